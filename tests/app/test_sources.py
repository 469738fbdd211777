"""Reads that viewers share: each gets what it asked for, also while the source is away, and nobody changes another's."""

from __future__ import annotations

import time
from pathlib import Path

import pandas as pd
import pytest

from observability.app import queries, sources
from observability.app.sources import CachedSource
from observability.errors import StoreError
from tests.app import synthetic

WHERE = {"model": synthetic.MODEL}
REQUESTS = queries.REQUESTS.name


@pytest.fixture
def cached(store_path: Path) -> CachedSource:
    return CachedSource(str(store_path))


def test_a_reader_of_days_of_forecasts_keeps_them_while_the_source_is_away(cached: CachedSource) -> None:
    now = time.time() // 3600 * 3600
    whole = cached.forecasts(REQUESTS, WHERE, "auto", now - 86400)
    late = cached.forecasts(REQUESTS, WHERE, "auto", now - 3600)
    assert len(whole) > len(late) > 0
    away = cached.offline(StoreError("away"))
    for since, frame in ((now - 86400, whole), (now - 3600, late)):
        pd.testing.assert_frame_equal(away.forecasts(REQUESTS, WHERE, "auto", since), frame)
    with pytest.raises(StoreError, match="away"):
        away.forecasts(REQUESTS, WHERE, "auto", now - 7 * 86400)


def test_what_one_reader_does_to_a_frame_another_does_not_see(cached: CachedSource, end: float) -> None:
    first = cached.range(REQUESTS, end - 3600, end, 60.0, WHERE)
    kept = first.copy()
    first.loc[first.index[0], "value"] = -1.0
    first["more"] = 1
    pd.testing.assert_frame_equal(cached.range(REQUESTS, end - 3600, end, 60.0, WHERE), kept)


def test_a_read_that_expires_while_it_is_looked_up_is_read_again() -> None:
    read = sources._Read("count", 1e-4, 10, lambda _, key: key)
    read._kept["spec", 1] = 1
    seen = set()
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        found = read.known("spec", 1)
        seen.add(found)
        if found is None:
            read._kept["spec", 1] = 1
    assert seen == {(1,), None}


def test_since_when_a_source_is_stale_does_not_depend_on_how_slow_it_is() -> None:
    newest = float(round(time.time() - 600))

    class Slow:
        def freshness(self) -> float:
            time.sleep(0.7)
            return time.time() - newest

    assert queries.freshness(Slow()).newest == newest  # type: ignore[arg-type]
