"""The recorder: what it writes when the target lives, dies and returns, and how it ends."""

from __future__ import annotations

import signal as signals
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from exporters.text import render
from observability import catalog as c
from observability.engine.clock import VirtualClock
from observability.engine.engine import Engine
from observability.engine.executor.hardware import gpu_by_name
from observability.engine.executor.roofline import RooflineExecutor
from observability.engine.model.costs import model_by_name
from observability.engine.types import EngineConfig, PromptSpan, Request, SamplingParams
from observability.errors import ConfigError, StoreError
from observability.signals import SIGNALS
from observability.store import embedded
from observability.store.embedded import EmbeddedStore
from observability.store.evaluate import Key
from observability.store.recorder import HttpTarget, Recorder, Scrape, TelemetryTarget, parse_exposition
from observability.telemetry.recorder import Telemetry
from tests.conftest import wait_for

RUNNING = "model:kvscope_requests_running:sum"
RECEIVED = "model:kvscope_requests_received:rate5m"
START = 1_790_000_000.0
LABELS = (("model", "m"), ("class", "standard"))


def scrape(running: float, received: float) -> Scrape:
    series: list[Key] = [(c.REQUESTS_RUNNING.series, LABELS), (c.REQUESTS_RECEIVED.series, LABELS)]
    return Scrape(series, np.array([running, received]))


def recorded(store: EmbeddedStore, name: str, steps: int) -> list[float | None]:
    frame = store.range(name, START, START + 15 * (steps - 1), 15)
    by_time = dict(zip(frame["time"].map(lambda t: t.timestamp()), frame["value"], strict=True))
    return [by_time.get(START + 15 * i) for i in range(steps)]


@pytest.mark.parametrize("batch", [1, 7])
def test_a_dead_target_leaves_a_gap_in_gauges_and_lets_rates_fade(tmp_path: Path, batch: int) -> None:
    store = embedded.create(tmp_path / "s.sqlite")
    recorder = Recorder(store, batch=batch)
    for i in range(60):
        recorder.step(START + 15 * i, None if 10 <= i < 50 else scrape(i, 30.0 * i))
    recorder.flush()
    running = recorded(store, RUNNING, 60)
    assert running == [float(i) if i < 10 or i >= 50 else None for i in range(60)]
    rate = recorded(store, RECEIVED, 60)
    assert rate[0] is None  # one sample has no rate
    assert rate[9] == pytest.approx(30 * 9 / 300)  # clamped at zero: the counter was 0 at the first sample
    assert all(value is not None for value in rate[1:29])  # two samples are still in the window
    assert all(value is None for value in rate[29:51])
    assert rate[51] == pytest.approx(30 * (1 + 0.5 + 0) / 300)
    assert recorder.observed == START + 15 * 59


def test_a_row_without_values_is_stored_once_and_not_for_ever(tmp_path: Path) -> None:
    store = embedded.create(tmp_path / "s.sqlite")
    recorder = Recorder(store, batch=5)
    for i in range(100):
        recorder.step(START + 15 * i, scrape(1, 1) if i < 3 else None)
    recorder.flush()
    with sqlite3.connect(store.path) as db:
        rows = db.execute(
            "SELECT count(*) FROM points JOIN signals ON id = signal WHERE name = ?", (RUNNING,)
        ).fetchone()
    db.close()
    assert rows == (4,)


def test_a_clock_that_steps_back_writes_nothing_twice(tmp_path: Path) -> None:
    recorder = Recorder(embedded.create(tmp_path / "s.sqlite"))
    assert recorder.step(START, scrape(1, 1))
    assert not recorder.step(START, scrape(2, 2))
    assert not recorder.step(START - 10, scrape(3, 3))
    assert recorder.step(START + 15, scrape(4, 4))
    assert recorded(EmbeddedStore(tmp_path / "s.sqlite"), RUNNING, 2) == [1.0, 4.0]


def test_telemetry_in_this_process_and_its_page_record_the_same(tmp_path: Path) -> None:
    """An engine in virtual time, read both ways at each tick; the page goes through rendering and parsing."""
    config = EngineConfig(num_blocks=256, max_num_seqs=4, max_num_batched_tokens=128, max_model_len=1024)
    clock = VirtualClock()
    telemetry = Telemetry("m", executor="roofline", virtual=True, device="cpu", kv_dtype="auto", clock=clock.now)
    executor = RooflineExecutor(
        model_by_name("smollm2-135m"), gpu_by_name("cpu-laptop"), config, telemetry, clock=clock
    )
    stores = [embedded.create(tmp_path / f"{name}.sqlite") for name in ("direct", "page")]
    direct, by_page = (Recorder(store) for store in stores)
    ends = []

    def tick(now: float) -> None:
        ends.append(START + now)
        direct.step(START + now, TelemetryTarget(telemetry).scrape())
        text = render(telemetry.snapshot(), openmetrics=False).decode()
        by_page.step(START + now, parse_exposition(text, "text/plain; version=0.0.4", "page"))

    requests = [
        Request(
            f"r{i}",
            PromptSpan(200 + 7 * i, (0, i + 1)),
            SamplingParams(max_tokens=20),
            c.CLASSES[i % 3],
            arrival=6.0 * i,
        )
        for i in range(40)
    ]
    Engine(config, executor, telemetry).run(requests, tick_seconds=15.0, on_tick=tick)
    compared = 0
    for signal in SIGNALS:
        a, b = (
            store.range(signal.name, ends[0], ends[-1], 15.0).sort_values([*signal.by, "time"], ignore_index=True)
            for store in stores
        )
        # a page prints times and sums in full: the same doubles come back
        pd.testing.assert_frame_equal(a, b, rtol=1e-12, obj=signal.name)
        compared += len(a)
    assert compared > 3000


# -- pages ------------------------------------------------------------------------------------------------------------


def page(openmetrics: bool) -> tuple[str, str]:
    registry = CollectorRegistry()
    Counter("a_things", "x", ["l"], registry=registry).labels('quote " and \\ and \n').inc(3)
    Gauge("g", "x", registry=registry).set(-1.5e-9)
    if openmetrics:
        return generate_openmetrics(registry).decode(), "application/openmetrics-text; version=1.0.0; charset=utf-8"
    return generate_latest(registry).decode(), "text/plain; version=0.0.4; charset=utf-8"


@pytest.mark.parametrize("openmetrics", [False, True])
def test_both_text_formats_are_read(openmetrics: bool) -> None:
    found = parse_exposition(*page(openmetrics), "page")
    values = dict(zip(found.series, found.values.tolist(), strict=True))
    assert values[("a_things_total", (("l", 'quote " and \\ and \n'),))] == 3.0
    assert values[("g", ())] == -1.5e-9


@pytest.mark.parametrize(
    "text",
    ["<html><body>404</body></html>", "a_metric 1 2 3 4 x\n", 'x{a="1" 2\n', "", "# HELP a b\n", "x{a=1} 2", "x y\n"],
)
def test_what_is_not_a_metrics_page_is_an_error_that_names_it(text: str) -> None:
    with pytest.raises(StoreError, match=r"http://somewhere"):
        parse_exposition(text, "text/plain", "http://somewhere")


def test_of_a_series_that_occurs_twice_the_first_counts() -> None:
    assert parse_exposition("x 1\nx 2\n", "text/plain", "page").values.tolist() == [1.0]


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://host/x", "file:///etc/passwd"])
def test_an_address_that_cannot_be_scraped_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="not an address"):
        HttpTarget(url)


# -- over HTTP --------------------------------------------------------------------------------------------------------


class Page(ThreadingHTTPServer):
    """Answers /metrics by `mode`: ok, 500, hang, endless, html; asks for the token `secret` when `token` is set."""

    allow_reuse_address = True

    def __init__(self, port: int = 0) -> None:
        self.mode, self.token, self.count = "ok", False, 0
        self.release = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if server.token and self.headers.get("Authorization") != "Bearer secret":
                    self.send_error(401)
                    return
                if server.mode == "hang":
                    server.release.wait(20)
                    return
                if server.mode == "500":
                    self.send_error(500)
                    return
                server.count += 1
                self.send_response(200)
                self.end_headers()
                if server.mode == "endless":
                    try:
                        while not server.release.is_set():
                            self.wfile.write(b"x 1\n" * 1000)
                    except OSError:
                        return
                labels = 'model="m",class="standard"'
                self.wfile.write(b"<html>" if server.mode == "html" else (
                    f"kvscope_requests_running{{{labels}}} 2\nkvscope_requests_received_total{{{labels}}} {server.count}\n"
                ).encode())  # fmt: skip

            def log_message(self, *args: object) -> None:
                pass

        super().__init__(("127.0.0.1", port), Handler)
        self.thread = threading.Thread(target=self.serve_forever, daemon=True)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/metrics"

    def end(self) -> None:
        self.release.set()
        self.shutdown()
        self.server_close()
        self.thread.join()


@pytest.fixture
def server() -> Iterator[Page]:
    page = Page()
    yield page
    page.end()


@pytest.mark.parametrize("mode", ["500", "hang", "endless", "html"])
def test_a_target_that_misbehaves_is_a_failed_scrape_within_its_timeout(
    server: Page, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("observability.store.recorder.MAX_BODY_BYTES", 100_000)
    server.mode = mode
    target = HttpTarget(server.url, timeout_seconds=1.0)
    began = time.monotonic()
    with pytest.raises(StoreError, match=r"127\.0\.0\.1") as error:
        target.scrape()
    assert error.value.next_step
    assert time.monotonic() - began < 5
    server.mode = "ok"
    assert len(target.scrape().values) == 2
    target.close()


def test_the_token_is_sent(server: Page) -> None:
    server.token = True
    with pytest.raises(StoreError, match="401"):
        HttpTarget(server.url).scrape()
    assert len(HttpTarget(server.url, token="secret").scrape().values) == 2


# -- the command ------------------------------------------------------------------------------------------------------


def run_record(spawn: Callable[..., subprocess.Popen[bytes]], url: str, store: Path) -> subprocess.Popen[bytes]:
    return spawn(
        sys.executable, "-m", "observability.cli", "record", "--url", url, "--store", str(store), "--interval", "0.5s",
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_record_starts_before_its_target_outlives_it_and_ends_on_sigterm(
    spawn: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    path = tmp_path / "new" / "store.sqlite"
    process = run_record(spawn, f"http://127.0.0.1:{port}/metrics", path)
    wait_for(path.exists, 60, "the store is made while nothing answers")
    page = Page(port)
    store = EmbeddedStore(path)
    wait_for(lambda: len(store.latest(RECEIVED)), 20, "a rate is recorded")
    page.end()
    wait_for(lambda: store.latest(RUNNING).empty, 20, "the gauge ends when the target has died")
    page = Page(port)
    wait_for(lambda: len(store.latest(RUNNING)), 20, "it is there again without a restart of the recorder")
    second = run_record(spawn, page.url, path)
    _, text = second.communicate(timeout=60)
    assert second.returncode == 1
    assert b"Another recorder already writes" in text
    process.send_signal(signals.SIGTERM)
    _, text = process.communicate(timeout=15)
    page.end()
    assert process.returncode == 0
    said = text.decode()
    assert said.count("does not answer") in (1, 2)  # the first one only if a step came before the page
    assert said.count("answers.") == 2
    assert "Traceback" not in said


def test_record_refuses_a_file_that_is_not_a_store(
    spawn: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a store\n" * 100)
    process = run_record(spawn, "http://127.0.0.1:9/metrics", path)
    _, text = process.communicate(timeout=60)
    assert process.returncode == 1
    assert b"notes.txt" in text
    assert b"next" in text
    assert path.read_text() == "not a store\n" * 100
