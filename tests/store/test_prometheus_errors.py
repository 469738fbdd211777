"""A Prometheus that is not there, is something else, or fails: an error with a next step, never a crash or a hang."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pandas as pd
import pytest

from observability.errors import StoreError
from observability.store import embedded
from observability.store.open import open_source
from observability.store.prometheus import PrometheusSource

SIGNAL = "model:kvscope_kv_usage:ratio"


@pytest.fixture
def answer() -> Iterator[Callable[[int, bytes], str]]:
    """answer(status, body) -> URL of a server that gives this to every request; status 0 never answers."""
    servers: list[ThreadingHTTPServer] = []
    release = threading.Event()

    def start(status: int, body: bytes) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if status == 0:
                    release.wait(20)
                    return
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    release.set()
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (200, b"<html>Welcome</html>", "not an answer of Prometheus"),
        (200, b"[]", "not an answer of Prometheus"),
        (404, b"not found", "status 404"),
        (503, b'{"status":"error","errorType":"unavailable","error":"starting up"}', "starting up"),
        (0, b"", "does not answer"),
    ],
)
def test_a_server_that_fails_is_an_error_that_says_what_it_said(
    answer: Callable[[int, bytes], str], status: int, body: bytes, reason: str
) -> None:
    source = PrometheusSource(answer(status, body), timeout_seconds=1.0)
    reads: list[Callable[[], object]] = [
        lambda: source.range(SIGNAL, 0, 60, 15), lambda: source.latest(SIGNAL), source.models, source.freshness,
        lambda: source.simulated(0, 60), source.describe,
    ]  # fmt: skip
    for read in reads[: 1 if status == 0 else None]:
        began = time.monotonic()
        with pytest.raises(StoreError, match=reason) as error:
            read()
        assert error.value.next_step
        assert time.monotonic() - began < 10
    source.close()


def test_nothing_listens(free_port: Callable[[], int]) -> None:
    with pytest.raises(StoreError, match="does not answer"):
        open_source(f"prometheus:http://user:secret@127.0.0.1:{free_port()}").latest(SIGNAL)


def test_a_password_is_not_shown(free_port: Callable[[], int]) -> None:
    with pytest.raises(StoreError) as error:
        open_source(f"prometheus:http://user:secret@127.0.0.1:{free_port()}").latest(SIGNAL)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("name", ["prometheus:", "prometheus:127.0.0.1:9090", "prometheus:ftp://x"])
def test_what_is_not_an_address_is_refused(name: str) -> None:
    with pytest.raises(StoreError, match="not the address"):
        open_source(name)


def test_forecasts_of_a_prometheus_come_from_the_file_that_is_named_with_it(tmp_path: Path) -> None:
    from tests.store.test_embedded import NOW, REQUESTS, forecast

    path = tmp_path / "forecasts.sqlite"
    source = open_source(f"prometheus:http://127.0.0.1:9#{path}")
    assert source.forecasts(REQUESTS, {}, "prophet").empty
    store = embedded.create(path)
    store.add_forecasts([forecast(NOW, 1.0)])
    pd.testing.assert_frame_equal(source.forecasts(REQUESTS, {}, "prophet"), store.forecasts(REQUESTS, {}, "prophet"))
