"""Recorder for engines that hand over finished statistics, such as vLLM: the same families as Telemetry, fewer of them.

Telemetry is told each step of a request; this one is told numbers that somebody else measured. What the engine does not
tell has no series here. Same rules as recorder.py: plain lists, no locks, readings from any thread.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, repeat
from math import inf, nan
from typing import NamedTuple

import numpy as np

from observability import catalog as c
from observability.telemetry import phases as p
from observability.telemetry.snapshot import Block, FamilySamples, Histograms, Layout, Series, counters

_FLOATS = {float}


class Gauges(NamedTuple):
    """The newest gauges; one tuple, so that a reader sees all of one instant. NaN: not told."""

    unix_time: float
    running: float = nan
    waiting: float = nan
    active_blocks: float = nan


class Source(NamedTuple):
    """What an engine is and what it can tell. `families`: name -> (status yes, partial or no; reason)."""

    model: str
    executor: str
    device: str
    kv_dtype: str
    version: str
    families: dict[str, tuple[str, str]]
    classes: tuple[str, ...] = ("standard",)  # of requests
    class_of_totals: str = "standard"  # of numbers that the engine tells for all requests together
    states: tuple[str, ...] = (c.FRONTEND_STATE, "queued", "prefill", "decode")
    outcomes: tuple[str, ...] = ("stop", "length", "abort", "error", "rejected")
    tiers: tuple[str, ...] = ("device",)


class Observed:
    """Every value of one foreign engine, by family. `before_reading` is called at the start of each reading."""

    def __init__(self, source: Source, wall_clock: Callable[[], float] = time.time) -> None:
        self.source = source
        self.wall_clock = wall_clock
        self.before_reading: Callable[[], None] | None = None
        self.capacity_blocks = self.block_size = nan
        self.gauges: Gauges | None = None
        classes, lengths = len(source.classes), len(c.LENGTH_BUCKETS)
        by_class = [(source.model, name) for name in source.classes]
        totals = [(source.model, source.class_of_totals)]
        self.received = [0.0] * classes
        self.ended = [0.0] * (classes * len(source.outcomes))
        self.prompt_tokens, self.generation_tokens = [0.0] * classes, [0.0] * classes
        self.duration = Histograms(c.REQUEST_DURATION, by_class)
        self.ttft = Histograms(c.TIME_TO_FIRST_TOKEN, by_class)
        self.itl = Histograms(c.INTER_TOKEN_LATENCY, totals)
        self.preemptions = [0.0]
        self.lookups, self.queried, self.hittable = ([0.0] * lengths for _ in range(3))
        self.hits = [0.0] * (lengths * len(source.tiers))
        self.recomputed = [0.0]
        self.steps = [0.0] * len(c.STEP_KINDS)
        self.step_tokens = [0.0, 0.0]
        self.step_duration = Histograms(c.STEP_DURATION, [(source.model, kind) for kind in c.STEP_KINDS])
        self.steps_told = False
        # Served requests by the highest tail bound that they exceed: not cumulative, cumulated when read.
        self._tail_requests = [0.0] * len(c.TAIL_BOUNDS)
        self._tail_seconds = [[0.0] * len(source.states) for _ in c.TAIL_BOUNDS]
        self._tail_lengths = np.zeros((2, len(c.TAIL_BOUNDS), lengths))  # requests and seconds by prompt length
        self.anomalies = [0.0] * len(c.ANOMALIES)
        self.outcome_folds = [0.0]
        self._layout = Layout(tuple(block for block in self._blocks() if self.tells(block.family)))

    def tells(self, family: c.Family) -> bool:
        """Whether the engine can feed `family` at all."""
        return self.source.families.get(family.name, ("no", ""))[0] != "no"

    # -- writing: one thread ----------------------------------------------------------------------------------------

    def observe(self, histograms: Histograms, row: int, values: Iterable[float]) -> None:
        """Counts `values` (seconds) in the label set `row`; what is no duration is counted as an anomaly."""
        cells, bounds, stride = histograms.cells, histograms.bounds, histograms.stride
        at = row * stride
        if (
            type(values) is not list
            or set(map(type, values)) != _FLOATS
            or not (min(values) >= 0.0 and sum(values) < inf)
        ):
            values = [value for value in values if self.duration_ok(value)]
        for bucket in map(bisect_left, repeat(bounds), values):
            cells[at + bucket] += 1
        cells[at + stride - 1] += sum(values)

    def duration_ok(self, seconds: float) -> bool:
        """Whether `seconds` is a finite duration; an anomaly is counted if not."""
        if type(seconds) is not float and type(seconds) is not int:
            self.anomalies[p.UNREADABLE_FIELD] += 1
        elif 0.0 <= seconds < inf:
            return True
        elif -inf < seconds < 0.0:
            self.anomalies[p.NEGATIVE_INTERVAL] += 1
        else:
            self.anomalies[p.NON_FINITE] += 1
        return False

    def add(self, values: list[float], index: int, amount: float) -> None:
        """Adds to a counter; an amount that a counter cannot take is counted as an anomaly."""
        if 0 <= amount < inf:
            values[index] += amount
        else:
            self.anomalies[p.NEGATIVE_INCREMENT if amount < 0 else p.NON_FINITE] += 1

    def lookup(self, prompt_tokens: int, hittable: int, hit: int, tier: int = 0) -> None:
        """One request's prefix lookup in tokens."""
        if not 0 <= hit <= hittable <= prompt_tokens:
            self.anomalies[p.NEGATIVE_INCREMENT] += 1
            return
        bucket = c.length_bucket(prompt_tokens)
        self.lookups[bucket] += 1
        self.queried[bucket] += prompt_tokens
        self.hittable[bucket] += hittable
        self.hits[bucket * len(self.source.tiers) + tier] += hit

    def end(self, class_index: int, outcome: str, count: int = 1) -> None:
        """Requests ended. An outcome that is not known becomes `error`, and the fold is counted."""
        if outcome not in self.source.outcomes:
            self.outcome_folds[0] += count
            outcome = "error"
        self.ended[class_index * len(self.source.outcomes) + self.source.outcomes.index(outcome)] += count

    def served(
        self, class_index: int, seconds: float, by_state: Sequence[float] | None, prompt_tokens: int | None
    ) -> None:
        """A request ended by stop or length after `seconds`, which it spent as `by_state` (in the order of source.states) says.

        None: its parts are not known; it then counts in the duration but not in the make-up. Without `prompt_tokens` it has no length.
        """
        self.observe(self.duration, class_index, (seconds,))
        if by_state is None:
            return
        slower_than = max(bisect_left(c.TAIL_BOUNDS, seconds) - 1, 0)
        self._tail_requests[slower_than] += 1
        row = self._tail_seconds[slower_than]
        for i, part in enumerate(by_state):
            row[i] += part
        if prompt_tokens is None:
            return
        bucket = c.length_bucket(prompt_tokens)
        self._tail_lengths[0, slower_than, bucket] += 1.0
        self._tail_lengths[1, slower_than, bucket] += sum(by_state)

    # -- reading: any thread ----------------------------------------------------------------------------------------

    @property
    def layout(self) -> list[Series]:
        """Identity of every column of `values`; only grows at its end."""
        return self._layout.series

    def values(self) -> np.ndarray:
        """One reading of every series, float64 [len(layout)]; NaN where a series does not exist (yet)."""
        if self.before_reading is not None:
            self.before_reading()
        return self._layout.values(None)

    def snapshot(self) -> list[FamilySamples]:
        """The same reading as rows by family, in catalogue order."""
        if self.before_reading is not None:
            self.before_reading()
        return self._layout.samples(None)

    def extend(self, blocks: Iterable[Block]) -> None:
        """Further series that another source tells about the same engine, as far as the engine is said to tell them."""
        self._layout = self._layout.extended(block for block in blocks if self.tells(block.family))

    def _blocks(self) -> Iterable[Block]:
        s = self.source
        m = s.model
        by_class = [(m, name) for name in s.classes]
        by_length = [(m, bucket) for bucket in c.LENGTH_BUCKETS]
        by_kind = [(m, kind) for kind in c.STEP_KINDS]
        yield Block(c.ENGINE, (("_info", (m, s.executor, "real", s.device, s.kv_dtype, s.version)),), lambda _: (1.0,))
        yield counters(c.REQUESTS_RECEIVED, by_class, self.received)
        yield counters(c.REQUESTS, [(m, name, outcome) for name in s.classes for outcome in s.outcomes], self.ended)
        yield from (h.block() for h in (self.duration, self.ttft, self.itl))
        yield counters(c.PROMPT_TOKENS, by_class, self.prompt_tokens)
        yield counters(c.GENERATION_TOKENS, by_class, self.generation_tokens)
        yield self._gauge(c.REQUESTS_RUNNING, (m, s.class_of_totals), lambda g: g.running)
        yield self._gauge(c.REQUESTS_WAITING, (m, s.class_of_totals), lambda g: g.waiting)
        yield counters(c.PREEMPTIONS, [(m, "kv_exhausted")], self.preemptions)
        above = [f"{bound:g}" for bound in c.TAIL_BOUNDS]
        tail = tuple(("_total", (m, state, c.UNTOLD, gt)) for gt in above for state in s.states)
        yield Block(c.PHASE_SECONDS, tail, lambda _: self._read_tail_seconds())
        yield Block(c.PHASE_REQUESTS, tuple(("_total", (m, gt)) for gt in above), lambda _: self._read_tail_requests())
        lengths = tuple(("_total", (m, bucket, gt)) for gt in above for bucket in c.LENGTH_BUCKETS)
        yield Block(c.PHASE_LENGTH_SECONDS, lengths, lambda _: self._read_tail_lengths(1))
        yield Block(c.PHASE_LENGTH_REQUESTS, lengths, lambda _: self._read_tail_lengths(0))
        yield counters(c.KV_LOOKUPS, by_length, self.lookups)
        yield counters(c.KV_QUERIED_TOKENS, by_length, self.queried)
        yield counters(c.KV_HITTABLE_TOKENS, by_length, self.hittable)
        yield counters(
            c.KV_HIT_TOKENS, [(m, bucket, tier) for bucket in c.LENGTH_BUCKETS for tier in s.tiers], self.hits
        )
        yield counters(c.KV_RECOMPUTED_TOKENS, [(m, "kv_exhausted")], self.recomputed)
        yield self._gauge(c.KV_BLOCKS, (m, "active"), lambda g: g.active_blocks)
        yield self._gauge(c.KV_BLOCKS, (m, c.ALLOCATABLE), lambda g: self.capacity_blocks - g.active_blocks)
        yield Block(c.KV_CAPACITY_BLOCKS, (("", (m,)),), lambda _: (self.capacity_blocks,))
        yield Block(c.KV_BLOCK_SIZE, (("", (m,)),), lambda _: (self.block_size,))
        for family, values in ((c.STEPS, self.steps), (c.STEP_TOKENS, self.step_tokens)):
            labels = by_kind if family is c.STEPS else [(m, "prefill"), (m, "decode")]
            yield self._if_steps(counters(family, labels, values))
        yield self._if_steps(self.step_duration.block())
        told = tuple(("_info", (m, s.executor, name, status, why)) for name, (status, why) in s.families.items())
        yield Block(c.SOURCE_FAMILY, told, lambda _: (1.0,) * len(told))
        yield self._gauge(c.LAST_UPDATE, (m, "engine"), lambda g: g.unix_time)
        yield counters(c.ANOMALIES_TOTAL, [(m, reason) for reason in c.ANOMALIES], self.anomalies)
        yield counters(c.LABEL_FOLDS, [("outcome",)], self.outcome_folds)

    def _gauge(self, family: c.Family, labels: tuple[str, ...], read: Callable[[Gauges], float]) -> Block:
        return Block(family, (("", labels),), lambda _: (nan if self.gauges is None else read(self.gauges),))

    def _if_steps(self, block: Block) -> Block:
        absent = (nan,) * len(block.rows)
        return Block(block.family, block.rows, lambda g: block.read(g) if self.steps_told else absent)

    def _read_tail_seconds(self) -> list[float]:
        # From the highest bound down, so that each sum adds the same non-decreasing terms in the same order: monotone.
        above = np.cumsum(np.array(self._tail_seconds)[::-1], axis=0)[::-1]
        flat: list[float] = above.ravel().tolist()
        return flat

    def _read_tail_lengths(self, which: int) -> list[float]:
        above = np.cumsum(self._tail_lengths[:, ::-1], axis=1)[:, ::-1]
        flat: list[float] = above[which].ravel().tolist()
        return flat

    def _read_tail_requests(self) -> list[float]:
        return list(accumulate(self._tail_requests[::-1]))[::-1]
