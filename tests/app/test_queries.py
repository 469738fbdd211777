"""What the panels read, against truth computed from the written rows by plain Python."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from alerts import burn
from observability import catalog, objectives
from observability.app import budget, findings, page_now, page_p99, queries, ui
from observability.app import happened as happening
from observability.app.happened import happened, incidents
from observability.app.page_now import in_words
from observability.app.view import RANGES, View, make_view, refresh_seconds
from observability.objectives import E2E, ITL, TTFT
from observability.signals import BY_NAME, WINDOW_SECONDS
from observability.store.embedded import SignalBlock, create
from observability.store.source import LOOKBACK_SECONDS, Fired, SeriesSource
from tests.app import synthetic


@pytest.fixture(scope="module")
def view(end: float) -> View:
    return View(synthetic.MODEL, end - 3600, end, 60.0)


def written(rows: dict[str, pd.DataFrame], signal: queries.Signal, view: View) -> list[dict[str, object]]:
    """The rows of `signal` inside the view, as dictionaries with a Unix `time`."""
    frame = rows[signal.name]
    seconds = (
        frame["time"].astype("int64") / 1e9
        if frame["time"].dtype == "int64"
        else frame["time"].map(pd.Timestamp.timestamp)
    )
    inside = frame[(seconds >= view.start) & (seconds <= view.end)].assign(time=seconds)
    return inside.to_dict("records")  # type: ignore[return-value]


def once(view: View) -> list[float]:
    """Moments five minutes apart from the end back: rates over five minutes there count each event once."""
    return [view.end - 300 * k for k in range(int(view.seconds / 300))]


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
    for signal, part in ((queries.QUERIED, 1.0), (queries.HITTABLE, 0.9), (queries.HIT, 0.4)):
        rate = counted(lambda t, part=part: part * counter(t), end, 1.3 * seconds / 3600, length_bucket="2K-8K")
        store.append(signal.name, rate)
    (row,) = queries.hits_by_length(store, make_view("m", seconds, end)).to_dict("records")
    truth = float(np.diff(counter(np.array([end - seconds, end])))[0])
    assert row["queried"] == pytest.approx(truth, rel=1e-6)
    assert row["hit"] == pytest.approx(0.4 * truth, rel=1e-6)
    assert row["hit_of_hittable"] == pytest.approx(0.4 / 0.9, rel=1e-6)


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
            put(queries.TAIL[q].name, np.where(told, seconds, np.nan), state=state, component="forward_decode")
    view = make_view("m", 3600, end)
    slow = queries.makeup_now(store, view, 0.99)
    assert slow is not None
    week = make_view("m", 7 * 86400, end)  # its points are ten minutes apart
    assert queries.kv_usage_of(store, week, slow) == pytest.approx(0.97)
    for made in (slow, None):
        usage = queries.kv_usage_of(store, view, made)
        assert usage == pytest.approx(0.97)
        finding = findings.explain(slow, None, usage)
        assert finding is not None
        assert "the KV pool is full" in finding.headline
    assert "Of the five minutes to" in ui.of_when(slow.time, view)
    assert ui.of_when(pd.Timestamp(end - 15, unit="s", tz="UTC"), view) == ""


def test_what_was_is_not_told_as_what_is(tmp_path: Path) -> None:
    """States of now are absent, with the time of the last, where the newest row is not of now."""
    end = 1.8e9
    store = create(tmp_path / "store.db")
    at = pd.to_datetime([end - 1500, end - 1200], unit="s", utc=True)
    for le in ("1.0", "+Inf"):
        store.append(queries.FREE_RUNS.name, pd.DataFrame({"time": at, "model": "m", "le": le, "value": 3.0}))
    view = make_view("m", 3600, end)
    assert queries.free_run_lengths(store, view).empty
    assert len(queries.free_run_lengths(store, make_view("m", 3600, end - 1200))) == 2
    last = end - 1200 + LOOKBACK_SECONDS  # as Prometheus, a source gives a value for so long
    told = ui.why_absent(ui.Context(store, view), [queries.FREE_RUNS])
    assert told == f"Nothing since {pd.Timestamp(last, unit='s'):%-d %b %H:%M}: what it was then is history."


def test_hits_are_sums_over_the_range_and_not_means_of_ratios(
    source: SeriesSource, rows: dict[str, pd.DataFrame], view: View
) -> None:
    table = queries.hits_by_length(source, view).set_index("length_bucket")
    sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for name, signal in (("queried", queries.QUERIED), ("hittable", queries.HITTABLE), ("hit", queries.HIT)):
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
    table = queries.free_run_lengths(source, view)
    newest = [r for r in written(rows, queries.FREE_RUNS, view) if r["time"] == view.end]
    by_bound = sorted((float(str(r["le"])), float(r["value"])) for r in newest)  # type: ignore[arg-type]
    assert table["runs"].sum() == by_bound[-1][1]
    assert table["runs"].tolist() == [
        by_bound[0][1],
        *(b[1] - a[1] for a, b in itertools.pairwise(by_bound)),
    ]
    assert table["length"].tolist()[:4] == ["1", "2", "3 to 4", "5 to 8"]
    assert table["length"].tolist()[-1] == "at least 16,385"


def test_the_make_up_sums_to_the_mean_latency_of_the_slowest(
    source: SeriesSource, rows: dict[str, pd.DataFrame], view: View
) -> None:
    makeup = queries.makeup_now(source, view, 0.99)
    assert makeup is not None
    newest = [r for r in written(rows, queries.TAIL[0.99], view) if r["time"] == view.end]
    assert makeup.seconds == pytest.approx(sum(float(r["value"]) for r in newest))  # type: ignore[arg-type]
    queued = sum(float(r["value"]) for r in newest if r["state"] == "queued")  # type: ignore[arg-type]
    assert makeup.matrix.loc["queued"].sum() == pytest.approx(queued)
    assert makeup.matrix.shape == (len(catalog.SHOWN_STATES), len(catalog.SHOWN_COMPONENTS))


def test_make_up_over_time_by_state_and_by_component_have_the_same_total(source: SeriesSource, view: View) -> None:
    totals = [
        queries.makeup_over_time(source, view, 0.99, by).groupby("time")["value"].sum() for by in ("state", "component")
    ]
    pd.testing.assert_series_equal(*totals)
    assert "swapped" not in set(queries.makeup_over_time(source, view, 0.99, "state")["series"])


def test_an_hour_is_compared_with_the_hour_before_by_medians(
    source: SeriesSource, rows: dict[str, pd.DataFrame], view: View
) -> None:
    changes = {change.title: change for change in queries.hour_against_hour(source, view)}
    wide = View(view.model, view.end - 7200, view.end, 60.0)
    for title, signal, direction in queries.COMPARED:
        points = [(float(r["time"]), float(r["value"])) for r in written(rows, signal, wide)]  # type: ignore[arg-type]
        before = statistics.median(v for t, v in points if t <= view.end - 3600)
        after = statistics.median(v for t, v in points if t > view.end - 3600)
        assert changes[title].before == pytest.approx(before)
        assert changes[title].after == pytest.approx(after)
        assert changes[title].worse == (None if direction == 0 or before == after else (after - before) * direction > 0)
    scores = [change.score for change in changes.values()]
    assert scores == sorted(scores, reverse=True)
    assert len(changes) == len(queries.COMPARED)


def test_the_objective_is_judged_by_the_share_over_the_threshold() -> None:
    def verdict(p99: float | None, over: float | None) -> str:
        return queries.ObjectiveNow(TTFT, p99, over).verdict

    assert verdict(0.3, 0.0) == "met"
    assert verdict(0.7, 0.009) == "near"
    assert verdict(0.79, 0.0101) == "missed"
    assert verdict(None, None) == "unknown"
    assert queries.ObjectiveNow(TTFT, 0.1, 0.0).allowed == pytest.approx(0.01)


def test_a_value_that_is_no_longer_current_is_not_shown_as_now(source: SeriesSource, view: View) -> None:
    later = View(view.model, view.start, view.end + 1200, 60.0)
    frame = queries.over_time(source, later, queries.KV_USAGE)
    assert queries.newest(frame) is not None
    assert queries.current(frame, later) is None
    assert queries.objective_now(source, later, ITL).p99 is None


def test_signals_of_every_panel_exist_and_have_values_in_the_synthetic_day(source: SeriesSource, view: View) -> None:
    for signal in vars(queries).values():
        if isinstance(signal, queries.Signal) and signal is not queries.TOLD:  # its engine is kvscope's own
            assert signal is BY_NAME[signal.name]
            assert not queries.over_time(source, view, signal).empty, signal.name
    assert not queries.latency_quantiles(source, view, E2E).empty


def test_absence_is_explained_by_virtual_time_only_in_virtual_time() -> None:
    name = [queries.QUANT_ERROR.name]
    assert "virtual time" in queries.why_absent(name, simulated=True)
    assert "not quantized" in queries.why_absent(name, simulated=False)
    assert queries.why_absent(["model:kvscope_kv_usage:ratio"], simulated=False)


def test_the_simulated_share_counts_only_what_is_inside_the_view(view: View) -> None:
    spans = [(view.start - 1000, view.start + 900), (view.end - 900, view.end + 5000)]
    assert queries.simulated_share(spans, view) == pytest.approx(0.5)
    assert queries.simulated_share([], view) == 0


@pytest.mark.parametrize("seconds", RANGES.values())
def test_viewers_of_one_moment_share_a_view_of_the_whole_range(seconds: int) -> None:
    one, other = make_view("m", seconds, 1_700_000_043.2), make_view("m", seconds, 1_700_000_044.9)
    assert one == other
    assert one.seconds == seconds
    assert 0 <= 1_700_000_043.2 - one.end < refresh_seconds(seconds) <= 60
    assert 50 < len(one.times) <= 1500
    assert (one.times[0].timestamp(), one.times[-1].timestamp()) == (one.start, one.end)
    if seconds <= 3 * 86400:
        assert one.step <= WINDOW_SECONDS, "a burst could fall between two points"


@pytest.mark.parametrize(
    ("before", "after", "unit", "text"),
    [(0.5, 0.45, "ratio", "▼ 5.0 points"), (1.0, 1.12, "seconds", "▲ 12 %"), (1.0, 4.2, "seconds", "▲ 4.2 times"),
     (0.0, 3.0, "requests", "▲ from 0"), (2.0, 2.0, "requests", "="), (2.0, 0.0, "requests", "▼ 100 %"),
     (1.0, 1.001, "seconds", "≈"), (0.5, 0.5001, "ratio", "≈")],
)  # fmt: skip
def test_changes_are_told_in_words(before: float, after: float, unit: str, text: str) -> None:
    assert in_words(queries.Change("x", unit, before, after, 2.0, None)) == text


def test_the_make_up_of_a_range_weighs_each_moment_by_its_requests(
    source: SeriesSource, rows: dict[str, pd.DataFrame], view: View
) -> None:
    makeup = queries.makeup_of_range(source, view, 0.9)
    assert makeup is not None
    weights = {
        r["time"]: float(r["value"]) for r in written(rows, queries.events_signal(E2E), view) if r["time"] in once(view)
    }  # type: ignore[arg-type]
    parts = [r for r in written(rows, queries.TAIL[0.9], view) if r["time"] in weights]
    truth = sum(float(r["value"]) * weights[r["time"]] for r in parts) / sum(weights.values())  # type: ignore[arg-type]
    assert makeup.seconds == pytest.approx(truth)


def test_lengths_add_up_to_the_latency_of_the_slowest(source: SeriesSource, view: View) -> None:
    makeup = queries.makeup_now(source, view, 0.99)
    assert makeup is not None
    assert queries.lengths_now(source, view, 0.99).sum() == pytest.approx(makeup.seconds)
    assert queries.length_shares_now(source, view, 0.99).sum() == pytest.approx(1.0)


def test_a_budget_counts_bad_events_against_allowed_ones(
    source: SeriesSource, rows: dict[str, pd.DataFrame], view: View
) -> None:
    found = budget.budget(source, view, TTFT)
    assert found is not None
    end = view.end // 300 * 300
    events, over = (
        {r["time"]: float(r["value"]) for r in rows[signal.name].assign(time=rows[signal.name]["time"].map(pd.Timestamp.timestamp)).to_dict("records")}
        for signal in (queries.events_signal(TTFT), queries.over_threshold_signal(TTFT))
    )  # fmt: skip

    def burn(seconds: float) -> float:
        times = [t for t in np.arange(end, end - seconds, -300.0) if t in events]
        return sum(events[t] * over[t] for t in times) / (0.01 * sum(events[t] for t in times))

    assert found.left == pytest.approx(1 - burn(3 * 3600 + 1))
    assert found.burn_1h == pytest.approx(burn(3600))
    assert 0.1 < found.days <= 3 / 24


def test_what_another_engine_cannot_feed_is_said_with_its_reason(view: View) -> None:
    class Served:
        def engines(self, model: str) -> list[str]:
            return ["llamacpp"]

    names = [queries.QUANT_ERROR.name, queries.RUNNING.name]
    told = queries.capabilities(queries.told(Served(), view), names)  # type: ignore[arg-type]
    assert told[names[0]].status == "no"
    assert names[1] not in told, "what is fed in full needs no reason"
    assert (
        queries.why_absent(names[:1], False, told)
        == "This engine cannot feed it: no metric of the KV cache is exported."
    )


def test_a_second_of_forward_passes_yields_the_tokens_over_the_seconds_in_them(
    source: SeriesSource, rows: dict[str, pd.DataFrame], view: View
) -> None:
    tokens: dict[object, float] = defaultdict(float)
    seconds: dict[object, float] = defaultdict(float)
    for row in written(rows, queries.STEP_TOKENS, view):
        tokens[row["time"]] += float(row["value"])  # type: ignore[arg-type]
    for row in written(rows, queries.STEP_SHARE, view):
        if str(row["component"]).startswith("forward"):
            seconds[row["time"]] += float(row["value"])  # type: ignore[arg-type]
    frame = queries.tokens_per_forward_second(source, view)
    truth = [tokens[t.timestamp()] / seconds[t.timestamp()] for t in frame["time"]]
    assert frame["value"].tolist() == pytest.approx(truth)
    assert len(frame) == len(view.times)


def test_a_new_version_is_a_deploy_at_its_first_moment(source: SeriesSource, view: View) -> None:
    wide = View(view.model, view.end - 7200, view.end, 60.0)
    (mark,) = [each for each in happened(source, wide) if each.kind == "deploy"]
    assert mark.text == "version 1.0 → 1.1"
    assert abs(mark.start - (view.end - 3600)) <= 60
    late = happened(source, View(view.model, view.end - 1800, view.end, 60.0))
    assert [each for each in late if each.kind == "deploy"] == []


def test_where_nothing_evaluates_alerts_an_objective_that_burns_is_an_incident_from_its_own_numbers(
    tmp_path: Path, end: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, end = create(tmp_path / "store.db"), end // 300 * 300
    minutes = np.arange(end - 6 * 3600, end + 1, 60.0)
    load = 1.0 + 0.5 * np.sin(minutes / 900)
    bad = np.where((minutes > end - 7200) & (minutes <= end - 4800), 0.6, 0.001)
    bad[(minutes > end - 14400) & (minutes <= end - 14100)] = 0.3  # five bad minutes of an hour: no page
    for signal, values in ((queries.events_signal(E2E), load), (queries.over_threshold_signal(E2E), bad)):
        frame = pd.DataFrame({"time": pd.to_datetime(minutes, unit="s", utc=True), "model": "m", "value": values})
        store.append(signal.name, frame)

    def burning(t: float) -> bool:
        def share(window: str) -> float:
            seconds = pd.Timedelta(window).total_seconds()
            kept = [i for i, at in enumerate(minutes) if at % 300 == 0 and t - seconds < at <= t]
            return sum(load[i] * bad[i] for i in kept) / sum(load[i] for i in kept)

        pages = [pair for pair in burn.PAIRS if pair.severity == "critical"]
        return any(min(share(p.long), share(p.short)) > p.burn * (1 - E2E.target) for p in pages)

    truth = [t for t in np.arange(end - 5 * 3600, end + 1, 300.0) if burning(t)]
    assert 3 <= len(truth) <= 20
    found = happened(store, View("m", end - 5 * 3600, end, 60.0))
    assert {each.text for each in found} == {"Request duration burns its budget"}
    assert [(each.kind, each.start, each.end) for each in found] == [("incident", truth[0] - 300, truth[-1])]
    # a model with an objective of its own has none of the general one; a few slow requests of a night are none
    own = dataclasses.replace(E2E, model="m", target=0.9)
    monkeypatch.setattr(objectives, "OBJECTIVES", (*objectives.OBJECTIVES, own))
    assert happened(store, View("m", end - 5 * 3600, end, 60.0)) == ()
    monkeypatch.undo()
    monkeypatch.setattr(happening, "OBJECTIVES", (dataclasses.replace(E2E, min_events=100_000),))
    assert happened(store, View("m", end - 5 * 3600, end, 60.0)) == ()


def test_alerts_that_overlap_are_one_incident_and_infos_are_none() -> None:
    fired = [Fired("KvscopeTTFTBudgetBurn", "critical", 10, 20, {}), Fired("KvscopeTTFTBudgetBurn", "warning", 15, 40, {}),
             Fired("KvscopeTTFTBudgetBurn", "warning", 90, 95, {}), Fired("KvscopeQueueGrowing", "info", 0, 99, {})]  # fmt: skip
    assert [(m.start, m.end, m.text) for m in incidents(fired)] == [
        (10, 40, "TTFTBudgetBurn"),
        (90, 95, "TTFTBudgetBurn"),
    ]


@pytest.mark.parametrize(("rate", "says"), [(0.0, "no requests"), (None, "not measured")])
def test_an_objective_says_whether_nobody_asked_or_nothing_is_known(
    tmp_path: Path, rate: float | None, says: str
) -> None:
    """Requests until 25 minutes ago; since then the engine tells that there are none, or does not tell."""
    end = 1.8e9
    store, times = create(tmp_path / "store.db"), np.arange(end - 3600, end + 1, 15.0)
    asked = times <= end - 1500

    def put(name: str, values: np.ndarray, **labels: str) -> None:
        store.append_blocks({name: SignalBlock(times, [{"model": "m", **labels}], values[:, None])})

    later = np.nan if rate is None else rate
    put(queries.quantile_signal(TTFT, 0.99).name, np.where(asked, 0.3, np.nan))
    put(queries.over_threshold_signal(TTFT).name, np.where(asked, 0.0, np.nan))
    put(queries.events_signal(TTFT).name, np.where(asked, 2.0, later))
    put(queries.OUTCOMES.name, np.where(asked, 2.0, later), outcome="stop")
    view = make_view("m", 3600, end)
    context = ui.Context(store, view)
    if rate == 0:  # P99 counts classes that the objective leaves out
        classes = dataclasses.replace(queries.objective_now(store, view, TTFT), p99=3.0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(queries, "objective_now", lambda *_: classes)
            words = page_now.panels("m")[0].words
            assert words is not None
            assert ">no requests</em>" in words(context, pd.DataFrame())
    for panel in page_now.panels("m"):
        data = panel.read(store, view)
        if len(data):
            assert panel.words is not None
            assert f">{says}</em>" in panel.words(context, data), panel.key
    assert ">✓ met</em>" in page_now.panels("m")[0].words(ui.Context(store, make_view("m", 900, end - 1500)), data)  # type: ignore[misc]


def test_a_day_to_compare_with_stands_alone_where_the_range_has_no_request(tmp_path: Path) -> None:
    """Yesterday's bars are drawn, and nothing is said of requests of now."""
    end = 1.8e9
    store = create(tmp_path / "store.db")
    at = pd.to_datetime(end - 86400 - np.arange(0, 900, 15.0), unit="s", utc=True)
    for q in (0.99, 0.5):
        for name, labels in (
            (queries.TAIL[q].name, {"state": "queued", "component": "forward_decode"}),
            (queries.TAIL_LENGTHS[q].name, {"length_bucket": "0-2K"}),
            (queries.TAIL_LENGTH_SHARES[q].name, {"length_bucket": "0-2K"}),
        ):
            store.append(name, pd.DataFrame({"time": at, "model": "m", **labels, "value": 2.0}))
    context = ui.Context(store, make_view("m", 900, end), versus="yesterday")
    lengths = page_p99._lengths(context, 0.99)
    bars = page_p99._makeup(context, 0.99, "state", False, 100)
    for content in (lengths, bars):
        assert content.figure is not None
        assert content.below == ""
        assert set(content.data["requests"]) == {"slowest 1 %, yesterday"}  # type: ignore[index]
