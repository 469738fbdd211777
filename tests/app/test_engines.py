"""The page Engines: what feeds what, how old it is, and what `kvscope doctor` finds at the endpoints that the app was started for."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd
import pytest

from exporters.adapters.doctor import Report
from exporters.adapters.engines import TITLES, capability
from observability.app import endpoints, engines
from observability.signals import SIGNALS
from observability.store.embedded import EmbeddedStore, create
from tests.app import synthetic
from tests.app.browser import Browser
from tests.app.conftest import Start
from tests.app.test_command import kvscope_app
from tests.conftest import wait_for

PAGE = "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{{model_name=\"m\"}} {n}\n# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting{{model_name=\"m\"}} 3\n"  # fmt: skip


@pytest.fixture(scope="module")
def engine_url() -> Iterator[str]:
    """A server that answers as a vLLM without its usual families does; it counts who asked."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            body = PAGE.format(n=len(asked)).encode() if self.path == "/metrics" else b""
            self.send_response(200 if body else 404)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/metrics"
    server.shutdown()
    server.server_close()


def test_the_matrix_is_that_of_the_adapters_one_row_a_signal_and_engine() -> None:
    table = engines.matrix()
    assert len(table) == len(SIGNALS) * len(TITLES)
    titles = {title: engine for engine, title in TITLES.items()}
    for row in table.itertuples(index=False):
        found = capability(titles[row.engine], row.signal)
        assert (row.status, row.reason) == (found.status, found.reason)


def test_a_model_feeds_the_signals_that_have_a_value_now(
    source: EmbeddedStore, tmp_path: Path, rows: dict[str, pd.DataFrame]
) -> None:
    end = max(frame["time"].max().timestamp() for frame in rows.values() if len(frame))
    (feed,) = engines.feeds(EmbeddedStore(source.path, clock=lambda: end), end)
    assert feed.model == synthetic.MODEL
    newest = {name: frame["time"].max().timestamp() for name, frame in rows.items() if len(frame)}
    current = {name for name, at in newest.items() if at > max(newest.values()) - 300}
    assert feed.fed == current - engines.HOST_SIGNALS
    assert len(feed.fed) > 70
    assert set(feed.engines["version"]) <= {"1.0", "1.1"}
    assert feed.age == pytest.approx(rows[engines.UPDATE_AGE.name]["value"].iloc[-1])
    ended = create(tmp_path / "ended.db")
    ended.append(engines.UPDATE_AGE.name, rows[engines.UPDATE_AGE.name])
    (stopped,) = engines.feeds(EmbeddedStore(ended.path, clock=lambda: end + 240), end + 240)
    assert stopped.age == pytest.approx(rows[engines.UPDATE_AGE.name]["value"].iloc[-1] + 240), "its recorder stopped"
    part = create(tmp_path / "part.db")
    part.append("model:kvscope_kv_usage:ratio", rows["model:kvscope_kv_usage:ratio"])
    (feed,) = engines.feeds(EmbeddedStore(part.path, clock=lambda: end), end)
    assert (feed.age, feed.fed) == (None, {"model:kvscope_kv_usage:ratio"})


def test_looks_are_made_beside_the_page_one_at_a_time_and_renewed_when_old() -> None:
    now, started, go = [1000.0], [], threading.Event()

    def look(url: str) -> Report:
        started.append(url)
        go.wait(10)
        return Report(url)

    watch = endpoints.EndpointWatch(["http://user:secret@h/metrics"], look, clock=lambda: now[0])
    assert watch.looks()[0].report is None
    assert "secret" not in watch.looks()[0].url
    wait_for(lambda: started, 5, "the look starts")
    watch.looks()
    assert len(started) == 1, "a look that is under way is not started again"
    go.set()
    wait_for(lambda: watch.looks()[0].report, 5, "the look is over")
    watch.looks()
    assert len(started) == 1
    now[0] += endpoints.RENEW_SECONDS
    watch.looks()
    wait_for(lambda: len(started) == 2, 5, "an old look is renewed")


def test_a_look_that_fails_is_a_finding() -> None:
    def look(url: str) -> Report:
        raise RuntimeError("boom")

    watch = endpoints.EndpointWatch(["http://h/metrics"], look)
    watch.looks()
    report = wait_for(lambda: watch.looks()[0].report, 5, "the look is over")
    assert isinstance(report, Report)
    assert [finding.code for finding in report.findings] == ["look_failed"]


def test_an_endpoint_that_is_no_address_is_named_before_anything_starts(store_path: Path) -> None:
    done = kvscope_app("--source", str(store_path), "--endpoint", "ftp://user:secret@h/metrics")
    assert done.returncode == 2
    assert "is not an http address" in " ".join(done.stderr.split())
    assert "secret" not in done.stderr


def test_the_page_shows_source_matrix_reasons_and_findings_and_asks_no_host_that_a_url_names(
    browser: Browser, start_app: Callable[..., str], store_path: Path, engine_url: str
) -> None:
    url = start_app(store_path, "--endpoint", engine_url, "--endpoint", "http://127.0.0.1:1/metrics")
    browser.look(1280, 800, "light")
    browser.open(f"{url}/engines?endpoint=http://127.0.0.1:2/metrics&engine=Text+Generation+Inference", 0)
    wait_for(
        lambda: "being looked at" not in browser.text() and "vLLM, version" in browser.text(), 60, "both looks are over"
    )
    text = browser.text()
    assert str(store_path) in text
    assert synthetic.MODEL in text
    assert "What can Text Generation Inference not feed, and why?" in text
    assert capability("tgi", "model:kvscope_kv_hit:ratio_rate5m").reason in text
    assert "does not answer" in text
    assert "127.0.0.1:2" not in text
    assert browser.count("table.marks tbody tr") == len(SIGNALS)
    assert browser.count(".placeholder.failed, [data-testid=stException]") == 0
    assert browser.overflow()[0] <= 0
    browser.picture("app-engines")


def test_the_page_works_without_data_and_without_endpoints(browser: Browser, start_app: Start, tmp_path: Path) -> None:
    store = create(tmp_path / "empty.db")
    browser.look(1920, 1080, "dark")
    url = start_app(store.path)
    browser.open(f"{url}/engines", 0)
    text = browser.text()
    assert "Nothing has been recorded yet." in text
    assert "No endpoint is watched." in text
    assert browser.count("table.marks tbody tr") == len(SIGNALS)
    store.path.rename(tmp_path / "gone.db")
    wait_for(lambda: browser.status() == "down", 60, "the page says that the source is gone")
    time.sleep(0.5)
    assert browser.count("table.marks tbody tr") + browser.count(".placeholder.failed") > 1, (
        "what needs no source stays"
    )
    assert browser.count("[data-testid=stException]") == 0
