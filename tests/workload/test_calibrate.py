"""Calibration: the fit finds the costs that steps were made with, the file says what it is, virtual time is what it says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

from observability.engine.clock import VirtualClock
from observability.engine.engine import Engine
from observability.engine.executor.calibrated import (
    FEATURES,
    CalibratedTimes,
    Calibration,
    default_path,
    load_calibration,
)
from observability.engine.executor.torch_executor import TorchExecutor
from observability.engine.executor.virtual import ChunkShape, StepShape, VirtualExecutor
from observability.engine.model.loading import load_model
from observability.engine.types import EngineConfig, PromptSpan, Request, SamplingParams, StepPlan
from observability.errors import ConfigError
from observability.workload.calibrate import Step, _kv_bytes, fit, plans
from observability.workload.replay import InProcess, MeasuredTelemetry, calibrated_engine, replay_in_process
from observability.workload.traces import TraceRequest

ROWS = ((1, 0.04), (2, 0.06), (8, 0.07), (64, 0.2), (512, 1.6))
COSTS = {
    "sampled_row": 0.001, "decode_step": 0.002, "visible_token": 2e-6, "chunk": 0.003, "first_chunk_pair": 1e-6,
    "later_chunk_pair": 1.5e-6, "later_chunk_context": 1e-5,
}  # fmt: skip
OVERHEAD = 0.0005 + 0.0004 + 0.0001


def record(**changes: Any) -> Calibration:
    fields: dict[str, Any] = {
        "model": "smollm2-135m", "device": "cpu", "processor": "a processor", "threads": 2, "kv_dtype": "auto",
        "measured_at": "2026-01-31T12:00:00+00:00", "versions": {"torch": "2.13.0"}, "load_average": 0.5,
        "steps_measured": 400, "median_relative_error": {"decode": 0.04}, "max_num_seqs": 8, "max_num_batched_tokens": 512,
        "max_context": 8192, "memory_bytes": 8_000_000_000, "weight_bytes": 538_060_032, "kv_bytes_per_token": 46080.0,
        "kv_fixed_bytes_per_sequence": 0, "copy_bytes_per_second": 1e9, "schedule_seconds": 0.0005,
        "sample_seconds": 0.0004, "emit_seconds": 0.0001, "row_seconds": ROWS, "coefficients": COSTS,
    }  # fmt: skip
    return Calibration(**fields | changes)


def row_seconds(rows: int) -> float:
    """The table read by hand: linear between its entries, in proportion beyond the last."""
    if rows > 512:
        return 1.6 * rows / 512
    return float(np.interp(rows, [known for known, _ in ROWS], [seconds for _, seconds in ROWS]))


def step_seconds(chunks: list[tuple[int, int, bool]], visible: list[int]) -> float:
    """A step priced chunk by chunk and token by token."""
    rows = len(visible)
    seconds = OVERHEAD + COSTS["visible_token"] * sum(visible) + COSTS["sampled_row"] * len(visible)
    if visible:
        seconds += COSTS["decode_step"]
    for start, tokens, samples in chunks:
        rows += tokens
        seconds += COSTS["chunk"] + COSTS["sampled_row"] * samples
        if start == 0:
            seconds += COSTS["first_chunk_pair"] * sum(range(1, tokens + 1))
        else:
            seconds += COSTS["later_chunk_pair"] * tokens * (start + tokens)
            seconds += COSTS["later_chunk_context"] * (start + tokens)
    return seconds + row_seconds(rows)


def modelled(times: CalibratedTimes, shape: StepShape) -> float:
    return times.forward(shape)[0] + times.overhead.seconds


def grid() -> list[StepShape]:
    """Decodes, chunks and both, as a calibration measures them, with rows at the entries of ROWS among them."""
    shapes = [StepShape(visible=(c,) * n) for n in (1, 2, 4, 8) for c in (20, 500, 1500)]
    shapes += [StepShape((ChunkShape(start, t),)) for t in (8, 16, 64, 256, 512) for start in (0, 1024)]
    shapes += [StepShape((ChunkShape(0, 512, False),)), StepShape((ChunkShape(0, 32), ChunkShape(0, 32)))]
    shapes += [StepShape((ChunkShape(0, 64 - n),), (500,) * n) for n in (1, 4, 8)]
    shapes += [StepShape((ChunkShape(512, 8),) * n) for n in (1, 2, 4, 8)]
    return shapes


def priced(shape: StepShape) -> float:
    return step_seconds([(c.start, c.tokens, c.samples) for c in shape.chunks], list(shape.visible))


def test_the_fit_finds_the_cost_of_steps_it_has_not_seen_in_spite_of_noise_and_outliers() -> None:
    random = np.random.default_rng(1)
    steps = []
    for shape in grid():
        for _ in range(5):
            noise = float(np.exp(random.normal(0.0, 0.05)))
            if random.random() < 0.1:
                noise *= 3.0  # another process had the machine
            steps.append(Step(shape, priced(shape) * noise, 0.0005, 0.0004, 0.0001))
    found = fit(steps)
    assert found.overhead == pytest.approx((0.0005, 0.0004, 0.0001))
    times = CalibratedTimes(record(row_seconds=found.row_seconds, coefficients=found.coefficients), EngineConfig())
    unseen = [
        StepShape(visible=(900,) * 4), StepShape(visible=(100, 1200)), StepShape((ChunkShape(0, 300),)),
        StepShape((ChunkShape(512, 200),)), StepShape((ChunkShape(0, 128),), (300,) * 6), StepShape((ChunkShape(0, 400),)),
    ]  # fmt: skip
    for shape in unseen:
        assert modelled(times, shape) == pytest.approx(priced(shape), rel=0.12), shape
    assert set(found.median_relative_error) == {"prefill", "decode", "mixed"}
    assert max(found.median_relative_error.values()) < 0.06


def test_without_noise_the_fit_gives_back_every_step() -> None:
    found = fit([Step(shape, priced(shape), 0.0005, 0.0004, 0.0001) for shape in grid()])
    times = CalibratedTimes(record(row_seconds=found.row_seconds, coefficients=found.coefficients), EngineConfig())
    for shape in grid():
        assert modelled(times, shape) == pytest.approx(priced(shape), rel=0.02), shape
    assert all(value >= 0.0 for value in found.coefficients.values())
    # attention is told apart from rows, because the same rows were seen with other contexts
    assert found.coefficients["visible_token"] == pytest.approx(COSTS["visible_token"], rel=0.1)


def test_nothing_to_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="no steps"):
        fit([])


def test_plans_cover_batches_lengths_and_starts_within_the_limits() -> None:
    for seqs, tokens in ((8, 512), (1, 64), (12, 700)):
        todo = plans(seqs, tokens)
        assert max(plan.sequences for plan in todo if plan.generate > 1) == seqs
        assert {plan.cached for plan in todo if plan.new == tokens} == {0, 1024}
        assert all(plan.sequences + bool(plan.mixed) <= seqs or plan.cached == 0 for plan in todo)


# -- the file ---------------------------------------------------------------------------------------------------------


def test_a_record_comes_back_from_its_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "mine.json"
    record().save(path)
    assert load_calibration(str(path)) == record()
    assert load_calibration(str(path), "smollm2-135m") == record()


def test_calibrated_means_the_file_in_the_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="no calibration at") as missing:
        load_calibration("calibrated", "smollm2-135m", "int8")
    assert missing.value.next_step == "Run `kvscope calibrate --model smollm2-135m --kv-dtype int8` first."
    record(kv_dtype="int8").save(default_path("smollm2-135m", "int8"))
    assert load_calibration("calibrated", "smollm2-135m", "int8").kv_dtype == "int8"
    assert {path.name for path in (tmp_path / "kvscope").iterdir()} == {"calibration-smollm2-135m-int8.json"}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("not json", "is not a calibration"),
        ("[1, 2]", "is not a calibration"),
        ('{"model": "tiny"}', "is not a calibration"),
        ('{"kind": "kvscope calibration", "format_version": 0}', "has format version 0; this kvscope reads version 1"),
        ('{"kind": "kvscope calibration", "format_version": 1}', "is damaged: model"),
    ],
)
def test_what_is_no_calibration_of_this_version_is_refused_with_the_way_out(
    tmp_path: Path, text: str, reason: str
) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=reason) as refused:
        load_calibration(str(path))
    assert "kvscope calibrate" in refused.value.next_step


@pytest.mark.parametrize(
    "damage",
    [
        {"row_seconds": []},
        {"row_seconds": [[8, 1.0], [2, 1.0]]},
        {"row_seconds": [[1, -1.0]]},
        {"coefficients": {"visible_token": 1e-6}},
        {"threads": 0},
        {"extra": 1},
    ],
)
def test_a_record_that_contradicts_itself_is_refused(tmp_path: Path, damage: dict[str, Any]) -> None:
    path = tmp_path / "damaged.json"
    path.write_text(json.dumps(record().model_dump(mode="json") | damage))
    with pytest.raises(ConfigError, match="is damaged"):
        load_calibration(str(path))


def test_another_model_or_kv_format_than_was_measured_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    record().save(path)
    with pytest.raises(ConfigError, match="calibrated with smollm2-135m, not with llama-3-8b"):
        replay_in_process([], InProcess(gpu=str(path)))
    with pytest.raises(ConfigError, match="kv_dtype auto, not with int8"):
        replay_in_process([], InProcess(gpu=str(path), model="smollm2-135m", kv_dtype="int8"))
    with pytest.raises(ConfigError, match="one device"):
        replay_in_process([], InProcess(gpu=str(path), model="smollm2-135m", tensor_parallel=3))


# -- virtual time -----------------------------------------------------------------------------------------------------

chunk_lists = st.lists(
    st.tuples(st.sampled_from([0, 16, 700, 4000]), st.integers(1, 700), st.booleans()), max_size=3
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(chunks=chunk_lists, visible=st.lists(st.integers(1, 8000), max_size=12))
def test_a_step_takes_what_its_parts_are_said_to_take(chunks: list[tuple[int, int, bool]], visible: list[int]) -> None:
    if not chunks and not visible:
        return
    shape = StepShape(tuple(ChunkShape(*chunk) for chunk in chunks), tuple(visible))
    times = CalibratedTimes(record(), EngineConfig())
    assert modelled(times, shape) == pytest.approx(step_seconds(chunks, visible), rel=1e-12)
    share = times.forward(shape)[1]
    assert 0.0 <= share <= 1.0
    assert share == 1.0 or visible
    assert share == 0.0 or chunks


def test_latency_of_a_request_is_the_sum_of_its_steps_worked_out_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    record().save(path)
    load = [TraceRequest(5.0, PromptSpan(700, (1, 2)), 4)]
    result = replay_in_process(load, InProcess(gpu=str(path), model="smollm2-135m"))
    ttft = step_seconds([(0, 512, False)], []) + step_seconds([(512, 188, True)], [])
    decodes = sum(step_seconds([], [701 + i]) for i in range(3))
    assert result.latency["time_to_first_token_seconds"]["max"] == pytest.approx(ttft, rel=1e-9)  # type: ignore[index]
    assert result.latency["end_to_end_seconds"]["max"] == pytest.approx(ttft + decodes, rel=1e-9)  # type: ignore[index]
    assert result.clock == "virtual"
    assert any(
        "smollm2-135m, calibrated on a processor (2 threads) at 2026-01-31T12:00:00+00:00" in note
        for note in result.notes
    )
    # 8 GB x 0.9 beside the weights, by 16 x 46,080 B; the model's context fits
    assert result.settings["num_blocks"] == int((7.2e9 - 538_060_032) // (16 * 46_080))
    assert (result.settings["max_num_seqs"], result.settings["max_num_batched_tokens"]) == (8, 512)
    assert result.settings["max_model_len"] == 8192


def test_blocks_that_do_not_fit_the_memory_are_refused() -> None:
    with pytest.raises(ConfigError, match="there is room for 9,035"):
        calibrated_engine(record(), EngineConfig(num_blocks=9036))
    with pytest.raises(ConfigError, match="leaves no room for KV"):
        CalibratedTimes(record(memory_bytes=500_000_000), EngineConfig()).fit_num_blocks(EngineConfig())


def requests_of(lengths: list[int], tokens: list[int], arrivals: list[float]) -> list[Request]:
    return [
        Request(f"r{i}", PromptSpan(n, tuple(range(i * 100, i * 100 + 9))), SamplingParams(max_tokens=t), arrival=a)
        for i, (n, t, a) in enumerate(zip(lengths, tokens, sorted(arrivals), strict=True))
    ]


class _OneByOne(VirtualExecutor):
    """Takes no run of equal steps at once."""

    def execute(self, plan: StepPlan, until: float | None) -> Any:
        return super().execute(StepPlan(plan.prefill, plan.decode, repeats=1), until)


@settings(max_examples=25, deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.integers(1, 1500), st.integers(1, 200), st.floats(0.0, 20.0)), min_size=1, max_size=8
    )
)
def test_fast_forward_ends_every_request_when_single_steps_do(requests: list[tuple[int, int, float]]) -> None:
    lengths, tokens, arrivals = (list(column) for column in zip(*requests, strict=True))
    config = EngineConfig(num_blocks=2000, max_num_seqs=4, max_num_batched_tokens=512)
    ends = []
    for kind in (VirtualExecutor, _OneByOne):
        clock, times = VirtualClock(), CalibratedTimes(record(), config)
        telemetry = MeasuredTelemetry("smollm2-135m", "roofline", times.device, "auto", clock)
        engine = Engine(config, kind(times, config, telemetry, clock=clock), telemetry)
        engine.run(requests_of(lengths, tokens, arrivals))
        engine.check_integrity()
        ends.append({r.request_id: (r.first_token, r.finished) for r in telemetry.records})
    assert len(ends[0]) == len(requests)
    for name, pair in ends[0].items():
        assert pair == pytest.approx(ends[1][name], rel=1e-9), name


def test_a_calibration_knows_quantized_blocks_of_every_size() -> None:
    """The scales of a block's keys are the block's, whatever its size."""
    loaded = load_model("tiny")
    config = EngineConfig(num_blocks=64, max_model_len=1024, kv_dtype="int8")
    per_token, per_block = _kv_bytes(loaded, config)
    found = record(kv_dtype="int8", kv_bytes_per_token=per_token, kv_block_bytes=per_block)
    for size in (4, 16, 64):
        sized = replace(config, block_size=size, num_blocks=1024 // size)
        stored = TorchExecutor(loaded, sized, None).kv_bytes_per_block
        assert CalibratedTimes(found, sized).kv_bytes_per_block == stored
    room = 8_000_000_000 * 0.9 - 538_060_032
    assert CalibratedTimes(found, sized).fit_num_blocks(sized) == int(room // stored)


# -- the command ------------------------------------------------------------------------------------------------------


def test_calibrate_writes_a_record_that_replay_takes(tmp_path: Path) -> None:
    path = tmp_path / "tiny.json"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}

    def kvscope(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "observability.cli", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)

    settings = ("--model", "tiny", "--output", str(path))
    made = kvscope("calibrate", *settings, "--quick", "--threads", "1", "--max-num-seqs", "4", "--json")
    assert made.returncode == 0, made.stderr
    found = load_calibration(str(path), "tiny")
    assert json.loads(made.stdout) == found.model_dump(mode="json")
    assert found.steps_measured > 50
    assert set(found.coefficients) == set(FEATURES)
    replayed = kvscope("replay", "generated", "--preset", "laptop", "--limit", "5", "--gpu", str(path), "--json", "-")
    assert replayed.returncode == 0, replayed.stderr
    assert any("tiny, calibrated on" in note for note in json.loads(replayed.stdout)["notes"])
