"""The forecast page's numbers, against plain loops over the stored forecasts and rows."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean

import numpy as np
import pandas as pd
import pytest

from observability.app import charts, outlook
from observability.app.page_forecast import (
    _chances,
    _choice,
    _forecast,
    _risks,
    between,
    error,
    headline,
    limits_line,
    models_table,
    risks_table,
)
from observability.app.ui import Context
from observability.app.units import quantity
from observability.app.view import View
from observability.forecast import series
from observability.forecast.backtest import scores
from observability.forecast.limits import LIMITS
from observability.forecast.quality import quality
from observability.forecast.series import read_series
from observability.objectives import LATENCY_OBJECTIVES
from observability.signals import Signal
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
    assert set(named) == {"made 1 h ago", "measured", "forecast"}
    np.testing.assert_allclose(named["forecast"].y, seen.ahead[outlook.MEDIAN])
    np.testing.assert_allclose(np.array(named["measured"].y, dtype=float), found.came["value"])
    middles = pd.DatetimeIndex(seen.ahead["time"]).tz_localize(None) - pd.Timedelta(minutes=5)
    assert list(pd.DatetimeIndex(named["forecast"].x)) == list(middles)
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
    assert "No forecast: only 2 steps" in headline(prophet, view)
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
    assert error(0.0399, "ratio") == "3.99 points"
    assert error(0.156, "requests/s") == "0.156 req/s"


@pytest.mark.parametrize(
    ("low", "high", "unit", "said"),
    [
        (12.0, 125.0, "seconds", "12.0 s to 2 min 5 s"),
        (200.0, 320.0, "seconds", "3 min 20 s to 5 min 20 s"),
        (1260.0, 8460.0, "seconds", "21 min to 2 h 21 min"),
        (120.0, 125.0, "seconds", "2 min to 2 min 5 s"),
        (0.9, 1.2, "seconds", "900 ms to 1.20 s"),
        (1.2, 34.0, "seconds", "1.20 to 34.0 s"),
        (120.0, 300.0, "seconds", "2 to 5 min"),
        (0.9996, 0.9999, "ratio", "> 99.9 % to > 99.9 %"),
        (0.5, 0.9999, "ratio", "50.0 % to > 99.9 %"),
        (1e-7, 0.02, "ratio", "< 0.0001 % to 2.00 %"),
        (0.02, 0.5, "ratio", "2.00 to 50.0 %"),
        (9000.0, 12300.0, "tokens", "9,000 to 12.3k tok"),
    ],
)
def test_an_interval_says_its_unit_once_only_where_both_ends_are_one_number_of_it(
    low: float, high: float, unit: str, said: str
) -> None:
    assert between(low, high, unit) == said


def test_no_interval_leaves_open_what_its_first_number_is() -> None:
    """Whole, or one number whose unit is the only one that follows."""
    ends = [0.0, *(10.0**exponent * first for exponent in range(-8, 6) for first in (1.0, 2.1, 3.33, 6.0, 9.996))]
    for unit in ("seconds", "ratio", "requests/s", "tokens", "bytes"):
        for low in ends:
            for high in ends:
                said = between(low, high, unit)
                if said != f"{quantity(low, unit)} to {quantity(high, unit)}":
                    number, to, *last = said.split(" ")
                    assert (to, len(last)) == ("to", 2), said
                    assert f"{number} {last[1]}" == quantity(low, unit), said


def test_skill_that_rounds_to_nothing_has_no_sign(source: EmbeddedStore, view: View) -> None:
    def seen(signal: Signal) -> outlook.Prospect:
        found = outlook.prospect(source, view, signal)
        return replace(found, models=[replace(m, lately=outlook.Lately(-0.004, {0.95: 0.9}, 6)) for m in found.models])

    models = seen(SIGNAL).models
    for told in (models_table(models, SIGNAL, view), _choice(Context(source, view, ()), "auto", seen).html):
        assert "<td>0.00</td>" in told
        assert "-0.00" not in told


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


def at(view: View, end: float) -> View:
    return replace(view, start=end - 3600, end=end)


def hhmm(unix: float, end: float) -> str:
    """The time of day of `unix`, with its date where a view that ends at `end` lies on another day (UTC)."""
    then = datetime.fromtimestamp(unix, UTC)
    same = unix // 86400 == end // 86400
    return then.strftime("%H:%M") if same else f"{then.day} {then:%b %H:%M}"


@pytest.mark.parametrize(
    ("chances", "age", "chance", "when"),
    [
        ((0.0, 0.1, 0.2, 0.3, 0.4, 0.49), 0, "49 %", "not by {60}"),
        ((0.0, 0.1, 0.2, 0.3, 0.4, 0.49), 1500, "49 %", "not by {60}"),
        ((0.1, 0.2, 0.6, 0.7, 0.8, 0.9), 120, "90 %", "within 28 min"),
        ((0.1, 0.2, 0.6, 0.7, 0.8, 0.9), 1799, "90 %", "within 1 min"),
        ((0.1, 0.2, 0.6, 0.7, 0.8, 0.9), 1800, "90 %", "by {30}"),
        ((0.7, 0.8, 0.9, 0.9, 1.0, 1.0), 900, "&gt; 99 %", "by {10}"),
        ((0.0, 0.0, 0.0, 0.0, 0.0, 0.001), 0, "&lt; 1 %", "not by {60}"),
    ],
)
def test_chance_and_first_passage_of_a_limit_are_said(
    source: EmbeddedStore, view: View, chances: tuple[float, ...], age: float, chance: str, when: str
) -> None:
    """The chance with the hour that it is of, which begins where the data end; the time from the end of the view on."""
    seen = by_name(source, view)["auto"]
    assert seen.origin is not None
    then = at(view, seen.origin + age)
    for minutes in (10, 30, 60):
        when = when.replace(f"{{{minutes}}}", hhmm(seen.origin + minutes * 60, then.end))
    told = limits_line(replace(seen, breaches=(Breach("kv", 4.0, chances, chances),)), then)
    hour = f"between {hhmm(seen.origin, then.end)} and {hhmm(seen.origin + 3600, then.end)}"
    assert f"<b>{chance}</b> {hour}, likely {when}</p>" in told
    assert limits_line(replace(seen, breaches=(), refused="no data"), view) == ""


def test_a_forecast_whose_hour_is_over_tells_no_chance_but_since_when_there_is_none(
    source: EmbeddedStore, view: View
) -> None:
    """The worker stopped: to the last second of its hour the newest forecast counts, after it nothing of it is told as what comes."""
    room = {
        name: next(m for m in outlook.prospect(source, view, signal).models if m.model == "auto")
        for name, signal in series.FORECAST_SIGNALS.items()
    }
    origin = room["kv_usage"].origin
    assert origin is not None
    over = at(view, origin + 3600)
    for each in room.values():
        assert each.reaches(over.end - 1)
        assert "in 0 min" in headline(each, at(view, over.end - 1))
        hour = f"between {hhmm(origin, over.end - 1)} and"
        assert limits_line(each, at(view, over.end - 1)).count(hour) == len(each.breaches)
        assert limits_line(each, over) == ""
        said = f"No current forecast since {hhmm(over.end, over.end)}: not renewed, the newest has data to {hhmm(origin, over.end)}."
        assert headline(each, over) == f'<p class="refused">{said}</p>'
    found = outlook.risks(list(room.values()), over.end)
    truth = [(signal, limit) for signal, limits in LIMITS.items() for limit in limits]
    assert sorted((r.look.signal.name, r.limit) for r in found) == sorted(
        (signal, limit) for signal, limit in truth if signal in {s.name for s in outlook.FORECAST_SIGNALS}
    )
    assert all(r.chance is None and r.by is None for r in found)
    table = risks_table(found, over)
    assert table.count(said) == len(found)
    assert "%</td>" not in table.replace("above 95 %</td>", "").replace("above 85 %</td>", "")


def test_chances_that_are_current_come_before_those_of_a_forecast_of_yesterday(
    tmp_path: Path, rows: dict[str, pd.DataFrame], view: View
) -> None:
    """As `kvscope history` and `kvscope forecast` leave it: the free requests were last forecast at 23:00 of the day before."""
    store = create(tmp_path / "store.db")
    now = view.end // 86400 * 86400 + 19.5 * 3600
    for name, origin, chance in (("kv_free_requests", now - 20.5 * 3600, 0.005), ("kv_usage", now - 600, 0.3)):
        limits = LIMITS[series.FORECAST_SIGNALS[name].name]
        breaches = tuple(Breach(each.name, each.value, (chance,) * 6, (chance,) * 6, each.below) for each in limits)
        made = Forecast(
            series.FORECAST_SIGNALS[name].name, view.where, "auto", origin, np.ones((6, len(LEVELS))), breaches=breaches
        )
        store.add_forecasts([made])
    later = at(view, now)
    content = _risks(Context(store, later, ()), "auto", lambda signal: outlook.prospect(store, later, signal))
    kv, full, ttft, e2e, room, *_ = content.html.split("<tr ")[1:]
    for row in (kv, full):
        assert ">30 %</td><td>19:20 and 20:20</td><td>not by 20:20</td>" in row
    yesterday = f"{datetime.fromtimestamp(now - 86400, UTC):%-d %b} 23:00"
    assert f"No current forecast since 00:00: not renewed, the newest has data to {yesterday}." in room
    assert all("No forecast by Auto stack was stored." in row for row in (ttft, e2e))
    assert "&lt; 1 %" not in content.html
    assert content.data is not None
    assert content.data["chance"].tolist()[:2] == [0.3, 0.3]
    assert content.data["chance"].isna().tolist() == [False, False, True, True, True]
    signal = series.FORECAST_SIGNALS["kv_free_requests"]
    assert f"<td>{yesterday}</td>" in models_table(outlook.prospect(store, later, signal).models, signal, later)


def test_a_refusal_is_told_as_of_its_time(source: EmbeddedStore, view: View) -> None:
    seen = by_name(source, view)["auto"]
    assert seen.origin is not None
    refused = replace(seen, refused="no data.", signal=series.FORECAST_SIGNALS["kv_usage"])
    for age, said in (
        (600, "No forecast: no data."),
        (7200, f"not tried again since {hhmm(seen.origin, seen.origin + 7200)}, then: no data."),
    ):
        then = at(view, seen.origin + age)
        assert said in headline(refused, then)
        assert risks_table(outlook.risks([refused], then.end), then).count(said) == len(LIMITS[refused.signal.name])


def test_the_chart_of_a_forecast_whose_hour_is_over_has_no_next_hour(source: EmbeddedStore, view: View) -> None:
    seen = outlook.prospect(source, view, SIGNAL)
    origin = seen.models[0].origin
    assert origin is not None
    for age, shown in ((600.0, True), (3600.0, False)):
        then = at(view, origin + age)
        figure = _forecast(Context(source, then, ()), SIGNAL, "auto", lambda signal: seen).figure
        assert figure is not None
        assert ("forecast" in {trace["name"] for trace in figure.traces if trace.get("name")}) is shown


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
    assert sorted((r.look.signal.name, r.limit.value, r.chance) for r in found) == sorted(truth)
    assert [r.chance for r in found] == sorted((chance for _, _, chance in truth), reverse=True)
    table = risks_table(found, view)
    assert table.count("not forecast") == len(LATENCY_OBJECTIVES), "the synthetic limits are no objectives"
    assert outlook.risks([replace(looks[0], refused="no data")], view.end) == []


def test_no_page_fits_a_model() -> None:
    """Nothing that the app imports can run one."""
    code = "import sys, observability.app.pages; print([m for m in sys.modules if m.endswith(('forecast.models', 'forecast.stack', 'prophet'))])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
