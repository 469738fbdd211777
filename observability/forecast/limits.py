"""The limits whose crossing is worth knowing beforehand, by signal: the objectives, and the KV pool running full or
having no room for one more request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from observability.objectives import (
    KV_ROOM_REQUESTS,
    KV_USAGE_CRITICAL,
    KV_USAGE_WARNING,
    LATENCY_OBJECTIVES,
    held_to,
)


class Limit(NamedTuple):
    """`value` in the signal's unit; above it, or with `below` under it, the objective called `name` is missed."""

    name: str
    value: float
    below: bool = False


LIMITS: Mapping[str, tuple[Limit, ...]] = {
    "model:kvscope_kv_usage:ratio": (Limit("kv_usage_warning", KV_USAGE_WARNING), Limit("kv_exhaustion", KV_USAGE_CRITICAL)),
    "model:kvscope_kv_free_requests:mean_length": (Limit("kv_room", KV_ROOM_REQUESTS, below=True),),
    **{
        f"model:{each.family.name}:p99_5m": (Limit(each.name, each.threshold_seconds),) for each in LATENCY_OBJECTIVES
    },
}  # fmt: skip


def limits_of(signal: str, model: str) -> tuple[Limit, ...]:
    """Those of a signal of `model`: where it has an objective of its own, that one's."""
    own = {x.name: held_to(model, x).threshold_seconds for x in LATENCY_OBJECTIVES}
    return tuple(limit._replace(value=own.get(limit.name, limit.value)) for limit in LIMITS.get(signal, ()))
