"""Alerts on symptoms and causes beside the objectives: KV cache, scheduling, sources; and the series that only they need.

By instance where one bad replica must not hide behind the others.
"""

from __future__ import annotations

from alerts import burn
from alerts.links import JOB
from alerts.types import Alert, Recording
from observability import catalog as c
from observability import objectives as o
from observability.objectives import LatencyObjective
from observability.signals import FREE, WINDOW, Aggregate, Gauge, Not, OneMinus, Rate, Ratio, events_name
from observability.signals import MI as _MI

_M = ("model",)
_ML = ("model", "length_bucket")
_GPU = ("instance", "gpu")

KV_USAGE = "model_instance:kvscope_kv_usage:ratio"
WAITING = "model_instance:kvscope_requests_waiting:sum"
RUNNING = "model_instance:kvscope_requests_running:sum"
ROOM = "model_instance:kvscope_kv_free_requests:mean_held"
AGE = "model_instance:kvscope_last_update_age:seconds"
FRAGMENTATION = "model_instance:kvscope_kv_external_fragmentation:ratio"
FALLBACKS = f"model_instance:kvscope_kv_layout_fallbacks_per_lookup:ratio_rate{WINDOW}"
FALLBACK_RATE = f"model_instance:kvscope_kv_layout_fallbacks:rate{WINDOW}"
COMPACTED = f"model_instance:kvscope_kv_compacted_blocks:rate{WINDOW}"
PREEMPTED = f"model_instance:kvscope_preemptions_per_request:ratio_rate{WINDOW}"
PREEMPTIONS = f"model_instance:kvscope_preemptions:rate{WINDOW}"
COMPUTED = "model_instance:kvscope_step_tokens:rate1m"
FORWARD = f"model_instance:kvscope_step_forward:ratio_rate{WINDOW}"
PER_FORWARD_SECOND = f"model_instance:kvscope_step_tokens_per_forward_second:rate{WINDOW}"
HIT_RATE = "model_length_bucket:kvscope_kv_hit:ratio_rate30m"
STALL_GAPS = "model_instance:kvscope_stall_gaps:increase1h"
STALL_PERIOD = "model_instance:kvscope_stall_gap_seconds:mean1h"
STALL_VARIATION = "model_instance:kvscope_stall_gap_seconds:variation1h"
LOOKUPS = "model_length_bucket:kvscope_kv_lookups:increase30m"

#: Hit rate below this share of the same time yesterday is a drop; yesterday's must have been worth something.
HIT_RATE_DROP = 0.6
HIT_RATE_WORTH = 0.1
MIN_LOOKUPS = 50
#: External fragmentation that matters, once requests find no adjacent blocks.
FRAGMENTED = 0.5
FALLBACKS_MATTER = 0.2
FALLBACK_FLOOR = 0.02  # a second: six in five minutes
#: Preemptions for each request that ends: above this, requests are computed more than once and a half.
PREEMPTION_STORM = 0.5
PREEMPTION_FLOOR = 0.05
QUEUE_GROWTH = 10
#: Forward passes fill this share of the time and still yield less than half of yesterday's tokens.
BUSY = 0.8
LOW_THROUGHPUT = 0.5
OVERFLOW = 0.01
GPU_HEALTH = 0.5
#: PCIe packets sent again, a second: a few an hour are normal.
PCIE_REPLAYS = 1.0
#: Gaps between stalls that vary by less than this (standard deviation / mean; of chance events it is 1) come from a clock. Of eight
#: chance gaps one set in 800 is as even; of five, one in 60.
PERIODIC = 0.3
PERIODIC_GAPS = 8
#: Below this many seconds it is the mix of steps and not a job.
PERIODIC_FLOOR = 1.0

#: An adapter's series carry the engine that they were read from.
_ON_MI = "on (model, instance, engine)"
_FORWARD = {"component": ("forward_prefill", "forward_decode")}


def _sum(node: Gauge | Rate, by: tuple[str, ...] = _MI) -> Aggregate:
    return Aggregate("sum", node, by)


def _increase(family: c.Family) -> str:
    return f"sum by ({', '.join(_MI)}) (increase({family.series}[1h]))"


def overflow_rate(objective: LatencyObjective) -> str:
    """Name of the rate of an objective's events above the top bucket bound."""
    return f"model:{objective.family.name}:overflow_rate{WINDOW}"


def _overflow(objective: LatencyObjective) -> Recording:
    """Events less those in a finite bucket, of which the last, being cumulative, has the highest rate."""
    events, finite = (
        Aggregate("sum", Rate(objective.family, {"le": le}), by).promql()
        for le, by in (("+Inf", _M), (Not(("+Inf",)), ("model", "le")))
    )
    return Recording(overflow_rate(objective), f"{events} - max by (model) ({finite})")


_stall_gaps = _increase(c.STALL_GAPS)
_capacity = _sum(Gauge(c.KV_CAPACITY_BLOCKS))
_tokens = _sum(Rate(c.STEP_TOKENS))
_forward = _sum(Rate(c.STEP_SECONDS, _FORWARD))

RECORDINGS: tuple[Recording, ...] = (
    Recording(KV_USAGE, Ratio(_sum(Gauge(c.KV_BLOCKS, {"state": "active"})), _capacity, _MI).promql()),
    Recording(WAITING, _sum(Gauge(c.REQUESTS_WAITING)).promql()),
    Recording(RUNNING, _sum(Gauge(c.REQUESTS_RUNNING)).promql()),
    # free share / share that a running request holds; from recorded series, so that it is made for engines behind adapters too
    Recording(ROOM, f"(1 - {KV_USAGE}) / ({KV_USAGE} > 0) * {_ON_MI} ({RUNNING} > 0)"),
    # min: of several engines behind one exporter the one that stopped longest ago counts. KV events come only while blocks change.
    Recording(AGE, f"time() - {Aggregate('min', Gauge(c.LAST_UPDATE, {'source': 'engine'}), _MI).promql()}"),
    Recording(
        FRAGMENTATION,
        OneMinus(Ratio(_sum(Gauge(c.KV_LARGEST_FREE_RUN)), _sum(Gauge(c.KV_BLOCKS, FREE)), _MI)).promql(),
    ),
    Recording(FALLBACKS, Ratio(_sum(Rate(c.KV_LAYOUT_FALLBACKS)), _sum(Rate(c.KV_LOOKUPS)), _MI).promql()),
    Recording(FALLBACK_RATE, _sum(Rate(c.KV_LAYOUT_FALLBACKS)).promql()),
    Recording(COMPACTED, _sum(Rate(c.KV_MOVED_BLOCKS, {"reason": "compaction"})).promql()),
    Recording(PREEMPTIONS, _sum(Rate(c.PREEMPTIONS)).promql()),
    Recording(PREEMPTED, Ratio(_sum(Rate(c.PREEMPTIONS)), _sum(Rate(c.REQUESTS)), _MI).promql()),
    Recording(COMPUTED, _sum(Rate(c.STEP_TOKENS)).promql().replace(f"[{WINDOW}]", "[1m]")),
    Recording(FORWARD, _forward.promql()),
    Recording(PER_FORWARD_SECOND, Ratio(_tokens, _forward, _MI).promql()),
    Recording(STALL_GAPS, _stall_gaps),
    Recording(STALL_PERIOD, f"{_increase(c.STALL_GAP_SECONDS)} / ({_stall_gaps} > 0)"),
    # mean of squares / square of mean - 1; rounding may put it a hair below 0
    Recording(
        STALL_VARIATION,
        f"sqrt(clamp_min({_increase(c.STALL_GAP_SQUARES)} * {_stall_gaps} / ({_increase(c.STALL_GAP_SECONDS)} ^ 2 > 0) - 1, 0))",
    ),
    Recording(
        HIT_RATE,
        f"avg_over_time(model_length_bucket:kvscope_kv_hit_tokens:rate{WINDOW}[30m])\n"
        f"/ (avg_over_time(model_length_bucket:kvscope_kv_queried_tokens:rate{WINDOW}[30m]) > 0)",
    ),
    Recording(LOOKUPS, f"sum by ({', '.join(_ML)}) (increase({c.KV_LOOKUPS.series}[30m]))"),
)

#: Another group: one holds 20 at most.
OVERFLOWS: tuple[Recording, ...] = tuple(_overflow(x) for x in o.LATENCY_OBJECTIVES)

#: Requests that wait where the pool is full, or has less room than a running request takes on average: with long requests that is
#: long before it is full. The first speaks alone for an engine that does not tell how many run.
EXHAUSTED = (
    f"{WAITING} > 0\nand {_ON_MI} ({KV_USAGE} > {o.KV_USAGE_CRITICAL:g} or {_ON_MI} {ROOM} < {o.KV_ROOM_REQUESTS:g})"
)

#: What makes forecasts is no source: KvscopeForecastStale speaks of it.
_DOWN = f'up{{job=~"{JOB}|{JOB}-.+",job!="{JOB}-forecast"}} == 0'
_WHERE = "{{ $labels.model }} on {{ $labels.instance }}"

ALERTS: tuple[Alert, ...] = (
    # -- is it there?
    Alert(
        name="KvscopeSourceStale",
        severity="critical",
        expr=(
            f"{AGE} > {o.STALE_AFTER_SECONDS:g}\n"
            f"or {_DOWN}\n"
            # engines read through adapters have no time of the last update, but they have running requests, be it 0
            f"or absent({c.LAST_UPDATE.name}) unless on () model:kvscope_requests_running:sum "
            f"unless on () ({_DOWN})"  # which says so by itself, and of which one
        ),
        hold="2m",
        keep_firing="1m",
        summary="An engine no longer reports what it does.",
        description=(
            "{{ if $labels.model }}The telemetry of {{ $labels.model }} on {{ $labels.instance }} last wrote "
            "{{ $value | humanizeDuration }} ago"
            "{{ else if $labels.instance }}{{ $labels.instance }} does not answer scrapes (up is {{ $value }})"
            "{{ else }}Prometheus knows no kvscope source and no other engine at all (absent is {{ $value }}){{ end }}; "
            f"values older than {o.STALE_AFTER_SECONDS:g} s say nothing about now, and the other alerts are blind."
        ),
        labels_kept=("model", "instance", "job"),
        area="sources",
        board="engines",
    ),
    Alert(
        name="KvscopeSchedulerStuck",
        severity="critical",
        expr=(
            f"{WAITING} > 0\nand {_ON_MI} {COMPUTED} == 0\nand {_ON_MI} {KV_USAGE} < {o.KV_USAGE_CRITICAL:g}\n"
            f"and {_ON_MI} {AGE} <= {o.STALE_AFTER_SECONDS:g}"
        ),
        hold="2m",
        keep_firing="1m",
        summary="Requests wait while the engine has room and computes nothing.",
        description=(
            f"{{{{ $value }}}} requests to {_WHERE} wait, the KV cache has room, and no token was computed within the last minute."
        ),
        labels_kept=_MI,
        area="scheduling",
        board="batching",
    ),
    # -- is it filling up?
    Alert(
        name="KvscopeKVCacheExhausted",
        severity="warning",
        expr=EXHAUSTED,
        hold="2m",
        keep_firing="5m",
        summary="The KV cache has no room for another request while requests wait.",
        description=(
            f"{{{{ $value }}}} requests to {_WHERE} wait: running ones hold more than {o.KV_USAGE_CRITICAL * 100:g} % of its KV blocks, or "
            "leave fewer than one of them holds on average."
        ),
        labels_kept=_MI,
        area="kv",
        board="kv-cache",
    ),
    Alert(
        name="KvscopeQueueGrowing",
        severity="warning",
        expr=f"deriv({WAITING}[10m]) * 600 > {QUEUE_GROWTH}\nand {_ON_MI} {WAITING} > {QUEUE_GROWTH}",
        hold="5m",
        keep_firing="5m",
        summary="The queue grows: more requests come than are served.",
        description=f"The queue of {_WHERE} grows by {{{{ $value | humanize }}}} requests in 10 minutes.",
        labels_kept=_MI,
        area="scheduling",
        board="batching",
    ),
    Alert(
        name="KvscopePreemptionStorm",
        severity="warning",
        expr=f"{PREEMPTED} > {PREEMPTION_STORM:g}\nand {_ON_MI} {PREEMPTIONS} > {PREEMPTION_FLOOR:g}",
        hold="5m",
        keep_firing="5m",
        summary="Running requests are put back more often than once for two requests that end.",
        description=f'{_WHERE} preempts {{{{ printf "%.1f" $value }}}} times for each request that ends; above {PREEMPTION_STORM:g} it computes much twice.',
        labels_kept=_MI,
        area="scheduling",
        board="batching",
    ),
    # -- does the cache still do its work?
    Alert(
        name="KvscopeHitRateDrop",
        severity="warning",
        expr=(
            f"{HIT_RATE} < {HIT_RATE_DROP:g} * ({HIT_RATE} offset 1d > {HIT_RATE_WORTH:g})\n"
            f"and on (model, length_bucket, engine) {LOOKUPS} >= {MIN_LOOKUPS}"
        ),
        hold="10m",
        keep_firing="10m",
        summary="The prefix cache serves much less than at this time yesterday.",
        description=(
            "{{ $value | humanizePercentage }} of the tokens of {{ $labels.length_bucket }} prompts to {{ $labels.model }} come from "
            f"cache in the last 30 minutes, less than {HIT_RATE_DROP * 100:g} % of the rate at the same time yesterday."
        ),
        labels_kept=_ML,
        area="kv",
        board="kv-cache",
    ),
    Alert(
        name="KvscopeKVFragmented",
        severity="warning",
        expr=(
            f"{FRAGMENTATION} > {FRAGMENTED:g}\nand {_ON_MI} {FALLBACKS} > {FALLBACKS_MATTER:g}\n"
            f"and {_ON_MI} {FALLBACK_RATE} > {FALLBACK_FLOOR:g}\n"
            f"unless {_ON_MI} {COMPACTED} > 0"
        ),
        hold="5m",
        keep_firing="5m",
        summary="Free KV blocks lie scattered and contiguous requests find none.",
        description=(
            f"{{{{ $value | humanizePercentage }}}} of the allocatable blocks of {_WHERE} lie outside the longest run, more than "
            f"{FALLBACKS_MATTER * 100:g} % of the requests fall back to paged blocks, and nothing compacts."
        ),
        labels_kept=_MI,
        area="kv",
        board="kv-cache",
    ),
    Alert(
        name="KvscopeCompactionBehind",
        severity="warning",
        expr=(
            f"{FRAGMENTATION} > {FRAGMENTED:g}\nand {_ON_MI} {FALLBACKS} > {FALLBACKS_MATTER:g}\n"
            f"and {_ON_MI} {FALLBACK_RATE} > {FALLBACK_FLOOR:g}\n"
            f"and {_ON_MI} {COMPACTED} > 0"
        ),
        hold="10m",
        keep_firing="5m",
        summary="Compaction moves blocks and the free space stays scattered.",
        description=(
            f"{{{{ $value | humanizePercentage }}}} of the allocatable blocks of {_WHERE} lie outside the longest run for ten minutes "
            f"of compaction, and more than {FALLBACKS_MATTER * 100:g} % of the requests still fall back to paged blocks."
        ),
        labels_kept=_MI,
        area="kv",
        board="kv-cache",
    ),
    Alert(
        name="KvscopeQuantizationError",
        severity="warning",
        expr=f"model_tensor_layer_group_scheme:kvscope_kv_quantization_relative_rms:ratio_rate{WINDOW} > {o.QUANT_ERROR_WARNING:g}",
        hold="10m",
        keep_firing="10m",
        summary="Stored KV is further from exact than greedy decoding tolerates.",
        description=(
            "The {{ $labels.tensor }} tensors of layers {{ $labels.layer_group }} of {{ $labels.model }} in {{ $labels.scheme }} are "
            f"{{{{ $value | humanizePercentage }}}} from exact (relative RMS; limit {o.QUANT_ERROR_WARNING * 100:g} %)."
        ),
        labels_kept=("model", "tensor", "layer_group", "scheme"),
        area="kv",
        board="quantization",
    ),
    # -- is it slow for another reason?
    Alert(
        name="KvscopeBusyLowThroughput",
        severity="warning",
        expr=(
            f"{PER_FORWARD_SECOND} < {LOW_THROUGHPUT:g} * {PER_FORWARD_SECOND} offset 1d\n"
            f"and {_ON_MI} {FORWARD} > {BUSY:g}"
        ),
        hold="15m",
        keep_firing="10m",
        summary="The model computes all the time and yields half of yesterday's tokens.",
        description=(
            f"{_WHERE} spends more than {BUSY * 100:g} % of its time in forward passes and computes {{{{ $value | humanize }}}} tokens "
            f"for each second of them, less than {LOW_THROUGHPUT * 100:g} % of the rate at the same time yesterday."
        ),
        labels_kept=_MI,
        area="scheduling",
        board="hardware",
    ),
    # -- is a GPU the reason?
    Alert(
        name="KvscopeGPUMemoryErrors",
        severity="critical",
        expr=(f'increase({c.GPU_ECC.series}{{kind="uncorrected"}}[15m]) > 0\nor {c.GPU_REPAIR_FLAG.series} > 0'),
        hold="1m",
        keep_firing="15m",
        summary="A GPU has memory errors that are not corrected, or a repair that waits or failed.",
        description=(
            "GPU {{ $labels.gpu }} on {{ $labels.instance }}: {{ with $labels.flag }}memory repair {{ . }}{{ else }}"
            "{{ $value | humanize }} uncorrected memory errors in 15 minutes{{ end }}. Results computed meanwhile may be wrong."
        ),
        labels_kept=(*_GPU, "kind", "flag"),
        area="hardware",
        board="hardware",
    ),
    Alert(
        name="KvscopeGPULinkErrors",
        severity="warning",
        expr=(
            f"increase({c.GPU_NVLINK_FAULTS.series}[15m]) > 0\n"
            f"or rate({c.GPU_PCIE_REPLAYS.series}[5m]) > {PCIE_REPLAYS:g}"
        ),
        hold="5m",
        keep_firing="15m",
        summary="A link of a GPU loses packets.",
        description=(
            "GPU {{ $labels.gpu }} on {{ $labels.instance }}: {{ with $labels.kind }}{{ $value | humanize }} NVLink errors ({{ . }}) in 15 "
            "minutes{{ else }}{{ $value | humanize }} PCIe packets a second are sent again{{ end }}."
        ),
        labels_kept=(*_GPU, "kind"),
        area="hardware",
        board="hardware",
    ),
    Alert(
        name="KvscopeGPUUnhealthy",
        severity="warning",
        expr=f"{c.GPU_HEALTH.series} < {GPU_HEALTH:g}",
        hold="10m",
        keep_firing="10m",
        summary="The health of a GPU is low.",
        description=(
            "The health of GPU {{ $labels.gpu }} on {{ $labels.instance }} is {{ $value | humanizePercentage }} for ten minutes; the board "
            "Hardware lists its findings."
        ),
        labels_kept=_GPU,
        area="hardware",
        board="hardware",
    ),
    Alert(
        name="KvscopePeriodicStall",
        severity="warning",
        expr=(
            f"{STALL_PERIOD} > {PERIODIC_FLOOR:g}\nand {_ON_MI} {STALL_VARIATION} < {PERIODIC:g}\n"
            f"and {_ON_MI} {STALL_GAPS} >= {PERIODIC_GAPS}"
        ),
        hold="5m",
        keep_firing="5m",
        summary="Something stops the engine at regular times.",
        description=(
            f"The step loop of {_WHERE} stalls every {{{{ $value | humanizeDuration }}}}, more regularly than chance: in the last hour "
            f"at least {PERIODIC_GAPS} gaps between stalls vary by less than {PERIODIC * 100:g} %."
        ),
        labels_kept=_MI,
        area="scheduling",
        board="batching",
    ),
    # -- can the numbers be trusted?
    Alert(
        name="KvscopeLatencyOverflow",
        severity="warning",
        expr="\nor ".join(
            # a ratio of means: a mean of ratios weighs a quiet minute like a busy one, and is NaN for an hour after one without events
            f"(avg_over_time({overflow_rate(x)}[1h]) / (avg_over_time({events_name(x, ())}[1h]) > 0) > {OVERFLOW:g}"
            f" and {burn.INTERVAL_SECONDS} * sum_over_time({events_name(x, ())}[1h]) >= {x.min_events})"
            for x in o.LATENCY_OBJECTIVES
        ),
        hold="10m",
        keep_firing="10m",
        summary="Latencies lie above the highest bucket bound, where quantiles end.",
        description=(
            "{{ $value | humanizePercentage }} of the latencies of {{ $labels.model }} in the last hour are above the highest "
            f"finite bucket bound (more than {OVERFLOW * 100:g} %): their upper quantiles read too low."
        ),
        labels_kept=_M,
        area="sources",
        board="exporter",
    ),
    Alert(
        name="KvscopeTelemetryAnomalies",
        severity="warning",
        expr=f"model:kvscope_telemetry_anomalies:rate{WINDOW} > 0",
        hold="10m",
        keep_firing="10m",
        summary="The exporter refuses or corrects measurements.",
        description='{{ printf "%.2g" $value }} measurements a second of {{ $labels.model }} were refused or corrected for ten minutes.',
        labels_kept=_M,
        area="sources",
        board="exporter",
    ),
)
