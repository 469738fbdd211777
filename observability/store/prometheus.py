"""Reads signals from a Prometheus server by its HTTP API: the recorded series, or the signal's own PromQL without rules."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pandas as pd

from observability import catalog, objectives
from observability.addresses import trusted, without_secrets
from observability.errors import StoreError
from observability.signals import SIGNALS, Signal
from observability.store.embedded import EmbeddedStore
from observability.store.forecast_rows import forecast_frame
from observability.store.source import ANY, Fired, SlowRequest, frame, grid, signal_named

TIMEOUT_SECONDS = 30.0
#: Prometheus answers at most 11,000 points a series; longer reads are split.
POINTS_PER_QUERY = 10_000
#: A series that every engine feeds, with the label `engine` where an adapter made it.
RUNNING = "model:kvscope_requests_running:sum"
#: Between a model and an engine, in the name of a model that is on several.
ON_ENGINE = objectives.ON_ENGINE
#: Labels of ALERTS that say no more than the record's fields.
_OF_ALERT = ("__name__", "alertname", "alertstate", "severity", "model")
_RULES_KNOWN_SECONDS = 60.0
_DAY_SECONDS = 86400.0
#: A model that two engines served within this time has two names, also in reads of times before the second came.
_SEVERAL_SECONDS = 31 * _DAY_SECONDS
_LABEL_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


class PrometheusSource:
    """A SeriesSource over a Prometheus server (2.42 or newer). `forecasts` is a store file for the forecasts of its series.

    Where one model is on several engines, each is a model of its own here: what an adapter's rules read of `m` from vLLM is called `m on vllm`.

    Raises StoreError at the first read when the server is not there; the source goes on working once it is.
    """

    def __init__(self, url: str, *, forecasts: Path | None = None, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL:
            parsed = httpx.URL("")
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise StoreError(
                f"{without_secrets(url)!r} is not the address of a Prometheus.",
                next_step="Give prometheus:http://host:9090, or the path of an embedded store.",
            )
        self._shown = without_secrets(str(parsed)).rstrip("/")
        self._client = httpx.Client(
            base_url=str(parsed).rstrip("/"),
            timeout=timeout_seconds,
            trust_env=False,
            transport=httpx.HTTPTransport(retries=1, verify=trusted()),
        )
        self._forecasts = forecasts
        self._recorded: tuple[float, frozenset[str]] | None = None
        self._known: tuple[float, dict[str, set[str]]] | None = None

    def range(self, signal: str, start: float, end: float, step: float, where: Mapping[str, str] = ANY) -> pd.DataFrame:
        wanted, at = signal_named(signal), grid(start, end, step)
        query = self._query_of(wanted, where)
        parts: list[dict[str, Any]] = []
        for low in range(0, len(at), POINTS_PER_QUERY):
            piece = at[low : low + POINTS_PER_QUERY]
            span = {
                "start": _seconds(piece[0]),
                "end": _seconds(piece[-1]),
                "step": f"{max(1, round(step * 1000)) / 1000:.3f}",
            }
            parts += self._vector("query_range", query=query, **span)
        return _frame(wanted, self._named(parts), at, where)

    def latest(self, signal: str, where: Mapping[str, str] = ANY) -> pd.DataFrame:
        wanted, now = signal_named(signal), round(time.time() * 1000)
        rows = self._vector("query", query=self._query_of(wanted, where), time=_seconds(now))
        rows = [row | {"values": [row["value"]]} for row in rows]
        return _frame(wanted, self._named(rows), np.array([now]), where)

    def models(self) -> list[str]:
        return sorted(self._name(model, engine) for model, on in self._serving(_DAY_SECONDS).items() for engine in on)

    def freshness(self) -> float | None:
        # An adapter's series are as old as their evaluation, and gone a step after their engine. Those of kvscope's own have no label `engine`.
        newest = (f"timestamp({catalog.ENGINE.series})", f'timestamp({RUNNING}{{engine!=""}})')
        # The second finds a target that went away within a day, to a minute.
        for each in ("{}", "max_over_time({}[1d:1m])"):
            query = f"time() - max({' or '.join(each.format(one) for one in newest)})"
            if rows := self._vector("query", query=query):
                return max(0.0, float(rows[0]["value"][1]))
        return None

    def simulated(self, start: float, end: float) -> list[tuple[float, float]]:
        step = max(5.0, (end - start) / 1000.0)
        at = grid(start, end, step)
        query = f'count({catalog.ENGINE.series}{{clock="virtual"}})'
        rows = self._vector("query_range", query=query, start=_seconds(at[0]), end=_seconds(at[-1]), step=f"{step:.3f}")
        return [span for row in rows for span in _spans(row["values"], step)]

    def alerts(self, start: float, end: float, model: str) -> list[Fired]:
        step = max(15.0, (end - start) / 500.0)
        at = grid(start, end, step)
        of_model = ",".join(self._matchers({"model": model}, or_none=True))
        query = f'ALERTS{{alertstate="firing",alertname=~"Kvscope.+",{of_model}}} or ALERTS{{alertstate="firing",alertname=~"Kvscope.+",model=""}}'
        rows = self._vector("query_range", query=query, start=_seconds(at[0]), end=_seconds(at[-1]), step=f"{step:.3f}")
        found = []
        for row in rows:
            labels = {k: v for k, v in row["metric"].items() if k not in _OF_ALERT}
            name, severity = row["metric"].get("alertname", ""), row["metric"].get("severity", "")
            found += [Fired(name, severity, low, high, labels) for low, high in _spans(row["values"], step)]
        return sorted(found, key=lambda each: each.start)

    def engines(self, model: str) -> list[str]:
        served, engine = self._served(model)
        if engine is not None:
            return [engine] if engine else []
        query = f"count by (engine) ({RUNNING}{{{_matcher('model', served)}}})"
        return sorted(name for row in self._vector("query", query=query) if (name := row["metric"].get("engine", "")))

    def exemplars(self, family: str, start: float, end: float, model: str) -> list[SlowRequest]:
        found: list[SlowRequest] = []
        served, engine = self._served(model)
        if engine:  # only kvscope's own histograms keep exemplars
            return found
        query = f"{family}_bucket{{{_matcher('model', served)}}}"
        for row in self._get("query_exemplars", query=query, start=f"{start:.3f}", end=f"{end:.3f}"):
            labels = {k: v for k, v in row["seriesLabels"].items() if k not in ("__name__", "le", "model")}
            found += [
                SlowRequest(family, float(each["value"]), float(each["timestamp"]), each["labels"], labels)
                for each in row["exemplars"]
            ]
        return sorted(found, key=lambda each: -each.seconds)

    def forecasts(self, signal: str, where: Mapping[str, str], model: str, since: float = 0.0) -> pd.DataFrame:
        wanted = signal_named(signal)
        if self._forecasts is None or not self._forecasts.exists():
            return forecast_frame(wanted, [])
        return EmbeddedStore(self._forecasts).forecasts(signal, where, model, since)

    def describe(self) -> str:
        missing = [signal.name for signal in SIGNALS if signal.name not in self._recorded_names()]
        text = f"Prometheus {self._shown}"
        if len(missing) == len(SIGNALS):
            return f"{text}; recording rules are not loaded, signals are computed on each read"
        if missing:
            return (
                f"{text}; {len(missing)} of {len(SIGNALS)} signals are not recorded there and are computed on each read"
            )
        return text

    def close(self) -> None:
        """Ends the connections to the server."""
        self._client.close()

    # -- inside -----------------------------------------------------------------------------------------------------

    def _query_of(self, signal: Signal, where: Mapping[str, str]) -> str:
        if signal.name not in self._recorded_names():
            return signal.promql  # `where` is then applied to the answer
        return signal.name + "{" + ",".join(self._matchers(where)) + "}"

    def _named(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """`rows` with the names that models have here."""
        out = []
        for row in rows:
            labels = row["metric"]
            if labels.get("engine") and "model" in labels:
                labels = labels | {"model": self._name(labels["model"], labels["engine"])}
            out.append(row | {"metric": labels})
        return out

    def _name(self, model: str, engine: str) -> str:
        several = len(self._serving(_SEVERAL_SECONDS).get(model, ())) > 1
        return f"{model}{ON_ENGINE}{engine}" if several and engine else model

    def _served(self, name: str) -> tuple[str, str | None]:
        """The model called `name` here, and its engine (that of kvscope's own series is ""); None for the only one. Raises StoreError."""
        serving = self._serving(_SEVERAL_SECONDS)
        for model, engines in serving.items():
            for engine in engines:
                if len(engines) > 1 and name == self._name(model, engine):
                    return model, engine
        if len(engines := serving.get(name, set())) > 1:
            raise StoreError(
                f"{name} is on several engines: {', '.join(sorted(engines))}.",
                next_step=f"Name one of them, such as {self._name(name, min(engines))!r}.",
            )
        return name, None

    def _matchers(self, where: Mapping[str, str], or_none: bool = False) -> list[str]:
        """PromQL matchers for `where`; with `or_none` also of series of the model that tell no engine."""
        out = [_matcher(name, value) for name, value in where.items() if name != "model"]
        if "model" in where:
            model, engine = self._served(where["model"])
            out.append(_matcher("model", model))
            if engine is not None:
                told = "" in self._serving(_SEVERAL_SECONDS)[model]  # what names no engine is of kvscope's own
                pattern = re.escape(engine) + ("|" if or_none and not told else "")
                out.append(_matcher("engine", pattern, "=~"))
        return out

    def _serving(self, seconds: float) -> dict[str, set[str]]:
        """Engines by model within the last `seconds`; that of kvscope's own series is ""."""
        now = time.monotonic()
        if seconds == _SEVERAL_SECONDS and self._known is not None and now - self._known[0] <= _RULES_KNOWN_SECONDS:
            return self._known[1]
        found: dict[str, set[str]] = {}
        end = time.time()
        span = {"start": f"{end - seconds:.0f}", "end": f"{end:.0f}"}
        for model in self._get("label/model/values", **{"match[]": catalog.ENGINE.series}, **span):
            found.setdefault(str(model), set()).add("")
        for labels in self._get("series", **{"match[]": RUNNING}, **span):
            if model := labels.get("model"):
                found.setdefault(model, set()).add(labels.get("engine", ""))
        if seconds == _SEVERAL_SECONDS:
            self._known = (now, found)
        return found

    def _recorded_names(self) -> frozenset[str]:
        now = time.monotonic()
        if self._recorded is None or now - self._recorded[0] > _RULES_KNOWN_SECONDS:
            groups = self._get("rules", type="record").get("groups", [])
            names = frozenset(rule["name"] for group in groups for rule in group.get("rules", []))
            self._recorded = (now, names)
        return self._recorded[1]

    def _vector(self, path: str, **parameters: str) -> list[dict[str, Any]]:
        found = self._get(path, timeout=f"{TIMEOUT_SECONDS:.0f}s", **parameters)
        return found["result"]

    def _get(self, path: str, **parameters: str) -> Any:
        try:
            answer = self._client.get(f"/api/v1/{path}", params=parameters)
        except httpx.HTTPError as error:
            raise StoreError(
                f"Prometheus at {self._shown} does not answer: {str(error) or type(error).__name__}.",
                next_step="Check that it runs and the address.",
            ) from error
        try:
            content = answer.json()
            if content["status"] == "success":
                return content["data"]
            reason = f"{content.get('errorType')}: {content.get('error')}"
        except (ValueError, KeyError, TypeError):
            reason = f"status {answer.status_code}, not an answer of Prometheus"
        raise StoreError(
            f"{self._shown}/api/v1/{path} failed: {reason}.",
            next_step="Check that the address is that of a Prometheus server, and its log.",
        )


def _spans(values: list[list[Any]], step: float) -> list[tuple[float, float]]:
    """Spans of the times of `values` ([time, value] each) that are a step apart from each other."""
    spans: list[tuple[float, float]] = []
    for at in (float(value[0]) for value in values):
        if spans and at - spans[-1][1] < 1.5 * step:
            spans[-1] = (spans[-1][0], at)
        else:
            spans.append((at, at))
    return spans


def _seconds(milliseconds: int | np.integer) -> str:
    return f"{milliseconds / 1000:.3f}"


def _matcher(name: str, value: str, how: str = "=") -> str:
    if not _LABEL_NAME.fullmatch(name):
        raise StoreError(f"{name!r} is not a label name.", next_step="Use a label of the signal.")
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'{name}{how}"{escaped}"'


def _frame(signal: Signal, rows: list[dict[str, Any]], at: np.ndarray, where: Mapping[str, str]) -> pd.DataFrame:
    """Rows of one or more matrix answers over the grid `at` (milliseconds) as a frame. Raises StoreError where two would be one series."""
    place: dict[tuple[str, ...], int] = {}
    cells: list[tuple[int, np.ndarray, np.ndarray]] = []
    for row in rows:
        labels = row["metric"]
        if all(labels.get(name, "") == value for name, value in where.items()):
            series = place.setdefault(tuple(labels.get(name, "") for name in signal.by), len(place))
            times = np.array([t for t, _ in row["values"]], dtype=np.float64)
            values = np.array([v for _, v in row["values"]], dtype=np.float64)
            cells.append((series, np.round(times * 1000).astype(np.int64), values))
    table = np.full((len(at), len(place)), np.nan)
    taken = np.zeros(table.shape, dtype=bool)
    for series, times, values in cells:
        at_times = np.searchsorted(at, times)
        if taken[at_times, series].any():
            names = {name for row in rows for name in row["metric"]} - {"__name__", *signal.by}
            beyond = sorted(n for n in names if len({row["metric"].get(n) for row in rows}) > 1)
            raise StoreError(
                f"Prometheus has several series of {signal.name} for one: they differ in {', '.join(beyond) or 'no label'}.",
                next_step="Several engines served the model then: choose a later time."
                if beyond == ["engine"]
                else "Read a Prometheus that holds each once; where one evaluates others' series, drop that label or let it deduplicate.",
            )
        taken[at_times, series] = True
        table[at_times, series] = values
    return frame(signal, [dict(zip(signal.by, key, strict=True)) for key in place], at, table)
