"""How much of the copies between device and host lay beside steps: intervals on the GPU's clock, by events. CUDA only.

hidden = time of copies during which a step was running; the rest is exposed. Ratio by published names: copy / compute overlap.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

_MAX_KEPT = 4096  # copies, or steps beside them, that wait to be looked at; older ones are forgotten

Interval = tuple[float, float]


def hidden_time(copies: Sequence[Interval], steps: Sequence[Interval]) -> float:
    """Summed length of the parts of `copies` that lie within `steps`. Steps do not overlap each other."""
    return sum(
        max(0.0, min(end, step_end) - max(begin, step_begin)) for begin, end in copies for step_begin, step_end in steps
    )


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class CopyOverlap:
    """begin_step() and end_step() around a step on its stream, `with copy()` around a copy on another; take() after a step.

    Copies are launched between steps. A copy's stream must wait for the step's stream before copy(), so that no event is older than
    the one that all times are measured from. `record` makes an event on the current stream.
    """

    def __init__(self, record: Callable[[], Any] = _event) -> None:
        self._record = record
        self._base: Any = None  # times are float32 milliseconds since it: renewed when no copy is on its way
        self._step: Any = None
        self._steps: deque[tuple[Any, Any]] = deque(maxlen=_MAX_KEPT)
        self._copies: deque[tuple[Any, Any]] = deque(maxlen=_MAX_KEPT)

    def rebase(self) -> None:
        """On the stream of the steps, before a copy: times are measured from here unless a copy is on its way."""
        if not self._copies:
            self._base = self._record()
            self._steps.clear()

    @contextmanager
    def copy(self) -> Iterator[None]:
        begin = self._record()
        yield
        self._copies.append((begin, self._record()))

    def begin_step(self) -> None:
        self._step = self._record() if self._copies else None

    def end_step(self) -> None:
        """Waits for the step."""
        if self._step is not None:
            end = self._record()
            end.synchronize()
            self._steps.append((self._step, end))
            self._step = None

    def take(self) -> tuple[float, float]:
        """(hidden, exposed) seconds of the copies that have ended since the last call; steps that begin later cannot lie beside them."""
        ended = []
        while self._copies and self._copies[0][1].query():
            ended.append(self._at(self._copies.popleft()))
        if not ended:
            return 0.0, 0.0
        hidden = hidden_time(ended, [self._at(step) for step in self._steps])
        total = sum(end - begin for begin, end in ended)
        return hidden, max(total - hidden, 0.0)

    def _at(self, pair: tuple[Any, Any]) -> Interval:
        begin, end = pair
        return self._base.elapsed_time(begin) / 1000, self._base.elapsed_time(end) / 1000
