"""Base-2 exponential buckets beside a histogram's own, kept once OTLP asks for them: quantiles of any size to within 2.2 %."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import ceil, log2
from time import time_ns

import numpy as np

#: Buckets of Exponential: 32 for each doubling (OTLP scale 5), bounds 2.2 % apart.
EXPONENTIAL_SCALE = 5
_PER_DOUBLING = 1 << EXPONENTIAL_SCALE
_LOWEST = -20 * _PER_DOUBLING  # up to 2^-20 s, about a microsecond, an observation counts as zero
_EXPONENTIAL_CELLS = 37 * _PER_DOUBLING  # the last one ends at 2^17 s, a day and a half, and takes what is beyond


class Exponential:
    """Base-2 exponential buckets of one family, as OTLP defines them: bucket i holds values in (2^(i/32), 2^((i+1)/32)].

    For each label set a zero count, one count a bucket, then the sum. Written by the engine's thread, read by copying.
    """

    stride = _EXPONENTIAL_CELLS + 2

    def __init__(self, label_sets: Iterable[tuple[str, ...]]) -> None:
        self.label_sets = tuple(label_sets)
        self.cells: list[float] = [0] * (self.stride * len(self.label_sets))
        self.start_ns = time_ns()

    def add(self, label_set: int, value: float, count: float = 1) -> None:
        """Counts `count` observations of `value` >= 0 under label_sets[label_set]."""
        at = ceil(log2(value) * _PER_DOUBLING) - _LOWEST if value > 0.0 else 0
        start = label_set * self.stride
        self.cells[start + min(max(at, 0), _EXPONENTIAL_CELLS)] += count
        self.cells[start + self.stride - 1] += count * value

    def add_many(self, label_set: int, values: np.ndarray, count: float = 1) -> None:
        """`add` for each of `values`, float64."""
        with np.errstate(divide="ignore"):
            at = np.ceil(np.log2(values) * _PER_DOUBLING) - _LOWEST
        counts = np.bincount(np.clip(at, 0, _EXPONENTIAL_CELLS).astype(np.int64))
        start = label_set * self.stride
        for i in np.flatnonzero(counts):
            self.cells[start + int(i)] += count * int(counts[i])
        self.cells[start + self.stride - 1] += count * float(values.sum())

    def read(self) -> Iterator[tuple[tuple[str, ...], int, int, list[int], float]]:
        """(labels, zero count, index of the first bucket, counts from there to the last used bucket, sum) of each label set."""
        cells = self.cells.copy()
        for i, labels in enumerate(self.label_sets):
            zero, *counts, total = cells[i * self.stride : (i + 1) * self.stride]
            used = [at for at, count in enumerate(counts) if count]
            first, end = (used[0], used[-1] + 1) if used else (0, 0)
            yield labels, int(zero), first + _LOWEST, [int(count) for count in counts[first:end]], total
