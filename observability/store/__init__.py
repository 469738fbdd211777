"""Where series are read from and written to. Read source.py first: the interface that the app and the forecasts use.

evaluate.py turns scrapes into signals as Prometheus would; recorder.py does so on a schedule and writes embedded.py, one
SQLite file; prometheus.py reads the same signals from a Prometheus server; open.py picks a source by its name;
forecasts.py says what a stored forecast is, forecast_rows.py how it is stored.
"""
