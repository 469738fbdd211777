"""Exact and quantized blocks side by side, mixed in any order within a sequence. The KV manager decides which blocks of a sequence are
compressed: mostly the oldest ones of long sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from observability.engine.executor.attention import DecodeAttention, causal_mask, chunk_attention, slots_of
from observability.engine.executor.kv_cache import Batch, FloatKV, Span, once, rows_of
from observability.engine.executor.quantizer import Fill, QuantizedBlocks, ReportError
from observability.engine.executor.timing import Part, StepTimer
from observability.engine.model.llama import ModelConfig
from observability.engine.types import EngineConfig, Request

#: Blocks that are compressed at once: bounds the exact copy that this takes.
_SLICE_BLOCKS = 64


@dataclass(slots=True)
class _Read:
    """Blocks of one kind and the tokens of scratch that they go to."""

    compressed: bool
    blocks: Tensor  # numbers within their kind
    into: slice


@dataclass(slots=True)
class _MixedChunk:
    """A chunk that reads or writes compressed blocks. `source` are its tokens, within the chunk, that fill compressed ones."""

    span: Span
    mask: Tensor | None
    reads: list[_Read]
    source: Tensor
    fill: Fill | None


@dataclass(slots=True)
class _MixedDecodes:
    """Decodes that are in scratch together: exact blocks of all of them, each once, then compressed ones."""

    rows: slice
    reads: list[_Read]
    attention: list[tuple[slice, DecodeAttention]]


class CompressedKV(FloatKV):
    """A FloatKV with `num_compressed_blocks` quantized blocks more, which are numbered from num_blocks on.

    Sequences without compressed blocks are read in place, as ever. The others are put together in scratch, which is counted as
    dequantization. compress_blocks() quantizes exact blocks; a chunk can also fill compressed blocks, whole ones only: it attends
    to its own tokens exactly, later steps to what was stored. A decode writes exact blocks only.
    """

    def __init__(
        self, model: ModelConfig, config: EngineConfig, device: torch.device, dtype: torch.dtype, timer: StepTimer
    ) -> None:
        super().__init__(model, config, device, dtype, timer)
        self.compressed = QuantizedBlocks(
            model,
            scheme=config.compressed_scheme,
            count=config.num_compressed_blocks,
            block_size=self._block,
            device=device,
            sample_rate=config.quant_sample_rate,
            seed=config.seed,
        )
        self.block_sets.append(self.compressed.block_set)
        self.comparison = self._new_comparison(self.compressed, quantized=self._filled, eligible=self._grows_long)
        self._write_rows: Tensor | None = None  # None: all rows, in order
        self._mixed_chunks: list[_MixedChunk] = []
        self._mixed_decodes: list[_MixedDecodes] = []

    def _filled(self, span: Span) -> np.ndarray:
        """Compressed blocks, numbered among themselves, that the sequence filled before this step."""
        blocks = span.blocks[: -(-span.start // self._block)]
        return blocks[blocks >= self._num_blocks] - self._num_blocks

    def _grows_long(self, span: Span) -> bool:
        return max(span.context, span.request.prompt_len) > self._config.compressed_from

    # -- a step --------------------------------------------------------------------------------------------------------

    def begin(self, batch: Batch) -> None:
        """Raises RuntimeError when a chunk covers a part of a compressed block only, or a decode would write one."""
        chunks, decodes = (
            [c for c in batch.chunks if self.is_mixed(c)],
            [d for d in batch.decodes if self.is_mixed(d)],
        )
        if not (chunks or decodes):
            super().begin(batch)
            self._write_rows, self._mixed_chunks, self._mixed_decodes = None, [], []
            return
        plain = Batch(
            [c for c in batch.chunks if not self.is_mixed(c)], batch.decodes[: len(batch.decodes) - len(decodes)]
        )
        super().begin(plain)
        self._index_writes(batch)
        turns = self._turns(decodes)
        size = self._block
        self._need_scratch(sum(len(span.blocks) for span in spans) * size for spans in (*([c] for c in chunks), *turns))
        self._mixed_chunks = [self._mixed_chunk(chunk) for chunk in chunks]
        self._mixed_decodes = [self._decodes_of_turn(turn) for turn in turns]
        if self.comparison is not None and (twin := self.comparison.twin) is not None:
            slots = slots_of(twin.span.blocks, size, twin.span.start)
            twin.exact = self._indices(slots[slots < self._slots])

    def is_mixed(self, span: Span) -> bool:
        """Whether any of the sequence's blocks is compressed."""
        return int(span.blocks.max()) >= self._num_blocks

    def _index_writes(self, batch: Batch) -> None:
        """Which rows of the step go to exact blocks, and to which slots."""
        rows, slots = [], []
        for span in (*batch.chunks, *batch.decodes):
            own = slots_of(span.blocks, self._block, span.context)[span.start :]
            exact = np.flatnonzero(own < self._slots)
            rows.append(span.row + exact)
            slots.append(own[exact])
        self._write_rows, self._writes = self._indices(np.concatenate(rows)), self._indices(np.concatenate(slots))

    def _mixed_chunk(self, span: Span) -> _MixedChunk:
        size, name = self._block, span.request.request_id
        written = span.blocks[span.start // size :]
        compressed = np.flatnonzero(written >= self._num_blocks)
        first = (
            span.start // size + compressed
        ) * size - span.start  # of each compressed block's tokens, within the chunk
        if compressed.size and (first[0] < 0 or first[-1] + size > span.tokens):
            raise RuntimeError(
                f"positions {span.start}..{span.context - 1} of request {name} cover a part of a compressed block only"
            )
        return _MixedChunk(
            span,
            causal_mask(span.tokens, span.context, self._device, self._dtype),
            self._reads_in_order(span),
            self._indices((first[:, None] + np.arange(size)).ravel()),
            self.compressed.fill(written[compressed] - self._num_blocks, self._keep(self._follows(span)))
            if compressed.size
            else None,
        )

    def _reads_in_order(self, span: Span) -> list[_Read]:
        """Blocks with the tokens before the chunk, in order of the sequence, neighbours of one kind together."""
        size = self._block
        blocks = span.blocks[: -(-span.start // size)]
        is_compressed = blocks >= self._num_blocks
        borders = [0, *(np.flatnonzero(np.diff(is_compressed)) + 1).tolist(), len(blocks)]
        return [
            self._read(blocks[first:end], slice(first * size, end * size))
            for first, end in pairwise(borders)
            if first < end
        ]

    def _decodes_of_turn(self, spans: list[Span]) -> _MixedDecodes:
        size = self._block
        for span in spans:
            if span.blocks[-1] >= self._num_blocks:
                raise RuntimeError(f"request {span.request.request_id} decodes into a compressed block")
        blocks, places = once([span.blocks for span in spans])
        exact = int(np.searchsorted(blocks, self._num_blocks))
        reads = [
            self._read(blocks[:exact], slice(0, exact * size)),
            self._read(blocks[exact:], slice(exact * size, len(blocks) * size)),
        ]
        slots = [slots_of(place, size, span.context) for place, span in zip(places, spans, strict=True)]
        return _MixedDecodes(rows_of(spans), reads, self._decode_index(slots, self._scratch.shape[2]))

    def _read(self, blocks: np.ndarray, into: slice) -> _Read:
        """`blocks` are all of one kind."""
        compressed = bool(blocks[0] >= self._num_blocks)
        return _Read(compressed, self._indices(blocks - self._num_blocks if compressed else blocks), into)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Stores k and v [tokens, kv_heads, head_dim] and returns the attention [tokens, heads, head_dim] of q."""
        if self._write_rows is None:
            return super().attend(layer, q, k, v)
        pool = self.pool[layer]
        for tensor, new in enumerate((k, v)):
            pool[tensor].index_copy_(1, self._writes, new.index_select(0, self._write_rows).transpose(0, 1))
        out = torch.empty_like(q)
        self._timer.lap(Part.LINEAR)
        self._attend_in_pool(layer, q, out)
        for chunk in self._mixed_chunks:
            self._attend_mixed_chunk(layer, chunk, q, torch.stack([k[chunk.span.rows], v[chunk.span.rows]]), out)
        for turn in self._mixed_decodes:
            self._gather(layer, turn.reads)
            for run, attention in turn.attention:
                out[turn.rows][run] = attention(q[turn.rows][run], self._scratch)
            self._timer.lap(Part.DECODE)
        if self.comparison is not None and (twin := self.comparison.twin) is not None:
            self.comparison.attend(layer, q, k, v, pool.index_select(2, twin.exact), out)
            self._timer.lap(Part.DECODE)
        return out

    def _attend_mixed_chunk(self, layer: int, chunk: _MixedChunk, q: Tensor, new: Tensor, out: Tensor) -> None:
        """`new` are the chunk's own keys and values, [2, tokens, kv_heads, head_dim]."""
        span, new = chunk.span, new.transpose(1, 2)
        self._gather(layer, chunk.reads)
        kv = self._scratch.narrow(2, 0, span.context)
        kv[:, :, span.start :] = new
        out[span.rows] = chunk_attention(q[span.rows], kv, chunk.mask)
        if chunk.fill is not None:
            exact = new.index_select(2, chunk.source).unflatten(2, (-1, self._block))
            self.compressed.write(layer, exact, chunk.fill)
        self._timer.lap(Part.PREFILL)

    def _gather(self, layer: int, reads: Sequence[_Read]) -> None:
        """Puts what blocks hold into scratch."""
        for read in reads:
            into = self._scratch[:, :, read.into]
            if read.compressed:
                self.compressed.read(layer, read.blocks, into)
            else:
                blocks = self.pool[layer].unflatten(2, (-1, self._block))
                into.unflatten(2, (-1, self._block)).copy_(blocks.index_select(2, read.blocks))
        self._timer.lap(Part.DEQUANT)

    # -- blocks ----------------------------------------------------------------------------------------------------------

    def compress_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Quantizes full exact blocks into compressed ones, which are numbered from num_blocks on like everywhere."""
        by_block = self.pool.unflatten(3, (-1, self._block))
        own = [] if self.comparison is None else self.comparison.followed_blocks
        for first in range(0, len(sources), _SLICE_BLOCKS):
            blocks = self._indices(list(sources[first : first + _SLICE_BLOCKS]))
            mine = np.isin(sources[first : first + _SLICE_BLOCKS], own)
            fill = self.compressed.fill(
                np.array(targets[first : first + _SLICE_BLOCKS]) - self._num_blocks, self._keep(mine)
            )
            for layer in range(self._model.num_layers):
                self.compressed.write(layer, by_block[layer].index_select(2, blocks), fill)

    def release(self, request: Request) -> None:
        """Its exact values need not be kept any longer."""
        if self.comparison is not None:
            self.comparison.release(request)

    def report(self, report: ReportError) -> None:
        """Hands on the error of each block measured since the last report."""
        self.compressed.report(report)
