"""The statistics that a real vLLM 0.32 handed to a plug-in for 60 requests, against its own /metrics afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace as Stats
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from exporters.vllm.recorder import Recorder, Settings
from tests.conftest import require
from tests.vllm.harness import iteration, scheduler, source, total, values

Found = dict[tuple[str, ...], float]


@pytest.fixture(scope="module")
def events(data_dir: Path) -> list[dict[str, Any]]:
    path = data_dir / "captures" / "vllm-0.32-stat-events.jsonl"
    require(path.is_file(), f"{path} is missing")
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def own(data_dir: Path) -> dict[str, float]:
    """vLLM's own samples: name{labels but engine and model} -> value."""
    text = (data_dir / "captures" / "vllm-0.32-cpu-metrics.txt").read_text()
    return {
        s.name + "".join(f",{k}={v}" for k, v in sorted(s.labels.items()) if k not in ("engine", "model_name")): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
        if family.name != "vllm:cache_config_info"
    }


@pytest.fixture(scope="module")
def found(events: list[dict[str, Any]]) -> Found:
    """What kvscope shows after the same events. The capture holds no first-token times, token counts or intervals."""
    recorder = Recorder(source(), Settings(block_size=128, capacity_blocks=364))
    for e in events:
        done = [Stats(**fields) for fields in e.get("fin", ())]
        recorder.record(
            scheduler(num_running_reqs=e["run"], num_waiting_reqs=e["wait"], kv_cache_usage=e["kv"]),
            iteration(finished_requests=done) if "fin" in e else None,
        )
    return values(recorder.observed["0"])


def test_every_request_ends_once_and_by_the_same_reason(found: Found, own: dict[str, float]) -> None:
    assert (
        total(found, "kvscope_requests_total", "length")
        == own["vllm:request_success_total,finished_reason=length"]
        == 60
    )
    for outcome in ("stop", "abort", "error"):
        assert (
            total(found, "kvscope_requests_total", outcome)
            == own[f"vllm:request_success_total,finished_reason={outcome}"]
        )


def test_hit_and_queried_tokens_are_those_of_vllm(found: Found, own: dict[str, float]) -> None:
    assert total(found, "kvscope_kv_hit_tokens_total") == own["vllm:prefix_cache_hits_total"] == 3712
    assert total(found, "kvscope_kv_queried_tokens_total") == own["vllm:prefix_cache_queries_total"] == 10352
    assert (
        total(found, "kvscope_kv_queried_tokens_total") - total(found, "kvscope_kv_hit_tokens_total")
        == (own["vllm:request_prefill_kv_computed_tokens_sum"])
    )
    assert total(found, "kvscope_kv_lookups_total") == 60


def test_hittable_tokens_are_whole_blocks_that_leave_one_token(found: Found, events: list[dict[str, Any]]) -> None:
    prompts = [fin["num_prompt_tokens"] for e in events for fin in e.get("fin", ())]
    wanted = sum(128 * max(k for k in range(100) if k * 128 < n) for n in prompts)
    assert total(found, "kvscope_kv_hittable_tokens_total") == wanted >= 3712


def test_latency_agrees_with_vllm_where_both_have_a_bound(found: Found, own: dict[str, float]) -> None:
    name = "kvscope_request_duration_seconds"
    assert total(found, f"{name}_count") == own["vllm:e2e_request_latency_seconds_count"]
    assert total(found, f"{name}_sum") == pytest.approx(own["vllm:e2e_request_latency_seconds_sum"])
    for bound in ("0.8", "1.0", "2.0", "2.5", "5.0", "10.0", "20.0", "40.0"):
        theirs = own[f"vllm:e2e_request_latency_seconds_bucket,le={bound}"]
        assert total(found, f"{name}_bucket", bound) == theirs, bound


def test_phases_are_those_of_vllm_and_add_up_to_the_latency(found: Found, own: dict[str, float]) -> None:
    name = "kvscope_request_phase_seconds_total"
    for state, theirs in (("queued", "queue"), ("prefill", "prefill"), ("decode", "decode")):
        assert total(found, name, state, "0") == pytest.approx(own[f"vllm:request_{theirs}_time_seconds_sum"])
    assert total(found, name, "0") == pytest.approx(own["vllm:e2e_request_latency_seconds_sum"])
    assert total(found, "kvscope_request_phase_requests_total", "0") == 60
    # what vLLM's histograms cannot answer: the make-up of the slower requests
    slow = total(found, name, "5")
    assert slow > 5 * total(found, "kvscope_request_phase_requests_total", "5") > 0


def test_blocks_of_the_pool_at_every_step(events: list[dict[str, Any]]) -> None:
    recorder = Recorder(source(), Settings(block_size=128, capacity_blocks=364))
    for e in events:
        recorder.record(scheduler(kv_cache_usage=e["kv"], num_running_reqs=e["run"], num_waiting_reqs=e["wait"]), None)
        now = values(recorder.observed["0"])
        active = now["kvscope_kv_blocks", "smol", "active"]
        assert active / 363 == pytest.approx(e["kv"], abs=1e-9)
        assert active == int(active)
        assert (
            active + now["kvscope_kv_blocks", "smol", "allocatable"] == now["kvscope_kv_capacity_blocks", "smol"] == 363
        )
        assert now["kvscope_requests_running", "smol", "standard"] == e["run"]


def test_nothing_was_refused(found: Found) -> None:
    assert total(found, "kvscope_telemetry_anomalies_total") == 0
    assert total(found, "kvscope_label_folds_total") == 0
