"""The block moves of types.Executor for tensors: on the device, to and from host slots, into and out of snapshots.

Block numbers run through the block sets in order: exact blocks first, compressed ones behind them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from observability.engine.executor.block_set import BlockSet
from observability.engine.executor.host_blocks import HostBlocks, Transfer
from observability.engine.executor.overlap import CopyOverlap
from observability.engine.executor.rates import Rate
from observability.engine.types import Payload

#: Blocks that are moved at once: bounds the copies that moves make.
_SLICE_BLOCKS = 64


class BlockMoves:
    """Moves blocks of `sets` and knows what that takes: from its own moves, before the first ones from a try at construction."""

    def __init__(self, sets: Sequence[BlockSet], num_host_blocks: int) -> None:
        self._sets = list(sets)
        self._bounds = np.cumsum([0, *(blocks.count for blocks in sets)])
        self._device = sets[0].device
        self._host = HostBlocks(num_host_blocks, sets) if num_host_blocks else None
        self._copying = Rate(self._device)
        for _ in range(2):  # the first time pays for what happens once
            self._copying = Rate(self._device)
            self.copy([(0, 0)])
        if self._host is not None:
            self._host.try_out()

    @property
    def overlap(self) -> CopyOverlap | None:
        """Measures copies to and from the host; None where they do not run beside steps."""
        return None if self._host is None else self._host.overlap

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies block to block (source, target), both of one kind; all sources are read before any target is written."""
        if not pairs:
            return
        sources, targets = np.array(pairs, np.int64).T
        target_kinds, within = self._locate(targets)
        for kind, at, numbers in self._by_kind(sources):
            if (target_kinds[at] != kind).any():
                raise ValueError("blocks can be copied within their kind only")
            blocks = self._sets[kind]
            with self._copying.measure(len(at) * blocks.bytes_per_block / self._sets[0].bytes_per_block):
                blocks.copy(self._indices(numbers), self._indices(within[at]))

    def offload(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies blocks to host slots (block, slot); returns when the blocks may be written again."""
        if not pairs:
            return
        numbers, slots = np.array(pairs, np.int64).T
        for kind, at, within in self._by_kind(numbers):
            for part in _slices(len(at)):
                self._tier.store(self._sets[kind], self._indices(within[part]), slots[at[part]].tolist())

    def load(self, pairs: Sequence[tuple[int, int]]) -> Transfer:
        """Starts to copy host slots to blocks (slot, block)."""
        transfer = Transfer()
        if not pairs:
            return transfer
        slots, numbers = np.array(pairs, np.int64).T
        for kind, at, within in self._by_kind(numbers):
            for part in _slices(len(at)):  # copies run in order: the last one ends last
                transfer = self._tier.load(self._sets[kind], slots[at[part]].tolist(), self._indices(within[part]))
        return transfer

    def export_payload(self, blocks: Sequence[int]) -> Payload:
        """Content of blocks of one kind (of none: the first) as arrays [blocks, ...] by tensor name: floats as they are (bfloat16 as its
        bits in uint16), quantized integers as int8. Raises ValueError for blocks of two kinds."""
        held, within = self._one_kind(blocks)
        parts = [held.to_payload(held.read(self._indices(within[part])).cpu()) for part in _slices(max(len(within), 1))]
        return {name: np.concatenate([part[name] for part in parts]) for name in held.tensors}

    def import_payload(self, blocks: Sequence[int], payload: Payload) -> None:
        """Writes what export_payload() gave. Raises ValueError, with nothing changed, when it does not fit so many blocks of this kind."""
        held, within = self._one_kind(blocks)
        rows = held.from_payload(payload, len(within))
        for part in _slices(len(within)):
            held.write(self._indices(within[part]), rows[part].to(self._device))

    def copy_seconds(self, blocks: int) -> float:
        return self._copying.seconds(blocks)

    def transfer_seconds(self, blocks: int) -> float:
        return math.inf if self._host is None else self._host.moving.seconds(blocks)

    # -- block numbers -----------------------------------------------------------------------------------------------------

    @property
    def _tier(self) -> HostBlocks:
        if self._host is None:
            raise RuntimeError("there is no host tier: num_host_blocks is 0")
        return self._host

    def _locate(self, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(index of each block's set, its number within the set)."""
        if blocks.size and not (blocks.min() >= 0 and blocks.max() < self._bounds[-1]):
            raise ValueError(f"block numbers lie in 0..{self._bounds[-1] - 1}")
        kinds = np.searchsorted(self._bounds, blocks, side="right") - 1
        return kinds, blocks - self._bounds[kinds]

    def _by_kind(self, blocks: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """For each kind among `blocks`: (index of its set, where its blocks are in `blocks`, their numbers within the set)."""
        kinds, within = self._locate(blocks)
        for kind in np.unique(kinds).tolist():
            at = np.flatnonzero(kinds == kind)
            yield kind, at, within[at]

    def _one_kind(self, blocks: Sequence[int]) -> tuple[BlockSet, np.ndarray]:
        kinds, within = self._locate(np.array(blocks, np.int64))
        if np.unique(kinds).size > 1:
            raise ValueError("blocks that are exported or imported together must be of one kind")
        return self._sets[int(kinds.max(initial=0))], within

    def _indices(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, np.int64)).to(self._device)


def _slices(count: int) -> list[slice]:
    return [slice(first, first + _SLICE_BLOCKS) for first in range(0, count, _SLICE_BLOCKS)]
