"""What a token costs a model in arithmetic and memory: the numbers that the roofline executor divides by a GPU's.

A cost record holds published architecture figures only; everything else here is arithmetic on them. KV per sequence is
a fixed part (sliding windows) plus a slope per token, because in newer models it is not proportional to the length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

from observability.engine.model.latent_config import TINY_MLA, LatentConfig
from observability.errors import ConfigError

WEIGHT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "fp8": 1.0, "fp4": 0.5 + 1 / 32}  # fp4: with one scale byte per 32
#: Input table and output layer stay in it where layers are quantized (DeepSeek-V3 report, arXiv 2412.19437, section 3.3.1).
_EMBEDDING_DTYPE = "bfloat16"


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Layers that keep KV in the same way. A *state* is one stored KV entry of one layer.

    A query token sees the latest `window` tokens uncompressed, and one state for each `tokens_per_state` tokens before
    it, of which it attends to at most `top_k` (chosen by an indexer that reads every one). tokens_per_state None: the
    window is all there is. flops_per_state: of one query token for one attended state, one layer (QK^T and AV, a
    multiply-add is 2); prefill_flops_per_state where prefill computes attention in another form. Bytes are by KV format;
    block_bytes are what a KV block of any size takes beside its states, where a state is a token (scales that its tokens
    share).
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
    block_bytes: Mapping[str, float] = field(default_factory=dict)

    def bytes_per_state(self, kv_format: str, block_size: int) -> float:
        """With its share of what its block takes."""
        return self.state_bytes[kv_format] + self.block_bytes.get(kv_format, 0.0) / block_size

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


@dataclass(frozen=True)  # no slots: what is derived is worked out once
class ModelCost:
    """One model. `parameters` and `active_parameters` (used by a token) count all weights, input table and output layer
    included: [vocab_size, hidden_size] each, one and the same where they are tied. `kv_heads` is what tensor parallelism
    can split the KV by. `sources` maps field names to where the numbers are from."""

    name: str
    parameters: float
    active_parameters: float
    vocab_size: int
    tied_embeddings: bool
    weight_dtype: str
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
    expert_dtype: str | None = None  # None: weight_dtype
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

    def kv_bytes_per_token(self, kv_format: str, block_size: int) -> float:
        """Bytes that a sequence's KV grows by for each token (the slope), all layers, in blocks of so many tokens."""
        return sum(
            g.layers
            * g.states_per_token
            * (g.bytes_per_state(kv_format, block_size) + g.index_bytes.get(kv_format, 0.0))
            for g in self.attention
        )

    def kv_bytes_per_block(self, kv_format: str, block_size: int) -> float:
        """Of a block of so many tokens, all layers."""
        return block_size * self.kv_bytes_per_token(kv_format, block_size)

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

    def linear_flops(self, tokens: int, sampled: int) -> float:
        """FLOPs of everything but attention, for a step of `tokens` tokens of which `sampled` yield a next one: 2 a parameter of
        the layers a token (Kaplan et al. 2020, section 2.1, whose N leaves embeddings out), and the output layer for each
        sampled one. Looking up the input table takes none. vLLM samples from the last token of every chunk, also of unfinished
        prompts, and drops what it does not need: one row a chunk more than is counted here."""
        return 2.0 * (self.layer_parameters * tokens + self.embedding_parameters * sampled)

    def kv_read_bytes(self, visible: float, kv_format: str, block_size: int) -> float:
        """KV bytes that one query with `visible` tokens in sight reads: attended states and every indexer key."""
        return sum(
            g.layers
            * (
                g.attended_states(visible) * g.bytes_per_state(kv_format, block_size)
                + visible * g.states_per_token * g.index_bytes.get(kv_format, 0.0)
            )
            for g in self.attention
        )

    def layer_bytes_read(self, tokens: int) -> float:
        """Weight bytes that a step of `tokens` tokens reads, each weight once, without the output layer. Of the experts, the
        expected share that at least one token is routed to, 1 - (1 - k/E)^tokens, under uniform routing. Of the input table
        only the tokens' rows are gathered; they count as little as other activations."""
        untouched = (1.0 - self.experts_per_token / self.experts) ** tokens
        return self._layer_bytes - untouched * self._expert_bytes

    @cached_property
    def weight_bytes(self) -> float:
        """All weights as published."""
        tables = 1 if self.tied_embeddings else 2
        return self._layer_bytes + tables * self.output_bytes

    @cached_property
    def output_bytes(self) -> float:
        """Of the output layer, which a step reads once if it samples."""
        return self.embedding_parameters * WEIGHT_BYTES[_EMBEDDING_DTYPE]

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the output layer, and as many of the input table."""
        return self.vocab_size * self.hidden_size

    @cached_property
    def layer_parameters(self) -> float:
        """Parameters that every token is multiplied with: the active ones without input table and output layer."""
        return self.active_parameters - (1 if self.tied_embeddings else 2) * self.embedding_parameters

    @cached_property
    def expert_parameters(self) -> float:
        """Parameters in routed experts: total - active = experts x (1 - k/E)."""
        if self.experts == 1:
            return 0.0
        return (self.parameters - self.active_parameters) / (1.0 - self.experts_per_token / self.experts)

    @cached_property
    def _expert_bytes(self) -> float:
        return self.expert_parameters * WEIGHT_BYTES[self.expert_dtype or self.weight_dtype]

    @cached_property
    def _layer_bytes(self) -> float:
        shared = self.layer_parameters + (self.parameters - self.active_parameters) - self.expert_parameters
        return shared * WEIGHT_BYTES[self.weight_dtype] + self._expert_bytes


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
    vocabulary: int,
    tied: bool,
    source: str,
) -> ModelCost:
    """A dense model with grouped-query attention. int8 and int4 KV as executor/quantizer.py stores it: one byte or half a
    byte an element, and per KV head a float32 scale for each token's values and for each channel of a block's keys; int4
    has as many zero points."""
    elements = 2 * kv_heads * head_dim
    formats = {
        "float32": 4.0 * elements,
        "bfloat16": 2.0 * elements,
        "int8": 1.0 * elements + kv_heads * 4.0,
        "int4": 0.5 * elements + kv_heads * 8.0,
    }
    key_grids = {"int8": kv_heads * head_dim * 4.0, "int4": kv_heads * head_dim * 8.0}
    return ModelCost(
        name=name,
        parameters=parameters,
        active_parameters=parameters,
        vocab_size=vocabulary,
        tied_embeddings=tied,
        weight_dtype="bfloat16",
        layers=layers,
        hidden_size=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_context=context,
        kv_format="bfloat16",
        attention=(
            AttentionGroup(
                layers,
                4.0 * heads * head_dim,
                MappingProxyType(formats),
                block_bytes=MappingProxyType(key_grids),
            ),
        ),
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
        vocab_size=config.vocab_size,
        tied_embeddings=False,
        weight_dtype="bfloat16",
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
    vocab_size=129_280,
    tied_embeddings=False,
    weight_dtype="fp8",
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
            "parameters": "input table and output layer included: README_WEIGHTS.md of the DeepSeek-V3 repository",
            "weight_dtype": "checkpoint in fp8 (block scales not counted)",
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
    return ModelCost(
        name=name,
        parameters=parameters,
        active_parameters=active,
        vocab_size=129_280,
        tied_embeddings=False,
        weight_dtype="fp8",
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
        expert_dtype="fp4",
        sources=MappingProxyType(
            {
                "all": source,
                "attention": "schedule and indexer: DeepSeek-V4 report sections 2.3.1 and 2.3.2; bf16 1,024 B and index "
                "256 B a state; fp8: vLLM records of 584 B (448 fp8, 64 bf16 RoPE, scales) and 132 B",
                "weight_dtype": "MoE experts fp4 with a scale byte per 32, the rest fp8, as the checkpoint is published; "
                "expert share from total - active = experts x (1 - 6/E)",
                "vocab_size": "transformers' DeepseekV4Config",
            }
        ),
    )


MODELS: dict[str, ModelCost] = {
    model.name: model
    for model in (
        _grouped_query(
            "smollm2-135m", parameters=134_515_008, layers=30, hidden=576, heads=9, kv_heads=3, head_dim=64, context=8192,
            vocabulary=49_152, tied=True,
            source="HuggingFaceTB/SmolLM2-135M-Instruct config.json; parameters counted with tied embeddings",
        ),
        _grouped_query(
            "llama-3-8b", parameters=8_030_261_248, layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128,
            context=131_072, vocabulary=128_256, tied=False,
            source="The Llama 3 Herd of Models (arXiv 2407.21783) table 3; vocabulary and context of the 3.1 release",
        ),
        _grouped_query(
            "llama-3-70b", parameters=70_553_706_496, layers=80, hidden=8192, heads=64, kv_heads=8, head_dim=128,
            context=131_072, vocabulary=128_256, tied=False,
            source="The Llama 3 Herd of Models (arXiv 2407.21783) table 3; vocabulary and context of the 3.1 release",
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
