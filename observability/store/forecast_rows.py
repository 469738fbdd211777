"""Forecasts as rows of the embedded store and as frames of a SeriesSource."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from pydantic_core import from_json

from observability.signals import Signal
from observability.store.forecasts import FRAME_COLUMNS, LEVELS, Breach, Forecast, level_column

#: Columns of the table `forecasts`: the first four are its key.
COLUMNS = (
    "signal", "labels", "model", "origin", "hindcast", "levels", "quantiles", "flags", "note", "refused", "stretch", "breaches",
)  # fmt: skip
_NAMES, _MARKS = ", ".join(COLUMNS), ", ".join("?" * len(COLUMNS))
#: A forecast made at its time is never replaced by one made afterwards.
INSERT = (
    f"INSERT INTO forecasts ({_NAMES}) VALUES ({_MARKS}) ON CONFLICT DO UPDATE SET "
    + ", ".join(f"{name} = excluded.{name}" for name in COLUMNS[4:])
    + " WHERE excluded.hindcast <= forecasts.hindcast"
)
SELECT = f"SELECT {_NAMES} FROM forecasts WHERE signal = ? AND model = ? AND origin >= ? ORDER BY origin"
#: The same of one series, by the table's key: what all series of a signal hold would take minutes.
SELECT_SERIES = SELECT.replace("model = ?", "model = ? AND labels = ?")
#: Of those the first in each hour.
SELECT_HOURLY = f"SELECT {_NAMES} FROM (SELECT *, MIN(origin) {SELECT_SERIES[SELECT_SERIES.index('FROM') : SELECT_SERIES.index(' ORDER')]} GROUP BY origin / 3600000) ORDER BY origin"
#: From schema version 1 to 2.
UPGRADE = (
    "ALTER TABLE forecasts ADD COLUMN stretch REAL NOT NULL DEFAULT 1",
    "ALTER TABLE forecasts ADD COLUMN breaches TEXT NOT NULL DEFAULT '[]'",
)


def label_key(labels: Mapping[str, str]) -> str:
    return json.dumps(dict(sorted(labels.items())))


def rows_of(forecasts: Iterable[Forecast]) -> list[tuple[Any, ...]]:
    """One row a forecast, as COLUMNS."""
    return [
        (
            f.signal, label_key(f.labels), f.model, round(f.origin * 1000), int(f.hindcast), json.dumps(LEVELS),
            json.dumps(f.quantiles.tolist()), json.dumps(f.flags), f.note, f.refused, f.stretch,
            json.dumps([[each.name, each.limit, each.raw, each.chances, each.below] for each in f.breaches]),
        )
        for f in forecasts
    ]  # fmt: skip


def forecasts_of(rows: Iterable[tuple[Any, ...]], where: Mapping[str, str]) -> list[Forecast]:
    """The forecasts of `rows` whose labels agree with `where`. Those with other quantile levels are left out."""
    found = []
    known: dict[str, dict[str, str]] = {}
    levels_text = json.dumps(LEVELS)
    for signal, text, model, origin, hindcast, levels, quantiles, flags, note, refused, stretch, breaches in rows:
        if (labels := known.get(text)) is None:
            labels = known[text] = from_json(text)
        if levels != levels_text or any(labels.get(name) != value for name, value in where.items()):
            continue
        table = np.array(from_json(quantiles), dtype=np.float64).reshape(-1, len(LEVELS))
        limits = tuple(
            Breach(name, limit, tuple(raw), tuple(chances), *below)
            for name, limit, raw, chances, *below in from_json(breaches)
        )
        found.append(
            Forecast(
                signal, labels, model, origin / 1000, table, tuple(from_json(flags)), note, refused, bool(hindcast),
                stretch, limits,
            )
        )  # fmt: skip
    return found


def forecast_frame(signal: Signal, forecasts: Sequence[Forecast]) -> pd.DataFrame:
    """Forecasts in the form that SeriesSource.forecasts describes."""
    # Column by column: rows of dictionaries cost ten times as much, and pages read thousands.
    refused = [bool(f.refused) for f in forecasts]
    counts = np.array([len(f.quantiles) + more for f, more in zip(forecasts, refused, strict=True)], dtype=np.int64)
    empty = np.full((1, len(LEVELS)), np.nan)
    steps, times, quantiles = [], [], []
    for f, more in zip(forecasts, refused, strict=True):
        steps.append(np.arange(0 if more else 1, len(f.quantiles) + 1))
        times.append(np.concatenate([[f.origin] * more, f.times]))
        quantiles += [empty, f.quantiles] if more else [f.quantiles]

    def repeated(values: Sequence[object]) -> np.ndarray:
        column = np.empty(len(values), dtype=object)
        column[:] = values  # a tuple stays one value
        return np.repeat(column, counts)

    def stamps(seconds: np.ndarray) -> pd.DatetimeIndex:
        return pd.to_datetime(seconds, unit="s", utc=True).as_unit("ns")

    columns: dict[str, object] = {
        "origin": stamps(np.repeat(np.array([f.origin for f in forecasts], dtype=np.float64), counts)),
        "time": stamps(np.concatenate(times) if times else np.empty(0)),
        "step": np.concatenate(steps).astype("int64") if steps else np.empty(0, dtype="int64"),
        **dict(zip(_LEVEL_COLUMNS, np.concatenate([*quantiles, empty[:0]]).T, strict=True)),
        "flags": pd.array(repeated([" ".join(f.flags) for f in forecasts]), dtype="str"),
        "note": pd.array(repeated([f.note for f in forecasts]), dtype="str"),
        "refused": pd.array(repeated([f.refused for f in forecasts]), dtype="str"),
        "hindcast": np.repeat(np.array([f.hindcast for f in forecasts], dtype=bool), counts),
        "breaches": repeated([f.breaches for f in forecasts]),
        **{name: pd.array(repeated([f.labels.get(name, "") for f in forecasts]), dtype="str") for name in signal.by},
    }
    return pd.DataFrame(columns)[[*FRAME_COLUMNS, *signal.by]]


_LEVEL_COLUMNS = tuple(map(level_column, LEVELS))
