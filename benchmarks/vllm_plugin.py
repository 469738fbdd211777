"""What the vLLM plug-in adds to an iteration of vLLM at 32 running requests, and to vLLM's own recording.

    python benchmarks/vllm_plugin.py [--json FILE]

CPU time of the thread, so that a busy machine does not count. Run with the Python of an environment that holds vLLM (`make test-vllm`
makes .venv-vllm) it also times vLLM's own PrometheusStatLogger on the very same objects, in turns, and tells the ratio.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from exporters.vllm.capabilities import families
from exporters.vllm.frontend import Frontend
from exporters.vllm.recorder import Recorder, Settings
from figures import Parser, Row, keep
from observability.telemetry.observed import Source

RUNNING = 32
OUTPUT_TOKENS = 128  # so that a request ends every fourth iteration


def iterations(count: int, stats: Any) -> list[tuple[Any, Any]]:
    """Scheduler and iteration statistics of a busy engine. Intervals of one step differ by microseconds, the worst case."""
    rng = random.Random(1)
    made = []
    for i in range(count):
        iteration, scheduler = stats.IterationStats(), stats.SchedulerStats()
        scheduler.num_running_reqs, scheduler.num_waiting_reqs, scheduler.kv_cache_usage = RUNNING, 4, 0.6
        iteration.num_generation_tokens = RUNNING
        iteration.inter_token_latencies_iter = [0.02 + rng.random() * 1e-3 for _ in range(RUNNING)]
        if i % (OUTPUT_TOKENS // RUNNING) == 0:
            iteration.time_to_first_tokens_iter = [0.2 + rng.random()]
            iteration.finished_requests = [
                stats.FinishedRequestStats(
                    finish_reason=stats.LENGTH,
                    request_id=f"cmpl-{i}",
                    e2e_latency=3.0,
                    num_prompt_tokens=900,
                    num_generation_tokens=128,
                    max_tokens_param=128,
                    queued_time=0.1,
                    prefill_time=0.2,
                    inference_time=2.7,
                    decode_time=2.5,
                    mean_time_per_output_token=0.02,
                    num_cached_tokens=512,
                )
            ]
        made.append((scheduler, iteration))
    return made


class Stand:
    """vLLM's statistics objects by shape, where vLLM is not installed."""

    LENGTH = "length"
    FinishedRequestStats = SimpleNamespace

    @staticmethod
    def SchedulerStats() -> SimpleNamespace:
        cache = SimpleNamespace(preempted_requests=0)
        return SimpleNamespace(
            num_skipped_waiting_reqs=0, prefix_cache_stats=cache, iteration_details=None, kv_cache_eviction_events=[]
        )

    @staticmethod
    def IterationStats() -> SimpleNamespace:
        return SimpleNamespace(
            num_preempted_reqs=0, num_prompt_tokens=900, time_to_first_tokens_iter=[], finished_requests=[]
        )


def theirs() -> tuple[Any, Callable[[Any, Any], None]] | None:
    """vLLM's classes and its own recording; None where vLLM is not installed."""
    try:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine import FinishReason
        from vllm.v1.metrics import loggers, stats
    except ImportError:
        return None
    with tempfile.TemporaryDirectory() as folder:
        config = {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
            "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 128, "max_position_embeddings": 4096,
        }  # fmt: skip
        (Path(folder) / "config.json").write_text(json.dumps(config))
        engine = EngineArgs(model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=4096)
        logger = loggers.PrometheusStatLogger(engine.create_engine_config())
    classes = SimpleNamespace(**vars(stats), LENGTH=FinishReason.LENGTH)
    return classes, lambda scheduler, iteration: logger.record(scheduler, iteration)


def main() -> None:
    options = Parser(__doc__, quick={}).parse_args()
    source = Source("m", "vllm", "cuda", "auto", "0.32.0", families(prefix_cache=True, frontend=True))
    ours = Recorder(source, Settings(block_size=16, capacity_blocks=10_000))
    ours.watch(Frontend(("standard",), ours.received, ours.aborted, ours.fault))
    found = theirs()
    made = iterations(400, Stand if found is None else found[0])
    recordings: dict[str, Callable[[Any, Any], None]] = {"kvscope": ours.record}
    if found is not None:
        recordings["vllm"] = found[1]
    spent: dict[str, list[float]] = {name: [] for name in recordings}
    for _ in range(30):  # rounds of 400 iterations, in turns
        for name, record in recordings.items():
            start = time.thread_time_ns()
            for scheduler, iteration in made:
                record(scheduler, iteration)
            spent[name].append((time.thread_time_ns() - start) / len(made) / 1e3)
    result: dict[str, float] = {f"{name}_us_per_iteration": round(statistics.median(v), 2) for name, v in spent.items()}
    if found is not None:
        result["kvscope_to_vllm"] = round(statistics.median(spent["kvscope"]) / statistics.median(spent["vllm"]), 2)
    sys.stdout.write(f"{RUNNING} running requests\n" + "".join(f"{k:28} {v}\n" for k, v in result.items()))
    rows = [Row(f"one iteration of {RUNNING} requests, CPU", result["kvscope_us_per_iteration"], "us")]
    if found is not None:
        rows.insert(0, Row("plug-in / vLLM's own recording", result["kvscope_to_vllm"], "ratio"))
    keep(options, rows, result | {"running_requests": RUNNING})


if __name__ == "__main__":
    main()
