"""The forecast page's numbers, against plain loops over the stored forecasts and rows."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import pandas as pd
import pytest

from observability.app import charts, outlook
from observability.app.page_forecast import _chances, between, error, headline, limits_line, models_table, risks_table
from observability.app.ui import Context
from observability.app.view import View
from observability.forecast.backtest import scores
from observability.forecast.quality import quality
from observability.forecast.series import read_series
from observability.objectives import LATENCY_OBJECTIVES
from observability.store.embedded import EmbeddedStore, create
from observability.store.forecasts import HORIZON_STEPS, LEVELS, MODELS, Breach, Forecast
from tests.app import synthetic

SIGNAL = outlook.FORECAST_SIGNALS[0]


@pytest.fixture(scope="module")
def view(end: float) -> View:
    return View(synthetic.MODEL, end - 3600, end, 15.0)


def mean_of_rows(rows: dict[str, pd.DataFrame], until: float) -> float | None:
    frame = rows[SIGNAL.name]
    values = [v for t, v in zip(frame["time"], frame["value"], strict=True) if until - 600 < t.timestamp() <= until]
    return fmean(values) if len(values) >= 5 else None


def by_name(source: EmbeddedStore, view: View) -> dict[str, outlook.Outlook]:
    return {each.model: each for each in outlook.prospect(source, view, SIGNAL).models}


@pytest.mark.parametrize("model", MODELS)
def test_error_and_coverage_are_those_of_every_stored_step_against_the_mean_that_came(
    source: EmbeddedStore, rows: dict[str, pd.DataFrame], view: View, model: str
) -> None:
    seen = {each.model: each for each in outlook.prospect(source, view, SIGNAL).models}[model]
    errors, inside, hindcasts = [], [], []
    for made in source.stored_forecasts(SIGNAL.name, view.where, model):
        for time, quantiles in zip(made.times, made.quantiles, strict=True):
            came = mean_of_rows(rows, time) if time <= view.end else None
            if came is not None:
                errors.append(abs(quantiles[LEVELS.index(0.5)] - came))
                inside.append(quantiles[0] <= came <= quantiles[-1])
                hindcasts.append(made.hindcast)
    assert len(errors) > 40
    accuracy = seen.accuracy
    assert accuracy is not None
    assert accuracy.mae == pytest.approx(fmean(errors))
    assert accuracy.coverage == pytest.approx(fmean(inside))
    assert (accuracy.outcomes, accuracy.hindcasts) == (len(errors), pytest.approx(fmean(hindcasts)))


def test_the_page_and_the_forecast_command_agree_on_accuracy(source: EmbeddedStore, view: View) -> None:
    (series,) = read_series(source, SIGNAL, view.end)
    stored = {model: source.stored_forecasts(SIGNAL.name, view.where, model) for model in MODELS}
    for score, seen in zip(
        scores(series, view.end, stored), outlook.prospect(source, view, SIGNAL).models, strict=True
    ):
        assert seen.accuracy is not None
        assert (score.model, score.targets) == (seen.model, seen.accuracy.outcomes)
        assert (score.mae, score.coverage) == (pytest.approx(seen.accuracy.mae), pytest.approx(seen.accuracy.coverage))


def test_past_forecasts_are_those_made_one_hour_before_their_time(source: EmbeddedStore, view: View) -> None:
    for seen in outlook.prospect(source, view, SIGNAL).models:
        assert len(seen.past)
        assert (seen.past["time"] - seen.past["origin"] == pd.Timedelta(hours=1)).all()
        assert (
            seen.past["time"]
            .between(pd.Timestamp(view.start, unit="s", tz="UTC"), pd.Timestamp(view.end, unit="s", tz="UTC"))
            .all()
        )
        assert len(seen.ahead) == HORIZON_STEPS
        assert seen.flags == ("short_history",)


def test_the_chart_holds_what_came_the_past_and_the_next_hour_with_three_bands(
    source: EmbeddedStore, view: View
) -> None:
    found = outlook.prospect(source, view, SIGNAL)
    seen = found.models[0]
    figure = charts.forecast(
        found.came, seen.past, seen.ahead, SIGNAL.unit, charts.Frame(view), median=outlook.MEDIAN, bands=outlook.BANDS
    ).figure()
    named = {trace.name: trace for trace in figure.data if trace.name}
    assert set(named) == {"made 1 h ago", "measured", "next hour"}
    np.testing.assert_allclose(named["next hour"].y, seen.ahead[outlook.MEDIAN])
    np.testing.assert_allclose(np.array(named["measured"].y, dtype=float), found.came["value"])
    middles = pd.DatetimeIndex(seen.ahead["time"]).tz_localize(None) - pd.Timedelta(minutes=5)
    assert list(pd.DatetimeIndex(named["next hour"].x)) == list(middles)
    filled = [trace for trace in figure.data if trace.fill == "tonexty"]
    assert len(filled) == 1 + len(outlook.BANDS)


def test_a_refused_forecast_says_why_and_none_is_invented(
    tmp_path: Path, rows: dict[str, pd.DataFrame], view: View
) -> None:
    store = create(tmp_path / "store.db")
    store.append(SIGNAL.name, rows[SIGNAL.name])
    refusal = Forecast(
        SIGNAL.name, view.where, "prophet", view.end - 60, np.empty((0, len(LEVELS))), refused="only 2 steps"
    )
    store.add_forecasts([refusal])
    prophet, last = (by_name(store, view)[name] for name in ("prophet", "last_value"))
    assert prophet.ahead.empty
    assert prophet.accuracy is None
    assert "only 2 steps" in headline(prophet, view.end)
    assert last.origin is None
    table = models_table([prophet, last], SIGNAL, view)
    assert table.count("–") == 7
    assert "0 req/s" not in table


def test_the_better_model_is_marked_and_a_tie_is_not(source: EmbeddedStore, view: View) -> None:
    prophet, last = (by_name(source, view)[name] for name in ("prophet", "last_value"))
    assert "best" not in models_table([prophet, last], SIGNAL, view), "the synthetic medians are equal"


def test_a_forecast_that_was_not_renewed_says_so(source: EmbeddedStore, view: View) -> None:
    models = outlook.prospect(source, view, SIGNAL).models
    newest = models[0].origin
    assert newest is not None
    for age, told in ((600, False), (3000, True)):
        later = View(view.model, newest + age - 3600, newest + age, 15.0)
        assert ("not renewed" in models_table(models, SIGNAL, later)) is told


def test_intervals_and_errors_read_well() -> None:
    assert between(0.109, 0.215, "requests/s") == "0.109 to 0.215 req/s"
    assert between(0.9, 1.2, "seconds") == "900 ms to 1.20 s"
    assert error(0.0399, "ratio") == "3.99 points"
    assert error(0.156, "requests/s") == "0.156 req/s"


def test_skill_and_coverage_of_the_last_day_are_those_of_the_stored_forecasts(
    source: EmbeddedStore, view: View
) -> None:
    """As `kvscope forecast --serve` exposes them."""
    (series,) = read_series(source, SIGNAL, view.end)
    stored = {model: source.stored_forecasts(SIGNAL.name, view.where, model) for model in MODELS}
    exposed = {each.model: each for each in quality(series, view.end, stored)}
    for seen in outlook.prospect(source, view, SIGNAL).models:
        assert seen.lately is not None
        truth = exposed[seen.model]
        assert seen.lately.skill == pytest.approx(truth.skill)
        assert seen.lately.outcomes == truth.targets
        assert {round(100 * share): covered for share, covered in seen.lately.coverage.items()} == pytest.approx(
            dict(truth.coverage)
        )


def test_reliability_counts_each_chance_of_an_hour_that_is_over_and_began_below_the_limit(
    source: EmbeddedStore, rows: dict[str, pd.DataFrame], view: View
) -> None:
    for model in MODELS:
        truth = []
        for made in source.stored_forecasts(SIGNAL.name, view.where, model):
            came = [mean_of_rows(rows, time) if time <= view.end else None for time in made.times]
            then = mean_of_rows(rows, made.origin)
            known = [value for value in came if value is not None]
            truth += [
                (each.chance, any(value > each.limit for value in known))
                for each in made.breaches
                if len(known) == HORIZON_STEPS and then is not None and then <= each.limit
            ]
        tried = by_name(source, view)[model].chances
        assert len(truth) > 3
        assert [(said, bool(happened)) for said, happened in tried.itertuples(index=False)] == truth
        table = outlook.reliability(tried)
        for said, came_true, n in table.itertuples(index=False):
            mine = [(p, happened) for p, happened in truth if int(p * 10) == int(said * 10)]
            assert (len(mine), fmean(p for p, _ in mine)) == (n, pytest.approx(said))
            assert fmean(happened for _, happened in mine) == pytest.approx(came_true)
        assert table["n"].sum() == len(truth)


def test_skill_of_chances_is_against_always_saying_how_often_it_happened() -> None:
    tried = pd.DataFrame({"chance": [0.9, 0.2, 0.1, 0.4], "happened": [1.0, 0.0, 0.0, 1.0]})
    assert outlook.skill(tried) == pytest.approx(1 - (0.01 + 0.04 + 0.01 + 0.36) / 4 / 0.25)
    assert outlook.skill(tried.assign(happened=0.0)) is None


@pytest.mark.parametrize(
    ("chances", "age", "chance", "when"),
    [
        ((0.0, 0.1, 0.2, 0.3, 0.4, 0.49), 0, "49 %", "&gt; 1 h"),
        ((0.1, 0.2, 0.6, 0.7, 0.8, 0.9), 120, "90 %", "within 28 min"),
        ((0.7, 0.8, 0.9, 0.9, 1.0, 1.0), 900, "&gt; 99 %", "now"),
        ((0.0, 0.0, 0.0, 0.0, 0.0, 0.001), 0, "&lt; 1 %", "&gt; 1 h"),
    ],
)
def test_chance_and_first_passage_of_a_limit_are_said(
    source: EmbeddedStore, view: View, chances: tuple[float, ...], age: float, chance: str, when: str
) -> None:
    seen = by_name(source, view)["auto"]
    assert seen.origin is not None
    told = limits_line(replace(seen, breaches=(Breach("kv", 4.0, chances, chances),)), seen.origin + age)
    assert f"<b>{chance}</b>" in told
    assert told.endswith(f"{when}</p>")
    assert limits_line(replace(seen, breaches=(), refused="no data"), view.end) == ""


def test_with_few_outcomes_the_page_says_so_instead_of_drawing(
    tmp_path: Path, rows: dict[str, pd.DataFrame], view: View
) -> None:
    store = create(tmp_path / "store.db")
    store.append(SIGNAL.name, rows[SIGNAL.name])
    context = Context(store, view, ())
    said = _chances(context, "auto", lambda signal: outlook.prospect(store, view, signal))
    assert "0 chances of Auto stack have an outcome" in said.absent


def test_risks_are_the_stored_chances_the_likeliest_first_with_objectives_that_are_not_forecast(
    source: EmbeddedStore, view: View
) -> None:
    looks = [
        next(m for m in outlook.prospect(source, view, s).models if m.model == "auto") for s in outlook.FORECAST_SIGNALS
    ]
    found = outlook.risks(looks, view.end)
    truth = []
    for signal in outlook.FORECAST_SIGNALS:
        newest = max(source.stored_forecasts(signal.name, view.where, "auto"), key=lambda made: made.origin)
        truth += [(signal.name, each.limit, each.chances[-1]) for each in newest.breaches]
    assert sorted((r.signal.name, r.breach.limit, r.chance) for r in found) == sorted(truth)
    assert [r.chance for r in found] == sorted((chance for _, _, chance in truth), reverse=True)
    table = risks_table(found, view.model)
    assert table.count("not forecast") == len(LATENCY_OBJECTIVES), "the synthetic limits are no objectives"
    assert outlook.risks([replace(looks[0], refused="no data")], view.end) == []


def test_no_page_fits_a_model() -> None:
    """Nothing that the app imports can run one."""
    code = "import sys, observability.app.pages; print([m for m in sys.modules if m.endswith(('forecast.models', 'forecast.stack', 'prophet'))])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
