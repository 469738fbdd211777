"""The thread that reads GPUs, and what a scrape sees of its newest reading. A driver that hangs stops the readings, never a scrape."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from exporters.gpu.health import TARGETS, WINDOW_SECONDS, Look, health, penalties
from exporters.gpu.reading import VALUES, WHOLE, GpuReading, GpuSource, Reading, SourceUnavailable
from observability import catalog as c
from observability.catalog import Family
from observability.telemetry.snapshot import FamilySamples, Row

_log = logging.getLogger(__name__)
#: Of targets that GPUs give: the value that measures them. The engine measures the other one.
_MEASURED_BY = {"dram_active": "profiled/dram", "l2_hit": "profiled/l2_hit"}
_COUNTERS = tuple(key for key, value in VALUES.items() if value.family.kind == "counter")
_RETRY_SECONDS = 60.0  # until a source that was not there is looked for again
_MAX_GPUS = 128  # with MIG instances; more are left out and counted


class Growth:
    """How much counters of one GPU grew within the window; a counter that falls has started anew."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._steps: deque[tuple[float, dict[str, float]]] = deque()

    def add(self, now: float, values: dict[str, float]) -> dict[str, float]:
        """Growth by counter up to `now` (monotonic seconds); nothing for a counter seen for the first time."""
        step = {}
        for key in _COUNTERS:
            if key in values and key in self._last:
                step[key] = values[key] - self._last[key] if values[key] >= self._last[key] else values[key]
        self._last.update((key, values[key]) for key in _COUNTERS if key in values)
        self._steps.append((now, step))
        while self._steps[0][0] < now - WINDOW_SECONDS:
            self._steps.popleft()
        grown: dict[str, float] = {}
        for _, part in self._steps:
            for key, amount in part.items():
                grown[key] = grown.get(key, 0.0) + amount
        return {key: amount for key, amount in grown.items() if key in values}


@dataclass(frozen=True)
class _State:
    """What a scrape sees; replaced as a whole. `unavailable` is (reason, message) when there was nothing to read from."""

    at: float = 0.0  # Unix seconds of the reading
    taken: float = -math.inf  # monotonic
    gpus: tuple[tuple[GpuReading, dict[str, float]], ...] = ()  # with penalties by reason
    unavailable: tuple[str, str] | None = ("not_read", "GPUs have not been read yet.")
    failures: Counter[str] = field(default_factory=Counter)


class GpuSampler:
    """Reads `source` every `interval` seconds. `on_change(message)` hears once when GPUs appear ("" then) or are not there.

    A reading that takes longer than `timeout` is counted (`timeout`); values older than `keep` seconds are no longer shown, their
    timestamp is.
    """

    def __init__(
        self,
        source: GpuSource,
        *,
        interval: float = 5.0,
        timeout: float = 10.0,
        keep: float = 60.0,
        on_change: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._source, self._interval, self._timeout, self._keep = source, interval, timeout, keep
        self._on_change, self._clock = on_change, clock
        self._state = _State()
        self._growth: dict[tuple[str, str, str], Growth] = {}
        self._stop = threading.Event()
        self._began: float | None = None  # monotonic, of the reading in progress
        self._hung = 0
        self._counted: float | None = None  # start of the reading whose hanging is counted
        self._lock = threading.Lock()  # for these two; held for an instant
        self._said: str | None = None
        self._thread = threading.Thread(target=self._run, name="kvscope-gpu", daemon=True)

    def start(self) -> GpuSampler:
        self._thread.start()
        return self

    def stop(self, timeout: float = 2.0) -> None:
        """Ends the thread; one that hangs in the driver is left behind (it ends with the process)."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        while not self._stop.is_set():
            self.read_once()
            self._stop.wait(self._interval if self._state.unavailable is None else max(self._interval, _RETRY_SECONDS))
        self._source.close()

    def read_once(self) -> None:
        """One reading, as the thread does it."""
        began = self._began = time.monotonic()
        before = self._state
        message = ""
        try:
            reading = self._source.read()
        except SourceUnavailable as error:
            message = str(error)
            failures = before.failures + Counter({"no_source": 1})
            self._state = _State(before.at, before.taken, before.gpus, (error.reason, message), failures)
        except Exception as error:  # a fault of ours or of a library must not end the readings
            if before.failures["error"] == 0:
                _log.exception("reading GPUs failed")
            message = f"Reading GPUs failed: {error}."
            failures = before.failures + Counter({"error": 1})
            self._state = _State(before.at, before.taken, before.gpus, ("error", message), failures)
        else:
            self._state = self._judged(reading, before.failures)
        self._count_hang(began)
        self._began = None
        if message != self._said:
            self._said = message
            if self._on_change is not None:
                self._on_change(message)

    def _judged(self, reading: Reading, failures: Counter[str]) -> _State:
        now = time.monotonic()
        gpus = []
        for gpu in reading.gpus[:_MAX_GPUS]:
            gpu.values = {key: value for key, value in gpu.values.items() if math.isfinite(value)}
            grown = self._growth.setdefault(gpu.labels, Growth()).add(now, gpu.values)
            gpus.append((gpu, penalties(Look(gpu.values, grown, gpu.recent_xids)) if gpu.mig == WHOLE else {}))
        self._growth = {gpu.labels: self._growth[gpu.labels] for gpu, _ in gpus}
        failures = failures + reading.failures + Counter({"error": max(len(reading.gpus) - _MAX_GPUS, 0)})
        return _State(self._clock(), now, tuple(gpus), None, failures)

    def _count_hang(self, began: float) -> None:
        """Counts the reading that began at `began`, once, when it has taken too long."""
        if time.monotonic() - began > self._timeout:
            with self._lock:
                if self._counted != began:
                    self._counted, self._hung = began, self._hung + 1

    # -- what a scrape sees ------------------------------------------------------------------------------------------------

    def snapshot(self) -> list[FamilySamples]:
        """Families of the newest reading. Waits for nothing."""
        began = self._began
        if began is not None:
            self._count_hang(began)
        state = self._state
        rows: dict[str, list[Row]] = {}

        def add(family: Family, labels: tuple[str, ...], value: float) -> None:
            suffix = {"counter": "_total", "info": "_info"}.get(family.kind, "")
            rows.setdefault(family.name, []).append(Row(suffix, labels, value))

        fresh = time.monotonic() - state.taken <= self._keep
        for gpu, found in state.gpus:
            add(c.GPU_LAST_READ, gpu.labels, state.at)
            if fresh:
                _add_gpu(add, gpu, found)
        failures = state.failures + Counter({"timeout": self._hung})
        for reason in c.GPU_READ_FAILURES:
            add(c.GPU_READ_FAILED, (reason,), failures[reason])
        for target, ratio in TARGETS.items():
            add(c.HARDWARE_TARGET, (target,), ratio)
        for target, key in _MEASURED_BY.items():
            add(c.HARDWARE_STATUS, (target, *_status(state, key, fresh)), 1.0)
        return [FamilySamples(family, rows[family.name]) for family in c.FAMILIES if family.name in rows]


def _add_gpu(add: Callable[[Family, tuple[str, ...], float], None], gpu: GpuReading, found: dict[str, float]) -> None:
    add(c.GPU, (*gpu.labels, gpu.name, gpu.driver, gpu.bus, gpu.source), 1.0)
    for key, value in VALUES.items():
        if key in gpu.values:
            add(value.family, (*gpu.labels, *value.labels), gpu.values[key])
    for code, count in sorted((gpu.xids or {}).items()):
        add(c.GPU_XIDS, (*gpu.labels, code), count)
    score = health(found)
    if score is not None:
        add(c.GPU_HEALTH, gpu.labels, score)
    for reason, penalty in found.items():
        add(c.GPU_PENALTY, (*gpu.labels, reason), penalty)


def _status(state: _State, key: str, fresh: bool) -> tuple[str, str]:
    """(status, reason) of a target whose measure is `key`."""
    if fresh and any(key in gpu.values for gpu, _ in state.gpus):
        return "measured", "none"
    if state.unavailable is not None:
        return "unavailable", state.unavailable[0]
    return "unavailable", "no_profiler" if fresh else "stale"
