"""Hours near saturation in virtual time with every mechanism on, steps that fail and an engine that is killed and begins anew: books that
agree in each life and over all of them, no leak of blocks, slots or memory, a store whose rates take each new life as a reset.

KVSCOPE_SOAK_HOURS=72 (make soak) runs three days of it.
"""

from __future__ import annotations

import gc
import itertools
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from observability.engine.clock import VirtualClock
from observability.engine.engine import Engine
from observability.engine.executor.hardware import gpu_by_name
from observability.engine.executor.roofline import RooflineExecutor, fit_num_blocks
from observability.engine.model.costs import model_by_name
from observability.engine.types import ControllerConfig, EngineConfig, Request, SamplingParams
from observability.store import embedded
from observability.store.embedded import EmbeddedStore
from observability.store.recorder import Recorder, TelemetryTarget
from observability.telemetry.recorder import Telemetry
from observability.workload.generate import PRESETS, generate_load
from observability.workload.traces import TraceRequest
from tests.engine.support import Exposition

HOURS = int(os.environ.get("KVSCOPE_SOAK_HOURS", "5"))
#: A tenth of a request a second on average, with a day's shape: one A10G is then busy about five sixths of the time.
LOAD = replace(PRESETS["recorded"], requests_per_second=0.1, day_strength=1.5)
START = 1_800_000_000.0  # Unix seconds of virtual time 0
SCRAPE_SECONDS = 60.0
STEPS_BETWEEN_FAILURES = 3_000
#: Lives of the engine: it is killed where one ends, whatever it is doing.
LIVES = max(3, HOURS // 8)


class Killed(Exception):
    """The engine is gone, with all that it held."""


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class FailingSteps(RooflineExecutor):
    """Every so many steps one raises, as a driver does that lost its device for a moment."""

    steps = 0
    failures = 0

    def execute(self, plan, until=None):  # type: ignore[no-untyped-def]
        self.steps += 1
        if self.steps % STEPS_BETWEEN_FAILURES == 0:
            self.failures += 1
            raise RuntimeError("device lost")
        return super().execute(plan, until)


def soak_engine(clock: VirtualClock) -> Engine:
    model, gpu = model_by_name("llama-3-8b"), gpu_by_name("A10G")
    config = EngineConfig(
        num_blocks=None, max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=32_768, max_queued=200,
        predictive_admission=True, controller=ControllerConfig(p99_high_seconds=20.0, p99_low_seconds=10.0),
    )  # fmt: skip
    room = fit_num_blocks(model, gpu, config)
    config = replace(
        config, num_blocks=room - 1168, num_compressed_blocks=2048, compressed_from=8192, num_host_blocks=20_000,
        compaction_seconds=0.002,
    )  # fmt: skip
    telemetry = Telemetry(
        model.name, executor="roofline", virtual=True, device=gpu.name, kv_dtype="auto", clock=clock.now,
        wall_clock=lambda: START + clock.now(), keep_finished=100,
    )  # fmt: skip
    engine = Engine(config, FailingSteps(model, gpu, config, telemetry, clock=clock), telemetry)
    step = engine.step

    def goes_on(until: float | None = None) -> bool:
        """As loop.EngineThread does where a step raises."""
        try:
            return step(until)
        except RuntimeError as error:
            engine.fail_running(str(error))
            engine.check_integrity()
            return True

    engine.step = goes_on  # type: ignore[method-assign]
    return engine


def load() -> Iterator[TraceRequest]:
    return itertools.takewhile(lambda r: r.arrival_seconds < HOURS * 3600.0, generate_load(LOAD, 3, start_time=START))


def requests() -> Iterator[Request]:
    for number, traced in enumerate(load()):
        request = Request(
            f"r{number}", traced.prompt, SamplingParams(max_tokens=traced.output_tokens, ignore_eos=True),
            request_class=traced.request_class, arrival=traced.arrival_seconds,
        )  # fmt: skip
        if number % 50 == 7:
            request.deadline = traced.arrival_seconds + 5.0
        yield request


@dataclass
class Soak:
    """What outlives an engine: the clock, the clients, the recorder and its store."""

    store: EmbeddedStore
    clock: VirtualClock
    sent: int = 0
    memory: list[int] = field(default_factory=list)
    lost: int = 0  # in flight when the engine was killed
    failures: int = 0
    moved: dict[str, float] = field(default_factory=dict)

    def run(self) -> None:
        recorder = Recorder(self.store)
        source = requests()
        ends = [HOURS * 3600.0 * (life + 1) / LIVES for life in range(LIVES)]
        held: list[Request] = []
        for end in ends:
            engine = soak_engine(self.clock)
            last = end == ends[-1]
            given = 0

            def offered(source=source, held=held) -> Iterator[Request]:
                nonlocal given
                for request in itertools.chain(held, source):
                    held[:] = [request]  # the engine reads one ahead of its submissions
                    given += 1
                    yield request
                held.clear()

            target = TelemetryTarget(engine.telemetry)

            def look(now: float, engine=engine, target=target, end=end, last=last) -> None:
                recorder.step(START + now, target.scrape())
                if now >= 3600.0 * (len(self.memory) + 1):
                    engine.check_integrity()
                    self.store.prune()
                    gc.collect()
                    self.memory.append(resident_bytes())
                if now >= end and not last:
                    raise Killed

            try:
                engine.run(offered(), tick_seconds=SCRAPE_SECONDS, on_tick=look)
            except Killed:
                pass
            else:
                assert last
                recorder.step(START + self.clock.now() + SCRAPE_SECONDS, target.scrape())
            self._close_books(engine, given, held, last)
        recorder.flush()

    def _close_books(self, engine: Engine, given: int, held: list[Request], last: bool) -> None:
        engine.check_integrity()
        shown = Exposition(engine)
        received = int(shown.value("kvscope_requests_received"))
        in_flight = engine.num_running + engine.num_waiting
        assert received in (given, given - 1)
        if received == given:
            held.clear()  # it was submitted
        assert received == shown.value("kvscope_requests") + in_flight
        anomalies = {row.labels: row.value for row in shown.families["kvscope_telemetry_anomalies"].rows if row.value}
        assert not anomalies
        assert isinstance(engine.executor, FailingSteps)
        if not engine.executor.failures:
            assert shown.value("kvscope_requests", outcome="error") == 0
        self.failures += engine.executor.failures
        self.sent += received
        self.lost += in_flight
        for reason in ("compress", "offload", "load"):
            self.moved[reason] = self.moved.get(reason, 0) + shown.value("kvscope_kv_moved_blocks", reason=reason)
        if last:
            assert in_flight == 0
            assert engine.kv.pool.num_active == engine.kv.compressed.num_active == engine.kv.host.pool.num_active == 0


def test_days_near_saturation_with_failures_and_restarts_leak_and_lose_nothing(tmp_path: Path) -> None:
    clock = VirtualClock()
    embedded.create(tmp_path / "soak.sqlite")
    soak = Soak(EmbeddedStore(tmp_path / "soak.sqlite", clock=lambda: START + clock.now()), clock)
    soak.run()
    sent = sum(1 for _ in load())
    assert soak.sent == sent > 250 * HOURS
    assert soak.failures >= HOURS // 4
    assert 0 < soak.lost < LIVES * 264, "what was in flight when the engine was killed, and no more than it can hold"
    assert all(moved > 0 for moved in soak.moved.values()), soak.moved
    assert len(soak.memory) >= HOURS - 1
    # Histories are bounded, so what is kept levels off once the load has been through its day: its first peak makes the process as large as it gets.
    assert soak.memory[-1] - soak.memory[23 if HOURS >= 48 else 1] < (8 if HOURS >= 48 else 24) * 2**20
    # The rate that was recorded, added up, is what was sent: a new life is a reset, not a loss and not a surge.
    frame = soak.store.range(
        "model:kvscope_requests_received:rate5m", START + 300, START + HOURS * 3600.0, SCRAPE_SECONDS
    )
    counted = float(frame["value"].sum() * SCRAPE_SECONDS)
    assert counted == pytest.approx(sent, rel=0.05)
    assert np.isfinite(frame["value"]).all()
    assert frame["value"].max() < 20 * 0.1
