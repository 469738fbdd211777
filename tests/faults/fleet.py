"""All long-lived processes of a deployment on this machine, each of which can be killed at any moment and started again: two replicas behind
a router, an exporter of its own, a recorder and a second writer on one store, Prometheus, the app."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from observability.store.embedded import EmbeddedStore
from tests.conftest import REPO, wait_for

INTERVAL = 1.0  # of the recorder and of Prometheus
SIGNAL = "model:kvscope_requests_received:rate5m"
WRITER_STEP = 0.5  # seconds of the written series between two rows
_ENV = {"OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "200", "PYTHONPATH": str(REPO)}
_CLI = (sys.executable, "-m", "observability.cli")

#: Writes row after row of a series of its own, value n at place n, and says each number once the store has taken it.
_WRITER = f"""
import sys, time
import numpy as np
from observability.store.embedded import EmbeddedStore, SignalBlock
store, base, n = EmbeddedStore(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
while True:
    row = SignalBlock(np.array([base + n * {WRITER_STEP}]), [{{"model": "writer"}}], np.array([[float(n)]]))
    store.append_blocks({{"{SIGNAL}": row}}, observed_until=0.0)
    print(n, flush=True)
    n += 1
    time.sleep(0.02)
"""


def http() -> httpx.Client:
    return httpx.Client(trust_env=False, timeout=30, limits=httpx.Limits(max_keepalive_connections=0))


@dataclass
class Member:
    """One process. `argv` is asked for at each start, `ready` says when it works again."""

    name: str
    argv: Callable[[], Sequence[str]]
    ready: Callable[[], object]
    log: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                self.argv(), stdout=out, stderr=subprocess.STDOUT, env=os.environ | _ENV, start_new_session=True
            )

    def wait(self) -> None:
        def looked() -> object:
            assert self.process is not None
            assert self.process.poll() is None, f"{self.name} ended with {self.process.returncode}"
            return self.ready()

        wait_for(looked, 120, f"{self.name} works (see {self.log})")

    def kill(self) -> None:
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGKILL)
        assert self.process.wait(30) == -signal.SIGKILL


@dataclass
class Fleet:
    folder: Path
    members: dict[str, Member] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.client = http()
        names = ("replica0", "replica1", "router", "exporter", "prometheus", "app")
        self.ports = dict(zip(names, _free_ports(len(names)), strict=True))
        self.store = self.folder / "store.sqlite"
        self.base = time.time() - 86_400.0  # of the writer's rows: within the store's full resolution
        self.written = 0  # rows that were there when the writer was started last

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.ports[name]}"

    def add(self, name: str, argv: Callable[[], Sequence[str]], ready: Callable[[], object]) -> None:
        self.members[name] = Member(name, argv, ready, self.folder / f"{name}.log")

    def start(self, *, prometheus: str, app: bool) -> None:
        for i in (0, 1):
            options = ("--port", str(self.ports[f"replica{i}"]), "--snapshot-dir", str(self.folder / "sessions"))
            self.add(
                f"replica{i}", lambda o=options: (*_CLI, "serve", "tiny", *o), self.answers(f"replica{i}", "/health")
            )
        replicas = [part for i in (0, 1) for part in ("--replica", self.url(f"replica{i}"))]
        options = ("--port", str(self.ports["router"]), "--check-interval", "0.1", *replicas)
        self.add("router", lambda: (*_CLI, "route", *options), self.answers("router", "/health"))
        gpu = (*_CLI, "gpu", "--port", str(self.ports["exporter"]))
        self.add("exporter", lambda: gpu, self.answers("exporter", "/metrics"))
        metrics = self.url("replica0") + "/metrics"
        record = (*_CLI, "record", "--url", metrics, "--store", str(self.store), "--interval", f"{INTERVAL:g}s")
        self.add("recorder", lambda: record, self.recorded)
        self.add("writer", self._writer, lambda: self.said() > self.written)
        config = self.folder / "prometheus.yml"
        targets = ", ".join(f"'127.0.0.1:{self.ports[name]}'" for name in ("replica0", "replica1"))
        config.write_text(
            f"global: {{scrape_interval: {INTERVAL:g}s}}\n"
            f"scrape_configs: [{{job_name: kvscope, static_configs: [{{targets: [{targets}]}}]}}]\n"
        )
        server = (
            prometheus, f"--config.file={config}", f"--storage.tsdb.path={self.folder / 'prometheus'}",
            f"--web.listen-address=127.0.0.1:{self.ports['prometheus']}",
        )  # fmt: skip
        self.add("prometheus", lambda: server, self.answers("prometheus", "/-/ready"))
        if app:
            pages = (*_CLI, "app", "--source", str(self.store), "--port", str(self.ports["app"]))
            self.add("app", lambda: pages, self.answers("app", "/_stcore/health"))
        for name, member in self.members.items():
            if name not in ("writer", "app"):
                member.start()
        self.members["recorder"].wait()  # it makes the store
        for name in ("writer", "app"):
            if name in self.members:
                self.members[name].start()
        for member in self.members.values():
            member.wait()
        wait_for(self.both_up, 60, "both replicas get requests")

    def stop(self) -> None:
        for member in self.members.values():
            if member.process is not None and member.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(member.process.pid, signal.SIGKILL)
                member.process.wait()

    # -- what it can be asked ----------------------------------------------------------------------------------------------

    def answers(self, name: str, path: str) -> Callable[[], bool]:
        return lambda: self.client.get(self.url(name) + path).status_code == 200

    def both_up(self) -> bool:
        return all(replica["up"] for replica in self.client.get(self.url("router") + "/health").json()["replicas"])

    def recorded(self) -> bool:
        """Whether something was recorded in the last seconds."""
        age = EmbeddedStore(self.store).freshness() if self.store.exists() else None
        return age is not None and age < 5 * INTERVAL

    def newest(self) -> float:
        """Unix time of the newest recorded step, the writer's rows left out: those lie a day back."""
        extent = EmbeddedStore(self.store).extent()
        return 0.0 if extent is None else extent[1]

    def _writer(self) -> Sequence[str]:
        self.written = self.rows_written()
        return (sys.executable, "-c", _WRITER, str(self.store), str(self.base), str(self.written))

    def said(self) -> int:
        """How many rows the writer has said are stored, in all its lives; a last line that was cut off says nothing."""
        numbers = re.findall(r"^(\d+)\n", self.members["writer"].log.read_text(), re.MULTILINE)
        return int(numbers[-1]) + 1 if numbers else 0

    def rows_written(self) -> int:
        """How many of the writer's rows are in the store, each with its value and none left out."""
        end = self.base + (self.said() + 2) * WRITER_STEP
        found = EmbeddedStore(self.store).range(SIGNAL, self.base, end, WRITER_STEP, {"model": "writer"})
        values = [round(value) for value in found["value"]]
        rows = len(dict.fromkeys(values))  # the last one stays current
        assert values[:rows] == list(range(rows))
        return rows

    def query(self, expression: str) -> list[dict]:  # type: ignore[type-arg]
        answer = self.client.post(self.url("prometheus") + "/api/v1/query", data={"query": expression})
        return answer.json()["data"]["result"]  # type: ignore[no-any-return]


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports
