"""Trends: at what load latency bends, whether batches and hardware got better or worse, and this week against last week."""

from __future__ import annotations

import functools
from dataclasses import replace
from html import escape

import pandas as pd
import streamlit as st

from observability.app import charts, charts_trends, queries, trends, ui
from observability.app.page_hardware import HEALTH
from observability.app.page_now import in_words
from observability.app.queries import Change
from observability.app.trends import Curve
from observability.app.ui import Content, Context, Panel
from observability.app.units import quantity, setting
from observability.objectives import E2E, TTFT, LatencyObjective, held_to, left_out
from observability.signals import Signal

CURVE_HEIGHT, HEIGHT = 300, 190
CURVE_NOTE = (
    "Each point is the P99 of five minutes against the requests received per second in them; of those that would cover each other one is "
    "drawn. The curve goes through the medians of bins of equally many points, made non-decreasing; its band and the knee's interval hold 95 % of 200 curves through hours drawn anew with replacement. "
    "The knee is where the curve lies furthest below the straight line between its ends (Kneedle, Satopaa et al. 2011); it is marked only when "
    "at least 80 % of those curves have one within half of the range. Points far above the curve at low load are not about load: see P99."
)


def curve_card(context: Context, objective: LatencyObjective) -> Content:
    """The curve of one objective with its knee and the load at which the objective is passed, in words and drawn."""
    points = trends.moments(context.source, context.view, objective)
    if points.empty:
        return Content(absent=ui.why_absent(context, [queries.REQUESTS, queries.quantile_signal(objective, 0.99)]))
    curve = trends.latency_curve(points, objective.threshold_seconds)
    if isinstance(curve, str):
        return Content(absent=curve)
    limit = setting(objective.threshold_seconds, "seconds")
    figure = charts_trends.latency_against_load(
        curve, context.view, charts.Line(objective.threshold_seconds, limit), CURVE_HEIGHT
    )
    data = pd.DataFrame({"load": curve.load, "latency": curve.latency, "low": curve.low, "high": curve.high})
    return Content(
        curve_words(curve, objective), figure, data=pd.concat([points.assign(kind="moment"), data.assign(kind="curve")])
    )


def curve_words(curve: Curve, objective: LatencyObjective) -> str:
    """HTML: the knee or why there is none, and the load that the objective allows."""
    if curve.knee is None:
        said = f'<div class="figure"><b>no knee</b><span>{escape(curve.no_knee)}</span></div>'
    else:
        knee = curve.knee
        said = (
            f'<div class="figure"><b>{quantity(knee.load, "requests/s")}</b><span>is the knee (95 %: {knee.low:.3g} to {knee.high:.3g}); '
            f"P99 there is typically {quantity(knee.latency, 'seconds')}</span></div>"
        )
    threshold = setting(objective.threshold_seconds, "seconds")
    if curve.limit is not None:
        high = "beyond the data" if curve.limit.high == float("inf") else f"{curve.limit.high:.3g}"
        where = f"The typical P99 passes {threshold} at {quantity(curve.limit.load, 'requests/s')} (95 %: {curve.limit.low:.3g} to {high})."
    elif curve.latency[0] > objective.threshold_seconds:
        where = f"The typical P99 is above {threshold} at every load seen."
    else:
        where = f"The typical P99 stays at or below {threshold} at every load seen, up to {quantity(float(curve.load[-1]), 'requests/s')}."
    return f'{said}<p class="limits">{where}</p>'


EFFICIENCY = Panel(
    "efficiency", "Do batches become more or less efficient?", "tok/s of compute", (trends.STEP_TOKENS, queries.STEP_TIME),
    trends.tokens_per_forward_second, lambda data, frame: charts.lines(data, "tokens/s", frame), compared=True,
    note="Tokens run through the model for each second of forward passes. A slow fall: contexts grow or batches shrink.",
)  # fmt: skip
BUSY = Panel(
    "busy-in-the-model", "Is busy time spent in the model?", "% of busy time", (queries.STEP_TIME,), trends.busy_in_the_model,
    lambda data, frame: charts.lines(data, "ratio", frame, bounded=True), compared=True,
    note="Share of the time that engines are not idle which forward passes take. The rest is scheduling, KV management, sampling and sending.",
)  # fmt: skip


def _week_panel(key: str, question: str, signal: Signal, unit: str = "", lines: tuple[charts.Line, ...] = ()) -> Panel:
    def words(context: Context, data: pd.DataFrame) -> str:
        assert context.earlier is not None
        before = queries.over_time(context.source, context.earlier, signal)
        return week_words(data, before.assign(time=before["time"] + context.apart), signal)

    return Panel(
        key, question, unit, (signal,), lambda source, view: queries.over_time(source, view, signal),
        lambda data, frame: charts.lines(data, signal.unit, frame, bounded=signal.unit == "ratio"), lines=lines, words=words, compared=True,
        note="Against the same time a week before. In words: the median of the range and how it differs from that of a week before.",
    )  # fmt: skip


def week_words(data: pd.DataFrame, before: pd.DataFrame, signal: Signal) -> str:
    """HTML: the median of the range, and how it differs from a week before over the moments that both weeks have.

    `before`: rows of the week before, moved by a week.
    """
    both = data.merge(before, on="time", suffixes=("", "_before"))
    now, told = float(data["value"].median()), "no values a week before"
    if not both.empty:
        shared, then = float(both["value"].median()), float(both["value_before"].median())
        told = f"{in_words(Change('', signal.unit, then, shared, 0.0, None))} against {quantity(then, signal.unit)} a week before"
        if len(both) < 0.9 * len(data):
            told += (
                f" ({quantity(shared, signal.unit)} over the {len(both) / len(data):.0%} of the range that both have)"
            )
    return f'<div class="figure"><b>{quantity(now, signal.unit)}</b><span>median, {told}</span></div>'


def week_panels(ttft: LatencyObjective) -> tuple[Panel, ...]:
    """This week against last week, first tokens with their objective."""
    limit = charts.Line(ttft.threshold_seconds, setting(ttft.threshold_seconds, "seconds"))
    return (
        _week_panel("week-requests", "More load than last week?", queries.REQUESTS),
        _week_panel("week-ttft", "Later first tokens?", queries.quantile_signal(ttft, 0.99), "TTFT P99", (limit,)),
        _week_panel("week-hits", "Does the cache save as much?", queries.HIT_RATE),
        _week_panel("week-tokens", "Does it generate as much?", queries.GENERATED),
    )


def draw(context: Context) -> None:
    """Latency against load, efficiency and hardware over time, this week against last week."""
    view = trends.trend_view(context.view)
    if view != context.view:
        simulated = context.source.simulated(view.start, view.end) if context.simulated else ()
        context = replace(context, view=view, simulated=simulated)
        st.html(
            '<p class="told">A trend needs a day: this page shows the last 24 hours of the range and before it.</p>'
        )
    ttft, e2e = (held_to(view.model, general) for general in (TTFT, E2E))
    for column, objective in zip(st.columns(2), (ttft, e2e), strict=True):
        with column:
            ui.text_card(
                context, f"curve-{objective.name}", f"At what load does {objective.title.lower()} bend?",
                f"P99{' of all classes' if left_out(objective) else ''} against requests/s",
                [queries.REQUESTS, queries.quantile_signal(objective, 0.99)], functools.partial(curve_card, objective=objective),
                note=CURVE_NOTE, height=CURVE_HEIGHT,
            )  # fmt: skip
    week = replace(context, versus="last week")
    panels = week_panels(ttft)
    for column, panel in zip(st.columns(len(panels)), panels, strict=True):
        with column:
            ui.card(week, panel, HEIGHT)
    for column, panel in zip(
        st.columns(3), (EFFICIENCY, BUSY, replace(HEALTH, question="Does hardware get worse?")), strict=True
    ):
        with column:
            ui.card(context, panel, HEIGHT)
