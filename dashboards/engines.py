"""The board "Engines": who feeds these boards, how fresh it is, and what each engine can and cannot tell."""

from __future__ import annotations

from alerts.adapters import CAPABILITY
from alerts.links import JOB
from dashboards.frame import frame
from dashboards.panels import GREEN, RED, YELLOW, Board, Json, Line, Query, Section, StateTimeline, Table
from dashboards.shared import MODEL, NO_TRAFFIC, STALE, about, limits, lines, query, signal
from observability import catalog as c
from observability import objectives as o


def sources() -> Section:
    """What is scraped, what it is, and how old its values are."""
    up = StateTimeline(
        **about(
            STALE,
            "Does every source answer?",
            f"Scrapes of the jobs `{JOB}` and `{JOB}-ENGINE` by target over time: green answered, red did not. {STALE} fires after two "
            "minutes of red.",
        ),
        targets=[query(f'up{{job=~"{JOB}|{JOB}-.+",instance=~"$instance"}}', "{{job}} {{instance}}")],
        unit="short",
        min=0,
        max=1,
        color={"mode": "thresholds"},
        thresholds=[(None, RED), (1, GREEN)],
        when_empty="No scrape job of this name",
    )
    names = {
        "model": "Model", "instance": "Instance", "executor": "Executor", "clock": "Clock", "device": "Device",
        "kv_dtype": "KV type", "version": "Version",
    }  # fmt: skip
    organize: Json = {
        "excludeByName": {"Time": True, "__name__": True, "job": True, "Value": True},
        "includeByName": {},
        "indexByName": {name: place for place, name in enumerate(names)},
        "renameByName": names,
    }
    engines = Table(
        **about(
            STALE,
            "Which engines report?",
            "Engines that kvscope's own exporter or plug-in feeds. Clock virtual: the numbers are simulated, and no model ran. Engines read "
            "through adapters are in the matrix below.",
        ),
        targets=[Query(expr=f'{c.ENGINE.series}{{{MODEL},instance=~"$instance"}}', format="table", instant=True)],
        transformations=[{"id": "organize", "options": organize}],
        unit="short",
        when_empty="No engine with kvscope's own exporter",
    )
    age = lines(
        STALE,
        "How old are the values?",
        "Seconds since the newest write, by model. A saw-tooth near 0 is well; a ramp is a frozen engine. Engines read through adapters "
        "export no such time and have no line.",
        "s",
        query(signal("model:kvscope_last_update_age:seconds"), "{{model}}"),
        when_empty="No time of the last update: only engines read through adapters",
        **limits((o.STALE_AFTER_SECONDS, RED)),
    )
    return Section("Who reports?", [Line(8, [up, engines, age], widths=(8, 10, 6))])


def side_by_side() -> Section:
    """The same signals of all engines, kvscope's own and those read through adapters."""
    ttft = lines(
        "KvscopeTTFTBudgetBurn",
        "Which engine gives first tokens in time? (P99)",
        "p99 of time to first token over 5 minutes by model and engine (no engine: kvscope's own). Of an engine with coarse buckets the "
        "value is a bound; docs/adapters.md says which.",
        "s",
        query(f"{signal('model:kvscope_time_to_first_token_seconds:p99_5m')} > -1", "{{model}} {{engine}}"),
        when_empty=NO_TRAFFIC,
        **limits((o.TTFT.threshold_seconds, RED)),
    )
    waiting = lines(
        "KvscopeQueueGrowing",
        "Where do requests wait?",
        "Requests waiting, by model and engine (no engine: kvscope's own).",
        "short",
        query(signal("model:kvscope_requests_waiting:sum"), "{{model}} {{engine}}"),
    )
    usage = lines(
        "KvscopeKVCacheExhausted",
        "Which engine is full?",
        "Share of the KV pool that requests hold, by model and engine (no engine: kvscope's own). Engines that export only a mean of "
        "their ranks say so in docs/adapters.md.",
        "percentunit",
        query(signal("model:kvscope_kv_usage:ratio"), "{{model}} {{engine}}"),
        max=1,
        **limits((o.KV_USAGE_WARNING, YELLOW), (o.KV_USAGE_CRITICAL, RED)),
    )
    return Section("How do they compare?", [Line(8, [ttft, waiting, usage])])


def matrix() -> Section:
    """What each engine read through an adapter can feed, signal by signal, with the reason where it cannot."""
    names = {"engine": "Engine", "signal": "Signal", "status": "Fed", "reason": "Why not, or what to mind"}
    organize: Json = {
        "excludeByName": {"Time": True, "__name__": True, "Value": True},
        "includeByName": {},
        "indexByName": {name: place for place, name in enumerate(names)},
        "renameByName": names,
    }
    table = Table(
        **about(
            STALE,
            "What can each engine not tell?",
            "For each engine whose rule file is loaded: the signals that it cannot feed, or only in part, and why. A panel that is empty "
            "for one of these engines is empty for the reason that stands here; it is not 0 and not a fault.",
        ),
        targets=[Query(expr=f"sort({CAPABILITY} < 1)", format="table", instant=True)],
        transformations=[
            {"id": "organize", "options": organize},
            {"id": "sortBy", "options": {"fields": {}, "sort": [{"desc": False, "field": "Engine"}]}},
        ],
        unit="short",
        overrides=[
            {"matcher": {"id": "byName", "options": name}, "properties": [{"id": "custom.width", "value": width}]}
            for name, width in (("Engine", 130), ("Signal", 520), ("Fed", 90))
        ],
        when_empty="No rule file of another engine is loaded (kvscope scrape-config names them)",
    )
    return Section("What can they tell?", [Line(14, [table])])


def board() -> Board:
    return frame(
        "engines", "Who feeds these boards, and what can each engine tell?", [sources(), side_by_side(), matrix()]
    )
