"""What the page Engines reads: which models have values, how old they are, and which signals each of them feeds now."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from exporters.adapters.engines import TITLES, capability
from observability.app.view import unix_seconds
from observability.signals import BY_NAME, SIGNALS
from observability.store.source import SeriesSource

UPDATE_AGE = BY_NAME["model:kvscope_last_update_age:seconds"]
ENGINES = BY_NAME["model_executor_clock_device_kv_dtype_version:kvscope_engine:sum"]
#: Signals of hosts and not of a model.
HOST_SIGNALS = frozenset(signal.name for signal in SIGNALS if "model" not in signal.by)


@dataclass(frozen=True, slots=True)
class ModelFeed:
    """One model: seconds since its engine last wrote, None where it has not within five minutes, the signals with a value now, and
    which engines serve it (executor, clock, device, kv_dtype, version, value: how many)."""

    model: str
    age: float | None
    fed: frozenset[str]
    engines: pd.DataFrame


def feeds(source: SeriesSource, now: float) -> list[ModelFeed]:
    """Every model of the source and what it feeds at `now` (Unix seconds)."""
    models = source.models()
    fed: dict[str, set[str]] = {model: set() for model in models}
    ages: dict[str, float] = {}
    for signal in SIGNALS:
        if signal.name in HOST_SIGNALS:
            continue
        newest = source.latest(signal.name)
        for model in newest["model"].unique():
            fed.setdefault(str(model), set()).add(signal.name)
        if signal is UPDATE_AGE:
            # as it was recorded, and what passed since then
            since = newest["value"] + np.maximum(0.0, now - unix_seconds(newest["time"]))
            ages = dict(zip(newest["model"], since, strict=True))
        if signal is ENGINES:
            serving = newest
    return [
        ModelFeed(model, ages.get(model), frozenset(fed[model]), serving[serving["model"] == model]) for model in fed
    ]


def matrix() -> pd.DataFrame:
    """One row a signal and engine: signal, title, engine (its title), status (yes, partial, no), reason."""
    rows = [
        (signal.name, signal.title, title, found.status, found.reason)
        for signal in SIGNALS
        for engine, title in TITLES.items()
        for found in (capability(engine, signal.name),)
    ]
    return pd.DataFrame(rows, columns=["signal", "title", "engine", "status", "reason"])
