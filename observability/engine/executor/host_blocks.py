"""The host tier's memory: slots that each hold one KV block of any kind. block_moves.py says which block goes where."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from observability.engine.executor.block_set import BlockSet
from observability.engine.executor.overlap import CopyOverlap
from observability.engine.executor.rates import Rate
from observability.engine.kv import codec

#: A packed block must be smaller than this share of its plain bytes to be worth unpacking.
_WORTH_PACKING = 0.9
#: Of blocks that did not shrink, each so many-th is tried again.
_TRY_EVERY = 64
#: Blocks on their way from the GPU that may wait to be packed.
_MAX_STAGED = 256


@dataclass(frozen=True, slots=True)
class _Packed:
    """A quantized block: integers by codec.py, the rest as it is, by tensor."""

    parts: tuple[bytes, ...]


@dataclass(slots=True)
class _Staged:
    """Rows of quantized blocks in pinned memory; they are complete once `event` has happened."""

    blocks: BlockSet
    slots: list[int]
    rows: Tensor
    event: torch.cuda.Event


class Transfer:
    """types.Transfer. On a GPU it is done when its event has happened; without one it was done when made."""

    ready_at: float | None = None

    def __init__(self, event: torch.cuda.Event | None = None) -> None:
        self._event = event

    def done(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()


class HostBlocks:
    """`count` slots of one row of bytes each, as long as the longest block of `sets`.

    Blocks lie as they are on the device. Quantized ones are packed, losslessly, where that saves a tenth: whether it does is seen
    from blocks of the kind, and where it did not, only every 64th is tried again. (Integers that share a scale within one block use
    all their bits, so that blocks of text rarely shrink; constant and slowly changing content does.)

    On a GPU rows are pinned memory and copies run on a stream of their own. Blocks leave through a copy on the device, made in the
    order of the steps: they may be written again at once. Blocks that arrive wait for the steps launched before.
    """

    def __init__(self, count: int, sets: Sequence[BlockSet]) -> None:
        self._sets, self._device = list(sets), sets[0].device
        self.moving = Rate(
            self._device
        )  # of a block of the first set, one way; on a GPU without packing, which is beside its work
        self._side = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self.overlap = CopyOverlap() if self._side is not None else None
        longest = max(blocks.bytes_per_block for blocks in sets)
        # empty: where it is not pinned, memory is taken as slots are first used
        self._rows = torch.empty((count, longest), dtype=torch.uint8, pin_memory=self._side is not None)
        self._kinds: list[BlockSet | None] = [None] * count
        self._packed: dict[int, _Packed] = {}
        self._skip = {blocks.kind: 0 for blocks in sets}  # blocks of a kind that will not be tried to pack
        self._staged: deque[_Staged] = deque()

    def try_out(self) -> None:
        """Moves block 0 of the first set to slot 0 and back, so that something is known of what moves take."""
        block = torch.zeros(1, dtype=torch.int64, device=self._device)
        for _ in range(2):  # the first time pays for what happens once
            self.moving = Rate(self._device)
            self.store(self._sets[0], block, [0])
            self.load(self._sets[0], [0], block).wait()
        self._kinds[0] = None
        self._packed.clear()
        if self.overlap is not None:
            self.overlap = CopyOverlap()

    def store(self, blocks: BlockSet, numbers: Tensor, slots: Sequence[int]) -> None:
        """Copies device blocks to slots. Returns when they may be written again."""
        self._settle(slots)
        for slot in slots:
            self._kinds[slot] = blocks
            self._packed.pop(slot, None)
        if self._side is None:
            with self._measured(blocks, slots):
                self._put(blocks, slots, blocks.read(numbers))
            return
        rows = blocks.read(numbers)
        with self._beside(blocks, slots):
            if blocks.quantized:
                pinned = torch.empty(rows.shape, dtype=torch.uint8, pin_memory=True)
                pinned.copy_(rows, non_blocking=True)
                event = torch.cuda.Event()
                event.record()
                self._staged.append(_Staged(blocks, list(slots), pinned, event))
            else:
                for slot, row in zip(slots, rows, strict=True):
                    self._row(blocks, slot).copy_(row, non_blocking=True)
            rows.record_stream(self._side)

    def load(self, blocks: BlockSet, slots: Sequence[int], numbers: Tensor) -> Transfer:
        """Starts to copy slots to device blocks. Raises ValueError when a slot holds no block of this kind."""
        self._settle(slots)
        for slot in slots:
            held = self._kinds[slot]
            if held is not blocks:
                raise ValueError(
                    f"host slot {slot} holds {'nothing' if held is None else f'a block of kind {held.kind}'}, not one of {blocks.kind}"
                )
        if self._side is None:
            with self._measured(blocks, slots):
                blocks.write(numbers, torch.stack([self._content(blocks, slot) for slot in slots]))
            return Transfer()
        with self._beside(blocks, slots):
            rows = torch.empty((len(slots), blocks.bytes_per_block), dtype=torch.uint8, device=self._device)
            for row, slot in zip(rows, slots, strict=True):
                row.copy_(self._content(blocks, slot), non_blocking=True)
            blocks.write(numbers, rows)
            numbers.record_stream(self._side)
            event = torch.cuda.Event()
            event.record()
        return Transfer(event)

    @property
    def packed_slots(self) -> int:
        return len(self._packed)

    @contextmanager
    def _beside(self, blocks: BlockSet, slots: Sequence[int]) -> Iterator[None]:
        """What is done in it runs on the stream of copies, after all that was launched before, and is measured."""
        assert self._side is not None
        assert self.overlap is not None
        self.overlap.rebase()
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side), self.overlap.copy(), self._measured(blocks, slots):
            yield

    def _measured(self, blocks: BlockSet, slots: Sequence[int]) -> AbstractContextManager[None]:
        return self.moving.measure(len(slots) * blocks.bytes_per_block / self._sets[0].bytes_per_block)

    # -- slots -----------------------------------------------------------------------------------------------------------

    def _row(self, blocks: BlockSet, slot: int) -> Tensor:
        return self._rows[slot, : blocks.bytes_per_block]

    def _put(self, blocks: BlockSet, slots: Sequence[int], rows: Tensor) -> None:
        """Keeps rows in host memory, packed where that is worth it."""
        for slot, row in zip(slots, rows, strict=True):
            if blocks.quantized and self._skip[blocks.kind] == 0:
                packed = _pack(blocks, row)
                if sum(map(len, packed.parts)) < _WORTH_PACKING * blocks.bytes_per_block:
                    self._packed[slot] = packed
                    continue
                self._skip[blocks.kind] = _TRY_EVERY
            self._skip[blocks.kind] = max(self._skip[blocks.kind] - 1, 0)
            self._row(blocks, slot).copy_(row)

    def _content(self, blocks: BlockSet, slot: int) -> Tensor:
        """The bytes of a slot's block, in host memory (pinned where it is on its way to a GPU)."""
        packed = self._packed.get(slot)
        if packed is None:
            return self._row(blocks, slot)
        row = _unpack(blocks, packed)
        return row if self._side is None else row.pin_memory()

    def _settle(self, slots: Sequence[int]) -> None:
        """Packs blocks that have arrived from the GPU; waits for those that are in `slots`, and for old ones when there are many."""
        wanted = set(slots)
        needed = max((i + 1 for i, staged in enumerate(self._staged) if wanted.intersection(staged.slots)), default=0)
        waiting = sum(len(staged.slots) for staged in self._staged)
        while self._staged and (needed > 0 or waiting > _MAX_STAGED or self._staged[0].event.query()):
            staged = self._staged.popleft()
            staged.event.synchronize()
            self._put(staged.blocks, staged.slots, staged.rows)
            needed -= 1
            waiting -= len(staged.slots)


def _pack(blocks: BlockSet, row: Tensor) -> _Packed:
    payload = blocks.to_payload(row.unsqueeze(0))
    return _Packed(
        tuple(
            payload[name].tobytes() if t.integers is None else codec.encode(payload[name])
            for name, t in blocks.tensors.items()
        )
    )


def _unpack(blocks: BlockSet, packed: _Packed) -> Tensor:
    parts = []
    for part, t in zip(packed.parts, blocks.tensors.values(), strict=True):
        if t.integers is None:
            parts.append(np.frombuffer(part, np.uint8))
        else:
            integers = codec.decode(part, max_bytes=2 * t.block_bytes)  # two int4 a byte
            parts.append(np.ascontiguousarray(t.integers.from_int8(integers)).reshape(-1).view(np.uint8))
    return torch.from_numpy(np.concatenate(parts))
