"""A source that answers slowly: the page says how long it waits, can be stopped, reads again; and says who answers with what it cannot read.

The server speaks Prometheus' HTTP API with a delay that the test chooses, and has one alert and one exemplar.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from observability.signals import SIGNALS
from observability.store.prometheus import PrometheusSource
from tests.app.browser import Browser
from tests.app.conftest import Start
from tests.conftest import wait_for

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


class Slow(ThreadingHTTPServer):
    """`delay`: seconds that each range query takes."""

    daemon_threads = True
    delay = 0.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Slow

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        query, path = parse_qs(asked.query), asked.path.removeprefix("/api/v1/")
        body = json.dumps({"status": "success", "data": self.answer(path, query)}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def answer(self, path: str, query: dict[str, list[str]]) -> Any:
        now = time.time()
        if path == "label/model/values":
            return ["m"]
        if path == "series":
            return [{"model": "m"}]
        if path == "rules":
            return {"groups": [{"rules": [{"name": signal.name} for signal in SIGNALS]}]}
        if path == "query_exemplars":
            labels = {"__name__": "x_bucket", "le": "1.0", "model": "m", "class": "standard"}
            noted = [{"labels": {"trace_id": TRACE}, "value": value, "timestamp": now} for value in ("0.4", "2.5")]
            return [{"seriesLabels": labels, "exemplars": noted}]
        if path == "query":
            return {"result": [{"metric": {}, "value": [now, "1"]}]}
        time.sleep(self.server.delay)
        if query["query"][0].startswith("ALERTS"):
            start, step = float(query["start"][0]), float(query["step"][0])
            metric = {"alertname": "KvscopeTTFTBudgetBurn", "severity": "critical", "model": "m", "window": "1h"}
            times = [start + step * i for i in (10, 11, 12, 30)]
            return {"result": [{"metric": metric, "values": [[at, "1"] for at in times]}]}
        return {"result": []}

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def slow() -> Iterator[Slow]:
    server = Slow(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_alerts_become_spans_and_exemplars_are_slowest_first(slow: Slow) -> None:
    source, end = PrometheusSource(slow.url), 1_790_000_000.0
    first, second = source.alerts(end - 900, end, "m")
    assert (first.name, first.severity, first.labels) == ("KvscopeTTFTBudgetBurn", "critical", {"window": "1h"})
    assert (first.start, first.end) == (end - 900 + 150, end - 900 + 180)
    assert second.start == second.end == end - 900 + 450
    noted = source.exemplars("kvscope_request_duration_seconds", end - 900, end, "m")
    assert [request.seconds for request in noted] == [2.5, 0.4]
    assert (noted[0].ids, noted[0].labels) == ({"trace_id": TRACE}, {"class": "standard"})
    source.close()


def test_a_slow_read_says_so_can_be_stopped_and_read_again(browser: Browser, start_app: Start, slow: Slow) -> None:
    url, run = start_app(f"prometheus:{slow.url}"), browser.driver.execute_script
    browser.look(1280, 800, "light")
    slow.delay = 5.0
    browser.driver.get(url)
    look = "const e = document.querySelector('.st-key-stop-reading'); return e ? getComputedStyle(e).visibility : ''"
    wait_for(lambda: browser.status() == "reading" and run(look) == "visible", 90, "Stop is offered")
    wait_for(lambda: "Reading… 3 s" in browser.text(), 60, "the page says how long it waits")
    browser.picture("app-slow", whole=False)
    run("document.querySelector('.st-key-stop-reading button').click()")
    wait_for(lambda: browser.status() == "stopped", 60, "reading stops")
    wait_for(lambda: "Not read: reading was stopped." in browser.text(), 20, "cards say why they are empty")
    slow.delay = 0.0
    run("document.querySelector('.st-key-read-again button').click()")
    wait_for(lambda: browser.status() == "live", 60, "reading goes on")
    wait_for(lambda: "reading was stopped" not in browser.text(), 20, "what was not read is read")


def test_the_slowest_requests_are_listed_with_their_traces(browser: Browser, start_app: Start, slow: Slow) -> None:
    slow.delay = 0.0
    browser.open(f"{start_app(f'prometheus:{slow.url}')}/p99", 0)
    wait_for(lambda: TRACE in browser.text(), 30, "the trace of a slow request")
    assert "2.50 s" in browser.text()
    assert browser.count(".st-key-card-requests a") == 0, "without a configured address an id is text"
