"""KV cache: what is reused, how long it lives, what fills the pool, and how broken up the free space is."""

from __future__ import annotations

import streamlit as st

from observability import catalog
from observability.app import charts, kv, queries, ui
from observability.app.ui import Context, Panel

HITS = Panel(
    "hits", "How much of a prompt is reused?", "% of tokens",
    (kv.HIT, kv.QUERIED, kv.HITTABLE),
    kv.hits_by_length,
    lambda data, frame: charts.hit_bars(data, frame.height),
    note="By prompt length. Hits as a share of the prompt tokens looked up, and of those that a perfect cache could have served (whole "
    "blocks, one token left to compute). Under each length: the tokens looked up in the range. Each request counts once.",
)  # fmt: skip
HITS_OVER_TIME = Panel(
    "hits-over-time", "When did the hit rate change?", "% of queried tokens", (kv.HIT_RATE_BY_LENGTH,),
    lambda source, view: queries.over_time(source, view, kv.HIT_RATE_BY_LENGTH).rename(columns={"length_bucket": "series"}),
    lambda data, frame: charts.lines(data, "ratio", frame, bounded=True, order=catalog.LENGTH_BUCKETS),
    note="By prompt length in tokens.", compared=True,
)  # fmt: skip
OCCUPANCY_ORDER = ("active", "evictable", "free", catalog.ALLOCATABLE)
OCCUPANCY = Panel(
    "occupancy", "What fills the pool?", "blocks", (kv.BLOCKS,),
    lambda source, view: queries.over_time(source, view, kv.BLOCKS).rename(columns={"state": "series"}),
    lambda data, frame: charts.stacked(data, "blocks", frame, order=OCCUPANCY_ORDER),
    note="active: held by a request. evictable: cached, in use by nobody, given up when space is needed. free: empty. allocatable: one of both, of "
    "an engine that does not tell them apart. Together they are the capacity.",
)  # fmt: skip
LAYOUTS = Panel(
    "layouts", "Which layouts do running requests use?", "blocks", (kv.LAYOUTS,),
    lambda source, view: queries.over_time(source, view, kv.LAYOUTS).rename(columns={"layout": "series"}),
    lambda data, frame: charts.stacked(data, "blocks", frame, order=catalog.LAYOUTS),
    compared=True, note="Block table entries; a block that requests share counts once a request.",
)  # fmt: skip
FRAGMENTATION = Panel(
    "fragmentation", "How much space is lost to fragmentation?", "%", (queries.INTERNAL, queries.EXTERNAL),
    lambda source, view: queries.several_over_time(source, view, {"internal": queries.INTERNAL, "external": queries.EXTERNAL}),
    lambda data, frame: charts.lines(data, "ratio", frame, bounded=True),
    compared=True, note="internal: unused slots in active blocks, 1 - tokens / (blocks x block size). external: 1 - largest run of "
    "adjacent allocatable blocks / allocatable blocks.",
)  # fmt: skip
EVICTIONS = Panel(
    "evictions", "How fast is cached content given up?", "blocks/s", (queries.EVICTED,),
    lambda source, view: queries.over_time(source, view, queries.EVICTED),
    lambda data, frame: charts.lines(data, "blocks/s", frame),
    compared=True, note="Cached blocks whose content was given up for another use.",
)  # fmt: skip
FREE_RUNS = Panel(
    "free-runs", "How long are the free runs now?", "runs", (kv.FREE_RUNS,),
    kv.free_run_lengths,
    lambda data, frame: charts.run_bars(data, frame.height),
    note="A contiguous layout needs a run of adjacent blocks that are free or evictable.",
)  # fmt: skip
SURVIVAL = Panel(
    "survival", "How long does cached content live?", "% alive after …", (kv.SURVIVAL,),
    kv.survival_now,
    lambda data, frame: charts.survival(data, frame.height),
    note="Share of cached blocks that live longer than an age, by pool, over the last 5 minutes of the range. Blocks that still live count as "
    "exposed, so there is no bias towards short lives.",
)  # fmt: skip
REUSE = Panel(
    "reuse", "Is content kept until it is used again?", "median", tuple(kv.IDLE_TIMES.values()),
    kv.idle_times,
    lambda data, frame: charts.lines(data, "seconds", frame), compared=True,
    note="Of the device's exact pool: idle time before a reuse against idle time before an eviction. Evicted sooner than reused: the cache is too small for its prefixes.",
)  # fmt: skip
REGRET = Panel(
    "regret", "What was evicted and then asked for?", "% of tokens", (kv.REGRET,),
    lambda source, view: queries.named_by(source, view, kv.REGRET, "window"),
    lambda data, frame: charts.lines(data, "ratio", frame, order=tuple(catalog.REGRET_WINDOWS)), compared=True,
    note="Prompt tokens that were not hit because their block was evicted within the window before; what a larger cache could have served.",
)  # fmt: skip
PREFETCH = Panel(
    "prefetch", "Does prefetch bring back what is used?", "blocks/s", (kv.PREFETCHED,),
    lambda source, view: queries.named_by(source, view, kv.PREFETCHED, "outcome"),
    lambda data, frame: charts.lines(data, "blocks/s", frame, order=("issued", "useful", "late", "wasted")), compared=True,
    note="Blocks brought back from the host ahead of their use: issued, and of these useful (hit once there), late (hit on their way) and wasted "
    "(evicted unused).",
)  # fmt: skip
MOVES = Panel(
    "moves", "Why are blocks moved?", "blocks/s", (kv.MOVED,),
    lambda source, view: queries.named_by(source, view, kv.MOVED, "reason"),
    lambda data, frame: charts.lines(data, "blocks/s", frame), compared=True,
    note="Blocks moved or rewritten: compaction, compress (quantized), offload and load (host tier), swap out and in.",
)  # fmt: skip
REGIONS = {
    "occupancy": Panel(
        "regions", "Where in the pool are the active blocks?", "% of a region", (kv.REGION_USAGE,),
        lambda source, view: queries.over_time(source, view, kv.REGION_USAGE),
        lambda data, frame: charts.heatmap(data, frame, title="active"),
        note="32 equal address regions over time.",
    ),
    "fragmentation": Panel(
        "regions", "Where in the pool is free space broken up?", "external fragmentation, %", (kv.REGION_FRAGMENTATION,),
        lambda source, view: queries.over_time(source, view, kv.REGION_FRAGMENTATION),
        lambda data, frame: charts.heatmap(data, frame, title="external fragmentation"),
        note="32 equal address regions over time. 0 %: all allocatable blocks of a region are adjacent. An empty cell: the region "
        "has no allocatable block, or nothing was recorded.",
    ),
}  # fmt: skip


def draw(context: Context) -> None:
    """Reuse, occupancy, residency, fragmentation, movement."""
    for row in ((HITS, HITS_OVER_TIME, REGRET), (OCCUPANCY, LAYOUTS, EVICTIONS), (SURVIVAL, REUSE, PREFETCH)):
        for column, panel in zip(st.columns(3), row, strict=True):
            with column:
                ui.card(context, panel, 200)
    for column, panel in zip(st.columns(3), (FRAGMENTATION, FREE_RUNS, MOVES), strict=True):
        with column:
            ui.card(context, panel, 190)
    shown = st.segmented_control(
        "Heatmap", list(REGIONS), default="fragmentation", key="regions", bind="query-params", required=True,
        label_visibility="collapsed", format_func=lambda name: f"{name} by region",
    )  # fmt: skip
    ui.card(context, REGIONS[shown or "fragmentation"], 260)
