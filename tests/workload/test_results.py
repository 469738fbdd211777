"""Result arithmetic: exact quantiles, phases that add up, unknown that stays unknown."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from observability import catalog
from observability.telemetry.recorder import RequestRecord
from observability.workload.results import ReplayResult, kv_from_buckets, phases_of, summarize, throughput


def record(latency: float, outcome: str = "length") -> RequestRecord:
    rng = random.Random(latency)
    matrix = np.zeros((len(catalog.STATES), len(catalog.COMPONENTS)))
    shares = [rng.random() for _ in range(4)]
    for share in shares:
        matrix[rng.randrange(len(catalog.STATES)), rng.randrange(len(catalog.COMPONENTS))] += (
            latency * share / sum(shares)
        )
    return RequestRecord("r", "standard", 10, 0, 5, 1.0, 1.0, 1.0, 1.0 + latency, outcome, 0, matrix, None)


@given(st.lists(st.tuples(st.floats(0, 1e4), st.integers(1, 5)), min_size=1, max_size=60))
def test_a_quantile_is_the_smallest_sample_that_so_many_do_not_exceed(samples: list[tuple[float, int]]) -> None:
    values, weights = zip(*samples, strict=True)
    summary = summarize(values, weights)
    assert summary is not None
    flat = sorted(value for value, weight in samples for _ in range(weight))
    for name, q in (("p50", 50), ("p90", 90), ("p95", 95), ("p99", 99)):
        want = next(v for i, v in enumerate(flat, 1) if i * 100 >= q * len(flat))
        assert summary[name] == want
    assert summary["max"] == flat[-1]
    assert summary["count"] == len(flat)
    assert summary["mean"] == pytest.approx(sum(flat) / len(flat))


def test_no_samples_have_no_quantiles() -> None:
    assert summarize([]) is None


def test_phases_of_all_and_of_the_slowest_percent_sum_to_their_mean_latency() -> None:
    latencies = [random.Random(i).expovariate(1.0) for i in range(250)]
    phases = phases_of([*map(record, latencies), record(99.0, "abort")])
    assert phases is not None
    for name, expected in (("all", latencies), ("slowest_1_percent", sorted(latencies)[-3:])):
        part = phases[name]
        mean = sum(expected) / len(expected)
        assert part.requests == len(expected)
        assert part.mean_latency_seconds == pytest.approx(mean)
        assert sum(part.by_state.values()) == pytest.approx(mean)
        assert sum(part.by_component.values()) == pytest.approx(mean)
        assert sum(sum(row.values()) for row in part.by_state_and_component.values()) == pytest.approx(mean)
    assert phases_of([record(1.0, "abort")]) is None


def test_totals_of_unknown_parts_are_unknown() -> None:
    known = dict.fromkeys(catalog.LENGTH_BUCKETS, 10)
    unknown: dict[str, int | None] = dict.fromkeys(catalog.LENGTH_BUCKETS)
    kv = kv_from_buckets(known, unknown, known)
    assert (kv.queried_tokens, kv.hittable_tokens, kv.hit_tokens) == (60, None, 60)
    assert (kv.hit_rate, kv.hittable_hit_rate) == (1.0, None)
    nothing = dict.fromkeys(catalog.LENGTH_BUCKETS, 0)
    assert kv_from_buckets(nothing, nothing, nothing).hit_rate is None  # nothing was asked for: no rate, not 0
    assert throughput(3, None, 6, 2.0) == {
        "requests_per_second": 1.5, "prompt_tokens_per_second": None, "generated_tokens_per_second": 3.0,
    }  # fmt: skip
    assert throughput(0, 0, 0, 0.0)["requests_per_second"] is None


def test_json_holds_settings_versions_and_null_for_unknown() -> None:
    unknown: dict[str, int | None] = dict.fromkeys(catalog.LENGTH_BUCKETS)
    result = ReplayResult(
        clock="real", settings={"target": "url"}, requests=1, outcomes={"lost": 1}, reasons={}, duration_seconds=0.0,
        wall_seconds=0.0, prompt_tokens=None, generated_tokens=None, latency={"end_to_end_seconds": None},
        throughput=throughput(0, None, None, 0.0), phases=None, kv=kv_from_buckets(unknown, unknown, unknown), preemptions=None,
    )  # fmt: skip
    data = json.loads(result.to_json())
    assert data["kv"]["hit_rate"] is None
    assert list(data["kv"]["by_length_bucket"]) == ["0-2K", "2K-8K", "8K-32K", "32K-128K", "128K-512K", "512K+"]
    assert data["versions"]["kvscope"]
    assert data["preemptions"] is None
