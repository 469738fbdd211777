"""The one interface through which the app, the forecasts and experiments read signals, whatever stores them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import numpy as np
import pandas as pd

from observability.errors import StoreError
from observability.signals import BY_NAME, Signal

#: Seconds a value stays current when nothing newer was evaluated (Prometheus' lookback).
LOOKBACK_SECONDS = 300.0
#: Any labels.
ANY: Mapping[str, str] = MappingProxyType({})
#: Points a read may ask for per series; more would only be thinned by the chart that shows them.
MAX_POINTS = 50_000


@dataclass(frozen=True, slots=True)
class Fired:
    """An alert that fired from `start` to `end` (Unix seconds). `labels` beyond its name and severity."""

    name: str
    severity: str
    start: float
    end: float
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class SlowRequest:
    """One request that a latency histogram noted: `seconds` at Unix time `time`. `ids` may hold trace_id, span_id, request_id."""

    family: str
    seconds: float
    time: float
    ids: Mapping[str, str]
    labels: Mapping[str, str]


class SeriesSource(Protocol):
    """Reads signals of observability.signals by name. Times are Unix seconds; methods raise StoreError.

    A frame has the columns `time` (datetime64[ns, UTC]), one for each label of the signal, and `value`. What is absent,
    unknown or not finite (0 / 0) has no row. `where` keeps the series whose labels have exactly these values.
    """

    def range(self, signal: str, start: float, end: float, step: float, where: Mapping[str, str] = ANY) -> pd.DataFrame:
        """The signal at start, start + step, ... up to end: at each time the newest value that is at most
        LOOKBACK_SECONDS old, unless a later evaluation found the series absent."""

    def latest(self, signal: str, where: Mapping[str, str] = ANY) -> pd.DataFrame:
        """The newest value of each series that is current now."""

    def models(self) -> list[str]:
        """Names of the models that have data, sorted."""

    def freshness(self) -> float | None:
        """Age in seconds of the newest observed data; None when there is none."""

    def simulated(self, start: float, end: float) -> list[tuple[float, float]]:
        """Spans inside [start, end] whose values come from virtual time."""

    def forecasts(self, signal: str, where: Mapping[str, str], model: str, since: float = 0.0) -> pd.DataFrame:
        """Stored forecasts of the signal by a forecast model ("prophet", "last_value") from the origin `since` (Unix seconds) on, by origin and time: columns of
        observability.store.forecasts.FRAME_COLUMNS plus the signal's labels."""

    def alerts(self, start: float, end: float, model: str) -> list[Fired] | None:
        """Alerts of kvscope that fired within [start, end] for the model, or for no model in particular; None where the source
        evaluates no alerts."""

    def engines(self, model: str) -> list[str]:
        """The adapters (exporters.adapters.engines.TITLES) that made the series of the model; none for kvscope's own."""

    def exemplars(self, family: str, start: float, end: float, model: str) -> list[SlowRequest] | None:
        """Requests that the histogram `family` noted within [start, end], slowest first; None where the source keeps none."""

    def describe(self) -> str:
        """One line for people: what is read, and any restriction that matters."""


def signal_named(name: str) -> Signal:
    """The signal of that name. Raises StoreError."""
    try:
        return BY_NAME[name]
    except KeyError:
        raise StoreError(
            f"{name!r} is not a signal.", next_step="Use a name from observability.signals.SIGNALS."
        ) from None


def grid(start: float, end: float, step: float) -> np.ndarray:
    """Evaluation times start, start + step, ... <= end in milliseconds, int64. Raises StoreError on an absurd request."""
    if not (step > 0 and end >= start and np.isfinite([start, end, step]).all()):
        raise StoreError(
            f"Cannot read from {start} to {end} in steps of {step} s.",
            next_step="Give start <= end and a step above 0.",
        )
    first, last, stride = round(start * 1000), round(end * 1000), max(1, round(step * 1000))
    count = (last - first) // stride + 1
    if count > MAX_POINTS:
        raise StoreError(
            f"{count:,} points a series were asked for; the most is {MAX_POINTS:,}.",
            next_step="Use a larger step or a shorter range.",
        )
    return first + stride * np.arange(count, dtype=np.int64)


def frame(signal: Signal, labels: list[Mapping[str, str]], times_ms: np.ndarray, values: np.ndarray) -> pd.DataFrame:
    """A frame as SeriesSource describes it, from `values` [times, series]; non-finite values are left out."""
    series, at = np.nonzero(np.isfinite(values.T))
    columns: dict[str, object] = {"time": pd.DatetimeIndex(times_ms[at].astype("datetime64[ms]")).as_unit("ns").tz_localize("UTC")}  # fmt: skip
    for name in signal.by:
        names = np.array([label.get(name, "") for label in labels], dtype=object)
        columns[name] = pd.array(names[series], dtype="str")
    columns["value"] = values[at, series]
    return pd.DataFrame(columns)
