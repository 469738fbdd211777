"""The process that process.py starts: a Prometheus endpoint over sources that lie in another process.

Started as `python -m exporters.mirror CONNECTION LISTENER`, two file descriptors; it ends when its standard input does.
"""

from __future__ import annotations

import socket
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from exporters.process import Columns, Request, Rows, Setup
from exporters.prometheus import MetricsApp, metrics_server
from exporters.together import Together
from observability.catalog import FAMILIES
from observability.telemetry.snapshot import Block, FamilySamples, Layout

_FAMILY = {family.name: family for family in FAMILIES}


class Far:
    """The other process. Raises EOFError when it is gone, and RuntimeError when it could not read the source."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()  # both forms may be rendered at the same time

    def ask(self, part: int, known: int = 0) -> Any:
        with self._lock:
            self._connection.send(Request(part, known))
            answer = self._connection.recv()
        if answer is None:
            raise RuntimeError("the source could not be read; the engine's log says why")
        return answer


class MirroredRows:
    """A source of few rows: all of them come over at each scrape."""

    def __init__(self, far: Far, part: int) -> None:
        self._far, self._part = far, part

    def snapshot(self) -> list[FamilySamples]:
        rows: Rows = self._far.ask(self._part)
        return [FamilySamples(_FAMILY[name], of_family) for name, of_family in rows]


class MirroredColumns:
    """A recorder: its layout is kept here, its values come over."""

    def __init__(self, far: Far, part: int) -> None:
        self._far, self._part = far, part
        self._lock = threading.Lock()
        self._layout = Layout(())

    def columns(self, pause_seconds: float = 0.0) -> tuple[Layout, np.ndarray]:
        """Layout and values; nobody's steps are behind this interpreter, so that it never pauses."""
        with self._lock:
            known = self._layout
            answer: Columns = self._far.ask(self._part, len(known.blocks))
            if answer.new:
                known = self._layout = known.extended(
                    Block(_FAMILY[name], rows, _elsewhere, None if count is None else [None] * count)
                    for name, rows, count in answer.new
                )
            for number, place, exemplar in answer.exemplars:
                exemplars = known.blocks[number].exemplars
                assert exemplars is not None
                exemplars[place] = exemplar
            return known, np.frombuffer(answer.values)

    def snapshot(self) -> list[FamilySamples]:
        layout, values = self.columns()
        return layout.rows(values.tolist())


def _elsewhere(_: object) -> list[float]:
    raise RuntimeError("the values of a mirror come from the other process: read its columns")


def main() -> None:
    connection, listener = Connection(int(sys.argv[1])), socket.socket(fileno=int(sys.argv[2]))
    setup: Setup = connection.recv()
    far = Far(connection)
    sources = [(MirroredColumns if c else MirroredRows)(far, part) for part, c in enumerate(setup.columnar)]
    server = metrics_server(MetricsApp(Together(sources), setup.token, pause_seconds=0.0), setup.tls)

    def end_with_parent() -> None:
        sys.stdin.buffer.read()
        server.should_exit = True

    threading.Thread(target=end_with_parent, daemon=True).start()
    server.run(sockets=[listener])


if __name__ == "__main__":
    main()
