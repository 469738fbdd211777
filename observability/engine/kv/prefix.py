"""Which block holds the KV of which tokens: keys of full blocks, and an index from key to block.

A block's key covers its tokens and all tokens before them, so equal keys mean equal prefixes and a prefix is found by
looking its blocks up one after the other until one is absent. Keys have 64 bits. Content is not compared on a hit: among
a million cached blocks, the chance that a looked-up key collides by accident is below 1e-13.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from hashlib import blake2b
from typing import Protocol

import numpy as np
import numpy.typing as npt

from observability.engine.types import PromptSpan

Keys = npt.NDArray[np.uint64]
Blocks = npt.NDArray[np.int64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)
_GENERATED = 0xD1B54A32D192ED03  # keeps generated blocks' keys apart from prompts'


def _mix(x: Keys) -> Keys:
    """SplitMix64's finalizer (Steele, Lea, Flood 2014): a bijection of 64 bits in which every input bit moves every output bit."""
    x = (x ^ (x >> _S30)) * _M1
    x = (x ^ (x >> _S27)) * _M2
    return x ^ (x >> _S31)


@cache
def _first_numbers(count: int) -> Keys:
    return _mix(np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN)


def _numbers(first: int, last: int) -> Keys:
    """Distinct well-spread values for first .. last - 1."""
    return _first_numbers(1 << last.bit_length())[first:last]


class BlockKeys(Protocol):
    """Keys of one sequence's full blocks, made when asked for; never 0."""

    def get(self, first: int, last: int) -> Keys:
        """Keys of blocks [first, last), shape `[last - first]`; all of their tokens must be known."""


class TokenKeys:
    """Keys of real tokens: blake2b over the parent's key and the block's token ids, so that no client can make two prompts collide
    cheaply. Reads prompt and output by reference and keeps the chain, so that each block is hashed once."""

    __slots__ = ("_block_size", "_chain", "_output", "_prompt")

    def __init__(self, prompt: Sequence[int], output: list[int], block_size: int) -> None:
        self._prompt = prompt
        self._output = output
        self._block_size = block_size
        self._chain: list[int] = []

    def get(self, first: int, last: int) -> Keys:
        chain, size, known = self._chain, self._block_size, len(self._chain)
        if known < last:
            start, stop, split = known * size, last * size, len(self._prompt)
            tokens = [*self._prompt[start:stop], *self._output[max(0, start - split) : max(0, stop - split)]]
            if len(tokens) != stop - start:
                raise ValueError(f"blocks up to {last} are not full: {split + len(self._output)} tokens are known")
            content = np.array(tokens, dtype="<i8").tobytes()
            parent = chain[-1].to_bytes(8, "little") if chain else b""
            for at in range(0, len(content), size * 8):
                parent = blake2b(content[at : at + size * 8], key=parent, digest_size=8).digest()
                chain.append(int.from_bytes(parent, "little") or 1)
        return np.array(chain[first:last], dtype=np.uint64)


class SpanKeys:
    """Keys of a prompt known by the hashes of its parts, without a loop over blocks.

    A block that ends inside part p is the same in two prompts exactly when their hash ids agree up to p. Blocks with
    generated tokens have unknown content: `serial`, unique to the request, gives them keys that match nothing but the request itself
    (when it is computed again after a preemption).
    """

    __slots__ = ("_block_size", "_generated", "_of_prompt", "_span")

    def __init__(self, span: PromptSpan, block_size: int, serial: int) -> None:
        self._span = span
        self._block_size = block_size
        self._generated = np.uint64((2 * serial + 1) * _GENERATED & 0xFFFFFFFFFFFFFFFF)
        self._of_prompt: Keys | None = None  # keys of the prompt's full blocks

    def get(self, first: int, last: int) -> Keys:
        if self._of_prompt is None:
            self._of_prompt = self._hash_prompt()
        split = len(self._of_prompt)
        if last <= split:
            return self._of_prompt[first:last]
        generated = np.maximum(_mix(_numbers(max(first, split), last) ^ self._generated), 1)
        return generated if first >= split else np.concatenate((self._of_prompt[first:], generated))

    def _hash_prompt(self) -> Keys:
        span, blocks = self._span, self._span.length // self._block_size
        ids = np.array(span.hash_ids, dtype=np.int64).view(np.uint64)
        parts = np.cumsum(_mix(_mix(ids) + _numbers(0, len(ids))), dtype=np.uint64)  # each covers all ids up to its own
        last_part = (np.arange(1, blocks + 1) * self._block_size - 1) // span.part_tokens
        return np.maximum(_mix(parts[last_part] ^ _numbers(0, blocks)), 1)


_BUCKET = 8  # slots of a bucket: its keys fill one cache line, and one comparison finds nearly every key
_AT_ONCE = 1 << 16  # keys placed at a time when the table is made anew, which bounds the memory for it


class PrefixIndex:
    """Map from key to block over whole arrays of keys: a hash table of 8-slot buckets, at most half full.

    A key that finds its bucket full goes to the next one and leaves a mark there, which lookups follow.
    """

    def __init__(self, expected_blocks: int = 256) -> None:
        self._live = 0
        self._slot_of = np.zeros(expected_blocks, dtype=np.int32)  # by block; means something for indexed blocks only
        self._resize(2 * expected_blocks)

    def __len__(self) -> int:
        return self._live

    def _resize(self, expected: int) -> None:
        buckets = 1 << max(4, (2 * expected // _BUCKET).bit_length())
        self._last_bucket = buckets - 1
        self._room = buckets * _BUCKET // 2
        self._keys = np.zeros((buckets, _BUCKET), dtype=np.uint64)  # 0: vacant
        self._blocks = np.zeros((buckets, _BUCKET), dtype=np.int32)
        self._overflowed = np.zeros(buckets, dtype=bool)
        self._num_overflowed = 0

    def _find(self, keys: Keys) -> Blocks:
        """Slot of each key in the flattened table, -1 where absent."""
        slots = np.full(len(keys), -1, dtype=np.int64)
        bucket = keys.astype(np.int64) & self._last_bucket
        (at,) = (self._keys[bucket] == keys[:, None]).reshape(-1).nonzero()  # [keys, 8], at most one in a row
        row = at // _BUCKET
        slots[row] = bucket[row] * _BUCKET + at % _BUCKET
        if self._num_overflowed:
            further = self._overflowed[bucket]
            further[row] = False
            if further.any():
                slots[further] = self._find_further(keys[further], bucket[further])
        return slots

    def _find_further(self, keys: Keys, bucket: Blocks) -> Blocks:
        """Slots of keys that are not in `bucket`, which overflowed."""
        slots = np.full(len(keys), -1, dtype=np.int64)
        which = np.arange(len(keys))
        while which.size:
            bucket = (bucket + 1) & self._last_bucket
            held = self._keys[bucket] == keys[which, None]
            found = held.any(axis=1)
            slots[which[found]] = bucket[found] * _BUCKET + held[found].argmax(axis=1)
            on = ~found & self._overflowed[bucket]
            which, bucket = which[on], bucket[on]
        return slots

    def get(self, keys: Keys) -> Blocks:
        """Block of each key, -1 where absent. Shape `[keys]`."""
        slots = self._find(keys)
        return np.where(slots >= 0, self._blocks.reshape(-1)[slots], -1).astype(np.int64)

    def match(self, keys: Keys) -> Blocks:
        """Blocks of the longest prefix of `keys` that is indexed throughout."""
        found: list[Blocks] = []
        start, window = 0, 64  # many lookups end early: do not look for thousands of keys behind the first absent one
        while start < len(keys):
            blocks = self.get(keys[start : start + window])
            absent = np.flatnonzero(blocks < 0)
            if absent.size:
                found.append(blocks[: absent[0]])
                break
            found.append(blocks)
            start, window = start + window, window * 4
        return np.concatenate(found) if found else np.empty(0, dtype=np.int64)

    def insert(self, keys: Keys, blocks: Blocks) -> None:
        """Adds keys that are distinct and absent, of blocks that have no other key here."""
        if not len(keys):
            return
        self._live += len(keys)
        highest = int(blocks.max())
        if highest >= len(self._slot_of):
            more = np.zeros(max(highest + 1, 2 * len(self._slot_of)), dtype=np.int32)
            more[: len(self._slot_of)] = self._slot_of
            self._slot_of = more
        # Marks stay when keys go; too many of them would make lookups walk far.
        if self._live > self._room or 8 * self._num_overflowed > self._last_bucket:
            old_keys, old_blocks = self.items()
            self._resize(self._live)
            for start in range(0, len(old_keys), _AT_ONCE):
                self._place(old_keys[start : start + _AT_ONCE], old_blocks[start : start + _AT_ONCE])
        self._place(keys, blocks)

    def _place(self, keys: Keys, blocks: Blocks) -> None:
        flat_keys, flat_blocks = self._keys.reshape(-1), self._blocks.reshape(-1)
        bucket = keys.astype(np.int64) & self._last_bucket
        while keys.size:
            vacant = self._keys[bucket] == 0
            slot = vacant.argmax(axis=1)
            fits = vacant[np.arange(len(keys)), slot]
            at = bucket * _BUCKET + slot
            flat_keys[at[fits]] = keys[fits]
            flat_blocks[at[fits]] = blocks[fits]
            self._slot_of[blocks[fits]] = at[fits]
            # Of several keys that want one slot the last written has it; the others look again.
            on = ~(fits & (flat_blocks[at] == blocks))
            full = bucket[~fits]
            if full.size:
                self._overflowed[full] = True
                self._num_overflowed = int(np.count_nonzero(self._overflowed))
                bucket = np.where(fits, bucket, (bucket + 1) & self._last_bucket)
            keys, blocks, bucket = keys[on], blocks[on], bucket[on]

    def replace(self, old: Blocks, new: Blocks) -> None:
        """The keys of indexed blocks `old` point to blocks `new` from now on, which have no key yet."""
        keys = self._keys.reshape(-1)[self._slot_of[old]]
        self.remove(old)
        self.insert(keys, new)

    def remove(self, blocks: Blocks) -> None:
        """Removes the keys of blocks that are indexed."""
        self._keys.reshape(-1)[self._slot_of[blocks]] = 0
        self._live -= len(blocks)

    def items(self) -> tuple[Keys, Blocks]:
        """All keys and their blocks, in no order."""
        live = self._keys != 0
        return self._keys[live], self._blocks[live].astype(np.int64)
