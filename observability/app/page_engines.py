"""Engines: what is read and how old it is, what each engine can feed, and what is wrong with the endpoints that the app watches."""

from __future__ import annotations

import time
from collections.abc import Sequence
from html import escape

import pandas as pd
import streamlit as st

from exporters.adapters.doctor import Report, together
from exporters.adapters.endpoint import Finding
from exporters.adapters.engines import TITLES
from observability.app import endpoints, engines, ui
from observability.app.endpoints import Look
from observability.app.engines import ModelFeed
from observability.app.ui import Content, Context
from observability.app.units import ABSENT, setting
from observability.app.view import moment
from observability.objectives import STALE_AFTER_SECONDS
from observability.signals import SIGNALS

MARKS = {"yes": "●", "partial": "◐", "no": "–"}
WORDS = {"yes": "yes", "partial": "in part", "no": "no"}
LEVELS = {"error": ("missed", "✕ error"), "warning": ("near", "▲ warning"), "note": ("unknown", "note")}
_HEIGHT = 430


def draw(context: Context) -> None:
    """Source and models, endpoints, capability matrix with its reasons."""
    left, right = st.columns([2, 3])
    with left:
        ui.text_card(
            context, "source", "What is read, and how old is it?", "now", [engines.UPDATE_AGE, engines.ENGINES], _source,
            note="Age: seconds since the engine last wrote its values; an idle engine still writes. Signals with a value within the last five minutes.",
        )  # fmt: skip
    with right:
        ui.text_card(
            context, "endpoints", "What is wrong with the engines' endpoints?", "", [], _endpoints,
            note="What `kvscope doctor` finds at the addresses that the app was started with (`--endpoint`), renewed each minute while somebody looks.",
        )  # fmt: skip
    ui.text_card(
        context, "capability", "Which engine can feed which signal?", f"{len(SIGNALS)} signals", [], _matrix, height=_HEIGHT,
        note="● yes, ◐ in part, – no; the reason is in the table below and on hover. docs/adapters.md has the same by engine.",
    )  # fmt: skip
    title = st.selectbox(
        "Engine", list(TITLES.values()), key="engine", bind="query-params", width=260, index=list(TITLES).index("vllm"),
        label_visibility="collapsed",
    )  # fmt: skip
    ui.text_card(
        context, "reasons", f"What can {title} not feed, and why?", "", [], lambda _: _reasons(title), height=_HEIGHT
    )


def _source(context: Context) -> Content:
    seen = engines.feeds(context.source, time.time())
    newest = context.source.freshness()
    told = f"{escape(context.source.describe())}; newest values " + (
        "none yet" if newest is None else f"{setting(round(newest), 'seconds')} old"
    )
    if not seen:
        return Content(f"<p>{told}</p>", below="<p>No model has values within the last day.</p>")
    possible = len(SIGNALS) - len(engines.HOST_SIGNALS)
    rows = "".join(
        f'<tr class="{"" if feed.fed else "quiet"}"><td>{escape(feed.model)}{_serving(feed)}</td><td>{_age(feed.age)}</td>'
        f"<td>{len(feed.fed)} of {possible}</td></tr>"
        for feed in seen
    )
    head = "<tr><th>model</th><th>written</th><th>signals with a value now</th></tr>"
    data = pd.DataFrame([(feed.model, feed.age, signal) for feed in seen for signal in sorted(feed.fed)], columns=["model", "age_seconds", "signal"])  # fmt: skip
    return Content(f'<p class="told">{told}</p><table class="plain">{head}{rows}</table>', data=data)


def _serving(feed: ModelFeed) -> str:
    """HTML: the engines that serve a model, a line each."""
    lines = []
    for row in feed.engines.to_dict("records"):
        count = f"{row['value']:.0f} × " if row["value"] != 1 else ""
        virtual = ", virtual time" if row["clock"] == "virtual" else ""
        lines.append(f"{count}{row['executor']} on {row['device']}, KV {row['kv_dtype']}, {row['version']}{virtual}")
    return "".join(f"<br><small>{escape(line)}</small>" for line in lines)


def _age(age: float | None) -> str:
    if age is None:
        return "not within 5 min"
    stale = ' <b class="worse">stale</b>' if age > STALE_AFTER_SECONDS else ""
    return f"{setting(round(age), 'seconds')} ago{stale}"


def _endpoints(context: Context) -> Content:
    looks = endpoints.watch().looks()
    if not looks:
        return Content(
            absent="No endpoint is watched. Start the app with `--endpoint http://127.0.0.1:8000/metrics` (once for each engine), "
            "or look at one by hand: `kvscope doctor http://127.0.0.1:8000/metrics`."
        )
    rows = [
        (look.url, look.report.title, finding.level, finding.code, finding.found, finding.do)
        for look in looks
        if look.report
        for finding in look.report.findings
    ]
    data = pd.DataFrame(rows, columns=["endpoint", "engine", "level", "code", "found", "do"])
    shown = [endpoint_html(look, context.view.zone) for look in looks]
    if common := together([look.report for look in looks if look.report]):
        data = pd.concat(
            [data, pd.DataFrame([("", "", f.level, f.code, f.found, f.do) for f in common], columns=data.columns)]
        )
        shown.append(
            f'<div class="endpoint"><div class="figure"><b>together</b></div><ul class="taken">{_findings_html(common)}</ul></div>'
        )
    return Content("".join(shown), data=data)


def _findings_html(findings: Sequence[Finding]) -> str:
    return "".join(
        f'<li><em class="verdict {LEVELS[each.level][0]}">{LEVELS[each.level][1]}</em> {escape(each.found)}'
        f'<br><span class="do">{ui.with_code(each.do)}</span></li>'
        for each in findings
    )


def endpoint_html(look: Look, zone: str) -> str:
    """HTML: what one endpoint is, what it feeds, and what was found there."""
    report = look.report
    if report is None:
        return f'<div class="endpoint"><div class="figure"><b>{escape(look.url)}</b><span>being looked at …</span></div></div>'
    about = f"{report.title}, version {report.version.text}" if report.engine else "not recognized as an engine"
    when = f"looked at {moment(look.at, zone):%H:%M:%S}"
    findings = _findings_html(report.findings)
    if not report.findings:
        findings = '<li><em class="verdict met">✓ no finding</em></li>'
    more = "".join(
        f"<li><code>{escape(flag.setting)}</code> would add: {escape(flag.gives)}</li>" for flag in report.flags
    )
    return (
        f'<div class="endpoint"><div class="figure"><b>{escape(look.url)}</b><span>{escape(about)} · {_fed(report)}{when}</span></div>'
        f'<ul class="taken">{findings}{more}</ul></div>'
    )


def _fed(report: Report) -> str:
    if not report.signals:
        return ""
    count = {
        status: sum(state.status == status for state in report.signals) for status in ("fed", "partial", "missing")
    }
    missing = f", {count['missing']} missing" if count["missing"] else ""
    return f"feeds {count['fed']} signals, {count['partial']} in part{missing} · "


def _matrix(context: Context) -> Content:
    table = engines.matrix()
    fed = {
        signal
        for feed in engines.feeds(context.source, time.time())
        if feed.model == context.view.model
        for signal in feed.fed
    }
    head = "".join(f"<th>{escape(title)}</th>" for title in TITLES.values())
    here = f'<th title="a value within five minutes">{escape(context.view.model or "this model")} now</th>'
    rows = []
    for name, group in table.groupby("signal", sort=False):
        now = ABSENT if name in engines.HOST_SIGNALS else "●" if name in fed else "–"
        cells = "".join(
            f'<td class="{status}" title="{escape(": ".join(filter(None, (engine, WORDS[status], reason))))}">{MARKS[status]}</td>'
            for engine, status, reason in zip(group["engine"], group["status"], group["reason"], strict=True)
        )
        rows.append(
            f'<tr><td title="{escape(str(name))}">{escape(str(group["title"].iloc[0]))}</td><td>{now}</td>{cells}</tr>'
        )
    return Content(
        f'<div class="scroll" style="height:{_HEIGHT}px" tabindex="0"><table class="plain marks"><thead><tr><th>signal</th>{here}{head}</tr>'
        f"</thead><tbody>{''.join(rows)}</tbody></table></div>",
        data=table,
    )  # fmt: skip


def _reasons(title: str) -> Content:
    table = engines.matrix()
    mine = table[(table["engine"] == title) & (table["status"] != "yes")]
    if mine.empty:
        return Content('<p class="told">It feeds every signal.</p>', data=table[table["engine"] == title])
    shared: dict[tuple[str, str], list[str]] = {}
    for status, reason, signal in zip(mine["status"], mine["reason"], mine["title"], strict=True):
        shared.setdefault((status, reason), []).append(signal)
    rows = "".join(
        f"<tr><td>{ui.with_code(reason)}</td><td>{WORDS[status]}</td><td>{'; '.join(map(ui.with_code, titles))}</td></tr>"
        for (status, reason), titles in sorted(shared.items(), key=lambda row: row[0][0] != "partial")
    )
    return Content(
        f'<table class="plain words reasons"><tr><th>why</th><th>fed</th><th>signals</th></tr>{rows}</table>',
        data=mine,
    )  # fmt: skip
