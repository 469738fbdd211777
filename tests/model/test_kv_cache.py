"""Keys and values in the pool: attention through any table, int8 within its bound, errors reported as they are."""

from __future__ import annotations

import random
from collections import defaultdict
from itertools import accumulate, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from observability.engine.executor.attention import (
    DecodeAttention,
    causal_mask,
    chunk_attention,
    slots_of,
    split_by_length,
)
from observability.engine.executor.block_moves import BlockMoves
from observability.engine.executor.kv_cache import Batch, FloatKV, Int8KV, Span
from observability.engine.executor.timing import Part, StepTimer
from observability.engine.model.llama import ModelConfig
from observability.engine.types import EngineConfig, Request, SamplingParams

CPU = torch.device("cpu")
MODEL = ModelConfig(
    vocab_size=32, hidden_size=48, intermediate_size=8, num_layers=6, num_heads=6, num_kv_heads=2, head_dim=8, max_position=512
)  # fmt: skip


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Written out: q [tokens, heads, d] are the last positions of k, v [context, kv_heads, d]."""
    group, tokens, context = q.shape[1] // k.shape[1], q.shape[0], k.shape[0]
    out = torch.empty_like(q)
    for i in range(tokens):
        seen = context - tokens + i + 1
        for h in range(q.shape[1]):
            weights = (k[:seen, h // group] @ q[i, h] * q.shape[-1] ** -0.5).softmax(0)
            out[i, h] = weights @ v[:seen, h // group]
    return out


# -- attention --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "context"), [(1, 1), (1, 9), (5, 5), (4, 11)])
def test_chunk_attention(tokens: int, context: int) -> None:
    q, kv = torch.randn(tokens, 6, 8), torch.randn(2, 2, context, 8)
    out = chunk_attention(q, kv, causal_mask(tokens, context, CPU, torch.float32))
    torch.testing.assert_close(out, attention(q, kv[0].transpose(0, 1), kv[1].transpose(0, 1)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["in place", "gathered"])
@pytest.mark.parametrize("lengths", [(1,), (5, 5), (1, 2, 30), (16, 17, 33, 64)])
@torch.inference_mode()
def test_decode_attention_of_sequences_anywhere_in_the_pool(lengths: tuple[int, ...], dtype: torch.dtype) -> None:
    """Both ways of reading. Slots that belong to nobody hold NaN: none may be read."""
    shuffled = np.random.default_rng(0).permutation(200)
    ends = list(accumulate(lengths))
    slots = [shuffled[end - length : end] for end, length in zip(ends, lengths, strict=True)]
    pool = torch.full((2, 2, 200, 8), torch.nan, dtype=dtype)
    pool[:, :, shuffled[: ends[-1]]] = torch.randn(2, 2, ends[-1], 8, dtype=dtype)
    q = torch.randn(len(lengths), 6, 8, dtype=dtype)
    decode = DecodeAttention(slots, heads=6, kv_heads=2, pool_slots=200, device=CPU, dtype=dtype)
    for _ in range(2):  # the index serves every layer
        out = decode(q, pool)
        for i, own in enumerate(slots):
            k, v = pool[:, :, own].transpose(1, 2)
            torch.testing.assert_close(out[i : i + 1], attention(q[i : i + 1], k, v))
        pool = pool.flip(0)


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=40))
def test_length_groups_cover_all_and_waste_little(lengths: list[int]) -> None:
    lengths.sort()
    runs = split_by_length(lengths)
    assert [i for run in runs for i in range(run.start, run.stop)] == list(range(len(lengths)))
    for run in runs:
        own = lengths[run]
        assert max(own) * len(own) * 0.7 <= sum(own)


# -- stores -----------------------------------------------------------------------------------------------------------


class Sequence:
    """Random q, k, v of one sequence, layer by layer, and where it lies."""

    def __init__(self, name: str, length: int, blocks: list[int], generator: torch.Generator) -> None:
        self.request = Request(name, [0] * length, SamplingParams())
        self.length, self.blocks, self.done = length, blocks, 0
        self.q = torch.randn(MODEL.num_layers, length, 6, 8, generator=generator)
        self.kv = torch.randn(MODEL.num_layers, 2, length, 2, 8, generator=generator)
        self.kv[:, 0, :, :, 3] *= 30  # a channel of keys that dwarfs the others, as real models have
        self.kv[:, :, ::7] *= 5

    def span(self, tokens: int, row: int, block_size: int) -> Span:
        needed = -(-(self.done + tokens) // block_size)
        return Span(self.request, self.done, tokens, row, np.array(self.blocks[:needed], np.int64))


@torch.inference_mode()
def play(kv: FloatKV | Int8KV, sequences: list[Sequence], chunk: int, block_size: int) -> dict[str, Tensor]:
    """Feeds the sequences, the first two thirds in chunks and the rest token by token; [layers, tokens, heads, d] by request."""
    outs = {s.request.request_id: torch.empty_like(s.q) for s in sequences}
    while any(s.done < s.length for s in sequences):
        chunks, decodes, rows = [], [], 0
        prefilling = [s for s in sequences if s.done < s.length * 2 // 3]
        decoding = [s for s in sequences if s.length > s.done >= s.length * 2 // 3]
        for s in prefilling:
            chunks.append(s.span(min(chunk, s.length * 2 // 3 - s.done), rows, block_size))
            rows += chunks[-1].tokens
        for s in sorted(decoding, key=lambda s: s.done):
            decodes.append(s.span(1, rows, block_size))
            rows += 1
        kv.begin(Batch(chunks, decodes))
        spans = {span.request: span for span in (*chunks, *decodes)}
        parts = [(s, spans[s.request]) for s in sequences if s.request in spans]
        parts.sort(key=lambda part: part[1].row)
        for layer in range(MODEL.num_layers):
            q = torch.cat([s.q[layer, span.start : span.context] for s, span in parts])
            k, v = torch.cat([s.kv[layer, :, span.start : span.context] for s, span in parts], dim=1)
            out = kv.attend(layer, q, k, v)
            for s, span in parts:
                outs[s.request.request_id][layer, span.start : span.context] = out[span.rows]
        kv.report(lambda *values: reports.append(values))
        for s, span in parts:
            s.done = span.context
    return outs


reports: list[tuple[int, str, str, float, float, float, int]] = []


def three_sequences(block_size: int) -> list[Sequence]:
    generator = torch.Generator().manual_seed(1)
    blocks = list(range(60))
    random.Random(2).shuffle(blocks)
    lengths = (3 * block_size + 1, 50, 2)
    taken = [0, *accumulate(-(-n // block_size) for n in lengths)]
    out = [Sequence(f"s{i}", n, blocks[taken[i] : taken[i + 1]], generator) for i, n in enumerate(lengths)]
    out.append(Sequence("adjacent", 40, list(range(60, 60 + -(-40 // block_size))), generator))
    return out


@pytest.mark.parametrize("chunk", [1000, 7])
def test_float_store_is_attention(chunk: int) -> None:
    config = EngineConfig(block_size=8, num_blocks=80, max_model_len=64)
    kv = FloatKV(MODEL, config, CPU, torch.float32, StepTimer(CPU))
    sequences = three_sequences(8)
    outs = play(kv, sequences, chunk, 8)
    for s in sequences:
        for layer in range(MODEL.num_layers):
            wanted = attention(s.q[layer], *s.kv[layer])
            torch.testing.assert_close(outs[s.request.request_id][layer], wanted, atol=1e-4, rtol=1e-4)
    assert kv.block_sets[0].bytes_per_block * 80 == kv.pool.numel() * 4


@torch.inference_mode()
def read_back(kv: Int8KV, layer: int, blocks: list[int]) -> Tensor:
    """What the store holds, dequantized: [2, tokens, kv_heads, head_dim]."""
    size = kv.blocks.integers.shape[4]
    into = torch.empty(2, 2, len(blocks) * size, 8)
    kv.blocks.read(layer, torch.tensor(blocks, dtype=torch.int64), into)
    return into.transpose(1, 2)


def quantized(x: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """(x after int8, its scale) with one scale along `axis`, in float64."""
    scale = np.abs(x).max(axis, keepdims=True) / 127
    return np.round(x / np.where(scale > 0, scale, 1)) * scale, scale


@pytest.mark.parametrize("chunk", [1000, 7])
def test_int8_store_attends_to_full_blocks_quantized_and_the_rest_exact(chunk: int) -> None:
    """Recomputed from the definition: a step sees blocks that were full before it dequantized, and everything since exact."""
    size = 8
    config = EngineConfig(block_size=size, num_blocks=80, max_model_len=64, kv_dtype="int8", quant_sample_rate=1.0)
    kv = Int8KV(MODEL, config, CPU, torch.float32, StepTimer(CPU))
    sequences = three_sequences(size)
    reports.clear()
    outs = play(kv, sequences, chunk, size)
    measured: dict[tuple[int, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0, 0.0])
    groups = np.array_split(np.arange(MODEL.num_layers), 4)
    blocks_filled = 0
    for s in sequences:
        full = s.length // size
        blocks_filled += full
        exact = s.kv.double().numpy()
        stored = exact.copy()
        for block in range(full):
            part = slice(block * size, (block + 1) * size)
            for tensor, axis in ((0, 1), (1, 3)):  # [layers, tokens, kv_heads, d]: keys over tokens, values over d
                stored[:, tensor, part], scale = quantized(exact[:, tensor, part], axis)
                error = stored[:, tensor, part] - exact[:, tensor, part]
                assert (np.abs(error) <= scale / 2 * (1 + 1e-9)).all()
                for group in groups:
                    cell = measured[tensor, f"{group[0]:02d}-{group[-1]:02d}"]
                    cell[0] += (error[group] ** 2).sum()
                    cell[1] += (exact[group, tensor, part] ** 2).sum()
                    cell[2] += error[group].size
                    cell[3] = max(cell[3], np.abs(error[group]).max())
        # what the store holds, read back
        for layer in range(MODEL.num_layers):
            read = read_back(kv, layer, s.blocks[:full])
            torch.testing.assert_close(
                read, torch.tensor(stored[layer, :, : full * size]).float(), atol=1e-5, rtol=1e-5
            )
        # attention, step by step
        starts = [*range(0, s.length * 2 // 3, chunk), *range(s.length * 2 // 3, s.length), s.length]
        for start, end in pairwise(starts):
            seen = exact[:, :, :end].copy()
            seen[:, :, : start // size * size] = stored[:, :, : start // size * size]
            for layer in (0, MODEL.num_layers - 1):
                wanted = attention(s.q[layer, start:end], *torch.tensor(seen[layer]).float())
                got = outs[s.request.request_id][layer, start:end]
                torch.testing.assert_close(got, wanted, atol=2e-5, rtol=2e-5)
    # every filled block was measured; the sums reported are those recomputed here
    assert len(reports) == blocks_filled * 2 * 4
    summed: dict[tuple[int, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0, 0.0])
    for tensor, group, scheme, error, signal, maximum, elements in reports:
        assert scheme == "int8"
        for i, value in enumerate((error, signal, elements)):
            summed[tensor, group][i] += value
        summed[tensor, group][3] = max(summed[tensor, group][3], maximum)
    assert summed.keys() == measured.keys()
    for key, (error, signal, elements, maximum) in measured.items():
        assert summed[key][0] == pytest.approx(error, rel=1e-3)
        assert summed[key][1] == pytest.approx(signal, rel=1e-6)
        assert summed[key][2] == elements
        assert summed[key][3] == pytest.approx(maximum, rel=1e-3)


def one_block_store(rate: float = 1.0, blocks: int = 8) -> Int8KV:
    config = EngineConfig(block_size=16, num_blocks=blocks, max_model_len=16, kv_dtype="int8", quant_sample_rate=rate)
    return Int8KV(MODEL, config, CPU, torch.float32, StepTimer(CPU))


@torch.inference_mode()
def fill_block(kv: Int8KV, k: Tensor, v: Tensor, block: int = 0, request: Request | None = None) -> None:
    request = request or Request("r", [0] * 16, SamplingParams())
    kv.begin(Batch([Span(request, 0, 16, 0, np.array([block]))], []))
    for layer in range(MODEL.num_layers):
        kv.attend(layer, torch.zeros(16, 6, 8), k, v)
    kv.report(lambda *values: reports.append(values))
    kv.release(request)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(1e-20, 1e20), st.floats(0, 6))
def test_int8_error_is_at_most_half_a_scale(seed: int, scale: float, spread: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    k, v = (
        torch.randn(2, 16, 2, 8, generator=generator)
        * 10 ** (torch.rand(2, 16, 2, 8, generator=generator) * spread)
        * scale
    )
    kv = one_block_store(blocks=1)
    fill_block(kv, k, v)
    read_k, read_v = read_back(kv, 0, [0])
    step_k = k.abs().amax(0, keepdim=True) / 127  # per channel over the block's tokens
    step_v = v.abs().amax(-1, keepdim=True) / 127  # per token and head
    assert ((read_k - k).abs() <= step_k * 0.5001).all()
    assert ((read_v - v).abs() <= step_v * 0.5001).all()


def test_the_reported_error_of_known_noise() -> None:
    """Keys on the quantization grid, displaced by a known part of a step, have exactly that error."""
    generator = torch.Generator().manual_seed(0)
    grid = torch.randint(-126, 127, (16, 2, 8), generator=generator).float()
    grid[0] = 127  # the largest of each channel: the step is exactly 1
    noise = torch.where(torch.rand(grid.shape, generator=generator) < 0.5, -0.25, 0.25)
    noise[0] = 0
    value_grid = torch.randint(-126, 127, (16, 2, 8), generator=generator).float()
    value_grid[..., 0] = 127
    reports.clear()
    fill_block(one_block_store(), grid + noise, value_grid)
    layers = [len(g) for g in np.array_split(np.arange(MODEL.num_layers), 4)]
    for (tensor, _, _, error, signal, maximum, elements), count in zip(reports, layers * 2, strict=True):
        displaced = 15 * 2 * 8 * 0.25**2 * count if tensor == 0 else 0.0
        assert error == pytest.approx(displaced, rel=1e-4, abs=1e-6)
        assert signal == pytest.approx(
            float(((grid + noise) if tensor == 0 else value_grid).double().square().sum()) * count
        )
        assert maximum == pytest.approx(0.25 if tensor == 0 else 0.0, rel=1e-4, abs=1e-5)
        assert elements == 16 * 2 * 8 * count


def test_zeros_have_no_error_and_no_signal() -> None:
    reports.clear()
    fill_block(one_block_store(), torch.zeros(16, 2, 8), torch.zeros(16, 2, 8))
    assert {r[3:6] for r in reports} == {(0.0, 0.0, 0.0)}


def test_the_sampled_share_follows_the_setting() -> None:
    shares = {}
    for rate in (0.0, 0.3, 1.0):
        reports.clear()
        kv = one_block_store(rate)
        for i in range(80):
            fill_block(kv, torch.randn(16, 2, 8), torch.randn(16, 2, 8), i % 8)
        shares[rate] = len(reports) / (80 * 2 * 4)
    assert shares[0.0] == 0
    assert shares[0.3] == pytest.approx(0.3, abs=0.1)
    assert shares[1.0] == 1


@pytest.mark.parametrize("kind", [FloatKV, Int8KV])
@torch.inference_mode()
def test_copied_blocks_read_alike_even_when_targets_are_sources(kind: type[FloatKV] | type[Int8KV]) -> None:
    config = EngineConfig(block_size=8, num_blocks=80, max_model_len=64, kv_dtype="int8" if kind is Int8KV else "auto")
    kv = kind(MODEL, config, CPU, torch.float32, StepTimer(CPU))
    sequence = Sequence("s", 24, [5, 6, 7], torch.Generator().manual_seed(4))
    q, k, v = sequence.q[0], *sequence.kv[0]
    kv.begin(Batch([Span(sequence.request, 0, 24, 0, np.array([5, 6, 7]))], []))
    for layer in range(MODEL.num_layers):
        kv.attend(layer, q, k, v)

    def last_token_again(blocks: list[int]) -> Tensor:
        kv.release(sequence.request)
        reader = Request("reader", [], SamplingParams())
        kv.begin(Batch([Span(reader, 24, 1, 0, np.array([*blocks, 70]))], []))
        out = kv.attend(0, q[:1], torch.zeros(1, 2, 8), torch.zeros(1, 2, 8))
        kv.release(reader)
        return out

    before = last_token_again([5, 6, 7])
    BlockMoves(kv.block_sets, 0).copy([(5, 4), (6, 5), (7, 6)])  # a slide to the left
    assert torch.equal(last_token_again([4, 5, 6]), before)


def test_bytes_per_block_are_what_the_tensors_take() -> None:
    config = EngineConfig(num_blocks=4, max_model_len=64)
    exact = FloatKV(MODEL, config, CPU, torch.float32, StepTimer(CPU))
    small = Int8KV(MODEL, config, CPU, torch.float32, StepTimer(CPU))
    blocks = small.blocks
    stored = blocks.integers.numel() + 4 * (blocks.key_grid.numel() + blocks.value_grid.numel())
    assert blocks.block_set.bytes_per_block * 4 == stored
    assert blocks.block_set.bytes_per_block < 0.5 * exact.block_sets[0].bytes_per_block


def test_tail_places_come_back_and_misuse_is_named() -> None:
    config = EngineConfig(block_size=4, num_blocks=64, max_model_len=64, max_num_seqs=2, kv_dtype="int8")
    kv = Int8KV(MODEL, config, CPU, torch.float32, StepTimer(CPU))
    requests = [Request(f"r{i}", [0] * 3, SamplingParams()) for i in range(4)]

    def start(i: int, at: int = 0) -> None:
        kv.begin(Batch([Span(requests[i], at, 3, 0, np.arange(2))], []))

    start(0)
    start(1)
    with pytest.raises(RuntimeError, match="more than max_num_seqs = 2"):
        start(2)
    kv.release(requests[0])
    kv.release(requests[0])  # a second time does nothing
    start(2)
    kv.release(requests[1])
    with pytest.raises(RuntimeError, match="r3 starts inside a block"):
        start(3, at=2)


def test_the_timer_gives_all_time_to_parts() -> None:
    timer = StepTimer(CPU)
    timer.begin()
    for part in Part:
        torch.randn(50, 50) @ torch.randn(50, 50)
        timer.lap(part)
    assert sum(timer.shares()) == pytest.approx(1.0)
    assert all(share > 0 for share in timer.shares())


def test_slots_of_blocks() -> None:
    assert slots_of(np.array([3, 0]), 4, 6).tolist() == [12, 13, 14, 15, 0, 1]
