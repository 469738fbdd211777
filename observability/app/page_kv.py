"""KV cache: what is reused, what fills the pool, how broken up the free space is, and what quantization costs."""

from __future__ import annotations

import streamlit as st

from observability import catalog
from observability.app import charts, queries, ui
from observability.app.ui import Context, Panel
from observability.app.units import setting
from observability.objectives import QUANT_ERROR_WARNING

HITS = Panel(
    "hits", "How much of a prompt is reused?", "% of tokens",
    (queries.HIT, queries.QUERIED, queries.HITTABLE),
    queries.hits_by_length,
    lambda data, frame: charts.hit_bars(data, frame.height),
    note="By prompt length. Hits as a share of the prompt tokens looked up, and of those that a perfect cache could have served (whole "
    "blocks, one token left to compute). Under each length: the tokens looked up in the range. Each request counts once.",
)  # fmt: skip
HITS_OVER_TIME = Panel(
    "hits-over-time", "When did the hit rate change?", "% of queried tokens", (queries.HIT_RATE_BY_LENGTH,),
    lambda source, view: queries.over_time(source, view, queries.HIT_RATE_BY_LENGTH).rename(columns={"length_bucket": "series"}),
    lambda data, frame: charts.lines(data, "ratio", frame, bounded=True, order=catalog.LENGTH_BUCKETS),
    note="By prompt length in tokens.",
)  # fmt: skip
OCCUPANCY = Panel(
    "occupancy", "What fills the pool?", "blocks", (queries.BLOCKS,),
    lambda source, view: queries.over_time(source, view, queries.BLOCKS).rename(columns={"state": "series"}),
    lambda data, frame: charts.stacked(data, "blocks", frame, order=("active", "evictable", "free")),
    note="active: held by a request. evictable: cached, in use by nobody, given up when space is needed. free: empty. "
    "Together they are the capacity.",
)  # fmt: skip
LAYOUTS = Panel(
    "layouts", "Which layouts do running requests use?", "blocks", (queries.LAYOUTS,),
    lambda source, view: queries.over_time(source, view, queries.LAYOUTS).rename(columns={"layout": "series"}),
    lambda data, frame: charts.stacked(data, "blocks", frame, order=catalog.LAYOUTS),
    note="Block table entries; a block that requests share counts once a request.",
)  # fmt: skip
FRAGMENTATION = Panel(
    "fragmentation", "How much space is lost to fragmentation?", "%", (queries.INTERNAL, queries.EXTERNAL),
    lambda source, view: queries.several_over_time(source, view, {"internal": queries.INTERNAL, "external": queries.EXTERNAL}),
    lambda data, frame: charts.lines(data, "ratio", frame, bounded=True),
    note="internal: unused slots in active blocks, 1 - tokens / (blocks x block size). external: 1 - largest run of "
    "adjacent allocatable blocks / allocatable blocks.",
)  # fmt: skip
EVICTIONS = Panel(
    "evictions", "How fast is cached content given up?", "blocks/s", (queries.EVICTED,),
    lambda source, view: queries.over_time(source, view, queries.EVICTED),
    lambda data, frame: charts.lines(data, "blocks/s", frame),
    note="Cached blocks whose content was given up for another use.",
)  # fmt: skip
FREE_RUNS = Panel(
    "free-runs", "How long are the free runs now?", "runs", (queries.FREE_RUNS,),
    queries.free_run_lengths,
    lambda data, frame: charts.run_bars(data, frame.height),
    note="A contiguous layout needs a run of adjacent blocks that are free or evictable.",
)  # fmt: skip
QUANTIZATION = Panel(
    "quantization", "What does quantization cost?", "relative RMS error", (queries.QUANT_ERROR,),
    queries.quantization_error,
    lambda data, frame: charts.lines(data, "ratio", frame),
    lines=(charts.Line(QUANT_ERROR_WARNING, setting(QUANT_ERROR_WARNING, "ratio")),),
    note="Dashed: the budget. Root of summed squared error over summed squared signal, on sampled live blocks, by tensor and layer group.",
)  # fmt: skip
REGIONS = {
    "occupancy": Panel(
        "regions", "Where in the pool are the active blocks?", "% of a region", (queries.REGION_USAGE,),
        lambda source, view: queries.over_time(source, view, queries.REGION_USAGE),
        lambda data, frame: charts.heatmap(data, frame, title="active"),
        note="32 equal address regions over time.",
    ),
    "fragmentation": Panel(
        "regions", "Where in the pool is free space broken up?", "external fragmentation, %", (queries.REGION_FRAGMENTATION,),
        lambda source, view: queries.over_time(source, view, queries.REGION_FRAGMENTATION),
        lambda data, frame: charts.heatmap(data, frame, title="external fragmentation"),
        note="32 equal address regions over time. 0 %: all allocatable blocks of a region are adjacent. An empty cell: the region "
        "has no allocatable block, or nothing was recorded.",
    ),
}  # fmt: skip


def draw(context: Context) -> None:
    """Reuse, occupancy, fragmentation, quantization."""
    for row in ((HITS, HITS_OVER_TIME, QUANTIZATION), (OCCUPANCY, LAYOUTS, EVICTIONS)):
        for column, panel in zip(st.columns(3), row, strict=True):
            with column:
                ui.card(context, panel, 210)
    fragmentation, runs = st.columns([1, 1])
    with fragmentation:
        ui.card(context, FRAGMENTATION, 200)
    with runs:
        ui.card(context, FREE_RUNS, 200)
    shown = st.segmented_control(
        "Heatmap", list(REGIONS), default="fragmentation", key="regions", bind="query-params", required=True,
        label_visibility="collapsed", format_func=lambda name: f"{name} by region",
    )  # fmt: skip
    ui.card(context, REGIONS[shown or "fragmentation"], 260)
