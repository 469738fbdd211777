"""Turns scrapes into stored signals: a target's /metrics page or telemetry in this process -> Evaluator -> EmbeddedStore.

A step is one scrape and one evaluation at its time. A failed scrape is a step too: gauges are absent from then on, and rates
fade out within their window, as in Prometheus. Nothing is written for a time at which nothing was evaluated.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import httpx
import numpy as np
from prometheus_client import parser
from prometheus_client.openmetrics import parser as openmetrics_parser

from observability.addresses import trusted, without_secrets
from observability.errors import ConfigError, StoreError
from observability.store.embedded import EmbeddedStore, SignalBlock
from observability.store.evaluate import Evaluated, Evaluator, Key
from observability.telemetry.recorder import Telemetry

MAX_BODY_BYTES = 64 << 20
PRUNE_EVERY_SECONDS = 3600.0
#: Steps that wait for a store that cannot be written, such as on a full disk; at 15 s an hour.
MOST_UNWRITTEN = 240


class Scrape(NamedTuple):
    """One answer of a target: series and their values [series]. With `nan_is_absent`, NaN marks a series that is not there."""

    series: Sequence[Key]
    values: np.ndarray
    nan_is_absent: bool = False


class Target(Protocol):
    """What is scraped. `name` is for messages."""

    name: str

    def scrape(self) -> Scrape:
        """One reading. Raises StoreError when the target does not answer as it should."""


class TelemetryTarget:
    """Telemetry of an engine in this process."""

    def __init__(self, telemetry: Telemetry) -> None:
        self.name = f"engine of {telemetry.model} in this process"
        self._telemetry = telemetry

    def scrape(self) -> Scrape:
        values = self._telemetry.values()
        series = self._telemetry.layout  # read after the values: it may have grown, never changed
        return Scrape(series if len(series) == len(values) else series[: len(values)], values, nan_is_absent=True)


class HttpTarget:
    """A /metrics page in the Prometheus text format or OpenMetrics. `token` is sent as a bearer token.

    Raises ConfigError for an address that cannot be scraped.
    """

    def __init__(self, url: str, *, token: str | None = None, timeout_seconds: float = 10.0) -> None:
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL:
            parsed = httpx.URL("")
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ConfigError(
                f"{without_secrets(url)!r} is not an address that can be scraped.",
                next_step="Give a URL such as http://127.0.0.1:8000/metrics.",
            )
        self.name = without_secrets(url)
        self._url = parsed
        self._timeout_seconds = timeout_seconds
        headers = {"Accept": "text/plain;version=0.0.4,application/openmetrics-text;version=1.0.0;q=0.5"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        self._client = httpx.Client(headers=headers, timeout=timeout_seconds, trust_env=False, verify=trusted())

    def scrape(self) -> Scrape:
        deadline = time.monotonic() + self._timeout_seconds
        try:
            with self._client.stream("GET", self._url) as answer:
                if answer.status_code != 200:
                    raise StoreError(
                        f"{self.name} answered {answer.status_code} {answer.reason_phrase}.",
                        next_step="Check the path and, where the target asks for one, the token.",
                    )
                body = bytearray()
                for part in answer.iter_bytes():
                    body += part
                    if len(body) > MAX_BODY_BYTES or time.monotonic() > deadline:
                        raise StoreError(
                            f"{self.name} sent {len(body):,} bytes without an end.",
                            next_step="Check that it is a metrics page.",
                        )
                kind = answer.headers.get("content-type", "")
        except httpx.HTTPError as error:
            raise StoreError(
                f"{self.name} does not answer: {str(error) or type(error).__name__}.",
                next_step="Check that the engine runs and the address.",
            ) from error
        return parse_exposition(body.decode("utf-8", errors="replace"), kind, self.name)

    def close(self) -> None:
        self._client.close()


def parse_exposition(text: str, content_type: str, name: str) -> Scrape:
    """Samples of an exposition; of a series that occurs twice the first counts, as in Prometheus. Raises StoreError."""
    if "application/openmetrics-text" in content_type:
        families = openmetrics_parser.text_string_to_metric_families(text)
    else:
        families = parser.text_string_to_metric_families(text)
    found: dict[Key, float] = {}
    try:
        for family in families:
            for sample in family.samples:
                found.setdefault((sample.name, tuple(sample.labels.items())), float(sample.value))
    except (ValueError, IndexError, KeyError, TypeError) as error:  # what the parser lets out on malformed lines
        raise StoreError(
            f"{name} is not a metrics page: {error}.", next_step="Give the address of a Prometheus exposition."
        ) from error
    if not found:
        raise StoreError(f"{name} has no samples.", next_step="Give the address of a Prometheus exposition.")
    return Scrape(list(found), np.array(list(found.values()), dtype=np.float64))


class Writer(Protocol):
    """What a Recorder writes to: an EmbeddedStore, or whoever passes the blocks on to one."""

    def append_blocks(self, blocks: dict[str, SignalBlock], *, observed_until: float | None = None) -> None:
        """As EmbeddedStore.append_blocks."""


class Recorder:
    """Evaluates each step and writes it, `batch` steps at a time. Call `flush` at the end.

    What the writer refuses (StoreError) is kept and written with a later step, the newest MOST_UNWRITTEN steps of it.
    """

    def __init__(self, writer: Writer, *, batch: int = 1) -> None:
        self._writer = writer
        self.observed: float | None = None  # time of the newest successful scrape
        self._batch = batch
        self._evaluator = Evaluator()
        self._steps: list[tuple[float, dict[str, Evaluated]]] = []
        self._absent: set[str] = set()  # signals whose last stored row has no value
        self._last = -np.inf

    def observe(self, at: float, scrape: Scrape | None) -> bool:
        """Takes a scrape at `at`, Unix seconds, into the window; None is a failed one. False, and nothing done, unless `at` is
        after the last."""
        if at <= self._last:
            return False
        self._last = at
        if scrape is None:
            self._evaluator.scrape_failed(at)
        else:
            self._evaluator.scrape(at, scrape.series, scrape.values, nan_is_absent=scrape.nan_is_absent)
            self.observed = at
        return True

    def step(self, at: float, scrape: Scrape | None) -> bool:
        """`observe`, then evaluates at `at` and keeps the result for writing."""
        if not self.observe(at, scrape):
            return False
        self._steps.append((at, self._evaluator.evaluate(at)))
        del self._steps[: -MOST_UNWRITTEN - self._batch]
        if len(self._steps) >= self._batch:
            self.flush()
        return True

    def flush(self) -> None:
        """Writes what is pending. A row without any value is written once, to end what was before it."""
        while self._steps:
            first = self._steps[0][1]  # a block has one list of series, and later steps may have more
            same = [
                step for step in self._steps if all(step[1][name].labels is old.labels for name, old in first.items())
            ]
            self._write(same)
            del self._steps[: len(same)]

    def _write(self, steps: list[tuple[float, dict[str, Evaluated]]]) -> None:
        """Writes steps that have the same series."""
        times = np.array([at for at, _ in steps])
        blocks, absent = {}, set(self._absent)
        for name, first in steps[0][1].items():
            if not first.labels:
                continue
            values = np.stack([found[name].values for _, found in steps])
            empty = np.isnan(values).all(axis=1)
            before = np.concatenate(([name in absent], empty[:-1]))
            keep = ~(empty & before)
            blocks[name] = SignalBlock(times[keep], first.labels, values[keep])
            (absent.add if empty[-1] else absent.discard)(name)
        self._writer.append_blocks(blocks, observed_until=self.observed)
        self._absent = absent


def record(
    target: Target,
    store: EmbeddedStore,
    interval: float,
    stop: threading.Event,
    *,
    on_change: Callable[[StoreError | None], None],
    on_store: Callable[[StoreError | None], None],
    on_step: Callable[[float], None] = lambda _: None,
) -> None:
    """Scrapes `target` every `interval` seconds, on multiples of it, until `stop` is set.

    `on_change` hears when the target stops answering (the error) and when it answers again (None, also the first time); `on_store`
    when the store cannot be written (the error) and when it can again (None). Raises StoreError only where the end cannot be written.
    """
    recorder = Recorder(store)
    answered: bool | None = None
    pruned, written = -np.inf, True
    while not stop.is_set():
        now = time.time()
        if stop.wait(interval - now % interval):
            break
        at = time.time()
        try:
            scrape, failure = target.scrape(), None
        except StoreError as error:
            scrape, failure = None, error
        try:
            recorder.step(at, scrape)
            if at - pruned > PRUNE_EVERY_SECONDS:
                store.prune()
                pruned = at
            refused = None
        except StoreError as error:  # a full disk, a file that another program holds: the recorder outlives it
            refused = error
        if written != (refused is None):
            written = refused is None
            on_store(refused)
        if answered != (failure is None):
            answered = failure is None
            on_change(failure)
        on_step(at)
    recorder.flush()
