"""Stalls of the step loop: steps that last far longer than is usual for their kind, and how regularly they come.

A slow periodic job (a collection of garbage, a backup, a scrape that holds a lock) hides in quantiles: it touches few requests. What gives it
away is that the gaps between its stalls are alike. Count, sum and sum of squares of the gaps tell that over any window and any fleet.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from observability import catalog as c
from observability.telemetry.snapshot import Block, counters

#: A stall lasts longer than this, and than this many times the usual step of its kind.
FLOOR_SECONDS = 0.05
TIMES_USUAL = 5.0
#: The running median moves by this factor a step, up or down (multiplicative form of Ma, Muthukrishnan and Sandler, "Frugal streaming for
#: estimating quantiles", 2013): a stall moves it no further than any other step does.
_MEDIAN_STEP = 1.05
#: Gaps are those between large stalls, at least half as long as the longest, which is forgotten by a twentieth a stall: chance hiccups
#: between the stalls of a job must not make them look irregular.
_LARGE = 0.5
_FORGET = 0.95
#: A gap counts once its neighbours are known, and if it is no longer than this many times either: the silence between a hiccup and the
#: first run of a job, or while a job rests, is no gap of the job.
_ALIKE = 3.0


class Stalls:
    """Told of each step's time by the engine's thread; a few comparisons a step."""

    def __init__(self) -> None:
        self._usual = [0.0] * len(c.STEP_KINDS)  # seconds; 0: no step yet
        self._slow = False
        self._longest = 0.0
        self._began: float | None = None  # the last large stall, on the engine's clock
        self._gap_before = self._gap = inf  # the last two gaps, of which the later is not counted yet
        self._count, self._seconds, self._gaps, self._gap_seconds, self._gap_squares = ([0.0] for _ in range(5))

    def observe(self, kind: int, seconds: float, now: float) -> None:
        """A step of `kind` (index in STEP_KINDS) ended at `now`, after `seconds` in which there was work: the step itself, and what
        held the loop up since the step before. Slow steps in a row are one stall."""
        if not 0.0 < seconds < inf:
            return
        usual = self._usual[kind] or seconds
        self._usual[kind] = usual * _MEDIAN_STEP if seconds > usual else usual / _MEDIAN_STEP
        if seconds <= FLOOR_SECONDS or seconds <= TIMES_USUAL * usual:
            self._slow = False
            return
        self._seconds[0] += seconds
        if self._slow:
            return
        self._slow = True
        self._count[0] += 1
        known = self._longest * _FORGET
        if known < _LARGE * seconds:
            self._began, self._gap_before, self._gap = None, inf, inf  # those before this one were hiccups
        self._longest = max(known, seconds)
        if seconds < _LARGE * self._longest:
            return
        began = now - seconds
        if self._began is not None and began > self._began:
            self._count_gap(began - self._began)
        self._began = began

    def _count_gap(self, following: float) -> None:
        """Counts the gap before `following` if it is like its neighbours."""
        gap = self._gap
        if gap <= _ALIKE * min(self._gap_before, following):
            self._gaps[0] += 1
            self._gap_seconds[0] += gap
            self._gap_squares[0] += gap * gap
        self._gap_before, self._gap = gap, following

    def blocks(self, model: str) -> Iterable[Block]:
        for family, cells in (
            (c.STALLS, self._count),
            (c.STALL_SECONDS, self._seconds),
            (c.STALL_GAPS, self._gaps),
            (c.STALL_GAP_SECONDS, self._gap_seconds),
            (c.STALL_GAP_SQUARES, self._gap_squares),
        ):
            yield counters(family, [(model,)], cells)
