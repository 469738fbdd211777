"""The endpoint in a process of its own: HTTP, rendering and compression never hold the interpreter of an engine.

This is the engine's side. A thread that sleeps until the other process (mirror.py) asks reads the values, a fifth of a millisecond at a
time, and sends them over: of a recorder 8 bytes a series, and what is new of its layout and exemplars.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from socket import socket
from typing import NamedTuple

from exporters.prometheus import listen, metrics_url
from exporters.together import Columnar, Source, parts
from observability.telemetry.snapshot import Block, Exemplar, Row
from observability.tls import Tls

_log = logging.getLogger(__name__)
#: Between two parts of a reading, each a fifth of a millisecond: a part costs a step some tenths, by the change of threads too.
_PAUSE_SECONDS = 0.008
_AGAIN_SECONDS = 1.0  # after which an endpoint that ended is started again
_STOP_SECONDS = 5.0


class Setup(NamedTuple):
    """First message to the mirror. `columnar`: of each part of the source, whether it gives Columns or rows."""

    token: str | None
    tls: Tls | None
    columnar: tuple[bool, ...]


class Request(NamedTuple):
    """What the mirror asks: part number `part`, of which it knows the first `known` blocks."""

    part: int
    known: int = 0


class Columns(NamedTuple):
    """A reading of a recorder: (family name, rows, number of exemplars or None) of blocks that are new, float64 values, and the exemplars
    that changed as (block, place, exemplar)."""

    new: list[tuple[str, tuple[tuple[str, tuple[str, ...]], ...], int | None]]
    values: bytes
    exemplars: list[tuple[int, int, Exemplar | None]]


Rows = list[tuple[str, list[Row]]]  # of any other source: by family name


class ExporterProcess:
    """A running endpoint. `url` is where Prometheus scrapes; `stop` (or leaving a `with` block) ends it.

    It is started again when it ends by itself, and ends with this process, however that ends.
    """

    def __init__(self, telemetry: Source, listener: socket, token: str | None = None, tls: Tls | None = None) -> None:
        """Takes `listener` over, a listening socket."""
        self.url = metrics_url(listener, tls)
        self._sources = parts(telemetry)
        self._listener, self._token, self._tls = listener, token, tls
        self._stopping = threading.Event()
        self._changing = threading.Lock()  # held while the process is started again or ended
        self._known = [_Known() for _ in self._sources]
        self._process, self._connection = self._start()
        self._thread = threading.Thread(target=self._run, name="kvscope-scrapes", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self, timeout: float = _STOP_SECONDS) -> None:
        """Ends the process and waits for it; one that takes longer than `timeout` seconds is killed."""
        self._stopping.set()
        with self._changing:
            self._listener.close()
            self._end(timeout)
        self._thread.join(timeout)

    def __enter__(self) -> ExporterProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self) -> tuple[subprocess.Popen[bytes], Connection]:
        ours, theirs = Pipe()
        with theirs:
            handles = (theirs.fileno(), self._listener.fileno())
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "exporters.mirror", *map(str, handles)],
                pass_fds=handles,
                stdin=subprocess.PIPE,  # its end tells the process that this one has ended
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
                start_new_session=True,  # Ctrl-C is this process's to answer
            )
        ours.send(Setup(self._token, self._tls, tuple(isinstance(source, Columnar) for source in self._sources)))
        return process, ours

    def _end(self, timeout: float) -> None:
        process = self._process
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _run(self) -> None:
        while True:
            try:
                while True:
                    request: Request = self._connection.recv()
                    self._connection.send(self._answer(request))
            except (EOFError, OSError):
                self._connection.close()
            self._stopping.wait(_AGAIN_SECONDS)
            with self._changing:
                if self._stopping.is_set():
                    return
                self._end(_STOP_SECONDS)
                _log.warning("the metrics process ended with status %s; it is started again", self._process.returncode)
                self._process, self._connection = self._start()

    def _answer(self, request: Request) -> Columns | Rows | None:
        """None: the source could not be read."""
        source = self._sources[request.part]
        try:
            if isinstance(source, Columnar):
                return self._known[request.part].read(source, request.known)
            return [(family.name, rows) for family, rows in source.snapshot()]
        except Exception:
            _log.exception("a source of metrics could not be read")
            return None


class _Known:
    """What the mirror knows of one recorder."""

    def __init__(self) -> None:
        self._exemplars: list[
            tuple[int, Block, list[Exemplar | None]]
        ] = []  # number of the block, and what was sent of it

    def read(self, source: Columnar, known: int) -> Columns:
        layout, values = source.columns(_PAUSE_SECONDS)
        new = []
        if not known:
            self._exemplars.clear()
        for number in range(known, len(layout.blocks)):
            block = layout.blocks[number]
            count = None if block.exemplars is None else len(block.exemplars)
            new.append((block.family.name, block.rows, count))
            if count is not None:
                self._exemplars.append((number, block, [None] * count))
        changed = []
        for number, block, sent in self._exemplars:
            now = list(block.exemplars or ())
            changed += [(number, i, b) for i, (a, b) in enumerate(zip(sent, now, strict=True)) if a is not b]
            sent[:] = now
        return Columns(new, values.tobytes(), changed)


def start_exporter_process(
    telemetry: Source, host: str = "127.0.0.1", port: int = 0, *, token: str | None = None
) -> ExporterProcess:
    """Serves `telemetry` at http://host:port/metrics from a process of its own; port 0 takes a free one.

    It takes a second or two to answer the first scrape, and about 60 MB. Raises ServiceError if the address cannot be taken.
    """
    return ExporterProcess(telemetry, listen(host, port), token)
