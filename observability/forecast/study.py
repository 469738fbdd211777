"""A back-test on one's own data: every forecast that could have been made in the past, by each model, against what came.

Origins come in order, and each forecast is calibrated on those before it alone, as the worker does it; so its numbers are what the
worker would have reached.
"""

from __future__ import annotations

import csv
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from observability.errors import StoreError
from observability.forecast.calibration import calibrate, outcomes
from observability.forecast.limits import Limit
from observability.forecast.models import forecast
from observability.forecast.quality import BASELINE
from observability.forecast.series import DAY_SECONDS, MIN_OBSERVED, GridSeries, on_grid, window, within_bounds
from observability.signals import Signal
from observability.store.forecasts import LEVELS, STEP_SECONDS, Forecast, beyond

#: Hours of history before the first origin; below a day nothing of a daily shape can be learned.
WARM_UP_SECONDS = DAY_SECONDS
MIN_ORIGINS = 12
_MIDDLE = LEVELS.index(0.5)
#: A limit to be crossed, where a signal has none: this quantile of what is known at the first origin.
_HIGH = 0.9


@dataclass(frozen=True)
class Row:
    """One model over all origins. `mae`, in the signal's unit, and `crps` of the median and of all quantiles; the ratios are to the last value
    with its own errors. `cover_*`: share of what came inside the central band. `width_ratio`: mean width of the 95 % band over that of the
    last value. `brier_skill`: of the chance of passing `limit`, against how often that happened; NaN where it never or always did."""

    model: str
    mae: float
    mae_ratio: float
    crps_ratio: float
    cover_50: float
    cover_80: float
    cover_95: float
    width_ratio: float
    brier_skill: float
    milliseconds: float
    origins: int


@dataclass(frozen=True)
class Study:
    """`made`: model -> forecasts by origin, all models at the same origins; `came` [origins, HORIZON_STEPS], NaN where absent."""

    series: GridSeries
    limit: Limit
    made: dict[str, list[Forecast]]
    came: np.ndarray
    rows: tuple[Row, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain data; what is unknown as null, times in UTC."""
        first, last = (next(iter(self.made.values()))[i].origin for i in (0, -1))
        return {
            "signal": self.series.signal.name, "labels": dict(self.series.labels), "unit": self.series.signal.unit,
            "first_origin": _iso(first), "last_origin": _iso(last), "limit": self.limit.value,
            "models": [
                {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in asdict(row).items()}
                for row in self.rows
            ],
        }  # fmt: skip


def read_csv(path: Path, signal: Signal) -> GridSeries:
    """Columns `ds` (ISO time, UTC unless it says otherwise, or Unix seconds) and `y` (empty: not observed), any spacing of ten minutes or
    less. Raises StoreError."""
    times, values = [], []
    try:
        with path.open(newline="") as file:
            for number, row in enumerate(csv.DictReader(file), start=2):
                try:
                    times.append(_seconds(row["ds"]))
                    values.append(float(row["y"] or "nan"))
                except (KeyError, TypeError, ValueError) as error:
                    raise StoreError(
                        f"{path}, line {number}: {error!r} where a time `ds` and a number `y` are wanted.",
                        next_step="Give a CSV file with the columns ds,y; an empty y is a value that was not observed.",
                    ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(f"{path} cannot be read: {error}.", next_step="Check the path.") from error
    if not times:
        raise StoreError(f"{path} has no rows.", next_step="Give a CSV file with the columns ds,y.")
    at, y = np.array(times), within_bounds(np.array(values), signal)
    start = at.min() // STEP_SECONDS * STEP_SECONDS - STEP_SECONDS
    end = math.ceil(at.max() / STEP_SECONDS) * STEP_SECONDS
    spacing = float(np.median(np.diff(np.unique(at)))) if len(at) > 1 else STEP_SECONDS
    if spacing > STEP_SECONDS:
        raise StoreError(
            f"{path} has a value each {spacing / 60:.0f} min; forecasts are made on a 10-minute grid.",
            next_step="Give values at least every 10 minutes.",
        )
    ends, means = on_grid(at, y, start, end, readings=STEP_SECONDS / spacing)
    return GridSeries(
        signal, {"series": path.stem}, ends, means, float(at[np.isfinite(y)].max()) if np.isfinite(y).any() else end
    )


def origins_of(series: GridSeries, days: float, every_seconds: float) -> list[float]:
    """Times from which a forecast could have been made and judged, in the last `days` days of the series, oldest first; at least
    WARM_UP_SECONDS lie before each. Raises StoreError when there are fewer than MIN_ORIGINS."""
    seen = np.flatnonzero(np.isfinite(series.values))
    observed = len(seen) * STEP_SECONDS / 3600
    if len(seen) < MIN_OBSERVED:
        raise _too_little(series, f"{len(seen)} steps of 10 minutes were observed")
    first, last = series.ends[seen[0]], series.ends[seen[-1]]
    low = max(first + WARM_UP_SECONDS, last - days * DAY_SECONDS)
    at = np.arange(math.ceil(low / every_seconds) * every_seconds, last - STEP_SECONDS + 1, every_seconds)
    found = []
    for origin in at.tolist():
        before = window(series, origin)
        if not before.refused and before.origin == origin and np.isfinite(outcomes(series, np.array([origin]))).any():
            found.append(origin)
    if len(found) < MIN_ORIGINS:
        raise _too_little(
            series, f"{observed:.1f} hours were observed, which leaves {len(found)} origins after the first day"
        )
    return found


def _too_little(series: GridSeries, what: str) -> StoreError:
    name = ", ".join([series.signal.name, *series.labels.values()])
    return StoreError(
        f"Too little history of {name}: {what}; {MIN_ORIGINS} origins are needed.",
        next_step="Record for two days or more, or make a history with `kvscope history`.",
    )


def study(
    series: GridSeries,
    models: Sequence[str],
    origins: Sequence[float],
    *,
    limits: Sequence[Limit] = (),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Study:
    """Forecasts by `models` and the baseline at each of `origins`. `limits`: of the signal; the last one that is ever passed is judged."""
    wanted = list(dict.fromkeys((*models, BASELINE)))
    came = outcomes(series, np.array(origins))
    limit = _limit(series, origins, came, limits)
    made: dict[str, list[Forecast]] = {model: [] for model in wanted}
    seconds = dict.fromkeys(wanted, 0.0)
    total = len(wanted) * len(origins)
    for place, origin in enumerate(origins):
        seen = window(series, origin)
        for number, model in enumerate(wanted, start=1):
            started = time.process_time()
            made[model].append(
                forecast(seen, model, calibrate(series, made[model], origin), limits=[limit], hindcast=True)
            )
            seconds[model] += time.process_time() - started
            progress(place * len(wanted) + number, total)
    refused = {place for each in made.values() for place, one in enumerate(each) if one.refused}
    kept = [place for place in range(len(origins)) if place not in refused]
    if not kept:
        reason = next(one.refused for each in made.values() for one in each if one.refused)
        raise StoreError(f"No model could forecast {series.signal.name}: {reason}")
    made = {model: [each[place] for place in kept] for model, each in made.items()}
    came = came[kept]
    tables = {model: np.stack([one.quantiles for one in each]) for model, each in made.items()}
    rows = tuple(
        _row(
            model,
            tables[model],
            tables[BASELINE],
            came,
            made[model],
            1e3 * seconds[model] / len(origins),
            series,
            limit,
        )
        for model in wanted
    )
    return Study(series, limit, made, came, rows)


def _limit(series: GridSeries, origins: Sequence[float], came: np.ndarray, limits: Iterable[Limit]) -> Limit:
    for limit in sorted(limits, key=lambda each: each.value if each.below else -each.value):
        if beyond(came, limit.value, limit.below).any():
            return limit
    known = series.values[series.ends <= origins[0]]
    return Limit(f"q{_HIGH * 100:g}", float(np.nanquantile(known, _HIGH)))


def _row(
    model: str, table: np.ndarray, base: np.ndarray, came: np.ndarray, made: Sequence[Forecast], milliseconds: float,
    series: GridSeries, limit: Limit,
) -> Row:  # fmt: skip
    seen = np.isfinite(came)

    def covered(tail: float) -> float:
        low, high = table[..., LEVELS.index(tail)], table[..., LEVELS.index(round(1 - tail, 6))]
        return float(((came >= low) & (came <= high))[seen].mean())

    width, base_width = ((t[..., -1] - t[..., 0])[seen].mean() for t in (table, base))
    return Row(
        model, _mae(table, came), _over(_mae(table, came), _mae(base, came)), _over(_crps(table, came), _crps(base, came)),
        covered(0.25), covered(0.1), covered(0.025), _over(width, base_width), _brier_skill(made, came, series, limit),
        milliseconds, len(made),
    )  # fmt: skip


def _over(top: float, bottom: float) -> float:
    return float(top / bottom) if bottom else math.nan


def _mae(table: np.ndarray, came: np.ndarray) -> float:
    return float(np.nanmean(np.abs(table[..., _MIDDLE] - came)))


def _crps(table: np.ndarray, came: np.ndarray) -> float:
    """Twice the mean pinball loss over the levels: the continuous ranked probability score as far as the quantiles tell it."""
    off, levels = came[..., None] - table, np.array(LEVELS)
    return float(2 * np.nanmean(np.maximum(levels * off, (levels - 1) * off)))


def _brier_skill(made: Sequence[Forecast], came: np.ndarray, series: GridSeries, limit: Limit) -> float:
    """Of the chance to pass `limit` within the hour from before it: 1 - Brier score / that of saying how often it came."""
    now = dict(zip(series.ends.tolist(), series.values.tolist(), strict=True))
    pairs = [
        (one.breaches[0].chance, float(beyond(row, limit.value, limit.below).any()))
        for one, row in zip(made, came, strict=True)
        if not beyond(np.array(now[one.origin]), limit.value, limit.below) and np.isfinite(row).all()
    ]
    if not pairs:
        return math.nan
    said, passed = np.array(pairs).T
    usual = float(((passed - passed.mean()) ** 2).mean())
    return _over(usual - float(((said - passed) ** 2).mean()), usual)


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        at = datetime.fromisoformat(text.strip())
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


def _iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z")
