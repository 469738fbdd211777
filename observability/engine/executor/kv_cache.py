"""Where keys and values of all sequences lie: FloatKV stores them as computed, Int8KV quantizes each block once it is full.
compressed_kv.py has both kinds of blocks side by side.

A store is told of a step by begin(batch) and then called by the decoder once a layer; see attention.py for a pool's shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from observability.engine.executor.attention import (
    DecodeAttention,
    causal_mask,
    chunk_attention,
    slots_of,
    split_by_length,
)
from observability.engine.executor.block_set import BlockSet, BlockTensor
from observability.engine.executor.comparison import Comparison, Shadow
from observability.engine.executor.quantizer import Fill, Keep, QuantizedBlocks, ReportError
from observability.engine.executor.timing import Part, StepTimer
from observability.engine.model.llama import ModelConfig
from observability.engine.types import EngineConfig, Request

#: Scratch holds as many tokens at most, or those of the longest sequence: decodes that need more take turns.
_SCRATCH_TOKENS = 65536
_SCRATCH_STEP = 1024


@dataclass(slots=True)
class Span:
    """Positions [start, start + tokens) of one sequence, computed in rows [row, row + tokens) of the step's batch.

    `blocks` are its block numbers as far as start + tokens needs them, int64.
    """

    request: Request
    start: int
    tokens: int
    row: int
    blocks: np.ndarray

    @property
    def context(self) -> int:
        return self.start + self.tokens

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + self.tokens)


@dataclass(slots=True)
class Batch:
    """A step's rows: chunks first, then decodes (one row each): those without compressed blocks, then those with any, each by
    ascending context length. A row more, behind them, is one of the decodes a second time, which comparison.py attends to."""

    chunks: list[Span]
    decodes: list[Span]

    @property
    def decode_rows(self) -> slice:
        return rows_of(self.decodes)


def rows_of(decodes: Sequence[Span]) -> slice:
    """Rows of neighbouring decodes."""
    first = decodes[0].row
    return slice(first, first + len(decodes))


class _KV:
    """What all stores share: sizes, masks and decode indices of a step, and scratch for what is not read in place."""

    fixed_bytes_per_sequence = 0
    comparison: Comparison | None = None  # with exact KV, in stores that quantize

    def __init__(
        self, model: ModelConfig, config: EngineConfig, device: torch.device, dtype: torch.dtype, timer: StepTimer
    ) -> None:
        assert config.num_blocks is not None
        self._model, self._config, self._device, self._dtype, self._timer = model, config, device, dtype, timer
        self._block, self._num_blocks = config.block_size, config.num_blocks
        self._slots = config.num_blocks * config.block_size
        self._batch = Batch([], [])
        self._masks: list[Tensor | None] = []
        self._scratch = self._new_scratch(0)

    def begin(self, batch: Batch) -> None:
        """Makes what all layers of this step share."""
        self._batch = batch
        self._masks = [causal_mask(c.tokens, c.context, self._device, self._dtype) for c in batch.chunks]

    def _decode_index(self, slots: Sequence[np.ndarray], pool_slots: int) -> list[tuple[slice, DecodeAttention]]:
        """Attention of decodes whose tokens lie in `slots`, in runs of similar length."""
        return [
            (
                run,
                DecodeAttention(
                    slots[run],
                    heads=self._model.num_heads,
                    kv_heads=self._model.num_kv_heads,
                    pool_slots=pool_slots,
                    device=self._device,
                    dtype=self._dtype,
                ),
            )
            for run in (split_by_length([len(s) for s in slots]) if slots else [])
        ]

    def _new_comparison(
        self, blocks: QuantizedBlocks, quantized: Callable[[Span], np.ndarray], eligible: Callable[[Span], bool]
    ) -> Comparison | None:
        """None where the settings leave out comparisons."""
        config, count = self._config, blocks.block_set.count
        most = min(-(-config.quant_shadow_tokens // self._block), count)
        if not (config.quant_compare_rate and most):
            return None
        shadow = Shadow(
            self._model, count=count, most=most, block_size=self._block, device=self._device, dtype=self._dtype
        )
        blocks.shadow, blocks.block_set.watcher = shadow.copies, shadow
        return Comparison(config, shadow, blocks.groups, quantized=quantized, eligible=eligible)

    def _keep(self, wanted: bool | np.ndarray) -> Keep | None:
        """For QuantizedBlocks.fill: of the blocks those `wanted`, which the followed sequence fills, stay known exactly."""
        comparison = self.comparison
        if comparison is None:
            return None
        return lambda blocks: comparison.keep(blocks, np.broadcast_to(np.asarray(wanted), blocks.shape))

    def _follows(self, span: Span) -> bool:
        return self.comparison is not None and self.comparison.follows(span.request)

    # -- scratch: tokens of one layer, [2, kv_heads, tokens, head_dim] ---------------------------------------------------

    def _new_scratch(self, tokens: int) -> Tensor:
        shape = (2, self._model.num_kv_heads, tokens, self._model.head_dim)
        return torch.empty(shape, device=self._device, dtype=self._dtype)

    def _need_scratch(self, tokens: Iterable[int]) -> None:
        """Makes scratch large enough for each of these numbers of tokens. It is kept from step to step and only grows."""
        needed = max(tokens, default=0)
        if needed > self._scratch.shape[2]:
            self._scratch = self._new_scratch(0)  # given back before more is taken
            self._scratch = self._new_scratch(-(-needed // _SCRATCH_STEP) * _SCRATCH_STEP)

    def _turns(self, decodes: list[Span]) -> list[list[Span]]:
        """Decodes that fit into scratch together, block by block."""
        turns: list[list[Span]] = []
        room = 0
        for span in decodes:
            needed = len(span.blocks) * self._block
            if needed > room:
                turns.append([])
                room = max(_SCRATCH_TOKENS, needed)
            turns[-1].append(span)
            room -= needed
        return turns

    def _indices(self, values: np.ndarray | list[int]) -> Tensor:
        return torch.from_numpy(np.asarray(values, np.int64)).to(self._device)


class FloatKV(_KV):
    """Keys and values in the model's own type, [layers, 2, kv_heads, slots, head_dim]."""

    def __init__(
        self, model: ModelConfig, config: EngineConfig, device: torch.device, dtype: torch.dtype, timer: StepTimer
    ) -> None:
        super().__init__(model, config, device, dtype, timer)
        shape = (model.num_layers, 2, model.num_kv_heads, self._slots, model.head_dim)
        self.pool = torch.zeros(shape, device=device, dtype=dtype)  # zeros: memory is taken as blocks are first used
        exact = BlockSet("exact", {"kv": BlockTensor(self.pool.unflatten(3, (-1, self._block)), 3)})
        self.block_sets = [exact]
        self._reads: list[tuple[int, Tensor | None]] = []
        self._decode: list[tuple[slice, DecodeAttention]] = []
        self._writes = torch.empty(0)

    def begin(self, batch: Batch) -> None:
        super().begin(batch)
        slots = [slots_of(span.blocks, self._block, span.context) for span in (*batch.chunks, *batch.decodes)]
        writes = [s[span.start :] for s, span in zip(slots, (*batch.chunks, *batch.decodes), strict=True)]
        self._writes = self._indices(np.concatenate([[], *writes]))
        self._reads = [
            (int(s[0]), None if _adjacent(c.blocks) else self._indices(s))
            for s, c in zip(slots, batch.chunks, strict=False)
        ]
        self._decode = self._decode_index(slots[len(batch.chunks) :], self._slots)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Stores k and v [tokens, kv_heads, head_dim] and returns the attention [tokens, heads, head_dim] of q."""
        pool = self.pool[layer]
        pool[0].index_copy_(1, self._writes, k.transpose(0, 1))
        pool[1].index_copy_(1, self._writes, v.transpose(0, 1))
        out = torch.empty_like(q)
        self._timer.lap(Part.LINEAR)
        self._attend_in_pool(layer, q, out)
        return out

    def _attend_in_pool(self, layer: int, q: Tensor, out: Tensor) -> None:
        pool = self.pool[layer]
        for span, (first, gather), mask in zip(self._batch.chunks, self._reads, self._masks, strict=True):
            kv = pool.narrow(2, first, span.context) if gather is None else pool.index_select(2, gather)
            out[span.rows] = chunk_attention(q[span.rows], kv, mask)
        if self._batch.chunks:
            self._timer.lap(Part.PREFILL)
        if self._batch.decodes:
            rows = self._batch.decode_rows
            q, out = q[rows], out[rows]
            for run, attention in self._decode:
                out[run] = attention(q[run], pool)
            self._timer.lap(Part.DECODE)

    def release(self, request: Request) -> None:
        """Nothing of a request is kept beside its blocks."""

    def report(self, _: ReportError) -> None:
        """Nothing is quantized."""


@dataclass(slots=True)
class _ChunkWork:
    """A chunk in Int8KV: `stored` blocks come first, the tail holds what is behind them, `fill` is what the chunk completes."""

    tail: int
    stored: Tensor
    fill: Fill


@dataclass(slots=True)
class _Turn:
    """Decodes of Int8KV that are in scratch together: `stored` blocks of all of them, each once, then their `tails`."""

    rows: slice
    stored: Tensor
    tails: Tensor
    attention: list[tuple[slice, DecodeAttention]]


class Int8KV(_KV):
    """Full blocks as int8, the block that a sequence is filling exact in a tail buffer.

    A block is read back quantized from the step after the one that fills it. Only full blocks can be moved: what the tail holds goes
    with release(), and a sequence is taken up again at a block's begin.
    """

    def __init__(
        self, model: ModelConfig, config: EngineConfig, device: torch.device, dtype: torch.dtype, timer: StepTimer
    ) -> None:
        super().__init__(model, config, device, dtype, timer)
        self.blocks = QuantizedBlocks(
            model,
            scheme="int8",
            count=self._num_blocks,
            block_size=self._block,
            device=device,
            sample_rate=config.quant_sample_rate,
            seed=config.seed,
        )
        self.block_sets = [self.blocks.block_set]
        self.comparison = self._new_comparison(
            self.blocks,
            quantized=lambda span: span.blocks[: span.start // self._block],
            eligible=lambda span: span.start < span.request.prompt_len,  # from a prefill on
        )
        tail_shape = (model.num_layers, 2, model.num_kv_heads, config.max_num_seqs * self._block, model.head_dim)
        self._tails = torch.zeros(tail_shape, device=device, dtype=dtype)
        self._tail_of: dict[Request, int] = {}
        self._free_tails = list(range(config.max_num_seqs))
        self._chunks: list[_ChunkWork] = []
        self._turns_of_step: list[_Turn] = []
        self._tail_writes = self._done_tails = torch.empty(0)
        self._done: Fill | None = None

    # -- a step --------------------------------------------------------------------------------------------------------

    def begin(self, batch: Batch) -> None:
        super().begin(batch)
        size = self._block
        self._chunks = []
        for span in batch.chunks:
            full = span.start // size
            fill = self.blocks.fill(span.blocks[full : span.context // size], self._keep(self._follows(span)))
            self._chunks.append(_ChunkWork(self._tail(span), self._indices(span.blocks[:full]), fill))
        tails = np.array([self._tail(span) for span in batch.decodes], np.int64)
        starts = np.array([span.start for span in batch.decodes], np.int64)
        self._tail_writes = self._indices(tails * size + starts % size)
        done = [span for span in batch.decodes if span.context % size == 0]
        self._done_tails = self._indices([self._tail(span) for span in done])
        self._done = None
        if done:
            keep = self._keep(np.array([self._follows(span) for span in done]))
            self._done = self.blocks.fill([span.blocks[-1] for span in done], keep)
        turns = self._turns(batch.decodes)
        self._need_scratch(
            [*(c.context for c in batch.chunks), *(sum(len(s.blocks) for s in turn) * size for turn in turns)]
        )
        self._turns_of_step = [self._turn(turn) for turn in turns]

    def _turn(self, spans: list[Span]) -> _Turn:
        size = self._block
        stored, places = once([span.blocks[: span.start // size] for span in spans])
        slots = [
            slots_of(np.append(place, len(stored) + i), size, span.context)
            for i, (span, place) in enumerate(zip(spans, places, strict=True))
        ]
        return _Turn(
            rows_of(spans),
            self._indices(stored),
            self._indices([self._tail(span) for span in spans]),
            self._decode_index(slots, self._scratch.shape[2]),
        )

    def _tail(self, span: Span) -> int:
        """The sequence's place in the tail buffer, taken when it first runs."""
        tail = self._tail_of.get(span.request)
        if tail is None:
            if span.start % self._block:
                raise RuntimeError(f"request {span.request.request_id} starts inside a block that it did not begin")
            if not self._free_tails:
                raise RuntimeError(f"more than max_num_seqs = {self._config.max_num_seqs} requests run at once")
            tail = self._tail_of[span.request] = self._free_tails.pop()
        return tail

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Stores k and v [tokens, kv_heads, head_dim] and returns the attention [tokens, heads, head_dim] of q."""
        size, scratch = self._block, self._scratch
        tails = self._tails[layer]
        new = torch.stack([k, v]).transpose(1, 2)  # [2, kv_heads, tokens, head_dim]
        out = torch.empty_like(q)
        self._timer.lap(Part.LINEAR)
        for span, work, mask in zip(self._batch.chunks, self._chunks, self._masks, strict=True):
            full = work.stored.shape[0] * size
            own = tails.narrow(2, work.tail * size, size)
            self.blocks.read(layer, work.stored, scratch[:, :, :full])
            scratch[:, :, full : span.start] = own[:, :, : span.start - full]
            self._timer.lap(Part.DEQUANT)
            scratch[:, :, span.start : span.context] = new[:, :, span.rows]
            kv = scratch.narrow(2, 0, span.context)
            out[span.rows] = chunk_attention(q[span.rows], kv, mask)
            end = span.context // size * size
            if end > full:
                self.blocks.write(layer, kv[:, :, full:end].unflatten(2, (-1, size)), work.fill)
            own[:, :, : span.context - end] = kv[:, :, end:]
            self._timer.lap(Part.PREFILL)
        if self._batch.decodes:
            tails.index_copy_(2, self._tail_writes, new[:, :, self._batch.decode_rows])
            self._timer.lap(Part.DECODE)
            by_tail = tails.unflatten(2, (-1, size))
            for turn in self._turns_of_step:
                full = turn.stored.shape[0] * size
                self.blocks.read(layer, turn.stored, scratch[:, :, :full])
                own = by_tail.index_select(2, turn.tails).flatten(2, 3)
                scratch[:, :, full : full + own.shape[2]] = own
                self._timer.lap(Part.DEQUANT)
                for run, attention in turn.attention:
                    out[turn.rows][run] = attention(q[turn.rows][run], scratch)
                self._timer.lap(Part.DECODE)
            if self._done is not None:
                self.blocks.write(layer, by_tail.index_select(2, self._done_tails), self._done)
                self._timer.lap(Part.DECODE)
        if self.comparison is not None and (twin := self.comparison.twin) is not None:
            own = tails.narrow(2, self._tail(twin.span) * size, twin.span.start % size)
            self.comparison.attend(layer, q, k, v, own, out)
            self._timer.lap(Part.DECODE)
        return out

    def report(self, report: ReportError) -> None:
        """Hands on the error of each block measured since the last report."""
        self.blocks.report(report)

    def release(self, request: Request) -> None:
        """Gives the request's place in the tail buffer back, if it has one."""
        tail = self._tail_of.pop(request, None)
        if tail is not None:
            self._free_tails.append(tail)
        if self.comparison is not None:
            self.comparison.release(request)


def once(blocks: Sequence[np.ndarray]) -> tuple[np.ndarray, list[np.ndarray]]:
    """(all block numbers, each once, ascending; for each sequence where its blocks are among them)."""
    distinct, places = np.unique(np.concatenate(blocks), return_inverse=True)
    return distinct, np.split(places, np.cumsum([len(b) for b in blocks])[:-1])


def _adjacent(blocks: np.ndarray) -> bool:
    return bool((np.diff(blocks) == 1).all())
