"""One-hour forecasts of load, KV use and P99. Read store/forecasts.py first (what a forecast is), then series.py.

series.py puts a signal on the 10-minute grid and says what is wrong with it. Each model turns a window into a Draft (draft.py):
last_value.py, prophet_model.py. models.py runs them by name, calibrates what they say (calibration.py, from stored forecasts)
and gives the chance of crossing each limit (limits.py); backtest.py measures how far past forecasts were off; worker.py does
all of it on a schedule and stores every forecast.
"""
