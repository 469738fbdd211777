"""What quantized KV costs: known noise gives the analytic value, attention and logits are compared with exact KV, and nothing is made up."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from observability import catalog as c
from observability.engine.executor import torch_executor
from observability.engine.executor.comparison import Shadow, divergence
from observability.engine.executor.compressed_kv import CompressedKV
from observability.engine.executor.kv_cache import Batch, Int8KV, Span
from observability.engine.executor.quantizer import QuantizedBlocks
from observability.engine.executor.timing import StepTimer
from observability.engine.model.llama import ModelConfig
from observability.engine.model.loading import LoadedModel
from observability.engine.types import EngineConfig, Request, SamplingParams, Scheme
from observability.errors import ConfigError
from observability.objectives import QUANTIZATION_BUDGET
from observability.signals import SIGNALS
from observability.store.evaluate import Evaluator
from observability.telemetry.recorder import Telemetry
from tests.model.running import Runner

CPU = torch.device("cpu")
MODEL = ModelConfig(
    vocab_size=32, hidden_size=48, intermediate_size=8, num_layers=6, num_heads=6, num_kv_heads=2, head_dim=8, max_position=512
)  # fmt: skip
SIZE = 16
STORED = "model_tensor_layer_group_scheme:kvscope_kv_quantization"
QUANTIZATION = [signal for signal in SIGNALS if "quantization" in signal.name]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def recorder(dtype: str = "int8") -> Telemetry:
    return Telemetry("m", executor="torch", virtual=False, device="cpu", kv_dtype=dtype, clock=lambda: 0.0)


class Signals:
    """The signals about quantization as a store computes them: between the recorder's state when made and when asked."""

    def __init__(self, telemetry: Telemetry) -> None:
        self.telemetry, self.evaluator = telemetry, Evaluator(QUANTIZATION)

    def scrape(self, at: float) -> None:
        layout = [(s.name, s.labels) for s in self.telemetry.layout]
        self.evaluator.scrape(at, layout, self.telemetry.values(), nan_is_absent=True)

    def read(self) -> dict[str, dict[tuple[str, ...], float]]:
        """Signal -> its values by the labels that are not the model's."""
        self.scrape(1300.0)
        found = self.evaluator.evaluate(1300.0)
        return {
            signal.name: {
                tuple(labels[name] for name in signal.by[1:]): value
                for labels, value in zip(found[signal.name].labels, found[signal.name].values.tolist(), strict=True)
            }
            for signal in QUANTIZATION
        }


def rows(telemetry: Telemetry) -> dict[str, dict[tuple[str, ...], float]]:
    """Sample name -> value by labels, of the families about quantization."""
    out: dict[str, dict[tuple[str, ...], float]] = {}
    for family, samples in telemetry.snapshot():
        for row in samples if "quantization" in family.name else ():
            out.setdefault(family.name + row.suffix, {})[row.labels[1:]] = row.value
    return out


# -- stored KV: noise whose size is known -----------------------------------------------------------------------------


@torch.inference_mode()
def measured(exact: np.ndarray, scheme: Scheme, telemetry: Telemetry) -> None:
    """Quantizes [blocks, 2, tokens, kv_heads, head_dim] in every layer, all of it measured."""
    count = len(exact)
    blocks = QuantizedBlocks(MODEL, scheme=scheme, count=count, block_size=SIZE, device=CPU, sample_rate=1.0, seed=0)
    fill = blocks.fill(np.arange(count))
    for layer in range(MODEL.num_layers):
        blocks.write(layer, torch.from_numpy(exact.astype(np.float32)).permute(1, 3, 0, 2, 4), fill)
    blocks.report(telemetry.quant_error)


def spread_over(shape: tuple[int, ...], low: float, seed: int) -> np.ndarray:
    """Uniform numbers in [low, 1], where each set that shares a scale holds both ends: its step is (1 - low) / levels."""
    x = np.random.default_rng(seed).uniform(low, 1.0, shape)
    for tensor, axis in ((0, 2), (1, 4)):
        ends = np.moveaxis(x[:, tensor : tensor + 1], axis, 0)
        ends[0], ends[1] = low, 1.0
    return x


@pytest.mark.parametrize(("scheme", "step"), [("int8", 1 / 127), ("int4", 2 / 15)])
def test_rounding_of_evenly_spread_numbers_is_noise_of_a_twelfth_of_the_squared_step(
    scheme: Scheme, step: float
) -> None:
    telemetry = recorder()
    signals = Signals(telemetry)
    measured(spread_over((1, 2, SIZE, 2, 8), -1.0, 0), scheme, telemetry)  # series appear
    signals.scrape(1000.0)
    exact = spread_over((200, 2, SIZE, 2, 8), -1.0, 1)
    measured(exact, scheme, telemetry)
    found = signals.read()
    groups = ["00-01", "02-03", "04-04", "05-05"]
    for tensor, numbers in (("key", SIZE), ("value", 8)):
        inside = (numbers - 2) / numbers  # the two ends of each set are met exactly
        noise, power = inside * step**2 / 12, inside / 3 + (1 - inside)
        for i, group in enumerate(groups):
            labels = (tensor, group, scheme)
            rms = math.sqrt(noise / power)
            assert found[f"{STORED}_relative_rms:ratio_rate5m"][labels] == pytest.approx(rms, rel=0.02)
            assert found[f"{STORED}_sqnr:decibel_rate5m"][labels] == pytest.approx(
                -20 * math.log10(rms), abs=20 * math.log10(1.02)
            )
            # the largest of n evenly spread errors is half a step times n / (n + 1)
            n = inside * SIZE * 2 * 8 * (2 if i < 2 else 1)
            sums = rows(telemetry)
            mean = (
                sums["kvscope_kv_quantization_maximum_error_ratio_sum"][labels]
                / sums["kvscope_kv_quantization_maximum_error_ratio_count"][labels]
            )
            assert mean == pytest.approx(step / 2 * n / (n + 1) / math.sqrt(power), rel=0.02)
            # the p99 is read from buckets: within the one that holds the largest possible error
            worst = step / 2 / math.sqrt(power)
            p99 = found[f"{STORED}_maximum_error_ratio:p99_5m"][labels]
            above = next(b for b in c.MAXIMUM_ERROR_BOUNDS if b >= worst * 0.98)
            below = max((b for b in c.MAXIMUM_ERROR_BOUNDS if b < worst * 0.98), default=0.0)
            assert below <= p99 <= above


@pytest.mark.parametrize("sigma", [0.02, 0.1])
def test_added_gaussian_noise_reads_as_what_was_added(sigma: float) -> None:
    """Numbers on the grid of int8 with noise added that rounding takes away again: the error is the noise."""
    random = np.random.default_rng(7)
    exact = random.integers(-126, 127, (150, 2, SIZE, 2, 8)).astype(np.float64)
    noise = np.clip(random.normal(0.0, sigma, exact.shape), -0.45, 0.45)
    for tensor, axis in ((0, 2), (1, 4)):
        np.moveaxis(exact[:, tensor : tensor + 1], axis, 0)[0] = 127.0  # the step is exactly 1
        np.moveaxis(noise[:, tensor : tensor + 1], axis, 0)[0] = 0.0
    telemetry = recorder()
    signals = Signals(telemetry)
    measured(exact[:1], "int8", telemetry)
    signals.scrape(1000.0)
    measured(exact + noise, "int8", telemetry)
    found = signals.read()
    for tensor, (name, numbers) in enumerate((("key", SIZE), ("value", 8))):
        share = (numbers - 1) / numbers
        power = float(((exact + noise)[:, tensor] ** 2).mean())
        rms = math.sqrt(share * sigma**2 / power)
        labels = (name, "00-01", "int8")
        assert found[f"{STORED}_relative_rms:ratio_rate5m"][labels] == pytest.approx(rms, rel=0.02)
        assert found[f"{STORED}_sqnr:decibel_rate5m"][labels] == pytest.approx(
            -20 * math.log10(rms), abs=20 * math.log10(1.02)
        )
        largest = np.abs(noise[:, tensor]).reshape(150, -1).max(1)
        relative = largest / np.sqrt(((exact + noise)[:, tensor] ** 2).reshape(150, -1).mean(1))
        sums = rows(telemetry)
        total = sums["kvscope_kv_quantization_maximum_error_ratio_sum"][labels]
        assert total == pytest.approx(relative.sum(), rel=0.02)  # the first block has no error


def test_the_default_share_of_blocks_estimates_the_error_of_all() -> None:
    """5 % of 4,000 blocks of unequal content: within 2 % of what measuring all of them gives."""
    random = np.random.default_rng(3)
    exact = random.standard_normal((2000, 2, SIZE, 2, 8)) * np.exp(random.normal(0, 0.3, (2000, 1, 1, 1, 1)))
    found = {}
    for rate in (1.0, EngineConfig().quant_sample_rate):
        blocks = QuantizedBlocks(
            MODEL, scheme="int8", count=2000, block_size=SIZE, device=CPU, sample_rate=rate, seed=0
        )
        telemetry = recorder()
        for part in np.split(np.arange(2000), 4):
            fill = blocks.fill(part)
            for layer in range(MODEL.num_layers):
                blocks.write(layer, torch.from_numpy(exact[part].astype(np.float32)).permute(1, 3, 0, 2, 4), fill)
        blocks.report(telemetry.quant_error)
        sums = rows(telemetry)
        found[rate] = {
            labels: math.sqrt(value / sums["kvscope_kv_quantization_squared_signal_total"][labels])
            for labels, value in sums["kvscope_kv_quantization_squared_error_total"].items()
        }
    for labels, value in found[1.0].items():
        assert found[0.05][labels] == pytest.approx(value, rel=0.02), labels


# -- attention: a case with a closed form -----------------------------------------------------------------------------


def rounded(values: np.ndarray, scheme: Scheme) -> np.ndarray:
    """Values [tokens, kv_heads, head_dim] as stored, a scale for each token and head, in float64."""
    if scheme == "int8":
        step = np.abs(values).max(-1, keepdims=True) / 127
        return np.round(values / step) * step
    low = values.min(-1, keepdims=True)
    step = (values.max(-1, keepdims=True) - low) / 15
    return low + np.round((values - low) / step) * step


def store_of(scheme: str, **changes: object) -> tuple[Int8KV | CompressedKV, int]:
    """(a store in which every decode is compared, the number of its first quantized block)."""
    common = {
        "block_size": SIZE,
        "num_blocks": 16,
        "max_model_len": 160,
        "contiguous_below": 0,
        "quant_compare_rate": 1.0,
    }
    if scheme == "int8 everywhere":
        return Int8KV(MODEL, EngineConfig(kv_dtype="int8", **common | changes), CPU, torch.float32, StepTimer(CPU)), 0  # type: ignore[arg-type]
    own = {"num_compressed_blocks": 16, "compressed_from": 32, "recent_window": 16, "compressed_scheme": scheme}
    return CompressedKV(MODEL, EngineConfig(**common | own | changes), CPU, torch.float32, StepTimer(CPU)), 16  # type: ignore[arg-type]


@torch.inference_mode()
def decode_compared(kv: Int8KV | CompressedKV, span: Span, k: Tensor, v: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """One decode step of one sequence, compared: attention outputs [layers, heads, head_dim] over stored and over exact KV."""
    assert kv.comparison is not None
    batch = Batch([], [span])
    twin = kv.comparison.choose(batch, 1)
    assert twin is not None
    kv.begin(batch)
    outs = [
        kv.attend(layer, torch.cat([q, q]), torch.cat([k, k]), torch.cat([v, v])) for layer in range(MODEL.num_layers)
    ]
    both = torch.stack(outs)
    return both[:, 0], both[:, 1]


@pytest.mark.parametrize("scheme", ["int8 everywhere", "int8", "int4"])
@torch.inference_mode()
def test_attention_over_equal_keys_errs_by_the_mean_error_of_the_values(scheme: str) -> None:
    """With all keys zero each token weighs the same: the output is the mean of the values, and its error the mean of their errors."""
    kv, first = store_of(scheme)
    random = np.random.default_rng(0)
    values = random.standard_normal((70, 2, 8)).astype(np.float32)
    request = Request("r", [0] * 69, SamplingParams())
    quantized = [first + 3, first + 1, first + 7] if first else [3, 1, 7, 4]
    blocks = np.array([*quantized, 9, 2][:5], np.int64)
    v = torch.from_numpy(values)
    assert kv.comparison is not None
    chunk = Span(request, 0, 69, 0, blocks)
    kv.comparison.choose(Batch([chunk], []), 69)
    kv.begin(Batch([chunk], []))
    for layer in range(MODEL.num_layers):
        kv.attend(layer, torch.zeros(69, 6, 8), torch.zeros(69, 2, 8), v[:69])
    stored, exact = decode_compared(
        kv, Span(request, 69, 1, 0, blocks), torch.zeros(1, 2, 8), v[69:], torch.randn(1, 6, 8)
    )
    tokens = len(quantized) * SIZE
    error = (rounded(values[:tokens].astype(np.float64), "int4" if scheme == "int4" else "int8") - values[:tokens]).sum(
        0
    ) / 70
    mean = values.astype(np.float64).mean(0)
    for layer in range(MODEL.num_layers):
        for head in range(6):
            np.testing.assert_allclose(exact[layer, head], mean[head // 3], atol=1e-6)
            np.testing.assert_allclose(stored[layer, head] - exact[layer, head], error[head // 3], atol=1e-6)
    twin = kv.comparison.twin
    assert twin is not None
    assert sorted(twin.layers.values()) == [0, 1, 2, 3]  # one layer of each group
    for squared_error, squared_signal in twin.sums.tolist():
        assert math.sqrt(squared_error / squared_signal) == pytest.approx(
            math.sqrt((error**2).sum() / (mean**2).sum()), rel=0.001
        )
        assert squared_signal == pytest.approx(3 * (mean**2).sum(), rel=1e-5)


@torch.inference_mode()
def test_exact_values_come_from_where_each_block_lies() -> None:
    """Random keys and values; some old blocks exact because they were shared, a part of the last one: attention written out."""
    kv, first = store_of("int4")
    assert isinstance(kv, CompressedKV)
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(6, 75, n, 8, generator=generator) for n in (6, 2, 2))
    request = Request("r", [0] * 74, SamplingParams())
    request.table = type("Table", (), {"blocks": [0, 1, 2, 3, 4]})()
    kv.comparison.choose(Batch([span := Span(request, 0, 74, 0, np.arange(5))], []), 74)  # type: ignore[union-attr]
    kv.begin(Batch([span], []))
    for layer in range(6):
        kv.attend(layer, q[layer, :74], k[layer, :74], v[layer, :74])
    kv.compress_blocks([0, 2], [first + 5, first + 6])
    blocks = np.array([first + 5, 1, first + 6, 3, 4])
    batch = Batch([], [Span(request, 74, 1, 0, blocks)])
    assert kv.comparison.choose(batch, 1) is not None  # type: ignore[union-attr]
    kv.begin(batch)
    for layer in range(6):
        out = kv.attend(layer, *(x[layer, 74:].repeat(2, 1, 1) for x in (q, k, v)))
        for head in range(6):
            weights = (k[layer, :, head // 3] @ q[layer, 74, head] * 8**-0.5).softmax(0)
            torch.testing.assert_close(out[1, head], weights @ v[layer, :, head // 3], atol=1e-5, rtol=1e-5)
        assert (out[0] - out[1]).abs().max() > 1e-3  # int4 is not exact


# -- logits -----------------------------------------------------------------------------------------------------------


def test_divergence_is_that_of_the_distributions() -> None:
    p, q = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.5, 0.25])
    nats, agreed = divergence(stored=(q.log() + 7), exact=(p.log() - 3))
    assert nats == pytest.approx(0.5 * math.log(2) + 0.25 * math.log(0.5))
    assert not agreed
    assert divergence(p.log(), p.log()) == (0.0, True)


def ids_of(model: LoadedModel, length: int, skip: int = 0) -> list[int]:
    text = Path(__file__).parents[2].joinpath("README.md").read_text()
    return (model.tokenizer.encode(text) * 4)[skip : skip + length]


@pytest.mark.parametrize("kind", ["int8 everywhere", "int8", "int4"])
def test_logits_are_compared_with_those_of_an_engine_that_stores_exactly(
    tiny: LoadedModel, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first decode after a prefill in one chunk, whose stored values were all computed exactly: the truth is another engine's."""
    seen: list[Tensor] = []
    original = torch_executor.sample
    monkeypatch.setattr(
        torch_executor, "sample", lambda logits, *rest: (seen.append(logits.clone()), original(logits, *rest))[1]
    )
    logits = {}
    for how in (kind, "exact"):
        settings_ = {"num_blocks": 40, "max_model_len": 256, "quant_compare_rate": 1.0}
        if how == "int8 everywhere":
            settings_ |= {"kv_dtype": "int8"}
        elif how != "exact":
            settings_ |= {
                "num_compressed_blocks": 40,
                "compressed_from": 64,
                "recent_window": 32,
                "contiguous_below": 0,
                "compressed_scheme": how,
            }
        runner = Runner(tiny, EngineConfig(**settings_))  # type: ignore[arg-type]
        seen.clear()
        runner.run([ids_of(tiny, 150)], [SamplingParams(max_tokens=2, ignore_eos=True)])
        logits[how] = seen[1][0].double()
        if how == kind:
            (record,) = runner.telemetry.finished
    p, q = logits["exact"].softmax(-1), logits[kind].softmax(-1)
    assert record.quantization is not None
    assert record.quantization.compared_tokens == 1
    assert record.quantization.divergence_nats == pytest.approx(float((p * (p / q).log()).sum()), rel=0.01)
    assert record.quantization.agreed_tokens == int(p.argmax() == q.argmax())
    assert 0 < record.quantization.relative < 0.2  # type: ignore[operator]


# -- under load -------------------------------------------------------------------------------------------------------

LOAD = {
    "num_blocks": 48,
    "max_model_len": 256,
    "max_num_batched_tokens": 120,
    "quant_compare_rate": 1.0,
    "quant_sample_rate": 0.2,
}
MIXED = {"num_compressed_blocks": 40, "compressed_from": 64, "recent_window": 32, "contiguous_below": 48}


def serve(model: LoadedModel, **changes: object) -> tuple[Runner, list[Request]]:
    """20 requests over a full pool, some with a common beginning, in two waves."""
    runner = Runner(model, EngineConfig(**LOAD | changes))  # type: ignore[arg-type]
    requests = []
    for wave in range(2):
        prompts = [
            ids_of(model, 90) * (i % 2) + ids_of(model, 20 + 9 * i, skip=100 + 50 * i + 7 * wave) for i in range(10)
        ]
        requests += runner.run(prompts, [SamplingParams(max_tokens=30, ignore_eos=True)] * 10)
    return runner, requests


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_dtype": "int8"},
        {"kv_dtype": "int8", "num_host_blocks": 200, "compaction_seconds": 0.01},
        {**MIXED},
        {**MIXED, "num_host_blocks": 200, "compaction_seconds": 0.01},
    ],
    ids=["int8", "int8, host tier, compaction", "compressed", "compressed, host tier, compaction"],
)
def test_what_is_compared_stays_small_whatever_happens_to_blocks(tiny: LoadedModel, changes: dict[str, object]) -> None:
    """A copy of another block, or of another place, would show as an error of the size of the signal."""
    runner, _ = serve(tiny, **changes)
    records = [r for r in runner.telemetry.finished if r.quantization is not None]
    assert len(records) >= 2
    assert all(r.quantization.relative < 0.03 for r in records)  # type: ignore[union-attr, operator]
    sums = rows(runner.telemetry)
    own = [r.quantization for r in records]
    one = ("int8",)
    assert sums["kvscope_kv_quantization_compared_tokens_total"][one] == sum(q.compared_tokens for q in own)  # type: ignore[union-attr]
    assert sums["kvscope_kv_quantization_agreed_tokens_total"][one] == sum(q.agreed_tokens for q in own)  # type: ignore[union-attr]
    assert sums["kvscope_kv_quantization_divergence_nats_total"][one] == pytest.approx(
        sum(q.divergence_nats for q in own)
    )  # type: ignore[union-attr]
    assert sums["kvscope_request_quantization_error_ratio_count"][one] == len(records)
    over = sums["kvscope_request_quantization_error_ratio_bucket"]
    within = sum(q.relative <= QUANTIZATION_BUDGET.attention_error for q in own)  # type: ignore[union-attr, operator]
    assert over["int8", str(QUANTIZATION_BUDGET.attention_error)] == within
    for part in ("error", "signal"):
        total = sum(sums[f"kvscope_kv_quantization_attention_squared_{part}_total"].values())
        assert total == pytest.approx(sum(getattr(q, f"squared_{part}") for q in own))


def test_comparisons_follow_the_seed_and_leave_the_text_alone(tiny: LoadedModel) -> None:
    def compared(**changes: object) -> tuple[list[list[int]], list[int]]:
        runner, requests = serve(tiny, kv_dtype="int8", **changes)
        tokens = [r.quantization.compared_tokens if r.quantization else 0 for r in runner.telemetry.finished]
        return [r.output for r in requests], tokens

    texts, tokens = compared(quant_compare_rate=0.3, seed=1)
    assert compared(quant_compare_rate=0.3, seed=1) == (texts, tokens)
    other, others = compared(quant_compare_rate=0.3, seed=2)
    assert others != tokens
    assert other == texts == compared(quant_compare_rate=0.0)[0]


def test_a_sequence_behind_a_shared_prefix_is_compared_while_the_prefix_is_known(tiny: LoadedModel) -> None:
    runner = Runner(tiny, EngineConfig(**LOAD | {"kv_dtype": "int8"}))  # type: ignore[arg-type]
    shared = ids_of(tiny, 128)
    for i in range(3):
        runner.run([shared + ids_of(tiny, 9, skip=300 + 20 * i)], [SamplingParams(max_tokens=8, ignore_eos=True)])
    records = list(runner.telemetry.finished)
    assert [r.cached_tokens for r in records] == [0, 128, 128]
    assert [r.quantization.compared_tokens for r in records] == [7, 7, 7]  # type: ignore[union-attr]


def test_memory_for_exact_values_is_bounded(tiny: LoadedModel) -> None:
    """64 tokens: longer sequences are given up, shorter ones still compared; without room nothing is."""
    runner, _ = serve(tiny, kv_dtype="int8", quant_shadow_tokens=64)
    comparison = runner.executor.kv.comparison
    assert comparison is not None
    assert comparison.shadow.copies.shape[3] == 4
    runner.run([ids_of(tiny, 30, skip=900)], [SamplingParams(max_tokens=10, ignore_eos=True)])
    assert runner.telemetry.finished[-1].quantization is not None
    runner, _ = serve(tiny, kv_dtype="int8", quant_shadow_tokens=0)
    assert runner.executor.kv.comparison is None
    assert not any("compared" in name for name in rows(runner.telemetry))


@pytest.mark.parametrize(
    "changes", [{}, {"num_compressed_blocks": 40, "compressed_from": 200, "recent_window": 32, "contiguous_below": 48}]
)
def test_without_quantized_blocks_there_is_no_series(tiny: LoadedModel, changes: dict[str, object]) -> None:
    runner = Runner(tiny, EngineConfig(**LOAD | changes))  # type: ignore[arg-type]
    (request,) = runner.run([ids_of(tiny, 100)], [SamplingParams(max_tokens=20, ignore_eos=True)])
    assert request.num_generated == 20
    assert rows(runner.telemetry) == {}
    assert runner.telemetry.finished[0].quantization is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"quant_compare_rate": 1.5}, "quant_compare_rate"), ({"quant_compare_rate": math.nan}, "quant_compare_rate"),
     ({"quant_shadow_tokens": -1}, "quant_shadow_tokens")],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(changes: dict[str, float], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        EngineConfig(**changes)  # type: ignore[arg-type]


# -- copies of exact values -------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_known_copy_always_has_the_content_of_its_block(data: st.DataObject) -> None:
    """Random fills, moves and rewrites of 12 blocks over 5 slots, beside a plain account of what each block holds."""
    shadow = Shadow(MODEL, count=12, most=5, block_size=1, device=CPU, dtype=torch.float32)
    content = [0] * 12  # by block
    copies = [-1] * 5  # by slot: the content that was put there
    fresh = 0
    for _ in range(data.draw(st.integers(1, 25))):
        blocks = np.array(data.draw(st.lists(st.integers(0, 11), min_size=1, max_size=4, unique=True)), np.int64)
        match data.draw(st.sampled_from(["fill", "move", "rewrite", "follow"])):
            case "fill":
                shadow.forget(blocks)
                slots = shadow.take(blocks)
                for i, block in enumerate(blocks.tolist()):
                    fresh += 1
                    content[block] = fresh
                    if slots is not None:
                        copies[slots[i]] = fresh
            case "move":
                targets = np.array(data.draw(st.permutations(range(12)))[: len(blocks)], np.int64)
                shadow.copied(torch.from_numpy(blocks), torch.from_numpy(targets))
                moved = [content[b] for b in blocks.tolist()]
                for target, what in zip(targets.tolist(), moved, strict=True):
                    content[target] = what
            case "rewrite":
                shadow.overwritten(torch.from_numpy(blocks))
                for block in blocks.tolist():
                    fresh += 1
                    content[block] = fresh
            case "follow":
                if (slots := shadow.slots(blocks)) is not None:
                    shadow.follow(slots)
        for block in range(12):
            slots = shadow.slots(np.array([block]))
            if slots is not None:
                assert copies[slots[0]] == content[block]
