"""The board "KV cache": hits by prompt length, who holds the blocks, fragmentation, residency, what is given up."""

from __future__ import annotations

from alerts import rules, symptoms
from dashboards.frame import frame
from dashboards.panels import RED, YELLOW, Board, Heatmap, Json, Line, Query, Section, color_overrides
from dashboards.shared import (
    BLOCK_COLORS,
    KV_EXHAUSTED,
    LENGTH_COLORS,
    MODEL,
    NAMED_LEGEND,
    NO_BOUND,
    NO_TRAFFIC,
    OF_INSTANCE,
    TTFT_BURN,
    about,
    known,
    limits,
    lines,
    query,
    signal,
    stack,
)
from observability import catalog as c

HIT_RATE_DROP = "KvscopeHitRateDrop"
NO_EVICTION = "No eviction in the last 5 minutes"
#: Of the bounds of kvscope_kv_block_* the ones that people ask about.
_SURVIVAL_AGES = "1.0|10.0|60.0|600.0|3600.0"
_QUANTILES = ("p50", "p90", "p99")


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
    hit_rate = "model_length_bucket:kvscope_kv_hit:ratio_rate30m"
    yesterday = lines(
        HIT_RATE_DROP,
        "Does the cache do what it did yesterday?",
        "Hit rate over 30 minutes by prompt length, less the hit rate at the same time yesterday. Below 0 the cache serves less "
        f"than it did; {HIT_RATE_DROP} fires at less than {symptoms.HIT_RATE_DROP * 100:g} % of yesterday's. Nothing is drawn "
        "until there is a yesterday.",
        "percentunit",
        query(f"{signal(hit_rate)} - {signal(hit_rate)} offset 1d", "{{length_bucket}}"),
        overrides=colors,
        options=legend,
        min=None,
        when_empty="No values from this time yesterday",
    )
    return Section(
        "$model: KV cache hits by prompt length",
        [Line(8, [queried, hittable, traffic, yesterday])],
        repeat_for="model",
    )


def _regions(title: str, name: str, scheme: str, text: str) -> Heatmap:
    return Heatmap(
        **about(KV_EXHAUSTED, title, text),
        targets=[query(signal(name), "{{region}}")],
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
        "Bytes reserved for the pool, resident (blocks with content) and active (held by requests), over all instances. Reserved "
        "minus resident is memory that holds nothing now.",
        "bytes",
        query(signal("model_kind:kvscope_kv_bytes:sum"), "{{kind}}"),
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
    scattered = lines(
        "KvscopeKVFragmented",
        "Which instance finds no adjacent blocks?",
        "By instance: external fragmentation, and the share of lookups whose request wanted adjacent blocks and went paged. Both "
        f"above their limits ({symptoms.FRAGMENTED * 100:g} % and {symptoms.FALLBACKS_MATTER * 100:g} %): compaction would help.",
        "percentunit",
        query(f"{symptoms.FRAGMENTATION}{{{OF_INSTANCE}}}", "{{instance}} scattered"),
        query(known(f"{symptoms.FALLBACKS}{{{OF_INSTANCE}}}"), "{{instance}} fallbacks"),
        max=1,
        when_empty=NO_BOUND,
        **limits((symptoms.FALLBACKS_MATTER, YELLOW), (symptoms.FRAGMENTED, RED)),
    )
    return Section(
        "$model: KV pool",
        [Line(8, [states, layouts, memory]), Line(8, [lost, scattered, runs]), Line(11, [held, broken])],
        repeat_for="model",
    )


def residency() -> Section:
    """How long cached KV lives, and what its eviction cost: is the cache large enough?"""
    pools = "Pools: device blocks, compressed ones, host blocks."
    survival = lines(
        HIT_RATE_DROP,
        "How long does cached KV survive?",
        "Share of cached blocks that live longer than so many seconds, one line an age: a life-table (actuarial) estimate, which counts "
        f"blocks that still live as well, so that an idle cache does not look short-lived. {pools} Lines that fall together: a burst "
        "of evictions.",
        "percentunit",
        query(f'{rules.SURVIVAL}{{{MODEL},le=~"{_SURVIVAL_AGES}"}}', "{{pool}} {{le}} s"),
        max=1,
        when_empty=NO_EVICTION,
    )
    lifetime = lines(
        HIT_RATE_DROP,
        "At what age are blocks evicted?",
        f"Lifetime of cached blocks by quantile, those still alive included. {pools} Below the time after which your users come back, "
        "the cache is too small for their conversations.",
        "s",
        *(
            query(signal(f"model_pool:kvscope_kv_block_lifetime_seconds:{p}_5m"), f"{{{{pool}}}} {p}")
            for p in _QUANTILES
        ),
        when_empty=NO_EVICTION,
    )
    idle = lines(
        HIT_RATE_DROP,
        "Do blocks wait to be evicted or to be reused?",
        f"Median time that a block was idle before it was evicted, before it was hit again, and the median age of blocks now. {pools} "
        "Reuse gaps near the idle time before eviction: a little more cache would be hit much more.",
        "s",
        query(
            known(signal("model_pool:kvscope_kv_idle_before_eviction_seconds:p50_5m")), "{{pool}} idle before eviction"
        ),
        query(known(signal("model_pool:kvscope_kv_reuse_gap_seconds:p50_5m")), "{{pool}} idle before reuse"),
        query(known(signal("model_pool:kvscope_kv_live_block_age_seconds:p50")), "{{pool}} age now"),
        when_empty="No cached blocks yet",
    )
    regret = lines(
        HIT_RATE_DROP,
        "What did evictions cost?",
        "Share of looked-up prompt tokens that missed although they had been cached and were evicted within the window. This is what a "
        "larger cache (or the host tier) would have served; a low line with a low hit rate means prompts that never repeat.",
        "percentunit",
        query(known(signal("model_window:kvscope_kv_regret:ratio_rate5m")), "evicted within {{window}}"),
        when_empty=NO_TRAFFIC,
    )
    return Section("$model: residency and regret", [Line(8, [survival, lifetime, idle, regret])], repeat_for="model")


def board() -> Board:
    return frame("kv-cache", "What does the KV cache do?", [hits(), pool(), residency()])
