"""What the page P99 reads: what made up the latency of the slowest requests, now, over a range and over time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pandas as pd

from observability import catalog
from observability.app.derived import shared
from observability.app.queries import (
    KV_USAGE,
    RUNNING,
    WAITING,
    at_newest,
    each_once,
    over_time,
    quantile_signal,
    several_over_time,
)
from observability.app.view import View
from observability.objectives import E2E, LatencyObjective
from observability.signals import BY_NAME, WINDOW_SECONDS, events_name
from observability.store.source import SeriesSource

#: One step of a look at some minutes.
_CLOSE_STEP = 15.0

TAIL = {
    q: BY_NAME[f"model_state_component:kvscope_request_phase_seconds:p{q * 100:g}_tail_mean5m"]
    for q in (0.5, 0.9, 0.99)
}
TAIL_LENGTHS, TAIL_LENGTH_SHARES = (
    {
        q: BY_NAME[f"model_length_bucket:kvscope_request_length_phase_{what}:p{q * 100:g}_tail_mean5m"]
        for q in (0.5, 0.9, 0.99)
    }
    for what in ("seconds", "requests")
)
#: Requests that ended, of every class.
ENDED = BY_NAME[events_name(E2E, ())]

By = Literal["state", "component"]


@dataclass(frozen=True, slots=True)
class Makeup:
    """Mean make-up of the slowest requests at one time: `matrix` is seconds, states down, components across."""

    q: float
    time: pd.Timestamp
    matrix: pd.DataFrame

    @property
    def seconds(self) -> float:
        """Their mean latency."""
        return float(self.matrix.to_numpy().sum())

    def rows(self) -> pd.DataFrame:
        """Columns state, component, value (seconds)."""
        states, components = self.matrix.index, self.matrix.columns
        return pd.DataFrame(
            {"state": np.tile(states, len(components)), "component": np.repeat(components, len(states)), "value": self.matrix.to_numpy().T.ravel()}
        )  # fmt: skip


@shared
def makeup_now(source: SeriesSource, view: View, q: float) -> Makeup | None:
    """The newest make-up in the view (of the five minutes to its `time`); None when no request ended in it."""
    frame = over_time(source, view, TAIL[q])
    if frame.empty:
        return None
    rows = at_newest(frame)
    return Makeup(q, rows["time"].iloc[0], _matrix(rows))


@shared
def makeup_of_range(source: SeriesSource, view: View, q: float) -> Makeup | None:
    """The make-up over all of the view: its moments weighted by the requests that ended then; None when none did."""
    frame, ended = each_once(source, view, TAIL[q]), _ended(source, view)
    weights = frame["time"].map(ended)
    frame = frame.assign(value=frame["value"] * weights)[weights > 0]
    total = float(weights[weights > 0].groupby(frame["time"]).first().sum())
    if frame.empty or not total > 0:
        return None
    return Makeup(q, frame["time"].max(), _matrix(frame) / total)


def _ended(source: SeriesSource, view: View) -> pd.Series:
    """Requests that ended, by time of `each_once`."""
    frame = each_once(source, view, ENDED).set_index("time")
    return frame["value"] * frame["seconds"]


def _matrix(rows: pd.DataFrame) -> pd.DataFrame:
    """Sums of `value` by all states and components. A part that has no series never took time: the parts still add up to the latency."""
    states, components = pd.Index(catalog.SHOWN_STATES), pd.Index(catalog.SHOWN_COMPONENTS)
    down, across = (
        index.get_indexer(pd.Index(rows[name])) for index, name in ((states, "state"), (components, "component"))
    )
    known = (down >= 0) & (across >= 0)
    sums = np.zeros((len(states), len(components)))
    np.add.at(sums, (down[known], across[known]), rows["value"].to_numpy()[known])
    return pd.DataFrame(sums, index=states, columns=components)


def makeup_over_time(source: SeriesSource, view: View, q: float, by: By) -> pd.DataFrame:
    """Mean seconds of the slowest 1 - q of the requests by `by`. Columns time, series, value; what never took time is left out."""
    frame = over_time(source, view, TAIL[q])
    frame = frame.groupby(["time", by], observed=True)["value"].sum().reset_index().rename(columns={by: "series"})
    used = frame.groupby("series")["value"].max()
    return frame[frame["series"].isin(used[used > 0].index)].reset_index(drop=True)


def kv_usage_of(source: SeriesSource, view: View, made: Makeup | None) -> float | None:
    """Share of the pool that was held while requests waited: over the five minutes of a make-up and the lives of its requests before, or over all
    of the view. Moments weigh by the requests that waited then; where none ever did by those that ran, or else ended. None where the use was
    not measured."""
    end = view.end if made is None else made.time.timestamp()
    start = view.start if made is None else end - WINDOW_SECONDS - made.seconds
    close = replace(view, start=start, end=end, step=view.step if made is None else _CLOSE_STEP)
    usage = over_time(source, close, KV_USAGE).set_index("time")["value"]
    for signal in (WAITING, RUNNING, ENDED):
        weights = over_time(source, close, signal).set_index("time")["value"].reindex(usage.index).fillna(0.0)
        if weights.sum() > 0:
            return float(np.average(usage, weights=weights))
    return None if usage.empty else float(usage.mean())


def lengths_now(source: SeriesSource, view: View, q: float) -> pd.Series:
    """Mean seconds of the slowest by prompt length at the newest time of the view; adds up to their mean latency."""
    frame = at_newest(over_time(source, view, TAIL_LENGTHS[q])).set_index("length_bucket")["value"]
    return frame.reindex([bucket for bucket in catalog.LENGTH_BUCKETS if frame.get(bucket, 0.0) > 0])


def length_shares_now(source: SeriesSource, view: View, q: float) -> pd.Series:
    """Share of the slowest requests by prompt length at the newest time of the view."""
    frame = at_newest(over_time(source, view, TAIL_LENGTH_SHARES[q])).set_index("length_bucket")["value"]
    return frame.reindex([bucket for bucket in catalog.LENGTH_BUCKETS if frame.get(bucket, 0.0) > 0])


def latency_quantiles(source: SeriesSource, view: View, objective: LatencyObjective) -> pd.DataFrame:
    """Columns time, series (P50, P90, P99), value in seconds."""
    return several_over_time(source, view, {f"P{q * 100:g}": quantile_signal(objective, q) for q in (0.5, 0.9, 0.99)})
