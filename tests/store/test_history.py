"""Simulated history: the live pipeline in virtual time, complete, marked, repeatable, and never over recorded data."""

from __future__ import annotations

import os
import signal as signals
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from observability.errors import ConfigError
from observability.signals import SIGNALS
from observability.store import embedded
from observability.store.embedded import EmbeddedStore
from observability.workload import history
from observability.workload.generate import PRESETS, generate_load
from tests.conftest import wait_for

END = 1_790_000_000.0
HOUR = 3600.0
#: What virtual time cannot know, an unquantized engine without host tier and controller does not have, or a load without tenants or GPUs
#: does not show.
_UNKNOWN_PARTS = (
    "quantization", "kvscope_gpu_", "kv_copy_overlap", "kv_prefetch", "kv_moved", "kvscope_limit_", "kvscope_controller_", "kvscope_requests_degraded",
    "kvscope_source_family",
)  # fmt: skip
UNKNOWN = {s.name for s in SIGNALS if "tenant" in s.by or any(part in s.name for part in _UNKNOWN_PARTS)}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> EmbeddedStore:
    path = tmp_path_factory.mktemp("history") / "store.sqlite"
    history.make_history(path, days=3 / 24, model="served", end=END)
    return EmbeddedStore(path, clock=lambda: END)


def test_every_signal_has_a_point_each_minute_and_what_is_unknown_is_absent(made: EmbeddedStore) -> None:
    for signal in SIGNALS:
        frame = made.range(signal.name, END - 3 * HOUR + 60, END, 60)
        if signal.name in UNKNOWN:
            assert frame.empty, signal.name
            continue
        assert not frame.empty, signal.name
        if "model" in signal.by:
            assert set(frame["model"]) == {"served"}
        low, high = signal.bounds
        assert frame["value"].min() >= low - 1e-9, signal.name
        assert high is None or frame["value"].max() <= high + 1e-9, signal.name
    requests = made.range("model:kvscope_requests_received:rate5m", END - 3 * HOUR + 60, END, 60)
    assert len(requests) == 180
    latencies = made.range("model:kvscope_request_duration_seconds:p99_5m", END - 3 * HOUR + 60, END, 60)
    assert len(latencies) > 170
    assert made.models() == ["served"]


def test_the_recorded_request_rate_is_that_of_the_load(made: EmbeddedStore) -> None:
    """The truth is counted on the generated arrivals: windows of five minutes join, and each request is in the one that it came in, however
    long the engine was busy at a tick."""
    start = END - 3 * HOUR
    arrivals = []
    for request in generate_load(PRESETS[history.PRESET], 0, start_time=start - 1800):
        arrivals.append(start - 1800 + request.arrival_seconds)
        if arrivals[-1] > END:
            break
    rates = made.range("model:kvscope_requests_received:rate5m", start + 600, END - 300, 300)
    ends = [time.timestamp() for time in rates["time"]]
    assert len(ends) == 34
    came = [sum(end - 300 < at <= end for at in arrivals) for end in ends]
    assert rates["value"].to_numpy() * 300 == pytest.approx(came, abs=1e-6)


def test_the_whole_span_is_marked_as_simulated(made: EmbeddedStore) -> None:
    assert made.simulated(0, 2 * END) == [(END - 3 * HOUR, END)]
    assert made.freshness() is not None
    assert made.freshness() < 120.0  # type: ignore[operator]


def test_parts_side_by_side_join_without_a_seam_and_do_not_depend_on_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "_PART_SECONDS", 1800.0)
    frames = []
    for cores in ({0}, {0, 1}):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: cores)
        path = tmp_path / f"{len(cores)}.sqlite"
        result = history.make_history(path, days=1 / 24, end=END)
        assert (result.end - result.start, result.steps) == (HOUR, pytest.approx(60, abs=1))
        store = EmbeddedStore(path)
        frames.append([store.range(signal.name, END - HOUR + 60, END, 60) for signal in SIGNALS])
        assert store.simulated(0, 2 * END) == [(END - HOUR, END)]
    for signal, one, other in zip(SIGNALS, *frames, strict=True):
        order = [*one.columns.drop(["time", "value"]), "time"]
        both = (each.sort_values(order, ignore_index=True) for each in (one, other))
        pd.testing.assert_frame_equal(*both, obj=signal.name)
    requests = frames[0][0]
    assert len(requests) == 60  # a rate at every minute, also at the first ones of the second part
    assert np.isfinite(requests["value"]).all()


def test_recorded_data_is_kept_and_only_what_follows_it_is_filled(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    name = "model:kvscope_requests_received:rate5m"
    real = pd.DataFrame({"time": pd.to_datetime([END - 1800], unit="s", utc=True), "model": "served", "value": [123.0]})
    embedded.create(path).append(name, real)
    result = history.make_history(path, days=1, model="served", end=END)
    assert result.start == END - 1740
    store = EmbeddedStore(path)
    assert store.simulated(0, END) == [(END - 1740, END)]
    frame = store.range(name, END - 1800, END, 60)
    assert frame["value"].iloc[0] == 123.0
    assert frame["value"].iloc[5:].max() < 50.0
    assert history.make_history(path, days=1, end=END).steps == 0


@pytest.mark.parametrize("days", [0.0, -1.0, 15.0, float("nan")])
def test_absurd_spans_are_refused(tmp_path: Path, days: float) -> None:
    with pytest.raises(ConfigError, match="days of history"):
        history.make_history(tmp_path / "s.sqlite", days=days)
    assert not list(tmp_path.iterdir())


def test_a_model_without_a_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no name"):
        history.make_history(tmp_path / "s.sqlite", model=" ")
    assert not list(tmp_path.iterdir())


def test_another_seed_shares_no_part_of_its_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of the longest histories."""
    asked: list[set[int]] = []

    def run(parts: list[history._Part], show: object) -> list[history._Done]:
        asked.append({part.seed for part in parts})
        return []

    monkeypatch.setattr(history, "_run", run)
    for seed in range(3):
        history.make_history(tmp_path / f"{seed}.sqlite", days=history.MAX_DAYS, seed=seed, end=END)
    assert [len(seeds) for seeds in asked] == [28, 28, 28]
    assert len(set.union(*asked)) == 3 * 28


def test_an_interrupted_run_leaves_no_store_and_no_process(
    spawn: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    path = tmp_path / "store.sqlite"
    process = spawn(
        sys.executable, "-m", "observability.cli", "history", "--store", str(path), "--days", "14",
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    part = path.with_name(path.name + ".part")
    wait_for(part.exists, 60, "the run has begun")
    time.sleep(3)
    os.killpg(process.pid, signals.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode != 0
    assert not list(tmp_path.iterdir())

    def alive() -> bool:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return False
        return True

    wait_for(lambda: not alive(), 10, "every worker has ended")
