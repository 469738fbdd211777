"""Figures of the page Trends."""

from __future__ import annotations

import numpy as np
import pandas as pd

from observability.app.charts import BLUE, OBJECTIVE_LINE, ORANGE, STEEL, Drawing, Line, Sheet, faded
from observability.app.trends import Curve
from observability.app.units import axis_unit, quantity
from observability.app.view import View, shown

#: Points of the cloud that a chart has room for, side by side and one over the other.
_ACROSS, _UP = 110, 50


def _apart(points: pd.DataFrame, load: float, latency: float) -> pd.DataFrame:
    """`points` without those that would be drawn on another: one of each cell of so much load and latency."""
    cells = pd.DataFrame({"load": points["load"] // (load or 1.0), "latency": points["latency"] // (latency or 1.0)})
    return points[~cells.duplicated()]


def latency_against_load(curve: Curve, view: View, line: Line, height: int) -> Drawing:
    """Moments as points, the curve with its 95 % band, the knee with its interval, the objective as a line."""
    sheet = Sheet(height)
    top = float(np.percentile(curve.points["latency"], 99)) * 1.05  # a few far points must not flatten the curve
    top = max(top, float(curve.high.max()))
    points = _apart(curve.points, float(curve.points["load"].max()) / _ACROSS, top / _UP)
    factor, unit = axis_unit("seconds", top)
    sheet.add(
        "scatter",
        x=points["load"], y=points["latency"] * factor, mode="markers", name="5 minutes", marker={"size": 4, "color": faded(STEEL, 0.45)},
        customdata=shown(pd.DatetimeIndex(points["time"]), view.clock),
        hovertemplate=f"%{{customdata|%-d %b %H:%M}}: %{{x:,.4~r}} req/s, %{{y:,.4~r}} {unit}<extra></extra>",
    )  # fmt: skip
    for values, fill in ((curve.low, None), (curve.high, "tonexty")):
        sheet.add(
            "scatter",
            x=curve.load, y=values * factor, mode="lines", line={"width": 0}, fill=fill, fillcolor=faded(BLUE, 0.22), hoverinfo="skip",
            showlegend=fill is not None, name="95 % band",
        )  # fmt: skip
    told = [
        f"{quantity(load, 'requests/s')}: {quantity(mid, 'seconds')} ({quantity(low, 'seconds')} to {quantity(high, 'seconds')})"
        for load, mid, low, high in zip(curve.load, curve.latency, curve.low, curve.high, strict=True)
    ]
    sheet.add(
        "scatter",
        x=curve.load, y=curve.latency * factor, mode="lines", name="typical P99", line={"color": BLUE, "width": 2.2},
        customdata=told, hovertemplate="%{customdata}<extra></extra>",
    )  # fmt: skip
    if curve.knee is not None:
        knee = curve.knee
        sheet.shapes.append({
            "type": "rect", "x0": knee.low, "x1": knee.high, "y0": 0, "y1": 1, "yref": "paper", "line": {"width": 0},
            "fillcolor": faded(ORANGE, 0.16), "layer": "below",
        })  # fmt: skip
        sheet.rule(ORANGE, "solid", x=knee.load)
        late = knee.load > 0.7 * curve.load[-1]
        sheet.note(
            f"knee {quantity(knee.load, 'requests/s')}", ORANGE, x=knee.load, xref="x", y=1, yanchor="top",
            xanchor="right" if late else "left", xshift=-3 if late else 3,
        )  # fmt: skip
    if line.value <= top:
        sheet.rule(OBJECTIVE_LINE, "dash", y=line.value * factor)
        sheet.note(
            line.label, OBJECTIVE_LINE, x=1, y=line.value * factor, yref="y", xanchor="left", yanchor="middle", xshift=2
        )
        sheet.margin["r"] = 6 + 6 * len(line.label)
    else:
        sheet.note(f"{line.label} ↑", OBJECTIVE_LINE, x=1, y=1, xanchor="right", yanchor="top")
    sheet.x |= {"title": {"text": "requests per second", "font": {"size": 10}, "standoff": 2}, "rangemode": "tozero"}
    sheet.y |= {"range": [0, top * factor], "ticksuffix": f" {unit}"}
    return sheet.figure()
