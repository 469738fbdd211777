"""What vLLM can tell the plug-in, family by family: yes, partial or no, and why. Pure data.

Exported as kvscope_source_family_info, so that a panel can say "not exported by vLLM" where it would say "No data"; the capability matrix
(exporters/adapters/vllm_plugin.py) is worked out from it.
"""

from __future__ import annotations

from observability import catalog as c

Told = tuple[str, str]  # status, reason

_YES: Told = ("yes", "")
_ADDRESS: Told = ("no", "vLLM does not tell block addresses")
_CONTENT: Told = ("no", "vLLM does not tell how full its blocks are")
_BYTES: Told = ("no", "vLLM does not tell the bytes of a block")
_QUANT: Told = ("no", "vLLM does not measure the error of its KV quantization")
_OWN: Told = ("no", "a mechanism of kvscope's own engine")
_STEP: Told = ("partial", "only with --enable-logging-iteration-details")

FAMILIES: dict[str, Told] = {
    family.name: told
    for told, families in (
        (
            _YES,
            (
                c.REQUEST_DURATION, c.TIME_TO_FIRST_TOKEN, c.PROMPT_TOKENS, c.GENERATION_TOKENS, c.REQUESTS_RUNNING, c.REQUESTS_WAITING,
                c.PREEMPTIONS, c.PHASE_REQUESTS, c.PHASE_LENGTH_SECONDS, c.PHASE_LENGTH_REQUESTS, c.REQUESTS_RECEIVED, c.REQUESTS, c.KV_CAPACITY_BLOCKS, c.KV_BLOCK_SIZE, c.KV_RECOMPUTED_TOKENS,
                c.ENGINE, c.SOURCE_FAMILY, c.LAST_UPDATE, c.ANOMALIES_TOTAL, c.LABEL_FOLDS,
            ),
        ),
        (_STEP, (c.STEPS, c.STEP_DURATION, c.STEP_TOKENS)),
        (_ADDRESS, (c.KV_LARGEST_FREE_RUN, c.KV_FREE_RUNS, c.KV_REGION_BLOCKS, c.KV_REGION_FREE_RUN)),
        (_CONTENT, (c.KV_STORED_TOKENS,)),
        (_BYTES, (c.KV_BYTES, c.KV_FIXED_BYTES)),
        (_QUANT, tuple(f for f in c.FAMILIES if "quantization" in f.name)),
    )
    for family in families
}  # fmt: skip
#: Told by KV events; by a sample of evictions.
EVENTS = (
    c.KV_EVICTED_BLOCKS, c.KV_LIVE_AGES, c.KV_EXPOSED, c.KV_REGRET, c.KV_EVICTION_MEMORY, c.KV_EVENT_BATCHES, c.KV_EVENT_UNMATCHED,
)  # fmt: skip
SAMPLED = (c.KV_IDLE_BEFORE_EVICTION, c.KV_REUSE_GAP)
FAMILIES |= {
    c.INTER_TOKEN_LATENCY.name: ("partial", "one sample an engine output: several tokens with speculative decoding"),
    c.PHASE_SECONDS.name: ("partial", "states only: vLLM does not tell what its steps did"),
    c.KV_LOOKUPS.name: ("partial", "counted when a request ends"),
    c.KV_QUERIED_TOKENS.name: ("partial", "counted when a request ends"),
    c.KV_HITTABLE_TOKENS.name: ("partial", "counted when a request ends"),
    c.KV_HIT_TOKENS.name: ("partial", "counted when a request ends; tier unknown with a KV connector"),
    c.KV_BLOCKS.name: ("partial", "free and evictable together, as allocatable"),
    **dict.fromkeys((f.name for f in EVENTS), ("no", "needs KV events (--kv-events-config)")),
    **dict.fromkeys((f.name for f in SAMPLED), ("no", "needs --kv-cache-metrics")),
    c.KV_EVICTED_AGES.name: ("no", "needs KV events (--kv-events-config)"),
    **dict.fromkeys((f.name for f in c.HOST_FAMILIES), ("no", "`kvscope gpu` tells it beside any engine")),
    **dict.fromkeys(
        (f.name for f in c.FORECAST_FAMILIES), ("no", "`kvscope forecast --serve` tells it beside any engine")
    ),
    **dict.fromkeys((f.name for f in c.FAMILIES if "tenant" in f.labels), ("no", "vLLM does not know tenants")),
    c.KV_ALLOCATED_BLOCKS.name: ("no", "vLLM does not count allocations"),
    c.KV_HOST_BLOCKS.name: ("no", "vLLM's offloading connectors have families of their own"),
    c.KV_MOVED_BLOCKS.name: ("no", "vLLM's connectors have families of their own"),
    c.KV_MOVE_SECONDS.name: ("no", "vLLM's connectors have families of their own"),
    c.STEP_SECONDS.name: ("no", "vLLM does not tell what its steps did"),
    c.SCRAPE_SECONDS.name: ("no", "vLLM renders its own /metrics"),
    c.SCRAPE_SERIES.name: ("no", "vLLM renders its own /metrics"),
}
#: Without prefix caching nothing is looked up.
LOOKUPS = tuple(f.name for f in (c.KV_LOOKUPS, c.KV_QUERIED_TOKENS, c.KV_HITTABLE_TOKENS, c.KV_HIT_TOKENS))


def families(*, prefix_cache: bool, frontend: bool, events: bool = False, sampled: bool = False) -> dict[str, Told]:
    """Every family of the catalogue with what this vLLM can tell of it."""
    told = {family.name: FAMILIES.get(family.name, _OWN) for family in c.FAMILIES}
    if not prefix_cache:
        told |= dict.fromkeys(LOOKUPS, ("no", "prefix caching is switched off"))
    if sampled:
        told |= dict.fromkeys((f.name for f in SAMPLED), ("partial", "of a sample of blocks, once they are evicted"))
        told[c.KV_EVICTED_AGES.name] = ("partial", "of a sample of blocks; those that still live need KV events")
    if events:
        told |= dict.fromkeys((f.name for f in (*EVENTS, c.KV_EVICTED_AGES)), _YES)
    if not frontend:
        told[c.REQUESTS_RECEIVED.name] = ("no", "vLLM's front end was not found")
        told[c.REQUESTS.name] = ("partial", "no aborts: vLLM's front end was not found")
    return told
