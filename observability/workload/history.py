"""Fills a store with days of simulated history: generated load -> Engine in virtual time -> Telemetry -> Recorder -> store.

It is the pipeline that runs live, except that time is virtual and steps cost what the roofline of the `cpu-laptop` record
says. The spans are marked as simulated in the store. What only a real model can show, the error of quantized KV, is absent.
Parts of half a day run side by side in processes of their own. Each warms up before its first recorded point (prefix cache,
conversations, rates), so that the seams do not show; the parts, and so the numbers, do not depend on the machine.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from observability.engine.clock import VirtualClock
from observability.engine.engine import Engine
from observability.engine.executor.hardware import gpu_by_name
from observability.engine.executor.roofline import RooflineExecutor
from observability.engine.model.costs import model_by_name
from observability.engine.types import EngineConfig, Request, SamplingParams
from observability.errors import ConfigError, StoreError
from observability.signals import WINDOW_SECONDS
from observability.store import embedded
from observability.store.embedded import SignalBlock
from observability.store.recorder import Recorder, TelemetryTarget
from observability.telemetry.recorder import Telemetry
from observability.workload.generate import PRESETS, generate_load

#: One scrape and one stored point a minute, which is what the store keeps of older data: a quarter of the work of 15 s.
INTERVAL_SECONDS = 60.0
GPU = "cpu-laptop"
COST_MODEL = "smollm2-135m"
PRESET = "laptop"
#: The engine of the demo, so that simulated and live charts are about the same settings.
CONFIG = EngineConfig(
    num_blocks=512, max_num_seqs=8, max_num_batched_tokens=512, max_model_len=8192, max_queued=256, kv_dtype="int8"
)
MAX_DAYS = embedded.RETENTION_SECONDS / embedded.DAY_SECONDS
_DAY_SECONDS = 86400.0
_BATCH_STEPS = 240
_PART_SECONDS = 43200.0
_MOST_PARTS = round(MAX_DAYS * _DAY_SECONDS / _PART_SECONDS)
_WARM_UP_SECONDS = 1800.0
_SHOW_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class History:
    """What was made: simulated from `start` to `end` (Unix seconds; equal when nothing was missing), in `wall_seconds`."""

    start: float
    end: float
    steps: int
    requests: int
    wall_seconds: float


def make_history(
    path: Path, *, days: float = 3.0, model: str = COST_MODEL, seed: int = 0, end: float | None = None
) -> History:
    """Simulates the `days` before `end` (by default now) into the store at `path`, with a progress bar on a terminal.

    A store that has data keeps it: only what lies after its newest point is filled. A new store appears when it is complete.
    `model` becomes the label of the series, so that they join with those of the served model. Raises ConfigError for days
    outside the store's retention and StoreError.
    """
    if not model.strip():
        raise ConfigError(
            "The model has no name.", next_step="Give the name of the served model, or leave --model out."
        )
    if not 0.0 < days <= MAX_DAYS:
        raise ConfigError(
            f"{days:g} days of history are not possible.",
            next_step=f"Ask for more than 0 and at most {MAX_DAYS:g} days.",
        )
    end = time.time() if end is None else end
    start = end - days * _DAY_SECONDS
    began = time.perf_counter()
    with _target(path) as store:
        extent = store.extent()
        if extent is not None:
            start = max(start, extent[1] + INTERVAL_SECONDS)
        if end - start < 2 * INTERVAL_SECONDS:
            return History(end, end, 0, 0, time.perf_counter() - began)
        edges = np.linspace(start, end, max(1, round((end - start) / _PART_SECONDS)) + 1).tolist()
        # no two histories share the load of a part
        parts = [_Part(model, seed * _MOST_PARTS + i, low, high) for i, (low, high) in enumerate(pairwise(edges))]
        steps = requests = 0
        with store.recording(), _progress(end - start) as show:
            for done in _run(parts, show):
                for blocks in done.blocks:
                    store.append_blocks(blocks)
                steps, requests = steps + done.steps, requests + done.requests
            store.mark_simulated(start, end)
    return History(start, end, steps, requests, time.perf_counter() - began)


# -- one part -------------------------------------------------------------------------------------------------------


class _Part(NamedTuple):
    model: str
    seed: int
    start: float
    end: float


class _Done(NamedTuple):
    steps: int
    requests: int
    blocks: list[dict[str, SignalBlock]]


class _Collector:
    """Where the recorder of a part writes: the store is written by one process."""

    def __init__(self) -> None:
        self.blocks: list[dict[str, SignalBlock]] = []

    def append_blocks(self, blocks: dict[str, SignalBlock], *, observed_until: float | None = None) -> None:
        self.blocks.append(blocks)


class _TickTelemetry(Telemetry):
    """Publishes gauges when the engine ticks, just before they are scraped, and not every second besides."""

    def due(self) -> bool:
        return False


def _simulate(part: _Part, advance: Callable[[float], None]) -> _Done:
    """Runs an engine of its own over the part; `advance` hears the recorded seconds that are done."""
    origin = part.start - _WARM_UP_SECONDS
    clock = VirtualClock()
    telemetry = _TickTelemetry(
        part.model, executor="roofline", virtual=True, device=GPU, kv_dtype=CONFIG.kv_dtype, clock=clock.now,
        wall_clock=lambda: origin + clock.now(), keep_finished=0,
    )  # fmt: skip
    telemetry.publish_interval_seconds = INTERVAL_SECONDS  # each tick publishes; between two nobody looks
    executor = RooflineExecutor(model_by_name(COST_MODEL), gpu_by_name(GPU), CONFIG, telemetry, clock=clock)
    engine = Engine(CONFIG, executor, telemetry)
    target, collector = TelemetryTarget(telemetry), _Collector()
    recorder = Recorder(collector, batch=_BATCH_STEPS)
    steps = requests = 0

    def tick(now: float) -> None:
        nonlocal steps
        # What a long step held up counts for its minute, so that windows join and each event is in one of them.
        at = origin + now // INTERVAL_SECONDS * INTERVAL_SECONDS
        if at > part.end:
            return
        if at >= part.start:
            steps += recorder.step(at, target.scrape())
            advance(at - part.start)
        elif at >= part.start - WINDOW_SECONDS - INTERVAL_SECONDS:
            recorder.observe(at, target.scrape())

    def load() -> Iterator[Request]:
        nonlocal requests
        for item in generate_load(PRESETS[PRESET], part.seed, start_time=origin):
            if origin + item.arrival_seconds > part.end:
                return
            requests += origin + item.arrival_seconds >= part.start
            params = SamplingParams(max_tokens=item.output_tokens, ignore_eos=True)
            yield Request(f"h{requests}", item.prompt, params, item.request_class, arrival=item.arrival_seconds)

    engine.run(load(), tick_seconds=INTERVAL_SECONDS, on_tick=tick)
    recorder.flush()
    return _Done(steps, requests, collector.blocks)


# -- all parts ------------------------------------------------------------------------------------------------------

_seconds_done: Any = None  # in a worker: shared array, recorded seconds done by part


def _start_worker(shared: Any) -> None:
    global _seconds_done
    _seconds_done = shared


def _work(task: tuple[int, _Part]) -> _Done:
    number, part = task

    def advance(seconds: float) -> None:
        _seconds_done[number] = seconds

    return _simulate(part, advance)


def _run(parts: list[_Part], show: Callable[[float], None]) -> Iterator[_Done]:
    """Simulates all parts, on as many processes as there are cores; yields them as they end. Leaving early ends the workers."""
    workers = min(len(parts), len(os.sched_getaffinity(0)))
    if workers == 1:
        before = 0.0
        for part in parts:
            yield _simulate(part, lambda seconds, before=before: show(before + seconds))  # type: ignore[misc]
            before += part.end - part.start
        return
    context = multiprocessing.get_context("spawn")
    shared = context.Array("d", len(parts), lock=False)
    # Ctrl-C reaches every process of the terminal. Only this one acts on it and ends its workers: they start with the signal blocked, since
    # one that died of it while it was still importing could leave the pool waiting for ever.
    before_start = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        pool = context.Pool(workers, initializer=_start_worker, initargs=(shared,))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before_start)
    with pool:
        results = pool.imap_unordered(_work, enumerate(parts))
        left = len(parts)
        while left:
            with contextlib.suppress(multiprocessing.TimeoutError):
                yield results.next(timeout=_SHOW_SECONDS)
                left -= 1
            show(sum(shared))


@contextlib.contextmanager
def _target(path: Path) -> Iterator[embedded.EmbeddedStore]:
    """The store at `path`. One that is not there yet is made beside it and moved into place when the block has succeeded, so
    that an interrupted run leaves no half history."""
    if path.exists():
        yield embedded.EmbeddedStore(path)
        return
    part = path.with_name(path.name + ".part")
    beside = [part.with_name(part.name + suffix) for suffix in ("", "-wal", "-shm", ".lock")]
    try:
        for leftover in beside:
            leftover.unlink(missing_ok=True)
        yield embedded.create(part)
        os.replace(part, path)
    except OSError as error:
        raise StoreError(f"Cannot write {path}: {error.strerror}.", next_step="Choose another --store path.") from error
    finally:
        for leftover in beside:
            leftover.unlink(missing_ok=True)


@contextlib.contextmanager
def _progress(seconds: float) -> Iterator[Callable[[float], None]]:
    """A bar over the simulated time, on standard error and only on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("simulating history"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=seconds)
        yield lambda now: bar.update(task, completed=now)
