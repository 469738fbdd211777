"""The nouns of the engine: configuration, request, step plan, and what an executor must do. Read this file first.

Engine.add() -> queue -> Scheduler.schedule() -> StepPlan -> Executor.execute() -> StepResult -> Engine.commit()
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from observability.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from observability.engine.kv.table import BlockTable
    from observability.telemetry.requests import RequestTrace

KVDtype = Literal["auto", "int8"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine replica. Lengths in tokens, sizes in blocks or bytes as named."""

    block_size: int = 16
    num_blocks: int | None = 1024  # None: unbounded, virtual time only
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 2048
    max_model_len: int = 8192
    max_queued: int = 256
    contiguous_below: int = 2048  # sequences expected to stay below this take adjacent blocks
    kv_dtype: KVDtype = "auto"
    prefix_caching: bool = True
    quant_sample_rate: float = 0.05  # share of quantized blocks whose error is measured
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "max_queued"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}; it must be at least 1.", next_step=f"Set {name} >= 1."
                )
        if self.num_blocks is not None and self.num_blocks * self.block_size < self.max_model_len:
            raise ConfigError(
                f"num_blocks x block_size = {self.num_blocks * self.block_size} tokens cannot hold one sequence of "
                f"max_model_len = {self.max_model_len} tokens.",
                next_step="Raise num_blocks or lower max_model_len.",
            )
        if self.contiguous_below < 0:
            raise ConfigError("contiguous_below is negative.", next_step="Set 0 to switch the contiguous layout off.")
        if not 0.0 <= self.quant_sample_rate <= 1.0:
            raise ConfigError("quant_sample_rate is outside 0..1.", next_step="Give a share such as 0.05.")


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

    limit: int = 0  # tokens it may generate: params.max_tokens, cut to what max_model_len leaves; 0 until added
    output: list[int] = field(default_factory=list)  # token ids; stays empty in virtual time
    num_generated: int = 0
    num_computed: int = 0  # tokens whose KV is stored: positions [0, num_computed)
    num_cached: int = 0  # prompt tokens served by the prefix cache at first admission
    num_preemptions: int = 0
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


class Executor(Protocol):
    """Runs a step plan. The torch executor takes the time that it takes; roofline advances a virtual clock by a model of it."""

    clock: Clock
    device: str
    kv_bytes_per_block: int

    def execute(self, plan: StepPlan, until: float | None) -> StepResult:
        """Runs plan once, or up to plan.repeats times, stopping at the first end past `until` (the next arrival)."""

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies KV content from block to block (source, target), for compaction and copy-on-write."""

    def release(self, request: Request) -> None:
        """`request` left the running set (done, aborted or preempted); its blocks may be reused from now on."""
