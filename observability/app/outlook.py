"""What the forecast page reads: the newest stored forecast of a signal, past ones beside what came, and their errors.

Nothing here fits a model: forecasts are made by a worker and stored.
"""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from observability.app.queries import KV_USAGE, REQUESTS, quantile_signal
from observability.app.view import View
from observability.forecast.types import HORIZON_STEPS, MODEL_TITLES, MODELS, STEP_SECONDS, level_column
from observability.objectives import TTFT
from observability.signals import Signal
from observability.store.source import SeriesSource

FORECAST_SIGNALS = (REQUESTS, KV_USAGE, quantile_signal(TTFT, 0.99))
#: Past forecasts are scored over this long before the end of the view.
SCORED_SECONDS = 3 * 86400.0
#: Step of the values whose mean over 10 minutes is what a forecast is about.
_VALUE_STEP = 60.0

MEDIAN = level_column(0.5)
#: Bands drawn, widest first: share -> its lower and upper quantile.
BANDS = {
    0.95: (level_column(0.025), level_column(0.975)),
    0.8: (level_column(0.1), level_column(0.9)),
    0.5: (level_column(0.25), level_column(0.75)),
}

FLAG_TEXTS = {
    "stale": "made from data that had stopped",
    "constant": "the series did not move",
    "short_history": "short history",
    "gaps": "gaps in its history",
    "simulated": "learned from simulated history",
    "outliers": "outliers pulled in",
}


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Past forecasts against what came: mean absolute error of the median in the signal's unit, share of outcomes inside
    the 95 % interval, number of outcomes; `hindcasts` is the share of them that were made afterwards."""

    mae: float
    coverage: float
    outcomes: int
    hindcasts: float


@dataclass(frozen=True, slots=True)
class Outlook:
    """One signal seen by one forecast model.

    `ahead`: the newest forecast (time, step and quantile columns), empty when there is none or it was refused.
    `past`: forecasts one hour ahead of their time inside the view, with `actual`. `origin` is the Unix time up to which
    the newest had data.
    """

    signal: Signal
    model: str
    ahead: pd.DataFrame
    past: pd.DataFrame
    origin: float | None
    flags: tuple[str, ...]
    refused: str
    accuracy: Accuracy | None

    @property
    def title(self) -> str:
        return MODEL_TITLES[self.model]


def outlooks(source: SeriesSource, view: View, signal: Signal) -> list[Outlook]:
    """What each model says about `signal`, as of the end of the view."""
    actual = ten_minute_means(source, view, signal)
    return [_outlook(source, view, signal, model, actual) for model in MODELS]


def _outlook(source: SeriesSource, view: View, signal: Signal, model: str, actual: pd.Series) -> Outlook:
    stored = source.forecasts(signal.name, view.where, model)
    end = pd.Timestamp(view.end, unit="s", tz="UTC")
    stored = stored[stored["origin"] <= end]
    if stored.empty:
        return Outlook(signal, model, stored, stored, None, (), "", None)
    newest = stored[stored["origin"] == stored["origin"].max()].sort_values("step")
    refused = str(newest["refused"].iloc[0])
    known = stored[(stored["step"] > 0) & (stored["origin"] < newest["origin"].iloc[0])]
    known = known.assign(actual=known["time"].map(actual))
    start = pd.Timestamp(view.start, unit="s", tz="UTC")
    past = known[(known["step"] == HORIZON_STEPS) & (known["time"] > start) & (known["time"] <= end)].sort_values(
        "time"
    )
    return Outlook(
        signal, model, newest[newest["step"] > 0], past, newest["origin"].iloc[0].timestamp(),
        tuple(str(newest["flags"].iloc[0]).split()), refused, _accuracy(known.dropna(subset=["actual"])),
    )  # fmt: skip


def _accuracy(known: pd.DataFrame) -> Accuracy | None:
    if known.empty:
        return None
    low, high = BANDS[0.95]
    inside = known["actual"].between(known[low], known[high])
    return Accuracy(
        float((known[MEDIAN] - known["actual"]).abs().mean()), float(inside.mean()), len(known), float(known["hindcast"].mean())
    )  # fmt: skip


def ten_minute_means(source: SeriesSource, view: View, signal: Signal) -> pd.Series:
    """What came: the mean of `signal` over each whole 10 minutes, by their end, over the scored time. A span of which less
    than half was recorded has none."""
    end = view.end // STEP_SECONDS * STEP_SECONDS
    frame = source.range(signal.name, end - SCORED_SECONDS + _VALUE_STEP, end, _VALUE_STEP, view.where)
    spans = frame.groupby(frame["time"].dt.ceil(f"{STEP_SECONDS}s"))["value"]
    return spans.mean()[spans.count() >= STEP_SECONDS / _VALUE_STEP / 2]
