"""What the page P99 reads, against truth computed from the written rows by plain Python."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from observability import catalog
from observability.app import findings, p99, page_p99, queries, ui
from observability.app.view import View, make_view
from observability.objectives import E2E
from observability.store.embedded import SignalBlock, create
from observability.store.source import SeriesSource
from tests.app.synthetic import once, written


def test_the_make_up_sums_to_the_mean_latency_of_the_slowest(
    source: SeriesSource, rows: dict[str, pd.DataFrame], view: View
) -> None:
    makeup = p99.makeup_now(source, view, 0.99)
    assert makeup is not None
    newest = [r for r in written(rows, p99.TAIL[0.99], view) if r["time"] == view.end]
    assert makeup.seconds == pytest.approx(sum(float(r["value"]) for r in newest))  # type: ignore[arg-type]
    queued = sum(float(r["value"]) for r in newest if r["state"] == "queued")  # type: ignore[arg-type]
    assert makeup.matrix.loc["queued"].sum() == pytest.approx(queued)
    assert makeup.matrix.shape == (len(catalog.SHOWN_STATES), len(catalog.SHOWN_COMPONENTS))


def test_make_up_over_time_by_state_and_by_component_have_the_same_total(source: SeriesSource, view: View) -> None:
    totals = [
        p99.makeup_over_time(source, view, 0.99, by).groupby("time")["value"].sum() for by in ("state", "component")
    ]
    pd.testing.assert_series_equal(*totals)
    assert "swapped" not in set(p99.makeup_over_time(source, view, 0.99, "state")["series"])


def test_the_make_up_of_a_range_weighs_each_moment_by_its_requests(
    source: SeriesSource, rows: dict[str, pd.DataFrame], view: View
) -> None:
    makeup = p99.makeup_of_range(source, view, 0.9)
    assert makeup is not None
    weights = {
        r["time"]: float(r["value"]) for r in written(rows, queries.events_signal(E2E), view) if r["time"] in once(view)
    }  # type: ignore[arg-type]
    parts = [r for r in written(rows, p99.TAIL[0.9], view) if r["time"] in weights]
    truth = sum(float(r["value"]) * weights[r["time"]] for r in parts) / sum(weights.values())  # type: ignore[arg-type]
    assert makeup.seconds == pytest.approx(truth)


def test_lengths_add_up_to_the_latency_of_the_slowest(source: SeriesSource, view: View) -> None:
    makeup = p99.makeup_now(source, view, 0.99)
    assert makeup is not None
    assert p99.lengths_now(source, view, 0.99).sum() == pytest.approx(makeup.seconds)
    assert p99.length_shares_now(source, view, 0.99).sum() == pytest.approx(1.0)


@pytest.mark.parametrize("gauge", ["kvscope_requests_waiting", "kvscope_requests_running", ""])
def test_a_finding_is_told_with_the_pool_as_it_was_while_requests_waited(tmp_path: Path, gauge: str) -> None:
    """For 45 minutes the pool is 97 % held while requests wait, then it is empty: the newest make-up is told for five minutes more."""
    end = 1.8e9
    store, times = create(tmp_path / "store.db"), np.arange(end - 3 * 3600, end + 1, 15.0)
    busy, told = (times > end - 3600) & (times <= end - 900), (times > end - 3600) & (times <= end - 600)

    def put(name: str, values: np.ndarray, **labels: str) -> None:  # as a recorder: a moment without a value is told
        store.append_blocks({name: SignalBlock(times, [{"model": "m", **labels}], values[:, None])})

    put(queries.KV_USAGE.name, np.where(busy, 0.97, 0.05))
    if gauge:
        put(f"model:{gauge}:sum", np.where(busy, 5.0, 0.0))
    put(queries.events_signal(E2E).name, np.where(busy, 0.5, 0.0))
    for q in (0.99, 0.5):
        for state, seconds in (("queued", 20.0), ("decode", 10.0)):
            put(p99.TAIL[q].name, np.where(told, seconds, np.nan), state=state, component="forward_decode")
    view = make_view("m", 3600, end)
    slow = p99.makeup_now(store, view, 0.99)
    assert slow is not None
    week = make_view("m", 7 * 86400, end)  # its points are ten minutes apart
    assert p99.kv_usage_of(store, week, slow) == pytest.approx(0.97)
    for made in (slow, None):
        usage = p99.kv_usage_of(store, view, made)
        assert usage == pytest.approx(0.97)
        finding = findings.explain(slow, None, usage)
        assert finding is not None
        assert "the KV pool is full" in finding.headline
    assert "Of the five minutes to" in ui.of_when(slow.time, view)
    assert ui.of_when(pd.Timestamp(end - 15, unit="s", tz="UTC"), view) == ""


def test_a_day_to_compare_with_stands_alone_where_the_range_has_no_request(tmp_path: Path) -> None:
    """Yesterday's bars are drawn, and nothing is said of requests of now."""
    end = 1.8e9
    store = create(tmp_path / "store.db")
    at = pd.to_datetime(end - 86400 - np.arange(0, 900, 15.0), unit="s", utc=True)
    for q in (0.99, 0.5):
        for name, labels in (
            (p99.TAIL[q].name, {"state": "queued", "component": "forward_decode"}),
            (p99.TAIL_LENGTHS[q].name, {"length_bucket": "0-2K"}),
            (p99.TAIL_LENGTH_SHARES[q].name, {"length_bucket": "0-2K"}),
        ):
            store.append(name, pd.DataFrame({"time": at, "model": "m", **labels, "value": 2.0}))
    context = ui.Context(store, make_view("m", 900, end), versus="yesterday")
    lengths = page_p99._lengths(context, 0.99)
    bars = page_p99._makeup(context, 0.99, "state", False, 100)
    for content in (lengths, bars):
        assert content.figure is not None
        assert content.below == ""
        assert set(content.data["requests"]) == {"slowest 1 %, yesterday"}  # type: ignore[index]
