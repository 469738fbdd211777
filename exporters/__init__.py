"""Ways out for what telemetry keeps. prometheus.py: the endpoint that Prometheus scrapes. otlp.py: spans and metrics pushed over OTLP.
adapters/: engines other than kvscope's."""
