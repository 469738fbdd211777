"""Every kind of bad input gives a finite, ordered, bounded, flagged forecast, or a refusal that says why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from observability.forecast.backtest import scores
from observability.forecast.models import forecast
from observability.forecast.series import on_grid, read_series, window, within_bounds
from observability.forecast.stack import hindsight
from observability.signals import Signal
from observability.store.embedded import create
from observability.store.forecasts import HORIZON_STEPS, LEVELS, MODELS, Forecast
from tests.forecast.conftest import DAY, END, KV_USAGE, REQUESTS, gridded, load

pytestmark = pytest.mark.filterwarnings("ignore:The inplace keyword")  # of Prophet on pandas 3


def check_shown(made: Forecast, signal: Signal) -> None:
    assert not made.refused
    assert made.quantiles.shape == (HORIZON_STEPS, len(LEVELS))
    assert np.isfinite(made.quantiles).all()
    assert (np.diff(made.quantiles, axis=1) >= 0).all()
    low, high = signal.bounds
    assert made.quantiles.min() >= low
    assert high is None or made.quantiles.max() <= high
    lower, upper = made.interval(0.95)
    assert (upper > lower).all(), "a promise without any width"


def with_gap() -> np.ndarray:
    values = load(3)
    values[-100:-60] = np.nan
    return values


def mostly_absent() -> np.ndarray:
    values = load(3)
    values[np.random.default_rng(0).random(len(values)) < 0.67] = np.nan
    values[-1] = 8.0
    return values


def with_spike() -> np.ndarray:
    values = load(3)
    values[-40] = 9000.0
    return values


def with_reset() -> np.ndarray:
    values = load(3)
    values[-40] = -9000.0
    values[-90] = np.inf
    return within_bounds(values, REQUESTS)


def bursts() -> np.ndarray:
    values = np.zeros(3 * DAY)
    values[::37] = 2.0
    return values


def saturating() -> np.ndarray:
    return np.clip(load(3) / 9.0, 0.0, 1.0)


def burst_at_the_end() -> np.ndarray:
    """From nearly nothing to a hundredfold within the hour: an exponential would run away."""
    values = load(3) / 100
    values[-3:] = (2.0, 5.0, 12.0)
    return values


#: A metric that may be negative, such as a temperature.
CELSIUS = replace(REQUESTS, bounds=(-50.0, None))
CASES: dict[str, tuple[Callable[[], np.ndarray], Signal, set[str]]] = {
    "clean": (lambda: load(3), REQUESTS, set()),
    "a gap of 7 hours": (with_gap, REQUESTS, set()),
    "two thirds absent": (mostly_absent, REQUESTS, {"gaps"}),
    "one spike": (with_spike, REQUESTS, {"outliers"}),
    "counter reset and infinity": (with_reset, REQUESTS, set()),
    "constant": (lambda: np.full(3 * DAY, 0.25), KV_USAGE, {"constant"}),
    "all zero": (lambda: np.zeros(3 * DAY), REQUESTS, {"constant"}),
    "all one": (lambda: np.ones(3 * DAY), KV_USAGE, {"constant"}),
    "new service": (lambda: np.concatenate((np.zeros(2 * DAY), load(1))), REQUESTS, {"short_history"}),
    "bursts over zero": (bursts, REQUESTS, set()),
    "saturates at 1": (saturating, KV_USAGE, set()),
    "a burst that began now": (burst_at_the_end, REQUESTS, {"outliers"}),
    "may be negative": (lambda: load(3) - 12.0, CELSIUS, set()),
    "12 steps": (lambda: load(12 / DAY), REQUESTS, {"short_history"}),
}


def test_bounds_are_those_of_the_metric_and_no_global_zero() -> None:
    for model in MODELS:
        made = forecast(window(gridded(load(3) - 12.0, CELSIUS), END), model)
        assert made.quantiles.max() < 0, model
    grown = forecast(window(gridded(burst_at_the_end()), END), "auto")
    assert grown.median.max() < 12.0 * 1.31, "no member may run beyond 1.3 times what was seen"


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("case", CASES)
def test_bad_input_gives_a_presentable_flagged_forecast(case: str, model: str) -> None:
    values, signal, flags = CASES[case]
    made = forecast(window(gridded(values(), signal), END), model)
    check_shown(made, signal)
    assert set(made.flags) - {"fallback"} == flags
    assert made.origin == END
    assert bool(made.note) == bool(made.flags)


@pytest.mark.parametrize(
    ("values", "newest", "now", "flag", "reason"),
    [
        (load(3), END, END + 1500, "stale", "25 min old (since 2027-01-15 08:00 UTC)"),
        (np.full(3 * DAY, np.nan), -np.inf, END, "stale", "nothing was observed"),
        (np.concatenate((np.full(DAY, np.nan), load(11 / DAY))), END, END, "short_history", "11 steps"),
        (np.concatenate((load(1), np.full(6, np.nan))), END + 60, END + 60, "stale", "no whole 10 minutes"),
    ],
)
@pytest.mark.parametrize("model", MODELS)
def test_what_cannot_be_forecast_is_refused_with_the_reason(
    values: np.ndarray, newest: float, now: float, flag: str, reason: str, model: str
) -> None:
    made = forecast(window(gridded(values, newest=newest), now), model)
    assert reason in made.refused
    assert made.flags == (flag,)
    assert made.quantiles.shape == (0, len(LEVELS))
    assert made.origin == now // 600 * 600, "a refusal must not replace the forecast of the last observed step"


def test_data_that_is_a_step_behind_is_forecast_from_its_own_end() -> None:
    made = forecast(window(gridded(load(3), newest=END + 60), END + 700), "last_value")
    assert made.origin == END
    assert made.times.tolist() == [END + 600 * h for h in range(1, 7)]


def test_a_new_service_is_forecast_as_if_its_zeros_had_not_been() -> None:
    used = load(1)
    padded = gridded(np.concatenate((np.full(DAY, np.nan), np.zeros(DAY), used)))
    for model in MODELS:
        assert np.array_equal(
            forecast(window(padded, END), model).quantiles, forecast(window(gridded(used), END), model).quantiles
        )


def test_a_lone_spike_does_not_widen_the_interval_by_half() -> None:
    for model in MODELS:
        low, high = forecast(window(gridded(load(3)), END), model).interval()
        spiked_low, spiked_high = forecast(window(gridded(with_spike()), END), model).interval()
        assert ((spiked_high - spiked_low) < 1.5 * (high - low)).all()


def test_outliers_that_last_or_are_newest_are_pulled_in_and_not_forgotten() -> None:
    values = load(3)
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
    values[[-40, -39, -1]] = 9000.0
    seen = window(gridded(values), END).values
    # Three points of 432 move the quartiles a little.
    assert seen[[-40, -39, -1]] == pytest.approx(np.full(3, middle + 20 * (high - low)), rel=0.05)
    assert np.array_equal(seen[:-40], values[:-40])


def test_nothing_after_the_origin_reaches_a_forecast() -> None:
    values = load(3)
    later = values.copy()
    later[-30:] = 500.0
    then = END - 30 * 600
    for model in MODELS:
        assert np.array_equal(
            forecast(window(gridded(values), then), model).quantiles,
            forecast(window(gridded(later), then), model).quantiles,
        )


def test_the_grid_is_the_mean_of_the_ten_minutes_up_to_its_end() -> None:
    rng = np.random.default_rng(5)
    times = END - 60.0 * np.arange(600)
    times = rng.permutation(np.concatenate((times, times[::7])))  # late and duplicated samples
    values = rng.normal(10, 2, len(times))
    values[rng.random(len(times)) < 0.3] = np.nan
    ends, means = on_grid(times, values, END - 36000, END)
    frame = pd.Series(values, pd.to_datetime(times, unit="s", utc=True)).sort_index()
    bins = frame.resample("10min", closed="right", label="right")
    truth = bins.mean().where(bins.count() >= 5)
    assert ends.tolist() == [at.timestamp() for at in truth.index]
    assert np.isnan(means).any()
    np.testing.assert_allclose(means, truth.to_numpy())


def test_absent_readings_of_a_store_are_nan_and_simulated_ones_are_flagged(tmp_path: Path) -> None:
    store = create(tmp_path / "s.sqlite")
    times = np.arange(END - 86400, END + 1, 60.0)
    times = times[(times < END - 20000) | (times > END - 10000)]
    stamps = pd.to_datetime(times, unit="s", utc=True)
    for model, value in (("a", 3.0), ("b", 5.0)):
        store.append(REQUESTS.name, pd.DataFrame({"time": stamps, "model": model, "value": value}))
    store.mark_simulated(END - 86400, END - 50000)
    read = read_series(store, REQUESTS, END + 30)
    assert [(each.labels["model"], np.nanmax(each.values), each.newest) for each in read] == [
        ("a", 3.0, END),
        ("b", 5.0, END),
    ]
    for each in read:
        gap = (each.ends > END - 20000 + 900) & (each.ends <= END - 10000)
        assert gap.sum() >= 14
        assert np.isnan(each.values[gap]).all()
        assert not (each.values == 0).any()
        assert "simulated" in window(each, END + 30).flags


def test_errors_count_only_where_a_value_was_observed() -> None:
    """Neither the errors that a forecast is made of nor those by which it is judged come from filled places."""
    values = mostly_absent()
    seen = hindsight(values, REQUESTS.bounds)
    observed = np.isfinite(values)
    for h in range(1, HORIZON_STEPS + 1):
        pairs = np.zeros(len(values), bool)
        pairs[:-h] = observed[:-h] & observed[h:]
        assert np.array_equal(np.isfinite(seen.errors[:, h - 1]), pairs)
    series = gridded(values)
    origins = [float(end) for end in series.ends[200:400][observed[200:400]]]
    made = [forecast(window(series, at), "last_value") for at in origins]
    (score,) = scores(series, END, {"last_value": made})
    place = {end: i for i, end in enumerate(series.ends.tolist())}
    targets = [values[place[at] + h] for at in origins for h in range(1, HORIZON_STEPS + 1)]
    assert score.targets == np.isfinite(targets).sum()
    assert 0 < score.targets < 0.5 * len(targets)
