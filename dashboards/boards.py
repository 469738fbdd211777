"""All boards by name."""

from __future__ import annotations

from collections.abc import Callable

from dashboards import batching, exporter, kv_cache, overview, p99, quantization
from dashboards.panels import Board

BOARDS: dict[str, Callable[[], Board]] = {
    "overview": overview.board,
    "p99": p99.board,
    "kv-cache": kv_cache.board,
    "quantization": quantization.board,
    "batching": batching.board,
    "exporter": exporter.board,
}
