"""How long cached KV content lives: one reading of a pool's books (engine/kv/residency.py) and the series made of it.

Blocks that still live are observations that ended too early to be a lifetime. Leaving them out makes an idle cache look empty and a busy
one forgetful, so the life table counts them while they live: of the blocks exposed in an age interval, which share was evicted there.
Products of the shares that survived estimate the lifetime's distribution without that bias (the actuarial form of Kaplan and Meier,
JASA 53, 1958; intervals as in Cutler and Ederer, J. Chronic Dis. 8, 1958). Both counts add up over engines and can be rated over any window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from math import nan
from typing import TYPE_CHECKING

import numpy as np

from observability import catalog as c
from observability.catalog import AGE_BOUNDS
from observability.telemetry.snapshot import Block, histogram_rows

if TYPE_CHECKING:
    from observability.telemetry.cells import Published

AGE_BOUNDS_US = np.array([round(bound * 1e6) for bound in AGE_BOUNDS], dtype=np.int64)
_SHOWN = [AGE_BOUNDS.index(bound) for bound in c.SPELL_BOUNDS]
_WIDTHS_US = np.diff(AGE_BOUNDS_US, prepend=0)


@dataclass(slots=True)
class Spells:
    """How long something lasted: a count by AGE_BOUNDS, one more above them, and the sum in microseconds."""

    counts: np.ndarray  # int64 [AGE_BOUNDS + 1]
    sum_us: int

    @classmethod
    def none(cls) -> Spells:
        return cls(np.zeros(len(AGE_BOUNDS) + 1, dtype=np.int64), 0)

    def add(self, lasted_us: np.ndarray) -> None:
        """int64 [spells]"""
        self.counts += np.bincount(np.searchsorted(AGE_BOUNDS_US, lasted_us), minlength=len(self.counts))
        self.sum_us += int(lasted_us.sum())

    def copy(self) -> Spells:
        return Spells(self.counts.copy(), self.sum_us)

    def rows(self) -> list[float]:
        """Cumulative counts by SPELL_BOUNDS, +Inf last, then sum (seconds) and count."""
        cumulative = list(accumulate(self.counts.tolist()))
        return [*(cumulative[i] for i in _SHOWN), cumulative[-1], self.sum_us / 1e6, cumulative[-1]]


@dataclass(frozen=True, eq=False)
class PoolResidency:
    """One pool at one instant; all of it was copied between two steps. Arrays must not be written to."""

    now_us: int
    births_us: np.ndarray  # int64 [live blocks]
    evicted: np.ndarray  # int64 [AGE_BOUNDS + 1], by age at eviction
    idle: Spells  # idle spells that ended by eviction
    gaps: Spells  # idle spells that ended by reuse

    @cached_property
    def series(self) -> tuple[list[float], list[float]]:
        """Live blocks of at most each age (SPELL_BOUNDS, then all), and blocks exposed in the interval up to each of AGE_BOUNDS.

        A block that outlived an interval, or was evicted in it, was exposed to it once; one that is in it now counts by the share of it
        that has passed. Whole numbers until the last division, so that exposure never decreases.
        """
        ages = np.sort(self.now_us - self.births_us)
        younger = np.searchsorted(ages, AGE_BOUNDS_US, side="right")  # of at most each bound
        total = np.concatenate(([0], np.cumsum(ages)))
        start = np.concatenate(([0], younger[:-1]))
        lived_us = total[younger] - total[start] - (younger - start) * (AGE_BOUNDS_US - _WIDTHS_US)
        ended = np.cumsum(self.evicted[::-1])[::-1]
        whole = len(ages) - younger + ended[:-1]
        exposed = (whole * _WIDTHS_US + lived_us) / _WIDTHS_US
        return [*map(float, younger[_SHOWN]), float(len(ages))], exposed.tolist()


def _published(published: Published | None) -> Sequence[PoolResidency | None]:
    return (None,) * len(c.POOLS) if published is None else published.kv.residency


def residency_blocks(
    model: str, pools_of: Callable[[Published | None], Sequence[PoolResidency | None]] = _published
) -> Iterator[Block]:
    """Families of residency, in catalogue order. Computed when they are read, by default from what was published last."""
    ages, les = c.AGE_LABELS, (*(str(float(bound)) for bound in c.SPELL_BOUNDS), "+Inf")
    pools = [(model, pool) for pool in c.POOLS]

    def by_pool(suffix: str, labels: tuple[str, ...]) -> tuple[tuple[str, tuple[str, ...]], ...]:
        return tuple((suffix, (*pool, label)) for pool in pools for label in labels)

    def block(
        family: c.Family, rows: tuple[tuple[str, tuple[str, ...]], ...], read: Callable[[PoolResidency], list[float]]
    ) -> Block:
        absent = [nan] * (len(rows) // len(pools))

        def values(published: Published | None) -> list[float]:
            found = pools_of(published)
            return list(chain.from_iterable(absent if pool is None else read(pool) for pool in found))

        return Block(family, rows, values)

    yield block(c.KV_LIVE_AGES, by_pool("", les), lambda pool: pool.series[0])
    yield block(c.KV_EVICTED_AGES, by_pool("_total", ages), lambda pool: pool.evicted.tolist())
    yield block(c.KV_EXPOSED, by_pool("_total", ages[:-1]), lambda pool: pool.series[1])
    yield block(c.KV_IDLE_BEFORE_EVICTION, histogram_rows(c.SPELL_BOUNDS, pools), lambda pool: pool.idle.rows())
    yield block(c.KV_REUSE_GAP, histogram_rows(c.SPELL_BOUNDS, pools), lambda pool: pool.gaps.rows())
