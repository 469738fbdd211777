"""Series on the grid, and recorded ones as Signals of the product."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from observability.forecast.series import FORECAST_SIGNALS, GridSeries
from observability.signals import Signal

#: End of the last step of every made series: a whole hour, 2027-01-15 08:00 UTC.
END = 1_800_000_000.0
REQUESTS, KV_USAGE = FORECAST_SIGNALS["requests"], FORECAST_SIGNALS["kv_usage"]
DAY = 144


def gridded(values: np.ndarray, signal: Signal = REQUESTS, end: float = END, newest: float | None = None) -> GridSeries:
    """`values` as the steps up to `end`, the newest reading at its end unless given."""
    ends = end + 600.0 * np.arange(1 - len(values), 1)
    return GridSeries(signal, {"model": "m"}, ends, values, end if newest is None else newest)


def load(days: float, seed: int = 3) -> np.ndarray:
    """Requests/s with a daily shape and autocorrelated noise."""
    steps = round(days * DAY)
    rng = np.random.default_rng(seed)
    noise = np.zeros(steps)
    for i in range(1, steps):
        noise[i] = 0.85 * noise[i - 1] + rng.normal(0, 0.3)
    return np.maximum(8 + 4 * np.sin(2 * np.pi * np.arange(steps) / DAY) + noise, 0.0)


def recorded(path: Path) -> np.ndarray:
    """Column y of a recorded series; empty is NaN."""
    with path.open(newline="") as file:
        return np.array([float(row["y"] or "nan") for row in csv.DictReader(file)])
