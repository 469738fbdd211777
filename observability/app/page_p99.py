"""P99: what the slowest requests are made of, when that changed, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import streamlit as st

from observability import catalog
from observability.app import charts, findings, queries, ui
from observability.app.queries import By, Makeup
from observability.app.ui import Content, Context, Panel
from observability.app.units import setting
from observability.objectives import LATENCY_OBJECTIVES, LatencyObjective

QUANTILES = {"P99": 0.99, "P90": 0.9, "P50": 0.5}
ORDERS: dict[By, Sequence[str]] = {"state": catalog.SHOWN_STATES, "component": catalog.SHOWN_COMPONENTS}


def slowest(q: float) -> str:
    """The requests above a quantile in words: slowest 1 %."""
    return "slower half" if q == 0.5 else f"slowest {(1 - q) * 100:g} %"


def makeup_panel(q: float, by: By) -> Panel:
    """Make-up over time of the slowest requests by state or component."""
    what = "state" if by == "state" else "engine's step"
    return Panel(
        f"makeup-{by}", f"Where did the {slowest(q)} spend their time, by {what}?", "mean", (queries.TAIL[q],),
        lambda source, view: queries.makeup_over_time(source, view, q, by),
        lambda data, frame: charts.stacked(data, "seconds", frame, order=ORDERS[by]),
        note="Mean of the slowest requests of the last five minutes. The parts add up to their latency.", compared=True,
    )  # fmt: skip


def quantile_panel(objective: LatencyObjective) -> Panel:
    """P50, P90 and P99 of one latency with its objective."""
    limit = setting(objective.threshold_seconds, "seconds")
    return Panel(
        f"quantiles-{objective.name}", f"How slow is {objective.title.lower()}?", "",
        tuple(queries.quantile_signal(objective, q) for q in (0.5, 0.9, 0.99)),
        lambda source, view: queries.latency_quantiles(source, view, objective),
        lambda data, frame: charts.lines(data, "seconds", frame),
        lines=(charts.Line(objective.threshold_seconds, limit),),
        note=f"Objective: {objective.target:.0%} at or under {limit}. Quantiles over five minutes, interpolated in their bucket.", compared=True,
    )  # fmt: skip


def draw(context: Context) -> None:
    """Finding, make-up now and over time, quantiles."""
    chosen = st.segmented_control(
        "Quantile", list(QUANTILES), default="P99", key="q", bind="query-params", required=True,
        label_visibility="collapsed", format_func=lambda name: f"{name}: {slowest(QUANTILES[name])}",
    )  # fmt: skip
    q = QUANTILES[chosen or "P99"]
    signals = [queries.TAIL[q], queries.TAIL[0.5]]
    finding, bars = st.columns([5, 6])
    with finding:
        ui.text_card(
            context, "finding", f"Why are the {slowest(q)} slow?", "newest 5 min", [*signals, queries.KV_USAGE],
            lambda c: _finding(c, q), height=250,
        )  # fmt: skip
    with bars:
        ui.text_card(
            context, "makeup-now", f"What are the {slowest(q)} made of?", "mean seconds a request, newest 5 min", signals,
            lambda c: _makeup(c, q, "state"), height=112, note="Against the slower half of all requests.",
        )  # fmt: skip
        ui.text_card(
            context, "makeup-now-component", "… and by the engine's step?", "mean seconds a request, newest 5 min", signals,
            lambda c: _makeup(c, q, "component"), height=136, note="What the engine was doing during that time.",
        )  # fmt: skip
    for column, by in zip(st.columns(2), ORDERS, strict=True):
        with column:
            ui.card(context, makeup_panel(q, by), 220)
    for column, objective in zip(st.columns(3), LATENCY_OBJECTIVES, strict=True):
        with column:
            ui.card(context, quantile_panel(objective), 190)


def _finding(context: Context, q: float) -> Content:
    source, view = context.source, context.view
    slow = queries.makeup_now(source, view, q)
    if slow is None:
        return Content(absent=ui.why_absent(context, [queries.TAIL[q]]))
    usage = queries.newest(queries.over_time(source, view, queries.KV_USAGE))
    finding = findings.explain(slow, queries.makeup_now(source, view, 0.5), usage)
    if finding is None:
        return Content(absent="The slowest requests took no measurable time.")
    return Content(ui.finding_html(finding, actions=3), data=slow.rows())


def _makeup(context: Context, q: float, by: str) -> Content:
    made = [queries.makeup_now(context.source, context.view, each) for each in dict.fromkeys((q, 0.5))]
    found = [makeup for makeup in made if makeup is not None]
    if not found:
        return Content(absent=ui.why_absent(context, [queries.TAIL[q]]))
    rows = {slowest(makeup.q): _parts(makeup, by) for makeup in found}
    data = pd.concat([makeup.rows().assign(requests=slowest(makeup.q)) for makeup in found])
    return Content(figure=charts.makeup_bars(rows, 112), data=data)


def _parts(makeup: Makeup, by: str) -> pd.Series:
    return makeup.matrix.sum(axis=1 if by == "state" else 0)
