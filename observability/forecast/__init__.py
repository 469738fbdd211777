"""One-hour forecasts of load, KV use and P99. Read store/forecasts.py first (what a forecast is), then series.py.

series.py puts a signal on the 10-minute grid and says what is wrong with it. Each model turns a window into a Draft (draft.py):
stack.py is the default, on members.py; last_value.py and prophet_model.py stand beside it, and pooled.py learns from all
series. models.py runs them by name,
calibrates what they say (calibration.py, from stored forecasts) and gives the chance of passing each limit (limits.py).
backtest.py measures how far past forecasts were off; worker.py does all of it on a schedule and stores every forecast.
"""
