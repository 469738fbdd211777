"""`kvscope forecast` as a user starts it, on a store of synthetic rows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from observability.app import outlook
from observability.app.view import make_view
from observability.store.embedded import EmbeddedStore, create
from observability.store.forecasts import MODELS, STEP_SECONDS
from tests.conftest import wait_for
from tests.forecast.conftest import KV_USAGE, REQUESTS

KVSCOPE = (sys.executable, "-m", "observability.cli")


def fill(path: Path, hours: float, until: float, model: str = "m") -> EmbeddedStore:
    """A store with a reading a minute of load and KV use."""
    store = create(path)
    times = np.arange(until - hours * 3600, until + 1, 60.0) // 60 * 60
    wave = 0.4 + 0.2 * np.sin(times / 86400 * 2 * np.pi)
    walk = np.cumsum(np.random.default_rng(2).normal(0, 0.004, len(times)))
    for name, values in (
        (KV_USAGE.name, np.clip(wave + walk, 0, 1)),
        (REQUESTS.name, np.maximum(9 * wave + 5 * walk, 0)),
    ):
        rows = pd.DataFrame({"time": pd.to_datetime(times, unit="s", utc=True), "model": model, "value": values})
        store.append(name, rows)
    return store


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*KVSCOPE, "forecast", *argv], capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def forecast_store(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """A store after one run, and what the run printed."""
    path = tmp_path_factory.mktemp("forecast") / "s.sqlite"
    fill(path, hours=9, until=time.time())
    done = run("--store", str(path), "--json", "--signal", "kv_usage", "--signal", "requests")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return path, json.loads(done.stdout)


def test_every_series_is_forecast_by_every_model_and_stored(forecast_store: tuple[Path, dict]) -> None:
    path, said = forecast_store
    store = EmbeddedStore(path)
    assert {(f["signal"], f["model"]) for f in said["forecasts"]} == {
        (s.name, m) for s in (KV_USAGE, REQUESTS) for m in MODELS
    }
    for printed in said["forecasts"]:
        frame = store.forecasts(printed["signal"], printed["labels"], printed["model"])
        newest = frame[frame["origin"] == pd.Timestamp(printed["origin"])]
        assert not newest["hindcast"].any()
        assert [at.isoformat() for at in newest["time"]] == [
            pd.Timestamp(step["time"]).isoformat() for step in printed["steps"]
        ]
        assert len(newest) == 6
        for step, row in zip(printed["steps"], newest.to_dict("records"), strict=True):
            assert {f"q{level}": value for level, value in step["quantiles"].items()} == {
                key: value for key, value in row.items() if key.startswith("q0")
            }
        assert "short_history" in printed["flags"]
        assert printed["refused"] is None


def test_printed_errors_are_those_of_the_stored_forecasts(forecast_store: tuple[Path, dict]) -> None:
    path, said = forecast_store
    store = EmbeddedStore(path)
    assert len(said["scores"]) == 2 * len(MODELS)
    for score in said["scores"]:
        frame = store.forecasts(score["signal"], {"model": "m"}, score["model"])
        at = pd.Timestamp(said["at"]).timestamp()
        raw = store.range(score["signal"], at // 60 * 60 - 10 * 3600, at, 60.0)
        bins = raw.set_index("time")["value"].resample("10min", closed="right", label="right")
        actual = bins.mean()[bins.count() >= 5]
        over = frame[frame["time"] <= pd.Timestamp(at // STEP_SECONDS * STEP_SECONDS, unit="s", tz="UTC")]
        came = over["time"].map(actual)
        assert score["targets"] == len(over) >= 30
        assert score["mean_absolute_error"] == pytest.approx((over["q0.5"] - came).abs().mean())
        assert score["coverage_95"] == pytest.approx(((came >= over["q0.025"]) & (came <= over["q0.975"])).mean())


def test_the_page_shows_the_same_errors(forecast_store: tuple[Path, dict]) -> None:
    path, said = forecast_store
    at = pd.Timestamp(said["at"]).timestamp()
    view = make_view("m", 3600, at)
    for signal_of in (KV_USAGE, REQUESTS):
        for shown in outlook.prospect(EmbeddedStore(path), view, signal_of).models:
            [score] = [s for s in said["scores"] if (s["signal"], s["model"]) == (signal_of.name, shown.model)]
            assert shown.accuracy is not None
            assert shown.accuracy.mae == pytest.approx(score["mean_absolute_error"])
            assert shown.accuracy.coverage == pytest.approx(score["coverage_95"])
            assert len(shown.ahead) == 6


def test_hindcasts_are_made_once(forecast_store: tuple[Path, dict]) -> None:
    path, said = forecast_store
    assert said["hindcasts"] >= 2 * 2 * 5

    def stored() -> int:
        frame = EmbeddedStore(path).forecasts(KV_USAGE.name, {}, "prophet")
        return frame[frame["hindcast"]]["origin"].nunique()

    before = stored()
    table = run("--store", str(path), "--signal", "kv_usage").stdout
    assert before <= stored() <= before + 1  # an hour may have begun meanwhile
    assert "Prophet + AR(1)" in table
    assert "Last value" in table
    assert "of history; two days are wanted" in table


def test_the_loop_waits_for_a_store_and_ends_at_once_when_asked(
    tmp_path: Path, spawn: Callable[..., subprocess.Popen[bytes]]
) -> None:
    path, log, temp = tmp_path / "s.sqlite", tmp_path / "log", tmp_path / "temp"
    temp.mkdir()
    with log.open("wb") as out:
        process = spawn(
            *KVSCOPE, "forecast", "--store", str(path), "--every", "10m", stdout=out, stderr=out,
            env=os.environ | {"TMPDIR": str(temp)},
        )  # fmt: skip
    wait_for(lambda: "does not exist yet" in log.read_text(), 30, "it says that it waits")
    create(path)
    wait_for(lambda: "nothing was recorded" in log.read_text(), 30, "it says what is missing")
    store = fill(path, hours=20, until=time.time())
    started = time.monotonic()
    wait_for(lambda: len(store.forecasts(KV_USAGE.name, {}, "prophet")), 25, "the first forecast of Prophet")
    assert time.monotonic() - started < 25
    process.send_signal(signal.SIGTERM)  # in the midst of the hindcasts
    started = time.monotonic()
    assert process.wait(timeout=10) == 0
    # The fit that runs is waited for (0.2 s), which takes longer where other work shares the processors.
    assert time.monotonic() - started < 2 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    assert log.read_text().count("does not exist yet") == 1
    assert "Traceback" not in log.read_text()
    assert not [p for p in temp.rglob("*") if p.is_file()]


def test_data_that_stopped_is_refused_and_the_refusal_is_stored(tmp_path: Path) -> None:
    store = fill(tmp_path / "s.sqlite", hours=5, until=time.time() - 7200)
    done = run("--store", str(store.path), "--json", "--signal", "requests")
    printed = json.loads(done.stdout)["forecasts"]
    assert len(printed) == len(MODELS)
    for each in printed:
        assert "old (since" in each["refused"]
        assert each["steps"] == []
        frame = store.forecasts(REQUESTS.name, {}, each["model"])
        newest = frame[frame["origin"] == frame["origin"].max()]
        assert newest["refused"].tolist() == [each["refused"]]
        assert newest["step"].tolist() == [0]


@pytest.mark.parametrize(
    ("argv", "code", "reason"),
    [
        (("--every", "7m"), 2, "'7m' is not a multiple of 10 minutes"),
        (("--signal", "hit_rate"), 2, "'hit_rate' is not forecast"),
        (("--store", "/nonexistent/s.sqlite"), 1, "There is no store at /nonexistent/s.sqlite"),
    ],
)
def test_wrong_options_say_what_to_do(argv: tuple[str, ...], code: int, reason: str) -> None:
    done = run(*argv)
    assert done.returncode == code
    assert reason in done.stderr.replace("\n", " ")
    assert "next:" in done.stderr
