"""The p99-plan experiment: arms that differ by one mechanism on the same memory, a load near a saturation that is really one, exact figures."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from observability.catalog import COMPONENTS, STATES
from observability.cli import root
from observability.engine.executor.hardware import GPUS
from observability.engine.executor.roofline import Roofline
from observability.engine.executor.virtual import ChunkShape, StepShape
from observability.engine.model.costs import MODELS
from observability.engine.types import EngineConfig, PromptSpan, Request, SamplingParams
from observability.errors import ConfigError, KvscopeError
from observability.workload.experiment import (
    MECHANISM_NAMES,
    NO_LIMIT,
    ExperimentResult,
    ExperimentSettings,
    at_rate,
    backlog_growth,
    cumulative_arms,
    find_max_rate,
    plan_sizes,
    rate_of,
    run_experiment,
    with_classes,
)
from observability.workload.experiment_report import findings, plot_html, print_experiment, verdicts
from observability.workload.generate import PRESETS, generate_load
from observability.workload.replay import InProcess, virtual_engine
from observability.workload.traces import TraceRequest, window

KVSCOPE = str(Path(sys.executable).with_name("kvscope"))
#: Settings of the engine that each mechanism is made of.
OWN = {
    "paging": {"reservation"},
    "contiguous": {"contiguous_below"},
    "prefix-cache": {"prefix_caching"},
    "compression": {"num_blocks", "num_compressed_blocks", "compressed_from", "recent_window"},
    "compaction": {"compaction_seconds"},
    "host-tier": {"num_host_blocks"},
    "predictive": {"predictive_admission"},
    "spread": {"spread_limit"},
    "classes": {"class_queues"},
    "swapping": {"swapping"},
    "controller": {"controller"},
}
TARGET = InProcess(kv_blocks=3000)  # H100 and llama-3-8b with a ninth of its memory


def small_load(count: int = 28) -> list[TraceRequest]:
    """An eighth of the recorded lengths."""
    return list(window(generate_load(replace(PRESETS["recorded"], length_scale=1 / 8), 3), limit=count))


@pytest.fixture(scope="module")
def everything() -> ExperimentResult:
    return run_experiment(small_load(), TARGET, ExperimentSettings(ablation=True, probe_requests=20))


def differing(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    return {name for name in EngineConfig.__dataclass_fields__ if name in one and one[name] != other[name]}


def test_each_arm_differs_from_the_one_before_in_exactly_one_mechanism(everything: ExperimentResult) -> None:
    engines = [arm.replay.settings for arm in everything.arms]
    assert [arm.arm.differs_by for arm in everything.arms] == [None, *MECHANISM_NAMES]
    for name, before, after in zip(MECHANISM_NAMES, engines[:-1], engines[1:], strict=True):
        changed = differing(before, after)
        assert changed
        assert changed <= OWN[name]


def test_the_baseline_has_every_mechanism_off(everything: ExperimentResult) -> None:
    engine = everything.arms[0].replay.settings
    assert engine["reservation"] == "max_model_len"
    for name in ("prefix_caching", "class_queues", "swapping", "predictive_admission"):
        assert engine[name] is False
    for name in ("contiguous_below", "spread_limit", "num_host_blocks", "num_compressed_blocks", "compaction_seconds"):
        assert engine[name] == 0
    assert engine["controller"] is None
    longest = max(r.prompt.length + r.output_tokens for r in small_load())
    assert longest <= engine["max_model_len"] < longest + 1024 // 8


def test_leaving_a_mechanism_out_leaves_out_it_and_what_needs_it(everything: ExperimentResult) -> None:
    full = everything.arms[-1].replay.settings
    for arm in everything.ablation:
        name = str(arm.arm.differs_by)
        changed = differing(full, arm.replay.settings)
        gone = {m for m in MECHANISM_NAMES if changed & OWN[m]}
        assert name in gone
        if name not in ("paging", "contiguous", "prefix-cache", "host-tier"):
            assert gone == {name}


def test_every_arm_has_the_same_bytes_of_kv_on_the_device(everything: ExperimentResult) -> None:
    exact = 16 * 32 * 2 * 8 * 128 * 2  # bf16
    packed = (
        32 * 8 * (16 * (2 * 128 + 4) + 4 * 128)
    )  # int8, and float32 scales of tokens' values and of a block's key channels
    for arm in (*everything.arms, *everything.ablation):
        engine = arm.replay.settings
        used = engine["num_blocks"] * exact + engine["num_compressed_blocks"] * packed
        assert used == 3000 * exact


def test_every_arm_serves_the_same_requests(everything: ExperimentResult) -> None:
    load = small_load()
    for arm in (*everything.arms, *everything.ablation, everything.no_limit):
        assert arm is not None
        assert arm.replay.outcomes["length"] == len(load)
        assert arm.replay.prompt_tokens == sum(r.prompt.length for r in load)
        assert arm.replay.generated_tokens == sum(r.output_tokens for r in load)


def test_figures_are_those_of_the_records(everything: ExperimentResult) -> None:
    load = with_classes(small_load())
    rate, total = everything.load.requests_per_second, 3000 * 16 * 131_072
    for measured in (everything.arms[0], everything.arms[2], everything.arms[-1]):
        arm, figures = measured.arm, measured.figures
        engine, telemetry = virtual_engine(replace(TARGET, kv_blocks=None, engine=dict(arm.engine)))
        held: list[tuple[float, float, float]] = []

        def look(now: float, engine: Any = engine, held: list[tuple[float, float, float]] = held) -> None:
            pools = [engine.kv.pool, *([engine.kv.compressed] if engine.kv.compressed else [])]
            sizes = (engine.executor.kv_bytes_per_block, engine.executor.kv_bytes_per_compressed_block)
            active = sum(p.num_active * size for p, size in zip(pools, sizes, strict=False))
            reusable = sum(p.num_evictable * size for p, size in zip(pools, sizes, strict=False))
            held.append((now, active / total, reusable / total))

        requests = [
            Request(f"{i}", r.prompt, SamplingParams(max_tokens=r.output_tokens, ignore_eos=True), r.request_class, r.arrival_seconds)
            for i, r in enumerate(at_rate(load, rate))
        ]  # fmt: skip
        engine.run(requests, tick_seconds=len(load) / rate / 200, on_tick=look)
        records = telemetry.records
        n = len(records)
        ttft = sorted(r.first_token - r.arrival for r in records)  # type: ignore[operator]
        slowest = sorted(records, key=lambda r: r.finished - r.arrival)
        assert figures.ttft_p50_seconds == pytest.approx(ttft[math.ceil(n * 0.5) - 1])
        assert figures.ttft_p99_seconds == pytest.approx(ttft[math.ceil(n * 0.99) - 1])
        assert figures.end_to_end_p99_seconds == pytest.approx(slowest[-1].finished - slowest[-1].arrival)
        seconds = max(r.finished for r in records) - min(r.arrival for r in records)
        assert figures.requests_per_second == pytest.approx(n / seconds)
        tokens = sum(r.prompt_tokens + r.generated_tokens for r in records)
        assert figures.tokens_per_second == pytest.approx(tokens / seconds)
        assert figures.preemptions == sum(r.preemptions for r in records)
        # 28 requests: the slowest 1 % are one
        worst, kv = slowest[-1], 0.0
        for i, state in enumerate(STATES):
            for j, component in enumerate(COMPONENTS):
                if (
                    state in ("kv_wait", "preempted", "swapped")
                    or component.startswith("kv_")
                    or component == "dequant"
                ):
                    kv += worst.matrix[i, j]
        assert figures.kv_management_ratio == pytest.approx(kv / (worst.finished - worst.arrival))
        blocked = sum(r.matrix[STATES.index("kv_wait")].sum() for r in records) / seconds
        assert figures.head_blocked_ratio == pytest.approx(min(blocked, 1.0))
        inside = [row for row in held if row[0] <= requests[-1].arrival]
        for column, told in ((1, figures.held_ratio), (2, figures.cached_ratio)):
            area = sum((b[0] - a[0]) * (a[column] + b[column]) / 2 for a, b in pairwise(inside))
            assert told == pytest.approx(area / (inside[-1][0] - inside[0][0]), rel=1e-6, abs=1e-9)


def test_memory_use_is_known_where_one_sequence_reserves_a_known_room() -> None:
    # Ten sequences run all the time; each holds 8,192 tokens and stores 4,000 to 4,800.
    load = [TraceRequest(0.01 * i, PromptSpan(4000, tuple(range(8 * i, 8 * i + 8))), 800) for i in range(10)]
    load.append(TraceRequest(20.0, PromptSpan(100, (1000,)), 1))
    target = InProcess(kv_blocks=10 * 512, max_model_len=8192)
    arms = ExperimentSettings(arms=("paging",), time_scale=1.0)
    baseline, paging = run_experiment(load, target, arms).arms
    assert paging.figures.useful_ratio == pytest.approx(1.0, abs=0.02)
    assert baseline.figures.useful_ratio == pytest.approx(4400 / 8192, abs=0.05)
    assert baseline.figures.stored_ratio is not None
    assert baseline.figures.held_ratio is not None
    assert baseline.figures.stored_ratio / baseline.figures.held_ratio == pytest.approx(baseline.figures.useful_ratio)
    assert baseline.figures.held_ratio > paging.figures.held_ratio  # type: ignore[operator]


# -- saturation -------------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(st.floats(1e-3, 1e3), st.floats(0.02, 50.0))
def test_bisection_finds_a_threshold_from_any_guess(capacity: float, off: float) -> None:
    asked: list[float] = []

    def sustained(rate: float) -> bool:
        asked.append(rate)
        return rate <= capacity

    found = find_max_rate(sustained, capacity * off)
    assert capacity / 1.021 <= found <= capacity
    assert len(asked) == len(set(asked))


def test_bisection_gives_up_where_there_is_no_threshold() -> None:
    for answer in (True, False):
        with pytest.raises(ConfigError, match="No saturation"):
            find_max_rate(lambda _, answer=answer: answer, 1.0)  # type: ignore[misc]


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**32 - 1), st.integers(1, 8), st.floats(0.05, 20.0))
def test_the_criterion_finds_the_capacity_of_a_queue(seed: int, servers: int, service_seconds: float) -> None:
    """M/D/c: its capacity is servers / service time."""
    rng = np.random.default_rng(seed)
    steps = rng.exponential(1.0, 1500)

    def sustained(rate: float) -> bool:
        arrivals = np.cumsum(steps) / rate
        free, ends = [0.0] * servers, []
        for arrival in arrivals:
            first = min(range(servers), key=free.__getitem__)
            free[first] = max(arrival, free[first]) + service_seconds
            ends.append(free[first])
        return backlog_growth(arrivals, np.array(ends)) <= 0.05

    capacity = servers / service_seconds
    assert find_max_rate(sustained, 1.3 * capacity) == pytest.approx(capacity, rel=0.15)


@pytest.mark.parametrize("overload", [1.0, 1.25, 2.0])
def test_growth_is_the_share_of_arrivals_that_pile_up(overload: float) -> None:
    arrivals = np.arange(1000) / overload
    ends = np.arange(1000) + 1.0  # one a second
    assert backlog_growth(arrivals, ends) == pytest.approx(1.0 - 1.0 / overload, abs=0.01)
    assert backlog_growth(arrivals, arrivals + 3.5 / overload) == pytest.approx(0.0, abs=1e-9)


def test_saturation_of_an_engine_with_one_seat_is_one_over_its_service_time() -> None:
    load = [TraceRequest(float(i), PromptSpan(2000, tuple(range(4 * i, 4 * i + 4))), 40) for i in range(60)]
    target = InProcess(kv_blocks=2000, max_num_seqs=1)
    result = run_experiment(load, target, ExperimentSettings(arms=("paging",), capacity=True))
    steps = Roofline(MODELS["llama-3-8b"], GPUS["H100"], EngineConfig(num_blocks=None))
    service = steps.step_cost(StepShape((ChunkShape(0, 2000),))).seconds + 0.003
    service += sum(steps.step_cost(StepShape((), (2000 + i,))).seconds + 0.003 for i in range(1, 40))
    assert result.load.saturation_requests_per_second == pytest.approx(1 / service, rel=0.08)
    assert result.load.requests_per_second == pytest.approx(0.92 * result.load.saturation_requests_per_second)  # type: ignore[operator]
    for arm in result.arms:  # memory is not what limits this engine
        assert arm.capacity_requests_per_second == pytest.approx(1 / service, rel=0.08)


# -- load and sizes ---------------------------------------------------------------------------------------------------------


def test_classes_come_from_the_recording_or_else_from_prompt_lengths() -> None:
    def load(*lengths: int, of_class: str = "standard") -> list[TraceRequest]:
        return [TraceRequest(0.0, PromptSpan(n, tuple(range(-(-n // 512)))), 1, of_class) for n in lengths]

    assert [r.request_class for r in with_classes(load(2047, 2048, 32_767, 32_768))] == [
        "interactive", "standard", "standard", "long_context",
    ]  # fmt: skip
    told = load(10_000, of_class="interactive") + load(100)
    assert with_classes(told) == told


def test_a_load_at_another_rate_keeps_its_requests_and_their_spacing() -> None:
    load = small_load(30)
    moved = list(at_rate(load, 7.0))
    assert rate_of(moved) == pytest.approx(7.0)
    factor = rate_of(load) / 7.0
    assert [r.arrival_seconds for r in moved] == pytest.approx([r.arrival_seconds * factor for r in load])
    assert [r.prompt for r in moved] == [r.prompt for r in load]


def test_requests_above_max_model_len_are_left_out_and_that_is_said() -> None:
    load, limit = small_load(), 2048
    fit = [r for r in load if r.prompt.length + r.output_tokens <= limit]
    assert 0 < len(fit) < len(load)
    target = InProcess(kv_blocks=1000, max_model_len=limit)
    result = run_experiment(load, target, ExperimentSettings(arms=("paging",), time_scale=0.1))
    assert result.load.requests == len(fit)
    assert any(note.startswith(f"{len(load) - len(fit)} requests longer than 2,048 tokens") for note in result.notes)
    assert result.arms[0].replay.outcomes["rejected"] == 0


def test_compressed_blocks_get_the_share_of_tokens_that_lie_in_them() -> None:
    short = [TraceRequest(float(i), PromptSpan(1000, (2 * i, 2 * i + 1)), 24) for i in range(40)]
    long = [TraceRequest(float(i), PromptSpan(40_000, tuple(range(10**6, 10**6 + 79))), 960) for i in range(2)]
    sizes = plan_sizes(short + long, InProcess())
    tokens_short, tokens_packed = 40 * 1024, 2 * (40_960 - 256)
    share = tokens_packed / (tokens_short + 2 * 40_960)
    got = sizes.compressed_blocks / (sizes.compressed_blocks + sizes.exact_blocks)
    assert got == pytest.approx(share, abs=0.01)
    assert sizes.lost_bytes == 0
    assert sizes.max_model_len == 40_960


def test_the_replay_of_an_arm_says_the_same_of_its_memory_as_its_figures() -> None:
    """Both pools count, by bytes; the figures end with the last arrival, the replay with the last answer."""
    result = run_experiment(small_load(200), TARGET, ExperimentSettings(arms=("paging", "compression"), time_scale=0.3))
    for arm in result.arms:
        use = arm.replay.kv.use
        assert use is not None
        assert use.usage_ratio is not None
        assert use.usage_ratio["mean"] == pytest.approx(arm.figures.held_ratio, rel=0.1), arm.arm.name
    assert use.active_compressed_blocks is not None
    assert use.active_compressed_blocks["mean"] > 0
    assert use.capacity_bytes == pytest.approx(result.sizes.kv_bytes, rel=1e-3)


# -- what people see --------------------------------------------------------------------------------------------------------


def test_tables_plot_and_json_say_virtual_time(
    everything: ExperimentResult, capsys: pytest.CaptureFixture[str]
) -> None:
    print_experiment(everything)
    text = capsys.readouterr().out
    assert "What each mechanism buys, in virtual time (llama-3-8b on H100)" in text
    source = "published figures of H100 and assumed efficiencies and overhead"
    assert f"Simulated: times are worked out from {source}; no model was run." in " ".join(text.split())
    assert "real time" not in text
    for name in MECHANISM_NAMES:
        assert f"+ {name}" in text
        assert f"all but {name}" in text
    assert NO_LIMIT in text
    page = plot_html(everything)
    assert "virtual time" in page
    assert "<script src" not in page  # nothing is fetched
    data = json.loads(everything.to_json())
    assert data["clock"] == "virtual"
    assert "assumed efficiencies and overhead" in data["notes"][0]
    assert [arm["replay"]["clock"] for arm in data["arms"]] == ["virtual"] * 12
    assert data["arms"][0]["replay"]["settings"]["reservation"] == "max_model_len"


def test_verdicts_follow_from_the_figures(everything: ExperimentResult) -> None:
    first, last = everything.arms[0], everything.arms[-1]

    def told(change: float, arms: ExperimentResult = everything) -> dict[str, bool | None]:
        figures = replace(
            first.figures,
            ttft_p99_seconds=first.figures.ttft_p99_seconds * (1 + change),  # type: ignore[operator]
            useful_ratio=first.figures.useful_ratio + abs(change),  # type: ignore[operator]
        )
        moved = replace(arms, arms=[first, replace(last, figures=figures)])
        return {v.claim.title: v.met for v in verdicts(moved)}

    assert told(-0.41)["P99 time to first token"] is True
    assert told(-0.39)["P99 time to first token"] is False
    assert told(-0.16)["KV memory use (useful / held)"] is True
    assert told(-0.14)["KV memory use (useful / held)"] is False
    assert told(-0.5)["throughput capacity"] is None  # not measured


def test_findings_name_who_helped_who_harmed_and_who_did_nothing(everything: ExperimentResult) -> None:
    first = replace(everything.arms[0], capacity_requests_per_second=1.0)

    def arm(name: str, ttft: float, capacity: float) -> Any:
        figures = replace(first.figures, ttft_p99_seconds=ttft, end_to_end_p99_seconds=2.0)
        return replace(
            first, arm=replace(first.arm, name=f"+ {name}", differs_by=name), figures=figures, capacity_requests_per_second=capacity
        )  # fmt: skip

    arms = [arm("paging", 1.0, 1.0), arm("spread", 0.5, 1.0), arm("classes", 0.5, 0.8), arm("swapping", 0.5, 0.8)]
    text = "\n".join(findings(replace(everything, arms=arms, ablation=[])))
    assert "helped: spread (P99 time to first token -50 %)" in text
    assert "made it worse: classes (capacity -20 %)" in text
    assert "on this load: swapping." in text


def test_a_real_model_takes_the_same_arms_in_real_time(capsys: pytest.CaptureFixture[str]) -> None:
    load = list(window(generate_load(replace(PRESETS["laptop"], length_scale=1 / 128), 5), limit=8))
    chosen = ExperimentSettings(arms=("paging", "prefix-cache", "compression"))
    result = run_experiment(load, InProcess(model="tiny", gpu=None, max_model_len=512), chosen)
    assert result.clock == "real"
    assert result.no_limit is None
    assert {arm.replay.clock for arm in result.arms} == {"real"}
    assert result.notes[0].startswith("Measured here, load average ")
    assert [arm.replay.outcomes["length"] for arm in result.arms] == [result.load.requests] * 4
    sizes = result.sizes
    assert sizes.num_blocks == 3 * 512 // 16
    assert 0 <= sizes.lost_bytes < sizes.bytes_per_block
    print_experiment(result)
    text = capsys.readouterr().out
    assert "in real time (tiny on cpu)" in text
    assert "virtual" not in text


# -- the command ------------------------------------------------------------------------------------------------------------


def kvscope(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "COLUMNS": "200"}
    command = [KVSCOPE, "experiment", "p99-plan", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)


def test_the_command_writes_tables_json_and_a_page(tmp_path: Path) -> None:
    out, page = tmp_path / "plan.json", tmp_path / "plan.html"
    done = kvscope(
        "--arms", "prefix-cache,paging", "--limit", "60", "--length-scale", "0.125", "--kv-blocks", "3000", "--seed", "4",
        "--json", str(out), "--plot", str(page),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "virtual time" in done.stdout
    assert done.stderr == ""
    data = json.loads(out.read_text())
    assert [arm["arm"]["name"] for arm in data["arms"]] == ["baseline", "+ paging", "+ prefix-cache"]
    assert data["settings"]["seed"] == 4
    assert data["settings"]["load_factor"] == 0.92
    assert "<script src" not in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--arms", "paging,teleport"], "no arm 'teleport'. next: Use some of baseline, paging, contiguous"),
        (["--arms", "paging", "--saturate", "spread"], "'spread' is not among the arms"),
        (["--load-factor", "much"], "--load-factor is 'much'"),
        (["--load-factor", "-1"], "load_factor is -1"),
        (["--time-scale", "1", "--load-factor", "0.9"], "both set the load"),
        (["--time-scale", "0"], "time_scale is 0"),
        (["--torch", "tiny", "--gpu", "H100"], "different targets"),
        (["--gpu", "H1000", "--limit", "9"], "no record of a GPU named 'H1000'"),
        (["--trace", "absent.jsonl"], "absent.jsonl cannot be read"),
        (["--trace", "absent.jsonl", "--seed", "1"], "--seed is for the built-in load"),
        (["--plot", "plan.png"], "plan.png is no page"),
        (["--json", "/no/such/folder/plan.json"], "cannot be written"),
        (["--limit", "1"], "A load of 1 requests over 0 s has no rate"),
        (["--kv-blocks", "100", "--limit", "50"], "cannot hold one sequence"),
    ],
)
def test_what_cannot_be_done_is_said_with_the_next_step(arguments: list[str], reason: str) -> None:
    ended = CliRunner().invoke(root, ["experiment", "p99-plan", *arguments])
    error = ended.exception
    assert isinstance(error, KvscopeError)
    assert reason in f"{error.reason} next: {error.next_step}"
    assert error.next_step
    assert ended.output == ""


def test_help_shows_examples() -> None:
    ended = CliRunner().invoke(root, ["experiment", "p99-plan", "--help"])
    assert ended.exit_code == 0
    assert "kvscope experiment p99-plan --trace mooncake.jsonl --gpu H100" in " ".join(ended.output.split())


def test_arms_keep_their_order_however_they_are_asked_for() -> None:
    sizes = plan_sizes(small_load(), TARGET, compression=False)
    names = [arm.differs_by for arm in cumulative_arms(sizes, ("spread", "paging"))]
    assert names == [None, "paging", "spread"]
    with pytest.raises(ConfigError, match="no arm 'telepathy'"):
        cumulative_arms(sizes, ("telepathy",))
