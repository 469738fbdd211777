"""kvscope's families on the page that vLLM serves: in one process and in several, without series that show twice."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.parser import text_string_to_metric_families

from exporters.vllm.exposition import EngineCollector, Exposition
from exporters.vllm.recorder import Recorder, Settings
from tests.conftest import REPO
from tests.vllm.harness import finished, iteration, recorder, scheduler, source

Shown = dict[tuple[str, frozenset[tuple[str, str]]], float]

_PROCESS = """
import sys
from exporters.vllm.exposition import Exposition
from tests.vllm.harness import *
r = recorder()
shown = Exposition(r.observed)
number = int(sys.argv[1])
for i in range(number):
    r.record(scheduler(num_running_reqs=number), iteration(
        finished_requests=[finished(e2e_latency=float(number))], inter_token_latencies_iter=[0.01] * number))
    shown.flusher.flush()
"""


def page(registry: CollectorRegistry) -> Shown:
    found: Shown = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for s in family.samples:
            key = (s.name, frozenset(s.labels.items()))
            assert key not in found, f"{key} shows twice"
            found[key] = s.value
    return found


def one(found: Shown, name: str, **labels: str) -> float:
    values = [v for (n, have), v in found.items() if n == name and labels.items() <= dict(have).items()]
    assert len(values) == 1, (name, labels, values)
    return values[0]


def test_every_engine_has_its_label_on_every_sample_beside_vllm_s_own() -> None:
    registry = CollectorRegistry()
    Counter("vllm:things", "Of vLLM", registry=registry).inc(3)
    r = Recorder(source(), Settings(block_size=16, capacity_blocks=101), engines=(0, 1))
    registry.register(EngineCollector(r.observed))
    r.record(scheduler(num_running_reqs=4), iteration(finished_requests=[finished()]), 1)
    found = page(registry)
    assert one(found, "vllm:things_total") == 3
    assert one(found, "kvscope_requests_running", engine="1") == 4
    assert {dict(labels).get("engine") for name, labels in found if name.startswith("kvscope_")} == {
        "0",
        "1",
        "frontend",
    }
    text = generate_latest(registry).decode()
    headers = [line for line in text.splitlines() if line.startswith("# TYPE ")]
    assert len(headers) == len(set(headers)), "a family shows once, whatever the number of engines"


def test_a_later_engine_of_the_process_takes_the_place_of_an_earlier_one() -> None:
    registry = CollectorRegistry()
    for running in (3, 5):
        r = recorder()
        Exposition(r.observed, registry)
        r.record(scheduler(num_running_reqs=running), None)
    assert one(page(registry), "kvscope_requests_running") == 5


def test_a_fault_of_ours_leaves_the_page_of_vllm_as_it_is() -> None:
    registry = CollectorRegistry()
    Counter("vllm:things", "Of vLLM", registry=registry).inc(3)
    r = recorder()
    registry.register(EngineCollector(r.observed))
    r.observed["0"].snapshot = None  # type: ignore[assignment, method-assign]
    assert {name for name, _ in page(registry)} == {"vllm:things_total", "vllm:things_created"}


def test_what_several_processes_write_is_added_up_and_gauges_are_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "PYTHONPATH": str(REPO)}
    for number in ("3", "5"):
        subprocess.run([sys.executable, "-c", _PROCESS, number], env=environment, check=True, timeout=120)
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(tmp_path))
    found = page(registry)
    assert one(found, "kvscope_requests_total", outcome="length") == 8
    assert one(found, "kvscope_request_duration_seconds_sum") == 3 * 3.0 + 5 * 5.0
    assert one(found, "kvscope_request_duration_seconds_count") == 8
    assert one(found, "kvscope_request_duration_seconds_bucket", le="3.15") == 3
    assert one(found, "kvscope_request_duration_seconds_bucket", le="+Inf") == 8
    assert one(found, "kvscope_inter_token_latency_seconds_count") == 3 * 3 + 5 * 5
    assert one(found, "kvscope_requests_running") == 5
    assert one(found, "kvscope_engine_info", executor="vllm", engine="0") == 1
    assert one(found, "kvscope_last_update_timestamp_seconds") > 1e9
