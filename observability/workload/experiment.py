"""What each mechanism of the engine buys: the same load, replayed with one mechanism more at a time, on the same bytes of KV memory.

Load -> Sizes (what every arm has in common) -> Arms -> time scale near an arm's saturation -> one replay an arm -> ExperimentResult.
The tables and the plot are made by experiment_report.py.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from observability.catalog import CLASSES
from observability.engine.types import ControllerConfig
from observability.errors import ConfigError
from observability.telemetry.cells import KVState
from observability.telemetry.recorder import RequestRecord
from observability.workload.replay import InProcess, MeasuredTelemetry, real_engine, replay_measured, virtual_engine
from observability.workload.results import Phases, ReplayResult, summarize
from observability.workload.traces import PART_TOKENS, TraceRequest

BASELINE = "baseline"
NO_LIMIT = "no memory limit"
_COMPACTION_SECONDS = 0.002  # a slice between two steps: about a tenth of a decode step of an 8B model
_INTERACTIVE_BELOW, _LONG_CONTEXT_FROM = 2048, 32_768  # prompt tokens, of a load without classes
_KV_STATES = ("kv_wait", "preempted", "swapped")
_KV_COMPONENTS = ("kv_alloc", "kv_evict", "kv_move", "dequant")
_GROWTH_LIMIT = 0.05  # of the requests that arrive, how many may pile up under a load that is sustained
_FILLING = 0.2  # of the arrivals, after which the engine is taken to be full
_RATE_STEP = 1.25  # of the search for a rate that is too high, or low enough
_RATE_TOLERANCE = 0.02
_AT_ONCE = 1e-3  # of its own span: so short that a load is as good as all there at once
_REAL_SEQUENCES = 3
_SAMPLE_SECONDS, _LEAST_SAMPLES = (
    10.0,
    200,
)  # of virtual time between two looks at the pool, and looks while requests arrive
_PROBE_REQUESTS = 1500  # of the load, to find a rate with
_CAPACITY_REQUESTS = 1000

Progress = Callable[[str, int, int], None]
"""(what is being replayed, requests that ended, requests in all)"""


# -- what is compared --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mechanism:
    """One thing the engine can do, and the settings that switch it on. `needs`: mechanisms without which it does nothing."""

    name: str
    title: str
    settings: Mapping[str, Any]
    needs: tuple[str, ...] = ()


#: Every mechanism off, as engines were before paging: each sequence reserves adjacent room for the longest one.
OFF: Mapping[str, Any] = {
    "reservation": "max_model_len", "contiguous_below": 0, "prefix_caching": False, "num_compressed_blocks": 0,
    "compaction_seconds": 0.0, "num_host_blocks": 0, "predictive_admission": False, "spread_limit": 0.0,
    "class_queues": False, "swapping": False, "controller": None,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sizes:
    """What all arms have in common. With compression, `num_blocks` exact blocks become `exact_blocks` and `compressed_blocks` that
    together take the same bytes, but for `lost_bytes`. Lengths in tokens."""

    max_model_len: int
    block_size: int
    num_blocks: int
    bytes_per_block: int
    host_blocks: int
    contiguous_below: int
    compressed_from: int
    recent_window: int
    exact_blocks: int = 0
    compressed_blocks: int = 0
    bytes_per_compressed_block: int = 0

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block

    @property
    def lost_bytes(self) -> int:
        """Of the budget that the arms with compression leave unused, since blocks are whole: 0, or less than one block."""
        if not self.compressed_blocks:
            return 0
        used = self.exact_blocks * self.bytes_per_block + self.compressed_blocks * self.bytes_per_compressed_block
        return self.kv_bytes - used


def mechanisms(sizes: Sizes) -> tuple[Mechanism, ...]:
    """All of them, in the order in which they are added."""
    compressed = {
        "num_blocks": sizes.exact_blocks, "num_compressed_blocks": sizes.compressed_blocks, "compressed_scheme": "int8",
        "compressed_from": sizes.compressed_from, "recent_window": sizes.recent_window,
    }  # fmt: skip
    return (
        Mechanism("paging", "blocks as a sequence grows", {"reservation": "grow"}),
        Mechanism(
            "contiguous", f"adjacent blocks below {sizes.contiguous_below:,} tokens",
            {"contiguous_below": sizes.contiguous_below}, ("paging",),
        ),
        Mechanism("prefix-cache", "shared prefixes are kept", {"prefix_caching": True}, ("paging",)),
        Mechanism("compression", f"int8 from {sizes.compressed_from:,} tokens on", compressed, ("paging",)),
        Mechanism(
            "compaction", "moves blocks to make adjacent room", {"compaction_seconds": _COMPACTION_SECONDS},
            ("paging", "contiguous"),
        ),
        Mechanism(
            "host-tier", "evicted prefixes go to host memory, prefetch brings them back",
            {"num_host_blocks": sizes.host_blocks}, ("paging", "prefix-cache"),
        ),
        Mechanism("predictive", "room and prefixes for what arrived regularly", {"predictive_admission": True}, ("paging",)),
        Mechanism("spread", "short prefills before much longer ones", {"spread_limit": 4.0}),
        Mechanism("classes", "interactive before standard before long_context", {"class_queues": True}),
        Mechanism(
            "swapping", "preempted sequences go to the host", {"swapping": True}, ("paging", "prefix-cache", "host-tier")
        ),
        Mechanism("controller", "limits shrink under pressure", {"controller": ControllerConfig()}),
    )  # fmt: skip


MECHANISM_NAMES = (
    "paging", "contiguous", "prefix-cache", "compression", "compaction", "host-tier", "predictive", "spread", "classes",
    "swapping", "controller",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Arm:
    """One setting of the engine. `differs_by`: the mechanism that it has more, or (leave-one-out) less, than what it is compared with."""

    name: str
    title: str
    engine: Mapping[str, Any]
    differs_by: str | None = None


def check_names(names: Sequence[str]) -> tuple[str, ...]:
    """`names` in the order in which mechanisms are added. Raises ConfigError for one that there is not."""
    known = (BASELINE, *MECHANISM_NAMES)
    for name in names:
        if name not in known:
            raise ConfigError(f"There is no arm {name!r}.", next_step=f"Use some of {', '.join(known)}.")
    return tuple(name for name in MECHANISM_NAMES if name in names)


def cumulative_arms(sizes: Sizes, names: Sequence[str] = MECHANISM_NAMES) -> list[Arm]:
    """The baseline, then an arm for each of the mechanisms `names`, which has it and all those before it."""
    chosen = check_names(names)
    settings = {**OFF, "num_blocks": sizes.num_blocks, "max_model_len": sizes.max_model_len}
    arms = [Arm(BASELINE, f"each sequence reserves {sizes.max_model_len:,} tokens", settings)]
    for mechanism in mechanisms(sizes):
        if mechanism.name in chosen:
            settings = {**settings, **mechanism.settings}
            arms.append(Arm(f"+ {mechanism.name}", mechanism.title, settings, mechanism.name))
    return arms


def ablation_arms(sizes: Sizes, names: Sequence[str] = MECHANISM_NAMES) -> list[Arm]:
    """For each of the mechanisms `names`, an arm with all the others but those that need it."""
    chosen = check_names(names)
    table = [mechanism for mechanism in mechanisms(sizes) if mechanism.name in chosen]
    arms = []
    for left_out in table:
        settings: dict[str, Any] = {**OFF, "num_blocks": sizes.num_blocks, "max_model_len": sizes.max_model_len}
        for mechanism in table:
            if mechanism is not left_out and left_out.name not in mechanism.needs:
                settings |= mechanism.settings
        too = [m.name for m in table if left_out.name in m.needs]
        title = f"and without {', '.join(too)}, of no use then" if too else left_out.title
        arms.append(Arm(f"all but {left_out.name}", title, settings, left_out.name))
    return arms


# -- the load ------------------------------------------------------------------------------------------------------------


def with_classes(load: Sequence[TraceRequest]) -> list[TraceRequest]:
    """The load, with classes by prompt length where the recording has none (all `standard`): interactive below 2K tokens,
    long_context from 32K on; the bounds are scaled as the load's lengths are."""
    if any(request.request_class != "standard" for request in load):
        return list(load)
    scale = _length_scale(load)

    def class_of(tokens: int) -> str:
        if tokens < _INTERACTIVE_BELOW * scale:
            return "interactive"
        return "long_context" if tokens >= _LONG_CONTEXT_FROM * scale else "standard"

    return [replace(request, request_class=class_of(request.prompt.length)) for request in load]


def at_rate(load: Sequence[TraceRequest], requests_per_second: float) -> Iterator[TraceRequest]:
    """The load, faster or slower, so that it arrives at this mean rate."""
    factor = rate_of(load) / requests_per_second
    return (replace(request, arrival_seconds=request.arrival_seconds * factor) for request in load)


def rate_of(load: Sequence[TraceRequest]) -> float:
    """Mean arrivals a second. Raises ConfigError for a load that has no extent in time."""
    span = load[-1].arrival_seconds - load[0].arrival_seconds if load else 0.0
    if span <= 0.0:
        raise ConfigError(
            f"A load of {len(load)} requests over {span:g} s has no rate.", next_step="Raise --limit or --span."
        )
    return (len(load) - 1) / span


def _length_scale(load: Sequence[TraceRequest]) -> float:
    return load[0].prompt.part_tokens / PART_TOKENS if load else 1.0


def _tokens(request: TraceRequest) -> int:
    return request.prompt.length + request.output_tokens


# -- sizes -----------------------------------------------------------------------------------------------------------------


def plan_sizes(
    load: Sequence[TraceRequest], target: InProcess, *, host_ratio: float = 2.0, compression: bool = True
) -> Sizes:
    """Sizes for `load` on the target's memory: `target.kv_blocks`, or what fits, of a real model three of the longest sequences.

    max_model_len: the target's, or what the longest request of the load needs, rounded up to 1,024 tokens: with the model's whole context,
    the baseline would reserve room that no request of this load can use. host_ratio: host blocks by device block. Compressed blocks get
    the share of the room, in tokens, that the load's tokens in them have among all its tokens.
    Raises ConfigError when one request does not fit the memory.
    """
    block, scale = target.block_size, _length_scale(load)
    longest = max(map(_tokens, load), default=1)
    step = max(round(1024 * scale) // block, 1) * block
    length = target.max_model_len or -(-longest // step) * step
    kv_blocks = target.kv_blocks
    if kv_blocks is None and target.gpu is None:  # a small load would never fill the memory of a real machine
        kv_blocks = _REAL_SEQUENCES * -(-length // block)
    probe = replace(target, max_model_len=length, kv_blocks=kv_blocks, engine={**OFF, "reservation": "grow"})
    engine = _engine(probe)
    num_blocks, bytes_per_block = engine.num_blocks, engine.bytes_per_block
    contiguous = max(round(2048 * scale), block)
    compressed_from = max(round(8192 * scale), 2 * block, contiguous)
    sizes = Sizes(
        max_model_len=length,
        block_size=block,
        num_blocks=num_blocks,
        bytes_per_block=bytes_per_block,
        host_blocks=max(round(host_ratio * num_blocks), 1),
        contiguous_below=contiguous,
        compressed_from=compressed_from,
        recent_window=max(min(256, compressed_from // 2) // block, 1) * block,
    )
    return _with_compression(sizes, load, probe) if compression else sizes


def _with_compression(sizes: Sizes, load: Sequence[TraceRequest], probe: InProcess) -> Sizes:
    block = sizes.block_size
    least_compressed = -(-sizes.max_model_len // block)  # both bounds are EngineConfig's
    least_exact = -(-(sizes.compressed_from + block) // block)
    packed = {
        "num_compressed_blocks": least_compressed, "compressed_from": sizes.compressed_from,
        "recent_window": sizes.recent_window, "num_blocks": least_exact,
    }  # fmt: skip
    small = _engine(replace(probe, kv_blocks=least_exact, engine={**probe.engine, **packed}))
    each, exact_bytes = small.bytes_per_compressed_block, sizes.bytes_per_block
    everything = sum(map(_tokens, load))
    long = sum(_tokens(r) - sizes.recent_window for r in load if _tokens(r) > sizes.compressed_from)
    share = long / everything if everything else 0.0
    # x compressed blocks beside y exact ones, x / (x + y) = share, x * each + y * exact_bytes = budget
    wanted = sizes.kv_bytes * share / (share * each + (1.0 - share) * exact_bytes)
    unit = exact_bytes // math.gcd(exact_bytes, each)  # so many compressed blocks take as much as whole exact ones
    most = (sizes.num_blocks - least_exact) * exact_bytes // each
    count = min(max(round(wanted), least_compressed), most)
    if count > unit:
        count = min(-(-max(count, least_compressed) // unit) * unit, most // unit * unit)
    if count < least_compressed:
        raise ConfigError(
            f"{sizes.num_blocks:,} KV blocks leave no room for compressed blocks of one sequence of "
            f"{sizes.max_model_len:,} tokens.",
            next_step="Give more KV blocks, or choose --arms without compression.",
        )
    exact = (sizes.kv_bytes - count * each) // exact_bytes
    return replace(sizes, exact_blocks=exact, compressed_blocks=count, bytes_per_compressed_block=each)


@dataclass(frozen=True, slots=True)
class _Memory:
    num_blocks: int
    bytes_per_block: int
    bytes_per_compressed_block: int


def _engine(target: InProcess) -> _Memory:
    """What the target's engine takes as KV blocks, asked of the engine itself."""
    engine = virtual_engine(target)[0] if target.gpu is not None else real_engine(target)[0]
    assert engine.config.num_blocks is not None
    executor = engine.executor
    return _Memory(engine.config.num_blocks, executor.kv_bytes_per_block, executor.kv_bytes_per_compressed_block)


# -- saturation --------------------------------------------------------------------------------------------------------------


def backlog_growth(arrivals: np.ndarray, ends: np.ndarray) -> float:
    """How many requests more are in the engine, waiting or running, for each one that arrives: the slope of their number, seen at each
    arrival, over the number of arrivals (least squares), after the first fifth. 0 where it does not grow; 1 - service rate / arrival rate
    where it does. Running ones count, since with much memory a backlog is admitted and slows all down instead of waiting.

    arrivals, ends: seconds, `[requests]` of the same requests, in any order.
    """
    arrivals = np.sort(arrivals)
    count = np.arange(1, len(arrivals) + 1)
    inside = count - np.searchsorted(np.sort(ends), arrivals, side="right")
    first = int(_FILLING * len(arrivals))
    if len(arrivals) - first < 2:
        return 0.0
    return float(np.polyfit(count[first:], inside[first:], 1)[0])


def find_max_rate(sustained: Callable[[float], bool], guess: float, tolerance: float = _RATE_TOLERANCE) -> float:
    """The highest rate that is sustained, to within `tolerance` of itself, by bisection of the logarithm from a bracket around `guess`.

    Raises ConfigError when no rate within a factor of a thousand of the guess is too high, or none is low enough.
    """
    low, high = guess, guess
    if sustained(guess):
        while sustained(high := high * _RATE_STEP):
            low = high
            _check_bracket(high, guess)
    else:
        while not sustained(low := low / _RATE_STEP):
            high = low
            _check_bracket(low, guess)
    while high / low > 1.0 + tolerance:
        middle = math.sqrt(low * high)
        if sustained(middle):
            low = middle
        else:
            high = middle
    return low


def _check_bracket(rate: float, guess: float) -> None:
    if not 1e-3 < rate / guess < 1e3:
        raise ConfigError(
            f"No saturation was found between {min(rate, guess):.3g} and {max(rate, guess):.3g} requests/s.",
            next_step="Use more requests (--limit), or give --time-scale.",
        )


# -- what one arm comes to -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Figures:
    """One arm on the load. None: unknown, or of no meaning (no request served, unbounded memory).

    stored, held and cached are means over time, from the first to the last arrival, of the device's KV bytes: those with tokens of
    running requests in them, those of blocks that running requests hold, and those kept for prefixes only; useful is stored / held.
    Compressed blocks count as full from the admission of their sequence on.
    kv_management is the share of KV states (kv_wait, preempted, swapped) and components (kv_alloc, kv_evict, kv_move, dequant) in the
    latency of the slowest 1 %; queued the share of the queue. head_blocked is the share of the whole time in which the head of the queue
    waited for KV blocks: all behind it count as queued.
    """

    ttft_p50_seconds: float | None
    ttft_p99_seconds: float | None
    end_to_end_p50_seconds: float | None
    end_to_end_p99_seconds: float | None
    requests_per_second: float | None
    tokens_per_second: float | None  # of prompts and answers of served requests
    stored_ratio: float | None
    held_ratio: float | None
    useful_ratio: float | None
    cached_ratio: float | None
    internal_fragmentation_ratio: float | None
    external_fragmentation_ratio: float | None
    hit_rate: float | None
    preemptions: int | None
    recomputed_tokens: int | None
    kv_management_ratio: float | None
    queued_ratio: float | None
    head_blocked_ratio: float | None
    ttft_p99_seconds_by_class: dict[str, float | None]


@dataclass(frozen=True, slots=True)
class ArmResult:
    arm: Arm
    figures: Figures
    replay: ReplayResult
    capacity_requests_per_second: float | None = None


def figures_of(result: ReplayResult, records: Sequence[RequestRecord], states: Sequence[tuple[float, KVState]]) -> Figures:  # fmt: skip
    """Figures of one replay from its result, its records and the pool's states with their times."""

    def quantile(latency: str, name: str) -> float | None:
        summary = result.latency[latency]
        return None if summary is None else summary[name]

    rates, use = result.throughput, result.kv.use
    prompt, generated = rates["prompt_tokens_per_second"], rates["generated_tokens_per_second"]
    slowest = None if result.phases is None else result.phases["slowest_1_percent"]
    stored, held, cached, useful = _memory_use(records, states)
    internal = None if use is None else use.internal_fragmentation_ratio
    external = None if use is None else use.external_fragmentation_ratio
    return Figures(
        ttft_p50_seconds=quantile("time_to_first_token_seconds", "p50"),
        ttft_p99_seconds=quantile("time_to_first_token_seconds", "p99"),
        end_to_end_p50_seconds=quantile("end_to_end_seconds", "p50"),
        end_to_end_p99_seconds=quantile("end_to_end_seconds", "p99"),
        requests_per_second=rates["requests_per_second"],
        tokens_per_second=None if prompt is None or generated is None else prompt + generated,
        stored_ratio=stored,
        held_ratio=held,
        useful_ratio=useful,
        cached_ratio=cached,
        internal_fragmentation_ratio=None if internal is None else internal["mean"],
        external_fragmentation_ratio=None if external is None else external["mean"],
        hit_rate=result.kv.hit_rate,
        preemptions=result.preemptions,
        recomputed_tokens=result.kv.recomputed_tokens,
        kv_management_ratio=None if slowest is None else _kv_seconds(slowest) / slowest.mean_latency_seconds,
        queued_ratio=None if slowest is None else slowest.by_state["queued"] / slowest.mean_latency_seconds,
        head_blocked_ratio=None
        if result.phases is None or not result.duration_seconds
        else min(_kv_wait_seconds(result.phases["all"]) / result.duration_seconds, 1.0),
        ttft_p99_seconds_by_class={name: _ttft_p99(records, name) for name in CLASSES},
    )


def _ttft_p99(records: Sequence[RequestRecord], request_class: str) -> float | None:
    waits = [
        r.first_token - r.arrival for r in records if r.request_class == request_class and r.first_token is not None
    ]
    summary = summarize(waits)
    return None if summary is None else summary["p99"]


def _kv_seconds(phases: Phases) -> float:
    """Seconds in KV states, and of KV components in the other states."""
    return math.fsum(
        seconds
        for state, row in phases.by_state_and_component.items()
        for component, seconds in row.items()
        if state in _KV_STATES or component in _KV_COMPONENTS
    )


def _kv_wait_seconds(everyone: Phases) -> float:
    return everyone.by_state["kv_wait"] * everyone.requests


def _memory_use(
    records: Sequence[RequestRecord], states: Sequence[tuple[float, KVState]]
) -> tuple[float | None, float | None, float | None, float | None]:
    """(stored, held, cached, useful) as Figures has them; between two states they change evenly."""
    last_arrival = max((r.arrival for r in records), default=0.0)
    inside = [(when, state) for when, state in states if when <= last_arrival]
    if len(inside) < 2 or inside[0][1].pool_bytes is None:
        return None, None, None, None
    times = np.array([when for when, _ in inside])
    if times[-1] <= times[0]:
        return None, None, None, None

    def mean(values: list[int]) -> float:
        return float(np.trapezoid(values, times) / (times[-1] - times[0]))

    capacity = inside[0][1].pool_bytes
    stored = mean([_stored_bytes(state) for _, state in inside])
    held = mean([state.active_bytes - (state.fixed_bytes or 0) for _, state in inside])
    cached = mean([state.resident_bytes - state.active_bytes for _, state in inside])
    return stored / capacity, held / capacity, cached / capacity, stored / held if held else None


def _stored_bytes(state: KVState) -> int:
    """Of tokens in held blocks. Compressed blocks count as full, which those of a sequence still in prefill are not yet."""
    compressed = state.compressed[2] if state.compressed else 0
    exact = state.stored_tokens * state.bytes_per_block // state.block_size
    return exact + compressed * state.bytes_per_compressed_block


# -- the experiment ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ExperimentSettings:
    """What to compare and under which load.

    arms: mechanisms, of MECHANISM_NAMES. ablation: also all but one of them. saturate: the arm near whose saturation the load is set:
    the baseline, or the mechanism that the arm adds last. load_factor: the share of its highest sustainable rate.
    time_scale: that of the load instead, with nothing looked for. capacity: also find each arm's highest sustainable rate.
    """

    arms: tuple[str, ...] = MECHANISM_NAMES
    ablation: bool = False
    saturate: str = BASELINE
    load_factor: float = 0.92
    time_scale: float | None = None
    capacity: bool = False
    host_ratio: float = 2.0
    probe_requests: int = _PROBE_REQUESTS
    capacity_requests: int = _CAPACITY_REQUESTS

    def __post_init__(self) -> None:
        check_names((*self.arms, self.saturate))
        if self.saturate not in (BASELINE, *self.arms):
            raise ConfigError(f"{self.saturate!r} is not among the arms.", next_step="Add it to --arms.")
        if not 0.0 < self.load_factor <= 2.0:
            raise ConfigError(f"load_factor is {self.load_factor:g}.", next_step="Give a share such as 0.92.")
        if self.time_scale is not None and not 1e-3 <= self.time_scale <= 1e6:
            raise ConfigError(f"time_scale is {self.time_scale:g}.", next_step="Give 0.001 to 1,000,000.")
        if not 0.0 < self.host_ratio <= 100.0:
            raise ConfigError(f"host_ratio is {self.host_ratio:g}.", next_step="Give a ratio such as 2.")


@dataclass(frozen=True, slots=True)
class LoadFacts:
    """The load that all arms served. `saturation`: highest rate that arm `saturated` sustains, None where it was not looked for."""

    requests: int
    prompt_tokens: int
    generated_tokens: int
    longest_tokens: int
    classes: dict[str, int]
    recorded_requests_per_second: float
    requests_per_second: float
    time_scale: float
    saturated: str
    saturation_requests_per_second: float | None


@dataclass(frozen=True, slots=True)
class ExperimentResult:
    """`clock` "virtual" marks figures of simulated time: nothing was run. `no_limit`: paging with memory without end, for comparison."""

    clock: Literal["virtual", "real"]
    settings: dict[str, Any]
    sizes: Sizes
    load: LoadFacts
    arms: list[ArmResult]
    ablation: list[ArmResult]
    no_limit: ArmResult | None
    notes: list[str]

    def to_json(self) -> str:
        """The result, with the replay of each arm and all its settings, as one indented JSON object; never NaN or Infinity."""
        return json.dumps(asdict(self), indent=2, allow_nan=False)


def run_experiment(
    load: Sequence[TraceRequest],
    target: InProcess,
    settings: ExperimentSettings | None = None,
    *,
    describe: dict[str, Any] | None = None,
    on_progress: Progress | None = None,
) -> ExperimentResult:
    """Replays `load` on every arm; `describe` joins the settings in the result.

    Saturation, in virtual time: the highest arrival rate at which the backlog does not grow (backlog_growth at most 5 % of the arrivals),
    found by bisection to 2 % on the load's first `probe_requests`. In real time that would take hours: it is the rate at which the load is
    served when all of it is there at once.
    Raises ConfigError when the load or the memory is too small for the comparison.
    """
    settings = settings or ExperimentSettings()
    too_long = sum(_tokens(r) > target.max_model_len for r in load) if target.max_model_len else 0
    fitting = [r for r in load if target.max_model_len is None or _tokens(r) <= target.max_model_len]
    recorded = rate_of(fitting)
    load = with_classes(fitting)
    sizes = plan_sizes(load, target, host_ratio=settings.host_ratio, compression="compression" in settings.arms)
    arms = cumulative_arms(sizes, settings.arms)
    runner = _Runner(target, sizes, on_progress)

    saturation = None
    if settings.time_scale is not None:
        rate = recorded * settings.time_scale
    else:
        saturated = next(a for a in arms if settings.saturate == (a.differs_by or BASELINE))
        saturation = runner.capacity(saturated, load[: settings.probe_requests])
        rate = settings.load_factor * saturation

    def measure(arm: Arm) -> ArmResult:
        result = runner.measure(arm, load, rate)
        if not settings.capacity:
            return result
        return replace(result, capacity_requests_per_second=runner.capacity(arm, load[: settings.capacity_requests]))

    measured = [measure(arm) for arm in arms]
    left_out = [measure(arm) for arm in ablation_arms(sizes, settings.arms)] if settings.ablation else []
    unlimited = None
    if target.gpu is not None:
        engine = {**OFF, "reservation": "grow", "max_model_len": sizes.max_model_len}
        unlimited = measure(Arm(NO_LIMIT, "paging, KV blocks without end", engine))
    if target.gpu is not None:
        notes = [note for note in measured[0].replay.notes if note.startswith("Simulated")]
    else:
        notes = [
            f"Measured here, load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores at the end: what else ran is in these figures."
        ]
    if too_long:
        notes.append(
            f"{too_long:,} requests longer than {target.max_model_len:,} tokens were left out of the load, for all arms."
        )
    facts = LoadFacts(
        requests=len(load),
        prompt_tokens=sum(r.prompt.length for r in load),
        generated_tokens=sum(r.output_tokens for r in load),
        longest_tokens=max(map(_tokens, load)),
        classes={name: sum(r.request_class == name for r in load) for name in CLASSES},
        recorded_requests_per_second=recorded,
        requests_per_second=rate,
        time_scale=rate / recorded,
        saturated=settings.saturate,
        saturation_requests_per_second=saturation,
    )
    return ExperimentResult(
        clock="virtual" if target.gpu is not None else "real",
        settings={
            "device": measured[0].replay.settings["device"], "model": target.model, **asdict(settings), **(describe or {}),
        },
        sizes=sizes, load=facts, arms=measured, ablation=left_out, no_limit=unlimited, notes=notes,
    )  # fmt: skip


class _Runner:
    """Replays arms on one target."""

    def __init__(self, target: InProcess, sizes: Sizes, on_progress: Progress | None) -> None:
        self._target, self._sizes, self._on_progress = target, sizes, on_progress

    def measure(self, arm: Arm, load: Sequence[TraceRequest], rate: float) -> ArmResult:
        sample_seconds = min(_SAMPLE_SECONDS, len(load) / rate / _LEAST_SAMPLES)
        result, telemetry = self._replay(arm, load, rate, arm.name, sample_seconds)
        return ArmResult(arm, figures_of(result, telemetry.records, telemetry.states), result)

    def capacity(self, arm: Arm, load: Sequence[TraceRequest]) -> float:
        """The highest rate, requests/s, that `arm` sustains of `load`; see run_experiment()."""

        def replay(rate: float) -> tuple[ReplayResult, MeasuredTelemetry]:
            return self._replay(arm, load, rate, f"{arm.name} at {rate:.3g} requests/s")

        def sustained(rate: float) -> bool:
            records = replay(rate)[1].records
            arrivals, ends = np.array([(r.arrival, r.finished) for r in records]).T
            return backlog_growth(arrivals, ends) <= _GROWTH_LIMIT

        whole = replay(rate_of(load) / _AT_ONCE)[0]
        at_once = whole.throughput["requests_per_second"]
        if not at_once:
            raise ConfigError(f"{arm.name} served nothing.", next_step="Give more memory, or a shorter load.")
        return at_once if self._target.gpu is None else find_max_rate(sustained, at_once)

    def _replay(
        self, arm: Arm, load: Sequence[TraceRequest], rate: float, what: str, sample_seconds: float | None = None
    ) -> tuple[ReplayResult, MeasuredTelemetry]:
        def on_end(done: int) -> None:
            if self._on_progress is not None:
                self._on_progress(what, done, len(load))

        on_end(0)
        unbounded = "num_blocks" not in arm.engine
        target = replace(
            self._target,
            kv_blocks=None if unbounded else arm.engine["num_blocks"],
            unbounded=unbounded,
            max_model_len=self._sizes.max_model_len,
            engine=dict(arm.engine),
        )
        return replay_measured(
            at_rate(load, rate), target, describe={"arm": arm.name}, on_end=on_end, sample_seconds=sample_seconds
        )
