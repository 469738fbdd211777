"""Why a panel is empty: virtual time, an engine that cannot feed it, a mechanism that is off, or nothing recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from exporters.adapters.capability import Capability
from exporters.adapters.engines import ADAPTERS, capability
from exporters.adapters.vllm_plugin import from_families
from observability import catalog
from observability.app.kv import HIT, HIT_OF_HITTABLE_BY_LENGTH, HIT_RATE_BY_LENGTH, HITTABLE, QUERIED
from observability.app.p99 import TAIL
from observability.app.queries import HIT_RATE, QUANT_ERROR, at_newest, over_time
from observability.app.view import View
from observability.signals import BY_NAME, SIGNALS
from observability.store.source import SeriesSource

TOLD = BY_NAME["_".join(catalog.SOURCE_FAMILY.labels) + ":kvscope_source_family:sum"]

#: Signals that only a run of the real model can feed, and why.
NOT_IN_VIRTUAL_TIME = {
    s.name: "Not measured in virtual time: the cost model stores no KV values, so there is no error to measure."
    for s in SIGNALS
    if "kvscope_kv_quantization" in s.name or "kvscope_request_quantization" in s.name
}
#: What makes a signal of a live engine absent though the engine works.
ABSENT_WHEN_LIVE = {
    **{
        s.name: "No GPU was read in this range: `kvscope gpu` reads those of a host."
        for s in SIGNALS
        if s.by[0] == "gpu"
    },
    **{
        s.name: "The load controller is off (`kvscope serve --engine controller=on` switches it on), or nothing was recorded in this range."
        for s in SIGNALS
        if "kvscope_limit_" in s.name or "kvscope_controller_" in s.name or "kvscope_requests_degraded" in s.name
    },
    **{
        s.name: "Prefetch is off (`kvscope serve --engine num_host_blocks=4096 --engine prefetch_lookahead=3` switches it on), or nothing was recorded in this range."
        for s in SIGNALS
        if "kvscope_kv_prefetch" in s.name
    },
    **{
        s.name: "Compaction, compression and the host tier are off, or nothing was recorded in this range."
        for s in SIGNALS
        if "kvscope_kv_moved_blocks" in s.name
    },
    **{
        s.name: "No batch with two or more prompts in this range, or the engine does not report their spread."
        for s in SIGNALS
        if "kvscope_prefill_batch_spread" in s.name
    },
    QUANT_ERROR.name: "No sample: the KV cache of this engine is not quantized, or the engine does not report the error.",
    **{
        s.name: "No request ended in this range, or the engine does not report where their time went."
        for s in TAIL.values()
    },
    **{
        s.name: "No prompt was looked up in this range, or the engine does not report the prefix cache."
        for s in (QUERIED, HITTABLE, HIT, HIT_RATE, HIT_RATE_BY_LENGTH, HIT_OF_HITTABLE_BY_LENGTH)
    },
    **{
        s.name: "No request was measured in this range."
        for s in SIGNALS
        if s.name.endswith(("p50_5m", "p90_5m", "p99_5m")) or ":error_ratio" in s.name
    },
}


def why_absent(signal_names: Sequence[str], simulated: bool, told: Mapping[str, Capability] | None = None) -> str:
    """The reason to show in place of a chart for which the source has no row. `simulated`: the view is virtual time; `told`: what the
    model's engine can feed."""
    for name in signal_names:
        if simulated and name in NOT_IN_VIRTUAL_TIME:
            return NOT_IN_VIRTUAL_TIME[name]
    for name in signal_names:
        if told and name in told and told[name].status == "no":
            return f"This engine cannot feed it: {told[name].reason}."
    for name in signal_names:
        if name in ABSENT_WHEN_LIVE:
            return ABSENT_WHEN_LIVE[name]
    return "The engine does not report it, or nothing was recorded in this range."


@dataclass(frozen=True, slots=True)
class Told:
    """How it is known what the engine behind a model can feed: by its adapter's table, or by what the vLLM plug-in says of each family
    (status and reason). Neither: it is kvscope's own."""

    adapter: str = ""
    families: Mapping[str, tuple[str, str]] = field(default_factory=dict)


def told(source: SeriesSource, view: View) -> Told:
    """What is known of the engine behind the view's model."""
    engines = [name for name in source.engines(view.model) if name in ADAPTERS]
    if engines:
        return Told(engines[0])
    rows = at_newest(over_time(source, view, TOLD)).to_dict("records")
    return Told(families={row["family"]: (row["status"], row["reason"]) for row in rows})


def capabilities(known: Told, signal_names: Sequence[str]) -> dict[str, Capability]:
    """What the engine can feed of the signals; those that are fed in full are left out."""
    if known.adapter:
        found = {name: capability(known.adapter, name) for name in signal_names}
    else:
        families = known.families
        found = {name: from_families(BY_NAME[name], families) for name in signal_names} if families else {}
    return {name: each for name, each in found.items() if each.status != "yes"}
