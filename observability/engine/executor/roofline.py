"""Runs step plans in virtual time: a step takes what a roofline of the named GPU and model says, and no model is run.

step = overhead + max(FLOPs / attainable FLOP/s, bytes / attainable bytes/s) + tensor-parallel all-reduces
(Williams, Waterman and Patterson, CACM 2009, applied to a batched step as in Splitwise and Vidur). Every result that
comes from here is simulated; its clock says `virtual`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from observability import catalog
from observability.engine.clock import VirtualClock
from observability.engine.executor.hardware import GPU
from observability.engine.model.costs import WEIGHT_BYTES, AttentionGroup, ModelCost
from observability.engine.types import Clock, EngineConfig, Request, StepPlan, StepResult
from observability.errors import ConfigError
from observability.telemetry.recorder import Telemetry

_SCHEDULE = catalog.COMPONENTS.index("schedule")
_PREFILL = catalog.COMPONENTS.index("forward_prefill")
_DECODE = catalog.COMPONENTS.index("forward_decode")
_SAMPLE = catalog.COMPONENTS.index("sample")
_EMIT = catalog.COMPONENTS.index("emit")

_ALL_REDUCES_PER_LAYER = 2  # after attention and after the MLP (Megatron-LM, Shoeybi et al. 2019)
_ACTIVATION_BYTES = 2.0
_MAX_REPEATS = 4096  # bounds the [repeats, sequences] array of models whose attention is capped


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of one model step by resource, without the per-step overhead.

    `prefill_share` is the part of the forward pass put down to prefill: its share of FLOPs where the step is bound by
    compute, of bytes where it is bound by memory (weights are shared by tokens).
    """

    compute_seconds: float
    memory_seconds: float
    link_seconds: float
    prefill_share: float

    @property
    def seconds(self) -> float:
        return max(self.compute_seconds, self.memory_seconds) + self.link_seconds


class RooflineExecutor:
    """types.Executor in virtual time, of `tensor_parallel` equal GPUs.

    Weights and FLOPs are split evenly over the GPUs, KV over at most the model's KV heads. `telemetry` may be None.
    Raises ConfigError when the KV format or the number of GPUs does not fit the model, or when weights and KV blocks
    do not fit the memory (unbounded KV, num_blocks None, is not checked).
    """

    def __init__(
        self,
        model: ModelCost,
        gpu: GPU,
        config: EngineConfig,
        telemetry: Telemetry | None = None,
        *,
        tensor_parallel: int = 1,
        clock: VirtualClock | None = None,
    ) -> None:
        _check_tensor_parallel(model, gpu, tensor_parallel)
        self.model, self.gpu, self.tensor_parallel = model, gpu, tensor_parallel
        self.clock: Clock = clock or VirtualClock()
        self.device = device_name(gpu, tensor_parallel)
        self.kv_format = kv_format(model, gpu, config)
        bytes_per_token = model.kv_bytes_per_token(self.kv_format)
        self.kv_bytes_per_block = round(config.block_size * bytes_per_token)
        if config.num_blocks is not None:
            room = fit_num_blocks(model, gpu, config, tensor_parallel=tensor_parallel)
            if config.num_blocks > room:
                raise ConfigError(
                    f"{config.num_blocks:,} KV blocks of {model.name} do not fit {self.device}; there is room for {room:,}.",
                    next_step=f"Ask for at most {room} blocks, for more GPUs, or for unbounded KV.",
                )
        self._telemetry = telemetry
        self._dtype = compute_dtype(model, gpu)
        self._flops_per_second = gpu.peak_flops[self._dtype] * gpu.compute_fraction * tensor_parallel
        self._bytes_per_second = gpu.memory_bandwidth * gpu.memory_fraction  # of one GPU
        self._weight_scale = _stored_weight_bytes(model, gpu) / model.weight_bytes / tensor_parallel
        self._kv_scale = 1.0 / _kv_shards(model, tensor_parallel)
        self._kv_write = bytes_per_token
        self._kv_fixed = model.kv_fixed_bytes(self.kv_format)
        self._link_seconds_per_token = _link_seconds_per_token(model, gpu, tensor_parallel)
        self._linear = all(group.linear for group in model.attention)
        # one visible token more costs a decode so many FLOPs and bytes, where cost is linear
        self._flops_per_visible = model.attention_flops(0, 1, decode=True) if self._linear else 0.0
        self._bytes_per_visible = model.kv_read_bytes(1, self.kv_format) if self._linear else 0.0

    # -- types.Executor ---------------------------------------------------------------------------------------------

    def execute(self, plan: StepPlan, until: float | None) -> StepResult:
        start = self.clock.now()
        overhead = self.gpu.step_overhead_seconds
        visible = [request.num_computed + 1 for request in plan.decode]
        if plan.repeats > 1 and not plan.prefill:
            durations = self._decode_durations(visible, min(plan.repeats, _MAX_REPEATS)) + overhead
            ends = start + np.cumsum(durations)
            if until is not None:
                ends = ends[: int(np.searchsorted(ends, until)) + 1]
            prefill_share = 0.0
        else:
            cost = self.step_cost([(chunk.start, chunk.tokens) for chunk in plan.prefill], visible)
            ends = np.array([start + cost.seconds + overhead])
            prefill_share = cost.prefill_share
        end = float(ends[-1])
        if self._telemetry is not None:
            self._lap(start, end, len(ends), prefill_share)
        self.clock.wait_until(end)
        return StepResult(ends=ends, tokens=None)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Advances the clock by the time to read and write the blocks once; kv_move is charged by the caller's lap."""
        moved = 2.0 * len(pairs) * self.kv_bytes_per_block * self._kv_scale
        self.clock.wait_until(self.clock.now() + moved / self._bytes_per_second)

    def release(self, request: Request) -> None:
        """Holds nothing by request."""

    # -- the model of time --------------------------------------------------------------------------------------------

    def step_cost(self, chunks: Sequence[tuple[int, int]], visible: Sequence[int]) -> StepCost:
        """Cost of one step: prefill `chunks` as (first position, tokens), decodes by the tokens each one attends to,
        its own included. Weights are read once a step; a chunk reads the KV before it once and writes its own."""
        model, kv_format = self.model, self.kv_format
        prefill_tokens = decode_tokens = 0
        prefill_flops = prefill_kv = 0.0
        for start, tokens in chunks:
            prefill_tokens += tokens
            prefill_flops += model.attention_flops(start, tokens)
            window_part = self._kv_fixed if start else 0.0
            prefill_kv += self._kv_write * (start + tokens) + window_part
        decode_tokens = len(visible)
        if self._linear:
            total = sum(visible)
            decode_flops = self._flops_per_visible * total
            decode_kv = self._bytes_per_visible * total
        else:
            decode_flops = sum(model.attention_flops(v - 1, 1, decode=True) for v in visible)
            decode_kv = sum(model.kv_read_bytes(v, kv_format) for v in visible)
        decode_kv += self._kv_write * decode_tokens
        tokens = prefill_tokens + decode_tokens
        prefill_flops += model.linear_flops(prefill_tokens)
        decode_flops += model.linear_flops(decode_tokens)
        flops = prefill_flops + decode_flops
        weights = model.weight_bytes_read(tokens) * self._weight_scale
        memory_bytes = weights + (prefill_kv + decode_kv) * self._kv_scale
        compute_seconds = flops / self._flops_per_second
        memory_seconds = memory_bytes / self._bytes_per_second
        if not decode_tokens or not prefill_tokens:
            prefill_share = 1.0 if prefill_tokens else 0.0
        elif compute_seconds >= memory_seconds:
            prefill_share = prefill_flops / flops
        else:
            prefill_share = (weights * prefill_tokens / tokens + prefill_kv * self._kv_scale) / memory_bytes
        return StepCost(compute_seconds, memory_seconds, self._link_seconds_per_token * tokens, prefill_share)

    def _decode_durations(self, visible: list[int], repeats: int) -> np.ndarray:
        """Seconds of each of `repeats` decode steps without overhead; each adds one visible token to each sequence."""
        model, n = self.model, len(visible)
        step = np.arange(repeats)
        if self._linear:
            total = sum(visible) + n * step
            flops = self._flops_per_visible * total
            kv = self._bytes_per_visible * total
        else:
            grown = np.asarray(visible)[None, :] + step[:, None]  # [repeats, sequences]
            flops, kv = np.zeros(repeats), np.zeros(repeats)
            for group in model.attention:
                states = _attended(group, grown).sum(axis=1)
                indexed = grown.sum(axis=1) * group.states_per_token
                flops += group.layers * (group.flops_per_state * states + group.index_flops_per_state * indexed)
                kv += group.layers * (
                    group.state_bytes[self.kv_format] * states + group.index_bytes.get(self.kv_format, 0.0) * indexed
                )
        flops = flops + model.linear_flops(n)
        kv = kv + self._kv_write * n
        memory_bytes = model.weight_bytes_read(n) * self._weight_scale + kv * self._kv_scale
        seconds = np.maximum(flops / self._flops_per_second, memory_bytes / self._bytes_per_second)
        return seconds + self._link_seconds_per_token * n

    def _lap(self, start: float, end: float, steps: int, prefill_share: float) -> None:
        """Books [start, end] of `steps` equal steps to the step components, in their order within a step."""
        assert self._telemetry is not None
        gpu, lap_to = self.gpu, self._telemetry.lap_to
        forward = end - start - steps * gpu.step_overhead_seconds
        at = start + steps * gpu.schedule_seconds
        lap_to(_SCHEDULE, at)
        if prefill_share > 0.0:
            lap_to(_PREFILL, at + forward * prefill_share)
        at += forward
        if prefill_share < 1.0:
            lap_to(_DECODE, at)
        lap_to(_SAMPLE, at + steps * gpu.sample_seconds)
        lap_to(_EMIT, end)


def _attended(group: AttentionGroup, visible: np.ndarray) -> np.ndarray:
    """AttentionGroup.attended_states for an array."""
    compressed = visible * group.states_per_token
    if group.top_k is not None:
        compressed = np.minimum(compressed, group.top_k)
    return np.minimum(visible, group.window) + compressed


def device_name(gpu: GPU, tensor_parallel: int) -> str:
    """`H100`, or `4xH100` for a tensor-parallel group."""
    return gpu.name if tensor_parallel == 1 else f"{tensor_parallel}x{gpu.name}"


def compute_dtype(model: ModelCost, gpu: GPU) -> str:
    """What the matrix products run in: the weights' dtype if the GPU has it, else the next wider that it has."""
    widths = list(WEIGHT_BYTES)
    for dtype in reversed(widths[: widths.index(model.weight_dtype) + 1]):
        if dtype in gpu.peak_flops:
            return dtype
    raise ConfigError(
        f"{gpu.name} has no arithmetic for {model.weight_dtype} weights.", next_step="Choose another GPU."
    )


def kv_format(model: ModelCost, gpu: GPU, config: EngineConfig) -> str:
    """The KV format that `config.kv_dtype` means here: "auto" is the model's own, or float32 on a float32 device."""
    if config.kv_dtype != "auto":
        chosen: str = config.kv_dtype
    else:
        chosen = "float32" if compute_dtype(model, gpu) == "float32" else model.kv_format
    model.check_kv_format(chosen)
    return chosen


def fit_num_blocks(
    model: ModelCost,
    gpu: GPU,
    config: EngineConfig,
    *,
    tensor_parallel: int = 1,
    memory_utilization: float = 0.9,
) -> int:
    """KV blocks that fit `memory_utilization` of each GPU beside its share of the weights and the fixed KV part (sliding
    windows) of max_num_seqs sequences. Raises ConfigError when not one block fits."""
    _check_tensor_parallel(model, gpu, tensor_parallel)
    chosen, shards = kv_format(model, gpu, config), _kv_shards(model, tensor_parallel)
    weights = _stored_weight_bytes(model, gpu) / tensor_parallel
    fixed = config.max_num_seqs * model.kv_fixed_bytes(chosen) / shards
    room = gpu.memory_bytes * memory_utilization - weights - fixed
    blocks = int(room // (config.block_size * model.kv_bytes_per_token(chosen) / shards))
    if blocks < 1:
        raise ConfigError(
            f"{model.name} ({weights * tensor_parallel / 1e9:,.0f} GB of weights) leaves no room for KV on "
            f"{tensor_parallel} x {gpu.name} ({gpu.memory_bytes / 1e9:.0f} GB each).",
            next_step="Use more GPUs (tensor parallel), a larger GPU or a smaller model.",
        )
    return blocks


def _check_tensor_parallel(model: ModelCost, gpu: GPU, tensor_parallel: int) -> None:
    if tensor_parallel < 1 or model.heads % tensor_parallel:
        raise ConfigError(
            f"tensor_parallel is {tensor_parallel}; it must divide the {model.heads} heads of {model.name}.",
            next_step="Use a power of two such as 1, 2, 4 or 8.",
        )
    if tensor_parallel > 1 and gpu.link_bandwidth is None:
        raise ConfigError(f"{gpu.name} cannot be grouped.", next_step="Use tensor_parallel = 1.")


def _kv_shards(model: ModelCost, tensor_parallel: int) -> int:
    """KV is split by head; further GPUs of the group hold copies (one head: every GPU holds all of it)."""
    return min(tensor_parallel, model.kv_heads)


def _stored_weight_bytes(model: ModelCost, gpu: GPU) -> float:
    """All weights as this device stores them: as published, or float32 where it computes in float32."""
    if compute_dtype(model, gpu) == "float32":
        return model.parameters * WEIGHT_BYTES["float32"]
    return model.weight_bytes


def _link_seconds_per_token(model: ModelCost, gpu: GPU, tensor_parallel: int) -> float:
    """Ring all-reduce: each GPU sends 2 (n - 1) / n of the activations, once after attention and once after the MLP."""
    if tensor_parallel == 1:
        return 0.0
    assert gpu.link_bandwidth is not None
    activations = _ALL_REDUCES_PER_LAYER * model.layers * model.hidden_size * _ACTIVATION_BYTES
    return activations * 2.0 * (tensor_parallel - 1) / tensor_parallel / gpu.link_bandwidth
