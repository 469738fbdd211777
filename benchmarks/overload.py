"""A server under four times its capacity: who is served how fast, who is refused, how fast it is scraped, and whether anything was lost.

    python benchmarks/overload.py [--seconds 20] [--factor 4] [--json FILE]

`kvscope serve tiny` runs as a process of its own, with /metrics on its port and once more with the endpoint in another process
(--metrics-port). As many clients as fit (running and queued) first find its capacity; then requests come at --factor times that rate,
whatever becomes of them, while /metrics is scraped ten times a second. Last, the books: what the client sent and got against
what the server's counters say.

The clients and the scraper run on the same machine, and take a core of it: on two cores the server has the other one. Requests are long (96
tokens), so that this client can send four times what the server can serve.
"""

from __future__ import annotations

import math
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from figures import Parser, Row, keep
from observability.engine.types import PromptSpan
from observability.workload.replay_http import HttpSettings, replay_http
from observability.workload.traces import TraceRequest

RUNNING, QUEUED, TOKENS = 8, 16, 96
WARM_UP, AT_CAPACITY = 24, 120
SCRAPES_A_SECOND, LIMIT_SECONDS = 10.0, 0.1


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def server(apart: bool) -> Iterator[tuple[str, str]]:
    """`kvscope serve tiny`: its address and that of its metrics; `apart`: from a process of their own."""
    port, metrics_port = free_port(), free_port()
    command = [sys.executable, "-m", "observability.cli", "serve", "tiny", "--port", str(port)]
    command += ["--max-num-seqs", str(RUNNING), "--max-queued", str(QUEUED)]
    command += ["--metrics-port", str(metrics_port)] if apart else []
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    url, metrics = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{metrics_port if apart else port}/metrics"
    try:
        for _ in range(600):
            with suppress(httpx.HTTPError):
                if httpx.get(f"{url}/health").is_success and httpx.get(metrics).is_success:
                    break
            time.sleep(0.1)
        else:
            raise SystemExit("kvscope serve did not answer within a minute")
        yield url, metrics
    finally:
        process.terminate()
        process.wait(30)


def load(first: int, count: int, rate: float) -> list[TraceRequest]:
    """`count` prompts that nobody had before, `rate` a second."""
    return [TraceRequest(i / rate, PromptSpan(16, (first + i,), 512), TOKENS) for i in range(count)]


def counted(metrics: str) -> dict[str, float]:
    """Requests by outcome as the server counts them, and `received`."""
    out: dict[str, float] = {}
    for family in text_string_to_metric_families(httpx.get(metrics, timeout=30).text):
        for sample in family.samples:
            if sample.name in ("kvscope_requests_received_total", "kvscope_requests_total"):
                name = sample.labels.get("outcome", "received")
                out[name] = out.get(name, 0.0) + sample.value
    return out


class Scraper(threading.Thread):
    """Scrapes until told to stop; `seconds` of each answer."""

    def __init__(self, metrics: str) -> None:
        super().__init__(daemon=True)
        self.metrics, self.done, self.seconds = metrics, threading.Event(), list[float]()
        self.failed = 0

    def run(self) -> None:
        with httpx.Client(timeout=30) as client:
            while not self.done.wait(1 / SCRAPES_A_SECOND):
                began = time.perf_counter()
                try:
                    client.get(self.metrics).raise_for_status()
                except httpx.HTTPError:
                    self.failed += 1
                else:
                    self.seconds.append(time.perf_counter() - began)


def measure(apart: bool, factor: float, seconds: float) -> dict[str, Any]:
    """Figures of one server, by name."""
    with server(apart) as (url, metrics):
        full = HttpSettings(url, max_concurrency=RUNNING + QUEUED, ignore_eos=True)
        replay_http(load(0, WARM_UP, 1e6), full)
        before = counted(metrics)
        at_capacity = replay_http(load(WARM_UP, AT_CAPACITY, 1e6), full)
        rate = at_capacity.outcomes["length"] / at_capacity.duration_seconds
        scraper = Scraper(metrics)
        scraper.start()
        count = math.ceil(rate * factor * seconds)
        settings = HttpSettings(url, max_concurrency=4000, ignore_eos=True)
        over = replay_http(load(WARM_UP + AT_CAPACITY, count, rate * factor), settings)
        scraper.done.set()
        scraper.join(60)
        after = counted(metrics)
    sent = {name: at_capacity.outcomes[name] + over.outcomes[name] for name in at_capacity.outcomes}
    booked = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in after}
    scrapes = sorted(scraper.seconds)
    return {
        "capacity_requests_per_second": rate,
        "offered_requests_per_second": over.requests / over.duration_seconds,
        "sent": AT_CAPACITY + count,
        "client": sent,
        "server": booked,
        "not_received": AT_CAPACITY + count - booked["received"],
        "served_differ": sent["length"] - booked.get("length", 0.0),
        "refused_differ": sent["rejected"] - booked.get("rejected", 0.0),
        "other_outcomes": over.reasons,
        "at_capacity": at_capacity.latency["end_to_end_seconds"],
        "over": over.latency["end_to_end_seconds"],
        "scrapes": len(scrapes),
        "scrapes_failed": scraper.failed,
        "scrape_median_seconds": statistics.median(scrapes),
        "scrape_p95_seconds": scrapes[math.ceil(0.95 * len(scrapes)) - 1],
        "scrape_longest_seconds": scrapes[-1],
        "scrapes_over_limit": sum(1 for each in scrapes if each > LIMIT_SECONDS) / len(scrapes),
    }


def main() -> None:
    parser = Parser(__doc__, quick={"seconds": 5.0})
    parser.add_argument("--factor", type=float, default=4.0, help="of the capacity [default: 4]")
    parser.add_argument("--seconds", type=float, default=20.0, help="of overload [default: 20]")
    options = parser.parse_args()
    rows, detail = [], {}
    for apart, where in ((False, "metrics on the server's port"), (True, "metrics by a process of their own")):
        figures = detail[where] = measure(apart, options.factor, options.seconds)
        print(f"\n{where}, load average {os.getloadavg()[0]:.1f}")
        for name, value in figures.items():
            print(f"  {name:32} {value}")
        rows += [
            Row(f"{where}: offered / capacity", figures["offered_requests_per_second"] / figures["capacity_requests_per_second"], "ratio"),
            *(
                Row(f"{where}: admitted, end to end, {q}, over capacity / at it", figures["over"][q] / figures["at_capacity"][q], "ratio")
                for q in ("p50", "p99")
            ),
            Row(f"{where}: requests that the server has not in its books", figures["not_received"], "requests"),
            Row(f"{where}: requests whose end the two books tell differently", abs(figures["served_differ"]) + abs(figures["refused_differ"]), "requests"),
            Row(f"{where}: scrapes that failed", figures["scrapes_failed"], "scrapes"),
            Row(f"{where}: a scrape, median", figures["scrape_median_seconds"] * 1e3, "ms"),
            Row(f"{where}: a scrape, P95", figures["scrape_p95_seconds"] * 1e3, "ms"),
            Row(f"{where}: the longest scrape", figures["scrape_longest_seconds"] * 1e3, "ms"),
        ]  # fmt: skip
    keep(options, rows, detail)


if __name__ == "__main__":
    main()
