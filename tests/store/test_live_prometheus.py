"""Real time: Prometheus scrapes a target that loses a model, dies and returns; its recorded series are ours, point by point.

Proves what backfilled data cannot: staleness of vanished series, of failed scrapes and of recorded series, and that both
sources answer `range` with the same frames.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import httpx
import numpy as np
import pandas as pd
import pytest

from alerts.rules import HAZARD, recordings
from observability.signals import SIGNALS, Age, Signal
from observability.store import embedded
from observability.store.embedded import SignalBlock
from observability.store.evaluate import Evaluated, Evaluator, Key
from observability.store.open import open_source
from observability.store.prometheus import PrometheusSource
from tests.conftest import wait_for
from tests.store.conftest import raw_samples
from tests.store.scrapes import FakeTarget, sample_line


class Target(ThreadingHTTPServer):
    """A /metrics page of two engines; `up` and `both` are set by the test."""

    def __init__(self) -> None:
        engines = FakeTarget(seed=9)
        engines.scrapes = 16  # classes that appear late do so after nine scrapes
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if not server.up:
                    self.send_error(503)
                    return
                values = engines.scrape(time.time())
                if not server.both:
                    values = {k: v for k, v in values.items() if ("model", "large") not in k[1]}
                body = "".join(f"{sample_line(name)} {value!r}\n" for name, value in values.items()).encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        self.up = self.both = True

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"


@pytest.fixture
def target() -> Iterator[Target]:
    server = Target()
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


Values = dict[tuple[tuple[str, str], ...], float]  # by labels
COMMIT_SECONDS = (
    0.6  # a scrape that began less than this before a rule's time may be stored only after the rule has run
)


def values_of(found: Evaluated) -> Values:
    pairs = zip(found.labels, found.values.tolist(), strict=True)
    return {tuple(sorted(labels.items())): value for labels, value in pairs if not np.isnan(value)}


def equal(signal: Signal, ours: Values, theirs: Values) -> bool:
    # The age of the newest value is a difference of two large times.
    tolerance = 1e-6 if isinstance(signal.expr, Age) else 1e-12
    return ours.keys() == theirs.keys() and all(
        abs(ours[k] - v) <= 1e-9 * abs(v) + tolerance for k, v in theirs.items()
    )


def test_recorded_series_are_what_the_evaluator_gives_and_both_sources_answer_alike(
    prometheus: Callable[..., str], target: Target, tmp_path: Path
) -> None:
    rules = tmp_path / "rules.yml"
    names = {signal.name for signal in SIGNALS}
    shipped = [rule for group in recordings().values() for rule in group if rule.name in names or rule is HAZARD]
    assert {rule.name for rule in shipped} - {HAZARD.name} == names
    recorded = [{"record": rule.name, "expr": rule.expr} for rule in shipped]
    rules.write_text(json.dumps({"groups": [{"name": "signals", "interval": "700ms", "rules": recorded}]}))
    url = prometheus(
        tmp_path / "data",
        json.dumps(
            {
                "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
                "rule_files": [str(rules)],
                "scrape_configs": [{"job_name": "engine", "static_configs": [{"targets": [target.address]}]}],
            }
        ),
    )
    started = time.time()
    wait_for(lambda: raw_samples(url, "up[1m]"), 20, "the first scrape")
    time.sleep(5)
    target.both = False
    time.sleep(3)
    target.up = False
    time.sleep(3)
    target.up = target.both = True
    time.sleep(4)
    now = time.time()
    time.sleep(2)  # a scrape that was under way has ended by then

    job = {"instance": target.address, "job": "engine"}
    scrapes: dict[float, dict[Key, float]] = {}
    for (_, labels), samples in raw_samples(url, 'up{job="engine"}[2m]', now).items():
        assert dict(labels) == job
        scrapes = {at: {} for at, _ in samples}
        answered = {at for at, up in samples if up}
    for (name, labels), samples in raw_samples(url, '{__name__=~"kvscope_.+",job="engine"}[2m]', now).items():
        for at, value in samples:
            scrapes[at][name, tuple(label for label in labels if label[0] not in job)] = value
    theirs: dict[float, dict[str, Values]] = {}
    for (name, labels), samples in raw_samples(url, '{__name__=~".+:.+"}[2m]', now).items():
        for at, value in samples:
            if np.isfinite(value):
                theirs.setdefault(at, {}).setdefault(name, {})[labels] = value
    assert len(scrapes) - len(answered) >= 2
    assert len(theirs) >= 15

    evaluator, pending = Evaluator(), sorted(scrapes)
    store = embedded.create(tmp_path / "store.db")

    def feed(until: float) -> None:
        while pending and pending[0] <= until:
            at = pending.pop(0)
            if at in answered:
                evaluator.scrape(at, list(scrapes[at]), np.array(list(scrapes[at].values())))
            else:
                evaluator.scrape_failed(at)

    for at in sorted(theirs):
        feed(at - COMMIT_SECONDS)
        without = evaluator.evaluate(at)
        feed(at)
        found = evaluator.evaluate(at)
        for signal in SIGNALS:
            name, recorded_then = signal.name, theirs[at].get(signal.name, {})
            if not equal(signal, values_of(found[name]), recorded_then):
                assert equal(signal, values_of(without[name]), recorded_then), (
                    f"{name}, {at - started:.1f} s after the start"
                )
                found[name] = without[name]
        store.append_blocks(
            {name: SignalBlock(np.array([at]), labels, values[None]) for name, (labels, values) in found.items()}
        )
    last = sorted(theirs)[-1]

    source = open_source(f"prometheus:{url}")
    assert isinstance(source, PrometheusSource)
    assert "not loaded" not in source.describe()
    compared = 0
    for signal in SIGNALS:
        where = {"model": "large"} if signal.name.endswith("sum") else {}
        a = source.range(signal.name, started - 2, last, 0.613, where)
        b = store.range(signal.name, started - 2, last, 0.613, where)
        order = [*signal.by, "time"]
        a, b = (each.sort_values(order, ignore_index=True) for each in (a, b))
        pd.testing.assert_frame_equal(
            a, b, rtol=1e-9, atol=1e-6 if isinstance(signal.expr, Age) else 1e-12, check_exact=False, obj=signal.name
        )
        compared += len(a)
    assert compared > 4_000
    assert source.models() == ["large", "small"]
    age = source.freshness()
    assert age is not None
    assert 0.0 <= age < 5.0
    spans = source.simulated(started - 60, now)  # the large one is marked virtual
    assert spans
    assert all(started - 6 < low <= high <= now for low, high in spans)
    source.close()


def test_without_rules_signals_are_computed_on_read_and_it_says_so(
    prometheus: Callable[..., str], target: Target, tmp_path: Path
) -> None:
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
        "scrape_configs": [{"job_name": "engine", "static_configs": [{"targets": [target.address]}]}],
    }
    url = prometheus(tmp_path / "data", json.dumps(config))
    source = PrometheusSource(url)
    assert source.describe().endswith("recording rules are not loaded, signals are computed on each read")
    name = "model_state:kvscope_kv_blocks:sum"
    wait_for(lambda: len(source.latest(name)), 20, "the first scrape")

    def raw() -> list[float]:
        query = {"query": 'kvscope_kv_blocks{model="small",state="active"}'}
        answer = httpx.get(f"{url}/api/v1/query", params=query, trust_env=False)
        return [float(row["value"][1]) for row in answer.json()["data"]["result"]]

    def read() -> bool:  # a scrape between the reads is seen by the raw values around them
        nonlocal frame
        before, frame = raw(), source.latest(name, {"model": "small", "state": "active"})
        return before == raw() == frame["value"].tolist()

    frame = source.latest(name)
    wait_for(read, 20, "both reads between two scrapes")
    assert frame[["model", "state"]].to_numpy().tolist() == [["small", "active"]]
    assert source.latest(name, {"model": 'no"such\\model'}).empty
    source.close()
