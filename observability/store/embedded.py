"""The embedded store: signals, forecasts and simulated spans in one SQLite file, for use without a Prometheus.

A row holds one evaluation of one signal: the time and the values of all its series as packed float64, series i at place
i (NaN: absent). That is a tenth of the rows of one point each, so that a week reads in milliseconds. A connection is opened
for each operation: no thread shares one, and a file that was replaced or damaged is noticed at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import pandas as pd

from observability.errors import StoreError
from observability.signals import Signal
from observability.store.forecast_rows import (
    INSERT,
    SELECT,
    SELECT_HOURLY,
    SELECT_SERIES,
    UPGRADE,
    forecast_frame,
    forecasts_of,
    label_key,
    rows_of,
)
from observability.store.forecasts import Forecast
from observability.store.source import ANY, LOOKBACK_SECONDS, frame, grid, signal_named

#: "kvsc" in PRAGMA application_id: the file is ours.
APPLICATION_ID = 0x6B767363
SCHEMA_VERSION = 2
DAY_SECONDS = 86400.0
RETENTION_SECONDS = 14 * DAY_SECONDS
#: Rows older than this are thinned to one a minute, and those in which series begin or end.
FULL_RESOLUTION_SECONDS = 2 * DAY_SECONDS
MAX_BYTES = 1 << 30
_LOOKBACK_MS = round(LOOKBACK_SECONDS * 1000)
_BUSY_SECONDS = 10.0
#: One search of the index for each time that is asked for: a chart of a week takes a thousand rows of the sixty thousand that are there.
#: (Where as many times are asked as there are rows, to read them one after the other would take a third of the time; nothing does so often.)
_NEWEST_ROWS = f"""
WITH RECURSIVE asked(at) AS (VALUES (:first) UNION ALL SELECT at + :step FROM asked WHERE at < :last),
one(id) AS MATERIALIZED (SELECT id FROM signals WHERE name = :name)
SELECT at, time, vals FROM one CROSS JOIN asked CROSS JOIN points ON signal = id AND time = (
    SELECT max(time) FROM points WHERE signal = id AND time BETWEEN at - {_LOOKBACK_MS} AND at
) ORDER BY at"""

#: A row goes when the one before it is of the same minute and has the same series, unless nothing follows within a minute. So each series exists
#: at just the times at which it did: rows in which one begins or ends stay, and so does the last row, from which LOOKBACK_SECONDS count.
_THIN = """
DELETE FROM points WHERE signal = ?1 AND time IN (
    SELECT near.time FROM (
        SELECT time, lag(time) OVER rows AS before, lead(time) OVER rows AS after
        FROM points WHERE signal = ?1 AND time < ?2 WINDOW rows AS (ORDER BY time)
    ) AS near
    CROSS JOIN points AS own ON own.signal = ?1 AND own.time = near.time
    CROSS JOIN points AS last ON last.signal = ?1 AND last.time = near.before
    WHERE near.before / 60000 = near.time / 60000 AND near.after - near.time <= 60000 AND same_series(own.vals, last.vals)
)"""

_SCHEMA = """
CREATE TABLE signals (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE) STRICT;
CREATE TABLE series (
    signal INTEGER NOT NULL REFERENCES signals, place INTEGER NOT NULL, labels TEXT NOT NULL,
    PRIMARY KEY (signal, place), UNIQUE (signal, labels)
) STRICT, WITHOUT ROWID;
CREATE TABLE points (
    signal INTEGER NOT NULL REFERENCES signals, time INTEGER NOT NULL, vals BLOB NOT NULL, PRIMARY KEY (signal, time)
) STRICT, WITHOUT ROWID;
CREATE TABLE spans (start INTEGER NOT NULL, stop INTEGER NOT NULL, kind TEXT NOT NULL) STRICT;
CREATE TABLE observed (only INTEGER PRIMARY KEY CHECK (only = 1), time INTEGER NOT NULL) STRICT;
CREATE TABLE forecasts (
    signal TEXT NOT NULL, labels TEXT NOT NULL, model TEXT NOT NULL, origin INTEGER NOT NULL, hindcast INTEGER NOT NULL,
    levels TEXT NOT NULL, quantiles TEXT NOT NULL, flags TEXT NOT NULL, note TEXT NOT NULL, refused TEXT NOT NULL,
    stretch REAL NOT NULL DEFAULT 1, breaches TEXT NOT NULL DEFAULT '[]',
    PRIMARY KEY (signal, labels, model, origin)
) STRICT, WITHOUT ROWID;
"""


def create(path: str | os.PathLike[str]) -> EmbeddedStore:
    """Opens the store at `path`, making the file and its folder when there is none. Raises StoreError; a file that is not a
    store of this version is left as it is."""
    target = Path(path)
    if not target.exists():
        part = target.with_name(f"{target.name}.new-{os.getpid()}")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            _write_schema(part)
            _move_unless_there(part, target)  # so that nobody ever sees a store without its tables
        except OSError as error:
            raise StoreError(
                f"Cannot make the store {target}: {error.strerror}.", next_step="Choose another --store path."
            ) from error
        finally:
            for suffix in ("", "-wal", "-shm"):
                with contextlib.suppress(OSError):
                    part.with_name(part.name + suffix).unlink()
    return EmbeddedStore(target)


def _write_schema(path: Path) -> None:
    with _errors(path), contextlib.closing(_connect(path, "rwc")) as db:
        db.execute("PRAGMA auto_vacuum = INCREMENTAL")  # this and WAL can only be set on an empty file
        db.execute("PRAGMA journal_mode = WAL")
        db.executescript(
            f"BEGIN; {_SCHEMA} PRAGMA application_id = {APPLICATION_ID};"
            f" PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
        )


def _move_unless_there(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileExistsError:
        return  # another process was first: its store is as good
    except OSError:  # no hard links on this file system
        source.rename(target)


class SignalBlock(NamedTuple):
    """Evaluations of one signal: `times` in Unix seconds [n], the labels of its series, values [n, series], NaN: absent."""

    times: np.ndarray
    labels: Sequence[Mapping[str, str]]
    values: np.ndarray


class EmbeddedStore:
    """Reader (a SeriesSource) and writer of one store file. Any number of readers; one Recorder at a time.

    Raises StoreError when the file is missing, not readable, of another program, of a newer version or damaged.
    """

    def __init__(self, path: str | os.PathLike[str], *, clock: Callable[[], float] = time.time) -> None:
        self.path = Path(path)
        self._clock = clock
        with self._open():
            pass

    # -- SeriesSource -----------------------------------------------------------------------------------------------

    def range(self, signal: str, start: float, end: float, step: float, where: Mapping[str, str] = ANY) -> pd.DataFrame:
        wanted, at = signal_named(signal), grid(start, end, step)
        labels, places, _, values = self._read(wanted, at)
        return _select(wanted, labels, at[places], values, where)

    def latest(self, signal: str, where: Mapping[str, str] = ANY) -> pd.DataFrame:
        wanted, now = signal_named(signal), np.array([round(self._clock() * 1000)])
        labels, _, times, values = self._read(wanted, now)
        return _select(wanted, labels, times, values, where)

    def models(self) -> list[str]:
        with self._open() as db:
            rows = db.execute("SELECT DISTINCT labels ->> 'model' FROM series").fetchall()
        return sorted(model for (model,) in rows if model)

    def freshness(self) -> float | None:
        with self._open() as db:
            row = db.execute("SELECT time FROM observed").fetchone()
        return None if row is None else max(0.0, self._clock() - row[0] / 1000)

    def simulated(self, start: float, end: float) -> list[tuple[float, float]]:
        low, high = round(start * 1000), round(end * 1000)
        with self._open() as db:
            rows = db.execute(
                "SELECT start, stop FROM spans WHERE kind = 'simulated' AND stop >= ? AND start <= ? ORDER BY start",
                (low, high),
            ).fetchall()
        return [(max(a, low) / 1000, min(b, high) / 1000) for a, b in rows]

    def forecasts(self, signal: str, where: Mapping[str, str], model: str, since: float = 0.0) -> pd.DataFrame:
        return forecast_frame(signal_named(signal), self.stored_forecasts(signal, where, model, since=since))

    def alerts(self, start: float, end: float, model: str) -> None:
        """None: alert rules are evaluated by Prometheus alone."""

    def engines(self, model: str) -> list[str]:
        return []  # the recorder reads kvscope's own families

    def exemplars(self, family: str, start: float, end: float, model: str) -> None:
        """None: the recorder keeps signals, not requests."""

    def describe(self) -> str:
        return f"Embedded store {self.path}"

    # -- forecasts --------------------------------------------------------------------------------------------------

    def stored_forecasts(
        self, signal: str, where: Mapping[str, str], model: str, *, since: float = 0.0
    ) -> list[Forecast]:
        """Stored forecasts by origin, from the origin `since` (Unix seconds) on."""
        oldest = round(since * 1000)
        with self._open() as db:
            if set(where) == set(signal_named(signal).by):
                rows = db.execute(SELECT_SERIES, (signal, model, label_key(where), oldest)).fetchall()
            else:
                rows = db.execute(SELECT, (signal, model, oldest)).fetchall()
        return forecasts_of(rows, where)

    def hourly_forecasts(self, signal: str, labels: Mapping[str, str], model: str, since: float) -> list[Forecast]:
        """Stored forecasts of one series (all its labels), the first in each hour, from the origin `since` on."""
        with self._open() as db:
            rows = db.execute(SELECT_HOURLY, (signal, model, label_key(labels), round(since * 1000))).fetchall()
        return forecasts_of(rows, labels)

    def add_forecasts(self, forecasts: Iterable[Forecast]) -> None:
        """Stores forecasts. One made at its time is never replaced by a hindcast of the same origin."""
        rows = rows_of(forecasts)
        with self._writing() as db:
            db.executemany(INSERT, rows)

    # -- writing ----------------------------------------------------------------------------------------------------

    def append(self, signal: str, rows: pd.DataFrame) -> None:
        """Adds points given as SeriesSource frames give them: time, the signal's labels, value."""
        wanted = signal_named(signal)
        missing = {"time", "value", *wanted.by} - set(rows.columns)
        if missing:
            raise StoreError(
                f"Rows of {signal} lack the columns {', '.join(sorted(missing))}.",
                next_step="Give time, value and the labels of the signal.",
            )
        if rows.empty:
            return
        stamps = pd.DatetimeIndex(pd.to_datetime(rows["time"], utc=True)).round("ms").as_unit("ms").asi8
        times, at = np.unique(stamps, return_inverse=True)
        keys = rows[list(wanted.by)].astype(str)
        series = keys.drop_duplicates()
        values = np.full((len(times), len(series)), np.nan)
        values[at, keys.groupby(list(wanted.by), sort=False).ngroup().to_numpy()] = rows["value"].to_numpy(np.float64)
        labels = [{str(name): value for name, value in row.items()} for row in series.to_dict("records")]
        self.append_blocks({signal: SignalBlock(times / 1000, labels, values)})

    def append_blocks(self, blocks: Mapping[str, SignalBlock], *, observed_until: float | None = None) -> None:
        """Adds evaluations by signal name. Points of other series at the same times are kept. `observed_until` is the time
        of the newest successful scrape; by default the newest time that has any value."""
        newest = None if observed_until is None else round(observed_until * 1000)
        with self._writing() as db:
            for name, (times, labels, values) in blocks.items():
                signal_named(name)
                if values.shape != (len(times), len(labels)):
                    raise StoreError(f"Values of {name} are {values.shape}, expected {(len(times), len(labels))}.")
                if not values.size:
                    continue
                stamps = np.round(np.asarray(times, dtype=np.float64) * 1000).astype(np.int64)
                number, place, width = _places(db, name, labels)
                rows = np.full((len(stamps), width), np.nan)
                rows[:, place] = values
                _merge_stored(db, number, stamps, rows)
                rows[~np.isfinite(rows)] = np.nan
                packed = rows.astype("<f8")
                db.executemany(
                    "INSERT OR REPLACE INTO points VALUES (?,?,?)",
                    ((number, at, row.tobytes()) for at, row in zip(stamps.tolist(), packed, strict=True)),
                )
                if observed_until is None and (seen := stamps[np.isfinite(values).any(axis=1)]).size:
                    newest = max(newest or 0, int(seen.max()))
            if newest is not None:
                db.execute(
                    "INSERT INTO observed VALUES (1, ?) ON CONFLICT DO UPDATE SET time = max(time, excluded.time)",
                    (newest,),
                )

    def mark_simulated(self, start: float, end: float) -> None:
        """Says that the values between two times come from virtual time."""
        with self._writing() as db:
            db.execute("INSERT INTO spans VALUES (?, ?, 'simulated')", (round(start * 1000), round(end * 1000)))

    def extent(self) -> tuple[float, float] | None:
        """Times of the oldest and the newest point; None when there is none."""
        with self._open() as db:
            low, high = db.execute(
                "SELECT min(low), max(high) FROM (SELECT (SELECT min(time) FROM points WHERE signal = id) AS low,"
                " (SELECT max(time) FROM points WHERE signal = id) AS high FROM signals)"
            ).fetchone()
        return None if low is None else (low / 1000, high / 1000)

    def prune(self, *, max_bytes: int = MAX_BYTES) -> None:
        """Deletes what is older than the retention, thins what is older than two days to one row a minute and those in which series
        begin or end, and, while the file is above `max_bytes`, deletes the oldest tenth. Freed pages go back to the file system."""
        now = self._clock()
        keep_from = round((now - RETENTION_SECONDS) * 1000)
        thin_until = round((now - FULL_RESOLUTION_SECONDS) * 1000)
        with self._writing() as db:
            _delete_before(db, keep_from)
            db.execute("DELETE FROM forecasts WHERE origin < ?", (keep_from,))
            db.execute("DELETE FROM spans WHERE stop < ?", (keep_from,))
            signals = db.execute("SELECT id FROM signals").fetchall()
        for (signal,) in signals:  # one at a time: others write in between
            with self._writing() as db:
                db.create_function("same_series", 2, _same_series, deterministic=True)
                db.execute(_THIN, (signal, thin_until))
        for _ in range(50):
            extent = self.extent()
            with self._writing() as db:
                if extent is None or _used_bytes(db) <= max_bytes:
                    break
                low, high = extent
                _delete_before(db, round((low + max(60.0, 0.1 * (high - low))) * 1000))
        with self._open() as db:
            db.executescript("PRAGMA incremental_vacuum")  # execute() would stop after one page

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Holds the right to record into the file while the block runs. Raises StoreError when another process has it."""
        lock = self.path.with_name(self.path.name + ".lock")
        with contextlib.ExitStack() as stack:
            try:
                handle: IO[str] = stack.enter_context(lock.open("a"))
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise StoreError(
                    f"Another recorder already writes to {self.path}.",
                    next_step="Stop it, or record into another --store file.",
                ) from error
            except OSError as error:
                raise StoreError(
                    f"Cannot lock {lock}: {error.strerror}.", next_step="Check the folder's permissions."
                ) from error
            yield

    # -- inside -----------------------------------------------------------------------------------------------------

    def _read(self, signal: Signal, at: np.ndarray) -> tuple[list[dict[str, str]], np.ndarray, np.ndarray, np.ndarray]:
        """Labels of all series, and the newest row not after each of the times `at` (ms, equally spaced) and within LOOKBACK_SECONDS of it:
        place in `at` [n], its own time in ms [n], values [n, series]."""
        step = int(at[1] - at[0]) if len(at) > 1 else 1
        with self._open() as db:
            db.execute("BEGIN")  # labels and points from one state of the file
            labels = [
                json.loads(text)
                for (text,) in db.execute(
                    "SELECT labels FROM series JOIN signals ON id = signal WHERE name = ? ORDER BY place",
                    (signal.name,),
                )
            ]
            rows = db.execute(
                _NEWEST_ROWS, {"name": signal.name, "first": int(at[0]), "step": step, "last": int(at[-1])}
            ).fetchall()
        wanted, times = (np.array([row[i] for row in rows], dtype=np.int64) for i in (0, 1))
        return labels, (wanted - at[0]) // step, times, self._unpack([row[2] for row in rows], len(labels))

    def _unpack(self, blobs: list[bytes], width: int) -> np.ndarray:
        lengths = np.array([len(blob) for blob in blobs], dtype=np.int64)
        if ((lengths % 8 != 0) | (lengths > 8 * width)).any():
            raise StoreError(f"{self.path} is damaged: a row of points has an impossible length.", next_step=_AWAY)
        return _unpack(blobs, width)

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        with _errors(self.path):
            if not self.path.exists():
                raise StoreError(
                    f"There is no store at {self.path}.",
                    next_step="Record one with `kvscope record`, or fill one with `kvscope history`.",
                )
            with contextlib.closing(_connect(self.path, "rw")) as db:
                _check_ours(self.path, db)
                yield db

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._open() as db:
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
            except BaseException:
                db.execute("ROLLBACK")
                raise
            db.execute("COMMIT")


_AWAY = "Move the file away and start a new one; nothing was changed in it."


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    db = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}", uri=True, timeout=_BUSY_SECONDS, isolation_level=None
    )
    db.execute("PRAGMA synchronous = NORMAL")
    return db


def _check_ours(path: Path, db: sqlite3.Connection) -> None:
    application = db.execute("PRAGMA application_id").fetchone()[0]
    if application != APPLICATION_ID:
        raise StoreError(
            f"{path} is not a kvscope store (it is empty or of another program).",
            next_step="Choose another --store path; nothing was changed in the file.",
        )
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version == 1:
        version = _upgrade(db)
    if version != SCHEMA_VERSION:
        raise StoreError(
            f"{path} has schema version {version}; this kvscope reads version {SCHEMA_VERSION}.",
            next_step="Upgrade kvscope, or choose another --store path.",
        )


def _upgrade(db: sqlite3.Connection) -> int:
    """Adds what version 2 stores beside each forecast; all that was stored is kept. Returns the version."""
    db.execute("BEGIN IMMEDIATE")
    try:
        if db.execute("PRAGMA user_version").fetchone()[0] == 1:  # no other process was first
            for statement in UPGRADE:
                db.execute(statement)
            db.execute("PRAGMA user_version = 2")
    except BaseException:
        db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")
    return SCHEMA_VERSION


@contextlib.contextmanager
def _errors(path: Path) -> Iterator[None]:
    """Turns SQLite's errors into StoreError with a next step."""
    try:
        yield
    except sqlite3.Error as error:
        text = str(error)
        if isinstance(error, sqlite3.OperationalError) and "locked" in text:
            step = "Another process writes to it for long; try again, or stop that process."
        elif isinstance(error, sqlite3.OperationalError) and "unable to open" in text:
            step = "Check that it is a file, and that you may read and write it and its folder."
        elif "readonly" in text:
            step = "The store needs write permission on the file and its folder, also for reading."
        elif "full" in text:
            step = "Free some disk space."
        elif "disk I/O" in text:
            step = "Check that the disk has room and works; the file itself may be whole."
        else:
            step = _AWAY
        raise StoreError(f"Cannot use the store {path}: {text}.", next_step=step) from error


def _unpack(blobs: Sequence[bytes], width: int) -> np.ndarray:
    """Values [rows, width] of packed rows; rows written when fewer series were known end early."""
    values = np.full((len(blobs), width), np.nan)
    if blobs and all(len(blob) == 8 * width for blob in blobs):
        return np.frombuffer(b"".join(blobs), dtype="<f8").reshape(len(blobs), width)
    for row, blob in zip(values, blobs, strict=True):
        row[: len(blob) // 8] = np.frombuffer(blob, dtype="<f8")
    return values


def _same_series(one: bytes, other: bytes) -> bool:
    """Whether two rows of a signal have values of the same series."""
    return _absent(one) == _absent(other)


def _absent(blob: bytes) -> bytes:
    """A byte for each series, 1: absent; without those at the end, which may have been unknown when the row was written."""
    return np.isnan(np.frombuffer(blob, dtype="<f8")).tobytes().rstrip(b"\1")


def _places(db: sqlite3.Connection, name: str, labels: Sequence[Mapping[str, str]]) -> tuple[int, np.ndarray, int]:
    """The signal's number, the place of each series in its rows [series], and the width of a row; adds what is new."""
    db.execute("INSERT OR IGNORE INTO signals (name) VALUES (?)", (name,))
    number = db.execute("SELECT id FROM signals WHERE name = ?", (name,)).fetchone()[0]
    known = dict(db.execute("SELECT labels, place FROM series WHERE signal = ?", (number,)).fetchall())
    new = []
    for key in map(label_key, labels):
        if key not in known:
            known[key] = len(known)
            new.append((number, known[key], key))
    db.executemany("INSERT INTO series VALUES (?,?,?)", new)
    return number, np.array([known[label_key(label)] for label in labels], dtype=np.int64), len(known)


def _merge_stored(db: sqlite3.Connection, number: int, stamps: np.ndarray, block: np.ndarray) -> None:
    """Fills the absent places of `block` with what is stored for the same times."""
    rows = db.execute(
        "SELECT time, vals FROM points WHERE signal = ? AND time BETWEEN ? AND ?",
        (number, int(stamps.min()), int(stamps.max())),
    ).fetchall()
    if rows:
        where = {int(at): i for i, at in enumerate(stamps)}
        for (at, _), stored in zip(rows, _unpack([b for _, b in rows], block.shape[1]), strict=True):
            if (i := where.get(at)) is not None:
                block[i] = np.where(np.isnan(block[i]), stored, block[i])


def _delete_before(db: sqlite3.Connection, limit: int) -> None:
    for (signal,) in db.execute("SELECT id FROM signals").fetchall():
        db.execute("DELETE FROM points WHERE signal = ? AND time < ?", (signal, limit))


def _used_bytes(db: sqlite3.Connection) -> int:
    pages, free, size = (
        db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
    )
    return (pages - free) * size


def _select(
    signal: Signal, labels: list[dict[str, str]], times: np.ndarray, values: np.ndarray, where: Mapping[str, str]
) -> pd.DataFrame:
    keep = [i for i, label in enumerate(labels) if all(label.get(k) == v for k, v in where.items())]
    if not len(times) or not keep:
        return frame(signal, [], np.empty(0, np.int64), np.empty((0, 0)))
    return frame(signal, [labels[i] for i in keep], times, values[:, keep])
