"""One sequence's block table: which blocks hold its tokens, in order, and how it took them."""

from __future__ import annotations

from dataclasses import dataclass, field

from observability.catalog import LAYOUTS
from observability.engine.kv.prefix import BlockKeys

CONTIGUOUS = LAYOUTS.index("contiguous")
PAGED = LAYOUTS.index("paged")


@dataclass(eq=False, slots=True)
class BlockTable:
    """Tokens [i * block_size, (i + 1) * block_size) of the sequence lie in `blocks[i]`.

    `layout` is an index into catalog.LAYOUTS. In the contiguous layout, block i is `blocks[0] + i`, so that attention may
    read a plain slice. A table outlives preemption (without blocks), so that keys are made once.
    """

    block_size: int
    keys: BlockKeys | None  # None when prefix caching is off
    blocks: list[int] = field(default_factory=list)
    layout: int = PAGED
    capacity_tokens: int = 0  # len(blocks) * block_size
    num_registered: int = 0  # leading blocks that were offered to the prefix index or came from it
    reserved_end: int = 0  # contiguous: blocks up to here (excluded) are left to this sequence where possible
    recompute_tokens: int = 0  # tokens that had been computed when the sequence was last preempted

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    def extend(self, blocks: list[int]) -> None:
        self.blocks.extend(blocks)
        self.capacity_tokens = len(self.blocks) * self.block_size

    def clear(self) -> None:
        self.blocks.clear()
        self.capacity_tokens = self.num_registered = self.reserved_end = 0
        self.layout = PAGED
