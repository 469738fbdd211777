"""Rows about latency: the first row "Are we well?", the make-up of slow requests, and the quantiles."""

from __future__ import annotations

from alerts import rules
from dashboards.panels import (
    GREEN,
    PLAIN,
    RED,
    YELLOW,
    BarGauge,
    Heatmap,
    Json,
    Line,
    Query,
    Section,
    Stat,
    Table,
    TimeSeries,
    color_overrides,
)
from dashboards.shared import (
    COMPONENT_COLORS,
    KV_EXHAUSTED,
    NAMED_LEGEND,
    NO_BOUND,
    NO_TRAFFIC,
    OF_CLASS,
    STALE,
    STATE_COLORS,
    TTFT_BURN,
    WITH_EXEMPLARS,
    about,
    buckets,
    known,
    limits,
    lines,
    quantile,
    query,
    signal,
    stack,
)
from observability import objectives as o
from observability.objectives import LatencyObjective

BUDGET = round(1 - o.TTFT.target, 9)
STEPS = tuple[float | None, str]


def _stat(alert: str, title: str, text: str, expr: str, unit: str, *steps: STEPS, **fields: object) -> Stat:
    return Stat(
        **about(alert, title, text),
        targets=[query(expr, title)],
        unit=unit,
        thresholds=list(steps),
        color={"mode": "thresholds"},
        min=0,
        **fields,
    )


def _p99_stat(objective: LatencyObjective, title: str) -> Stat:
    return _stat(
        TTFT_BURN,
        title,
        f"99th percentile of {objective.title.lower()} over the last 5 minutes, worst of the chosen models. The objective "
        f"is {objective.target * 100:g} % within {objective.threshold_seconds:g} s. Red: read the next row, which says "
        "where the slow requests spent their time.",
        f"max({known(signal(f'model:{objective.family.name}:p99_5m'))})",
        "s",
        (None, GREEN),
        (objective.threshold_seconds, RED),
        when_empty=NO_TRAFFIC,
    )


def well() -> Section:
    """Eight numbers whose colours are the alerts' thresholds."""
    burn = _stat(
        TTFT_BURN,
        "Does the TTFT budget burn?",
        "Share of requests over the TTFT objective in the last hour, divided by the share allowed, worst of the chosen "
        f"models. 1 spends the budget of 30 days in 30 days; {rules.BURN_RATE:g} spends 2 % of it in an hour and pages "
        f"({TTFT_BURN}).",
        f"max({known(signal(rules.TTFT_ERROR_RATIO_LONG))}) / {BUDGET:g}",
        "suffix: x",
        (None, GREEN),
        (1, YELLOW),
        (rules.BURN_RATE, RED),
        decimals=1,
        when_empty="No requests in the last hour",
    )
    usage = _stat(
        KV_EXHAUSTED,
        "How full is the KV pool?",
        "KV blocks held by running requests over the pool's blocks, fullest instance of the chosen models. Cached blocks "
        f"that nobody holds do not count. Above {o.KV_USAGE_CRITICAL * 100:g} % with requests waiting, {KV_EXHAUSTED} "
        "fires. Absent for an unbounded pool.",
        f"max({signal(rules.INSTANCE_KV_USAGE)})",
        "percentunit",
        (None, GREEN),
        (o.KV_USAGE_WARNING, YELLOW),
        (o.KV_USAGE_CRITICAL, RED),
        decimals=0,
        max=1,
        when_empty=NO_BOUND,
    )
    hits = _stat(
        TTFT_BURN,
        "How much does the cache save?",
        "Prompt tokens served from cache over prompt tokens looked up, last 5 minutes, lowest of the chosen models. Each "
        "request counts once, however often scheduling retries it. No value is good in general: look for a fall, and "
        "compare with the row on KV cache hits.",
        f"min({known(signal('model:kvscope_kv_hit:ratio_rate5m'))})",
        "percentunit",
        (None, PLAIN),
        decimals=1,
        max=1,
        when_empty=NO_TRAFFIC,
    )
    waiting = _stat(
        KV_EXHAUSTED,
        "Do requests wait?",
        "Requests queued, waiting for KV blocks or preempted, summed over the chosen models. A standing queue is time to "
        "first token in the making; the next row says for what they wait.",
        f"sum({signal('model:kvscope_requests_waiting:sum')})",
        "short",
        (None, PLAIN),
        decimals=0,
    )
    age = _stat(
        STALE,
        "Are these numbers fresh?",
        "Seconds since the source that stopped longest ago last wrote its values, over all instances of the chosen "
        f"models. Above {o.STALE_AFTER_SECONDS:g} s nothing on this board says anything about now, and {STALE} fires. An "
        "idle engine still writes.",
        f"max({signal(rules.INSTANCE_AGE)})",
        "s",
        (None, GREEN),
        (o.STALE_AFTER_SECONDS, RED),
        decimals=1,
    )
    p99 = [
        _p99_stat(o.TTFT, "Do first tokens come in time? (P99)"),
        _p99_stat(o.ITL, "Do tokens flow evenly? (P99)"),
        _p99_stat(o.E2E, "Do requests end in time? (P99)"),
    ]
    return Section("Are we well?", [Line(4, [*p99, burn]), Line(4, [usage, hits, waiting, age])])


# -- make-up of slow requests ---------------------------------------------------------------------------------------


def _tail(percent: str, by: str) -> str:
    return f"sum by ({by}) ({signal(f'model_state_component:kvscope_request_phase_seconds:{percent}_tail_mean5m')})"


_TAIL = (
    "Mean seconds of the slowest 1 % of served requests over the last 5 minutes, split by {split}. The parts add up to the "
    "mean latency of those requests: each of their seconds is in one state, and the engine does one thing in it. "
)


def _compare() -> Table:
    columns = {"A": "Slowest half", "B": "Slowest 10 %", "C": "Slowest 1 %"}
    names = {"state": "State", "component": "Engine does", **{f"Value #{ref}": title for ref, title in columns.items()}}
    organize: Json = {
        "excludeByName": {"Time": True},
        "includeByName": {},
        "indexByName": {name: place for place, name in enumerate(names)},
        "renameByName": names,
    }
    return Table(
        **about(
            TTFT_BURN,
            "What do slow requests spend that typical ones do not?",
            "Mean seconds by state and component of the slowest half, the slowest 10 % and the slowest 1 %. A part that "
            "grows from left to right makes the tail; one that stays level is the work itself and does not explain P99.",
        ),
        targets=[
            Query(expr=f"{_tail(percent, 'state, component')} > 0", format="table", instant=True)
            for percent in ("p50", "p90", "p99")
        ],
        transformations=[
            {"id": "merge", "options": {}},
            {"id": "organize", "options": organize},
            {"id": "sortBy", "options": {"fields": {}, "sort": [{"desc": True, "field": columns["C"]}]}},
        ],
        unit="s",
    )


def makeup() -> Section:
    """P99 by state, by component, the largest parts, and the comparison with typical requests."""
    by_state = stack(
        TTFT_BURN,
        "Which states hold the slowest 1 %?",
        _TAIL.format(split="the state of the request")
        + "Queued or kv_wait: too little capacity; see the KV pool. Preempted: the pool is overcommitted. Prefill: long "
        "prompts or few cache hits.",
        "s",
        query(_tail("p99", "state"), "{{state}}"),
        overrides=color_overrides(STATE_COLORS),
        options=NAMED_LEGEND,
    )
    by_component = stack(
        TTFT_BURN,
        "What does the engine do meanwhile?",
        _TAIL.format(split="what the engine did meanwhile")
        + "forward_prefill inside the time of a decoding request is interference by other prompts; idle means that the "
        "engine did not run.",
        "s",
        query(_tail("p99", "component"), "{{component}}"),
        overrides=color_overrides(COMPONENT_COLORS),
        options=NAMED_LEGEND,
    )
    largest = BarGauge(
        **about(
            TTFT_BURN,
            "What holds the slowest 1 % now?",
            "The eight largest parts of the slowest 1 %, mean seconds a request, as state / component. Start with the "
            "longest bar: its state names the resource, its component what used it.",
        ),
        targets=[
            Query(
                expr=f"sort_desc(topk(8, {_tail('p99', 'state, component')} > 0))",
                instant=True,
                legendFormat="{{state}} / {{component}}",
            )
        ],
        unit="s",
        min=0,
        color={"mode": "fixed", "fixedColor": "blue"},
    )
    return Section(
        "$model: where do slow requests spend their time?",
        [Line(9, [by_state, by_component]), Line(9, [largest, _compare()])],
        repeat_for="model",
    )


# -- quantiles ------------------------------------------------------------------------------------------------------


def _quantiles(objective: LatencyObjective, title: str) -> TimeSeries:
    family, selection = objective.family, "p99 of selection"
    exemplars = family in WITH_EXEMPLARS
    dashed: Json = {
        "matcher": {"id": "byName", "options": selection},
        "properties": [
            {"id": "custom.lineStyle", "value": {"dash": [4, 4], "fill": "dash"}},
            {"id": "color", "value": {"fixedColor": "purple", "mode": "fixed"}},
        ],
    }
    return lines(
        TTFT_BURN,
        title,
        f"{objective.title}: p50, p90 and p99 over 5 minutes of all classes and instances, and (dashed, at the board's own "
        f"resolution) p99 of the classes and instances chosen above{', with exemplars' if exemplars else ''}. The red line is the objective of "
        f"{objective.threshold_seconds:g} s. {family.help} When p99 leaves p90 behind, few requests suffer: look at the "
        "slowest 1 %. When all rise together, the engine is short of capacity.",
        "s",
        *(query(known(signal(f"model:{family.name}:{p}_5m")), p) for p in ("p50", "p90", "p99")),
        Query(expr=known(quantile(0.99, family)), legendFormat=selection, exemplar=exemplars),
        when_empty=NO_TRAFFIC,
        overrides=[*color_overrides({"p50": "green", "p90": "yellow", "p99": "red"}), dashed],
        **limits((objective.threshold_seconds, RED)),
    )


def latency() -> Section:
    """TTFT, ITL and request duration, how many miss their objective, and how far the quantiles can be trusted."""

    def ratios(kind: str) -> list[Query]:
        names = {x.title: f"model:{x.family.name}:{kind}_ratio_rate5m" for x in o.LATENCY_OBJECTIVES}
        return [query(known(signal(name)), title) for title, name in names.items()]

    over = lines(
        TTFT_BURN,
        "How many requests miss their objective?",
        "Share of first tokens, inter-token gaps and requests slower than their objective, over 5 minutes; counted at a "
        f"bucket bound, so exact. The red line is what the objectives allow; {TTFT_BURN} compares the first-token line "
        f"with {rules.BURN_RATE:g} times as much.",
        "percentunit",
        *ratios("error"),
        when_empty=NO_TRAFFIC,
        **limits((BUDGET, RED)),
    )
    overflow = lines(
        TTFT_BURN,
        "Can the quantiles be trusted?",
        "Share of measurements above the highest bucket bound (the +Inf bucket). Above 1 % the p99 shown is a floor, not a "
        "value: the real one is higher than the highest bound.",
        "percentunit",
        *ratios("overflow"),
        when_empty=NO_TRAFFIC,
        **limits((0.01, RED)),
    )
    crowds = Heatmap(
        **about(
            TTFT_BURN,
            "Is time to first token one crowd or several?",
            "First tokens by bucket of their latency, of the chosen classes and instances. Two bands mean two kinds of "
            "request (cache hit and miss, short and long prompt): split by class, or compare with the hit rate. Points are "
            "exemplars.",
        ),
        targets=buckets(o.TTFT.family, OF_CLASS),
        unit="short",
        options={"yAxis": {"unit": "s"}},
    )
    return Section(
        "$model: latency",
        [
            Line(
                9,
                [
                    _quantiles(o.TTFT, "How long until the first token?"),
                    _quantiles(o.ITL, "How long between tokens?"),
                    _quantiles(o.E2E, "How long until the last token?"),
                ],
            ),
            Line(8, [over, overflow, crowds]),
        ],
        repeat_for="model",
    )
