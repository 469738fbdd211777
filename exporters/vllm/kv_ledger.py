"""Which cached blocks exist in each tier, since when, and which come back after their eviction: vLLM's KV events, added up.

Events name every block, so nothing is sampled; but they may be lost. What is lost leaves the books short of an event, never with
a negative count: an unknown block that is removed, or a known one that is stored again, is counted and changes nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from math import inf

from observability import catalog as c

#: vLLM's names of places. Storage behind the host has no ages here: other engines share it.
TIERS = {"GPU": 0, "CPU": 1}
_DEVICE = TIERS["GPU"]
_REMEMBERED = 200_000  # evictions


class KVLedger:
    """Written by one thread. Times are Unix seconds, as vLLM stamps its batches."""

    def __init__(self, remembered: int = _REMEMBERED) -> None:
        self.born: tuple[dict[Hashable, float], ...] = tuple({} for _ in TIERS)
        self.evicted_ages = [[0] * (len(c.AGE_BOUNDS) + 1) for _ in TIERS]
        self.stored = [0.0 for _ in TIERS]
        self.removed = [0.0 for _ in TIERS]
        self.regret_tokens = [0.0 for _ in c.REGRET_WINDOWS]
        self.unmatched = 0.0  # events about blocks that the books have otherwise
        self.now = 0.0
        self._evictions: OrderedDict[Hashable, float] = OrderedDict()  # oldest first
        self._remembered = remembered
        self._forgotten = -inf

    def store(self, tier: int, keys: Iterable[Hashable], block_size: int, when: float) -> None:
        """Blocks became findable in `tier`. On the device, one that was evicted before is computed again, unless the host still has it."""
        born = self.born[tier]
        for key in keys:
            if key in born:  # told again, as vLLM does on request
                continue
            born[key] = when
            self.stored[tier] += 1
            if tier == _DEVICE and (evicted := self._evictions.pop(key, None)) is not None and key not in self.born[1]:
                for i, window in enumerate(c.REGRET_WINDOWS.values()):
                    if when - evicted <= window:
                        self.regret_tokens[i] += block_size
        self.now = max(self.now, when)

    def remove(self, tier: int, keys: Iterable[Hashable], when: float) -> None:
        """Blocks of `tier` were evicted."""
        born, ages = self.born[tier], self.evicted_ages[tier]
        for key in keys:
            start = born.pop(key, None)
            if start is None:
                self.unmatched += 1
                continue
            self.removed[tier] += 1
            ages[bisect_left(c.AGE_BOUNDS, max(when - start, 0.0))] += 1
            if tier == _DEVICE:
                self._evictions[key] = when
                self._evictions.move_to_end(key)
                if len(self._evictions) > self._remembered:
                    self._forgotten = self._evictions.popitem(last=False)[1]
        self.now = max(self.now, when)

    def clear(self) -> None:
        """Every block is gone without an eviction: the cache was reset, or events were lost and the books no longer hold."""
        for born in self.born:
            born.clear()

    def reach(self) -> float | None:
        """Seconds within which every eviction is remembered; None: none was forgotten."""
        return None if self._forgotten == -inf else self.now - self._forgotten
