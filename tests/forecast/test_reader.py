"""Reading only what is new gives what reading everything gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from observability.forecast import series as module
from observability.forecast.series import DAY_SECONDS, GridSeries, SeriesReader, read_series
from observability.store.embedded import EmbeddedStore, create
from tests.forecast.conftest import END, KV_USAGE

MINUTE = 60.0


def record(store: EmbeddedStore, start: float, stop: float, models: tuple[str, ...], seed: int) -> None:
    """A reading a minute in (start, stop], some of them lost, some with a second value."""
    rng = np.random.default_rng(seed)
    times = np.arange(start + MINUTE, stop + 1, MINUTE)
    for model in models:
        some = times[rng.random(len(times)) > 0.1]
        rows = {"time": pd.to_datetime(some, unit="s", utc=True), "model": model, "value": rng.random(len(some))}
        store.append(KV_USAGE.name, pd.DataFrame(rows))


def assert_same(found: list[GridSeries], wanted: list[GridSeries]) -> None:
    assert [dict(each.labels) for each in found] == [dict(each.labels) for each in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert np.array_equal(one.ends, other.ends)
        assert np.array_equal(one.values, other.values, equal_nan=True)
        assert (one.newest, one.simulated) == (other.newest, other.simulated)


class Counting:
    """A store that counts the minutes that were asked for."""

    def __init__(self, store: EmbeddedStore) -> None:
        self._store = store
        self.minutes = 0

    def range(self, signal: str, start: float, end: float, step: float) -> pd.DataFrame:
        self.minutes += round((end - start) / step) + 1
        return self._store.range(signal, start, end, step)

    def simulated(self, start: float, end: float) -> list[tuple[float, float]]:
        return self._store.simulated(start, end)


def test_a_series_that_begins_stops_or_falls_silent_reads_as_anew_and_little_is_read(tmp_path: Path) -> None:
    store = create(tmp_path / "s.sqlite")
    record(store, END - 9 * DAY_SECONDS, END, ("a", "b"), seed=1)
    store.mark_simulated(END - 3 * DAY_SECONDS, END - 2 * DAY_SECONDS)
    source, reader = Counting(store), SeriesReader()
    assert_same(reader.read(source, KV_USAGE, END + 5), read_series(store, KV_USAGE, END + 5))
    source.minutes = 0
    at = END
    for turn, seconds in enumerate((600.0, 1800.0, 7200.0, 60.0, 1200.0)):
        record(store, at, at + seconds, ("a", "c") if turn else ("a",), seed=turn)
        at += seconds
        assert_same(reader.read(source, KV_USAGE, at + 5), read_series(store, KV_USAGE, at + 5))
    assert source.minutes < 900


def test_a_reading_that_comes_late_and_a_history_that_is_added_are_seen(tmp_path: Path) -> None:
    store = create(tmp_path / "s.sqlite")
    record(store, END - DAY_SECONDS, END - 2400, ("a",), seed=1)
    reader = SeriesReader()
    reader.read(store, KV_USAGE, END)
    record(store, END - 2400, END, ("a",), seed=2)
    assert_same(reader.read(store, KV_USAGE, END + 600), read_series(store, KV_USAGE, END + 600))
    record(store, END - 4 * DAY_SECONDS, END - DAY_SECONDS, ("a",), seed=3)
    store.mark_simulated(END - 4 * DAY_SECONDS, END - DAY_SECONDS)
    assert_same(reader.read(store, KV_USAGE, END + 605), read_series(store, KV_USAGE, END + 605))


def test_everything_is_read_anew_once_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LATE_SECONDS", 600.0)
    store = create(tmp_path / "s.sqlite")
    record(store, END - DAY_SECONDS, END, ("a",), seed=1)
    reader = SeriesReader()
    reader.read(store, KV_USAGE, END)
    record(store, END - 2 * DAY_SECONDS, END - DAY_SECONDS, ("a",), seed=2)  # nobody says so
    (old,) = reader.read(store, KV_USAGE, END + 600)
    assert np.isnan(old.values[old.ends < END - DAY_SECONDS]).all()
    record(store, END, END + 86_000, ("a",), seed=3)
    later = END + DAY_SECONDS + 5
    assert_same(reader.read(store, KV_USAGE, later), read_series(store, KV_USAGE, later))
