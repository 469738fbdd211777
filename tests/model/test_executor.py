"""The torch executor under the real engine: time by component, settings that do not fit, int8, sampling by seed."""

from __future__ import annotations

import pytest

from observability import catalog
from observability.catalog import COMPONENTS
from observability.engine.executor.torch_executor import TorchExecutor
from observability.engine.model.loading import LoadedModel
from observability.engine.types import Chunk, EngineConfig, PromptSpan, Request, SamplingParams, StepPlan
from observability.errors import ConfigError, RequestError
from tests.model.running import Runner

SMALL = EngineConfig(num_blocks=200, max_model_len=1024)


def text_prompt(model: LoadedModel, i: int, length: int) -> list[int]:
    return (model.tokenizer.encode(f"prompt {i}: the quick brown fox jumps over the lazy dog. ") * 40)[:length]


def test_seconds_go_to_the_components_that_ran(tiny: LoadedModel) -> None:
    runner = Runner(tiny, SMALL)
    seconds = runner.telemetry.seconds
    started = runner.telemetry.lap(COMPONENTS.index("idle"))
    before = sum(seconds)
    runner.run([text_prompt(tiny, 0, 200)], [SamplingParams(max_tokens=1)])
    spent = dict(zip(COMPONENTS, seconds, strict=True))
    assert spent["forward_prefill"] > 0
    assert spent["sample"] > 0
    assert spent["forward_decode"] == 0
    assert spent["dequant"] == 0
    runner.run([text_prompt(tiny, 1, 20)], [SamplingParams(max_tokens=50)])
    assert dict(zip(COMPONENTS, seconds, strict=True))["forward_decode"] > 0
    ended = runner.telemetry.lap(COMPONENTS.index("idle"))
    assert sum(seconds) - before == pytest.approx(ended - started, abs=1e-6)
    (record, _) = runner.telemetry.finished
    assert record.matrix.sum() == pytest.approx(record.finished - record.arrival, rel=1e-6)


def test_a_mixed_step_is_split_by_tokens(tiny: LoadedModel) -> None:
    runner = Runner(tiny, EngineConfig(num_blocks=200, max_model_len=1024, max_num_batched_tokens=65))
    runner.run(
        [text_prompt(tiny, i, 640) for i in range(2)], [SamplingParams(max_tokens=100), SamplingParams(max_tokens=1)]
    )
    assert runner.executor.kinds["mixed"] > 5
    seconds = dict(zip(COMPONENTS, runner.telemetry.seconds, strict=True))
    assert seconds["forward_prefill"] > 0
    assert seconds["forward_decode"] > 0


def test_int8_reports_errors_and_dequantization_under_load(tiny: LoadedModel) -> None:
    config = EngineConfig(
        num_blocks=200, max_model_len=1024, kv_dtype="int8", quant_sample_rate=1.0, max_num_batched_tokens=100
    )
    runner = Runner(tiny, config)
    requests = runner.run([text_prompt(tiny, i, 130 + i) for i in range(6)], [SamplingParams(max_tokens=40)] * 6)
    assert {r.outcome for r in requests} <= {"length", "stop"}
    seconds = dict(zip(COMPONENTS, runner.telemetry.seconds, strict=True))
    assert seconds["dequant"] > 0
    rows = {f.family.name: f.rows for f in runner.telemetry.snapshot()}
    relative = {}
    signal = {row.labels: row.value for row in rows[catalog.KV_QUANT_SIGNAL.name]}
    for row in rows[catalog.KV_QUANT_ERROR.name]:
        relative[row.labels] = (row.value / signal[row.labels]) ** 0.5
    assert {labels[1] for labels in relative} == {"key", "value"}
    assert {labels[2] for labels in relative} == {"00-00", "01-01", "02-02", "03-03"}
    # uniform rounding of a scale of max/127: its RMS is scale/sqrt(12); against a normal signal's that is near 0.5 %
    assert all(0.001 < value < 0.02 for value in relative.values())
    assert runner.executor.kv._tail_of == {}  # type: ignore[union-attr]


def test_a_seeded_request_gives_the_same_text_in_any_company(tiny: LoadedModel) -> None:
    mine = SamplingParams(max_tokens=30, temperature=0.8, top_p=0.9, seed=5)
    prompt = text_prompt(tiny, 0, 50)
    (alone,) = Runner(tiny, SMALL).run([prompt], [mine])
    others = [SamplingParams(max_tokens=25, temperature=0.5 * (i % 3), seed=i) for i in range(9)]
    runner = Runner(
        tiny, EngineConfig(num_blocks=24, block_size=4, max_model_len=96, max_num_batched_tokens=40, seed=9)
    )
    mixed = runner.run([text_prompt(tiny, i, 30) for i in range(1, 10)] + [prompt], [*others, mine])
    assert sum(r.num_preemptions for r in mixed) > 0
    assert mixed[-1].output == alone.output
    (other,) = Runner(tiny, SMALL).run([prompt], [SamplingParams(max_tokens=30, temperature=0.8, top_p=0.9, seed=6)])
    assert other.output != alone.output


def test_settings_that_do_not_fit_the_model(tiny: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="max_model_len = 9000 is longer than the 8192 tokens"):
        TorchExecutor(tiny, EngineConfig(num_blocks=1000, max_model_len=9000), None)
    with pytest.raises(ConfigError, match="bounded KV pool"):
        TorchExecutor(tiny, EngineConfig(num_blocks=None), None)
    with pytest.raises(ConfigError, match="cannot be allocated"):
        TorchExecutor(tiny, EngineConfig(num_blocks=1 << 40), None)


def test_prompts_that_no_model_can_read(tiny: LoadedModel) -> None:
    executor = TorchExecutor(tiny, SMALL, None)
    for prompt, reason in (
        (PromptSpan(4, (1,)), "hashes only"),
        ([1, 2, 259, 3], "outside 0..258"),
        ([1, -1, 2, 3], "outside"),
    ):
        request = Request("bad", prompt, SamplingParams())
        request.table = type("Table", (), {"blocks": [0]})()
        with pytest.raises(RequestError, match=reason):
            executor.execute(StepPlan([Chunk(request, 0, 4, samples=True)], []))


def test_engines_of_different_lengths_share_a_model(tiny: LoadedModel) -> None:
    """The rotary table of the model only grows: a shorter engine must not take positions from a longer one."""
    prompt = [5] * 200
    long = Runner(tiny, EngineConfig(num_blocks=64, max_model_len=512))
    (before,) = long.run([prompt], [SamplingParams(max_tokens=8)])
    Runner(tiny, EngineConfig(num_blocks=64, max_model_len=32)).run([[5, 6]], [SamplingParams(max_tokens=4)])
    (after,) = long.run([prompt], [SamplingParams(max_tokens=8)])
    assert after.output == before.output
