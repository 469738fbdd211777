"""What the forecast page reads: the newest stored forecast of a signal, past ones beside what came, and their errors.

Nothing here fits a model: forecasts are made by a worker and stored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from observability.app.derived import shared
from observability.app.view import View, unix_seconds
from observability.forecast import series
from observability.forecast.backtest import SCORED_SECONDS
from observability.forecast.limits import Limit, limits_of
from observability.forecast.quality import BASELINE, QUALITY_SECONDS
from observability.forecast.series import READ_STEP, grid_step, on_grid
from observability.signals import Signal
from observability.store.forecasts import (
    HORIZON_SECONDS,
    HORIZON_STEPS,
    MODEL_TITLES,
    MODELS,
    POOLED,
    Breach,
    level_column,
    shared_origins,
)
from observability.store.source import SeriesSource

#: What is forecast, in the order of the page: load, room, latency, queue.
FORECAST_SIGNALS = tuple(
    series.FORECAST_SIGNALS[name]
    for name in ("requests", "kv_usage", "ttft_p99", "e2e_p99", "queue", "kv_free_tokens", "kv_free_requests")
)
MEDIAN = level_column(0.5)
#: Bands drawn, widest first: share -> its lower and upper quantile.
BANDS = {
    0.95: (level_column(0.025), level_column(0.975)),
    0.8: (level_column(0.1), level_column(0.9)),
    0.5: (level_column(0.25), level_column(0.75)),
}

_NUMBERS = ("origin", "time", "step", MEDIAN, *(name for band in BANDS.values() for name in band), "hindcast")

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
class Lately:
    """The same over the last day: `skill` is 1 - error over that of the last value, None where that is unknown or without error;
    `coverage` by the share of the band."""

    skill: float | None
    coverage: Mapping[float, float]
    outcomes: int


@dataclass(frozen=True, slots=True)
class Outlook:
    """One signal seen by one forecast model.

    `ahead`: the newest forecast (time, step and quantile columns), empty when there is none or it was refused.
    `past`: forecasts one hour ahead of their time inside the view, with `actual`. `origin` is the Unix time up to which
    the newest had data. `breaches`: its chances of passing limits. `chances`: those of past forecasts whose hour is over and that began
    below the limit (columns chance and happened, 0 or 1).
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
    lately: Lately | None = None
    breaches: tuple[Breach, ...] = ()
    chances: pd.DataFrame = field(default_factory=lambda: pd.DataFrame({"chance": [], "happened": []}))

    @property
    def title(self) -> str:
        return MODEL_TITLES[self.model]

    def reaches(self, now: float) -> bool:
        """Whether the newest was not refused and a part of its hour lies after `now`: else it says nothing of what comes."""
        return not self.refused and self.origin is not None and self.origin + HORIZON_SECONDS > now


@dataclass(frozen=True, slots=True)
class Prospect:
    """`came`: what was measured inside the view as a forecast means it (time: end of ten minutes, value: their mean), and
    what each model says."""

    came: pd.DataFrame
    models: list[Outlook]


def models_of(source: SeriesSource, view: View) -> list[str]:
    """Models to choose from: those that always run, and the pooled one where it has said something."""
    pooled = any(not _stored(source, view, signal, POOLED).empty for signal in FORECAST_SIGNALS)
    return [model for model in MODEL_TITLES if model != POOLED or pooled]


@shared
def prospect(source: SeriesSource, view: View, signal: Signal) -> Prospect:
    """`signal` as of the end of the view. The accuracy of the models is over the origins of the last three days from which
    every one of them made a forecast, so that it can be compared (as `kvscope forecast` does)."""
    actual = ten_minute_means(source, view, signal)
    start, now = (pd.Timestamp(at, unit="s", tz="UTC") for at in (view.start, view.end))
    since = view.end - SCORED_SECONDS
    stored = {model: _stored(source, view, signal, model) for model in MODEL_TITLES}
    stored = {
        model: frame[frame["origin"] <= now] for model, frame in stored.items() if model in MODELS or not frame.empty
    }
    known = {model: _observed(frame, actual) for model, frame in stored.items()}
    made = {model: np.unique(unix_seconds(frame["origin"])) for model, frame in known.items()}
    shared = shared_origins({model: origins[origins > since].tolist() for model, origins in made.items()})
    base = _shared(known[BASELINE], shared, view)
    models = [
        _outlook(view, signal, model, frame, known[model], shared, base, actual) for model, frame in stored.items()
    ]  # fmt: skip
    came = actual[actual.index > start]
    return Prospect(pd.DataFrame({"time": came.index, "value": came.to_numpy()}), models)


def _stored(source: SeriesSource, view: View, signal: Signal, model: str) -> pd.DataFrame:
    """Forecasts that are scored or whose hour lies in the view; from a whole hour on, so that viewers share what was read."""
    oldest = min(view.start, view.end - SCORED_SECONDS) - 2 * HORIZON_SECONDS
    return source.forecasts(signal.name, view.where, model, oldest // 3600 * 3600)


def _observed(stored: pd.DataFrame, actual: pd.Series) -> pd.DataFrame:
    """The steps of stored forecasts, without their texts, and what came of each in `actual`, NaN where it was not observed."""
    steps = stored.loc[stored["step"] > 0, list(_NUMBERS)]
    return steps.assign(actual=actual.reindex(pd.DatetimeIndex(steps["time"])).to_numpy(dtype=np.float64))


def _outlook(
    view: View, signal: Signal, model: str, stored: pd.DataFrame, known: pd.DataFrame, shared: set[float],
    base: pd.DataFrame, actual: pd.Series,
) -> Outlook:  # fmt: skip
    if stored.empty:
        return Outlook(signal, model, stored, known, None, (), "", "", None)
    newest = stored[stored["origin"] == stored["origin"].max()].sort_values("step")
    start, end = (pd.Timestamp(at, unit="s", tz="UTC") for at in (view.start, view.end))
    past = known[(known["step"] == HORIZON_STEPS) & (known["time"] > start) & (known["time"] <= end)].sort_values(
        "time"
    )
    first = newest.iloc[0]
    compared = known[np.isin(unix_seconds(known["origin"]), list(shared))].dropna(subset=["actual"])
    return Outlook(
        signal, model, newest[newest["step"] > 0], past, first["origin"].timestamp(), tuple(str(first["flags"]).split()),
        str(first["note"]), str(first["refused"]), _accuracy(compared), _lately(_shared(known, shared, view), base),
        tuple(first["breaches"]), chances(stored, known[unix_seconds(known["origin"]) > view.end - SCORED_SECONDS], actual),
    )  # fmt: skip


def _shared(known: pd.DataFrame, shared: set[float], view: View) -> pd.DataFrame:
    """Steps of the last day that were observed, of the origins that all models have."""
    origins = unix_seconds(known["origin"])
    return known[np.isin(origins, list(shared)) & (origins > view.end - QUALITY_SECONDS)].dropna(subset=["actual"])


def _error(known: pd.DataFrame) -> float:
    return float((known[MEDIAN] - known["actual"]).abs().mean())


def _lately(known: pd.DataFrame, base: pd.DataFrame) -> Lately | None:
    """Against the last value of the same origins."""
    if known.empty:
        return None
    base_error = _error(base[base["origin"].isin(known["origin"])])
    skill = 1.0 - _error(known) / base_error if base_error > 0 else None  # NaN is not above 0
    coverage = {
        share: float(known["actual"].between(known[low], known[high]).mean()) for share, (low, high) in BANDS.items()
    }
    return Lately(skill, coverage, len(known))


def chances(stored: pd.DataFrame, known: pd.DataFrame, actual: pd.Series) -> pd.DataFrame:
    """Said chance and what `happened` (1 or 0) of each forecast and limit, where all steps of its hour were observed and the series
    was not beyond the limit when it was made. `known`: the steps of `stored` with what came."""
    known = known.sort_values(["origin", "step"])
    came, said = known["actual"].to_numpy(), stored["breaches"].loc[known.index].to_numpy()
    _, first, counts = np.unique(unix_seconds(known["origin"]), return_index=True, return_counts=True)
    first = first[counts == HORIZON_STEPS]
    before = actual.reindex(pd.DatetimeIndex(known["origin"].iloc[first])).to_numpy(dtype=np.float64)
    hours = came[first[:, None] + np.arange(HORIZON_STEPS)]
    whole = np.isfinite(hours).all(axis=1) & np.isfinite(before)
    rows = [
        (each.chance, float(each.passed(hour).any()))
        for at, hour, then in zip(first[whole], hours[whole], before[whole], strict=True)
        for each in said[at]
        if not each.passed(then)
    ]
    return pd.DataFrame(rows, columns=["chance", "happened"], dtype="float64")


def reliability(tried: pd.DataFrame) -> pd.DataFrame:
    """Tenths of the said chance: mean `said`, share that `came` true, and `n`; tenths without any are left out."""
    tenth = np.minimum((tried["chance"] * 10).astype(int), 9)
    found = tried.groupby(tenth).agg(said=("chance", "mean"), came=("happened", "mean"), n=("chance", "size"))
    return found.reset_index(drop=True)


def skill(tried: pd.DataFrame) -> float | None:
    """1 - Brier score over that of always saying how often it happened; None where it always or never did."""
    usual = float(tried["happened"].mean())
    base = usual * (1.0 - usual)
    return 1.0 - float(((tried["chance"] - tried["happened"]) ** 2).mean()) / base if base > 0 else None


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


@dataclass(frozen=True, slots=True)
class Risk:
    """A limit that a signal may pass: the `chance` of that in the hour after `start`, the origin of `look`, and the Unix time by which it is
    more likely than not to have been passed (None: after that hour). No chance: no forecast reaches past the moment that was asked for."""

    look: Outlook
    limit: Limit
    start: float = math.nan
    chance: float | None = None
    by: float | None = None


def risks(seen: Sequence[Outlook], now: float, served: str = "") -> list[Risk]:
    """Every limit of the given forecasts of the model `served`, the likeliest first; those of signals of which no forecast reaches past `now` last."""
    found = []
    for each in seen:
        if each.origin is not None and each.reaches(now):
            for breach in each.breaches:
                until = breach.seconds_until()
                limit = Limit(breach.name, breach.limit, breach.below)
                found.append(
                    Risk(each, limit, each.origin, breach.chance, None if until is None else each.origin + until)
                )
        else:
            found += [Risk(each, limit) for limit in limits_of(each.signal.name, served)]
    return sorted(found, key=lambda risk: -1.0 if risk.chance is None else risk.chance, reverse=True)
