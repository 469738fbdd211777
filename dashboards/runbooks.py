"""One Grafana page for each runbook of alerts/runbooks/, so that an alert's link works wherever the boards are."""

from __future__ import annotations

from pathlib import Path

import grafanalib.core as G

from alerts import rules
from alerts.links import board_url, runbook_uid
from alerts.types import Alert
from dashboards.frame import TITLES
from dashboards.panels import Board, Line, Section, Text, layout, link

FOLDER = Path(rules.__file__).parent / "runbooks"


def text(alert: str) -> str:
    """The runbook of `alert` as Markdown."""
    return (FOLDER / f"{alert}.md").read_text(encoding="utf-8")


def board(alert: Alert) -> Board:
    page = Text(title=f"What to do: {alert.name}", description=alert.summary, options={"content": text(alert.name)})
    return Board(
        uid=runbook_uid(alert.name),
        title=f"Runbook: {alert.name}",
        description=alert.summary,
        tags=["kvscope", "runbook"],
        refresh="",
        time=G.Time("now-1h", "now"),
        links=[
            link(
                f"Board: {TITLES[alert.board][0]}", board_url(alert.board), tooltip="The board that this page refers to"
            )
        ],
        templating=G.Templating(list=[]),
        panels=layout([Section(alert.summary, [Line(32, [page])])]),
    )
