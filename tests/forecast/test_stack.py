"""The default model, its calibration and its chances, against the same computed another way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from observability.forecast import models
from observability.forecast.calibration import CHANCE_PRIOR, GAIN, MISSED, UNCALIBRATED, Calibration, calibrate
from observability.forecast.draft import whole_rows
from observability.forecast.last_value import last_value
from observability.forecast.limits import Limit
from observability.forecast.members import Kind, _ridge, simple, smoothed
from observability.forecast.models import breach, forecast, forecast_many
from observability.forecast.series import window
from observability.forecast.stack import fill, stack, weighted_quantiles
from observability.store.forecast_rows import forecasts_of, rows_of
from observability.store.forecasts import HORIZON_STEPS, LEVELS, Breach, Forecast
from tests.forecast.conftest import DAY, END, KV_USAGE, REQUESTS, gridded, load, recorded

MIDDLE = LEVELS.index(0.5)


def test_the_stack_beats_the_last_value_and_covers_on_recorded_series(data_dir: Path) -> None:
    """Over all 25 recorded series and 4,164 hourly origins: 0.73 of the last value's error, 0.69 of its CRPS."""
    ratios, inside = [], []
    for path in sorted((data_dir / "series").glob("*.csv"))[::3]:
        values = recorded(path)
        series, off = gridded(values), []
        for at in range(7 * DAY + 5, len(values) - HORIZON_STEPS, 211):
            seen, came = window(series, float(series.ends[at])), values[at + 1 : at + 1 + HORIZON_STEPS]
            if seen.refused or seen.origin != series.ends[at] or np.isnan(came).any():
                continue
            made = forecast(seen, "auto").quantiles
            off.append(
                (
                    np.abs(made[:, MIDDLE] - came).mean(),
                    np.abs(last_value(seen.values).quantiles[:, MIDDLE] - came).mean(),
                )
            )
            inside += ((came >= made[:, 0]) & (came <= made[:, -1])).tolist()
        mine, theirs = np.mean(off, axis=0)
        ratios.append((mine + 1e-9) / (theirs + 1e-9))
    assert np.exp(np.mean(np.log(ratios))) < 0.9, ratios
    assert 0.88 < np.mean(inside) < 0.98


def test_a_regular_shape_is_foreseen_where_the_last_value_cannot() -> None:
    hours = np.arange(5 * DAY + 3 + HORIZON_STEPS)
    values = 10 + 8 * (hours % 6 == 0)  # one step in six is high, as of a job that runs every hour
    seen = window(gridded(values[:-HORIZON_STEPS].astype(float)), END)
    made = stack(seen).quantiles[:, MIDDLE]
    np.testing.assert_allclose(made, values[-HORIZON_STEPS:], atol=0.5)


def test_simple_members_say_nothing_from_after_their_step() -> None:
    values = load(3)
    changed = values.copy()
    changed[300:] += 5.0
    for name, (said, _) in simple(values).items():
        np.testing.assert_array_equal(simple(changed)[name][0][:300], said[:300], err_msg=name)


def test_a_regression_is_judged_by_coefficients_from_other_half_days() -> None:
    """Against least squares on the rows that are left, the penalty written as further rows."""
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(400, 5)), rng.normal(size=(400, HORIZON_STEPS))
    weights = rng.uniform(0.5, 2.0, 400)
    past, following = _ridge(x, y, weights, Kind("squares", 0.1, 0, np.inf, False, ()))
    weights[:72] = 0.0
    unit = x / np.sqrt(weights @ x**2 / weights.sum())
    ridge = np.sqrt(0.1 * weights.sum()) * np.eye(5)

    def fitted(keep: np.ndarray) -> np.ndarray:
        root = np.sqrt(weights * keep)[:, None]
        return np.linalg.lstsq(np.vstack((root * unit, ridge)), np.vstack((root * y, np.zeros((5, 6)))), rcond=None)[0]

    keep = np.ones(400)
    np.testing.assert_allclose(following, unit[-1] @ fitted(keep), rtol=1e-6)
    keep[400 - 144 - 6 : 400 - 72 + 6] = 0.0
    np.testing.assert_allclose(past[256:328], unit[256:328] @ fitted(keep), rtol=1e-6)


def test_smoothing_is_the_recursion() -> None:
    values, state = load(1), None
    for value, said in zip(values, smoothed(values, 0.35), strict=True):
        state = value if state is None else state + 0.35 * (value - state)
        assert said == pytest.approx(state, rel=1e-5)


def test_weighted_quantiles_of_equal_weights_are_those_of_the_sorted_middles() -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=400)
    np.testing.assert_allclose(weighted_quantiles(values, np.ones(400)), np.quantile(values, LEVELS, method="hazen"))
    heavy = rng.integers(1, 5, 400)
    np.testing.assert_allclose(
        weighted_quantiles(values, heavy.astype(float)), np.quantile(np.repeat(values, heavy), LEVELS), atol=0.05
    )


def test_short_gaps_are_filled_along_the_line_and_long_ones_along_yesterday() -> None:
    values = 10 + 3 * np.sin(2 * np.pi * np.arange(3 * DAY) / DAY)
    holes = values.copy()
    holes[100:103] = np.nan
    holes[300:340] = np.nan
    filled = fill(holes)
    np.testing.assert_allclose(filled[99:104], np.linspace(values[99], values[103], 5))
    np.testing.assert_allclose(filled[300:340], values[300:340], atol=1e-6)
    assert np.array_equal(filled[np.isfinite(holes)], values[np.isfinite(holes)])


def test_an_hour_observed_in_part_is_a_path_along_what_was_seen() -> None:
    rows = whole_rows(
        np.array([[1.0, 2, 3, 4, 5, 6], [np.nan, 4, np.nan, 6, np.nan, np.nan], [np.nan, 4, 5, 6, np.nan, np.nan]])
    )
    assert rows.tolist() == [[1, 2, 3, 4, 5, 6], [2, 4, 5, 6, 6, 6]]
    values = load(3)
    values[100:140] = np.nan
    for draft in (last_value(values), stack(window(gridded(values), END))):
        assert len(draft.paths) > 300
        assert np.isfinite(draft.paths).all(), "an unknown step of a path would count as below every limit"


def test_history_below_two_days_says_what_was_used_instead() -> None:
    made = forecast(window(gridded(load(1)), END), "auto")
    assert "fallback" in made.flags
    assert "two days are needed" in made.note
    assert "fallback" not in forecast(window(gridded(load(3)), END), "auto").flags


def past(origin: float, width: float, *, stretch: float = 1.0, breaches: tuple[Breach, ...] = ()) -> Forecast:
    table = 8.0 + np.tile((np.array(LEVELS) - 0.5) * width, (HORIZON_STEPS, 1))
    return Forecast(REQUESTS.name, {"model": "m"}, "auto", origin, table, stretch=stretch, breaches=breaches)


def test_the_factor_follows_the_outcomes_that_are_known_and_no_others() -> None:
    series = gridded(load(3))
    stored = [past(END - 3600.0 * hour, 9.0, stretch=1.5) for hour in range(30, -1, -1)]
    logarithm = np.log(1.5)
    actual = dict(zip(series.ends.tolist(), series.values.tolist(), strict=True))
    for each in stored[:-1]:  # the hour of the last one is not over
        low, high = 8 - 9.0 * 0.475, 8 + 9.0 * 0.475
        missed = np.mean([not low <= actual[time] <= high for time in each.times])
        logarithm += GAIN * (missed - MISSED)
    assert calibrate(series, stored, END).stretch == pytest.approx(np.exp(logarithm))
    assert calibrate(series, stored[-1:], END) == UNCALIBRATED


def test_a_restart_changes_nothing_and_ten_minute_forecasts_move_the_factor_no_faster() -> None:
    series = gridded(load(3))
    narrow = [past(END - 86400.0 + 600.0 * i, 0.01) for i in range(31)]
    hourly = calibrate(series, narrow[::6], END).stretch
    assert calibrate(series, narrow, END).stretch == pytest.approx(hourly, rel=0.05)
    assert hourly > 4


def test_too_sure_chances_are_drawn_to_what_happened() -> None:
    """Against the minimum of the penalized likelihood over a fine grid."""
    rng = np.random.default_rng(1)
    values = np.where(rng.random(6 * DAY) < 0.03, 20.0, 5.0)
    series = gridded(values)
    origins = END - 3600.0 * np.arange(120, 0, -1)
    raw = np.where(rng.random(120) < 0.5, 0.9, 0.05)
    stored = [
        past(float(at), 8.0, breaches=(Breach("l", 10.0, (float(p),) * 6, (float(p),) * 6),))
        for at, p in zip(origins, raw, strict=True)
    ]
    offset, slope = calibrate(series, stored, END).chance
    actual = dict(zip(series.ends.tolist(), values.tolist(), strict=True))
    passed = np.array([any(actual[time] > 10 for time in each.times) for each in stored])
    odds = np.log(raw / (1 - raw))

    def cost(a: float, b: float) -> float:
        chance = 1 / (1 + np.exp(-(a + b * odds)))
        fit = -np.log(np.where(passed, chance, 1 - chance)).sum()
        return float(fit + 0.5 * (a / CHANCE_PRIOR[0]) ** 2 + 0.5 * ((b - 1) / CHANCE_PRIOR[1]) ** 2)

    best = min((cost(a, b), a, b) for a in np.arange(-1.5, 1.5, 0.02) for b in np.arange(0.0, 1.6, 0.02))
    assert (offset, slope) == pytest.approx(best[1:], abs=0.03)
    calibrated = Calibration(1.0, (offset, slope)).trusted((0.05, 0.9))
    assert calibrated[0] < calibrated[1] < 0.9


def test_the_chance_is_the_share_of_past_hours_laid_on_this_one() -> None:
    """Counted in loops, the first passage included."""
    values = load(4)
    seen = window(gridded(values), END)
    limit = Limit("ttft", float(np.quantile(values, 0.8)))
    (made,) = forecast(seen, "last_value", Calibration(), limits=(limit,)).breaches
    paths = last_value(values).paths
    first = [next((h for h in range(6) if path[h] > limit.value), None) for path in np.maximum(paths, 0)]
    usual = []
    for t in range(len(values) - 1):
        if (values[t] > limit.value) == (values[-1] > limit.value):
            hour = values[t + 1 : t + 7]
            usual.append([bool((hour[: h + 1] > limit.value).any()) for h in range(6)])
    for h in range(6):
        hits = sum(step is not None and step <= h for step in first)
        assert made.raw[h] == pytest.approx((hits + 0.5 * np.mean(usual, axis=0)[h]) / (len(paths) + 0.5))
    assert list(made.chances) == sorted(made.chances)
    assert made.chances == pytest.approx(made.raw)  # nothing learned yet


def test_a_pool_that_stays_calm_is_not_exhausted_within_the_hour() -> None:
    calm, full = 0.3 + 0.01 * load(3) / 8, np.clip(0.9 + 0.02 * np.arange(3 * DAY) / DAY, 0, 1)
    for values, hour in ((calm, None), (full, 600.0)):
        made = forecast(window(gridded(values, KV_USAGE), END), "auto")
        found = {each.name: each for each in made.breaches}
        assert set(found) == {"kv_usage_warning", "kv_exhaustion"}
        assert found["kv_exhaustion"].seconds_until() == hour
        assert (found["kv_exhaustion"].chance > 0.5) is (hour is not None)


def test_one_series_that_breaks_a_model_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    good = window(gridded(load(3)), END)
    bad = replace(good, labels={"model": "bad"})

    def run(seen: object) -> object:
        if seen is bad:
            raise ZeroDivisionError("of nothing")
        return stack(good)

    monkeypatch.setitem(models._RUN, "auto", run)
    first, second, third = forecast_many([(good, UNCALIBRATED), (bad, UNCALIBRATED), (good, UNCALIBRATED)], "auto")
    assert "ZeroDivisionError: of nothing" in second.refused
    assert np.array_equal(first.quantiles, third.quantiles)


def test_the_chance_of_falling_below_a_limit_is_that_of_the_mirrored_series_rising_above_it() -> None:
    series = load(7, seed=9)
    level = float(np.quantile(series, 0.2))
    down = window(gridded(series), END)
    up = window(gridded(20.0 - series), END)
    (fallen,) = forecast(down, "last_value", Calibration(), limits=(Limit("l", level, below=True),)).breaches
    (risen,) = forecast(up, "last_value", Calibration(), limits=(Limit("l", 20.0 - level),)).breaches
    assert fallen.below
    assert fallen.raw == pytest.approx(risen.raw, abs=1e-9)
    assert 0.0 < fallen.chance < 1.0
    paths = np.array([[9.0, 7.0, 9.0, 9.0, 9.0, 9.0], [9.0] * 6])
    said = breach(Limit("l", 8.0, below=True), paths, np.empty((6, 13)), down, Calibration())
    assert said.raw[0] < said.raw[1] - 0.3 <= said.raw[5] - 0.3 < 1.0
    store_row = past(END, 1.0, breaches=(said,))
    assert forecasts_of(rows_of([store_row]), store_row.labels)[0].breaches == (said,)
