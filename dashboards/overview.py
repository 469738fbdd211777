"""The board "Overview": are we inside the objectives, and what is saturated?"""

from __future__ import annotations

from alerts import burn, symptoms
from dashboards.frame import frame
from dashboards.panels import GREEN, PLAIN, RED, YELLOW, Board, Json, Line, Query, Section, Stat, Table, color_overrides
from dashboards.shared import (
    AVAILABILITY_BURN,
    KV_EXHAUSTED,
    NO_BOUND,
    NO_TRAFFIC,
    OF_INSTANCE,
    OUTCOME_COLORS,
    QUEUE_GROWING,
    STALE,
    TTFT_BURN,
    about,
    known,
    limits,
    lines,
    query,
    signal,
)
from observability import objectives as o
from observability.objectives import LatencyObjective

_PAGE = burn.PAIRS[0].burn
_BURN_COLUMNS = {
    "A": ("Bad, last hour", "percentunit"),
    "B": ("Burn, 1 h", "suffix: x"),
    "C": ("Burn, 6 h", "suffix: x"),
    "D": ("Burn, 3 d", "suffix: x"),
    "E": ("Budget left, 30 d", "percentunit"),
}


def _stat(
    alert: str, title: str, text: str, expr: str, unit: str, *steps: tuple[float | None, str], **fields: object
) -> Stat:
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
        burn.alert_name(objective.name),
        title,
        f"99th percentile of {objective.title.lower()} over the last 5 minutes, worst of the chosen models. The objective "
        f"is {objective.target * 100:g} % within {objective.threshold_seconds:g} s. Red: the board P99 says where the slow "
        "requests spent their time.",
        f"max({known(signal(f'model:{objective.family.name}:p99_5m'))})",
        "s",
        (None, GREEN),
        (objective.threshold_seconds, RED),
        when_empty=NO_TRAFFIC,
    )


def well() -> Section:
    """Eight numbers whose colours are the alerts' thresholds."""
    burning = _stat(
        TTFT_BURN,
        "How fast does the worst budget burn?",
        "Share of bad events in the last hour over the share allowed, worst objective and class of the chosen models. 1 spends "
        f"the budget of 30 days in 30 days; {_PAGE:g} spends 2 % of it in an hour and pages. The table below says which.",
        f"max({signal(burn.burn('1h'))})",
        "suffix: x",
        (None, GREEN),
        (1, YELLOW),
        (_PAGE, RED),
        decimals=1,
        when_empty="No requests in the last hour",
    )
    usage = _stat(
        KV_EXHAUSTED,
        "How full is the KV pool?",
        "KV blocks held by running requests over the pool's blocks, fullest instance of the chosen models. Cached blocks "
        f"that nobody holds do not count. Above {o.KV_USAGE_CRITICAL * 100:g} % with requests waiting, {KV_EXHAUSTED} "
        "fires; with long requests earlier, once less is free than one holds. Absent for an unbounded pool.",
        f"max({signal(symptoms.KV_USAGE)})",
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
        "compare with the board KV cache.",
        f"min({known(signal('model:kvscope_kv_hit:ratio_rate5m'))})",
        "percentunit",
        (None, PLAIN),
        decimals=1,
        max=1,
        when_empty=NO_TRAFFIC,
    )
    waiting = _stat(
        QUEUE_GROWING,
        "Do requests wait?",
        "Requests queued, waiting for KV blocks or preempted, summed over the chosen models. A standing queue is time to "
        "first token in the making; the board P99 says for what they wait.",
        f"sum({signal('model:kvscope_requests_waiting:sum')})",
        "short",
        (None, PLAIN),
        decimals=0,
    )
    age = _stat(
        STALE,
        "Are these numbers fresh?",
        "Seconds since the engine that stopped longest ago last wrote its values, over all instances of the chosen "
        f"models. Above {o.STALE_AFTER_SECONDS:g} s nothing on this board says anything about now, and {STALE} fires. An "
        "idle engine still writes.",
        f"max({signal(symptoms.AGE)})",
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
    return Section("Are we well?", [Line(4, [*p99, burning]), Line(4, [usage, hits, waiting, age])])


def _objectives_table() -> Table:
    names = {"model": "Model", "class": "Class", "objective": "Objective"}
    names |= {f"Value #{ref}": title for ref, (title, _) in _BURN_COLUMNS.items()}
    organize: Json = {
        "excludeByName": {"Time": True},
        "includeByName": {},
        "indexByName": {name: place for place, name in enumerate(names)},
        "renameByName": names,
    }
    exprs = (burn.error("1h"), burn.burn("1h"), burn.burn("6h"), burn.burn("3d"), burn.BUDGET_LEFT)
    return Table(
        **about(
            TTFT_BURN,
            "Which objective, of which class, is in trouble?",
            "For each objective by model and class: share of bad events in the last hour, burn rates over three windows, and "
            "what is left of the budget of 30 days (below 0: overspent). Burn is bad events over those allowed. Act on the "
            "row whose 1-hour burn is high; plan on the one whose 3-day burn is above 1.",
        ),
        # without the series' names, which differ: the transformation makes one row of what is equal in all other columns
        targets=[Query(expr=f"sum without () ({signal(name)})", format="table", instant=True) for name in exprs],
        transformations=[
            {"id": "merge", "options": {}},
            {"id": "organize", "options": organize},
            {"id": "sortBy", "options": {"fields": {}, "sort": [{"desc": True, "field": _BURN_COLUMNS["B"][0]}]}},
        ],
        unit="short",
        overrides=[
            # an engine without classes has one budget a model
            {"matcher": {"id": "byName", "options": "Class"}, "properties": [{"id": "noValue", "value": "all"}]},
            *(
                {
                    "matcher": {"id": "byName", "options": title},
                    "properties": [{"id": "unit", "value": unit}, {"id": "decimals", "value": 2 if "x" in unit else 1}],
                }
                for title, unit in _BURN_COLUMNS.values()
            ),
        ],
        when_empty="No requests in the last hour",
    )


def objectives() -> Section:
    """Error budgets by objective and class: now, over time, and what is left."""
    over_time = lines(
        TTFT_BURN,
        "When did the budgets burn?",
        "Burn rate over one hour by model and objective, of its worst class. The red line pages; below 1 the budget lasts its 30 days. "
        "Compare the start of a rise with the alert marks and with deployments.",
        "suffix: x",
        query(f"max by (model, objective) ({signal(burn.burn('1h'))})", "{{model}} {{objective}}"),
        when_empty="No requests in the last hour",
        **limits((1, YELLOW), (_PAGE, RED)),
    )
    failures = lines(
        AVAILABILITY_BURN,
        "How do requests end?",
        "Requests ended per second by outcome, and requests received. stop and length are served; abort: the client left; "
        "error: the engine failed it; rejected: the queue was full or the server not ready; invalid: it could not be served as asked; "
        "deadline: it passed the time its client gave it. "
        "Received above the sum of the rest for long: work piles up.",
        "reqps",
        query(f"sum({signal('model:kvscope_requests_received:rate5m')})", "received"),
        query(f"sum by (outcome) ({signal('model_outcome:kvscope_requests:rate5m')})", "{{outcome}}"),
        overrides=color_overrides(OUTCOME_COLORS),
    )
    return Section(
        "Are we inside the objectives?", [Line(8, [_objectives_table(), over_time, failures], widths=(12, 6, 6))]
    )


def saturated() -> Section:
    """What has no room left, by instance, so that one full replica does not hide behind the others."""
    full = lines(
        KV_EXHAUSTED,
        "Which instance is full?",
        "KV blocks held by requests over the pool, by instance; the lines are the warning and the alert's threshold. Uneven: "
        "the router does not see KV use.",
        "percentunit",
        query(f"{symptoms.KV_USAGE}{{{OF_INSTANCE}}}", "{{model}} {{instance}}"),
        max=1,
        when_empty=NO_BOUND,
        **limits((o.KV_USAGE_WARNING, YELLOW), (o.KV_USAGE_CRITICAL, RED)),
    )
    busy = lines(
        "KvscopeBusyLowThroughput",
        "Which instance has no time left?",
        "Share of time in forward passes, by instance. Near 100 %: the device is the limit, and more load is more queue. High "
        "with few tokens: something slows the device down; see the board Batching.",
        "percentunit",
        query(f"{symptoms.FORWARD}{{{OF_INSTANCE}}}", "{{model}} {{instance}}"),
        max=1,
        **limits((symptoms.BUSY, YELLOW)),
    )
    queues = lines(
        QUEUE_GROWING,
        "Where do requests wait?",
        "Requests waiting, by instance. One queue that grows while others are empty: load is spread badly. All grow: the "
        "service is short of capacity.",
        "short",
        query(f"{symptoms.WAITING}{{{OF_INSTANCE}}}", "{{model}} {{instance}}"),
    )
    twice = lines(
        "KvscopePreemptionStorm",
        "Is work done twice?",
        "Preemptions for each request that ends, by instance. Above the line requests lose their blocks so often that much is "
        "computed again: lower max_num_seqs or give KV more memory.",
        "short",
        query(known(f"{symptoms.PREEMPTED}{{{OF_INSTANCE}}}"), "{{model}} {{instance}}"),
        when_empty=NO_TRAFFIC,
        **limits((symptoms.PREEMPTION_STORM, RED)),
    )
    return Section("What is saturated?", [Line(8, [full, busy, queues, twice])])


def board() -> Board:
    return frame(
        "overview", "Are we inside the objectives, and what is saturated?", [well(), objectives(), saturated()]
    )
