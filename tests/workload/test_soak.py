"""Eight virtual hours near saturation with every mechanism on: books that agree, no leak of blocks, slots or memory."""

from __future__ import annotations

import gc
import itertools
import resource
from dataclasses import replace
from pathlib import Path

from observability.engine.clock import VirtualClock
from observability.engine.engine import Engine
from observability.engine.executor.hardware import gpu_by_name
from observability.engine.executor.roofline import RooflineExecutor, fit_num_blocks
from observability.engine.model.costs import model_by_name
from observability.engine.types import ControllerConfig, EngineConfig, Request, SamplingParams
from observability.telemetry.recorder import Telemetry
from observability.workload.generate import PRESETS, generate_load
from observability.workload.traces import window
from tests.engine.support import Exposition

HOURS = 8
SLOWED = 0.03  # of the recorded rate: one A10G is then busy about five sixths of the time


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def soak_engine() -> Engine:
    model, gpu, clock = model_by_name("llama-3-8b"), gpu_by_name("A10G"), VirtualClock()
    config = EngineConfig(
        num_blocks=None, max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=32_768, max_queued=200,
        predictive_admission=True, controller=ControllerConfig(p99_high_seconds=20.0, p99_low_seconds=10.0),
    )  # fmt: skip
    room = fit_num_blocks(model, gpu, config)
    config = replace(
        config, num_blocks=room - 1100, num_compressed_blocks=2048, compressed_from=8192, num_host_blocks=20_000,
        compaction_seconds=0.002,
    )  # fmt: skip
    telemetry = Telemetry(
        model.name, executor="roofline", virtual=True, device=gpu.name, kv_dtype="auto", clock=clock.now,
        wall_clock=clock.now, keep_finished=100,
    )  # fmt: skip
    return Engine(config, RooflineExecutor(model, gpu, config, telemetry, clock=clock), telemetry)


def test_eight_hours_near_saturation_leak_nothing() -> None:
    engine = soak_engine()
    load = window(generate_load(PRESETS["recorded"], 3), time_scale=SLOWED, span_seconds=HOURS * 3600.0 * SLOWED)
    numbers = itertools.count()
    sent: list[int] = []

    def requests():
        for traced in load:
            number = next(numbers)
            sent.append(number)
            request = Request(
                f"r{number}", traced.prompt, SamplingParams(max_tokens=traced.output_tokens, ignore_eos=True),
                request_class=traced.request_class, arrival=traced.arrival_seconds,
            )  # fmt: skip
            if number % 50 == 7:
                request.deadline = traced.arrival_seconds + 5.0
            yield request

    memory: list[int] = []

    def look(now: float) -> None:
        if now >= 3600.0 * (len(memory) + 1):
            engine.check_integrity()
            gc.collect()
            memory.append(resident_bytes())

    engine.run(requests(), tick_seconds=60.0, on_tick=look)
    engine.check_integrity()
    shown = Exposition(engine)
    assert len(sent) > 2000
    assert shown.value("kvscope_requests_received") == len(sent) == shown.value("kvscope_requests")
    assert shown.value("kvscope_requests", outcome="error") == shown.value("kvscope_telemetry_anomalies") == 0
    assert engine.kv.pool.num_active == engine.kv.compressed.num_active == engine.kv.host.pool.num_active == 0
    for reason in ("compress", "offload", "load"):
        assert shown.value("kvscope_kv_moved_blocks", reason=reason) > 0, reason
    assert len(memory) >= HOURS - 1
    # Histories are bounded, so what is kept levels off after the warm-up.
    assert memory[-1] - memory[1] < 16 * 2**20
