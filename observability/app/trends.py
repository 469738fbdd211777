"""How latency follows load, and how efficient the batches are: what the page Trends computes from signals.

The curve of latency against load is the medians of bins of equally many moments, made non-decreasing (isotonic regression: more load does
not make an engine faster) and joined smoothly (PCHIP). Its knee is found as Kneedle does (Satopaa, Albrecht, Irwin, Raghavan: Finding a
"Kneedle" in a Haystack, 2011): the point furthest below the straight line between the ends of the normalized curve. Band and interval of
the knee come from moving blocks of an hour (Künsch 1989), drawn anew with replacement: neighbouring moments depend on each other.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from scipy.interpolate import PchipInterpolator
from scipy.optimize import isotonic_regression

from observability.app import queries
from observability.app.queries import REQUESTS, STEP_TIME, quantile_signal
from observability.app.view import STEPS, View
from observability.objectives import LatencyObjective
from observability.signals import BY_NAME, WINDOW_SECONDS
from observability.store.source import SeriesSource

STEP_TOKENS = BY_NAME["model_phase:kvscope_step_tokens:rate5m"]
#: A trend needs a day: a shorter range is looked at from a day before its end on.
LEAST_SECONDS = 86400.0
#: Fewer moments of five minutes than these say nothing of a curve.
LEAST_MOMENTS = 72
#: ... nor does load whose 95th percentile is less than this above its 5th.
LEAST_SPREAD = 1.5
GRID = 60
RESAMPLES = 200
_BLOCK = 12  # moments of an hour
_IN_A_BIN, _MOST_BINS = 20, 24
#: Kneedle's distance below the straight line from which it is a knee (0: straight, 0.5: a right angle halfway) ...
LEAST_BEND = 0.15
#: ... and the share of resamples that must have one, within this share of the range of load.
LEAST_SHARE, MOST_WIDTH = 0.8, 0.5


@dataclass(frozen=True, slots=True)
class Place:
    """A load (requests/s) with its 95 % interval and the latency of the curve there (seconds)."""

    load: float
    low: float
    high: float
    latency: float


@dataclass(frozen=True, slots=True)
class Curve:
    """Latency (seconds) against load (requests/s): `points` has time, load and latency of each moment; `load`, `latency` and the 95 % band
    `low` to `high` are float64 [GRID].

    `knee` is None where the data do not show one, and `no_knee` says why. `limit`: where the curve passes the objective, None where
    it does not within the data.
    """

    points: pd.DataFrame
    load: np.ndarray
    latency: np.ndarray
    low: np.ndarray
    high: np.ndarray
    knee: Place | None
    no_knee: str
    limit: Place | None


def trend_view(view: View) -> View:
    """The view, from at least a day before its end on, with the step that a range of that length has."""
    if view.seconds >= LEAST_SECONDS:
        return view
    return replace(view, start=view.end - LEAST_SECONDS, step=float(STEPS[int(LEAST_SECONDS)]))


def moments(source: SeriesSource, view: View, objective: LatencyObjective) -> pd.DataFrame:
    """Columns time, load (requests/s), latency (P99, seconds): one row for each five minutes with both, none overlapping."""
    apart = replace(view, step=float(WINDOW_SECONDS))
    load = queries.over_time(source, apart, REQUESTS).rename(columns={"value": "load"})
    latency = queries.over_time(source, apart, quantile_signal(objective, 0.99)).rename(columns={"value": "latency"})
    return load.merge(latency, on="time").sort_values("time", ignore_index=True)[["time", "load", "latency"]]


def latency_curve(points: pd.DataFrame, threshold_seconds: float) -> Curve | str:
    """The curve through `moments`, or why there is none."""
    if len(points) < LEAST_MOMENTS:
        return (
            f"{len(points)} moments of five minutes have both load and latency; {LEAST_MOMENTS} are needed. "
            "Choose a longer range, or wait for more traffic."
        )
    low, high = np.percentile(points["load"], [5, 95])
    if not high >= LEAST_SPREAD * max(low, 1e-12):
        return (
            f"Load hardly moved: its middle 90 % lie between {low:.3g} and {high:.3g} requests/s. A curve needs busy and calm hours; "
            "choose a longer range."
        )
    load, latency = (points[name].to_numpy(dtype=np.float64) for name in ("load", "latency"))
    fit = _fitted(load.tobytes(), latency.tobytes(), threshold_seconds)
    return Curve(points, *fit)


@functools.lru_cache(maxsize=64)  # viewers of one moment, and refreshes without new points, share a fit
def _fitted(
    loads: bytes, latencies: bytes, threshold: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, Place | None, str, Place | None]:
    load, latency = np.frombuffer(loads), np.frombuffer(latencies)
    middle = np.percentile(load, [2, 98])
    grid = np.linspace(middle[0], middle[1], GRID)
    fit = smooth(load, latency, grid)
    rng, count = np.random.default_rng(0), len(load)
    starts = rng.integers(0, count - _BLOCK + 1, (RESAMPLES, -(-count // _BLOCK)))
    drawn = (starts[:, :, None] + np.arange(_BLOCK)).reshape(RESAMPLES, -1)[:, :count]
    again = np.array([smooth(load[rows], latency[rows], grid) for rows in drawn])
    low, high = np.percentile(again, [2.5, 97.5], axis=0)
    knee, why = _knee(grid, fit, again)
    return grid, fit, low, high, knee, why, _limit(grid, fit, again, threshold)


def smooth(load: np.ndarray, latency: np.ndarray, grid: np.ndarray) -> np.ndarray:
    """Non-decreasing latency at each load of `grid`; see the module. Beyond the first and last bin it stays level."""
    order = np.argsort(load, kind="stable")
    bins = int(np.clip(len(load) // _IN_A_BIN, 4, _MOST_BINS))
    parts = np.array_split(order, bins)
    at = np.array([np.median(load[part]) for part in parts])
    level = np.array([np.median(latency[part]) for part in parts])
    at, first = np.unique(at, return_index=True)  # bins of one load
    level = np.array([level[i:j].mean() for i, j in zip(first, [*first[1:], bins], strict=True)])
    if len(at) < 2:
        return np.full(len(grid), level.mean())
    rising = isotonic_regression(level).x
    return np.asarray(PchipInterpolator(at, rising)(np.clip(grid, at[0], at[-1])), dtype=np.float64)


def bend(latency: np.ndarray) -> tuple[int, float]:
    """Place on an even grid where the curve lies furthest below the straight line between its ends, both axes from 0 to 1, and how far."""
    rise = latency[-1] - latency[0]
    if not rise > 0:
        return 0, 0.0
    below = np.linspace(0, 1, len(latency)) - (latency - latency[0]) / rise
    at = int(below.argmax())
    return at, float(below[at])


def _knee(grid: np.ndarray, fit: np.ndarray, again: np.ndarray) -> tuple[Place | None, str]:
    at, far = bend(fit)
    if not fit[-1] > 1.5 * fit[0]:
        return None, "The data show no knee: latency rises by less than half from the calmest to the busiest hours."
    if far < LEAST_BEND:
        return None, "The data show no knee: latency rises evenly with load, without a bend."
    found = [bend(each) for each in again]
    loads = np.array([grid[place] for place, distance in found if distance >= LEAST_BEND])
    share = len(loads) / len(again)
    if share < LEAST_SHARE:
        return (
            None,
            f"The data show no sure knee: {share:.0%} of the resampled curves have one, {LEAST_SHARE:.0%} are needed.",
        )
    low, high = np.percentile(loads, [2.5, 97.5])
    if high - low > MOST_WIDTH * (grid[-1] - grid[0]):
        return None, f"The data show no sure knee: it could lie anywhere from {low:.3g} to {high:.3g} requests/s."
    return Place(float(grid[at]), float(low), float(high), float(fit[at])), ""


def _limit(grid: np.ndarray, fit: np.ndarray, again: np.ndarray, threshold: float) -> Place | None:
    def passes(curve: np.ndarray) -> float:
        above = np.flatnonzero(curve > threshold)
        return float(grid[above[0]]) if len(above) else np.inf

    at = passes(fit)
    if not np.isfinite(at) or at == grid[0]:
        return None
    low, high = np.percentile([passes(each) for each in again], [2.5, 97.5], method="nearest")
    return Place(at, float(low), float(high), threshold)


# -- efficiency ---------------------------------------------------------------------------------------------------------


def tokens_per_forward_second(source: SeriesSource, view: View) -> pd.DataFrame:
    """Columns time, value: tokens run through the model for each second of forward passes; absent where none ran."""
    tokens = queries.over_time(source, view, STEP_TOKENS).groupby("time")["value"].sum()
    forward = _shares(source, view)[["forward_prefill", "forward_decode"]].sum(axis=1)
    ratio = (tokens / forward.where(forward > 1e-9)).dropna()
    return ratio.rename("value").rename_axis("time").reset_index()


def busy_in_the_model(source: SeriesSource, view: View) -> pd.DataFrame:
    """Columns time, value: share of the time that engines were not idle which forward passes took."""
    shares = _shares(source, view)
    busy = shares.drop(columns="idle").sum(axis=1)
    ratio = shares[["forward_prefill", "forward_decode"]].sum(axis=1) / busy.where(busy > 1e-9)
    return ratio.dropna().rename("value").rename_axis("time").reset_index()


def _shares(source: SeriesSource, view: View) -> pd.DataFrame:
    frame = queries.over_time(source, view, STEP_TIME)
    wide = frame.pivot_table(index="time", columns="component", values="value", aggfunc="sum", observed=True)
    wanted = list(dict.fromkeys(["forward_prefill", "forward_decode", "idle", *wide.columns]))
    return wide.reindex(columns=wanted).fillna(0.0)
