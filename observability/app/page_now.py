"""Now: is the service well, what is saturated, and what is different from an hour ago. One screen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from html import escape

import pandas as pd
import streamlit as st

from observability import catalog
from observability.app import budget, charts, findings, queries, ui
from observability.app.p99 import TAIL, kv_usage_of, makeup_now
from observability.app.queries import Change
from observability.app.ui import Content, Context, Panel
from observability.app.units import quantity, setting
from observability.app.view import View
from observability.objectives import (
    BAD_OUTCOMES,
    GOOD_OUTCOMES,
    KV_USAGE_WARNING,
    OBJECTIVES,
    AvailabilityObjective,
    LatencyObjective,
    Objective,
    held_to,
    left_out,
)
from observability.signals import Signal, but_for
from observability.store.source import SeriesSource

Words = Callable[[Context, pd.DataFrame], str]
_VERDICTS = {"met": "✓ met", "near": "▲ near", "missed": "✕ missed", "unknown": "not measured"}
_QUIET = "no requests"


def _objective_words(objective: LatencyObjective) -> Words:
    def words(context: Context, data: pd.DataFrame) -> str:
        now = queries.objective_now(context.source, context.view, objective)
        told = _VERDICTS[now.verdict]
        if now.share_over is None:
            told = _QUIET if now.events == 0 else "not recorded" if now.p99 is not None else told
        return (
            f'<div class="figure"><b>{quantity(now.p99, "seconds")}</b>'
            f'<em class="verdict {now.verdict}">{told}</em>'
            f"<span>{quantity(now.share_over, 'ratio')} over {setting(objective.threshold_seconds, 'seconds')}"
            f"{but_for(left_out(objective))}, {setting(now.allowed, 'ratio')} allowed</span></div>{budget_line(context, objective)}"
        )

    return words


def budget_line(context: Context, objective: Objective) -> str:
    """What is left of the error budget and how fast it goes, as HTML."""
    found = budget.budget(context.source, context.view, objective)
    if found is None:
        return '<p class="limits">Nothing counted yet, so no budget.</p>'
    left = f"{found.left * 100:.0f} % left" if found.left >= 0 else f"overspent {1 - found.left:.1f} times"
    spans = "30 d" if found.days >= 29.5 else f"30 d, from {found.days:.1f} d of data"
    burns = ", ".join(
        f"{value:.1f} × in {name}"
        for name, value in (("1 h", found.burn_1h), ("6 h", found.burn_6h))
        if value is not None
    )
    kind = "bad" if found.left <= 0 or (found.burn_1h or 0.0) > budget.FAST_BURN else ""
    return f'<p class="limits {kind}">Budget of {spans}: <b>{left}</b>; burns {burns or "nothing"}</p>'


def _outcome_shares(source: SeriesSource, view: View, signal: Signal) -> pd.DataFrame:
    """Share of the requests of `signal` that ended badly, of those that ended by anything but an abort."""
    frame = queries.over_time(source, view, signal)
    ended = frame[frame["outcome"].isin((*GOOD_OUTCOMES, *BAD_OUTCOMES))].groupby("time")["value"].sum()
    bad = frame[frame["outcome"].isin(BAD_OUTCOMES)].groupby("time")["value"].sum().reindex(ended.index, fill_value=0.0)
    return (bad / ended.where(ended > 0)).dropna().rename("value").rename_axis("time").reset_index()


def _left_out(objective: Objective) -> str:
    """Whom an objective does not judge, in words."""
    classes = left_out(objective)
    if not classes:
        return ""
    quantiles = " (P99 has all)" if isinstance(objective, LatencyObjective) else ""
    return f" Verdict and budget leave out {' and '.join(classes)}, which alerts hold to objectives of their own{quantiles}."


def _availability_panel(objective: Objective) -> Panel:
    allowed, outcomes = 1 - objective.target, queries.outcomes_signal(objective)

    def words(context: Context, data: pd.DataFrame) -> str:
        failed = queries.current(data, context.view)
        verdict = "unknown" if failed is None else "missed" if failed > allowed else "met"
        told, ended = (
            _VERDICTS[verdict],
            queries.now_rows(queries.over_time(context.source, context.view, outcomes), context.view),
        )
        if failed is None and len(ended) and not ended["value"].any():
            told = _QUIET
        return (
            f'<div class="figure"><b>{quantity(failed, "ratio")}</b><em class="verdict {verdict}">{told}</em>'
            f"<span>failed{but_for(left_out(objective))}, {setting(allowed, 'ratio')} allowed</span></div>{budget_line(context, objective)}"
        )

    return Panel(
        f"objective-{objective.name}", "Do requests end well?", "% failed", (outcomes,),
        lambda source, view: _outcome_shares(source, view, outcomes),
        lambda data, frame: charts.lines(data, "ratio", frame), lines=(charts.Line(allowed, setting(allowed, "ratio")),),
        note="Requests that ended by error, refusal or deadline, of all that ended by anything but an abort."
        f"{_left_out(objective)}", words=words, compared=True,
    )  # fmt: skip


def _objective_panel(objective: LatencyObjective) -> Panel:
    p99, over = queries.quantile_signal(objective, 0.99), queries.over_threshold_signal(objective)
    line = charts.Line(objective.threshold_seconds, setting(objective.threshold_seconds, "seconds"))
    return Panel(
        f"objective-{objective.name}", f"Is {objective.title.lower()} good?", "P99", (p99, over),
        lambda source, view: queries.over_time(source, view, p99),
        lambda data, frame: charts.lines(data, "seconds", frame),
        lines=(line,),
        note=f"Objective: {setting(objective.target, 'ratio')} at or under {setting(objective.threshold_seconds, 'seconds')}. "
        "The verdict is judged by the share over the threshold, which is exact; P99 is interpolated in its bucket."
        f"{_left_out(objective)}",
        words=_objective_words(objective), compared=True,
    )  # fmt: skip


def _value_words(unit: str) -> Words:
    def words(context: Context, data: pd.DataFrame) -> str:
        value = queries.current(data, context.view)
        return f'<div class="figure"><b>{quantity(value, unit)}</b></div>'

    return words


def _saturation_panel(key: str, question: str, signal: Signal, note: str, lines: tuple[charts.Line, ...] = ()) -> Panel:
    bounded = signal.unit == "ratio"
    return Panel(
        key, question, "", (signal,),
        lambda source, view: queries.over_time(source, view, signal),
        lambda data, frame: charts.lines(data, signal.unit, frame, bounded=bounded),
        lines=lines, note=note, words=_value_words(signal.unit), compared=True,
    )  # fmt: skip


def _busy(source: SeriesSource, view: View) -> pd.DataFrame:
    """Share of the engines' time that is not idle."""
    shares = queries.step_shares(source, view)
    busy = shares[shares["series"] != catalog.COMPONENTS[-1]].groupby("time")["value"].sum()
    return busy.reset_index()


def panels(model: str) -> tuple[Panel, ...]:
    """One for each objective that `model` is held to."""
    held = [held_to(model, general) for general in OBJECTIVES if not general.applies_to]
    return (
        *(_objective_panel(o) for o in held if isinstance(o, LatencyObjective)),
        *(_availability_panel(o) for o in held if isinstance(o, AvailabilityObjective)),
    )


SATURATION = (
    _saturation_panel(
        "requests", "How much load arrives?", queries.REQUESTS, "Requests received per second, over five minutes."
    ),
    _saturation_panel(
        "kv-usage", "Is the KV pool full?", queries.KV_USAGE,
        "Blocks held by running requests, as a share of the pool. Cached blocks in use by nobody do not count.",
        (charts.Line(KV_USAGE_WARNING, setting(KV_USAGE_WARNING, "ratio")),),
    ),
    _saturation_panel(
        "waiting", "Is anybody waiting?", queries.WAITING, "Requests queued, waiting for KV blocks, or preempted."
    ),
    Panel(
        "busy", "Is the engine busy?", "% of its time", (queries.STEP_TIME,), _busy,
        lambda data, frame: charts.lines(data, "ratio", frame, bounded=True), words=_value_words("ratio"), compared=True,
        note="Time that the engine's loop does not idle, over all engines of the model. Near 100 % with a queue: no capacity left.",
    ),
)  # fmt: skip


def draw(context: Context) -> None:
    """Objectives, saturation, changes, and where the slow requests wait."""
    objectives = panels(context.view.model)
    for column, panel in zip(st.columns(len(objectives)), objectives, strict=True):
        with column:
            ui.card(context, panel, 90)
    for column, panel in zip(st.columns(len(SATURATION)), SATURATION, strict=True):
        with column:
            ui.card(context, panel, 88)
    left, right = st.columns(2)
    with left:
        ui.text_card(
            context, "changes", "What changed in the last hour against the hour before?", "median of each hour",
            [signal for _, signal, _ in queries.COMPARED], _changes,
            note="A change is clear when the medians differ by more than the spread of the hour before "
            "(its interquartile range, at least 1 %). Unclear ones are grey.",
        )  # fmt: skip
    with right:
        ui.text_card(
            context, "slowest", "Where do the slowest 1 % spend their time?", "mean of the last 5 min",
            [TAIL[0.99], TAIL[0.5], queries.KV_USAGE], _slowest,
        )  # fmt: skip


def _changes(context: Context) -> Content:
    changes = queries.hour_against_hour(context.source, context.view)
    if not changes:
        return Content(absent="Needs values from both hours; the source has fewer.")
    return Content(changes_table(changes), data=pd.DataFrame([asdict(change) for change in changes]))


def changes_table(
    changes: Sequence[Change], rows: int = 7, names: tuple[str, str] = ("hour before", "last hour")
) -> str:
    """HTML of the first `rows` changes between two spans called `names`; those that are not clear are grey."""
    lines = []
    for row in changes[:rows]:
        clear = row.score >= 1
        kind = "" if row.worse is None or not clear else ("worse" if row.worse else "better")
        lines.append(
            f'<tr class="{"" if clear else "quiet"}"><td>{escape(row.title)}</td><td>{quantity(row.before, row.unit)}</td>'
            f'<td>{quantity(row.after, row.unit)}</td><td class="{kind}">{in_words(row)}'
            f"{' ' + kind if kind else ''}</td></tr>"
        )
    head = f"<tr><th></th><th>{names[0]}</th><th>{names[1]}</th><th>change</th></tr>"
    return f'<table class="plain">{head}{"".join(lines)}</table>'


def in_words(change: Change) -> str:
    """▲ 12 %, ▼ 3 %, ▲ 4.2 times, ▲ from 0, = or ≈. Shares change by points, not by percent."""
    before, after = change.before, change.after
    if after == before:
        return "="
    arrow = "▲" if after > before else "▼"
    if change.unit == "ratio":
        points = abs(after - before) * 100
        return f"{arrow} {points:.1f} points" if points >= 0.05 else "≈"
    if before == 0:
        return f"{arrow} from 0"
    ratio = after / before
    if ratio >= 2:
        return f"{arrow} {ratio:.1f} times"
    return f"{arrow} {abs(ratio - 1) * 100:.0f} %" if abs(ratio - 1) >= 0.005 else "≈"


def _slowest(context: Context) -> Content:
    source, view = context.source, context.view
    slow = makeup_now(source, view, 0.99)
    if slow is None:
        return Content(absent=ui.why_absent(context, [TAIL[0.99]]))
    usage = kv_usage_of(source, view, slow)
    finding = findings.explain(slow, makeup_now(source, view, 0.5), usage)
    if finding is None:
        return Content(absent="The slowest requests took no measurable time.")
    return Content(ui.of_when(slow.time, view) + ui.finding_html(finding, actions=2), data=slow.rows())
