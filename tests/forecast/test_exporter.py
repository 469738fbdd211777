"""Forecasts as Prometheus metrics: what is served is what was stored, and what came of it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pandas as pd
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from rich.console import Console

from exporters import forecast as exporter
from exporters.forecast import ForecastMetrics, seconds_until
from exporters.prometheus import start_exporter
from observability import catalog as c
from observability.cli import forecast as command
from observability.forecast import backtest, models, worker
from observability.forecast.calibration import GAIN
from observability.forecast.series import FORECAST_SIGNALS, GridSeries, Window
from observability.forecast.worker import run_once
from observability.store.embedded import EmbeddedStore, create
from observability.store.forecasts import Breach
from tests.conftest import wait_for

KV, TTFT = FORECAST_SIGNALS["kv_usage"], FORECAST_SIGNALS["ttft_p99"]
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def fill(path: Path, hours: float = 9, model: str = "m") -> EmbeddedStore:
    """A store with a reading a minute: KV use climbs towards its limit, requests end an hour ago."""
    store = create(path)
    times = np.arange(time.time() - hours * 3600, time.time() + 1, 60.0) // 60 * 60
    rng = np.random.default_rng(5)
    noise = np.cumsum(rng.normal(0, 0.0015, len(times)))
    rows = {
        "kv_usage": np.clip(np.linspace(0.4, 0.93, len(times)) + noise - noise[-1], 0, 1),
        "ttft_p99": 0.3 + 0.1 * np.abs(rng.normal(0, 1, len(times))),
        "requests": np.where(times < times[-1] - 3600, 5 + rng.normal(0, 0.2, len(times)), np.nan),
    }
    for name, values in rows.items():
        frame = pd.DataFrame({"time": pd.to_datetime(times, unit="s", utc=True), "model": model, "value": values})
        store.append(FORECAST_SIGNALS[name].name, frame.dropna())
    return store


def samples(text: str) -> Samples:
    return {
        (s.name, frozenset(s.labels.items())): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


def scrape(url: str, token: str = "") -> httpx.Response:
    headers = {"Accept": "application/openmetrics-text; version=1.0.0"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    return httpx.get(url, headers=headers, timeout=10)


def of(found: Samples, name: str, **labels: str) -> float:
    return found[name, frozenset(labels.items())]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Samples, EmbeddedStore, float]:
    """What one run of the worker made: the samples at its endpoint, the store, and when."""
    store = fill(tmp_path_factory.mktemp("exporter") / "s.sqlite")
    metrics = ForecastMetrics()
    with start_exporter(metrics) as endpoint:
        run = run_once(store, store, [KV, TTFT, FORECAST_SIGNALS["requests"]], publish=metrics.publish)
        answer = scrape(endpoint.url)
    assert answer.status_code == 200
    return samples(answer.text), store, run.at


def test_every_family_of_the_catalogue_is_fed(served: tuple[Samples, EmbeddedStore, float]) -> None:
    names = {name for name, _ in served[0]}
    assert {f.series for f in c.FORECAST_FAMILIES} <= names


def test_values_are_the_stored_quantiles_of_the_newest_forecast(served: tuple[Samples, EmbeddedStore, float]) -> None:
    found, store, _ = served
    for short in ("kv_usage", "ttft_p99"):
        frame = store.forecasts(FORECAST_SIGNALS[short].name, {"model": "m"}, "auto")
        newest = frame[frame["origin"] == frame["origin"].max()]
        assert (
            of(found, "kvscope_forecast_origin_timestamp_seconds", model="m", signal=short)
            == newest["origin"].iloc[0].timestamp()
        )
        for row in newest.to_dict("records"):
            for level in (0.025, 0.1, 0.25, 0.5, 0.75, 0.9, 0.975):
                shown = of(
                    found, "kvscope_forecast_value", model="m", signal=short, horizon=f"{row['step']}0m",
                    quantile=f"{level:g}",
                )  # fmt: skip
                assert shown == row[f"q{level:g}"]
    values = [key for key in found if key[0] == "kvscope_forecast_value"]
    assert len(values) == 2 * 6 * 7  # the third signal stopped


def test_error_skill_and_coverage_are_those_of_the_last_day(served: tuple[Samples, EmbeddedStore, float]) -> None:
    found, store, at = served
    raw = store.range(KV.name, at // 60 * 60 - 30 * 3600, at, 60.0)
    bins = raw.set_index("time")["value"].resample("10min", closed="right", label="right")
    actual = bins.mean()[bins.count() >= 5]
    day = pd.Timestamp(at - 86400, unit="s", tz="UTC")
    mae = {}
    for model in ("auto", "last_value", "seasonal_naive", "prophet"):
        frame = store.forecasts(KV.name, {"model": "m"}, model)
        frame = frame[(frame["origin"] > day) & (frame["step"] > 0)]
        frame["came"] = frame["time"].map(actual)
        frame = frame[frame["came"].notna() & (frame["time"] <= pd.Timestamp(at // 600 * 600, unit="s", tz="UTC"))]
        labels = {"model": "m", "signal": "kv_usage", "forecaster": model}
        assert of(found, "kvscope_forecast_scored_targets", **labels) == len(frame) >= 30
        mae[model] = float((frame["q0.5"] - frame["came"]).abs().mean())
        assert of(found, "kvscope_forecast_absolute_error", **labels) == pytest.approx(mae[model])
        for band, low, high in (("50", "q0.25", "q0.75"), ("80", "q0.1", "q0.9"), ("95", "q0.025", "q0.975")):
            inside = float(frame["came"].between(frame[low], frame[high]).mean())
            assert of(found, "kvscope_forecast_coverage_ratio", **labels, band=band) == pytest.approx(inside)
    for model, error in mae.items():
        skill = of(found, "kvscope_forecast_skill_ratio", model="m", signal="kv_usage", forecaster=model)
        assert skill == pytest.approx(1 - error / mae["last_value"])


def test_chance_and_time_of_a_breach_agree(served: tuple[Samples, EmbeddedStore, float]) -> None:
    """KV use climbs by 6 points an hour to 93 %: past the warning, near exhaustion."""
    found, _, _ = served
    of_kv = {"model": "m", "signal": "kv_usage"}
    for limit in ("kv_usage_warning", "kv_exhaustion"):
        name = "kvscope_forecast_breach_probability_ratio"
        chances = [of(found, name, **of_kv, limit=limit, horizon=h) for h in c.FORECAST_HORIZONS]
        assert chances == sorted(chances)
        assert 0 <= chances[0] <= chances[-1] <= 1
        for share in (0.1, 0.5, 0.9):
            key = frozenset({**of_kv, "limit": limit, "quantile": f"{share:g}"}.items())
            seconds = found.get(("kvscope_forecast_time_to_breach_seconds", key))
            assert (seconds is None) == (chances[-1] < share)
            if seconds is not None:
                curve = np.interp(seconds, np.arange(7) * 600, [0, *chances])
                assert curve == pytest.approx(share)
    assert of(found, "kvscope_forecast_limit", **of_kv, limit="kv_exhaustion") == 0.95


def test_time_to_a_breach_by_hand() -> None:
    breach = Breach("x", 1.0, (0.0,) * 6, (0.0, 0.2, 0.4, 0.6, 0.6, 0.6))
    assert seconds_until(breach, 0.1) == 900  # half of the second step
    assert seconds_until(breach, 0.5) == 2100
    assert seconds_until(breach, 0.9) is None


def test_a_refused_forecast_has_no_numbers_and_is_counted(served: tuple[Samples, EmbeddedStore, float]) -> None:
    found, _, at = served
    labels = {"model": "m", "signal": "requests", "forecaster": "auto", "status": "refused", "history": "real"}
    assert of(found, "kvscope_forecast_info", **labels) == 1
    assert of(found, "kvscope_forecast_failures_total", signal="requests", reason="stale") == 4  # one a model
    assert of(found, "kvscope_forecast_failures_total", signal="kv_usage", reason="stale") == 0
    shown = {dict(labels)["signal"] for name, labels in found if name == "kvscope_forecast_origin_timestamp_seconds"}
    assert shown == {"kv_usage", "ttft_p99"}
    assert of(found, "kvscope_forecast_runs_total", outcome="done") == 1
    assert of(found, "kvscope_forecast_last_run_timestamp_seconds") == at


def test_one_bad_series_never_stops_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = fill(tmp_path / "s.sqlite", hours=6, model="good")
    fill(tmp_path / "s.sqlite", hours=6, model="bad")
    real_window, real_run = worker.window, dict(models._RUN)

    def broken_window(series: GridSeries, now: float) -> Window:
        if series.labels["model"] == "bad" and series.signal == KV:
            raise ZeroDivisionError("planted")
        return real_window(series, now)

    def broken_model(window: Window) -> object:
        if window.labels["model"] == "bad":
            raise FloatingPointError("planted")
        return real_run["auto"](window)

    monkeypatch.setattr(worker, "window", broken_window)
    monkeypatch.setitem(models._RUN, "auto", broken_model)  # type: ignore[arg-type]
    metrics = ForecastMetrics()
    run = run_once(store, store, [KV, TTFT], until=0.0, publish=metrics.publish)
    refused = {(f.labels["model"], f.signal, f.model) for f in run.forecasts if f.refused}
    assert refused == {("bad", KV.name, model) for model in ("auto", "prophet", "last_value", "seasonal_naive")} | {
        ("bad", TTFT.name, "auto")
    }
    assert all("planted" in f.refused for f in run.forecasts if f.refused)
    with start_exporter(metrics) as endpoint:
        found = samples(scrape(endpoint.url).text)
    assert of(found, "kvscope_forecast_failures_total", signal="kv_usage", reason="model") == 4
    assert of(found, "kvscope_forecast_failures_total", signal="ttft_p99", reason="model") == 1
    shown = {(dict(of)["model"], dict(of)["signal"]) for name, of in found if name == "kvscope_forecast_value"}
    assert shown == {("good", "kv_usage"), ("good", "ttft_p99")}


def test_a_series_that_breaks_at_an_earlier_hour_says_so_and_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its newest window is well, so its forecast is made: no refusal would tell."""
    store = fill(tmp_path / "s.sqlite", hours=6)
    real = backtest.window

    def broken(series: GridSeries, now: float) -> Window:
        if series.signal == KV:
            raise FloatingPointError("planted")
        return real(series, now)

    monkeypatch.setattr(backtest, "window", broken)
    run = run_once(store, store, [KV, TTFT])
    assert not any(f.refused for f in run.forecasts)
    assert {f.signal for f in run.forecasts} == {KV.name, TTFT.name}
    made = {s.name for s in (KV, TTFT) if any(f.hindcast for f in store.stored_forecasts(s.name, {}, "auto"))}
    assert made == {TTFT.name}
    reason = "an earlier window failed: FloatingPointError: planted"
    assert run.as_json()["unmeasured"] == [{"signal": KV.name, "labels": {"model": "m"}, "reason": reason}]
    command._print_table(run)
    command._print_line(Console(file=sys.stdout), run)
    said = capsys.readouterr().out
    assert said.count(f"past not measured: {reason}") == 1
    assert said.count(f"past not measured: {KV.name} m: {reason}") == 1


def test_a_scrape_does_not_wait_for_a_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, fitting, go_on = fill(tmp_path / "s.sqlite", hours=6), threading.Event(), threading.Event()
    real = dict(models._RUN)["auto"]
    metrics = ForecastMetrics()
    run_once(store, store, [KV], until=0.0, publish=metrics.publish)

    def slow(window: Window) -> object:
        fitting.set()
        assert go_on.wait(60)
        return real(window)

    monkeypatch.setitem(models._RUN, "auto", slow)  # type: ignore[arg-type]
    working = threading.Thread(target=run_once, args=(store, store, [KV]), kwargs={"until": 0.0})
    with start_exporter(metrics) as endpoint:
        working.start()
        try:
            assert fitting.wait(30)
            found = samples(scrape(endpoint.url).text)
            assert of(found, "kvscope_forecast_runs_total", outcome="done") == 1
            assert any(name == "kvscope_forecast_value" for name, _ in found)
            assert working.is_alive()
        finally:
            go_on.set()
            working.join(60)


def test_a_restart_keeps_the_calibration(served: tuple[Samples, EmbeddedStore, float]) -> None:
    """Another process stretches its first forecast by what the stored ones teach: hour after hour, more where outcomes were missed."""
    _, store, _ = served
    said = subprocess.run(
        [sys.executable, "-m", "observability.cli", "forecast", "--store", str(store.path), "--signal", "kv_usage", "--json"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    at = pd.Timestamp(json.loads(said.stdout)["at"]).timestamp()
    *past, newest = store.stored_forecasts(KV.name, {"model": "m"}, "auto")
    raw = store.range(KV.name, at // 60 * 60 - 30 * 3600, at, 60.0).set_index("time")["value"]
    bins = raw.resample("10min", closed="right", label="right")
    actual = {when.timestamp(): value for when, value in bins.mean()[bins.count() >= 5].items()}
    stretch, before = past[0].stretch, -np.inf
    for each in (f for f in past if f.origin + 3600 <= at):
        low, high = each.interval(0.95)
        missed = np.mean([not lo <= actual[when] <= hi for when, lo, hi in zip(each.times, low, high, strict=True)])
        stretch *= np.exp(GAIN * min(1.0, (each.origin - before) / 3600) * (missed - 0.05))
        before = each.origin
    assert newest.stretch == pytest.approx(stretch)
    assert newest.stretch != past[0].stretch


def test_a_failed_run_keeps_what_was_forecast_and_is_counted(served: tuple[Samples, EmbeddedStore, float]) -> None:
    metrics = ForecastMetrics()
    store = served[1]
    run = run_once(store, store, [KV], until=0.0)
    metrics.publish(run)
    metrics.publish(replace(run, hindcasts=3))
    metrics.failed()
    rows = {family.name: rows for family, rows in metrics.snapshot()}
    counts = {row.labels: row.value for row in rows["kvscope_forecast_runs"]}
    assert counts == {("done",): 1, ("failed",): 1}
    assert len(rows["kvscope_forecast_value"]) == 6 * 7


def test_a_forecast_is_not_told_beyond_its_hour(served: tuple[Samples, EmbeddedStore, float]) -> None:
    """Runs fail: what the newest said of the hour after its data goes with that hour; how old it is stays to be seen."""
    now = [0.0]
    metrics = ForecastMetrics(clock=lambda: now[0])
    run = run_once(served[1], served[1], [KV], until=0.0)
    metrics.publish(run)
    (origin,) = {f.origin for f in run.forecasts if f.model == "auto"}
    of_hour = {
        "kvscope_forecast_value",
        "kvscope_forecast_breach_probability_ratio",
        "kvscope_forecast_time_to_breach_seconds",
    }
    seen = []
    for now[0] in (origin + 3599, origin + 3600):
        metrics.failed()
        seen.append({family.name for family, _ in metrics.snapshot()})
    assert of_hour <= seen[0]
    assert seen[0] - seen[1] == of_hour
    assert "kvscope_forecast_origin_timestamp_seconds" in seen[1]


def test_the_command_serves_what_it_forecasts_with_a_token(
    tmp_path: Path, spawn: Callable[..., subprocess.Popen[bytes]]
) -> None:
    path, log = tmp_path / "s.sqlite", tmp_path / "log"
    fill(path, hours=5)
    with log.open("wb") as out:
        process = spawn(
            sys.executable, "-m", "observability.cli", "forecast", "--store", str(path), "--every", "10m", "--serve",
            "--port", "0", "--token", "secret", stdout=out, stderr=out,
        )  # fmt: skip
    wait_for(lambda: "metrics at http" in log.read_text(), 30, "the address")
    url = next(word for word in log.read_text().split() if word.startswith("http")).rstrip(";")
    assert scrape(url).status_code == 401
    wait_for(lambda: "kvscope_forecast_value{" in scrape(url, "secret").text, 60, "the first forecast")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 0
    assert "Traceback" not in log.read_text()


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (("--serve",), "--serve needs a schedule"),
        (("--serve", "--every", "10m", "--host", "0.0.0.0"), "no token is set"),
        (("--jobs", "2", "--dask", "tcp://127.0.0.1:1"), "exclude each other"),
    ],
)
def test_wrong_options_of_serving_say_what_to_do(argv: tuple[str, ...], reason: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "observability.cli", "forecast", *argv], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert reason in done.stderr.replace("\n", " ")
    assert "next:" in done.stderr


def test_label_values_are_those_of_the_catalogue() -> None:
    assert set(c.FORECAST_QUANTILES) <= set(exporter.LEVELS)
    assert set(exporter.SHORT.values()) == set(FORECAST_SIGNALS)
