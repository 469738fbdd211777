"""Rows about the KV cache: hits by prompt length, the block pool and its fragmentation, quantization error."""

from __future__ import annotations

from dashboards.panels import RED, Heatmap, Json, Line, Query, Section, color_overrides
from dashboards.shared import (
    BLOCK_COLORS,
    KV_EXHAUSTED,
    LENGTH_COLORS,
    NAMED_LEGEND,
    NO_QUANT,
    OF_INSTANCE,
    TTFT_BURN,
    about,
    buckets,
    known,
    limits,
    lines,
    query,
    signal,
    stack,
)
from observability import catalog as c
from observability import objectives as o


def hits() -> Section:
    """Hit rate against queried and against hittable tokens, and the traffic that it is measured on."""
    # sorting by name puts 2K-8K before 128K-512K: the legend compares numbers inside names by value
    legend: Json = {"legend": {**NAMED_LEGEND["legend"], "sortBy": "Name", "sortDesc": False}}
    colors = color_overrides(LENGTH_COLORS)

    def by_length(name: str) -> Query:
        return query(known(signal(f"model_length_bucket:{name}")), "{{length_bucket}}")

    queried = lines(
        TTFT_BURN,
        "How much of each prompt is served from cache?",
        "Hit tokens over queried tokens by prompt length, 5 minutes, one lookup a request. A length without traffic has no "
        "line. A fall at one length only: its prefixes were evicted or its prompts changed; compare with evictions in the "
        "row on load and pressure.",
        "percentunit",
        by_length("kvscope_kv_hit:ratio_rate5m"),
        max=1,
        overrides=colors,
        options=legend,
    )
    hittable = lines(
        TTFT_BURN,
        "How much of what could be cached is?",
        "Hit tokens over hittable tokens: whole blocks, leaving one token to compute, which is all that a perfect cache "
        "could serve. Low here means evicted or never seen prefixes; low only in the panel to the left means prompts "
        "shorter than a block or two.",
        "percentunit",
        by_length("kvscope_kv_hit_of_hittable:ratio_rate5m"),
        max=1,
        overrides=colors,
        options=legend,
    )
    traffic = stack(
        TTFT_BURN,
        "Which prompt lengths come in?",
        "Prompt tokens looked up per second by prompt length. A shift to long prompts raises prefill time and KV use with "
        "the same number of requests.",
        "si:tok/s",
        query(f"{signal('model_length_bucket:kvscope_kv_queried_tokens:rate5m')} > 0", "{{length_bucket}}"),
        overrides=colors,
        options=legend,
    )
    return Section(
        "$model: KV cache hits by prompt length", [Line(8, [queried, hittable, traffic])], repeat_for="model"
    )


def _regions(title: str, name: str, scheme: str, text: str) -> Heatmap:
    return Heatmap(
        **about(KV_EXHAUSTED, title, text),
        targets=[query(f"avg by (region) ({signal(name)})", "{{region}}")],
        unit="percentunit",
        options={
            "cellGap": 0,
            "cellValues": {"decimals": 0, "unit": "percentunit"},
            "color": {"exponent": 1, "max": 1, "min": 0, "scale": "linear", "scheme": scheme},
            "filterValues": {"le": -1},  # 0 is a finding, not a gap: hide nothing
            "yAxis": {"axisLabel": "address region"},
        },
    )


def pool() -> Section:
    """Blocks by state and layout, memory, fragmentation as numbers, as run lengths, and by address over time."""
    states = stack(
        KV_EXHAUSTED,
        "Who holds the KV blocks?",
        "Blocks by state: active (held by a request), evictable (cached, held by nobody), free. They add up to the pool. "
        "Active near the top: requests will wait or be preempted. No evictable left: the prefix cache no longer saves "
        "anything.",
        "short",
        query(signal("model_state:kvscope_kv_blocks:sum"), "{{state}}"),
        overrides=color_overrides(BLOCK_COLORS),
    )
    layouts = stack(
        KV_EXHAUSTED,
        "Which layouts do running requests use?",
        "Block table entries of running requests by layout; a block shared by several requests counts once for each. "
        "Contiguous blocks are read as one slice, paged ones are gathered. See layout fallbacks for requests that wanted "
        "adjacent blocks and found none.",
        "short",
        query(signal("model_layout:kvscope_kv_layout_blocks:sum"), "{{layout}}"),
    )
    memory = lines(
        KV_EXHAUSTED,
        "How much KV memory is held?",
        "Bytes reserved for the pool, resident (blocks with content) and active (held by requests), over the chosen "
        "instances. Reserved minus resident is memory that holds nothing now.",
        "bytes",
        query(f"sum by (kind) ({c.KV_BYTES.series}{{{OF_INSTANCE}}})", "{{kind}}"),
    )
    lost = lines(
        KV_EXHAUSTED,
        "How much of the pool is lost to fragmentation?",
        "Internal: 1 - tokens stored / slots of active blocks, the unused ends of last blocks. External: 1 - largest run of "
        "adjacent allocatable blocks / all allocatable blocks. High internal: many short sequences for this block size. "
        "High external: requests for a contiguous layout fall back to paged.",
        "percentunit",
        *(query(signal(f"model:kvscope_kv_{k}_fragmentation:ratio"), k) for k in ("internal", "external")),
        max=1,
    )
    runs = Heatmap(
        **about(
            KV_EXHAUSTED,
            "Do free blocks lie in long runs?",
            "Runs of adjacent allocatable blocks by length (at most so many blocks) over time. Many short runs and no long "
            "one: the pool is fragmented, and long prompts cannot be laid out contiguously.",
        ),
        targets=[
            Query(
                expr=f"sum by (le) ({signal('model_le:kvscope_kv_free_runs:sum')})",
                format="heatmap",
                legendFormat="{{le}}",
            )
        ],
        unit="short",
        options={"color": {"scheme": "Blues"}, "yAxis": {"axisLabel": "blocks in a run, at most"}},
    )
    held = _regions(
        "Where in the pool is KV held?",
        "model_region:kvscope_kv_region_usage:ratio",
        "Blues",
        f"Share of active blocks in each of {c.REGIONS} address regions, lowest address at the bottom, over time. Held "
        "regions that lie apart split the free space between them. With several instances, their mean.",
    )
    broken = _regions(
        "Where in the pool is free space broken up?",
        "model_region:kvscope_kv_region_fragmentation:ratio",
        "Oranges",
        f"1 - largest free run / allocatable blocks inside each of {c.REGIONS} address regions, lowest address at the "
        "bottom, over time. A region without allocatable blocks is blank. Rows that stay strong are kept apart by "
        "long-lived sequences.",
    )
    return Section(
        "$model: KV pool",
        [Line(8, [states, layouts, memory]), Line(8, [lost, runs]), Line(11, [held, broken])],
        repeat_for="model",
    )


def quantization() -> Section:
    """Error of stored KV, mean and single blocks."""
    rms = signal("model_tensor_layer_group_scheme:kvscope_kv_quantization_relative_rms:ratio_rate5m")
    mean = lines(
        TTFT_BURN,
        "How far is stored KV from exact?",
        "Relative RMS error, sqrt(sum of squared error / sum of squared signal), measured on sampled live blocks, by tensor "
        "and layer group. Above the red line greedy output may change: store KV unquantized, or find the layer group that "
        "drifts.",
        "percentunit",
        query(rms, "{{tensor}} {{layer_group}} {{scheme}}"),
        decimals=2,
        when_empty=NO_QUANT,
        **limits((o.QUANT_ERROR_WARNING, RED)),
    )
    blocks = Heatmap(
        **about(
            TTFT_BURN,
            "Are single blocks much worse than the mean?",
            "Measured blocks by bucket of their relative RMS error, over the chosen instances. A second band far above the "
            "first means outlier blocks that the mean hides.",
        ),
        targets=buckets(c.KV_QUANT_RELATIVE, OF_INSTANCE),
        unit="short",
        when_empty=NO_QUANT,
        options={"yAxis": {"unit": "percentunit"}},
    )
    return Section("$model: KV quantization error", [Line(8, [mean, blocks])], repeat_for="model")
