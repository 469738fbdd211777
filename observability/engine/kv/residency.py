"""How long cached content lives in a pool, and which evicted content is remembered: the books behind residency and regret.

A life begins when a block becomes findable and ends when its content is evicted. It goes on when the content moves to another block.
While nobody holds the block it is idle; an idle spell ends by reuse or by eviction. pool.py and manager.py say what happened.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from observability.catalog import AGE_BOUNDS
from observability.engine.kv.prefix import Blocks, Keys, PrefixIndex
from observability.telemetry.residency import AGE_BOUNDS_US, PoolResidency, Spells

_NOT_CACHED = -1


class Ledger:
    """Lives of the cached content of one bounded pool of `num_blocks`. Times are whole microseconds, so that sums are exact."""

    def __init__(self, num_blocks: int, clock: Callable[[], float]) -> None:
        self.born = np.full(num_blocks, _NOT_CACHED, dtype=np.int64)
        self._idle_since = np.zeros(num_blocks, dtype=np.int64)
        self._clock = clock
        self._evicted = np.zeros(len(AGE_BOUNDS) + 1, dtype=np.int64)
        self._idle = Spells.none()
        self._gaps = Spells.none()

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
        ages = np.searchsorted(AGE_BOUNDS_US, now - self.born[blocks])
        self._evicted += np.bincount(ages, minlength=len(self._evicted))
        self._idle.add(now - self._idle_since[blocks])
        self.born[blocks] = _NOT_CACHED

    def residency(self) -> PoolResidency:
        """The books at this instant, as a copy: 8 bytes a block."""
        births = self.born[self.born != _NOT_CACHED]
        return PoolResidency(self._now(), births, self._evicted.copy(), self._idle.copy(), self._gaps.copy())


class EvictionMemory:
    """When content was evicted, by key: the newest `capacity` evictions (in the spirit of the ghost lists of ARC, Megiddo and Modha,
    FAST 2003). What was evicted again counts with its last eviction. About 50 bytes a key; each key costs the same whatever is known."""

    def __init__(self, capacity: int) -> None:
        self._index = PrefixIndex(min(capacity, 1024))  # grows with what is known; its blocks are places in the ring
        self._times = np.zeros(capacity)
        self._used = np.zeros(capacity, dtype=bool)
        self._next = 0
        self._forgotten = -np.inf  # newest eviction that had to make room while nothing newer of its key was known

    def __len__(self) -> int:
        return len(self._index)

    def add(self, keys: Keys, now: float) -> None:
        """`keys`, which are distinct, are evicted at `now`, which never decreases."""
        keys = keys[-len(self._times) :]
        known = self._index.get(keys)
        known = known[known >= 0]
        if known.size:
            self._index.remove(known)
            self._used[known] = False
        places = (self._next + np.arange(len(keys))) % len(self._times)
        self._next = (self._next + len(keys)) % len(self._times)
        old = places[self._used[places]]
        if old.size:
            self._forgotten = max(self._forgotten, float(self._times[old].max()))
            self._index.remove(old)
        self._index.insert(keys, places)
        self._times[places] = now
        self._used[places] = True

    def times(self, keys: Keys) -> np.ndarray:
        """When each key was evicted last, float64 [keys]; -inf where that is not known."""
        places = self._index.get(keys)
        return np.where(places >= 0, self._times[places], -np.inf)

    def reach(self, now: float) -> float | None:
        """Seconds within which every eviction is known; None: none was ever forgotten."""
        return None if self._forgotten == -np.inf else now - self._forgotten
