"""KV blocks of one kind as things to move: which tensors hold them, and reading and writing whole blocks, whatever they contain.

A store of executor/ says which block sets it has; block_moves.py moves their blocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from observability.engine.types import Payload


class IntegerForm(Protocol):
    """How a tensor of small integers is laid out in bytes (quantizer.Quantizer)."""

    def to_int8(self, stored: np.ndarray) -> np.ndarray: ...

    def from_int8(self, integers: np.ndarray) -> np.ndarray: ...


@dataclass(frozen=True, slots=True)
class BlockTensor:
    """A tensor whose dimension `axis` counts blocks. `integers` says how quantized integers lie in it; None for floats."""

    tensor: Tensor
    axis: int
    integers: IntegerForm | None = None

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Shape of one block."""
        return (*self.tensor.shape[: self.axis], *self.tensor.shape[self.axis + 1 :])

    @property
    def block_bytes(self) -> int:
        return math.prod(self.block_shape) * self.tensor.element_size()


class Watcher(Protocol):
    """Who has to know what is written to blocks of a set."""

    def copied(self, sources: Tensor, targets: Tensor) -> None: ...

    def overwritten(self, blocks: Tensor) -> None: ...


class BlockSet:
    """Blocks 0..count-1 of one kind, each spread over the same places of several tensors. `kind` names it in errors."""

    def __init__(self, kind: str, tensors: Mapping[str, BlockTensor]) -> None:
        self.kind, self.tensors = kind, dict(tensors)
        first = next(iter(self.tensors.values()))
        self.count = first.tensor.shape[first.axis]
        self.device = first.tensor.device
        self.bytes_per_block = sum(t.block_bytes for t in self.tensors.values())
        self.quantized = any(t.integers is not None for t in self.tensors.values())
        self.watcher: Watcher | None = None

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copies whole blocks; all are read before any is written."""
        for t in self.tensors.values():
            t.tensor.index_copy_(t.axis, targets, t.tensor.index_select(t.axis, sources))
        if self.watcher is not None:
            self.watcher.copied(sources, targets)

    def read(self, blocks: Tensor) -> Tensor:
        """The blocks' bytes, tensor after tensor: uint8 [blocks, bytes_per_block] on the same device."""
        parts = []
        for t in self.tensors.values():
            content = t.tensor.index_select(t.axis, blocks).movedim(t.axis, 0).contiguous()
            parts.append(content.flatten(1).view(torch.uint8))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def write(self, blocks: Tensor, rows: Tensor) -> None:
        """Writes what read() gave to other blocks (or the same)."""
        for t, part in zip(self.tensors.values(), self.split(rows), strict=True):
            content = part.contiguous().view(t.tensor.dtype).view(-1, *t.block_shape)
            t.tensor.index_copy_(t.axis, blocks, content.movedim(0, t.axis))
        if self.watcher is not None:
            self.watcher.overwritten(blocks)

    def split(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Rows of read() by tensor, [blocks, bytes] each."""
        return rows.split([t.block_bytes for t in self.tensors.values()], dim=1)

    def to_payload(self, rows: Tensor) -> Payload:
        """Rows of read(), on the CPU, as arrays [blocks, ...] by tensor: integers as int8, bfloat16 as its bits in uint16."""
        out: Payload = {}
        for (name, t), part in zip(self.tensors.items(), self.split(rows), strict=True):
            content = part.contiguous().view(_numpy_type(t.tensor.dtype)).view(rows.shape[0], *t.block_shape).numpy()
            out[name] = content if t.integers is None else t.integers.to_int8(content)
        return out

    def from_payload(self, payload: Payload, count: int) -> Tensor:
        """The inverse of to_payload. Raises ValueError when names, shapes or types are not those of `count` blocks of this set."""
        if payload.keys() != self.tensors.keys():
            raise ValueError(f"a payload of {self.kind} blocks has {sorted(self.tensors)}, not {sorted(payload)}")
        parts = []
        for name, t in self.tensors.items():
            content = payload[name]
            if t.integers is not None and content.dtype == np.int8 and content.ndim:
                content = t.integers.from_int8(content)
            wanted = torch.empty(0, dtype=_numpy_type(t.tensor.dtype)).numpy().dtype
            if content.shape != (count, *t.block_shape) or content.dtype != wanted:
                raise ValueError(
                    f"{name} of {count} {self.kind} blocks is {wanted} of shape {(count, *t.block_shape)}, "
                    f"not {content.dtype} of shape {content.shape}"
                )
            parts.append(torch.from_numpy(np.ascontiguousarray(content)).flatten(1).view(torch.uint8))
        return torch.cat(parts, dim=1)


def _numpy_type(dtype: torch.dtype) -> torch.dtype:
    return torch.uint16 if dtype == torch.bfloat16 else dtype
