"""`kvscope report`: one file that needs no network, with the numbers of the source, and errors that say what to do."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from observability.app import queries, report
from observability.app.kv import BLOCKS
from observability.app.p99 import TAIL
from observability.app.settings import SOURCE_VARIABLE
from observability.cli.report import parse_start, parse_time
from observability.cli.report import report as write_report
from observability.errors import ConfigError, KvscopeError
from observability.objectives import LATENCY_OBJECTIVES, TTFT
from observability.store.embedded import EmbeddedStore, create
from tests.app import synthetic
from tests.app.browser import Browser


def kvscope_report(*options: str) -> subprocess.CompletedProcess[str]:
    argv = (sys.executable, "-m", "observability.cli", "report", *options)
    environment = {k: v for k, v in os.environ.items() if k != SOURCE_VARIABLE}
    return subprocess.run(argv, capture_output=True, text=True, timeout=240, env=environment, check=False)


@pytest.fixture(scope="module")
def made(source: EmbeddedStore, end: float) -> report.Report:
    return report.make_report(source, report.span_view(synthetic.MODEL, end - 2 * 3600, end))


def test_objectives_are_judged_over_the_whole_span_each_event_once(
    made: report.Report, rows: dict[str, pd.DataFrame]
) -> None:
    over, events, p99 = (
        {t.timestamp(): v for t, v in zip(rows[s.name]["time"], rows[s.name]["value"], strict=True)}
        for s in (queries.over_threshold_signal(TTFT), queries.events_signal(TTFT), queries.quantile_signal(TTFT, 0.99))
    )
    inside = [made.view.start + made.view.step * i for i in range(round(made.view.seconds / made.view.step) + 1)]
    held = [t // 60 * 60 for t in inside]  # the newest value of each moment
    apart = [
        (made.view.end - 300 * i) // 60 * 60 for i in range(round(made.view.seconds / 300))
    ]  # windows side by side
    kept = made.objectives[0]
    assert kept.share_over == pytest.approx(sum(over[t] * events[t] for t in apart) / sum(events[t] for t in apart))
    assert kept.worst_p99 == pytest.approx(max(p99[t] for t in held))
    assert kept.verdict == ("missed" if kept.share_over > 1 - TTFT.target else "met")
    assert [each.objective for each in made.objectives] == list(LATENCY_OBJECTIVES)


def test_the_finding_is_about_the_moment_at_which_the_slowest_took_longest(
    made: report.Report, rows: dict[str, pd.DataFrame]
) -> None:
    frame = rows[TAIL[0.99].name]
    inside = frame[frame["time"].map(lambda t: made.view.start <= t.timestamp() <= made.view.end)]
    total = inside.groupby("time")["value"].sum()
    assert made.finding_at is not None
    assert total[pd.Timestamp(made.finding_at // 60 * 60, unit="s", tz="UTC")] == pytest.approx(total.max())
    assert made.finding is not None


def test_the_span_is_compared_with_one_as_long_before_it(
    source: EmbeddedStore, rows: dict[str, pd.DataFrame], end: float
) -> None:
    view = report.span_view(synthetic.MODEL, end - 3600, end)
    changes = {change.title: change for change in queries.span_against_span(source, view)}
    frame = rows[queries.REQUESTS.name]
    at = frame["time"].map(lambda t: t.timestamp())
    now = frame.loc[(at >= end - 3600) & (at <= end), "value"]
    assert changes["Requests received"].after == pytest.approx(now.median(), rel=0.02)
    assert changes["Requests received"].before < changes["Requests received"].after


def test_the_command_writes_a_file_and_a_pdf_and_says_the_same_as_json(
    program: Callable[[str], str], browser: Browser, store_path: Path, tmp_path: Path, made: report.Report
) -> None:
    program("chromium")
    begin, to = (datetime.fromtimestamp(t, UTC).isoformat() for t in (made.view.start, made.view.end))
    out = tmp_path / "review.html"
    done = kvscope_report(
        "--from", begin, "--to", to, "--source", str(store_path), "--out", str(out), "--pdf", "--json"
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["files"] == {"html": str(out), "pdf": str(tmp_path / "review.pdf")}
    assert (tmp_path / "review.pdf").read_bytes().startswith(b"%PDF-")
    assert told["objectives"][0]["share_over"] == pytest.approx(made.objectives[0].share_over)
    assert {panel["key"] for panel in told["panels"]} == {d.panel.key for _, panels in made.sections for d in panels}

    html = out.read_text()
    assert html.count("plotly.js (cartesian") == 1, "Plotly is there once"
    assert not re.search(r'(?:src|href)\s*=\s*["\']?(?:https?:)?//', html.split("<script>")[0])
    browser.look(1280, 1400, "light")
    browser.driver.get(out.as_uri())
    drawn = sum(d.figure is not None for _, panels in made.sections for d in panels)
    script = "return [...document.querySelectorAll('.chart')].filter(c => c.querySelector('.main-svg')).length"
    assert browser.driver.execute_script(script) == drawn
    text = browser.text()
    assert "Were the objectives kept?" in text
    assert made.finding is not None
    assert made.finding.headline in text
    assert queries.KV_USAGE.title in text
    assert browser.console_errors() == []
    browser.picture("report", whole=False)
    loaded = browser.driver.execute_script("return performance.getEntriesByType('resource').map(e => e.name)")
    assert [name for name in loaded if name.startswith("http")] == []


def test_labels_that_are_markup_stay_text(tmp_path: Path, rows: dict[str, pd.DataFrame], end: float) -> None:
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    store = create(tmp_path / "evil.db")
    for name in (queries.REQUESTS.name, queries.OUTCOMES.name, TAIL[0.99].name, BLOCKS.name):
        store.append(name, rows[name].assign(model=evil))
    html = report.as_html(report.make_report(store, report.span_view(evil, end - 3600, end)))
    assert "alert(1)" in html
    assert "<script>alert" not in html
    assert "<img" not in html.split("<script>")[0]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"begin": "2h", "to": "soon"}, "--to 'soon' is not a time"),
        ({"begin": "2026-11-30T05:00", "to": "2026-11-30T04:00"}, "is not before --to"),
        ({"begin": "99d"}, "A report of 142560 minutes is not possible"),
        ({"begin": "2h", "model": "other"}, "has no model 'other'"),
        ({"begin": "2h", "out": Path("/nowhere/r.html")}, "/nowhere/r.html cannot be written"),
    ],
)
def test_mistakes_are_named_with_the_next_step(store_path: Path, options: dict[str, Any], told: str) -> None:
    with pytest.raises(KvscopeError) as raised:
        write_report(source=str(store_path), **options)
    assert told in raised.value.reason
    assert raised.value.next_step


def test_a_mistake_ends_the_command_without_a_traceback(store_path: Path) -> None:
    done = kvscope_report("--source", str(store_path), "--from", "yesterday")
    assert done.returncode == 2
    assert "'yesterday' is not a time" in " ".join(done.stderr.split())
    assert "next: " in done.stderr
    assert "Traceback" not in done.stderr


def test_a_span_without_data_is_a_report_that_says_so(source: EmbeddedStore, end: float) -> None:
    empty = report.make_report(source, report.span_view(synthetic.MODEL, end - 12 * 86400, end - 11 * 86400))
    html = report.as_html(empty)
    assert html.count("unknown") >= len(LATENCY_OBJECTIVES)
    assert "No request ended in this span" in html
    assert 'class="chart"' not in html.split("<script>")[0]


def test_times_are_utc_unless_they_say_otherwise() -> None:
    assert parse_time("2026-11-30T05:00", "--from") == datetime(2026, 11, 30, 5, tzinfo=UTC).timestamp()
    assert parse_time("2026-11-30T05:00+02:00", "--from") == datetime(2026, 11, 30, 3, tzinfo=UTC).timestamp()
    assert parse_start("90m", 10_000.0) == 10_000.0 - 5400
    with pytest.raises(ConfigError, match="before --to"):
        parse_start("0m", 10_000.0)
