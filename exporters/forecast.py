"""Forecasts as series: what the newest run of the worker (observability/forecast/worker.py) made, as families of the catalogue.

The worker hands over each run by `publish`; a scrape gives what was handed over last, and waits for nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from observability import catalog as c
from observability.catalog import Family
from observability.forecast.quality import Quality
from observability.forecast.series import FORECAST_SIGNALS
from observability.forecast.worker import Run
from observability.store.forecasts import DEFAULT_MODEL, HORIZON_SECONDS, LEVELS, STEP_SECONDS, Breach, Forecast
from observability.telemetry.snapshot import FamilySamples, Row

#: Signal -> its short name, the label `signal`. Those of one series a served model; others have no place in these families.
SHORT = {signal.name: name for name, signal in FORECAST_SIGNALS.items() if signal.by == ("model",)}
_QUANTILES = {f"{level:g}": LEVELS.index(level) for level in c.FORECAST_QUANTILES}

#: What a forecast says of its hour; not told once that is over.
_OF_THE_HOUR = (c.FORECAST_VALUE, c.FORECAST_BREACH, c.FORECAST_BREACH_TIME)

Found = Iterator[tuple[Family, tuple[str, ...], float]]


class ForecastMetrics:
    """Families of the forecasts by the model `forecaster`; error, skill and coverage of all models. `publish` and `failed` are called from
    the worker's thread, `snapshot` from any: each replaces what it changes by a new tuple or mapping. `clock`: Unix seconds."""

    def __init__(self, forecaster: str = DEFAULT_MODEL, clock: Callable[[], float] = time.time) -> None:
        self._forecaster, self._clock = forecaster, clock
        self._failures: Mapping[tuple[str, str], int] = {
            (signal, reason): 0 for signal in SHORT.values() for reason in c.FORECAST_FAILED
        }
        self._runs: Mapping[str, int] = dict.fromkeys(c.FORECAST_RUN_OUTCOMES, 0)
        self._counted = -math.inf
        self._found: tuple[tuple[Family, tuple[str, ...], float], ...] = ()

    def publish(self, run: Run) -> None:
        """What a run made. It may come twice, before and after the forecasts that it made up for; it counts once."""
        if run.at != self._counted:
            self._counted = run.at
            self._count("done")
            failures = dict(self._failures)
            for one in run.forecasts:
                if one.refused and one.signal in SHORT:
                    failures[SHORT[one.signal], failed_by(one)] += 1
            self._failures = failures
        self._found = tuple(found(run, self._forecaster))

    def failed(self) -> None:
        """A run that could not read its history. The forecasts before it stay, and grow old until their hour is over."""
        self._count("failed")

    def _count(self, outcome: str) -> None:
        self._runs = {**self._runs, outcome: self._runs[outcome] + 1}

    def snapshot(self) -> list[FamilySamples]:
        """Rows by family in catalogue order."""
        told, past = self._found, self._clock() - HORIZON_SECONDS
        over = {labels for family, labels, origin in told if family is c.FORECAST_ORIGIN and origin <= past}
        rows: dict[str, list[Row]] = {}
        for family, labels, value in told:
            if family in _OF_THE_HOUR and labels[:2] in over:
                continue
            rows.setdefault(family.name, []).append(Row("_info" if family.kind == "info" else "", labels, value))
        rows[c.FORECAST_FAILURES.name] = [Row("_total", labels, count) for labels, count in self._failures.items()]
        rows[c.FORECAST_RUNS.name] = [Row("_total", (outcome,), count) for outcome, count in self._runs.items()]
        return [FamilySamples(family, rows[family.name]) for family in c.FORECAST_FAMILIES if family.name in rows]


def failed_by(refusal: Forecast) -> str:
    """Why there is no forecast, one of catalog.FORECAST_FAILED."""
    for flag in ("stale", "short_history"):
        if flag in refusal.flags and "failed" not in refusal.refused:
            return flag
    return "model"


def found(run: Run, forecaster: str) -> Found:
    """Family, labels and value of everything that `run` tells."""
    yield c.FORECAST_LAST_RUN, (), run.at
    yield c.FORECAST_RUN_SECONDS, (), run.seconds
    for one in run.forecasts:
        if one.model == forecaster and one.signal in SHORT:
            yield from _forecast_rows(one)
    for series, each in run.lately:
        if series.signal.name in SHORT:
            yield from _quality_rows((series.labels["model"], SHORT[series.signal.name]), each)


def _forecast_rows(one: Forecast) -> Found:
    of = (one.labels["model"], SHORT[one.signal])
    status = "refused" if one.refused else "fallback" if "fallback" in one.flags else "own"
    history = "simulated" if "simulated" in one.flags else "real"
    yield c.FORECAST, (*of, one.model, status, history), 1
    if one.refused:
        return
    yield c.FORECAST_ORIGIN, of, one.origin
    for horizon, row in zip(c.FORECAST_HORIZONS, one.quantiles.tolist(), strict=True):
        for level, place in _QUANTILES.items():
            yield c.FORECAST_VALUE, (*of, horizon, level), row[place]
    for breach in one.breaches:
        yield c.FORECAST_LIMIT, (*of, breach.name), breach.limit
        for horizon, chance in zip(c.FORECAST_HORIZONS, breach.chances, strict=True):
            yield c.FORECAST_BREACH, (*of, breach.name, horizon), chance
        for share in c.FORECAST_TIME_QUANTILES:
            seconds = seconds_until(breach, share)
            if seconds is not None:
                yield c.FORECAST_BREACH_TIME, (*of, breach.name, f"{share:g}"), seconds


def seconds_until(breach: Breach, share: float) -> float | None:
    """Time within which the limit is passed with probability `share`, linear inside a step; None: more than an hour."""
    before = 0.0
    for step, chance in enumerate(breach.chances):
        if chance >= share:
            return STEP_SECONDS * (step + (share - before) / (chance - before))
        before = chance
    return None


def _quality_rows(of: tuple[str, str], each: Iterable[Quality]) -> Found:
    for lately in each:
        mine = (*of, lately.model)
        yield c.FORECAST_ERROR, mine, lately.mae
        if math.isfinite(lately.skill):
            yield c.FORECAST_SKILL, mine, lately.skill
        for band, share in lately.coverage.items():
            yield c.FORECAST_COVERAGE, (*mine, str(band)), share
        yield c.FORECAST_TARGETS, mine, lately.targets
