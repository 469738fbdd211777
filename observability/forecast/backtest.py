"""How far past forecasts were off, and forecasts made afterwards so that this can be said from the first hour on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from observability.forecast.series import DAY_SECONDS, GridSeries, window
from observability.store.forecasts import HORIZON_SECONDS, Forecast, Score, shared_origins

HINDCAST_EVERY_SECONDS = 3600.0
HINDCAST_SECONDS = DAY_SECONDS
#: Forecasts are compared with what came over this long, as on the Forecast page.
SCORED_SECONDS = 3 * DAY_SECONDS


def hindcast_origins(series: GridSeries, now: float) -> list[float]:
    """Whole hours of the last day whose own hour ahead is over and from which a forecast could have been made, newest
    first."""
    newest = (now - HORIZON_SECONDS) // HINDCAST_EVERY_SECONDS * HINDCAST_EVERY_SECONDS
    hours = newest - HINDCAST_EVERY_SECONDS * np.arange(round(HINDCAST_SECONDS / HINDCAST_EVERY_SECONDS))
    possible = []
    for hour in map(float, hours):
        seen = window(series, hour)
        if not seen.refused and seen.origin == hour:
            possible.append(hour)
    return possible


def scores(series: GridSeries, now: float, forecasts: Mapping[str, Sequence[Forecast]]) -> list[Score]:
    """One score a model over SCORED_SECONDS before `now`, all on shared_origins."""
    actual = dict(zip(series.ends.tolist(), series.values.tolist(), strict=True))
    made = {
        model: {f.origin: f for f in each if not f.refused and f.origin > now - SCORED_SECONDS}
        for model, each in forecasts.items()
    }
    shared = sorted(shared_origins(made))
    return [
        _score(model, [each[origin] for origin in shared if origin in each], actual) for model, each in made.items()
    ]


def _score(model: str, forecasts: Sequence[Forecast], actual: Mapping[float, float]) -> Score:
    errors: list[float] = []
    inside: list[bool] = []
    origins = 0
    for each in forecasts:
        came = np.array([actual.get(time, np.nan) for time in each.times.tolist()])
        seen = np.isfinite(came)
        low, high = each.interval(0.95)
        errors += np.abs(each.median - came)[seen].tolist()
        inside += ((came >= low) & (came <= high))[seen].tolist()
        origins += bool(seen.any())
    if not errors:
        return Score(model, float("nan"), float("nan"), 0, 0)
    return Score(model, float(np.mean(errors)), float(np.mean(inside)), len(errors), origins)
