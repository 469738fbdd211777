"""Rounding of keys and values to few bits, and the tensors that hold quantized blocks. kv_cache.py and compressed_kv.py decide which
blocks of a sequence are quantized and when they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from observability.engine.executor.block_set import BlockSet, BlockTensor
from observability.engine.model.llama import ModelConfig
from observability.engine.types import Scheme

#: report(tensor index in catalog.TENSORS, layer group, scheme, squared error, squared signal, largest |error|, elements)
ReportError = Callable[[int, str, str, float, float, float, int], None]
_LAYER_GROUPS = 4
#: The dimension of [kv_heads, blocks, block_size, head_dim] that shares a scale, by tensor: tokens for keys, channels for values.
_SHARED_DIM = (2, 3)


@dataclass(frozen=True, slots=True)
class Quantizer:
    """Evenly spaced levels between the extremes of the numbers that share a scale.

    int8 is symmetric: x is stored as round(x / scale), scale = largest |x| / 127. int4 has a zero point: x is stored as
    round((x - zero) / scale), zero = smallest x, scale = (largest x - zero) / 15, which halves the keys' error (of SmolLM2-135M on
    English text: relative RMS 0.030 against 0.061; values 0.097 against 0.123). Either way |error| <= scale / 2, beside the rounding of
    float32 numbers as large as x.
    """

    scheme: Scheme

    @property
    def grid_rows(self) -> int:
        """Numbers that describe the levels: the scale, and the zero point where the scheme has one."""
        return 1 if self.scheme == "int8" else 2

    def stored_width(self, head_dim: int) -> int:
        """Bytes in which the integers of one token and head are stored."""
        return head_dim if self.scheme == "int8" else head_dim // 2

    def grid(self, exact: Tensor, dim: int) -> Tensor:
        """float32 [grid_rows, ...]: scale (and zero point) of the numbers that differ in `dim` alone, which becomes of size 1."""
        if self.scheme == "int8":
            return (exact.abs().amax(dim, keepdim=True) / 127).unsqueeze(0)
        zero = exact.amin(dim, keepdim=True)
        return torch.stack([(exact.amax(dim, keepdim=True) - zero) / 15, zero])

    def round(self, exact: Tensor, grid: Tensor) -> Tensor:
        """The level of each number as a whole float32: -127..127 for int8, 0..15 for int4."""
        scale = grid[0].clamp_min(torch.finfo(torch.float32).tiny)  # all numbers equal: level 0
        return (exact / scale).round_() if self.scheme == "int8" else ((exact - grid[1]) / scale).round_().clamp_(0, 15)

    def store(self, levels: Tensor) -> Tensor:
        """Levels [..., head_dim] as they are stored, [..., stored_width]: int8, or the second half's int4 above the first half's."""
        if self.scheme == "int8":
            return levels.to(torch.int8)
        low, high = levels.to(torch.uint8).chunk(2, dim=-1)
        return low | (high << 4)

    def dequantize(self, stored: Tensor, grid: Tensor, into: Tensor) -> None:
        """Writes the numbers that `stored` [..., stored_width] stands for to `into` [..., head_dim], of any float type."""
        # A plain conversion and one product in place: 4 times as fast as a product of mixed types.
        if self.scheme == "int8":
            into.copy_(stored).mul_(grid[0])
            return
        half = stored.shape[-1]
        into[..., :half].copy_(stored & 15)
        into[..., half:].copy_(stored >> 4)
        torch.addcmul(grid[1], into, grid[0], out=into)

    def to_int8(self, stored: np.ndarray) -> np.ndarray:
        """Stored integers as one int8 a number (int4: -8..7), in which form codec.py packs them and snapshots carry them."""
        if self.scheme == "int8":
            return stored
        return np.concatenate([stored & 15, stored >> 4], axis=-1).view(np.int8) - np.int8(8)

    def from_int8(self, integers: np.ndarray) -> np.ndarray:
        """The inverse of to_int8. Raises ValueError for integers that the scheme does not have."""
        if self.scheme == "int8":
            return integers
        if integers.size and not (integers.min() >= -8 and integers.max() <= 7):
            raise ValueError("int4 integers lie in -8..7")
        low, high = np.split((integers + np.int8(8)).view(np.uint8), 2, axis=-1)
        return low | (high << 4)


#: keep(blocks that are about to be filled) -> (places among them, slots of a shadow that takes their exact values)
Keep = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True, slots=True)
class Fill:
    """Blocks that are about to be quantized, which of them are measured, and which of them stay known exactly."""

    blocks: Tensor  # [blocks]
    chosen: Tensor  # indices in `blocks`
    exact: Tensor  # of the chosen ones, as written: [layers, 2, kv_heads, chosen, block_size, head_dim]
    kept: Tensor  # indices in `blocks`
    slots: Tensor  # of the shadow, by `kept`


class QuantizedBlocks:
    """`count` blocks of one scheme. Keys are scaled per channel over the block's tokens, values per token, as KIVI found best
    (arXiv 2402.02750): key channels differ by orders of magnitude and stay so from token to token.

    A block is written whole, layer by layer: fill() once, then write() for each layer. report() hands on what was measured since.
    `shadow` [layers, 2, kv_heads, slots, block_size, head_dim], where there is one, takes exact values (comparison.py).
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        scheme: Scheme,
        count: int,
        block_size: int,
        device: torch.device,
        sample_rate: float,
        seed: int,
    ) -> None:
        layers, kv_heads, width = model.num_layers, model.num_kv_heads, model.head_dim
        self.quantizer = quantizer = Quantizer(scheme)
        self._device, self._block = device, block_size
        stored_as = torch.int8 if scheme == "int8" else torch.uint8
        # zeros: memory is taken as blocks are first used
        self.integers = torch.zeros(
            (layers, 2, kv_heads, count, block_size, quantizer.stored_width(width)), device=device, dtype=stored_as
        )
        rows = quantizer.grid_rows
        self.key_grid = torch.zeros((layers, rows, kv_heads, count, width), device=device)
        self.value_grid = torch.zeros((layers, rows, kv_heads, count, block_size), device=device)
        self.block_set = BlockSet(
            scheme,
            {
                "key_grid": BlockTensor(self.key_grid, 3),
                "value_grid": BlockTensor(self.value_grid, 3),
                "integers": BlockTensor(self.integers, 3, quantizer),
            },
        )
        self._sample_rate, self._random = sample_rate, np.random.default_rng(seed)
        self.groups = groups = np.array_split(np.arange(layers), min(_LAYER_GROUPS, layers))
        self.layer_groups = [f"{g[0]:02d}-{g[-1]:02d}" for g in groups]
        self._layers = layers
        self._elements = [len(g) * kv_heads * block_size * width for g in groups]
        self._measured: list[Fill] = []
        self.shadow: Tensor | None = None

    def fill(self, blocks: np.ndarray | Sequence[int], keep: Keep | None = None) -> Fill:
        """Announces that blocks will be written, draws those whose error is measured and asks which ones to keep in the shadow."""
        chosen = np.flatnonzero(self._random.random(len(blocks)) < self._sample_rate)
        layers, _, kv_heads, _, size, _ = self.integers.shape
        exact = torch.empty((layers, 2, kv_heads, len(chosen), size, self.key_grid.shape[-1]), device=self._device)
        kept, slots = keep(np.asarray(blocks, np.int64)) if keep is not None else ((), ())
        return Fill(self._indices(blocks), self._indices(chosen), exact, self._indices(kept), self._indices(slots))

    def write(self, layer: int, exact: Tensor, fill: Fill) -> None:
        """Stores whole blocks [2, kv_heads, blocks, block_size, head_dim], and notes the chosen ones for report()."""
        if not fill.blocks.shape[0]:
            return
        if fill.kept.shape[0]:
            assert self.shadow is not None
            self.shadow[layer].index_copy_(2, fill.slots, exact.index_select(2, fill.kept))
        exact = exact.float()
        quantizer = self.quantizer
        for tensor, grids in enumerate((self.key_grid, self.value_grid)):
            dim = _SHARED_DIM[tensor]
            grid = quantizer.grid(exact[tensor], dim)
            levels = quantizer.round(exact[tensor], grid)
            stored = quantizer.store(levels)
            self.integers[layer, tensor].index_copy_(1, fill.blocks, stored)
            grids[layer].index_copy_(2, fill.blocks, grid.squeeze(dim + 1))
        if fill.chosen.shape[0]:
            self.note(layer, exact, fill)

    def note(self, layer: int, exact: Tensor, fill: Fill) -> None:
        """Keeps the exact values of the chosen blocks until report()."""
        torch.index_select(exact, 2, fill.chosen, out=fill.exact[layer])
        if layer == self._layers - 1:  # written in every layer
            self._measured.append(fill)

    def read(self, layer: int, blocks: Tensor, into: Tensor) -> None:
        """Writes the blocks' tokens, dequantized, to `into` [2, kv_heads, blocks x block_size, head_dim]."""
        if not blocks.shape[0]:
            return
        into = into.unflatten(2, (blocks.shape[0], self._block))
        for tensor, grids in enumerate((self.key_grid, self.value_grid)):
            stored = self.integers[layer, tensor].index_select(1, blocks)
            grid = grids[layer].index_select(2, blocks).unsqueeze(_SHARED_DIM[tensor] + 1)
            self.quantizer.dequantize(stored, grid, into[tensor])

    def report(self, report: ReportError) -> None:
        """Hands on the error of each block measured since the last report: one call a block, tensor and layer group. The blocks must
        not have been written again."""
        measured, self._measured = self._measured, []
        for fill in measured:
            blocks = fill.blocks.index_select(0, fill.chosen)
            for tensor, grids in enumerate((self.key_grid, self.value_grid)):
                exact, read = fill.exact[:, tensor], torch.empty_like(fill.exact[:, tensor])
                stored = self.integers[:, tensor].index_select(2, blocks)
                grid = grids.index_select(3, blocks).transpose(0, 1).unsqueeze(_SHARED_DIM[tensor] + 2)
                self.quantizer.dequantize(stored, grid, read)
                error = read.sub_(exact)
                inside = (1, 3, 4)  # all but layers and blocks
                sums = torch.stack([x.square().sum(inside, dtype=torch.float64) for x in (error, exact)])
                largest = error.abs_().amax(inside).cpu().numpy()
                squares = sums.cpu().numpy()
                for layers, name, elements in zip(self.groups, self.layer_groups, self._elements, strict=True):
                    error_of, signal_of = squares[:, layers].sum(1).tolist()
                    maxima = largest[layers].max(0).tolist()
                    for block in zip(error_of, signal_of, maxima, strict=True):
                        report(tensor, name, self.quantizer.scheme, *block, elements)

    def _indices(self, values: np.ndarray | Sequence[int]) -> Tensor:
        return torch.from_numpy(np.asarray(values, np.int64)).to(self._device)
