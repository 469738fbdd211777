"""Faults to practise on: a live engine under a moderate load, in which one of the engine's own mechanisms goes wrong at a given time.

Nothing of the engine knows of it: a fault wraps objects of this one engine, on the engine's thread. Each is described with the alert that
must find it.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from observability.engine.engine import Engine
from observability.engine.executor.kv_cache import Int8KV
from observability.engine.executor.quantizer import Quantizer
from observability.engine.executor.torch_executor import TorchExecutor
from observability.engine.kv.prefix import BlockKeys, Keys
from observability.engine.loop import EngineThread
from observability.engine.model.loading import LoadedModel
from observability.engine.types import EngineConfig, Request, SamplingParams, StepPlan
from observability.errors import KvscopeError
from observability.telemetry.recorder import Telemetry

#: Ends a fault; to be called on the engine's thread.
Undo = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of class standard come at random, `rate` a second on average, while fewer than `at_once` are in the engine. Two thirds
    share a prefix."""

    rate: float = 3.0
    at_once: int = 8
    shared_tokens: int = 96
    own_tokens: tuple[int, int] = (8, 64)
    answer_tokens: tuple[int, int] = (8, 24)


@dataclass(frozen=True, slots=True)
class Incident:
    """`alert` is what must fire and nothing else. It takes `sets_in_seconds` until the engine is in the state that is wrong, and another
    `shows_seconds` until the windows of the rule show it; then the rule's own `for` begins."""

    name: str
    alert: str
    what: str
    sets_in_seconds: float
    shows_seconds: float
    inject: Callable[
        [Engine, float], Undo
    ]  # engine, seconds between the runs of a periodic job; on the engine's thread
    load: Load = Load()
    config: tuple[tuple[str, Any], ...] = ()
    needs: str = ""  # beside a Prometheus with the rules


_CONFIG = EngineConfig(
    block_size=16, num_blocks=256, max_num_seqs=8, max_num_batched_tokens=256, max_model_len=512, max_queued=64, contiguous_below=0,
)  # fmt: skip
_LEAKED = 0.965  # of the pool: above the alert's 95 %, and room for one request
_PINNED_EVERY = 6  # blocks
_COARSER = 8.0
_HELD_SECONDS = 0.4
_LOOK_SECONDS = 0.01


# -- faults ---------------------------------------------------------------------------------------------------------


def _leak(engine: Engine, _: float) -> Undo:
    """Blocks of requests that end keep a holder, until nearly the whole pool is held by nobody who runs."""
    pool, release = engine.kv.pool, engine.kv.pool.release
    lost: list[np.ndarray] = []

    def leaky(blocks: np.ndarray) -> None:
        room = int(_LEAKED * pool.size) - sum(map(len, lost))
        kept = blocks[pool.refs[blocks] == 1][: max(room, 0)]
        lost.append(kept)
        release(blocks[~np.isin(blocks, kept)])  # in sequence order

    pool.release = leaky  # type: ignore[method-assign]

    def undo() -> None:
        pool.release = release  # type: ignore[method-assign]
        for blocks in lost:
            release(blocks)

    return undo


def _pin(engine: Engine, _: float) -> Undo:
    """Small sequences that live long lie all over the pool: every sixth block is held."""
    pool = engine.kv.pool
    everything = pool.take(pool.allocatable)
    mine = everything % _PINNED_EVERY == 0
    pool.release(everything[~mine])
    return lambda: pool.release(everything[mine])


@dataclass(frozen=True, slots=True)
class _Coarse(Quantizer):
    """Scales that are too large by a factor: what remains are fewer levels."""

    def grid(self, exact: Any, dim: int) -> Any:
        return Quantizer.grid(self, exact, dim) * _COARSER


def _lose_precision(engine: Engine, _: float) -> Undo:
    """The scales of new quantized blocks are wrong."""
    assert isinstance(engine.executor, TorchExecutor)
    assert isinstance(engine.executor.kv, Int8KV)
    blocks = engine.executor.kv.blocks
    right = blocks.quantizer
    blocks.quantizer = _Coarse(right.scheme)

    def undo() -> None:
        blocks.quantizer = right

    return undo


def _stop_admitting(engine: Engine, _: float) -> Undo:
    """The scheduler finds nobody to admit; what runs goes on to its end, and then nothing runs."""
    scheduler = engine.scheduler
    schedule = scheduler.schedule

    def stuck(now: float) -> StepPlan:
        if scheduler.num_running:
            return schedule(now)
        time.sleep(_LOOK_SECONDS)
        return StepPlan([], [])

    scheduler._admit = lambda now, budget: None  # type: ignore[method-assign]
    scheduler.schedule = stuck  # type: ignore[method-assign]

    def undo() -> None:
        del scheduler._admit, scheduler.schedule

    return undo


class _Salted:
    """Keys of a sequence that match nothing of another one."""

    def __init__(self, keys: BlockKeys, salt: int) -> None:
        self._keys, self._salt = keys, np.uint64(salt)

    def get(self, first: int, last: int) -> Keys:
        return np.maximum(self._keys.get(first, last) ^ self._salt, 1)


def _change_keys(engine: Engine, _: float) -> Undo:
    """A deployment puts something that is different for each request into what block keys are made of."""
    kv = engine.kv
    open_table, serial = kv.open_table, itertools.count(1)

    def salted(request: Request) -> None:
        open_table(request)
        table = request.table
        if table is not None and table.keys is not None:
            table.keys = _Salted(table.keys, next(serial) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF)

    kv.open_table = salted  # type: ignore[method-assign]

    def undo() -> None:
        kv.open_table = open_table  # type: ignore[method-assign]

    return undo


def _hold_up(engine: Engine, every_seconds: float) -> Undo:
    """A job takes the engine's thread for 0.4 s, at regular times."""
    step, clock = engine.step, engine.executor.clock
    due = clock.now()

    def held(until: float | None = None) -> bool:
        nonlocal due
        if clock.now() >= due and engine.scheduler.has_work:
            due += every_seconds
            time.sleep(_HELD_SECONDS)
        return step(until)

    engine.step = held  # type: ignore[method-assign]

    def undo() -> None:
        engine.step = step  # type: ignore[method-assign]

    return undo


INCIDENTS: tuple[Incident, ...] = (
    Incident(
        "kv-exhaustion", "KvscopeKVCacheExhausted",
        "Blocks of ended requests are not given back; requests wait for the few that are left.",
        sets_in_seconds=30, shows_seconds=15, inject=_leak,
        # each takes more than half of the blocks that are left, so that one runs at a time and nobody is preempted; at most three wait,
        # so that first tokens stay in time, and they come faster than a fast machine serves one at a time
        load=Load(rate=100.0, at_once=4, shared_tokens=32, own_tokens=(66, 72), answer_tokens=(30, 41)),
    ),
    Incident(
        "fragmentation", "KvscopeKVFragmented",
        "Small sequences that live long pin blocks all over the pool; no long run of free blocks is left.",
        sets_in_seconds=0, shows_seconds=150, inject=_pin,
        # few at once: what runs must not itself break the pool in pieces too small for the next request
        load=Load(at_once=3, own_tokens=(96, 200)), config=(("contiguous_below", 512),),
    ),
    Incident(
        "precision-loss", "KvscopeQuantizationError",
        "The scales of quantized blocks come out eight times too large.",
        sets_in_seconds=0, shows_seconds=90, inject=_lose_precision,
        config=(("kv_dtype", "int8"), ("quant_sample_rate", 0.5)),
    ),
    Incident(
        "stuck-scheduler", "KvscopeSchedulerStuck",
        "Admission returns nothing: requests wait beside an empty engine.",
        sets_in_seconds=5, shows_seconds=75, inject=_stop_admitting,
    ),
    Incident(
        "cache-key-change", "KvscopeHitRateDrop",
        "Block keys differ for each request, so that no prefix is found again.",
        sets_in_seconds=0, shows_seconds=1080, inject=_change_keys,
        needs="a day of history before the fault (--after 86400), which the rule compares with",
    ),
    Incident(
        "slow-periodic-job", "KvscopePeriodicStall",
        "A job holds the engine's thread for 0.4 s at regular times.",
        sets_in_seconds=0, shows_seconds=15, inject=_hold_up,
    ),
)  # fmt: skip
#: Gaps between stalls that the rule asks for, and the stall that begins the first.
PERIODS = 10


def find(name: str) -> Incident:
    """The incident called `name`. Raises KvscopeError with the names that there are."""
    for incident in INCIDENTS:
        if incident.name == name:
            return incident
    raise KvscopeError(
        f"There is no incident {name!r}.", next_step=f"Use one of {', '.join(x.name for x in INCIDENTS)}."
    )


def onset_seconds(incident: Incident, every_seconds: float) -> float:
    """Seconds, at the most, until the engine is in the state that is wrong."""
    periods = PERIODS * every_seconds if incident.inject is _hold_up else 0.0
    return incident.sets_in_seconds + periods


# -- a live engine --------------------------------------------------------------------------------------------------


class IncidentEngine:
    """An engine of `loaded` as `incident` needs it, under its load. start(), inject(), end() and stop() are for one thread."""

    def __init__(
        self, incident: Incident, loaded: LoadedModel, telemetry: Telemetry, clock: Any, seed: int = 0
    ) -> None:
        self.incident, self.telemetry = incident, telemetry
        config = engine_config(incident)
        executor = TorchExecutor(loaded, config, telemetry, clock=clock)
        self.engine = Engine(config, executor, telemetry)
        self.thread = EngineThread(self.engine)
        self.ended: dict[str, int] = {}
        self._vocabulary = loaded.config.vocab_size
        self._rng = np.random.default_rng(seed)
        self._stop = threading.Event()
        self._load = threading.Thread(target=self._send, name="load", daemon=True)
        self._undo: Undo | None = None

    def start(self) -> None:
        self.thread.start()
        self._load.start()

    def inject(self, every_seconds: float) -> None:
        """The fault begins, between two steps."""
        self._undo = self.engine.call(lambda: self.incident.inject(self.engine, every_seconds)).result()

    def end(self) -> None:
        """The fault ends, between two steps. Nothing happens when there is none."""
        if self._undo is not None:
            self.engine.call(self._undo).result()
            self._undo = None

    def stop(self) -> None:
        self._stop.set()
        if self._load.ident is not None:
            self._load.join()
        self.thread.stop()

    def _send(self) -> None:
        load, rng = self.incident.load, self._rng
        shared = rng.integers(3, self._vocabulary, load.shared_tokens).tolist()
        number, due = 0, time.monotonic()
        while not self._stop.wait(max(due - time.monotonic(), 0.001)):
            if self.engine.num_waiting + self.engine.num_running >= load.at_once:
                due = time.monotonic() + _LOOK_SECONDS
                continue
            due = max(due, time.monotonic() - 1.0) + rng.exponential(1.0 / load.rate)
            own = rng.integers(3, self._vocabulary, int(rng.integers(*load.own_tokens))).tolist()
            number += 1
            try:
                self.engine.add(
                    Request(
                        f"r{number}",
                        shared + own if number % 3 else own,
                        SamplingParams(max_tokens=int(rng.integers(*load.answer_tokens)), ignore_eos=True),
                        arrival=self.engine.executor.clock.now(),
                        on_token=self._told,
                    )
                )
            except KvscopeError:
                return  # the engine has stopped

    def _told(self, request: Request, token: int | None, finished: str | None) -> None:
        if finished is not None:
            self.ended[finished] = self.ended.get(finished, 0) + 1


def engine_config(incident: Incident) -> EngineConfig:
    """Settings of the engine that `incident` happens in."""
    return replace(_CONFIG, **dict(incident.config))
