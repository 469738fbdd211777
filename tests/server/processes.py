"""`kvscope serve` and `kvscope route` as processes, ended whatever happens."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import httpx

from tests.conftest import wait_for

_ENV = {"OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "200"}


class Process:
    """A running command; `output` grows with what it prints."""

    def __init__(self, *argv: str) -> None:
        self._process = subprocess.Popen(
            (sys.executable, "-m", "observability.cli", *argv),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | _ENV,
            start_new_session=True,
        )
        self.output = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = ""

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.output += line.decode()
        self._process.stdout.close()

    def wait_up(self) -> None:
        """Waits until it has printed its address, which is `url` from then on, and is healthy."""
        found = wait_for(lambda: re.search(r"API +(http://\S+)/v1", self.output), 60, "address printed")
        assert isinstance(found, re.Match)
        self.url = found.group(1)
        wait_for(lambda: httpx.get(self.url + "/health", trust_env=False).status_code == 200, 20, "healthy")

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Its exit code; negative when a signal ended it."""
        self._process.send_signal(number)
        code = self._process.wait(20)
        self._reader.join(5)
        return code

    def close(self) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._reader.join(5)


@contextlib.contextmanager
def running(*argv: str) -> Iterator[Process]:
    process = Process(*argv)
    try:
        yield process
    finally:
        process.close()


def serve(*options: str) -> contextlib.AbstractContextManager[Process]:
    """`kvscope serve tiny`; wait_up() says when it can be used."""
    return running("serve", "tiny", *options)


def route(*options: str) -> contextlib.AbstractContextManager[Process]:
    return running("route", *options)
