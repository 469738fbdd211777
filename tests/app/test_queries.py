"""What the panels read, against truth computed from the written rows by plain Python."""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from alerts import burn
from observability import objectives
from observability.app import absence, budget, kv, p99, page_now, queries, ui
from observability.app import happened as happening
from observability.app.happened import happened, incidents
from observability.app.page_now import in_words
from observability.app.view import RANGES, View, make_view, refresh_seconds
from observability.objectives import E2E, ITL, TTFT
from observability.signals import BY_NAME, WINDOW_SECONDS, Signal
from observability.store.embedded import SignalBlock, create
from observability.store.source import Fired, SeriesSource
from tests.app.conftest import STORED_SECONDS
from tests.app.synthetic import written


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
    later = View(view.model, view.start, view.end + STORED_SECONDS + 1200, 60.0)
    frame = queries.over_time(source, later, queries.KV_USAGE)
    assert queries.newest(frame) is not None
    assert queries.current(frame, later) is None
    assert queries.objective_now(source, later, ITL).p99 is None


def test_signals_of_every_panel_exist_and_have_values_in_the_synthetic_day(source: SeriesSource, view: View) -> None:
    for signal in (*vars(queries).values(), *vars(kv).values(), *vars(p99).values()):
        if isinstance(signal, Signal):
            assert signal is BY_NAME[signal.name]
            assert not queries.over_time(source, view, signal).empty, signal.name
    assert not p99.latency_quantiles(source, view, E2E).empty


def test_absence_is_explained_by_virtual_time_only_in_virtual_time() -> None:
    name = [queries.QUANT_ERROR.name]
    assert "virtual time" in absence.why_absent(name, simulated=True)
    assert "not quantized" in absence.why_absent(name, simulated=False)
    assert absence.why_absent(["model:kvscope_kv_usage:ratio"], simulated=False)


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
    told = absence.capabilities(absence.told(Served(), view), names)  # type: ignore[arg-type]
    assert told[names[0]].status == "no"
    assert names[1] not in told, "what is fed in full needs no reason"
    assert (
        absence.why_absent(names[:1], False, told)
        == "This engine cannot feed it: no metric of the KV cache is exported."
    )


def test_a_second_of_forward_passes_yields_the_tokens_over_the_seconds_in_them(
    source: SeriesSource, rows: dict[str, pd.DataFrame], view: View
) -> None:
    tokens: dict[object, float] = defaultdict(float)
    seconds: dict[object, float] = defaultdict(float)
    for row in written(rows, queries.STEP_TOKENS, view):
        tokens[row["time"]] += float(row["value"])  # type: ignore[arg-type]
    for row in written(rows, queries.STEP_TIME, view):
        if str(row["component"]).startswith("forward"):
            seconds[row["time"]] += float(row["value"])  # type: ignore[arg-type]
    frame = queries.tokens_per_forward_second(source, view)
    truth = [tokens[t.timestamp()] / seconds[t.timestamp()] for t in frame["time"]]
    assert frame["value"].tolist() == pytest.approx(truth)
    assert len(frame) == len(view.times)


def test_shares_of_time_of_three_engines_add_up_to_all_of_it(tmp_path: Path, end: float) -> None:
    store, view = create(tmp_path / "store.db"), View("m", end - 600, end, 60.0)
    times = pd.to_datetime(np.arange(end - 900, end + 1, 15.0), unit="s", utc=True)
    for component, engines in (("forward_decode", 2.7), ("idle", 0.3)):
        rows = pd.DataFrame({"time": times, "model": "m", "component": component, "value": engines})
        store.append(queries.STEP_TIME.name, rows)
    shares = queries.step_shares(store, view)
    assert shares.groupby("series")["value"].max().to_dict() == pytest.approx({"forward_decode": 0.9, "idle": 0.1})


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
