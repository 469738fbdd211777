"""The series source of the running app, with its reads cached for all viewers together."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Generic, TypeVar, cast

import pandas as pd
import streamlit as st
from cachetools import LRUCache, TTLCache

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
#: Forecasts are made every ten minutes, and those of days are read.
FORECAST_TTL = 60.0
#: Reads kept for the time in which the source cannot be asked.
MAX_KEPT = 1000

_T = TypeVar("_T")


@st.cache_resource(show_spinner=False)
def _opened(spec: str) -> SeriesSource:
    return open_source(spec)


class _Kept(Generic[_T]):
    """Values that all viewers share for `ttl` seconds; `most` of them. They are not copied for each reader: `CachedSource` hands out frames
    that change apart from each other."""

    def __init__(self, ttl: float, most: int, timer: Callable[[], float] = time.monotonic) -> None:
        self._kept: TTLCache[tuple[Hashable, ...], _T] = TTLCache(most, ttl, timer)
        self._lock = threading.Lock()

    def known(self, *key: Hashable) -> tuple[_T] | None:
        """What is kept under `key`, the source's text first; None: nothing, or from too long ago."""
        with self._lock:
            try:
                return (self._kept[key],)
            except KeyError:  # asked for once: between two looks it could expire
                return None

    def keep(self, value: _T, *key: Hashable) -> _T:
        """Keeps `value` under `key`, and gives it back."""
        with self._lock:
            self._kept[key] = value
        return value


class _Read(_Kept[_T]):
    """A read of a source whose answers are kept; errors are not."""

    def __init__(self, name: str, ttl: float, most: int, read: Callable[..., _T]) -> None:
        super().__init__(ttl, most)
        self.name, self._read = name, read

    def __call__(self, spec: str, *arguments: Hashable) -> _T:
        return self.keep(self._read(_opened(spec), *arguments), spec, *arguments)


_RANGE = _Read(
    "range", TTL, 2000, lambda s, signal, start, end, step, where: s.range(signal, start, end, step, dict(where))
)
_LONG_RANGE = _Read(
    "long range",
    LONG_TTL,
    200,
    lambda s, signal, start, end, step, where: s.range(signal, start, end, step, dict(where)),
)
_LATEST = _Read("latest", TTL, 500, lambda s, signal, where: s.latest(signal, dict(where)))
_FORECASTS = _Read(
    "forecasts", FORECAST_TTL, 100, lambda s, signal, where, *which: s.forecasts(signal, dict(where), *which)
)
_ALERTS: _Read[list[Fired] | None] = _Read("alerts", TTL, 200, lambda s, *span: s.alerts(*span))
_EXEMPLARS: _Read[list[SlowRequest] | None] = _Read("exemplars", TTL, 50, lambda s, *span: s.exemplars(*span))
_SIMULATED: _Read[list[tuple[float, float]]] = _Read("simulated", TTL, 200, lambda s, *span: list(s.simulated(*span)))
_ENGINES: _Read[list[str]] = _Read("engines", FORECAST_TTL, 50, lambda s, model: s.engines(model))
_MODELS: _Read[list[str]] = _Read("models", STATE_TTL, 10, lambda s: list(s.models()))


def _unix_time_of_newest(source: SeriesSource) -> float | None:
    age = source.freshness()
    return None if age is None else time.time() - age


#: What pages worked out of reads; a key has the view in it, which moves on.
_DERIVED: _Kept[object] = _Kept(TTL, 300)

_NEWEST = _Read("newest", STATE_TTL, 10, _unix_time_of_newest)


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

    def _asked(self, read: _Read[_T], *arguments: Hashable) -> _T:
        known = read.known(self.spec, *arguments)
        if known is not None:
            return known[0]
        return patiently((read.name, self.spec, *arguments), lambda: read(self.spec, *arguments), self._waiting)

    def _kept(self, key: tuple[Hashable, ...], read: _Read[_T], *arguments: Hashable) -> _T:
        """What `read` gives for the spec and `arguments`, kept under `key`; without asking, what was kept."""
        lock, kept = _last_reads()
        key = (self.spec, *key)
        if self._offline is not None:
            with lock:
                if key not in kept:
                    raise self._offline
                return _apart(cast(_T, kept[key]))
        value = self._asked(read, *arguments)
        with lock:
            kept[key] = value
        return _apart(value)

    def range(self, signal: str, start: float, end: float, step: float, where: Mapping[str, str] = ANY) -> pd.DataFrame:
        labels = tuple(sorted(where.items()))
        ago = round((time.time() - end) / 3600.0)  # hours: yesterday is kept beside today
        key = ("range", signal, end - start, step, ago, labels)
        read = _LONG_RANGE if step >= LONG_STEP else _RANGE
        return self._kept(key, read, signal, start, end, step, labels)

    def latest(self, signal: str, where: Mapping[str, str] = ANY) -> pd.DataFrame:
        labels = tuple(sorted(where.items()))
        return self._kept(("latest", signal, labels), _LATEST, signal, labels)

    def forecasts(self, signal: str, where: Mapping[str, str], model: str, since: float = 0.0) -> pd.DataFrame:
        labels = tuple(sorted(where.items()))
        ago = (time.time() // 3600.0 * 3600.0 - since) // 3600.0  # a reader of days does not get another's three
        return self._kept(("forecasts", signal, labels, model, ago), _FORECASTS, signal, labels, model, since)

    def simulated(self, start: float, end: float) -> list[tuple[float, float]]:
        return self._kept(("simulated", end - start), _SIMULATED, start, end)

    def alerts(self, start: float, end: float, model: str) -> list[Fired] | None:
        return self._kept(("alerts", end - start, model), _ALERTS, start, end, model)

    def engines(self, model: str) -> list[str]:
        return self._kept(("engines", model), _ENGINES, model)

    def exemplars(self, family: str, start: float, end: float, model: str) -> list[SlowRequest] | None:
        return self._kept(("exemplars", family, end - start, model), _EXEMPLARS, family, start, end, model)

    def models(self) -> list[str]:
        return self._kept(("models",), _MODELS)

    def derived(self, key: Hashable, work: Callable[[], object]) -> object:
        """What `work` gave under `key`, for a viewer within TTL seconds; not of a source that is not asked, whose reads are older."""
        if self._offline is not None:
            return work()
        known = _DERIVED.known(self.spec, key)
        return known[0] if known is not None else _DERIVED.keep(work(), self.spec, key)

    def freshness(self) -> float | None:
        newest = self._asked(_NEWEST)
        return None if newest is None else max(0.0, time.time() - newest)

    def describe(self) -> str:
        return _opened(self.spec).describe()


def _apart(value: _T) -> _T:
    """What one reader may change without others seeing it: a frame's data are copied when they are written to, not before."""
    return value.copy(deep=False) if isinstance(value, pd.DataFrame) else value


@st.cache_resource(show_spinner=False)
def _last_reads() -> tuple[threading.Lock, LRUCache[tuple[Hashable, ...], object]]:
    return threading.Lock(), LRUCache(MAX_KEPT)


def current_source(waiting: Callable[[float], None] = _nobody) -> CachedSource:
    """The source that this process was started for; `waiting` is told the seconds that a read lasts."""
    return CachedSource(os.environ[SOURCE_VARIABLE], waiting=waiting)
