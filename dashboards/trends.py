"""The board "Trends": how latency follows load, what changed since last week, and how much room is left."""

from __future__ import annotations

from alerts import symptoms
from dashboards.frame import frame
from dashboards.panels import RED, Board, Json, Line, Query, Section, XYChart
from dashboards.shared import NO_BOUND, NO_TRAFFIC, TTFT_BURN, about, known, limits, lines, query, signal
from observability import objectives as o

_QPS = "model:kvscope_requests_received:rate5m"
_NO_LAST_WEEK = "No values from a week ago"


def _against_load(objective: o.LatencyObjective, title: str) -> XYChart:
    organize: Json = {
        "excludeByName": {},
        "includeByName": {},
        "indexByName": {},
        "renameByName": {"requests a second": "Requests a second", "p99": f"P99 {objective.title.lower()}"},
    }
    return XYChart(
        **about(
            TTFT_BURN,
            title,
            f"Each point is one moment of the time range: requests per second against p99 of {objective.title.lower()}. Flat, then a knee, "
            "then a wall: the load at the knee is the capacity at the objective (red). Points far above the curve at low load are not "
            "about load: look at the board P99 at that time.",
        ),
        targets=[
            Query(expr=f"sum({signal(_QPS)})", legendFormat="requests a second"),
            Query(expr=f"max({known(signal(f'model:{objective.family.name}:p99_5m'))})", legendFormat="p99"),
        ],
        transformations=[
            {"id": "joinByField", "options": {"byField": "Time", "mode": "inner"}},
            {"id": "organize", "options": organize},
        ],
        unit="s",
        min=0,
        thresholds=[(None, "transparent"), (objective.threshold_seconds, RED)],
        when_empty=NO_TRAFFIC,
    )


def load() -> Section:
    """Latency against load, as a cloud of points."""
    return Section(
        "How does latency follow load?",
        [
            Line(
                10,
                [
                    _against_load(o.TTFT, "At what load do first tokens get late?"),
                    _against_load(o.E2E, "At what load do requests get slow?"),
                ],
            )
        ],
    )


def _week(name: str, title: str, text: str, unit: str, alert: str = TTFT_BURN, **fields: object) -> object:
    return lines(
        alert,
        title,
        text + " Dashed in grey: the same time a week ago. Nothing is drawn for last week until there is one.",
        unit,
        query(known(signal(name)), "{{model}}"),
        query(f"{signal(name)} offset 1w > -1", "{{model}} last week"),
        overrides=[
            {
                "matcher": {"id": "byRegexp", "options": "/ last week$/"},
                "properties": [
                    {"id": "custom.lineStyle", "value": {"dash": [4, 4], "fill": "dash"}},
                    {"id": "color", "value": {"fixedColor": "#808080", "mode": "fixed"}},
                ],
            }
        ],
        when_empty=_NO_LAST_WEEK,
        **fields,
    )


def week_over_week() -> Section:
    """Load, latency, hits and throughput against the same time last week."""
    panels = [
        _week(_QPS, "Is there more load than last week?", "Requests received per second, by model.", "reqps"),
        _week(
            f"model:{o.TTFT.family.name}:p99_5m",
            "Are first tokens later than last week?",
            "p99 of time to first token over 5 minutes, by model.",
            "s",
            **limits((o.TTFT.threshold_seconds, RED)),
        ),
        _week(
            "model:kvscope_kv_hit:ratio_rate5m",
            "Does the cache save what it saved last week?",
            "Prompt tokens served from cache over tokens looked up, by model.",
            "percentunit",
            "KvscopeHitRateDrop",
            max=1,
        ),
        _week(
            "model:kvscope_generation_tokens:rate5m",
            "Does it generate what it generated last week?",
            "Tokens generated per second, by model.",
            "si:tok/s",
        ),
    ]
    return Section("What changed since last week?", [Line(9, panels)])


def _hour(name: str) -> str:
    return f"sum by (model) (sum_over_time({signal(name)}[1h]))"


def capacity() -> Section:
    """Room that is left: of KV, of time."""
    kv = lines(
        "KvscopeKVCacheExhausted",
        "How much KV room is left at the peaks?",
        "Most that running requests held of the KV pool in each hour, by model. The trend of the peaks, not of the mean, says when the pool "
        "is too small.",
        "percentunit",
        query(f"max_over_time({signal('model:kvscope_kv_usage:ratio')}[1h])", "{{model}}"),
        max=1,
        when_empty=NO_BOUND,
        **limits((o.KV_USAGE_CRITICAL, RED)),
    )
    time = lines(
        "KvscopeBusyLowThroughput",
        "How much computing time is left at the peaks?",
        "Most time in forward passes in each hour, busiest instance by model. Near 100 %: more load is more queue.",
        "percentunit",
        query(f"max by (model) (max_over_time({signal(symptoms.FORWARD)}[1h]))", "{{model}}"),
        max=1,
        **limits((symptoms.BUSY, RED)),
    )
    efficiency = lines(
        "KvscopeBusyLowThroughput",
        "Does computing become more or less efficient?",
        "Tokens of an hour for each second of its forward passes, by model. A slow fall: contexts grow or batches shrink.",
        "si:tok/s",
        # sums, not means: a replica that came or went counts for as long as it was there
        query(f"{_hour('model_phase:kvscope_step_tokens:rate5m')} / ({_hour(symptoms.FORWARD)} > 0)", "{{model}}"),
    )
    return Section("How much room is left?", [Line(8, [kv, time, efficiency])])


def board() -> Board:
    return frame(
        "trends", "How does latency follow load, and what changed?", [load(), week_over_week(), capacity()],
        refresh="5m", span="now-7d",
    )  # fmt: skip
