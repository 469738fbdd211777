"""What the page KV cache reads: reuse by prompt length, how long cached content lives, layouts and free runs."""

from __future__ import annotations

import numpy as np
import pandas as pd

from observability import catalog
from observability.app.queries import each_once, now_rows, over_time
from observability.app.view import View
from observability.signals import BY_NAME, Signal
from observability.store.source import SeriesSource

HIT_RATE_BY_LENGTH = BY_NAME["model_length_bucket:kvscope_kv_hit:ratio_rate5m"]
HIT_OF_HITTABLE_BY_LENGTH = BY_NAME["model_length_bucket:kvscope_kv_hit_of_hittable:ratio_rate5m"]
QUERIED = BY_NAME["model_length_bucket:kvscope_kv_queried_tokens:rate5m"]
HITTABLE = BY_NAME["model_length_bucket:kvscope_kv_hittable_tokens:rate5m"]
HIT = BY_NAME["model_length_bucket:kvscope_kv_hit_tokens:rate5m"]
REGRET = BY_NAME["model_window:kvscope_kv_regret:ratio_rate5m"]
SURVIVAL = BY_NAME["model_pool_le:kvscope_kv_block_survival:ratio_rate5m"]
IDLE_TIMES = {
    name: BY_NAME[f"model_pool:kvscope_kv_{part}_seconds:p50_5m"]
    for name, part in (("reused after", "reuse_gap"), ("evicted after", "idle_before_eviction"))
}
BLOCKS = BY_NAME["model_state:kvscope_kv_blocks:sum"]
LAYOUTS = BY_NAME["model_layout:kvscope_kv_layout_blocks:sum"]
PREFETCHED = BY_NAME["model_outcome:kvscope_kv_prefetch_blocks:rate5m"]
MOVED = BY_NAME["model_reason:kvscope_kv_moved_blocks:rate5m"]
REGION_USAGE = BY_NAME["model_region:kvscope_kv_region_usage:ratio"]
REGION_FRAGMENTATION = BY_NAME["model_region:kvscope_kv_region_fragmentation:ratio"]
FREE_RUNS = BY_NAME["model_le:kvscope_kv_free_runs:sum"]


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


def survival_now(source: SeriesSource, view: View) -> pd.DataFrame:
    """Share of cached blocks that live longer than an age, at the end of the view. Columns pool, age (seconds), value."""
    frame = now_rows(over_time(source, view, SURVIVAL), view)
    return frame.assign(age=frame["le"].astype(float)).sort_values(["pool", "age"])[["pool", "age", "value"]]


def idle_times(source: SeriesSource, view: View) -> pd.DataFrame:
    """Median idle times before a reuse and before an eviction, of the device's exact pool. Columns time, series (the keys of IDLE_TIMES), value
    in seconds."""
    read = {name: over_time(source, view, signal) for name, signal in IDLE_TIMES.items()}
    told = [frame[frame["pool"] == "exact"].assign(series=name) for name, frame in read.items()]
    return pd.concat(told, ignore_index=True)[["time", "series", "value"]]


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
