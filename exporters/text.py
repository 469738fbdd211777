"""Classic exposition text and OpenMetrics 1.0: `render` as a pure function of a reading, and Exposition, which keeps the lines of a
source and makes anew only those whose value moved.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np

from exporters.together import Columnar, Source, parts
from observability.catalog import FAMILIES, Family
from observability.telemetry.snapshot import Block, Exemplar, FamilySamples, Row

_LINES_AT_ONCE = 200  # about 0.2 ms
_NO_EXEMPLAR: tuple[list[Exemplar | None], int] = ([None], 0)


def render(families: Iterable[FamilySamples], *, openmetrics: bool) -> bytes:
    """The exposition of `families`: OpenMetrics 1.0 with exemplars, or classic text 0.0.4 without."""
    out: list[str] = []
    for family, rows in families:
        out.append(_header(family.name, family.kind, family.unit, family.help, openmetrics))
        out += (_line(family, row, openmetrics) for row in rows)
    out.append("# EOF\n" if openmetrics else "")
    return "\n".join(out).encode("utf-8", "replace")  # an id that is no text must not cost the whole exposition


def _line(family: Family, row: Row, openmetrics: bool) -> str:
    sample = _series_text(family.name, family.labels, row.suffix, row.labels) + _number(row.value)
    return sample + _exemplar_text(row.exemplar) if row.exemplar is not None and openmetrics else sample


@lru_cache(maxsize=1024)
def _header(name: str, kind: str, unit: str, help: str, openmetrics: bool) -> str:
    if not openmetrics:  # classic text names a counter with its suffix and does not know info
        name += {"counter": "_total", "info": "_info"}.get(kind, "")
        kind = "gauge" if kind == "info" else kind
    help = help.replace("\\", r"\\").replace("\n", r"\n")
    lines = [
        f"# HELP {name} {help.replace(chr(34), chr(92) + chr(34)) if openmetrics else help}",
        f"# TYPE {name} {kind}",
    ]
    if openmetrics and unit and name.endswith("_" + unit):  # OpenMetrics wants a unit to be the end of the name
        lines.append(f"# UNIT {name} {unit}")
    return "\n".join(lines)


@lru_cache(maxsize=1 << 16)  # series are bounded: label values come from the catalogue and a capped set
def _series_text(name: str, label_names: tuple[str, ...], suffix: str, values: tuple[str, ...]) -> str:
    names = (*label_names, "le") if suffix == "_bucket" else label_names
    pairs = ",".join(f'{label}="{_escape(value)}"' for label, value in zip(names, values, strict=True))
    return f"{name}{suffix}{{{pairs}}} " if pairs else f"{name}{suffix} "


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: float) -> str:
    """Shortest text that reads back as the same float64."""
    if value == 0:  # most series of an exposition
        return "0"
    if abs(value) < 1e15 and value == int(value):
        return str(int(value))
    return {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}.get(text := repr(float(value)), text)


def _exemplar_text(exemplar: Exemplar) -> str:
    pairs = ",".join(f'{name}="{_escape(value)}"' for name, value in exemplar.labels)
    return f" # {{{pairs}}} {_number(exemplar.value)} {exemplar.timestamp:.3f}"


class _Columns:
    """The lines of one recorder, by column of its layout."""

    def __init__(self, recorder: Columnar, *, openmetrics: bool) -> None:
        self._recorder = recorder
        self._openmetrics = openmetrics
        self._blocks: list[Block] = []
        self._starts: list[int] = [0]
        self._block_of: list[int] = []
        self._names: list[str] = []  # of each column, with its labels and a space
        self._lines: list[str] = []  # "" where the series does not exist
        self._values = np.zeros(0)
        self._texts: list[str] = []  # of each block
        #: Of each block with exemplars: the columns of its buckets, and the exemplars as rendered.
        self._exemplars: list[tuple[Block, list[int], list[Exemplar | None]]] = []
        self._exemplar_of: dict[int, tuple[list[Exemplar | None], int]] = {}  # by column: list and place in it

    def update(self, pause_seconds: float) -> int:
        """Reads the recorder and brings the lines up to date, a few at a time; how many series there are."""
        layout, values = self._recorder.columns(pause_seconds)
        self._grow(layout.blocks)
        moved = (values != self._values) & ~(np.isnan(values) & np.isnan(self._values))
        for block, columns, before in self._exemplars:
            now = list(block.exemplars or ())
            moved[[column for column, a, b in zip(columns, now, before, strict=True) if a is not b]] = True
            before[:] = now
        self._values = values
        changed = list(zip(np.flatnonzero(moved).tolist(), values[moved].tolist(), strict=True))
        for start in range(0, len(changed), _LINES_AT_ONCE):
            time.sleep(pause_seconds)
            for column, value in changed[start : start + _LINES_AT_ONCE]:
                self._lines[column] = self._line(column, value)
        time.sleep(pause_seconds)
        for number in {self._block_of[column] for column, _ in changed}:
            self._texts[number] = "".join(self._lines[self._starts[number] : self._starts[number + 1]])
        return len(values) - int(np.count_nonzero(np.isnan(values)))

    def texts(self) -> Iterable[tuple[Family, str]]:
        """Families and some of their lines; a family may come more than once."""
        return ((block.family, text) for block, text in zip(self._blocks, self._texts, strict=True) if text)

    def _line(self, column: int, value: float) -> str:
        if value != value:
            return ""
        exemplars, place = self._exemplar_of.get(column, _NO_EXEMPLAR)
        if (exemplar := exemplars[place]) is None:
            return f"{self._names[column]}{_number(value)}\n"
        return f"{self._names[column]}{_number(value)}{_exemplar_text(exemplar)}\n"

    def _grow(self, blocks: Sequence[Block]) -> None:
        """Makes room for columns that are new since the last time; they are at the end."""
        for number in range(len(self._blocks), len(blocks)):
            block, start = blocks[number], self._starts[-1]
            self._blocks.append(block)
            self._starts.append(start + len(block.rows))
            self._block_of += [number] * len(block.rows)
            self._names += [_series_text(block.family.name, block.family.labels, *row) for row in block.rows]
            self._lines += [""] * len(block.rows)
            self._texts.append("")
            if block.exemplars is not None and self._openmetrics:
                buckets = [start + i for i, (suffix, _) in enumerate(block.rows) if suffix == "_bucket"]
                shown: list[Exemplar | None] = [None] * len(buckets)
                self._exemplars.append((block, buckets, shown))
                self._exemplar_of.update((column, (shown, i)) for i, column in enumerate(buckets))
        new = len(self._names) - len(self._values)
        self._values = np.append(self._values, np.full(new, np.nan))


class Exposition:
    """Text of `source` in one form, to be made again and again, by one thread at a time.

    Of a recorder, values are read at once and most lines stay as they were. Whatever else is in `source` is rendered by `render`.
    """

    def __init__(self, source: Source, *, openmetrics: bool) -> None:
        self._parts = [_Columns(s, openmetrics=openmetrics) if isinstance(s, Columnar) else s for s in parts(source)]
        self._openmetrics = openmetrics

    def render(self, more: Sequence[FamilySamples] = (), *, pause_seconds: float = 0.0) -> tuple[bytes, int]:
        """What `render` makes of a snapshot of the source and `more` families, and how many series that is.

        Sleeps `pause_seconds` after each fifth of a millisecond of work, which lets other threads of the interpreter go on.
        """
        found: dict[str, list[str]] = {}
        series = 0
        for part in self._parts:
            if isinstance(part, _Columns):
                series += part.update(pause_seconds)
                for family, text in part.texts():
                    found.setdefault(family.name, []).append(text)
            else:
                series += self._add(part.snapshot(), found)
        series += self._add(more, found)
        out: list[str] = []
        for family in FAMILIES:
            if texts := found.get(family.name):
                out += (_header(family.name, family.kind, family.unit, family.help, self._openmetrics), "\n", *texts)
        time.sleep(pause_seconds)
        out.append("# EOF\n" if self._openmetrics else "")
        return "".join(out).encode("utf-8", "replace"), series

    def _add(self, families: Iterable[FamilySamples], found: dict[str, list[str]]) -> int:
        series = 0
        for family, rows in families:
            found.setdefault(family.name, []).extend(_line(family, row, self._openmetrics) + "\n" for row in rows)
            series += len(rows)
        return series
