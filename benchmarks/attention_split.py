"""Where the time of one transformer layer goes as prompts grow: the parts of a prefill of the bundled model, each measured alone.

    python benchmarks/attention_split.py                      2,048, 4,096 and 8,192 tokens
    python benchmarks/attention_split.py --tokens 1024 2048 --rounds 9 --json split.json

Projections, rotary embedding and MLP do the same work for each token, so they grow as the prompt does; in attention each token looks at
all before it, so it grows with the square. The arithmetic is the decoder's own (observability/engine/model/llama.py), part by part, and is
checked against its forward pass before anything is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from figures import Parser, Row, keep
from observability.engine.model.llama import Llama
from observability.engine.model.loading import load_model

#: Tokens that the parts without attention take at a time, as chunked prefill does: buffers stay as large, however long the prompt.
_STEP = 2048
Parts = dict[str, Callable[[], object]]


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores, softmax and their product with v: q [tokens, heads, head_dim], k and v with kv_heads -> as q."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return a.squeeze(0).transpose(0, 1)


def layer_parts(model: Llama, tokens: int) -> tuple[Parts, Tensor]:
    """The parts of layer 0 on a prompt of `tokens` tokens, each on the input that it has there, and the layer's output [tokens, hidden]."""
    c, layer = model.config, model.layers[0]
    heads, kv_heads, width = c.num_heads, c.num_kv_heads, c.head_dim
    x = model.embedding[_prompt(model, tokens)]
    cos, sin = model._cos_sin[torch.arange(tokens)].unsqueeze(1).unbind(2)
    h = F.rms_norm(x, (c.hidden_size,), layer.attention_norm, c.rms_norm_eps)
    qkv = F.linear(h, layer.qkv).view(tokens, heads + 2 * kv_heads, width)
    qk, v = qkv.split((heads + kv_heads, kv_heads), dim=1)

    def rotate(at: slice) -> Tensor:
        return torch.addcmul(qk[at] * cos[at], qk[at].roll(width // 2, dims=-1), sin[at])

    whole, steps = slice(None), [slice(i, i + _STEP) for i in range(0, tokens, _STEP)]
    q, k = rotate(whole).split((heads, kv_heads), dim=1)
    a = causal_attention(q, k, v).reshape(tokens, heads * width)
    y = torch.addmm(x, a, layer.out)
    g = F.rms_norm(y, (c.hidden_size,), layer.mlp_norm, c.rms_norm_eps)

    def mlp(at: slice) -> Tensor:
        gate, up = F.linear(g[at], layer.gate_up).chunk(2, dim=-1)
        return torch.addmm(y[at], F.silu(gate).mul_(up), layer.down)

    parts: Parts = {
        "qkv projection": lambda: [F.linear(h[at], layer.qkv) for at in steps],
        "rotary embedding": lambda: [rotate(at) for at in steps],
        "attention": lambda: causal_attention(q, k, v),
        "output projection": lambda: [torch.addmm(x[at], a[at], layer.out) for at in steps],
        "MLP": lambda: [mlp(at) for at in steps],
    }
    return parts, mlp(whole)


def check(model: Llama, tokens: int) -> None:
    """Raises ValueError unless the parts make up the decoder's own first layer."""
    deeper = model.layers
    model.layers = deeper[:1]
    try:
        want = model.forward(_prompt(model, tokens), torch.arange(tokens), lambda _, q, k, v: causal_attention(q, k, v))
    finally:
        model.layers = deeper
    got = F.rms_norm(layer_parts(model, tokens)[1], (model.config.hidden_size,), model.norm, model.config.rms_norm_eps)
    if not torch.allclose(got, want, rtol=1e-3, atol=1e-3):
        raise ValueError("the parts that are measured do not make up the decoder's layer")


def _prompt(model: Llama, tokens: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(0, model.config.vocab_size, tokens))


def measure(model: Llama, lengths: list[int], rounds: int) -> dict[str, list[float]]:
    """Median CPU seconds of each part by length. A round goes through all lengths and parts, so that all share the machine's moods."""
    parts = [layer_parts(model, tokens)[0] for tokens in lengths]
    seconds: dict[str, list[list[float]]] = {name: [[] for _ in lengths] for name in parts[0]}
    for number in range(rounds + 1):
        for i in range(len(lengths)):
            for name, part in parts[i].items():
                began = time.process_time()
                part()
                if number:  # the first round is for warming up
                    seconds[name][i].append(time.process_time() - began)
    return {name: [float(np.median(values)) for values in by_length] for name, by_length in seconds.items()}


def main() -> None:
    parser = Parser(__doc__, quick={"tokens": [1024, 2048], "rounds": 2})
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 4096, 8192], metavar="N")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    lengths = sorted(options.tokens)
    if lengths[0] < 2 or options.rounds < 1:
        parser.error("--tokens must be at least 2, and --rounds at least 1")
    torch.set_num_threads(1)  # CPU time of one thread is the part's own, whatever else runs on the machine
    loaded = load_model(options.model)
    model = loaded.model
    assert isinstance(model, Llama)
    with torch.inference_mode():
        model.prepare(lengths[-1])
        check(model, min(lengths[0], 256))
        medians = measure(model, lengths, options.rounds)
    print(f"One layer of {loaded.name}, float32, CPU time of one thread, median of {options.rounds}")
    print()
    print(f"{'ms at prompt tokens':20}" + "".join(f"{n:>10,}" for n in lengths) + "   growth" + f"{'share':>22}")
    totals = [sum(values[i] for values in medians.values()) for i in range(len(lengths))]
    for name, values in [*medians.items(), ("layer", totals)]:
        growth = "  ".join(f"x{b / a:4.2f}" for a, b in pairwise(values))
        shares = f"{values[0] / totals[0]:6.1%} to {values[-1] / totals[-1]:.1%}"
        print(f"{name:20}" + "".join(f"{1e3 * v:10.2f}" for v in values) + f"   {growth:14}{shares:>20}")
    attention = [values for name, values in medians.items() if "attention" in name]
    rows = [
        Row(
            f"attention's share of a layer at {n:,} tokens", sum(values[i] for values in attention) / totals[i], "ratio"
        )
        for i, n in enumerate(lengths)
    ]
    rows += [Row(f"one layer, {n:,} tokens", 1e3 * total, "ms CPU") for n, total in zip(lengths, totals, strict=True)]
    keep(options, rows, {"median_seconds": medians})


if __name__ == "__main__":
    main()
