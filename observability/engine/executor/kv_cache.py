"""Where keys and values of all sequences lie: FloatKV stores them as computed, Int8KV quantizes each block once it is full.

Both are told of a step by begin(batch) and then called by the decoder once a layer; see attention.py for a pool's shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from observability.catalog import TENSORS
from observability.engine.executor.attention import (
    DecodeAttention,
    causal_mask,
    chunk_attention,
    slots_of,
    split_by_length,
)
from observability.engine.executor.timing import Part, StepTimer
from observability.engine.model.llama import ModelConfig
from observability.engine.types import EngineConfig, Request

#: report(tensor index in catalog.TENSORS, layer group, scheme, squared error, squared signal, elements)
ReportError = Callable[[int, str, str, float, float, int], None]
_LAYER_GROUPS = 4


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
    """A step's rows: chunks first, then decodes (one row each) by ascending context length."""

    chunks: list[Span]
    decodes: list[Span]

    @property
    def decode_rows(self) -> slice:
        first = self.decodes[0].row
        return slice(first, first + len(self.decodes))


class _KV:
    """What both kinds share: sizes, the decode index of a step, the order of a layer's work."""

    def __init__(
        self, model: ModelConfig, config: EngineConfig, device: torch.device, dtype: torch.dtype, timer: StepTimer
    ) -> None:
        assert config.num_blocks is not None
        self._model, self._config, self._device, self._dtype, self._timer = model, config, device, dtype, timer
        self._block, self._num_blocks = config.block_size, config.num_blocks
        self._slots = config.num_blocks * config.block_size
        self._batch = Batch([], [])
        self._decode: list[tuple[slice, DecodeAttention]] = []
        self._masks: list[Tensor | None] = []

    def begin(self, batch: Batch) -> None:
        """Makes what all layers of this step share."""
        self._batch = batch
        self._masks = [causal_mask(c.tokens, c.context, self._device, self._dtype) for c in batch.chunks]

    def _index_decodes(self, slots: Sequence[np.ndarray], pool_slots: int) -> None:
        self._decode = []
        for run in split_by_length([len(s) for s in slots]) if slots else []:
            attention = DecodeAttention(
                slots[run],
                heads=self._model.num_heads,
                kv_heads=self._model.num_kv_heads,
                pool_slots=pool_slots,
                device=self._device,
                dtype=self._dtype,
            )
            self._decode.append((run, attention))

    def _attend_decodes(self, q: Tensor, pool: Tensor, out: Tensor) -> None:
        rows = self._batch.decode_rows
        q, out = q[rows], out[rows]
        for run, attention in self._decode:
            out[run] = attention(q[run], pool)

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
        self.bytes_per_block = self.pool[:, :, :, : self._block].numel() * self.pool.element_size()
        self._reads: list[tuple[int, Tensor | None]] = []
        self._writes = torch.empty(0)

    def begin(self, batch: Batch) -> None:
        super().begin(batch)
        slots = [slots_of(span.blocks, self._block, span.context) for span in (*batch.chunks, *batch.decodes)]
        writes = [s[span.start :] for s, span in zip(slots, (*batch.chunks, *batch.decodes), strict=True)]
        self._writes = self._indices(np.concatenate(writes))
        self._reads = [
            (int(s[0]), None if _adjacent(c.blocks) else self._indices(s))
            for s, c in zip(slots, batch.chunks, strict=False)
        ]
        self._index_decodes(slots[len(batch.chunks) :], self._slots)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Stores k and v [tokens, kv_heads, head_dim] and returns the attention [tokens, heads, head_dim] of q."""
        pool = self.pool[layer]
        pool[0].index_copy_(1, self._writes, k.transpose(0, 1))
        pool[1].index_copy_(1, self._writes, v.transpose(0, 1))
        out = torch.empty_like(q)
        self._timer.lap(Part.LINEAR)
        for span, (first, gather), mask in zip(self._batch.chunks, self._reads, self._masks, strict=True):
            kv = pool.narrow(2, first, span.context) if gather is None else pool.index_select(2, gather)
            out[span.rows] = chunk_attention(q[span.rows], kv, mask)
        if self._batch.chunks:
            self._timer.lap(Part.PREFILL)
        if self._batch.decodes:
            self._attend_decodes(q, pool, out)
            self._timer.lap(Part.DECODE)
        return out

    def copy_blocks(self, sources: Tensor, targets: Tensor) -> None:
        """Copies whole blocks; all are read before any is written."""
        blocks = self.pool.view(*self.pool.shape[:3], self._num_blocks, self._block, -1)
        blocks.index_copy_(3, targets, blocks.index_select(3, sources))

    def release(self, request: Request) -> None:
        """Nothing of a request is kept beside its blocks."""

    def report(self, _: ReportError) -> None:
        """Nothing is quantized."""


class Int8KV(_KV):
    """Full blocks as int8, the block that a sequence is filling exact in a tail buffer.

    Keys are scaled per channel over the block's tokens, values per token, as KIVI found best (arXiv 2402.02750): key channels
    differ by orders of magnitude and stay so from token to token. x is stored as round(x / scale), scale = largest |x| / 127,
    so that |error| <= scale / 2. A block is read back quantized from the step after the one that fills it.
    """

    scheme = "int8"

    def __init__(
        self, model: ModelConfig, config: EngineConfig, device: torch.device, dtype: torch.dtype, timer: StepTimer
    ) -> None:
        super().__init__(model, config, device, dtype, timer)
        layers, kv_heads, width = model.num_layers, model.num_kv_heads, model.head_dim
        self.pool = torch.zeros((layers, 2, kv_heads, self._slots, width), device=device, dtype=torch.int8)
        self.key_scales = torch.zeros((layers, kv_heads, self._num_blocks, width), device=device)
        self.value_scales = torch.zeros((layers, kv_heads, self._slots), device=device)
        self.bytes_per_block = layers * kv_heads * (2 * self._block * width + 4 * width + 4 * self._block)
        self._tails = torch.zeros(
            (layers, 2, kv_heads, config.max_num_seqs * self._block, width), device=device, dtype=dtype
        )
        self._tail_of: dict[Request, int] = {}
        self._free_tails = list(range(config.max_num_seqs))
        self._scratch = torch.empty((2, kv_heads, 0, width), device=device, dtype=dtype)
        self._random = np.random.default_rng(config.seed)
        groups = np.array_split(np.arange(layers), min(_LAYER_GROUPS, layers))
        self.layer_groups = [f"{g[0]:02d}-{g[-1]:02d}" for g in groups]
        self._group_of = [i for i, g in enumerate(groups) for _ in g]
        self._elements = [len(g) * kv_heads * self._block * width for g in groups]
        self._begin_decodes([])
        self._fills: list[tuple[Tensor, Tensor, slice]] = []
        self._errors = torch.empty(0)

    # -- a step --------------------------------------------------------------------------------------------------------

    def begin(self, batch: Batch) -> None:
        super().begin(batch)
        size = self._block
        self._chunk_reads = []
        self._fills, sampled = [], 0  # blocks that this step fills: of each chunk, then of all decodes

        def fill(blocks: np.ndarray) -> None:
            nonlocal sampled
            chosen = np.flatnonzero(self._random.random(len(blocks)) < self._config.quant_sample_rate)
            self._fills.append((self._indices(blocks), self._indices(chosen), slice(sampled, sampled + len(chosen))))
            sampled += len(chosen)

        for span in batch.chunks:
            full = span.start // size
            self._chunk_reads.append((self._tail(span), full, self._indices(span.blocks[:full])))
            fill(span.blocks[full : span.context // size])
        self._begin_decodes(batch.decodes)
        done = [span for span in batch.decodes if span.context % size == 0]
        self._done_tails = self._indices([self._tail(span) for span in done])
        fill(np.array([span.blocks[span.start // size] for span in done], np.int64))
        self._errors = torch.zeros((2, len(self.layer_groups), sampled, 2), device=self._device, dtype=torch.float64)
        needed = max([self._decode_slots, *(span.context for span in batch.chunks)])
        if needed > self._scratch.shape[2]:
            self._scratch = torch.empty(
                (2, self._model.num_kv_heads, -(-needed // 1024) * 1024, self._model.head_dim),
                device=self._device,
                dtype=self._dtype,
            )
        self._index_decodes(self._scratch_slots, self._scratch.shape[2])

    def _begin_decodes(self, spans: list[Span]) -> None:
        """Places the decodes' contexts in scratch: dequantized full blocks of one after another, then the tails."""
        size = self._block
        full = np.array([span.start // size for span in spans], np.int64)
        first = np.concatenate([[0], np.cumsum(full)])
        self._decode_full = self._indices(np.concatenate([[], *(s.blocks[: s.start // size] for s in spans)]))
        tails = np.array([self._tail(span) for span in spans], np.int64)
        self._decode_tails = self._indices(tails)
        self._tail_writes = self._indices(tails * size + np.array([span.start % size for span in spans], np.int64))
        self._decode_slots = int(first[-1] + len(spans)) * size
        self._scratch_slots = []
        for i, span in enumerate(spans):
            blocks = np.append(np.arange(first[i], first[i + 1]), first[-1] + i)
            self._scratch_slots.append(slots_of(blocks, size, span.context))

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
        size = self._block
        tails = self._tails[layer]
        new = torch.stack([k, v]).transpose(1, 2)  # [2, kv_heads, tokens, head_dim]
        out = torch.empty_like(q)
        self._timer.lap(Part.LINEAR)
        for span, (tail, full, blocks), mask, fill in zip(
            self._batch.chunks, self._chunk_reads, self._masks, self._fills, strict=False
        ):
            self._dequantize(layer, blocks)
            own = tails.narrow(2, tail * size, size)
            self._scratch[:, :, full * size : span.start] = own[:, :, : span.start - full * size]
            self._timer.lap(Part.DEQUANT)
            self._scratch[:, :, span.start : span.context] = new[:, :, span.rows]
            kv = self._scratch.narrow(2, 0, span.context)
            out[span.rows] = chunk_attention(q[span.rows], kv, mask)
            end = span.context // size * size
            if end > full * size:
                self._quantize(layer, kv[:, :, full * size : end].unflatten(2, (-1, size)), fill)
            own[:, :, : span.context - end] = kv[:, :, end:]
            self._timer.lap(Part.PREFILL)
        if self._batch.decodes:
            rows = self._batch.decode_rows
            tails.index_copy_(2, self._tail_writes, new[:, :, rows])
            self._timer.lap(Part.DECODE)
            self._dequantize(layer, self._decode_full)
            by_tail = tails.unflatten(2, (-1, size))
            begin = self._decode_full.shape[0] * size
            self._scratch[:, :, begin : self._decode_slots] = by_tail.index_select(2, self._decode_tails).flatten(2, 3)
            self._timer.lap(Part.DEQUANT)
            self._attend_decodes(q, self._scratch, out)
            if self._done_tails.shape[0]:
                self._quantize(layer, by_tail.index_select(2, self._done_tails), self._fills[-1])
            self._timer.lap(Part.DECODE)
        return out

    # -- quantization ---------------------------------------------------------------------------------------------------

    def _quantize(self, layer: int, exact: Tensor, fill: tuple[Tensor, Tensor, slice]) -> None:
        """Stores whole blocks [2, kv_heads, blocks, block_size, head_dim]; adds the error of the sampled ones."""
        blocks, chosen, place = fill
        exact = exact.float()
        scales = exact[0].abs().amax(2, keepdim=True) / 127, exact[1].abs().amax(3, keepdim=True) / 127
        pool = self.pool[layer].unflatten(2, (-1, self._block))
        for tensor, scale in enumerate(scales):
            stored = (exact[tensor] / scale.clamp_min(torch.finfo(torch.float32).tiny)).round_()
            pool[tensor].index_copy_(1, blocks, stored.to(torch.int8))
            if chosen.shape[0]:
                signal = exact[tensor].index_select(1, chosen).double()
                error = (stored * scale).index_select(1, chosen).double() - signal
                sums = self._errors[tensor, self._group_of[layer], place]
                sums[:, 0] += error.square().sum((0, 2, 3))
                sums[:, 1] += signal.square().sum((0, 2, 3))
        self.key_scales[layer].index_copy_(1, blocks, scales[0].squeeze(2))
        self.value_scales[layer].unflatten(1, (-1, self._block)).index_copy_(1, blocks, scales[1].squeeze(3))

    def _dequantize(self, layer: int, blocks: Tensor) -> None:
        """Writes the blocks' content to the first slots of scratch."""
        count = blocks.shape[0]
        if count == 0:
            return
        keys, values = self.pool[layer].unflatten(2, (-1, self._block)).index_select(2, blocks)
        into = self._scratch[:, :, : count * self._block].unflatten(2, (count, self._block))
        torch.mul(keys, self.key_scales[layer].index_select(1, blocks).unsqueeze(2), out=into[0])
        scales = self.value_scales[layer].unflatten(1, (-1, self._block)).index_select(1, blocks)
        torch.mul(values, scales.unsqueeze(3), out=into[1])

    def report(self, report: ReportError) -> None:
        """Hands on the error of each block that this step measured: one call a block, tensor and layer group."""
        if self._errors.numel() == 0:
            return
        sums = self._errors.cpu().numpy()
        for tensor in range(len(TENSORS)):
            for group, name in enumerate(self.layer_groups):
                for error, signal in sums[tensor, group].tolist():
                    report(tensor, name, self.scheme, error, signal, self._elements[group])

    # -- blocks and requests ----------------------------------------------------------------------------------------------

    def copy_blocks(self, sources: Tensor, targets: Tensor) -> None:
        """Copies whole blocks with their scales; all are read before any is written."""
        for tensor, dim in (
            (self.pool.unflatten(3, (-1, self._block)), 3),
            (self.key_scales, 2),
            (self.value_scales.unflatten(2, (-1, self._block)), 2),
        ):
            tensor.index_copy_(dim, targets, tensor.index_select(dim, sources))

    def release(self, request: Request) -> None:
        """Gives the request's place in the tail buffer back, if it has one."""
        tail = self._tail_of.pop(request, None)
        if tail is not None:
            self._free_tails.append(tail)


def _adjacent(blocks: np.ndarray) -> bool:
    return bool((np.diff(blocks) == 1).all())
