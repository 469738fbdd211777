"""The exposition: exact text, both reference parsers, promtool, HTTP behaviour, many scrapes while recording."""

from __future__ import annotations

import asyncio
import gzip
import math
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import httpx
import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from exporters.prometheus import Exporter, MetricsApp, TelemetryCollector, prefers_openmetrics, start_exporter
from exporters.text import render
from observability import catalog as c
from observability.catalog import Family
from observability.engine.kv.residency import Ledger
from observability.errors import ServiceError
from observability.telemetry.snapshot import Exemplar, FamilySamples, Row
from tests.telemetry.bench import PREFILL, Bench, kv_state

OPENMETRICS = {"Accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"}


def busy() -> Bench:
    """A recorder in which every family has samples."""
    b = Bench(kv_dtype="int8")
    for i in range(12):
        b.serve(b.submit(request_class=c.CLASSES[i % 3], prompt=700 * i), prefill=0.05 * i)
    b.t.lookup(b.submit(tenant="acme"), 96, 16)
    b.t.preempted(b.submit())
    b.t.quant_error(0, "0-9", "int8", 0.01, 100.0, 0.05, 10)
    compared = b.submit()
    b.t.quant_compared(compared, "int8", 0.002, True, [("0-9", 0.04, 100.0)])
    b.t.finish(compared, "abort", b.clock.now)
    b.t.mechanisms.expect(moves=range(len(c.MOVES)), prefetch=True, controller=True, sessions=True, copies=True)
    b.t.mechanisms.limits(2048, 32)
    state = kv_state(free=60, evictable=1, active=3, stored=40)
    state = replace(
        state,
        compressed=(5, 2, 1),
        bytes_per_compressed_block=256,
        host=(9, 1, 0),
        fixed_bytes=512,
        fixed_bytes_per_sequence=256,
    )
    ledger = Ledger(4, lambda: 5.0)
    ledger.begin(np.arange(4))
    state = replace(state, residency=[ledger.residency()] * 3, eviction_memory_seconds=12.5)
    b.t.publish(state, [0, 2, 0], [1, 0, 0])
    return b


@pytest.fixture
def served() -> Iterator[tuple[Bench, Exporter]]:
    b = busy()
    with start_exporter(b.t) as exporter:
        yield b, exporter


# -- text -------------------------------------------------------------------------------------------------------------

_SECONDS = Family("x_wait_seconds", "histogram", "seconds", ("model",), 'Time "waiting",\nwith \\ inside.', (0.5, 1.0))
_FAMILIES = [
    FamilySamples(Family("x_requests", "counter", "requests", ("model", "class"), "Requests."), [Row("_total", ('a"b\\c\nd', "s"), 3.0)]),
    FamilySamples(Family("x_running", "gauge", "requests", (), "Running."), [Row("", (), 0.1)]),
    FamilySamples(Family("x_engine", "info", "", ("version",), "Engine."), [Row("_info", ("1",), 1.0)]),
    FamilySamples(
        _SECONDS,
        [
            Row("_bucket", ("m", "0.5"), 1.0, Exemplar((("request_id", "r-1"),), 0.25, 1700000000.5)),
            Row("_bucket", ("m", "1.0"), 1.0),
            Row("_bucket", ("m", "+Inf"), 2.0, Exemplar((("trace_id", 'ab"'),), 64.0, 1700000001.0)),
            Row("_sum", ("m",), 64.25),
            Row("_count", ("m",), 2.0),
        ],
    ),
]  # fmt: skip


def test_classic_text() -> None:
    assert render(_FAMILIES, openmetrics=False).decode() == (
        "# HELP x_requests_total Requests.\n"
        "# TYPE x_requests_total counter\n"
        'x_requests_total{model="a\\"b\\\\c\\nd",class="s"} 3\n'
        "# HELP x_running Running.\n"
        "# TYPE x_running gauge\n"
        "x_running 0.1\n"
        "# HELP x_engine_info Engine.\n"
        "# TYPE x_engine_info gauge\n"
        'x_engine_info{version="1"} 1\n'
        '# HELP x_wait_seconds Time "waiting",\\nwith \\\\ inside.\n'
        "# TYPE x_wait_seconds histogram\n"
        'x_wait_seconds_bucket{model="m",le="0.5"} 1\n'
        'x_wait_seconds_bucket{model="m",le="1.0"} 1\n'
        'x_wait_seconds_bucket{model="m",le="+Inf"} 2\n'
        'x_wait_seconds_sum{model="m"} 64.25\n'
        'x_wait_seconds_count{model="m"} 2\n'
    )


def test_openmetrics_text() -> None:
    assert render(_FAMILIES, openmetrics=True).decode() == (
        "# HELP x_requests Requests.\n"
        "# TYPE x_requests counter\n"
        "# UNIT x_requests requests\n"
        'x_requests_total{model="a\\"b\\\\c\\nd",class="s"} 3\n'
        "# HELP x_running Running.\n"
        "# TYPE x_running gauge\n"
        "x_running 0.1\n"
        "# HELP x_engine Engine.\n"
        "# TYPE x_engine info\n"
        'x_engine_info{version="1"} 1\n'
        '# HELP x_wait_seconds Time \\"waiting\\",\\nwith \\\\ inside.\n'
        "# TYPE x_wait_seconds histogram\n"
        "# UNIT x_wait_seconds seconds\n"
        'x_wait_seconds_bucket{model="m",le="0.5"} 1 # {request_id="r-1"} 0.25 1700000000.500\n'
        'x_wait_seconds_bucket{model="m",le="1.0"} 1\n'
        'x_wait_seconds_bucket{model="m",le="+Inf"} 2 # {trace_id="ab\\""} 64 1700000001.000\n'
        'x_wait_seconds_sum{model="m"} 64.25\n'
        'x_wait_seconds_count{model="m"} 2\n'
        "# EOF\n"
    )


def test_nothing_renders_to_an_empty_exposition() -> None:
    assert render([], openmetrics=False) == b""
    assert render([], openmetrics=True) == b"# EOF\n"


@pytest.mark.parametrize("number", [0.1, 1e-300, 1 / 3, 2.0**53, 1e15, 1e22, -0.5, math.inf, -math.inf])
def test_numbers_read_back_as_the_same_float(number: float) -> None:
    text = render([FamilySamples(c.SCRAPE_SECONDS, [Row("", (), number)])], openmetrics=False).decode()
    assert float(text.splitlines()[-1].split()[-1]) == number


@pytest.mark.parametrize("openmetrics", [False, True])
def test_the_reference_parsers_read_back_every_sample(openmetrics: bool) -> None:
    families = busy().t.snapshot()
    text = render(families, openmetrics=openmetrics).decode()
    parsed = {
        (s.name, frozenset(s.labels.items())): s
        for metric in (parse_openmetrics if openmetrics else parse_text)(text)
        for s in metric.samples
    }
    expected = {
        (family.name + row.suffix, frozenset(zip((*family.labels, "le"), row.labels, strict=False))): row
        for family, rows in families
        for row in rows
    }
    assert parsed.keys() == expected.keys()
    of_others = {f.name for f in (c.SCRAPE_SECONDS, c.SCRAPE_SERIES, *c.FOREIGN_FAMILIES, *c.HOST_FAMILIES)}
    of_others |= {f.name for f in c.FORECAST_FAMILIES}
    assert {f.name for f, _ in families} - {"kvscope_hardware_target"} == {f.name for f in c.FAMILIES} - of_others
    for key, row in expected.items():
        assert parsed[key].value == row.value
        if openmetrics and row.exemplar is not None:
            assert parsed[key].exemplar.labels == dict(row.exemplar.labels)
            assert parsed[key].exemplar.value == row.exemplar.value
            assert float(parsed[key].exemplar.timestamp) == pytest.approx(row.exemplar.timestamp, abs=1e-3)
    assert (
        sum(s.exemplar is not None for s in parsed.values())
        == sum(r.exemplar is not None for r in expected.values()) * openmetrics
    )
    assert not any(name.endswith("_created") for name, _ in parsed)


def test_the_collector_exposes_the_same_samples_through_a_registry() -> None:
    b = busy()
    registry = CollectorRegistry()
    registry.register(TelemetryCollector(b.t))

    def read(text: str) -> set[tuple[object, ...]]:
        return {
            (s.name, frozenset(s.labels.items()), s.value, s.exemplar and tuple(s.exemplar.labels.items()))
            for metric in parse_openmetrics(text)
            for s in metric.samples
        }

    assert read(generate_openmetrics(registry).decode()) == read(render(b.t.snapshot(), openmetrics=True).decode())


def test_exemplars_are_the_newest_request_of_their_bucket() -> None:
    b = Bench()
    for prefill in (0.31, 0.31, 5.0):
        b.serve(b.submit(), queue=0.0, prefill=prefill, tokens=1)
    exemplars = [
        row.exemplar for f, rows in b.t.snapshot() if f is c.TIME_TO_FIRST_TOKEN for row in rows if row.exemplar
    ]
    assert [e.labels for e in exemplars] == [(("request_id", "req-2"),), (("request_id", "req-3"),)]
    assert exemplars[1].value == pytest.approx(5.0)
    assert exemplars[1].timestamp == pytest.approx(1_700_000_000 + 5.62)


@pytest.mark.parametrize(("request_id", "label"), [('r\n"1"', 'r\n"1"'), ("x" * 5000, None), ("", None)])
def test_an_id_that_an_exemplar_cannot_hold_is_left_out(request_id: str, label: str | None) -> None:
    b = Bench()
    trace = b.t.arrive(request_id, "standard", 10, 0.0)
    b.serve(trace)
    text = render(b.t.snapshot(), openmetrics=True).decode()
    found = [s.exemplar.labels for m in parse_openmetrics(text) for s in m.samples if s.exemplar]
    assert found == ([{"request_id": label}] * 2 if label else [])


def test_promtool_finds_nothing_but_the_heatmaps_bucket_label(program: Callable[[str], str]) -> None:
    families = [
        *busy().t.snapshot(),
        FamilySamples(c.SCRAPE_SECONDS, [Row("", (), 0.1)]),
        FamilySamples(c.SCRAPE_SERIES, [Row("", (), 9)]),
    ]
    text = render(families, openmetrics=False)
    result = subprocess.run([program("promtool"), "check", "metrics"], input=text, capture_output=True, timeout=60)
    assert result.returncode in (0, 3), result  # 3: something to remark
    found = set((result.stdout + result.stderr).decode().splitlines())
    # A heatmap over a gauge sorts its rows by `le`; promtool wants this label on histograms only.
    heatmaps = (c.KV_FREE_RUNS, c.KV_LIVE_AGES)
    assert found <= {f'{family.name} non-histogram metrics should not have "le" label' for family in heatmaps}


# -- HTTP -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accept", "openmetrics"),
    [
        ("", False),
        ("*/*", False),
        ("application/openmetrics-text", True),
        (
            "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
            True,
        ),
        ("application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,text/plain;version=0.0.4;q=0.3", True),
        ("application/openmetrics-text;version=0.0.1,text/plain;q=0.5", False),
        ("text/plain, application/openmetrics-text;q=0.5", False),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text; version=x; q=high,;;;=,,", False),
    ],
)
def test_openmetrics_is_served_to_those_who_prefer_it(accept: str, openmetrics: bool) -> None:
    assert prefers_openmetrics(accept) is openmetrics


def test_the_endpoint_negotiates_form_and_compression(served: tuple[Bench, Exporter]) -> None:
    _, exporter = served
    assert exporter.url.startswith("http://127.0.0.1:")
    with httpx.Client(headers={"Accept-Encoding": ""}) as client:
        text = client.get(exporter.url)
        openmetrics = client.get(exporter.url, headers=OPENMETRICS)
        assert text.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert openmetrics.headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
        assert "# EOF" not in text.text
        assert " # {" in openmetrics.text
        assert openmetrics.text.endswith("# EOF\n")
        with client.stream("GET", exporter.url, headers={"Accept-Encoding": "gzip"}) as packed:
            raw = b"".join(packed.iter_raw())
        assert packed.headers["content-encoding"] == "gzip"
        assert len(raw) < len(text.content) / 5
        assert gzip.decompress(raw).startswith(b"# HELP kvscope_requests_received_total")
        assert client.head(exporter.url).status_code == 200
        assert client.post(exporter.url).status_code == 405
        assert client.get(exporter.url + "x").status_code == 404


def test_scrapes_at_the_same_time_share_one_rendering() -> None:
    b = busy()
    snapshots: list[int] = []

    class Counting:
        def snapshot(self) -> list[FamilySamples]:
            snapshots.append(threading.get_ident())
            return b.t.snapshot()

    async def scrape() -> list[httpx.Response]:
        transport = httpx.ASGITransport(MetricsApp(Counting()))  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await asyncio.gather(*(client.get("/") for _ in range(30)))

    responses = asyncio.run(scrape())
    assert {r.status_code for r in responses} == {200}
    assert len({r.text for r in responses}) == len(snapshots) < 5
    assert threading.get_ident() not in snapshots  # not on the event loop's thread


def test_a_scrape_tells_how_long_and_how_large_the_previous_one_was(served: tuple[Bench, Exporter]) -> None:
    _, exporter = served
    first, second = (httpx.get(exporter.url).text for _ in range(2))
    assert "kvscope_scrape" not in first  # nothing to tell yet
    values = {
        s.name: s.value for metric in parse_text(second) for s in metric.samples if s.name.startswith("kvscope_scrape")
    }
    assert values["kvscope_scrape_series"] == sum(not line.startswith("#") for line in first.splitlines())
    assert 0.0 < values["kvscope_scrape_render_seconds"] < 5.0


def test_a_token_guards_the_endpoint() -> None:
    with start_exporter(Bench().t, token="s3cret") as exporter:
        assert httpx.get(exporter.url).status_code == 401
        assert httpx.get(exporter.url, headers={"Authorization": "Bearer wrong"}).status_code == 401
        assert httpx.get(exporter.url, headers={"Authorization": "Bearer s3cret"}).status_code == 200


def test_a_taken_port_is_named_in_the_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ServiceError, match=f"127.0.0.1:{port}.*\nNext: "):
            start_exporter(Bench().t, port=port)


def test_stop_closes_the_port_and_ends_the_thread() -> None:
    exporter = start_exporter(Bench().t)
    assert httpx.get(exporter.url).status_code == 200
    exporter.stop()
    assert not [t for t in threading.enumerate() if t.name == "kvscope-exporter"]
    with pytest.raises(httpx.ConnectError):
        httpx.get(exporter.url)


def test_scrapes_from_many_threads_never_see_a_counter_go_back_or_hold_up_the_recorder() -> None:
    b = Bench(kv_dtype="int8")
    stop = threading.Event()
    faults: list[str] = []
    scrapes = [0]

    def scrape(url: str) -> None:
        last: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        with httpx.Client(timeout=30) as client:
            while not stop.is_set():
                response = client.get(url, headers=OPENMETRICS)
                if response.status_code != 200:
                    faults.append(f"status {response.status_code}")
                for metric in parse_openmetrics(response.text):
                    for s in metric.samples:
                        if metric.type in ("counter", "histogram"):
                            key = (s.name, frozenset(s.labels.items()))
                            if s.value < last.get(key, 0.0):
                                faults.append(f"{key}: {last[key]} -> {s.value}")
                            last[key] = s.value
                scrapes[0] += 1

    def read() -> None:
        last = np.zeros(0)
        gauges = {f.name for f in c.FAMILIES if f.kind == "gauge"}
        while not stop.is_set():
            values = b.t.values()
            layout = b.t.layout[: len(values)]
            back = np.flatnonzero(values[: len(last)] < last)
            faults.extend(f"{layout[i]}: {last[i]} -> {values[i]}" for i in back if layout[i].name not in gauges)
            last = values

    with start_exporter(b.t) as exporter:
        threads = [
            *(threading.Thread(target=scrape, args=(exporter.url,)) for _ in range(3)),
            threading.Thread(target=read),
        ]
        for thread in threads:
            thread.start()
        end, i = time.monotonic() + 4.0, 0
        while time.monotonic() < end:
            i += 1
            b.serve(b.submit(request_class=c.CLASSES[i % 3]), prefill=0.001 * (i % 900))
            b.t.quant_error(i % 2, f"{i % 50}", "int8", 0.01, 100.0, 0.05, 10)
            b.t.publish(kv_state(), [0, 0, 0], [0, 0, 0])
            if i % 100 == 0:
                trace = b.submit()
                b.t.transition(trace, PREFILL)
                b.t.preempted(trace)
                b.t.finish(trace, "abort", b.clock.now)
        stop.set()
        for thread in threads:
            thread.join()
    assert not faults
    assert scrapes[0] >= 3
    assert i > 200
    assert not b.anomalies()
