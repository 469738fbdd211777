"""Every derived series (rates, ratios, quantiles), each defined once, as a small expression tree.

A tree renders to PromQL (recording rules, boards, "show the query") and is evaluated on scrapes by the embedded store's
recorder (store/evaluate.py) with the same meaning; a test holds both to the same numbers. Imports only the catalogue
and the objectives.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from observability import catalog as c
from observability.catalog import Family
from observability.objectives import (
    DEFAULT_THRESHOLDS,
    LATENCY_OBJECTIVES,
    OBJECTIVES,
    QUANTIZATION_BUDGET,
    TTFT,
    LatencyObjective,
    left_out,
)

WINDOW_SECONDS = 300
WINDOW = "5m"


# -- expression nodes -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Not:
    """In a selector: any value of a label but these."""

    values: tuple[str, ...]


Where = Mapping[str, str | tuple[str, ...] | Not]


def _selector(family: Family, where: Where) -> str:
    match = ",".join(_matcher(label, wanted) for label, wanted in where.items())
    return family.series + (f"{{{match}}}" if match else "")


def _matcher(label: str, wanted: str | tuple[str, ...] | Not) -> str:
    if isinstance(wanted, Not):
        [one, *more] = wanted.values
        return f'{label}!~"{"|".join(wanted.values)}"' if more else f'{label}!="{one}"'
    return f'{label}="{wanted}"' if isinstance(wanted, str) else f'{label}=~"{"|".join(wanted)}"'


def _operand(node: Node) -> str:
    """PromQL of `node`, in parentheses unless it binds tightest by itself."""
    text = node.promql()
    return text if isinstance(node, Gauge | Rate | Aggregate | Quantile | Sqrt) else f"({text})"


@dataclass(frozen=True)
class Gauge:
    """The newest value of each series of a gauge family."""

    family: Family
    where: Where = field(default_factory=dict)

    def promql(self) -> str:
        return _selector(self.family, self.where)


@dataclass(frozen=True)
class Rate:
    """Per-second increase over WINDOW of each series of a counter, or of each bucket of a histogram."""

    family: Family
    where: Where = field(default_factory=dict)

    def promql(self) -> str:
        return f"rate({_selector(self.family, self.where)}[{WINDOW}])"


@dataclass(frozen=True)
class Aggregate:
    """`sum`, `avg`, `max` or `min` over series, keeping the labels `by`."""

    op: Literal["sum", "avg", "max", "min"]
    of: Node
    by: tuple[str, ...]

    def promql(self) -> str:
        return f"{self.op} by ({', '.join(self.by)}) ({self.of.promql()})"


@dataclass(frozen=True)
class Quantile:
    """histogram_quantile: linear inside a bucket, the highest finite bound when the quantile falls in +Inf."""

    q: float
    of: Node  # rates of buckets, `le` kept

    def promql(self) -> str:
        return f"histogram_quantile({self.q:g}, {self.of.promql()})"


@dataclass(frozen=True)
class Ratio:
    """`top` / `bottom`, matched on the labels of `bottom`, which must be a subset of those of `top`. 0 / 0 is absent."""

    top: Node
    bottom: Node
    on: tuple[str, ...]

    def promql(self) -> str:
        return f"{_operand(self.top)} / on ({', '.join(self.on)}) group_left () {_operand(self.bottom)}"


@dataclass(frozen=True)
class OneMinus:
    of: Node

    def promql(self) -> str:
        return f"1 - {_operand(self.of)}"


@dataclass(frozen=True)
class Sqrt:
    of: Node

    def promql(self) -> str:
        return f"sqrt({self.of.promql()})"


@dataclass(frozen=True)
class Decibel:
    """10 log10 of a ratio of powers; infinite (no value in a store) where the ratio is."""

    of: Node

    def promql(self) -> str:
        return f"10 * log10({self.of.promql()})"


@dataclass(frozen=True)
class Product:
    """`left` * `right`, matched on `on`; `right` has exactly these labels."""

    left: Node
    right: Node
    on: tuple[str, ...]

    def promql(self) -> str:
        return f"{_operand(self.left)} * on ({', '.join(self.on)}) group_left () {_operand(self.right)}"


@dataclass(frozen=True)
class Age:
    """Seconds between the evaluation time and a timestamp gauge; 0 where the clock that wrote it is ahead."""

    of: Node

    def promql(self) -> str:
        return f"clamp_min(time() - {_operand(self.of)}, 0)"


@dataclass(frozen=True)
class Survival:
    """Share of cached blocks that live longer than `le` seconds, for each pool and each of AGE_BOUNDS, from the life table of the
    evictions of WINDOW: the product of 1 - evicted / exposed over the age intervals up to `le`.

    Blocks that are still there count as exposed, so it has no bias towards short lives. Absent from the first interval on in which no
    block was exposed within WINDOW.
    """

    @staticmethod
    def hazard(ages: tuple[str, ...] = ()) -> str:
        """PromQL of the share of the blocks exposed in each of `ages` (all) that was evicted there, by model, pool and age."""
        match = f'{{age=~"{"|".join(ages)}"}}' if ages else ""
        evicted, exposed = (
            f"sum by (model, pool, age) (rate({family.series}{match}[{WINDOW}]))"
            for family in (c.KV_EVICTED_AGES, c.KV_EXPOSED)
        )
        return f"{evicted} / {exposed}"

    def promql(self, recorded_hazard: str = "") -> str:
        """From `recorded_hazard`, a series recorded from `hazard`, it costs a fleet no more than one engine."""

        def upto(count: int) -> str:
            ages = c.AGE_LABELS[:count]
            hazard = f'{recorded_hazard}{{age=~"{"|".join(ages)}"}}' if recorded_hazard else self.hazard(ages)
            product = f"exp(sum by (model, pool) (ln(1 - clamp_max({hazard}, 1))))"
            return f'label_replace({product} >= 0, "le", "{float(c.AGE_BOUNDS[count - 1])}", "", "")'  # >= 0 drops NaN

        return " or ".join(upto(i + 1) for i in range(len(c.AGE_BOUNDS)))


@dataclass(frozen=True)
class LifetimeQuantile:
    """Age at which a share `q` of cached blocks has been evicted, linear between AGE_BOUNDS; absent while `survival` does not reach
    down to 1 - q: more than that outlive every age that is known."""

    q: float
    survival: Survival

    def promql(self) -> str:
        survival = f"({self.survival.promql()})"
        reached = f"min by (model, pool) {survival} <= {1 - self.q:.6g}"
        everything = f'label_replace(({reached}) * 0 + 1, "le", "+Inf", "", "")'
        return f"histogram_quantile({self.q:g}, (1 - {survival}) or {everything}) >= 0"  # without +Inf it is NaN, which >= 0 drops


@dataclass(frozen=True)
class TailMean:
    """Mean of a tail family over the slowest requests: those above the tightest latency bound that still holds at least the slowest
    1 - q of the served requests (kvscope_request_phase_*; exact within TAIL_BOUNDS).

    Of seconds, the sum over all `by` labels beyond `model` is the mean latency of those requests; of requests, it is 1.
    """

    q: float
    by: tuple[str, ...]
    family: Family = c.PHASE_SECONDS

    def promql(self) -> str:
        seconds = f"sum by ({', '.join((*self.by, 'gt'))}) (rate({self.family.series}[{WINDOW}]))"
        requests = f"sum by (model, gt) (rate({c.PHASE_REQUESTS.series}[{WINDOW}]))"
        everyone = f'sum by (model) (rate({c.PHASE_REQUESTS.series}{{gt="0"}}[{WINDOW}]))'
        share = f"{requests} / on (model) group_left () {everyone}"
        tail = f"{requests} and on (model, gt) bottomk by (model) (1, ({share}) >= {1 - self.q:.6g})"
        return f"sum by ({', '.join(self.by)}) ({seconds} / on (model, gt) group_left () ({tail}))"


Node = (
    Gauge
    | Rate
    | Aggregate
    | Quantile
    | Ratio
    | OneMinus
    | Sqrt
    | Decibel
    | Product
    | Age
    | Survival
    | LifetimeQuantile
    | TailMean
)


# -- signals --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Signal:
    """One recorded series: `level:metric:operation`, labels `by` left, in `unit`, within `bounds`."""

    name: str
    title: str
    unit: Literal[
        "seconds",
        "ratio",
        "requests/s",
        "tokens/s",
        "blocks/s",
        "requests",
        "blocks",
        "bytes",
        "tokens",
        "1/s",
        "dB",
        "nats",
        "hosts",
        "engines",
        "times",
    ]
    expr: Node
    by: tuple[str, ...]
    bounds: tuple[float, float | None] = (0.0, None)

    @property
    def promql(self) -> str:
        return self.expr.promql()


def _sum(node: Node, *by: str) -> Aggregate:
    return Aggregate("sum", node, by)


def _rate(family: Family, *by: str, **where: str) -> Aggregate:
    return _sum(Rate(family, where), *by)


def _quantile(family: Family, q: float, *by: str) -> Quantile:
    return Quantile(q, _rate(family, *by, "le"))


M = ("model",)
MI = ("model", "instance")
G = ("gpu", "uuid", "mig")
MC = ("model", "class")
ML = ("model", "length_bucket")
MRA = ("model", "rule", "action")
MR = ("model", "region")
MP = ("model", "component")
MT = ("model", "tenant")
MPOOL = ("model", "pool")
MW = ("model", "window")
MQ = ("model", "tensor", "layer_group", "scheme")
MGS = ("model", "layer_group", "scheme")
MS = ("model", "scheme")
QUANTILES = (0.5, 0.9, 0.99)
UNIT = (0.0, 1.0)


_PER_SECOND: Mapping[str, Literal["requests/s", "tokens/s"]] = {"requests": "requests/s", "tokens": "tokens/s"}


def _percent(q: float) -> str:
    return f"p{q * 100:g}".replace(".", "_")


def without(classes: tuple[str, ...]) -> str:
    """Part of the name of a signal that does not count `classes`."""
    return "_without_" + "_".join(classes) if classes else ""


def of_every_class(name: str) -> str:
    """The signal `name` as it is called where it counts every class."""
    return re.sub(r"_without_\w+(?=:)", "", name)


def events_name(objective: LatencyObjective, classes: tuple[str, ...]) -> str:
    """Name of the signal that is the rate of an objective's events but those of `classes`."""
    return f"model:{objective.family.name}{without(classes)}:rate5m"


def share_name(objective: LatencyObjective, classes: tuple[str, ...]) -> str:
    """Name of the signal that is the share of these events over the objective's threshold."""
    return f"model:{objective.family.name}{without(classes)}:error_ratio{_over(objective)}_rate5m"


def tenant_share_name() -> str:
    """Name of the signal that is the share of each tenant's requests over the general threshold of the time to first token."""
    return f"model_tenant:{c.TENANT_TTFT.name}:error_ratio{_over(TTFT)}_rate5m"


def _over(objective: LatencyObjective) -> str:
    """What the name of a share says of its threshold. Another threshold is another signal, so that what was recorded for one never passes for
    the other."""
    own = objective.threshold_seconds != DEFAULT_THRESHOLDS[objective.name]
    return re.sub(r"[^_a-z0-9]", "_", f"_over_{objective.threshold_seconds:g}s") if own else ""


def threshold_of(name: str) -> float | None:
    """Seconds of which the signal `name` is the share above; None where it is no such share."""
    shares = ((share_name(each, classes), each) for general in LATENCY_OBJECTIVES for each, classes in counted(general))
    return next((each.threshold_seconds for share, each in shares if share == name), None)


def outcomes_name(classes: tuple[str, ...]) -> str:
    """Name of the signal that is the rate of ended requests by outcome but those of `classes`."""
    return f"model_outcome:kvscope_requests{without(classes)}:rate5m"


def counted(general: LatencyObjective) -> Iterator[tuple[LatencyObjective, tuple[str, ...]]]:
    """What is counted for the objectives that a model can be held to, each with the classes that are not: all events for the general one, then
    for each the events that it judges."""
    yield general, ()
    for each in OBJECTIVES:
        if isinstance(each, LatencyObjective) and each.name == general.name and not each.request_class:
            yield each, left_out(each)


def _but(classes: tuple[str, ...]) -> dict[str, Not]:
    return {"class": Not(classes)} if classes else {}


def but_for(classes: tuple[str, ...]) -> str:
    """What a title says of `classes` that are not counted."""
    return f" without {' and '.join(classes)}" if classes else ""


def _measured(objective: LatencyObjective, classes: tuple[str, ...]) -> Iterator[Signal]:
    """How many events an objective has and which share of them is over its threshold, without those of `classes`."""
    family, title, but = objective.family, objective.title, _but(classes)
    total = _sum(Rate(family, {**but, "le": "+Inf"}), "model")
    good = _sum(Rate(family, {**but, "le": str(float(objective.threshold_seconds))}), "model")
    yield Signal(
        events_name(objective, classes), f"{title}: {objective.events} measured per second{but_for(classes)}",
        _PER_SECOND[objective.events], total, M,
    )  # fmt: skip
    yield Signal(
        share_name(objective, classes), f"Share of {title.lower()} over {objective.threshold_seconds:g} s{but_for(classes)}",
        "ratio", OneMinus(Ratio(good, total, M)), M, UNIT,
    )  # fmt: skip


def _outcome_signals() -> Iterator[Signal]:
    """Ended requests of every class, and without classes that have an availability objective of their own."""
    general = next(x for x in OBJECTIVES if x.name == "availability" and not x.applies_to)
    for classes in dict.fromkeys(((), left_out(general))):
        rate = _sum(Rate(c.REQUESTS, _but(classes)), "model", "outcome")
        yield Signal(outcomes_name(classes), f"Ended requests by outcome{but_for(classes)}", "requests/s", rate, ("model", "outcome"))  # fmt: skip


def _latency_signals() -> list[Signal]:
    out = []
    for objective in LATENCY_OBJECTIVES:
        family, short = objective.family, objective.family.name
        for q in QUANTILES:
            name, title = f"model:{short}:{_percent(q)}_5m", f"{objective.title} {_percent(q)}"
            out.append(Signal(name, title, "seconds", _quantile(family, q, "model"), M))
        measured = [signal for each, classes in counted(objective) for signal in _measured(each, classes)]
        out += {signal.name: signal for signal in measured}.values()
        total = _rate(family, "model", le="+Inf")
        # Buckets are cumulative: of the finite ones the last has the highest rate, the first the lowest, whatever their bounds.
        finite = _sum(Rate(family, {"le": Not(("+Inf",))}), "model", "le")
        overflow = OneMinus(Ratio(Aggregate("max", finite, M), total, M))
        out.append(Signal(f"model:{short}:overflow_ratio_rate5m", f"{objective.title}: share above the top bucket bound", "ratio", overflow, M, UNIT))  # fmt: skip
        first = Ratio(Aggregate("min", finite, M), total, M)
        out.append(Signal(f"model:{short}:first_bucket_ratio_rate5m", f"{objective.title}: share in the lowest bucket", "ratio", first, M, UNIT))  # fmt: skip
    return out


def _makeup_signals() -> list[Signal]:
    return [
        Signal(
            f"model_state_component:kvscope_request_phase_seconds:{_percent(q)}_tail_mean5m",
            f"Mean make-up of the slowest {(1 - q) * 100:g} % of requests",
            "seconds", TailMean(q, ("model", "state", "component")), ("model", "state", "component"),
        )
        for q in QUANTILES
    ] + [
        Signal(
            f"model_length_bucket:kvscope_request_length_phase_{kind}:{_percent(q)}_tail_mean5m",
            f"{what} of the slowest {(1 - q) * 100:g} % of requests by prompt length",
            "seconds" if kind == "seconds" else "ratio", TailMean(q, ML, family), ML, bounds,
        )
        for q in QUANTILES
        for kind, what, family, bounds in (
            ("seconds", "Mean latency", c.PHASE_LENGTH_SECONDS, (0.0, None)),
            ("requests", "Share", c.PHASE_LENGTH_REQUESTS, UNIT),
        )
    ]  # fmt: skip


def _quantization_signals() -> list[Signal]:
    error, signal = _rate(c.KV_QUANT_ERROR, *MQ), _rate(c.KV_QUANT_SIGNAL, *MQ)
    compared = _rate(c.KV_QUANT_COMPARED, *MS)
    within = _rate(c.REQUEST_QUANT_ERROR, "model", le=str(float(QUANTIZATION_BUDGET.attention_error)))
    measured = _rate(c.REQUEST_QUANT_ERROR, "model", le="+Inf")
    attention = Ratio(_rate(c.KV_QUANT_ATTENTION_ERROR, *MGS), _rate(c.KV_QUANT_ATTENTION_SIGNAL, *MGS), MGS)
    stored, by_group = (
        "model_tensor_layer_group_scheme:kvscope_kv_quantization",
        "model_layer_group_scheme:kvscope_kv_quantization",
    )
    return [
        Signal(f"{stored}_relative_rms:ratio_rate5m", "Relative RMS error of stored KV", "ratio", Sqrt(Ratio(error, signal, MQ)), MQ),
        Signal(f"{stored}_sqnr:decibel_rate5m", "Signal to quantization noise of stored KV", "dB", Decibel(Ratio(signal, error, MQ)), MQ, (-100.0, None)),
        Signal(f"{stored}_maximum_error_ratio:p99_5m", "Largest error of a block over its RMS, p99", "ratio", Quantile(0.99, _rate(c.KV_QUANT_MAXIMUM, *MQ, "le")), MQ),
        Signal(f"{by_group}_attention_error:ratio_rate5m", "Relative error of attention over quantized KV", "ratio", Sqrt(attention), MGS),
        Signal("model_scheme:kvscope_kv_quantization_divergence:mean_rate5m", "Divergence of logits by quantized KV, mean", "nats", Ratio(_rate(c.KV_QUANT_DIVERGENCE, *MS), compared, MS), MS),
        Signal("model_scheme:kvscope_kv_quantization_agreed:ratio_rate5m", "Tokens that quantized KV leaves the likeliest", "ratio", Ratio(_rate(c.KV_QUANT_AGREED, *MS), compared, MS), MS, UNIT),
        Signal("model:kvscope_request_quantization_error:over_budget_ratio_rate5m", "Sequences over the quantization error budget", "ratio", OneMinus(Ratio(within, measured, M)), M, UNIT),
    ]  # fmt: skip


def _batching_signals() -> list[Signal]:
    ttft = f"model_class:{TTFT.family.name}:p99_5m"
    spread = f"model:{c.PREFILL_SPREAD.name}"
    return [
        Signal("model_class:kvscope_requests_running:sum", "Requests running by class", "requests", _sum(Gauge(c.REQUESTS_RUNNING), *MC), MC),
        Signal("model_class:kvscope_requests_waiting:sum", "Requests waiting by class", "requests", _sum(Gauge(c.REQUESTS_WAITING), *MC), MC),
        Signal(ttft, f"{TTFT.title} p99 by class", "seconds", _quantile(TTFT.family, 0.99, *MC), MC),
        Signal("model_class:kvscope_queue_promotions:rate5m", "Overdue requests moved to the front per second", "1/s", _rate(c.QUEUE_PROMOTIONS, *MC), MC),
        Signal("model_reason:kvscope_preemptions:rate5m", "Preemptions per second by reason", "1/s", _rate(c.PREEMPTIONS, "model", "reason"), ("model", "reason")),
        Signal("model_reason:kvscope_kv_recomputed_tokens:rate5m", "Tokens computed again per second by reason", "tokens/s", _rate(c.KV_RECOMPUTED_TOKENS, "model", "reason"), ("model", "reason")),
        Signal("model_kind:kvscope_steps:rate5m", "Model steps per second by what they held", "1/s", _rate(c.STEPS, "model", "kind"), ("model", "kind")),
        Signal("model_kind:kvscope_step_duration_seconds:p99_5m", "Duration of a model step p99", "seconds", _quantile(c.STEP_DURATION, 0.99, "model", "kind"), ("model", "kind")),
        Signal(f"{spread}:p50_5m", "Spread of prefill lengths (q75 / q25) in a batch p50", "times", _quantile(c.PREFILL_SPREAD, 0.5, "model"), M),
        Signal(f"{spread}:p99_5m", "Spread of prefill lengths (q75 / q25) in a batch p99", "times", _quantile(c.PREFILL_SPREAD, 0.99, "model"), M),
        Signal("model:kvscope_prefill_batch_splits:rate5m", "Steps per second that left long prefills out for their spread", "1/s", _rate(c.BATCH_SPLITS, "model"), M),
        Signal("model:kvscope_limit_batched_tokens:min", "Most tokens of a step as the controller has it", "tokens", Aggregate("min", Gauge(c.LIMIT_BATCHED_TOKENS), M), M),
        Signal("model:kvscope_limit_prefills:min", "Most requests in prefill as the controller has it", "requests", Aggregate("min", Gauge(c.LIMIT_PREFILLS), M), M),
        Signal("model_rule_action:kvscope_controller_changes:rate5m", "Changes of limits by the controller per second", "1/s", _rate(c.CONTROLLER_CHANGES, *MRA), MRA),
        Signal("model_rule:kvscope_requests_degraded:rate5m", "Requests affected by lowered limits per second", "requests/s", _rate(c.REQUESTS_DEGRADED, "model", "rule"), ("model", "rule")),
    ]  # fmt: skip


def _engine_signals() -> list[Signal]:
    """Which engines there are, and what foreign ones can tell: a change of the first is a deploy."""
    engine, told = c.ENGINE.labels, c.SOURCE_FAMILY.labels
    return [
        Signal(f"{'_'.join(engine)}:kvscope_engine:sum", "Engines by version and setting", "engines", _sum(Gauge(c.ENGINE), *engine), engine),
        Signal(f"{'_'.join(told)}:kvscope_source_family:sum", "Engines that tell a family in full, in part or not, and why", "engines", _sum(Gauge(c.SOURCE_FAMILY), *told), told),
    ]  # fmt: skip


_tenant_ttft = _rate(c.TENANT_TTFT, *MT, le="+Inf")
_tenant_in_time = _rate(c.TENANT_TTFT, *MT, le=str(float(TTFT.threshold_seconds)))


def _residency_signals() -> list[Signal]:
    out = [Signal("model_pool_le:kvscope_kv_block_survival:ratio_rate5m", "Share of cached blocks that live longer than `le` seconds", "ratio", Survival(), (*MPOOL, "le"), UNIT)]  # fmt: skip
    for q in QUANTILES:
        name = f"model_pool:kvscope_kv_block_lifetime_seconds:{_percent(q)}_5m"
        title = f"Lifetime of cached blocks {_percent(q)}, those still alive included"
        out += [Signal(name, title, "seconds", LifetimeQuantile(q, Survival()), MPOOL)]
    for family, title in (
        (c.KV_IDLE_BEFORE_EVICTION, "Idle time before eviction"),
        (c.KV_REUSE_GAP, "Idle time before reuse"),
    ):
        for q in QUANTILES:
            name = f"model_pool:{family.name}:{_percent(q)}_5m"
            out.append(Signal(name, f"{title} {_percent(q)}", "seconds", _quantile(family, q, *MPOOL), MPOOL))
    live = Quantile(0.5, _sum(Gauge(c.KV_LIVE_AGES), *MPOOL, "le"))
    out.append(Signal("model_pool:kvscope_kv_live_block_age_seconds:p50", "Age of cached blocks p50", "seconds", live, MPOOL))  # fmt: skip
    regret = _rate(c.KV_REGRET, *MW)
    out.append(Signal("model_window:kvscope_kv_regret_tokens:rate5m", "Prompt tokens per second missed for an eviction in the last `window`", "tokens/s", regret, MW))  # fmt: skip
    out.append(
        Signal(
            "model_window:kvscope_kv_regret:ratio_rate5m", "Share of looked-up tokens missed for an eviction in the last `window`",
            "ratio", Ratio(regret, _rate(c.KV_QUERIED_TOKENS, "model"), M), MW, UNIT,
        )
    )  # fmt: skip
    return out


#: Blocks that external fragmentation is measured over. Engines that do not tell free from cached ones (`allocatable`) tell no runs either.
FREE = {"state": ("free", "evictable")}
_hit = _rate(c.KV_HIT_TOKENS, *ML)
_active = _sum(Gauge(c.KV_BLOCKS, {"state": "active"}), "model")
_capacity = _sum(Gauge(c.KV_CAPACITY_BLOCKS), "model")


def _slots(where: Where) -> Aggregate:
    """Tokens that blocks hold when full. Replicas may have blocks of different sizes, so each counts with its own."""
    return _sum(
        Product(_sum(Gauge(c.KV_BLOCKS, where), *MI), Aggregate("max", Gauge(c.KV_BLOCK_SIZE), MI), MI), "model"
    )


_free_tokens = _slots({"state": (*FREE["state"], c.ALLOCATABLE)})


def _gpu_signals() -> list[Signal]:
    """Of GPUs, which two exporters of one host show alike, and the hardware targets with their status."""

    def newest(family: Family, *by: str, **where: str) -> Aggregate:
        return Aggregate("max", Gauge(family, where), (*G, *by))

    overlap = Ratio(_rate(c.KV_COPY_SECONDS, "model", overlap="hidden"), _rate(c.KV_COPY_SECONDS, "model"), M)
    throttled = Aggregate("max", Rate(c.GPU_THROTTLED), (*G, "reason"))
    status = _sum(Gauge(c.HARDWARE_STATUS), "target", "status", "reason")
    return [
        Signal("gpu_uuid_mig:kvscope_gpu_health:min", "Health of a GPU", "ratio", Aggregate("min", Gauge(c.GPU_HEALTH), G), G, UNIT),
        Signal("gpu_uuid_mig_reason:kvscope_gpu_health_penalty:max", "What takes off the health of a GPU", "ratio", newest(c.GPU_PENALTY, "reason"), (*G, "reason"), UNIT),
        Signal("gpu_uuid_mig_unit:kvscope_gpu_utilization:max", "GPU utilization", "ratio", newest(c.GPU_UTILIZATION, "unit"), (*G, "unit"), UNIT),
        Signal("gpu_uuid_mig_kind:kvscope_gpu_memory_bytes:max", "GPU memory", "bytes", newest(c.GPU_MEMORY, "kind"), (*G, "kind")),
        Signal("gpu_uuid_mig_reason:kvscope_gpu_throttle:rate5m", "Share of time that clocks are held down", "ratio", throttled, (*G, "reason")),
        Signal("gpu_uuid_mig:kvscope_gpu_dram_active:max", "DRAM active", "ratio", newest(c.GPU_PROFILED_RATIO, unit="dram"), G, UNIT),
        Signal("gpu_uuid_mig:kvscope_gpu_l2_hit:max", "L2 hit rate", "ratio", newest(c.GPU_PROFILED_RATIO, unit="l2_hit"), G, UNIT),
        Signal("model:kvscope_kv_copy_overlap:ratio_rate5m", "Share of copy time hidden beside steps", "ratio", overlap, M, UNIT),
        Signal("target_status_reason:kvscope_hardware_target:sum", "Hosts by status of a hardware target", "hosts", status, ("target", "status", "reason")),
    ]  # fmt: skip


SIGNALS: tuple[Signal, ...] = (
    Signal("model:kvscope_requests_received:rate5m", "Requests per second", "requests/s", _rate(c.REQUESTS_RECEIVED, "model"), M),
    *_outcome_signals(),
    Signal("model:kvscope_prompt_tokens:rate5m", "Prompt tokens per second", "tokens/s", _rate(c.PROMPT_TOKENS, "model"), M),
    Signal("model:kvscope_generation_tokens:rate5m", "Generated tokens per second", "tokens/s", _rate(c.GENERATION_TOKENS, "model"), M),
    Signal("model:kvscope_requests_running:sum", "Requests running", "requests", _sum(Gauge(c.REQUESTS_RUNNING), "model"), M),
    Signal("model:kvscope_requests_waiting:sum", "Requests waiting", "requests", _sum(Gauge(c.REQUESTS_WAITING), "model"), M),
    Signal("model:kvscope_stalls:rate5m", "Stalls of the step loop per second", "1/s", _rate(c.STALLS, "model"), M),
    Signal("model:kvscope_stall_seconds:rate5m", "Share of the engines' time lost in stalls", "ratio", Aggregate("avg", Rate(c.STALL_SECONDS), M), M),
    Signal("model:kvscope_preemptions:rate5m", "Preemptions per second", "1/s", _rate(c.PREEMPTIONS, "model"), M),
    *_latency_signals(),
    Signal("model_tenant:kvscope_tenant_requests:rate5m", "Ended requests by tenant", "requests/s", _rate(c.TENANT_REQUESTS, *MT), MT),
    Signal("model_tenant:kvscope_tenant_tokens:rate5m", "Tokens per second by tenant", "tokens/s", _rate(c.TENANT_TOKENS, *MT), MT),
    Signal("model_tenant:kvscope_tenant_time_to_first_token_seconds:p99_5m", "Time to first token p99 by tenant", "seconds", _quantile(c.TENANT_TTFT, 0.99, *MT), MT),
    Signal(tenant_share_name(), f"Share of time to first token over {TTFT.threshold_seconds:g} s by tenant", "ratio", OneMinus(Ratio(_tenant_in_time, _tenant_ttft, MT)), MT, UNIT),
    Signal("model_kind:kvscope_kv_bytes:sum", "KV memory: reserved, resident, active", "bytes", _sum(Gauge(c.KV_BYTES), "model", "kind"), ("model", "kind")),
    *_makeup_signals(),
    Signal("model:kvscope_kv_hit:ratio_rate5m", "KV hit rate", "ratio", Ratio(_rate(c.KV_HIT_TOKENS, "model"), _rate(c.KV_QUERIED_TOKENS, "model"), M), M, UNIT),
    Signal("model_length_bucket:kvscope_kv_hit:ratio_rate5m", "KV hit rate by prompt length", "ratio", Ratio(_hit, _rate(c.KV_QUERIED_TOKENS, *ML), ML), ML, UNIT),
    Signal("model_length_bucket:kvscope_kv_hit_of_hittable:ratio_rate5m", "KV hit rate of hittable tokens", "ratio", Ratio(_hit, _rate(c.KV_HITTABLE_TOKENS, *ML), ML), ML, UNIT),
    Signal("model_length_bucket:kvscope_kv_queried_tokens:rate5m", "Prompt tokens looked up per second", "tokens/s", _rate(c.KV_QUERIED_TOKENS, *ML), ML),
    Signal("model_length_bucket:kvscope_kv_hittable_tokens:rate5m", "Prompt tokens a perfect cache could serve per second", "tokens/s", _rate(c.KV_HITTABLE_TOKENS, *ML), ML),
    Signal("model_length_bucket:kvscope_kv_hit_tokens:rate5m", "Prompt tokens served from cache per second", "tokens/s", _hit, ML),
    Signal("model:kvscope_kv_usage:ratio", "KV pool held by requests", "ratio", Ratio(_active, _capacity, M), M, UNIT),
    Signal("model_state:kvscope_kv_blocks:sum", "KV blocks by state", "blocks", _sum(Gauge(c.KV_BLOCKS), "model", "state"), ("model", "state")),
    Signal("model_layout:kvscope_kv_layout_blocks:sum", "KV blocks by layout", "blocks", _sum(Gauge(c.KV_LAYOUT_BLOCKS), "model", "layout"), ("model", "layout")),
    Signal("model:kvscope_kv_stored_tokens:sum", "Tokens held in the KV pool", "tokens", _sum(Gauge(c.KV_STORED_TOKENS), "model"), M),
    Signal("model:kvscope_kv_free_tokens:sum", "Tokens for which the KV pool has room", "tokens", _free_tokens, M),
    Signal("model:kvscope_kv_free_requests:mean_length", "Requests of the present mean length for which the KV pool has room", "requests", Ratio(Product(_free_tokens, _sum(Gauge(c.REQUESTS_RUNNING), "model"), M), _sum(Gauge(c.KV_STORED_TOKENS), "model"), M), M),
    Signal("model:kvscope_kv_evicted_blocks:rate5m", "Blocks evicted per second", "blocks/s", _rate(c.KV_EVICTED_BLOCKS, "model"), M),
    Signal("model_outcome:kvscope_kv_prefetch_blocks:rate5m", "Blocks brought back ahead of their use per second", "blocks/s", _rate(c.KV_PREFETCH_BLOCKS, "model", "outcome"), ("model", "outcome")),
    Signal("model_reason:kvscope_kv_moved_blocks:rate5m", "Blocks moved or rewritten per second", "blocks/s", _rate(c.KV_MOVED_BLOCKS, "model", "reason"), ("model", "reason")),
    Signal("model:kvscope_kv_layout_fallbacks:rate5m", "Requests per second that found no adjacent blocks", "requests/s", _rate(c.KV_LAYOUT_FALLBACKS, "model"), M),
    *_residency_signals(),
    Signal(
        "model:kvscope_kv_internal_fragmentation:ratio", "Internal fragmentation: unused slots in active blocks", "ratio",
        OneMinus(Ratio(_sum(Gauge(c.KV_STORED_TOKENS), "model"), _slots({"state": "active"}), M)), M, UNIT,
    ),
    Signal(
        "model:kvscope_kv_external_fragmentation:ratio", "External fragmentation: 1 - largest free run / free blocks", "ratio",
        OneMinus(Ratio(_sum(Gauge(c.KV_LARGEST_FREE_RUN), "model"), _sum(Gauge(c.KV_BLOCKS, FREE), "model"), M)), M, UNIT,
    ),
    Signal(
        "model_region:kvscope_kv_region_usage:ratio", "Active share of each address region", "ratio",
        Ratio(_sum(Gauge(c.KV_REGION_BLOCKS, {"state": "active"}), *MR), _sum(Gauge(c.KV_REGION_BLOCKS), *MR), MR), MR, UNIT,
    ),
    Signal(
        "model_region:kvscope_kv_region_fragmentation:ratio", "External fragmentation of each address region", "ratio",
        OneMinus(Ratio(_sum(Gauge(c.KV_REGION_FREE_RUN), *MR), _sum(Gauge(c.KV_REGION_BLOCKS, FREE), *MR), MR)), MR, UNIT,
    ),
    Signal("model_le:kvscope_kv_free_runs:sum", "Free runs of at most `le` blocks", "blocks", _sum(Gauge(c.KV_FREE_RUNS), "model", "le"), ("model", "le")),
    *_quantization_signals(),
    Signal("model_component:kvscope_step_seconds:rate5m", "Time of the engines by step component, 1 being all of one engine's", "engines", _rate(c.STEP_SECONDS, *MP), MP),
    Signal("model_phase:kvscope_step_tokens:rate5m", "Tokens run through the model per second", "tokens/s", _rate(c.STEP_TOKENS, "model", "phase"), ("model", "phase")),
    *_batching_signals(),
    *_gpu_signals(),
    *_engine_signals(),
    Signal("model:kvscope_telemetry_anomalies:rate5m", "Refused or corrected measurements per second", "1/s", _rate(c.ANOMALIES_TOTAL, "model"), M),
    Signal("model:kvscope_last_update_age:seconds", "Age of the newest values", "seconds", Age(Aggregate("max", Gauge(c.LAST_UPDATE), M)), M),
)  # fmt: skip
BY_NAME = {s.name: s for s in SIGNALS}
