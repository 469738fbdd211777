"""Splits the time of one step's forward pass by what it was spent on, on a CPU by a clock and on a GPU by events."""

from __future__ import annotations

import time
from enum import IntEnum

import torch


class Part(IntEnum):
    """What a stretch of the forward pass did."""

    LINEAR = 0  # everything that treats all tokens alike
    HEAD = 1  # logits of the sampled rows
    PREFILL = 2  # attention of prefill chunks
    DECODE = 3  # attention of decodes
    DEQUANT = 4  # reading quantized blocks


class StepTimer:
    """begin(), then lap(part) after each stretch, then shares(). On CUDA a lap is an event, read once the step has ended."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds = [0.0] * len(Part)
        self._last = 0.0
        self._events: list[tuple[Part | None, torch.cuda.Event]] = []

    def begin(self) -> None:
        self._seconds = [0.0] * len(Part)
        if self._cuda:
            self._events = [(None, self._event())]
        else:
            self._last = time.perf_counter()

    def lap(self, part: Part) -> None:
        """The time since the previous lap goes to `part`."""
        if self._cuda:
            self._events.append((part, self._event()))
            return
        now = time.perf_counter()
        self._seconds[part] += now - self._last
        self._last = now

    def shares(self) -> list[float]:
        """Share of each part in the time since begin(), by Part; sums to 1. Waits for the device."""
        if self._cuda:
            self._events[-1][1].synchronize()  # not the device: copies beside the step go on
            for (_, before), (part, after) in zip(self._events, self._events[1:], strict=False):
                assert part is not None
                self._seconds[part] += before.elapsed_time(after)
        total = sum(self._seconds)
        return [s / total for s in self._seconds] if total > 0 else [1.0] + [0.0] * (len(Part) - 1)

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
