"""Other engines' metrics as kvscope's signals. Read table.py first (what an adapter is made of), then one engine's table, such as vllm.py.

engines.py lists the adapters, capability.py answers which engine can feed which signal, promql.py turns a table into the
expressions of its recording rules (alerts/adapters.py writes the files). endpoint.py, page.py and doctor.py look at a live endpoint.
"""
