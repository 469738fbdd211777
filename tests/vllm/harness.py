"""Statistics objects of the shape that vLLM 0.32 hands to a stat logger, and a plug-in's recorder to hand them to."""

from __future__ import annotations

from types import SimpleNamespace as Stats
from typing import Any

from exporters.vllm.capabilities import families
from exporters.vllm.recorder import Recorder, Settings
from observability.telemetry.observed import Observed, Source


def source(**changes: Any) -> Source:
    return Source(
        model="smol", executor="vllm", device="cpu", kv_dtype="auto", version="0.32.0",
        families=families(prefix_cache=True, frontend=True), states=("frontend", "queued", "prefill", "decode", "preempted"),
    )._replace(**changes)  # fmt: skip


def recorder(**changes: Any) -> Recorder:
    return Recorder(source(**changes), Settings(block_size=16, capacity_blocks=101))


def scheduler(**changes: Any) -> Stats:
    cache = Stats(requests=0, queries=0, hits=0, preempted_requests=0, preempted_queries=0, preempted_hits=0)
    return Stats(**{
        "num_running_reqs": 2, "num_waiting_reqs": 1, "num_skipped_waiting_reqs": 0, "kv_cache_usage": 0.25, "prefix_cache_stats": cache,
        "iteration_details": None, "kv_cache_eviction_events": [], **changes,
    })  # fmt: skip


def finished(**changes: Any) -> Stats:
    return Stats(**{
        "finish_reason": "length", "request_id": "cmpl-1", "e2e_latency": 1.0, "num_prompt_tokens": 100, "num_preemptions": 0,
        "num_generation_tokens": 9, "max_tokens_param": 9, "queued_time": 0.1, "prefill_time": 0.3, "inference_time": 0.8,
        "decode_time": 0.5, "mean_time_per_output_token": 0.0625, "is_corrupted": False, "num_cached_tokens": 64, **changes,
    })  # fmt: skip


def iteration(**changes: Any) -> Stats:
    return Stats(**{
        "iteration_timestamp": 1e9, "num_generation_tokens": 0, "num_prompt_tokens": 0, "num_preempted_reqs": 0,
        "finished_requests": [], "time_to_first_tokens_iter": [], "inter_token_latencies_iter": [], **changes,
    })  # fmt: skip


def values(observed: Observed) -> dict[tuple[Any, ...], float]:
    """(sample name, label values...) -> value of every series that exists."""
    return {
        (family.name + suffix, *labels): value
        for family, rows in observed.snapshot()
        for suffix, labels, value, _ in rows
    }


def total(found: dict[tuple[Any, ...], float], name: str, *having: str) -> float:
    """Sum of the series of `name` that have all label values `having`."""
    return sum(value for key, value in found.items() if key[0] == name and set(having) <= set(key))
