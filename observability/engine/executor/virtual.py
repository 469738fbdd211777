"""Runs step plans in virtual time: a step takes what a model of step times says, and no model is run.

Two models of time exist: the roofline of a GPU and a model from published figures and assumed efficiencies (roofline.py), and coefficients fitted to steps
measured on this machine (calibrated.py). Every result that comes from here is simulated; its clock says `virtual`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from observability import catalog
from observability.engine.clock import VirtualClock
from observability.engine.types import Clock, EngineConfig, Payload, Request, StepPlan, StepResult, Transfer
from observability.errors import ConfigError
from observability.telemetry.recorder import Telemetry

_SCHEDULE = catalog.COMPONENTS.index("schedule")
_PREFILL = catalog.COMPONENTS.index("forward_prefill")
_DECODE = catalog.COMPONENTS.index("forward_decode")
_SAMPLE = catalog.COMPONENTS.index("sample")
_EMIT = catalog.COMPONENTS.index("emit")

_STAGED_BLOCKS = 256  # exact blocks on their way to the host at most, beside the pool
_MAX_REPEATS = 4096  # bounds the [repeats, sequences] array of models whose attention is capped


class ChunkShape(NamedTuple):
    """Positions [start, start + tokens) of one prompt; `samples` when the last one yields a token."""

    start: int
    tokens: int
    samples: bool = True


@dataclass(frozen=True, slots=True)
class StepShape:
    """All of a step plan that its time depends on: prefill chunks, and the tokens that each decode attends to, its own included."""

    chunks: tuple[ChunkShape, ...] = ()
    visible: tuple[int, ...] = ()
    packed_tokens: int = 0  # of all that is attended to, how many lie in compressed blocks

    @classmethod
    def of(cls, plan: StepPlan) -> StepShape:
        chunks = tuple(ChunkShape(chunk.start, chunk.tokens, chunk.samples) for chunk in plan.prefill)
        read = [(request.table, request.num_computed) for request in plan.decode]
        read += [(chunk.request.table, chunk.start) for chunk in plan.prefill]
        # The oldest blocks are the compressed ones.
        packed = sum(
            min(table.num_compressed * table.block_size, tokens)
            for table, tokens in read
            if table is not None and table.num_compressed
        )
        return cls(chunks, tuple(request.num_computed + 1 for request in plan.decode), packed)

    @property
    def kind(self) -> str:
        """As StepPlan.kind."""
        return "mixed" if self.chunks and self.visible else "prefill" if self.chunks else "decode"


@dataclass(frozen=True, slots=True)
class Overhead:
    """Seconds that a step spends outside the model, whatever it holds, by telemetry component."""

    schedule_seconds: float
    sample_seconds: float
    emit_seconds: float

    @property
    def seconds(self) -> float:
        return self.schedule_seconds + self.sample_seconds + self.emit_seconds


class StepTimes(Protocol):
    """A model of time. Seconds of the forward pass leave the overhead out."""

    device: str
    overhead: Overhead
    source: str  # for people: "Simulated: times are worked out from <source>; no model was run."
    kv_bytes_per_block: int
    kv_bytes_per_compressed_block: int
    kv_fixed_bytes_per_sequence: int
    transfers_beside_steps: bool  # False where host and device share a memory, and a move is the engine's own work

    def check(self, config: EngineConfig) -> None:
        """Raises ConfigError when the KV blocks of `config` do not fit."""

    def forward(self, shape: StepShape) -> tuple[float, float]:
        """(seconds of the forward pass, the share of it put down to prefill)."""

    def decode_run(self, shape: StepShape, repeats: int) -> np.ndarray:
        """Seconds of each of `repeats` forward passes of decodes alone, [repeats]; each adds one visible token to each sequence.
        Equal to forward() called so many times."""

    def copy_seconds(self, blocks: int) -> float:
        """What copying so many blocks takes."""

    def transfer_seconds(self, kv_bytes: float) -> float:
        """What moving so much KV between device and host takes, one way."""


class VirtualExecutor:
    """types.Executor that advances a virtual clock by `times`. `telemetry` may be None. Raises what times.check() raises."""

    def __init__(
        self,
        times: StepTimes,
        config: EngineConfig,
        telemetry: Telemetry | None = None,
        *,
        clock: VirtualClock | None = None,
    ) -> None:
        times.check(config)
        self.times = times
        self.clock: Clock = clock or VirtualClock()
        self.device = times.device
        self.kv_bytes_per_block = times.kv_bytes_per_block
        self.kv_bytes_per_compressed_block = times.kv_bytes_per_compressed_block
        self.kv_fixed_bytes_per_sequence = times.kv_fixed_bytes_per_sequence
        self._telemetry = telemetry
        self._exact_blocks = config.num_blocks or 0
        self._step_tokens = config.max_num_batched_tokens
        self._compressed_slots: set[int] = set()  # host slots that hold a compressed block
        self._loaded_at = self._offloaded_at = self.clock.now()  # when the link is free again, each way
        self._slot_ready: dict[int, float] = {}  # when a host slot's content has arrived there

    def execute(self, plan: StepPlan, until: float | None) -> StepResult:
        start = self.clock.now()
        shape, overhead = StepShape.of(plan), self.times.overhead.seconds
        if plan.repeats > 1 and not plan.prefill:
            ends = start + np.cumsum(self.times.decode_run(shape, min(plan.repeats, _MAX_REPEATS)) + overhead)
            if until is not None:
                ends = ends[: int(np.searchsorted(ends, until)) + 1]
            prefill_share = 0.0
        else:
            forward, prefill_share = self.times.forward(shape)
            ends = np.array([start + forward + overhead])
        end = float(ends[-1])
        if self._telemetry is not None:
            self._lap(self._telemetry, start, end, len(ends), prefill_share)
        self.clock.wait_until(end)
        return StepResult(ends=ends, tokens=None)

    # -- moves: each advances the clock, and is booked by the caller's lap -------------------------------------------

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._spend(self.times.copy_seconds(len(pairs)))

    def compress_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Reads the exact blocks and writes the compressed ones: bound by memory, so less than a copy."""
        share = (1.0 + self.kv_bytes_per_compressed_block / self.kv_bytes_per_block) / 2.0
        self._spend(self.times.copy_seconds(len(pairs)) * share)

    def offload_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """As the torch executor does on a GPU: blocks leave through a copy on the device, and go from there over the link beside the
        steps. The engine waits where more than _STAGED_BLOCKS would be on their way."""
        for block, slot in pairs:
            (self._compressed_slots.add if block >= self._exact_blocks else self._compressed_slots.discard)(slot)
        transfer = self.times.transfer_seconds(self._bytes(pairs, 1))
        if not self.times.transfers_beside_steps:
            self._spend(transfer)
            return
        self._spend(self.times.copy_seconds(len(pairs)))
        self._offloaded_at = max(self.clock.now(), self._offloaded_at) + transfer
        staged = self.times.transfer_seconds(_STAGED_BLOCKS * self.kv_bytes_per_block)
        self.clock.wait_until(self._offloaded_at - staged)
        for _, slot in pairs:
            self._slot_ready[slot] = self._offloaded_at

    def load_blocks(self, pairs: Sequence[tuple[int, int]]) -> Transfer:
        """The link is full duplex and serves one load after the other, beside the steps; what is still leaving comes back after that."""
        begin = max(self.clock.now(), self._loaded_at, *(self._slot_ready.get(slot, 0.0) for slot, _ in pairs))
        self._loaded_at = begin + self.times.transfer_seconds(self._bytes(pairs, 0))
        return _VirtualTransfer(self.clock, self._loaded_at)

    def _bytes(self, pairs: Sequence[tuple[int, int]], slot_at: int) -> int:
        compressed = sum(pair[slot_at] in self._compressed_slots for pair in pairs)
        return (len(pairs) - compressed) * self.kv_bytes_per_block + compressed * self.kv_bytes_per_compressed_block

    def _spend(self, seconds: float) -> None:
        self.clock.wait_until(self.clock.now() + seconds)

    def export_blocks(self, blocks: Sequence[int]) -> Payload:
        """Nothing is stored in virtual time."""
        return {}

    def import_blocks(self, blocks: Sequence[int], payload: Payload) -> None:
        raise ValueError("no KV is stored in virtual time")

    def recompute_seconds(self, tokens: int) -> float:
        """In chunks of max_num_batched_tokens, alone."""
        total, chunk = 0.0, self._step_tokens
        for start in range(0, tokens, chunk):
            last = start + chunk >= tokens
            forward, _ = self.times.forward(StepShape((ChunkShape(start, min(chunk, tokens - start), last),)))
            total += forward + self.times.overhead.seconds
        return total

    def transfer_seconds(self, blocks: int) -> float:
        return self.times.transfer_seconds(blocks * self.kv_bytes_per_block)

    def copy_seconds(self, blocks: int) -> float:
        return self.times.copy_seconds(blocks)

    def release(self, request: Request) -> None:
        """Holds nothing by request."""

    def _lap(self, telemetry: Telemetry, start: float, end: float, steps: int, prefill_share: float) -> None:
        """Books [start, end] of `steps` equal steps to the step components, in their order within a step."""
        overhead, lap_to = self.times.overhead, telemetry.lap_to
        forward = end - start - steps * overhead.seconds
        at = start + steps * overhead.schedule_seconds
        lap_to(_SCHEDULE, at)
        if prefill_share > 0.0:
            lap_to(_PREFILL, at + forward * prefill_share)
        at += forward
        if prefill_share < 1.0:
            lap_to(_DECODE, at)
        lap_to(_SAMPLE, at + steps * overhead.sample_seconds)
        lap_to(_EMIT, end)


class _VirtualTransfer:
    """types.Transfer that ends at a known time."""

    def __init__(self, clock: Clock, ready_at: float) -> None:
        self.ready_at: float | None = ready_at
        self._clock, self._when = clock, ready_at

    def done(self) -> bool:
        return self._clock.now() >= self._when

    def wait(self) -> None:
        self._clock.wait_until(self._when)


def blocks_that_fit(room_bytes: float, bytes_per_block: float, holder: str) -> int:
    """Whole KV blocks in `room_bytes`. Raises ConfigError when there is not one; `holder` says of what and where."""
    blocks = int(room_bytes // bytes_per_block)
    if blocks < 1:
        raise ConfigError(
            f"{holder} leaves no room for KV.",
            next_step="Use more GPUs (tensor parallel), a larger GPU or a smaller model.",
        )
    return blocks


def check_num_blocks(config: EngineConfig, room_blocks: int, model: str, device: str) -> None:
    """Raises ConfigError when config.num_blocks is more than there is room for."""
    if config.num_blocks is not None and config.num_blocks > room_blocks:
        raise ConfigError(
            f"{config.num_blocks:,} KV blocks of {model} do not fit {device}; there is room for {room_blocks:,}.",
            next_step=f"Ask for at most {room_blocks} blocks, for more GPUs, or for unbounded KV.",
        )
