"""What watching quantized KV costs the engine: the same load with and without it, step by step in turn, in one run.

    python benchmarks/quantization.py                     SmolLM2-135M, float32, int8 blocks, 8 requests of 256 + 96 tokens
    python benchmarks/quantization.py --scheme compressed-int4 --json quantization.json

Three engines serve the same requests, each step of one after the same step of the others: without measurements, with the defaults, and
with every decode step compared. Figures are CPU seconds of one thread, which other programs disturb less than the clock. What measuring
blocks takes is timed inside the engine with the defaults (keeping the chosen blocks, their errors, the records). A comparison costs what
it adds to a decode step (median over pairs of steps) times the default share of steps: an upper bound, since it counts every step as one
of the compared sequence. The last two lines compare whole steps, default over off: their median pair, and their sums, which are as noisy as the machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
import torch

from figures import Parser, Row, keep
from observability.engine.clock import MonotonicClock
from observability.engine.engine import Engine
from observability.engine.executor.compressed_kv import CompressedKV
from observability.engine.executor.kv_cache import Int8KV
from observability.engine.executor.quantizer import Fill, Keep
from observability.engine.executor.torch_executor import TorchExecutor
from observability.engine.model.fetch import FETCHABLE, fetch_model
from observability.engine.model.loading import LoadedModel, load_model
from observability.engine.types import EngineConfig, Request, SamplingParams
from observability.telemetry.recorder import Telemetry

DEFAULTS = EngineConfig()
#: Arm -> (share of blocks measured, share of steps compared).
ARMS = {
    "off": (0.0, 0.0),
    "default": (DEFAULTS.quant_sample_rate, DEFAULTS.quant_compare_rate),
    "every step": (0.0, 1.0),
}


@dataclass
class Arm:
    """One engine and what its steps took."""

    engine: Engine
    telemetry: Telemetry
    filled: int = 0  # blocks so far
    measuring: float = 0.0  # seconds
    seconds: list[float] = field(default_factory=list)
    fills: list[int] = field(default_factory=list)  # blocks filled in each step
    compared: list[float] = field(default_factory=list)  # comparisons so far, after each step

    def step(self) -> None:
        before, start = self.filled, time.thread_time()
        self.engine.step()
        self.seconds.append(time.thread_time() - start)
        self.fills.append(self.filled - before)
        tokens = [q.compared_tokens for q in self._quantization()]
        self.compared.append(sum(tokens))

    def _quantization(self) -> list[Any]:
        running = [r.trace.quantization for r in self.engine.scheduler.running() if r.trace is not None]
        ended = [r.quantization for r in self.telemetry.finished]
        return [q for q in (*running, *ended) if q is not None]


def timed(arm: Arm, call: Callable[..., None]) -> Callable[..., None]:
    """`call`, whose time counts as measuring."""

    def measured(*args: Any) -> None:
        start = time.thread_time()
        call(*args)
        arm.measuring += time.thread_time() - start

    return measured


def make_arm(
    loaded: LoadedModel, scheme: str, rates: tuple[float, float], prompts: list[list[int]], output: int
) -> Arm:
    longest = max(map(len, prompts)) + output
    blocks = len(prompts) * -(-longest // DEFAULTS.block_size) + 8
    values: dict[str, Any] = {
        "num_blocks": blocks, "max_model_len": longest, "quant_sample_rate": rates[0], "quant_compare_rate": rates[1],
        "prefix_caching": False,
    }  # fmt: skip
    if scheme == "int8":
        values["kv_dtype"] = "int8"
    else:
        values |= {
            "num_compressed_blocks": blocks, "compressed_scheme": scheme.removeprefix("compressed-"), "compressed_from": 128,
            "contiguous_below": 0, "recent_window": 64,
        }  # fmt: skip
    config = EngineConfig(**values)
    clock = MonotonicClock()
    telemetry = Telemetry(
        loaded.name, executor="torch", virtual=False, device="cpu", kv_dtype=config.kv_dtype, clock=clock.now
    )
    executor = TorchExecutor(loaded, config, telemetry, clock=clock)
    arm = Arm(Engine(config, executor, telemetry), telemetry)
    kv = executor.kv
    assert isinstance(kv, Int8KV | CompressedKV)
    quantized = kv.compressed if isinstance(kv, CompressedKV) else kv.blocks
    original = quantized.fill

    def counted(numbers: Any, keep: Keep | None = None) -> Fill:
        arm.filled += len(numbers)
        return original(numbers, keep)

    quantized.fill = counted  # type: ignore[method-assign]
    for name in ("note", "report"):
        setattr(quantized, name, timed(arm, getattr(quantized, name)))
    for i, prompt in enumerate(prompts):
        arm.engine.add(
            Request(f"r{i}", prompt, SamplingParams(max_tokens=output, ignore_eos=True), arrival=clock.now())
        )
    return arm


def measure(loaded: LoadedModel, scheme: str, prompts: list[list[int]], output: int) -> dict[str, Any]:
    arms = {name: make_arm(loaded, scheme, rates, prompts, output) for name, rates in ARMS.items()}
    order = list(arms)
    while all(arm.engine.num_running or arm.engine.num_waiting for arm in arms.values()):
        order = order[1:] + order[:1]
        for name in order:
            arms[name].step()
    if any(arm.fills != arms["off"].fills for arm in arms.values()):
        raise SystemExit("the engines did not make the same steps")
    seconds = {name: np.array(arm.seconds) for name, arm in arms.items()}
    off, total = seconds["off"], float(seconds["off"].sum())
    filling = np.array(arms["off"].fills) > 0
    compared = np.diff([0.0, *arms["every step"].compared]) > 0
    default = arms["default"]
    blocks = default.measuring / float(seconds["default"].sum())
    added = median(((seconds["every step"] - off) / off)[compared].tolist())
    comparisons = added * DEFAULTS.quant_compare_rate
    return {
        "steps": len(off),
        "steps_that_fill_blocks": int(filling.sum()),
        "cpu_seconds_a_step_off": median(off.tolist()),
        "blocks_cost_ratio": blocks,
        "compared_step_adds_ratio": added,
        "comparisons_cost_ratio": comparisons,
        "cost_ratio": blocks + comparisons,
        "median_step_default_over_off_ratio": median((seconds["default"] / off).tolist()) - 1,
        "all_steps_default_over_off_ratio": float(seconds["default"].sum()) / total - 1,
        "comparisons_at_default": default.compared[-1],
    }


def main() -> None:
    parser = Parser(__doc__, quick={"requests": 4, "prompt": 128, "output": 32})
    parser.add_argument(
        "--model", default="smollm2-135m", help="as `kvscope serve` takes it; the default is fetched if it must"
    )
    parser.add_argument("--scheme", choices=("int8", "compressed-int8", "compressed-int4"), default="int8")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--output", type=int, default=96, help="tokens")
    arguments = parser.parse_args()
    if (known := FETCHABLE.get(arguments.model)) is not None:
        fetch_model(known)
    torch.set_num_threads(1)
    loaded = load_model(arguments.model)
    random = np.random.default_rng(0)
    prompts = [
        random.integers(10, loaded.config.vocab_size - 10, arguments.prompt).tolist() for _ in range(arguments.requests)
    ]
    figures = measure(loaded, arguments.scheme, prompts, arguments.output)
    print(
        f"{arguments.model}, {arguments.scheme}, {arguments.requests} requests of {arguments.prompt} + {arguments.output} tokens"
    )
    print(
        f"  {figures['steps']} steps, {figures['steps_that_fill_blocks']} of them fill blocks; {figures['cpu_seconds_a_step_off'] * 1e3:.1f} ms CPU a step"
    )
    print(
        f"  measuring {DEFAULTS.quant_sample_rate:.0%} of blocks        {figures['blocks_cost_ratio']:+.2%} of the time of all steps"
    )
    print(f"  a compared step takes           {figures['compared_step_adds_ratio']:+.1%}")
    print(f"  comparing {DEFAULTS.quant_compare_rate:.0%} of steps           {figures['comparisons_cost_ratio']:+.2%}")
    print(f"  both                            {figures['cost_ratio']:+.2%}")
    print(f"  a median step, default over off {figures['median_step_default_over_off_ratio']:+.2%}")
    print(f"  all steps, default over off     {figures['all_steps_default_over_off_ratio']:+.2%}, with {figures['comparisons_at_default']:.0f} comparisons")  # fmt: skip
    rows = [
        Row("measuring blocks / steps", figures["blocks_cost_ratio"], "ratio"),
        Row("comparing decode steps / steps", figures["comparisons_cost_ratio"], "ratio"),
        Row("both / steps", figures["cost_ratio"], "ratio"),
    ]
    keep(arguments, rows, figures)


if __name__ == "__main__":
    main()
