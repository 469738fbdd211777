"""The reference every other model has to beat: what was last observed, with the errors that this made so far."""

from __future__ import annotations

import numpy as np

from observability.store.forecasts import HORIZON_STEPS, LEVELS

#: Recent volatility is the mean change from step to step over these many steps (3 h, 12 h, all), so weighted. Errors are
#: counted in units of it, which keeps coverage steady between calm and busy hours.
_SPANS = (18, 72, None)
_WEIGHTS = (0.45, 0.35, 0.2)


def last_value(values: np.ndarray) -> np.ndarray:
    """Quantiles [HORIZON_STEPS, len(LEVELS)] after `values` [steps] (NaN: not observed; the last one is).

    The median is the last value. The others add the quantiles of past h-step changes between observed steps, each divided
    by the volatility of its time and multiplied by that of now.
    """
    scale = volatility(values)
    middle = LEVELS.index(0.5)
    out = np.full((HORIZON_STEPS, len(LEVELS)), values[-1])
    for h in range(1, HORIZON_STEPS + 1):
        with np.errstate(divide="ignore", invalid="ignore"):
            errors = (values[h:] - values[:-h]) / scale[:-h]
        errors = errors[np.isfinite(errors)]
        if len(errors):
            offsets = scale[-1] * np.quantile(errors, LEVELS)
            out[h - 1, :middle] += np.minimum(offsets[:middle], 0.0)
            out[h - 1, middle + 1 :] += np.maximum(offsets[middle + 1 :], 0.0)
    return out


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
