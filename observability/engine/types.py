"""The nouns of the engine: configuration, request, step plan, and what an executor must do. Read this file first.

Engine.add() -> queue -> Scheduler.schedule() -> StepPlan -> Executor.execute() -> StepResult -> Engine.commit()
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from observability.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from observability.engine.kv.table import BlockTable
    from observability.telemetry.requests import RequestTrace
    from observability.telemetry.tracing import RequestSpan

KVDtype = Literal["auto", "int8"]
Scheme = Literal["int8", "int4"]
_LEAST_SHRINK = 0.01
Reservation = Literal["grow", "max_model_len"]


@dataclass(frozen=True, slots=True)
class ControllerConfig:
    """When the load controller acts. Each rule needs `patience` looks in a row to act and to let go, at the two bounds of its pair."""

    interval_seconds: float = 1.0  # between two looks
    window_seconds: float = 30.0  # of ended requests that P99 and error rate are taken over
    min_requests: int = 20  # in the window, below which P99 and error rate say nothing
    patience: int = 3
    utilization_high: float = 0.85  # of KV blocks held by requests
    utilization_low: float = 0.70
    p99_high_seconds: float = 0.6  # of time to first token
    p99_low_seconds: float = 0.45
    error_rate_high: float = 0.05  # of requests that ended
    error_rate_low: float = 0.01
    shrink_factor: float = 0.5  # of max_num_batched_tokens at each step down; its inverse on the way up
    min_batched_tokens: int = 256

    def __post_init__(self) -> None:
        for low, high in (
            ("utilization_low", "utilization_high"),
            ("p99_low_seconds", "p99_high_seconds"),
            ("error_rate_low", "error_rate_high"),
        ):
            if not 0.0 < getattr(self, low) < getattr(self, high) < math.inf:
                raise ConfigError(
                    f"{low} = {getattr(self, low):g} and {high} = {getattr(self, high):g} are out of order.",
                    next_step=f"Set 0 < {low} < {high}.",
                )
        if not 0 < self.interval_seconds <= self.window_seconds < math.inf:
            raise ConfigError(
                f"interval_seconds = {self.interval_seconds:g} does not fit window_seconds = {self.window_seconds:g}.",
                next_step="Set 0 < interval_seconds <= window_seconds.",
            )
        if (
            not _LEAST_SHRINK <= self.shrink_factor < 1.0
            or self.patience < 1
            or self.min_requests < 1
            or self.min_batched_tokens < 1
        ):
            raise ConfigError(
                "shrink_factor must lie in [0.01, 1); patience, min_requests and min_batched_tokens must be at least 1.",
                next_step="Use the defaults 0.5, 3, 20 and 256.",
            )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine replica. Lengths in tokens, sizes in blocks or bytes as named.

    Layouts: a sequence below `contiguous_below` tokens takes adjacent blocks, up to `compressed_from` any blocks, and beyond it keeps
    all but its newest `recent_window` tokens quantized. Each mechanism has a value that switches it off.
    """

    block_size: int = 16
    num_blocks: int | None = 1024  # None: unbounded, virtual time only
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 2048
    max_model_len: int = 8192
    max_queued: int = 256
    reservation: Reservation = (
        "grow"  # "max_model_len": each sequence reserves adjacent room for the longest one, as before paging
    )
    contiguous_below: int = 2048  # 0: off
    compressed_from: int = 8192  # matters with compressed blocks only
    num_compressed_blocks: int = 0  # quantized blocks beside num_blocks exact ones; 0: off
    compressed_scheme: Scheme = "int8"
    recent_window: int = 256  # tokens
    compaction_seconds: float = 0.0  # most time of one slice of compaction between two steps; 0: off
    num_host_blocks: int = 0  # KV blocks in host memory; 0: no host tier, no prefetch, no swapping
    swapping: bool = True  # preempted sequences go to the host where that is cheaper than computing them again
    prefetch_lookahead: int = 3  # waiting requests whose prefix is brought back from the host; 0: off
    prefetch_warmup_ratio: float = 0.2  # of num_blocks: most blocks that hold prefetched content nobody has used yet
    prefetch_min_confidence: float = 0.7  # that prefetched content will be used
    spread_limit: float = 4.0  # q75/q25 of lengths above which a prefill batch is split; 0: off
    class_queues: bool = True  # False: first come first served, whatever the class
    max_wait_seconds: float = 30.0  # in the queue, after which a request goes before all that are not overdue
    predictive_admission: bool = False  # room and prefixes are prepared for what arrived regularly of late
    controller: ControllerConfig | None = None
    kv_dtype: KVDtype = "auto"
    prefix_caching: bool = True
    quant_sample_rate: float = 0.05  # share of quantized blocks whose error is measured
    quant_compare_rate: float = (
        0.01  # share of one sequence's decode steps that are also computed with exact KV; 0: off
    )
    quant_shadow_tokens: int = (
        16384  # most tokens whose exact values are kept for that; longer sequences are not compared
    )
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "max_queued"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}; it must be at least 1.", next_step=f"Set {name} >= 1."
                )
        # A sequence that runs alone must always fit, or nothing would ever make room for it.
        longest = (
            self.max_model_len
            if not self.num_compressed_blocks
            else min(self.compressed_from + self.block_size, self.max_model_len)
        )
        if self.num_blocks is not None and self.num_blocks * self.block_size < longest:
            raise ConfigError(
                f"num_blocks x block_size = {self.num_blocks * self.block_size} tokens cannot hold one sequence of "
                f"{longest} tokens (max_model_len = {self.max_model_len}).",
                next_step="Raise num_blocks or lower max_model_len.",
            )
        if self.contiguous_below < 0:
            raise ConfigError("contiguous_below is negative.", next_step="Set 0 to switch the contiguous layout off.")
        self._check_mechanisms()
        for name in ("quant_sample_rate", "quant_compare_rate"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"{name} is outside 0..1.", next_step="Give a share such as 0.05, or 0 for off.")
        if self.quant_shadow_tokens < 0:
            raise ConfigError("quant_shadow_tokens is negative.", next_step="Set it to 0 to compare nothing.")

    def _check_mechanisms(self) -> None:
        def check(ok: bool, first: str, second: str, next_step: str) -> None:
            if not ok:
                values = f"{first} = {getattr(self, first)} and {second} = {getattr(self, second)}"
                raise ConfigError(f"{values} contradict each other.", next_step=next_step)

        for name in (
            "num_compressed_blocks",
            "num_host_blocks",
            "prefetch_lookahead",
            "compaction_seconds",
            "spread_limit",
            "compressed_from",
            "recent_window",
        ):
            if not math.isfinite(getattr(self, name)):
                raise ConfigError(f"{name} is {getattr(self, name)}.", next_step=f"Give {name} a finite number.")
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is negative.", next_step=f"Set {name} to 0 to switch it off.")
        for name in ("prefetch_warmup_ratio", "prefetch_min_confidence"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"{name} is {getattr(self, name)}, outside 0..1.", next_step="Give a share.")
        if not 0 < self.max_wait_seconds < math.inf:
            raise ConfigError("max_wait_seconds must be above 0.", next_step="Give seconds, such as 30.")
        if 0 < self.spread_limit < 1:
            raise ConfigError("spread_limit is a ratio of quartiles, at least 1.", next_step="Use 4, or 0 for off.")
        check(self.prefetch_lookahead == 0 or self.num_host_blocks == 0 or self.num_host_blocks >= self.prefetch_lookahead,
              "prefetch_lookahead", "num_host_blocks", "Look at fewer requests ahead, or give the host more blocks.")  # fmt: skip
        if self.num_blocks is None:
            for name in ("num_compressed_blocks", "num_host_blocks", "compaction_seconds"):
                check(not getattr(self, name), name, "num_blocks", f"Bound num_blocks, or leave {name} at 0.")
            check(self.reservation == "grow", "reservation", "num_blocks", "Bound num_blocks.")
        if self.reservation == "max_model_len":
            check(not self.num_compressed_blocks, "reservation", "num_compressed_blocks", "Use one of them.")
            check(
                not self.prefix_caching,
                "reservation",
                "prefix_caching",
                "Set prefix_caching to False: nothing is shared.",
            )
        if not self.num_compressed_blocks:
            return
        check(self.contiguous_below <= self.compressed_from, "contiguous_below", "compressed_from",
              "Put the bounds in order: contiguous_below <= compressed_from.")  # fmt: skip
        check(self.recent_window <= self.compressed_from, "recent_window", "compressed_from",
              "Keep the exact window within the shortest compressed sequence.")  # fmt: skip
        check(self.recent_window >= self.block_size, "recent_window", "block_size", "Keep one block exact at least.")
        check(
            self.kv_dtype == "auto",
            "kv_dtype",
            "num_compressed_blocks",
            "Quantize all blocks or those of long sequences.",
        )
        check(self.max_num_batched_tokens >= self.max_num_seqs + self.block_size, "max_num_batched_tokens", "max_num_seqs",
              "With compressed blocks, leave room for one block of prefill beside all decodes.")  # fmt: skip
        check(self.num_compressed_blocks * self.block_size >= self.max_model_len, "num_compressed_blocks", "max_model_len",
              "Give compressed blocks for one sequence of max_model_len tokens.")  # fmt: skip


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to pick tokens and when to stop. temperature 0 is greedy. Raises RequestError with `param` on absurd values."""

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        def check(ok: bool, param: str, want: str) -> None:
            if not ok:
                raise RequestError(f"{param} = {getattr(self, param)} is not valid; {want}.", param=param)

        check(self.max_tokens >= 1, "max_tokens", "it must be at least 1")
        check(0.0 <= self.temperature <= 2.0, "temperature", "it must lie in 0..2")
        check(0.0 < self.top_p <= 1.0, "top_p", "it must lie in (0, 1]")
        check(len(self.stop) <= 4 and all(self.stop), "stop", "at most 4 non-empty strings are allowed")


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """A prompt known only by its length and the hashes of its 512-token parts, as recorded traces give it.

    Two prompts share tokens exactly as far as their `hash_ids` agree; the last part may be partial.
    """

    length: int
    hash_ids: tuple[int, ...]
    part_tokens: int = 512


@dataclass(frozen=True, slots=True)
class DegradeRecord:
    """The load controller served this request under reduced limits, or put others before it."""

    request_id: str
    degrade_reason: str  # rule of catalog.CONTROLLER_RULES
    degrade_timestamp: float  # seconds on the engine's clock


@dataclass(slots=True)
class Limits:
    """What the scheduler may do in one step. The controller moves these within the bounds that EngineConfig sets."""

    max_num_batched_tokens: int
    max_prefills: int  # requests in prefill at a time; 1 is serial admission


@dataclass(eq=False, slots=True)
class Request:
    """One generation. Identity is the object; `request_id` is for people. The engine owns all fields below `arrival`.

    `prompt` is token ids, or a PromptSpan where only virtual time will run it. `on_token(request, token_id, finished)`
    is called on the engine's thread; it must be quick and must not raise.
    """

    request_id: str
    prompt: Sequence[int] | PromptSpan
    params: SamplingParams
    request_class: str = "standard"
    arrival: float = 0.0  # seconds on the engine's clock
    on_token: Callable[[Request, int | None, str | None], None] | None = None
    deadline: float | None = (
        None  # on the engine's clock; past it the request ends between two steps with outcome "deadline"
    )
    tenant: str = ""
    session_id: str = ""
    span: RequestSpan | None = None  # OpenTelemetry span that hears what happens to the request

    limit: int = 0  # tokens it may generate: params.max_tokens, cut to what max_model_len leaves; 0 until added
    output: list[int] = field(default_factory=list)  # token ids; stays empty in virtual time
    num_generated: int = 0
    num_computed: int = 0  # tokens whose KV is stored: positions [0, num_computed)
    num_cached: int = 0  # prompt tokens served by the prefix cache at first admission
    num_preemptions: int = 0
    degraded: list[DegradeRecord] = field(default_factory=list)
    table: BlockTable | None = None
    trace: RequestTrace | None = None
    outcome: str | None = None
    error: str | None = None

    @property
    def prompt_len(self) -> int:
        return self.prompt.length if isinstance(self.prompt, PromptSpan) else len(self.prompt)

    @property
    def num_tokens(self) -> int:
        return self.prompt_len + self.num_generated


@dataclass(slots=True)
class Chunk:
    """`tokens` positions [start, start + tokens) of one request in this step. `samples`: the last one yields a token."""

    request: Request
    start: int
    tokens: int
    samples: bool


@dataclass(slots=True)
class StepPlan:
    """One step: prefill chunks and decodes. `repeats` is how many times the same plan could run without the scheduler:
    nothing would finish, need a block, or be admitted. Only an executor in virtual time makes use of repeats > 1."""

    prefill: list[Chunk]
    decode: list[Request]
    repeats: int = 1

    @property
    def kind(self) -> str:
        return "mixed" if self.prefill and self.decode else "prefill" if self.prefill else "decode"


@dataclass(slots=True)
class StepResult:
    """What ran. `ends[i]` is the clock at the end of repeat i (len >= 1). `tokens` holds one id for each sampling chunk
    of plan.prefill in order, then for each of plan.decode; None in virtual time, where ids carry no meaning."""

    ends: np.ndarray
    tokens: list[int] | None


class Clock(Protocol):
    virtual: bool

    def now(self) -> float:
        """Seconds since an arbitrary start; never goes back."""

    def wait_until(self, when: float) -> None:
        """Virtual clocks jump; a real clock does not wait here (the engine's thread waits on its inbox)."""


class Transfer(Protocol):
    """Blocks on their way between host and device."""

    ready_at: float | None  # in virtual time, when it will have ended; None in real time

    def done(self) -> bool:
        """Whether all blocks have arrived."""

    def wait(self) -> None:
        """Returns once they have; virtual time jumps."""


Payload = dict[str, np.ndarray]  # of blocks, by tensor name; the first axis is blocks


class Executor(Protocol):
    """Runs a step plan and moves KV blocks. The torch executor takes the time that it takes; roofline advances a virtual clock by a
    model of it.

    Block numbers below num_blocks are exact blocks, those from there on compressed ones; host slots have numbers of their own and hold
    either kind. Moves are in the order of the calls, before the next step.
    """

    clock: Clock
    device: str
    kv_bytes_per_block: int
    kv_bytes_per_compressed_block: int
    kv_fixed_bytes_per_sequence: int  # beside the blocks (sliding windows)

    def execute(self, plan: StepPlan, until: float | None) -> StepResult:
        """Runs plan once, or up to plan.repeats times, stopping at the first end past `until` (the next arrival)."""

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies KV content from block to block (source, target) of one kind; all sources are read before any target is written."""

    def compress_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Quantizes full exact blocks into compressed ones (source, target)."""

    def offload_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies device blocks to host slots (block, slot); returns when the blocks may be written again."""

    def load_blocks(self, pairs: Sequence[tuple[int, int]]) -> Transfer:
        """Starts to copy host slots to device blocks (slot, block), beside the steps that follow. Neither may be used otherwise until
        the transfer is done."""

    def export_blocks(self, blocks: Sequence[int]) -> Payload:
        """Content of device blocks of one kind, bit-exact, for import_blocks of an executor with the same model and scheme."""

    def import_blocks(self, blocks: Sequence[int], payload: Payload) -> None:
        """Raises ValueError when the payload does not fit."""

    def recompute_seconds(self, tokens: int) -> float:
        """What the prefill of a sequence of `tokens` tokens probably takes, beside others; inf when not known yet."""

    def transfer_seconds(self, blocks: int) -> float:
        """What moving so many exact blocks between device and host probably takes, one way."""

    def copy_seconds(self, blocks: int) -> float:
        """What copying so many exact blocks on the device probably takes."""

    def release(self, request: Request) -> None:
        """`request` left the running set (done, aborted or preempted); its blocks may be reused from now on."""
