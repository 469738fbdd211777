"""One exposition of several sources: an engine's telemetry and the GPUs of its host, say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from observability.catalog import FAMILIES
from observability.telemetry.snapshot import FamilySamples


class Source(Protocol):
    def snapshot(self) -> list[FamilySamples]:
        """Rows by family in catalogue order. Called from any thread; does not wait for what it measures."""


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
