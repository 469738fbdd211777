"""What a token costs a model in arithmetic and memory: the numbers that the roofline executor divides by a GPU's.

A cost record holds published architecture figures only; everything else here is arithmetic on them. KV per sequence is
a fixed part (sliding windows) plus a slope per token, because in newer models it is not proportional to the length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from observability.engine.model.latent_config import TINY_MLA, LatentConfig
from observability.errors import ConfigError

WEIGHT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "fp8": 1.0, "fp4": 0.5 + 1 / 32}  # fp4: with one scale byte per 32


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Layers that keep KV in the same way. A *state* is one stored KV entry of one layer.

    A query token sees the latest `window` tokens uncompressed, and one state for each `tokens_per_state` tokens before
    it, of which it attends to at most `top_k` (chosen by an indexer that reads every one). tokens_per_state None: the
    window is all there is. flops_per_state: of one query token for one attended state, one layer (QK^T and AV, a
    multiply-add is 2); prefill_flops_per_state where prefill computes attention in another form. Bytes are by KV format.
    """

    layers: int
    flops_per_state: float
    state_bytes: Mapping[str, float]
    tokens_per_state: int | None = 1
    window: int = 0
    top_k: int | None = None
    prefill_flops_per_state: float | None = None
    index_flops_per_state: float = 0.0
    index_bytes: Mapping[str, float] = field(default_factory=dict)

    @property
    def states_per_token(self) -> float:
        return 0.0 if self.tokens_per_state is None else 1.0 / self.tokens_per_state

    @property
    def linear(self) -> bool:
        """True where cost is proportional to the number of visible tokens."""
        return self.window == 0 and self.top_k is None

    def attended_states(self, visible: float) -> float:
        """Attended states of a query that sees `visible` tokens, itself included; whole states are not rounded."""
        compressed = min(visible * self.states_per_token, math.inf if self.top_k is None else self.top_k)
        return min(visible, self.window) + compressed

    def attended_states_sum(self, start: int, tokens: int) -> float:
        """Sum of attended_states over the causal queries at positions [start, start + tokens)."""
        total = _capped_sum(start, tokens, 1.0, self.window)
        if self.tokens_per_state is not None:
            cap = math.inf if self.top_k is None else self.top_k
            total += _capped_sum(start, tokens, self.states_per_token, cap)
        return total


def _capped_sum(start: int, tokens: int, slope: float, cap: float) -> float:
    """Sum of min(slope * v, cap) over v = start + 1 .. start + tokens, in closed form."""
    if cap == 0.0:
        return 0.0
    last_below = tokens if math.isinf(cap) else min(max(math.floor(cap / slope) - start, 0), tokens)
    below = slope * (last_below * start + last_below * (last_below + 1) / 2)
    return below + (0.0 if last_below == tokens else (tokens - last_below) * cap)


@dataclass(frozen=True, slots=True)
class ModelCost:
    """One model. `parameters` and `active_parameters` (used by a token) count all weights; `kv_heads` is what tensor
    parallelism can split the KV by. `sources` maps field names to where the numbers are from."""

    name: str
    parameters: float
    active_parameters: float
    weight_dtype: str
    weight_bytes: float
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    max_context: int
    kv_format: str
    attention: tuple[AttentionGroup, ...]
    experts: int = 1
    experts_per_token: int = 1
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def kv_formats(self) -> tuple[str, ...]:
        return tuple(self.attention[0].state_bytes)

    def check_kv_format(self, kv_format: str) -> None:
        """Raises ConfigError where this model's KV record has no such format."""
        if kv_format not in self.kv_formats:
            raise ConfigError(
                f"{self.name} has no KV format {kv_format!r}.", next_step=f"Use one of {', '.join(self.kv_formats)}."
            )

    def kv_bytes_per_token(self, kv_format: str) -> float:
        """Bytes that a sequence's KV grows by for each token (the slope), all layers."""
        return sum(
            g.layers * g.states_per_token * (g.state_bytes[kv_format] + g.index_bytes.get(kv_format, 0.0))
            for g in self.attention
        )

    def kv_fixed_bytes(self, kv_format: str) -> float:
        """Bytes that a sequence longer than its windows takes besides the slope, all layers."""
        return sum(g.layers * g.window * g.state_bytes[kv_format] for g in self.attention)

    def attention_flops(self, start: int, tokens: int, *, decode: bool = False) -> float:
        """FLOPs of attention (indexer included) for the causal queries at positions [start, start + tokens)."""
        total = 0.0
        for g in self.attention:
            own_form = decode or g.prefill_flops_per_state is None
            flops_per_state = g.flops_per_state if own_form else g.prefill_flops_per_state
            assert flops_per_state is not None
            total += g.layers * flops_per_state * g.attended_states_sum(start, tokens)
            if g.index_flops_per_state:
                index_states = _capped_sum(start, tokens, g.states_per_token, math.inf)
                total += g.layers * g.index_flops_per_state * index_states
        return total

    def linear_flops(self, tokens: int) -> float:
        """FLOPs of everything but attention: 2 a parameter a token (Kaplan et al. 2020, section 2.1)."""
        return 2.0 * self.active_parameters * tokens

    def kv_read_bytes(self, visible: float, kv_format: str) -> float:
        """KV bytes that one query with `visible` tokens in sight reads: attended states and every indexer key."""
        return sum(
            g.layers
            * (
                g.attended_states(visible) * g.state_bytes[kv_format]
                + visible * g.states_per_token * g.index_bytes.get(kv_format, 0.0)
            )
            for g in self.attention
        )

    def weight_bytes_read(self, tokens: int) -> float:
        """Weight bytes that a step of `tokens` tokens reads, each weight once. Of the experts, the expected share that
        at least one token is routed to, 1 - (1 - k/E)^tokens, under uniform routing."""
        untouched = (1.0 - self.experts_per_token / self.experts) ** tokens
        return self.weight_bytes * (1.0 - untouched * self.expert_parameters / self.parameters)

    @property
    def expert_parameters(self) -> float:
        """Parameters in routed experts: total - active = experts x (1 - k/E)."""
        if self.experts == 1:
            return 0.0
        return (self.parameters - self.active_parameters) / (1.0 - self.experts_per_token / self.experts)


def _grouped_query(
    name: str,
    *,
    parameters: float,
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    context: int,
    source: str,
) -> ModelCost:
    """A dense model with grouped-query attention. int8 and int4 KV: one byte or half a byte an element,
    and a float32 scale per head and tensor."""
    elements = 2 * kv_heads * head_dim
    formats = {
        "float32": 4.0 * elements,
        "bfloat16": 2.0 * elements,
        "int8": 1.0 * elements + 2 * kv_heads * 4.0,
        "int4": 0.5 * elements + 2 * kv_heads * 4.0,
    }
    return ModelCost(
        name=name,
        parameters=parameters,
        active_parameters=parameters,
        weight_dtype="bfloat16",
        weight_bytes=parameters * WEIGHT_BYTES["bfloat16"],
        layers=layers,
        hidden_size=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_context=context,
        kv_format="bfloat16",
        attention=(AttentionGroup(layers, 4.0 * heads * head_dim, MappingProxyType(formats)),),
        sources=MappingProxyType({"all": source}),
    )


def latent_cost(name: str, config: LatentConfig, *, source: str) -> ModelCost:
    """The record of a dense model with latent attention: full layers are its slope, sliding ones its fixed part. Decode reads
    states in absorbed form (scores over latent + RoPE, values over latent), prefill expands them to heads."""
    heads, width = config.num_heads, config.state_width
    parameters = float(sum(math.prod(shape) for shape in config.tensor_shapes().values()))

    def group(layers: int, tokens_per_state: int | None, window: int) -> AttentionGroup:
        return AttentionGroup(
            layers,
            2.0 * heads * (width + config.kv_lora_rank),
            MappingProxyType({"float32": 4.0 * width, "bfloat16": 2.0 * width}),
            tokens_per_state=tokens_per_state,
            window=window,
            prefill_flops_per_state=2.0
            * heads
            * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim),
        )

    groups = (group(config.full_layers, 1, 0), group(config.window_layers, None, config.sliding_window))
    return ModelCost(
        name=name,
        parameters=parameters,
        active_parameters=parameters,
        weight_dtype="bfloat16",
        weight_bytes=parameters * WEIGHT_BYTES["bfloat16"],
        layers=config.num_layers,
        hidden_size=config.hidden_size,
        heads=heads,
        kv_heads=1,
        head_dim=width,
        max_context=config.max_position,
        kv_format="bfloat16",
        attention=tuple(g for g in groups if g.layers),
        sources=MappingProxyType({"all": source}),
    )


_V3_HEADS, _V3_LATENT, _V3_ROPE = 128, 512, 64
_DEEPSEEK_V3 = ModelCost(
    name="deepseek-v3",
    parameters=671e9,
    active_parameters=37e9,
    weight_dtype="fp8",
    weight_bytes=671e9 * WEIGHT_BYTES["fp8"],
    layers=61,
    hidden_size=7168,
    heads=_V3_HEADS,
    kv_heads=1,
    head_dim=_V3_LATENT + _V3_ROPE,
    max_context=163_840,
    kv_format="bfloat16",
    attention=(
        AttentionGroup(
            61,
            # absorbed form: scores over latent + RoPE, values over latent
            2.0 * _V3_HEADS * (_V3_LATENT + _V3_ROPE + _V3_LATENT),
            MappingProxyType({"bfloat16": 2.0 * (_V3_LATENT + _V3_ROPE), "fp8": 656.0}),
            # expanded form: heads with keys of 128 + 64 and values of 128
            prefill_flops_per_state=2.0 * _V3_HEADS * (128 + 64 + 128),
        ),
    ),
    experts=256,
    experts_per_token=8,
    sources=MappingProxyType(
        {
            "all": "DeepSeek-V3 technical report (arXiv 2412.19437) section 4.2 and its config.json",
            "attention": "bf16: 1,152 B per token and layer; fp8: vLLM fp8_ds_mla record of 656 B",
            "weight_bytes": "checkpoint in fp8 (block scales not counted)",
        }
    ),
)


def _deepseek_v4(
    name: str,
    *,
    parameters: float,
    active: float,
    hidden: int,
    heads: int,
    experts: int,
    window_layers: int,
    csa_layers: int,
    hca_layers: int,
    top_k: int,
    source: str,
) -> ModelCost:
    """V4: shared K = V of head size 512, sliding window 128 on each layer; CSA keeps one state per 4 tokens and picks
    top_k of them by an indexer (64 heads of 128), HCA keeps one per 128 tokens, dense. Experts are fp4, the rest fp8."""
    head_dim, window = 512, 128
    flops = 4.0 * heads * head_dim
    record = MappingProxyType({"bfloat16": 1024.0, "fp8": 584.0})
    index = MappingProxyType({"bfloat16": 256.0, "fp8": 132.0})
    groups = (
        AttentionGroup(
            csa_layers, flops, record, tokens_per_state=4, window=window, top_k=top_k,
            index_flops_per_state=2.0 * 64 * 128, index_bytes=index,
        ),
        AttentionGroup(hca_layers, flops, record, tokens_per_state=128, window=window),
        AttentionGroup(window_layers, flops, record, tokens_per_state=None, window=window),
    )  # fmt: skip
    routed = (parameters - active) / (1.0 - 6 / experts)
    return ModelCost(
        name=name,
        parameters=parameters,
        active_parameters=active,
        weight_dtype="fp8",
        weight_bytes=routed * WEIGHT_BYTES["fp4"] + (parameters - routed) * WEIGHT_BYTES["fp8"],
        layers=csa_layers + hca_layers + window_layers,
        hidden_size=hidden,
        heads=heads,
        kv_heads=1,
        head_dim=head_dim,
        max_context=1_048_576,
        kv_format="fp8",
        attention=tuple(group for group in groups if group.layers),
        experts=experts,
        experts_per_token=6,
        sources=MappingProxyType(
            {
                "all": source,
                "attention": "schedule and indexer: DeepSeek-V4 report sections 2.3.1 and 2.3.2; bf16 1,024 B and index "
                "256 B a state; fp8: vLLM records of 584 B (448 fp8, 64 bf16 RoPE, scales) and 132 B",
                "weight_bytes": "MoE experts fp4 with a scale byte per 32, the rest fp8, as the checkpoint is published; "
                "expert share from total - active = experts x (1 - 6/E)",
            }
        ),
    )


MODELS: dict[str, ModelCost] = {
    model.name: model
    for model in (
        _grouped_query(
            "smollm2-135m", parameters=134_515_008, layers=30, hidden=576, heads=9, kv_heads=3, head_dim=64, context=8192,
            source="HuggingFaceTB/SmolLM2-135M-Instruct config.json; parameters counted with tied embeddings",
        ),
        _grouped_query(
            "llama-3-8b", parameters=8_030_261_248, layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128,
            context=131_072,
            source="The Llama 3 Herd of Models (arXiv 2407.21783) table 3; context of the 3.1 release",
        ),
        _grouped_query(
            "llama-3-70b", parameters=70_553_706_496, layers=80, hidden=8192, heads=64, kv_heads=8, head_dim=128,
            context=131_072,
            source="The Llama 3 Herd of Models (arXiv 2407.21783) table 3; context of the 3.1 release",
        ),
        latent_cost("tiny-mla", TINY_MLA, source="latent_config.TINY_MLA, the random-weight preset that this engine runs"),
        _DEEPSEEK_V3,
        _deepseek_v4(
            "deepseek-v4-pro", parameters=1600e9, active=49e9, hidden=7168, heads=128, experts=384,
            window_layers=0, csa_layers=30, hca_layers=31, top_k=1024,
            source="DeepSeek-V4-Pro model card and config.json: 61 layers, 128 heads, 384 experts, 6 a token",
        ),
        _deepseek_v4(
            "deepseek-v4-flash", parameters=284e9, active=13e9, hidden=4096, heads=64, experts=256,
            window_layers=2, csa_layers=21, hca_layers=20, top_k=512,
            source="DeepSeek-V4-Flash config.json (also the defaults of transformers' DeepseekV4Config): 43 layers, "
            "64 heads, 256 experts, 6 a token",
        ),
    )
}  # fmt: skip


def model_by_name(name: str) -> ModelCost:
    """The record of that name, upper or lower case. Raises ConfigError that lists the known names."""
    if model := MODELS.get(name.lower()):
        return model
    raise ConfigError(
        f"There is no cost record of a model named {name!r}.", next_step=f"Use one of {', '.join(MODELS)}."
    )
