"""What every test shares: where outside data lies, which servers are installed, free ports, process clean-up."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
#: No configuration file of whoever runs the tests; processes that tests start inherit it.
os.environ["KVSCOPE_CONFIG"] = os.devnull
#: torch's threads, here and in processes that tests start: twice as many as cores would wait for each other.
os.environ.setdefault(
    "OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))))
)
IN_CI = os.environ.get("CI", "").lower() in ("1", "true", "yes")


def require(condition: object, reason: str) -> None:
    """Skips with `reason`; in CI the same lack fails the test, so that nothing is left out unseen."""
    if not condition:
        if IN_CI:
            pytest.fail(reason)
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def environment_stays() -> Iterator[None]:
    """A command that runs in this process hands settings on by the environment: the next test must not inherit them."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Recorded traces, captures and series: the folder named by KVSCOPE_DATA, or `shared` beside the repository."""
    path = Path(os.environ.get("KVSCOPE_DATA", REPO.parent / "shared"))
    require(
        path.is_dir(), f"recorded data is missing: set KVSCOPE_DATA to the folder that holds traces/ (tried {path})"
    )
    return path


@pytest.fixture(scope="session")
def program() -> Callable[[str], str]:
    """Path of a server or tool from the system's packages, by name."""

    def find(name: str) -> str:
        path = shutil.which(name)
        require(
            path,
            f"{name} is not installed: apt-get install prometheus prometheus-alertmanager chromium chromium-driver",
        )
        assert path is not None
        return path

    return find


@pytest.fixture
def free_port() -> Callable[[], int]:
    def find() -> int:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            return int(s.getsockname()[1])

    return find


@pytest.fixture
def spawn() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts a process in its own group and ends the whole group after the test."""
    started: list[subprocess.Popen[bytes]] = []

    def heed_interrupts() -> None:
        """In the child: it may have inherited that Ctrl-C is ignored, as processes of a background job do."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    def start(*argv: str, **kwargs: object) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(argv, start_new_session=True, preexec_fn=heed_interrupts, **kwargs)  # type: ignore[call-overload]
        started.append(process)
        return process  # type: ignore[no-any-return]

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
    for process in started:
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_for(check: Callable[[], object], seconds: float, what: str) -> object:
    """Polls `check` until it returns something true (which is returned) or fails the test after `seconds`."""
    deadline, last = time.monotonic() + seconds, None
    while time.monotonic() < deadline:
        try:
            if result := check():
                return result
        except Exception as error:
            last = error
        time.sleep(0.1)
    pytest.fail(f"{what}: not within {seconds} s (last error: {last})")
