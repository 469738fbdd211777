"""Disks that are full, read-only or slow, and clocks that step: what is stored stays, what can go on goes on, and it is told once."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from exporters.prometheus import start_exporter
from observability.engine.model.loading import load_model
from observability.engine.sessions import SnapshotDirectory
from observability.errors import StoreError
from observability.store import embedded
from observability.store import recorder as recorder_module
from observability.store.embedded import EmbeddedStore
from observability.store.recorder import Recorder, TelemetryTarget, record
from observability.telemetry.recorder import Telemetry
from tests.conftest import wait_for
from tests.server.harness import HTTP, serving
from tests.telemetry.bench import Bench

CLI = (sys.executable, "-m", "observability.cli")
RATE = "model:kvscope_requests_received:rate5m"


def stored_times(path: Path) -> list[float]:
    with sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=30) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        rows = db.execute("SELECT time FROM points JOIN signals ON signal = id WHERE name = ? ORDER BY time", (RATE,))
        times = [at / 1000 for (at,) in rows.fetchall()]
    db.close()
    return times


class Disk:
    """A writer that can be made to refuse."""

    def __init__(self, store: EmbeddedStore) -> None:
        self.store, self.full = store, False

    def append_blocks(self, blocks, *, observed_until=None) -> None:  # type: ignore[no-untyped-def]
        if self.full:
            raise StoreError("disk is full.", next_step="Free some.")
        self.store.append_blocks(blocks, observed_until=observed_until)


@pytest.mark.parametrize("batch", [1, 7])
def test_what_could_not_be_written_is_written_once_there_is_room(tmp_path: Path, batch: int) -> None:
    b = Bench()
    disk = Disk(embedded.create(tmp_path / "s.sqlite"))
    recorder, target = Recorder(disk, batch=batch), TelemetryTarget(b.t)
    start = time.time() - 3600.0
    wanted = []
    for i in range(60):
        disk.full = 10 <= i < 40
        b.serve(b.submit(request_class=("standard", "interactive")[i > 20]))  # a class more while the disk is full
        wanted.append(start + 15.0 * i)
        with contextlib.suppress(StoreError):
            recorder.step(wanted[-1], target.scrape())
    recorder.flush()
    assert stored_times(tmp_path / "s.sqlite") == pytest.approx(wanted, abs=0.001)


def test_what_waits_for_room_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "MOST_UNWRITTEN", 12)
    b = Bench()
    disk = Disk(embedded.create(tmp_path / "s.sqlite"))
    recorder, target = Recorder(disk), TelemetryTarget(b.t)
    disk.full = True
    start = time.time() - 7200.0
    for i in range(30):
        with contextlib.suppress(StoreError):
            recorder.step(start + 15.0 * i, target.scrape())
    disk.full = False
    recorder.flush()
    assert len(stored_times(tmp_path / "s.sqlite")) == 12 + 1, "the newest, and the one of the last step"


def test_a_recorder_outlives_a_full_disk_and_its_store_opens(
    spawn: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """No file of it may grow by more than 50 KB: writing fails as on a disk without room."""
    store, log = tmp_path / "s.sqlite", tmp_path / "log"
    embedded.create(store)
    b = Bench()
    for name in ("standard", "interactive", "long_context") * 3:
        b.serve(b.submit(request_class=name))
    with start_exporter(b.t) as exporter, log.open("wb") as out:
        limit = store.stat().st_size + 50_000
        # spawn has a preexec of its own; the shell sets the limit (in blocks of 1,024 bytes) and becomes the recorder
        command = f'trap "" XFSZ; ulimit -f {limit // 1024}; exec "$@"'
        process = spawn(
            "bash", "-c", command, "-", *CLI, "record", "--url", exporter.url, "--store", str(store), "--interval", "1s",
            stdout=out, stderr=out, env=os.environ | {"NO_COLOR": "1", "COLUMNS": "200"},
        )  # fmt: skip
        wait_for(lambda: "Cannot use the store" in log.read_text(), 120, "the store cannot be written")
        before = stored_times(store)
        time.sleep(1.5)
        assert process.poll() is None, log.read_text()
        assert log.read_text().count("Cannot use the store") == 1
    process.send_signal(signal.SIGTERM)
    process.wait(30)
    assert "Traceback" not in log.read_text()
    assert before
    assert stored_times(store)[: len(before)] == before
    assert EmbeddedStore(store).freshness() is not None


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True)
    if mount.returncode:
        pytest.skip("this user may not mount a file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_fills_and_then_is_read_only_costs_only_what_comes_meanwhile(small_disk: Path) -> None:
    store = embedded.create(small_disk / "s.sqlite")
    b, stop, told = Bench(), threading.Event(), []  # type: ignore[var-annotated]
    b.serve(b.submit())
    thread = threading.Thread(
        target=record, args=(TelemetryTarget(b.t), store, 0.1, stop),
        kwargs={"on_change": lambda _: None, "on_store": told.append},
    )  # fmt: skip
    thread.start()
    try:
        wait_for(lambda: store.extent() is not None, 20, "a first step")
        filler = small_disk / "filler"
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"0" * 4096)
        wait_for(lambda: told, 30, "the full disk is told")
        assert re.search("full|disk I/O", str(told[0]))
        filler.unlink()
        wait_for(lambda: told[-1] is None, 30, "it goes on")
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=False, capture_output=True)
        if not os.access(small_disk / "s.sqlite", os.W_OK):
            wait_for(lambda: told[-1] is not None, 30, "a read-only disk is told")
            subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
            wait_for(lambda: told[-1] is None, 30, "it goes on")
    finally:
        stop.set()
        thread.join(30)
    assert not thread.is_alive()
    times = stored_times(small_disk / "s.sqlite")
    assert times == sorted(set(times))
    steps = np.diff(times)
    assert steps.max() < 10.0, "what was observed while nothing could be written is there"


def test_a_slow_disk_holds_up_no_request(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Snapshots of sessions are written beside the answers."""
    go, waiting = threading.Event(), threading.Event()
    write = SnapshotDirectory.write

    def slow(self: SnapshotDirectory, name: str, data: bytes) -> object:
        waiting.set()
        assert go.wait(60)
        return write(self, name, data)

    monkeypatch.setattr(SnapshotDirectory, "write", slow)
    with serving(load_model("tiny"), snapshots=tmp_path / "sessions") as server:
        body = {"model": "tiny", "prompt": "a long enough prompt to fill more than a block", "max_tokens": 4}
        for i in range(4):
            answer = HTTP.post(server.url + "/v1/completions", json=body, headers={"X-Session-ID": f"s{i % 2}"})
            assert answer.status_code == 200
        assert waiting.wait(20)
        assert HTTP.get(server.url + "/metrics").status_code == 200
        assert not list((tmp_path / "sessions").glob("*.kvsnap"))
        go.set()
        wait_for(lambda: list((tmp_path / "sessions").glob("*.kvsnap")), 20, "snapshots are written later")
        server.check_books()


@pytest.mark.parametrize("step", [3600.0, -3600.0])
def test_a_clock_that_steps_an_hour_moves_no_duration_and_no_counter(step: float) -> None:
    """Durations come from the monotonic clock; the wall clock only stamps."""
    wall, monotonic = [1_800_000_000.0], [100.0]
    t = Telemetry(
        "m", executor="torch", virtual=False, device="cpu", kv_dtype="f", clock=lambda: monotonic[0], wall_clock=lambda: wall[0]
    )  # fmt: skip
    request = t.arrive("r", "standard", 10, monotonic[0])
    wall[0] += step
    monotonic[0] += 2.0
    t.lap(0)
    t.finish(request, "abort", monotonic[0])
    rows = {f.family.name: f.rows for f in t.snapshot()}
    assert sum(row.value for row in rows["kvscope_telemetry_anomalies"]) == 0
    assert sum(row.value for row in rows["kvscope_requests"]) == 1
    spent = [record for record in t.finished][-1]
    assert spent.matrix.sum() == pytest.approx(2.0)


@pytest.mark.parametrize(("step", "kept"), [(3600.0, 20), (-3600.0, 10)])
def test_the_store_never_holds_a_moment_twice_however_the_clock_steps(tmp_path: Path, step: float, kept: int) -> None:
    """Forward: a gap. Backward: nothing is recorded until the clock is past where it was, as in Prometheus."""
    b, store = Bench(), embedded.create(tmp_path / "s.sqlite")
    recorder, target = Recorder(store), TelemetryTarget(b.t)
    start = time.time() - 2 * 3600.0
    b.serve(b.submit())
    for i in range(20):
        recorder.step(start + 15.0 * i + (step if i >= 10 else 0.0), target.scrape())
    times = stored_times(tmp_path / "s.sqlite")
    assert times == sorted(set(times))
    assert kept - 3 <= len(times) <= kept
    back = recorder.step(start + 3600.0 + 15.0 * 30, target.scrape())
    assert back
