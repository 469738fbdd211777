"""Ways out for what telemetry keeps. prometheus.py: the endpoint that Prometheus scrapes. adapters/: engines other than kvscope's."""
