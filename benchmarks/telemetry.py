"""What telemetry costs: a step's records, the engine with and without them, a scrape, and a step during a scrape.

    python benchmarks/telemetry.py
    python benchmarks/telemetry.py --json telemetry.json
    python benchmarks/telemetry.py --fours 1500 --seconds 60        steadier figures, on a quiet machine

Costs are CPU time of the thread that pays, so that other work on the machine hardly shows; medians over many repetitions. What telemetry
takes from the engine is told by steps of one engine with it on and off in turns, of a tiny model and of the bundled one. What a scrape takes from a step is told by the steps during
scrapes of their own engine against those during equal scrapes of another one, with the endpoint in a process of its own and in a thread of
the engine's; a quiet machine is needed: the load is printed, too.
"""

from __future__ import annotations

import gc
import gzip
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from exporters.process import ExporterProcess, start_exporter_process
from exporters.prometheus import Exporter, start_exporter
from exporters.text import Exposition, render
from figures import Parser, Row, keep
from observability import catalog as c
from observability.engine.clock import MonotonicClock
from observability.engine.engine import Engine
from observability.engine.executor.torch_executor import TorchExecutor
from observability.engine.kv.residency import EvictionMemory, Ledger
from observability.engine.model.loading import load_model
from observability.engine.types import EngineConfig, Request, SamplingParams
from observability.telemetry.recorder import KVState, RequestTrace, Telemetry

PREFILL, DECODE = c.STATES.index("prefill"), c.STATES.index("decode")
FORWARD = c.COMPONENTS.index("forward_decode")
SERIES = 3000  # of the scrape
DEFAULT_MODEL = "smollm2-135m"
#: What docs/performance.md shows.
SHOWN = (
    *((f"record_step_{n}_running_us", f"records of a step of {n} requests, CPU", "us") for n in (8, 32, 128)),
    ("bundled_model_records_ratio", f"records within a step of {DEFAULT_MODEL}, 32 requests / the step", "ratio"),
    ("bundled_model_on_off_cpu_ratio", "such a step: telemetry on / off", "ratio"),
    ("bundled_model_on_on_cpu_ratio", "the same comparison of no difference: on / on", "ratio"),
    ("engine_records_ratio", "records within a step of the model of --model, 32 requests / the step", "ratio"),
    ("engine_on_off_cpu_ratio", "a step of the model of --model (tiny: 6 ms), 32 requests: telemetry on / off", "ratio"),
    ("engine_on_on_cpu_ratio", "the same comparison of no difference: on / on, of that model", "ratio"),
    ("scrape_text_us", "a scrape of 3,000 series, CPU", "us"),
    ("scrape_text_longest_hold_us", "longest that it holds the interpreter at a time", "us"),
    ("scrape_text_bytes", "its text", "bytes"),
    ("scrape_text_gzip_bytes", "its text, gzip", "bytes"),
    *(
        row
        for name, where in (("process", "a process of its own"), ("thread", "a thread of the engine"))
        for row in (
            (f"delay_{name}_scrape_ms", f"a scrape at 5 Hz by {where}", "ms"),
            (f"delay_{name}_p50_ms", "steps during it against equal scrapes of another process: P50 later by", "ms"),
            (f"delay_{name}_p99_ms", "the same, P99", "ms"),
            (f"delay_{name}_longest_ms", "the same, the longest", "ms"),
        )
    ),
)  # fmt: skip
STEP_COMPONENTS = tuple(
    c.COMPONENTS.index(name) for name in ("schedule", "kv_alloc", "forward_decode", "sample", "emit")
)


def median_us(call: Callable[[], object], repeat: int) -> float:
    """Median CPU time of one call in microseconds, after a short warm-up."""
    for _ in range(max(3, repeat // 20)):
        call()
    times = []
    for _ in range(repeat):
        start = time.thread_time_ns()
        call()
        times.append(time.thread_time_ns() - start)
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


def grow(t: Telemetry, series: int) -> int:
    """Lets series of quantization and pools appear until `t` has at least `series`; how many it has."""
    ledger = Ledger(1024, time.perf_counter)
    ledger.begin(np.arange(256))
    t.publish(replace(pool(), residency=[ledger.residency()] * len(c.POOLS)), [0, 8, 0], [1, 2, 0])
    made = 0
    while (count := sum(len(rows) for _, rows in t.snapshot())) < series:
        t.quant_error(made % 2, f"{made}", "int4", 0.01, 100.0, 0.05, 64)
        made += 1
    return count


def record_costs() -> dict[str, float]:
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
    return out


def residency_costs() -> dict[str, float]:
    """Of the books of cached content: each event of 32 blocks, and a copy of them for a scrape."""
    out: dict[str, float] = {}
    rng = np.random.default_rng(1)
    some = rng.permutation(4096)[:32]
    ledger, memory = Ledger(4096, time.perf_counter), EvictionMemory(16_384)
    keys = rng.integers(1, 1 << 63, 1 << 16).astype(np.uint64)
    for name in ("begin", "idle", "reuse", "end"):
        event = getattr(ledger, name)
        out[f"residency_{name}_32_blocks_us"] = median_us(lambda event=event: event(some), 2000)  # type: ignore[misc]
        ledger.begin(some)
    turn = iter(range(0, 1 << 40, 32))
    out["residency_remember_32_evictions_us"] = median_us(
        lambda: memory.add(keys[(at := next(turn) % len(keys)) : at + 32], 0.0), 2000
    )
    for blocks in (4096, 65_536):
        books = Ledger(blocks, time.perf_counter)
        books.begin(np.arange(blocks))
        out[f"residency_copy_{blocks}_blocks_us"] = median_us(books.residency, 200)
        out[f"residency_life_table_{blocks}_blocks_us"] = median_us(lambda books=books: books.residency().series, 100)  # type: ignore[misc]
    return out


def scrape_costs() -> dict[str, float]:
    """Of one scrape of a busy engine: the work in all, and the longest that it holds the interpreter at a time."""
    subject = Subject()
    t = subject.t
    out: dict[str, float] = {"scrape_series": grow(t, SERIES)}
    traces = subject.decoding(32)
    step = subject.step(traces)

    def in_parts(call: Callable[[], object]) -> tuple[float, float]:
        """Medians of the work in microseconds, and of the longest part between two pauses."""
        works, longest = [], []
        for _ in range(60):
            for _ in range(5):
                subject.life()
            step()
            marks = [time.thread_time_ns()]
            sleep, time.sleep = time.sleep, lambda _, marks=marks: marks.append(time.thread_time_ns())  # type: ignore[assignment, misc]
            try:
                call()
            finally:
                time.sleep = sleep
            marks.append(time.thread_time_ns())
            works.append(marks[-1] - marks[0])
            longest.append(max(np.diff(marks)))
        return statistics.median(works) / 1e3, float(statistics.median(longest)) / 1e3

    out["scrape_read_us"], out["scrape_read_longest_hold_us"] = in_parts(lambda: t.columns(0.001))
    for name, openmetrics in (("text", False), ("openmetrics", True)):
        exposition = Exposition(t, openmetrics=openmetrics)
        exposition.render()
        work, longest = in_parts(lambda exposition=exposition: exposition.render(pause_seconds=0.001))  # type: ignore[misc]
        out[f"scrape_{name}_us"], out[f"scrape_{name}_longest_hold_us"] = work, longest
        body = render(t.snapshot(), openmetrics=openmetrics)
        out[f"scrape_{name}_from_nothing_us"] = median_us(
            lambda om=openmetrics: render(t.snapshot(), openmetrics=om), 30
        )  # type: ignore[misc]
        out[f"scrape_{name}_bytes"] = len(body)
        out[f"scrape_{name}_gzip_bytes"] = len(gzip.compress(body, 1))
        out[f"gzip_{name}_us"] = median_us(lambda body=body: gzip.compress(body, 1), 30)  # type: ignore[misc]
    return out


# -- the engine ---------------------------------------------------------------------------------------------------------------


class Switch:
    """Telemetry of one engine, on or off. Off, nothing is recorded, measured or published; the clock is still read once a lap.

    To be switched while requests decode: what begins while it is off is never ended in the books.
    """

    def __init__(self, engine: Engine) -> None:
        t: Any = engine.telemetry
        timer: Any = engine.executor._timer  # type: ignore[attr-defined]

        def nothing(*_: object, **__: object) -> None: ...

        def lap(_: int) -> float:
            t.last = now = t._clock()
            return now

        shares = timer.shares()
        self._stubs: list[tuple[Any, dict[str, Any]]] = [
            (t, {name: nothing for name in dir(Telemetry) if hasattr(getattr(Telemetry, name), "__wrapped__")}),
            (t.mechanisms, {name: nothing for name in dir(t.mechanisms) if not name.startswith("_")}),
            (timer, {"lap": nothing, "shares": lambda: shares}),
        ]
        self._stubs[0][1].update(lap=lap, lap_to=nothing, begin_step=nothing, due=lambda: False)
        self._kv = engine.kv
        self._evictions = engine.kv.evictions
        self._ledgers = [(held, held.ledger) for held in engine.kv.pools if held is not None]

    def turn(self, on: bool) -> None:
        for target, stubs in self._stubs:
            for name, stub in stubs.items():
                if on:
                    target.__dict__.pop(name, None)
                else:
                    target.__dict__[name] = stub
        self._kv.evictions = self._evictions if on else None
        for held, ledger in self._ledgers:
            held.ledger = ledger if on else None


def engine_of(model: str, requests: int, tokens: int) -> Engine:
    """An engine with `requests` requests that all decode for `tokens` tokens more."""
    clock = MonotonicClock()
    t = Telemetry(model, executor="torch", virtual=False, device="cpu", kv_dtype="auto", clock=clock.now)
    length = tokens + 64
    config = EngineConfig(
        max_num_seqs=requests, num_blocks=requests * (length // 16 + 2), max_model_len=length, max_queued=requests
    )
    engine = Engine(config, TorchExecutor(load_model(model), config, t, clock=clock), t)
    refill(engine, requests, tokens)
    return engine


def refill(engine: Engine, requests: int, tokens: int) -> None:
    """New requests, up to where all of them decode."""
    rng = np.random.default_rng(2)
    new = [
        Request(f"r{i}", rng.integers(3, 250, 32).tolist(), SamplingParams(max_tokens=tokens, ignore_eos=True))
        for i in range(requests)
    ]
    for request in new:
        request.arrival = engine.executor.clock.now()
        engine.add(request)
    while any(request.num_generated < 2 for request in new):
        engine.step()


def engine_costs(model: str, fours: int) -> dict[str, float]:
    """Decode steps of 32 requests with telemetry on and off, on one engine: two engines differ by more than telemetry takes, by where
    their memory lies. Four steps in a row are on, off, off, on or the other way round, which cancels what changes slowly; the
    difference is the median over `fours` of them. What publishes gauges, a few times a second, is measured for itself and added by its
    share. The same with both turns on shows what the method makes of no difference at all."""
    engine = engine_of(model, 32, 400)
    switch = Switch(engine)
    published: list[int] = []
    publish = engine.publish

    def timed_publish() -> None:
        began = time.thread_time_ns()
        publish()
        published.append(time.thread_time_ns() - began)

    engine.publish = timed_publish  # type: ignore[method-assign]
    rng = np.random.default_rng(0)

    def step() -> int:
        count, began = len(published), time.thread_time_ns()
        engine.step()
        return time.thread_time_ns() - began - sum(published[count:])

    def fours_of(off: bool) -> np.ndarray:
        """CPU microseconds of a step, [fours, 2]: on, and off."""
        found = []
        for _ in range(fours):
            if min(request.limit - request.num_generated for request in engine.scheduler.running()) < 8:
                switch.turn(True)
                engine.run_until_idle()
                refill(engine, 32, 400)
            order = (0, 1, 1, 0) if rng.random() < 0.5 else (1, 0, 0, 1)
            spent = [0, 0]
            for which in order:
                switch.turn(not (off and which))
                spent[which] += step()
            found.append(spent)
        switch.turn(True)
        return np.array(found) / 2e3

    out: dict[str, float] = {}
    for name, off in (("on_off", True), ("on_on", False)):
        times = fours_of(off)
        difference, base = times[:, 0] - times[:, 1], float(np.median(times[:, 1]))
        medians = [np.median(rng.choice(difference, len(difference))) for _ in range(1000)]
        shared = (
            statistics.median(published) / 1e3 * base / 1e6 / engine.telemetry.publish_interval_seconds if off else 0.0
        )
        low, high = np.quantile(medians, (0.025, 0.975))
        out |= {
            f"engine_{name}_cpu_us_per_step": float(np.median(difference)) + shared,
            f"engine_{name}_cpu_ratio": 1.0 + (float(np.median(difference)) + shared) / base,
            f"engine_{name}_cpu_ratio_low": 1.0 + (low + shared) / base,
            f"engine_{name}_cpu_ratio_high": 1.0 + (high + shared) / base,
        }
        if off:
            out = {"engine_step_cpu_us": base, "engine_publish_us": statistics.median(published) / 1e3} | out
    return out | records_in_place(engine)


def records_in_place(engine: Engine) -> dict[str, float]:
    """Time inside record calls of steps as they come, with whatever the forward pass left in the caches."""
    refill_needed = min(request.limit - request.num_generated for request in engine.scheduler.running()) < 300
    if refill_needed:
        engine.run_until_idle()
        refill(engine, 32, 400)
    t: Any = engine.telemetry
    spent: dict[str, list[int]] = {}
    inside = [False]

    def watch(target: Any, name: str) -> None:
        call = getattr(target, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            if inside[0]:
                return call(*args, **kwargs)
            inside[0], began = True, time.perf_counter_ns()
            try:
                return call(*args, **kwargs)
            finally:
                spent.setdefault(name, []).append(time.perf_counter_ns() - began)
                inside[0] = False

        setattr(target, name, watched)

    guarded = [name for name in dir(Telemetry) if hasattr(getattr(Telemetry, name), "__wrapped__")]
    for name in (*guarded, "lap", "lap_to", "begin_step", "due"):
        if name != "publish":
            watch(t, name)
    for name in [name for name in dir(t.mechanisms) if not name.startswith("_")]:
        watch(t.mechanisms, name)
    steps = 250
    for _ in range(steps):
        engine.step()
    total = sum(statistics.median(times) * len(times) for times in spent.values())
    return {"engine_records_in_place_us_per_step": total / steps / 1e3}


def shares(figures: dict[str, float]) -> dict[str, float]:
    """Records in place over the step that they are in, of each model that was run."""
    return {
        f"{name}_records_ratio": figures[f"{name}_records_in_place_us_per_step"] / figures[f"{name}_step_cpu_us"]
        for name in ("engine", "bundled_model")
        if f"{name}_step_cpu_us" in figures
    }


SCRAPER = """
import json, sys, time, urllib.request
seconds, rate, urls = float(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
requests = [urllib.request.Request(url, headers={"Accept-Encoding": "gzip"}) for url in urls]
spans = [[] for _ in urls]
end, turn = time.perf_counter() + seconds, 0
while time.perf_counter() < end:
    began = time.perf_counter()
    with urllib.request.urlopen(requests[turn], timeout=10) as answer:
        answer.read()
    spans[turn].append((began, time.perf_counter()))
    turn = (turn + 1) % len(urls)
    time.sleep(max(0.0, 1.0 / rate / len(urls) - (time.perf_counter() - began)))
print(json.dumps(spans))
"""


def serve_elsewhere(connection: Any) -> None:
    """An exporter of as many series in a process of its own, until the connection ends."""
    subject = Subject()
    grow(subject.t, SERIES)
    with start_exporter(subject.t) as exporter:
        connection.send(exporter.url)
        while not connection.poll(0.1):
            subject.life()


def other_threads() -> float:
    """CPU seconds of all threads of this process but this one: more than the time for which they can have held the interpreter."""
    return time.process_time() - time.thread_time()


def scrape_delay(
    model: str, seconds: float, rate: float, start: Callable[[Telemetry], Exporter | ExporterProcess], name: str
) -> dict[str, float]:
    """Steps of 32 decoding requests during scrapes of their engine, against steps during equal scrapes of another process.

    Both cost the machine the same, so the difference is what a scrape costs the engine's thread.
    """
    engine = engine_of(model, 32, 400)
    series = grow(engine.telemetry, SERIES)
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    other = multiprocessing.get_context("spawn").Process(target=serve_elsewhere, args=(theirs,), daemon=True)
    other.start()
    marks: list[tuple[float, float]] = []
    try:
        with start(engine.telemetry) as exporter:
            urls = [exporter.url, ours.recv()]
            for url in urls:  # the first rendering of everything is not what a scrape costs
                urllib.request.urlopen(url, timeout=60).read()
            command = [sys.executable, "-c", SCRAPER, str(seconds), str(rate), *urls]
            collected: list[tuple[int, float]] = []
            gc.callbacks.append(
                collecting := lambda _, about: collected.append((about["generation"], time.perf_counter()))
            )
            before = other_threads()
            client = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            while client.poll() is None:
                if engine.scheduler.num_running < 32:
                    engine.run_until_idle()
                    refill(engine, 32, 400)
                began = time.perf_counter()
                engine.step()
                marks.append((began, time.perf_counter()))
            assert client.stdout is not None
            here, elsewhere = json.loads(client.stdout.read())
            spent = other_threads() - before
            gc.callbacks.remove(collecting)
    finally:
        ours.send("end")
        other.join(10)
    starts, ends = np.array(marks).T
    steps = (ends - starts) * 1e3

    def overlapped(spans: list[tuple[float, float]]) -> np.ndarray:
        found = np.zeros(len(steps), dtype=bool)
        for began, ended in spans:
            found |= (starts < ended) & (ends > began)
        return found

    during, beside = overlapped(here), overlapped(elsewhere)
    scraped, control = steps[during & ~beside], steps[beside & ~during]
    rng = np.random.default_rng(0)
    # The longest of as many steps: of more it would be longer by chance alone.
    count = min(len(scraped), len(control))
    if not count:  # steps longer than the time between scrapes
        return {}
    longest = [float(np.median([rng.choice(x, count).max() for _ in range(300)])) for x in (scraped, control)]
    out = {
        "delay_series": series,
        "delay_scrapes": len(here),
        "delay_longest_collection_ms": max((b[1] - a[1] for a, b in pairwise(collected) if a[0] == b[0]), default=0.0)
        * 1e3,
        "delay_cpu_beside_steps_us": spent / len(here) * 1e6,
        "delay_scrape_ms": statistics.median(b - a for a, b in here) * 1e3,
        "delay_steps_during_scrapes": len(scraped),
        "delay_steps_of_control": len(control),
        "delay_step_without_scrape_ms": float(np.median(steps[~during & ~beside])),
    }
    for q in (0.5, 0.9, 0.99):
        out[f"delay_p{q * 100:g}_ms"] = float(np.quantile(scraped, q) - np.quantile(control, q))
    out |= {
        "delay_longest_ms": longest[0] - longest[1],
        "delay_longest_step_ms": longest[0],
        "delay_longest_step_of_control_ms": longest[1],
    }
    return {figure.replace("delay_", f"delay_{name}_"): value for figure, value in out.items()}


def main() -> None:
    parser = Parser(__doc__, quick={"fours": 100, "bundled_fours": 0, "seconds": 6.0})
    parser.add_argument(
        "--model", default="tiny", help="model of the engine (default: tiny, whose steps are the shortest)"
    )
    parser.add_argument("--fours", type=int, default=500, help="of steps with telemetry on and off (default: 500)")
    parser.add_argument(
        "--bundled-fours", type=int, default=40, help=f"the same with {DEFAULT_MODEL}, some seconds each; 0: not"
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="of scrapes at 5 Hz (default: 20)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    load = [os.getloadavg()[0]]
    figures = record_costs() | residency_costs() | scrape_costs()
    figures |= engine_costs(options.model, options.fours)
    if options.bundled_fours:
        whole = engine_costs(DEFAULT_MODEL, options.bundled_fours)
        figures |= {name.replace("engine_", "bundled_model_"): value for name, value in whole.items()}
    figures |= scrape_delay(options.model, options.seconds, 5.0, start_exporter_process, "process")
    figures |= scrape_delay(options.model, options.seconds, 5.0, start_exporter, "thread")
    figures |= shares(figures)
    load.append(os.getloadavg()[0])
    figures |= {"load_before": load[0], "load_after": load[1]}
    for name, figure in figures.items():
        print(f"{name:44} {figure:14,.3f}")
    if max(load) > 1.0:
        print(
            "\nOther work was running: the figures that begin with engine_ or delay_ are to be taken again on a quiet machine."
        )
    rows = [Row(named, figures[name], unit) for name, named, unit in SHOWN if name in figures]
    keep(options, rows, figures)


if __name__ == "__main__":
    main()
