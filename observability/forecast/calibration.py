"""What the stored forecasts of one series and model teach about the next: how far to stretch its bands, how far to trust its
chances. Nothing is kept beside the stored forecasts, so a restart changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from observability.forecast.series import GridSeries
from observability.store.forecasts import HORIZON_STEPS, STEP_SECONDS, Forecast

#: The logarithm of the factor moves by this much in an hour for each unit by which the share of outcomes outside the 95 %
#: interval differs from 5 %: two days from a wrong start, and little noise once there (measured over 44 series).
GAIN = 0.1
MISSED = 0.05
#: The factor stays between these.
STRETCH = (0.25, 8.0)


@dataclass(frozen=True)
class Calibration:
    """`stretch`: factor on a model's quantiles about their median."""

    stretch: float = 1.0


UNCALIBRATED = Calibration()


def calibrate(series: GridSeries, stored: Sequence[Forecast], now: float) -> Calibration:
    """From the stored forecasts of one series and model, by origin, against what of their hour was observed by `now`.

    The first forecast's own factor is where it starts; each forecast then moves it by how many outcomes it missed, the less
    the closer forecasts follow one another, and once its hour is over.
    """
    made = [each for each in stored if not each.refused and each.origin + HORIZON_STEPS * STEP_SECONDS <= now]
    if not made:
        return UNCALIBRATED
    came = outcomes(series, np.array([each.origin for each in made]))
    logarithm = np.log(made[0].stretch)
    previous = -np.inf
    for each, actual in zip(made, came, strict=True):
        seen = np.isfinite(actual)
        if seen.any():
            low, high = each.interval(0.95)
            missed = float(((actual < low) | (actual > high))[seen].mean())
            hours = min(1.0, (each.origin - previous) / 3600.0)
            logarithm = np.clip(logarithm + GAIN * hours * (missed - MISSED), *np.log(STRETCH))
            previous = each.origin
    return Calibration(float(np.exp(logarithm)))


def outcomes(series: GridSeries, origins: np.ndarray) -> np.ndarray:
    """What came in the hour after each of `origins` (Unix seconds, on the grid): [origins, HORIZON_STEPS], NaN where absent."""
    place = np.round((origins - series.ends[0]) / STEP_SECONDS).astype(np.int64)[:, None] + np.arange(
        1, HORIZON_STEPS + 1
    )
    inside = (place >= 0) & (place < len(series.values))
    return np.where(inside, series.values[np.clip(place, 0, len(series.values) - 1)], np.nan)
