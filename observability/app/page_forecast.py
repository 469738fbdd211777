"""Forecast: the next hour of load, KV use and P99, and how far past forecasts were off."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from html import escape

import pandas as pd
import streamlit as st

from observability.app import charts, outlook, queries, ui
from observability.app.outlook import Lately, Outlook, Prospect, Risk
from observability.app.ui import Content, Context
from observability.app.units import ABSENT, percent, quantity, setting, significant
from observability.app.view import View, moment
from observability.errors import KvscopeError
from observability.forecast.limits import Limit
from observability.forecast.quality import BASELINE
from observability.objectives import LATENCY_OBJECTIVES, left_out
from observability.signals import Signal
from observability.store.forecasts import DEFAULT_MODEL, HORIZON_SECONDS, MODEL_TITLES, MODELS

QUESTIONS = dict(
    zip(
        (signal.name for signal in outlook.FORECAST_SIGNALS),
        (
            "How much load comes next hour?", "Will the KV pool fill up?", "Will time to first token P99 hold?",
            "Will request duration P99 hold?", "Will a queue build up?", "How many tokens will have room?", "How many more requests will have room?",
        ),
        strict=True,
    )
)  # fmt: skip
#: A limit in words, by the name that a forecast gives it.
LIMIT_TITLES = {
    "kv_usage_warning": "KV pool held", "kv_exhaustion": "KV pool exhausted", "kv_room": "Room for requests",
    **{objective.name: f"{objective.title} P99" for objective in LATENCY_OBJECTIVES},
}  # fmt: skip
HEIGHT = 250
#: Forecasts are made every ten minutes; one whose data end this long before the view was not renewed.
OLD_SECONDS = 1500.0
#: Fewer chances with an outcome, or fewer of them that came true, say nothing of how true chances are.
MIN_CHANCES, MIN_EVENTS = 30, 3
CHANCES_HEIGHT = 230
CHANCES_NOTE = (
    "Each stored forecast of the last three days says how likely its series is to pass a limit within the hour. Of those whose hour is over, and that "
    "began below the limit, chances are put into tenths: where 30 % was said, 3 of 10 should have passed it. The larger a point the "
    "more forecasts. Forecasts of one hour overlap, so they are fewer independent ones than their number. Skill: 1 - Brier score over "
    "that of always saying how often it happened; above 0 the chances tell hours apart."
)
NOTE = (
    "All values are means of ten minutes, drawn at their middle, measured ones too. Dotted: what was forecast one hour before, "
    "with its 95 % interval. Bands: 50, 80 and 95 %. The mean error compares the stored forecasts of the last three days with what came; "
    "skill and coverage those of the last 24 hours. Skill is 1 - error over that of the last value: a model is worth having above 0. A good 95 % "
    "interval covers 95 %. A limit's chance is that of the whole hour after the newest data; it is likely passed by the first time by which that "
    "is more likely than not. Forecasts are made by `kvscope forecast`, never by this page."
)


Seen = Callable[[Signal], Prospect]
RISKS_NOTE = (
    "Of the newest forecast of the model chosen above, where it reaches past this moment. The chance is that of the whole hour after its newest data, "
    "counted over some hundred paths and corrected by its own past outcomes. Likely: the end of the ten minutes by which the limit is more likely than "
    "not to have been passed; where that is over, it was forecast, not measured. Not every objective is forecast."
)
CHOICE_NOTE = (
    "Mean absolute error of the stored forecasts of the last three days, of the origins that all models have, beside that of taking the last value for "
    "the next hour. Skill and coverage are of the last 24 hours. `kvscope forecast` makes all of them; alerts use the automatic one."
)


def draw(context: Context) -> None:
    """What may be missed and when, which model is good at what, then one card a signal, and whether chances came true."""
    chosen = st.segmented_control(
        "Forecast model", _models(context), default=DEFAULT_MODEL, key="by", bind="query-params", required=True,
        label_visibility="collapsed", format_func=MODEL_TITLES.__getitem__,
    )  # fmt: skip
    model = chosen or DEFAULT_MODEL

    known: dict[str, Prospect] = {}  # cards of one drawing share what they read

    def seen(signal: Signal) -> Prospect:
        if signal.name not in known:
            known[signal.name] = outlook.prospect(context.source, context.view, signal)
        return known[signal.name]

    left, right = st.columns([5, 6])
    with left:
        ui.text_card(
            context, "forecast-risks", "What may be missed within the hour, and when?", MODEL_TITLES[model], outlook.FORECAST_SIGNALS,
            lambda c: _risks(c, model, seen), note=RISKS_NOTE,
        )  # fmt: skip
    with right:
        ui.text_card(
            context, "forecast-choice", "Which model, and why?", "3 days", outlook.FORECAST_SIGNALS, lambda c: _choice(c, model, seen),
            note=CHOICE_NOTE,
        )  # fmt: skip
    signals = outlook.FORECAST_SIGNALS
    for row in (signals[:2], signals[2:4], signals[4:]):
        for column, signal in zip(st.columns(len(row)), row, strict=True):
            write = functools.partial(_forecast, signal=signal, model=model, seen=seen)
            with column:
                ui.text_card(
                    context,
                    _key(signal),
                    QUESTIONS[signal.name],
                    "10-min means",
                    [signal],
                    write,
                    height=HEIGHT,
                    note=NOTE,
                )
    ui.text_card(
        context, "forecast-chances", "Can its chances be trusted?", "all limits, 3 days", signals, lambda c: _chances(c, model, seen),
        height=CHANCES_HEIGHT, note=CHANCES_NOTE,
    )  # fmt: skip


def _models(context: Context) -> list[str]:
    try:
        return outlook.models_of(context.source, context.view)
    except KvscopeError:  # each card says it in its place
        return list(MODELS)


def _of(prospect: Prospect, model: str) -> Outlook | None:
    return next((each for each in prospect.models if each.model == model), None)


def _risks(context: Context, model: str, seen: Seen) -> Content:
    looks = [look for signal in outlook.FORECAST_SIGNALS if (look := _of(seen(signal), model)) is not None]
    if all(look.origin is None for look in looks):
        return Content(absent="No forecast with limits has been stored. Start `kvscope forecast` beside the recorder.")
    end = context.view.end
    found = outlook.risks(looks, end, context.view.model)
    data = pd.DataFrame(
        [
            (_title(r.limit, context.view.model), r.limit.value, r.chance, r.start, None if r.by is None else r.by - end, lack(r.look, context.view) if r.chance is None else "")
            for r in found
        ],
        columns=["limit", "value", "chance", "hour_from", "seconds_until", "absent"],
    )  # fmt: skip
    data["hour_from"] = pd.to_datetime(data["hour_from"], unit="s", utc=True)
    return Content(risks_table(found, context.view), data=data)


def risks_table(found: Sequence[Risk], view: View) -> str:
    """HTML: each limit with its chance in the hour of the forecast and when it is likely passed, or why there is no forecast of what comes;
    the objectives that are not forecast last."""
    rows = "".join(
        f'<tr class="{"" if (risk.chance or 0.0) >= 0.05 else "quiet"}"><td>{escape(_title(risk.limit, view.model))}</td>'
        f"<td>{_beyond(risk)}</td>{_told(risk, view)}</tr>"
        for risk in found
    )
    told = {risk.limit.name for risk in found}
    lacking = [objective for objective in queries.held_latencies(view.model) if objective.name not in told]
    rows += "".join(f'<tr class="quiet"><td>{escape(LIMIT_TITLES[each.name])}</td><td>above {setting(each.threshold_seconds, "seconds")}</td><td colspan="3">not forecast</td></tr>' for each in lacking)  # fmt: skip
    return f'<table class="plain"><tr><th></th><th>limit</th><th>chance</th><th>between</th><th>likely</th></tr>{rows}</table>'


def _title(limit: Limit, model: str) -> str:
    """What is limited. Quantiles are of all classes, also where the objective of `model` leaves some out."""
    apart = any(left_out(each) for each in queries.held_latencies(model) if each.name == limit.name)
    return LIMIT_TITLES.get(limit.name, limit.name) + (" of all classes" if apart else "")


def _beyond(risk: Risk) -> str:
    return f"{'below' if risk.limit.below else 'above'} {setting(risk.limit.value, risk.look.signal.unit)}"


def _told(risk: Risk, view: View) -> str:
    """The cells of chance, hour and time, or one that says why there is none."""
    if risk.chance is None:
        return f'<td colspan="3" class="why">{escape(lack(risk.look, view))}</td>'
    mark = "worse" if risk.chance >= 0.5 else ""
    return f'<td class="{mark}">{_chance(risk.chance)}</td><td>{_hour(risk, view)}</td><td>{_when(risk, view)}</td>'


def _hour(risk: Risk, view: View) -> str:
    """The hour that the chance is of: from the end of the data on, not from that of the view."""
    return f"{clock(risk.start, view)} and {clock(risk.start + HORIZON_SECONDS, view)}"


def _when(risk: Risk, view: View) -> str:
    """By when it is more likely than not that the limit has been passed: a time that is over is told as one."""
    if risk.by is None:
        return f"not by {clock(risk.start + HORIZON_SECONDS, view)}"
    left = risk.by - view.end
    return f"within {math.ceil(left / 60)} min" if left > 0 else f"by {clock(risk.by, view)}"


def clock(at: float, view: View) -> str:
    """Time of day, with the date where it is not that of the end of the view."""
    then = moment(at, view.zone)
    return f"{then:%H:%M}" if then.date() == moment(view.end, view.zone).date() else f"{then:%-d %b %H:%M}"


def lack(look: Outlook, view: View) -> str:
    """Why no forecast of it reaches past the end of the view, and since when."""
    if look.origin is None:
        return f"No forecast by {look.title} was stored."
    if not look.refused:
        since, data = clock(look.origin + HORIZON_SECONDS, view), clock(look.origin, view)
        return f"No current forecast since {since}: not renewed, the newest has data to {data}."
    if view.end - look.origin > OLD_SECONDS:
        return f"No forecast; not tried again since {clock(look.origin, view)}, then: {look.refused}"
    return f"No forecast: {look.refused}"


def _choice(context: Context, model: str, seen: Seen) -> Content:
    rows, lines = [], []
    for signal in outlook.FORECAST_SIGNALS:
        models = seen(signal).models
        scored = {each.model: each.accuracy.mae for each in models if each.accuracy}
        look = _of(seen(signal), model)
        if not scored:
            lines.append(
                f'<tr class="quiet"><td>{escape(signal.title)}</td><td colspan="5">no forecast with an outcome yet</td></tr>'
            )
            continue
        base, mine = scored.get(BASELINE), scored.get(model)
        least = [name for name, mae in scored.items() if mae == min(scored.values())]
        lately = None if look is None else look.lately
        skill = ABSENT if lately is None else _skill(lately.skill)
        covers = ABSENT if lately is None else percent(lately.coverage[0.95])
        told = [ABSENT if value is None else error(value, signal.unit) for value in (mine, base)]
        best = MODEL_TITLES[least[0]] if len(least) == 1 else "several alike"
        mark = ' class="best"' if least == [model] else ""
        lines.append(
            f"<tr><td>{escape(signal.title)}</td><td>{escape(best)}</td><td{mark}>{told[0]}</td><td>{told[1]}</td><td>{skill}</td><td>{covers}</td></tr>"
        )
        rows += [(signal.title, each.model, scored.get(each.model)) for each in models]
    if not rows:
        return Content(
            absent="No stored forecast has an outcome yet: the first hour after `kvscope forecast` began tells."
        )
    head = f"<tr><th></th><th>least error</th><th>error of {escape(MODEL_TITLES[model])}</th><th>of the last value</th><th>skill 24 h</th><th>95 % covers</th></tr>"
    why = f'<p class="limits">{WHY[model]}</p>'
    return Content(
        f'<table class="plain">{head}{"".join(lines)}</table>{why}',
        data=pd.DataFrame(rows, columns=["signal", "model", "mean_error"]),
    )


#: What a model is, and why one would choose it.
WHY = {
    "auto": "Auto stack weighs 19 simple models by their newest errors at each step, so it follows whichever is right now; it is what alerts use. With less "
    "than two days of history it falls back to smoothing and says so in its card.",
    "prophet": "Prophet with AR(1) on its newest residual: a daily shape and a trend. Good where days repeat; needs two days.",
    "last_value": "The last ten minutes, for the whole hour: what every other model has to beat.",
    "seasonal_naive": "The same hour yesterday: right where days repeat and nothing else changed.",
    "pooled": "A small network that learned from all series together, off-line, what the stack errs by; half that and half the stack.",
}


def _chances(context: Context, model: str, seen: Seen) -> Content:
    prospects = [seen(signal) for signal in outlook.FORECAST_SIGNALS]
    tried = pd.concat([each.chances for found in prospects for each in found.models if each.model == model])
    events = int(tried["happened"].sum())
    if len(tried) < MIN_CHANCES or not events >= MIN_EVENTS:
        return Content(
            absent=f"Too few to say: {len(tried)} chances of {MODEL_TITLES[model]} have an outcome and {events} came true; "
            f"{MIN_CHANCES} and {MIN_EVENTS} are needed."
        )
    table = outlook.reliability(tried)
    gap = float((table["n"] * (table["said"] - table["came"]).abs()).sum() / len(tried))
    words = (
        f'<div class="figure"><b>{significant(gap * 100)} points</b><span>is how far chances of {escape(MODEL_TITLES[model])} were off on '
        f"average; {len(tried)} chances, {events} came true, skill {_skill(outlook.skill(tried))}</span></div>"
    )
    return Content(words, charts.reliability(table, CHANCES_HEIGHT), data=table)


def _key(signal: Signal) -> str:
    return f"forecast-{signal.name.split(':')[1]}"


def _forecast(context: Context, signal: Signal, model: str, seen: Seen) -> Content:
    view, prospect = context.view, seen(signal)
    models, chosen = prospect.models, _of(prospect, model)
    if chosen is None:
        return Content(
            absent=f"No forecast of this series by {MODEL_TITLES[model]} was stored in this range or the three days before its end."
        )
    if all(each.origin is None for each in models):
        if prospect.came.empty:
            return Content(absent=ui.why_absent(context, [signal]))
        return Content(
            absent="No forecast of this series was stored in this range or the three days before its end. Start `kvscope forecast` beside the recorder."
        )
    threshold = queries.threshold_of(signal, view.model)
    lines = () if threshold is None else (charts.Line(threshold, setting(threshold, signal.unit)),)
    ahead = chosen.ahead if chosen.reaches(view.end) else chosen.ahead.iloc[:0]  # a past hour is not the next one
    figure = charts.forecast(
        prospect.came, chosen.past, ahead, signal.unit, context.frame(HEIGHT, lines),
        median=outlook.MEDIAN, bands=outlook.BANDS, bounded=signal.unit == "ratio",
    )  # fmt: skip
    data = pd.concat([each.ahead.assign(model=each.model) for each in models], ignore_index=True).drop(
        columns="breaches"
    )
    words = headline(chosen, view) + limits_line(chosen, view)
    return Content(words, figure, data=data, below=models_table(models, signal, view))


def headline(chosen: Outlook, view: View) -> str:
    """The hour ahead in one line, or why there is none."""
    if not chosen.reaches(view.end):
        return f'<p class="refused">{escape(lack(chosen, view))}</p>'
    unit, (low, high) = chosen.signal.unit, outlook.BANDS[0.95]
    last = chosen.ahead.iloc[-1]
    return (
        f'<div class="figure"><b>{quantity(last[outlook.MEDIAN], unit)}</b><span>in {_minutes(last["time"], view.end)} min, '
        f"95 %: {between(last[low], last[high], unit)}</span></div>"
    )


def limits_line(chosen: Outlook, view: View) -> str:
    """The chance of passing each limit within the forecast's hour, and when; nothing where no forecast reaches past the end of the view."""
    if not chosen.reaches(view.end):
        return ""
    if not chosen.breaches:
        return '<p class="limits">No objective is set for it.</p>'
    said = [
        f"{_beyond(risk)}: <b>{_chance(risk.chance)}</b> between {_hour(risk, view)}, likely {_when(risk, view)}"
        for risk in outlook.risks([chosen], view.end)
    ]
    return f'<p class="limits">{"<br>".join(said)}</p>'


def _skill(value: float | None) -> str:
    return ABSENT if value is None else f"{value:z.2f}"  # never -0.00


def _chance(share: float | None) -> str:
    """A chance is never certain: the paths that it is counted from are some hundred."""
    if share is None:
        return ABSENT
    return "&lt; 1 %" if share < 0.01 else "&gt; 99 %" if share > 0.99 else f"{share * 100:.0f} %"


def between(low: float, high: float, unit: str) -> str:
    """Two values with their unit, said once where both are one number of the same: 0.109 to 0.215 req/s, but 12.0 s to 2 min 5 s."""
    first, last = quantity(low, unit), quantity(high, unit)
    number, *name = first.split(" ")
    return f"{number if len(name) == 1 and last.split(' ')[1:] == name else first} to {last}"


def _minutes(time: pd.Timestamp, now: float) -> int:
    return round((time.timestamp() - now) / 60)


def error(mae: float, unit: str) -> str:
    """A mean error with its unit; shares are off by points, not by percent."""
    return f"{significant(mae * 100)} points" if unit == "ratio" else quantity(mae, unit)


def models_table(seen: list[Outlook], signal: Signal, view: View) -> str:
    """HTML: each model's error and coverage beside the other's, when it was made, and what to know before trusting it."""
    errors = sorted(each.accuracy.mae for each in seen if each.accuracy)
    best = errors[0] if len(errors) > 1 and errors[0] < errors[1] else None
    rows = []
    for each in seen:
        accuracy = each.accuracy
        if accuracy is None:
            numbers = f"<td>{ABSENT}</td>"
        else:
            mark = ' class="best"' if accuracy.mae == best else ""
            told = f"{percent(accuracy.coverage)} of {accuracy.outcomes} outcomes were in the 95 % band"
            numbers = f'<td{mark} title="{told}">{error(accuracy.mae, signal.unit)}</td>'
        numbers += _last_day(each.lately)
        made = ABSENT if each.origin is None else clock(each.origin, view)
        rows.append(f"<tr><td>{escape(each.title)}</td>{numbers}<td>{made}</td></tr>")
    notes = []
    for each in seen:
        said = [each.note if flag == "fallback" else outlook.FLAG_TEXTS.get(flag, flag) for flag in each.flags]
        if each.origin is not None and view.end - each.origin > OLD_SECONDS:
            said.insert(0, "not renewed; is kvscope forecast running?")
        if said:
            notes.append(f"<li>{escape(each.title)}: {escape(', '.join(said))}</li>")
    scored = next((each.accuracy for each in seen if each.accuracy), None)
    if scored is not None:
        afterwards = f", {percent(scored.hindcasts)} of them hindcast" if scored.hindcasts else ""
        notes.append(f"<li>{scored.outcomes} outcomes in 3 days{afterwards}</li>")
    head = "<tr><th></th><th>mean error</th><th>skill 24 h</th><th>95 % covers</th><th>data to</th></tr>"
    return f'<table class="plain">{head}{"".join(rows)}</table><ul class="notes">{"".join(notes)}</ul>'


def _last_day(lately: Lately | None) -> str:
    """Two cells: skill against the last value, and what the 95 % band covered (the others on hover)."""
    if lately is None:
        return f"<td>{ABSENT}</td>" * 2
    bands = ", ".join(f"{share:.0%} band: {percent(covered)}" for share, covered in sorted(lately.coverage.items()))
    return f'<td>{_skill(lately.skill)}</td><td title="{escape(bands)}; {lately.outcomes} outcomes">{percent(lately.coverage[0.95])}</td>'
