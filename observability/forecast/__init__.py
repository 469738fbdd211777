"""One-hour forecasts of load, KV use and P99. Read store/forecasts.py first (what a forecast is), then series.py.

series.py puts a signal on the 10-minute grid and says what is wrong with it; last_value.py and prophet_model.py forecast,
models.py makes their quantiles fit to show; backtest.py measures how far past forecasts were off; worker.py does all of
it on a schedule and stores every forecast.
"""
