"""Runs the processes of a demo together: starts them in order, waits until each answers, and leaves nothing running.

A child lives in its own session, so that Ctrl-C reaches only the supervisor, which ends the children in reverse order.
On Linux the kernel also ends a child whose supervisor was killed without a chance to clean up (prctl, PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType

import httpx

from observability.errors import ServiceError

_PR_SET_PDEATHSIG = 1
STOP_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Service:
    """One child process. `ready_url` must answer 200 within `ready_seconds`; None means ready once started."""

    name: str
    argv: Sequence[str]
    ready_url: str | None = None
    ready_seconds: float = 120.0
    env: dict[str, str] = field(default_factory=dict)


def check_port_free(host: str, port: int, what: str) -> None:
    """Raises ServiceError when nothing could listen on host:port."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((host, port))
        except OSError as error:
            raise ServiceError(
                f"{what} cannot listen on {host}:{port}: {error.strerror}.",
                next_step=f"Stop what uses port {port}, or choose another port.",
            ) from error


class Supervisor:
    """Context manager around a set of services; leaving it ends every child, whatever happened."""

    def __init__(self, log_dir: Path) -> None:
        log_dir.mkdir(parents=True, exist_ok=True)
        self.log_dir = log_dir
        self._children: list[tuple[Service, subprocess.Popen[bytes]]] = []
        self._stopping = False
        self._old_handlers: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    def __enter__(self) -> Supervisor:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self._old_handlers[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping = True  # a second Ctrl-C must not interrupt the clean-up
        self._stop_children()
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)

    def start(self, service: Service) -> None:
        """Starts one service and waits for it. Raises ServiceError with the end of its log when it does not come up."""
        log = self.log_dir / f"{service.name}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                service.argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=os.environ | service.env,
                start_new_session=True,
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )
        self._children.append((service, process))
        if service.ready_url is None:
            return
        deadline = time.monotonic() + service.ready_seconds
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise self._failure(service, f"ended with code {process.returncode} while starting")
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(service.ready_url, timeout=2.0, trust_env=False).status_code == 200:
                    return
            time.sleep(0.2)
        raise self._failure(service, f"did not answer {service.ready_url} within {service.ready_seconds:.0f} s")

    def watch(self) -> None:
        """Blocks until a signal asks to stop (returns) or a service ends by itself (raises ServiceError)."""
        while not self._stopping:
            for service, process in self._children:
                if process.poll() is not None:
                    raise self._failure(service, f"ended by itself with code {process.returncode}")
            time.sleep(0.3)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self._stopping:
            self._stopping = True
            raise KeyboardInterrupt

    def _stop_children(self) -> None:
        for _, process in reversed(self._children):
            _signal_group(process, signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        for _, process in reversed(self._children):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
        for _, process in reversed(self._children):
            _signal_group(process, signal.SIGKILL)  # also what a child left behind in its group
            process.wait()

    def _failure(self, service: Service, what: str) -> ServiceError:
        log = self.log_dir / f"{service.name}.log"
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-8:])
        return ServiceError(f"{service.name} {what}.\n{tail}".rstrip(), next_step=f"Read {log}.")


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
