"""What charts are drawn with, and what is worked out once for all viewers."""

from __future__ import annotations

import base64
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import plotly
import pytest

from observability.app import charts, charts_trends, settings, sources
from observability.app.derived import shared
from observability.app.sources import CachedSource
from observability.app.trends import Curve
from observability.app.view import View
from observability.errors import StoreError
from observability.store.source import SeriesSource

VIEW = View("m", 1_700_000_000.0, 1_700_000_600.0, 60.0)


def test_the_browser_gets_the_plotly_that_figures_are_checked_against() -> None:
    versions = [
        re.search(r"plotly\.js (?:\(cartesian - minified\) )?v([\d.]+)", path.read_text()[:200])
        for path in (settings.PLOTLY, Path(plotly.__file__).parent / "package_data" / "plotly.min.js")
    ]
    ours, theirs = (found[1] if found else None for found in versions)
    assert ours == theirs, "take plotly.js-cartesian-dist-min of the version that Plotly for Python comes with"


def test_what_is_sent_holds_the_same_numbers_times_and_gaps() -> None:
    values = [0.25, np.nan, 1 / 3]
    times = pd.date_range("2026-03-01", periods=3, freq="min")
    sheet = charts.Sheet(100)
    sheet.add("scatter", x=times, y=pd.Series(values), name="0-2K <b>")
    sheet.add("scatter", x=[1, 2], y=np.array([[1.0, 2.0]]), name="0-2K <b>", marker={"size": pd.Series([3, 4])})
    sheet.rule("#123456", "dot", x=times[1])
    sent = json.loads(sheet.figure().json("1h"))
    first, second = sent["data"]
    assert first["y"]["dtype"] == "f8"
    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(first["y"]["bdata"]), "<f8"), values)
    assert [pd.Timestamp(each) for each in first["x"]] == list(times)
    assert second["y"]["shape"] == "1, 2"
    assert second["marker"]["size"] == [3, 4]
    assert pd.Timestamp(sent["layout"]["shapes"][0]["x0"]) == times[1]
    assert sent["revision"] == "1h"


def test_figures_of_other_pages_have_only_properties_that_plotly_knows() -> None:
    ages = pd.DataFrame({"pool": "exact", "age": [1.0, 10.0], "value": [0.5, 0.25]})
    charts.survival(ages).figure()
    charts.run_bars(pd.DataFrame({"label": ["1"], "length": ["1"], "runs": [3.0]})).figure()
    charts.hit_bars(
        pd.DataFrame({"length_bucket": ["0-2K"], "queried": 9.0, "hittable": 8.0, "hit": 4.0, "hit_of_queried": 4 / 9, "hit_of_hittable": 0.5})
    ).figure()  # fmt: skip
    charts.reliability(pd.DataFrame({"said": [0.1], "came": [0.2], "n": [40]}), 200).figure()
    points = pd.DataFrame(
        {"time": pd.to_datetime([0, 300], unit="s", utc=True), "load": [1.0, 2.0], "latency": [0.2, 0.3]}
    )
    curve = Curve(points, *(np.array([1.0, 2.0]) for _ in range(4)), None, "too few", None)
    charts_trends.latency_against_load(curve, VIEW, charts.Line(0.8, "800 ms"), 200).figure()


def test_points_that_would_cover_each_other_are_drawn_once_and_no_cell_is_lost() -> None:
    rng = np.random.default_rng(0)
    points = pd.DataFrame({"load": rng.random(5000) * 10, "latency": rng.random(5000)})
    kept = charts_trends._apart(points, 1.0, 0.1)
    cells = {(int(x), int(y * 10)) for x, y in zip(points["load"], points["latency"], strict=True)}
    assert len(kept) == len(cells)


@pytest.mark.parametrize(("values", "text"), [([131072.0, 5.0], ",.8~r"), ([0.25, 0.5], ",.5~r"), ([9999.0], ",.5~r")])
def test_hover_has_digits_enough_for_whole_blocks(values: list[float], text: str) -> None:
    data = pd.DataFrame({"time": VIEW.times[: len(values)], "value": values})
    (trace, *_) = charts.lines(data, "blocks", charts.Frame(VIEW)).traces
    assert text in trace["hovertemplate"]


def test_a_figure_with_an_unknown_property_is_refused_in_tests() -> None:
    sheet = charts.Sheet(100)
    sheet.add("scatter", y=[1], collour="red")
    with pytest.raises(ValueError, match="collour"):
        sheet.figure().figure()


@pytest.fixture
def counted() -> tuple[Callable[[SeriesSource, View], int], list[View]]:
    seen: list[View] = []

    @shared
    def work(source: SeriesSource, view: View) -> int:
        seen.append(view)
        return len(seen)

    return work, seen


def test_viewers_of_one_source_share_what_is_worked_out_of_it(
    counted: tuple[Callable[[SeriesSource, View], int], list[View]], monkeypatch: pytest.MonkeyPatch
) -> None:
    work, seen = counted
    monkeypatch.setattr(sources, "_DERIVED", sources._Kept(60.0, 10))
    one, other = CachedSource("one.sqlite"), CachedSource("other.sqlite")
    assert [work(one, VIEW), work(CachedSource("one.sqlite"), VIEW), work(other, VIEW)] == [1, 1, 2]
    assert work(one, VIEW.earlier(60.0)) == 3
    assert work(one.offline(StoreError("gone", next_step="wait")), VIEW) == 4, "of older reads, so not kept"
    assert work(one, VIEW) == 1
    assert len(seen) == 4


def test_a_failure_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_DERIVED", sources._Kept(60.0, 10))
    answers = iter([StoreError("gone", next_step="wait"), 7])

    @shared
    def work(source: SeriesSource, view: View) -> int:
        answer = next(answers)
        if isinstance(answer, StoreError):
            raise answer
        return answer

    with pytest.raises(StoreError):
        work(CachedSource("one.sqlite"), VIEW)
    assert work(CachedSource("one.sqlite"), VIEW) == 7


def test_what_expires_while_it_is_asked_for_is_worked_out_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock is a second later."""
    monkeypatch.setattr(sources, "_DERIVED", sources._Kept(1.5, 10, itertools.count().__next__))
    source = CachedSource("one.sqlite")
    for number in range(20):
        assert source.derived("key", lambda number=number: number) in (number, number - 1)  # type: ignore[misc]
