"""Puts kvscope's families onto vLLM's own /metrics, whichever way vLLM serves it.

One API server process: a collector in prometheus_client's registry, read at each scrape. Several: vLLM then adds up files
that each process writes, and collectors are not read; a thread writes our series into the same files.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.values import ValueClass

from exporters.prometheus import metrics
from observability.catalog import Family
from observability.telemetry.observed import Observed
from observability.telemetry.snapshot import Row

_log = logging.getLogger(__name__)
_FLUSH_SECONDS = 1.0


class EngineCollector(Collector):
    """Families of every engine of one vLLM; the label `engine` is vLLM's own (data-parallel rank)."""

    def __init__(self, engines: Mapping[str, Observed]) -> None:
        self.engines = engines
        self._logged = False

    def collect(self) -> Iterable[Metric]:
        try:
            return list(metrics(({"engine": name}, observed.snapshot()) for name, observed in self.engines.items()))
        except Exception:  # the scrape of vLLM's own families goes on
            if not self._logged:
                self._logged = True
                _log.exception("kvscope's families could not be read")
            return []


_registered: weakref.WeakKeyDictionary[CollectorRegistry, EngineCollector] = weakref.WeakKeyDictionary()


class Exposition:
    """Shows `engines` until the process ends or a later Exposition takes its place."""

    def __init__(self, engines: Mapping[str, Observed], registry: CollectorRegistry = REGISTRY) -> None:
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            self.flusher: Flusher | None = Flusher(engines)
            self.flusher.start()
            return
        self.flusher = None
        earlier = _registered.pop(registry, None)
        if earlier is not None:  # an earlier engine of this process: two would show the same series twice
            registry.unregister(earlier)
        _registered[registry] = EngineCollector(engines)
        registry.register(_registered[registry])


class Flusher(threading.Thread):
    """Writes every series into prometheus_client's files of this process, about once a second and at exit."""

    def __init__(self, engines: Mapping[str, Observed]) -> None:
        super().__init__(name="kvscope-flush", daemon=True)
        self._engines = engines
        self._cells: dict[tuple[str, str, str, tuple[str, ...]], tuple[Any, tuple[float, float]]] = {}
        self._since = time.time()
        self._done = threading.Event()
        atexit.register(self.stop)

    def run(self) -> None:
        while not self._done.wait(_FLUSH_SECONDS):
            self.flush()

    def stop(self) -> None:
        self._done.set()

    def flush(self) -> None:
        """One round; values that did not change are not written again."""
        try:
            for engine, observed in self._engines.items():
                for family, rows in observed.snapshot():
                    self._write(engine, family, rows)
        except Exception:
            _log.exception("kvscope's families could not be written")
            self._done.set()

    def _write(self, engine: str, family: Family, rows: list[Row]) -> None:
        kind = {"info": "gauge"}.get(family.kind, family.kind)
        metric = family.name + ("_info" if family.kind == "info" else "")
        below = 0.0
        for suffix, labels, value, _ in rows:
            if suffix == "_count":  # worked out from the buckets by the reader
                below = 0.0
                continue
            names = (*family.labels, "engine")
            if suffix == "_bucket":  # files hold each bucket by itself
                value, below = value - below, value
                names, labels = (*names, "le"), (*labels[:-1], engine, labels[-1])
            else:
                labels = (*labels, engine)
            key = (engine, family.name, suffix, labels)
            state = (value, self._newest_gauges(engine) if kind == "gauge" else 0.0)
            cell, written = self._cells.get(key, (None, None))
            if written == state:
                continue
            if cell is None:
                cell = ValueClass(
                    kind, metric, family.name + suffix, names, labels, family.help, multiprocess_mode="mostrecent"
                )
            cell.set(value, timestamp=state[1])
            self._cells[key] = (cell, state)

    def _newest_gauges(self, engine: str) -> float:
        """Unix time of the gauges: of several processes that tell one, readers take the newest."""
        gauges = self._engines[engine].gauges
        return self._since if gauges is None else gauges.unix_time
