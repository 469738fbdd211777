"""Step times by a roofline of the named GPU and model, and the executor that runs step plans by them in virtual time.

step = overhead + max(FLOPs / attainable FLOP/s, bytes / attainable bytes/s) + tensor-parallel all-reduces,
with the sum in place of the maximum on a device that does not overlap the two
(Williams, Waterman and Patterson, CACM 2009, applied to a batched step as in Splitwise and Vidur). Every result that
comes from here is simulated.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from observability.engine.clock import VirtualClock
from observability.engine.executor.hardware import GPU, group_sizes
from observability.engine.executor.virtual import (
    Overhead,
    StepShape,
    VirtualExecutor,
    blocks_that_fit,
    check_num_blocks,
)
from observability.engine.model.costs import WEIGHT_BYTES, AttentionGroup, ModelCost
from observability.engine.types import EngineConfig
from observability.errors import ConfigError
from observability.telemetry.recorder import Telemetry

_ALL_REDUCES_PER_LAYER = 2  # after attention and after the MLP (Megatron-LM, Shoeybi et al. 2019)
_ACTIVATION_BYTES = 2.0
_PCIE_FRACTION = 0.8  # assumption: what large copies from pinned memory attain of the link's rate


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of one model step by resource, without the per-step overhead.

    `prefill_share` is the part of the forward pass put down to prefill: its share of FLOPs where the step is bound by
    compute, of bytes where it is bound by memory (weights are shared by tokens, those of the output layer by sampled ones),
    weighted by both where they do not overlap.
    """

    compute_seconds: float
    memory_seconds: float
    link_seconds: float
    prefill_share: float
    overlapped: bool = True

    @property
    def seconds(self) -> float:
        both = self.compute_seconds, self.memory_seconds
        return (max(both) if self.overlapped else sum(both)) + self.link_seconds


class Roofline:
    """virtual.StepTimes of `tensor_parallel` equal GPUs.

    Weights and FLOPs are split evenly over the GPUs, KV over at most the model's KV heads.
    Raises ConfigError when the KV format or the number of GPUs does not fit the model.
    """

    def __init__(self, model: ModelCost, gpu: GPU, config: EngineConfig, *, tensor_parallel: int = 1) -> None:
        _check_tensor_parallel(model, gpu, tensor_parallel)
        self.model, self.gpu, self.tensor_parallel = model, gpu, tensor_parallel
        self.device = device_name(gpu, tensor_parallel)
        self.source = source_of(gpu, tensor_parallel)
        self.overhead = Overhead(gpu.schedule_seconds, gpu.sample_seconds, gpu.emit_seconds)
        self.kv_format = kv_format(model, gpu, config)
        self._block_size = config.block_size
        bytes_per_token = model.kv_bytes_per_token(self.kv_format, config.block_size)
        self.kv_bytes_per_block = round(model.kv_bytes_per_block(self.kv_format, config.block_size))
        self.kv_bytes_per_compressed_block, self._saved_per_token = 0, 0.0
        if config.num_compressed_blocks:
            model.check_kv_format(config.compressed_scheme)
            packed = model.kv_bytes_per_token(config.compressed_scheme, config.block_size)
            self.kv_bytes_per_compressed_block = round(
                model.kv_bytes_per_block(config.compressed_scheme, config.block_size)
            )
            self._saved_per_token = bytes_per_token - packed
        self.kv_fixed_bytes_per_sequence = round(model.kv_fixed_bytes(self.kv_format))
        self.transfers_beside_steps = gpu.pcie_bandwidth is not None
        self._pcie_bytes_per_second = (gpu.pcie_bandwidth or gpu.memory_bandwidth) * _PCIE_FRACTION
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
        self._bytes_per_visible = model.kv_read_bytes(1, self.kv_format, config.block_size) if self._linear else 0.0

    # -- virtual.StepTimes ------------------------------------------------------------------------------------------

    def check(self, config: EngineConfig) -> None:
        """Raises ConfigError when weights and KV blocks do not fit the memory (unbounded KV is not checked)."""
        if config.num_blocks is not None:
            room = fit_num_blocks(self.model, self.gpu, config, tensor_parallel=self.tensor_parallel)
            check_num_blocks(config, room, self.model.name, self.device)

    def forward(self, shape: StepShape) -> tuple[float, float]:
        cost = self.step_cost(shape)
        return cost.seconds, cost.prefill_share

    def copy_seconds(self, blocks: int) -> float:
        """To read and write the blocks once."""
        return 2.0 * blocks * self.kv_bytes_per_block * self._kv_scale / self._bytes_per_second

    def transfer_seconds(self, kv_bytes: float) -> float:
        """Each GPU of a group moves its share over a link of its own."""
        return kv_bytes * self._kv_scale / self._pcie_bytes_per_second

    # -- the roofline -----------------------------------------------------------------------------------------------

    def step_cost(self, shape: StepShape) -> StepCost:
        """Cost of one step. Weights are read once a step, those of the output layer if it samples; a chunk reads the KV before it
        once and writes its own. An attention kernel is taken to dequantize compressed blocks as it reads them."""
        model, visible = self.model, shape.visible
        prefill_tokens = prefill_samples = 0
        prefill_flops = prefill_kv = 0.0
        for start, tokens, samples in shape.chunks:
            prefill_tokens += tokens
            prefill_samples += samples
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
            decode_kv = sum(model.kv_read_bytes(v, self.kv_format, self._block_size) for v in visible)
        decode_kv += self._kv_write * decode_tokens
        tokens, sampled = prefill_tokens + decode_tokens, prefill_samples + decode_tokens
        prefill_flops += model.linear_flops(prefill_tokens, prefill_samples)
        decode_flops += model.linear_flops(decode_tokens, decode_tokens)
        flops = prefill_flops + decode_flops
        layers = model.layer_bytes_read(tokens) * self._weight_scale
        output = model.output_bytes * self._weight_scale if sampled else 0.0
        saved = self._saved_per_token * shape.packed_tokens
        memory_bytes = layers + output + max(prefill_kv + decode_kv - saved, 0.0) * self._kv_scale
        compute_seconds = flops / self._flops_per_second
        memory_seconds = memory_bytes / self._bytes_per_second
        if not decode_tokens or not prefill_tokens:
            prefill_share = 1.0 if prefill_tokens else 0.0
        else:
            of_flops = prefill_flops / flops
            weights = layers * prefill_tokens / tokens + output * prefill_samples / sampled
            # What packed blocks save is taken off the whole, also where a chunk is what reads them.
            of_bytes = min((weights + prefill_kv * self._kv_scale) / memory_bytes, 1.0)
            if self.gpu.overlapped:
                prefill_share = of_flops if compute_seconds >= memory_seconds else of_bytes
            else:
                prefill_share = (of_flops * compute_seconds + of_bytes * memory_seconds) / (
                    compute_seconds + memory_seconds
                )
        link_seconds = self._link_seconds_per_token * tokens
        return StepCost(compute_seconds, memory_seconds, link_seconds, prefill_share, self.gpu.overlapped)

    def decode_run(self, shape: StepShape, repeats: int) -> np.ndarray:
        model, visible, n = self.model, shape.visible, len(shape.visible)
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
                    group.bytes_per_state(self.kv_format, self._block_size) * states
                    + group.index_bytes.get(self.kv_format, 0.0) * indexed
                )
        flops = flops + model.linear_flops(n, n)
        kv = np.maximum(kv + self._kv_write * n - self._saved_per_token * shape.packed_tokens, 0.0)
        weights = (model.layer_bytes_read(n) + model.output_bytes) * self._weight_scale
        memory_bytes = weights + kv * self._kv_scale
        compute_seconds, memory_seconds = flops / self._flops_per_second, memory_bytes / self._bytes_per_second
        both = np.maximum if self.gpu.overlapped else np.add
        return both(compute_seconds, memory_seconds) + self._link_seconds_per_token * n


class RooflineExecutor(VirtualExecutor):
    """types.Executor in virtual time by a Roofline. Raises ConfigError as Roofline and its check() do."""

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
        self.roofline = Roofline(model, gpu, config, tensor_parallel=tensor_parallel)
        super().__init__(self.roofline, config, telemetry, clock=clock)


def _attended(group: AttentionGroup, visible: np.ndarray) -> np.ndarray:
    """AttentionGroup.attended_states for an array."""
    compressed = visible * group.states_per_token
    if group.top_k is not None:
        compressed = np.minimum(compressed, group.top_k)
    return np.minimum(visible, group.window) + compressed


def device_name(gpu: GPU, tensor_parallel: int) -> str:
    """`H100`, or `4xH100` for a tensor-parallel group."""
    return gpu.name if tensor_parallel == 1 else f"{tensor_parallel}x{gpu.name}"


def source_of(gpu: GPU, tensor_parallel: int) -> str:
    """StepTimes.source of a roofline."""
    device = device_name(gpu, tensor_parallel)
    if gpu.assumed:
        return f"published figures of {device} and assumed efficiencies and overhead"
    return f"measured figures of {device}"


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
    """KV blocks that fit `memory_utilization` of each GPU beside its share of the weights, the fixed KV part (sliding
    windows) of max_num_seqs sequences and the compressed blocks. Raises ConfigError when not one block fits."""
    _check_tensor_parallel(model, gpu, tensor_parallel)
    chosen, shards = kv_format(model, gpu, config), _kv_shards(model, tensor_parallel)
    weights = _stored_weight_bytes(model, gpu) / tensor_parallel
    fixed = config.max_num_seqs * model.kv_fixed_bytes(chosen) / shards
    room = gpu.memory_bytes * memory_utilization - weights - fixed
    beside = ""
    if config.num_compressed_blocks:
        model.check_kv_format(config.compressed_scheme)
        block = model.kv_bytes_per_block(config.compressed_scheme, config.block_size)
        room -= config.num_compressed_blocks * block / shards
        beside = f" and {config.num_compressed_blocks:,} compressed blocks"
    return blocks_that_fit(
        room,
        model.kv_bytes_per_block(chosen, config.block_size) / shards,
        f"{model.name} ({weights * tensor_parallel / 1e9:,.0f} GB of weights){beside} on {tensor_parallel} x {gpu.name} "
        f"({gpu.memory_bytes / 1e9:.0f} GB each)",
    )


def _check_tensor_parallel(model: ModelCost, gpu: GPU, tensor_parallel: int) -> None:
    if tensor_parallel < 1 or model.heads % tensor_parallel:
        raise ConfigError(
            f"tensor_parallel is {tensor_parallel}; it must divide the {model.heads} heads of {model.name}.",
            next_step=f"Use one of {', '.join(map(str, group_sizes(gpu, model.heads)))}.",
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
