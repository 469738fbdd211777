"""`kvscope demo` as a user runs it: everything answers, Ctrl-C leaves nothing running, a second start keeps the history."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pandas as pd
import pytest

from observability.demo import _served_name
from observability.store.embedded import EmbeddedStore
from tests.conftest import wait_for

MODEL = "tiny"
REQUESTS = "model:kvscope_requests_received:rate5m"


def start(data_dir: Path, engine_port: int, app_port: int, forecast_port: int) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "observability.cli", "demo", "--data-dir", str(data_dir), "--model", MODEL]
    argv += ["--engine-port", str(engine_port), "--app-port", str(app_port), "--days", "0.2"]
    argv += ["--forecast-port", str(forecast_port)]
    return subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)


def processes_using(data_dir: Path) -> list[str]:
    """Command lines of live processes that name the data folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if str(data_dir) in command:
                found.append(command)
    return found


def live_points(store: EmbeddedStore) -> int:
    """Evaluations after the simulated span."""
    spans, extent = store.simulated(0, 4e9), store.extent()
    if not spans or extent is None:
        return 0
    return len(store.range(REQUESTS, max(stop for _, stop in spans) + 1, extent[1], 15.0))


@pytest.mark.slow
def test_demo_starts_serves_records_stops_and_keeps_its_history(tmp_path: Path, free_port: Callable[[], int]) -> None:
    data_dir, ports = tmp_path / "data", (free_port(), free_port(), free_port())
    engine_port, app_port, forecast_port = ports
    process = start(data_dir, *ports)
    try:
        wait_for(lambda: httpx.get(f"http://127.0.0.1:{app_port}/_stcore/health").text == "ok", 120, "the app")
        models = httpx.get(f"http://127.0.0.1:{engine_port}/v1/models").json()
        assert [m["id"] for m in models["data"]] == [MODEL]
        body = {"model": MODEL, "prompt": "hello", "max_tokens": 4}
        answer = httpx.post(f"http://127.0.0.1:{engine_port}/v1/completions", json=body, timeout=60).json()
        assert answer["usage"]["completion_tokens"] == 4
        store = EmbeddedStore(data_dir / "kvscope.sqlite")
        wait_for(lambda: live_points(store) >= 2, 90, "live points after the simulated span")
        # 0.2 days of minutes were simulated, and the rate that the pages show is the load's: positive and plausible.
        (first, last), *_ = store.simulated(0, 4e9)
        assert last - first == pytest.approx(0.2 * 86400, abs=120)
        simulated = store.range(REQUESTS, first + 600, last, 60.0)["value"]
        assert len(simulated) > 250
        assert 0.02 < simulated.mean() < 0.5
        # 0.2 days are enough for a forecast of load by every model, and its quantiles stand in order.
        told = f"http://127.0.0.1:{forecast_port}/metrics"
        value = re.compile(
            r'^kvscope_forecast_value\{model="tiny",signal="requests",horizon="60m",quantile="(.+)"\} (.+)$', re.M
        )
        wait_for(lambda: value.search(httpx.get(told).text), 120, "the forecast of the load")
        found = [(float(level), float(said)) for level, said in value.findall(httpx.get(told).text)]
        assert len(found) == 7
        assert found == sorted(found)
        assert [said for _, said in found] == sorted(said for _, said in found)
    finally:
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 0, said
    assert re.search(r"kvscope is running", said), said
    assert processes_using(data_dir) == []
    for port in ports:
        with socket.socket() as s:
            assert s.connect_ex(("127.0.0.1", port)) != 0
    before = store.range(REQUESTS, first, last, 60.0)

    again = start(data_dir, *ports)
    try:
        wait_for(lambda: httpx.get(f"http://127.0.0.1:{app_port}/_stcore/health").text == "ok", 120, "the app again")
    finally:
        again.send_signal(signal.SIGTERM)
        _, said = again.communicate(timeout=30)
    assert again.returncode == 0, said
    after = store.range(REQUESTS, first, last, 60.0)
    pd.testing.assert_frame_equal(after, before)


def test_a_taken_port_is_refused_before_anything_starts(tmp_path: Path, free_port: Callable[[], int]) -> None:
    port = free_port()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        process = start(tmp_path / "data", port, free_port(), free_port())
        _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"127.0.0.1:{port}" in said
    assert "next:" in said
    assert processes_using(tmp_path / "data") == []


def test_the_history_of_a_model_by_path_joins_the_served_series(tmp_path: Path) -> None:
    file = tmp_path / "weights.gguf"
    file.touch()
    assert _served_name(str(file)) == "weights"
    assert _served_name(str(tmp_path) + "/.") == tmp_path.name
    assert _served_name("smollm2-135m") == "smollm2-135m"
