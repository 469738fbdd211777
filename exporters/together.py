"""One exposition of several sources: an engine's telemetry and the GPUs of its host, say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from observability.catalog import FAMILIES
from observability.telemetry.snapshot import FamilySamples, Layout


class Source(Protocol):
    def snapshot(self) -> list[FamilySamples]:
        """Rows by family in catalogue order. Called from any thread; does not wait for what it measures."""


@runtime_checkable
class Columnar(Protocol):
    """A source that gives its values alone: a recorder, or its mirror in another process."""

    def columns(self, pause_seconds: float = 0.0) -> tuple[Layout, np.ndarray]:
        """Layout and values as those of telemetry.cells.Cells."""


def parts(source: Source) -> tuple[Source, ...]:
    """The sources that `source` is made of."""
    return source.sources if isinstance(source, Together) else (source,)


class Together:
    """Families of all `sources` in catalogue order; rows of a family that several have stand together."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = tuple(sources)

    def snapshot(self) -> list[FamilySamples]:
        found: dict[str, FamilySamples] = {}
        for source in self.sources:
            for family, rows in source.snapshot():
                known = found.get(family.name)
                found[family.name] = FamilySamples(family, [*known.rows, *rows] if known else rows)
        return [found[family.name] for family in FAMILIES if family.name in found]
