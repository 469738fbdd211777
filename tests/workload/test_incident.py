"""`kvscope incident` by itself: each fault puts a real engine in the state that it says, and leaves it whole when it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from observability import catalog as c
from observability.cli import root
from tests.conftest import wait_for
from tests.telemetry.bench import total

pytest.importorskip("torch")

from alerts import rules
from observability.engine.clock import MonotonicClock
from observability.engine.model.loading import load_model
from observability.telemetry.recorder import Telemetry
from observability.workload.incident import INCIDENTS, IncidentEngine, engine_config, find


@pytest.fixture
def engine() -> Iterator[Callable[[str], IncidentEngine]]:
    started: list[IncidentEngine] = []

    def start(name: str) -> IncidentEngine:
        incident, clock = find(name), MonotonicClock()
        dtype = engine_config(incident).kv_dtype
        telemetry = Telemetry("tiny", executor="torch", virtual=False, device="cpu", kv_dtype=dtype, clock=clock.now)
        engine = IncidentEngine(incident, load_model("tiny"), telemetry, clock)
        engine.start()
        started.append(engine)
        wait_for(lambda: sum(engine.ended.values()) > 5, 30, "requests")
        return engine

    yield start
    for each in started:
        each.stop()


def _on_thread(engine: IncidentEngine, work: Callable[[], Any]) -> Any:
    return engine.engine.call(work).result(timeout=30)


@pytest.mark.parametrize("incident", INCIDENTS, ids=lambda x: x.name)
def test_engine_is_whole_after_the_fault_and_all_its_requests_end(
    engine: Callable[[str], IncidentEngine], incident: Any
) -> None:
    live = engine(incident.name)
    live.inject(1.5)
    time.sleep(1.0)
    live.end()
    ended = sum(live.ended.values())
    wait_for(lambda: sum(live.ended.values()) > ended + 5, 30, "requests after the fault")
    _on_thread(live, live.engine.check_integrity)
    assert set(live.ended) == {"length"}
    assert live.thread.alive


def test_leaked_blocks_fill_the_pool_and_come_back(engine: Callable[[str], IncidentEngine]) -> None:
    live = engine("kv-exhaustion")
    assert live.engine.kv.device.utilization < 0.5
    live.inject(0)
    wait_for(lambda: live.engine.kv.device.utilization > 0.95 and live.engine.num_waiting, 60, "a full pool")
    live.end()
    wait_for(lambda: live.engine.kv.device.utilization < 0.5, 30, "the blocks")
    _on_thread(live, live.engine.check_integrity)


def test_pinned_blocks_leave_no_long_run(engine: Callable[[str], IncidentEngine]) -> None:
    live = engine("fragmentation")
    before = total(live.telemetry, c.KV_LAYOUT_FALLBACKS.series)
    live.inject(0)
    assert _on_thread(live, live.engine.kv_state).largest_free_run <= 5
    wait_for(lambda: total(live.telemetry, c.KV_LAYOUT_FALLBACKS.series) > before + 3, 30, "fallbacks")


def test_wrong_scales_make_stored_keys_and_values_coarser(engine: Callable[[str], IncidentEngine]) -> None:
    live = engine("precision-loss")

    def error() -> float:
        squares = total(live.telemetry, c.KV_QUANT_ERROR.series), total(live.telemetry, c.KV_QUANT_SIGNAL.series)
        return float(squares[0] / squares[1]) ** 0.5

    wait_for(lambda: total(live.telemetry, c.KV_QUANT_SIGNAL.series) > 0, 30, "a measured block")
    well = error()
    assert well < 0.01
    live.inject(0)
    wait_for(lambda: error() > 3 * well, 30, "the error")


def test_stuck_scheduler_computes_nothing_while_requests_wait(engine: Callable[[str], IncidentEngine]) -> None:
    live = engine("stuck-scheduler")
    live.inject(0)
    wait_for(lambda: live.engine.num_waiting and not live.engine.num_running, 30, "nothing to run")
    before = total(live.telemetry, c.STEP_TOKENS.series)
    time.sleep(0.5)
    assert total(live.telemetry, c.STEP_TOKENS.series) == before
    live.end()
    wait_for(lambda: total(live.telemetry, c.STEP_TOKENS.series) > before, 30, "work")


def test_changed_keys_find_no_prefix_again(engine: Callable[[str], IncidentEngine]) -> None:
    live = engine("cache-key-change")
    wait_for(lambda: total(live.telemetry, c.KV_HIT_TOKENS.series) > 0, 30, "a hit")
    live.inject(0)
    ended = sum(live.ended.values())
    wait_for(lambda: sum(live.ended.values()) > ended + 8, 30, "those that had looked up before")
    hits = total(live.telemetry, c.KV_HIT_TOKENS.series)
    ended = sum(live.ended.values())
    wait_for(lambda: sum(live.ended.values()) > ended + 6, 30, "more requests")
    assert total(live.telemetry, c.KV_HIT_TOKENS.series) == hits


def test_periodic_job_stalls_the_loop(engine: Callable[[str], IncidentEngine]) -> None:
    live = engine("slow-periodic-job")
    live.inject(1.5)
    wait_for(lambda: total(live.telemetry, c.STALL_GAPS.series) >= 2, 30, "stalls")


def test_list_names_every_incident_with_an_alert_that_exists() -> None:
    rows = json.loads(CliRunner().invoke(root, ["incident", "--list", "--json"]).stdout)
    assert [row["incident"] for row in rows] == [x.name for x in INCIDENTS]
    for row in rows:
        hold = rules.named(row["alert"]).hold
        assert row["within_seconds"] > int(hold.removesuffix("m")) * 60
        assert row["severity"] in ("critical", "warning")


@pytest.mark.parametrize("argv", [[], ["no-such"]])
def test_unknown_incident_is_told_which_there_are(argv: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "observability.cli", "incident", *argv], capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0
    assert "next:" in done.stderr


def _run(*argv: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "observability.cli", "incident", "stuck-scheduler", "--json", *argv],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip


def test_command_tells_what_happens_and_ends_by_itself() -> None:
    with _run("--port=0", "--after=0.5", "--lasts=0.5", "--duration=2") as process:
        out, err = process.communicate(timeout=60)
    lines = [json.loads(line) for line in out.splitlines()]
    assert process.returncode == 0, err
    assert [line["state"] for line in lines] == ["healthy", "fault", "over", "stopped"]
    assert lines[0]["alert"] == "KvscopeSchedulerStuck"
    assert lines[0]["metrics"].startswith("http://127.0.0.1:")
    assert set(lines[-1]["requests"]) <= {"length", "abort"}


def test_interrupt_ends_the_command_cleanly() -> None:
    with _run("--port=0", "--after=60") as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["state"] == "healthy"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, json.loads(out.splitlines()[-1])["state"]) == (0, "stopped"), err


def test_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with _run(f"--port={port}") as process:
            _, err = process.communicate(timeout=60)
    assert process.returncode != 0
    assert str(port) in err
