"""The references every other model has to beat: what was last observed, and yesterday's hour, with the errors these made."""

from __future__ import annotations

import numpy as np

from observability.forecast.draft import Draft, ahead, around, whole_rows
from observability.store.forecasts import HORIZON_STEPS

DAY_STEPS = 144
#: Recent volatility is the mean change from step to step over these many steps (3 h, 12 h, all), so weighted. Errors are
#: counted in units of it, which keeps coverage steady between calm and busy hours.
_SPANS = (18, 72, None)
_WEIGHTS = (0.45, 0.35, 0.2)


def last_value(values: np.ndarray) -> Draft:
    """The hour after `values` [steps] (NaN: not observed; the last one is).

    The median is the last value. The other quantiles add those of past h-step changes between observed steps, each divided by
    the volatility of its time and multiplied by that of now.
    """
    return _draft(values, np.full(HORIZON_STEPS, values[-1]), ahead(values) - values[:, None])


def seasonal_naive(values: np.ndarray) -> Draft:
    """The same with yesterday's values at the hour to come; the last value where there is no yesterday."""
    if len(values) <= DAY_STEPS + HORIZON_STEPS:
        return last_value(values)._replace(fallback="last value: there is no day before to repeat")
    yesterday = values[-DAY_STEPS:][:HORIZON_STEPS]
    before = np.concatenate((np.full((DAY_STEPS, HORIZON_STEPS), np.nan), ahead(values)[:-DAY_STEPS]))
    errors = ahead(values) - before
    if not np.isfinite(yesterday).all() or not np.isfinite(errors).any():
        return last_value(values)._replace(fallback="last value: yesterday's hour was not observed")
    return _draft(values, yesterday.copy(), errors)


def _draft(values: np.ndarray, centre: np.ndarray, errors: np.ndarray) -> Draft:
    scale = volatility(values)
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = errors / scale[:, None]
    scaled[~np.isfinite(scaled)] = np.nan
    now = scale[-1] if np.isfinite(scale[-1]) else 0.0
    return Draft(around(centre, now * scaled), centre + now * whole_rows(scaled))


def volatility(values: np.ndarray) -> np.ndarray:
    """Recent mean absolute change at each of `values` [steps], looking back only; NaN before the first change."""
    change = np.concatenate(([np.nan], np.abs(np.diff(values))))
    seen = np.isfinite(change)
    total, count = np.cumsum(np.where(seen, change, 0.0)), np.cumsum(seen)
    parts = []
    for span in _SPANS:
        sums, counts = total.copy(), count.astype(np.float64)
        if span is not None and span < len(values):
            sums[span:] -= total[:-span]
            counts[span:] -= count[:-span]
        with np.errstate(invalid="ignore"):
            parts.append(np.where(counts > 0, np.maximum(sums, 0.0) / counts, np.nan))
    weights = np.array(_WEIGHTS)[:, None] * np.isfinite(parts)
    with np.errstate(invalid="ignore"):
        return (weights * np.nan_to_num(parts)).sum(axis=0) / weights.sum(axis=0)
