"""Replays a load on the engine in this process: on the roofline executor in virtual time, or on a real model in real time.

Requests -> Engine (the same code that serves) -> MeasuredTelemetry, which keeps what the exact figures need -> ReplayResult.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from observability import catalog
from observability.engine.clock import MonotonicClock, VirtualClock
from observability.engine.engine import Engine
from observability.engine.executor.calibrated import CalibratedTimes, Calibration, is_calibration, load_calibration
from observability.engine.executor.hardware import gpu_by_name
from observability.engine.executor.roofline import RooflineExecutor, device_name, fit_num_blocks
from observability.engine.executor.virtual import VirtualExecutor
from observability.engine.kv.manager import KVManager
from observability.engine.model.costs import model_by_name
from observability.engine.types import Clock, EngineConfig, KVDtype, PromptSpan, Request, SamplingParams
from observability.errors import ConfigError, KvscopeError
from observability.telemetry.cells import KVState
from observability.telemetry.recorder import RequestRecord, RequestTrace, Telemetry
from observability.workload.generate import WORDS, prompt_token_ids
from observability.workload.results import (
    SERVED,
    KVUse,
    ReplayResult,
    Summary,
    kv_from_buckets,
    notes_on,
    phases_of,
    summarize,
    throughput,
)
from observability.workload.traces import TraceRequest

if TYPE_CHECKING:
    from observability.engine.model.tokenizer import Tokenizer

_Number = TypeVar("_Number", int, float)

DEFAULT_VIRTUAL_MODEL_LEN = 131_072
"""Admits the recorded traces on models whose context is at least that; Llama-3 reaches it with the scaled RoPE of 3.1."""
_UNLIMITED_QUEUE = 10**9  # a replay measures how long requests wait; it refuses none for the length of the queue
_DEFAULT_TORCH_BLOCKS = 4096
_MANY_BLOCKS = 1 << 40  # more than any memory holds: for settings that are not complete without a number of blocks
_REAL_POLL_SECONDS = 0.02
_SAMPLE_SECONDS = 10.0  # of virtual time, at least that often the pool's fragmentation is looked at


@dataclass(frozen=True, slots=True)
class InProcess:
    """What to replay on. `gpu` names a record of engine/executor/hardware.py and `model` a cost record; `gpu` may also be `calibrated`
    or the path of a calibration, with the model that it was made with. gpu None runs `model` for real (a name or path that load_model
    knows). None elsewhere: the default for that target. `engine`: further settings of EngineConfig by name, which go before those above."""

    model: str = "llama-3-8b"
    gpu: str | None = "H100"
    tensor_parallel: int = 1
    kv_blocks: int | None = None
    unbounded: bool = False
    block_size: int = 16
    kv_dtype: KVDtype = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    prefix_caching: bool = True
    serial: bool = False
    engine: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = {f.name for f in fields(EngineConfig)}
        if unknown := ", ".join(sorted(set(self.engine) - known)):
            raise ConfigError(
                f"The engine has no setting {unknown}.", next_step=f"Use some of {', '.join(sorted(known))}."
            )
        if self.kv_dtype not in ("auto", "int8"):
            raise ConfigError(f"kv_dtype is {self.kv_dtype!r}.", next_step="Use auto or int8.")
        if self.unbounded and self.kv_blocks is not None:
            raise ConfigError("KV cannot be unbounded and have kv_blocks.", next_step="Give one of them.")
        if self.gpu is None and (self.unbounded or self.tensor_parallel != 1):
            raise ConfigError(
                "Unbounded KV and tensor parallelism are for simulated GPUs.",
                next_step="Leave them out with a real model.",
            )


class MeasuredTelemetry(Telemetry):
    """The engine's telemetry, which also keeps every ended request, every inter-token latency and the pool's use over time."""

    def __init__(self, model: str, executor: str, device: str, kv_dtype: str, clock: Clock) -> None:
        super().__init__(
            model, executor=executor, virtual=clock.virtual, device=device, kv_dtype=kv_dtype, clock=clock.now,
            wall_clock=clock.now, on_finish=self._keep,
        )  # fmt: skip
        self.records: list[RequestRecord] = []
        self.on_record: Callable[[], None] | None = None
        # Inter-token latencies and how many tokens had each: a step gives nearly all of its decodes the same one.
        self.intervals, self.weights = array("d"), array("q")
        self.states: list[tuple[float, KVState]] = []  # published ones and when
        self.kv: KVManager | None = None  # of the engine, once there is one
        # Blocks that requests hold: over time, at most, and the most bytes of both kinds together.
        self.active_block_seconds = self.active_compressed_block_seconds = 0.0
        self.most_active = self.most_active_compressed = self.most_active_bytes = 0
        self._active_at_start = 0, 0

    def _keep(self, record: RequestRecord) -> None:
        self.records.append(record)
        if self.on_record is not None:
            self.on_record()

    def tokens(self, traces: Sequence[RequestTrace], now: float) -> None:
        by_last = Counter(trace.last_token for trace in traces)
        for last, count in by_last.items():
            if last is not None:
                self.intervals.append(now - last)
                self.weights.append(count)
        super().tokens(traces, now)

    def tokens_run(self, traces: Sequence[RequestTrace], ends: np.ndarray) -> None:
        super().tokens_run(traces, ends)  # which passes the first of `ends` through tokens()
        if traces:
            self.intervals.frombytes(np.diff(ends).tobytes())
            self.weights.frombytes(np.full(len(ends) - 1, len(traces), dtype=np.int64).tobytes())

    def begin_step(self) -> None:
        super().begin_step()
        if self.kv is not None:
            self._active_at_start = _active(self.kv)

    def step(self, kind: int, prefill_tokens: int, decode_tokens: int, durations: np.ndarray | float) -> None:
        super().step(kind, prefill_tokens, decode_tokens, durations)
        if self.kv is not None:  # asked before who has finished gives blocks back
            exact, compressed = held = _active(self.kv)
            before = (
                held if np.ndim(durations) == 0 else self._active_at_start
            )  # a run of steps takes blocks on the way
            seconds = float(np.sum(durations))
            self.active_block_seconds += (before[0] + exact) / 2.0 * seconds
            self.active_compressed_block_seconds += (before[1] + compressed) / 2.0 * seconds
            self.most_active = max(self.most_active, exact)
            self.most_active_compressed = max(self.most_active_compressed, compressed)
            self.most_active_bytes = max(self.most_active_bytes, self._bytes(exact, compressed))

    @property
    def active_byte_seconds(self) -> float:
        """Bytes of the blocks that requests held, times how long."""
        return self._bytes(self.active_block_seconds, self.active_compressed_block_seconds)

    def _bytes(self, exact: _Number, compressed: _Number) -> _Number:
        assert self.kv is not None
        executor = self.kv.executor
        return exact * executor.kv_bytes_per_block + compressed * executor.kv_bytes_per_compressed_block

    def publish(self, kv: KVState, running: Sequence[int], waiting: Sequence[int]) -> None:
        self.states.append((self.last, kv))
        super().publish(kv, running, waiting)

    def count(self, family: catalog.Family, label: str) -> dict[str, int]:
        """Present values of a counter by one of its labels, summed over the others."""
        at = family.labels.index(label)
        sums: Counter[str] = Counter()
        for samples in self.snapshot():
            if samples.family is family:
                for row in samples.rows:
                    sums[row.labels[at]] += round(row.value)
        return sums


def _active(kv: KVManager) -> tuple[int, int]:
    """Blocks that requests hold, exact and compressed."""
    return kv.pool.num_active, 0 if kv.compressed is None else kv.compressed.num_active


def replay_in_process(
    requests: Iterable[TraceRequest],
    target: InProcess,
    *,
    describe: dict[str, Any] | None = None,
    on_end: Callable[[int], None] | None = None,
) -> ReplayResult:
    """Serves `requests` on the engine and returns exact figures; `describe` joins the settings in the result.

    Every request generates exactly as many tokens as the load says, as far as max_model_len leaves room. Prompts that do not fit
    max_model_len are counted as invalid. `on_end` is called with the number of requests that ended so far. Raises ConfigError
    when the target's settings contradict each other or its hardware, ModelError when a real model cannot be loaded.
    """
    return replay_measured(requests, target, describe=describe, on_end=on_end)[0]


def replay_measured(
    requests: Iterable[TraceRequest],
    target: InProcess,
    *,
    describe: dict[str, Any] | None = None,
    on_end: Callable[[int], None] | None = None,
    sample_seconds: float | None = None,
) -> tuple[ReplayResult, MeasuredTelemetry]:
    """replay_in_process(), and what its figures were worked out from: the records of all requests and the pool's states.

    In virtual time there is a state every `sample_seconds`, whether the engine is busy or idle; by default every 10 s while it is busy."""
    if target.gpu is not None:
        return _replay_virtual(requests, target, describe or {}, on_end, sample_seconds)
    return _replay_real(requests, target, describe or {}, on_end)


def virtual_engine(target: InProcess, *, clock: VirtualClock | None = None) -> tuple[Engine, MeasuredTelemetry]:
    """An engine on the roofline executor as `target` says. Raises ConfigError when the settings do not fit each other."""
    assert target.gpu is not None
    if is_calibration(target.gpu):
        return _calibrated_target(target, clock)
    model, gpu = model_by_name(target.model), gpu_by_name(target.gpu)
    config = EngineConfig(
        block_size=target.block_size,
        num_blocks=None,
        max_num_seqs=target.max_num_seqs or 256,
        max_num_batched_tokens=target.max_num_batched_tokens or 8192,
        max_model_len=target.max_model_len or min(model.max_context, DEFAULT_VIRTUAL_MODEL_LEN),
        max_queued=_UNLIMITED_QUEUE,
        kv_dtype=target.kv_dtype,
        prefix_caching=target.prefix_caching,
    )
    blocks = target.engine.get("num_blocks", target.kv_blocks)
    if not target.unbounded and blocks is None:
        whole = config if target.max_model_len else _shortened(config, target, _MANY_BLOCKS)
        blocks = fit_num_blocks(
            model, gpu, _with_engine(whole, target, _MANY_BLOCKS), tensor_parallel=target.tensor_parallel
        )
        if target.max_model_len is None:
            config = _shortened(config, target, blocks)
    config = _with_engine(config, target, blocks)
    clock = clock or VirtualClock()
    device = device_name(gpu, target.tensor_parallel)
    telemetry = MeasuredTelemetry(model.name, "roofline", device, config.kv_dtype, clock)
    executor = RooflineExecutor(model, gpu, config, telemetry, tensor_parallel=target.tensor_parallel, clock=clock)
    engine = Engine(config, executor, telemetry)
    telemetry.kv = engine.kv
    return engine, telemetry


def _calibrated_target(target: InProcess, clock: VirtualClock | None) -> tuple[Engine, MeasuredTelemetry]:
    """virtual_engine() of a calibration; by default within what was measured: batch, tokens in a step, the model's context."""
    assert target.gpu is not None
    calibration = load_calibration(target.gpu, target.model, target.kv_dtype)
    if target.tensor_parallel != 1:
        raise ConfigError("A calibration is of one device.", next_step="Leave --tensor-parallel out.")
    config = EngineConfig(
        block_size=target.block_size,
        num_blocks=None,
        max_num_seqs=target.max_num_seqs or calibration.max_num_seqs,
        max_num_batched_tokens=target.max_num_batched_tokens or calibration.max_num_batched_tokens,
        max_model_len=target.max_model_len or calibration.max_context,
        max_queued=_UNLIMITED_QUEUE,
        kv_dtype=target.kv_dtype,
        prefix_caching=target.prefix_caching,
    )
    blocks = target.engine.get("num_blocks", target.kv_blocks)
    if not target.unbounded and blocks is None:
        whole = _with_engine(config, target, None)
        blocks = CalibratedTimes(calibration, whole).fit_num_blocks(whole)
        if target.max_model_len is None:
            config = _shortened(config, target, blocks)
    return calibrated_engine(calibration, _with_engine(config, target, blocks), clock=clock)


def _with_engine(config: EngineConfig, target: InProcess, num_blocks: int | None) -> EngineConfig:
    """`config` with so many blocks and the target's own settings, which go before."""
    return replace(config, **{"num_blocks": num_blocks, **target.engine})


def _shortened(config: EngineConfig, target: InProcess, num_blocks: int) -> EngineConfig:
    """`config` with the longest sequence that the memory holds, if that is shorter than its max_model_len. Of a long sequence, all but the
    newest tokens lie in compressed blocks where there are such."""
    blocks = target.engine.get("num_compressed_blocks") or num_blocks
    return replace(config, max_model_len=min(config.max_model_len, blocks * config.block_size))


def calibrated_engine(
    calibration: Calibration, config: EngineConfig, *, clock: VirtualClock | None = None
) -> tuple[Engine, MeasuredTelemetry]:
    """An engine in virtual time whose steps take what `calibration` says. Raises ConfigError when the KV blocks do not fit its memory."""
    clock = clock or VirtualClock()
    times = CalibratedTimes(calibration, config)
    telemetry = MeasuredTelemetry(calibration.model, "roofline", times.device, config.kv_dtype, clock)
    engine = Engine(config, VirtualExecutor(times, config, telemetry, clock=clock), telemetry)
    telemetry.kv = engine.kv
    return engine, telemetry


def _replay_virtual(
    requests: Iterable[TraceRequest],
    target: InProcess,
    describe: dict[str, Any],
    on_end: Callable[[int], None] | None,
    sample_seconds: float | None,
) -> tuple[ReplayResult, MeasuredTelemetry]:
    engine, telemetry = virtual_engine(target)
    feed = _Feed(engine.config, telemetry, on_end)
    started = time.perf_counter()
    engine.run(
        feed.read(requests, lambda r: (r.prompt, r.prompt.length)),
        serial=target.serial,
        tick_seconds=sample_seconds or _SAMPLE_SECONDS,
        on_tick=None
        if sample_seconds is None
        else lambda now: None,  # somebody who looks keeps idle time from being jumped over
    )
    feed.check_last()
    return _result(engine, telemetry, feed, target, describe, time.perf_counter() - started), telemetry


def real_engine(target: InProcess) -> tuple[Engine, MeasuredTelemetry, Tokenizer]:
    """An engine that runs the target's model, and the tokenizer of that. Raises ModelError when it cannot be loaded."""
    from observability.engine.executor.torch_executor import TorchExecutor
    from observability.engine.model.loading import load_model

    loaded = load_model(target.model)
    max_model_len = target.max_model_len or loaded.config.max_position
    config = EngineConfig(
        block_size=target.block_size,
        num_blocks=max(_DEFAULT_TORCH_BLOCKS, -(-max_model_len // target.block_size)),
        max_num_seqs=target.max_num_seqs or 8,
        max_num_batched_tokens=target.max_num_batched_tokens or 512,
        max_model_len=max_model_len,
        max_queued=_UNLIMITED_QUEUE,
        kv_dtype=target.kv_dtype,
        prefix_caching=target.prefix_caching,
    )
    blocks = config.num_blocks if target.kv_blocks is None else target.kv_blocks
    config = replace(config, **{"num_blocks": blocks, **target.engine})
    clock = MonotonicClock()
    telemetry = MeasuredTelemetry(loaded.name, "torch", str(loaded.model.device), config.kv_dtype, clock)
    engine = Engine(config, TorchExecutor(loaded, config, telemetry, clock=clock), telemetry)
    telemetry.kv = engine.kv
    return engine, telemetry, loaded.tokenizer


def _replay_real(
    requests: Iterable[TraceRequest], target: InProcess, describe: dict[str, Any], on_end: Callable[[int], None] | None
) -> tuple[ReplayResult, MeasuredTelemetry]:
    engine, telemetry, tokenizer = real_engine(target)
    clock, vocabulary = engine.executor.clock, one_token_words(tokenizer)
    feed = _Feed(engine.config, telemetry, on_end)
    started, wall = clock.now(), time.perf_counter()
    source = feed.read(requests, lambda r: (prompt_token_ids(r.prompt, vocabulary), r.prompt.length), start=started)
    pending = next(source, None)
    while pending is not None or engine.num_running or engine.num_waiting:
        while pending is not None and (
            not (engine.num_running or engine.num_waiting) if target.serial else pending.arrival <= clock.now()
        ):
            if target.serial:
                pending.arrival = clock.now()
            try:
                engine.add(pending)
            except KvscopeError as error:
                pending.outcome, pending.error = error.outcome, error.reason
            pending = next(source, None)
        if not engine.step() and pending is not None and not target.serial:
            time.sleep(min(max(pending.arrival - clock.now(), 0.0), _REAL_POLL_SECONDS))
    feed.check_last()
    return _result(engine, telemetry, feed, target, describe, time.perf_counter() - wall), telemetry


class _Feed:
    """Turns a load into the engine's requests, one at a time, and keeps count of what ended and of what was refused and why."""

    def __init__(
        self, config: EngineConfig, telemetry: MeasuredTelemetry, on_end: Callable[[int], None] | None
    ) -> None:
        self.sent = 0
        self.reasons: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()  # by outcome
        self.shortened = 0
        self._config, self._telemetry, self._on_end = config, telemetry, on_end
        self._last: Request | None = None
        telemetry.on_record = self._ended

    def _ended(self) -> None:
        if self._on_end is not None:
            self._on_end(len(self._telemetry.records) + self.refused.total())

    def read(
        self,
        requests: Iterable[TraceRequest],
        prompt_of: Callable[[TraceRequest], tuple[Sequence[int] | PromptSpan, int]],
        start: float = 0.0,
    ) -> Iterator[Request]:
        for number, request in enumerate(requests):
            self.check_last()
            prompt, length = prompt_of(request)
            self.sent += 1
            room = self._config.max_model_len - length
            self.shortened += 0 < room < request.output_tokens
            params = SamplingParams(max_tokens=request.output_tokens, ignore_eos=True)
            self._last = Request(
                f"r{number}", prompt, params, request.request_class, arrival=start + request.arrival_seconds
            )
            yield self._last

    def check_last(self) -> None:
        """Counts the request handed out last if the engine refused it."""
        last, self._last = self._last, None
        if last is not None and last.outcome in catalog.REFUSED_OUTCOMES:
            self.refused[last.outcome] += 1
            if last.prompt_len >= self._config.max_model_len:
                reason = f"prompt does not fit max_model_len = {self._config.max_model_len}"
            else:
                reason = str(last.error).splitlines()[0]
            self.reasons[reason] += 1
            self._ended()


def one_token_words(tokenizer: Tokenizer) -> list[int]:
    """Ids of the WORDS that this vocabulary holds as one token; of a vocabulary without them (bytes), the ids that spell them."""
    encoded = [tokenizer.encode(f" {word}", add_special_tokens=False) for word in WORDS]
    single = sorted({ids[0] for ids in encoded if len(ids) == 1})
    return single if len(single) >= len(WORDS) // 2 else sorted({i for ids in encoded for i in ids})


def _result(
    engine: Engine,
    telemetry: MeasuredTelemetry,
    feed: _Feed,
    target: InProcess,
    describe: dict[str, Any],
    wall: float,
) -> ReplayResult:
    records = telemetry.records
    served = [r for r in records if r.outcome in SERVED]
    outcomes = Counter(r.outcome for r in records)
    outcomes += feed.refused
    outcomes["lost"] = feed.sent - len(records) - feed.refused.total()
    virtual = engine.executor.clock.virtual
    notes = []
    if isinstance(engine.executor, VirtualExecutor):
        notes.append(f"Simulated: times are worked out from {engine.executor.times.source}; no model was run.")
    phases = phases_of(records)
    notes += notes_on(feed.sent, feed.refused.total(), feed.shortened, engine.config.max_model_len, phases)
    duration = max((r.finished for r in records), default=0.0) - min((r.arrival for r in records), default=0.0)
    prompt_tokens, generated = sum(r.prompt_tokens for r in served), sum(r.generated_tokens for r in served)
    by_length = [
        telemetry.count(family, "length_bucket")
        for family in (catalog.KV_QUERIED_TOKENS, catalog.KV_HITTABLE_TOKENS, catalog.KV_HIT_TOKENS)
    ]
    kv = kv_from_buckets(by_length[0], by_length[1], by_length[2])
    settings = asdict(target) | {f.name: getattr(engine.config, f.name) for f in fields(engine.config)}
    if engine.config.controller is not None:
        settings["controller"] = asdict(engine.config.controller)
    # said by num_blocks or under their own names, or of no effect here
    for name in ("kv_blocks", "unbounded", "engine", "seed", "quant_sample_rate"):
        settings.pop(name)
    return ReplayResult(
        clock="virtual" if virtual else "real",
        settings={
            "target": "roofline" if virtual else "torch",
            "device": engine.executor.device,
            **settings,
            **describe,
        },
        requests=feed.sent,
        outcomes={name: outcomes[name] for name in (*catalog.OUTCOMES, "lost")},
        reasons=dict(feed.reasons.most_common(20)),
        duration_seconds=duration,
        wall_seconds=wall,
        prompt_tokens=prompt_tokens,
        generated_tokens=generated,
        latency={
            "time_to_first_token_seconds": summarize(
                [r.first_token - r.arrival for r in served if r.first_token is not None]
            ),
            "end_to_end_seconds": summarize([r.finished - r.arrival for r in served]),
            "inter_token_seconds": summarize(
                np.frombuffer(telemetry.intervals), np.frombuffer(telemetry.weights, np.int64)
            ),
        },
        throughput=throughput(len(served), prompt_tokens, generated, duration),
        phases=phases,
        kv=replace(
            kv,
            recomputed_tokens=sum(telemetry.count(catalog.KV_RECOMPUTED_TOKENS, "reason").values()),
            evicted_blocks=sum(telemetry.count(catalog.KV_EVICTED_BLOCKS, "model").values()),
            use=_use(telemetry, duration),
        ),
        preemptions=sum(telemetry.count(catalog.PREEMPTIONS, "reason").values()),
        answers_cut_short=feed.shortened,
        notes=notes,
    )


def _use(telemetry: MeasuredTelemetry, seconds: float) -> KVUse | None:
    """Use of both pools over `seconds`: active blocks of every step, fragmentation from the published states."""
    if not telemetry.states or seconds <= 0.0:
        return None
    times = np.array([when for when, _ in telemetry.states])
    states = [state for _, state in telemetry.states]
    capacity, size = states[0].capacity_blocks, states[0].block_size
    held = np.array([s.active for s in states]) * size
    stored = np.array([s.stored_tokens for s in states])
    open_ = np.array([s.free + s.evictable for s in states])
    run = np.array([s.largest_free_run for s in states])
    capacity_bytes, kv = states[0].pool_bytes, telemetry.kv
    assert kv is not None
    usage = None
    if capacity_bytes is not None:
        mean_bytes = telemetry.active_byte_seconds / seconds
        usage = {"mean": mean_bytes / capacity_bytes, "max": telemetry.most_active_bytes / capacity_bytes}
    use = KVUse(
        capacity_blocks=capacity,
        block_size_tokens=size,
        bytes_per_block=states[0].bytes_per_block,
        active_blocks={"mean": telemetry.active_block_seconds / seconds, "max": float(telemetry.most_active)},
        usage_ratio=usage,
        internal_fragmentation_ratio=_shortfall(times, stored, held),
        external_fragmentation_ratio=None if capacity is None else _shortfall(times, run, open_),
    )
    if kv.compressed is None:
        return use
    return replace(
        use,
        compressed_capacity_blocks=kv.compressed.size,
        bytes_per_compressed_block=states[0].bytes_per_compressed_block,
        active_compressed_blocks={
            "mean": telemetry.active_compressed_block_seconds / seconds,
            "max": float(telemetry.most_active_compressed),
        },
    )


def _shortfall(times: np.ndarray, part: np.ndarray, whole: np.ndarray) -> Summary | None:
    """Mean over time and maximum of 1 - part / whole, of the samples that have a whole; between two it changes evenly."""
    there = whole > 0
    if not there.any():
        return None
    values = 1.0 - part / np.maximum(whole, 1)
    spans, middles = np.diff(times), (values[1:] + values[:-1]) / 2.0
    known = there[1:] & there[:-1] & (spans > 0.0)
    mean = np.average(middles[known], weights=spans[known]) if known.any() else values[there].mean()
    return {"mean": float(mean), "max": float(values[there].max())}
