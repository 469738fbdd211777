"""The board "P99": where the slowest requests spend their time, over time and against typical ones; latency and its split."""

from __future__ import annotations

from collections.abc import Callable

from alerts import burn, symptoms
from dashboards.frame import frame
from dashboards.panels import (
    RED,
    BarGauge,
    Board,
    Heatmap,
    Json,
    Line,
    Query,
    Section,
    Table,
    TimeSeries,
    color_overrides,
)
from dashboards.shared import (
    COMPONENT_COLORS,
    KV_EXHAUSTED,
    LENGTH_COLORS,
    NAMED_LEGEND,
    NO_TENANTS,
    NO_TRAFFIC,
    OF_CLASS,
    STATE_COLORS,
    TTFT_BURN,
    WITH_EXEMPLARS,
    about,
    buckets,
    known,
    limits,
    lines,
    quantile_now,
    query,
    signal,
    stack,
    worst_p99,
)
from observability import catalog as c
from observability import objectives as o
from observability.objectives import LatencyObjective
from observability.signals import share_name, tenant_share_name

BUDGET = round(1 - o.TTFT.target, 9)


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
    legend: Json = {"legend": {**NAMED_LEGEND["legend"], "sortBy": "Name", "sortDesc": False}}
    lengths = stack(
        TTFT_BURN,
        "Which prompt lengths are the slowest 1 %?",
        "Share of the slowest 1 % of served requests by prompt length; adds up to 100 %. One length far above its share of the traffic (panel "
        "on prompt lengths, board KV cache): look at its hit rate. Shares like the traffic's: length is not the reason.",
        "percentunit",
        query(signal("model_length_bucket:kvscope_request_length_phase_requests:p99_tail_mean5m"), "{{length_bucket}}"),
        overrides=color_overrides(LENGTH_COLORS),
        options=legend,
        max=1,
        when_empty=NO_TRAFFIC,
    )
    length_seconds = stack(
        TTFT_BURN,
        "How much of the slowest 1 % does each length take?",
        "Mean latency of the slowest 1 % of served requests, split by prompt length: adds up to the same seconds as the split by state above. "
        "A length that is few of the requests and most of the seconds holds the tail alone.",
        "s",
        query(signal("model_length_bucket:kvscope_request_length_phase_seconds:p99_tail_mean5m"), "{{length_bucket}}"),
        overrides=color_overrides(LENGTH_COLORS),
        options=legend,
        when_empty=NO_TRAFFIC,
    )
    return Section(
        "$model: where do slow requests spend their time?",
        [Line(9, [by_state, by_component]), Line(9, [largest, _compare()]), Line(8, [lengths, length_seconds])],
        repeat_for="model",
    )


def _quantiles(objective: LatencyObjective, title: str) -> TimeSeries:
    family, selection = objective.family, "worst p99 of selection"
    exemplars = family in WITH_EXEMPLARS
    now = Query(expr=known(quantile_now(0.99, family)), legendFormat="p99 now", exemplar=True)
    dashed: list[Json] = [
        {
            "matcher": {"id": "byName", "options": name},
            "properties": [
                {"id": "custom.lineStyle", "value": {"dash": dash, "fill": "dash"}},
                {"id": "color", "value": {"fixedColor": "purple", "mode": "fixed"}},
            ],
        }
        for name, dash in ((selection, [4, 4]), ("p99 now", [1, 6]))
    ]
    return lines(
        TTFT_BURN,
        title,
        f"{objective.title}: p50, p90 and p99 over 5 minutes of all classes and instances, and (dashed) p99 of the slowest of the "
        f"classes and instances chosen above{'; the dotted line is p99 of all chosen at the right edge, and the points are their exemplars' if exemplars else ''}. The red line is the objective of "
        f"{objective.threshold_seconds:g} s. {family.help} When p99 leaves p90 behind, few requests suffer: look at the "
        "slowest 1 %. When all rise together, the engine is short of capacity.",
        "s",
        *(query(known(signal(f"model:{family.name}:{p}_5m")), p) for p in ("p50", "p90", "p99")),
        query(worst_p99(family), selection),
        *([now] if exemplars else ()),
        when_empty=NO_TRAFFIC,
        overrides=[*color_overrides({"p50": "green", "p90": "yellow", "p99": "red"}), *dashed],
        **limits((objective.threshold_seconds, RED)),
    )


def latency() -> Section:
    """TTFT, ITL and request duration, how many miss their objective, and how far the quantiles can be trusted."""

    def shares(name: Callable[[LatencyObjective], str], told: str = "") -> list[Query]:
        return [query(known(signal(name(x))), x.title + told) for x in o.LATENCY_OBJECTIVES]

    over = lines(
        TTFT_BURN,
        "How many requests miss their objective?",
        "Share of first tokens, inter-token gaps and requests slower than their objective, over 5 minutes; counted at a "
        f"bucket bound, so exact. The red line is what the objectives allow; {TTFT_BURN} compares the first-token line "
        f"with {burn.PAIRS[0].burn:g} times as much.",
        "percentunit",
        *shares(lambda x: share_name(x, ())),
        when_empty=NO_TRAFFIC,
        **limits((BUDGET, RED)),
    )
    overflow = lines(
        "KvscopeLatencyOverflow",
        "Can the quantiles be trusted?",
        "Share of measurements above the highest bucket bound (the +Inf bucket), and (first bucket) at or below the lowest. Above "
        "1 % over the top the p99 shown is a floor, not a value; near 100 % in the first bucket every quantile is a ceiling.",
        "percentunit",
        *shares(lambda x: f"model:{x.family.name}:overflow_ratio_rate5m"),
        *shares(lambda x: f"model:{x.family.name}:first_bucket_ratio_rate5m", ", first bucket"),
        when_empty=NO_TRAFFIC,
        **limits((symptoms.OVERFLOW, RED)),
    )
    crowds = Heatmap(
        **about(
            TTFT_BURN,
            "Is time to first token one crowd or several?",
            "First tokens a second by bucket of their latency over 5 minutes, of the chosen classes on all instances. Two bands mean two kinds of "
            "request (cache hit and miss, short and long prompt): split by class, or compare with the hit rate.",
        ),
        targets=buckets(o.TTFT.family, "class"),
        unit="reqps",
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


def _p99(family: c.Family, by: str, title: str, text: str) -> TimeSeries:
    return lines(
        TTFT_BURN,
        title,
        text,
        "s",
        query(worst_p99(family, by), f"{{{{{by}}}}}"),
        when_empty="No first tokens in this time",
    )


def split() -> Section:
    """The same symptoms by class and by instance."""
    by_class = _p99(
        c.TIME_TO_FIRST_TOKEN,
        "class",
        "Which class waits for its first token?",
        "p99 of time to first token over 5 minutes by priority class, on the slowest of the chosen instances. Only the lowest class slow: "
        "priorities do their work. All slow: capacity.",
    )
    by_instance = _p99(
        c.TIME_TO_FIRST_TOKEN,
        "instance",
        "Which instance is slow?",
        "p99 of time to first token over 5 minutes by instance, of the slowest of the chosen classes. One apart from the rest: look at that "
        "machine, or at how load is spread. All alike: look at the load.",
    )
    queues = lines(
        KV_EXHAUSTED,
        "Which class queues?",
        "Requests waiting by priority class, over the chosen classes and instances. interactive should be near 0 whatever "
        "the others do.",
        "short",
        query(f"sum by (class) ({c.REQUESTS_WAITING.series}{{{OF_CLASS}}})", "{{class}}"),
    )
    tenant_ttft = lines(
        TTFT_BURN,
        "Which tenant waits for its first token?",
        "p99 of time to first token by tenant over 5 minutes. Tenants beyond the configured number are one line, other. One apart "
        "from the rest: its prompts are longer or come in bursts.",
        "s",
        query(known(signal("model_tenant:kvscope_tenant_time_to_first_token_seconds:p99_5m")), "{{tenant}}"),
        when_empty=NO_TENANTS,
        **limits((o.TTFT.threshold_seconds, RED)),
    )
    tenant_over = lines(
        TTFT_BURN,
        "Which tenant misses the objective?",
        f"Share of first tokens later than {o.TTFT.threshold_seconds:g} s by tenant over 5 minutes. The red line is what the "
        "objective allows.",
        "percentunit",
        query(known(signal(tenant_share_name())), "{{tenant}}"),
        when_empty=NO_TENANTS,
        **limits((BUDGET, RED)),
    )
    tenant_load = lines(
        TTFT_BURN,
        "Which tenant brings the load?",
        "Tokens per second by tenant over 5 minutes, prompt and generated. A rise of one tenant at the start of a burn is the "
        "first suspect.",
        "si:tok/s",
        query(signal("model_tenant:kvscope_tenant_tokens:rate5m"), "{{tenant}}"),
        when_empty=NO_TENANTS,
    )
    tenant_requests = lines(
        TTFT_BURN,
        "How many requests does each tenant send?",
        "Ended requests per second by tenant over 5 minutes, however they ended. Few requests with many tokens: long prompts.",
        "reqps",
        query(signal("model_tenant:kvscope_tenant_requests:rate5m"), "{{tenant}}"),
        when_empty=NO_TENANTS,
    )
    return Section(
        "$model: split by class, instance and tenant",
        [
            Line(8, [by_class, by_instance, queues]),
            Line(8, [tenant_ttft, tenant_over, tenant_load, tenant_requests]),
        ],
        collapsed=True,
        repeat_for="model",
    )


def board() -> Board:
    return frame("p99", "Where do the slowest requests spend their time?", [makeup(), latency(), split()])
