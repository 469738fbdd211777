"""The pooled network as users have it: trained off-line, run where it was trained, served by its name, with a stated way out."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from exporters.forecast import ForecastMetrics
from observability.forecast.models import forecast
from observability.forecast.pooled import NOT_TRAINED, load, path_beside, trained_beside
from observability.forecast.quality import quality
from observability.forecast.series import window
from observability.forecast.worker import run_once
from observability.store.embedded import EmbeddedStore
from observability.store.forecasts import MODELS, POOLED
from tests.forecast.conftest import END, KV_USAGE, REQUESTS, gridded
from tests.forecast.conftest import load as load_of
from tests.forecast.test_worker import fill

KVSCOPE = (sys.executable, "-m", "observability.cli", "forecast")


def command(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*KVSCOPE, *argv], capture_output=True, text=True, timeout=200, check=False)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[EmbeddedStore, dict]:
    """A store of eight days, and what training on it printed."""
    path = tmp_path_factory.mktemp("pooled") / "s.sqlite"
    for name in ("m", "n"):
        store = fill(path, hours=8 * 24, until=time.time(), model=name)
    done = command("--store", str(path), "--train", "--json", "--signal", "requests", "--signal", "kv_usage")
    assert done.returncode == 0, done.stderr
    return store, json.loads(done.stdout)


def run(store: EmbeddedStore, trained: object, now: float):
    # Hindcasts are another matter: their time is over before they begin.
    return run_once(store, store, [REQUESTS, KV_USAGE], clock=lambda: now, until=now - 1, trained=trained)


def test_training_stores_weights_beside_the_store_that_know_nothing_later(trained: tuple[EmbeddedStore, dict]) -> None:
    store, told = trained
    network = load(path_beside(store.path))
    assert told["file"] == str(path_beside(store.path))
    assert (told["series"], told["examples"]) == (network.series, network.examples)
    assert network.series == 4
    assert network.until <= time.time()
    assert network.until % 600 == 0


def test_once_trained_it_runs_beside_the_others_and_is_served_by_its_name(trained: tuple[EmbeddedStore, dict]) -> None:
    store, _ = trained
    made = run(store, trained_beside(store.path), time.time())
    by_model = {(one.signal, one.model): one for one in made.forecasts if one.labels["model"] == "m"}
    assert {model for _, model in by_model} == {*MODELS, POOLED}
    assert not any(one.refused for one in made.forecasts)
    one, stack = by_model[REQUESTS.name, POOLED], by_model[REQUESTS.name, "auto"]
    assert "fallback" not in one.flags
    assert (one.quantiles != stack.quantiles).any()
    metrics = ForecastMetrics(POOLED)
    metrics.publish(made)
    (info,) = [rows for family, rows in metrics.snapshot() if family.name == "kvscope_forecast"]
    assert {row.labels[2] for row in info} == {POOLED}
    assert {row.labels[3] for row in info} == {"own"}


@pytest.mark.parametrize("reason", [NOT_TRAINED, "the file is damaged"])
def test_without_weights_the_stack_stands_in_and_the_reason_is_said(
    trained: tuple[EmbeddedStore, dict], reason: str
) -> None:
    store, _ = trained
    found = run(store, reason, time.time()).forecasts
    made = {one.model: one for one in found if (one.signal, one.labels["model"]) == (REQUESTS.name, "m")}
    assert "fallback" in made[POOLED].flags
    assert reason in made[POOLED].note
    assert made[POOLED].quantiles == pytest.approx(made["auto"].quantiles, rel=0.5)


def test_a_damaged_file_of_weights_is_a_reason_and_no_failure(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    assert trained_beside(path) == NOT_TRAINED
    path_beside(path).write_bytes(b"not weights")
    assert "is not a trained pooled model" in trained_beside(path)


def test_where_it_begins_late_the_others_keep_the_errors_of_their_whole_day() -> None:
    series = gridded(load_of(2))
    hours = [END - 3600.0 * ago for ago in range(20, 0, -1)]
    made = {
        model: [forecast(window(series, at), model) for at in (hours[-1:] if model == POOLED else hours)]
        for model in ("auto", "last_value", POOLED)
    }
    told = {each.model: each for each in quality(series, END, made)}
    assert told["auto"].targets == told["last_value"].targets == 20 * 6
    assert told[POOLED].targets == 6
    # It is compared with the last value of its own hours: here it is the stack, so that its skill is that of the stack there.
    alone = {each.model: each for each in quality(series, END, {m: each[-1:] for m, each in made.items()})}
    assert told[POOLED].skill == alone["auto"].skill != told["auto"].skill
