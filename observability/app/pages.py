"""The pages of the app, in the order of the header."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from observability.app import (
    page_batching,
    page_engines,
    page_forecast,
    page_hardware,
    page_kv,
    page_now,
    page_p99,
    page_quantization,
    page_trends,
    page_whatif,
)
from observability.app.ui import Context


@dataclass(frozen=True, slots=True)
class AppPage:
    """`path` is its place in the URL; the first page has none. `without_data`: it is drawn even where the source has nothing, or is away."""

    title: str
    path: str
    icon: str
    draw: Callable[[Context], None]
    without_data: bool = False


PAGES = (
    AppPage("Now", "", ":material/speed:", page_now.draw),
    AppPage("P99", "p99", ":material/timeline:", page_p99.draw),
    AppPage("KV cache", "kv-cache", ":material/grid_view:", page_kv.draw),
    AppPage("Quantization", "quantization", ":material/compress:", page_quantization.draw),
    AppPage("Batching", "batching", ":material/stacks:", page_batching.draw),
    AppPage("Hardware", "hardware", ":material/memory:", page_hardware.draw),
    AppPage("Trends", "trends", ":material/show_chart:", page_trends.draw),
    AppPage("Forecast", "forecast", ":material/trending_up:", page_forecast.draw),
    AppPage("What if", "what-if", ":material/compare_arrows:", page_whatif.draw, without_data=True),
    AppPage("Engines", "engines", ":material/dns:", page_engines.draw, without_data=True),
)
