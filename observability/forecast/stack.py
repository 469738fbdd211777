"""The default model: cheap local members weighted by their newest errors, with a width that follows how uncertain the hour is.

Nothing is kept between forecasts and nothing is fitted twice: the members' errors over the window choose the weights, give the
scale model its targets and are themselves, in units of that scale, the distribution of what comes. NumPy alone.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from observability.forecast.draft import Draft, ahead, whole_rows
from observability.forecast.last_value import volatility
from observability.forecast.members import DAY, LAST, REGRESSION_STEPS, Members, delayed, members, trailing_mean
from observability.forecast.series import Window, duration
from observability.store.forecasts import HORIZON_STEPS, LEVELS, STEP_SECONDS

#: A member's error counts half after so many steps: which of them is right changes within the day.
_ERROR_HALF_LIFE = 50.0
#: Weights fall by e for each 1/50 by which a member's recent error is above the best one's.
_SHARPNESS = 50.0
#: How much of the members' mean may be kept against the last value, and the half-life of the errors that decide. Where nothing
#: is predictable the members chase noise, and a part of the last value keeps them from being worse than it.
_KEPT = np.array((0.4, 0.6, 0.8, 1.0))
_KEPT_HALF_LIFE = 400.0
#: Errors count half for the distribution after three days.
_DISTRIBUTION_HALF_LIFE = 432.0
#: Half of each step's distribution is that of all steps together.
_POOLED = 0.5
_SCALE_PENALTY = 0.05
_LEVELS = np.array(LEVELS)


class Hindsight(NamedTuple):
    """`filled` [steps]: the window without gaps. `past` [steps, HORIZON_STEPS]: what the members together say at each step, and
    `errors` what came minus that (NaN: not observed); `centre` [HORIZON_STEPS] at the end. `scale` [steps]: errors to be expected."""

    filled: np.ndarray
    past: np.ndarray
    centre: np.ndarray
    errors: np.ndarray
    scale: np.ndarray


def stack(window: Window) -> Draft:
    """Quantiles and paths of the hour after `window`. Below two days smoothing and means alone are combined, and said to be."""
    seen = hindsight(window.values, window.signal.bounds)
    draft = spread(seen.centre, seen.errors, seen.scale)
    if len(window.values) < REGRESSION_STEPS:
        history = duration(len(window.values) * STEP_SECONDS)
        draft = draft._replace(
            fallback=f"smoothing and means alone: {history} of history, two days are needed for a daily shape"
        )
    return draft


def hindsight(values: np.ndarray, bounds: tuple[float, float | None]) -> Hindsight:
    """Of `values` [steps] (NaN: not observed) of a metric within `bounds`."""
    low, high = bounds
    filled = fill(values)
    calm = steady_volatility(values)
    found = members(values, filled, calm, (low, np.inf if high is None else high))
    came = np.where(np.isfinite(values)[:, None], ahead(values), np.nan)
    past, centre = combined(found, came)
    errors = came - past
    return Hindsight(filled, past, centre, errors, error_scale(filled, calm, errors))


def fill(values: np.ndarray) -> np.ndarray:
    """`values` without NaN: gaps up to half an hour linear, longer ones by the shape of the day before, tied to both ends."""
    seen = np.isfinite(values)
    places = np.arange(len(values))
    line = np.interp(places, places[seen], values[seen])
    if seen.all():
        return line
    out = line.copy()
    edges = np.flatnonzero(np.diff(np.concatenate(([False], ~seen, [False])).astype(np.int8)))
    for start, end in edges.reshape(-1, 2):
        if end - start > 3 and start >= DAY + 1 and end < len(values):
            before = out[start - DAY : end - DAY]
            ends = np.interp(np.arange(start, end), (start - 1, end), (out[start - 1 - DAY], out[end - DAY]))
            out[start:end] = np.clip(line[start:end] + before - ends, values[seen].min(), values[seen].max())
    return out


def steady_volatility(values: np.ndarray) -> np.ndarray:
    """Recent volatility at each step, never absent and never zero."""
    found = volatility(values)
    known = np.isfinite(found) & (found > 0)
    if not known.any():
        return np.full(len(values), 1e-9)
    found = np.where(known, found, found[known].mean())
    return np.maximum(found, 0.02 * np.median(found) + 1e-9)


def combined(found: Members, came: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The members' weighted mean at each step [steps, HORIZON_STEPS] and at the end [HORIZON_STEPS], drawn towards the last value
    as far as that was good over days; `came` as `found.past`."""
    known = np.isfinite(came)
    errors = np.where(known, found.past - np.where(known, came, 0.0), 0.0)
    weights = _weights(np.abs(errors), _ERROR_HALF_LIFE)
    mean, last = np.tensordot(weights, errors, 1), errors[found.names.index(LAST)]
    kept = _weights(np.abs(np.stack([share * mean + (1.0 - share) * last for share in _KEPT])), _KEPT_HALF_LIFE) @ _KEPT
    weights *= kept
    weights[found.names.index(LAST)] += 1.0 - kept
    return np.tensordot(weights, found.past, 1), weights @ found.next


def _weights(off: np.ndarray, half_life: float) -> np.ndarray:
    """Shares [members] by how far off [members, steps, HORIZON_STEPS] each was, the newest counting most."""
    recent = off.sum(axis=2) @ 0.5 ** (np.arange(off.shape[1])[::-1] / half_life)
    recent += 1e-12 * (1.0 + recent.max())
    weights = np.exp(-_SHARPNESS * (recent / recent.min() - 1.0))
    return weights / weights.sum()


def error_scale(filled: np.ndarray, calm: np.ndarray, errors: np.ndarray) -> np.ndarray:
    """How large `errors` [steps, HORIZON_STEPS] (NaN: not observed) are to be expected at each step [steps], looking back only:
    recent volatility `calm` times what a regression of the logarithm of the error on the state of the series says."""
    known = np.isfinite(errors)
    count = known.sum(axis=1)
    sizes = np.sqrt(np.where(known, errors**2, 0.0).sum(axis=0) / np.maximum(known.sum(axis=0), 1)) + 1e-12
    usual = float(np.sqrt((sizes**2).mean()))
    seen = count > 0
    seen[:36] = False
    if seen.sum() < DAY:
        return calm
    size = np.where(known, np.abs(errors), 0.0) @ (usual / sizes) / np.maximum(count, 1)
    least = 0.05 * float(size[seen].mean()) + 1e-12
    features = _state(filled, np.where(known, np.abs(errors), 0.0), 0.05 * float(np.median(calm)) + 1e-12, least)
    target = np.where(seen, np.log(size + least) - np.log(calm), 0.0)
    weights = seen * 0.5 ** (np.arange(len(filled))[::-1] / _DISTRIBUTION_HALF_LIFE)
    weights /= weights.sum()
    x = features - weights @ features
    x /= np.sqrt(weights @ x**2) + 1e-9
    weighted = x * weights[:, None]
    found = np.linalg.solve(
        weighted.T @ x + _SCALE_PENALTY * np.eye(x.shape[1]), weighted.T @ (target - weights @ target)
    )
    moved = x @ found
    return calm * np.exp(np.clip(moved, *np.quantile(moved[seen], (0.005, 0.995))))


def _state(filled: np.ndarray, errors: np.ndarray, least_change: float, least_error: float) -> np.ndarray:
    """[steps, features]: changes over several spans, level, distance from the mean, yesterday's changes around the hour to
    come, and the errors that were known by then, mostly as logarithms."""
    change = np.abs(np.diff(filled, prepend=filled[0]))
    level = 0.05 * float(np.median(np.abs(filled))) + 1e-9
    found = [np.log(trailing_mean(change, span) + least_change) for span in (2, 6, 18, 72, 432)]
    found += [np.log(np.abs(each) + level) for each in (filled, trailing_mean(filled, 72))]
    found.append(np.log(np.abs(filled - trailing_mean(filled, 18)) + least_change))
    if len(filled) > 2 * DAY:
        around = trailing_mean(change, 9)
        found += [np.log(delayed(around, DAY - 7) + least_change)]
        found += [np.log(0.5 * (delayed(around, DAY - 7) + delayed(around, 2 * DAY - 7)) + least_change)]
    was = np.mean([delayed(errors[:, h - 1], h) for h in (1, 2, 3)], axis=0)
    was[:3] = was[3]
    found += [np.log(trailing_mean(was, span) + least_error) for span in (6, 36)]
    return np.stack(found, axis=1)


def spread(centre: np.ndarray, errors: np.ndarray, scale: np.ndarray) -> Draft:
    """Quantiles of `centre` plus past `errors` in units of their `scale`, times that of now; paths of whole past hours."""
    scaled = errors / scale[:, None]
    known = np.isfinite(scaled)
    weights = np.repeat(0.5 ** (np.arange(len(scale))[::-1] / _DISTRIBUTION_HALF_LIFE)[:, None], HORIZON_STEPS, axis=1)
    if not known.any():
        return Draft(np.repeat(centre[:, None], len(LEVELS), axis=1), np.empty((0, HORIZON_STEPS)))
    sizes = np.where(known, np.abs(scaled), 0.0).sum(axis=0) / np.maximum(known.sum(axis=0), 1) + 1e-12
    shared = weighted_quantiles((scaled / sizes)[known], weights[known])
    quantiles = np.empty((HORIZON_STEPS, len(LEVELS)))
    for h in range(HORIZON_STEPS):
        mine = known[:, h]
        own = weighted_quantiles(scaled[mine, h], weights[mine, h]) if mine.any() else shared * sizes[h]
        quantiles[h] = centre[h] + scale[-1] * ((1.0 - _POOLED) * own + _POOLED * shared * sizes[h])
    return Draft(quantiles, centre + scale[-1] * whole_rows(scaled))


def weighted_quantiles(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The LEVELS of `values` [n], each standing for its share of `weights`; linear in between."""
    order = np.argsort(values)
    share = np.cumsum(weights[order])
    share = (share - 0.5 * weights[order]) / share[-1]
    return np.interp(_LEVELS, share, values[order])
