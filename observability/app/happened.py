"""Where marks come from: alerts that fired, changed engines, and objectives that burned where nothing evaluates alerts."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from observability import catalog
from observability.app.budget import PAGING, STEP, rates
from observability.app.derived import shared
from observability.app.marks import Mark
from observability.app.view import View, unix_seconds
from observability.errors import StoreError
from observability.objectives import OBJECTIVES, held_to
from observability.signals import BY_NAME
from observability.store.source import Fired, SeriesSource

ENGINES = BY_NAME["_".join(catalog.ENGINE.labels) + ":kvscope_engine:sum"]
#: Most marks of one chart, the newest: more would hide the data.
MAX_MARKS = 40


def happened(source: SeriesSource, view: View) -> tuple[Mark, ...]:
    """Deploys and incidents of the view, oldest first; none that the source cannot tell."""
    marks: list[Mark] = []
    for told in (deploys, _troubles):
        with contextlib.suppress(StoreError):  # the page says itself when its source fails
            marks += told(source, view)
    return tuple(sorted(marks, key=lambda mark: mark.start)[-MAX_MARKS:])


@shared
def _troubles(source: SeriesSource, view: View) -> list[Mark]:
    """Alerts that fired, or what an alert would have fired for where none are evaluated."""
    fired = source.alerts(view.start, view.end, view.model)
    return burns(source, view) if fired is None else incidents(fired)


def incidents(fired: Sequence[Fired]) -> list[Mark]:
    """One mark an alert name and time; alerts of info severity are none."""
    spans: dict[str, list[tuple[float, float]]] = {}
    for alert in fired:
        if alert.severity != "info":
            spans.setdefault(alert.name, []).append((alert.start, alert.end))
    return [
        Mark("incident", low, high, name.removeprefix("Kvscope"))
        for name, each in spans.items()
        for low, high in joined(each)
    ]


def burns(source: SeriesSource, view: View) -> list[Mark]:
    """Spans in which an objective of the model burnt its budget as fast as alerts/burn.py pages for, over both windows of a pair and with
    enough events; of a source that evaluates no alerts. About when it would have paged: the sums are of whole five minutes and over
    classes; the alert waits some minutes more and looks at each class."""
    marks = []
    start, end = (at // STEP * STEP for at in (view.start, view.end))
    for objective in (held_to(view.model, general) for general in OBJECTIVES if not general.applies_to):
        longest = max(long for _, long, _ in PAGING)
        every = rates(source, objective, start - longest, end, view.where)
        times = unix_seconds(every.index)
        sums = {name: np.append(0.0, every[name].cumsum()) for name in ("events", "bad")}

        def window(
            seconds: float, times: np.ndarray = times, sums: dict[str, np.ndarray] = sums
        ) -> tuple[np.ndarray, np.ndarray]:
            """Rates of events and bad ones, summed over so many seconds before each time."""
            before = np.searchsorted(times, times - seconds, side="right")
            return sums["events"][1:] - sums["events"][before], sums["bad"][1:] - sums["bad"][before]

        burning = np.zeros(len(times), dtype=bool)
        for burn, long, short in PAGING:
            (events, bad), (late, late_bad) = window(long), window(short)
            allowed = burn * (1 - objective.target)
            enough = events * STEP >= objective.min_events
            burning |= enough & (bad > allowed * events) & (late_bad > allowed * late)
        spans = joined([(at - STEP, at) for at in times[burning & (times > start)]])
        marks += [Mark("incident", low, high, f"{objective.title} burns its budget") for low, high in spans]
    return marks


def joined(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """`spans` with those that overlap as one."""
    out: list[tuple[float, float]] = []
    for low, high in sorted(spans):
        if out and low <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], high))
        else:
            out.append((low, high))
    return out


@shared
def deploys(source: SeriesSource, view: View) -> list[Mark]:
    """The moments inside the view at which an engine appeared that differs from those before in version or setting."""
    step = max(view.step, 60.0)
    frame = source.range(ENGINES.name, view.start - step, view.end, step, view.where)
    if frame.empty:
        return []
    described = [label for label in ENGINES.by if label not in ("model", "clock")]
    first = frame.groupby(described)["time"].min().reset_index()
    return [
        Mark("deploy", row["time"].timestamp(), None, told(row, frame, described))
        for row in first.to_dict("records")
        if row["time"] > frame["time"].min()
    ]


def told(new: Mapping[Hashable, Any], frame: pd.DataFrame, described: list[str]) -> str:
    """What is different about the engine `new` that was not there before its time: version 1.0 → 1.1."""
    before = frame[frame["time"] < new["time"]].sort_values("time").iloc[-1]
    parts = [f"{name} {before[name]} → {new[name]}" for name in described if before[name] != new[name]]
    return ", ".join(parts).replace("_", " ")
