"""One run makes every forecast that is due and stores it; the loop repeats that with each step of the grid, patiently."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from observability.errors import StoreError
from observability.forecast.backtest import SCORED_SECONDS, hindcast_origins, scores
from observability.forecast.calibration import Calibration, calibrate
from observability.forecast.models import forecast, forecast_many
from observability.forecast.series import GridSeries, read_series, window
from observability.signals import Signal
from observability.store.embedded import EmbeddedStore, create
from observability.store.forecasts import LEVELS, MODELS, Forecast, Score
from observability.store.open import PROMETHEUS, open_source
from observability.store.source import SeriesSource

#: The last readings of a step are recorded a moment after its end.
SETTLE_SECONDS = 5.0
RETRY_SECONDS = 2.0
#: A store that cannot be opened may be one that a recorder is just making.
CREATION_SECONDS = 5.0
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Run:
    """What one run made: the forecasts at `at` (Unix seconds), the scores of each series, and the seconds it took."""

    at: float
    forecasts: tuple[Forecast, ...]
    scored: tuple[tuple[GridSeries, tuple[Score, ...]], ...]
    hindcasts: int
    seconds: float

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
) -> Run:
    """Forecasts every series of `signals` by every model and stores each as soon as it is made; then, until the time `until`,
    makes up for the forecasts that are missing in the last day. Raises StoreError; also when nothing was recorded yet."""
    started, now = time.monotonic(), clock()
    found = [series for signal in signals for series in read_series(source, signal, now)]
    if not found:
        raise StoreError(
            f"{source.describe()}: nothing was recorded in the last 8 days of {', '.join(s.name for s in signals)}.",
            next_step="Record an engine with `kvscope record`, or make a history with `kvscope history`.",
        )
    made = list(_live(store, found, now))
    missing = _missing(store, found, now)
    done = 0
    for done, (series, origin, model) in enumerate(missing, start=1):
        if clock() >= until:
            done -= 1
            break
        seen, calibration = window(series, origin), _calibration(store, series, model, origin)
        store.add_forecasts([forecast(seen, model, calibration, hindcast=True)])
        progress(done, len(missing))
    scored = tuple((series, tuple(_scores(store, series, now))) for series in found)
    return Run(now, tuple(made), scored, done, time.monotonic() - started)


def run_forever(
    source_name: str,
    path: Path,
    signals: Sequence[Signal],
    every_seconds: float,
    *,
    report: Callable[[Run], None],
    say: Callable[[str], None],
    progress: Progress = lambda done, total: None,
) -> None:
    """Runs now and then at each multiple of `every_seconds`, until interrupted. Waits for a store that does not exist yet or
    holds nothing, and goes on after a failed run; each reason is said once. Raises StoreError when the store at `path` exists
    and is not ours."""
    said = ""
    opened = False
    refused_since = math.inf
    while True:
        due = time.time() // every_seconds * every_seconds + every_seconds + SETTLE_SECONDS
        try:
            if not _is_there(source_name):
                raise StoreError(f"{source_name} does not exist yet.")
            source, store = open_pair(source_name, path)
            opened = True
            report(run_once(source, store, signals, until=due, progress=progress))
            said = ""
        except StoreError as error:
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


def _live(store: EmbeddedStore, found: Iterable[GridSeries], now: float) -> Iterator[Forecast]:
    """The quick model of all series first: something is there to see while Prophet loads."""
    windows = [(series, window(series, now)) for series in found]
    for model in reversed(MODELS):
        pairs = ((seen, _calibration(store, series, model, now)) for series, seen in windows)
        for one in forecast_many(pairs, model):
            store.add_forecasts([one])
            yield one


def _missing(store: EmbeddedStore, found: Iterable[GridSeries], now: float) -> list[tuple[GridSeries, float, str]]:
    """Series, origin and model of the hindcasts that are still to be made, oldest origins first, since each is calibrated
    on those before."""
    missing = []
    for series in found:
        origins = hindcast_origins(series, now)
        if origins:
            for model in MODELS:
                stored = {f.origin for f in _stored(store, series, model, origins[-1])}
                missing += [(series, origin, model) for origin in origins if origin not in stored]
    return sorted(missing, key=lambda each: each[1])


def _calibration(store: EmbeddedStore, series: GridSeries, model: str, now: float) -> Calibration:
    return calibrate(series, _stored(store, series, model, 0.0), now)


def _scores(store: EmbeddedStore, series: GridSeries, now: float) -> list[Score]:
    return scores(series, now, {model: _stored(store, series, model, now - SCORED_SECONDS) for model in MODELS})


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
