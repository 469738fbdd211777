"""P99: what the slowest requests are made of, when that changed, and what to do about it."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from html import escape

import pandas as pd
import streamlit as st

from observability import catalog
from observability.app import charts, findings, p99, queries, traces, ui
from observability.app.p99 import By, Makeup
from observability.app.settings import TRACE_URL_VARIABLE
from observability.app.ui import Content, Context, Panel
from observability.app.units import quantity, setting
from observability.app.view import View, moment
from observability.objectives import E2E, TTFT, LatencyObjective

QUANTILES = {"P99": 0.99, "P90": 0.9, "P50": 0.5}
#: Which requests are explained: name -> in words, as the URL has it.
WINDOWS = {"5m": "newest 5 min", "range": "all of the range"}
SHOWN_REQUESTS = 6
#: Pixels of one bar more.
ROW_HEIGHT = 46
ORDERS: dict[By, Sequence[str]] = {"state": catalog.SHOWN_STATES, "component": catalog.SHOWN_COMPONENTS}


def slowest(q: float) -> str:
    """The requests above a quantile in words: slowest 1 %."""
    return "slower half" if q == 0.5 else f"slowest {(1 - q) * 100:g} %"


def makeup_panel(q: float, by: By) -> Panel:
    """Make-up over time of the slowest requests by state or component."""
    what = "state" if by == "state" else "engine's step"
    return Panel(
        f"makeup-{by}", f"Where did the {slowest(q)} spend their time, by {what}?", "mean", (p99.TAIL[q],),
        lambda source, view: p99.makeup_over_time(source, view, q, by),
        lambda data, frame: charts.stacked(data, "seconds", frame, order=ORDERS[by]),
        note="Mean of the slowest requests of the last five minutes. The parts add up to their latency.", compared=True,
    )  # fmt: skip


def quantile_panel(objective: LatencyObjective) -> Panel:
    """P50, P90 and P99 of one latency with its objective."""
    limit = setting(objective.threshold_seconds, "seconds")
    return Panel(
        f"quantiles-{objective.name}", f"How slow is {objective.title.lower()}?", "",
        tuple(queries.quantile_signal(objective, q) for q in (0.5, 0.9, 0.99)),
        lambda source, view: p99.latency_quantiles(source, view, objective),
        lambda data, frame: charts.lines(data, "seconds", frame),
        lines=(charts.Line(objective.threshold_seconds, limit),),
        note=f"Objective: {setting(objective.target, 'ratio')} at or under {limit}. Quantiles over five minutes, interpolated in their bucket.", compared=True,
    )  # fmt: skip


def draw(context: Context) -> None:
    """Finding, make-up now and over time, the slowest requests, quantiles."""
    with st.container(horizontal=True, gap="small"):
        chosen = st.segmented_control(
            "Quantile", list(QUANTILES), default="P99", key="q", bind="query-params", required=True,
            label_visibility="collapsed", format_func=lambda name: f"{name}: {slowest(QUANTILES[name])}",
        )  # fmt: skip
        window = st.segmented_control(
            "Requests of", list(WINDOWS), default="5m", key="of", bind="query-params", required=True, label_visibility="collapsed",
            format_func=WINDOWS.__getitem__,
        )  # fmt: skip
    q, whole = QUANTILES[chosen or "P99"], window == "range"
    signals = [p99.TAIL[q], p99.TAIL[0.5]]
    finding, bars = st.columns([5, 6])
    more = 0 if context.earlier is None else ROW_HEIGHT
    unit = f"mean seconds a request, {WINDOWS[window or '5m']}"
    with finding:
        ui.text_card(
            context, "finding", f"Why are the {slowest(q)} slow?", WINDOWS[window or "5m"], [*signals, queries.KV_USAGE],
            lambda c: _finding(c, q, whole), height=300,
        )  # fmt: skip
    with bars:
        for by, question, note, height in (
            ("state", f"What are the {slowest(q)} made of?", "Against the slower half of all requests.", 112 + more),
            ("component", "… and by the engine's step?", "What the engine was doing during that time.", 136 + more),
        ):
            ui.text_card(
                context, "makeup-now" if by == "state" else "makeup-now-component", question, unit, signals,
                functools.partial(_makeup, q=q, by=by, whole=whole, height=height), height=height, note=note,
            )  # fmt: skip
    lengths, requests = st.columns([5, 6])
    with lengths:
        ui.text_card(
            context, "makeup-length", "… and by prompt length?", "mean seconds a request, newest 5 min",
            [p99.TAIL_LENGTHS[q], p99.TAIL_LENGTHS[0.5]], lambda c: _lengths(c, q), height=140,
            note="Seconds of the mean slow request by the prompt length of those that took them; adds up to the same latency. Under it: which share of "
            "the slow requests each length is.",
        )  # fmt: skip
    with requests:
        ui.text_card(
            context, "requests", "Which requests were the slowest?", "as noted by the engine", [], _requests, height=140,
            note="Exemplars of request duration and time to first token: the newest request of each bucket at each scrape.",
        )  # fmt: skip
    for column, shown in zip(st.columns(2), ORDERS, strict=True):
        with column:
            ui.card(context, makeup_panel(q, shown), 220)
    for column, objective in zip(st.columns(3), queries.held_latencies(context.view.model), strict=True):
        with column:
            ui.card(context, quantile_panel(objective), 190)


def _read(context: Context, view: View, q: float, whole: bool) -> Makeup | None:
    return (p99.makeup_of_range if whole else p99.makeup_now)(context.source, view, q)


def _finding(context: Context, q: float, whole: bool) -> Content:
    source, view = context.source, context.view
    slow = _read(context, view, q, whole)
    if slow is None:
        return Content(absent=ui.why_absent(context, [p99.TAIL[q]]))
    usage = p99.kv_usage_of(source, view, None if whole else slow)
    finding = findings.explain(slow, _read(context, view, 0.5, whole), usage)
    if finding is None:
        return Content(absent="The slowest requests took no measurable time.")
    return Content(
        ("" if whole else ui.of_when(slow.time, view)) + ui.finding_html(finding, actions=3),
        data=slow.rows(),
        more=(f"Runbook {finding.runbook}", findings.runbook(finding.runbook)),
    )


def _makeup(context: Context, q: float, by: str, whole: bool, height: int) -> Content:
    made = {slowest(each): _read(context, context.view, each, whole) for each in dict.fromkeys((q, 0.5))}
    if context.earlier is not None:
        made[f"{slowest(q)}, {context.versus}"] = _read(context, context.earlier, q, whole)
    found = {name: makeup for name, makeup in made.items() if makeup is not None}
    if not found:
        return Content(absent=ui.why_absent(context, [p99.TAIL[q]]))
    rows = {name: makeup.matrix.sum(axis=1 if by == "state" else 0) for name, makeup in found.items()}
    data = pd.concat([makeup.rows().assign(requests=name) for name, makeup in found.items()])
    now = _read(context, context.view, q, whole)
    told = "" if whole or now is None else ui.of_when(now.time, context.view)
    return Content(figure=charts.makeup_bars(rows, height), below=told, data=data)


def _lengths(context: Context, q: float) -> Content:
    views = {slowest(each): (context.view, each) for each in dict.fromkeys((q, 0.5))}
    if context.earlier is not None:
        views[f"{slowest(q)}, {context.versus}"] = (context.earlier, q)
    rows = {name: p99.lengths_now(context.source, view, each) for name, (view, each) in views.items()}
    rows = {name: parts for name, parts in rows.items() if len(parts)}
    if not rows:
        return Content(absent=ui.why_absent(context, [p99.TAIL_LENGTHS[q]]))
    shares, below = p99.length_shares_now(context.source, context.view, q), ""
    if len(shares):
        told = ", ".join(f"{quantity(share, 'ratio')} are {bucket}" for bucket, share in shares.items())
        when = queries.over_time(context.source, context.view, p99.TAIL_LENGTH_SHARES[q])["time"].max()
        below = f'<p class="limits">Of the {slowest(q)}: {told}</p>{ui.of_when(when, context.view)}'
    data = pd.concat([parts.rename("value").reset_index().assign(requests=name) for name, parts in rows.items()])
    return Content(figure=charts.makeup_bars(rows, 120), below=below, data=data)


def _requests(context: Context) -> Content:
    view, noted = context.view, []
    for objective in (E2E, TTFT):
        found = context.source.exemplars(objective.family.name, view.start, view.end, view.model)
        if found is None:
            return Content(
                absent="This source keeps no single requests. A Prometheus with `--enable-feature=exemplar-storage` does."
            )
        noted += [(objective.title, request) for request in found]
    if not noted:
        return Content(
            absent="No request was noted in this range: exemplars come with an OpenMetrics scrape and `--enable-feature=exemplar-storage`."
        )
    rows, template = [], os.environ.get(TRACE_URL_VARIABLE, "")
    slow = sorted(noted, key=lambda each: -each[1].seconds)[:SHOWN_REQUESTS]
    for title, request in slow:
        rows.append(
            f"<tr><td>{escape(title)}</td><td>{quantity(request.seconds, 'seconds')}</td><td>{moment(request.time, view.zone):%H:%M:%S}</td>"
            f"<td>{escape(request.labels.get('class', ''))}</td><td>{traces.link(template, request.ids)}</td></tr>"
        )
    head = "<tr><th></th><th>took</th><th>at</th><th>class</th><th>trace</th></tr>"
    data = pd.DataFrame(
        [
            {"measured": t, "seconds": r.seconds, "time": pd.Timestamp(r.time, unit="s", tz="UTC"), **r.labels, **r.ids}
            for t, r in slow
        ]
    )
    return Content(f'<table class="plain">{head}{"".join(rows)}</table>', data=data)
