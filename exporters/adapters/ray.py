"""Ray Serve LLM: vLLM's families through Ray's metrics agent, under `ray_vllm_` with the colon replaced."""

from __future__ import annotations

from dataclasses import replace

from exporters.adapters.vllm import ADAPTER as VLLM

ADAPTER = replace(
    VLLM,
    engine="ray",
    title="Ray Serve LLM",
    prefixes=("ray_vllm_", "ray_vllm:"),
    port=8080,
    where="",
    ranks=("engine", "WorkerId", "ReplicaId"),
    bare_counters=True,
    version_page=None,
    flags=(),
    notes=(
        "Ray exports a counter with `_total`, as a gauge of the raw name, or both; of one target the form with `_total` counts.",
        "A counter has no series before its first increment: until the first preemption there is no preemption rate, and until the first prefix hit no hit rate.",
        "Replicas and workers of one node share its metrics agent; they are told apart by ReplicaId and WorkerId and added up.",
    ),
)
