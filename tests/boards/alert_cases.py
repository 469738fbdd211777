"""For each alert, what its series do when all is well and when it is not; promtool tests are made of these.

A counter is given as its growth in 15 seconds, a gauge as its value; None is no series at all. What an alert says is written out by hand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

State = float | None


@dataclass(frozen=True)
class Course:
    """One series: what it is while all is well, while the fault lasts, and with too little traffic to say."""

    series: str
    kind: Literal["counter", "gauge", "ramp", "clock"]
    well: State
    bad: State
    few: State = None  # as `bad`, at too little traffic


@dataclass(frozen=True, kw_only=True)
class AlertCase:
    """What an alert must do, in minutes: all is well for `settle`, then the fault begins. From its start, the alert is pending
    at `pending`, fires at `fires`, and says `description` at `steady`, when its value has come to rest. The fault ends there;
    `recovers` later the alert has ended.
    """

    alert: str
    courses: tuple[Course, ...]
    labels: Mapping[str, str]
    description: str
    settle: float
    pending: float
    fires: float
    steady: float
    recovers: float
    which: Mapping[str, str] = field(default_factory=dict)  # labels that choose among rules of one name
    #: Seconds between evaluations and samples; windows of days are tested at a coarser one.
    interval: int = 15
    #: Whether too little traffic must keep it silent.
    few: bool = True
    fires_without_series: bool = False


M, MI = 'model="m"', 'model="m",instance="a:1"'
MC = 'model="m",class="standard"'
GPU = 'gpu="0",uuid="GPU-aaaa",mig="",instance="a:1"'


_PAIRS = {
    # window: (severity, what `description` ends in, interval, and the minutes of: settle, pending, fires, steady, recovers)
    "1h": ("critical", "Above 14.4 for 1h and 5m, 2 % of it goes in an hour.", 15, (65, 20.5, 24, 70, 12)),
    "6h": ("critical", "Above 6 for 6h and 30m, 5 % of it goes in six hours.", 60, (365, 50, 66, 370, 60)),
    "1d": ("warning", "Above 3 for 1d and 2h, 10 % of it goes in a day.", 120, (1446, 100, 158, 1450, 172)),
    "3d": ("warning", "Above 1 for 3d and 6h, 10 % of it goes in three days.", 240, (4332, 152, 284, 4336, 444)),
}
_HOURS = {"1h": 1, "6h": 6, "1d": 24, "3d": 72}
_LATENCY = {
    "ttft": ("TTFT", "kvscope_time_to_first_token_seconds", "0.8", "requests", 30),
    "itl": ("ITL", "kvscope_inter_token_latency_seconds", "0.1", "tokens", 1000),
    "e2e": ("Duration", "kvscope_request_duration_seconds", "20.0", "requests", 30),
}


def _burns(objective: str) -> Iterator[AlertCase]:
    """An objective is missed by 50 times what it allows: the four alerts, each at a traffic below its floor too."""
    for window, (severity, ending, interval, (settle, pending, fires, steady, recovers)) in _PAIRS.items():
        if objective in _LATENCY:
            title, family, threshold, events, floor = _LATENCY[objective]
            rate, few = 40.0 if events == "tokens" else 10.0, 0.6 * floor / (_HOURS[window] * 240)
            courses = (
                Course(f'{family}_bucket{{{MC},instance="a:1",le="{threshold}"}}', "counter", rate, rate / 2, 0),
                Course(f'{family}_bucket{{{MC},instance="a:1",le="+Inf"}}', "counter", rate, rate, few),
            )
            of = "" if events == "requests" else f"{events} of "
            what = f"too many of the {of}standard requests to m took longer than the objective allows"
        else:
            title, few = "Availability", 0.6 * 30 / (_HOURS[window] * 240)
            courses = (
                Course(f'kvscope_requests_total{{{MC},instance="a:1",outcome="stop"}}', "counter", 10, 9.5, 0),
                Course(f'kvscope_requests_total{{{MC},instance="a:1",outcome="error"}}', "counter", None, 0.5, few),
                Course(f'kvscope_requests_total{{{MC},instance="a:1",outcome="abort"}}', "counter", 5, 5, 0),
                Course(f'kvscope_requests_total{{{MC},instance="a:1",outcome="invalid"}}', "counter", 5, 5, 0),
            )
            what = "too many of the standard requests to m failed, were refused or ran out of time"
        yield AlertCase(
            alert=f"Kvscope{title}BudgetBurn",
            courses=courses,
            labels={"severity": severity, "model": "m", "class": "standard", "objective": objective, "window": window},
            description=f"Over {window} the error budget burns 50 times as fast as it may: {what}. {ending}",
            which={"window": window},
            interval=interval,
            settle=settle, pending=pending, fires=fires, steady=steady, recovers=recovers,
        )  # fmt: skip


def _blocks(active: float, bad: float, few: State = None) -> tuple[Course, ...]:
    return (
        Course(f'kvscope_kv_blocks{{{MI},state="active"}}', "gauge", active, bad, few),
        Course(f"kvscope_kv_capacity_blocks{{{MI}}}", "gauge", 100, 100, 100),
    )


_FRAGMENTED = (
    Course(f"kvscope_kv_largest_free_run_blocks{{{MI}}}", "gauge", 40, 10, 10),
    Course(f'kvscope_kv_blocks{{{MI},state="free"}}', "gauge", 30, 30, 30),
    Course(f'kvscope_kv_blocks{{{MI},state="evictable"}}', "gauge", 20, 20, 20),
    Course(f"kvscope_kv_layout_fallbacks_total{{{MI}}}", "counter", 0, 5, 0.05),
    Course(f'kvscope_kv_lookups_total{{{MI},length_bucket="0-2K"}}', "counter", 10, 10, 0.1),
)
_CARD = {"gpu": "0", "uuid": "GPU-aaaa", "instance": "a:1"}
_REPLICA = {"model": "m", "instance": "a:1"}

CASES: tuple[AlertCase, ...] = (
    *(case for objective in (*_LATENCY, "availability") for case in _burns(objective)),
    AlertCase(
        alert="KvscopeSourceStale",
        courses=(
            Course('up{job="kvscope",instance="a:1"}', "gauge", 1, 1),
            Course(f'kvscope_last_update_timestamp_seconds{{{MI},source="engine"}}', "clock", 1, 0),
        ),
        labels={"severity": "critical", **_REPLICA},
        description="The telemetry of m on a:1 last wrote 10m 0s ago; values older than 60 s say nothing about now, and the other alerts are blind.",
        settle=10, pending=2, fires=4, steady=10, recovers=3, few=False, fires_without_series=True,
    ),
    AlertCase(
        alert="KvscopeSchedulerStuck",
        courses=(
            *_blocks(10, 10),
            Course(f'kvscope_requests_waiting{{{MC},instance="a:1"}}', "gauge", 0, 5),
            Course(f'kvscope_step_tokens_total{{{MI},phase="decode"}}', "counter", 100, 0),
            Course(f'kvscope_last_update_timestamp_seconds{{{MI},source="engine"}}', "clock", 1, 1),
        ),
        labels={"severity": "critical", **_REPLICA},
        description="5 requests to m on a:1 wait, the KV cache has room, and no token was computed within the last minute.",
        settle=10, pending=2.5, fires=4, steady=6, recovers=3, few=False,
    ),
    AlertCase(
        alert="KvscopeKVCacheExhausted",
        courses=(*_blocks(50, 97, 97), Course(f'kvscope_requests_waiting{{{MC},instance="a:1"}}', "gauge", 0, 3, 0)),
        labels={"severity": "warning", **_REPLICA},
        description="3 requests to m on a:1 wait: running ones hold more than 95 % of its KV blocks, or leave fewer than one of them holds on average.",
        settle=10, pending=1, fires=3, steady=4, recovers=7,
    ),
    AlertCase(
        alert="KvscopeKVCacheExhausted",
        # two that hold 35 % each leave 30 %; of three that hold 25 % each one more fits
        courses=(
            *_blocks(70, 70, 75),
            Course(f'kvscope_requests_running{{{MC},instance="a:1"}}', "gauge", 2, 2, 3),
            Course(f'kvscope_requests_waiting{{{MC},instance="a:1"}}', "gauge", 0, 8, 8),
        ),
        labels={"severity": "warning", **_REPLICA},
        description="8 requests to m on a:1 wait: running ones hold more than 95 % of its KV blocks, or leave fewer than one of them holds on average.",
        settle=10, pending=1, fires=3, steady=4, recovers=7,
    ),
    AlertCase(
        alert="KvscopeQueueGrowing",
        courses=(Course(f'kvscope_requests_waiting{{{MC},instance="a:1"}}', "ramp", 2, 1, 0.01),),
        labels={"severity": "warning", **_REPLICA},
        description="The queue of m on a:1 grows by 40 requests in 10 minutes.",
        settle=15, pending=5, fires=9, steady=14, recovers=7,
    ),
    AlertCase(
        alert="KvscopePreemptionStorm",
        courses=(
            Course(f'kvscope_preemptions_total{{{MI},reason="kv_exhausted"}}', "counter", 0, 12, 0.1),
            Course(f'kvscope_requests_total{{{MC},instance="a:1",outcome="stop"}}', "counter", 15, 15, 0.1),
        ),
        labels={"severity": "warning", **_REPLICA},
        description="m on a:1 preempts 0.8 times for each request that ends; above 0.5 it computes much twice.",
        settle=10, pending=5, fires=10, steady=12, recovers=10,
    ),
    AlertCase(
        alert="KvscopeHitRateDrop",
        courses=(
            Course(f'kvscope_kv_lookups_total{{{MI},length_bucket="2K-8K"}}', "counter", 10, 10, 0.3),
            Course(f'kvscope_kv_queried_tokens_total{{{MI},length_bucket="2K-8K"}}', "counter", 1000, 1000, 30),
            Course(f'kvscope_kv_hit_tokens_total{{{MI},length_bucket="2K-8K",tier="device"}}', "counter", 500, 100, 3),
        ),
        labels={"severity": "warning", "model": "m", "length_bucket": "2K-8K"},
        description=(
            "10% of the tokens of 2K-8K prompts to m come from cache in the last 30 minutes, less than 60 % of the rate at the "
            "same time yesterday."
        ),
        settle=1500, pending=22, fires=30, steady=40, recovers=35, interval=60,
    ),
    AlertCase(
        alert="KvscopeKVFragmented",
        courses=_FRAGMENTED,
        labels={"severity": "warning", **_REPLICA},
        description=(
            "80% of the allocatable blocks of m on a:1 lie outside the longest run, more than 20 % of the requests fall back to "
            "paged blocks, and nothing compacts."
        ),
        settle=10, pending=4, fires=8, steady=9, recovers=12,
    ),
    AlertCase(
        alert="KvscopeCompactionBehind",
        courses=(*_FRAGMENTED, Course(f'kvscope_kv_moved_blocks_total{{{MI},reason="compaction"}}', "counter", 0, 5, 5)),
        labels={"severity": "warning", **_REPLICA},
        description=(
            "80% of the allocatable blocks of m on a:1 lie outside the longest run for ten minutes of compaction, and more than "
            "20 % of the requests still fall back to paged blocks."
        ),
        settle=10, pending=8, fires=13, steady=14, recovers=12,
    ),
    AlertCase(
        alert="KvscopeQuantizationError",
        courses=(
            Course(f'kvscope_kv_quantization_squared_error_total{{{MI},tensor="key",layer_group="0-3",scheme="int8"}}', "counter", 0.1, 2.5),
            Course(f'kvscope_kv_quantization_squared_signal_total{{{MI},tensor="key",layer_group="0-3",scheme="int8"}}', "counter", 1000, 1000),
        ),
        labels={"severity": "warning", "model": "m", "tensor": "key", "layer_group": "0-3", "scheme": "int8"},
        description="The key tensors of layers 0-3 of m in int8 are 5% from exact (relative RMS; limit 2 %).",
        settle=10, pending=8, fires=12, steady=14, recovers=18, few=False,
    ),
    AlertCase(
        alert="KvscopeBusyLowThroughput",
        courses=(
            Course(f'kvscope_step_tokens_total{{{MI},phase="decode"}}', "counter", 1500, 300, 1),
            Course(f'kvscope_step_seconds_total{{{MI},component="forward_decode"}}', "counter", 13.5, 13.5, 0.1),
            Course(f'kvscope_step_seconds_total{{{MI},component="idle"}}', "counter", 1.5, 1.5, 14.9),
        ),
        labels={"severity": "warning", **_REPLICA},
        description=(
            "m on a:1 spends more than 80 % of its time in forward passes and computes 22.22 tokens for each second of them, less "
            "than 50 % of the rate at the same time yesterday."
        ),
        settle=1460, pending=15, fires=21, steady=23, recovers=16, interval=60,
    ),
    AlertCase(
        alert="KvscopeGPUMemoryErrors",
        courses=(Course(f'kvscope_gpu_ecc_errors_total{{{GPU},kind="uncorrected"}}', "counter", 0, 1),),
        labels={"severity": "critical", **_CARD, "kind": "uncorrected"},
        description="GPU 0 on a:1: 60 uncorrected memory errors in 15 minutes. Results computed meanwhile may be wrong.",
        settle=20, pending=0.5, fires=2, steady=18, recovers=32, few=False,
    ),
    AlertCase(
        alert="KvscopeGPULinkErrors",
        courses=(Course(f"kvscope_gpu_pcie_replays_total{{{GPU}}}", "counter", 0, 45, 1),),
        labels={"severity": "warning", **_CARD},
        description="GPU 0 on a:1: 3 PCIe packets a second are sent again.",
        settle=10, pending=4, fires=8, steady=9, recovers=20,
    ),
    AlertCase(
        alert="KvscopeGPUUnhealthy",
        courses=(Course(f"kvscope_gpu_health_ratio{{{GPU}}}", "gauge", 0.9, 0.25),),
        labels={"severity": "warning", **_CARD},
        description="The health of GPU 0 on a:1 is 25% for ten minutes; the board Hardware lists its findings.",
        settle=10, pending=5, fires=11, steady=12, recovers=12, few=False,
    ),
    AlertCase(
        alert="KvscopePeriodicStall",
        # 60 s apart with a variation of 0.1; chance gaps vary by 1: their mean of squares is twice the square of their mean
        courses=(
            Course(f"kvscope_stall_gaps_total{{{MI}}}", "counter", 0.25, 0.25, 0.02),
            Course(f"kvscope_stall_gap_seconds_total{{{MI}}}", "counter", 15, 15, 1.2),
            Course(f"kvscope_stall_gap_squared_seconds_total{{{MI}}}", "counter", 1800, 909, 72.72),
        ),
        labels={"severity": "warning", **_REPLICA},
        description=(
            "The step loop of m on a:1 stalls every 1m 0s, more regularly than chance: in the last hour at least 8 gaps between stalls "
            "vary by less than 30 %."
        ),
        settle=65, pending=58, fires=63, steady=66, recovers=20,
    ),
    AlertCase(
        alert="KvscopeLatencyOverflow",
        courses=(
            Course(f'kvscope_time_to_first_token_seconds_bucket{{{MC},instance="a:1",le="640.0"}}', "counter", 10, 9, 0),
            Course(f'kvscope_time_to_first_token_seconds_bucket{{{MC},instance="a:1",le="+Inf"}}', "counter", 10, 10, 0.05),
        ),
        labels={"severity": "warning", "model": "m"},
        description=(
            "10% of the latencies of m in the last hour are above the highest finite bucket bound (more than 1 %): their upper "
            "quantiles read too low."
        ),
        settle=65, pending=12, fires=21, steady=70, recovers=72,
    ),
    AlertCase(
        alert="KvscopeTelemetryAnomalies",
        courses=(Course(f'kvscope_telemetry_anomalies_total{{{MI},reason="clock_step"}}', "counter", 0, 1),),
        labels={"severity": "warning", "model": "m"},
        description="0.067 measurements a second of m were refused or corrected for ten minutes.",
        settle=10, pending=5, fires=12, steady=14, recovers=17, few=False,
    ),
    AlertCase(
        alert="KvscopeKVExhaustionPredicted",
        courses=(
            Course('kvscope_forecast_breach_probability_ratio{instance="f:1",model="m",signal="kv_usage",limit="kv_exhaustion",horizon="60m"}', "gauge", 0.1, 0.75, 0.4),
            Course('kvscope_forecast_origin_timestamp_seconds{instance="f:1",model="m",signal="kv_usage"}', "clock", 1, 1, 1),
            *_blocks(50, 80, 80),
        ),
        labels={"severity": "warning", "model": "m", "signal": "kv_usage", "limit": "kv_exhaustion", "horizon": "60m"},
        description=(
            "The newest forecast gives 75% for more than 95 % of the KV blocks of m being held at some time of the hour from the end of its data (up to 30 "
            "minutes ago); for 11 minutes forecasts have given at least 50 %."
        ),
        settle=15, pending=10, fires=12, steady=14, recovers=12,
    ),
    AlertCase(
        alert="KvscopeKVRoomPredictedGone",
        courses=(
            Course('kvscope_forecast_breach_probability_ratio{instance="f:1",model="m",signal="kv_free_requests",limit="kv_room",horizon="60m"}', "gauge", 0.1, 0.75, 0.4),
            Course('kvscope_forecast_origin_timestamp_seconds{instance="f:1",model="m",signal="kv_free_requests"}', "clock", 1, 1, 1),
        ),
        labels={"severity": "warning", "model": "m", "signal": "kv_free_requests", "limit": "kv_room", "horizon": "60m"},
        description=(
            "The newest forecast gives 75% for the free KV of m being too small for another request of the present mean length at some time of the hour "
            "from the end of its data (up to 30 minutes ago); for 11 minutes forecasts have given at least 50 %."
        ),
        settle=15, pending=10, fires=12, steady=14, recovers=12,
    ),
    AlertCase(
        alert="KvscopeForecastStale",
        courses=(
            Course('up{job="kvscope-forecast",instance="f:1"}', "gauge", 1, 1),
            Course('kvscope_forecast_last_run_timestamp_seconds{instance="f:1",job="kvscope-forecast"}', "clock", 1, 0),
        ),
        labels={"severity": "warning", "instance": "f:1"},
        description=(
            "f:1 made its newest forecasts too long ago, or does not answer (seconds since then, or 0 for no answer: 2400): what the board "
            "Forecast shows is of the past, and alerts on forecasts are blind."
        ),
        settle=10, pending=33, fires=36, steady=40, recovers=7, few=False,
    ),
    AlertCase(
        alert="KvscopeForecastCoverageOff",
        courses=(
            Course('kvscope_forecast_coverage_ratio{instance="f:1",model="m",signal="queue",forecaster="auto",band="95"}', "gauge", 0.95, 0.8, 0.5),
            Course('kvscope_forecast_scored_targets{instance="f:1",model="m",signal="queue",forecaster="auto"}', "gauge", 138, 138, 24),
            Course('kvscope_forecast_info{instance="f:1",model="m",signal="queue",forecaster="auto",status="own",history="real"}', "gauge", 1, 1, 1),
        ),
        labels={"severity": "warning", "model": "m", "signal": "queue", "forecaster": "auto", "band": "95"},
        description="Of the last 24 hours of queue of m, 80% lay inside the 95 % band of auto (alert below 85 %).",
        settle=10, pending=20, fires=32, steady=40, recovers=32,
    ),
)  # fmt: skip
