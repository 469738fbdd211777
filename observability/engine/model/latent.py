"""The decoder with multi-head latent attention (MLA), as in DeepSeek-V2 (arXiv 2405.04434 section 2.1) and V3 (arXiv 2412.19437),
with a dense MLP. All that is kept of a token in a layer is its *state*: one latent vector, normalized, and one rotary key for all heads.

As with Llama, `forward` hands each layer's queries and states to a function that it is given. Whoever keeps the states computes
attention with one of two forms, equal but for rounding: `expanded` for many queries of one sequence, `absorbed` for one of each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from observability.engine.model.latent_config import LatentConfig
from observability.engine.model.llama import rotary_table
from observability.errors import ModelError

#: attend(layer, q [tokens, heads, nope + rope], latent [tokens, kv_lora_rank], rope key [tokens, rope])
#: -> [tokens, heads, v_head_dim]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(slots=True)
class _Layer:
    """Weights of one layer; projections that read the same input are one matrix."""

    attention_norm: Tensor  # [hidden]
    down: Tensor  # [q_lora_rank (or all query heads) + kv_lora_rank + rope, hidden]
    q_norm: Tensor | None  # [q_lora_rank]; None where queries are projected in one step
    q_up: Tensor | None  # [heads x (nope + rope), q_lora_rank]
    kv_norm: Tensor  # [kv_lora_rank]
    kv_up: Tensor  # [heads, nope + v_head_dim, kv_lora_rank]
    out: Tensor  # [heads x v_head_dim, hidden]
    mlp_norm: Tensor  # [hidden]
    gate_up: Tensor  # [2 x intermediate, hidden]
    mlp_down: Tensor  # [intermediate, hidden]


class LatentDecoder:
    """A decoder with its weights. `read(name)` gives each tensor of LatentConfig.tensor_shapes() once, in any float type.

    The rotation pairs the two halves of a rotary key, as transformers does with rope_interleave off. Raises ModelError when a
    tensor has another shape than the configuration says.
    """

    def __init__(self, config: LatentConfig, read: Callable[[str], Tensor], *, device: str, dtype: torch.dtype) -> None:
        self.config, self.device, self.dtype = config, torch.device(device), dtype
        shapes = config.tensor_shapes()

        def get(name: str) -> Tensor:
            tensor = read(name)
            if tuple(tensor.shape) != shapes[name]:
                raise ModelError(
                    f"Tensor {name} has shape {tuple(tensor.shape)}; the model's configuration asks for {shapes[name]}.",
                    next_step="Compare the model's configuration with the original's.",
                )
            return tensor.to(device=self.device, dtype=dtype)

        self.embedding = get("model.embed_tokens.weight")
        self.layers: list[_Layer] = []
        for i in range(config.num_layers):
            attention, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
            in_two = config.q_lora_rank is not None
            down = get(attention + ("q_a_proj.weight" if in_two else "q_proj.weight"))
            self.layers.append(
                _Layer(
                    attention_norm=get(f"model.layers.{i}.input_layernorm.weight"),
                    down=torch.cat([down, get(attention + "kv_a_proj_with_mqa.weight")]),
                    q_norm=get(attention + "q_a_layernorm.weight") if in_two else None,
                    q_up=get(attention + "q_b_proj.weight") if in_two else None,
                    kv_norm=get(attention + "kv_a_layernorm.weight"),
                    kv_up=get(attention + "kv_b_proj.weight").unflatten(0, (config.num_heads, -1)),
                    out=get(attention + "o_proj.weight").t(),
                    mlp_norm=get(f"model.layers.{i}.post_attention_layernorm.weight"),
                    gate_up=torch.cat([get(f"{mlp}{x}_proj.weight") for x in ("gate", "up")]),
                    mlp_down=get(mlp + "down_proj.weight").t(),
                )
            )
        self.norm = get("model.norm.weight")
        self.head = get("lm_head.weight")
        self._scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
        self._cos_sin: Tensor = torch.empty(0)

    def prepare(self, max_positions: int) -> None:
        """Computes the rotary table for positions below `max_positions`; forward() may use no later one. It only grows, so
        that executors of different lengths can share the model."""
        if max_positions <= len(self._cos_sin):
            return
        width = self.config.qk_rope_head_dim
        frequencies = self.config.rope_theta ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)
        table = rotary_table(frequencies, max_positions)
        self._cos_sin = table.to(self.device, self.dtype)  # [positions, 2, rope]

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states [tokens, hidden] after the last layer's norm, for token ids and positions [tokens] (int64).

        Tokens of any sequences may be mixed; only `attend` knows which belong together.
        """
        c = self.config
        heads, rank, nope, rope = c.num_heads, c.kv_lora_rank, c.qk_nope_head_dim, c.qk_rope_head_dim
        x = self.embedding[tokens]
        cos, sin = self._cos_sin[positions].unsqueeze(1).unbind(2)  # [tokens, 1, rope] each

        def rotate(part: Tensor) -> Tensor:
            """part [tokens, heads or 1, rope], turned by its position's angles: x * (cos, cos) + (x2, x1) * (-sin, sin)."""
            return torch.addcmul(part * cos, part.roll(rope // 2, dims=-1), sin)

        for i, layer in enumerate(self.layers):
            h = F.rms_norm(x, (c.hidden_size,), layer.attention_norm, c.rms_norm_eps)
            h = F.linear(h, layer.down)
            q, latent, key = h.split((h.shape[1] - c.state_width, rank, rope), dim=1)
            if layer.q_norm is not None and layer.q_up is not None:
                q = F.linear(F.rms_norm(q, (q.shape[1],), layer.q_norm, c.rms_norm_eps), layer.q_up)
            q_nope, q_rope = q.unflatten(1, (heads, nope + rope)).split((nope, rope), dim=2)
            q = torch.cat([q_nope, rotate(q_rope)], dim=2)
            latent = F.rms_norm(latent, (rank,), layer.kv_norm, c.rms_norm_eps)
            a = attend(i, q, latent, rotate(key.unsqueeze(1)).squeeze(1))
            x = torch.addmm(x, a.flatten(1), layer.out)
            h = F.rms_norm(x, (c.hidden_size,), layer.mlp_norm, c.rms_norm_eps)
            gate, up = F.linear(h, layer.gate_up).chunk(2, dim=-1)
            x = torch.addmm(x, F.silu(gate).mul_(up), layer.mlp_down)
        return F.rms_norm(x, (c.hidden_size,), self.norm, c.rms_norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token, float32 [rows, vocab_size], of hidden states [rows, hidden]."""
        return F.linear(hidden, self.head).float()

    # -- attention of one layer over states ------------------------------------------------------------------------------

    def expanded(self, layer: int, q: Tensor, states: Tensor, mask: Tensor) -> Tensor:
        """Attention with each state projected up to keys and values of all heads: the work on a state is shared by the queries.

        q [tokens, heads, nope + rope], states [context, kv_lora_rank + rope], mask [tokens, context] true where a query sees a
        state. Returns [tokens, heads, v_head_dim].
        """
        c = self.config
        latent, key = states.split((c.kv_lora_rank, c.qk_rope_head_dim), dim=-1)
        up = F.linear(latent, self.layers[layer].kv_up.flatten(0, 1)).unflatten(1, (c.num_heads, -1)).transpose(0, 1)
        k_nope, v = up.split((c.qk_nope_head_dim, c.v_head_dim), dim=-1)  # [heads, context, ...]
        k = torch.cat([k_nope, key.expand(c.num_heads, -1, -1)], dim=-1)
        out = F.scaled_dot_product_attention(q.transpose(0, 1), k, v, attn_mask=mask, scale=self._scale)
        return out.transpose(0, 1)

    def absorbed(self, layer: int, q: Tensor, states: Tensor, mask: Tensor | None) -> Tensor:
        """Attention in latent space: the key projection is applied to the query, the value projection to the mean of latents,
        q . (W_uk c) = (W_uk^T q) . c and sum_t p_t (W_uv c_t) = W_uv (sum_t p_t c_t), so that states are read once and as they lie.

        q [sequences, heads, nope + rope], states [sequences, context, kv_lora_rank + rope], mask [sequences, context] true where
        there is a state (None: everywhere). Returns [sequences, heads, v_head_dim].
        """
        c = self.config
        k_up, v_up = self.layers[layer].kv_up.split((c.qk_nope_head_dim, c.v_head_dim), dim=1)
        q_nope, q_rope = q.split((c.qk_nope_head_dim, c.qk_rope_head_dim), dim=-1)
        q = torch.cat([torch.einsum("shn,hnr->shr", q_nope, k_up), q_rope], dim=-1)
        # all heads read the same states: to SDPA they are the rows of one head
        mean = F.scaled_dot_product_attention(
            q,
            states,
            states[..., : c.kv_lora_rank],
            attn_mask=None if mask is None else mask.unsqueeze(1),
            scale=self._scale,
        )
        return torch.einsum("shr,hvr->shv", mean, v_up)


def random_weights(config: LatentConfig, seed: int = 21) -> dict[str, Tensor]:
    """Weights by name, the same for a seed every time; scaled so that greedy choices are far from ties."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in config.tensor_shapes().items():
        noise = torch.randn(shape, generator=generator)
        if len(shape) == 1:
            weights[name] = 1.0 + 0.1 * noise
        else:
            weights[name] = noise * (1.0 if "embed" in name else 2.0 * shape[-1] ** -0.5)
    return weights
