"""What the engine behind a model cannot tell: said in each panel that it leaves empty, and with the reasons in a row of the board."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

import attr
import grafanalib.core as G

from alerts.adapters import CAPABILITY
from dashboards.panels import Json, Line, Panel, Query, Section, Table
from dashboards.shared import MODEL, OF_INSTANCE, STALE, about
from exporters.adapters.engines import ADAPTERS, capability
from exporters.adapters.vllm_plugin import families_of
from observability import catalog as c
from observability.signals import BY_NAME

ROW = "What can the engine of $model not tell?"
SEE_ROW = "not exported (reasons below)"
#: A series that every engine feeds, with the label `engine` where an adapter made it.
MODELS = "model:kvscope_requests_running:sum"
_SERIES = {family.series: family.name for family in c.FAMILIES}


def asked(panels: Iterable[G.Panel]) -> tuple[list[str], list[str]]:
    """(signals, names of families) that queries of `panels` about models read."""
    text = "\n".join(t.expr for panel in panels for t in getattr(panel, "targets", ()) or () if MODEL in t.expr)
    signals = [name for name in BY_NAME if re.search(rf"(?<![\w:]){name}(?![\w:])", text)]
    raw = [name for series, name in _SERIES.items() if re.search(rf"(?<![\w:]){series}(?![\w:])", text)]
    families = [family for name in signals for family in families_of(BY_NAME[name])]
    return signals, list(dict.fromkeys([*raw, *families]))


def may_lack(panel: G.Panel) -> bool:
    """Whether some engine leaves `panel` empty, as it does not export what the panel reads."""
    signals, families = asked([panel])
    return (bool(families) and not signals) or any(
        capability(engine, name).status == "no" for name in signals for engine in ADAPTERS
    )


def mark(panel: G.Panel) -> G.Panel:
    """`panel`, which says when it is empty that its engine may be the reason."""
    if not isinstance(panel, Panel) or not panel.HAS_FIELDS or not may_lack(panel):
        return panel
    empty = f"{panel.when_empty}, or {SEE_ROW}" if panel.when_empty else f"No values now, or {SEE_ROW}"
    marked: G.Panel = attr.evolve(panel, when_empty=empty)  # type: ignore[misc]  # attrs that mypy cannot see
    return marked


def marked(sections: Sequence[Section]) -> list[Section]:
    """`sections` with their panels marked, and the row with the reasons behind them where one of them may lack something."""
    out = [
        replace(section, lines=[replace(line, panels=[mark(p) for p in line.panels]) for line in section.lines])
        for section in sections
    ]
    panels = [panel for section in sections for line in section.lines for panel in line.panels]
    return [*out, reasons(panels)] if any(may_lack(panel) for panel in panels) else out


def reasons_query(panels: Iterable[G.Panel]) -> str:
    """What the engines of the chosen model cannot feed of what `panels` read: of adapters by signal, of kvscope's own sources, which
    tell it themselves, by family."""
    signals, families = asked(panels)
    own = (
        f"max by (source, family, status, reason) ({c.SOURCE_FAMILY.series}"
        f'{{{OF_INSTANCE},status!="yes",family=~"{"|".join(families)}"}})'
    )
    adapted = f'({CAPABILITY}{{signal=~"{"|".join(signals)}"}} < 1) and on (engine) {MODELS}{{{MODEL}}}'
    return f"{adapted} or {own}" if signals else own


def reasons(panels: Sequence[G.Panel]) -> Section:
    names = {
        "engine": "Engine", "signal": "Signal", "source": "Source", "family": "Family", "status": "Fed",
        "reason": "Why not, or what to mind",
    }  # fmt: skip
    organize: Json = {
        "excludeByName": {name: True for name in ("Time", "__name__", "Value")},
        "includeByName": {},
        "indexByName": {name: place for place, name in enumerate(names)},
        "renameByName": names,
    }
    table = Table(
        **about(
            STALE,
            "What is not exported, and why?",
            "Of the signals on this board, those that the engine of this model cannot feed (status no) or only in part. A panel that is "
            "empty for such a signal is neither 0 nor a fault. All engines are compared on the board Engines.",
        ),
        targets=[Query(expr=reasons_query(panels), format="table", instant=True)],
        transformations=[{"id": "organize", "options": organize}],
        unit="short",
        when_empty="No gaps: its engine feeds every panel of this board",
    )
    return Section(ROW, [Line(10, [table])], collapsed=True, repeat_for="model")
