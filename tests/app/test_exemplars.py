"""The way from a slow request to its trace, with real parts: a traced request of a live server, its exemplar in a real Prometheus, the page
P99 in a browser, and the link."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from opentelemetry.sdk.trace import TracerProvider

from observability.engine.model.loading import load_model
from tests.app.browser import Browser
from tests.app.conftest import Start
from tests.boards import live
from tests.conftest import wait_for
from tests.server.harness import HTTP, serving

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def test_a_slow_request_leads_to_its_trace(
    browser: Browser, start_app: Start, spawn: Callable[..., Any], program: Callable[[str], str], tmp_path: Path
) -> None:
    with serving(load_model("tiny"), tracers=TracerProvider()) as server:
        address = live.free_address()
        target = server.url.removeprefix("http://")
        prometheus = live.start_prometheus(spawn, program, tmp_path, [target], address=address)
        live.wait_until_ready(prometheus.url)
        body = {"model": "tiny", "prompt": "Why is it slow?", "max_tokens": 200, "ignore_eos": True}
        caller = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
        HTTP.post(f"{server.url}/v1/completions", json=body, headers=caller).raise_for_status()

        def noted() -> bool:
            HTTP.post(f"{server.url}/v1/completions", json={**body, "max_tokens": 1})
            return TRACE in HTTP.get(
                f"{prometheus.url}/api/v1/query_exemplars",
                params={"query": "kvscope_request_duration_seconds_bucket", "start": 0, "end": 1e11},
            ).text  # fmt: skip

        wait_for(noted, 60, "the exemplar is stored")
        url = start_app(
            f"prometheus:{prometheus.url}", "--trace-url", "http://traces.example/t/{trace_id}?from=kvscope"
        )
        browser.look(1280, 800, "light")
        browser.open(f"{url}/p99?range=15m", 0)
        wanted = f"http://traces.example/t/{TRACE}?from=kvscope"
        links = "return [...document.querySelectorAll('.st-key-card-requests a')].map(a => a.href)"
        wait_for(lambda: wanted in browser.driver.execute_script(links), 90, "the link to the trace")
        found = browser.driver.execute_script(links)
        assert all(re.fullmatch(r"http://traces\.example/t/[0-9a-f]{32}\?from=kvscope", link) for link in found)
        assert found[0] == wanted, "the slowest stands first"
