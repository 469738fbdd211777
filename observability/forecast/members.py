"""The cheap local models that the stack combines. Each says what it would have said at every step of the window, without having
learned from the hours around that step, so that members can be compared by errors that they would really have made.

Simple ones look at the last value, short means, exponential smoothing and yesterday's move. The others are ridge regressions
of the next hour on lags, means and the daily shape: on the values, their square roots and logarithms, with all days alike or
the newest preferred, by squares or (reweighted) nearly by absolute errors, which a single burst does not bend.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from observability.forecast.draft import ahead
from observability.store.forecasts import HORIZON_STEPS

DAY = 144
LAST = "last"
#: From this much on there are two days to compare, and regressions join.
REGRESSION_STEPS = 2 * DAY
_LAGS = (1, 2, 3, 4, 5, 6, 8, 11, 12, 17, 18, 36, 72, 143, 144, 145)
_MEANS = (3, 6, 18, 72, 144)
_RATES = (0.6, 0.35, 0.15)
#: Reweighted passes towards absolute errors, and the error below which weight grows no further, in medians.
_PASSES = 4
_LEAST = 0.05
#: A regression's error is taken from coefficients that have not seen its half day, nor the hour before and after.
_BLOCK = 72
#: A back-transformed prediction stays under this multiple of the window's maximum: exp() of an extrapolation knows no end.
_CEILING = 1.3


@dataclass(frozen=True)
class Members:
    """`past` [members, steps, HORIZON_STEPS]: what each member says at each step of the window; `next` [members, HORIZON_STEPS]
    at its end. All inside the bounds."""

    names: tuple[str, ...]
    past: np.ndarray
    next: np.ndarray


@dataclass(frozen=True)
class Kind:
    """How a regression is fitted: `penalty` as a share of the features' (unit) power, `passes` of reweighting, the steps in
    which a row's weight halves, whether calm hours weigh more, and on which scales."""

    name: str
    penalty: float
    passes: int
    half_life: float
    calm: bool
    scales: tuple[str, ...]


KINDS = (
    Kind("squares", 0.03, 0, np.inf, True, ("value",)),
    Kind("absolute", 0.1, _PASSES, np.inf, False, ("value", "root", "log")),
    Kind("stiff", 1.0, _PASSES, np.inf, False, ("value", "root")),
    Kind("recent", 0.3, _PASSES, 216.0, False, ("value", "log")),
)


@dataclass(frozen=True)
class _Scale:
    """A transform of the values with its inverse."""

    forward: np.ndarray
    back: Callable[[np.ndarray], np.ndarray]


def members(values: np.ndarray, filled: np.ndarray, volatility: np.ndarray, bounds: tuple[float, float]) -> Members:
    """All members on `values` [steps] (NaN: not observed), `filled` (no NaN) and their recent `volatility` (positive)."""
    found = simple(filled)
    if len(values) >= REGRESSION_STEPS:
        found |= regressions(values, filled, volatility)
    past = np.clip(np.stack([each for each, _ in found.values()]), *bounds)
    return Members(tuple(found), past, np.clip(np.stack([each for _, each in found.values()]), *bounds))


def simple(filled: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Members without coefficients: name -> what they say at each step, and at the last."""
    flat = {LAST: filled, "mean3": trailing_mean(filled, 3), "mean6": trailing_mean(filled, 6)}
    flat |= {f"smooth{rate:g}": smoothed(filled, rate) for rate in _RATES}
    said = {name: np.repeat(each[:, None], HORIZON_STEPS, axis=1) for name, each in flat.items()}
    if len(filled) > DAY + HORIZON_STEPS:
        calm = trailing_mean(filled, 5)
        move = np.stack([delayed(filled, DAY - h) - delayed(filled, DAY) for h in range(1, HORIZON_STEPS + 1)], axis=1)
        shape = np.stack([delayed(calm, DAY - h - 2) for h in range(1, HORIZON_STEPS + 1)], axis=1)
        calm_move = shape - delayed(calm, DAY - 2)[:, None]
        said["yesterday"] = shape
        said["yesterday's move"] = filled[:, None] + move
        said |= {
            f"smooth{rate:g} + half of yesterday's move": said[f"smooth{rate:g}"] + 0.5 * calm_move for rate in _RATES
        }
    return {name: (each, each[-1]) for name, each in said.items()}


def regressions(
    values: np.ndarray, filled: np.ndarray, volatility: np.ndarray
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Ridge regressions by name, as `simple`."""
    seen = np.isfinite(values)
    scales = {"value": _Scale(filled, lambda z: z)}
    if filled.min() >= 0:
        top, least = _CEILING * filled.max(), 0.05 * float(np.median(filled)) + 1e-9
        scales["root"] = _Scale(np.sqrt(filled), lambda z: np.clip(z, 0.0, np.sqrt(top)) ** 2)
        scales["log"] = _Scale(np.log(filled + least), lambda z: np.exp(np.minimum(z, np.log(top + least))) - least)
    calm, age = np.median(volatility) / volatility, np.arange(len(values))[::-1]
    said = {}
    for name, scale in scales.items():
        z = scale.forward
        columns = features(z)
        targets = ahead(np.where(seen, z, np.nan)) - z[:, None]
        targets[~seen] = np.nan
        for kind in KINDS:
            if name in kind.scales:
                weights = (calm if kind.calm else 1.0) * 0.5 ** (age / kind.half_life)
                past, following = _ridge(columns, targets, weights, kind)
                said[f"ridge {name} {kind.name}"] = (scale.back(z[:, None] + past), scale.back(z[-1] + following))
    return said


def features(z: np.ndarray) -> np.ndarray:
    """[steps, features], each looking back only and relative to the value now: lags, means, and the day's shape ahead. Columns lie
    together in memory, as they are made."""
    calm = trailing_mean(z, 5)
    move = [delayed(calm, DAY - h - 2) - delayed(calm, DAY - 2) for h in range(1, HORIZON_STEPS + 1)]
    sharp = [delayed(z, DAY - h) - delayed(z, DAY) for h in (1, HORIZON_STEPS)]
    days = [_same_time(calm, h) - z for h in (1, 3, HORIZON_STEPS)]
    return np.stack(
        [*(delayed(z, lag) - z for lag in _LAGS), *(trailing_mean(z, n) - z for n in _MEANS), *move, *sharp, *days]
    ).T  # fmt: skip


def _same_time(calm: np.ndarray, h: int) -> np.ndarray:
    """Mean over the days before of what was around h steps later in the day."""
    total, count = np.zeros(len(calm)), np.zeros(len(calm))
    for lag in range(DAY - h - 2, len(calm), DAY):
        total[lag:] += calm[: len(calm) - lag]
        count[lag:] += 1
    return np.where(count > 0, total / np.maximum(count, 1), calm)


def _ridge(features: np.ndarray, targets: np.ndarray, weights: np.ndarray, kind: Kind) -> tuple[np.ndarray, np.ndarray]:
    """Predicted targets [steps, HORIZON_STEPS], each by coefficients that have not seen its block, and those after the end
    [HORIZON_STEPS]. `targets` NaN: not observed."""
    steps, width = features.shape
    known = np.isfinite(targets)
    usable = known.all(axis=1)
    usable[:_BLOCK] = False  # its lags reach back before the window
    y = np.where(known, targets, 0.0)
    given = weights = np.where(usable, weights, 0.0)
    if not given.any():
        return np.zeros_like(y), np.zeros(HORIZON_STEPS)
    x = features / (np.sqrt(given @ features**2 / given.sum()) + 1e-12)
    unit = np.eye(width)
    if kind.passes:
        weights = _reweighted(x, y, given, kind)
    root = np.sqrt(weights)[:, None]  # a product of a matrix with itself costs half of one with another
    weighted, weighted_y = x * root, y * root
    blocks = [(max(0, end - _BLOCK), end) for end in range(steps, 0, -_BLOCK)]
    powers = np.empty((len(blocks) + 1, width, width))
    products = np.empty((len(blocks) + 1, width, HORIZON_STEPS))
    powers[-1], products[-1] = weighted.T @ weighted, weighted.T @ weighted_y
    for i, (start, end) in enumerate(blocks):
        near = weighted[max(0, start - HORIZON_STEPS) : end + HORIZON_STEPS]
        powers[i] = powers[-1] - near.T @ near
        products[i] = products[-1] - near.T @ weighted_y[max(0, start - HORIZON_STEPS) : end + HORIZON_STEPS]
    found = np.linalg.solve(powers + kind.penalty * weights.sum() * unit, products)
    past = np.concatenate([x[start:end] @ found[i] for i, (start, end) in reversed(list(enumerate(blocks)))])
    return past, x[-1] @ found[-1]


def _reweighted(x: np.ndarray, y: np.ndarray, given: np.ndarray, kind: Kind) -> np.ndarray:
    """Weights [steps] under which squares are nearly absolute errors; rows whose `given` weight is 0 stay out. Single precision
    is enough for a weight."""
    size = float(np.abs(y).max()) + 1e-12
    used = given > 0
    x, y = x[used].astype(np.float32), (y[used] / size).astype(np.float32)
    start = weights = (given[used] / given.max()).astype(np.float32)
    unit, mean = np.eye(x.shape[1], dtype=np.float32), np.full(HORIZON_STEPS, 1.0 / HORIZON_STEPS, dtype=np.float32)
    for _ in range(kind.passes):
        root = np.sqrt(weights)[:, None]
        weighted = x * root
        found = np.linalg.solve(weighted.T @ weighted + kind.penalty * weights.sum() * unit, weighted.T @ (y * root))
        off = np.abs(y - x @ found) @ mean
        usual = np.median(off) + np.float32(1e-9)
        weights = start * usual / np.maximum(off, np.float32(_LEAST) * usual)
    out = np.zeros(len(given))
    out[used] = weights * given.max()
    return out


def trailing_mean(z: np.ndarray, steps: int) -> np.ndarray:
    """Mean of the last `steps` of z up to each place; of fewer at the start."""
    total = np.concatenate(([0.0], np.cumsum(z)))
    end = np.arange(1, len(z) + 1)
    start = np.maximum(0, end - steps)
    return (total[end] - total[start]) / (end - start)


def delayed(z: np.ndarray, steps: int) -> np.ndarray:
    """z `steps` earlier; its first value before the start."""
    steps = min(steps, len(z))
    return np.concatenate((np.full(steps, z[0]), z[: len(z) - steps])) if steps else z


def smoothed(z: np.ndarray, rate: float) -> np.ndarray:
    """Exponential smoothing, started at the first value."""
    reach = int(np.ceil(np.log(1e-6) / np.log(1.0 - rate)))
    kernel = rate * (1.0 - rate) ** np.arange(reach)
    padded = np.concatenate((np.full(reach, z[0]), z))
    return np.convolve(padded, kernel)[reach : reach + len(z)] / kernel.sum()
