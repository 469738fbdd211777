"""Replay in process: hits are those of the trace, figures are exact, and virtual time says so."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from observability.engine.executor.hardware import GPUS
from observability.engine.executor.roofline import Roofline
from observability.engine.executor.virtual import ChunkShape, StepShape
from observability.engine.model.costs import MODELS
from observability.engine.model.tokenizer import byte_tokenizer
from observability.engine.types import EngineConfig, PromptSpan, Request, SamplingParams
from observability.errors import ConfigError, ModelError, TraceError
from observability.workload.generate import PRESETS, WORDS, generate_load
from observability.workload.replay import InProcess, one_token_words, replay_in_process, virtual_engine
from observability.workload.report import print_result
from observability.workload.results import ReplayResult
from observability.workload.traces import TraceRequest, read_trace, window
from tests.workload.truth import hit_rate, hits_of_unbounded_cache, mooncake_prompts

Buckets = dict[str, tuple[int, int]]


@pytest.fixture(scope="module")
def trace(data_dir: Path) -> Path:
    return data_dir / "traces" / "mooncake_conversation.jsonl"


def buckets(result: ReplayResult) -> Buckets:
    """(queried, hit) by length bucket."""
    kv = result.kv.by_length_bucket
    return {name: (row["queried_tokens"], row["hit_tokens"]) for name, row in kv.items()}  # type: ignore[misc]


def span(length: int, *hash_ids: int) -> PromptSpan:
    return PromptSpan(length, hash_ids or tuple(range(-(-length // 512))))


@pytest.mark.slow
def test_serial_replay_with_an_unbounded_cache_hits_what_the_file_says(trace: Path) -> None:
    result = replay_in_process(read_trace(trace), InProcess(serial=True, unbounded=True))
    want = hits_of_unbounded_cache(mooncake_prompts(trace))
    assert result.outcomes["length"] == result.requests == 12_031
    for name, (queried, hit) in buckets(result).items():
        assert queried == want[name][0]
        if queried:
            assert hit / queried == pytest.approx(want[name][1] / queried, abs=0.002)
    assert result.kv.hit_rate == pytest.approx(0.3736, abs=0.002)
    hittable = sum((tokens - 1) // 16 * 16 for tokens, _ in mooncake_prompts(trace))
    assert result.kv.hittable_tokens == hittable


def test_hits_never_rise_when_the_cache_shrinks(trace: Path) -> None:
    def serial(blocks: int | None) -> ReplayResult:
        target = InProcess(serial=True, kv_blocks=blocks, unbounded=blocks is None, max_model_len=127_000)
        return replay_in_process(read_trace(trace, limit=250), target)

    want = hits_of_unbounded_cache(mooncake_prompts(trace, 250))
    rates = [serial(blocks).kv.hit_rate or 0.0 for blocks in (None, 26_000, 16_000, 8_000)]
    assert rates[0] == pytest.approx(hit_rate(want), abs=1e-9)
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < rates[0]


def test_recorded_arrivals_and_bounded_caches_never_hit_more_than_the_serial_unbounded_one(trace: Path) -> None:
    best = hits_of_unbounded_cache(mooncake_prompts(trace, 500))
    for target in (
        InProcess(unbounded=True),
        InProcess(),
        InProcess(model="llama-3-70b", gpu="H200", tensor_parallel=4),
    ):
        result = replay_in_process(read_trace(trace, limit=500), target)
        for name, (queried, hit) in buckets(result).items():
            assert queried == best[name][0]
            assert hit <= best[name][1]


def test_latency_of_one_request_is_the_sum_of_its_steps() -> None:
    load = [TraceRequest(5.0, span(3000), 10)]
    result = replay_in_process(load, InProcess(max_num_batched_tokens=2048))
    steps = Roofline(MODELS["llama-3-8b"], GPUS["H100"], EngineConfig(num_blocks=None))
    overhead = 0.003
    chunks = [StepShape((chunk,)) for chunk in (ChunkShape(0, 2048, samples=False), ChunkShape(2048, 952))]
    ttft = sum(steps.step_cost(chunk).seconds + overhead for chunk in chunks)
    decodes = [steps.step_cost(StepShape((), (3000 + i,))).seconds + overhead for i in range(1, 10)]
    assert result.latency["time_to_first_token_seconds"]["p50"] == pytest.approx(ttft, rel=1e-9)  # type: ignore[index]
    assert result.latency["end_to_end_seconds"]["max"] == pytest.approx(ttft + sum(decodes), rel=1e-9)  # type: ignore[index]
    itl = result.latency["inter_token_seconds"]
    assert itl is not None
    assert itl["count"] == 9
    assert itl["p50"] == pytest.approx(sorted(decodes)[4], rel=1e-9)
    assert result.clock == "virtual"
    assert result.throughput["generated_tokens_per_second"] == pytest.approx(10 / (ttft + sum(decodes)))


def test_quantiles_phases_and_counts_are_those_of_the_requests(trace: Path) -> None:
    target = InProcess(gpu="A100-80", max_num_seqs=12)
    engine, telemetry = virtual_engine(target)
    result = replay_in_process(read_trace(trace, limit=300), target)
    # the same run again, with the figures worked out from the telemetry's records
    requests = [
        Request(
            f"{i}", r.prompt, SamplingParams(max_tokens=r.output_tokens, ignore_eos=True), arrival=r.arrival_seconds
        )
        for i, r in enumerate(read_trace(trace, limit=300))
    ]
    engine.run(requests)
    engine.check_integrity()
    latencies = sorted(r.finished - r.arrival for r in telemetry.records)
    end_to_end = result.latency["end_to_end_seconds"]
    assert end_to_end is not None
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p99.9", 0.999)):
        assert end_to_end[name] == pytest.approx(latencies[math.ceil(share * 300) - 1], rel=1e-9)
    itl = result.latency["inter_token_seconds"]
    assert itl is not None
    assert itl["count"] == sum(r.output_tokens - 1 for r in read_trace(trace, limit=300))
    assert itl["max"] == pytest.approx(max(r.max_itl for r in telemetry.records if r.max_itl is not None), rel=1e-9)
    assert itl["mean"] * itl["count"] == pytest.approx(
        sum(r.finished - r.first_token for r in telemetry.records if r.first_token is not None), rel=1e-9
    )
    assert result.generated_tokens == sum(r.output_tokens for r in read_trace(trace, limit=300))
    phases = result.phases
    assert phases is not None
    assert phases["all"].mean_latency_seconds == pytest.approx(np.mean(latencies))
    assert phases["slowest_1_percent"].mean_latency_seconds == pytest.approx(np.mean(latencies[-3:]))
    for part in phases.values():
        for view in (part.by_state, part.by_component):
            assert sum(view.values()) == pytest.approx(part.mean_latency_seconds, rel=1e-9)


def test_the_same_load_gives_the_same_result(trace: Path) -> None:
    one, other = (json.loads(replay_in_process(read_trace(trace, limit=100), InProcess()).to_json()) for _ in range(2))
    one.pop("wall_seconds"), other.pop("wall_seconds")
    assert one == other


def test_prompts_longer_than_the_context_are_counted_as_invalid_and_said(trace: Path) -> None:
    result = replay_in_process(read_trace(trace, limit=300), InProcess(max_model_len=8192))
    lengths = [tokens for tokens, _ in mooncake_prompts(trace, 300)]
    too_long = sum(tokens > 8191 for tokens in lengths)
    assert 0 < too_long == result.outcomes["invalid"]
    assert sum(result.outcomes.values()) == result.requests == 300
    assert result.reasons == {"prompt does not fit max_model_len = 8192": too_long}
    assert any(f"{too_long:,} of 300 requests were refused" in note for note in result.notes)
    assert result.kv.queried_tokens == sum(tokens for tokens in lengths if tokens <= 8191)


def test_answers_cut_short_by_the_context_are_said() -> None:
    result = replay_in_process([TraceRequest(0.0, span(1000), 100)], InProcess(max_model_len=1040))
    assert result.generated_tokens == 40
    assert any("cut short" in note for note in result.notes)


def test_kv_use_is_measured_over_time_and_unknown_without_a_capacity() -> None:
    load = [TraceRequest(0.0, span(16_000), 4000)]
    use = replay_in_process(load, InProcess(kv_blocks=10_000)).kv.use
    assert use is not None
    assert use.capacity_blocks == 10_000
    assert use.usage_ratio is not None
    # from 1,000 blocks to 1,250 while it decodes for about half a minute
    assert use.usage_ratio["mean"] == pytest.approx(0.1125, abs=0.003)
    assert use.usage_ratio["max"] == pytest.approx(0.125, abs=0.002)
    assert use.bytes_per_block == 16 * 131_072
    unbounded = replay_in_process(load, InProcess(unbounded=True)).kv.use
    assert unbounded is not None
    assert unbounded.usage_ratio is None
    assert unbounded.external_fragmentation_ratio is None


def test_preemption_and_recomputation_are_counted_apart_from_hits() -> None:
    load = [TraceRequest(0.0, span(1000, 2 * i, 2 * i + 1), 1500) for i in range(6)]
    result = replay_in_process(load, InProcess(kv_blocks=500, max_model_len=4000))
    assert result.outcomes["length"] == 6
    assert result.preemptions is not None
    assert result.preemptions > 0
    assert result.kv.recomputed_tokens is not None
    assert result.kv.hit_tokens == 0  # six distinct prompts
    assert result.kv.queried_tokens == 6000


def test_time_scale_brings_queueing(trace: Path) -> None:
    calm, rushed = (
        replay_in_process(read_trace(trace, limit=150, time_scale=scale, length_scale=0.1), InProcess())
        for scale in (0.1, 10.0)
    )
    assert calm.phases is not None
    assert rushed.phases is not None
    queued = [phases["all"].by_state["queued"] for phases in (calm.phases, rushed.phases)]
    assert queued[1] > 2 * queued[0]
    assert rushed.latency["end_to_end_seconds"]["p50"] > 2 * calm.latency["end_to_end_seconds"]["p50"]  # type: ignore[index]


@pytest.mark.parametrize("model", MODELS)
def test_every_model_replays_on_hardware_that_holds_it(model: str) -> None:
    gpu, group = ("H200", 8) if model.startswith("deepseek") else ("H200", 1)
    if model == "smollm2-135m":
        gpu = "cpu-laptop"
    if model == "llama-3-70b":
        group = 4
    load = window(generate_load(PRESETS["laptop"]), limit=60)
    result = replay_in_process(load, InProcess(model=model, gpu=gpu, tensor_parallel=group))
    assert result.outcomes["length"] == 60
    assert result.kv.hit_rate is not None


def test_a_real_model_replays_in_real_time_with_the_same_hits() -> None:
    load = list(window(generate_load(PRESETS["laptop"], 5), limit=12, time_scale=1000))
    result = replay_in_process(load, InProcess(model="tiny", gpu=None, serial=True, max_model_len=8192))
    assert result.clock == "real"
    assert result.settings["target"] == "torch"
    assert result.outcomes["length"] == 12
    assert result.generated_tokens == sum(r.output_tokens for r in load)
    want = hits_of_unbounded_cache(
        ((r.prompt.length, r.prompt.hash_ids) for r in load), part_tokens=load[0].prompt.part_tokens
    )
    # Tokens of parts that only look different may agree by chance for a block of 16: never with this vocabulary.
    assert buckets(result) == want
    assert result.duration_seconds <= result.wall_seconds
    assert result.phases is not None
    assert sum(result.phases["all"].by_state.values()) == pytest.approx(result.phases["all"].mean_latency_seconds)


def test_a_real_model_gets_requests_at_their_time() -> None:
    load = [TraceRequest(0.25 * i, span(40, i), 2) for i in range(5)]
    result = replay_in_process(load, InProcess(model="tiny", gpu=None))
    assert result.outcomes["length"] == 5
    assert 1.0 <= result.duration_seconds <= result.wall_seconds
    assert result.clock == "real"


def test_progress_counts_every_end_once() -> None:
    seen: list[int] = []
    load = [TraceRequest(0.0, span(9000 if i % 3 == 0 else 100, *range(20 * i, 20 * i + 18)), 5) for i in range(9)]
    replay_in_process(load, InProcess(max_model_len=8192), on_end=seen.append)
    assert sorted(seen) == list(range(1, 10))


def test_a_load_that_breaks_off_fails_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": [1]}\n\n{}\n')
    for gpu, model in (("H100", "llama-3-8b"), (None, "tiny")):
        with pytest.raises(TraceError, match="line 2: is empty"):
            replay_in_process(read_trace(path), InProcess(gpu=gpu, model=model))


@pytest.mark.parametrize(
    ("options", "error", "reason"),
    [
        ({"gpu": "H1000"}, ConfigError, "no record of a GPU"),
        ({"model": "gpt-2"}, ConfigError, "no cost record"),
        ({"model": "llama-3-70b"}, ConfigError, "leaves no room for KV"),
        ({"kv_blocks": 10}, ConfigError, "cannot hold one sequence"),
        ({"kv_blocks": 10_000_000}, ConfigError, "do not fit H100"),
        ({"kv_blocks": 10_000, "unbounded": True}, ConfigError, "unbounded"),
        ({"gpu": None, "unbounded": True}, ConfigError, "simulated GPUs"),
        ({"kv_dtype": "int3"}, ConfigError, "int3"),
        ({"gpu": None, "model": "no-such-model"}, ModelError, "no model 'no-such-model'"),
    ],
)
def test_settings_that_cannot_be_are_refused(options: dict[str, object], error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        replay_in_process([], InProcess(**options))  # type: ignore[arg-type]


def test_the_table_says_virtual_time_wherever_figures_come_from_it(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    print_result(replay_in_process(read_trace(trace, limit=50), InProcess()))
    text = capsys.readouterr().out
    for line in ("Replay in virtual time", "Latency (virtual time)", "Where the time went, mean (virtual time)", "Throughput (virtual time)"):  # fmt: skip
        assert line in text
    assert "real time" not in text
    assert "\x1b" not in text  # no colour in a pipe
    print_result(replay_in_process([TraceRequest(0.0, span(40), 2)], InProcess(model="tiny", gpu=None)))
    text = capsys.readouterr().out
    assert "Latency (real time)" in text
    assert "virtual" not in text


def test_words_are_single_tokens_or_the_bytes_that_spell_them() -> None:
    ids = one_token_words(byte_tokenizer())
    spelled = {c for word in WORDS for c in f" {word}".encode()}
    assert len(ids) == len(set(ids)) == len(spelled)
