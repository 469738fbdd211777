"""Figures from frames: pure functions, tested without a browser. Colours read on light and on dark backgrounds alike.

Streamlit gives text, grid and background the colours of the theme; everything drawn here uses mid tones (at least 3:1
against both backgrounds, tests/app/test_charts.py) that stay apart in the common forms of colour blindness.
"""

from __future__ import annotations

import base64
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
import pandas as pd
import plotly.graph_objects as go

from observability import catalog
from observability.app.marks import Mark
from observability.app.units import axis_unit, axis_units, quantity
from observability.app.view import View, moment, shown, unix_seconds

BLUE, ORANGE, GREEN, PINK, VIOLET = "#2f7fc1", "#d2761b", "#159a80", "#c2609f", "#8269d4"
RED, OCHRE, STEEL, OLIVE, GREY = "#d1493f", "#a3812a", "#4f95a8", "#6f9340", "#82878f"
SERIES = (BLUE, ORANGE, GREEN, PINK, VIOLET, OCHRE, STEEL, RED, OLIVE, GREY)

#: A label value has one colour on every page.
COLOURS: dict[str, str] = {
    **dict(zip(catalog.SHOWN_STATES, (ORANGE, PINK, BLUE, GREEN, RED, VIOLET, OLIVE), strict=True)),
    **dict(
        zip(
            catalog.SHOWN_COMPONENTS,
            (OCHRE, VIOLET, PINK, STEEL, RED, BLUE, GREEN, OLIVE, ORANGE, GREY, STEEL),
            strict=True,
        )
    ),
    **dict(zip(catalog.BLOCK_STATES, (GREY, STEEL, BLUE), strict=True)),
    catalog.ALLOCATABLE: GREY,
    **dict(zip(catalog.LAYOUTS, (BLUE, ORANGE, GREEN), strict=True)),
    "P50": STEEL, "P90": BLUE, "P99": ORANGE,
    "stop": BLUE, "length": GREEN, "abort": OCHRE, "error": RED, "rejected": PINK, "deadline": VIOLET, "invalid": OLIVE,
    "internal": BLUE, "external": ORANGE,
}  # fmt: skip
OBJECTIVE_LINE = RED
#: Colour and sign of what is marked in time charts.
MARKS = {"deploy": (STEEL, "▲"), "incident": (RED, "⚠")}
_SIMULATED_FILL = "rgba(130,105,212,0.09)"


@dataclass(frozen=True, slots=True)
class Line:
    """A horizontal line: an objective or a budget, in the unit of the chart."""

    value: float
    label: str


@dataclass(frozen=True, slots=True)
class Earlier:
    """The rows of an earlier span moved onto the times of the view; `when` in words: yesterday."""

    data: pd.DataFrame
    when: str


@dataclass(frozen=True, slots=True)
class Frame:
    """What surrounds the data of a time chart: the view, spans of virtual time, lines to compare with, height in px, deploys
    and incidents, and the same of an earlier time."""

    view: View
    simulated: Sequence[tuple[float, float]] = ()
    lines: Sequence[Line] = ()
    height: int = 210
    marks: Sequence[Mark] = ()
    earlier: Earlier | None = None


def readable(label: str) -> str:
    """A label value as words: forward_prefill -> forward prefill, kv_wait -> KV wait."""
    return label.replace("_", " ").replace("kv ", "KV ")


@dataclass(frozen=True, slots=True)
class Drawing:
    """A figure as plain dictionaries, for chart.js: to make, fill and copy a figure of Plotly takes longer than all else of a chart."""

    traces: list[dict[str, Any]]
    layout: dict[str, Any]

    def json(self, revision: str = "", heading: str = "") -> bytes:
        """As chart.js takes it. What a reader did to a chart (zoom, hidden lines) stays as long as `revision` does. `heading`: HTML to stand
        over it, of the program's own words."""
        data = [{name: _plain(value) for name, value in trace.items()} for trace in self.traces]
        sent = {"data": data, "layout": _plain(self.layout), "revision": revision, "heading": heading}
        return orjson.dumps(sent, option=orjson.OPT_SERIALIZE_NUMPY)

    def figure(self) -> go.Figure:
        """The same as a figure of Plotly, each property checked. Raises ValueError for one that Plotly does not have."""
        return go.Figure(self.traces, self.layout)


def _plain(value: Any) -> Any:
    """`value` without what JSON does not have: moments are text, arrays of numbers what plotly.js calls typed arrays."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, pd.Timestamp):
        return value.isoformat()
    if isinstance(value, pd.Series | pd.Index):
        value = value.to_numpy()
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype.kind == "M":
        return np.datetime_as_string(value, unit="ms").tolist()
    if value.dtype.kind != "f":
        return value.tolist()
    dtype = "f4" if value.dtype == np.float32 else "f8"
    numbers = np.ascontiguousarray(value, dtype=f"<{dtype}")
    packed = {"dtype": dtype, "bdata": base64.b64encode(numbers.tobytes()).decode()}
    return packed if value.ndim == 1 else packed | {"shape": ", ".join(map(str, value.shape))}


class Sheet:
    """A figure in the making, as plain dictionaries: Plotly's own updates cost ten times as much."""

    def __init__(self, height: int, **layout: Any) -> None:
        self.traces: list[dict[str, Any]] = []
        self.x: dict[str, Any] = {"automargin": True, "zeroline": False, "showgrid": False}
        self.y: dict[str, Any] = {"automargin": True, "zeroline": False, "nticks": 5, "ticklabeloverflow": "allow"}
        self.margin = {"l": 8, "r": 8, "t": 4, "b": 4}
        self.shapes: list[dict[str, Any]] = []
        self.notes: list[dict[str, Any]] = []
        self.layout: dict[str, Any] = {
            "height": height,
            "font": {"size": 11},
            "hoverlabel": {"font": {"size": 12}},
            **layout,
        }

    def add(self, kind: str, **trace: Any) -> None:
        """Adds a trace."""
        self.traces.append({"type": kind, **trace})

    def note(self, text: str, colour: str, **place: Any) -> None:
        """Adds small text in paper coordinates unless `place` says otherwise."""
        look = {
            "text": text,
            "showarrow": False,
            "font": {"size": 10, "color": colour},
            "xref": "paper",
            "yref": "paper",
        }
        self.notes.append(look | place)

    def rule(self, colour: str, dash: str, *, x: Any = None, y: float | None = None) -> None:
        """A straight line over the whole plot, at `x` or at `y`."""
        ends = {"y0": 0, "y1": 1, "yref": "paper", "x0": x, "x1": x} if y is None else {"x0": 0, "x1": 1, "xref": "paper", "y0": y, "y1": y}  # fmt: skip
        self.shapes.append({"type": "line", **ends, "line": {"color": colour, "width": 1.2, "dash": dash}})

    def figure(self) -> Drawing:
        """The finished figure."""
        legend = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "xanchor": "left", "entrywidth": 0,
                  "font": {"size": 11}, "traceorder": "normal"}  # fmt: skip
        layout = {
            "xaxis": self.x,
            "yaxis": self.y,
            "margin": self.margin,
            "shapes": self.shapes,
            "annotations": self.notes,
        }
        return Drawing(self.traces, {"legend": legend, **layout, **self.layout})


def _time_axis(sheet: Sheet, frame: Frame, *, covered: bool = False) -> None:
    """The time axis of the view, with simulated spans shaded; where the chart is `covered`, a bar over it marks them."""
    view = frame.view
    sheet.margin["b"] = 22
    sheet.x |= {
        "automargin": False,
        "type": "date",
        "range": [moment(view.start, view.clock), moment(view.end, view.clock)],
    }
    days = {"tickformat": "%-d %b", "dtick": 86_400_000 * (1 if view.seconds < 5 * 86400 else 2)}  # at midnight
    sheet.x |= days if view.seconds > 86400 else {"tickformat": "%H:%M", "nticks": 6}
    _marks(sheet, frame)
    inside = _inside(frame.simulated, view)
    if not inside:
        return
    top = sheet.y["range"][1] if "range" in sheet.y else np.inf
    crossed = any(shape.get("xref") == "paper" and shape["y0"] > 0.78 * top for shape in sheet.shapes)
    height = {"y0": 1.01, "y1": 1.03} if covered else {"y0": 0, "y1": 1}
    for low, high in inside:
        ends = {"x0": moment(low, view.clock), "x1": moment(high, view.clock), "yref": "paper", **height}
        look = {"fillcolor": VIOLET if covered else _SIMULATED_FILL, "line": {"width": 0}, "layer": "below"}
        sheet.shapes.append({"type": "rect", "name": "simulated", **ends, **look})
    low, high = inside[0]
    late = low > view.start + 0.5 * view.seconds  # little room to the right of its start
    sheet.note(
        "simulated (virtual time)", VIOLET, name="simulated", x=moment(high if late else low, view.clock), xref="x",
        xanchor="right" if late else "left", xshift=-2 if late else 2, y=1.03 if covered else 1,
        yanchor="bottom" if covered else "top", yshift=-13 if crossed else 0,
    )  # fmt: skip
    if covered:
        sheet.margin["t"] = 20


def _marks(sheet: Sheet, frame: Frame) -> None:
    """Deploys as a dotted line under a triangle, incidents as a shade (a strip where it would cover most) under a warning sign; what they
    were, on hover."""
    view = frame.view
    for mark in frame.marks:
        low, high = max(mark.start, view.start), min(mark.start if mark.end is None else mark.end, view.end)
        if low > high:
            continue
        colour, sign = MARKS[mark.kind]
        if high > low:
            whole = (
                high - low <= 0.5 * view.seconds
            )  # a longer one would only tint the chart: a strip at its foot says it
            top, opacity = (1, 0.1) if whole else (0.03, 0.6)
            ends = {"x0": moment(low, view.clock), "x1": moment(high, view.clock), "y0": 0, "y1": top, "yref": "paper"}
            look = {"fillcolor": faded(colour, opacity), "line": {"width": 0}, "layer": "below"}
            sheet.shapes.append({"type": "rect", "name": mark.kind, **ends, **look})
        else:
            sheet.rule(colour, "dot", x=moment(low, view.clock))
            sheet.shapes[-1]["name"] = mark.kind
        sheet.note(
            sign, colour, name=mark.kind, x=moment(low, view.clock), xref="x", y=0, yanchor="bottom", hovertext=mark.told(view.zone),
            font={"size": 12, "color": colour},
        )  # fmt: skip


def _inside(spans: Sequence[tuple[float, float]], view: View) -> list[tuple[float, float]]:
    """The parts of `spans` inside the view; those that a few points apart from each other are one."""
    merged: list[tuple[float, float]] = []
    for low, high in sorted(
        (max(a, view.start), min(b, view.end)) for a, b in spans if b > view.start and a < view.end
    ):
        if merged and low - merged[-1][1] <= max(2 * view.step, 120.0):
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return merged


def _value_axis(sheet: Sheet, unit: str, largest: float, lines: Sequence[Line], bounded: bool = False) -> float:
    """Sets the y axis for values up to `largest` in `unit`; returns the factor that values are drawn with."""
    top = max([largest, *(line.value for line in lines if line.value <= 4 * largest or not largest)])
    factor, name = axis_unit(unit, top)
    if unit in ("requests", "blocks", "tokens"):
        top = max(top, 3.0)  # whole things: no ticks between 0 and 1
    far = [line for line in lines if line.value > top * 1.12 and not bounded]
    ceiling = 1.0 if bounded else (top or 1.0) * (1.35 if far else 1.12)
    suffix = {"seconds": f" {name}", "ratio": "%", "bytes": f" {name}"}.get(unit, "")
    sheet.y |= {"range": [0, ceiling * factor], "ticksuffix": suffix, "automargin": False}
    # Room for the longest label, so that Plotly need not draw twice to find it.
    longest = max(min(len(f"{part:.3g}"), 5) for part in ceiling * factor * np.linspace(0, 1, 5)) + len(suffix)
    sheet.margin["l"] = 10 + round(6.3 * max(longest, 4))
    for line in lines:
        if line in far:  # drawn to scale it would flatten the data, so it is told in words
            sheet.note(f"{line.label} ↑", OBJECTIVE_LINE, x=1, y=1, xanchor="right", yanchor="top")
            continue
        at = line.value * factor
        sheet.rule(OBJECTIVE_LINE, "dash", y=at)
        sheet.note(line.label, OBJECTIVE_LINE, x=1, y=at, yref="y", xanchor="left", yanchor="middle", xshift=2)
        sheet.margin["r"] = 6 + 6 * len(line.label)
    return factor


def _on_grid(data: pd.DataFrame, view: View, names: pd.Series, *, adding: bool = False) -> dict[str, np.ndarray]:
    """`value` by name on the grid of the view, NaN where the source has no row, so that lines break at gaps. `names`: one for each row. Of two
    rows of one name and time the later counts; with `adding` they add up."""
    codes, found = pd.factorize(names)
    times, values = unix_seconds(data["time"]), data["value"].to_numpy(dtype=float)
    place = (times - view.start) / view.step
    there = (np.abs(place - place.round()) < 1e-3) & (times >= view.start) & (times <= view.end)
    there &= (codes >= 0) & np.isfinite(values)
    out = np.full((len(found), len(view.times)), np.nan)
    at = codes[there], place[there].round().astype(int)
    if adding:
        out[at] = 0.0
        np.add.at(out, at, values[there])
    else:
        out[at] = values[there]
    return dict(zip(found, out, strict=True))


@functools.lru_cache(64)
def _times(view: View) -> dict[str, Any]:
    """The grid of the view as Plotly takes it: a start and a step, which spares a browser a text for each point."""
    return {"x0": moment(view.start, view.clock).isoformat(), "dx": 1000.0 * view.step}


#: Of more points than these only those that stand alone are marked.
MARKED = 60


def _hover(unit: str, factor: float, largest: float) -> str:
    """Hover text of values up to `largest` in `unit`, drawn with `factor`, by the browser: a text for each point would be most of what a page
    sends."""
    name = {found: name for found, name in axis_units(unit)}[factor]
    return f"%{{y:{_digits(factor * largest)}}} {name}"


def _digits(largest: float) -> str:
    """d3 format of five digits; of whole thousands there are more to tell."""
    return ",.8~r" if largest >= 1e4 else ",.5~r"


def lines(data: pd.DataFrame, unit: str, frame: Frame, *, bounded: bool = False, order: Sequence[str] = ()) -> Drawing:
    """One line a series. `data`: time, value and optionally series. `bounded`: the axis ends at 1 (shares)."""
    sheet = Sheet(frame.height, hovermode="x unified")
    past = frame.earlier.data if frame.earlier is not None and len(frame.earlier.data) else data.iloc[:0]
    found, before = (
        _on_grid(rows, frame.view, rows["series"] if "series" in rows else pd.Series("", rows.index))
        for rows in (data, past)
    )
    largest = max(float(rows["value"].max()) for rows in (data, past) if len(rows))
    factor = _value_axis(sheet, unit, largest, frame.lines, bounded)
    names = [name for name in order if name in found] or sorted(found)
    for i, name in enumerate(names):
        colour = COLOURS.get(name, SERIES[i % len(SERIES)])
        if name in before:
            _earlier_line(sheet, frame, before[name], unit, factor, name, colour if len(names) > 1 else GREY)
        values = found[name] * factor
        sheet.add(
            "scatter",
            **_times(frame.view), y=values, name=readable(name), mode="lines",
            line={"color": colour, "width": 1.8}, legendgroup=name,
            hovertemplate=_hover(unit, factor, largest), showlegend=len(names) > 1,
        )  # fmt: skip
        if len(names) == 1:
            sheet.traces[-1] |= {"fill": "tozeroy", "fillcolor": faded(colour, 0.10)}
        _lonely(sheet, frame.view.times, values, frame, colour, name)
    _time_axis(sheet, frame)
    return sheet.figure()


def _lonely(sheet: Sheet, times: pd.DatetimeIndex, values: np.ndarray, frame: Frame, colour: str, group: str) -> None:
    """Dots where a value stands between gaps, which no line would show. A trace of their own: a browser takes a node for each marker of a
    trace, seen or not."""
    gap = np.isnan(np.concatenate(([np.nan], values, [np.nan])))
    alone = ~gap[1:-1] & gap[:-2] & gap[2:]
    if alone.any():
        sheet.add(
            "scatter", x=shown(times[alone], frame.view.clock), y=values[alone], mode="markers", marker={"size": 4, "color": colour},
            legendgroup=group, showlegend=False, hoverinfo="skip",
        )  # fmt: skip


def _earlier_line(
    sheet: Sheet, frame: Frame, values: np.ndarray, unit: str, factor: float, name: str, colour: str
) -> None:
    """A dotted line of what was at the same time of an earlier day."""
    assert frame.earlier is not None
    sheet.add(
        "scatter",
        **_times(frame.view), y=values * factor, mode="lines",
        name=f"{readable(name)} {frame.earlier.when}".strip(), line={"color": colour, "width": 1.3, "dash": "dot"},
        hovertemplate=_hover(unit, factor, float(np.nanmax(values, initial=0.0))), showlegend=name == "total",
    )  # fmt: skip


def faded(colour: str, opacity: float) -> str:
    """`colour` (#rrggbb) with an opacity."""
    r, g, b = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({r},{g},{b},{opacity:g})"


def stacked(data: pd.DataFrame, unit: str, frame: Frame, *, order: Sequence[str], share: bool = False) -> Drawing:
    """Stacked areas by series, bottom first in `order` (others over these). Where nothing was measured there is a hole, not 0."""
    sheet = Sheet(frame.height, hovermode="x unified")
    view = frame.view
    found = _on_grid(data, view, data["series"], adding=True)
    present = [name for name in order if name in found] + sorted(set(found) - set(order))
    parts = np.array([found[name] for name in present]).reshape(len(present), len(view.times))
    measured = ~np.isnan(parts).all(axis=0)
    parts = np.nan_to_num(parts)  # the others of a moment were measured: this one took no part in it
    total = None
    if frame.earlier is not None and len(frame.earlier.data) and not share:
        past = frame.earlier.data
        total = _on_grid(past, view, pd.Series("total", past.index), adding=True)["total"]
    largest = max(float(parts.sum(axis=0).max()), 0.0 if total is None else float(np.nanmax(total, initial=0.0)))
    factor = _value_axis(sheet, unit, largest, frame.lines, bounded=share)
    (at,) = np.nonzero(measured)
    for number, piece in enumerate(np.split(at, np.nonzero(np.diff(at) > 1)[0] + 1) if len(at) else ()):
        place: dict[str, Any] = {"x": shown(view.times[piece], view.clock)}
        if len(piece) == 1:  # an area needs two points to be seen
            half = pd.Timedelta(seconds=view.step / 4)
            place = {
                "x": shown(pd.DatetimeIndex([view.times[piece[0]] - half, view.times[piece[0]] + half]), view.clock)
            }
            piece = piece.repeat(2)
        elif len(piece) == len(view.times):
            place = _times(view)
        for i, name in enumerate(present):
            colour = COLOURS.get(name, SERIES[i % len(SERIES)])
            told = parts[i].max() >= 0.01 * largest  # slivers are named on hover
            sheet.add(
                "scatter",
                **place, y=parts[i][piece] * factor, name=readable(name),
                stackgroup=f"piece{number}", legendgroup=name, showlegend=bool(number == 0 and told), mode="lines",
                line={"width": 0.6, "color": colour}, fillcolor=faded(colour, 0.75),
                hovertemplate=_hover(unit, factor, largest),
            )  # fmt: skip
    if total is not None:
        _earlier_line(sheet, frame, total, unit, factor, "total", GREY)
    _time_axis(sheet, frame)
    return sheet.figure()


def heatmap(data: pd.DataFrame, frame: Frame, *, title: str) -> Drawing:
    """Address regions (down) by time (across); `data`: time, region, value in 0..1. Unmeasured cells stay empty."""
    sheet = Sheet(frame.height)
    view = frame.view
    found, empty = _on_grid(data, view, data["region"]), np.full(len(view.times), np.nan)
    cells = np.array([found.get(region, empty) for region in catalog.REGION_LABELS], dtype=np.float32)
    sheet.add(
            "heatmap",
        **_times(view), y=list(catalog.REGION_LABELS), z=100 * cells,  # shown with three digits
        zmin=0, zmax=100, colorscale="Cividis", hoverongaps=False,
        colorbar={"thickness": 8, "ticksuffix": "%", "outlinewidth": 0, "nticks": 3, "tickfont": {"size": 10}, "xpad": 4},
        hovertemplate=f"region %{{y}}, %{{x}}<br>{title} %{{z:.1f}} %<extra></extra>",
    )  # fmt: skip
    sheet.y |= {"showgrid": False, "title": {"text": "region", "standoff": 2, "font": {"size": 10}}}
    _time_axis(sheet, frame, covered=True)
    return sheet.figure()


def hit_bars(data: pd.DataFrame, height: int = 210) -> Drawing:
    """Two bars a prompt-length bucket: hits of queried and of hittable tokens; under each the tokens that were asked."""
    sheet = Sheet(height, barmode="group", bargap=0.3, bargroupgap=0.06)
    ticks = [f"{b}<br>{quantity(q, 'tokens')}" for b, q in zip(data["length_bucket"], data["queried"], strict=True)]
    for column, name, of, colour in (
        ("hit_of_queried", "of queried", "queried", BLUE),
        ("hit_of_hittable", "of hittable", "hittable", GREEN),
    ):
        shares = data[column] * 100
        sheet.add(
            "bar",
            x=ticks, y=shares, name=name, marker={"color": colour},
            text=[f"{v:.0f}%" if pd.notna(v) else "" for v in shares], textposition="outside", textfont={"size": 10},
            cliponaxis=False,
            customdata=[(quantity(h, "tokens"), quantity(d, "tokens"), quantity(s, "ratio"))
                        for h, d, s in zip(data["hit"], data[of], data[column], strict=True)],
            hovertemplate=f"%{{customdata[2]}}: %{{customdata[0]}} hit of %{{customdata[1]}} {of}<extra></extra>",
        )  # fmt: skip
    sheet.y |= {"range": [0, 112], "ticksuffix": "%", "tickvals": [0, 25, 50, 75, 100]}
    return sheet.figure()


def run_bars(data: pd.DataFrame, height: int = 210) -> Drawing:
    """Free runs by length in blocks."""
    sheet = Sheet(height, bargap=0.15)
    sheet.add(
            "bar",
        x=data["label"], y=data["runs"], marker={"color": STEEL},
        text=[f"{v:,.0f}" if v else "" for v in data["runs"]], textposition="outside", textfont={"size": 10}, cliponaxis=False,
        customdata=data["length"], hovertemplate="%{y:,.0f} runs of %{customdata} blocks<extra></extra>",
    )  # fmt: skip
    title = {"text": "up to … adjacent allocatable blocks", "font": {"size": 10}, "standoff": 2}
    sheet.x |= {"type": "category", "tickangle": 0, "title": title}
    sheet.y |= {"range": [0, max(float(data["runs"].max()), 4.0) * 1.2]}
    return sheet.figure()


def survival(data: pd.DataFrame, height: int = 210) -> Drawing:
    """Share that lives longer than an age, one step line a pool, over ages on a log axis. `data`: pool, age (seconds), value."""
    sheet = Sheet(height, hovermode="x unified")
    for i, (pool, rows) in enumerate(data.groupby("pool")):
        sheet.add(
            "scatter",
            x=rows["age"], y=rows["value"] * 100, name=readable(str(pool)), mode="lines+markers", showlegend=data["pool"].nunique() > 1,
            line={"color": SERIES[i % len(SERIES)], "width": 1.8}, marker={"size": 4},
            customdata=[f"{quantity(v, 'ratio')} live longer than {quantity(a, 'seconds')}" for a, v in zip(rows["age"], rows["value"], strict=True)],
            hovertemplate="%{customdata}",
        )  # fmt: skip
    ages = [a for a in (0.1, 1, 10, 60, 600, 3600, 86400) if data["age"].min() <= a <= data["age"].max()]
    sheet.x |= {
        "type": "log",
        "tickvals": ages,
        "ticktext": [quantity(a, "seconds").replace(".00", "").replace(".0", "") for a in ages],
        "showgrid": True,
    }
    sheet.y |= {"range": [0, 104], "ticksuffix": "%", "tickvals": [0, 25, 50, 75, 100]}
    return sheet.figure()


def _fitting(text: str, share_of_width: float) -> str:
    """`text` if about 80 characters fit the whole width and it fits its share of it."""
    return text if len(text) + 1 <= 80 * share_of_width else ""


def makeup_bars(rows: Mapping[str, pd.Series], height: int = 210) -> Drawing:
    """One horizontal stacked bar a row (for example P99 and the slowest half): seconds by part, in the order given. The
    legend names parts of at least 1 % of a row; the others are drawn and named on hover."""
    sheet = Sheet(height, barmode="stack", bargap=0.35)
    longest = max(float(parts.sum()) for parts in rows.values())
    factor, unit = axis_unit("seconds", longest)
    names = list(dict.fromkeys(name for parts in rows.values() for name in parts.index))
    labels = [f"{row}<br><b>{quantity(float(parts.sum()), 'seconds')}</b>" for row, parts in rows.items()]
    for i, name in enumerate(names):
        values = [float(parts.get(name, 0.0)) for parts in rows.values()]
        if not any(values):
            continue
        shares = [value / float(parts.sum()) for value, parts in zip(values, rows.values(), strict=True)]
        sheet.add(
            "bar",
            y=labels, x=np.array(values) * factor, orientation="h", name=readable(name),
            marker={"color": COLOURS.get(name, SERIES[i % len(SERIES)]), "line": {"width": 0}},
            text=[_fitting(f"{readable(name)} {s:.0%}", v / longest) for v, s in zip(values, shares, strict=True)], textposition="inside",
            insidetextanchor="middle", textangle=0, textfont={"size": 11, "color": "white"}, constraintext="none",
            customdata=[(quantity(v, "seconds"), quantity(s, "ratio")) for v, s in zip(values, shares, strict=True)],
            showlegend=max(shares) >= 0.01,
            hovertemplate=f"{readable(name)}: %{{customdata[0]}} (%{{customdata[1]}})<extra></extra>",
        )  # fmt: skip
    sheet.x |= {"showgrid": True, "ticksuffix": f" {unit}", "nticks": 6}
    sheet.y |= {"autorange": "reversed"}
    return sheet.figure()


def forecast(
    came: pd.DataFrame, past: pd.DataFrame, ahead: pd.DataFrame, unit: str, frame: Frame, *,
    median: str, bands: Mapping[float, tuple[str, str]], bounded: bool = False,
) -> Drawing:  # fmt: skip
    """What came, what was forecast an hour before it (widest band faint), and what is forecast now with its bands.

    All are means over the ten minutes before their `time`, in the unit of the signal, drawn at the middle of these.
    `came` has time, value; `past` and `ahead` have time, `median` and the columns of `bands` (share -> lower, upper).
    """
    sheet = Sheet(frame.height, hovermode="x unified")
    view, widest = frame.view, bands[max(bands)]
    tops = [float(top.max()) for top in (came["value"], past[median], ahead[widest[1]]) if len(top)]
    factor = _value_axis(sheet, unit, max(tops, default=0.0), frame.lines, bounded)
    hover = _hover(unit, factor, max(tops, default=0.0))

    def middle(times: pd.Series | pd.DatetimeIndex) -> pd.DatetimeIndex:
        return shown(pd.DatetimeIndex(times) - pd.Timedelta(minutes=5), view.clock)

    def band(data: pd.DataFrame, share: float, colour: str) -> None:
        for column, fill in zip(bands[share], (None, "tonexty"), strict=True):
            sheet.add(
            "scatter",
                x=middle(data["time"]), y=data[column] * factor, mode="lines", line={"width": 0}, fill=fill,
                fillcolor=faded(colour, 0.16), hoverinfo="skip", showlegend=False,
            )  # fmt: skip

    def centre(data: pd.DataFrame, name: str, **look: Any) -> None:
        ends = np.column_stack([data[column] * factor for column in widest])
        digits = _digits(factor * max(tops, default=0.0))
        said = f"{hover} (%{{customdata[0]:{digits}}} to %{{customdata[1]:{digits}}})"
        sheet.add(
            "scatter",
            x=middle(data["time"]), y=data[median] * factor, name=name, customdata=ends, hovertemplate=said, **look
        )  # fmt: skip

    if len(past):
        band(past, max(bands), STEEL)
        centre(past, "made 1 h ago", mode="lines", line={"color": STEEL, "width": 1.4, "dash": "dot"})
    means = came.set_index("time")["value"].resample("10min").mean()  # a missing ten minutes breaks the line
    means.index = pd.DatetimeIndex(means.index) - pd.Timedelta(minutes=5)
    sheet.add(
            "scatter",
        x=shown(pd.DatetimeIndex(means.index), view.clock), y=means * factor, name="measured", legendgroup="measured",
        mode="lines+markers" if len(means) <= MARKED else "lines",
        line={"color": BLUE, "width": 1.8}, marker={"size": 3}, hovertemplate=hover,
    )  # fmt: skip
    if len(means) > MARKED:
        _lonely(sheet, pd.DatetimeIndex(means.index), (means * factor).to_numpy(), frame, BLUE, "measured")
    if len(ahead):
        for share in sorted(bands, reverse=True):
            band(ahead, share, ORANGE)
        centre(ahead, "forecast", mode="lines+markers", line={"color": ORANGE, "width": 2}, marker={"size": 5})
    _time_axis(sheet, frame)
    now = moment(view.end, view.clock)
    sheet.x["range"] = [moment(view.start, view.clock), max([now, *shown(pd.DatetimeIndex(ahead["time"]), view.clock)])]
    sheet.rule(GREY, "dot", x=now)
    return sheet.figure()


def reliability(table: pd.DataFrame, height: int) -> Drawing:
    """How often what was said with a chance came true, beside the line on which all chances are right. `table`: said, came, n."""
    sheet = Sheet(height)
    sheet.add(
            "scatter",
        x=[0, 100], y=[0, 100], mode="lines", name="as said", line={"color": GREY, "width": 1.4, "dash": "dot"}, hoverinfo="skip",
    )  # fmt: skip
    sheet.add(
            "scatter",
        x=table["said"] * 100, y=table["came"] * 100, mode="lines+markers", name="came true", customdata=table["n"],
        line={"color": ORANGE, "width": 1.8}, marker={"size": 5 + 3 * np.log10(table["n"])},
        hovertemplate="said %{x:.0f} %, came true %{y:.0f} % of %{customdata}<extra></extra>",
    )  # fmt: skip
    title = {"text": "chance that was said", "font": {"size": 10}, "standoff": 2}
    quarters = {"tickvals": [0, 25, 50, 75, 100], "ticktext": ["0%", "25%", "50%", "75%", "100%"]}
    sheet.x |= {"range": [-2, 102], "title": title, **quarters}
    sheet.y |= {"range": [-2, 104], **quarters}
    return sheet.figure()
