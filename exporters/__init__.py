"""Ways out for what telemetry keeps. prometheus.py: the endpoint that Prometheus scrapes. process.py: the same in a process of its own. otlp.py: spans and metrics pushed over OTLP.
adapters/: engines other than kvscope's."""
