"""The blocks on the device: exact ones and, where configured, quantized ones of long sequences, under one numbering.

Numbers below `first_compressed` are exact blocks, those from there on quantized ones. Either kind has a pool of its own, which knows its blocks
by their place in it; whoever has blocks of both kinds comes here and need not tell them apart.
"""

from __future__ import annotations

import numpy as np

from observability.engine.kv.pool import BlockPool
from observability.engine.kv.prefix import Blocks, Keys


class DevicePools:
    """A pool of `num_blocks` exact blocks (None: without bound) and, unless `num_compressed_blocks` is 0, one of quantized blocks.

    What is asked of blocks of one kind alone is asked of its pool, `exact` or `compressed`.
    """

    def __init__(self, num_blocks: int | None, num_compressed_blocks: int) -> None:
        self.exact = BlockPool(num_blocks)
        self.compressed = BlockPool(num_compressed_blocks) if num_compressed_blocks else None
        self.first_compressed = num_blocks or 0  # number of the first compressed block
        self.size = self.first_compressed + num_compressed_blocks  # of a bounded device

    @property
    def utilization(self) -> float:
        """Share of the blocks, exact and compressed, that requests hold; 0 for an unbounded pool."""
        if not self.exact.bounded:
            return 0.0
        active, size = self.exact.num_active, self.exact.size
        if self.compressed is not None:
            active, size = active + self.compressed.num_active, size + self.compressed.size
        return active / size

    @property
    def releases(self) -> int:
        """Moves whenever blocks became allocatable."""
        return self.exact.releases + (self.compressed.releases if self.compressed is not None else 0)

    def find(self, keys: Keys, compressed: np.ndarray | None = None) -> Blocks:
        """The block that caches each key, -1 where there is none: of the kind that `compressed` says, bool [keys], else of any kind, the
        compressed one first."""
        exact = self.exact.index.get(keys)
        if self.compressed is None:
            return exact
        packed = self.compressed.index.get(keys)
        packed = np.where(packed >= 0, packed + self.first_compressed, -1)
        return np.where(packed >= 0 if compressed is None else compressed, packed, exact)

    def has_room(self, exact: int, compressed: int, hits: Blocks, spare: int) -> bool:
        """Whether so many blocks of each kind can be taken once `hits` are held, and `spare` exact ones more."""
        if self.compressed is not None:
            packed = hits >= self.first_compressed
            revived = self.compressed.num_revived(hits[packed] - self.first_compressed)
            if compressed + revived > self.compressed.allocatable:
                return False
            hits = hits[~packed]
        return exact + self.exact.num_revived(hits) + spare <= self.exact.allocatable

    def take(self, compressed: np.ndarray) -> Blocks:
        """Blocks of the kinds that `compressed` says, bool [blocks], now held once. Only with compressed blocks."""
        assert self.compressed is not None
        count = int(np.count_nonzero(compressed))
        blocks = np.empty(len(compressed), dtype=np.int64)
        blocks[compressed] = self.compressed.take(count) + self.first_compressed
        blocks[~compressed] = self.exact.take(len(compressed) - count)
        return blocks

    def share(self, blocks: Blocks) -> None:
        """One more sequence holds these blocks, which it found here."""
        for pool, own, _ in self._by_pool(blocks):
            pool.share(own)

    def release(self, blocks: Blocks) -> None:
        """One holder less for each of `blocks`, given in sequence order."""
        for pool, own, _ in self._by_pool(blocks):
            pool.release(own)

    def register(self, blocks: Blocks, keys: Keys, *, distinct: bool) -> None:
        """Makes held, fully stored blocks findable. Not `distinct`: a key may be there more than once, and counts once a kind."""
        for pool, own, part in self._by_pool(blocks):
            own_keys = keys[part]
            if not distinct:
                own_keys, first = np.unique(own_keys, return_index=True)
                own = own[first]
            pool.register(own, own_keys)

    def keyed(self, blocks: Blocks) -> np.ndarray:
        """Which of `blocks` can be found. bool [blocks]"""
        if self.compressed is None:
            return self.exact.keyed[blocks]
        return np.concatenate((self.exact.keyed, self.compressed.keyed))[blocks]

    def _by_pool(self, blocks: Blocks) -> list[tuple[BlockPool, Blocks, np.ndarray | slice]]:
        """Each pool that is concerned, its blocks by their place in it, and which of `blocks` these are."""
        if self.compressed is None or not (packed := blocks >= self.first_compressed).any():
            return [(self.exact, blocks, slice(None))]
        return [
            (self.exact, blocks[~packed], ~packed),
            (self.compressed, blocks[packed] - self.first_compressed, packed),
        ]
