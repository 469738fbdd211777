"""Grafana boards as code: panels.py (Grafana's shapes), shared.py (recurring panels), frame.py (what all boards have), then one
file a board; runbooks.py makes a page of each runbook. `kvscope generate` writes them to generated/.
"""
