"""A session's KV prefix as one bytes object, so that another replica can go on with the session or know why it must not.

    magic, 8 bytes | blake2b of all that follows, 16 bytes | length of the envelope, u32 little-endian
    | envelope (snapshot.proto) | one zstd frame an array, in the envelope's order

Arrays stand outside the envelope because a protobuf message ends at 2 GiB, which the KV of one long session passes. The checksum
finds damage; it is no signature, so what it covers is bounded and checked all the same.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import zstandard
from google.protobuf.message import DecodeError

from observability.engine.kv import codec
from observability.engine.kv.snapshot_pb2 import CODEC, RAW, SHUFFLED, Array, Encoding, Envelope
from observability.errors import KvscopeError

VERSION = 1
MAX_ENVELOPE_BYTES = 1 << 20  # all but the arrays; bounds what parsing a hostile one can cost

#: What of a snapshot does not fit. "content" is what no writer of this version makes.
Part = Literal["content", "checksum", "version", "size", "model", "fingerprint", "kv_scheme", "block_size"]

_MAGIC = b"KVSNAP\r\n"
_FRAME = struct.Struct("<8s16sI")
_COVERED = len(_MAGIC) + 16  # the checksum covers everything from here
_ZSTD_LEVEL = 3
_MAX_DIMS = 64  # numpy's own limit
_RECOMPUTE = "Compute the prefix again from its tokens."

#: numpy has no bfloat16; its bits travel as uint16, which stands for nothing else here.
_DTYPE_OF: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
    "int32": np.dtype("<i4"),
    "int8": np.dtype("i1"),
    "uint8": np.dtype("u1"),
}
_NAME_OF = {dtype: name for name, dtype in _DTYPE_OF.items()}


class SnapshotError(KvscopeError):
    """A snapshot is refused; `part` says which part of it does not fit."""

    def __init__(self, reason: str, *, part: Part, next_step: str = _RECOMPUTE) -> None:
        super().__init__(reason, next_step=next_step)
        self.part: Part = part


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """KV of `tokens`, int32 [tokens], and of whose making it is. Raises SnapshotError when its parts contradict each other.

    Tensors are [blocks, ...] with ceil(tokens / block_size) blocks: float32, float16, uint16 (the bits of bfloat16), int32, uint8,
    or int8 [blocks, ..., tokens, channels]. Rows of the last block that hold no token travel as they are. `fingerprint` tells
    weights and numerics apart that share the model's name.
    """

    model: str
    fingerprint: str
    kv_scheme: str
    block_size: int
    tokens: np.ndarray
    metadata: dict[str, str]
    tensors: dict[str, np.ndarray]

    def __post_init__(self) -> None:
        if not 1 <= self.block_size < 1 << 31:
            raise SnapshotError(f"A snapshot has a block size of {self.block_size} tokens.", part="content")
        if self.tokens.ndim != 1 or self.tokens.dtype != np.int32:
            raise SnapshotError(
                f"A snapshot's tokens are {self.tokens.dtype} of shape {self.tokens.shape}, not int32 [tokens].",
                part="content",
            )
        for name, tensor in self.tensors.items():
            if tensor.dtype.newbyteorder("<") not in _NAME_OF:
                raise SnapshotError(
                    f"Snapshot tensor {name!r} is {tensor.dtype}, which the format does not hold.", part="content"
                )
            if tensor.shape[:1] != (self.num_blocks,):
                raise SnapshotError(
                    f"Snapshot tensor {name!r} has shape {tensor.shape}; its first axis must be the {self.num_blocks} blocks that "
                    f"hold {len(self.tokens)} tokens.",
                    part="content",
                )

    @property
    def num_blocks(self) -> int:
        return -(-len(self.tokens) // self.block_size)


def dump(snapshot: Snapshot) -> bytes:
    """The snapshot's bytes; load() gives every element back bit by bit.

    Raises SnapshotError when names and metadata together pass MAX_ENVELOPE_BYTES or are no Unicode text.
    """
    tokens, frame = _pack("tokens", snapshot.tokens)
    packed = [_pack(name, tensor) for name, tensor in snapshot.tensors.items()]
    try:
        envelope = Envelope(
            version=VERSION,
            model=snapshot.model,
            fingerprint=snapshot.fingerprint,
            kv_scheme=snapshot.kv_scheme,
            block_size=snapshot.block_size,
            metadata=snapshot.metadata,
            tokens=tokens,
            tensors=[array for array, _ in packed],
        ).SerializeToString(deterministic=True)
    except UnicodeError as error:
        raise SnapshotError(
            f"A name or metadata entry of a snapshot is no Unicode text: {error}.", part="content"
        ) from error
    if len(envelope) > MAX_ENVELOPE_BYTES:
        raise SnapshotError(
            f"Names and metadata of a snapshot take {len(envelope)} bytes, more than {MAX_ENVELOPE_BYTES}.",
            part="size",
            next_step="Give less metadata.",
        )
    parts = [struct.pack("<I", len(envelope)), envelope, frame, *(frame for _, frame in packed)]
    return b"".join([_MAGIC, _checksum(parts), *parts])


def load(data: bytes, *, max_bytes: int) -> Snapshot:
    """The snapshot that dump() was given, if all its arrays together have no more than `max_bytes` bytes.

    Raises SnapshotError when it is damaged in any byte, of a newer version, too large or malformed. Memory is bounded whatever the
    data says: the arrays, the largest of them once more while it is unpacked, and some tens of MiB for the envelope.
    """
    if len(data) < _FRAME.size or data[: len(_MAGIC)] != _MAGIC:
        raise SnapshotError("The data is no KV snapshot.", part="content")
    _, checksum, envelope_bytes = _FRAME.unpack_from(data)
    view = memoryview(data)
    if _checksum([view[_COVERED:]]) != checksum:
        raise SnapshotError("The snapshot is damaged: its checksum does not fit.", part="checksum")
    if envelope_bytes > MAX_ENVELOPE_BYTES:
        raise SnapshotError(f"The snapshot's envelope claims {envelope_bytes} bytes.", part="size")
    payload = _FRAME.size + envelope_bytes
    try:
        envelope = Envelope.FromString(data[_FRAME.size : payload])
    except DecodeError as error:
        raise SnapshotError(f"The snapshot's envelope cannot be read: {error}.", part="content") from error
    if envelope.version != VERSION:
        raise SnapshotError(
            f"The snapshot is of format version {envelope.version}; this kvscope reads version {VERSION}.",
            part="version",
            next_step="Run the same kvscope on all replicas, or compute the prefix again from its tokens.",
        )
    arrays = [envelope.tokens, *envelope.tensors]
    shapes = [_checked_shape(array) for array in arrays]
    total = sum(_num_bytes(array, shape) for array, shape in zip(arrays, shapes, strict=True))
    if total > max_bytes:
        raise SnapshotError(f"The snapshot holds {total} bytes, more than the {max_bytes} accepted.", part="size")
    frames = _frames(view[payload:], arrays)
    tokens, *tensors = [_unpack(*item) for item in zip(arrays, shapes, frames, strict=True)]
    names = [array.name for array in envelope.tensors]
    if len(set(names)) < len(names):
        raise SnapshotError("The snapshot holds two tensors of one name.", part="content")
    return Snapshot(
        model=envelope.model,
        fingerprint=envelope.fingerprint,
        kv_scheme=envelope.kv_scheme,
        block_size=envelope.block_size,
        tokens=tokens,
        metadata=dict(envelope.metadata),
        tensors=dict(zip(names, tensors, strict=True)),
    )


def check(snapshot: Snapshot, *, model: str, fingerprint: str, kv_scheme: str, block_size: int) -> None:
    """Raises SnapshotError, naming the first part that differs, unless a replica of these settings may use the snapshot."""
    wanted: tuple[tuple[Part, str, str | int, str | int], ...] = (
        ("model", "model", snapshot.model, model),
        ("fingerprint", "model fingerprint", snapshot.fingerprint, fingerprint),
        ("kv_scheme", "KV scheme", snapshot.kv_scheme, kv_scheme),
        ("block_size", "block size", snapshot.block_size, block_size),
    )
    for part, noun, found, own in wanted:
        if found != own:
            raise SnapshotError(
                f"The snapshot was made with {noun} {found}; this replica runs {own}.",
                part=part,
                next_step="Resume on a replica with the same settings, or compute the prefix again from its tokens.",
            )


def _checksum(parts: list[bytes] | list[memoryview]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.digest()


# -- arrays ------------------------------------------------------------------------------------------------------------


def _pack(name: str, array: np.ndarray) -> tuple[Array, bytes]:
    """(description, zstd frame) in the encoding that suits the type.

    int8 is tried both ways: on some tensors (values quantized per token) zstd does better on the bytes than on the codec's planes.
    """
    dtype = array.dtype.newbyteorder("<")
    array = np.ascontiguousarray(array, dtype)
    content: dict[Encoding, bytes | memoryview]
    if dtype == np.int8:
        content = {CODEC: codec.encode(array, axis=_token_axis(array.ndim)), RAW: array.tobytes()}
    elif dtype.itemsize == 1:
        content = {RAW: array.tobytes()}
    else:
        content = {SHUFFLED: array.reshape(-1).view(np.uint8).reshape(-1, dtype.itemsize).T.tobytes()}
    compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL)
    frames = {encoding: compressor.compress(plain) for encoding, plain in content.items()}
    encoding = min(frames, key=lambda encoding: len(frames[encoding]))
    frame = frames[encoding]
    return Array(
        name=name, dtype=_NAME_OF[dtype], shape=array.shape, encoding=encoding, compressed_bytes=len(frame)
    ), frame


def _token_axis(ndim: int) -> int:
    return max(ndim - 2, 0)


def _checked_shape(array: Array) -> tuple[int, ...]:
    shape = tuple(array.shape)
    if array.dtype not in _DTYPE_OF:
        raise SnapshotError(f"Snapshot tensor {array.name!r} is of unknown type {array.dtype!r}.", part="content")
    # numpy refuses more than this even where another size is zero
    largest = math.prod(max(size, 1) for size in shape) * _DTYPE_OF[array.dtype].itemsize
    if not 1 <= len(shape) <= _MAX_DIMS or largest > np.iinfo(np.int64).max:
        raise SnapshotError(f"Snapshot tensor {array.name!r} has the impossible shape {shape}.", part="content")
    return shape


def _num_bytes(array: Array, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * _DTYPE_OF[array.dtype].itemsize


def _frames(payload: memoryview, arrays: list[Array]) -> Iterator[memoryview]:
    if sum(array.compressed_bytes for array in arrays) != len(payload):
        raise SnapshotError("The snapshot's arrays do not end where its data ends.", part="content")
    start = 0
    for array in arrays:
        yield payload[start : start + array.compressed_bytes]
        start += array.compressed_bytes


def _unpack(array: Array, shape: tuple[int, ...], frame: memoryview) -> np.ndarray:
    """The array that _pack() was given. Allocates nothing before the frame's own claim of its size is known to fit."""
    dtype, size = _DTYPE_OF[array.dtype], _num_bytes(array, shape)
    packed = array.encoding == CODEC
    if packed and dtype != np.int8:
        raise SnapshotError(f"Snapshot tensor {array.name!r} is {array.dtype}, but packed as int8.", part="content")
    try:
        claimed = zstandard.frame_content_size(frame)  # -1 where the frame does not say
        if not (0 <= claimed <= codec.max_encoded_bytes(shape) if packed else claimed == size):
            raise SnapshotError(
                f"Snapshot tensor {array.name!r} unpacks to {claimed} bytes, which does not fit its shape.", part="size"
            )
        plain = zstandard.ZstdDecompressor().decompress(frame, max_output_size=claimed, allow_extra_data=False)
        if packed:
            values = codec.decode(plain, max_bytes=size)
            if values.shape != shape:
                raise SnapshotError(f"Snapshot tensor {array.name!r} is packed in another shape.", part="content")
            return values
    except (zstandard.ZstdError, codec.CodecError) as error:
        reason = error.reason if isinstance(error, codec.CodecError) else f"{error}."
        raise SnapshotError(f"Snapshot tensor {array.name!r} cannot be unpacked: {reason}", part="content") from error
    if array.encoding == SHUFFLED:
        rows = np.frombuffer(plain, np.uint8).reshape(dtype.itemsize, -1)
        elements = np.ascontiguousarray(rows.T).reshape(-1).view(dtype)
    elif array.encoding == RAW:
        elements = np.frombuffer(bytearray(plain), dtype)
    else:
        raise SnapshotError(f"Snapshot tensor {array.name!r} has unknown encoding {array.encoding}.", part="content")
    return elements.reshape(shape).astype(dtype.newbyteorder("="), copy=False)
