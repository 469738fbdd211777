"""Forecast: the next hour of load, KV use and P99, and how far past forecasts were off."""

from __future__ import annotations

import functools
from html import escape

import pandas as pd
import streamlit as st

from observability.app import charts, outlook, queries, ui
from observability.app.outlook import Outlook
from observability.app.ui import Content, Context
from observability.app.units import ABSENT, percent, quantity, setting, significant
from observability.app.view import View, moment
from observability.signals import Signal
from observability.store.forecasts import DEFAULT_MODEL, MODEL_TITLES

QUESTIONS = {
    queries.REQUESTS.name: "How much load comes next hour?",
    queries.KV_USAGE.name: "Will the KV pool fill up?",
    outlook.FORECAST_SIGNALS[2].name: "Will time to first token P99 hold?",
}
HEIGHT = 385
#: Forecasts are made every ten minutes; one whose data end this long before the view was not renewed.
OLD_SECONDS = 1500.0
NOTE = (
    "All values are means of ten minutes, drawn at their middle, measured ones too. Dotted: what was forecast one hour before, "
    "with its 95 % interval. Bands: 50, 80 and 95 %. Mean error and coverage compare the stored forecasts of the last three days with what came: "
    "a good 95 % interval covers 95 %, and a model is worth having where its error is below that of the last value. "
    "Forecasts are made by `kvscope forecast`, never by this page."
)


def draw(context: Context) -> None:
    """One card a signal: history, past forecasts, next hour, and both models side by side."""
    model = st.segmented_control(
        "Forecast model", list(MODEL_TITLES), default=DEFAULT_MODEL, key="by", bind="query-params", required=True,
        label_visibility="collapsed", format_func=MODEL_TITLES.__getitem__,
    )  # fmt: skip
    for column, signal in zip(st.columns(len(outlook.FORECAST_SIGNALS)), outlook.FORECAST_SIGNALS, strict=True):
        write = functools.partial(_forecast, signal=signal, model=model or DEFAULT_MODEL)
        with column:
            ui.text_card(
                context, _key(signal), QUESTIONS[signal.name], "10-min means", [signal], write, height=HEIGHT, note=NOTE
            )


def _key(signal: Signal) -> str:
    return f"forecast-{signal.name.split(':')[1]}"


def _forecast(context: Context, signal: Signal, model: str) -> Content:
    source, view = context.source, context.view
    prospect = outlook.prospect(source, view, signal)
    seen = prospect.models
    chosen = next(each for each in seen if each.model == model)
    if all(each.origin is None for each in seen):
        if prospect.came.empty:
            return Content(absent=ui.why_absent(context, [signal]))
        return Content(
            absent="No forecast has been stored for this series. Start `kvscope forecast` beside the recorder."
        )
    threshold = queries.threshold_of(signal)
    lines = () if threshold is None else (charts.Line(threshold, setting(threshold, signal.unit)),)
    figure = charts.forecast(
        prospect.came, chosen.past, chosen.ahead, signal.unit, charts.Frame(view, context.simulated, lines, HEIGHT),
        median=outlook.MEDIAN, bands=outlook.BANDS, bounded=signal.unit == "ratio",
    )  # fmt: skip
    data = pd.concat([each.ahead.assign(model=each.model) for each in seen], ignore_index=True)
    return Content(headline(chosen, view.end), figure, data=data, below=models_table(seen, signal, view))


def headline(chosen: Outlook, now: float) -> str:
    """The hour ahead in one line, or why there is none."""
    if chosen.refused:
        return f'<p class="refused">No forecast: {escape(chosen.refused)}</p>'
    ahead = chosen.ahead[chosen.ahead["time"] > pd.Timestamp(now, unit="s", tz="UTC")]
    if ahead.empty:
        return '<p class="refused">No forecast reaches past this moment.</p>'
    unit, (low, high) = chosen.signal.unit, outlook.BANDS[0.95]
    last = ahead.iloc[-1]
    return (
        f'<div class="figure"><b>{quantity(last[outlook.MEDIAN], unit)}</b><span>in {_minutes(last["time"], now)} min, '
        f"95 %: {between(last[low], last[high], unit)}</span></div>"
    )


def between(low: float, high: float, unit: str) -> str:
    """Two values with their unit, said once when it is the same: 0.109 to 0.215 req/s."""
    first, last = quantity(low, unit), quantity(high, unit)
    number, _, name = first.partition(" ")
    return f"{number if last.endswith(' ' + name) else first} to {last}"


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
            numbers = f"<td>{ABSENT}</td><td>{ABSENT}</td>"
        else:
            mark = ' class="best"' if accuracy.mae == best else ""
            numbers = (
                f"<td{mark}>{error(accuracy.mae, signal.unit)}</td>"
                f'<td title="of {accuracy.outcomes} outcomes">{percent(accuracy.coverage)}</td>'
            )
        made = ABSENT if each.origin is None else f"{moment(each.origin, view.zone):%H:%M}"
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
    head = "<tr><th></th><th>mean error</th><th>95 % covers</th><th>data to</th></tr>"
    return f'<table class="plain">{head}{"".join(rows)}</table><ul class="notes">{"".join(notes)}</ul>'
