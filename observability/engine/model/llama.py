"""The Llama decoder: configuration, weights and forward pass over one flat batch of tokens. Where keys and values are kept and
how attention reads them is the caller's: `forward` hands each layer's q, k and v to a function that it is given.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from observability.errors import ModelError

#: attend(layer, q [tokens, heads, head_dim], k [tokens, kv_heads, head_dim], v) -> [tokens, heads, head_dim]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Change of the rotary frequencies for contexts longer than pre-training's.

    linear: all frequencies / factor. llama3: Llama 3.1's rule, long wavelengths / factor, short ones kept, smooth between
    (transformers' modeling_rope_utils). factors: one divisor a frequency, as GGUF files carry it.
    """

    kind: Literal["linear", "llama3", "factors"]
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a Llama decoder. `max_position` is the longest context in tokens."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "max_position",
        ):
            value = getattr(self, name)
            most = 4096 if name == "num_layers" else 1 << 31
            if not isinstance(value, int) or not 1 <= value <= most:
                raise ModelError(
                    f"Model configuration: {name} is {value!r}; it must be a whole number in 1..{most}.",
                    next_step=_CHECK,
                )
        if self.num_heads % self.num_kv_heads or self.head_dim < 2 or self.head_dim % 2:
            raise ModelError(
                f"Model configuration: {self.num_heads} heads of {self.head_dim} over {self.num_kv_heads} key-value heads do not fit.",
                next_step=_CHECK,
            )
        if not (math.isfinite(self.rope_theta) and self.rope_theta > 0 and 0 < self.rms_norm_eps < 1):
            raise ModelError(
                f"Model configuration: rope_theta {self.rope_theta} or rms_norm_eps {self.rms_norm_eps} is out of range.",
                next_step=_CHECK,
            )

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name (as Hugging Face checkpoints have it) and shape of every weight that the model needs."""
        hidden, inner = self.hidden_size, self.intermediate_size
        heads, kv_heads = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for i in range(self.num_layers):
            layer = f"model.layers.{i}."
            shapes |= {
                layer + "input_layernorm.weight": (hidden,),
                layer + "self_attn.q_proj.weight": (heads, hidden),
                layer + "self_attn.k_proj.weight": (kv_heads, hidden),
                layer + "self_attn.v_proj.weight": (kv_heads, hidden),
                layer + "self_attn.o_proj.weight": (hidden, heads),
                layer + "post_attention_layernorm.weight": (hidden,),
                layer + "mlp.gate_proj.weight": (inner, hidden),
                layer + "mlp.up_proj.weight": (inner, hidden),
                layer + "mlp.down_proj.weight": (hidden, inner),
            }
        shapes["model.norm.weight"] = (hidden,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes


_CHECK = "Compare the model's configuration with the original's."


@dataclass(slots=True)
class _Layer:
    """Weights of one layer; projections that read the same input are one matrix."""

    attention_norm: Tensor  # [hidden]
    qkv: Tensor  # [(heads + 2 x kv_heads) x head_dim, hidden]
    out: Tensor  # [heads x head_dim, hidden]
    mlp_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 x intermediate, hidden]
    down: Tensor  # [intermediate, hidden]


class Llama:
    """A decoder with its weights. `read(name)` gives each tensor of ModelConfig.tensor_shapes() once, in any float type.

    Raises ModelError when a tensor has another shape than the configuration says.
    """

    def __init__(self, config: ModelConfig, read: Callable[[str], Tensor], *, device: str, dtype: torch.dtype) -> None:
        self.config, self.device, self.dtype = config, torch.device(device), dtype
        shapes = config.tensor_shapes()

        def get(name: str) -> Tensor:
            tensor = read(name)
            if tuple(tensor.shape) != shapes[name]:
                raise ModelError(
                    f"Tensor {name} has shape {tuple(tensor.shape)}; the model's configuration asks for {shapes[name]}.",
                    next_step=_CHECK,
                )
            return tensor.to(device=self.device, dtype=dtype)

        self.embedding = get("model.embed_tokens.weight")
        self.layers: list[_Layer] = []
        for i in range(config.num_layers):
            attention, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
            self.layers.append(
                _Layer(
                    attention_norm=get(f"model.layers.{i}.input_layernorm.weight"),
                    qkv=torch.cat([get(f"{attention}{x}_proj.weight") for x in "qkv"]),
                    out=get(attention + "o_proj.weight").t(),
                    mlp_norm=get(f"model.layers.{i}.post_attention_layernorm.weight"),
                    gate_up=torch.cat([get(f"{mlp}{x}_proj.weight") for x in ("gate", "up")]),
                    down=get(mlp + "down_proj.weight").t(),
                )
            )
        self.norm = get("model.norm.weight")
        self.head = self.embedding if config.tie_word_embeddings else get("lm_head.weight")
        self._cos_sin: Tensor = torch.empty(0)

    def prepare(self, max_positions: int) -> None:
        """Computes the rotary table for positions below `max_positions`; forward() may use no later one. It only grows, so
        that executors of different lengths can share the model."""
        if max_positions <= len(self._cos_sin):
            return
        table = rotary_table(_inverse_frequencies(self.config), max_positions)
        self._cos_sin = table.to(self.device, self.dtype)  # [positions, 2, head_dim]

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states [tokens, hidden] after the last layer's norm, for token ids and positions [tokens] (int64).

        Tokens of any sequences may be mixed; only `attend` knows which belong together.
        """
        c = self.config
        heads, kv_heads, width = c.num_heads, c.num_kv_heads, c.head_dim
        count = tokens.shape[0]
        x = self.embedding[tokens]
        cos, sin = self._cos_sin[positions].unsqueeze(1).unbind(2)  # [tokens, 1, head_dim] each
        shape = (c.hidden_size,)
        for i, layer in enumerate(self.layers):
            h = F.rms_norm(x, shape, layer.attention_norm, c.rms_norm_eps)
            qkv = F.linear(h, layer.qkv).view(count, heads + 2 * kv_heads, width)
            qk, v = qkv.split((heads + kv_heads, kv_heads), dim=1)
            # rotation of (x1, x2) by the angle, both halves at once: x * (cos, cos) + (x2, x1) * (-sin, sin)
            swapped = qk.roll(width // 2, dims=-1)
            qk = torch.addcmul(qk * cos, swapped, sin)
            q, k = qk.split((heads, kv_heads), dim=1)
            a = attend(i, q, k, v).reshape(count, heads * width)
            x = torch.addmm(x, a, layer.out)
            h = F.rms_norm(x, shape, layer.mlp_norm, c.rms_norm_eps)
            gate, up = F.linear(h, layer.gate_up).chunk(2, dim=-1)
            x = torch.addmm(x, F.silu(gate).mul_(up), layer.down)
        return F.rms_norm(x, shape, self.norm, c.rms_norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token, float32 [rows, vocab_size], of hidden states [rows, hidden]."""
        return F.linear(hidden, self.head).float()


def rotary_table(frequencies: Tensor, positions: int) -> Tensor:
    """Float32 [positions, 2, width]: (cos, cos) and (-sin, sin) of position x frequency, for frequencies [width / 2] in radians."""
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], dim=1)


def _inverse_frequencies(config: ModelConfig) -> Tensor:
    """Rotary frequencies [head_dim / 2] in radians a position, scaled as the checkpoint says."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "factors":
        return frequencies / torch.tensor(scaling.factors)
    wavelengths = 2 * math.pi / frequencies
    low = scaling.original_max_position / scaling.low_freq_factor
    high = scaling.original_max_position / scaling.high_freq_factor
    smooth = (scaling.original_max_position / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    between = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    scaled = torch.where(wavelengths > low, frequencies / scaling.factor, between)
    return torch.where(wavelengths < high, frequencies, scaled)
