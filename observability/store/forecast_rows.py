"""Forecasts as rows of the embedded store and as frames of a SeriesSource."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

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
            labels = known[text] = json.loads(text)
        if levels != levels_text or any(labels.get(name) != value for name, value in where.items()):
            continue
        table = np.array(json.loads(quantiles), dtype=np.float64).reshape(-1, len(LEVELS))
        limits = tuple(
            Breach(name, limit, tuple(raw), tuple(chances), *below)
            for name, limit, raw, chances, *below in json.loads(breaches)
        )
        found.append(
            Forecast(
                signal, labels, model, origin / 1000, table, tuple(json.loads(flags)), note, refused, bool(hindcast),
                stretch, limits,
            )
        )  # fmt: skip
    return found


def forecast_frame(signal: Signal, forecasts: Sequence[Forecast]) -> pd.DataFrame:
    """Forecasts in the form that SeriesSource.forecasts describes."""
    rows = []
    for f in forecasts:
        shared = {"flags": " ".join(f.flags), "note": f.note, "refused": f.refused, "hindcast": f.hindcast}
        shared |= {"breaches": f.breaches} | dict(f.labels)
        origin = pd.Timestamp(f.origin, unit="s", tz="UTC")
        if f.refused:
            rows.append({"origin": origin, "time": origin, "step": 0} | shared)
        for step, (at, quantiles) in enumerate(zip(f.times, f.quantiles, strict=True), start=1):
            named = dict(zip(map(level_column, LEVELS), quantiles, strict=True))
            rows.append({"origin": origin, "time": pd.Timestamp(at, unit="s", tz="UTC"), "step": step} | named | shared)
    out = pd.DataFrame(rows, columns=[*FRAME_COLUMNS, *signal.by])
    for column in ("origin", "time"):
        out[column] = pd.to_datetime(out[column], utc=True).astype("datetime64[ns, UTC]")
    return out.astype({level_column(level): "float64" for level in LEVELS} | {"step": "int64", "hindcast": "bool"})
