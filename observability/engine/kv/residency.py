"""How long cached content lives in a pool, and which evicted content is remembered: the books behind residency and regret.

A life begins when a block becomes findable and ends when its content is evicted. It goes on when the content moves to another block.
While nobody holds the block it is idle; an idle spell ends by reuse or by eviction. pool.py and manager.py say what happened.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import repeat
from math import inf

import numpy as np

from observability.catalog import AGE_BOUNDS
from observability.engine.kv.prefix import Blocks, Keys
from observability.telemetry.residency import AGE_BOUNDS_US, PoolResidency, Spells

_NOT_CACHED = -1
_AT_ONCE = 4096  # events that are kept as they came, and then counted in one go


class Ledger:
    """Lives of the cached content of one bounded pool of `num_blocks`. Times are whole microseconds, so that sums are exact."""

    def __init__(self, num_blocks: int, clock: Callable[[], float]) -> None:
        self.born = np.full(num_blocks, _NOT_CACHED, dtype=np.int64)
        self._idle_since = np.zeros(num_blocks, dtype=np.int64)
        self._clock = clock
        self._evicted = np.zeros(len(AGE_BOUNDS) + 1, dtype=np.int64)
        self._idle = Spells.none()
        self._gaps = Spells.none()
        self._ended: list[
            tuple[np.ndarray, np.ndarray]
        ] = []  # ages and idle times of blocks evicted since these were counted
        self._num_ended = 0

    def _now(self) -> int:
        return int(self._clock() * 1e6)

    def begin(self, blocks: Blocks) -> None:
        """New content can be found in `blocks`, which are held."""
        self.born[blocks] = self._now()

    def carry(self, old: Blocks, new: Blocks) -> None:
        """The content of `old` is in `new` from now on."""
        self.born[new] = self.born[old]
        self.born[old] = _NOT_CACHED

    def idle(self, blocks: Blocks) -> None:
        """Nobody holds these cached blocks any more."""
        self._idle_since[blocks] = self._now()

    def reuse(self, blocks: Blocks) -> None:
        """Idle blocks are hit."""
        self._gaps.add(self._now() - self._idle_since[blocks])

    def end(self, blocks: Blocks) -> None:
        """Idle blocks are evicted."""
        now = self._now()
        self._ended.append((now - self.born[blocks], now - self._idle_since[blocks]))
        self._num_ended += len(blocks)
        self.born[blocks] = _NOT_CACHED
        if self._num_ended > _AT_ONCE:
            self._count()

    def _count(self) -> None:
        if self._ended:
            ages, idle = (np.concatenate(column) for column in zip(*self._ended, strict=True))
            self._ended.clear()
            self._num_ended = 0
            self._evicted += np.bincount(np.searchsorted(AGE_BOUNDS_US, ages), minlength=len(self._evicted))
            self._idle.add(idle)

    def residency(self) -> PoolResidency:
        """The books at this instant, as a copy: 8 bytes a block."""
        self._count()
        births = self.born[self.born != _NOT_CACHED]
        return PoolResidency(self._now(), births, self._evicted.copy(), self._idle.copy(), self._gaps.copy())


class EvictionMemory:
    """When content was evicted, by key: the newest `capacity` evictions (in the spirit of the ghost lists of ARC, Megiddo and Modha,
    FAST 2003). What was evicted again counts with its last eviction. About 150 bytes each, and the same time whatever is known."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._time_of: dict[int, float] = {}
        self._batches: deque[tuple[float, list[int]]] = deque()  # as they were evicted together, oldest first
        self._evictions = 0  # in the batches
        self._forgotten = -inf  # newest eviction that had to make room while nothing newer of its key was known

    def __len__(self) -> int:
        return len(self._time_of)

    def add(self, keys: Keys, now: float) -> None:
        """`keys` are evicted at `now`, which never decreases."""
        batch = keys.tolist()
        self._time_of.update(zip(batch, repeat(now)))
        self._batches.append((now, batch))
        self._evictions += len(batch)
        while self._evictions > self._capacity:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        time_of = self._time_of
        then, batch = self._batches.popleft()
        self._evictions -= len(batch)
        for key in batch:
            if time_of.get(key) == then:
                del time_of[key]
                self._forgotten = then

    def times(self, keys: Keys) -> np.ndarray:
        """When each key was evicted last, float64 [keys]; -inf where that is not known."""
        time_of = self._time_of
        return np.array([time_of.get(key, -inf) for key in keys.tolist()], dtype=np.float64)

    def reach(self, now: float) -> float | None:
        """Seconds within which every eviction is known; None: none was ever forgotten."""
        return None if self._forgotten == -inf else now - self._forgotten
