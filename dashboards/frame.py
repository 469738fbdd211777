"""What frames every board: variables, alert marks, links to runbooks and to the other boards, the glossary."""

from __future__ import annotations

from collections.abc import Sequence

import attr
import grafanalib.core as G

from alerts.links import board_uid, board_url, runbook_url
from alerts.rules import ALERT_NAMES, named
from dashboards.panels import (
    DATASOURCE,
    Board,
    DatasourceVariable,
    Json,
    LabelVariable,
    Line,
    Panel,
    Section,
    Text,
    layout,
    link,
)
from dashboards.shared import MODEL
from dashboards.told import MODELS, marked
from observability import catalog as c

#: Every board: its title, and the board that one looks at next.
TITLES = {
    "overview": ("Overview", "p99"),
    "p99": ("P99", "kv-cache"),
    "kv-cache": ("KV cache", "batching"),
    "quantization": ("Quantization", "kv-cache"),
    "batching": ("Batching", "p99"),
    "forecast": ("Forecast", "trends"),
    "trends": ("Trends", "overview"),
    "hardware": ("Hardware", "batching"),
    "engines": ("Engines", "exporter"),
    "exporter": ("Exporter", "engines"),
}

#: Boards that speak of hosts and sources, whatever engine feeds a model.
OF_HOSTS = ("hardware", "engines", "exporter")

GLOSSARY = """\
- **TTFT**, time to first token: from arrival to the first token, measured. **ITL**, inter-token latency: one sample for each
  token after the first. **TPOT** of a request is the mean of its ITLs; it hides single long gaps, so ITL is shown.
- **State** of a request: queued, kv_wait (for blocks), prefill, decode, preempted, swapped. **Component**: what the engine did
  in the same second. A request's latency is the sum over both.
- **Slowest 1 %**: served requests above the tightest of the fixed latency bounds that still holds at least 1 % of them.
- **Hittable** tokens: whole blocks of a prompt, leaving one token to compute. **Block**: the unit in which KV memory is handed out.
- **Allocatable** block: free, or evictable (cached and held by nobody). Fragmentation is measured over allocatable blocks.
- **Burn rate**: share of slow requests over the share allowed. 1 spends the 30-day budget in 30 days.
- A line that is missing means unknown or no traffic, never 0.
"""


def words() -> Section:
    """The glossary."""
    page = Text(title="Words on this board", description="Terms as they are used here.", options={"content": GLOSSARY})
    return Section("What do the words mean?", [Line(9, [page])], collapsed=True)


def variables() -> list[G.Template]:
    engine, received = c.ENGINE.series, c.REQUESTS_RECEIVED.series
    return [
        DatasourceVariable(name="datasource", label="Data source", query="prometheus", type="datasource"),
        LabelVariable(
            name="model", label="Model", query=f"label_values({MODELS}, model)", description="Rows repeat for each."
        ),
        LabelVariable(
            name="instance",
            label="Instance",
            query=f"label_values({engine}{{{MODEL}}}, instance)",
            description="Applies where a panel's description speaks of chosen instances.",
        ),
        LabelVariable(
            name="class",
            label="Class",
            query=f"label_values({received}{{{MODEL}}}, class)",
            description="Applies where a panel's description speaks of chosen classes.",
        ),
    ]


def alert_marks() -> list[Json]:
    """Firing alerts, drawn over all panels."""
    return [
        {
            "datasource": DATASOURCE,
            "enable": True,
            "expr": 'ALERTS{alertstate="firing",alertname=~"Kvscope.+"}',
            "hide": False,
            "iconColor": "red",
            "name": "Alerts firing",
            "step": "60s",
            "tagKeys": "severity",
            "textFormat": "{{model}} {{instance}}",
            "titleFormat": "{{alertname}}",
        }
    ]


def frame(
    name: str,
    description: str,
    sections: Sequence[Section],
    *,
    refresh: str = "15s",
    span: str = "now-1h",
    until: str = "now",
) -> Board:
    """The board `name` with what all boards have; each panel also links to the board to look at next."""
    title, following = TITLES[name]
    neighbour = link(f"Board: {TITLES[following][0]}", board_url(following))
    panels = []
    for panel in layout([*(sections if name in OF_HOSTS else marked(sections)), words()]):
        inside = [_linked(p, neighbour) for p in panel.panels] if isinstance(panel, G.RowPanel) else []
        panels.append(attr.evolve(panel, panels=inside) if inside else _linked(panel, neighbour))
    shown = [alert for alert in ALERT_NAMES if named(alert).board == name]
    return Board(
        uid=board_uid(name),
        title=title,
        description=description,
        tags=["kvscope"],
        refresh=refresh,
        time=G.Time(span, until),
        links=[
            *(link(other, board_url(key)) for key, (other, _) in TITLES.items() if key != name),
            *(link(f"Runbook: {alert}", runbook_url(alert), tooltip=named(alert).summary) for alert in shown),
        ],
        templating=G.Templating(list=variables()),
        annotation_list=alert_marks(),
        panels=panels,
    )


def _linked(panel: G.Panel, neighbour: Json) -> G.Panel:
    if not isinstance(panel, Panel) or not panel.HAS_FIELDS:
        return panel
    linked: G.Panel = attr.evolve(panel, links=[*panel.links, neighbour])  # type: ignore[misc]  # attrs that mypy cannot see
    return linked
