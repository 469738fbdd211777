"""The two clocks that an executor can have: the machine's, and one that only moves when told to."""

from __future__ import annotations

import time


class MonotonicClock:
    """Real time that never goes back."""

    virtual = False

    def now(self) -> float:
        return time.monotonic()

    def wait_until(self, when: float) -> None:
        """Does not wait: a live engine waits on its inbox."""


class VirtualClock:
    """Simulated time in seconds. Starts at `start` and is moved by the executor (a step took time) and by idle jumps."""

    virtual = True

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def wait_until(self, when: float) -> None:
        """Jumps to `when`; never goes back."""
        self._now = max(self._now, when)
