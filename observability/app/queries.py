"""What each panel reads: pure functions from a series source and a view to a DataFrame or a small record.

Charts and pages take what these return; nothing else in the app touches a source. A value that the source does not
have is a missing row, never 0.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import pandas as pd

from exporters.adapters.capability import Capability
from exporters.adapters.engines import ADAPTERS, capability
from exporters.adapters.vllm_plugin import from_families
from observability import catalog, objectives
from observability.app.derived import shared
from observability.app.view import View, unix_seconds
from observability.objectives import (
    E2E,
    LATENCY_OBJECTIVES,
    STALE_AFTER_SECONDS,
    LatencyObjective,
    Objective,
    held_to,
    left_out,
)
from observability.signals import (
    BY_NAME,
    SIGNALS,
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
#: One step of a look at some minutes.
_CLOSE_STEP = 15.0

REQUESTS = BY_NAME["model:kvscope_requests_received:rate5m"]
OUTCOMES = BY_NAME["model_outcome:kvscope_requests:rate5m"]
GENERATED = BY_NAME["model:kvscope_generation_tokens:rate5m"]
RUNNING = BY_NAME["model:kvscope_requests_running:sum"]
WAITING = BY_NAME["model:kvscope_requests_waiting:sum"]
PREEMPTIONS = BY_NAME["model:kvscope_preemptions:rate5m"]
KV_USAGE = BY_NAME["model:kvscope_kv_usage:ratio"]
HIT_RATE = BY_NAME["model:kvscope_kv_hit:ratio_rate5m"]
HIT_RATE_BY_LENGTH = BY_NAME["model_length_bucket:kvscope_kv_hit:ratio_rate5m"]
HIT_OF_HITTABLE_BY_LENGTH = BY_NAME["model_length_bucket:kvscope_kv_hit_of_hittable:ratio_rate5m"]
QUERIED = BY_NAME["model_length_bucket:kvscope_kv_queried_tokens:rate5m"]
HITTABLE = BY_NAME["model_length_bucket:kvscope_kv_hittable_tokens:rate5m"]
HIT = BY_NAME["model_length_bucket:kvscope_kv_hit_tokens:rate5m"]
BLOCKS = BY_NAME["model_state:kvscope_kv_blocks:sum"]
LAYOUTS = BY_NAME["model_layout:kvscope_kv_layout_blocks:sum"]
EVICTED = BY_NAME["model:kvscope_kv_evicted_blocks:rate5m"]
INTERNAL = BY_NAME["model:kvscope_kv_internal_fragmentation:ratio"]
EXTERNAL = BY_NAME["model:kvscope_kv_external_fragmentation:ratio"]
REGION_USAGE = BY_NAME["model_region:kvscope_kv_region_usage:ratio"]
REGION_FRAGMENTATION = BY_NAME["model_region:kvscope_kv_region_fragmentation:ratio"]
FREE_RUNS = BY_NAME["model_le:kvscope_kv_free_runs:sum"]
QUANT_ERROR = BY_NAME["model_tensor_layer_group_scheme:kvscope_kv_quantization_relative_rms:ratio_rate5m"]
STEP_SHARE = BY_NAME["model_component:kvscope_step_seconds:rate5m"]
STEP_TOKENS = BY_NAME["model_phase:kvscope_step_tokens:rate5m"]
STEPS = BY_NAME["model_kind:kvscope_steps:rate5m"]
TAIL_LENGTHS, TAIL_LENGTH_SHARES = (
    {
        q: BY_NAME[f"model_length_bucket:kvscope_request_length_phase_{what}:p{q * 100:g}_tail_mean5m"]
        for q in (0.5, 0.9, 0.99)
    }
    for what in ("seconds", "requests")
)
TAIL = {
    q: BY_NAME[f"model_state_component:kvscope_request_phase_seconds:p{q * 100:g}_tail_mean5m"]
    for q in (0.5, 0.9, 0.99)
}


#: Requests that ended, of every class.
ENDED = BY_NAME[events_name(E2E, ())]


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


# -- reading one signal ---------------------------------------------------------------------------------------------


def over_time(source: SeriesSource, view: View, signal: Signal) -> pd.DataFrame:
    """Columns time, the signal's labels beyond model, value."""
    frame = source.range(signal.name, view.start, view.end, view.step, view.where)
    return frame[[name for name in frame.columns if name != "model"]]


def several_over_time(source: SeriesSource, view: View, named: dict[str, Signal]) -> pd.DataFrame:
    """Columns time, series (the keys of `named`), value. A signal that the source does not have adds no row."""
    frames = [over_time(source, view, signal).assign(series=name) for name, signal in named.items()]
    return pd.concat(frames, ignore_index=True)[["time", "series", "value"]]


def newest(frame: pd.DataFrame) -> float | None:
    """The value of the newest row, None without rows."""
    return None if frame.empty else float(frame["value"].to_numpy()[unix_seconds(frame["time"]).argmax()])


def at_newest(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of the newest time."""
    return frame[frame["time"] == frame["time"].max()]


def is_current(unix: float, view: View) -> bool:
    """Whether a time is of the last two steps (at least two minutes) of the view; what is older is history."""
    return unix >= view.end - max(2 * view.step, 120.0)


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


def current(frame: pd.DataFrame, view: View) -> float | None:
    """The newest value, if it is current."""
    times = unix_seconds(frame["time"])
    return newest(frame) if len(times) and is_current(times.max(), view) else None


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


# -- KV cache -----------------------------------------------------------------------------------------------------------


def hits_by_length(source: SeriesSource, view: View) -> pd.DataFrame:
    """One row a prompt-length bucket that was looked up in the view, shortest first.

    Columns: length_bucket, queried, hittable, hit (tokens over the view), hit_of_queried, hit_of_hittable (shares of these sums, so a busy
    minute weighs more than a quiet one; absent when nothing counts).
    """

    def tokens(signal: Signal) -> pd.Series:
        frame = each_once(source, view, signal)
        return (frame["value"] * frame["seconds"]).groupby(frame["length_bucket"]).sum()

    named = (("queried", QUERIED), ("hittable", HITTABLE), ("hit", HIT))
    sums = pd.DataFrame({name: tokens(signal) for name, signal in named})
    asked = set(sums.index[sums["queried"] > 0])
    sums = sums.reindex([bucket for bucket in catalog.LENGTH_BUCKETS if bucket in asked])
    sums["hit_of_queried"] = sums["hit"] / sums["queried"]
    sums["hit_of_hittable"] = sums["hit"] / sums["hittable"].where(sums["hittable"] > 0)
    return sums.rename_axis("length_bucket").reset_index()


def quantization_error(source: SeriesSource, view: View) -> pd.DataFrame:
    """Columns time, series (tensor, layer group and scheme in words), value: relative RMS error."""
    frame = over_time(source, view, QUANT_ERROR)
    if frame.empty:
        return frame.assign(series="")
    scheme = "" if frame["scheme"].nunique() == 1 else " " + frame["scheme"]
    return frame.assign(series=frame["tensor"] + " " + frame["layer_group"] + scheme)


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


def survival_now(source: SeriesSource, view: View) -> pd.DataFrame:
    """Share of cached blocks that live longer than an age, at the end of the view. Columns pool, age (seconds), value."""
    frame = now_rows(over_time(source, view, BY_NAME["model_pool_le:kvscope_kv_block_survival:ratio_rate5m"]), view)
    return frame.assign(age=frame["le"].astype(float)).sort_values(["pool", "age"])[["pool", "age", "value"]]


# -- batching -----------------------------------------------------------------------------------------------------------


def tokens_per_forward_second(source: SeriesSource, view: View) -> pd.DataFrame:
    """Tokens that the model computes for each second of its forward passes. Columns time, value; absent where none ran."""
    tokens = over_time(source, view, STEP_TOKENS).groupby("time")["value"].sum()
    share = over_time(source, view, STEP_SHARE)
    forward = share[share["component"].str.startswith("forward_")].groupby("time")["value"].sum()
    return (tokens / forward.where(forward > 0)).dropna().rename("value").rename_axis("time").reset_index()


def tokens_per_step(source: SeriesSource, view: View) -> pd.DataFrame:
    """Tokens of a mean step by phase. Columns time, series, value; absent where no step ran."""
    steps = over_time(source, view, STEPS).groupby("time")["value"].sum()
    tokens = over_time(source, view, STEP_TOKENS).rename(columns={"phase": "series"})
    per_step = tokens["value"] / tokens["time"].map(steps.where(steps > 0))
    return tokens.assign(value=per_step).dropna(subset="value")


def step_shares(source: SeriesSource, view: View) -> pd.DataFrame:
    """Share of the engines' time by step component; adds up to 1. Columns time, series, value."""
    frame = over_time(source, view, STEP_SHARE).rename(columns={"component": "series"})
    return frame.assign(value=frame["value"] / frame.groupby("time")["value"].transform("sum")).dropna(subset="value")


def free_run_lengths(source: SeriesSource, view: View) -> pd.DataFrame:
    """How many free runs there are of each length, at the end of the view; counts are not cumulative.

    Columns: label (longest length of the class in blocks), length (the class in words: 5 to 8), runs.
    """
    frame = now_rows(over_time(source, view, FREE_RUNS), view)
    frame = frame.assign(longest=frame["le"].astype(float)).sort_values("longest", ignore_index=True)
    runs = frame["value"].diff().fillna(frame["value"])
    shortest = frame["longest"].shift(fill_value=0.0) + 1
    classes = list(zip(shortest, frame["longest"], strict=True))
    return pd.DataFrame(
        {
            "label": [_short_count(high) if np.isfinite(high) else f"> {_short_count(low - 1)}" for low, high in classes],
            "length": [
                f"{low:,.0f}" if low == high else f"{low:,.0f} to {high:,.0f}" if np.isfinite(high) else f"at least {low:,.0f}"
                for low, high in classes
            ],
            "runs": runs,
        }
    )  # fmt: skip


def _short_count(blocks: float) -> str:
    return f"{blocks / 1024:g}K" if blocks >= 1024 else f"{blocks:g}"


# -- P99 ----------------------------------------------------------------------------------------------------------------

By = Literal["state", "component"]


def makeup_over_time(source: SeriesSource, view: View, q: float, by: By) -> pd.DataFrame:
    """Mean seconds of the slowest 1 - q of the requests by `by`. Columns time, series, value; what never took time is left out."""
    frame = over_time(source, view, TAIL[q])
    frame = frame.groupby(["time", by], observed=True)["value"].sum().reset_index().rename(columns={by: "series"})
    used = frame.groupby("series")["value"].max()
    return frame[frame["series"].isin(used[used > 0].index)].reset_index(drop=True)


@dataclass(frozen=True, slots=True)
class Makeup:
    """Mean make-up of the slowest requests at one time: `matrix` is seconds, states down, components across."""

    q: float
    time: pd.Timestamp
    matrix: pd.DataFrame

    @property
    def seconds(self) -> float:
        """Their mean latency."""
        return float(self.matrix.to_numpy().sum())

    def rows(self) -> pd.DataFrame:
        """Columns state, component, value (seconds)."""
        states, components = self.matrix.index, self.matrix.columns
        return pd.DataFrame(
            {"state": np.tile(states, len(components)), "component": np.repeat(components, len(states)), "value": self.matrix.to_numpy().T.ravel()}
        )  # fmt: skip


@shared
def makeup_now(source: SeriesSource, view: View, q: float) -> Makeup | None:
    """The newest make-up in the view (of the five minutes to its `time`); None when no request ended in it."""
    frame = over_time(source, view, TAIL[q])
    if frame.empty:
        return None
    rows = at_newest(frame)
    return Makeup(q, rows["time"].iloc[0], _matrix(rows))


def _matrix(rows: pd.DataFrame) -> pd.DataFrame:
    """Sums of `value` by all states and components. A part that has no series never took time: the parts still add up to the latency."""
    states, components = pd.Index(catalog.SHOWN_STATES), pd.Index(catalog.SHOWN_COMPONENTS)
    down, across = (
        index.get_indexer(pd.Index(rows[name])) for index, name in ((states, "state"), (components, "component"))
    )
    known = (down >= 0) & (across >= 0)
    sums = np.zeros((len(states), len(components)))
    np.add.at(sums, (down[known], across[known]), rows["value"].to_numpy()[known])
    return pd.DataFrame(sums, index=states, columns=components)


@shared
def makeup_of_range(source: SeriesSource, view: View, q: float) -> Makeup | None:
    """The make-up over all of the view: its moments weighted by the requests that ended then; None when none did."""
    frame, ended = each_once(source, view, TAIL[q]), _ended(source, view)
    weights = frame["time"].map(ended)
    frame = frame.assign(value=frame["value"] * weights)[weights > 0]
    total = float(weights[weights > 0].groupby(frame["time"]).first().sum())
    if frame.empty or not total > 0:
        return None
    return Makeup(q, frame["time"].max(), _matrix(frame) / total)


def _ended(source: SeriesSource, view: View) -> pd.Series:
    """Requests that ended, by time of `each_once`."""
    frame = each_once(source, view, ENDED).set_index("time")
    return frame["value"] * frame["seconds"]


def kv_usage_of(source: SeriesSource, view: View, made: Makeup | None) -> float | None:
    """Share of the pool that was held while requests waited: over the five minutes of a make-up and the lives of its requests before, or over all
    of the view. Moments weigh by the requests that waited then; where none ever did by those that ran, or else ended. None where the use was
    not measured."""
    end = view.end if made is None else made.time.timestamp()
    start = view.start if made is None else end - WINDOW_SECONDS - made.seconds
    close = replace(view, start=start, end=end, step=view.step if made is None else _CLOSE_STEP)
    usage = over_time(source, close, KV_USAGE).set_index("time")["value"]
    for signal in (WAITING, RUNNING, ENDED):
        weights = over_time(source, close, signal).set_index("time")["value"].reindex(usage.index).fillna(0.0)
        if weights.sum() > 0:
            return float(np.average(usage, weights=weights))
    return None if usage.empty else float(usage.mean())


def lengths_now(source: SeriesSource, view: View, q: float) -> pd.Series:
    """Mean seconds of the slowest by prompt length at the newest time of the view; adds up to their mean latency."""
    frame = at_newest(over_time(source, view, TAIL_LENGTHS[q])).set_index("length_bucket")["value"]
    return frame.reindex([bucket for bucket in catalog.LENGTH_BUCKETS if frame.get(bucket, 0.0) > 0])


def length_shares_now(source: SeriesSource, view: View, q: float) -> pd.Series:
    """Share of the slowest requests by prompt length at the newest time of the view."""
    frame = at_newest(over_time(source, view, TAIL_LENGTH_SHARES[q])).set_index("length_bucket")["value"]
    return frame.reindex([bucket for bucket in catalog.LENGTH_BUCKETS if frame.get(bucket, 0.0) > 0])


def latency_quantiles(source: SeriesSource, view: View, objective: LatencyObjective) -> pd.DataFrame:
    """Columns time, series (P50, P90, P99), value in seconds."""
    return several_over_time(source, view, {f"P{q * 100:g}": quantile_signal(objective, q) for q in (0.5, 0.9, 0.99)})


# -- why a panel is empty ---------------------------------------------------------------------------------------------------

#: Signals that only a run of the real model can feed, and why.
NOT_IN_VIRTUAL_TIME = {
    s.name: "Not measured in virtual time: the cost model stores no KV values, so there is no error to measure."
    for s in SIGNALS
    if "kvscope_kv_quantization" in s.name or "kvscope_request_quantization" in s.name
}
#: What makes a signal of a live engine absent though the engine works.
ABSENT_WHEN_LIVE = {
    **{
        s.name: "No GPU was read in this range: `kvscope gpu` reads those of a host."
        for s in SIGNALS
        if s.by[0] == "gpu"
    },
    **{
        s.name: "The load controller is off (`kvscope serve --engine controller=on` switches it on), or nothing was recorded in this range."
        for s in SIGNALS
        if "kvscope_limit_" in s.name or "kvscope_controller_" in s.name or "kvscope_requests_degraded" in s.name
    },
    **{
        s.name: "Prefetch is off (`kvscope serve --engine num_host_blocks=4096 --engine prefetch_lookahead=3` switches it on), or nothing was recorded in this range."
        for s in SIGNALS
        if "kvscope_kv_prefetch" in s.name
    },
    **{
        s.name: "Compaction, compression and the host tier are off, or nothing was recorded in this range."
        for s in SIGNALS
        if "kvscope_kv_moved_blocks" in s.name
    },
    **{
        s.name: "No batch with two or more prompts in this range, or the engine does not report their spread."
        for s in SIGNALS
        if "kvscope_prefill_batch_spread" in s.name
    },
    QUANT_ERROR.name: "No sample: the KV cache of this engine is not quantized, or the engine does not report the error.",
    **{
        s.name: "No request ended in this range, or the engine does not report where their time went."
        for s in TAIL.values()
    },
    **{
        s.name: "No prompt was looked up in this range, or the engine does not report the prefix cache."
        for s in (QUERIED, HITTABLE, HIT, HIT_RATE, HIT_RATE_BY_LENGTH, HIT_OF_HITTABLE_BY_LENGTH)
    },
    **{
        s.name: "No request was measured in this range."
        for s in SIGNALS
        if s.name.endswith(("p50_5m", "p90_5m", "p99_5m")) or ":error_ratio" in s.name
    },
}


def why_absent(signal_names: Sequence[str], simulated: bool, told: Mapping[str, Capability] | None = None) -> str:
    """The reason to show in place of a chart for which the source has no row. `simulated`: the view is virtual time; `told`: what the
    model's engine can feed."""
    for name in signal_names:
        if simulated and name in NOT_IN_VIRTUAL_TIME:
            return NOT_IN_VIRTUAL_TIME[name]
    for name in signal_names:
        if told and name in told and told[name].status == "no":
            return f"This engine cannot feed it: {told[name].reason}."
    for name in signal_names:
        if name in ABSENT_WHEN_LIVE:
            return ABSENT_WHEN_LIVE[name]
    return "The engine does not report it, or nothing was recorded in this range."


TOLD = BY_NAME["_".join(catalog.SOURCE_FAMILY.labels) + ":kvscope_source_family:sum"]


@dataclass(frozen=True, slots=True)
class Told:
    """How it is known what the engine behind a model can feed: by its adapter's table, or by what the vLLM plug-in says of each family
    (status and reason). Neither: it is kvscope's own."""

    adapter: str = ""
    families: Mapping[str, tuple[str, str]] = field(default_factory=dict)


def told(source: SeriesSource, view: View) -> Told:
    """What is known of the engine behind the view's model."""
    engines = [name for name in source.engines(view.model) if name in ADAPTERS]
    if engines:
        return Told(engines[0])
    rows = at_newest(over_time(source, view, TOLD)).to_dict("records")
    return Told(families={row["family"]: (row["status"], row["reason"]) for row in rows})


def capabilities(known: Told, signal_names: Sequence[str]) -> dict[str, Capability]:
    """What the engine can feed of the signals; those that are fed in full are left out."""
    if known.adapter:
        found = {name: capability(known.adapter, name) for name in signal_names}
    else:
        families = known.families
        found = {name: from_families(BY_NAME[name], families) for name in signal_names} if families else {}
    return {name: each for name, each in found.items() if each.status != "yes"}


def simulated_share(spans: Sequence[tuple[float, float]], view: View) -> float:
    """Share of the view that comes from virtual time."""
    covered = sum(max(0.0, min(end, view.end) - max(start, view.start)) for start, end in spans)
    return covered / view.seconds


def threshold_of(signal: Signal, model: str) -> float | None:
    """The objective or warning line of a signal of `model`, in its unit."""
    lines = {KV_USAGE.name: objectives.KV_USAGE_WARNING, QUANT_ERROR.name: objectives.QUANT_ERROR_WARNING}
    for objective in held_latencies(model):
        lines |= {quantile_signal(objective, q).name: objective.threshold_seconds for q in (0.5, 0.9, 0.99)}
    return lines.get(signal.name)
