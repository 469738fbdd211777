"""The board "Forecast": what the next hour brings, and how far forecasts can be trusted."""

from __future__ import annotations

from alerts import forecasts as f
from dashboards.frame import frame
from dashboards.panels import RED, YELLOW, BarGauge, Board, Json, Line, Query, Section, Table, TimeSeries
from dashboards.shared import KV_EXHAUSTED, LINES, MODEL, QUEUE_GROWING, about, limits, lines, query, signal
from observability import objectives as o

PREDICTED, OLD, OFF = "KvscopeKVExhaustionPredicted", "KvscopeForecastStale", "KvscopeForecastCoverageOff"
NO_ROOM = "KvscopeKVRoomPredictedGone"
NOT_SERVED = (
    "No forecasts: `kvscope forecast --serve` is not scraped or has made none for an hour, or its history is too short"
)

#: The board reaches into the future, where an instant query finds nothing: panels of one value end now instead.
_NOW = "1h"

#: What is forecast: the label `signal`, the recorded series, what it is called, its unit here, whose runbook helps when it is high.
_SHOWN = (
    ("requests", "model:kvscope_requests_received:rate5m", "the load", "reqps", QUEUE_GROWING),
    ("kv_usage", "model:kvscope_kv_usage:ratio", "KV use", "percentunit", PREDICTED),
    ("kv_free_tokens", "model:kvscope_kv_free_tokens:sum", "free KV tokens", "short", KV_EXHAUSTED),
    ("kv_free_requests", "model:kvscope_kv_free_requests:mean_length", "room for requests", "short", NO_ROOM),
    ("queue", "model:kvscope_requests_waiting:sum", "the queue", "short", QUEUE_GROWING),
    ("ttft_p99", f"model:{o.TTFT.family.name}:p99_5m", "time to first token, p99", "s", "KvscopeTTFTBudgetBurn"),
    ("e2e_p99", f"model:{o.E2E.family.name}:p99_5m", "request duration, p99", "s", "KvscopeDurationBudgetBurn"),
)  # fmt: skip


def _of(name: str, **labels: str) -> str:
    """Selector of a recorded series for the chosen models and `labels`."""
    more = "".join(f',{label}="{value}"' for label, value in labels.items())
    return signal(name).replace(MODEL, MODEL + more)


def _value(short: str, quantile: str, horizon: str = "60m") -> str:
    return _of(f.VALUE, signal=short, horizon=horizon, quantile=quantile)


#: The band is what lies between its two ends: the upper one is filled down to the lower.
_LOW, _HIGH = "2.5 %", "97.5 %"
_BAND: list[Json] = [
    {
        "matcher": {"id": "byName", "options": name},
        "properties": [
            {"id": "custom.lineWidth", "value": 0},
            {"id": "color", "value": {"mode": "fixed", "fixedColor": "blue"}},
            *fill,
        ],
    }
    for name, fill in (
        (_LOW, []),
        (_HIGH, [{"id": "custom.fillBelowTo", "value": _LOW}, {"id": "custom.fillOpacity", "value": 20}]),
    )
] + [
    {
        "matcher": {"id": "byName", "options": "forecast"},
        "properties": [
            {"id": "color", "value": {"mode": "fixed", "fixedColor": "blue"}},
            {"id": "custom.lineStyle", "value": {"fill": "dash", "dash": [8, 6]}},
        ],
    }
]


def _course(short: str, series: str, name: str, unit: str, alert: str) -> TimeSeries:
    """Where the signal goes, over where it was said to go."""
    bounds = {"max": 1} if unit == "percentunit" else {}
    return lines(
        alert,
        f"Where does {name} go?",
        "The value, and what was forecast for each moment an hour before: the median, and the 95 % band of the mean of ten minutes. The band "
        "reaches an hour beyond the last value: that is the coming hour. One moment in twenty may lie outside; long stretches outside mean that "
        "the load is new to the model.",
        unit,
        query(signal(series), "came"),
        *(
            query(f"{_value(short, quantile)} offset 1h", legend)
            for quantile, legend in (("0.5", "forecast"), ("0.025", _LOW), ("0.975", _HIGH))
        ),
        overrides=_BAND,
        when_empty=NOT_SERVED,
        **bounds,
    )


def likely() -> Section:
    """Limits: how likely, and how soon."""
    chances = BarGauge(
        **about(
            PREDICTED,
            "How likely is each limit passed within the hour?",
            "Chance that the signal passes the limit at some time of the hour from its newest observation on, by model: an objective's threshold, KV use of "
            f"{o.KV_USAGE_WARNING * 100:g} % and {o.KV_USAGE_CRITICAL * 100:g} %. Calibrated on what came of earlier chances. From "
            f"{f.LIKELY * 100:g} % for exhaustion, {PREDICTED} fires.",
        ),
        targets=[Query(expr=_of(f.BREACH, horizon="60m"), legendFormat="{{limit}} {{model}}", instant=True)],
        timeFrom=_NOW,
        unit="percentunit",
        min=0,
        max=1,
        thresholds=[(None, "green"), (0.2, YELLOW), (f.LIKELY, RED)],
        color={"mode": "thresholds"},
        when_empty=NOT_SERVED,
    )
    soon = BarGauge(
        **about(
            PREDICTED,
            "How soon is it passed, if it is?",
            "Time from now within which each limit is passed with a probability of 10, 50 and 90 %; 0: by now. A missing bar: the chance on the "
            "left does not reach that probability.",
        ),
        targets=[Query(expr=signal(f.TIME_LEFT), legendFormat="{{limit}} {{quantile}} {{model}}", instant=True)],
        timeFrom=_NOW,
        unit="s",
        min=0,
        max=3600,
        when_empty="No limit is likely to be passed within the hour",
    )
    course = lines(
        PREDICTED,
        "How did the chances change?",
        "Chance of passing each limit within the hour, as it was given at each refresh. A steady rise is a trend; a jump follows a jump of the "
        "signal.",
        "percentunit",
        query(_of(f.BREACH, horizon="60m"), "{{model}} {{limit}}"),
        max=1,
        when_empty=NOT_SERVED,
        **limits((f.LIKELY, RED)),
    )
    return Section("Will a limit be passed?", [Line(8, [chances, soon, course]), Line(8, [_table()])])


def _table() -> Table:
    columns = {"A": "10 min", "B": "30 min", "C": "1 h", "D": "1 h, 2.5 %", "E": "1 h, 97.5 %"}
    names = {"model": "Model", "signal": "Signal"} | {f"Value #{ref}": title for ref, title in columns.items()}
    exprs = [("0.5", "10m"), ("0.5", "30m"), ("0.5", "60m"), ("0.025", "60m"), ("0.975", "60m")]
    return Table(
        **about(
            PREDICTED,
            "What is expected of each signal?",
            "Median of the next 10 minutes, of those that end in 30 minutes and in an hour, and the ends of the 95 % band of the last. In the "
            "unit of the signal: seconds, requests, requests/s, tokens, or a share of 1.",
        ),
        targets=[
            Query(
                expr=f"max by (model, signal) ({_of(f.VALUE, horizon=horizon, quantile=quantile)})",
                format="table",
                instant=True,
            )
            for quantile, horizon in exprs
        ],
        timeFrom=_NOW,
        transformations=[
            {"id": "merge", "options": {}},
            {
                "id": "organize",
                "options": {
                    "excludeByName": {"Time": True},
                    "includeByName": {},
                    "indexByName": {name: place for place, name in enumerate(names)},
                    "renameByName": names,
                },
            },
        ],
        unit="short",
        when_empty=NOT_SERVED,
    )


def _in_use() -> Table:
    names = {"model": "Model", "signal": "Signal", "forecaster": "Forecaster", "status": "Status", "history": "History"}
    return Table(
        **about(
            OLD,
            "Which model forecasts, and from what?",
            "The forecaster in use for each signal. fallback: another one stood in, since the history is short. refused: there is no forecast. "
            "simulated: a part of the history comes from virtual time.",
        ),
        targets=[Query(expr=signal(f.IN_USE), format="table", instant=True)],
        timeFrom=_NOW,
        transformations=[
            {
                "id": "organize",
                "options": {
                    "excludeByName": {"Time": True, "Value": True, "__name__": True},
                    "includeByName": {},
                    "indexByName": {name: place for place, name in enumerate(names)},
                    "renameByName": names,
                },
            }
        ],
        unit="short",
        when_empty=NOT_SERVED,
    )


def trusted() -> Section:
    """Skill, coverage, age and failures."""
    skill = lines(
        OFF,
        "Are forecasts better than the last value?",
        "Skill over the last 24 hours by signal and forecaster: 1 - mean error / that of taking the last value. 0: no better, below: worse. "
        "Higher is better; 0.2 to 0.4 is what a load with a daily shape allows.",
        "percentunit",
        query(signal(f.SKILL), "{{model}} {{signal}} {{forecaster}}"),
        min=None,
        when_empty="No forecast of the last 24 hours has come due",
        custom={**LINES, "axisSoftMin": -0.2},
        up_to=1,
    )
    covered = lines(
        OFF,
        "Do the bands hold what they promise?",
        "Share of the last 24 hours inside the 95 % band, by signal and forecaster. One day wanders between 88 and 100 %; below the red line "
        f"{OFF} fires.",
        "percentunit",
        query(_of(f.COVERAGE, band="95"), "{{model}} {{signal}} {{forecaster}}"),
        max=1,
        when_empty="No forecast of the last 24 hours has come due",
        **limits((f.COVERAGE_LOW, RED)),
    )
    age = lines(
        OLD,
        "How old is each forecast?",
        "Time since the newest observation that the forecast in use has seen. A saw-tooth of 10 to 20 minutes is well; a signal that is no "
        "longer observed has no line.",
        "s",
        query(signal(f.AGE), "{{model}} {{signal}}"),
        when_empty=NOT_SERVED,
        **limits((f.STALE_AFTER_SECONDS, RED)),
    )
    run_age = lines(
        OLD,
        "When were forecasts last made?",
        "Time since the newest refresh, by the instance that makes forecasts. It saw-tooths to 10 minutes; above the red line "
        f"{OLD} fires.",
        "s",
        query(f.RUN_AGE, "{{instance}}"),
        when_empty=NOT_SERVED,
        **limits((f.STALE_AFTER_SECONDS, RED)),
    )
    failures = lines(
        OLD,
        "Which forecasts were refused?",
        "Forecasts refused in the last hour by signal and reason, each of the forecasters counted. stale: nothing new observed; short_history: "
        "too little ever observed; model: it failed on the series, and the worker's output says how.",
        "short",
        query(f.FAILURES, "{{signal}} {{reason}}"),
        when_empty=NOT_SERVED,
    )
    return Section(
        "Can forecasts be trusted?",
        [Line(8, [skill, covered, _in_use()]), Line(8, [age, run_age, failures])],
    )


def courses() -> Section:
    """Each signal: what came, what was forecast, and the coming hour."""
    panels = [_course(*shown) for shown in _SHOWN]
    rows = [panels[at : at + 2] for at in range(0, len(panels), 2)]
    return Section("$model: where does it go?", [Line(8, row) for row in rows], repeat_for="model")


def board() -> Board:
    return frame(
        "forecast",
        "What does the next hour bring, and how far can that be trusted?",
        [likely(), courses(), trusted()],
        refresh="1m",
        span="now-6h",
        until="now+1h",
    )
