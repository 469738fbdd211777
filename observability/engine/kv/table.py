"""One sequence's block table: which blocks hold its tokens, in order, and how it took them."""

from __future__ import annotations

from dataclasses import dataclass, field

from observability.catalog import LAYOUTS
from observability.engine.kv.prefix import BlockKeys
from observability.engine.types import Transfer

CONTIGUOUS = LAYOUTS.index("contiguous")
PAGED = LAYOUTS.index("paged")
COMPRESSED = LAYOUTS.index("compressed")


@dataclass(eq=False, slots=True)
class BlockTable:
    """Tokens [i * block_size, (i + 1) * block_size) of the sequence lie in `blocks[i]`.

    `layout` is an index into catalog.LAYOUTS. In the contiguous layout, block i is `blocks[0] + i`, so that attention may
    read a plain slice. In the compressed one, numbers from num_blocks on are quantized blocks. A table outlives preemption (without
    blocks), so that keys are made once.
    """

    block_size: int
    keys: BlockKeys | None  # None when prefix caching is off
    blocks: list[int] = field(default_factory=list)
    layout: int = PAGED
    capacity_tokens: int = 0  # len(blocks) * block_size
    num_registered: int = 0  # leading blocks that were offered to the prefix index or came from it
    num_compressed: int = 0  # of `blocks`
    compress_next: int = 0  # first block that was not looked at yet for compression
    reserved_end: int = 0  # contiguous: blocks up to here (excluded) are left to this sequence where possible
    recompute_tokens: int = 0  # tokens that had been computed when the sequence was last preempted
    slots: list[int] = field(default_factory=list)  # host slots of blocks [0, len(slots)) while swapped out
    swapped_compressed: list[bool] = field(default_factory=list)  # which of them hold a compressed block
    looked_ahead: bool = False  # prefetch has looked at this waiting sequence
    loading: list[Transfer] = field(default_factory=list)  # on whose end the sequence waits

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    def extend(self, blocks: list[int]) -> None:
        self.blocks.extend(blocks)
        self.capacity_tokens = len(self.blocks) * self.block_size

    def clear(self) -> None:
        self.blocks.clear()
        self.loading.clear()
        self.capacity_tokens = self.num_registered = self.num_compressed = self.compress_next = self.reserved_end = 0
        self.layout = PAGED
