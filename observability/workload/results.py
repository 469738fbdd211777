"""What a replay found, as data for people and for --json: outcomes, latency quantiles, phases, cache hits, KV use.

An unknown value is None (null in JSON), never 0. Quantiles are exact: the smallest measured value that at least that share
of the samples does not exceed, over all samples and not over a histogram.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any, Literal

import numpy as np

from observability import catalog
from observability.telemetry.recorder import RequestRecord

SCHEMA_VERSION = 1
SERVED = ("stop", "length")
QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p99.9": 0.999}

Summary = dict[str, float]


@dataclass(frozen=True, slots=True)
class Phases:
    """Mean make-up of the latency of some served requests, in seconds. Each of the three views sums to the mean latency."""

    requests: int
    mean_latency_seconds: float
    by_state: dict[str, float]
    by_component: dict[str, float]
    by_state_and_component: dict[str, dict[str, float]]


@dataclass(frozen=True, slots=True)
class KVUse:
    """How full KV memory was, from the first arrival to the last end. Active blocks are of every step; fragmentation is of
    samples of the exact pool, about one a second in a busy engine. What has no meaning without a capacity (unbounded pool) or without
    compressed blocks is None."""

    capacity_blocks: int | None  # exact ones
    block_size_tokens: int
    bytes_per_block: int
    active_blocks: Summary  # mean, max
    usage_ratio: Summary | None  # bytes of active blocks / bytes of all, exact and compressed
    internal_fragmentation_ratio: Summary | None  # 1 - tokens / (active blocks x block size), while any is active
    external_fragmentation_ratio: Summary | None  # 1 - largest free run / allocatable
    compressed_capacity_blocks: int | None = None
    bytes_per_compressed_block: int | None = None
    active_compressed_blocks: Summary | None = None

    @property
    def capacity_tokens(self) -> int | None:
        """Tokens that all blocks have room for, exact and compressed."""
        if self.capacity_blocks is None:
            return None
        return (self.capacity_blocks + (self.compressed_capacity_blocks or 0)) * self.block_size_tokens

    @property
    def capacity_bytes(self) -> int | None:
        """Of all blocks, exact and compressed."""
        if self.capacity_blocks is None:
            return None
        compressed = (self.compressed_capacity_blocks or 0) * (self.bytes_per_compressed_block or 0)
        return self.capacity_blocks * self.bytes_per_block + compressed


@dataclass(frozen=True, slots=True)
class KV:
    """Prefix cache and pool. Token counts by length bucket have queried_tokens, hittable_tokens and hit_tokens."""

    queried_tokens: int | None
    hittable_tokens: int | None
    hit_tokens: int | None
    hit_rate: float | None  # hit / queried
    hittable_hit_rate: float | None  # hit / hittable
    by_length_bucket: dict[str, dict[str, int | None]]
    recomputed_tokens: int | None = None
    evicted_blocks: int | None = None
    use: KVUse | None = None


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """One replay. `clock` "virtual" marks figures of simulated time: nothing was run."""

    clock: Literal["virtual", "real"]
    settings: dict[str, Any]
    requests: int  # sent
    outcomes: dict[str, int]  # by catalog.OUTCOMES, and `lost`: sent, and no end was seen
    reasons: dict[str, int]  # why requests were refused, failed or lost, most frequent first
    duration_seconds: float  # from the first arrival to the last end, on the replay's clock
    wall_seconds: float
    prompt_tokens: int | None  # of served requests
    generated_tokens: int | None
    latency: dict[str, Summary | None]
    throughput: dict[str, float | None]
    phases: dict[str, Phases] | None
    kv: KV
    preemptions: int | None
    answers_cut_short: int | None = None  # by max_model_len
    notes: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(
        default_factory=lambda: {
            "kvscope": version("kvscope"), "python": platform.python_version(), "numpy": np.__version__,
        }
    )  # fmt: skip
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> str:
        """The result as one indented JSON object; never NaN or Infinity."""
        return json.dumps(asdict(self), indent=2, allow_nan=False)


def summarize(
    values: Sequence[float] | np.ndarray, weights: Sequence[int] | np.ndarray | None = None
) -> Summary | None:
    """count, mean, p50, p90, p95, p99, p99.9, max of `values`, each counted `weights` times; None of none."""
    array = np.asarray(values, dtype=np.float64)
    if array.size == 0:
        return None
    counts = np.ones(array.size) if weights is None else np.asarray(weights, dtype=np.float64)
    marks = np.quantile(array, list(QUANTILES.values()), weights=counts, method="inverted_cdf")
    return {
        "count": int(counts.sum()),
        "mean": float(np.average(array, weights=counts)),
        **dict(zip(QUANTILES, marks.tolist(), strict=True)),
        "max": float(array.max()),
    }


def phases_of(records: Sequence[RequestRecord]) -> dict[str, Phases] | None:
    """Make-up of all served requests and of the slowest 1 % of them (at least one); None if none was served."""
    served = sorted((r for r in records if r.outcome in SERVED), key=lambda r: r.finished - r.arrival)
    if not served:
        return None
    slowest = served[-math.ceil(len(served) / 100) :]
    return {"all": _mean_phases(served), "slowest_1_percent": _mean_phases(slowest)}


def _mean_phases(records: Sequence[RequestRecord]) -> Phases:
    mean = np.mean([r.matrix for r in records], axis=0)  # [STATES, COMPONENTS]
    return Phases(
        requests=len(records),
        mean_latency_seconds=math.fsum(r.finished - r.arrival for r in records) / len(records),
        by_state=dict(zip(catalog.STATES, mean.sum(axis=1).tolist(), strict=True)),
        by_component=dict(zip(catalog.COMPONENTS, mean.sum(axis=0).tolist(), strict=True)),
        by_state_and_component={
            state: dict(zip(catalog.COMPONENTS, row, strict=True))
            for state, row in zip(catalog.STATES, mean.tolist(), strict=True)
        },
    )


def notes_on(
    requests: int, refused: int, cut_short: int, max_model_len: int, phases: Mapping[str, Phases] | None
) -> list[str]:
    """What to mind of a replay's figures: requests that are not in them, answers that are shorter than asked for, overload."""
    notes = []
    if refused:
        notes.append(f"{refused:,} of {requests:,} requests were refused; they are in no latency and no hit rate.")
    if cut_short:
        notes.append(f"{cut_short:,} answers were cut short by max_model_len = {max_model_len:,}.")
    if phases is not None and (waited := phases["all"].by_state["queued"] / phases["all"].mean_latency_seconds) > 0.5:
        notes.append(f"Overloaded: requests spent {waited:.0%} of their time queued. Add GPUs, or slow the load.")
    return notes


def throughput(
    served: int, prompt_tokens: int | None, generated_tokens: int | None, seconds: float
) -> dict[str, float | None]:
    """Served requests and their tokens by second of the replay's clock; None where tokens or time are unknown."""

    def rate(amount: int | None) -> float | None:
        return None if amount is None or seconds <= 0 else amount / seconds

    return {
        "requests_per_second": rate(served),
        "prompt_tokens_per_second": rate(prompt_tokens),
        "generated_tokens_per_second": rate(generated_tokens),
    }


def kv_from_buckets(
    queried: Mapping[str, int | None], hittable: Mapping[str, int | None], hit: Mapping[str, int | None]
) -> KV:
    """KV with totals and rates of the given token counts by length bucket. A total is None if a part of it is."""

    def total(parts: Mapping[str, int | None]) -> int | None:
        known = [n for n in parts.values() if n is not None]
        return sum(known) if len(known) == len(parts) else None

    def ratio(part: int | None, whole: int | None) -> float | None:
        return None if part is None or not whole else part / whole

    sums = total(queried), total(hittable), total(hit)
    return KV(
        queried_tokens=sums[0],
        hittable_tokens=sums[1],
        hit_tokens=sums[2],
        hit_rate=ratio(sums[2], sums[0]),
        hittable_hit_rate=ratio(sums[2], sums[1]),
        by_length_bucket={
            b: {"queried_tokens": queried[b], "hittable_tokens": hittable[b], "hit_tokens": hit[b]}
            for b in catalog.LENGTH_BUCKETS
        },
    )
