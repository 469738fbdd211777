"""A day in the life of one engine as rows of every signal: calm, then a load peak that fills the KV pool."""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd

from observability import catalog
from observability.app.outlook import FORECAST_SIGNALS
from observability.app.view import View
from observability.signals import SIGNALS, Signal
from observability.store.forecasts import HORIZON_STEPS, LEVELS, MODELS, Breach, Forecast

MODEL = "smollm2-135m"
SHARES = {"queued": 0.46, "kv_wait": 0.12, "prefill": 0.17, "decode": 0.21, "preempted": 0.04}
COMPONENT_SHARES = {
    "forward_prefill": 0.55,
    "forward_decode": 0.3,
    "schedule": 0.04,
    "sample": 0.05,
    "emit": 0.02,
    "idle": 0.04,
}


def load(times: np.ndarray) -> np.ndarray:
    """0..1: a daily wave with a peak in the last 40 minutes of `times`."""
    wave = 0.35 + 0.2 * np.sin(times / 86400 * 2 * np.pi)
    peak = 0.4 / (1 + np.exp(-(times - (times[-1] - 2000)) / 300))
    noise = np.random.default_rng(1).normal(0, 0.02, len(times))
    return np.clip(wave + peak + noise, 0.02, 0.99)


def values(signal: Signal, times: np.ndarray, labels: dict[str, str]) -> np.ndarray:
    """Values of one series of `signal` at `times` (Unix seconds), within its bounds."""
    x = load(times)
    name = signal.name
    if "kvscope_engine:" in name:  # a new version took over an hour ago
        new = times > times[-1] - 3600
        return np.where(new if labels["version"] == "1.1" else ~new, 1.0, np.nan)
    if "source_family" in name:
        return np.full_like(x, np.nan)  # the engine is kvscope's own
    if "model_kind:kvscope_steps" in name:
        return {"prefill": 1.0, "decode": 20.0, "mixed": 9.0}[labels["kind"]] * (1.3 - 0.5 * x)
    if "step_duration" in name:
        return {"prefill": 0.05, "decode": 0.02, "mixed": 0.07}[labels["kind"]] * (0.7 + x)
    if "batch_spread" in name:
        return (2.2 if "p50" in name else 7.0) * (0.8 + 0.4 * x)
    if "kvscope_limit_batched" in name:
        return np.where(x > 0.8, 512.0, 1024.0)
    if "kvscope_limit_prefills" in name:
        return np.where(x > 0.9, 1.0, 4.0)
    if "length_phase" in name:
        k = catalog.LENGTH_BUCKETS.index(labels["length_bucket"])
        share = (0.5, 0.25, 0.15, 0.1, 0.0, 0.0)[k] * np.ones_like(x)
        if "requests" in name:
            return share
        total = next(v for q, v in (("p99", 1.0), ("p90", 0.6), ("p50", 0.3)) if f":{q}_" in name)
        return total * (0.4 + 6 * x**3) * (0.25, 0.25, 0.3, 0.2, 0.0, 0.0)[k]
    if "tail_mean" in name:
        q = next(q for q in ("p99", "p90", "p50") if f":{q}_" in name)
        total = {"p99": 1.0, "p90": 0.6, "p50": 0.3}[q] * (0.4 + 6 * x**3)
        return total * SHARES.get(labels["state"], 0.0) * COMPONENT_SHARES.get(labels["component"], 0.0)
    if signal.unit == "seconds" and ":p" in name:
        scale = 0.02 if "inter_token" in name else 8.0 if "duration" in name else 0.35
        return scale * {"p50": 0.4, "p90": 0.8, "p99": 1.4}[name.split(":")[-1][:3]] * (0.6 + 2.2 * x**2)
    if "length_bucket" in labels:
        k = catalog.LENGTH_BUCKETS.index(labels["length_bucket"])
        queried = (2000, 9000, 22000, 6000, 800, 0)[k] * (0.5 + x)
        share = (0.62, 0.48, 0.37, 0.21, 0.08, 0)[k] * (1.2 - 0.5 * x)
        known = {"queried_tokens": queried, "hittable_tokens": queried * 0.97, "hit_tokens": queried * share,
                 "kv_hit_of_hittable": share / 0.97, "kv_hit:": share}  # fmt: skip
        return next(np.broadcast_to(v, x.shape).copy() for k, v in known.items() if k in name)
    if "kv_blocks:sum" in name:
        active = 4096 * np.clip(x * 1.05, 0, 1)
        return {"active": active, "evictable": (4096 - active) * 0.7, "free": (4096 - active) * 0.3}[labels["state"]]
    if "layout_blocks" in name:
        return {"contiguous": 900 * x, "paged": 2600 * x, "compressed": 0 * x}[labels["layout"]]
    if "region" in labels:
        region = int(labels["region"])
        return np.clip(x + 0.35 * np.sin(region / 3 + times / 5000) - 0.1, 0, 1)
    if "free_runs" in name:
        bound = float(labels["le"])
        return np.round(60 * (1 - np.exp(-min(bound, 1e6) / 12)) * (1.1 - x))
    if "quantization" in name:
        size = next(
            (v for k, v in QUANTIZATION.items() if k in name), 0.006 if labels.get("tensor") == "key" else 0.008
        )
        return size * (1 + 0.1 * x) if size < 1 else np.minimum(size - 0.1 * x, size)
    if "step_seconds" in name:
        return COMPONENT_SHARES.get(labels["component"], 0.0) * np.ones_like(x)
    if signal.unit == "ratio":
        return np.clip(
            {"error": 0.03 * x**3, "usage": x, "overflow": 0 * x}.get(
                next((k for k in ("error", "usage", "overflow") if k in name), ""), 0.5 - 0.2 * x
            ),
            0,
            1,
        )
    scale = {
        "requests/s": 9.0,
        "tokens/s": 3000.0,
        "requests": 40.0,
        "tokens": 60000.0,
        "blocks/s": 30.0,
        "1/s": 0.05,
        "seconds": 3.0,
        "bytes": 1e9,
    }
    if name.endswith("waiting:sum"):
        return np.round(np.maximum(x - 0.6, 0) * 60)
    if "anomalies" in name:
        return 0 * x
    return scale.get(signal.unit, 1.0) * x


QUANTIZATION = {"sqnr": 44.0, "maximum": 0.06, "divergence": 0.0004, "agreed": 0.9, "over_budget": 0.002}
#: Labels whose values depend on the signal: (label, part of its name).
OF_SIGNAL = {
    ("state", "kv_blocks"): catalog.BLOCK_STATES, ("kind", "kvscope_step"): ("prefill", "decode", "mixed"),
    ("outcome", "prefetch"): ("issued", "useful", "late", "wasted"), ("reason", "moved"): ("compaction", "offload", "load"),
    ("reason", "preemptions"): ("kv_exhausted",), ("reason", "recomputed"): ("kv_exhausted",), ("version", "engine"): ("1.0", "1.1"),
}  # fmt: skip
LABELS = {
    "outcome": ("stop", "length", "abort"), "class": catalog.CLASSES, "rule": catalog.CONTROLLER_RULES, "action": catalog.CONTROLLER_ACTIONS,
    "executor": ("torch",), "clock": ("real",), "device": ("cuda",), "kv_dtype": ("int8",), "length_bucket": catalog.LENGTH_BUCKETS[:5], "state": catalog.STATES,
    "component": catalog.COMPONENTS, "layout": catalog.LAYOUTS, "region": catalog.REGION_LABELS, "phase": ("prefill", "decode"),
    "le": (*(f"{b:.1f}" for b in catalog.FREE_RUN_BOUNDS), "+Inf"), "tensor": catalog.TENSORS,
    "layer_group": ("00-09", "10-19", "20-29"), "scheme": ("int8",), "model": (MODEL,),
    "tenant": ("search", "chat"), "kind": ("reserved", "resident", "active"), "pool": catalog.POOLS, "window": tuple(catalog.REGRET_WINDOWS),
}  # fmt: skip


#: Two GPUs: the first is well, the second has two findings.
GPUS = (("0", "GPU-11110000-aaaa", "none"), ("1", "GPU-22220000-bbbb", "none"))
FOUND = {"pcie_width": 0.3, "hot": 0.1}
GPU_LABELS = {
    "unit": ("sm", "memory"),
    "kind": ("total", "used", "free", "reserved"),
    "reason": (*FOUND, "xid_fatal", "ecc_uncorrected"),
}
TARGET_ROWS = (
    ("dram_active", "measured", "none"),
    ("l2_hit", "unavailable", "no_profiler"),
    ("copy_compute_overlap", "unavailable", "no_host_tier"),
)


def gpu_series(signal: Signal, times: np.ndarray) -> pd.DataFrame:
    """`series` of GPUs and of the hosts' hardware targets."""
    stamps, x, parts = pd.to_datetime(times, unit="s", utc=True), load(times), []
    if signal.by[0] == "target":
        rows = [dict(zip(signal.by, row, strict=True)) for row in TARGET_ROWS]
        return pd.concat([pd.DataFrame({"time": stamps, **row, "value": 2.0}) for row in rows], ignore_index=True)
    extra = signal.by[3:]
    for gpu in GPUS:
        for values_of in itertools.product(*(GPU_LABELS[label] for label in extra)):
            labels = dict(zip(signal.by, (*gpu, *values_of), strict=True))
            ill = gpu is GPUS[1]
            if "penalty" in signal.name:
                value = (FOUND.get(labels["reason"], 0.0) if ill else 0.0) * np.ones_like(x)
            elif "health" in signal.name:
                value = (1.0 - sum(FOUND.values()) if ill else 1.0) * np.ones_like(x)
            elif signal.unit == "bytes":
                total = 80 * 2.0**30
                value = (
                    total
                    * {"total": 1 + 0 * x, "used": 0.5 + 0.4 * x, "free": 0.48 - 0.4 * x, "reserved": 0.02 + 0 * x}[
                        labels["kind"]
                    ]
                )
            else:
                value = np.clip(x * (0.9 if ill else 1.0), 0, 1)
            parts.append(pd.DataFrame({"time": stamps, **labels, "value": value}))
    return pd.concat(parts, ignore_index=True)


def series(signal: Signal, times: np.ndarray) -> pd.DataFrame:
    """All rows of `signal`: time (UTC), its labels, value."""
    if signal.by[0] in ("gpu", "target"):
        return gpu_series(signal, times)
    choices = [
        next(
            (v for (key, part), v in OF_SIGNAL.items() if key == label and part in signal.name),
            LABELS.get(label, ("a",)),
        )
        for label in signal.by
    ]
    stamps = pd.to_datetime(times, unit="s", utc=True)
    parts = []
    for combination in itertools.product(*choices):
        labels = dict(zip(signal.by, combination, strict=True))
        made = pd.DataFrame({"time": stamps, **labels, "value": values(signal, times, labels)})
        parts.append(made.dropna(subset="value"))
    return pd.concat(parts, ignore_index=True)


def all_series(times: np.ndarray) -> dict[str, pd.DataFrame]:
    """Every signal of the catalogue."""
    return {signal.name: series(signal, times) for signal in SIGNALS}


def forecasts(rows: dict[str, pd.DataFrame], end: float, seconds: float = 9600.0) -> list[Forecast]:
    """Forecasts of every model each ten minutes of the last `seconds`: the value at the origin, with a symmetric band, and the
    chance of passing a middle and a high value of the signal."""
    made = []
    for signal in FORECAST_SIGNALS:
        frame = rows[signal.name].set_index("time")["value"]
        limits = {name: float(frame.quantile(share)) for name, share in (("middle", 0.5), ("high", 0.8))}
        for origin in np.arange(end // 600 * 600 - seconds, end + 1, 600.0):
            value = float(frame[: pd.Timestamp(origin, unit="s", tz="UTC")].iloc[-1])
            for model in MODELS:
                scale = 0.4 if model == "prophet" else 0.6
                spread = np.outer(np.sqrt(np.arange(1, HORIZON_STEPS + 1)), (np.array(LEVELS) - 0.5) * scale * value)
                quantiles = np.clip(value + spread, 0, 1 if signal.unit == "ratio" else None)
                breaches = tuple(breach(name, limit, quantiles) for name, limit in limits.items())
                made.append(Forecast(signal.name, {"model": MODEL}, model, origin, quantiles, flags=("short_history",), hindcast=origin < end - 3600, breaches=breaches))  # fmt: skip
    return made


def breach(name: str, limit: float, quantiles: np.ndarray) -> Breach:
    """The chance of each step, the largest so far."""
    above = [1 - np.interp(limit, row, LEVELS, left=0, right=1) for row in quantiles]
    passed = tuple(map(float, np.maximum.accumulate(above)))
    return Breach(name, limit, passed, passed)


def written(rows: dict[str, pd.DataFrame], signal: Signal, view: View) -> list[dict[str, object]]:
    """The rows of `signal` inside the view, as dictionaries with a Unix `time`."""
    frame = rows[signal.name]
    seconds = (
        frame["time"].astype("int64") / 1e9
        if frame["time"].dtype == "int64"
        else frame["time"].map(pd.Timestamp.timestamp)
    )
    inside = frame[(seconds >= view.start) & (seconds <= view.end)].assign(time=seconds)
    return inside.to_dict("records")  # type: ignore[return-value]


def once(view: View) -> list[float]:
    """Moments five minutes apart from the end back: rates over five minutes there count each event once."""
    return [view.end - 300 * k for k in range(int(view.seconds / 300))]
