"""What the engine tells about itself, kept in plain arrays until someone asks: read phases.py, then recorder.py.

phases.py: the running vector of seconds by step component. recorder.py: Telemetry, the object the engine is given.
exponential.py: buckets for OTLP. tracing.py: spans of requests and gen_ai.server.* metrics, over OpenTelemetry's API.
tenants.py: the few series that each of a bounded number of tenants has. residency.py: ages and life table of cached KV.
snapshot.py: the stable list of series and the values read from it. reference.py: the catalogue as a page of docs.
"""
