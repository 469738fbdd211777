"""The supervisor: leaves nothing running however it ends, and says what failed with the end of its log."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from observability.errors import ServiceError
from observability.supervise import Service, Supervisor, check_port_free
from tests.conftest import wait_for

SLEEPER = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); print('up', flush=True); time.sleep(600)"


def children_of(group: int) -> list[int]:
    """Live processes of a process group, from /proc."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, pgrp = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:3]
            except (OSError, IndexError):
                continue
            if int(pgrp) == group and state != "Z":
                found.append(int(entry.name))
    return found


def test_leaving_ends_children_and_grandchildren(tmp_path: Path) -> None:
    with Supervisor(tmp_path) as supervisor:
        supervisor.start(Service("sleeper", (sys.executable, "-c", SLEEPER)))
        group = supervisor._children[0][1].pid
        wait_for(lambda: len(children_of(group)) == 2, 10, "child and grandchild")
    wait_for(
        lambda: children_of(group) == [], 5, "both are gone"
    )  # on a busy machine one that was killed takes its time


def test_a_child_that_ends_by_itself_is_named_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match=r"(?s)worker ended by itself with code 3.*the disk is full"):
        with Supervisor(tmp_path) as supervisor:
            supervisor.start(
                Service("worker", (sys.executable, "-c", "import sys; print('the disk is full'); sys.exit(3)"))
            )
            supervisor.watch()


def test_a_child_that_never_answers_is_given_up(tmp_path: Path, free_port: Callable[[], int]) -> None:
    with pytest.raises(ServiceError, match="did not answer"):
        with Supervisor(tmp_path) as supervisor:
            url = f"http://127.0.0.1:{free_port()}/health"
            supervisor.start(Service("mute", (sys.executable, "-c", SLEEPER), ready_url=url, ready_seconds=1.0))


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_nothing_is_left_when_the_supervisor_is_signalled(tmp_path: Path, how: signal.Signals) -> None:
    program = textwrap.dedent(f"""
        import sys
        from pathlib import Path
        from observability.supervise import Service, Supervisor
        with Supervisor(Path({str(tmp_path)!r})) as s:
            s.start(Service("sleeper", (sys.executable, "-c", "import time; time.sleep(600)")))
            try:
                print(s._children[0][1].pid, flush=True)
                s.watch()
            except KeyboardInterrupt:
                pass
    """)
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    assert children_of(child) == [child]
    process.send_signal(how)
    assert process.wait(timeout=20) == (0 if how != signal.SIGKILL else -signal.SIGKILL)
    wait_for(lambda: children_of(child) == [], 10, "the child's end")
    process.stdout.close()


def test_a_port_in_use_is_named_with_the_next_step(free_port: Callable[[], int]) -> None:
    import socket

    port = free_port()
    check_port_free("127.0.0.1", port, "The engine")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(ServiceError, match=f"The engine cannot listen on 127.0.0.1:{port}") as caught:
            check_port_free("127.0.0.1", port, "The engine")
    assert "another port" in caught.value.next_step


def test_waiting_does_not_outlast_a_signal(tmp_path: Path) -> None:
    """watch() polls: a stop is seen within a second."""
    started = time.monotonic()
    with Supervisor(tmp_path) as supervisor:
        supervisor.start(Service("sleeper", (sys.executable, "-c", "import time; time.sleep(600)")))
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
            supervisor.watch()
    assert time.monotonic() - started < 5.0
