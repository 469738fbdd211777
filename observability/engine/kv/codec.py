"""Lossless packing of quantized KV integers that leave the device, for the host tier and snapshots (see snapshot.py).

The token axis is moved last and the values are cut into groups of 16. Each group is stored in the smaller of two forms:

- *plain*: its values, zigzag-coded to unsigned, in the least number of bits that holds the largest of them;
- *delta*: its first value as a byte, then the differences between neighbours (modulo 256), zigzag-coded and packed likewise.

Where that does not pay for what it says about the groups, as with well-quantized data it often does not, a page of groups is stored
plain with one width. So the size is never more than the values' own width, plus a byte a page and the header.

Bits are stored in planes (bit 0 of all groups, then bit 1, ...), so that zstd, which may follow, finds the skew of the high bits.
The format, little-endian:

    "KVC1" | ndim u8 | token axis u8 | shape u64 x ndim | pages of 16384 groups (the last one shorter)
    page = 1..8, the width of all groups | planes
         | 0 | a nibble a group: 0..7 delta of that width, 8..15 plain of width 1..8 | first values | planes, widest groups first

The last group is filled up with its last value.

Sources: Lemire and Boytsov, "Decoding billions of integers per second through vectorization" (arXiv 1209.2137) for delta and bit
packing by group, the encoding guide of Protocol Buffers for zigzag, Li and Patel, "BitWeaving" (SIGMOD 2013) for bit planes.
"""

from __future__ import annotations

import math
import struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from observability.errors import KvscopeError

_Values = NDArray[np.int8]
_Bytes = NDArray[np.uint8]
_Words = NDArray[np.uint64]

_MAGIC = b"KVC1"
_GROUP = 16  # values: whole bytes of a bit plane
_PAGE = 16384  # groups: 256 KiB of values, so that a page and its intermediates stay in a core's cache
_PLANE_BYTES = _GROUP // 8
_MAX_WIDTH = 8
_GROUPED = 0  # kind of a page whose groups have widths of their own
_FIRST_PLAIN = 8
_MAX_DIMS = 64  # numpy's own limit
_WIDTH_OF_CODE = np.array([*range(8), *range(1, 9)], np.uint8)
_BIT_LENGTH = np.array([value.bit_length() for value in range(256)], np.uint8)
_ONES = np.uint64(0x0101010101010101)  # the lowest bit of each byte
_DISCARD = "Discard it; what it held can be computed again."


class CodecError(KvscopeError):
    """Bytes are no packed KV block, are damaged, or hold more than the caller accepts."""


class _Header(NamedTuple):
    shape: tuple[int, ...]
    axis: int
    size: int  # bytes of the header itself


def encode(values: np.ndarray, *, axis: int = -2) -> bytes:
    """Packs int8 values of any shape; `axis` is the token axis. int4 values are given as int8 in -8..7
    (levels 0..15 of a scheme with a zero point, less 8).

    Raises TypeError for another dtype and numpy's AxisError for an axis that the array lacks.
    """
    if values.dtype != np.int8:
        raise TypeError(f"only int8 values can be packed, not {values.dtype}")
    flat = np.ascontiguousarray(np.moveaxis(values, axis, -1)).reshape(-1)
    parts = [_MAGIC, struct.pack(f"<BB{values.ndim}Q", values.ndim, axis % values.ndim, *values.shape)]
    for start in range(0, flat.size, _PAGE * _GROUP):
        parts += _encode_page(_groups(flat[start : start + _PAGE * _GROUP]))
    return b"".join(parts)


def decode(data: bytes | memoryview, *, max_bytes: int) -> np.ndarray:
    """The array that encode() was given, int8, as a view whose token axis is the fastest in memory.

    Allocates the array and about 2 MiB. Raises CodecError, before it allocates, when the array would have more than `max_bytes`
    bytes or the data cannot be as long as its header says; and when data is truncated, has bytes too many, or is no packed block.
    """
    header = _read_header(data)
    count = math.prod(header.shape)
    groups = -(-count // _GROUP)
    if count > max_bytes:
        raise CodecError(
            f"A packed KV block of shape {header.shape} has {count} bytes, more than the {max_bytes} accepted.",
            next_step=_DISCARD,
        )
    body = np.frombuffer(data, np.uint8)[header.size :]
    if 2 * body.size < 3 * groups:  # the least that a group takes is its nibble and a first value
        raise _truncated()
    flat = np.empty(count, np.int8)
    position = 0
    for first in range(0, groups, _PAGE):
        page, taken = _decode_page(body[position:], min(_PAGE, groups - first))
        part = flat[first * _GROUP : (first + _PAGE) * _GROUP]
        part[:] = page.reshape(-1)[: part.size]
        position += taken
    if position != body.size:
        raise CodecError(f"A packed KV block has {body.size - position} bytes too many.", next_step=_DISCARD)
    moved = [size for dim, size in enumerate(header.shape) if dim != header.axis] + [header.shape[header.axis]]
    return np.moveaxis(flat.reshape(moved), -1, header.axis)


def max_encoded_bytes(shape: tuple[int, ...]) -> int:
    """What encode() of an int8 array of this shape can return at most, in bytes."""
    groups = -(-math.prod(shape) // _GROUP)
    return _header_bytes(len(shape)) + -(-groups // _PAGE) + groups * _GROUP


def _header_bytes(ndim: int) -> int:
    return len(_MAGIC) + 2 + 8 * ndim


def _read_header(data: bytes | memoryview) -> _Header:
    if bytes(data[: len(_MAGIC)]) != _MAGIC:
        raise CodecError("The data is no packed KV block of this format.", next_step=_DISCARD)
    if len(data) < _header_bytes(0):
        raise _truncated()
    ndim, axis = data[4], data[5]
    if not axis < ndim <= _MAX_DIMS:
        raise CodecError(f"A packed KV block claims token axis {axis} of {ndim}.", next_step=_DISCARD)
    size = _header_bytes(ndim)
    if len(data) < size:
        raise _truncated()
    shape = struct.unpack_from(f"<{ndim}Q", data, _header_bytes(0))
    # numpy refuses more than this even where another size is zero
    if math.prod(max(size, 1) for size in shape) > np.iinfo(np.int64).max:
        raise CodecError(f"A packed KV block claims the impossible shape {shape}.", next_step=_DISCARD)
    return _Header(shape, axis, size)


def _truncated() -> CodecError:
    return CodecError("A packed KV block is truncated.", next_step=_DISCARD)


# -- pages -------------------------------------------------------------------------------------------------------------
#
# A group's 16 bytes are handled as two 64-bit words wherever an operation may act on eight bytes at once.


def _groups(flat: _Values) -> _Values:
    """[groups, 16]; a last group that is not full is filled up with its last value, which costs no wider bits."""
    missing = -flat.size % _GROUP
    return (np.pad(flat, (0, missing), mode="edge") if missing else flat).reshape(-1, _GROUP)


def _encode_page(groups: _Values) -> list[bytes]:
    steps = np.empty_like(groups)
    np.subtract(groups.reshape(-1)[1:], groups.reshape(-1)[:-1], out=steps.reshape(-1)[1:])  # wraps modulo 256
    steps[:, 0] = 0
    plain, delta = _zigzag(_words(groups)), _zigzag(_words(steps))
    plain_width, delta_width = np.maximum(_width(plain), 1), _width(delta)
    use_delta = delta_width < plain_width  # one bit less a value saves two bytes, the first value costs one
    widths = np.where(use_delta, delta_width, plain_width)
    uniform = int(plain_width.max())
    if _PLANE_BYTES * uniform * len(groups) <= _grouped_bytes(int(np.count_nonzero(use_delta)), widths):
        return [bytes([uniform]), *_planes(plain, [len(groups)] * uniform)]
    codes = np.where(use_delta, widths, widths + (_FIRST_PLAIN - 1))
    residuals = np.where(use_delta[:, None], delta, plain).take(_widest_first(widths), axis=0)
    return [
        bytes([_GROUPED]),
        _pack_nibbles(codes).tobytes(),
        groups[use_delta, 0].tobytes(),
        *_planes(residuals, _num_wider(widths)),
    ]


def _decode_page(body: _Bytes, count: int) -> tuple[_Values, int]:
    """([count, 16] values, bytes of `body` that they took)."""
    if not body.size:
        raise _truncated()
    kind, body = int(body[0]), body[1:]
    if kind > _MAX_WIDTH:
        raise CodecError(f"A packed KV block has a page of unknown kind {kind}.", next_step=_DISCARD)
    if kind != _GROUPED:
        size = _PLANE_BYTES * kind * count
        if body.size < size:
            raise _truncated()
        return _bytes(_unzigzag(_read_planes(body, [count] * kind, count))).view(np.int8), 1 + size
    position = -(-count // 2)
    if body.size < position:
        raise _truncated()
    codes = _unpack_nibbles(body[:position], count)
    delta_groups, widths = np.flatnonzero(codes < _FIRST_PLAIN), _WIDTH_OF_CODE[codes]
    size = _grouped_bytes(delta_groups.size, widths)
    if body.size < size:
        raise _truncated()
    first_values = body[position : position + delta_groups.size].view(np.int8)
    residuals = _read_planes(body[position + delta_groups.size :], _num_wider(widths), count)
    words = np.empty_like(residuals)
    words[_widest_first(widths)] = _unzigzag(residuals)
    values = _bytes(words.take(delta_groups, axis=0)).view(np.int8)
    values[:, 0] = first_values
    for i in range(1, _GROUP):
        values[:, i] += values[:, i - 1]
    words[delta_groups] = _words(values)
    return _bytes(words).view(np.int8), 1 + size


def _grouped_bytes(num_delta: int, widths: _Bytes) -> int:
    """Bytes of a page of groups of these widths, `num_delta` of them delta, without the byte that says its kind."""
    return -(-widths.size // 2) + num_delta + _PLANE_BYTES * int(widths.sum(dtype=np.int64))


def _planes(residuals: _Words, num_wider: list[int]) -> list[bytes]:
    """Bit b of the first num_wider[b] groups, for each b."""
    bits = [_ONES << np.uint64(bit) for bit in range(len(num_wider))]
    return [np.packbits(_bytes(residuals[:n] & bit)).tobytes() for n, bit in zip(num_wider, bits, strict=True)]


def _read_planes(body: _Bytes, num_wider: list[int], count: int) -> _Words:
    """What _planes() was given, [count, 2], from the start of `body`, which must be long enough."""
    residuals = np.zeros((count, 2), np.uint64)
    position = 0
    for bit, wider in enumerate(num_wider):
        packed = body[position : position + _PLANE_BYTES * wider]
        residuals[:wider] |= _words(np.unpackbits(packed).reshape(-1, _GROUP)) << np.uint64(bit)
        position += packed.size
    return residuals


def _words(groups: _Values | _Bytes) -> _Words:
    return groups.view(np.uint64)


def _bytes(words: _Words) -> _Bytes:
    return words.view(np.uint8)


def _zigzag(words: _Words) -> _Words:
    """In each byte: 0, -1, 1, -2, ... become 0, 1, 2, 3, ..."""
    signs = (words >> np.uint64(7)) & _ONES
    return ((words << np.uint64(1)) & ~_ONES) ^ (signs * np.uint64(0xFF))


def _unzigzag(words: _Words) -> _Words:
    return ((words & ~_ONES) >> np.uint64(1)) ^ ((words & _ONES) * np.uint64(0xFF))


def _width(words: _Words) -> _Bytes:
    """Bits that the largest of each group's bytes needs, [groups]: those of the OR of all 16."""
    folded = words[:, 0] | words[:, 1]
    for shift in (32, 16, 8):
        folded |= folded >> np.uint64(shift)
    widths: _Bytes = _BIT_LENGTH[folded & np.uint64(0xFF)]
    return widths


def _widest_first(widths: _Bytes) -> NDArray[np.intp]:
    """Order of the groups in the bit planes, so that those that have a bit b come before those that do not."""
    return np.argsort(8 - widths, kind="stable")


def _num_wider(widths: _Bytes) -> list[int]:
    """How many groups are wider than 0, 1, 2, ... bits, as long as there are any."""
    at_most = np.cumsum(np.bincount(widths))
    return [widths.size - int(narrow) for narrow in at_most[:-1]]


def _pack_nibbles(codes: _Bytes) -> _Bytes:
    """Two codes a byte, the earlier one in the low half; an odd last one is alone."""
    packed = codes[::2].copy()
    packed[: codes.size // 2] |= codes[1::2] << 4
    return packed


def _unpack_nibbles(packed: _Bytes, count: int) -> _Bytes:
    return np.stack([packed & 0xF, packed >> 4], axis=1).reshape(-1)[:count]
