"""Where the states of a model with latent attention lie (see model/latent.py): full-attention layers in the block pool, which is
the slope of a sequence's memory, sliding layers in one ring buffer a sequence beside it, which is the fixed part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from observability.engine.executor.attention import slots_of, split_by_length
from observability.engine.executor.block_set import BlockSet, BlockTensor
from observability.engine.executor.kv_cache import Batch, Span
from observability.engine.executor.quantizer import ReportError
from observability.engine.executor.timing import Part, StepTimer
from observability.engine.model.latent import LatentDecoder
from observability.engine.model.latent_config import LatentConfig
from observability.engine.types import EngineConfig, Request
from observability.errors import ConfigError


@dataclass(slots=True)
class _ChunkReads:
    """What a chunk attends to in layers of one kind: stored states, then the chunk's own."""

    stored: Tensor  # slots [earlier tokens], oldest first
    mask: Tensor  # [tokens, earlier tokens + tokens], true where a query sees a state


@dataclass(slots=True)
class _DecodeReads:
    """What a run of decodes attends to in layers of one kind, own tokens included."""

    rows: slice  # among the step's decodes
    slots: Tensor  # [decodes, longest]
    mask: Tensor | None  # [decodes, longest], false in the padding; None without padding


@dataclass(slots=True)
class _Step:
    """A step's work in layers of one kind, made once for all of them."""

    chunks: list[_ChunkReads]
    decodes: list[_DecodeReads]
    sources: Tensor  # rows of the batch whose states are to be stored
    targets: Tensor  # where, one slot a row


class LatentKV:
    """States [latent, rotary key] in the model's own type.

    `pool` is [full layers, slots, width] and reached by block tables. `rings` is [sliding layers, max_num_seqs x window, width]: a
    running sequence owns one ring of `window` slots from its first step to release(), and position p lies at p modulo window. A ring
    cannot be shared or taken up later, so where layers slide a sequence always starts at its first token. Raises ConfigError for
    settings that would have it otherwise, and for quantized KV.
    """

    comparison = None  # nothing is quantized

    def __init__(self, model: LatentDecoder, config: EngineConfig, timer: StepTimer) -> None:
        assert config.num_blocks is not None
        c = model.config
        _check(c, config)
        self._model, self._config, self._timer = model, config, timer
        self._block, self._window = config.block_size, c.sliding_window
        slots = config.num_blocks * config.block_size
        rings = config.max_num_seqs * self._window
        # zeros: memory is taken as slots are first used
        self.pool = torch.zeros((c.full_layers, slots, c.state_width), device=model.device, dtype=model.dtype)
        self.rings = torch.zeros((c.window_layers, rings, c.state_width), device=model.device, dtype=model.dtype)
        self.block_sets = [BlockSet("latent", {"states": BlockTensor(self.pool.unflatten(1, (-1, self._block)), 1)})]
        self.fixed_bytes_per_sequence = self.rings[:, : self._window].nbytes
        self._ring_of: dict[Request, int] = {}
        self._free_rings = list(range(config.max_num_seqs))
        pooled, ringed = iter(self.pool), iter(self.rings)
        self._sliding = [kind == "sliding_attention" for kind in c.layer_types]
        self._store = [next(ringed if sliding else pooled) for sliding in self._sliding]  # [slots, width] by layer
        self._batch = Batch([], [])
        self._steps: dict[bool, _Step] = {}  # by whether the layer slides

    # -- a step --------------------------------------------------------------------------------------------------------

    def begin(self, batch: Batch) -> None:
        """Makes what all layers of this step share."""
        self._batch = batch
        self._steps = {sliding: self._step(sliding) for sliding in set(self._sliding)}

    def _step(self, sliding: bool) -> _Step:
        batch, window = self._batch, self._window if sliding else None
        chunks, sources, targets = [], [], []
        for span in batch.chunks:
            # the first query's view begins the stored part, the last one's the part that is worth storing
            first = 0 if window is None else max(span.start - window + 1, 0)
            kept = span.start if window is None else max(span.start, span.context - window)
            mask = _causal_mask(span.tokens, span.context - first, window).to(self.pool.device)
            chunks.append(_ChunkReads(self._indices(self._slots(span, first, span.start, sliding)), mask))
            sources.append(np.arange(span.row + kept - span.start, span.row + span.tokens))
            targets.append(self._slots(span, kept, span.context, sliding))
        own = []
        for span in batch.decodes:
            own.append(self._slots(span, 0 if window is None else max(span.context - window, 0), span.context, sliding))
            sources.append(np.array([span.row]))
            targets.append(own[-1][-1:])
        runs = split_by_length([len(slots) for slots in own]) if own else []
        decodes = [self._decode_reads(run, own[run]) for run in runs]
        return _Step(chunks, decodes, self._indices(np.concatenate(sources)), self._indices(np.concatenate(targets)))

    def _decode_reads(self, rows: slice, slots: Sequence[np.ndarray]) -> _DecodeReads:
        lengths = np.array([len(s) for s in slots])
        longest = int(lengths.max())
        # padding reads the sequence's own first slot: never another's data
        padded = np.stack([np.pad(s, (0, longest - len(s)), constant_values=s[0]) for s in slots])
        within = np.arange(longest) < lengths[:, None]
        mask = None if within.all() else torch.from_numpy(within).to(self.pool.device)
        return _DecodeReads(rows, self._indices(padded), mask)

    def _slots(self, span: Span, start: int, end: int, sliding: bool) -> np.ndarray:
        """Slots of the sequence's positions [start, end), int64; at most a window of them in sliding layers."""
        if sliding:
            return self._ring(span) * self._window + np.arange(start, end) % self._window
        return slots_of(span.blocks, self._block, end)[start:]

    def _ring(self, span: Span) -> int:
        """The sequence's ring, taken when it first runs."""
        ring = self._ring_of.get(span.request)
        if ring is None:
            if span.start:
                raise RuntimeError(f"request {span.request.request_id} starts behind tokens that its window never saw")
            if not self._free_rings:
                raise RuntimeError(f"more than max_num_seqs = {self._config.max_num_seqs} requests run at once")
            ring = self._ring_of[span.request] = self._free_rings.pop()
        return ring

    def attend(self, layer: int, q: Tensor, latent: Tensor, rope_key: Tensor) -> Tensor:
        """Stores the states of all rows and returns the attention [tokens, heads, v_head_dim] of q [tokens, heads, nope + rope].

        Chunks read before anything is stored: in a ring, a chunk's last tokens take the places of what its first ones see.
        """
        step, store = self._steps[self._sliding[layer]], self._store[layer]
        new = torch.cat([latent, rope_key], dim=-1)
        out = q.new_empty((*q.shape[:2], self._model.config.v_head_dim))
        self._timer.lap(Part.LINEAR)
        for span, reads in zip(self._batch.chunks, step.chunks, strict=True):
            states = torch.cat([store.index_select(0, reads.stored), new[span.rows]])
            out[span.rows] = self._model.expanded(layer, q[span.rows], states, reads.mask)
        if self._batch.chunks:
            self._timer.lap(Part.PREFILL)
        store.index_copy_(0, step.targets, new.index_select(0, step.sources))
        if self._batch.decodes:
            self._timer.lap(Part.LINEAR)
            own_q, own_out = q[self._batch.decode_rows], out[self._batch.decode_rows]
            for run in step.decodes:
                own_out[run.rows] = self._model.absorbed(layer, own_q[run.rows], store[run.slots], run.mask)
            self._timer.lap(Part.DECODE)
        return out

    def release(self, request: Request) -> None:
        """Gives the request's ring back, if it has one."""
        ring = self._ring_of.pop(request, None)
        if ring is not None:
            self._free_rings.append(ring)

    def report(self, _: ReportError) -> None:
        """Nothing is quantized."""

    def _indices(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values.astype(np.int64, copy=False)).to(self.pool.device)


def _check(model: LatentConfig, config: EngineConfig) -> None:
    """Raises ConfigError where settings ask for what states of this model cannot do."""
    if config.kv_dtype != "auto" or config.num_compressed_blocks:
        raise ConfigError(
            f"kv_dtype = {config.kv_dtype} and num_compressed_blocks = {config.num_compressed_blocks} ask for quantized KV, which a "
            "model with latent attention does not have.",
            next_step="Set kv_dtype to auto and num_compressed_blocks to 0.",
        )
    if model.supports_prefix_caching:
        return
    beside = (
        f"{model.window_layers} of the model's {model.num_layers} layers keep a sliding window beside the blocks, without which a "
        "sequence cannot be continued."
    )
    if config.prefix_caching:
        raise ConfigError(
            f"prefix_caching is on, but {beside}",
            next_step="Set prefix_caching to off (kvscope serve --engine prefix_caching=off, kvscope replay --no-prefix-caching).",
        )
    if config.num_host_blocks:
        raise ConfigError(
            f"num_host_blocks is {config.num_host_blocks}, but {beside}", next_step="Set num_host_blocks to 0."
        )


def _causal_mask(tokens: int, context: int, window: int | None) -> Tensor:
    """[tokens, context], true where one of the last `tokens` of `context` positions sees a position: its own and the earlier ones, with
    a window only the latest `window` of these."""
    query, key = torch.arange(context - tokens, context)[:, None], torch.arange(context)
    seen = key <= query
    return seen if window is None else seen & (key > query - window)
