"""The board "KV cache and P99": is the service well, and if not, where do its slow requests spend their time?

Rows repeat for each chosen model. Panels read recorded signals; those that split by class or instance read the raw
families. Thresholds are those of the objectives and alerts. The rows are in latency_rows, kv_rows and engine_rows.
"""

from __future__ import annotations

import grafanalib.core as G

from alerts import rules
from dashboards.engine_rows import exporter, pressure, split, steps
from dashboards.kv_rows import hits, pool, quantization
from dashboards.latency_rows import latency, makeup, well
from dashboards.panels import (
    DATASOURCE,
    Board,
    DatasourceVariable,
    Json,
    LabelVariable,
    Line,
    Section,
    Text,
    layout,
    link,
)
from dashboards.shared import MODEL
from observability import catalog as c

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
            name="model", label="Model", query=f"label_values({engine}, model)", description="Rows repeat for each."
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


def board() -> Board:
    """The whole board; `dashboards.panels.write` makes its JSON."""
    rows = (well, makeup, latency, hits, pool, pressure, steps, quantization, split, exporter, words)
    return Board(
        uid=rules.BOARD_UID,
        title="KV cache and P99",
        description="Why P99 is what it is: where slow requests spend their time, the KV cache, load and pressure.",
        tags=["kvscope"],
        refresh="15s",
        time=G.Time("now-1h", "now"),
        links=[link(f"Runbook: {a.name}", rules.runbook_url(a.name), tooltip=a.summary) for a in rules.ALERTS],
        templating=G.Templating(list=variables()),
        annotation_list=alert_marks(),
        panels=layout([row() for row in rows]),
    )
