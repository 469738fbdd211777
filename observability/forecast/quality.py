"""How good the forecasts of the last day were: error, skill against the last value, and how often the bands held."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from observability.catalog import FORECAST_BANDS
from observability.forecast.calibration import outcomes
from observability.forecast.series import DAY_SECONDS, GridSeries
from observability.store.forecasts import Forecast, shared_origins

QUALITY_SECONDS = DAY_SECONDS
#: What skill is measured against.
BASELINE = "last_value"


@dataclass(frozen=True)
class Quality:
    """Of one model's forecasts of one series. `mae`: mean distance of the median from what came, in the signal's unit. `skill`: 1 - mae over
    that of the last value, NaN where that is 0 or was not made. `coverage`: share of `targets` inside each central band of
    FORECAST_BANDS, by its percentage. All over shared_origins."""

    model: str
    mae: float
    skill: float
    coverage: Mapping[int, float]
    targets: int


def quality(series: GridSeries, now: float, forecasts: Mapping[str, Sequence[Forecast]]) -> tuple[Quality, ...]:
    """Of each model of `forecasts` that was made at an origin in the last QUALITY_SECONDS of which something was observed since;
    empty when there is none. Models without a forecast in that time are left out."""
    made = {
        model: {f.origin: f for f in each if not f.refused and f.origin > now - QUALITY_SECONDS}
        for model, each in forecasts.items()
    }
    shared = shared_origins(made)
    found = []
    for model, each in made.items():
        origins = sorted(shared & each.keys())
        came = outcomes(series, np.array(origins)) if origins else np.empty(0)
        seen = np.isfinite(came)
        if not seen.any():
            continue
        mine = [each[origin] for origin in origins]
        error, base = _error(mine, came), math.nan
        if made.get(BASELINE) and shared <= made[BASELINE].keys():
            base = _error([made[BASELINE][origin] for origin in origins], came)
        covered = {band: _covered(mine, came, band) for band in FORECAST_BANDS}
        found.append(Quality(model, error, 1.0 - error / base if base else math.nan, covered, int(seen.sum())))
    return tuple(found)


def _error(made: Sequence[Forecast], came: np.ndarray) -> float:
    return float(np.nanmean(np.abs(np.array([each.median for each in made]) - came)))


def _covered(forecasts: Sequence[Forecast], came: np.ndarray, band: int) -> float:
    """Share of the observed `came` [forecasts, HORIZON_STEPS] within the central `band` percent."""
    low, high = np.stack([each.interval(band / 100) for each in forecasts], axis=1)
    seen = np.isfinite(came)
    return float(((came >= low) & (came <= high))[seen].mean())
