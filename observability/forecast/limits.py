"""The limits whose crossing is worth knowing beforehand, by signal: the objectives, and the KV pool running full."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from observability.objectives import KV_USAGE_CRITICAL, KV_USAGE_WARNING, LATENCY_OBJECTIVES


class Limit(NamedTuple):
    """`value` in the signal's unit; above it the objective called `name` is missed."""

    name: str
    value: float


LIMITS: Mapping[str, tuple[Limit, ...]] = {
    "model:kvscope_kv_usage:ratio": (Limit("kv_usage_warning", KV_USAGE_WARNING), Limit("kv_exhaustion", KV_USAGE_CRITICAL)),
    **{
        f"model:{each.family.name}:p99_5m": (Limit(each.name, each.threshold_seconds),) for each in LATENCY_OBJECTIVES
    },
}  # fmt: skip
