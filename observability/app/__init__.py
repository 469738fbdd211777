"""The Streamlit pages. Read main.py first (one refresh), then ui.py (cards and states) and queries.py (what panels read). kv.py and p99.py
read for these two pages, absence.py says why there is nothing to show.

charts.py draws, findings.py puts the P99 into words, outlook.py reads forecasts; page_*.py only say which card stands where.
"""
