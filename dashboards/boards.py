"""All boards by name."""

from __future__ import annotations

from collections.abc import Callable

from dashboards import batching, engines, exporter, forecast, hardware, kv_cache, overview, p99, quantization, trends
from dashboards.panels import Board

BOARDS: dict[str, Callable[[], Board]] = {
    "overview": overview.board,
    "p99": p99.board,
    "kv-cache": kv_cache.board,
    "quantization": quantization.board,
    "batching": batching.board,
    "forecast": forecast.board,
    "trends": trends.board,
    "hardware": hardware.board,
    "engines": engines.board,
    "exporter": exporter.board,
}
