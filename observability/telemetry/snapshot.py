"""Values read from the recorder as pure data: a stable list of series for stores, rows by family for exporters.

Series are only ever appended to a layout, so column i of one reading is column i of every later one; NaN marks a series
that does not exist (yet): an unknown value is absent, never 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import accumulate, chain, islice
from math import inf, nan
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from observability.catalog import FAMILIES, Family

if TYPE_CHECKING:
    from observability.telemetry.exponential import Exponential
    from observability.telemetry.recorder import Published


_HOLD_SECONDS = 2e-4  # longest that a reading in parts holds the interpreter at a time, but for the block it is at


class Exemplar(NamedTuple):
    """One observation that fell into a bucket: where to look for the request behind it."""

    labels: tuple[tuple[str, str], ...]
    value: float
    timestamp: float  # Unix seconds


class Row(NamedTuple):
    """One sample. `labels` are values in the order of `family.labels`; a histogram bucket's `le` comes last."""

    suffix: str  # "", "_total", "_info", "_bucket", "_sum" or "_count"
    labels: tuple[str, ...]
    value: float
    exemplar: Exemplar | None = None


class FamilySamples(NamedTuple):
    """A family and the rows it has now, histograms as cumulative buckets, sum, count for each label set."""

    family: Family
    rows: list[Row]


class Series(NamedTuple):
    """Identity of a column: the sample's full name and its labels in exposition order."""

    name: str
    labels: tuple[tuple[str, str], ...]


#: Gives the values of one block, in the order of its rows; `Published` is the newest set of gauges, None before the first.
Reader = Callable[["Published | None"], Iterable[float]]


@dataclass(frozen=True)
class Block:
    """Adjacent columns of one family: `rows` are (suffix, label values), `read` gives as many values."""

    family: Family
    rows: tuple[tuple[str, tuple[str, ...]], ...]
    read: Reader
    exemplars: list[Exemplar | None] | None = None  # one for each bucket row, in order

    @property
    def series(self) -> list[Series]:
        names = (*self.family.labels, "le")
        return [Series(self.family.name + s, tuple(zip(names, v, strict=False))) for s, v in self.rows]


@dataclass(frozen=True)
class Layout:
    """All blocks of a recorder in column order. Immutable: a recorder that learns of a new series makes a longer one."""

    blocks: tuple[Block, ...]
    series: list[Series] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.series:
            self.series.extend(s for block in self.blocks for s in block.series)

    def extended(self, blocks: Iterable[Block]) -> Layout:
        """This layout with `blocks` behind it."""
        new = tuple(blocks)
        return Layout(self.blocks + new, self.series + [s for block in new for s in block.series])

    def values(self, published: Published | None, pause_seconds: float = 0.0) -> np.ndarray:
        """One reading, float64 [len(series)]; NaN where a series does not exist.

        With `pause_seconds`, sleeps that long between two blocks after each fifth of a millisecond of reading.
        """
        out: list[float] = []
        until = time.perf_counter() + _HOLD_SECONDS if pause_seconds else inf
        for block in self.blocks:
            out.extend(block.read(published))
            if time.perf_counter() > until:
                time.sleep(pause_seconds)
                until = time.perf_counter() + _HOLD_SECONDS
        return np.array(out, dtype=np.float64)

    def samples(self, published: Published | None) -> list[FamilySamples]:
        """One reading as `rows` of it."""
        return self.rows(chain.from_iterable(block.read(published) for block in self.blocks))

    def rows(self, values: Iterable[float]) -> list[FamilySamples]:
        """One reading (a value for each series) as rows by family, in catalogue order; families without a row are left out.
        Raises ValueError where there are more or fewer values."""
        found: dict[str, list[Row]] = {}
        left = iter(values)
        for block in self.blocks:
            rows = found.setdefault(block.family.name, [])
            read = zip(block.rows, islice(left, len(block.rows)), strict=True)
            if block.exemplars is None:
                rows += [Row(suffix, labels, value) for (suffix, labels), value in read if value == value]  # not NaN
                continue
            exemplars = iter(block.exemplars)
            for (suffix, labels), value in read:
                exemplar = next(exemplars) if suffix == "_bucket" else None
                if value == value:
                    rows.append(Row(suffix, labels, value, exemplar))
        if any(True for _ in left):
            raise ValueError("there are more values than series")
        return [FamilySamples(family, found[family.name]) for family in FAMILIES if found.get(family.name)]


def histogram_rows(
    bounds: Iterable[float], label_sets: Iterable[tuple[str, ...]]
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Rows of a histogram block: for each label set its buckets (+Inf last), sum and count."""
    les = (*(str(float(b)) for b in bounds), "+Inf")
    return tuple(
        row
        for labels in label_sets
        for row in (*(("_bucket", (*labels, le)) for le in les), ("_sum", labels), ("_count", labels))
    )


class Histograms:
    """One histogram family: a flat list of cells, for each label set one count per bucket (+Inf last), then the sum.

    Counts are kept by bucket and cumulated when read. Bucket counts, sum and count of a reading come from one copy of
    the cells, which is atomic under the interpreter lock.
    """

    def __init__(
        self,
        family: Family,
        label_sets: Iterable[tuple[str, ...]],
        *,
        bounds: tuple[float, ...] | None = None,
        exemplars: bool = False,
        used: list[bool] | None = None,
    ) -> None:
        """`bounds` in place of those of the catalogue. `used`: which label sets exist; flags of others, that only ever become True."""
        self.family = family
        self.bounds = family.bounds if bounds is None else bounds
        self.label_sets = tuple(label_sets)
        self._used = [True] * len(self.label_sets) if used is None else used
        self.stride = len(self.bounds) + 2
        self.cells: list[float] = [0] * (self.stride * len(self.label_sets))
        self.exponential: Exponential | None = None  # filled as well after Telemetry.keep_exponential
        self.exemplars: list[Exemplar | None] | None = None
        if exemplars:
            self.exemplars = [None] * ((self.stride - 1) * len(self.label_sets))

    def block(self) -> Block:
        return Block(self.family, histogram_rows(self.bounds, self.label_sets), self._read, self.exemplars)

    def _read(self, _: Published | None) -> list[float]:
        cells = self.cells.copy()
        out: list[float] = []
        for used, at in zip(self._used, range(0, len(cells), self.stride), strict=True):
            if not used:
                out += [nan] * (self.stride + 1)
                continue
            total = at + self.stride - 1
            out += accumulate(cells[at:total])
            out += (cells[total], out[-1])
        return out


def counters(family: Family, label_sets: Iterable[tuple[str, ...]], values: list[float]) -> Block:
    """Block over `values`, a list that the recorder adds to in place; values[i] belongs to label set i."""
    return Block(family, tuple(("_total", labels) for labels in label_sets), lambda _: values)


def gauges(
    family: Family, label_sets: Iterable[tuple[str, ...]], read: Callable[[Published], Iterable[float]]
) -> Block:
    """Block whose values come from the newest published gauges; absent before the first publication."""
    rows = tuple(("", labels) for labels in label_sets)
    absent = [np.nan] * len(rows)
    return Block(family, rows, lambda published: absent if published is None else read(published))
