"""What work takes, learnt from the work itself: seconds a unit, recent work counting most."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_DECAY = 0.9  # of what was measured before, at each new measurement
_MAX_PENDING = 256  # measurements of a GPU that nobody has asked about


class Rate:
    """Seconds a unit over the measured work, the latest 10 measurements weighing about two thirds.

    Work is weighted by its size: many small pieces do not outvote a large one.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds = self._units = 0.0
        self._pending: deque[tuple[float, torch.cuda.Event, torch.cuda.Event]] = deque(maxlen=_MAX_PENDING)

    def add(self, units: float, seconds: float) -> None:
        self._units = self._units * _DECAY + units
        self._seconds = self._seconds * _DECAY + seconds

    @contextmanager
    def measure(self, units: float) -> Iterator[None]:
        """Adds what the block takes: on a CPU by a clock, on a GPU what its current stream takes, known once that has ended."""
        if self._cuda:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._pending.append((units, begin, end))
        else:
            began = time.perf_counter()
            yield
            self.add(units, time.perf_counter() - began)

    def seconds(self, units: float) -> float:
        """Expected seconds of so many units; inf when nothing was measured."""
        while self._pending and self._pending[0][2].query():
            measured, begin, end = self._pending.popleft()
            self.add(measured, begin.elapsed_time(end) / 1000)
        return units * self._seconds / self._units if self._units else math.inf
