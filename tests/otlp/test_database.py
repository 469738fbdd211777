"""A database with OTLP ingest stores what is pushed under the names of a scrape. Opt-in: KVSCOPE_VICTORIA_METRICS names its program."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from exporters.otlp import HistogramForm, start_otlp
from observability import catalog
from observability.engine.model.loading import load_model
from tests.conftest import wait_for
from tests.otlp.test_otlp import CHAT
from tests.server.harness import HTTP, serving

PROGRAM = os.environ.get("KVSCOPE_VICTORIA_METRICS")
pytestmark = pytest.mark.skipif(
    not PROGRAM, reason="KVSCOPE_VICTORIA_METRICS names no VictoriaMetrics (1.145 was tried)"
)


@pytest.mark.parametrize("form", ["advised", "exponential"])
def test_a_database_stores_every_series_under_the_name_of_a_scrape_and_finds_the_quantiles(
    form: HistogramForm,
    free_port: Callable[[], int],
    spawn: Callable[..., subprocess.Popen[bytes]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address = f"127.0.0.1:{free_port()}"
    assert PROGRAM is not None
    with (tmp_path / "log").open("wb") as log:
        spawn(
            PROGRAM, f"-storageDataPath={tmp_path / 'data'}", f"-httpListenAddr={address}",
            "-opentelemetry.usePrometheusNaming", "-search.latencyOffset=0s", stdout=log, stderr=log,
        )  # fmt: skip
    with httpx.Client(base_url=f"http://{address}/api/v1", trust_env=False) as database:
        wait_for(lambda: database.get("/query", params={"query": "1"}).is_success, 20, "the database")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", f"http://{address}/opentelemetry/v1/metrics")
        monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
        with serving(load_model("tiny"), otlp=lambda telemetry: start_otlp(telemetry, form=form)) as server:
            for _ in range(10):
                assert HTTP.post(server.url + "/v1/chat/completions", json=CHAT).is_success
            server.wait_idle()

        def value(query: str) -> float:
            (sample,) = database.get("/query", params={"query": query}).json()["data"]["result"]
            return float(sample["value"][1])

        def names() -> set[str]:
            return set(database.get("/label/__name__/values").json()["data"])

        wait_for(lambda: value("sum(gen_ai_server_request_duration_seconds_count)"), 15, "what was pushed")
        rows = [(family, row) for family, rows in server.telemetry.snapshot() for row in rows]
        assert {family.name + row.suffix for family, row in rows} <= names()
        for family in (catalog.REQUESTS, catalog.GENERATION_TOKENS, catalog.KV_QUERIED_TOKENS):
            assert value(f"sum({family.series})") == sum(row.value for known, row in rows if known is family)
        durations = sorted(record.finished - record.arrival for record in server.records)
        for name in ("kvscope_request_duration_seconds", "gen_ai_server_request_duration_seconds"):
            assert value(f"sum({name}_count)") == 10
            assert value(f"sum({name}_sum)") == pytest.approx(sum(durations), rel=1e-6)
            if form == "exponential":  # the database's own buckets are 1 to 1.14 wide
                found = value(f"histogram_quantile(0.9, sum({name}_bucket) by (le, vmrange))")
                assert durations[8] / 1.2 <= found <= durations[9] * 1.2
