"""What the page Hardware reads: the health of each GPU with what takes from it, and which hardware figures are measured at all.

Signals of GPUs carry no model: a GPU is of a host, whatever is served on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from exporters.gpu import health
from exporters.gpu.reading import WHOLE
from observability.app.view import View
from observability.signals import BY_NAME, Signal
from observability.store.source import ANY, SeriesSource

HEALTH = BY_NAME["gpu_uuid_mig:kvscope_gpu_health:min"]
PENALTY = BY_NAME["gpu_uuid_mig_reason:kvscope_gpu_health_penalty:max"]
UTILIZATION = BY_NAME["gpu_uuid_mig_unit:kvscope_gpu_utilization:max"]
MEMORY = BY_NAME["gpu_uuid_mig_kind:kvscope_gpu_memory_bytes:max"]
THROTTLED = BY_NAME["gpu_uuid_mig_reason:kvscope_gpu_throttle:rate5m"]
DRAM_ACTIVE = BY_NAME["gpu_uuid_mig:kvscope_gpu_dram_active:max"]
L2_HIT = BY_NAME["gpu_uuid_mig:kvscope_gpu_l2_hit:max"]
OVERLAP = BY_NAME["model:kvscope_kv_copy_overlap:ratio_rate5m"]
TARGETS = BY_NAME["target_status_reason:kvscope_hardware_target:sum"]

#: From here down a GPU needs a look, and is called unhealthy: bounds of the board Hardware and of the alert KvscopeGPUUnhealthy.
LOOK_BELOW, UNHEALTHY_BELOW = 0.8, 0.5
TARGET_TITLES = {
    "dram_active": "memory interface active", "copy_compute_overlap": "copies hidden beside steps", "l2_hit": "L2 hits",
}  # fmt: skip
#: Why a hardware figure is not measured, by the word that the exporter gives, and what would give it.
UNAVAILABLE = {
    "virtual_time": "time is virtual: nothing ran on hardware",
    "no_gpu": "no GPU on that host",
    "no_driver": "no NVIDIA driver: `kvscope doctor --host` says what to do",
    "no_library": "the driver's Python library is missing: `pip install 'kvscope[gpu]'`",
    "no_host_tier": "the engine has no host tier, so nothing is copied",
    "no_copies": "nothing was copied yet",
    "no_profiler": "card or driver give no hardware counters",
    "stale": "the newest reading is too old",
}


@dataclass(frozen=True, slots=True)
class Taken:
    """One finding on a GPU: what it takes off the health, what it means and what to do."""

    reason: str
    penalty: float
    condition: str
    do: str


#: The labels that name a GPU or a part of one.
GPU_KEY = ("gpu", "uuid", "mig")


@dataclass(frozen=True, slots=True)
class GpuHealth:
    """One GPU at its newest reading in the view. `score` is 1 less the penalties of `taken`, at least 0; `looked_for` counts the
    findings that could be told, of all that there are. `current` is False when there was no reading at the end of the view."""

    name: str
    score: float
    taken: tuple[Taken, ...]
    looked_for: int
    time: pd.Timestamp
    current: bool


def gpus_over_time(source: SeriesSource, view: View, signal: Signal, by: str = "") -> pd.DataFrame:
    """Columns time, series, value: a series a GPU, or a GPU and value of the label `by`."""
    frame = source.range(signal.name, view.start, view.end, view.step, ANY)
    return frame.assign(series=_series(frame, gpu_names(frame), [by] if by else []))[["time", "series", "value"]]


def _series(frame: pd.DataFrame, names: Mapping[tuple[str, str, str], str], more: Sequence[str] = ()) -> pd.Series:
    """The name of each row's GPU, with the values of the labels `more` after it."""
    labels = [*GPU_KEY, *more]
    group = frame.groupby(labels, observed=True, dropna=False).ngroup().to_numpy()
    _, first = np.unique(group, return_index=True)
    told = [
        " ".join([names[gpu, uuid, mig], *rest])
        for gpu, uuid, mig, *rest in frame.iloc[first][labels].astype(str).itertuples(index=False)
    ]
    return pd.Series(np.array(told, dtype=object)[group], index=frame.index, dtype="str")


def memory_used(source: SeriesSource, view: View) -> pd.DataFrame:
    """Columns time, series (a GPU), value: share of its memory that is used or reserved. Without the total there is no row."""
    frame = source.range(MEMORY.name, view.start, view.end, view.step, ANY)
    wide = frame.pivot_table(
        index=["time", "gpu", "uuid", "mig"], columns="kind", values="value", aggfunc="last", observed=True
    )
    wide = wide.reindex(columns=["total", "used", "reserved"])
    shares = (
        ((wide["used"] + wide["reserved"].fillna(0.0)) / wide["total"].where(wide["total"] > 0))
        .dropna()
        .reset_index(name="value")
    )
    return shares.assign(series=_series(shares, gpu_names(frame)))[["time", "series", "value"]]


def gpu_names(frame: pd.DataFrame) -> dict[tuple[str, str, str], str]:
    """(gpu, uuid, mig) -> a name for people: GPU 0, with the end of its UUID where hosts have GPUs of one number."""
    keys = sorted(frame[list(GPU_KEY)].drop_duplicates().astype(str).itertuples(index=False, name=None))
    cards: dict[str, set[str]] = {}
    for gpu, uuid, _ in keys:
        cards.setdefault(gpu, set()).add(uuid)
    return {
        (gpu, uuid, mig): f"GPU {gpu}"
        + (f" (…{uuid[-6:]})" if len(cards[gpu]) > 1 else "")
        + (f" MIG {mig}" if mig not in (WHOLE, "") else "")
        for gpu, uuid, mig in keys
    }


def gpu_health(source: SeriesSource, view: View) -> list[GpuHealth]:
    """Every GPU that was read in the view, the least healthy first."""
    scores = source.range(HEALTH.name, view.start, view.end, view.step, ANY)
    penalties = source.range(PENALTY.name, view.start, view.end, view.step, ANY)
    recent = pd.Timestamp(view.end - max(2 * view.step, 120.0), unit="s", tz="UTC")
    out = []
    for key, name in gpu_names(scores).items():
        mine = scores[_of(scores, key)].sort_values("time").iloc[-1]
        told = penalties[_of(penalties, key) & (penalties["time"] == mine["time"])]
        found = told[told["value"] > 0].sort_values("value", ascending=False)
        taken = tuple(_taken(reason, value) for reason, value in zip(found["reason"], found["value"], strict=True))
        out.append(GpuHealth(name, float(mine["value"]), taken, len(told), mine["time"], mine["time"] >= recent))
    return sorted(out, key=lambda each: (each.score, each.name))


def _of(frame: pd.DataFrame, key: tuple[str, str, str]) -> pd.Series:
    gpu, uuid, mig = key
    return (frame["gpu"] == gpu) & (frame["uuid"] == uuid) & (frame["mig"] == mig)


def _taken(reason: str, penalty: float) -> Taken:
    known = health.BY_REASON.get(reason)
    if known is None:  # of a newer exporter
        return Taken(reason, penalty, reason.replace("_", " "), "See docs/hardware.md of the exporter's version.")
    return Taken(reason, penalty, known.condition, known.do)


def target_states(source: SeriesSource, view: View) -> pd.DataFrame:
    """Which hardware figures are measured: newest rows of the view with target, status, reason and value (hosts)."""
    frame = source.range(TARGETS.name, view.start, view.end, view.step, ANY)
    frame = frame[frame["value"] > 0]
    newest = frame.groupby("target")["time"].transform("max") if len(frame) else frame["time"]
    return frame[frame["time"] == newest].sort_values(["target", "status"]).reset_index(drop=True)


def why_unavailable(reason: str) -> str:
    """The exporter's word for why a figure is not measured, as a clause."""
    return UNAVAILABLE.get(reason, reason.replace("_", " "))
