"""Runs a forecast model on a window and makes its quantiles fit to show: finite, ordered, inside the signal's bounds."""

from __future__ import annotations

import numpy as np

from observability.forecast.last_value import last_value
from observability.forecast.prophet_model import FitError, prophet_ar1
from observability.forecast.series import Window
from observability.signals import Signal
from observability.store.forecasts import LEVELS, Forecast

#: Half the least width of a 95 % interval, by unit: one request in 10 minutes; a tenth of a percent; a millisecond.
#: Below it a constant series would be promised exactly.
RESOLUTION = {"requests/s": 1 / 600, "ratio": 1e-3, "seconds": 1e-3}


def forecast(window: Window, model: str, *, hindcast: bool = False) -> Forecast:
    """The forecast of one of types.MODELS, or its refusal with the reason."""
    quantiles, refused = np.empty((0, len(LEVELS))), window.refused
    if not refused:
        try:
            raw = last_value(window.values) if model == "last_value" else prophet_ar1(window)
        except FitError as error:
            refused = error.reason
        else:
            quantiles = presentable(raw, window.signal)
    return Forecast(
        window.signal.name, window.labels, model, window.origin, quantiles, window.flags, window.note, refused, hindcast
    )  # fmt: skip


def presentable(quantiles: np.ndarray, signal: Signal) -> np.ndarray:
    """Quantiles [steps, len(LEVELS)] sorted, at least as wide as the signal's resolution, clipped to its own bounds."""
    ordered = np.sort(quantiles, axis=1)
    levels = np.array(LEVELS)
    least = ordered[:, [LEVELS.index(0.5)]] + RESOLUTION[signal.unit] * (levels - 0.5) / (levels[-1] - 0.5)
    widened = np.where(levels < 0.5, np.minimum(ordered, least), np.maximum(ordered, least))
    return np.clip(widened, signal.bounds[0], signal.bounds[1])
