"""Four times more load than the engine can serve: a bounded queue, refusals with Retry-After, admitted requests no slower than at capacity,
scrapes that are answered, and books of client and server that agree."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from prometheus_client.parser import text_string_to_metric_families

from observability.engine.model.loading import load_model
from observability.engine.types import PromptSpan
from observability.workload.replay_http import HttpSettings, replay_http
from observability.workload.traces import TraceRequest
from tests.server.harness import HTTP, RunningServer, serving
from tests.server.test_errors import slow_down

RUNNING, QUEUED, TOKENS = 4, 8, 8


def load(count: int, rate: float) -> list[TraceRequest]:
    """`count` distinct prompts, `rate` a second."""
    return [TraceRequest(i / rate, PromptSpan(8, (i,), 512), TOKENS) for i in range(count)]


def steps_taken(server: RunningServer, begun: list[float], since: int) -> list[int]:
    """Steps of the engine between arrival and end of each request that was admitted after the first `since`: time as the engine
    counts it, whatever else the machine does."""
    served = [record for record in server.records[since:] if record.outcome == "length"]
    return sorted(bisect_left(begun, r.finished) - bisect_left(begun, r.arrival) for r in served)


class Scraper(threading.Thread):
    """Scrapes and asks for completions one after the other until told to stop."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.url, self.done = url, threading.Event()
        self.pages: list[httpx.Response] = []
        self.answers: list[httpx.Response] = []

    def run(self) -> None:
        body = {"model": "tiny", "prompt": "probe", "max_tokens": 1}
        while not self.done.is_set():
            self.pages.append(HTTP.get(f"{self.url}/metrics"))
            self.answers.append(HTTP.post(f"{self.url}/v1/completions", json=body))


@contextmanager
def scraping(url: str) -> Iterator[Scraper]:
    scraper = Scraper(url)
    scraper.start()
    try:
        yield scraper
    finally:
        scraper.done.set()
        scraper.join(60)


def received(page: str) -> float:
    found = text_string_to_metric_families(page)
    return sum(s.value for family in found for s in family.samples if s.name == "kvscope_requests_received_total")


def test_four_times_the_capacity_costs_the_admitted_nothing_and_the_refused_a_retry() -> None:
    with serving(load_model("tiny"), max_num_seqs=RUNNING, max_queued=QUEUED, max_num_batched_tokens=256) as server:
        slow_down(server, 0.004)
        begun: list[float] = []
        waiting: list[int] = []
        execute, now = server.engine.executor.execute, server.engine.executor.clock.now

        def noted(plan, until=None):
            begun.append(now())
            waiting.append(server.engine.num_waiting)
            return execute(plan, until)

        server.engine.executor.execute = noted
        # at capacity: as many clients as fit, each with its next request as soon as it has an answer
        full = HttpSettings(server.url, max_concurrency=RUNNING + QUEUED, ignore_eos=True)
        at_capacity = replay_http(load(60, 1e6), full)
        served, early = at_capacity.outcomes["length"], at_capacity.outcomes["rejected"]
        assert served + early == 60  # the queue is full for a moment where a step has ended and the next not begun
        assert served > 45
        steps_at_capacity = steps_taken(server, begun, 0)
        rate = served / at_capacity.duration_seconds
        before = len(server.records)

        with scraping(server.url) as scraper:
            over = replay_http(load(240, 4 * rate), HttpSettings(server.url, max_concurrency=240, ignore_eos=True))
        books = server.check_books()
        probes = [answer.status_code for answer in scraper.answers]
        sent = 60 + 240 + len(probes)

        assert over.outcomes["length"] + over.outcomes["rejected"] == over.requests == 240
        assert over.outcomes["rejected"] > 60
        assert over.reasons
        assert all(reason.startswith("HTTP 429") for reason in over.reasons)
        assert set(probes) <= {200, 429}
        refused = [answer for answer in scraper.answers if answer.status_code == 429]
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
        assert max(waiting) <= QUEUED
        # each request is in the books of both sides once
        assert books.received == sent
        assert books.ended["rejected"] == early + over.outcomes["rejected"] + len(refused)
        assert books.ended["length"] + books.ended["stop"] == served + over.outcomes["length"] + probes.count(200)
        identities = [answer.json()["id"] for answer in scraper.answers if answer.status_code == 200]
        assert len(set(identities)) == len(identities)
        # a queue that is full is as long as at capacity, and so is what is waited in it; a probe of one token takes a place, too
        steps = steps_taken(server, begun, before)
        assert steps[len(steps) * 99 // 100] <= 1.25 * steps_at_capacity[-1] + 2
        # every scrape was answered, and the last one has all
        assert {page.status_code for page in scraper.pages} == {200}
        counts = [received(page.text) for page in scraper.pages]
        assert counts == sorted(counts)
        assert received(HTTP.get(f"{server.url}/metrics").text) == sent


def test_two_hundred_scrapers_at_once_and_a_busy_engine_are_all_answered() -> None:
    with serving(load_model("tiny"), max_num_seqs=RUNNING) as server:
        stop = threading.Event()

        def busy() -> None:
            while not stop.is_set():
                HTTP.post(f"{server.url}/v1/completions", json={"model": "tiny", "prompt": "x", "max_tokens": 8})

        worker = threading.Thread(target=busy, daemon=True)
        worker.start()
        statuses = scrape_at_once(f"{server.url}/metrics", 200)
        stop.set()
        worker.join(60)
        assert statuses == [200] * 200
        assert server.check_books().ended["error"] == 0


def test_an_idle_connection_is_kept_longer_than_clients_keep_it() -> None:
    """Else a request is lost now and then: sent on a connection that the server closes at this moment."""
    patience = httpx.Limits().keepalive_expiry
    assert patience is not None
    with serving(load_model("tiny")) as server:
        assert server.http.config.timeout_keep_alive > 2 * patience


def scrape_at_once(url: str, count: int) -> list[int]:
    """Statuses of `count` scrapes, all of which are connected before the first is sent."""
    import socket
    from urllib.parse import urlsplit

    parts = urlsplit(url)
    sockets = [socket.create_connection((parts.hostname, parts.port), timeout=60) for _ in range(count)]
    asked = f"GET {parts.path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAccept-Encoding: gzip\r\n\r\n".encode()
    for each in sockets:
        each.sendall(asked)
    statuses = []
    for each in sockets:
        with each, each.makefile("rb") as answer:
            statuses.append(int(answer.readline().split()[1]))
            length = next(int(line.split(b":")[1]) for line in answer if line.lower().startswith(b"content-length"))
            while answer.readline().strip():
                pass
            assert len(answer.read()) == length
    return statuses


def test_an_exporter_of_its_own_answers_two_hundred_scrapers_at_once() -> None:
    from exporters.prometheus import start_exporter
    from tests.telemetry.bench import Bench

    with start_exporter(Bench().t) as exporter:
        began = time.monotonic()
        assert scrape_at_once(exporter.url, 200) == [200] * 200
        assert time.monotonic() - began < 60
