"""What panels read: the signals that several pages show, and pure functions from a series source and a view to a DataFrame or a small record.

kv.py and p99.py are built on these for a page each. A value that the source does not have is a missing row, never 0.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd

from observability import objectives
from observability.app.derived import shared
from observability.app.view import View, unix_seconds
from observability.objectives import (
    LATENCY_OBJECTIVES,
    STALE_AFTER_SECONDS,
    LatencyObjective,
    Objective,
    held_to,
    left_out,
)
from observability.signals import (
    BY_NAME,
    WINDOW_SECONDS,
    Signal,
    events_name,
    outcomes_name,
    share_name,
)
from observability.store.source import SeriesSource

HOUR = 3600.0
#: One step of the hour-against-hour comparison.
COMPARISON_STEP = 60.0

REQUESTS = BY_NAME["model:kvscope_requests_received:rate5m"]
OUTCOMES = BY_NAME["model_outcome:kvscope_requests:rate5m"]
GENERATED = BY_NAME["model:kvscope_generation_tokens:rate5m"]
RUNNING = BY_NAME["model:kvscope_requests_running:sum"]
WAITING = BY_NAME["model:kvscope_requests_waiting:sum"]
PREEMPTIONS = BY_NAME["model:kvscope_preemptions:rate5m"]
KV_USAGE = BY_NAME["model:kvscope_kv_usage:ratio"]
HIT_RATE = BY_NAME["model:kvscope_kv_hit:ratio_rate5m"]
EVICTED = BY_NAME["model:kvscope_kv_evicted_blocks:rate5m"]
INTERNAL = BY_NAME["model:kvscope_kv_internal_fragmentation:ratio"]
EXTERNAL = BY_NAME["model:kvscope_kv_external_fragmentation:ratio"]
QUANT_ERROR = BY_NAME["model_tensor_layer_group_scheme:kvscope_kv_quantization_relative_rms:ratio_rate5m"]
STEP_TIME = BY_NAME["model_component:kvscope_step_seconds:rate5m"]
STEP_TOKENS = BY_NAME["model_phase:kvscope_step_tokens:rate5m"]
STEPS = BY_NAME["model_kind:kvscope_steps:rate5m"]


def held_latencies(model: str) -> tuple[LatencyObjective, ...]:
    """The latency objectives that `model` is held to."""
    return tuple(held_to(model, general) for general in LATENCY_OBJECTIVES)


def quantile_signal(objective: LatencyObjective, q: float) -> Signal:
    """The recorded quantile `q` (0.5, 0.9 or 0.99) of an objective's latency."""
    return BY_NAME[f"model:{objective.family.name}:p{q * 100:g}_5m"]


def events_signal(objective: LatencyObjective) -> Signal:
    """The recorded rate of the events that an objective (not one of a class) counts."""
    return BY_NAME[events_name(objective, left_out(objective))]


def over_threshold_signal(objective: LatencyObjective) -> Signal:
    """The recorded share of these events that is over the objective's threshold."""
    return BY_NAME[share_name(objective, left_out(objective))]


def outcomes_signal(objective: Objective) -> Signal:
    """The recorded rate of the requests that an availability objective (not one of a class) counts, by outcome."""
    return BY_NAME[outcomes_name(left_out(objective))]


def threshold_of(signal: Signal, model: str) -> float | None:
    """The objective or warning line of a signal of `model`, in its unit."""
    lines = {KV_USAGE.name: objectives.KV_USAGE_WARNING, QUANT_ERROR.name: objectives.QUANT_ERROR_WARNING}
    for objective in held_latencies(model):
        lines |= {quantile_signal(objective, q).name: objective.threshold_seconds for q in (0.5, 0.9, 0.99)}
    return lines.get(signal.name)


# -- reading one signal ---------------------------------------------------------------------------------------------


def over_time(source: SeriesSource, view: View, signal: Signal) -> pd.DataFrame:
    """Columns time, the signal's labels beyond model, value."""
    frame = source.range(signal.name, view.start, view.end, view.step, view.where)
    return frame[[name for name in frame.columns if name != "model"]]


def several_over_time(source: SeriesSource, view: View, named: dict[str, Signal]) -> pd.DataFrame:
    """Columns time, series (the keys of `named`), value. A signal that the source does not have adds no row."""
    frames = [over_time(source, view, signal).assign(series=name) for name, signal in named.items()]
    return pd.concat(frames, ignore_index=True)[["time", "series", "value"]]


def named_by(source: SeriesSource, view: View, signal: Signal, *labels: str) -> pd.DataFrame:
    """Columns time, series (the values of `labels` in words), value; without labels there is one series."""
    frame = over_time(source, view, signal)
    if frame.empty or not labels:
        return frame.assign(series="")[["time", "series", "value"]]
    names = frame[labels[0]]
    for label in labels[1:]:
        if frame[label].nunique() > 1:
            names = names + " " + frame[label]
    return frame.assign(series=names)[["time", "series", "value"]]


def newest(frame: pd.DataFrame) -> float | None:
    """The value of the newest row, None without rows."""
    return None if frame.empty else float(frame["value"].to_numpy()[unix_seconds(frame["time"]).argmax()])


def at_newest(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of the newest time."""
    return frame[frame["time"] == frame["time"].max()]


def is_current(unix: float, view: View) -> bool:
    """Whether a time is of the last two steps (at least two minutes) of the view; what is older is history."""
    return unix >= view.end - max(2 * view.step, 120.0)


def current(frame: pd.DataFrame, view: View) -> float | None:
    """The newest value, if it is current."""
    times = unix_seconds(frame["time"])
    return newest(frame) if len(times) and is_current(times.max(), view) else None


def now_rows(frame: pd.DataFrame, view: View) -> pd.DataFrame:
    """The rows of the newest time, none where that is not current."""
    rows = at_newest(frame)
    return rows if len(rows) and is_current(rows["time"].iloc[0].timestamp(), view) else rows.iloc[:0]


def last_seen(source: SeriesSource, view: View, signals: Sequence[Signal]) -> float | None:
    """Unix time of the newest row of any of `signals` in the view."""
    times = [unix_seconds(frame["time"]).max() for s in signals if len(frame := over_time(source, view, s))]
    return max(times, default=None)


def each_once(source: SeriesSource, view: View, signal: Signal) -> pd.DataFrame:
    """`over_time` of a signal over five minutes at moments five minutes apart, so that each event of the view counts once; `seconds`: how much of
    the view a row stands for."""
    start = view.end - (math.ceil(view.seconds / WINDOW_SECONDS) - 1) * WINDOW_SECONDS
    frame = source.range(signal.name, start, view.end, WINDOW_SECONDS, view.where)
    seconds = np.minimum(WINDOW_SECONDS, unix_seconds(frame["time"]) - view.start)
    return frame[[name for name in frame.columns if name != "model"]].assign(seconds=seconds)


# -- is the source alive ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Freshness:
    """`state`: live, stale (nothing new for over STALE_AFTER_SECONDS) or empty (never wrote). `newest` is Unix time."""

    state: Literal["live", "stale", "empty"]
    age: float | None = None
    newest: float | None = None


def freshness(source: SeriesSource) -> Freshness:
    """How old the newest data of the source is."""
    age = source.freshness()
    if age is None:
        return Freshness("empty")
    # to the second, where what is said is cut
    return Freshness("stale" if age > STALE_AFTER_SECONDS else "live", age, float(round(time.time() - age)))


def simulated_share(spans: Sequence[tuple[float, float]], view: View) -> float:
    """Share of the view that comes from virtual time."""
    covered = sum(max(0.0, min(end, view.end) - max(start, view.start)) for start, end in spans)
    return covered / view.seconds


# -- Now --------------------------------------------------------------------------------------------------------------

Verdict = Literal["met", "near", "missed", "unknown"]
#: An objective is "near" from this share of its threshold on.
NEAR = 0.8


@dataclass(frozen=True, slots=True)
class ObjectiveNow:
    """One latency objective over the last five minutes. None where nothing was measured."""

    objective: LatencyObjective
    p99: float | None
    share_over: float | None
    events: float | None = None  # a second

    @property
    def allowed(self) -> float:
        """Share that may be over the threshold."""
        return 1 - self.objective.target

    @property
    def verdict(self) -> Verdict:
        """Judged by the share over the threshold (exact: the threshold is a bucket bound); P99, where it is of the same classes, tells how
        near it is."""
        if self.share_over is None:
            return "unknown"
        if self.share_over > self.allowed:
            return "missed"
        near = (self.p99 or 0.0) >= NEAR * self.objective.threshold_seconds and not left_out(self.objective)
        return "near" if near else "met"


def objective_now(source: SeriesSource, view: View, objective: LatencyObjective) -> ObjectiveNow:
    """A latency objective at the end of the view."""
    p99 = over_time(source, view, quantile_signal(objective, 0.99))
    over = over_time(source, view, over_threshold_signal(objective))
    events = over_time(source, view, events_signal(objective))
    return ObjectiveNow(objective, current(p99, view), current(over, view), current(events, view))


#: What the hour-against-hour comparison looks at, by a short name, and whether more of it is worse (+1), better (-1)
#: or neither (0).
COMPARED: tuple[tuple[str, Signal, int], ...] = (
    *((f"{o.title} P99", quantile_signal(o, 0.99), 1) for o in LATENCY_OBJECTIVES),
    ("Requests received", REQUESTS, 0),
    ("Tokens generated", GENERATED, 0),
    ("Requests waiting", WAITING, 1),
    ("Requests running", RUNNING, 0),
    ("KV pool held", KV_USAGE, 1),
    ("KV hit rate", HIT_RATE, -1),
    ("Blocks evicted", EVICTED, 1),
    ("Preemptions", PREEMPTIONS, 1),
    ("External fragmentation", EXTERNAL, 1),
    ("Internal fragmentation", INTERNAL, 1),
)


@dataclass(frozen=True, slots=True)
class Change:
    """One signal in a span against the span before it: medians, in `unit`.

    `score` is the difference of the medians over the spread of the span before (its interquartile range, at least 1 % of
    its median): from 1 on a change is clear. `worse` is None where neither direction is bad.
    """

    title: str
    unit: str
    before: float
    after: float
    score: float
    worse: bool | None


@shared
def hour_against_hour(source: SeriesSource, view: View) -> list[Change]:
    """What is different in the last hour of the view, the clearest change first. A signal that lacks an hour is left out."""

    def hours(signal: Signal) -> tuple[np.ndarray, np.ndarray]:
        frame = source.range(signal.name, view.end - 2 * HOUR, view.end, COMPARISON_STEP, view.where)
        values, late = frame["value"].to_numpy(), unix_seconds(frame["time"]) > view.end - HOUR
        return values[~late], values[late]

    return _changes(hours)


@shared
def span_against_span(source: SeriesSource, view: View) -> list[Change]:
    """What is different in the view from one as long before it, as `hour_against_hour`."""
    before = view.earlier(view.seconds)
    return _changes(lambda s: tuple(over_time(source, v, s)["value"].to_numpy() for v in (before, view)))


def _changes(values: Callable[[Signal], tuple[np.ndarray, ...]]) -> list[Change]:
    """The clearest first; `values` of a signal are those of the span before and of the span."""
    changes = []
    for title, signal, bad_direction in COMPARED:
        before, after = values(signal)
        if not len(before) or not len(after):
            continue
        low, high = np.percentile(before, (25, 75)).tolist()
        usual, now = float(np.median(before)), float(np.median(after))
        spread = max(high - low, 0.01 * abs(usual))
        score = 0.0 if now == usual else abs(now - usual) / spread if spread else np.inf
        worse = None if bad_direction == 0 or now == usual else (now - usual) * bad_direction > 0
        changes.append(Change(title, signal.unit, usual, now, score, worse))
    return sorted(changes, key=lambda change: -change.score)


# -- batching -----------------------------------------------------------------------------------------------------------


def tokens_per_forward_second(source: SeriesSource, view: View) -> pd.DataFrame:
    """Tokens that the model computes for each second of its forward passes. Columns time, value; absent where none ran."""
    tokens = over_time(source, view, STEP_TOKENS).groupby("time")["value"].sum()
    spent = over_time(source, view, STEP_TIME)
    forward = spent[spent["component"].str.startswith("forward_")].groupby("time")["value"].sum()
    return (tokens / forward.where(forward > 0)).dropna().rename("value").rename_axis("time").reset_index()


def tokens_per_step(source: SeriesSource, view: View) -> pd.DataFrame:
    """Tokens of a mean step by phase. Columns time, series, value; absent where no step ran."""
    steps = over_time(source, view, STEPS).groupby("time")["value"].sum()
    tokens = over_time(source, view, STEP_TOKENS).rename(columns={"phase": "series"})
    per_step = tokens["value"] / tokens["time"].map(steps.where(steps > 0))
    return tokens.assign(value=per_step).dropna(subset="value")


def step_shares(source: SeriesSource, view: View) -> pd.DataFrame:
    """Share of the engines' time by step component; adds up to 1. Columns time, series, value."""
    frame = over_time(source, view, STEP_TIME).rename(columns={"component": "series"})
    return frame.assign(value=frame["value"] / frame.groupby("time")["value"].transform("sum")).dropna(subset="value")
