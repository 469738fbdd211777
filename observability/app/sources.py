"""The series source of the running app, with its reads cached for all viewers together."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar, cast

import pandas as pd
import streamlit as st

from observability.app.reads import patiently
from observability.app.settings import SOURCE_VARIABLE
from observability.app.view import FASTEST_REFRESH
from observability.errors import KvscopeError
from observability.store.open import open_source
from observability.store.source import ANY, Fired, SeriesSource, SlowRequest

#: Seconds that a read is shared: the shortest time between two refreshes, so that each of them reads once.
TTL = float(FASTEST_REFRESH)
#: Whether the source is alive, and its models: seconds that this is shared.
STATE_TTL = 2.0
#: Reads of days change little: seconds that one with a step of at least LONG_STEP is shared.
LONG_TTL, LONG_STEP = 300.0, 300.0
#: Forecasts are made every ten minutes, and all stored ones are read.
FORECAST_TTL = 60.0
#: Reads kept for the time in which the source cannot be asked.
MAX_KEPT = 1000

_T = TypeVar("_T")

_Where = tuple[tuple[str, str], ...]


@st.cache_resource(show_spinner=False)
def _opened(spec: str) -> SeriesSource:
    return open_source(spec)


# Frames are kept as they are, not pickled for each reader as cache_data does; readers get shallow copies (CachedSource._kept).


@st.cache_resource(ttl=TTL, max_entries=2000, show_spinner=False)
def _range(spec: str, signal: str, start: float, end: float, step: float, where: _Where) -> pd.DataFrame:
    return _opened(spec).range(signal, start, end, step, dict(where))


@st.cache_resource(ttl=LONG_TTL, max_entries=200, show_spinner=False)
def _long_range(spec: str, signal: str, start: float, end: float, step: float, where: _Where) -> pd.DataFrame:
    return _opened(spec).range(signal, start, end, step, dict(where))


@st.cache_data(ttl=TTL, max_entries=200, show_spinner=False)
def _alerts(spec: str, start: float, end: float, model: str) -> list[Fired] | None:
    return _opened(spec).alerts(start, end, model)


@st.cache_data(ttl=FORECAST_TTL, max_entries=50, show_spinner=False)
def _engines(spec: str, model: str) -> list[str]:
    return _opened(spec).engines(model)


@st.cache_data(ttl=TTL, max_entries=50, show_spinner=False)
def _exemplars(spec: str, family: str, start: float, end: float, model: str) -> list[SlowRequest] | None:
    return _opened(spec).exemplars(family, start, end, model)


@st.cache_resource(ttl=TTL, max_entries=500, show_spinner=False)
def _latest(spec: str, signal: str, where: _Where) -> pd.DataFrame:
    return _opened(spec).latest(signal, dict(where))


@st.cache_resource(ttl=FORECAST_TTL, max_entries=100, show_spinner=False)
def _forecasts(spec: str, signal: str, where: _Where, model: str, since: float) -> pd.DataFrame:
    return _opened(spec).forecasts(signal, dict(where), model, since)


@st.cache_data(ttl=TTL, max_entries=200, show_spinner=False)
def _simulated(spec: str, start: float, end: float) -> list[tuple[float, float]]:
    return list(_opened(spec).simulated(start, end))


@st.cache_data(ttl=STATE_TTL, max_entries=10, show_spinner=False)
def _models(spec: str) -> list[str]:
    return list(_opened(spec).models())


@st.cache_data(ttl=STATE_TTL, max_entries=10, show_spinner=False)
def _newest(spec: str) -> float | None:
    age = _opened(spec).freshness()
    return None if age is None else time.time() - age


def _nobody(seconds: float) -> None:
    """Tells nobody that a read takes long."""


class CachedSource:
    """A SeriesSource that reads through the caches above; errors are not cached, so a source that returns is seen.

    `offline` is the error for which the source is not asked at all: reads then give what they last gave (charts end
    where it ends), or raise that error. So a dead server costs one time-out a refresh, not one a chart. `waiting` is told
    the seconds that a read lasts.
    """

    def __init__(
        self, spec: str, offline: KvscopeError | None = None, waiting: Callable[[float], None] = _nobody
    ) -> None:
        self.spec = spec
        self._offline = offline
        self._waiting = waiting

    def offline(self, error: KvscopeError) -> CachedSource:
        """The same source, not asked again."""
        return CachedSource(self.spec, error)

    def _kept(self, key: tuple[Hashable, ...], read: Callable[..., _T], *arguments: Hashable) -> _T:
        """What `read` gives for the spec and `arguments`, kept under `key`; without asking, what was kept."""
        kept, key = _last_reads(), (self.spec, *key)
        if self._offline is not None:
            if key not in kept:
                raise self._offline
            return _apart(cast(_T, kept[key]))
        value = patiently((read.__name__, self.spec, *arguments), lambda: read(self.spec, *arguments), self._waiting)
        kept[key] = value
        while len(kept) > MAX_KEPT:
            kept.pop(next(iter(kept)), None)
        return _apart(value)

    def range(self, signal: str, start: float, end: float, step: float, where: Mapping[str, str] = ANY) -> pd.DataFrame:
        labels = tuple(sorted(where.items()))
        ago = round((time.time() - end) / 3600.0)  # hours: yesterday is kept beside today
        key = ("range", signal, end - start, step, ago, labels)
        read = _long_range if step >= LONG_STEP else _range
        return self._kept(key, read, signal, start, end, step, labels)

    def latest(self, signal: str, where: Mapping[str, str] = ANY) -> pd.DataFrame:
        labels = tuple(sorted(where.items()))
        return self._kept(("latest", signal, labels), _latest, signal, labels)

    def forecasts(self, signal: str, where: Mapping[str, str], model: str, since: float = 0.0) -> pd.DataFrame:
        labels = tuple(sorted(where.items()))
        return self._kept(("forecasts", signal, labels, model), _forecasts, signal, labels, model, since)

    def simulated(self, start: float, end: float) -> list[tuple[float, float]]:
        return self._kept(("simulated", end - start), _simulated, start, end)

    def alerts(self, start: float, end: float, model: str) -> list[Fired] | None:
        return self._kept(("alerts", end - start, model), _alerts, start, end, model)

    def engines(self, model: str) -> list[str]:
        return self._kept(("engines", model), _engines, model)

    def exemplars(self, family: str, start: float, end: float, model: str) -> list[SlowRequest] | None:
        return self._kept(("exemplars", family, end - start, model), _exemplars, family, start, end, model)

    def models(self) -> list[str]:
        return self._kept(("models",), _models)

    def freshness(self) -> float | None:
        newest = patiently(("newest", self.spec), lambda: _newest(self.spec), self._waiting)
        return None if newest is None else max(0.0, time.time() - newest)

    def describe(self) -> str:
        return _opened(self.spec).describe()


def _apart(value: _T) -> _T:
    """What one reader may change without others seeing it: a frame's data are copied when they are written to, not before."""
    return value.copy(deep=False) if isinstance(value, pd.DataFrame) else value


@st.cache_resource(show_spinner=False)
def _last_reads() -> dict[tuple[Hashable, ...], object]:
    return {}


def current_source(waiting: Callable[[float], None] = _nobody) -> CachedSource:
    """The source that this process was started for; `waiting` is told the seconds that a read lasts."""
    return CachedSource(os.environ[SOURCE_VARIABLE], waiting=waiting)
