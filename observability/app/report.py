"""A report of one span of time as a single HTML file, for an incident review: findings first, then charts, each with its query.

It opens without a network: styles and Plotly are inside, and its Content-Security-Policy allows nothing from elsewhere. The panels are those
of the pages, read once from the source.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from html import escape
from typing import Any

import numpy as np
import pandas as pd

from observability.app import (
    budget,
    findings,
    page_hardware,
    page_kv,
    page_now,
    page_p99,
    page_quantization,
    page_trends,
    queries,
    settings,
    ui,
)
from observability.app.charts import Drawing
from observability.app.findings import Finding
from observability.app.happened import happened
from observability.app.marks import Mark
from observability.app.p99 import TAIL, Makeup, kv_usage_of, makeup_now
from observability.app.page_now import changes_table
from observability.app.queries import Change
from observability.app.ui import Context, Panel
from observability.app.units import quantity, setting
from observability.app.view import View, moment, unix_seconds
from observability.errors import ConfigError, KvscopeError
from observability.objectives import LatencyObjective, left_out
from observability.signals import but_for
from observability.store.source import SeriesSource

#: Points of a line: more than a page of paper shows.
POINTS = 600
SHORTEST, LONGEST = 300.0, 14 * 86400.0
_CHART_HEIGHT = 220


def chapters(model: str) -> tuple[tuple[str, tuple[Panel, ...]], ...]:
    """Titles and panels of a report about `model`."""
    held = queries.held_latencies(model)
    return (
        ("Objectives and load", (*page_now.panels(model), *page_now.SATURATION)),
        ("What slow requests are made of", (
            page_p99.makeup_panel(0.99, "state"), page_p99.makeup_panel(0.99, "component"), *map(page_p99.quantile_panel, held),
        )),
        ("KV cache", (
            page_kv.HITS, page_kv.HITS_OVER_TIME, page_kv.OCCUPANCY, page_kv.FRAGMENTATION, page_kv.EVICTIONS, page_kv.REGIONS["fragmentation"],
            page_quantization.ROWS[0][0],
        )),
        ("Efficiency and hardware", (page_trends.EFFICIENCY, page_trends.BUSY, page_hardware.HEALTH, page_hardware.PANELS[0])),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Kept:
    """One latency objective over the whole span: share of what was measured in it that was over the threshold, and its worst P99 with its
    time (Unix seconds). None: nothing was measured."""

    objective: LatencyObjective
    share_over: float | None
    worst_p99: float | None
    worst_at: float | None

    @property
    def verdict(self) -> str:
        """met, missed or unknown."""
        if self.share_over is None:
            return "unknown"
        return "missed" if self.share_over > 1 - self.objective.target else "met"


@dataclass(frozen=True, slots=True)
class Drawn:
    """One panel: its figure, or why it has none."""

    panel: Panel
    data: pd.DataFrame
    figure: Drawing | None
    absent: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that a report says. `worst`: the make-up of the slowest at the time of the worst P99 of requests, and what it means."""

    source: str
    view: View
    simulated: float  # share of the span that comes from virtual time
    objectives: tuple[Kept, ...]
    finding: Finding | None
    finding_at: float | None
    changes: tuple[Change, ...]
    marks: tuple[Mark, ...]
    sections: tuple[tuple[str, tuple[Drawn, ...]], ...] = field(default=())


def span_view(model: str, start: float, end: float, zone: str = "UTC") -> View:
    """The view of a report. Raises ConfigError for a span that is too short or too long."""
    if not SHORTEST <= end - start <= LONGEST:
        raise ConfigError(
            f"A report of {(end - start) / 60:g} minutes is not possible.",
            next_step=f"Let --to be between {SHORTEST / 60:g} minutes and {LONGEST / 86400:g} days after --from.",
        )
    return View(model, start, end, float(max(15.0, np.ceil((end - start) / POINTS / 15) * 15)), zone)


def make_report(source: SeriesSource, view: View) -> Report:
    """Reads and judges the span. Raises StoreError when the source cannot be read; a panel that fails says so in its place."""
    simulated = source.simulated(view.start, view.end)
    marks = happened(source, view)
    context = Context(source, view, simulated, marks)
    slow = worst_makeup(source, view)
    usage = None
    if slow is not None:
        usage = kv_usage_of(source, view, slow)
    return Report(
        source=source.describe(), view=view, simulated=queries.simulated_share(simulated, view),
        objectives=tuple(kept(source, view, each) for each in queries.held_latencies(view.model)),
        finding=None if slow is None else findings.explain(slow, _makeup_at(source, view, 0.5, slow.time), usage),
        finding_at=None if slow is None else slow.time.timestamp(),
        changes=tuple(queries.span_against_span(source, view)), marks=tuple(marks),
        sections=tuple((title, tuple(_drawn(context, panel) for panel in panels)) for title, panels in chapters(view.model)),
    )  # fmt: skip


def kept(source: SeriesSource, view: View, objective: LatencyObjective) -> Kept:
    """How an objective was kept over the view."""
    p99 = queries.over_time(source, view, queries.quantile_signal(objective, 0.99))
    windows = int(np.ceil(view.seconds / budget.STEP))
    measured = budget.rates(source, objective, view.end - (windows - 1) * budget.STEP, view.end, view.where)
    # Each event counts once; of the first five minutes, where they begin before the view, as much as lies inside.
    inside = np.clip((unix_seconds(measured.index) - view.start) / budget.STEP, 0.0, 1.0)
    events = float((measured["events"] * inside).sum())
    share = float((measured["bad"] * inside).sum()) / events if events > 0 else None
    if p99.empty:
        return Kept(objective, share, None, None)
    worst = p99.iloc[int(p99["value"].argmax())]
    return Kept(objective, share, float(worst["value"]), worst["time"].timestamp())


def worst_makeup(source: SeriesSource, view: View) -> Makeup | None:
    """The make-up of the slowest 1 % at the moment of the view at which they took longest."""
    frame = queries.over_time(source, view, TAIL[0.99])
    if frame.empty:
        return None
    total = frame.groupby("time")["value"].sum()
    return _makeup_at(source, view, 0.99, total.index[int(total.argmax())])


def _makeup_at(source: SeriesSource, view: View, q: float, time: pd.Timestamp) -> Makeup | None:
    return makeup_now(source, replace(view, end=time.timestamp()), q)


def _drawn(context: Context, panel: Panel) -> Drawn:
    try:
        data = panel.read(context.source, context.view)
        if data.empty:
            return Drawn(panel, data, None, ui.why_absent(context, panel.signals))
        return Drawn(panel, data, panel.draw(data, context.frame(_CHART_HEIGHT, panel.lines)))
    except KvscopeError as error:
        return Drawn(panel, pd.DataFrame(), None, f"{error.reason} {error.next_step}")


# -- as JSON ------------------------------------------------------------------------------------------------------------


def as_json(report: Report) -> dict[str, Any]:
    """The report without its charts, for programs; times are ISO 8601, values in base units, unknown ones null."""
    return {
        "source": report.source, "model": report.view.model, "from": _iso(report.view.start), "to": _iso(report.view.end),
        "simulated_share": report.simulated,
        "objectives": [
            {
                "name": each.objective.name, "threshold_seconds": each.objective.threshold_seconds, "allowed_share": round(1 - each.objective.target, 9),
                "share_over": each.share_over, "worst_p99_seconds": each.worst_p99, "worst_at": _iso(each.worst_at), "verdict": each.verdict,
            }
            for each in report.objectives
        ],
        "finding": None if report.finding is None else {
            "at": _iso(report.finding_at), "headline": report.finding.headline, "evidence": list(report.finding.evidence),
            "actions": list(report.finding.actions),
        },
        "changes": [
            {"title": each.title, "unit": each.unit, "median_before": each.before, "median_after": each.after, "clear": bool(each.score >= 1), "worse": each.worse}
            for each in report.changes
        ],
        "marks": [{"kind": each.kind, "start": _iso(each.start), "end": _iso(each.end), "text": each.text} for each in report.marks],
        "panels": [
            {
                "section": title, "key": each.panel.key, "question": each.panel.question, "absent": each.absent, "rows": len(each.data),
                "queries": {signal.name: signal.promql for signal in each.panel.signals},
            }
            for title, panels in report.sections
            for each in panels
        ],
    }  # fmt: skip


def _iso(unix: float | None) -> str | None:
    return None if unix is None else datetime.fromtimestamp(unix, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


# -- as HTML ------------------------------------------------------------------------------------------------------------

_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
_STYLE = """
:root { --line: #dfe4ea; --soft: #5b6672; --good: #0f7a66; --warn: #96610f; --bad: #b8362d; --virtual: #6a50c0; }
* { box-sizing: border-box; } body { font: 14px/1.45 system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', 'Liberation Sans', sans-serif; color: #1c2733; background: #fff; margin: 0 auto; padding: 1.6rem 2rem; max-width: 1240px; }
h1 { font-size: 1.5rem; margin: 0 0 .2rem; } h2 { font-size: 1.1rem; margin: 1.6rem 0 .5rem; border-bottom: 1px solid var(--line); padding-bottom: .2rem; } h3 { font-size: .95rem; margin: 0; }
h3 small, .soft { color: var(--soft); font-weight: 400; } .virtual { color: var(--virtual); border: 1px solid var(--virtual); border-radius: 99px; padding: .05rem .6rem; font-size: .85rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100%; } th { font-weight: 500; color: var(--soft); text-align: right; } td { text-align: right; } th, td { padding: .2rem .5rem; border-bottom: 1px solid var(--line); } td:first-child, th:first-child { text-align: left; } tr.quiet td { color: var(--soft); }
.met, .better { color: var(--good); font-weight: 600; } .missed, .worse { color: var(--bad); font-weight: 600; } .unknown { color: var(--soft); }
.finding { border-left: 4px solid #2f7fc1; padding: .3rem 1rem; background: #f4f8fc; break-inside: avoid; } .headline { font-size: 1.1rem; font-weight: 600; margin: .2rem 0; } ul { margin: .2rem 0 .4rem; padding-left: 1.2rem; }
.grid { display: grid; grid-template-columns: 1fr 1fr; gap: .8rem; } .card { border: 1px solid var(--line); border-radius: 8px; padding: .5rem .7rem; break-inside: avoid; min-width: 0; } .chart { height: 220px; } .absent { height: 80px; display: flex; align-items: center; justify-content: center; color: var(--soft); text-align: center; background: #f6f7f9; border-radius: 6px; padding: 0 1rem; }
details { font-size: .82rem; color: var(--soft); } summary { cursor: pointer; } pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f4f6f8; padding: .4rem .6rem; border-radius: 6px; color: #1c2733; margin: .2rem 0; font: 12px/1.4 ui-monospace, 'Cascadia Code', 'Liberation Mono', monospace; } .two { break-inside: avoid; display: grid; grid-template-columns: 3fr 2fr; gap: 1.2rem; }
@media print { body { padding: 0; max-width: none; } h2 { break-after: avoid; } @page { size: A4 landscape; margin: 12mm; } .queries { break-before: page; } }
"""
_DRAW = """
for (const [id, figure] of Object.entries(figures)) {
  Plotly.newPlot(id, figure.data, figure.layout, { displaylogo: false, displayModeBar: false, responsive: true });
}
"""


def as_html(report: Report) -> str:
    """The report as one HTML document that needs nothing else."""
    view, sections = report.view, []
    figures: dict[str, Any] = {}
    for title, panels in report.sections:
        cards = []
        for each in panels:
            place = f"chart-{len(figures)}"
            if each.figure is None:
                body = f'<div class="absent">{ui.with_code(each.absent)}</div>'
            else:
                figures[place] = _figure(each.figure)
                body = f'<div class="chart" id="{place}"></div>'
            unit = f" <small>{escape(each.panel.unit)}</small>" if each.panel.unit else ""
            cards.append(f'<section class="card"><h3>{escape(each.panel.question)}{unit}</h3>{body}</section>')
        sections.append(f'<h2>{escape(title)}</h2><div class="grid">{"".join(cards)}</div>')
    told = f"{_when(view.start, view)} to {_when(view.end, view)} {escape(view.zone)}"
    virtual = (
        f' <span class="virtual">Simulated: {report.simulated:.0%} of this span is virtual time</span>'
        if report.simulated
        else ""
    )
    # In a script element nothing but "</" and "<!--" can end or change it.
    data = json.dumps(figures, allow_nan=False).replace("<", "\\u003c")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f'<meta name="viewport" content="width=device-width"><title>kvscope report: {escape(view.model)}, {told}</title><style>{_STYLE}</style></head>'
        f"<body><h1>What happened to {escape(view.model)}?</h1>"
        f'<p class="soft">{told} · {escape(report.source)} · written {_when(datetime.now(UTC).timestamp(), view)}{virtual}</p>'
        f"{_objectives(report)}{_finding(report)}"
        f'<div class="two"><div><h2>What differs from the {escape(setting(view.seconds, "seconds"))} before?</h2>{changes_table(report.changes, 12, ("median before", "median of this span"))}</div>'
        f"<div><h2>What happened beside it?</h2>{_marks(report)}</div></div>"
        f"{''.join(sections)}{_queries(report)}"
        f"<script>{settings.PLOTLY.read_text()}</script><script>const figures = {data};{_DRAW}</script></body></html>"
    )


def _when(unix: float, view: View) -> str:
    return f"{moment(unix, view.zone):%-d %b %Y %H:%M}"


def _objectives(report: Report) -> str:
    rows = "".join(
        f"<tr><td>{escape(each.objective.title)}: {setting(each.objective.target, 'ratio')} within {setting(each.objective.threshold_seconds, 'seconds')}"
        f"{but_for(left_out(each.objective))}</td>"
        f'<td class="{each.verdict}">{each.verdict}</td><td>{quantity(each.share_over, "ratio")}</td><td>{setting(1 - each.objective.target, "ratio")}</td>'
        f"<td>{quantity(each.worst_p99, 'seconds')}</td><td>{'–' if each.worst_at is None else _when(each.worst_at, report.view)}</td></tr>"
        for each in report.objectives
    )
    head = (
        "<tr><th>objective</th><th></th><th>share over</th><th>allowed</th><th>worst P99 (5 min)</th><th>at</th></tr>"
    )
    return f"<h2>Were the objectives kept?</h2><table>{head}{rows}</table>"


def _finding(report: Report) -> str:
    if report.finding is None:
        return "<h2>Why were the slowest requests slow?</h2><p>No request ended in this span, or the engine does not report where their time went.</p>"
    evidence, actions = (
        "".join(f"<li>{escape(line)}</li>" for line in lines)
        for lines in (report.finding.evidence, report.finding.actions)
    )
    return (
        f'<h2>Why were the slowest 1 % slow at {_when(report.finding_at or 0.0, report.view)}, when they took longest?</h2><div class="finding">'
        f'<p class="headline">{escape(report.finding.headline)}</p><ul>{evidence}</ul><b>What to do</b><ul>{actions}</ul></div>'
    )


def _marks(report: Report) -> str:
    if not report.marks:
        return "<p>No deploy and no alert is known in this span.</p>"
    return f"<ul>{''.join(f'<li>{escape(mark.told(report.view.zone))}</li>' for mark in report.marks)}</ul>"


def _queries(report: Report) -> str:
    signals = {signal.name: signal for _, panels in report.sections for each in panels for signal in each.panel.signals}
    items = "".join(
        f"<details><summary>{escape(signal.title)}: <code>{escape(name)}</code></summary><pre>{escape(signal.promql)}</pre></details>"
        for name, signal in signals.items()
    )
    return f'<div class="queries"><h2>Queries behind the charts</h2>{items}</div>'


def _figure(drawing: Drawing) -> dict[str, Any]:
    """Data and layout of a figure as plain JSON, in the report's light colours."""
    figure = drawing.figure()
    axis = {"gridcolor": "#e6eaee", "linecolor": "#c9d1d9", "zerolinecolor": "#e6eaee"}
    figure.update_layout(
        template="none",
        paper_bgcolor="#ffffff",
        plot_bgcolor="#ffffff",
        font={"color": "#1c2733", "size": 11},
        autosize=True,
        width=None,
    )
    figure.update_xaxes(**axis)
    figure.update_yaxes(**axis)
    plain: dict[str, Any] = json.loads(figure.to_json(engine="json"))
    plain["layout"].pop("template", None)
    return plain
