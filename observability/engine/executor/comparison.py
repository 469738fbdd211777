"""Quantized KV against exact KV while the engine serves: one sequence at a time has the exact values of its quantized blocks kept, and on
sampled decode steps its token is run a second time, as a row of the same batch that reads those.

What is compared is this step with stored keys and values against the same step with the values that were rounded. That stored values
were themselves computed from rounded ones is not undone: it would take a run of the whole sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from observability.engine.executor.attention import chunk_attention
from observability.engine.model.llama import ModelConfig
from observability.engine.types import EngineConfig, Request

if TYPE_CHECKING:
    from observability.engine.executor.kv_cache import Batch, Span


class Shadow:
    """Exact copies of some of `count` quantized blocks, at most `most`: [layers, 2, kv_heads, most, block_size, head_dim] in the model's
    own type. A copy lasts until its block is written again, or until room is needed for the sequence that is followed."""

    def __init__(
        self, model: ModelConfig, *, count: int, most: int, block_size: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        shape = (model.num_layers, 2, model.num_kv_heads, most, block_size, model.head_dim)
        self.copies = torch.zeros(shape, device=device, dtype=dtype)  # zeros: memory is taken as slots are first used
        self._slot_of = np.full(count, -1, np.int64)
        self._block_of = np.full(most, -1, np.int64)
        self._used = np.zeros(most, np.int64)  # when a slot was last taken or followed
        self._time = 1

    def slots(self, blocks: np.ndarray) -> np.ndarray | None:
        """Slots of blocks, int64; None unless all have copies."""
        slots = self._slot_of[blocks]
        return slots if (slots >= 0).all() else None

    def follow(self, slots: np.ndarray) -> None:
        """From now on room is never made from these slots, only from those of sequences followed before."""
        self._time += 1
        self._used[slots] = self._time

    def take(self, blocks: np.ndarray) -> np.ndarray | None:
        """Slots for copies of blocks that have none; None, with nothing changed, where the followed sequence leaves too little room."""
        order = np.argsort(np.where(self._block_of < 0, 0, self._used), kind="stable")
        slots = order[: len(blocks)]
        if len(slots) < len(blocks) or (self._used[slots] == self._time)[self._block_of[slots] >= 0].any():
            return None
        self._drop(self._block_of[slots])
        self._slot_of[blocks], self._block_of[slots], self._used[slots] = slots, blocks, self._time
        return slots

    def forget(self, blocks: np.ndarray) -> None:
        """These blocks get other content."""
        self._drop(blocks)

    def _drop(self, blocks: np.ndarray) -> None:
        blocks = blocks[blocks >= 0]
        slots = self._slot_of[blocks]
        self._block_of[slots[slots >= 0]] = -1
        self._slot_of[blocks] = -1

    # -- block_set.Watcher -------------------------------------------------------------------------------------------------

    def copied(self, sources: Tensor, targets: Tensor) -> None:
        """Content went from block to block; a copy goes along, so the block that it came from has none any more."""
        source, target = sources.cpu().numpy(), targets.cpu().numpy()
        slots = self._slot_of[source]
        self._slot_of[source] = -1
        self._block_of[slots[slots >= 0]] = -1
        self._drop(target)
        self._slot_of[target] = slots
        self._block_of[slots[slots >= 0]] = target[slots >= 0]

    def overwritten(self, blocks: Tensor) -> None:
        self._drop(blocks.cpu().numpy())


@dataclass(slots=True)
class Twin:
    """A decode that this step runs twice. `row` is that of the second time."""

    span: Span
    row: int
    slots: Tensor  # shadow slots of its quantized blocks
    layers: dict[int, int]  # where attention is recomputed for the first time's query -> place in `sums`
    sums: Tensor  # float64 [layer groups, 2]: squared error and squared signal of the attention output
    exact: Tensor = field(
        default_factory=lambda: torch.empty(0, dtype=torch.int64)
    )  # slots of its tokens that are not quantized


class Comparison:
    """Chooses the sequence that is followed and the steps that are compared, by seed. `quantized` gives the numbers of a span's quantized
    blocks that were filled before this step, `eligible` whether a sequence has such blocks now or soon."""

    def __init__(
        self,
        config: EngineConfig,
        shadow: Shadow,
        layer_groups: Sequence[np.ndarray],
        *,
        quantized: Callable[[Span], np.ndarray],
        eligible: Callable[[Span], bool],
    ) -> None:
        self.shadow = shadow
        self._groups, self._quantized, self._eligible = layer_groups, quantized, eligible
        self._rate = config.quant_compare_rate
        self._random = np.random.default_rng([config.seed, 1])
        self._followed: Request | None = None
        self.twin: Twin | None = None

    def follows(self, request: Request) -> bool:
        """Whether the exact values of the blocks that this request fills are to be kept."""
        return request is self._followed

    @property
    def followed_blocks(self) -> Sequence[int]:
        """Block numbers of the followed sequence, if any."""
        table = self._followed.table if self._followed is not None else None
        return table.blocks if table is not None else ()

    def keep(self, blocks: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`blocks` are about to be filled, those `wanted` (bool) by the followed sequence: (places in `blocks`, slots for their values).
        A sequence that the shadow cannot hold is followed no longer."""
        self.shadow.forget(blocks)
        places = np.flatnonzero(wanted)
        if places.size:
            slots = self.shadow.take(blocks[places])
            if slots is not None:
                return places, slots
            self._followed = None
        return places[:0], places[:0]

    def choose(self, batch: Batch, row: int) -> Twin | None:
        """Follows a sequence of the batch if none is followed. The decode that is also run in row `row` of this step, if any."""
        self.twin = None
        if self._followed is None:
            for span in (*batch.chunks, *batch.decodes):
                if self._eligible(span) and (slots := self.shadow.slots(self._quantized(span))) is not None:
                    self._followed = span.request
                    self.shadow.follow(slots)
                    break
        for span in batch.decodes:
            if span.request is self._followed:
                self.twin = self._twin(span, row)
        return self.twin

    def _twin(self, span: Span, row: int) -> Twin | None:
        blocks = self._quantized(span)
        if not blocks.size or self._random.random() >= self._rate:
            return None
        slots = self.shadow.slots(blocks)
        if slots is None:  # some came back from elsewhere
            self._followed = None
            return None
        device = self.shadow.copies.device
        layers = {int(self._random.choice(group)): i for i, group in enumerate(self._groups)}
        sums = torch.zeros((len(self._groups), 2), device=device, dtype=torch.float64)
        return Twin(span, row, torch.from_numpy(slots).to(device), layers, sums)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, exact: Tensor, out: Tensor) -> None:
        """Attention of the twin's row, and in sampled layers the error of the first row's output.

        `exact` [2, kv_heads, tokens, head_dim] are the sequence's tokens outside quantized blocks but for the newest. Order does not
        matter to one query: positions are in the keys.
        """
        twin = self.twin
        assert twin is not None
        kept = self.shadow.copies[layer].index_select(2, twin.slots).flatten(2, 3)
        own = torch.stack([k[twin.row], v[twin.row]]).unsqueeze(2)
        kv = torch.cat([kept, exact, own], dim=2)
        out[twin.row] = chunk_attention(q[twin.row : twin.row + 1], kv, None)[0]
        group = twin.layers.get(layer)
        if group is not None:
            row = twin.span.row
            kv[:, :, -1] = torch.stack([k[row], v[row]])
            wanted = chunk_attention(q[row : row + 1], kv, None)[0].float()
            twin.sums[group, 0] += (out[row].float() - wanted).square().sum(dtype=torch.float64)
            twin.sums[group, 1] += wanted.square().sum(dtype=torch.float64)

    def release(self, request: Request) -> None:
        """The request left the running set."""
        if request is self._followed:
            self._followed = None


def divergence(stored: Tensor, exact: Tensor) -> tuple[float, bool]:
    """(KL(exact || stored) in nats, whether the likeliest token is the same) of two rows of logits [vocab_size]."""
    log_p, log_q = exact.double().log_softmax(-1), stored.double().log_softmax(-1)
    nats = float((log_p.exp() * (log_p - log_q)).sum())
    return max(nats, 0.0), bool(stored.argmax() == exact.argmax())  # rounding can put it a hair below 0
