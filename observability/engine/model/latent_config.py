"""Shape of a decoder with latent attention, and the `tiny-mla` preset. Free of torch, so that cost records are made of the same
numbers that the model runs on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from observability.errors import ModelError

LayerType = Literal["full_attention", "sliding_attention"]


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Shape of a decoder with multi-head latent attention; names as in DeepSeek's config.json.

    `q_lora_rank` None: queries are projected in one step. `layer_types` has one entry a layer: full_attention sees every token,
    sliding_attention the latest `sliding_window`, its own included; one at least is full. `max_position` is the longest context in tokens. Raises
    ModelError when sizes do not fit each other.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    layer_types: tuple[LayerType, ...]
    sliding_window: int
    max_position: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_heads", "kv_lora_rank", "qk_nope_head_dim",
                 "qk_rope_head_dim", "v_head_dim", "num_layers", "max_position")  # fmt: skip
        for name in sizes:
            if getattr(self, name) < 1:
                raise ModelError(
                    f"Model configuration: {name} is {getattr(self, name)}; it must be at least 1.", next_step=_CHECK
                )
        if self.q_lora_rank is not None and self.q_lora_rank < 1:
            raise ModelError(f"Model configuration: q_lora_rank is {self.q_lora_rank}.", next_step=_CHECK)
        if self.qk_rope_head_dim % 2:
            raise ModelError(
                f"Model configuration: qk_rope_head_dim is {self.qk_rope_head_dim}; rotation needs pairs.",
                next_step=_CHECK,
            )
        if not self.full_layers:
            raise ModelError("Model configuration: no layer has full attention.", next_step=_CHECK)
        if self.window_layers and self.sliding_window < 1:
            raise ModelError(
                f"Model configuration: {self.window_layers} layers slide over a window of {self.sliding_window} tokens.",
                next_step=_CHECK,
            )

    @property
    def num_layers(self) -> int:
        return len(self.layer_types)

    @property
    def window_layers(self) -> int:
        return self.layer_types.count("sliding_attention")

    @property
    def full_layers(self) -> int:
        return self.num_layers - self.window_layers

    @property
    def state_width(self) -> int:
        """Numbers kept of one token in one layer: its latent vector and the rotary key that all heads share."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def supports_prefix_caching(self) -> bool:
        """Whether a prefix can be continued from its blocks alone. With sliding layers it cannot: it would take their windows as
        they were where the prefix ended, and windows are not kept in blocks."""
        return self.window_layers == 0

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name (as in DeepSeek-V3 checkpoints) and shape of every weight that the model needs."""
        hidden, inner, heads = self.hidden_size, self.intermediate_size, self.num_heads
        queries = heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for i in range(self.num_layers):
            layer, attention = f"model.layers.{i}.", f"model.layers.{i}.self_attn."
            shapes[layer + "input_layernorm.weight"] = (hidden,)
            if self.q_lora_rank is None:
                shapes[attention + "q_proj.weight"] = (queries, hidden)
            else:
                shapes |= {
                    attention + "q_a_proj.weight": (self.q_lora_rank, hidden),
                    attention + "q_a_layernorm.weight": (self.q_lora_rank,),
                    attention + "q_b_proj.weight": (queries, self.q_lora_rank),
                }
            shapes |= {
                attention + "kv_a_proj_with_mqa.weight": (self.state_width, hidden),
                attention + "kv_a_layernorm.weight": (self.kv_lora_rank,),
                attention + "kv_b_proj.weight": (heads * (self.qk_nope_head_dim + self.v_head_dim), self.kv_lora_rank),
                attention + "o_proj.weight": (hidden, heads * self.v_head_dim),
                layer + "post_attention_layernorm.weight": (hidden,),
                layer + "mlp.gate_proj.weight": (inner, hidden),
                layer + "mlp.up_proj.weight": (inner, hidden),
                layer + "mlp.down_proj.weight": (hidden, inner),
            }
        return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (self.vocab_size, hidden)}


_CHECK = "Compare the model's configuration with the original's."

#: Random weights, a token a byte; every second layer slides, so that a sequence's KV has a fixed part and a slope.
TINY_MLA = LatentConfig(
    vocab_size=259, hidden_size=64, intermediate_size=128, num_heads=4,
    q_lora_rank=48, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
    layer_types=("full_attention", "sliding_attention") * 2, sliding_window=32, max_position=8192,
)  # fmt: skip
