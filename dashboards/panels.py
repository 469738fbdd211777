"""Panels, variables and boards in the shape that Grafana 13 writes (schema version 42): thin subclasses of grafanalib's.

grafanalib keeps what it does well (objects, panel ids, rows, encoding); its JSON is of 2021, so `to_json_data` is ours.
A board is rows of lines of panels; places on the 24-column grid follow from that (`layout`).
"""

from __future__ import annotations

import json
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import attr
import grafanalib.core as G
from grafanalib._gen import DashboardEncoder

Json = dict[str, Any]
#: attr.s under a name that mypy does not know: it cannot see the fields that grafanalib's classes bring, and would refuse them.
element: Any = attr.s

SCHEMA_VERSION = 42
COLUMNS = 24
DATASOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}
#: Threshold colours. The first step of a threshold list has no value: it is what holds below all others.
GREEN, YELLOW, RED, PLAIN = "green", "yellow", "red", "blue"


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> Json:
    """`base` with `over` laid on top, nested dictionaries merged."""
    out = dict(base)
    for key, value in over.items():
        old = out.get(key)
        out[key] = _merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return out


def _without_none(values: Mapping[str, Any]) -> Json:
    return {key: value for key, value in values.items() if value is not None}


@element
class Query(G.Target):
    """One PromQL query of a panel. `ref_id` is given by the query's position in the panel."""

    exemplar = attr.ib(default=False, kw_only=True)

    def json(self, ref_id: str) -> Json:
        return _without_none(
            {
                "datasource": DATASOURCE,
                "editorMode": "code",
                "exemplar": self.exemplar,
                "expr": self.expr,
                "format": self.format,
                "instant": self.instant,
                "interval": self.interval or None,
                "legendFormat": self.legendFormat or "__auto",
                "range": not self.instant,
                "refId": ref_id,
            }
        )


@element
class Panel(G.Panel):
    """What all kinds share. `options` and `custom` are laid over the kind's own; `when_empty` says why a healthy engine
    may have nothing to show here, in place of "No data".
    """

    KIND = ""
    OPTIONS: ClassVar[Json] = {}
    CUSTOM: ClassVar[Json] = {}
    HAS_FIELDS = True

    unit = attr.ib(default=None, kw_only=True)
    decimals = attr.ib(default=None, kw_only=True)
    min = attr.ib(default=None, kw_only=True)
    max = attr.ib(default=None, kw_only=True)
    color = attr.ib(factory=lambda: {"mode": "palette-classic"}, kw_only=True)
    overrides: Any = attr.ib(factory=list, kw_only=True)
    options: Any = attr.ib(factory=dict, kw_only=True)
    custom: Any = attr.ib(factory=dict, kw_only=True)
    when_empty = attr.ib(default=None, kw_only=True)

    def _field_config(self) -> Json:
        defaults = _without_none(
            {
                "color": self.color,
                "custom": _merge(self.CUSTOM, self.custom) or None,
                "decimals": self.decimals,
                "mappings": [],
                "max": self.max,
                "min": self.min,
                "noValue": self.when_empty,
                "unit": self.unit,
            }
        )
        if self.thresholds:
            defaults["thresholds"] = {
                "mode": "absolute",
                "steps": [{"value": value, "color": color} for value, color in self.thresholds],
            }
        return {"defaults": defaults, "overrides": self.overrides}

    def to_json_data(self) -> Json:
        out = {
            "description": self.description,
            "gridPos": self.gridPos,
            "id": self.id,
            "links": self.links,
            "options": _merge(self.OPTIONS, self.options),
            "title": self.title,
            "transparent": self.transparent,
            "type": self.KIND,
        }
        if self.timeFrom:
            out["timeFrom"] = self.timeFrom
        if self.HAS_FIELDS:
            out["datasource"] = DATASOURCE
            out["fieldConfig"] = self._field_config()
            out["targets"] = [q.json(ref) for q, ref in zip(self.targets, string.ascii_uppercase, strict=False)]
            out["transformations"] = self.transformations
        return out


_TOOLTIP: Json = {"mode": "multi", "sort": "desc", "hideZeros": False}


@element
class TimeSeries(Panel):
    """Lines over time. Thresholds are drawn where custom.thresholdsStyle says so."""

    KIND = "timeseries"
    OPTIONS: ClassVar[Json] = {
        "legend": {"calcs": [], "displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": _TOOLTIP,
    }
    CUSTOM: ClassVar[Json] = {
        "axisPlacement": "auto",
        "drawStyle": "line",
        "fillOpacity": 8,
        "gradientMode": "none",
        "hideFrom": {"legend": False, "tooltip": False, "viz": False},
        "lineInterpolation": "linear",
        "lineWidth": 1,
        "pointSize": 4,
        "scaleDistribution": {"type": "linear"},
        "showPoints": "auto",
        "spanNulls": False,
        "stacking": {"group": "A", "mode": "none"},
        "thresholdsStyle": {"mode": "off"},
    }


@element
class Stat(Panel):
    """One number with its recent course; the colour follows the thresholds."""

    KIND = "stat"
    OPTIONS: ClassVar[Json] = {
        "colorMode": "value",
        "graphMode": "area",
        "justifyMode": "auto",
        "orientation": "auto",
        "percentChangeColorMode": "standard",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "showPercentChange": False,
        "textMode": "value",
        "wideLayout": True,
    }


@element
class BarGauge(Panel):
    """One bar for each series, newest value. Give `min`, and `max` where there is one: else bars scale on each other."""

    KIND = "bargauge"
    OPTIONS: ClassVar[Json] = {
        "displayMode": "basic",
        "legend": {"calcs": [], "displayMode": "list", "placement": "bottom", "showLegend": False},
        "maxVizHeight": 300,
        "minVizHeight": 16,
        "minVizWidth": 8,
        "namePlacement": "top",
        "orientation": "horizontal",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "showUnfilled": True,
        "sizing": "auto",
        "text": {"titleSize": 13, "valueSize": 15},
        "valueMode": "color",
    }


@element
class Heatmap(Panel):
    """Cells over time: one row for each series in the order given, or for each `le` of a query with format="heatmap"."""

    KIND = "heatmap"
    OPTIONS: ClassVar[Json] = {
        "calculate": False,
        "cellGap": 1,
        "cellValues": {},
        "color": {
            "exponent": 0.5,
            "fill": "dark-orange",
            "mode": "scheme",
            "reverse": False,
            "scale": "exponential",
            "scheme": "Oranges",
            "steps": 64,
        },
        "exemplars": {"color": "rgba(255,0,255,0.7)"},
        "filterValues": {"le": 1e-9},
        "legend": {"placement": "bottom", "show": True},
        "rowsFrame": {"layout": "auto"},
        "showValue": "never",
        "tooltip": {"mode": "single", "showColorScale": True, "yHistogram": False},
        "yAxis": {"axisPlacement": "left", "reverse": False},
    }
    CUSTOM: ClassVar[Json] = {
        "hideFrom": {"legend": False, "tooltip": False, "viz": False},
        "scaleDistribution": {"type": "linear"},
    }


@element
class Table(Panel):
    """A table of instant values (queries with format="table")."""

    KIND = "table"
    OPTIONS: ClassVar[Json] = {
        "cellHeight": "sm",
        "frameIndex": 0,
        "showHeader": True,
        "showTypeIcons": False,
        "sortBy": [],
    }
    CUSTOM: ClassVar[Json] = {"align": "auto", "cellOptions": {"type": "auto"}, "inspect": False, "minWidth": 90}


@element
class StateTimeline(Panel):
    """One bar a series over time, coloured by its value."""

    KIND = "state-timeline"
    OPTIONS: ClassVar[Json] = {
        "alignValue": "left",
        "legend": {"calcs": [], "displayMode": "list", "placement": "bottom", "showLegend": False},
        "mergeValues": True,
        "rowHeight": 0.9,
        "showValue": "never",
        "tooltip": {"mode": "single", "sort": "none", "hideZeros": False},
    }
    CUSTOM: ClassVar[Json] = {
        "axisPlacement": "auto",
        "fillOpacity": 80,
        "hideFrom": {"legend": False, "tooltip": False, "viz": False},
        "lineWidth": 0,
    }


@element
class XYChart(Panel):
    """One field against another, a point for each time: the first query is x, the second y (joined by time)."""

    KIND = "xychart"
    OPTIONS: ClassVar[Json] = {
        "legend": {"calcs": [], "displayMode": "list", "placement": "bottom", "showLegend": False},
        "mapping": "auto",
        "series": [],
        "tooltip": {"mode": "single", "sort": "none", "hideZeros": False},
    }
    CUSTOM: ClassVar[Json] = {
        "axisPlacement": "auto",
        "fillOpacity": 40,
        "hideFrom": {"legend": False, "tooltip": False, "viz": False},
        "pointSize": {"fixed": 4},
        "pointStrokeWidth": 0,
        "scaleDistribution": {"type": "linear"},
        "show": "points",
    }


@element
class Text(Panel):
    """Markdown, no data."""

    KIND = "text"
    OPTIONS: ClassVar[Json] = {"mode": "markdown"}
    HAS_FIELDS = False


@element
class Row(G.RowPanel):
    """A heading over panels. `repeat_for` draws the row once for each chosen value of that variable."""

    repeat_for = attr.ib(default=None, kw_only=True)

    def to_json_data(self) -> Json:
        return _without_none(
            {
                "collapsed": self.collapsed,
                "gridPos": self.gridPos,
                "id": self.id,
                "panels": self.panels,
                "repeat": self.repeat_for,
                "title": self.title,
                "type": "row",
            }
        )


@dataclass(frozen=True)
class Line:
    """Panels side by side, all `height` grid units high, sharing the 24 columns by `widths` (equally when left out)."""

    height: int
    panels: Sequence[G.Panel]
    widths: Sequence[int] = ()

    def columns(self) -> Sequence[int]:
        widths = self.widths or [COLUMNS // len(self.panels)] * len(self.panels)
        if len(widths) != len(self.panels) or sum(widths) != COLUMNS:
            raise ValueError(f"widths {list(widths)} do not share {COLUMNS} columns among {len(self.panels)} panels")
        return widths


@dataclass(frozen=True)
class Section:
    """A row and the lines under it."""

    title: str
    lines: Sequence[Line]
    collapsed: bool = False
    repeat_for: str | None = None


def layout(sections: Iterable[Section]) -> list[G.Panel]:
    """The panels of a board with their places: rows one below the other, panels of a collapsed row inside it."""
    out: list[G.Panel] = []
    y = 0
    for section in sections:
        place = G.GridPos(h=1, w=COLUMNS, x=0, y=y)
        y += 1
        inside: list[G.Panel] = []
        for line in section.lines:
            x = 0
            for panel, width in zip(line.panels, line.columns(), strict=True):
                inside.append(attr.evolve(panel, gridPos=G.GridPos(h=line.height, w=width, x=x, y=y)))
                x += width
            y += line.height
        row = Row(
            title=section.title,
            collapsed=section.collapsed,
            gridPos=place,
            panels=inside if section.collapsed else [],
            repeat_for=section.repeat_for,
        )
        out += [row] if section.collapsed else [row, *inside]
    return out


@element
class DatasourceVariable(G.Template):
    """The data source that all panels read, chosen by the reader."""

    def to_json_data(self) -> Json:
        return {
            "current": {"text": "", "value": ""},
            "hide": 0,
            "includeAll": False,
            "label": self.label,
            "multi": False,
            "name": self.name,
            "options": [],
            "query": self.query,
            "refresh": 1,
            "regex": "",
            "skipUrlSync": False,
            "type": "datasource",
        }


@element
class LabelVariable(G.Template):
    """Values of a label, asked by `label_values(...)`; several may be chosen, "All" is the regex `.+`."""

    description = attr.ib(default="", kw_only=True)

    def to_json_data(self) -> Json:
        return {
            "allValue": ".+",
            "allowCustomValue": True,
            "current": {"text": ["All"], "value": ["$__all"]},
            "datasource": DATASOURCE,
            "description": self.description,
            "hide": 0,
            "includeAll": True,
            "label": self.label,
            "multi": True,
            "name": self.name,
            "options": [],
            "query": {"qryType": 1, "query": self.query, "refId": f"variable-{self.name}"},
            "refresh": 2,  # on time range change: models and instances come and go
            "regex": "",
            "skipUrlSync": False,
            "sort": 1,
            "type": "query",
        }


@element
class Board(G.Dashboard):
    """A dashboard of schema version 42. `annotation_list` holds plain annotation objects."""

    annotation_list: Any = attr.ib(factory=list, kw_only=True)

    def to_json_data(self) -> Json:
        return {
            "annotations": {"list": self.annotation_list},
            "description": self.description,
            "editable": False,
            "fiscalYearStartMonth": 0,
            "graphTooltip": 1,
            "links": self.links,
            "panels": self.panels,
            "preload": False,
            "refresh": self.refresh,
            "schemaVersion": SCHEMA_VERSION,
            "tags": self.tags,
            "templating": self.templating,
            "time": self.time,
            "timepicker": {},
            "timezone": "browser",
            "title": self.title,
            "uid": self.uid,
            "version": 1,
            "weekStart": "",
        }


def link(title: str, url: str, *, tooltip: str = "") -> Json:
    """A link of a panel or board to `url`, with the time range kept."""
    return {
        "asDropdown": False,
        "icon": "doc",
        "includeVars": False,
        "keepTime": False,
        "tags": [],
        "targetBlank": True,
        "title": title,
        "tooltip": tooltip,
        "type": "link",
        "url": url,
    }


def color_overrides(colors: Mapping[str, str]) -> list[Json]:
    """Fixed colours for series by display name, so that one thing has one colour on every panel."""
    return [
        {
            "matcher": {"id": "byName", "options": name},
            "properties": [{"id": "color", "value": {"fixedColor": color, "mode": "fixed"}}],
        }
        for name, color in colors.items()
    ]


def unit_override(name: str, unit: str) -> Json:
    """Another unit for the series `name`, which gets its own axis on the right."""
    return {"matcher": {"id": "byName", "options": name}, "properties": [{"id": "unit", "value": unit}]}


def write(board: Board) -> str:
    """The board's JSON text: panels numbered, keys sorted, so that equal boards are equal bytes."""
    return json.dumps(board.auto_panel_ids(), cls=DashboardEncoder, sort_keys=True, indent=1) + "\n"
