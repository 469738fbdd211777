"""Picks a series source by its name on the command line."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urldefrag

from observability.store.embedded import EmbeddedStore
from observability.store.source import SeriesSource

PROMETHEUS = "prometheus:"


def open_source(name: str | Path) -> SeriesSource:
    """The source of `name`: `prometheus:http://host:9090`, or the path of an embedded store.

    A store file after `#` holds the forecasts that go with a Prometheus: `prometheus:http://host:9090#/data/forecasts.db`.
    Raises StoreError.
    """
    text = str(name)
    if not text.startswith(PROMETHEUS):
        return EmbeddedStore(text)
    from observability.store.prometheus import PrometheusSource

    url, forecasts = urldefrag(text.removeprefix(PROMETHEUS))
    return PrometheusSource(url, forecasts=Path(forecasts) if forecasts else None)
