"""What the page KV cache reads, against truth computed from the written rows by plain Python."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from observability import catalog
from observability.app import kv, ui
from observability.app.view import RANGES, View, make_view
from observability.store.embedded import create
from observability.store.source import LOOKBACK_SECONDS, SeriesSource
from tests.app.synthetic import once, written


def counted(counter: Callable[[np.ndarray], np.ndarray], end: float, hours: float, **labels: str) -> pd.DataFrame:
    """The rate over five minutes of a counter, each 15 seconds of some hours to `end`, as a recorder writes it."""
    times = np.arange(end - hours * 3600, end + 1, 15.0)
    rate = (counter(times) - counter(times - 300)) / 300
    return pd.DataFrame({"time": pd.to_datetime(times, unit="s", utc=True), "model": "m", **labels, "value": rate})


@pytest.mark.parametrize("name", RANGES)
def test_tokens_of_a_range_are_those_that_a_counter_counted_in_it(tmp_path: Path, name: str) -> None:
    """Bursts at any moment, one just before the range: the counter itself says what was looked up in it."""
    end, seconds = 1.8e9, RANGES[name]
    rng = np.random.default_rng(seconds)
    bursts = np.sort(np.concatenate([rng.uniform(end - 1.2 * seconds, end, 40), [end - seconds - 60]]))
    sizes = rng.integers(100, 5000, len(bursts)).astype(float)

    def counter(times: np.ndarray) -> np.ndarray:
        return np.concatenate([[0.0], np.cumsum(sizes)])[np.searchsorted(bursts, times, side="right")]

    store = create(tmp_path / "store.db")
    for signal, part in ((kv.QUERIED, 1.0), (kv.HITTABLE, 0.9), (kv.HIT, 0.4)):
        rate = counted(lambda t, part=part: part * counter(t), end, 1.3 * seconds / 3600, length_bucket="2K-8K")
        store.append(signal.name, rate)
    (row,) = kv.hits_by_length(store, make_view("m", seconds, end)).to_dict("records")
    truth = float(np.diff(counter(np.array([end - seconds, end])))[0])
    assert row["queried"] == pytest.approx(truth, rel=1e-6)
    assert row["hit"] == pytest.approx(0.4 * truth, rel=1e-6)
    assert row["hit_of_hittable"] == pytest.approx(0.4 / 0.9, rel=1e-6)


def test_hits_are_sums_over_the_range_and_not_means_of_ratios(
    source: SeriesSource, rows: dict[str, pd.DataFrame], view: View
) -> None:
    table = kv.hits_by_length(source, view).set_index("length_bucket")
    sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for name, signal in (("queried", kv.QUERIED), ("hittable", kv.HITTABLE), ("hit", kv.HIT)):
        for row in written(rows, signal, view):
            if row["time"] in once(view):
                sums[str(row["length_bucket"])][name] += float(row["value"]) * 300  # type: ignore[arg-type]
    assert list(table.index) == [b for b in catalog.LENGTH_BUCKETS if sums[b]["queried"] > 0]
    for bucket, row in table.iterrows():
        truth = sums[str(bucket)]
        assert row["hit"] == pytest.approx(truth["hit"])
        assert row["hit_of_queried"] == pytest.approx(truth["hit"] / truth["queried"])
        assert row["hit_of_hittable"] == pytest.approx(truth["hit"] / truth["hittable"])


def test_free_runs_are_counts_by_class_that_sum_to_all_runs(
    source: SeriesSource, rows: dict[str, pd.DataFrame], view: View
) -> None:
    table = kv.free_run_lengths(source, view)
    newest = [r for r in written(rows, kv.FREE_RUNS, view) if r["time"] == view.end]
    by_bound = sorted((float(str(r["le"])), float(r["value"])) for r in newest)  # type: ignore[arg-type]
    assert table["runs"].sum() == by_bound[-1][1]
    assert table["runs"].tolist() == [
        by_bound[0][1],
        *(b[1] - a[1] for a, b in itertools.pairwise(by_bound)),
    ]
    assert table["length"].tolist()[:4] == ["1", "2", "3 to 4", "5 to 8"]
    assert table["length"].tolist()[-1] == "at least 16,385"


def test_what_was_is_not_told_as_what_is(tmp_path: Path) -> None:
    """States of now are absent, with the time of the last, where the newest row is not of now."""
    end = 1.8e9
    store = create(tmp_path / "store.db")
    at = pd.to_datetime([end - 1500, end - 1200], unit="s", utc=True)
    for le in ("1.0", "+Inf"):
        store.append(kv.FREE_RUNS.name, pd.DataFrame({"time": at, "model": "m", "le": le, "value": 3.0}))
    view = make_view("m", 3600, end)
    assert kv.free_run_lengths(store, view).empty
    assert len(kv.free_run_lengths(store, make_view("m", 3600, end - 1200))) == 2
    last = end - 1200 + LOOKBACK_SECONDS  # as Prometheus, a source gives a value for so long
    told = ui.why_absent(ui.Context(store, view), [kv.FREE_RUNS])
    assert told == f"Nothing since {pd.Timestamp(last, unit='s'):%-d %b %H:%M}: what it was then is history."
