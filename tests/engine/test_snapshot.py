"""Snapshots of a session's KV: bit-exact, refused when anything is damaged or does not fit, harmless whoever wrote them."""

from __future__ import annotations

import hashlib
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zstandard
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from observability.engine.kv import codec, snapshot_pb2
from observability.engine.kv.snapshot import MAX_ENVELOPE_BYTES, VERSION, Snapshot, SnapshotError, check, dump, load
from observability.engine.kv.snapshot_pb2 import CODEC, RAW, SHUFFLED, Envelope

LIMIT = 1 << 20
DTYPES = (np.float32, np.float16, np.uint16, np.int32, np.int8, np.uint8)
FITS = {"model": "smollm2-135m", "fingerprint": "a1b2", "kv_scheme": "int8", "block_size": 16}


def make(**fields: object) -> Snapshot:
    """40 tokens in 3 blocks of 16: quantized keys and values with their scales."""
    random = np.random.default_rng(0)
    walk = np.cumsum(random.integers(-2, 3, (3, 2, 16, 8)), axis=2)
    values: dict[str, object] = {
        **FITS,
        "tokens": random.integers(0, 49152, 40, np.int32),
        "metadata": {"session_id": "s-1", "tenant": "ü"},
        "tensors": {"keys": walk.astype(np.int8), "key_scales": random.random((3, 2, 8), np.float32)},
    }
    return Snapshot(**{**values, **fields})  # type: ignore[arg-type]


def assert_same(left: Snapshot, right: Snapshot) -> None:
    """Equal in every bit: arrays are compared by their bytes, so that two NaN differ when their bits do."""
    for name in ("model", "fingerprint", "kv_scheme", "block_size", "metadata"):
        assert getattr(left, name) == getattr(right, name)
    assert left.tensors.keys() == right.tensors.keys()
    for a, b in [(left.tokens, right.tokens), *((left.tensors[n], right.tensors[n]) for n in left.tensors)]:
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    block_size = draw(st.integers(1, 20))
    tokens = draw(hnp.arrays(np.int32, st.integers(0, 60)))
    blocks = -(-len(tokens) // block_size)
    rest = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=6)
    tensor = st.sampled_from(DTYPES).flatmap(
        # Drawn as bytes, so that floats take every bit pattern there is.
        lambda dtype: rest.flatmap(
            lambda shape: hnp.arrays(np.uint8, (blocks, *shape, np.dtype(dtype).itemsize)).map(
                lambda raw: raw.view(dtype)[..., 0]
            )
        )
    )
    return Snapshot(
        model=draw(st.text(max_size=8)),
        fingerprint=draw(st.text(max_size=8)),
        kv_scheme=draw(st.sampled_from(["float32", "int8"])),
        block_size=block_size,
        tokens=tokens,
        metadata=draw(st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3)),
        tensors=draw(st.dictionaries(st.text(max_size=5), tensor, max_size=4)),
    )


# -- bit-exact ---------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=80)
@given(snapshots())
def test_every_bit_of_every_dtype_comes_back(snapshot: Snapshot) -> None:
    assert_same(load(dump(snapshot), max_bytes=LIMIT), snapshot)


def test_all_bit_patterns_of_16_bit_floats_survive() -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16).reshape(4, 1 << 14)
    snapshot = make(
        block_size=10,
        tensors={"half": patterns.view(np.float16), "bfloat16": patterns, "byte": patterns.view(np.uint8)},
    )
    assert_same(load(dump(snapshot), max_bytes=LIMIT), snapshot)


def test_strided_and_foreign_endian_arrays_travel_by_value() -> None:
    wide = np.arange(3 * 4 * 6, dtype=np.float32).reshape(4, 6, 3)
    back = load(dump(make(tensors={"view": wide.T[:, ::-2], "big": wide.T.astype(">f4")})), max_bytes=LIMIT)
    np.testing.assert_array_equal(back.tensors["view"], wide.T[:, ::-2])
    np.testing.assert_array_equal(back.tensors["big"], wide.T)
    assert back.tensors["big"].dtype == np.float32


def test_loaded_arrays_can_be_written() -> None:
    snapshot = load(dump(make(tensors={str(d): np.zeros((3, 4), d) for d in DTYPES})), max_bytes=LIMIT)
    for array in (snapshot.tokens, *snapshot.tensors.values()):
        array[:] = 1


def test_the_same_snapshot_gives_the_same_bytes_in_whatever_order_metadata_was_set() -> None:
    items = {str(i): "x" for i in range(20)}
    assert dump(make(metadata=items)) == dump(make(metadata=dict(reversed(items.items()))))


def test_smooth_quantized_keys_and_scales_get_smaller() -> None:
    random = np.random.default_rng(1)
    keys = np.cumsum(random.integers(-1, 2, (64, 4, 16, 32)), axis=2).astype(np.int8)
    scales = (1 + 0.001 * random.random((64, 4, 32))).astype(np.float32)
    snapshot = make(tokens=np.zeros(1024, np.int32), tensors={"keys": keys, "scales": scales})
    assert len(dump(snapshot)) < 0.5 * (keys.nbytes + scales.nbytes)


# -- refused -----------------------------------------------------------------------------------------------------------


def refusal(data: bytes, max_bytes: int = LIMIT) -> SnapshotError:
    with pytest.raises(SnapshotError) as caught:
        load(data, max_bytes=max_bytes)
    assert caught.value.next_step
    return caught.value


def test_any_single_flipped_byte_is_refused() -> None:
    data = bytearray(dump(make()))
    for position in range(len(data)):
        for flip in (0x01, 0x80, 0xFF):
            data[position] ^= flip
            assert refusal(bytes(data)).part == ("content" if position < 8 else "checksum")
            data[position] ^= flip
    load(bytes(data), max_bytes=LIMIT)


def test_any_truncation_and_any_extra_byte_is_refused() -> None:
    data = dump(make())
    for size in range(len(data)):
        refusal(data[:size])
    for extra in (b"\0", b"\n", b"KVSNAP\r\n", data):
        assert refusal(data + extra).part == "checksum"


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=100), st.booleans())
def test_arbitrary_bytes_are_refused(junk: bytes, with_magic: bool) -> None:
    refusal(b"KVSNAP\r\n" + junk if with_magic else junk)


@pytest.mark.parametrize(
    ("part", "other", "says"),
    [
        ("model", "llama", "model smollm2-135m; this replica runs llama"),
        ("fingerprint", "c3d4", "model fingerprint a1b2; this replica runs c3d4"),
        ("kv_scheme", "float32", "KV scheme int8; this replica runs float32"),
        ("block_size", 32, "block size 16; this replica runs 32"),
    ],
)
def test_a_replica_of_other_settings_is_told_which_part_does_not_fit(part: str, other: object, says: str) -> None:
    check(make(), **FITS)  # type: ignore[arg-type]
    with pytest.raises(SnapshotError, match=says) as caught:
        check(make(), **{**FITS, part: other})  # type: ignore[arg-type]
    assert caught.value.part == part


def test_all_arrays_together_are_held_to_the_bound() -> None:
    snapshot = make()
    total = snapshot.tokens.nbytes + sum(tensor.nbytes for tensor in snapshot.tensors.values())
    load(dump(snapshot), max_bytes=total)
    assert refusal(dump(snapshot), max_bytes=total - 1).part == "size"


def test_contradictions_are_refused_when_a_snapshot_is_made() -> None:
    two_blocks = np.zeros((2, 16, 8), np.int8)
    for fields in (
        {"tensors": {"keys": two_blocks}},  # 40 tokens need three
        {"tensors": {"scale": np.array(1.0, np.float32)}},
        {"tensors": {"keys": np.zeros((3, 4), np.float64)}},
        {"tensors": {"keys": np.array([object()] * 3)}},
        {"tokens": np.zeros(40, np.int64)},
        {"tokens": np.zeros((40, 1), np.int32)},
        {"block_size": 0},
    ):
        with pytest.raises(SnapshotError) as caught:
            make(**fields)
        assert caught.value.part == "content"


def test_metadata_that_a_reader_would_refuse_is_not_written() -> None:
    with pytest.raises(SnapshotError, match="more than") as caught:
        dump(make(metadata={"x": "y" * MAX_ENVELOPE_BYTES}))
    assert caught.value.part == "size"
    with pytest.raises(SnapshotError, match="no Unicode text"):
        dump(make(metadata={"x": "\ud800"}))


# -- hostile: the checksum fits, the content is made up ------------------------------------------------------------------


def seal(envelope: bytes, payload: bytes) -> bytes:
    """A snapshot around any content, with a checksum that fits."""
    covered = struct.pack("<I", len(envelope)) + envelope + payload
    return b"KVSNAP\r\n" + hashlib.blake2b(covered, digest_size=16).digest() + covered


def opened(data: bytes) -> tuple[Envelope, bytes]:
    size = struct.unpack_from("<I", data, 24)[0]
    return Envelope.FromString(data[28 : 28 + size]), data[28 + size :]


def forged(change: Callable[[Envelope], object], extra: bytes = b"", **fields: object) -> bytes:
    envelope, payload = opened(dump(make(**fields)))
    change(envelope)
    return seal(envelope.SerializeToString(), payload + extra)


def with_frame(content: bytes, shape: tuple[int, ...], dtype: str, encoding: snapshot_pb2.Encoding) -> bytes:
    """A snapshot with one more tensor, "x", whose frame and description are given."""

    def add(envelope: Envelope) -> None:
        envelope.tensors.add(name="x", dtype=dtype, shape=shape, encoding=encoding, compressed_bytes=len(content))

    return forged(add, content)


def squeezed(content: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(content)


def test_forging_nothing_is_accepted() -> None:
    assert_same(load(forged(lambda envelope: None), max_bytes=LIMIT), make())
    data = with_frame(squeezed(bytes(12)), (3, 4), "uint8", RAW)
    assert load(data, max_bytes=LIMIT).tensors["x"].shape == (3, 4)


def test_a_newer_version_is_refused_by_name() -> None:
    error = refusal(forged(lambda envelope: setattr(envelope, "version", VERSION + 1)))
    assert error.part == "version"
    assert f"version {VERSION + 1}" in str(error)
    assert f"reads version {VERSION}" in str(error)


def set_tensor(**fields: object) -> Callable[[Envelope], None]:
    def change(envelope: Envelope) -> None:
        tensor = envelope.tensors[0]
        for name, value in fields.items():
            if name == "shape":
                tensor.shape[:] = value  # type: ignore[call-overload]
            else:
                setattr(tensor, name, value)

    return change


@pytest.mark.parametrize(
    ("data", "part", "says"),
    [
        (seal(b"\xff" * 20, b""), "content", "cannot be read"),
        (seal(b"", b""), "version", "version 0"),
        (seal(bytes(MAX_ENVELOPE_BYTES + 1), b""), "size", "envelope claims"),
        (forged(lambda e: e.ClearField("tokens")), "content", "unknown type ''"),
        (forged(lambda e: setattr(e, "block_size", 0)), "content", "block size of 0"),
        (forged(lambda e: setattr(e, "block_size", 1)), "content", "the 40 blocks"),
        (forged(lambda e: setattr(e.tokens, "dtype", "float32")), "content", "not int32"),
        (forged(set_tensor(dtype="object")), "content", "unknown type 'object'"),
        (forged(set_tensor(shape=[])), "content", "impossible shape"),
        (forged(set_tensor(shape=[1] * 65)), "content", "impossible shape"),
        (forged(set_tensor(shape=[0, 1 << 63, 1 << 63])), "content", "impossible shape"),
        (forged(set_tensor(shape=[1 << 40])), "size", "more than the 1048576"),
        (forged(set_tensor(shape=[3, 2, 8, 16])), "content", "another shape"),
        (forged(set_tensor(shape=[3, 1])), "size", "does not fit its shape"),
        (forged(set_tensor(encoding=9)), "size", "does not fit its shape"),
        (forged(set_tensor(encoding=RAW)), "size", "does not fit its shape"),
        (forged(set_tensor(dtype="uint8")), "content", "packed as int8"),
        (forged(set_tensor(name="key_scales")), "content", "two tensors of one name"),
        (forged(set_tensor(compressed_bytes=1)), "content", "do not end where"),
        (forged(lambda e: None, b"more"), "content", "do not end where"),
        (with_frame(b"", (3, 4), "uint8", RAW), "content", "cannot be unpacked"),
        (with_frame(b"no zstd at all", (3, 4), "uint8", RAW), "content", "cannot be unpacked"),
        (with_frame(squeezed(bytes(12))[:-1], (3, 4), "uint8", RAW), "content", "cannot be unpacked"),
        (with_frame(squeezed(bytes(12)) + b"x", (3, 4), "uint8", RAW), "content", "cannot be unpacked"),
        (with_frame(squeezed(bytes(12)), (3, 4), "uint8", snapshot_pb2.ENCODING_UNSPECIFIED), "content", "encoding 0"),
        (with_frame(squeezed(b"KVC1\x02\x00"), (3, 4), "int8", CODEC), "content", "truncated"),
        (with_frame(squeezed(bytes(LIMIT)), (3, 4), "int8", CODEC), "size", "does not fit its shape"),
        (
            with_frame(zstandard.ZstdCompressor(write_content_size=False).compress(bytes(12)), (3, 4), "int8", CODEC),
            "size",
            "unpacks to -1 bytes",
        ),
    ],
)  # fmt: skip
def test_forged_content_is_refused_by_name(data: bytes, part: str, says: str) -> None:
    error = refusal(data)
    assert says in str(error)
    assert error.part == part


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_changes_under_a_fitting_checksum_give_a_snapshot_within_the_bound_or_a_snapshot_error(
    data: st.DataObject,
) -> None:
    whole = bytearray(dump(make())[24:])
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    digest = hashlib.blake2b(whole, digest_size=16).digest()
    try:
        snapshot = load(b"KVSNAP\r\n" + digest + whole, max_bytes=LIMIT)
    except SnapshotError:
        return
    assert snapshot.tokens.nbytes + sum(tensor.nbytes for tensor in snapshot.tensors.values()) <= LIMIT


def peak_bytes(data: bytes, max_bytes: int) -> int:
    tracemalloc.start()
    try:
        load(data, max_bytes=max_bytes)
    except SnapshotError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


@pytest.mark.parametrize(("dtype", "encoding"), [("uint8", RAW), ("float32", SHUFFLED), ("int8", CODEC)])
def test_a_zstd_bomb_costs_no_memory(dtype: str, encoding: snapshot_pb2.Encoding) -> None:
    bomb = squeezed(bytes(200 << 20))
    assert len(bomb) < 20_000
    for shape in ((3, 4), (3, 1 << 40)):  # claims little, claims much
        data = with_frame(bomb, shape, dtype, encoding)
        assert refusal(data).part == "size"
        assert peak_bytes(data, LIMIT) < LIMIT


def test_memory_is_the_arrays_and_the_largest_once_more() -> None:
    random = np.random.default_rng(2)
    tensors: dict[str, np.ndarray] = {
        "keys": np.cumsum(random.integers(-2, 3, (64, 64, 1024)), axis=1).astype(np.int8),
        "tail": random.random((64, 16384), np.float32),
    }
    data = dump(make(tokens=np.zeros(1024, np.int32), tensors=tensors))
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert peak_bytes(data, 2 * total) < total + 1.1 * max(tensor.nbytes for tensor in tensors.values()) + (3 << 20)


def test_packed_int8_is_what_the_codec_wrote() -> None:
    """A reader may hand the unpacked frame to the codec alone."""
    envelope, payload = opened(dump(make()))
    keys = envelope.tensors[0]
    assert (keys.name, keys.encoding) == ("keys", CODEC)
    start = envelope.tokens.compressed_bytes
    plain = zstandard.ZstdDecompressor().decompress(payload[start : start + keys.compressed_bytes])
    np.testing.assert_array_equal(codec.decode(plain, max_bytes=LIMIT), make().tensors["keys"])


def test_generated_code_is_current(tmp_path: Path) -> None:
    protoc = pytest.importorskip("grpc_tools.protoc", reason="grpcio-tools is needed to compile snapshot.proto")
    root, out = Path(__file__).parents[2], tmp_path / "descriptors"
    source = root / "observability/engine/kv/snapshot.proto"
    assert protoc.main(["protoc", f"-I{root}", f"--descriptor_set_out={out}", str(source)]) == 0
    (compiled,) = FileDescriptorSet.FromString(out.read_bytes()).file
    imported = FileDescriptorProto()
    snapshot_pb2.DESCRIPTOR.CopyToProto(imported)

    def facts(file: FileDescriptorProto) -> list[str]:
        return [line for line in str(file).splitlines() if "json_name" not in line]  # set by one of the two ways alone

    assert facts(imported) == facts(compiled)
