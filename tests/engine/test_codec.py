"""Packed KV integers: nothing is lost, little is added, and damaged or hostile bytes are refused before they cost memory."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from observability.engine.kv.codec import CodecError, decode, encode, max_encoded_bytes
from observability.errors import KvscopeError

LIMIT = 1 << 20
PAGE_VALUES = 16384 * 16
HEADER = struct.Struct("<4sBB")


@st.composite
def blocks(draw: st.DrawFn, low: int = -128, high: int = 127) -> tuple[np.ndarray, int]:
    """(int8 array of any shape, its token axis): noise, smooth along an axis, constant, or few values."""
    shape = draw(hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=20))
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    values = st.one_of(
        st.integers(low, high), st.sampled_from([low, high]), st.just(draw(st.integers(low, high))), st.integers(-1, 1)
    )
    array = draw(hnp.arrays(np.int8, shape, elements=values, fill=st.integers(low, high)))
    if draw(st.booleans()):
        array = np.clip(np.cumsum(np.clip(array, -2, 2), axis=axis), low, high).astype(np.int8)
    return array, axis


def header_bytes(array: np.ndarray) -> int:
    return 6 + 8 * array.ndim


def assert_lossless(array: np.ndarray, axis: int = -2) -> None:
    back = decode(encode(array, axis=axis), max_bytes=array.size)
    assert back.dtype == np.int8
    np.testing.assert_array_equal(back, array, strict=True)


# -- nothing is lost ---------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=100)
@given(blocks())
def test_any_int8_array_comes_back_as_it_was(block: tuple[np.ndarray, int]) -> None:
    assert_lossless(*block)


@settings(deadline=None, max_examples=100)
@given(blocks(-8, 7))
def test_any_int4_array_comes_back_as_it_was(block: tuple[np.ndarray, int]) -> None:
    assert_lossless(*block)


@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0, 5), (2, 3, 0), (1,), (1, 1), (17, 1), (1, 17), (2, 16, 64)])
def test_empty_and_odd_shapes_keep_their_shape(shape: tuple[int, ...]) -> None:
    for axis in range(len(shape)):
        assert_lossless(np.full(shape, -3, np.int8), axis)


def test_every_value_and_every_step_between_two_values_survive() -> None:
    """All 65,536 pairs of neighbours, among them the steps that wrap around such as -128 to 127."""
    every = np.arange(-128, 128).astype(np.int8)
    pairs = np.stack(np.meshgrid(every, every, indexing="ij"), axis=-1)
    assert_lossless(pairs.reshape(-1, 2), axis=1)
    assert_lossless(np.repeat(pairs.reshape(-1, 2), 8, axis=1), axis=1)  # in groups of their own, where delta pays


def test_arrays_of_more_than_one_page_survive() -> None:
    random = np.random.default_rng(0)
    for size in (PAGE_VALUES - 1, PAGE_VALUES, PAGE_VALUES + 1, 3 * PAGE_VALUES + 17):
        noise = random.integers(-128, 128, size, np.int8)
        walk = np.cumsum(random.integers(-2, 3, size)).astype(np.int8)
        for values in (noise, walk):
            assert_lossless(values, axis=0)


def test_views_that_are_not_contiguous_are_packed_by_value() -> None:
    values = np.random.default_rng(1).integers(-20, 20, (6, 32, 10), np.int8)
    for view in (values[::2, ::-1], values.T, values[:, :, 3:4], np.broadcast_to(values[:1], values.shape)):
        assert_lossless(view, axis=1)


# -- little is added ---------------------------------------------------------------------------------------------------


def bits_of_widest(array: np.ndarray) -> int:
    """Bits that two's complement needs for the widest value, at least 1; computed value by value."""
    return max((max(v, ~v).bit_length() + 1 for v in array.reshape(-1).tolist()), default=1)


@settings(deadline=None, max_examples=100)
@given(blocks())
def test_size_stays_within_a_byte_a_page_of_the_values_own_width(block: tuple[np.ndarray, int]) -> None:
    array, axis = block
    groups, pages = -(-array.size // 16), -(-array.size // PAGE_VALUES)
    size = len(encode(array, axis=axis))
    assert size <= header_bytes(array) + pages + groups * 2 * bits_of_widest(array)
    assert size <= max_encoded_bytes(array.shape)


def test_noise_of_full_range_costs_a_byte_a_value() -> None:
    noise = np.random.default_rng(2).integers(-128, 128, (64, 16, 256), np.int8)
    assert noise.size < len(encode(noise)) <= noise.size + header_bytes(noise) + 1


def test_int4_noise_costs_half_a_byte_a_value() -> None:
    noise = np.random.default_rng(3).integers(-8, 8, (64, 16, 256), np.int8)
    assert noise.size // 2 < len(encode(noise)) <= noise.size // 2 + header_bytes(noise) + 1


def test_values_that_change_little_from_token_to_token_get_smaller_along_the_token_axis_alone() -> None:
    random = np.random.default_rng(4)
    offsets = random.integers(-100, 100, (1, 1, 64))  # channels far apart, each nearly constant
    keys = (offsets + random.integers(-1, 2, (32, 16, 64))).astype(np.int8)
    assert len(encode(keys, axis=1)) < 0.5 * keys.size
    assert len(encode(keys, axis=2)) > 0.9 * keys.size


def test_constant_channels_cost_under_a_tenth() -> None:
    constant = np.broadcast_to(np.arange(-64, 64, dtype=np.int8), (8, 32, 128))
    assert len(encode(constant)) < constant.size / 10


# -- the format is what the module says ----------------------------------------------------------------------------------


def unpack_by_the_book(data: bytes) -> np.ndarray:
    """The format read value by value, as the module's docstring gives it."""
    magic, ndim, axis = HEADER.unpack_from(data)
    assert magic == b"KVC1"
    shape = struct.unpack_from(f"<{ndim}Q", data, HEADER.size)
    body = data[HEADER.size + 8 * ndim :]
    count = int(np.prod(shape, dtype=object))
    values: list[int] = []
    at = 0
    for first in range(0, -(-count // 16), 16384):
        groups = min(16384, -(-count // 16) - first)
        kind, at = body[at], at + 1
        forms: list[tuple[int, int | None]] = [(kind, None)] * groups  # (width, first value of a delta group)
        if kind == 0:
            nibbles = [n for byte in body[at : at + (groups + 1) // 2] for n in (byte & 15, byte >> 4)][:groups]
            at += (groups + 1) // 2
            forms = []
            for nibble in nibbles:
                if nibble < 8:
                    forms.append((nibble, struct.unpack_from("b", body, at)[0]))
                    at += 1
                else:
                    forms.append((nibble - 7, None))
        codes = [[0] * 16 for _ in forms]
        for bit in range(8):
            for group in sorted(range(groups), key=lambda g: -forms[g][0]):
                if forms[group][0] > bit:
                    for i in range(16):
                        codes[group][i] |= (body[at + i // 8] >> (7 - i % 8) & 1) << bit
                    at += 2
        for (_, value), group_codes in zip(forms, codes, strict=True):
            decoded = [code // 2 if code % 2 == 0 else -(code + 1) // 2 for code in group_codes]
            if value is not None:
                decoded[0] = value
                for i in range(1, 16):
                    decoded[i] = (decoded[i - 1] + decoded[i] + 128) % 256 - 128
            values += decoded
    assert at == len(body)
    moved = shape[:axis] + shape[axis + 1 :] + (shape[axis],)
    return np.moveaxis(np.array(values[:count], np.int8).reshape(moved), -1, axis)


@settings(deadline=None, max_examples=100)
@given(blocks())
def test_a_reader_written_from_the_format_alone_reads_the_same(block: tuple[np.ndarray, int]) -> None:
    array, axis = block
    np.testing.assert_array_equal(unpack_by_the_book(encode(array, axis=axis)), array, strict=True)


# -- hostile bytes -----------------------------------------------------------------------------------------------------

WALK = np.cumsum(np.random.default_rng(5).integers(-2, 3, (3, 40, 6)), axis=1).astype(np.int8)


@settings(deadline=None, max_examples=100)
@given(blocks(), st.data())
def test_every_truncation_and_every_extra_byte_is_refused(block: tuple[np.ndarray, int], data: st.DataObject) -> None:
    array, axis = block
    packed = encode(array, axis=axis)
    with pytest.raises(CodecError):
        decode(packed[: data.draw(st.integers(0, len(packed) - 1))], max_bytes=LIMIT)
    with pytest.raises(CodecError, match="too many"):
        decode(packed + data.draw(st.binary(min_size=1, max_size=40)), max_bytes=LIMIT)


def test_each_possible_truncation_of_one_block_is_refused() -> None:
    packed = encode(WALK)
    for size in range(len(packed)):
        with pytest.raises(CodecError):
            decode(packed[:size], max_bytes=LIMIT)


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_changed_bytes_give_an_array_within_the_bound_or_a_codec_error(data: st.DataObject) -> None:
    packed = bytearray(encode(WALK))
    for _ in range(data.draw(st.integers(1, 4))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    try:
        array = decode(bytes(packed), max_bytes=LIMIT)
    except CodecError:
        return
    assert array.dtype == np.int8
    assert array.size <= LIMIT


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=200), st.booleans())
def test_arbitrary_bytes_give_an_array_within_the_bound_or_a_codec_error(junk: bytes, with_magic: bool) -> None:
    try:
        array = decode(b"KVC1" + junk if with_magic else junk, max_bytes=LIMIT)
    except CodecError:
        return
    assert array.size <= LIMIT


def packed_header(shape: tuple[int, ...], axis: int = 0) -> bytes:
    return HEADER.pack(b"KVC1", len(shape), axis) + struct.pack(f"<{len(shape)}Q", *shape)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "no packed KV block"),
        (b"KVC2" + encode(WALK)[4:], "no packed KV block"),
        (b"KVC1", "truncated"),
        (b"KVC1\x02\x00" + bytes(15), "truncated"),
        (packed_header((4,), axis=1) + bytes(9), "token axis 1 of 1"),
        (packed_header((), axis=0), "token axis 0 of 0"),
        (packed_header((1,) * 65), "of 65"),
        (packed_header((LIMIT + 1,)) + bytes(100), "more than the 1048576 accepted"),
        (packed_header((2**63, 2**63)) + bytes(100), "impossible shape"),
        (packed_header((0, 2**63, 2**63)), "impossible shape"),
        (packed_header((LIMIT,)) + bytes(100), "truncated"),
        (packed_header((16,)) + b"\x09" + bytes(18), "unknown kind 9"),
    ],
)
def test_absurd_headers_are_refused_by_name(data: bytes, says: str) -> None:
    with pytest.raises(KvscopeError, match=says) as caught:
        decode(data, max_bytes=LIMIT)
    assert caught.value.next_step


def test_a_size_zero_next_to_huge_ones_allocates_nothing() -> None:
    assert decode(packed_header((0, 2**40)), max_bytes=0).shape == (0, 2**40)


def test_the_bound_is_exact() -> None:
    packed = encode(WALK)
    assert decode(packed, max_bytes=WALK.size).shape == WALK.shape
    with pytest.raises(CodecError, match="more than"):
        decode(packed, max_bytes=WALK.size - 1)


def peak_bytes(data: bytes, max_bytes: int) -> int:
    tracemalloc.start()
    try:
        decode(data, max_bytes=max_bytes)
    except CodecError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


def test_memory_is_the_array_and_a_constant() -> None:
    values = np.cumsum(np.random.default_rng(6).integers(-2, 3, 40 * PAGE_VALUES)).astype(np.int8)
    assert peak_bytes(encode(values, axis=0), values.size) < values.size + (3 << 20)


def test_claims_beyond_the_bound_or_the_data_cost_no_memory() -> None:
    huge = 1 << 40
    assert peak_bytes(packed_header((huge,)) + bytes(1000), LIMIT) < 1 << 16
    assert peak_bytes(packed_header((huge,)) + bytes(1000), huge) < 1 << 16


def test_other_dtypes_are_no_input() -> None:
    with pytest.raises(TypeError, match="int16"):
        encode(np.zeros((2, 2), np.int16))
