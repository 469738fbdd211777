"""What the forecast page reads: the newest stored forecast of a signal, past ones beside what came, and their errors.

Nothing here fits a model: forecasts are made by a worker and stored.
"""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from observability.app.queries import KV_USAGE, REQUESTS, quantile_signal
from observability.app.view import View
from observability.forecast.backtest import SCORED_SECONDS
from observability.forecast.series import READ_STEP, grid_step, on_grid
from observability.objectives import TTFT
from observability.signals import Signal
from observability.store.forecasts import HORIZON_STEPS, MODEL_TITLES, MODELS, level_column
from observability.store.source import SeriesSource

FORECAST_SIGNALS = (REQUESTS, KV_USAGE, quantile_signal(TTFT, 0.99))
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
    note: str
    refused: str
    accuracy: Accuracy | None

    @property
    def title(self) -> str:
        return MODEL_TITLES[self.model]


@dataclass(frozen=True, slots=True)
class Prospect:
    """`came`: what was measured inside the view as a forecast means it (time: end of ten minutes, value: their mean), and
    what each model says."""

    came: pd.DataFrame
    models: list[Outlook]


def prospect(source: SeriesSource, view: View, signal: Signal) -> Prospect:
    """`signal` as of the end of the view. The accuracy of the models is over the origins of the last three days from which
    every one of them made a forecast, so that it can be compared (as `kvscope forecast` does)."""
    actual = ten_minute_means(source, view, signal)
    start, now, since = (
        pd.Timestamp(at, unit="s", tz="UTC") for at in (view.start, view.end, view.end - SCORED_SECONDS)
    )
    stored = {model: source.forecasts(signal.name, view.where, model) for model in MODELS}
    stored = {model: frame[frame["origin"] <= now] for model, frame in stored.items()}
    made = [set(frame.loc[(frame["step"] > 0) & (frame["origin"] > since), "origin"]) for frame in stored.values()]
    some = [origins for origins in made if origins]
    shared = set.intersection(*some) if some else set()
    models = [_outlook(view, signal, model, frame, actual, shared) for model, frame in stored.items()]
    came = actual[actual.index > start]
    return Prospect(pd.DataFrame({"time": came.index, "value": came.to_numpy()}), models)


def _outlook(
    view: View, signal: Signal, model: str, stored: pd.DataFrame, actual: pd.Series, shared: set[pd.Timestamp]
) -> Outlook:
    if stored.empty:
        return Outlook(signal, model, stored, stored, None, (), "", "", None)
    newest = stored[stored["origin"] == stored["origin"].max()].sort_values("step")
    known = stored[stored["step"] > 0].assign(actual=lambda frame: frame["time"].map(actual))
    start, end = (pd.Timestamp(at, unit="s", tz="UTC") for at in (view.start, view.end))
    past = known[(known["step"] == HORIZON_STEPS) & (known["time"] > start) & (known["time"] <= end)].sort_values(
        "time"
    )
    first = newest.iloc[0]
    return Outlook(
        signal, model, newest[newest["step"] > 0], past, first["origin"].timestamp(), tuple(str(first["flags"]).split()),
        str(first["note"]), str(first["refused"]), _accuracy(known[known["origin"].isin(shared)].dropna(subset=["actual"])),
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
    """The mean of `signal` over each whole 10 minutes of the view and of the scored time, by their end (UTC)."""
    end = grid_step(view.end)
    start = min(end - SCORED_SECONDS, grid_step(view.start))
    frame = source.range(signal.name, start + READ_STEP, end, READ_STEP, view.where)
    seconds = frame["time"].to_numpy(dtype="datetime64[s]").astype("int64").astype("float64")
    ends, means = on_grid(seconds, frame["value"].to_numpy(dtype="float64"), start, end)
    return pd.Series(means, index=pd.to_datetime(ends, unit="s", utc=True).as_unit("ns")).dropna()
