"""Reads a GGUF container: metadata and where each tensor lies. Bounded, so that a broken file is an error and not a hang.

The format is specified in ggml's docs/gguf.md. The `gguf` package's own reader makes an array object for every string of the
vocabulary (4 s for SmolLM2 where this takes 0.1 s) and loops over lengths a broken file claims; its dequantization is used.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from observability.errors import ModelError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: `shape` outermost dimension first (GGUF stores it reversed), bytes [offset, offset + size) of the file."""

    shape: tuple[int, ...]
    type: gguf.GGMLQuantizationType
    offset: int
    size: int


class GGUFFile:
    """A little-endian GGUF file of version 2 or 3. `metadata` holds every key; `tensors` the table of contents.

    Raises ModelError when the file is no GGUF file, is cut short, or contradicts itself.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._data: np.ndarray = np.memmap(path, mode="r")
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise ModelError(f"{path} cannot be read: {error}.", next_step="Give the path of a GGUF file.") from error
        self._at = 0
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError, _BrokenError) as error:
            raise self.broken(f"{error} (at byte {self._at} of {self._data.size})") from error

    def broken(self, why: str) -> ModelError:
        """The error for a file that is cut short or contradicts itself."""
        return ModelError(
            f"{self.path} is not a whole GGUF file: {why}.", next_step="Fetch the file again and compare its size."
        )

    def tensor(self, name: str) -> np.ndarray:
        """The tensor dequantized to float32, outermost dimension first."""
        info = self.tensors[name]
        raw = self._data[info.offset : info.offset + info.size]
        try:
            if info.type == gguf.GGMLQuantizationType.F32:
                return np.array(raw.view(np.float32).reshape(info.shape))
            if info.type == gguf.GGMLQuantizationType.F16:
                return raw.view(np.float16).reshape(info.shape).astype(np.float32)
            rows = raw.reshape(*info.shape[:-1], -1)
            return gguf.quants.dequantize(rows, info.type).reshape(info.shape)
        except NotImplementedError as error:
            raise ModelError(
                f"{self.path}: tensor {name} is stored as {info.type.name}, which cannot be dequantized here.",
                next_step="Use a file with F32, F16, BF16, Q4_0, Q4_1, Q5, Q8_0 or K-quant weights.",
            ) from error

    # -- header ------------------------------------------------------------------------------------------------------

    def _read_header(self) -> None:
        if self._take(4) != b"GGUF":
            raise ModelError(
                f"{self.path} is not a GGUF file: it does not begin with `GGUF`.", next_step="Give a .gguf file."
            )
        version, tensors, pairs = self._unpack("<IQQ")
        if version not in (2, 3):
            raise _BrokenError(f"version {version} is not known (2 and 3 are; a big-endian file looks so too)")
        self.metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = self._string()
            (kind,) = self._unpack("<I")
            self.metadata[key] = self._value(kind)
        found = [self._tensor_entry() for _ in range(tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise _BrokenError(f"alignment {alignment!r} is not a positive number")
        start = -(-self._at // alignment) * alignment
        self.tensors: dict[str, TensorInfo] = {}
        for name, shape, kind, offset in found:
            try:
                kind = gguf.GGMLQuantizationType(kind)
            except ValueError as error:
                raise _BrokenError(f"tensor {name} has the unknown type {kind}") from error
            block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
            elements = math.prod(shape)
            if not shape or shape[-1] % block:
                raise _BrokenError(f"tensor {name} of shape {shape} is not made of whole {kind.name} blocks")
            size = elements // block * block_bytes
            if start + offset + size > self._data.size:
                raise _BrokenError(f"tensor {name} ends at byte {start + offset + size}, past the end of the file")
            if name in self.tensors:
                raise _BrokenError(f"tensor {name} is listed twice")
            self.tensors[name] = TensorInfo(shape, kind, start + offset, size)

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (dimensions,) = self._unpack("<I")
        if dimensions > 8:
            raise _BrokenError(f"tensor {name} claims {dimensions} dimensions")
        shape = self._unpack(f"<{dimensions}Q")
        kind, offset = self._unpack("<IQ")
        return name, tuple(reversed(shape)), kind, offset

    def _take(self, size: int) -> bytes:
        end = self._at + size
        if end > self._data.size:
            raise _BrokenError(f"{size} bytes are announced and {self._data.size - self._at} are left")
        piece = self._data[self._at : end].tobytes()
        self._at = end
        return piece

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack(layout, self._take(struct.calcsize(layout)))

    def _string(self) -> str:
        (size,) = self._unpack("<Q")
        return self._take(size).decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._unpack("<" + _SCALARS[kind])[0]
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise _BrokenError(f"metadata of the unknown type {kind}")
        item, count = self._unpack("<IQ")
        if item in _SCALARS:
            return np.frombuffer(self._take(count * struct.calcsize(_SCALARS[item])), "<" + _SCALARS[item]).tolist()
        if item != _STRING:
            raise _BrokenError(f"metadata array of the unsupported type {item}")
        if count * 8 > self._data.size - self._at:
            raise _BrokenError(f"an array of {count} strings is announced")
        return self._strings(count)

    def _strings(self, count: int) -> list[str]:
        # the vocabulary: one pass over one buffer, since a call per string would cost seconds
        rest = memoryview(self._data)[self._at :]  # type: ignore[arg-type]
        texts, at, size_of = [], 0, struct.Struct("<Q").unpack_from
        for _ in range(count):
            (size,) = size_of(rest, at)
            at += 8 + size
            if at > len(rest):
                raise _BrokenError(f"a string of {size} bytes is announced")
            texts.append(str(rest[at - size : at], "utf-8"))
        self._at += at
        return texts


class _BrokenError(Exception):
    """The file contradicts itself; GGUFFile turns it into a ModelError with the path and the position."""
