"""Series of how long vLLM's cached blocks live: exact from KV events, from a sample of evictions where vLLM takes one.

The families are those of the bundled engine. Events tell every birth and eviction, so also blocks that still live count; they do
not tell when a block is hit. The sample (--kv-cache-metrics) tells idle times and reuse, for evicted blocks only.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from math import nan
from typing import TYPE_CHECKING, Any

import numpy as np

from exporters.vllm.kv_ledger import TIERS
from observability import catalog as c
from observability.telemetry.residency import PoolResidency, Spells, residency_blocks
from observability.telemetry.snapshot import Block, counters

if TYPE_CHECKING:
    from exporters.vllm.kv_events import KVEvents

_NONE = np.array([], dtype=np.int64)
_DEVICE, _HOST = TIERS["GPU"], TIERS["CPU"]


class EvictionSample:
    """Blocks that vLLM picked when they were allocated, told when they are evicted."""

    def __init__(self) -> None:
        self.ages, self.idle, self.gaps = Spells.none(), Spells.none(), Spells.none()

    def add(self, events: Iterable[Any]) -> None:
        """vLLM's KVCacheEvictionEvent objects of one iteration."""
        for event in events:
            read = ((event.lifetime_seconds,), (event.idle_seconds,), event.reuse_gaps_seconds)
            spells = [_microseconds(seconds) for seconds in read]
            for kept, found in zip((self.ages, self.idle, self.gaps), spells, strict=True):
                if found.size:
                    kept.add(found)


def _microseconds(seconds: Sequence[float]) -> np.ndarray:
    """int64 [seconds]. Raises ValueError for what is no duration."""
    found = np.array(seconds, dtype=np.float64)
    if found.ndim != 1 or not ((found >= 0.0) & (found < 1e9)).all():
        raise ValueError(f"no durations: {seconds!r}")
    return np.asarray((found * 1e6).astype(np.int64))


def blocks(model: str, events: KVEvents | None, sample: EvictionSample) -> Iterator[Block]:
    """Every series of this file; which of them a vLLM can tell, its capabilities say."""

    def pools(_: object) -> list[PoolResidency | None]:
        idle, gaps = sample.idle.copy(), sample.gaps.copy()
        if events is None:
            return [PoolResidency(0, _NONE, sample.ages.counts.copy(), idle, gaps), None, None]
        ledger, now = events.ledger, int(time.time() * 1e6)

        def pool(tier: int) -> PoolResidency:
            births = np.array([int(born * 1e6) for born in list(ledger.born[tier].values())], dtype=np.int64)
            evicted = np.array(ledger.evicted_ages[tier], dtype=np.int64)
            nothing = Spells.none()
            return PoolResidency(now, births, evicted, *((idle, gaps) if tier == _DEVICE else (nothing, nothing)))

        return [pool(_DEVICE), None, pool(_HOST) if ledger.stored[_HOST] else None]

    yield from residency_blocks(model, pools)
    if events is None:
        return
    ledger = events.ledger
    yield Block(c.KV_EVICTED_BLOCKS, (("_total", (model,)),), lambda _: (ledger.removed[_DEVICE],))
    yield counters(c.KV_REGRET, [(model, window) for window in c.REGRET_WINDOWS], ledger.regret_tokens)
    yield Block(c.KV_EVICTION_MEMORY, (("", (model,)),), lambda _: (_or_nan(ledger.reach()),))
    yield counters(c.KV_EVENT_BATCHES, [(model, outcome) for outcome in c.KV_EVENT_OUTCOMES], events.batches)
    yield Block(c.KV_EVENT_UNMATCHED, (("_total", (model,)),), lambda _: (ledger.unmatched,))
    yield Block(c.LAST_UPDATE, (("", (model, "kv_events")),), lambda _: (_or_nan(events.last_batch),))


def _or_nan(value: float | None) -> float:
    return nan if value is None else value
