"""A signal on the 10-minute UTC grid, and the window of it that a forecast may learn from, with what is wrong with it.

Absent is NaN, never 0: zeros written into gaps double the error of the next twelve hours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import numpy as np

from observability.objectives import E2E, TTFT
from observability.signals import BY_NAME, Signal
from observability.store.forecasts import STEP_SECONDS, Flag
from observability.store.source import SeriesSource

#: What is forecast, by the name the command line takes.
FORECAST_SIGNALS: Mapping[str, Signal] = {
    "requests": BY_NAME["model:kvscope_requests_received:rate5m"],
    "kv_usage": BY_NAME["model:kvscope_kv_usage:ratio"],
    "kv_free_tokens": BY_NAME["model:kvscope_kv_free_tokens:sum"],
    "kv_free_requests": BY_NAME["model:kvscope_kv_free_requests:mean_length"],
    "queue": BY_NAME["model:kvscope_requests_waiting:sum"],
    "ttft_p99": BY_NAME[f"model:{TTFT.family.name}:p99_5m"],
    "e2e_p99": BY_NAME[f"model:{E2E.family.name}:p99_5m"],
}
DAY_SECONDS = 86400.0
WINDOW_SECONDS = 7 * DAY_SECONDS
#: Forecasts are made afterwards for origins of the last day, each from a window as long as that of the newest.
READ_SECONDS = WINDOW_SECONDS + DAY_SECONDS
READ_STEP = 60.0
STALE_SECONDS = 1200.0
#: A reading that is recorded later than this after its time is seen when everything is read anew.
LATE_SECONDS = 3600.0
#: Below this many observed steps nothing is forecast.
MIN_OBSERVED = 12
#: Below this a daily shape cannot be told from a trend, and few errors were seen.
WANTED_SECONDS = 2 * DAY_SECONDS
GAP_SHARE = 0.2
OUTLIER_IQRS = 20.0
RARE_SHARE = 0.01
#: A step counts as observed when at least half of its readings are there, as on the Forecast page.
_READINGS = STEP_SECONDS / READ_STEP
_BOUND_SLACK = 1e-6


@dataclass(frozen=True)
class GridSeries:
    """Means over 10 minutes of one series: `values` float64 [steps] (NaN: not observed) and their `ends`, Unix seconds.

    `newest` is the time of the newest reading. `simulated` are the spans that come from virtual time.
    """

    signal: Signal
    labels: Mapping[str, str]
    ends: np.ndarray
    values: np.ndarray
    newest: float
    simulated: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Window:
    """What a model sees: `values` float64 [steps], the last of them observed and ending at `origin`.

    When `refused` gives a reason, `values` is empty and `origin` is the step in which the forecast was wanted.
    """

    signal: Signal
    labels: Mapping[str, str]
    origin: float
    values: np.ndarray
    flags: tuple[Flag, ...] = ()
    note: str = ""
    refused: str = ""

    @property
    def ends(self) -> np.ndarray:
        """Ends of the steps, Unix seconds, float64 [steps]."""
        return self.origin + STEP_SECONDS * np.arange(1 - len(self.values), 1, dtype=np.float64)


def grid_step(now: float) -> float:
    """End of the last whole grid step at `now`, Unix seconds."""
    return now // STEP_SECONDS * STEP_SECONDS


def read_series(source: SeriesSource, signal: Signal, now: float, seconds: float = READ_SECONDS) -> list[GridSeries]:
    """Every series of `signal` over the last `seconds`. Raises StoreError."""
    end = grid_step(now)
    start = end - seconds
    frame = source.range(signal.name, start + READ_STEP, now // READ_STEP * READ_STEP, READ_STEP)
    if frame.empty:
        return []
    simulated = tuple(source.simulated(start, end))
    found = []
    for key, rows in frame.groupby(list(signal.by)):
        times = rows["time"].to_numpy(dtype="datetime64[s]").astype(np.int64).astype(np.float64)
        values = within_bounds(rows["value"].to_numpy(dtype=np.float64), signal)
        if np.isfinite(values).any():
            labels = dict(zip(signal.by, map(str, key if isinstance(key, tuple) else (key,)), strict=True))
            ends, means = on_grid(times, values, start, end)
            newest = float(times[np.isfinite(values)].max())
            found.append(GridSeries(signal, labels, ends, means, newest, simulated))
    return found


class SeriesReader:
    """`read_series` again and again, of what is new: the last hour, in which readings may still come late. Everything is read anew once a
    day, and when the spans that were simulated have changed, since then the past has. For one source, which may be opened anew."""

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}

    def read(self, source: SeriesSource, signal: Signal, now: float) -> list[GridSeries]:
        """As read_series(source, signal, now). Raises StoreError."""
        end = grid_step(now)
        start = end - READ_SECONDS
        kept = self._kept.get(signal.name)
        simulated = tuple(source.simulated(start, end))
        if kept is None or not kept.holds(now, simulated):
            found = read_series(source, signal, now)
            self._kept[signal.name] = _Kept(end, now, simulated, found)
            return found
        cut = kept.end - LATE_SECONDS
        new = {_key(series): series for series in read_series(source, signal, now, end - cut)}
        found = [
            joined
            for series in kept.series
            if (joined := _joined(series, new.pop(_key(series), None), cut, start, end))
        ]
        found += [joined for series in new.values() if (joined := _joined(None, series, cut, start, end))]
        found = [replace(series, simulated=simulated) for series in sorted(found, key=_key)]
        self._kept[signal.name] = replace(kept, end=end, simulated=simulated, series=found)
        return found


@dataclass(frozen=True)
class _Kept:
    """The series of one signal, and what they were read from."""

    end: float
    whole_at: float  # when all of it was read
    simulated: tuple[tuple[float, float], ...]
    series: list[GridSeries]

    def holds(self, now: float, simulated: tuple[tuple[float, float], ...]) -> bool:
        start, cut = grid_step(now) - READ_SECONDS, self.end - LATE_SECONDS
        return self.whole_at <= now <= self.whole_at + DAY_SECONDS and _clipped(self.simulated, start, cut) == _clipped(
            simulated, start, cut
        )


def _clipped(spans: Iterable[tuple[float, float]], start: float, end: float) -> list[tuple[float, float]]:
    return [(max(a, start), min(b, end)) for a, b in spans if b > start and a < end]


def _key(series: GridSeries) -> tuple[str, ...]:
    return tuple(series.labels[name] for name in series.signal.by)


def _joined(old: GridSeries | None, new: GridSeries | None, cut: float, start: float, end: float) -> GridSeries | None:
    """`old` up to `cut` and `new` from there, on the grid of (start, end]; None: nothing was observed."""
    ends = start + STEP_SECONDS * np.arange(1, round((end - start) / STEP_SECONDS) + 1, dtype=np.float64)
    values = np.full(len(ends), np.nan)
    newest = -np.inf
    for part, kept in ((old, lambda at: at <= cut), (new, lambda at: at > cut)):
        if part is not None:
            inside = kept(part.ends) & (part.ends > start) & (part.ends <= end)
            place = np.round((part.ends[inside] - start) / STEP_SECONDS).astype(np.int64) - 1
            values[place] = part.values[inside]
            newest = max(newest, part.newest)
    either = new or old
    if either is None or newest <= start:
        return None
    return GridSeries(either.signal, either.labels, ends, values, newest)


def within_bounds(values: np.ndarray, signal: Signal) -> np.ndarray:
    """Values that the signal can have; infinite, impossible (a negative rate) and absent ones as NaN."""
    low, high = signal.bounds[0], np.inf if signal.bounds[1] is None else signal.bounds[1]
    possible = np.isfinite(values) & (values >= low - _BOUND_SLACK) & (values <= high + _BOUND_SLACK)
    return np.where(possible, np.clip(values, low, high), np.nan)


def on_grid(
    times: np.ndarray, values: np.ndarray, start: float, end: float, *, readings: float = _READINGS
) -> tuple[np.ndarray, np.ndarray]:
    """Ends of the steps in (start, end] and the mean of the finite values in each (step end - 600, step end]; NaN where
    less than half of the `readings` of a step are there. Order and duplicates of `times` (Unix seconds) do not matter."""
    steps = round((end - start) / STEP_SECONDS)
    ends = start + STEP_SECONDS * np.arange(1, steps + 1, dtype=np.float64)
    place = np.ceil((times - start) / STEP_SECONDS).astype(np.int64) - 1
    keep = np.isfinite(values) & (place >= 0) & (place < steps)
    place, count = place[keep], np.bincount(place[keep], minlength=steps)
    total = np.bincount(place, weights=values[keep], minlength=steps)
    return ends, np.where(count >= readings / 2, total / np.maximum(count, 1), np.nan)


def window(series: GridSeries, now: float) -> Window:
    """What is known of `series` at `now`, at most 7 days of it, ready for a model; or why nothing can be said."""
    end = grid_step(now)
    inside = (series.ends > end - WINDOW_SECONDS) & (series.ends <= end)
    ends, values = series.ends[inside], series.values[inside]
    observed = np.flatnonzero(np.isfinite(values))

    def refuse(reason: str, *flags: Flag) -> Window:
        return Window(series.signal, series.labels, end, np.empty(0), flags, refused=reason)

    newest = series.newest if series.newest <= now else ends[observed[-1]] if len(observed) else -np.inf
    if now - newest > STALE_SECONDS:
        if not np.isfinite(newest):
            return refuse("nothing was observed in the last 7 days.", "stale")
        return refuse(f"the newest observation is {duration(now - newest)} old (since {_clock(newest)}).", "stale")
    # Zeros before the first load are the time before the service was used, not a shape to learn.
    used = np.flatnonzero(np.nan_to_num(values) != 0)
    if len(used):
        observed = observed[observed >= used[0]]
    if len(observed) < MIN_OBSERVED:
        return refuse(f"{len(observed)} steps of 10 minutes were observed; {MIN_OBSERVED} are needed.", "short_history")
    origin = float(ends[observed[-1]])
    if end - origin > STALE_SECONDS:
        return refuse(f"no whole 10 minutes were observed since {_clock(origin)}.", "stale")
    values = values[observed[0] : observed[-1] + 1]
    return _judged(series, origin, values)


def _judged(series: GridSeries, origin: float, values: np.ndarray) -> Window:
    """The window with its flags, without outliers."""
    flags: list[Flag] = []
    notes = []
    seconds = len(values) * STEP_SECONDS
    absent = float(np.isnan(values).mean())
    values, outliers = without_outliers(values)
    if np.nanmin(values) == np.nanmax(values):
        flags.append("constant")
        notes.append(f"constant for {duration(seconds)}")
    if seconds < WANTED_SECONDS:
        flags.append("short_history")
        notes.append(f"{duration(seconds)} of history; two days are wanted")
    if absent > GAP_SHARE:
        flags.append("gaps")
        notes.append(f"{absent:.0%} of the window was not observed")
    if any(start < origin and stop > origin - seconds for start, stop in series.simulated):
        flags.append("simulated")
    if outliers:
        flags.append("outliers")
        notes.append(f"{outliers} outliers left out or pulled in")
    return Window(series.signal, series.labels, origin, values, tuple(flags), "; ".join(notes))


def without_outliers(values: np.ndarray) -> tuple[np.ndarray, int]:
    """Values without points beyond median +- 20 interquartile ranges, and how many those were.

    A rare one that stands alone counts as absent: even clipped, it would widen every interval tenfold for half a day. Others,
    and the newest, are clipped. A series that rests on one value (range 0) has no scale to judge by and is left alone.
    """
    low, middle, high = np.nanquantile(values, (0.25, 0.5, 0.75))
    reach = OUTLIER_IQRS * (high - low)
    far = np.abs(values - middle) > reach  # False where absent
    if reach == 0 or not far.any():
        return values, 0
    kept = np.clip(values, middle - reach, middle + reach)
    if far.sum() <= RARE_SHARE * np.isfinite(values).sum():
        padded = np.pad(far, 1)
        alone = far & ~padded[:-2] & ~padded[2:]
        alone[-1] = False
        kept[alone] = np.nan
    return kept, int(far.sum())


def duration(seconds: float) -> str:
    """`12 min`, `3.5 h` or `2.1 days`."""
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 2 * DAY_SECONDS else f"{seconds / DAY_SECONDS:.1f} days"


def _clock(time: float) -> str:
    return f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M} UTC"
