"""Two API server processes and priority scheduling: vLLM reads no collectors then, and the families are there all the same."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.conftest import wait_for
from tests.vllm_live.conftest import MODEL, Samples, Server, errors_of_kvscope, total
from tests.vllm_live.events import free_port

_PRIORITIES = {"interactive": -3, "standard": 0, "long_context": 7}


@pytest.fixture(scope="module")
def server(start_vllm: Callable[..., Server]) -> Server:
    return start_vllm(free_port(), "--api-server-count", "2", "--scheduling-policy", "priority", several=True)


def test_both_processes_add_up_by_class_of_priority(server: Server) -> None:
    with ThreadPoolExecutor(6) as pool:
        sent = [
            pool.submit(server.complete, f"request {i}", 4, priority=_PRIORITIES[name])
            for i in range(4) for name in _PRIORITIES
        ]  # fmt: skip
        assert {future.result().status_code for future in sent} == {200}
    tokens = sum(future.result().json()["usage"]["prompt_tokens"] for future in sent)
    body = {"model": MODEL, "prompt": "leaves", "max_tokens": 500, "ignore_eos": True, "stream": True, "priority": 7}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=300) as response:
        next(line for line in response.iter_lines() if line.startswith("data:"))

    def flushed() -> Samples | None:
        now = server.samples()
        return now if total(now, "kvscope_requests_total") == 13 else None

    found: Samples = wait_for(flushed, 30, "every request in the files")  # type: ignore[assignment]
    for name in _PRIORITIES:
        assert total(found, "kvscope_requests_total", **{"class": name, "outcome": "length"}) == 4
        assert total(found, "kvscope_request_duration_seconds_count", **{"class": name}) == 4
        assert total(found, "kvscope_request_duration_seconds_bucket", **{"class": name, "le": "+Inf"}) == 4
    assert total(found, "kvscope_requests_total", outcome="abort") == 1
    assert total(found, "kvscope_requests_received_total") == 13
    assert total(found, "kvscope_time_to_first_token_seconds_count") == 13
    assert total(found, "kvscope_inter_token_latency_seconds_count", **{"class": "unknown"}) == total(
        found, "vllm:inter_token_latency_seconds_count"
    )
    assert total(found, "kvscope_kv_queried_tokens_total") >= tokens
    assert total(found, "kvscope_request_duration_seconds_sum") == pytest.approx(
        total(found, "vllm:e2e_request_latency_seconds_sum")
    )
    bounds = sorted(
        (float(dict(labels)["le"]), value) for (name, labels), value in found.items()
        if name == "kvscope_request_duration_seconds_bucket" and dict(labels)["class"] == "standard"
    )  # fmt: skip
    assert [v for _, v in bounds] == sorted(v for _, v in bounds), "buckets are cumulative"


def test_gauges_are_of_the_engine_and_not_of_a_process(server: Server) -> None:
    def quiet() -> bool:
        return total(server.samples(), "kvscope_requests_running") == 0

    wait_for(quiet, 30, "an idle gauge")
    found = server.samples()
    for name in ("kvscope_requests_running", "kvscope_kv_capacity_blocks", "kvscope_last_update_timestamp_seconds"):
        assert len([1 for n, _ in found if n == name]) == 1, name
    assert total(found, "kvscope_kv_blocks") == total(found, "kvscope_kv_capacity_blocks") > 0
    assert {dict(labels).get("engine") for name, labels in found if name.startswith("kvscope_")} == {"0"}
    assert errors_of_kvscope(server) == []


def test_two_processes_took_part(server: Server) -> None:
    assert len(set(re.findall(r"ApiServer_(\d+)", server.log.read_text(errors="replace")))) == 2
