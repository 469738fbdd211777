"""Speed of the engine on the default model, beside the limit set by matrix products and beside transformers, in one run.

    python benchmarks/engine.py                      32 requests of 256 + 64 tokens, float32
    python benchmarks/engine.py --kv-dtype int8 --no-transformers --json engine.json

The limit is the time that the model's matrix products alone take, in the shapes that the engine's own steps had: no engine on this
machine with this library can be faster. All three are measured in the same process, `--rounds` times in turn; the best round of each counts.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from figures import Parser, Row, keep
from observability.catalog import COMPONENTS
from observability.engine.clock import MonotonicClock
from observability.engine.engine import Engine
from observability.engine.executor.torch_executor import TorchExecutor
from observability.engine.model.fetch import fetch_model
from observability.engine.model.loading import LoadedModel, load_model
from observability.engine.types import EngineConfig, Request, SamplingParams, StepPlan, StepResult
from observability.telemetry.recorder import Telemetry

#: How many of the requests transformers also serves one at a time, as a server without batching would; it would take minutes for all.
_SINGLE = 4

#: Rows of each step's projections, rows of its logits -> how many steps had them.
Shapes = Counter[tuple[int, int]]


class Counting(TorchExecutor):
    """The executor, noting the shape of every step."""

    shapes: Shapes

    def execute(self, plan: StepPlan, until: float | None = None) -> StepResult:
        decodes = len(plan.decode)
        sampled = decodes + sum(chunk.samples for chunk in plan.prefill)
        self.shapes[sum(chunk.tokens for chunk in plan.prefill) + decodes, sampled] += 1
        return super().execute(plan, until)


def run_engine(
    loaded: LoadedModel, config: EngineConfig, prompts: list[list[int]], output: int
) -> tuple[float, Shapes, dict[str, float]]:
    """(seconds, step shapes, seconds by component) to serve all prompts, given at once."""
    clock = MonotonicClock()
    telemetry = Telemetry(
        loaded.name, executor="torch", virtual=False, device="cpu", kv_dtype=config.kv_dtype, clock=clock.now
    )
    executor = Counting(loaded, config, telemetry, clock=clock)
    executor.shapes = Counter()
    engine = Engine(config, executor, telemetry)
    start = clock.now()
    requests = []
    for i, prompt in enumerate(prompts):
        request = Request(f"r{i}", prompt, SamplingParams(max_tokens=output, ignore_eos=True), arrival=start)
        engine.add(request)
        requests.append(request)
    engine.run_until_idle()
    seconds = clock.now() - start
    assert all(len(r.output) == output for r in requests)
    return seconds, executor.shapes, dict(zip(COMPONENTS, telemetry.seconds, strict=True))


@torch.inference_mode()
def run_products(loaded: LoadedModel, shapes: Shapes) -> tuple[float, float]:
    """(seconds of the matrix products alone in these shapes, their floating-point operations)."""
    model, total, operations = loaded.model, 0.0, 0.0
    for (rows, sampled), steps in shapes.items():
        hidden = torch.randn(rows, loaded.config.hidden_size)
        inner = torch.randn(rows, loaded.config.intermediate_size)
        last = torch.randn(sampled, loaded.config.hidden_size)
        start = time.perf_counter()
        for layer in model.layers:
            F.linear(hidden, layer.qkv)
            torch.mm(hidden, layer.out)
            F.linear(hidden, layer.gate_up)
            torch.mm(inner, layer.down)
        F.linear(last, model.head)
        total += (time.perf_counter() - start) * steps
        weights = sum(w.numel() for layer in model.layers for w in (layer.qkv, layer.out, layer.gate_up, layer.down))
        operations += 2.0 * (rows * weights + sampled * model.head.numel()) * steps
    return total, operations


def transformers_runner(output: int) -> Callable[[list[list[int]]], float]:
    """A function that gives the seconds of one `generate` call for prompts of equal length."""
    from transformers import AutoModelForCausalLM

    path = fetch_model()
    model: Any = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()

    def run(prompts: list[list[int]]) -> float:
        ids = torch.tensor(prompts)
        start = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=output, min_new_tokens=output, do_sample=False
            )
        seconds = time.perf_counter() - start
        assert out.shape[1] == ids.shape[1] + output
        return seconds

    return run


def main() -> None:
    parser = Parser(__doc__, quick={"requests": 8, "prompt": 128, "output": 32, "rounds": 2})
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=256, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=64, help="tokens generated for each")
    parser.add_argument("--kv-dtype", choices=("auto", "int8"), default="auto")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-transformers", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    loaded = load_model("smollm2-135m")
    random = np.random.default_rng(0)
    prompts = random.integers(100, 40_000, (arguments.requests, arguments.prompt)).tolist()
    length = arguments.prompt + arguments.output
    config = EngineConfig(
        max_num_seqs=arguments.requests,
        num_blocks=arguments.requests * (length // 16 + 2),
        max_model_len=length,
        max_queued=arguments.requests,
        kv_dtype=arguments.kv_dtype,
    )
    reference = None if arguments.no_transformers else transformers_runner(arguments.output)
    engines, products, batched, single = [], [], [], []
    for _ in range(arguments.rounds):
        engines.append(run_engine(loaded, config, prompts, arguments.output))
        products.append(run_products(loaded, engines[-1][1]))
        if reference is not None:
            batched.append(reference(prompts))
            single.append(sum(reference([prompt]) for prompt in prompts[:_SINGLE]))
    seconds, shapes, components = min(engines, key=lambda run: run[0])
    product_seconds, operations = min(products)
    tokens = arguments.requests * length
    result: dict[str, Any] = {
        "engine_seconds": seconds,
        "engine_tokens_per_second": tokens / seconds,
        "engine_output_tokens_per_second": arguments.requests * arguments.output / seconds,
        "engine_seconds_by_component": {name: s for name, s in components.items() if s},
        "steps": sum(shapes.values()),
        "product_seconds": product_seconds,
        "product_gflop_per_second": operations / product_seconds / 1e9,
        "share_of_product_limit": product_seconds / seconds,
        "rounds": {
            "engine_seconds": [e[0] for e in engines],
            "product_seconds": [p[0] for p in products],
            "transformers_batched_seconds": batched,
            "transformers_single_seconds": single,
        },
    }
    if reference is not None:
        speeds = {
            "batched": tokens / min(batched),
            "single": min(_SINGLE, arguments.requests) * length / min(single),
        }
        for name, speed in speeds.items():
            result[f"transformers_{name}_tokens_per_second"] = speed
            result[f"times_transformers_{name}"] = tokens / seconds / speed
    print(f"engine        {seconds:8.2f} s  {tokens / seconds:8.0f} tokens/s (prompt and output)")
    print(f"products only {product_seconds:8.2f} s  {result['product_gflop_per_second']:8.0f} GFLOP/s")
    print(f"              the engine reaches {result['share_of_product_limit']:.2f} of that limit")
    if reference is not None:
        for name, what in (("batched", "all in one batch"), ("single", "one request at a time")):
            speed, times = result[f"transformers_{name}_tokens_per_second"], result[f"times_transformers_{name}"]
            print(f"transformers  {speed:19.0f} tokens/s, {what}: the engine is {times:.2f} times as fast")
    for name, spent in result["engine_seconds_by_component"].items():
        print(f"  {name:16s} {spent:8.2f} s")
    rows = [Row("limit set by the model's matrix products / engine", result["share_of_product_limit"], "ratio")]
    if reference is not None:
        rows.append(Row("engine / transformers, all in one batch", result["times_transformers_batched"], "ratio"))
        rows.append(Row("engine / transformers, one at a time", result["times_transformers_single"], "ratio"))
    rows.append(Row("engine, prompt and output", result["engine_tokens_per_second"], "tokens/s"))
    keep(arguments, rows, result)


if __name__ == "__main__":
    main()
