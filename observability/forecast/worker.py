"""One run makes every forecast that is due and stores it; the loop repeats that with each step of the grid, patiently.

A series on which anything fails is refused with the reason and stops no other.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from observability.errors import ServiceError, StoreError
from observability.forecast.backtest import SCORED_SECONDS, hindcast_origins, scores
from observability.forecast.calibration import UNCALIBRATED, Calibration, calibrate
from observability.forecast.models import forecast_many
from observability.forecast.pooled import NOT_TRAINED, Network, Trained, train
from observability.forecast.quality import Quality, quality
from observability.forecast.series import READ_SECONDS, GridSeries, SeriesReader, Window, grid_step, read_series, window
from observability.forecast.spread import Pool, in_this_process, spread
from observability.signals import Signal
from observability.store.embedded import EmbeddedStore, create
from observability.store.forecasts import LEVELS, MODEL_TITLES, MODELS, POOLED, Forecast, Score
from observability.store.open import PROMETHEUS, open_source
from observability.store.source import SeriesSource

#: The last readings of a step are recorded a moment after its end.
SETTLE_SECONDS = 5.0
RETRY_SECONDS = 2.0
#: A store that cannot be opened may be one that a recorder is just making.
CREATION_SECONDS = 5.0
#: Forecasts are written together that were made within this many seconds.
WRITE_SECONDS = 1.0
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Run:
    """What one run made: the forecasts at `at` (Unix seconds), the scores of each series, how good those of its last day were, and
    the seconds it took. `unmeasured`: series whose past forecasts could not be made up for, and why."""

    at: float
    forecasts: tuple[Forecast, ...]
    scored: tuple[tuple[GridSeries, tuple[Score, ...]], ...]
    hindcasts: int
    seconds: float
    lately: tuple[tuple[GridSeries, tuple[Quality, ...]], ...] = ()
    unmeasured: tuple[tuple[GridSeries, str], ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Plain data for --json; times in UTC, what is unknown as null."""
        return {
            "at": _iso(self.at),
            "forecasts": [_forecast_json(each) for each in self.forecasts],
            "scores": [
                {
                    "signal": series.signal.name, "labels": dict(series.labels), "model": score.model,
                    "mean_absolute_error": _known(score.mae), "coverage_95": _known(score.coverage),
                    "targets": score.targets, "origins": score.origins,
                }
                for series, each in self.scored
                for score in each
            ],
            "hindcasts": self.hindcasts,
            "unmeasured": [
                {"signal": series.signal.name, "labels": dict(series.labels), "reason": reason}
                for series, reason in self.unmeasured
            ],
            "seconds": round(self.seconds, 3),
        }  # fmt: skip


def run_once(
    source: SeriesSource,
    store: EmbeddedStore,
    signals: Sequence[Signal],
    *,
    clock: Callable[[], float] = time.time,
    until: float = math.inf,
    progress: Progress = lambda done, total: None,
    publish: Callable[[Run], None] = lambda run: None,
    pool: Executor | None = None,
    trained: Trained | None = None,
    reader: SeriesReader | None = None,
) -> Run:
    """Forecasts every series of `signals` by every model, the pooled one where there is something `trained` (or the reason why not, which
    its forecasts then say), and stores each as soon as it is made, on `pool` where there is one, and
    gives that to `publish`; then, until the time `until`, makes up for the forecasts that are missing in the last day. Raises
    StoreError; also when nothing was recorded yet."""
    started, now = time.monotonic(), clock()
    reader = reader or SeriesReader()
    found = [series for signal in signals for series in reader.read(source, signal, now)]
    if not found:
        raise StoreError(
            f"{source.describe()}: nothing was recorded in the last 8 days of {', '.join(s.name for s in signals)}.",
            next_step="Record an engine with `kvscope record`, or make a history with `kvscope history`.",
        )
    made = tuple(_live(store, found, now, pool, trained))

    def result(hindcasts: int) -> Run:
        scored, lately = [], []
        for series in found:
            stored = {model: _stored(store, series, model, now - SCORED_SECONDS) for model in MODEL_TITLES}
            stored = {model: each for model, each in stored.items() if each or model in MODELS}
            scored.append((series, tuple(scores(series, now, stored))))
            lately.append((series, quality(series, now, stored)))
        seconds = time.monotonic() - started
        return Run(now, made, tuple(scored), hindcasts, seconds, tuple(lately), tuple(unmeasured))

    missing, unmeasured = _missing(store, found, now)
    if missing:
        publish(result(0))
    done = 0
    for done, (series, origin, model) in enumerate(missing, start=1):
        if clock() >= until:
            done -= 1
            break
        work = _work(store, series, model, origin)
        store.add_forecasts(forecast_many([work], model, hindcast=True))
        progress(done, len(missing))
    run = result(done)
    publish(run)
    return run


def train_once(source: SeriesSource, signals: Sequence[Signal], *, clock: Callable[[], float] = time.time) -> Network:
    """The pooled model of all series of `signals`, up to the last whole step. Raises StoreError, and ConfigError where there is too little."""
    now = clock()
    return train([series for signal in signals for series in read_series(source, signal, now)], grid_step(now))


def run_forever(
    source_name: str,
    path: Path,
    signals: Sequence[Signal],
    every_seconds: float,
    *,
    report: Callable[[Run], None],
    say: Callable[[str], None],
    progress: Progress = lambda done, total: None,
    publish: Callable[[Run], None] = lambda run: None,
    failed: Callable[[], None] = lambda: None,
    pool: Pool = in_this_process,
    trained: Callable[[], Trained | None] = lambda: None,
) -> None:
    """Runs now and then at each multiple of `every_seconds`, until interrupted. Waits for a store that does not exist yet or
    holds nothing, and goes on after a failed run; asks before each what is `trained`; `failed` is told of each, each reason is said once. Raises StoreError when the
    store at `path` exists and is not ours."""
    said = ""
    opened = False
    refused_since = math.inf
    reader, read_from = SeriesReader(), None
    while True:
        due = time.time() // every_seconds * every_seconds + every_seconds + SETTLE_SECONDS
        try:
            if not _is_there(source_name):
                raise StoreError(f"{source_name} does not exist yet.")
            source, store = open_pair(source_name, path)
            opened = True
            if (file := _identity(source_name)) != read_from:
                reader, read_from = SeriesReader(), file
            with pool() as executor:
                run = run_once(
                    source, store, signals, until=due, progress=progress, publish=publish, pool=executor, trained=trained(),
                    reader=reader,
                )  # fmt: skip
            report(run)
            said = ""
        except (StoreError, ServiceError) as error:
            failed()
            if not opened and _is_there(source_name):
                refused_since = min(refused_since, time.monotonic())
                if time.monotonic() - refused_since > CREATION_SECONDS:
                    raise
            if error.reason != said:
                said = error.reason
                say(f"Waiting: {said}")
            due = time.time() + RETRY_SECONDS
        time.sleep(max(0.0, due - time.time()))


def open_pair(source_name: str, path: Path) -> tuple[SeriesSource, EmbeddedStore]:
    """The source to read and the store for the forecasts. A store beside a Prometheus is made when there is none; the store
    of a recorder is not, since it would stay empty. Raises StoreError."""
    if source_name.startswith(PROMETHEUS):
        return open_source(source_name), create(path)
    return open_source(source_name), EmbeddedStore(path)


def _is_there(source_name: str) -> bool:
    return source_name.startswith(PROMETHEUS) or Path(source_name).exists()


def _identity(source_name: str) -> tuple[int, int] | None:
    """Of a file: one that was replaced is another."""
    if source_name.startswith(PROMETHEUS):
        return None
    found = os.stat(source_name)
    return found.st_dev, found.st_ino


def _live(
    store: EmbeddedStore, found: Sequence[GridSeries], now: float, pool: Executor | None, trained: Trained | None
) -> Iterator[Forecast]:
    """The quick models of all series first: something is there to see while Prophet loads."""
    models = MODELS if trained is None else (*MODELS, POOLED)
    for model in sorted(models, key=lambda name: name == "prophet"):
        unsaved: list[Forecast] = []
        saved = time.monotonic()
        for one in spread((_work(store, series, model, now) for series in found), model, pool, trained or NOT_TRAINED):
            unsaved.append(one)
            if time.monotonic() - saved > WRITE_SECONDS:
                store.add_forecasts(unsaved)
                unsaved, saved = [], time.monotonic()
            yield one
        store.add_forecasts(unsaved)


def _work(store: EmbeddedStore, series: GridSeries, model: str, now: float) -> tuple[Window, Calibration]:
    """What `model` is to see at `now`. A series that breaks on the way there is refused with the reason."""
    try:
        return window(series, now), _calibration(store, series, model, now)
    except StoreError:
        raise
    except Exception as error:  # on a series nobody thought of
        reason = f"its window failed: {type(error).__name__}: {error}"
        return Window(series.signal, series.labels, grid_step(now), np.empty(0), refused=reason), UNCALIBRATED


def _missing(
    store: EmbeddedStore, found: Iterable[GridSeries], now: float
) -> tuple[list[tuple[GridSeries, float, str]], list[tuple[GridSeries, str]]]:
    """Series, origin and model of the hindcasts that are still to be made, oldest origins first, since each is calibrated
    on those before; and the series that broke when their origins were looked for, with the reason."""
    missing, unmeasured = [], []
    for series in found:
        try:
            origins = hindcast_origins(series, now)
        except Exception as error:  # at an hour of a series nobody thought of; its newest window may be well
            unmeasured.append((series, f"an earlier window failed: {type(error).__name__}: {error}"))
            continue
        if origins:
            for model in MODELS:
                stored = {f.origin for f in _stored(store, series, model, origins[-1])}
                missing += [(series, origin, model) for origin in origins if origin not in stored]
    return sorted(missing, key=lambda each: each[1]), unmeasured


def _calibration(store: EmbeddedStore, series: GridSeries, model: str, now: float) -> Calibration:
    """On one forecast an hour, whose outcomes do not overlap, as far back as there are outcomes; the first says what was learned before."""
    stored = store.hourly_forecasts(series.signal.name, series.labels, model, now - READ_SECONDS)
    return calibrate(series, stored, now)


def _stored(store: EmbeddedStore, series: GridSeries, model: str, since: float) -> list[Forecast]:
    return store.stored_forecasts(series.signal.name, series.labels, model, since=since)


def _forecast_json(each: Forecast) -> dict[str, Any]:
    steps = [
        {"time": _iso(at), "quantiles": dict(zip(map(str, LEVELS), row, strict=True))}
        for at, row in zip(each.times.tolist(), each.quantiles.tolist(), strict=True)
    ]
    labels: Mapping[str, str] = dict(each.labels)
    return {
        "signal": each.signal, "labels": labels, "model": each.model, "origin": _iso(each.origin), "steps": steps,
        "flags": list(each.flags), "note": each.note, "refused": each.refused or None,
    }  # fmt: skip


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z")
