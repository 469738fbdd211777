"""How good the forecasts of the last day were: error, skill against the last value, and how often the bands held."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from observability.catalog import FORECAST_BANDS
from observability.forecast.calibration import outcomes
from observability.forecast.series import DAY_SECONDS, GridSeries
from observability.store.forecasts import Forecast

QUALITY_SECONDS = DAY_SECONDS
#: What skill is measured against.
BASELINE = "last_value"


@dataclass(frozen=True)
class Quality:
    """Of one model's forecasts of one series. `mae`: mean distance of the median from what came, in the signal's unit. `skill`: 1 - mae over
    that of the last value, NaN where that is 0 or was not made. `coverage`: share of `targets` inside each central band of
    FORECAST_BANDS, by its percentage. All over the origins that every model has."""

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
    made = {model: each for model, each in made.items() if each}
    origins = sorted(set.intersection(*map(set, made.values()))) if made else []
    if not origins:
        return ()
    came = outcomes(series, np.array(origins))
    seen = np.isfinite(came)
    if not seen.any():
        return ()
    errors = {
        model: float(np.abs(np.array([each[o].median for o in origins]) - came)[seen].mean())
        for model, each in made.items()
    }
    base = errors.get(BASELINE, math.nan)
    return tuple(
        Quality(
            model, errors[model], 1.0 - errors[model] / base if base else math.nan,
            {band: _covered([each[o] for o in origins], came, band) for band in FORECAST_BANDS}, int(seen.sum()),
        )
        for model, each in made.items()
    )  # fmt: skip


def _covered(forecasts: Sequence[Forecast], came: np.ndarray, band: int) -> float:
    """Share of the observed `came` [forecasts, HORIZON_STEPS] within the central `band` percent."""
    low, high = np.stack([each.interval(band / 100) for each in forecasts], axis=1)
    seen = np.isfinite(came)
    return float(((came >= low) & (came <= high))[seen].mean())
