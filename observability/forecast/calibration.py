"""What the stored forecasts of one series and model teach about the next: how far to stretch its bands, how far to trust its
chances. Nothing is kept beside the stored forecasts, so a restart changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from observability.forecast.series import GridSeries
from observability.store.forecasts import HORIZON_STEPS, STEP_SECONDS, Breach, Forecast

#: The logarithm of the factor moves by this much in an hour for each unit by which the share of outcomes outside the 95 %
#: interval differs from 5 %: within a day from a wrong start. Over 25 series and 4,164 hourly origins 0.1 leaves the worst
#: series at 90.6 %, 0.3 at 92.3, for 4 % of width.
GAIN = 0.3
MISSED = 0.05
#: Standard deviations of the prior on offset and slope of the log odds: some dozen outcomes are needed to move them much.
CHANCE_PRIOR = (0.6, 0.3)
#: The factor stays between these.
STRETCH = (0.25, 8.0)


@dataclass(frozen=True)
class Calibration:
    """`stretch`: factor on a model's quantiles about their median. `chance`: offset and slope on the log odds that its paths
    give for a limit being crossed."""

    stretch: float = 1.0
    chance: tuple[float, float] = (0.0, 1.0)

    def trusted(self, raw: Sequence[float]) -> tuple[float, ...]:
        """Chances as outcomes bear them out; the order of `raw` stays."""
        offset, slope = self.chance
        if (offset, slope) == (0.0, 1.0):
            return tuple(raw)
        return tuple((1.0 / (1.0 + np.exp(-(offset + slope * _log_odds(np.asarray(raw, dtype=np.float64)))))).tolist())


#: A model's own past errors are a little smaller than those to come: some of what it is made of was chosen by them.
UNCALIBRATED = Calibration(1.28)


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
    raw = np.array([limit.raw[-1] for each in made for limit in each.breaches])
    passed = np.array(
        [_passed(actual, limit) for each, actual in zip(made, came, strict=True) for limit in each.breaches]
    )
    return Calibration(float(np.exp(logarithm)), _chance(raw, passed))


def _passed(actual: np.ndarray, limit: Breach) -> float:
    """Whether one of the steps was beyond: 1 or 0; NaN when that is not known."""
    if limit.passed(actual).any():
        return 1.0
    return 0.0 if np.isfinite(actual).all() else np.nan


def _log_odds(chance: np.ndarray) -> np.ndarray:
    chance = np.clip(chance, 1e-3, 1.0 - 1e-3)
    return np.log(chance / (1.0 - chance))


def _chance(raw: np.ndarray, passed: np.ndarray) -> tuple[float, float]:
    """Offset and slope under which the log odds `raw` fit the outcomes best (Platt 1999), with a normal prior on no change."""
    known = np.isfinite(passed)
    x = np.stack((np.ones(known.sum()), _log_odds(raw[known])), axis=1) if known.any() else np.empty((0, 2))
    found = np.array((0.0, 1.0))
    precision = np.array(CHANCE_PRIOR) ** -2.0
    for _ in range(20 if len(x) else 0):
        chance = 1.0 / (1.0 + np.exp(-np.clip(x @ found, -30, 30)))
        slope = x.T @ (passed[known] - chance) - precision * (found - (0.0, 1.0))
        step = np.linalg.solve((x * (chance * (1 - chance))[:, None]).T @ x + np.diag(precision), slope)
        found = found + np.clip(step, -0.5, 0.5)
        if np.abs(step).max() < 1e-6:
            break
    return float(found[0]), float(max(found[1], 0.1))


def outcomes(series: GridSeries, origins: np.ndarray) -> np.ndarray:
    """What came in the hour after each of `origins` (Unix seconds, on the grid): [origins, HORIZON_STEPS], NaN where absent."""
    place = np.round((origins - series.ends[0]) / STEP_SECONDS).astype(np.int64)[:, None] + np.arange(
        1, HORIZON_STEPS + 1
    )
    inside = (place >= 0) & (place < len(series.values))
    return np.where(inside, series.values[np.clip(place, 0, len(series.values) - 1)], np.nan)
