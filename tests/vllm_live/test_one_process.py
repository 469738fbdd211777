"""A real vLLM under load: kvscope's families on its own /metrics say what vLLM's do, and what those leave out."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from observability import catalog as c
from tests.conftest import wait_for
from tests.vllm_live.conftest import MODEL, Samples, Server, errors_of_kvscope, grown, total
from tests.vllm_live.events import free_port, history

#: 8 usable blocks of 128 tokens: four requests of more than 256 tokens do not fit.
_BLOCKS = 9


@pytest.fixture(scope="module")
def server(start_vllm: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory) -> Server:
    events = f"ipc://{tmp_path_factory.mktemp('zmq')}/events"
    config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": events,
        "replay_endpoint": events + "-replay",
    }
    started = start_vllm(
        free_port(), "--max-num-seqs", "4", "--num-gpu-blocks-override", str(_BLOCKS), "--kv-cache-metrics",
        "--kv-cache-metrics-sample", "1.0", "--enable-logging-iteration-details", "--kv-events-config", json.dumps(config)
    )  # fmt: skip
    started.replay = events + "-replay"
    return started


def idle(server: Server) -> Samples:
    """Samples once nothing runs or waits, by vLLM's word and by kvscope's."""

    def quiet() -> Samples | None:
        now = server.samples()
        names = ("vllm:num_requests_running", "kvscope_requests_running", "kvscope_requests_waiting")
        return now if not any(total(now, name) for name in names) else None

    return wait_for(quiet, 120, "an idle vLLM")  # type: ignore[return-value]


def test_replayed_load_reads_the_same_in_both(server: Server, tmp_path: Path) -> None:
    before = idle(server)
    replayed = subprocess.run(
        [sys.executable, "-m", "observability.cli", "replay", "generated", "--preset", "laptop", "--url", server.url, "--limit", "12",
         "--span", "30", "--json", str(tmp_path / "replay.json")], capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    outcomes = json.loads((tmp_path / "replay.json").read_text())["outcomes"]
    after = idle(server)
    served = grown(before, after, "kvscope_requests_total", outcome="length") + grown(
        before, after, "kvscope_requests_total", outcome="stop"
    )
    assert (
        served
        == grown(before, after, "vllm:request_success_total")
        == sum(outcomes.get(o, 0) for o in ("stop", "length"))
        > 0
    )
    for ours, theirs in (
        ("kvscope_request_duration_seconds_count", "vllm:e2e_request_latency_seconds_count"),
        ("kvscope_request_duration_seconds_sum", "vllm:e2e_request_latency_seconds_sum"),
        ("kvscope_time_to_first_token_seconds_count", "vllm:time_to_first_token_seconds_count"),
        ("kvscope_time_to_first_token_seconds_sum", "vllm:time_to_first_token_seconds_sum"),
        ("kvscope_inter_token_latency_seconds_count", "vllm:inter_token_latency_seconds_count"),
        ("kvscope_inter_token_latency_seconds_sum", "vllm:inter_token_latency_seconds_sum"),
        ("kvscope_prompt_tokens_total", "vllm:prompt_tokens_total"),
        ("kvscope_generation_tokens_total", "vllm:generation_tokens_total"),
        ("kvscope_kv_queried_tokens_total", "vllm:prefix_cache_queries_total"),
        ("kvscope_kv_hit_tokens_total", "vllm:prefix_cache_hits_total"),
        ("kvscope_preemptions_total", "vllm:num_preemptions_total"),
    ):
        assert grown(before, after, ours) == pytest.approx(grown(before, after, theirs)), ours
    phases = {s: grown(before, after, "kvscope_request_phase_seconds_total", state=s, gt="0") for s in c.SHOWN_STATES}
    assert sum(phases.values()) == pytest.approx(grown(before, after, "vllm:e2e_request_latency_seconds_sum"))
    assert phases["queued"] == pytest.approx(grown(before, after, "vllm:request_queue_time_seconds_sum"))
    assert phases["prefill"] + phases["decode"] + phases["preempted"] == pytest.approx(
        grown(before, after, "vllm:request_inference_time_seconds_sum")
    )


def test_a_shared_prefix_is_hit_in_whole_blocks(server: Server) -> None:
    prompt = "The quick brown fox jumps over the lazy dog. " * 30
    tokens = server.complete(prompt, 1).json()["usage"]["prompt_tokens"]
    before = idle(server)
    assert server.complete(prompt, 4).status_code == 200
    after = idle(server)
    for _ in range(2):  # hit again, so that the blocks have gaps to tell when they are evicted
        assert server.complete(prompt, 1).status_code == 200
    assert grown(before, after, "kvscope_kv_queried_tokens_total", length_bucket="0-2K") == tokens
    assert grown(before, after, "kvscope_kv_hittable_tokens_total") == (tokens - 1) // 128 * 128
    assert grown(before, after, "kvscope_kv_hit_tokens_total", tier="device") == (tokens - 1) // 128 * 128 > 0


def leave(server: Server, prompt: str, after_tokens: int | None) -> None:
    """Sends a long request and closes the connection after some tokens, or after half a second."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 600, "ignore_eos": True, "stream": True}
    with contextlib.suppress(httpx.TimeoutException):
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json=body, timeout=300 if after_tokens else 0.5
        ) as response:
            for i, _ in enumerate(line for line in response.iter_lines() if line.startswith("data:")):
                if after_tokens is not None and i + 1 >= after_tokens:
                    break


def test_clients_that_leave_in_queue_prefill_or_decode_are_aborts(server: Server) -> None:
    before = idle(server)
    with ThreadPoolExecutor(8) as pool:
        holding = [pool.submit(leave, server, f"{i} holds a seat", 60) for i in range(4)]  # four seats: all of them
        wait_for(lambda: total(server.samples(), "kvscope_requests_running") == 4, 60, "four running")
        pool.submit(leave, server, "this one waits", None).result()  # leaves in the queue
        for future in holding:
            future.result()
    idle(server)
    leave(server, "word " * 700, None)  # leaves in prefill
    after = idle(server)
    assert grown(before, after, "kvscope_requests_total", outcome="abort") == 6
    assert grown(before, after, "kvscope_requests_received_total") == 6
    assert grown(before, after, "kvscope_requests_total") == 6
    assert grown(before, after, "vllm:request_success_total") == 0  # vLLM itself does not know of them
    assert total(after, "kvscope_requests_received_total") == total(after, "kvscope_requests_total")
    assert grown(before, after, "kvscope_request_duration_seconds_count") == 0
    assert total(after, "kvscope_kv_blocks", state="active") == 0


def test_requests_that_lose_their_blocks_show_preempted_time_and_recomputation(server: Server) -> None:
    assert (
        server.complete("settle", 1).status_code == 200
    )  # vLLM tells of the lookup of an aborted request in its next step
    before = idle(server)
    with ThreadPoolExecutor(4) as pool:
        sent = [pool.submit(server.complete, f"{i} " + "some words of a prompt " * 38, 110) for i in range(4)]
        assert {f.result().status_code for f in sent} == {200}
    after = idle(server)
    assert grown(before, after, "kvscope_preemptions_total") == grown(before, after, "vllm:num_preemptions_total") > 0
    assert grown(before, after, "kvscope_request_phase_seconds_total", state="preempted", gt="0") > 0
    assert grown(before, after, "kvscope_kv_recomputed_tokens_total") > 0
    assert grown(before, after, "kvscope_kv_queried_tokens_total") == grown(
        before, after, "vllm:prefix_cache_queries_total"
    )
    assert grown(before, after, "kvscope_request_phase_seconds_total", gt="0") == pytest.approx(
        grown(before, after, "vllm:e2e_request_latency_seconds_sum")
    )


def test_the_books_of_cached_blocks_are_those_of_every_event(server: Server) -> None:
    after = idle(server)
    batches = history(server.replay)
    live, evicted = dict[Any, float](), list[float]()
    for when, events, *_ in batches:
        for event in events:
            for key in event.get("block_hashes", ()):
                if event["type"] == "BlockStored":
                    live.setdefault(key, when)
                elif key in live:
                    evicted.append(when - live.pop(key))
    assert total(after, "kvscope_kv_live_blocks", pool="exact", le="+Inf") == len(live) > 0
    assert total(after, "kvscope_kv_evicted_blocks_total") == len(evicted) > 0
    assert total(after, "kvscope_kv_evicted_age_blocks_total", pool="exact") == len(evicted)
    for age in ("10", "60"):
        shown = sum(
            v
            for (n, k), v in after.items()
            if n == "kvscope_kv_evicted_age_blocks_total" and float(dict(k)["age"]) <= float(age)
        )
        assert shown == sum(seconds <= float(age) for seconds in evicted)
    counted = {o: total(after, "kvscope_kv_event_batches_total", outcome=o) for o in c.KV_EVENT_OUTCOMES}
    assert counted["received"] + counted["replayed"] == len(batches)
    assert counted["lost"] == counted["malformed"] == total(after, "kvscope_kv_event_unmatched_blocks_total") == 0


def test_every_family_that_is_told_moved_and_no_other_is_there(server: Server) -> None:
    after = idle(server)
    status = {dict(k[1])["family"]: dict(k[1])["status"] for k in after if k[0] == "kvscope_source_family_info"}
    assert set(status) == {family.name for family in c.FAMILIES}
    untouched = (
        c.LABEL_FOLDS,
        c.KV_EVENT_UNMATCHED,
        c.ANOMALIES_TOTAL,
        c.REQUESTS_RUNNING,
        c.REQUESTS_WAITING,
    )  # 0 is what they should be
    for family in c.FAMILIES:
        names = {family.name + s for s in ("", "_total", "_info", "_bucket", "_count", "_sum")}
        values = [v for (name, _), v in after.items() if name in names]
        if status[family.name] == "no":
            assert not values, family.name
        elif family is not c.KV_EVICTION_MEMORY:  # absent until an eviction is forgotten
            assert values, f"{family.name} is told but has no series"
            assert family in untouched or any(values), f"{family.name} never moved"
    assert total(after, "kvscope_telemetry_anomalies_total") == 0
    assert errors_of_kvscope(server) == []
    assert {dict(k[1]).get("engine") for k in after if k[0].startswith("kvscope_")} == {"0"}


def test_an_idle_vllm_keeps_its_timestamp_fresh(server: Server) -> None:
    idle(server)
    time.sleep(2)
    shown = total(server.samples(), "kvscope_last_update_timestamp_seconds", source="engine")
    assert 0 <= time.time() - shown < 2


def test_scrapes_from_many_sides_at_once_all_answer(server: Server) -> None:
    stop = threading.Event()
    with ThreadPoolExecutor(5) as pool:
        work = pool.submit(server.complete, "talk while scraped", 40)
        found = list(pool.map(lambda _: server.samples(), range(8)))
        assert work.result().status_code == 200
    stop.set()
    assert len(found) == 8
