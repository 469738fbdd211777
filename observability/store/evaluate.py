"""Evaluates the signals of observability/signals.py on a sequence of scrapes, as Prometheus 2.42 does at a point in time.

A scrape becomes a row over a growing list of columns (series). Each expression tree is compiled once for a list of columns
into index arrays, so that an evaluation is a few array operations a signal. Sources of the rules: promql/functions.go
(extrapolatedRate), promql/quantile.go (bucketQuantile), promql/engine.go (lookback, staleness, bottomk) of Prometheus 2.42.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from observability import catalog
from observability.catalog import Family
from observability.signals import (
    SIGNALS,
    WINDOW_SECONDS,
    Age,
    Aggregate,
    Decibel,
    Gauge,
    LifetimeQuantile,
    Node,
    Not,
    OneMinus,
    Product,
    Quantile,
    Rate,
    Ratio,
    Signal,
    Sqrt,
    Survival,
    TailMean,
    Where,
)

#: Identity of a series: sample name (with `_total` or `_bucket`) and its labels as (name, value) pairs.
Key = tuple[str, tuple[tuple[str, str], ...]]
Labels = dict[str, str]

_WINDOW_MS = WINDOW_SECONDS * 1000  # of rate(); the instant lookback of 5 minutes is as long


class Vector(NamedTuple):
    """Values of some series, float64 [series], and which of them exist, bool [series]."""

    values: np.ndarray
    present: np.ndarray


class Evaluated(NamedTuple):
    """One signal: labels of its series (the same list object until series appear), values [series], NaN where absent."""

    labels: list[Labels]
    values: np.ndarray


class Evaluator:
    """Holds the scrapes of the last five minutes and evaluates signals on them.

    Feed it in time order: `scrape` for each answer of the target, `scrape_failed` when there was none. A series that
    is not in a scrape is stale from then on, as with Prometheus' staleness markers.
    """

    def __init__(self, signals: Sequence[Signal] = SIGNALS) -> None:
        self._signals = signals
        self._names = {family.series for signal in signals for family in _families(signal.expr)}
        self._columns: list[Key] = []
        self._column_of: dict[Key, int] = {}
        self._mapped: tuple[Sequence[Key], int, np.ndarray, np.ndarray] | None = None
        self._compiled: list[tuple[str, _Compiled]] | None = None
        self._times: list[int] = []  # milliseconds, ascending
        self._rows: list[Vector] = []  # each over the columns that were known when it was added

    def scrape(self, time: float, series: Sequence[Key], values: np.ndarray, *, nan_is_absent: bool = False) -> None:
        """Adds one scrape at `time` (Unix seconds): values [series]. An append-only list of series should be passed as
        the same object each time; its columns are then looked up once. `nan_is_absent`: NaN marks a series that does
        not exist. A time that is not after the last one is ignored, as Prometheus drops such samples."""
        at = round(time * 1000)
        if self._times and at <= self._times[-1]:
            return
        places, columns = self._places(series)
        row = Vector(np.zeros(len(self._columns)), np.zeros(len(self._columns), dtype=bool))
        row.values[columns] = values[places]
        row.present[columns] = ~np.isnan(row.values[columns]) if nan_is_absent else True
        self._append(at, row)

    def scrape_failed(self, time: float) -> None:
        """The target did not answer at `time`: every series is stale until the next scrape."""
        at = round(time * 1000)
        if not self._times or at > self._times[-1]:
            self._append(at, Vector(np.zeros(0), np.zeros(0, dtype=bool)))

    def evaluate(self, time: float) -> dict[str, Evaluated]:
        """Every signal at `time`, Unix seconds, by name; signals whose families were never seen have no series."""
        if self._compiled is None:
            compiler = _Compiler(self._columns)
            self._compiled = [(signal.name, compiler.signal(signal)) for signal in self._signals]
        at = round(time * 1000)
        samples = self._samples(at)
        out = {}
        with np.errstate(divide="ignore", invalid="ignore"):
            for name, compiled in self._compiled:
                values, present = compiled.run(samples)
                out[name] = Evaluated(compiled.labels, np.where(present & np.isfinite(values), values, np.nan))
        return out

    def _append(self, at: int, row: Vector) -> None:
        while self._times and self._times[0] < at - _WINDOW_MS:
            del self._times[0], self._rows[0]
        self._times.append(at)
        self._rows.append(row)

    def _places(self, series: Sequence[Key]) -> tuple[np.ndarray, np.ndarray]:
        """Positions in `series` that some signal reads, and their columns; new columns are added."""
        if self._mapped is not None and self._mapped[0] is series and self._mapped[1] == len(series):
            return self._mapped[2], self._mapped[3]
        places, columns = [], []
        for place, (name, labels) in enumerate(series):
            if name in self._names:
                key = (name, tuple(labels))
                column = self._column_of.setdefault(key, len(self._columns))
                if column == len(self._columns):
                    self._columns.append(key)
                    self._compiled = None
                places.append(place)
                columns.append(column)
        found = np.array(places, dtype=np.int64), np.array(columns, dtype=np.int64)
        self._mapped = (series, len(series), *found)
        return found

    def _samples(self, at: int) -> _Samples:
        width = len(self._columns)
        inside = [i for i, time in enumerate(self._times) if at - _WINDOW_MS <= time <= at]
        times = np.array([self._times[i] for i in inside], dtype=np.int64)
        values, present = np.zeros((len(inside), width)), np.zeros((len(inside), width), dtype=bool)
        for target, i in enumerate(inside):
            row = self._rows[i]
            values[target, : len(row.values)] = row.values
            present[target, : len(row.values)] = row.present
        if len(inside):
            instant = Vector(values[-1], present[-1])
        else:
            instant = Vector(np.zeros(width), np.zeros(width, dtype=bool))
        return _Samples(at, instant, rates(times, values, present, at))


def rates(times: np.ndarray, values: np.ndarray, present: np.ndarray, at: int) -> Vector:
    """Per-second rate() over the window that ends at `at`, of counters with `values` [scrapes, series] at `times` in
    milliseconds [scrapes]; a series with fewer than two samples has none.

    Prometheus 2.42: the increase, corrected for resets, is extrapolated to the ends of the window where the first and
    last samples are within 1.1 average intervals of them (else by half an interval), but not to before the counter was 0.
    """
    scrapes, width = values.shape
    if scrapes < 2:
        return Vector(np.zeros(width), np.zeros(width, dtype=bool))
    everywhere = bool(present.all())
    column = np.arange(width)
    if everywhere:
        count = np.full(width, scrapes)
        first, last = np.zeros(width, dtype=np.int64), np.full(width, scrapes - 1)
        filled = values
    else:
        count = present.sum(axis=0)
        first = present.argmax(axis=0)
        last = scrapes - 1 - present[::-1].argmax(axis=0)
        newest = np.maximum.accumulate(np.where(present, np.arange(scrapes)[:, None], -1), axis=0)
        filled = np.where(newest >= 0, values[np.maximum(newest, 0), column], -np.inf)
    first_value = values[first, column]
    increase = values[last, column] - first_value
    dropped = filled[1:] < filled[:-1]
    if dropped.any():
        increase = increase + np.where(dropped, filled[:-1], 0.0).sum(axis=0)
    sampled = (times[last] - times[first]) / 1000.0
    with np.errstate(divide="ignore", invalid="ignore"):
        to_start = (times[first] - (at - _WINDOW_MS)) / 1000.0
        to_end = (at - times[last]) / 1000.0
        average = sampled / (count - 1.0)
        to_zero = sampled * (first_value / increase)
        clamp = (increase > 0) & (first_value >= 0) & (to_zero < to_start)
        to_start = np.where(clamp, to_zero, to_start)
        threshold = average * 1.1
        covered = sampled + np.where(to_start < threshold, to_start, average / 2.0)
        covered = covered + np.where(to_end < threshold, to_end, average / 2.0)
        return Vector(increase * (covered / sampled / WINDOW_SECONDS), count >= 2)


# -- expressions ----------------------------------------------------------------------------------------------------


class _Samples(NamedTuple):
    """What the leaves of every tree read: the newest value and the rate of each column at `at` (milliseconds)."""

    at: int
    instant: Vector
    rates: Vector


@dataclass
class _Compiled:
    """A node over fixed columns: the labels of its series, and what computes them."""

    labels: list[Labels]
    run: Callable[[_Samples], Vector]


@dataclass
class _Compiler:
    """Compiles nodes for one list of columns. Nodes with the same PromQL share one computation per evaluation."""

    columns: list[Key]
    done: dict[str, _Compiled] = field(default_factory=dict)

    def signal(self, signal: Signal) -> _Compiled:
        """Without any series where Prometheus would refuse to evaluate the rule."""
        try:
            return self.node(signal.expr)
        except _AmbiguousMatch:
            return _Compiled([], lambda _: Vector(np.zeros(0), np.zeros(0, dtype=bool)))

    def node(self, node: Node) -> _Compiled:
        text = node.promql()
        if text not in self.done:
            compiled = self._node(node)
            self.done[text] = _Compiled(compiled.labels, _once(compiled.run))
        return self.done[text]

    def _node(self, node: Node) -> _Compiled:
        match node:
            case Gauge(family, where):
                labels, at = self._select(family, where)
                return _Compiled(labels, lambda s: Vector(s.instant.values[at], s.instant.present[at]))
            case Rate(family, where):
                labels, at = self._select(family, where)
                return _Compiled(labels, lambda s: Vector(s.rates.values[at], s.rates.present[at]))
            case Aggregate(op, of, by):
                return _aggregate(op, self.node(of), by)
            case Quantile(q, of):
                return _quantile(q, self.node(of))
            case Ratio(top, bottom, on):
                return _matched(self.node(top), self.node(bottom), on, np.divide)
            case Product(left, right, on):
                return _matched(self.node(left), self.node(right), on, np.multiply)
            case OneMinus(of):
                return _each(self.node(of), lambda v, _: 1.0 - v)
            case Sqrt(of):
                return _each(self.node(of), lambda v, _: np.sqrt(v))
            case Decibel(of):
                return _each(self.node(of), lambda v, _: 10.0 * np.log10(v))
            case Age(of):
                return _each(self.node(of), lambda v, at: np.maximum(at / 1000.0 - v, 0.0))
            case Survival():
                return self._survival()
            case LifetimeQuantile(q, survival):
                return self._lifetime_quantile(q, self.node(survival))
            case TailMean(q, by, family):
                return self._tail_mean(q, by, family)

    def _select(self, family: Family, where: Where) -> tuple[list[Labels], np.ndarray]:
        def wanted(labels: Labels) -> bool:
            return all(_matches(labels.get(name, ""), value) for name, value in where.items())

        found = [(i, dict(key[1])) for i, key in enumerate(self.columns) if key[0] == family.series]
        # In label order, as Prometheus reads series from its blocks, so that sums add in the same order: where a rank falls
        # exactly on the end of a bucket, the last digit of a sum decides a quantile.
        found = sorted(((i, labels) for i, labels in found if wanted(labels)), key=lambda pair: sorted(pair[1].items()))
        return [labels for _, labels in found], np.array([i for i, _ in found], dtype=np.int64)

    def _tail_mean(self, q: float, by: tuple[str, ...], family: Family) -> _Compiled:
        """sum by (seconds / tail), where tail is for each model the requests above the one bound whose share of all
        requests is the smallest that is at least 1 - q (`bottomk by (model) (1, share >= ...)`)."""
        seconds = self.node(Aggregate("sum", Rate(family), (*by, "gt")))
        requests = self.node(Aggregate("sum", Rate(catalog.PHASE_REQUESTS), ("model", "gt")))
        everyone = Aggregate("sum", Rate(catalog.PHASE_REQUESTS, {"gt": "0"}), ("model",))
        share = self.node(Ratio(Aggregate("sum", Rate(catalog.PHASE_REQUESTS), ("model", "gt")), everyone, ("model",)))
        least = float(f"{1 - q:.6g}")
        row_of = {(labels["model"], labels["gt"]): i for i, labels in enumerate(requests.labels)}
        # Candidates of each model in label order: of bounds that no request lies between, any gives the same mean.
        candidates: dict[str, list[tuple[int, int]]] = {}
        for i, labels in sorted(enumerate(share.labels), key=lambda pair: pair[1]["gt"]):
            candidates.setdefault(labels["model"], []).append((i, row_of[labels["model"], labels["gt"]]))
        model = [labels["model"] for labels in seconds.labels]
        rows = [row_of.get((m, labels["gt"]), -1) for m, labels in zip(model, seconds.labels, strict=True)]
        row = np.array(rows, dtype=np.int64)
        groups, member = _groups(seconds.labels, by)

        def run(s: _Samples) -> Vector:
            shares, counts, spent = share.run(s), requests.run(s), seconds.run(s)
            divisor = np.full(len(requests.labels) + 1, np.nan)  # the last one: no such row
            for pairs in candidates.values():
                ok = [(shares.values[i], n) for i, n in pairs if shares.present[i] and shares.values[i] >= least]
                if ok:
                    chosen = min(ok, key=lambda pair: pair[0])[1]
                    divisor[chosen] = counts.values[chosen]
            below = divisor[row]
            used = spent.present & ~np.isnan(below)
            means = np.where(used, spent.values / below, 0.0)
            return Vector(np.bincount(member, means, len(groups)), np.bincount(member, used, len(groups)) > 0)

        return _Compiled(groups, run)

    def _survival(self) -> _Compiled:
        """exp(sum of ln(1 - evicted / exposed)) over the ages up to each bound, for each model and pool; NaN, which is where an
        interval had no exposure, is dropped."""
        by = ("model", "pool", "age")
        evicted = self.node(Aggregate("sum", Rate(catalog.KV_EVICTED_AGES), by))
        exposed = self.node(Aggregate("sum", Rate(catalog.KV_EXPOSED), by))
        ratio = _matched(evicted, exposed, by, np.divide)
        place = {age: i for i, age in enumerate(catalog.AGE_LABELS)}
        groups, member = _groups(ratio.labels, ("model", "pool"))
        bounds = len(catalog.AGE_BOUNDS)
        pairs = [
            (i, n) for i, labels in enumerate(ratio.labels) for n in range(place.get(labels["age"], bounds), bounds)
        ]
        source = np.array([i for i, _ in pairs], dtype=np.int64)
        target = np.array([member[i] * bounds + n for i, n in pairs], dtype=np.int64)
        size = len(groups) * bounds

        def run(s: _Samples) -> Vector:
            values, present = ratio.run(s)
            here = present[source]
            logs = np.where(here, np.log(1.0 - np.minimum(values, 1.0))[source], 0.0)
            survival = np.exp(np.bincount(target, logs, size))
            known = np.bincount(target, here, size) > 0
            return Vector(survival, known & (survival >= 0.0))

        labels = [{**group, "le": str(float(bound))} for group in groups for bound in catalog.AGE_BOUNDS]
        return _Compiled(labels, run)

    def _lifetime_quantile(self, q: float, survival: _Compiled) -> _Compiled:
        groups, _ = _groups(survival.labels, ("model", "pool"))
        bounds = np.array([*catalog.AGE_BOUNDS, np.inf])
        least = float(f"{1 - q:.6g}")

        def run(s: _Samples) -> Vector:
            found = survival.run(s)
            shape = (len(groups), len(catalog.AGE_BOUNDS))
            values, present = found.values.reshape(shape), found.present.reshape(shape)
            reached = np.where(present, values, np.inf).min(axis=1, initial=np.inf) <= least
            counts = np.column_stack((1.0 - values, np.ones(len(groups))))
            exists = np.column_stack((present, reached))
            return Vector(bucket_quantile(q, bounds, counts, exists), np.any(exists, axis=1))

        return _Compiled(groups, run)


class _AmbiguousMatch(Exception):
    """Several series on the right side of an operator stand for one on its left."""


def _matches(label: str, wanted: str | tuple[str, ...] | Not) -> bool:
    if isinstance(wanted, Not):
        return label not in wanted.values
    return label == wanted if isinstance(wanted, str) else label in wanted


def _once(run: Callable[[_Samples], Vector]) -> Callable[[_Samples], Vector]:
    """Computes once for each _Samples object."""
    last: list[tuple[_Samples, Vector]] = []

    def cached(samples: _Samples) -> Vector:
        if not last or last[0][0] is not samples:
            last[:] = [(samples, run(samples))]
        return last[0][1]

    return cached


def _groups(labels: Sequence[Mapping[str, str]], by: tuple[str, ...]) -> tuple[list[Labels], np.ndarray]:
    """Distinct label sets over `by`, and the group of each series [series]."""
    found: dict[tuple[str, ...], int] = {}
    member = [found.setdefault(tuple(label.get(name, "") for name in by), len(found)) for label in labels]
    return [dict(zip(by, key, strict=True)) for key in found], np.array(member, dtype=np.int64)


def _each(of: _Compiled, function: Callable[[np.ndarray, int], np.ndarray]) -> _Compiled:
    def run(s: _Samples) -> Vector:
        values, present = of.run(s)
        return Vector(function(values, s.at), present)

    return _Compiled(of.labels, run)


def _aggregate(op: str, of: _Compiled, by: tuple[str, ...]) -> _Compiled:
    groups, member = _groups(of.labels, by)
    if op in ("sum", "avg"):

        def run(s: _Samples) -> Vector:
            values, present = of.run(s)
            sums = np.bincount(member, np.where(present, values, 0.0), len(groups))
            counts = np.bincount(member, present, len(groups))
            return Vector(sums if op == "sum" else sums / np.maximum(counts, 1), counts > 0)

    else:
        extreme, start = (np.maximum, -np.inf) if op == "max" else (np.minimum, np.inf)

        def run(s: _Samples) -> Vector:
            values, present = of.run(s)
            out = np.full(len(groups), start)
            extreme.at(out, member, np.where(present, values, start))
            return Vector(out, np.bincount(member, present, len(groups)) > 0)

    return _Compiled(groups, run)


def _matched(
    left: _Compiled, right: _Compiled, on: tuple[str, ...], operation: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> _Compiled:
    """`left op on (...) group_left () right`: every left series whose match on the right exists."""
    place = {tuple(labels.get(name, "") for name in on): i for i, labels in enumerate(right.labels)}
    if len(place) < len(right.labels):
        raise _AmbiguousMatch(f"several series on the right side match on {on}")
    pairs = [(i, place.get(tuple(labels.get(name, "") for name in on))) for i, labels in enumerate(left.labels)]
    here = np.array([i for i, j in pairs if j is not None], dtype=np.int64)
    there = np.array([j for _, j in pairs if j is not None], dtype=np.int64)

    def run(s: _Samples) -> Vector:
        a, b = left.run(s), right.run(s)
        return Vector(operation(a.values[here], b.values[there]), a.present[here] & b.present[there])

    return _Compiled([left.labels[i] for i in here], run)


def _quantile(q: float, of: _Compiled) -> _Compiled:
    """histogram_quantile over bucket rates: linear inside a bucket, the highest finite bound when it falls in +Inf."""
    bound_of = [_bound(labels.get("le", "")) for labels in of.labels]
    kept = np.array(
        [i for i, bound in enumerate(bound_of) if not np.isnan(bound)], dtype=np.int64
    )  # others are no buckets
    names = [tuple(sorted((k, v) for k, v in of.labels[i].items() if k != "le")) for i in kept]
    found: dict[tuple[tuple[str, str], ...], int] = {}
    group = np.array([found.setdefault(name, len(found)) for name in names], dtype=np.int64)
    bounds = np.array([bound_of[i] for i in kept], dtype=np.float64)
    les, bucket = np.unique(bounds, return_inverse=True)
    shape = (len(found), len(les))
    flat = group * len(les) + bucket  # equal bounds written differently ("1", "1.0") add up

    def run(s: _Samples) -> Vector:
        values, present = (part[kept] for part in of.run(s))
        counts = np.bincount(flat, np.where(present, values, 0.0), shape[0] * shape[1]).reshape(shape)
        exists = np.bincount(flat, present, shape[0] * shape[1]).reshape(shape) > 0
        return Vector(bucket_quantile(q, les, counts, exists), np.any(exists, axis=1))

    return _Compiled([dict(name) for name in found], run)


def _bound(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return np.nan


def bucket_quantile(q: float, bounds: np.ndarray, counts: np.ndarray, exists: np.ndarray) -> np.ndarray:
    """Quantile of each histogram [groups] from cumulative `counts` [groups, bounds]; NaN without observations.

    `bounds` ascend. A bucket that does not `exist` is skipped, as if its bound were not there.
    """
    if not len(bounds) or not np.isposinf(bounds[-1]):
        return np.full(len(counts), np.nan)
    row = np.arange(len(counts))
    counts = np.maximum.accumulate(np.where(exists, counts, -np.inf), axis=1)
    total = counts[:, -1]
    rank = q * total
    index = (exists & (counts >= rank[:, None])).argmax(axis=1)
    # place of the last existing bucket before each place, -1 if none
    seen = np.maximum.accumulate(np.where(exists, np.arange(len(bounds)), -1), axis=1)
    before = np.where(index > 0, seen[row, index - 1], -1)
    start = np.where(before >= 0, bounds[before], 0.0)
    below = np.where(before >= 0, counts[row, before], 0.0)
    end = bounds[index]
    with np.errstate(divide="ignore", invalid="ignore"):
        inside = start + (end - start) * ((rank - below) / (counts[row, index] - below))
    inside = np.where((before < 0) & (end <= 0), end, inside)
    out = np.where(index == len(bounds) - 1, start, inside)
    valid = exists[:, -1] & (exists.sum(axis=1) >= 2) & (total != 0) & ~np.isnan(total)
    return np.where(valid, out, np.nan)


def _families(node: Node) -> list[Family]:
    match node:
        case Gauge(family, _) | Rate(family, _):
            return [family]
        case Ratio(a, b, _) | Product(a, b, _):
            return _families(a) + _families(b)
        case Survival() | LifetimeQuantile():
            return [catalog.KV_EVICTED_AGES, catalog.KV_EXPOSED]
        case TailMean(_, _, family):
            return [family, catalog.PHASE_REQUESTS]
        case Aggregate(_, of, _) | Quantile(_, of) | OneMinus(of) | Sqrt(of) | Decibel(of) | Age(of):
            return _families(of)
