"""What telemetry costs: recording one decode step, one request's life, one reading, one scrape.

    python benchmarks/telemetry.py [--json]

Medians over many repetitions on one thread. The recorder has served 1,000 requests; those that decode are of two classes.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

from exporters.text import render
from observability import catalog as c
from observability.telemetry.recorder import KVState, RequestTrace, Telemetry

PREFILL, DECODE = c.STATES.index("prefill"), c.STATES.index("decode")
FORWARD = c.COMPONENTS.index("forward_decode")
STEP_COMPONENTS = tuple(
    c.COMPONENTS.index(name) for name in ("schedule", "kv_alloc", "forward_decode", "sample", "emit")
)


def median_us(call: Callable[[], object], repeat: int) -> float:
    """Median time of one call in microseconds, after a short warm-up."""
    for _ in range(max(3, repeat // 20)):
        call()
    times = []
    for _ in range(repeat):
        start = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - start)
    return statistics.median(times) / 1e3


def pool() -> KVState:
    return KVState(
        capacity_blocks=1024, block_size=16, bytes_per_block=368_640, free=512, evictable=256, active=256,
        layout_blocks=(200, 56), stored_tokens=4000, largest_free_run=300,
        free_runs=list(range(len(c.FREE_RUN_BOUNDS) + 1)),
        region_blocks=np.full((c.REGIONS, 3), 8), region_free_run=np.full(c.REGIONS, 8),
    )  # fmt: skip


class Subject:
    """A recorder in the state of a busy engine."""

    def __init__(self) -> None:
        self.t = Telemetry(
            "smollm2-135m", executor="torch", virtual=False, device="cpu", kv_dtype="int8", clock=time.perf_counter
        )
        self.made = 0
        self.rng = np.random.default_rng(5)
        for _ in range(1000):
            self.life()
        for tensor in (0, 1):
            for group in ("0-9", "10-19", "20-29"):
                self.t.quant_error(tensor, group, "int8", 0.01, 100.0, 0.05, 64)
        self.t.publish(pool(), [0, 8, 0], [1, 2, 0])

    def arrive(self, request_class: str = "standard") -> RequestTrace:
        self.made += 1
        self.t.received(request_class)
        return self.t.arrive(
            f"cmpl-{self.made:032x}", request_class, 700, time.perf_counter() - float(self.rng.random())
        )

    def life(self) -> None:
        """One request from arrival to end, two tokens."""
        t, trace = self.t, self.arrive()
        t.lookup(trace, 688, 256)
        t.transition(trace, PREFILL)
        t.prefilled(trace)
        t.transition(trace, DECODE)
        t.tokens([trace], t.lap(FORWARD))
        t.tokens([trace], t.lap(FORWARD))
        t.finish(trace, "length", t.last)

    def decoding(self, running: int) -> list[RequestTrace]:
        """Requests that got their first token."""
        traces = [self.arrive(c.CLASSES[i % 2]) for i in range(running)]
        self.t.tokens(traces, self.t.lap(FORWARD))
        return traces

    def step(self, traces: list[RequestTrace]) -> Callable[[], None]:
        """All record calls of one decode step of the engine."""
        t, tokens = self.t, len(traces)

        def call() -> None:
            t.begin_step()
            now = 0.0
            for component in STEP_COMPONENTS:
                now = t.lap(component)
            t.tokens(traces, now)
            t.step(1, 0, tokens, 0.02)
            t.due()

        return call


def measure() -> dict[str, float]:
    """Figures by name; the unit is the end of the name."""
    subject = Subject()
    t = subject.t
    out: dict[str, float] = {}
    for running in (8, 32, 128):
        traces = subject.decoding(running)
        out[f"record_step_{running}_running_us"] = median_us(subject.step(traces), 3000)
        out[f"record_tokens_{running}_running_us"] = median_us(lambda traces=traces: t.tokens(traces, t.last), 3000)  # type: ignore[misc]
    traces = subject.decoding(32)
    ends = t.last + np.arange(1, 1001) * 0.02
    out["record_1000_step_run_32_running_us"] = median_us(lambda: t.tokens_run(traces, ends), 300)
    out["record_one_request_us"] = median_us(subject.life, 2000)
    out["publish_us"] = median_us(lambda: t.publish(pool(), [0, 8, 0], [1, 2, 0]), 500)
    out["values_us"] = median_us(t.values, 300)
    out["series"] = sum(len(rows) for _, rows in t.snapshot())
    for name, openmetrics in (("text", False), ("openmetrics", True)):
        body = render(t.snapshot(), openmetrics=openmetrics)
        out[f"scrape_{name}_us"] = median_us(lambda om=openmetrics: render(t.snapshot(), openmetrics=om), 100)  # type: ignore[misc]
        out[f"scrape_{name}_bytes"] = len(body)
        out[f"scrape_{name}_gzip_bytes"] = len(gzip.compress(body, 1))
        out[f"gzip_{name}_us"] = median_us(lambda body=body: gzip.compress(body, 1), 50)  # type: ignore[misc]
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    figures = measure()
    if options.json:
        machine = {"python": platform.python_version(), "machine": platform.machine(), "cpus": os.cpu_count()}
        json.dump({"figures": figures, **machine}, sys.stdout, indent=2)
        print()
    else:
        for name, figure in figures.items():
            print(f"{name:40} {figure:12,.1f}")


if __name__ == "__main__":
    main()
