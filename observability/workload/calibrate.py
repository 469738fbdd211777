"""Fits virtual time to this machine: measures steps of the real engine on the torch executor and fits the coefficients of calibrated.py.

measure() -> steps with their seconds -> fit() -> Calibration. check() then serves one small load in real and in virtual time.

Steps are measured as the engine takes them, scheduler and telemetry included. Contexts come about without computing them: a request
runs through the engine with the model left out (its blocks are registered, their content is arbitrary), and the measured request with
the same prompt finds them in the prefix cache. Every shape is measured once a round, so that what disturbs the machine for a
while disturbs all shapes alike; the median over rounds counts.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls

from observability import catalog
from observability.engine.clock import MonotonicClock
from observability.engine.engine import Engine
from observability.engine.executor.calibrated import (
    FEATURES,
    CalibratedTimes,
    Calibration,
    features_of,
    row_weights,
    rows_of,
)
from observability.engine.executor.torch_executor import TorchExecutor
from observability.engine.executor.virtual import StepShape
from observability.engine.model.loading import LoadedModel, load_model
from observability.engine.types import EngineConfig, KVDtype, Request, SamplingParams, StepPlan, StepResult
from observability.errors import ConfigError
from observability.workload.generate import PRESETS, generate_load, prompt_token_ids
from observability.workload.replay import MeasuredTelemetry, calibrated_engine, one_token_words
from observability.workload.results import Summary, summarize
from observability.workload.traces import TraceRequest, window

#: Told (done, total): of the measured shapes, or of the served requests.
OnProgress = Callable[[int, int], None]

ROUNDS, QUICK_ROUNDS = 4, 1
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 8, 512  # the replay's defaults with a real model

_BLOCK = 16
_NEW_TOKENS = 8  # of a prompt whose earlier part is cached
_DECODE_STEPS = 4  # measured for a batch and context
_CONTEXTS = (16, 512, 1536)
_STARTS = (0, 1024)
_MIXED_DECODES = (1, 4)
_KNOT_RATIO = 1.3  # between neighbours in the table of seconds by rows; closer ones are fitted together
_REWEIGHTINGS = 8
_SHRINKAGE = 0.02  # of a feature's relative share; where measurements leave it open, time belongs to the rows
_COPIED_BLOCKS, _COPIES = 64, 5


@dataclass(frozen=True, slots=True)
class Step:
    """One measured step of the engine, from the call of Engine.step() to its return."""

    shape: StepShape
    seconds: float
    schedule_seconds: float = 0.0  # of which; allocation and eviction of blocks included
    sample_seconds: float = 0.0
    emit_seconds: float = 0.0


# -- fitting ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fit:
    """Result of fit(): what Calibration holds of the same names, and the median relative error by step kind."""

    overhead: tuple[float, float, float]  # schedule, sample, emit
    row_seconds: tuple[tuple[int, float], ...]
    coefficients: dict[str, float]
    median_relative_error: dict[str, float]


def fit(steps: Sequence[Step]) -> Fit:
    """Non-negative least squares of relative errors over the median step of each shape, reweighted towards least absolute error
    (iteratively reweighted least squares), so that a disturbed shape does not pull the others. Raises ValueError without steps.
    """
    if not steps:
        raise ValueError("there are no steps to fit")
    overhead = tuple(
        float(np.median([getattr(step, name) for step in steps]))
        for name in ("schedule_seconds", "sample_seconds", "emit_seconds")
    )
    by_shape: dict[tuple[Any, ...], list[Step]] = defaultdict(list)
    for step in steps:
        by_shape[_alike(step.shape)].append(step)
    knots = _knots({rows_of(step.shape) for step in steps})
    design, seconds = [], []
    for group in by_shape.values():
        columns = [
            np.concatenate([row_weights(rows_of(s.shape), knots), [features_of(s.shape)[name] for name in FEATURES]])
            for s in group
        ]
        design.append(np.mean(columns, axis=0))
        seconds.append(np.median([step.seconds for step in group]))
    target = np.array(seconds)
    # every row is divided by its seconds: what is left is the relative error
    matrix = np.array(design) / target[:, None]
    wanted = 1.0 - sum(overhead) / target
    scale = np.maximum(np.abs(matrix).max(axis=0), np.finfo(float).tiny)  # columns differ by ten orders of magnitude
    shrink = _SHRINKAGE * np.eye(len(scale))[len(knots) :]
    weights = np.ones(len(target))
    for _ in range(_REWEIGHTINGS):
        left = np.vstack([matrix / scale * weights[:, None], shrink])
        solution = nnls(left, np.concatenate([wanted * weights, np.zeros(len(shrink))]))[0] / scale
        error = np.abs(matrix @ solution - wanted)
        weights = 1.0 / np.sqrt(np.maximum(error, 0.01))  # errors below 1 % count squared
    kinds = np.array([group[0].shape.kind for group in by_shape.values()])
    return Fit(
        overhead,  # type: ignore[arg-type]
        tuple((rows, float(value)) for rows, value in zip(knots, solution, strict=False)),
        dict(zip(FEATURES, solution[len(knots) :].tolist(), strict=True)),
        {kind: float(np.median(error[kinds == kind])) for kind in catalog.STEP_KINDS if (kinds == kind).any()},
    )


def _alike(shape: StepShape) -> tuple[Any, ...]:
    """Steps of equal key are repeats of each other: decodes may have grown by some tokens in between."""
    return shape.chunks, len(shape.visible), round(sum(shape.visible) / 64 / max(len(shape.visible), 1))


def _knots(rows: set[int]) -> list[int]:
    """Row counts of the table: measured ones, from the smallest on each at least _KNOT_RATIO times the one before."""
    knots: list[int] = []
    for count in sorted(rows):
        if not knots or count >= knots[-1] * _KNOT_RATIO:
            knots.append(count)
    return knots


# -- measuring --------------------------------------------------------------------------------------------------------


class _Watched(TorchExecutor):
    """The torch executor, which notes the shape of its last step; in a `dry` one it leaves the model out."""

    dry = False
    shape: StepShape | None = None

    def execute(self, plan: StepPlan, until: float | None = None) -> StepResult:
        if self.dry:
            sampled = sum(chunk.samples for chunk in plan.prefill) + len(plan.decode)
            return StepResult(np.array([self.clock.now()]), [0] * sampled)
        self.shape = StepShape.of(plan)
        return super().execute(plan, until)


class Bench:
    """A real engine whose steps are noted."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig) -> None:
        self.clock = MonotonicClock()
        self.telemetry = MeasuredTelemetry(loaded.name, "torch", str(loaded.model.device), config.kv_dtype, self.clock)
        self.executor = _Watched(loaded, config, self.telemetry, clock=self.clock)
        self.engine = Engine(config, self.executor, self.telemetry)
        self.steps: list[Step] = []
        self._names = itertools.count()
        assert config.num_blocks is not None
        # Memory that was never written is one page of zeros, and fast to read: every block is written once.
        for first in range(1, config.num_blocks, _COPIED_BLOCKS):
            self.executor.copy_blocks([(0, i) for i in range(first, min(first + _COPIED_BLOCKS, config.num_blocks))])

    def warm_up(self) -> None:
        """Runs a small request that leaves no trace, so that what is allocated once has been."""
        self.add([0] * _BLOCK, 2)
        self.run()
        self.steps.clear()
        self.telemetry.records.clear()

    def add(
        self, prompt: Sequence[int], tokens: int, request_class: str = "standard", *, arrival: float | None = None
    ) -> None:
        """Queues a request that generates exactly so many tokens."""
        arrival = self.clock.now() if arrival is None else arrival
        name = f"c{next(self._names)}"
        self.engine.add(Request(name, prompt, _exactly(tokens), request_class, arrival=arrival))

    def step(self) -> bool:
        """Engine.step(), noted if it ran the model."""
        self.executor.shape = None
        before, began = self.telemetry.seconds.copy(), self.clock.now()
        worked = self.engine.step()
        if (shape := self.executor.shape) is not None:
            seconds = self.clock.now() - began
            spent = dict(zip(catalog.COMPONENTS, np.subtract(self.telemetry.seconds, before).tolist(), strict=True))
            schedule = sum(spent[name] for name in ("schedule", "kv_alloc", "kv_evict", "kv_move"))
            self.steps.append(Step(shape, seconds, schedule, spent["sample"], spent["emit"]))
        return worked

    def run(self) -> None:
        """Steps until every request has ended."""
        while self.step():
            pass

    def cache(self, prompt: list[int]) -> list[int]:
        """Puts the whole blocks of an idle engine's `prompt` into its prefix cache without computing them; returns the prompt."""
        if prompt:
            self.executor.dry = True
            self.add(prompt, 1)
            self.run()
            self.executor.dry = False
        return prompt


@dataclass(frozen=True, slots=True)
class Plan:
    """What one measurement sends: prompts of `new` tokens after `cached` ones, which then generate; and, once those decode, one prompt of
    `mixed` tokens beside them (0: none)."""

    sequences: int
    cached: int
    new: int
    generate: int
    mixed: int = 0


def plans(max_num_seqs: int, max_num_batched_tokens: int) -> list[Plan]:
    """Decodes of every batch size (closely spaced up to 8) and context, chunks of every length and start, both together."""
    batches = [n for n in (1, 2, 3, 4, 6, 8) if n <= max_num_seqs]
    while batches[-1] * 2 <= max_num_seqs:
        batches.append(batches[-1] * 2)
    batches = sorted({*batches, max_num_seqs})
    lengths = [_BLOCK]
    while lengths[-1] * 2 <= max_num_batched_tokens:
        lengths.append(lengths[-1] * 2)
    lengths = sorted({*lengths, max_num_batched_tokens})
    half = max_num_batched_tokens // 2
    return [
        *(Plan(n, context, _NEW_TOKENS, _DECODE_STEPS + 1) for n in batches for context in _CONTEXTS),
        *(Plan(1, start, length, 1) for length in lengths for start in _STARTS),
        Plan(2, 0, half, 1),
        Plan(1, 0, max_num_batched_tokens + half, 1),  # a first chunk that samples nothing
        *(
            Plan(n, _CONTEXTS[1], _NEW_TOKENS, 3, mixed)
            for n in _MIXED_DECODES
            if n < max_num_seqs
            for mixed in (64, half)
        ),
    ]


def measure(
    model: str = "smollm2-135m",
    *,
    kv_dtype: KVDtype = "auto",
    threads: int | None = None,
    rounds: int = ROUNDS,
    max_num_seqs: int = MAX_NUM_SEQS,
    max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS,
    on_progress: OnProgress | None = None,
) -> Calibration:
    """Measures `rounds` rounds of plans() on the model here and fits them; `threads` of torch, by default as many as it takes.

    Raises ModelError when the model cannot be loaded and ConfigError when the settings do not fit it.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    loaded = load_model(model)
    todo = plans(max_num_seqs, max_num_batched_tokens)
    longest = max(plan.cached + plan.new + plan.generate for plan in todo)
    if longest > loaded.config.max_position:
        raise ConfigError(
            f"{loaded.name} has a context of {loaded.config.max_position} tokens; a calibration needs {longest}.",
            next_step="Calibrate with another model, such as smollm2-135m.",
        )
    config = EngineConfig(
        block_size=_BLOCK,
        num_blocks=(max_num_seqs + 1) * -(-(longest + 1) // _BLOCK),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=longest + 1,
        kv_dtype=kv_dtype,
    )
    bench = Bench(loaded, config)
    bench.warm_up()
    random = np.random.default_rng(0)
    for done, (_, plan) in enumerate(itertools.product(range(rounds), todo), start=1):
        _run_plan(bench, plan, random)
        if on_progress is not None:
            on_progress(done, rounds * len(todo))
    fitted = fit(bench.steps)
    parameters = sum(math.prod(shape) for shape in loaded.config.tensor_shapes().values())
    schedule, sample, emit = fitted.overhead
    per_token, per_block = _kv_bytes(loaded, config)
    return Calibration(
        model=loaded.name,
        device=str(loaded.model.device),
        processor=_processor(),
        threads=torch.get_num_threads(),
        kv_dtype=kv_dtype,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        versions={"kvscope": version("kvscope"), "torch": torch.__version__, "python": platform.python_version()},
        load_average=load_average(),
        steps_measured=len(bench.steps),
        median_relative_error=fitted.median_relative_error,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_context=loaded.config.max_position,
        memory_bytes=_memory_bytes(),
        weight_bytes=parameters * loaded.model.dtype.itemsize,
        kv_bytes_per_token=per_token,
        kv_block_bytes=per_block,
        kv_fixed_bytes_per_sequence=bench.executor.kv_fixed_bytes_per_sequence,
        copy_bytes_per_second=_copy_speed(bench.executor),
        schedule_seconds=schedule,
        sample_seconds=sample,
        emit_seconds=emit,
        row_seconds=fitted.row_seconds,
        coefficients=fitted.coefficients,
    )


def _kv_bytes(loaded: LoadedModel, config: EngineConfig) -> tuple[float, float]:
    """KV bytes that (a token, a block beside its tokens) takes: blocks of two sizes tell them apart."""

    def block_bytes(size: int) -> int:
        few = replace(config, block_size=size, num_blocks=-(-config.max_model_len // size))
        return TorchExecutor(loaded, few, None).kv_bytes_per_block

    single, double = block_bytes(_BLOCK), block_bytes(2 * _BLOCK)
    return (double - single) / _BLOCK, float(2 * single - double)


def _run_plan(bench: Bench, plan: Plan, random: np.random.Generator) -> None:
    vocabulary = bench.executor.vocab_size

    def tokens(count: int) -> list[int]:
        return random.integers(0, vocabulary, count).tolist()

    prompts = [bench.cache(tokens(plan.cached)) for _ in range(plan.sequences)]
    for prompt in prompts:
        bench.add(prompt + tokens(plan.new), plan.generate)
    if plan.mixed:
        bench.step()
        bench.add(tokens(plan.mixed), 1)
    bench.run()


def _copy_speed(executor: TorchExecutor) -> float:
    """Bytes of KV blocks copied in a second."""
    pairs = [(i, i + _COPIED_BLOCKS) for i in range(_COPIED_BLOCKS)]
    seconds = []
    for _ in range(_COPIES):
        began = time.perf_counter()
        executor.copy_blocks(pairs)
        seconds.append(time.perf_counter() - began)
    return _COPIED_BLOCKS * executor.kv_bytes_per_block / float(np.median(seconds))


def _memory_bytes() -> int:
    """Half of the physical memory: the rest is for what else runs here."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _processor() -> str:
    """`AMD EPYC, 2 of 2 cores`, as far as the system says."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                name = value.strip()
                break
    return f"{name}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} cores"


def load_average() -> float | None:
    """Runnable processes over the last minute, this one included; None where the system does not say."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return None


# -- checking ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Check:
    """Real and virtual time beside each other, on one load. Relative figures are (virtual - real) / real."""

    requests: int
    steps: int
    load_average: float | None
    median_step_error: float  # of |modelled - measured| / measured over the real run's own steps
    median_step_difference: (
        float  # the same with its sign: how much slower (below 0) all steps ran than when calibrated
    )
    step_error_by_kind: dict[str, float]
    step_noise: (
        float | None
    )  # median distance of equal real steps from their median, which no model can beat; None without any
    real: dict[str, Summary]  # seconds by name of the latency
    virtual: dict[str, Summary]

    def difference(self, latency: str, quantile: str) -> float:
        """Relative difference of a quantile of `ttft` or `duration`."""
        return self.virtual[latency][quantile] / self.real[latency][quantile] - 1.0


#: The laptop preset at half its lengths, without a day shape.
CHECK_LOAD = replace(PRESETS["laptop"], length_scale=1 / 48, day_strength=0.0)
_CHECK_STRETCH = 1.5  # arrivals spread over so many times what serving all of them takes: busy, with short queues
CHECK_REQUESTS = 50
_CHECK_BLOCKS = 1024


def check(
    calibration: Calibration,
    *,
    model: str | None = None,
    requests: int = CHECK_REQUESTS,
    seed: int = 0,
    on_progress: OnProgress | None = None,
) -> Check:
    """Serves CHECK_LOAD once on the torch executor in real time and once in virtual time by `calibration`, with equal settings.

    `model` is the name or path of the calibrated model, by default the name in the calibration. The step errors are of the real run's
    steps: what the calibration says of the very plan that ran. Raises what loading the model raises.
    """
    load = list(window(generate_load(CHECK_LOAD, seed), limit=requests))
    torch.set_num_threads(calibration.threads)
    loaded = load_model(model or calibration.model)
    config = EngineConfig(
        block_size=_BLOCK,
        num_blocks=_CHECK_BLOCKS,
        max_num_seqs=calibration.max_num_seqs,
        max_num_batched_tokens=calibration.max_num_batched_tokens,
        max_model_len=min(calibration.max_context, _CHECK_BLOCKS * _BLOCK),
        max_queued=requests,
        kv_dtype=calibration.kv_dtype,
    )
    at_once = _serve_virtually(calibration, config, [replace(item, arrival_seconds=0.0) for item in load])
    scale = _CHECK_STRETCH * at_once.last / max(load[-1].arrival_seconds, 1e-9)
    load = [replace(item, arrival_seconds=item.arrival_seconds * scale) for item in load]
    virtual = _serve_virtually(calibration, config, load)
    bench = Bench(loaded, config)
    bench.warm_up()
    _serve(bench, load, one_token_words(loaded.tokenizer), on_progress)
    times = CalibratedTimes(calibration, config)
    relative = np.array([
        (times.forward(step.shape)[0] + times.overhead.seconds) / step.seconds - 1.0 for step in bench.steps
    ])  # fmt: skip
    kinds = np.array([step.shape.kind for step in bench.steps])
    return Check(
        requests=len(load),
        steps=len(bench.steps),
        load_average=load_average(),
        median_step_error=float(np.median(np.abs(relative))),
        median_step_difference=float(np.median(relative)),
        step_error_by_kind={
            kind: float(np.median(np.abs(relative[kinds == kind]))) for kind in catalog.STEP_KINDS if kind in kinds
        },
        step_noise=_noise(bench.steps),
        real=_latencies(bench.telemetry),
        virtual=_latencies(virtual),
    )


def _noise(steps: Sequence[Step]) -> float | None:
    by_shape: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    for step in steps:
        by_shape[_alike(step.shape)].append(step.seconds)
    distances = [abs(s / np.median(group) - 1.0) for group in by_shape.values() if len(group) > 2 for s in group]
    return float(np.median(distances)) if distances else None


def _exactly(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, ignore_eos=True)


def _serve_virtually(calibration: Calibration, config: EngineConfig, load: Sequence[TraceRequest]) -> MeasuredTelemetry:
    engine, telemetry = calibrated_engine(calibration, config)
    engine.run(
        Request(f"v{i}", item.prompt, _exactly(item.output_tokens), item.request_class, arrival=item.arrival_seconds)
        for i, item in enumerate(load)
    )
    return telemetry


def _serve(
    bench: Bench, load: Sequence[TraceRequest], vocabulary: Sequence[int], on_progress: OnProgress | None
) -> None:
    """Sends each request when it is due and steps until all have ended."""
    prompts = [prompt_token_ids(item.prompt, vocabulary) for item in load]
    start = bench.clock.now()
    sent = 0
    while sent < len(load) or bench.engine.num_running or bench.engine.num_waiting:
        while sent < len(load) and start + load[sent].arrival_seconds <= bench.clock.now():
            item = load[sent]
            bench.add(prompts[sent], item.output_tokens, item.request_class, arrival=start + item.arrival_seconds)
            sent += 1
        if not bench.step() and sent < len(load):
            time.sleep(max(start + load[sent].arrival_seconds - bench.clock.now(), 0.0))
        if on_progress is not None:
            on_progress(len(bench.telemetry.records), len(load))


def _latencies(telemetry: MeasuredTelemetry) -> dict[str, Summary]:
    records = telemetry.records
    found = {
        "ttft": summarize([r.first_token - r.arrival for r in records if r.first_token is not None]),
        "duration": summarize([r.finished - r.arrival for r in records]),
    }
    return {name: summary for name, summary in found.items() if summary is not None}
