"""Figures: every value is drawn, gaps stay gaps, colours can be told apart on both backgrounds."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pandas as pd
import pytest

from observability import catalog
from observability.app import charts, settings
from observability.app.marks import Mark
from observability.app.view import VERSUS, View, moment

VIEW = View("m", 1_700_000_000.0, 1_700_000_600.0, 60.0)


def frame_of(values: dict[str, list[float | None]]) -> pd.DataFrame:
    """One row a value at each step of VIEW; None is a missing row."""
    rows = [
        (pd.Timestamp(VIEW.start + 60 * i, unit="s", tz="UTC"), name, value)
        for name, column in values.items()
        for i, value in enumerate(column)
        if value is not None
    ]
    return pd.DataFrame(rows, columns=["time", "series", "value"])


def luminance(colour: str) -> float:
    """Relative luminance (WCAG 2.2)."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))


def lab(linear_rgb: np.ndarray) -> np.ndarray:
    """CIE L*a*b* (D65) of linear sRGB."""
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ linear_rgb
    f = np.cbrt(np.clip(xyz / [0.9505, 1.0, 1.089], 1e-6, None))
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


#: Machado, Oliveira and Fernandes 2009, severity 1.0, on linear RGB.
SEEN_BY = {
    "normal": np.eye(3),
    "protan": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]),
    "deutan": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]),
}  # fmt: skip


def seen(colour: str, eye: str) -> np.ndarray:
    parts = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return lab(np.clip(SEEN_BY[eye] @ linear, 0, 1))


@pytest.mark.parametrize("colour", [*charts.SERIES, charts.OBJECTIVE_LINE])
@pytest.mark.parametrize("background", [settings.LIGHT_BACKGROUND, settings.DARK_BACKGROUND])
def test_every_colour_reads_on_both_backgrounds(colour: str, background: str) -> None:
    low, high = sorted((luminance(colour), luminance(background)))
    assert (high + 0.05) / (low + 0.05) >= 3.0


@pytest.mark.parametrize("eye", SEEN_BY)
@pytest.mark.parametrize(
    "together",
    [
        ("queued", "prefill", "decode", "kv_wait", "preempted"),
        ("forward_prefill", "forward_decode", "schedule"),
        catalog.BLOCK_STATES,
        catalog.LAYOUTS,
        ("P50", "P90", "P99"),
        ("internal", "external"),
    ],
)
def test_colours_shown_together_can_be_told_apart(together: tuple[str, ...], eye: str) -> None:
    for one, other in itertools.combinations(together, 2):
        distance = np.linalg.norm(seen(charts.COLOURS[one], eye) - seen(charts.COLOURS[other], eye))
        assert distance >= 9, (one, other, distance)


def test_every_state_component_layout_and_block_state_has_a_colour() -> None:
    for name in (*catalog.STATES, *catalog.COMPONENTS, *catalog.BLOCK_STATES, *catalog.LAYOUTS):
        assert name in charts.COLOURS


def test_a_line_breaks_where_nothing_was_measured() -> None:
    data = frame_of({"P99": [0.1, 0.2, None, None, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]})
    (trace,) = charts.lines(data, "seconds", charts.Frame(VIEW)).figure().data
    drawn = np.array(trace.y, dtype=float)
    assert np.isnan(drawn[2:4]).all()
    assert not trace.connectgaps
    np.testing.assert_allclose(drawn[~np.isnan(drawn)], np.array(data["value"]) * 1000)


def test_stacked_parts_add_up_at_every_moment_and_leave_a_hole_where_nothing_was_measured() -> None:
    queued, decode = [1.0, 2, 3, None, None, 4, 5, 6, 7, 8, 9], [0.5, 0.5, 0.5, None, None, 1, 1, 1, 1, 1, 1]
    figure = charts.stacked(
        frame_of({"queued": queued, "decode": decode}), "seconds", charts.Frame(VIEW), order=catalog.STATES
    ).figure()
    drawn: dict[pd.Timestamp, float] = {}
    for trace in figure.data:
        for x, y in zip(trace.x, trace.y, strict=True):
            drawn[pd.Timestamp(x)] = drawn.get(pd.Timestamp(x), 0.0) + y
    start = pd.Timestamp(VIEW.start, unit="s")
    expected = {
        start + pd.Timedelta(minutes=i): q + d
        for i, (q, d) in enumerate(zip(queued, decode, strict=True))
        if q is not None and d is not None
    }
    assert drawn == pytest.approx(expected)
    for trace in figure.data:
        times = pd.DatetimeIndex(trace.x)
        assert (np.diff(times) == np.timedelta64(60, "s")).all(), "one area spans the hole"
    assert sum(trace.showlegend for trace in figure.data) == 2


def test_a_moment_on_its_own_is_still_visible() -> None:
    alone = frame_of({"queued": [None, None, 2.0]})
    (area,) = charts.stacked(alone, "seconds", charts.Frame(VIEW), order=catalog.STATES).figure().data
    assert len(area.x) == 2
    line, dot = charts.lines(alone, "seconds", charts.Frame(VIEW)).figure().data
    assert (line.mode, dot.mode) == ("lines", "markers")
    assert (pd.DatetimeIndex(dot.x) == charts.shown(VIEW.times, VIEW.zone)[2:3]).all()
    assert list(dot.y) == [value for value in line.y if value == value]


def test_an_objective_far_above_the_data_does_not_flatten_it() -> None:
    data = frame_of({"P99": [0.010, 0.012]})
    figure = charts.lines(data, "seconds", charts.Frame(VIEW, lines=(charts.Line(20.0, "20 s"),))).figure()
    assert figure.layout.yaxis.range[1] < 20
    assert any("20 s" in (a.text or "") for a in figure.layout.annotations)
    near = charts.lines(data, "seconds", charts.Frame(VIEW, lines=(charts.Line(0.02, "20 ms"),))).figure()
    assert near.layout.yaxis.range[1] > 20
    assert len(near.layout.shapes) == 1


def test_simulated_spans_are_shaded_and_named_only_inside_the_view() -> None:
    data = frame_of({"P99": [0.1, 0.2]})
    inside = charts.lines(
        data, "seconds", charts.Frame(VIEW, simulated=[(VIEW.start - 5000, VIEW.start + 120)])
    ).figure()
    (shade,) = inside.layout.shapes
    assert (shade.x0, shade.x1) == (pd.Timestamp(VIEW.start, unit="s"), pd.Timestamp(VIEW.start + 120, unit="s"))
    assert any("simulated (virtual time)" in a.text for a in inside.layout.annotations)
    outside = charts.lines(
        data, "seconds", charts.Frame(VIEW, simulated=[(VIEW.start - 5000, VIEW.start - 10)])
    ).figure()
    assert not outside.layout.shapes
    assert not outside.layout.annotations


def test_simulated_spans_a_few_points_apart_are_shaded_as_one() -> None:
    data = frame_of({"P99": [0.1, 0.2]})
    start = VIEW.start
    spans = [(start, start + 60), (start + 120, start + 180), (start + 480, start + 500)]
    shades = charts.lines(data, "seconds", charts.Frame(VIEW, simulated=spans)).figure().layout.shapes
    edges = [
        ((pd.Timestamp(s.x0) - moment(start, "UTC")).seconds, (pd.Timestamp(s.x1) - moment(start, "UTC")).seconds)
        for s in shades
    ]
    assert edges == [(0, 180), (480, 500)]


def times_of(trace: Any, count: int) -> pd.DatetimeIndex:
    """The moments of a trace that has them all, or a start and a step."""
    if trace.x is not None:
        return pd.DatetimeIndex(trace.x)
    return pd.DatetimeIndex([pd.Timestamp(trace.x0) + pd.Timedelta(milliseconds=trace.dx * i) for i in range(count)])


def test_times_are_shown_in_the_zone_of_the_view() -> None:
    data = frame_of({"P99": [0.1]})
    (kolkata, *_), (utc, *_) = (
        charts.lines(data, "seconds", charts.Frame(View("m", VIEW.start, VIEW.end, 60.0, zone))).figure().data
        for zone in ("Asia/Kolkata", "UTC")
    )
    assert (times_of(utc, len(utc.y)) == VIEW.times.tz_localize(None)).all()
    assert (times_of(kolkata, len(kolkata.y)) - times_of(utc, len(utc.y)) == pd.Timedelta(hours=5, minutes=30)).all()


@pytest.mark.parametrize("ends", ["2026-10-25T01:10Z", "2026-10-25T01:30Z", "2026-10-25T03:00Z", "2026-03-29T01:20Z"])
def test_a_time_axis_goes_on_over_a_change_of_the_clock(ends: str) -> None:
    """Clocks of Berlin go back at 01:00 UTC on 25 October and forward on 29 March: on the axis no hour comes twice, none is missing, and the
    end is what clocks show then."""
    end = pd.Timestamp(ends)
    view = View("m", end.timestamp() - 3600, end.timestamp(), 600.0, "Europe/Berlin")
    data = pd.DataFrame({"time": view.times, "series": "P99", "value": 0.1})
    figure = charts.lines(data, "seconds", charts.Frame(view, simulated=[(view.start, view.end - 600)])).figure()
    axis = [pd.Timestamp(each) for each in figure.layout.xaxis.range]
    drawn = list(times_of(figure.data[0], len(figure.data[0].y)))
    assert axis[1] == drawn[-1] == end.tz_convert("Europe/Berlin").tz_localize(None)
    assert axis[0] == drawn[0] == axis[1] - pd.Timedelta(hours=1)
    assert (np.diff(pd.DatetimeIndex(drawn)) == np.timedelta64(10, "m")).all()
    (shade,) = [each for each in figure.layout.shapes if each.name == "simulated"]
    assert [pd.Timestamp(shade.x0), pd.Timestamp(shade.x1)] == [drawn[0], drawn[-2]]


def test_areas_that_are_not_in_the_order_are_drawn_over_the_others() -> None:
    data = frame_of({"active": [300.0], "allocatable": [700.0]})
    figure = charts.stacked(data, "blocks", charts.Frame(VIEW), order=("active", "free")).figure()
    assert [trace.name for trace in figure.data] == ["active", "allocatable"]
    assert sum(max(trace.y) for trace in figure.data) == pytest.approx(1000)


def test_a_heatmap_has_all_regions_and_leaves_unmeasured_cells_empty() -> None:
    data = frame_of({"03": [0.25, 0.5]}).rename(columns={"series": "region"})
    (trace,) = charts.heatmap(data, charts.Frame(VIEW), title="active").figure().data
    cells = np.array(trace.z, dtype=float)
    assert cells.shape == (32, 11)
    np.testing.assert_allclose(cells[3, :2], [25, 50])
    assert np.isnan(np.delete(cells, 3, axis=0)).all()
    assert np.isnan(cells[3, 2:]).all()


def test_make_up_bars_add_up_to_the_latency() -> None:
    rows = {
        "slowest 1 %": pd.Series({"queued": 1.0, "decode": 0.5, "swapped": 0.0}),
        "slower half": pd.Series({"queued": 0.1, "decode": 0.4, "swapped": 0.0}),
    }
    figure = charts.makeup_bars(rows).figure()
    assert {trace.name for trace in figure.data} == {"queued", "decode"}
    np.testing.assert_allclose(np.sum([trace.x for trace in figure.data], axis=0), [1.5, 0.5])


def test_slivers_of_a_make_up_are_drawn_and_not_in_the_legend() -> None:
    """Ten entries would lie over the bars; what is below 1 % of every row is named on hover alone."""
    rows = {
        "slowest 1 %": pd.Series({"forward_prefill": 9.0, "forward_decode": 0.95, "emit": 0.05}),
        "slower half": pd.Series({"forward_prefill": 3.0, "forward_decode": 1.0, "emit": 0.01}),
    }
    drawn = {bar.name: bar for bar in charts.makeup_bars(rows).figure().data}
    assert {name for name, bar in drawn.items() if bar.showlegend} == {"forward prefill", "forward decode"}
    assert sum(bar.x[0] for bar in drawn.values()) == pytest.approx(10.0)
    assert sum(bar.x[1] for bar in drawn.values()) == pytest.approx(4.01)


@pytest.mark.parametrize(
    ("zone", "end", "yesterday", "last_week"),
    [
        ("Europe/Berlin", "2027-03-28 14:00+02:00", "2027-03-27 14:00+01:00", "2027-03-21 14:00+01:00"),
        ("Europe/Berlin", "2026-10-25 14:00+01:00", "2026-10-24 14:00+02:00", "2026-10-18 14:00+02:00"),
        ("UTC", "2027-03-28 12:00+00:00", "2027-03-27 12:00+00:00", "2027-03-21 12:00+00:00"),
        ("Australia/Lord_Howe", "2027-04-04 14:00+10:30", "2027-04-03 14:00+11:00", "2027-03-28 14:00+11:00"),
    ],
)
def test_yesterday_and_last_week_are_the_same_time_by_the_clocks(
    zone: str, end: str, yesterday: str, last_week: str
) -> None:
    """Where clocks changed between, a day is 23, 25 or 24.5 hours."""
    at = pd.Timestamp(end).timestamp()
    view = View("m", at - 3600, at, 15.0, zone)
    for days, then in ((VERSUS["yesterday"], yesterday), (VERSUS["last week"], last_week)):
        earlier = view.days_before(days)
        assert earlier.end == pd.Timestamp(then).timestamp()
        assert (earlier.seconds, earlier.step, earlier.zone) == (3600.0, 15.0, zone)


def test_an_earlier_day_is_drawn_dotted_and_fits_the_axis() -> None:
    now, before = frame_of({"P99": [0.1, 0.2]}), frame_of({"P99": [0.4, 0.5]})
    figure = charts.lines(now, "seconds", charts.Frame(VIEW, earlier=charts.Earlier(before, "yesterday"))).figure()
    dotted, solid = figure.data
    assert (dotted.line.dash, solid.line.dash) == ("dot", None)
    assert dotted.name == "P99 yesterday"
    np.testing.assert_allclose(dotted.y[:2], [400, 500])
    assert figure.layout.yaxis.range[1] >= 500


def test_a_stack_is_compared_by_its_total() -> None:
    now = frame_of({"queued": [1.0, 2], "decode": [1.0, 1]})
    before = frame_of({"queued": [4.0, 5], "decode": [0.5, 0.5]})
    frame = charts.Frame(VIEW, earlier=charts.Earlier(before, "last week"))
    total = charts.stacked(now, "seconds", frame, order=catalog.STATES).figure().data[-1]
    assert total.name == "total last week"
    assert list(total.y[:2]) == [4.5, 5.5]


def test_deploys_are_lines_and_incidents_are_shades_with_their_text_on_hover() -> None:
    start = VIEW.start
    marks = (
        Mark("deploy", start + 120, None, "version 1.3"),
        Mark("incident", start - 600, start + 60, "KvscopeTTFTBudgetBurn"),
        Mark("incident", start - 900, start - 600, "before the view"),
    )
    layout = charts.lines(frame_of({"P99": [0.1, 0.2]}), "seconds", charts.Frame(VIEW, marks=marks)).figure().layout
    deploy, incident = layout.shapes
    assert (deploy.type, pd.Timestamp(deploy.x0)) == ("line", moment(start + 120, "UTC"))
    assert (pd.Timestamp(incident.x0), pd.Timestamp(incident.x1)) == (moment(start, "UTC"), moment(start + 60, "UTC"))
    assert ["version 1.3" in note.hovertext for note in layout.annotations] == [True, False]
    assert layout.annotations[0].text != layout.annotations[1].text, "told apart without colour"


def test_an_incident_shades_its_span_and_one_that_lasts_most_of_the_view_is_a_strip() -> None:
    data = frame_of({"P99": [0.1, 0.2, 0.3]})
    for share, top in ((0.3, 1), (0.9, 0.03)):
        mark = Mark("incident", VIEW.start, VIEW.start + share * VIEW.seconds, "burns")
        figure = charts.lines(data, "seconds", charts.Frame(VIEW, marks=(mark,))).figure()
        (shade,) = [shape for shape in figure.layout.shapes if shape.name == "incident"]
        assert shade.y1 == top
        assert (pd.Timestamp(shade.x1) - pd.Timestamp(shade.x0)).total_seconds() == pytest.approx(share * VIEW.seconds)
