"""The page Trends: a knee is marked where the data have one and only there, and its numbers are those of the signals."""

from __future__ import annotations

import re
from statistics import median

import numpy as np
import pandas as pd
import pytest

from observability.app import queries, trends
from observability.app.page_trends import curve_words, week_words
from observability.app.trends import Curve, latency_curve
from observability.app.view import View
from observability.objectives import E2E, TTFT
from observability.store.embedded import EmbeddedStore
from tests.app import synthetic
from tests.app.browser import Browser

KNEE = 6.0


def moments_of(latency: np.ndarray, load: np.ndarray) -> pd.DataFrame:
    times = pd.date_range("2026-01-01", periods=len(load), freq="5min", tz="UTC")
    return pd.DataFrame({"time": times, "load": load, "latency": latency})


def week_of_load(seed: int) -> tuple[np.ndarray, np.random.Generator]:
    """Five-minute loads of a week, 1 to 9 requests/s, with a daily wave."""
    rng = np.random.default_rng(seed)
    at = np.arange(2016)
    return np.clip(5 + 3.5 * np.sin(at / 288 * 2 * np.pi) + rng.normal(0, 0.5, 2016), 0.8, 9.5), rng


def hinged(load: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Flat at 200 ms up to KNEE, then rising by 500 ms for each request/s, with noise that multiplies."""
    return (0.2 + 0.5 * np.maximum(load - KNEE, 0.0)) * np.exp(rng.normal(0, 0.25, len(load)))


@pytest.mark.parametrize("seed", range(4))
def test_the_knee_of_a_hinged_curve_lies_in_its_interval(seed: int) -> None:
    load, rng = week_of_load(seed)
    curve = latency_curve(moments_of(hinged(load, rng), load), TTFT.threshold_seconds)
    assert isinstance(curve, Curve)
    assert curve.knee is not None
    assert curve.knee.low - 0.15 <= KNEE <= curve.knee.high + 0.3
    assert curve.knee.load == pytest.approx(KNEE, abs=0.6)
    assert curve.limit is not None
    assert curve.limit.load == pytest.approx(KNEE + 0.6 / 0.5, abs=0.5)
    assert f"{curve.knee.load:.2f}" in curve_words(curve, TTFT)


def test_the_band_holds_the_true_curve_and_the_curve_never_falls() -> None:
    load, rng = week_of_load(9)
    curve = latency_curve(moments_of(hinged(load, rng), load), TTFT.threshold_seconds)
    assert isinstance(curve, Curve)
    truth = 0.2 + 0.5 * np.maximum(curve.load - KNEE, 0.0)
    assert np.mean((curve.low * 0.97 <= truth) & (truth <= curve.high * 1.03)) > 0.85
    assert (np.diff(curve.latency) >= 0).all()
    assert (curve.low <= curve.latency + 1e-12).all()
    assert (curve.latency <= curve.high + 1e-12).all()


def straight(load: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return 0.1 * load * np.exp(rng.normal(0, 0.2, len(load)))


def level(load: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return 0.3 * np.exp(rng.normal(0, 0.3, len(load)))


def saturating(load: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return np.sqrt(load) * np.exp(rng.normal(0, 0.1, len(load)))


@pytest.mark.parametrize("shape", [straight, level, saturating])
def test_without_a_knee_none_is_marked_and_the_page_says_so(shape: object) -> None:
    load, rng = week_of_load(3)
    curve = latency_curve(moments_of(shape(load, rng), load), E2E.threshold_seconds)  # type: ignore[operator]
    assert isinstance(curve, Curve)
    assert curve.knee is None
    assert "no knee" in curve_words(curve, E2E)
    assert "no" in curve.no_knee


def test_too_few_moments_or_a_load_that_hardly_moves_give_a_reason_in_place_of_a_curve() -> None:
    load, rng = week_of_load(1)
    few = moments_of(hinged(load, rng), load).head(trends.LEAST_MOMENTS - 1)
    assert "Choose a longer range" in str(latency_curve(few, 0.8))
    steady = moments_of(hinged(load, rng), np.full(len(load), 3.0) + rng.normal(0, 0.1, len(load)))
    assert "Load hardly moved" in str(latency_curve(steady, 0.8))


def test_loads_that_repeat_and_latencies_that_are_all_equal_are_no_trouble() -> None:
    load = np.repeat([1.0, 2.0, 5.0], 40)
    curve = latency_curve(moments_of(np.full(120, 0.5), load), 0.8)
    assert isinstance(curve, Curve)
    assert np.isfinite(curve.latency).all()
    assert curve.limit is None


@pytest.fixture(scope="module")
def view(end: float) -> View:
    return trends.trend_view(View(synthetic.MODEL, end - 3600, end, 15.0))


def test_a_short_range_is_widened_to_a_day_and_a_long_one_is_kept(view: View, end: float) -> None:
    assert (view.start, view.end) == (end - 86400, end)
    week = View(synthetic.MODEL, end - 7 * 86400, end, 600.0)
    assert trends.trend_view(week) == week


def test_moments_pair_load_and_latency_of_the_same_five_minutes(
    source: EmbeddedStore, rows: dict[str, pd.DataFrame], view: View
) -> None:
    points = trends.moments(source, view, TTFT)
    load, latency = (
        {t.timestamp(): v for t, v in zip(rows[s.name]["time"], rows[s.name]["value"], strict=True)}
        for s in (queries.REQUESTS, queries.quantile_signal(TTFT, 0.99))
    )
    assert len(points) == 3 * 12 + 1
    for time, x, y in points.itertuples(index=False):
        assert (x, y) == (pytest.approx(load[time.timestamp()]), pytest.approx(latency[time.timestamp()]))


def test_efficiency_is_tokens_over_the_share_of_time_in_forward_passes(
    source: EmbeddedStore, rows: dict[str, pd.DataFrame], view: View, end: float
) -> None:
    tokens, forward, busy = 0.0, 0.0, 0.0
    for row in rows[trends.STEP_TOKENS.name].itertuples(index=False):
        tokens += row.value if row.time.timestamp() == end else 0.0
    for row in rows[queries.STEP_TIME.name].itertuples(index=False):
        if row.time.timestamp() == end:
            forward += row.value if row.component in ("forward_prefill", "forward_decode") else 0.0
            busy += row.value if row.component != "idle" else 0.0
    assert trends.tokens_per_forward_second(source, view)["value"].iloc[-1] == pytest.approx(tokens / forward)
    assert trends.busy_in_the_model(source, view)["value"].iloc[-1] == pytest.approx(forward / busy)


def test_the_week_before_is_compared_by_medians_of_the_moments_that_both_have_and_its_absence_is_said() -> None:
    times = pd.date_range("2026-01-01", periods=4, freq="10min", tz="UTC")
    now = pd.DataFrame({"time": times, "value": [1.0, 5.0, 2.0, 900.0]})
    then = pd.DataFrame({"time": times[:3], "value": [4.0, 1.0, 1.0]})
    told = week_words(now, then, queries.REQUESTS)
    assert f"<b>{median([1.0, 5.0, 2.0, 900.0]):.2f} req/s</b>" in told
    assert "▲ 2.0 times against 1.00 req/s a week before (2.00 req/s over the 75% of the range that both have)" in told
    assert "no values a week before" in week_words(now, then.head(0), queries.REQUESTS)


def test_the_page_says_that_three_hours_are_too_few_and_draws_the_rest(browser: Browser, app_url: str) -> None:
    browser.look(1280, 800, "light")
    browser.open(f"{app_url}/trends", 7)
    text = browser.text()
    assert "A trend needs a day" in text
    assert len(re.findall(r"3\d moments of five minutes have both load and latency; 72 are needed.", text)) == 2
    assert text.count("no values a week before") == 4
    assert browser.count(".placeholder.failed, [data-testid=stException]") == 0
