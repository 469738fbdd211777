"""The endpoint in a process of its own shows what the recorder holds, and lives as long as the process that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import pytest

from exporters.mirror import Far, MirroredColumns
from exporters.process import Columns, ExporterProcess, _Known, start_exporter_process
from exporters.text import render
from exporters.together import Together
from observability import catalog as c
from observability.telemetry.snapshot import FamilySamples, Row
from tests.telemetry.bench import Bench
from tests.telemetry.test_exporter import OPENMETRICS, busy

SECONDS = 60.0  # for what takes one or two on a machine with nothing else to do


class Gpu:
    """A source beside the recorder that gives rows."""

    def __init__(self) -> None:
        self.celsius = 61.0

    def snapshot(self) -> list[FamilySamples]:
        if self.celsius > 100.0:
            raise RuntimeError("no sensor")
        return [FamilySamples(c.SCRAPE_SECONDS, [Row("", (), self.celsius)])]


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Bench, Gpu, ExporterProcess]]:
    bench, gpu = busy(), Gpu()
    with start_exporter_process(Together([bench.t, gpu]), token="s3cret") as exporter:
        yield bench, gpu, exporter


def scrape(exporter: ExporterProcess, **headers: str) -> httpx.Response:
    return httpx.get(exporter.url, headers={"Authorization": "Bearer s3cret", **headers}, timeout=SECONDS)


def lines(body: bytes) -> set[bytes]:
    return {line for line in body.splitlines() if b"kvscope_scrape_" not in line}


@pytest.mark.parametrize("headers", [{}, OPENMETRICS], ids=["text", "openmetrics"])
def test_what_is_served_is_what_the_recorder_holds_through_new_values_series_and_exemplars(
    served: tuple[Bench, Gpu, ExporterProcess], headers: dict[str, str]
) -> None:
    bench, gpu, exporter = served
    for turn in range(3):
        span = bench.submit(tenant=f"tenant-{len(headers)}-{turn}")
        span.exemplar = (("trace_id", f"{turn:032x}"),)
        bench.serve(span)
        gpu.celsius += 1.0
        found = scrape(exporter, **headers)
        assert found.status_code == 200
        assert lines(found.content) == lines(render(bench.t.snapshot(), openmetrics=bool(headers)))
        assert f"kvscope_scrape_render_seconds {gpu.celsius:g}\n" in found.text
        assert (f'trace_id="{turn:032x}"' in found.text) == bool(headers)


def test_it_asks_for_the_token(served: tuple[Bench, Gpu, ExporterProcess]) -> None:
    _, _, exporter = served
    assert httpx.get(exporter.url, timeout=SECONDS).status_code == 401


def test_a_source_that_cannot_be_read_costs_that_scrape_alone(served: tuple[Bench, Gpu, ExporterProcess]) -> None:
    _, gpu, exporter = served
    before, gpu.celsius = gpu.celsius, 1000.0
    assert scrape(exporter).status_code == 500
    gpu.celsius = before
    assert scrape(exporter).status_code == 200


def test_killed_it_comes_back_with_everything_and_stopped_it_is_gone() -> None:
    bench = busy()
    with start_exporter_process(bench.t) as exporter:
        assert httpx.get(exporter.url, timeout=SECONDS).status_code == 200
        first = exporter.pid
        os.kill(first, signal.SIGKILL)
        end = time.monotonic() + SECONDS
        while exporter.pid == first:
            assert time.monotonic() < end
            time.sleep(0.05)
        again = httpx.get(exporter.url, timeout=SECONDS)
        assert lines(again.content) == lines(render(bench.t.snapshot(), openmetrics=False))
        last = exporter.pid
    with pytest.raises(httpx.ConnectError):
        httpx.get(exporter.url)
    with pytest.raises(ProcessLookupError):
        os.kill(last, 0)


ENGINE = """
import time
from exporters.process import start_exporter_process
from tests.telemetry.bench import Bench
exporter = start_exporter_process(Bench().t)
print(exporter.url, exporter.pid, flush=True)
time.sleep(600)
"""


def test_it_ends_with_an_engine_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", ENGINE], stdout=subprocess.PIPE, text=True) as engine:
        try:
            assert engine.stdout is not None
            url, _ = engine.stdout.readline().split()
            assert httpx.get(url, timeout=SECONDS).status_code == 200
        finally:
            engine.kill()
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        try:
            httpx.get(url, timeout=SECONDS)
        except httpx.TransportError:
            return
        time.sleep(0.05)
    pytest.fail("the endpoint still answers")


def test_a_mirror_gives_the_rows_that_its_recorder_gives() -> None:
    bench, known = busy(), _Known()

    class Near(Far):
        def __init__(self) -> None: ...

        def ask(self, part: int, blocks: int = 0) -> Columns:
            return known.read(bench.t, blocks)

    mirror = MirroredColumns(Near(), 0)
    for turn in range(2):
        span = bench.submit(tenant=f"tenant-{turn}")
        span.exemplar = (("trace_id", f"{turn:032x}"),)
        bench.serve(span)
        assert mirror.snapshot() == bench.t.snapshot()


@pytest.mark.parametrize("change", [-1, 1])
def test_a_reading_of_another_length_is_refused(change: int) -> None:
    layout, values = busy().t.columns()
    with pytest.raises(ValueError, match=r"zip|more values"):
        layout.rows([*values.tolist(), 0.0][: len(values) + change])
