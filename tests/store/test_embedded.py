"""The embedded store: absent stays absent, nothing foreign is touched, it stays bounded and fast."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from observability.errors import StoreError
from observability.store import embedded
from observability.store.embedded import EmbeddedStore, SignalBlock
from observability.store.forecasts import FRAME_COLUMNS, LEVELS, Breach, Forecast
from observability.store.open import open_source
from observability.store.recorder import Recorder, Scrape
from observability.store.source import LOOKBACK_SECONDS, SeriesSource

REQUESTS = "model:kvscope_requests_received:rate5m"
OUTCOMES = "model_outcome:kvscope_requests:rate5m"
ENGINE = "model_executor_clock_device_kv_dtype_version:kvscope_engine:sum"
NOW = 1_790_000_000.0


@pytest.fixture
def store(tmp_path: Path) -> EmbeddedStore:
    embedded.create(tmp_path / "store.sqlite")
    return EmbeddedStore(tmp_path / "store.sqlite", clock=lambda: NOW)


def rows(times: list[float], values: list[float], model: str = "m", **labels: str) -> pd.DataFrame:
    return pd.DataFrame({"time": pd.to_datetime(times, unit="s", utc=True), "model": model, **labels, "value": values})


def read(source: SeriesSource, start: float, end: float, step: float = 60, **where: str) -> list[tuple[float, float]]:
    frame = source.range(REQUESTS, start, end, step, where)
    return list(zip(frame["time"].map(lambda t: t.timestamp()), frame["value"], strict=True))


def test_a_frame_comes_back_with_its_types_labels_and_values(store: EmbeddedStore) -> None:
    written = pd.concat(
        [rows([NOW - 120, NOW - 60], [1.5, 2.5], outcome="stop"), rows([NOW - 60], [0.1], outcome="abort")],
        ignore_index=True,
    )
    store.append(OUTCOMES, written)
    back = store.range(OUTCOMES, NOW - 120, NOW - 60, 60).sort_values(["outcome", "time"], ignore_index=True)
    assert back.dtypes.astype(str).tolist() == ["datetime64[ns, UTC]", "str", "str", "float64"]
    assert back.to_numpy().tolist() == [
        [pd.Timestamp(NOW - 60, unit="s", tz="UTC"), "m", "abort", 0.1],
        [pd.Timestamp(NOW - 120, unit="s", tz="UTC"), "m", "stop", 1.5],
        [pd.Timestamp(NOW - 60, unit="s", tz="UTC"), "m", "stop", 2.5],
    ]
    assert store.range(OUTCOMES, NOW - 120, NOW, 60, {"outcome": "abort"})["value"].tolist() == [0.1, 0.1]
    assert store.range(OUTCOMES, NOW - 120, NOW, 60, {"outcome": "length"}).empty
    assert store.range(OUTCOMES, NOW - 120, NOW, 60, {"no_such_label": "x"}).empty


def test_a_gap_stays_a_gap_and_is_never_zero(store: EmbeddedStore) -> None:
    store.append(REQUESTS, rows([NOW - 3600, NOW - 3000, NOW - 600], [1.0, 2.0, 3.0]))
    # each value holds for five minutes (the lookback), then there is nothing
    assert read(store, NOW - 3600, NOW - 2400, 300) == [
        (NOW - 3600, 1.0), (NOW - 3300, 1.0), (NOW - 3000, 2.0), (NOW - 2700, 2.0),
    ]  # fmt: skip
    assert read(store, NOW - 299, NOW) == []


def test_a_series_found_absent_ends_at_once(store: EmbeddedStore) -> None:
    times = np.array([NOW - 120, NOW - 60])
    store.append_blocks(
        {REQUESTS: SignalBlock(times, [{"model": "a"}, {"model": "b"}], np.array([[1.0, 2.0], [np.nan, 3.0]]))}
    )
    assert read(store, NOW - 120, NOW, 60, model="a") == [(NOW - 120, 1.0)]
    assert read(store, NOW - 120, NOW, 60, model="b") == [(NOW - 120, 2.0), (NOW - 60, 3.0), (NOW, 3.0)]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_absent(store: EmbeddedStore, value: float) -> None:
    store.append(REQUESTS, rows([NOW - 60], [value]))
    assert read(store, NOW - 120, NOW) == []
    assert store.freshness() is None


def test_two_writers_of_one_moment_do_not_erase_each_other(store: EmbeddedStore) -> None:
    store.append(REQUESTS, rows([NOW - 60], [1.0], model="a"))
    store.append(REQUESTS, rows([NOW - 60], [2.0], model="b"))
    assert store.latest(REQUESTS)[["model", "value"]].to_numpy().tolist() == [["a", 1.0], ["b", 2.0]]
    assert store.models() == ["a", "b"]
    assert store.freshness() == 60.0


def test_latest_is_only_what_is_current(store: EmbeddedStore) -> None:
    store.append(REQUESTS, rows([NOW - 301], [1.0]))
    assert store.latest(REQUESTS).empty
    store.append(REQUESTS, rows([NOW - 299], [2.0]))
    assert store.latest(REQUESTS)["value"].tolist() == [2.0]


def test_simulated_spans_are_cut_to_what_was_asked(store: EmbeddedStore) -> None:
    store.mark_simulated(NOW - 1000, NOW - 500)
    assert store.simulated(NOW - 2000, NOW) == [(NOW - 1000, NOW - 500)]
    assert store.simulated(NOW - 700, NOW - 600) == [(NOW - 700, NOW - 600)]
    assert store.simulated(NOW - 400, NOW) == []


def forecast(origin: float, value: float, *, hindcast: bool = False, refused: str = "") -> Forecast:
    table = np.empty((0, len(LEVELS))) if refused else np.full((6, len(LEVELS)), value) + np.arange(len(LEVELS))
    return Forecast(REQUESTS, {"model": "m"}, "prophet", origin, table, ("simulated",), "note", refused, hindcast)


def test_forecasts_come_back_as_they_were_stored(store: EmbeddedStore) -> None:
    store.add_forecasts([forecast(NOW - 600, 1.0), forecast(NOW, 0.0, refused="too short")])
    (first, second) = store.stored_forecasts(REQUESTS, {"model": "m"}, "prophet")
    assert first.quantiles.tolist() == forecast(NOW - 600, 1.0).quantiles.tolist()
    assert (first.flags, first.note, first.labels, first.hindcast) == (("simulated",), "note", {"model": "m"}, False)
    assert (second.refused, second.quantiles.shape) == ("too short", (0, len(LEVELS)))
    frame = store.forecasts(REQUESTS, {"model": "m"}, "prophet")
    assert frame.columns.tolist() == [*FRAME_COLUMNS, "model"]
    assert frame["step"].tolist() == [1, 2, 3, 4, 5, 6, 0]
    assert (frame["time"] - frame["origin"]).dt.total_seconds().tolist() == [600, 1200, 1800, 2400, 3000, 3600, 0]
    assert store.forecasts(REQUESTS, {"model": "other"}, "prophet").empty
    assert store.forecasts(REQUESTS, {}, "last_value").empty


def test_a_forecast_made_in_time_is_not_replaced_by_a_hindcast(store: EmbeddedStore) -> None:
    store.add_forecasts([forecast(NOW, 1.0, hindcast=True)])
    store.add_forecasts([forecast(NOW, 2.0)])
    store.add_forecasts([forecast(NOW, 3.0, hindcast=True)])
    (kept,) = store.stored_forecasts(REQUESTS, {}, "prophet")
    assert (kept.hindcast, kept.quantiles[0, 0]) == (False, 2.0)


# -- bad input --------------------------------------------------------------------------------------------------------


def test_a_missing_file_is_not_made_by_reading(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="There is no store at") as error:
        open_source(tmp_path / "none.sqlite")
    assert "kvscope history" in error.value.next_step
    assert not list(tmp_path.iterdir())


def foreign_files(folder: Path) -> dict[str, Path]:
    files = {name: folder / name for name in ("text", "empty", "sqlite", "truncated", "newer", "folder")}
    files["text"].write_text("time,value\n1,2\n" * 1000)
    files["empty"].touch()
    with sqlite3.connect(files["sqlite"]) as db:
        db.execute("CREATE TABLE points (a)")
    db.close()
    embedded.create(files["truncated"]).append(REQUESTS, rows([NOW + i for i in range(2000)], [1.0] * 2000))
    os.truncate(files["truncated"], 20_000)
    embedded.create(files["newer"])
    with sqlite3.connect(files["newer"]) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    files["folder"].mkdir()
    return files


@pytest.mark.parametrize("kind", ["text", "empty", "sqlite", "truncated", "newer", "folder"])
def test_a_file_that_is_not_ours_or_damaged_is_refused_and_left_as_it_is(tmp_path: Path, kind: str) -> None:
    path = foreign_files(tmp_path)[kind]
    before = path.read_bytes() if path.is_file() else b""
    with pytest.raises(StoreError) as error:
        embedded.create(path).range(REQUESTS, NOW, NOW + 2000, 1)
    assert str(path) in error.value.reason
    assert error.value.next_step
    with pytest.raises(StoreError):
        embedded.create(path).append(REQUESTS, rows([NOW], [1.0]))
    assert (path.read_bytes() if path.is_file() else b"") == before


def test_a_page_that_was_overwritten_is_an_error_and_no_crash(tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    store = embedded.create(path)
    store.append(REQUESTS, rows([NOW + i for i in range(20_000)], [1.0] * 20_000))
    with path.open("r+b") as file:
        for page in range(2, path.stat().st_size // 4096, 2):
            file.seek(page * 4096)
            file.write(os.urandom(4096))
    with pytest.raises(StoreError, match=r"store\.sqlite"):
        store.range(REQUESTS, NOW, NOW + 20_000, 1)


def test_a_file_in_use_by_another_program_for_long_is_an_error_with_a_next_step(
    store: EmbeddedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "_BUSY_SECONDS", 0.2)
    other = sqlite3.connect(store.path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    try:
        with pytest.raises(StoreError, match="locked"):
            store.append(REQUESTS, rows([NOW], [1.0]))
        assert read(store, NOW, NOW) == []  # readers do not wait for a writer
    finally:
        other.execute("ROLLBACK")
        other.close()


@pytest.mark.parametrize(
    ("signal", "start", "end", "step", "reason"),
    [
        ("no:such:signal", 0, 10, 1, "is not a signal"),
        (REQUESTS, 10, 0, 1, "Cannot read"),
        (REQUESTS, 0, 10, 0, "Cannot read"),
        (REQUESTS, 0, float("inf"), 1, "Cannot read"),
        (REQUESTS, 0, 1e9, 1, "points a series"),
    ],
)
def test_absurd_reads_are_refused(
    store: EmbeddedStore, signal: str, start: float, end: float, step: float, reason: str
) -> None:
    with pytest.raises(StoreError, match=reason):
        store.range(signal, start, end, step)


def test_rows_without_the_labels_of_the_signal_are_refused(store: EmbeddedStore) -> None:
    with pytest.raises(StoreError, match="lack the columns outcome"):
        store.append(OUTCOMES, rows([NOW], [1.0]))


# -- many at once, for long ---------------------------------------------------------------------------------------------


def test_readers_and_writers_of_several_processes_do_not_disturb_each_other(store: EmbeddedStore) -> None:
    code = (
        "import sys, pandas as pd\nfrom observability.store.embedded import EmbeddedStore\n"
        "store = EmbeddedStore(sys.argv[1])\n"
        "for i in range(40):\n"
        "    store.append(sys.argv[2], pd.DataFrame({'time': pd.to_datetime([float(sys.argv[4]) + i], unit='s', utc=True),"
        " 'model': sys.argv[3], 'value': [float(i)]}))\n"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", code, str(store.path), REQUESTS, model, str(NOW)])
        for model in ("a", "b")
    ]
    failures: list[BaseException] = []

    def look() -> None:
        try:
            while any(writer.poll() is None for writer in writers):
                store.range(REQUESTS, NOW, NOW + 40, 1)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=look)
    thread.start()
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0]
    thread.join()
    assert not failures
    for model in ("a", "b"):
        assert read(store, NOW, NOW + 39, 1, model=model) == [(NOW + i, float(i)) for i in range(40)]


def test_only_one_recorder_at_a_time(store: EmbeddedStore) -> None:
    with store.recording(), pytest.raises(StoreError, match="Another recorder"), EmbeddedStore(store.path).recording():
        pass
    with EmbeddedStore(store.path).recording():
        pass


def test_old_points_are_thinned_then_deleted(store: EmbeddedStore) -> None:
    day = 86400.0
    for age in (20 * day, 3 * day, day):
        times = (NOW // 60 * 60) - age + 15 * np.arange(40)
        store.append(REQUESTS, rows(times.tolist(), list(range(40))))
    store.add_forecasts([forecast(NOW - 20 * day, 1.0), forecast(NOW - day, 1.0)])
    store.mark_simulated(NOW - 20 * day, NOW - 19 * day)
    store.prune()
    start = NOW // 60 * 60
    assert read(store, start - 20 * day, start - 20 * day + 600, 15) == []
    thinned = read(store, start - 3 * day, start - 3 * day + 540, 60)
    assert [value for _, value in thinned] == [0.0, 4.0, 8.0, 12.0, 16.0, 20.0, 24.0, 28.0, 32.0, 36.0]
    with sqlite3.connect(store.path) as db:
        assert (
            db.execute("SELECT count(*) FROM points").fetchone()[0] == 10 + 1 + 40
        )  # 1: after which there is none for days
    db.close()
    assert [f.origin for f in store.stored_forecasts(REQUESTS, {}, "prophet")] == [NOW - day]
    assert store.simulated(0, NOW) == []


def test_outages_stay_outages_however_old_they_become(store: EmbeddedStore) -> None:
    """Four minutes of failed scrapes, and an engine that comes back with another setting, all of it three days ago."""
    start, old = NOW // 60 * 60 - 3 * 86400, ("kvscope_engine_info", (("model", "m"), ("executor", "torch")))
    new = ("kvscope_engine_info", (("model", "m"), ("executor", "calibrated")))
    recorder = Recorder(store)
    for i in range(60):
        seen = Scrape([old if i < 22 else new], np.ones(1))
        recorder.step(start + 15 * i, None if 22 <= i < 38 else seen)
    for _ in range(2):  # a second time changes nothing
        store.prune()
        for executor, times in (("torch", range(22)), ("calibrated", range(38, 60))):
            frame = store.range(ENGINE, start, start + 15 * 59, 15, {"executor": executor})
            assert frame["time"].map(lambda t: t.timestamp()).tolist() == [start + 15 * i for i in times]
    with sqlite3.connect(store.path) as db:
        kept = db.execute(
            "SELECT (time - ?) / 1000 FROM points JOIN signals ON id = signal WHERE name = ?", (1000 * start, ENGINE)
        )
        minutes = [0, 60, 120, 180, 240, 300, 600, 660, 720, 780, 840]
        assert sorted(at for (at,) in kept) == sorted([*minutes, 22 * 15, 38 * 15, 59 * 15]), "and end, begin, end"
    db.close()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_thinning_neither_makes_nor_loses_a_moment_of_any_series(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Rows at any distance, series that come and go alone or together, also ones that older rows do not know yet."""
    store = EmbeddedStore(embedded.create(tmp_path_factory.mktemp("thin") / "s.sqlite").path, clock=lambda: NOW)
    steps = data.draw(st.lists(st.sampled_from([5, 15, 15, 15, 40, 60, 61, 200, 400]), min_size=5, max_size=80))
    start = NOW // 60 * 60 - 3 * 86400
    times = start + np.cumsum(steps)
    values = np.arange(3.0 * len(times)).reshape(-1, 3)
    for column in range(3):
        absent = data.draw(st.lists(st.tuples(st.integers(0, len(times)), st.integers(0, 20)), max_size=3))
        for first, count in absent:
            values[first : first + count, column] = np.nan
    known = data.draw(st.integers(0, len(times)))  # rows before the third series was first seen
    labels = [{"model": "m", "outcome": name} for name in "abc"]
    store.append_blocks({OUTCOMES: SignalBlock(times[:known], labels[:2], values[:known, :2])})
    store.append_blocks({OUTCOMES: SignalBlock(times[known:], labels, values[known:])})

    def whole() -> pd.DataFrame:
        return store.range(OUTCOMES, start, times[-1] + 400, 5)

    before = whole()
    store.prune()
    after = whole()
    assert after[["time", "outcome"]].equals(before[["time", "outcome"]])
    assert set(after["value"]) <= set(before["value"])
    column = after["value"] % 3
    assert (column == after["outcome"].map({"a": 0.0, "b": 1.0, "c": 2.0})).all()
    assert (before["value"] - after["value"]).between(0, 3 * 12).all(), "a value of the same minute"


def test_a_store_above_its_size_loses_its_oldest_part_and_gives_the_room_back(store: EmbeddedStore) -> None:
    times = NOW - 100_000 + np.arange(0, 100_000, 5.0)
    labels = [{"model": "m", "outcome": f"o{i}"} for i in range(20)]
    store.append_blocks({OUTCOMES: SignalBlock(times, labels, np.ones((len(times), 20)))})
    before = store.path.stat().st_size
    assert before > 3_000_000
    store.prune(max_bytes=1_500_000)
    assert store.path.stat().st_size < 1_700_000
    extent = store.extent()
    assert extent is not None
    assert extent[1] == times[-1]
    assert extent[0] > times[0]


def test_650_000_points_are_written_in_under_ten_seconds_and_read_in_well_under_one(store: EmbeddedStore) -> None:
    times = NOW - 4320 * 60 + 60 * np.arange(4320.0)
    labels = [{"model": "m", "outcome": f"o{i}"} for i in range(151)]
    values = np.random.default_rng(0).random((4320, 151))
    began = time.process_time()
    store.append_blocks({OUTCOMES: SignalBlock(times, labels, values)})
    assert time.process_time() - began < 5.0
    began = time.process_time()
    frame = store.range(OUTCOMES, times[0], times[-1], 600, {"outcome": "o7"})
    assert time.process_time() - began < 0.5
    assert frame["value"].tolist() == values[::10, 7].tolist()


def test_a_store_of_version_1_keeps_its_forecasts_and_gains_the_new_columns(store: EmbeddedStore) -> None:
    store.add_forecasts([forecast(NOW - 600, 1.0)])
    with sqlite3.connect(store.path) as db:
        db.execute("ALTER TABLE forecasts DROP COLUMN stretch")
        db.execute("ALTER TABLE forecasts DROP COLUMN breaches")
        db.execute("PRAGMA user_version = 1")
    db.close()
    (kept,) = EmbeddedStore(store.path).stored_forecasts(REQUESTS, {}, "prophet")
    assert kept.quantiles.tolist() == forecast(NOW - 600, 1.0).quantiles.tolist()
    assert (kept.stretch, kept.breaches) == (1.0, ())
    limit = Breach("ttft", 0.8, (0.1,) * 6, (0.0, 0.1, 0.2, 0.5, 0.5, 0.6))
    store.add_forecasts([replace(forecast(NOW, 1.0), stretch=1.25, breaches=(limit,))])
    added = store.stored_forecasts(REQUESTS, {}, "prophet")[-1]
    assert (added.stretch, added.breaches) == (1.25, (limit,))
    assert (limit.chance, limit.seconds_until(), limit.seconds_until(0.9)) == (0.6, 2400.0, None)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    at=st.lists(st.integers(0, 4000), min_size=1, max_size=40, unique=True),
    absent=st.sets(st.integers(0, 39)),
    start=st.integers(-400, 4200),
    step=st.integers(1, 700),
    count=st.integers(1, 60),
)
def test_a_read_gives_at_each_time_the_newest_row_within_the_lookback(
    tmp_path: Path, at: list[int], absent: set[int], start: int, step: int, count: int
) -> None:
    path = tmp_path / "any.sqlite"
    path.unlink(missing_ok=True)
    store = embedded.create(path)
    values = np.array([[np.nan if place in absent else 10.0 * place, float(place)] for place in range(len(at))])
    store.append_blocks({REQUESTS: SignalBlock(NOW + np.array(at), [{"model": "a"}, {"model": "b"}], values)})
    wanted = []
    for asked in range(start, start + step * count, step):
        before = [each for each in at if asked - LOOKBACK_SECONDS <= each <= asked]
        if before and at.index(max(before)) not in absent:
            wanted.append((NOW + asked, 10.0 * at.index(max(before))))
    assert read(store, NOW + start, NOW + start + step * (count - 1), step, model="a") == wanted
