"""The Streamlit pages. Read main.py first (one refresh), then ui.py (cards and states) and queries.py (what panels read).

charts.py draws, findings.py puts the P99 into words, outlook.py reads forecasts; page_*.py only say which card stands where.
"""
