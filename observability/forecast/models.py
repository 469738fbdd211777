"""Runs a forecast model on a window and makes what it says fit to show: calibrated, finite, ordered, inside the bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from observability.forecast.calibration import UNCALIBRATED, Calibration
from observability.forecast.draft import Draft, ahead
from observability.forecast.last_value import last_value, seasonal_naive
from observability.forecast.limits import Limit, limits_of
from observability.forecast.pooled import NOT_TRAINED, Trained, pooled_or_stack
from observability.forecast.prophet_model import FitError, prophet_ar1
from observability.forecast.series import Window
from observability.forecast.stack import stack
from observability.signals import Signal
from observability.store.forecasts import HORIZON_STEPS, LEVELS, POOLED, Breach, Forecast, beyond

#: Half the least width of a 95 % interval, by unit: one request in 10 minutes; a tenth of a percent; a millisecond ...
#: Below it a constant series would be promised exactly.
RESOLUTION = {"requests/s": 1 / 600, "ratio": 1e-3, "seconds": 1e-3}
_RESOLUTION_ELSE = 1e-2
_MIDDLE = LEVELS.index(0.5)
_RUN: Mapping[str, Callable[[Window], Draft]] = {
    "auto": stack,
    "prophet": prophet_ar1,
    "last_value": lambda window: last_value(window.values),
    "seasonal_naive": lambda window: seasonal_naive(window.values),
}


def forecast(
    window: Window,
    model: str,
    calibration: Calibration = UNCALIBRATED,
    *,
    limits: Sequence[Limit] | None = None,
    hindcast: bool = False,
    trained: Trained = NOT_TRAINED,
) -> Forecast:
    """The forecast by one of store.forecasts.MODELS or, with what was `trained`, the pooled one; or its refusal with the reason. `limits`:
    whose crossing is looked for, by default those of the signal. Whatever a model does with a series ends here."""
    if window.refused:
        return _refusal(window, model, window.refused, hindcast)
    try:
        draft = pooled_or_stack(trained, window) if model == POOLED else _RUN[model](window)
    except FitError as error:
        return _refusal(window, model, error.reason, hindcast)
    return finished(window, model, draft, calibration, limits=limits, hindcast=hindcast)


def forecast_many(
    windows: Iterable[tuple[Window, Calibration]], model: str, *, hindcast: bool = False, trained: Trained = NOT_TRAINED
) -> Iterator[Forecast]:
    """A forecast of each window, in order, each as soon as it is made. One that fails is a refusal with the reason and does not
    stop the others."""
    for window, calibration in windows:
        try:
            yield forecast(window, model, calibration, hindcast=hindcast, trained=trained)
        except Exception as error:  # of a library, on a series nobody thought of
            yield _refusal(window, model, f"{model} failed: {type(error).__name__}: {error}", hindcast)


def finished(
    window: Window,
    model: str,
    draft: Draft,
    calibration: Calibration,
    *,
    limits: Sequence[Limit] | None = None,
    hindcast: bool = False,
) -> Forecast:
    """What `draft` says about the hour after `window`, calibrated and fit to show."""
    if not np.isfinite(draft.quantiles).all():
        return _refusal(window, model, f"{model} gave no finite numbers on this series.", hindcast)
    stretch = calibration.stretch
    quantiles = presentable(stretched(draft.quantiles, stretch), window.signal)
    if limits is None:
        limits = limits_of(window.signal.name, window.labels.get("model", ""))
    # Paths are not stretched: chances have a calibration of their own, and at the tracked factor they are worse (0.0822 against 0.0771 Brier).
    paths = np.clip(draft.paths, window.signal.bounds[0], window.signal.bounds[1])
    flags, note = window.flags, window.note
    if draft.fallback:
        flags, note = (*flags, "fallback"), "; ".join(filter(None, (note, draft.fallback)))
    return Forecast(
        window.signal.name, window.labels, model, window.origin, quantiles, flags, note, "", hindcast, stretch,
        tuple(breach(limit, paths, quantiles, window, calibration) for limit in limits),
    )  # fmt: skip


def stretched(quantiles: np.ndarray, factor: float) -> np.ndarray:
    """Quantiles [steps, len(LEVELS)] with their distance from the median times `factor`."""
    middle = quantiles[:, [_MIDDLE]]
    return middle + factor * (quantiles - middle)


def presentable(quantiles: np.ndarray, signal: Signal) -> np.ndarray:
    """Quantiles [steps, len(LEVELS)] sorted, at least as wide as the signal's resolution, clipped to its own bounds."""
    ordered = np.sort(quantiles, axis=1)
    levels = np.array(LEVELS)
    resolution = RESOLUTION.get(signal.unit, _RESOLUTION_ELSE)
    least = ordered[:, [_MIDDLE]] + resolution * (levels - 0.5) / (levels[-1] - 0.5)
    widened = np.where(levels < 0.5, np.minimum(ordered, least), np.maximum(ordered, least))
    return np.clip(widened, signal.bounds[0], signal.bounds[1])


def breach(limit: Limit, paths: np.ndarray, quantiles: np.ndarray, window: Window, calibration: Calibration) -> Breach:
    """Chance of being beyond `limit` by each step: the share of `paths` [paths, HORIZON_STEPS] that have been, drawn towards how
    often the series was in such an hour by the weight of half a path, then as outcomes bear it out. Without paths: the largest of the steps' own chances."""
    if len(paths):
        passed = np.logical_or.accumulate(beyond(paths, limit.value, limit.below), axis=1)
        share = passed.mean(axis=0)
    else:
        under = np.array([np.interp(limit.value, row, LEVELS, left=0.0, right=1.0) for row in quantiles])
        share = np.maximum.accumulate(under if limit.below else 1.0 - under)
    usual = usually(window.values, limit)
    raw = (len(paths) * share + 0.5 * usual) / (len(paths) + 0.5)
    said = tuple(np.clip(raw, 0.0, 1.0).tolist())
    return Breach(limit.name, limit.value, said, calibration.trusted(said), limit.below)


def usually(values: np.ndarray, limit: Limit) -> np.ndarray:
    """How often the limit was passed within h steps from where the series is now, before or beyond it [HORIZON_STEPS]."""
    already = beyond(values, limit.value, limit.below)
    alike = np.isfinite(values) & (already == already[-1])
    alike[-1] = False
    passed = np.logical_or.accumulate(beyond(ahead(values), limit.value, limit.below), axis=1)
    return passed[alike].mean(axis=0) if alike.any() else np.full(HORIZON_STEPS, float(already[-1]))


def _refusal(window: Window, model: str, reason: str, hindcast: bool) -> Forecast:
    return Forecast(
        window.signal.name, window.labels, model, window.origin, np.empty((0, len(LEVELS))), window.flags, window.note,
        reason, hindcast,
    )  # fmt: skip
