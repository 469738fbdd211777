"""The adapters, by engine, and what each of them, the bundled engine and the vLLM plug-in can feed."""

from __future__ import annotations

import re
from collections.abc import Mapping

from exporters.adapters import dynamo, llamacpp, ray, sglang, tgi, triton, trtllm, vllm
from exporters.adapters.capability import YES, Capability, no, partial
from exporters.adapters.promql import objective_of
from exporters.adapters.table import Adapter
from exporters.adapters.vllm_plugin import CAPABILITIES as VLLM_PLUGIN
from observability.objectives import DEFAULT_THRESHOLDS
from observability.signals import BY_NAME, of_every_class, threshold_of

ADAPTERS: Mapping[str, Adapter] = {
    module.ADAPTER.engine: module.ADAPTER for module in (vllm, sglang, llamacpp, trtllm, triton, tgi, dynamo, ray)
}
BUNDLED = "kvscope"
PLUGIN = "vllm-plugin"
#: Column headings of the matrix, in order.
TITLES: Mapping[str, str] = {
    BUNDLED: "kvscope's engine",
    PLUGIN: "vLLM with plug-in",
    **{engine: adapter.title for engine, adapter in ADAPTERS.items()},
}

_OWN = "a mechanism of kvscope's own engine"
_RESIDENCY = "how long blocks live is not exported"
#: Reasons that hold for every engine without kvscope's telemetry, by a part of the signal's name.
_NOWHERE = (
    ("kvscope_tenant_", "tenants are a matter of kvscope's server"),
    ("kvscope_kv_bytes", "bytes of the KV pool are not exported by what they are used for"),
    ("kvscope_request_quantization", "no error of stored KV is measured"),
    ("kvscope_kv_block_survival", _RESIDENCY),
    ("kvscope_kv_block_lifetime", _RESIDENCY),
    ("kvscope_kv_idle_before_eviction", _RESIDENCY),
    ("kvscope_kv_reuse_gap", _RESIDENCY),
    ("kvscope_kv_live_block_age", _RESIDENCY),
    ("kvscope_kv_regret", "what was evicted and asked for again is not counted"),
    ("kvscope_gpu_", "`kvscope gpu` gives it for the host of any engine"),
    ("kvscope_hardware_target", "`kvscope gpu` gives it for the host of any engine"),
    ("kvscope_kv_copy_overlap", "copies beside steps are measured by kvscope's engine alone"),
    (":kvscope_request_phase_seconds:", "no split of a request's time is exported"),
    (":kvscope_request_length_phase_", "no split of a request's time is exported"),
    ("kvscope_kv_prefetch", _OWN),
    ("kvscope_kv_moved", _OWN),
    ("kvscope_kv_layout", _OWN),
    ("kvscope_prefill_batch_", _OWN),
    ("kvscope_queue_promotions", _OWN),
    ("kvscope_limit_", _OWN),
    ("kvscope_controller_", _OWN),
    ("kvscope_requests_degraded", _OWN),
    ("model_class:", "classes of requests are a matter of kvscope's engine and of the plug-in for vLLM"),
    ("model_reason:kvscope_preemptions", "preemptions are not told apart by reason"),
    ("kvscope_kv_recomputed", "tokens computed again after a preemption are not counted"),
    ("kvscope_step_seconds", "the engine's time by step component is not exported"),
    ("kvscope_step", "steps of the engine are not measured"),
    (":kvscope_engine:", "what kvscope's exporters tell about themselves"),
    (":kvscope_source_family:", "what kvscope's exporters tell about themselves"),
    ("kvscope_kv_hit", "no counters of hits and lookups are exported"),
    ("kvscope_kv_region", "where blocks lie in memory is not exported"),
    ("kvscope_kv_free_runs", "where blocks lie in memory is not exported"),
    ("kvscope_kv_external_fragmentation", "where blocks lie in memory is not exported"),
    ("kvscope_kv_internal_fragmentation", "no count of the tokens in blocks in use is exported"),
    ("kvscope_kv_quantization", "no error of stored KV is measured"),
    ("kvscope_telemetry_anomalies", "refused measurements are counted by kvscope's telemetry alone"),
    ("kvscope_last_update_age", "no time of the last update is exported: a frozen gauge looks like a steady one"),
)


def capability(engine: str, signal: str) -> Capability:
    """Whether `engine` (a key of TITLES) can feed the signal of that name. Raises KeyError for names that there are not."""
    known = BY_NAME[signal]
    if engine == BUNDLED:
        return YES
    if engine == PLUGIN:
        return VLLM_PLUGIN[signal]
    adapter = ADAPTERS[engine]
    objective = objective_of(known)
    if objective is not None and objective.name in adapter.latencies:
        latency = adapter.latencies[objective.name]
        told = [latency.limits]
        if re.search(r":p\d", signal):
            told.append(latency.resolution)
        elif (threshold := threshold_of(signal)) == DEFAULT_THRESHOLDS[objective.name]:
            told.append(latency.share)
        elif threshold is not None:
            told.append(f"only where {threshold:g} s is a bucket bound of the engine")
        reason = "; ".join(text for text in told if text)
        return partial(reason) if reason else YES
    if (feed := adapter.feeds.get(of_every_class(signal))) is not None:
        return feed.capability
    for part, reason in (*adapter.lacks, *_NOWHERE):
        if part in signal:
            return no(reason)
    return no(f"{adapter.title} exports nothing it could be worked out from")
