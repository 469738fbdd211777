"""CPU profiles arrive at a Pyroscope server with the engine's phases, and a server that is not there changes nothing."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest

from exporters.profiles import PhaseTag, profiles_to
from observability.errors import ConfigError
from tests.conftest import wait_for
from tests.profiles.pushes import Pyroscope

pytest.importorskip("pyroscope")
torch = pytest.importorskip("torch")

from observability.cli.profile import _engine, _Load  # noqa: E402
from observability.engine.profiling import named, phases  # noqa: E402


@pytest.fixture
def pyroscope() -> Iterator[Pyroscope]:
    server = Pyroscope()
    yield server
    server.stop()


def burn_outside(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def burn_inside(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def test_samples_carry_the_phase_they_were_taken_in(pyroscope: Pyroscope) -> None:
    def work(tag: PhaseTag) -> None:
        with tag("forward_decode"):
            burn_outside(0.6)
            with tag("kv_move"):
                burn_inside(1.2)
            burn_outside(0.6)

    with profiles_to(pyroscope.url, {"model": "tiny"}, upload_seconds=1) as tag:
        thread = threading.Thread(target=work, args=(tag,))
        thread.start()
        thread.join()
        wait_for(lambda: pyroscope.functions["kv_move", "burn_inside"], 10, "a push")
        time.sleep(1.5)
    found = pyroscope.functions
    inside, outside = found["kv_move", "burn_inside"], found["forward_decode", "burn_outside"]
    assert inside > 20
    assert outside > 20
    strays = sum(n for (phase, name), n in found.items() if name == "burn_inside" and phase != "kv_move")
    assert strays <= 3, "at most a sample at each change"
    assert pyroscope.periods == {10_000_000}, "100 samples a second"
    assert all(labels["service_name"] == "kvscope" and labels["model"] == "tiny" for labels in pyroscope.labels)


def serve(spawn, port: int, url: str, **options) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process: subprocess.Popen[bytes] = spawn(
        sys.executable, "-m", "observability.cli", "serve", "tiny", "--port", str(port), "--profile-to", url, env=environment, **options
    )  # fmt: skip
    return process


def complete(port: int, tokens: int) -> httpx.Response:
    body = {"model": "tiny", "prompt": "a b c", "max_tokens": tokens, "ignore_eos": True}
    return httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60)


def test_serve_sends_profiles_with_the_phases_of_the_engine(spawn, free_port, pyroscope: Pyroscope) -> None:
    port = free_port()
    process = serve(spawn, port, pyroscope.url)
    wait_for(lambda: httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200, 60, "the server")
    end = time.monotonic() + 60
    while not pyroscope.samples["forward_decode"] and time.monotonic() < end:
        assert complete(port, 200).status_code == 200
    process.terminate()
    assert process.wait(20) == 0
    assert pyroscope.samples["forward_decode"] > pyroscope.samples["schedule"]
    assert set(pyroscope.samples) <= {
        "",
        "schedule",
        "forward_prefill",
        "forward_decode",
        "forward_mixed",
        "kv_move",
        "emit",
    }
    in_forward = Counter[bool]()
    for (phase, name), count in pyroscope.functions.items():
        if name.rpartition(".")[2] in ("execute", "attend"):
            in_forward[phase.startswith("forward")] += count
    assert in_forward[True] > 10
    # The sampler reads stack and tag one after the other, so that a change of phase between them is misread: 1 % on a quiet
    # machine, 6 % on a loaded one. Without tags it would be all of them.
    assert in_forward[False] <= 0.2 * in_forward[True], "samples at a change of phase"


@pytest.mark.parametrize("hangs", [False, True], ids=["not there", "hangs"])
def test_a_server_that_does_not_answer_disturbs_nothing(free_port, hangs: bool) -> None:
    torch.set_num_threads(1)
    engine = _engine("tiny", "cpu", 4, 40, 10, "auto")
    load = _Load(engine, 4, 40, 10)
    load.run(3, None)
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        port = free_port()
        if hangs:  # connections are taken by the kernel, and nothing comes of them
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
        with profiles_to(f"http://127.0.0.1:{port}", {}, upload_seconds=1) as tag, named(phases(engine), tag):
            while time.monotonic() < began + 3.5:  # three pushes fail
                load.run(1, None)
            left = time.monotonic()
        assert time.monotonic() - left < 15, "leaving waits 5 s for a server that hangs, not the profiler's half minute"
    finished = list(engine.telemetry.finished)
    assert len(finished) > 10
    assert {record.outcome for record in finished} == {"length"}
    engine.check_integrity()


@pytest.mark.parametrize("url", ["", "127.0.0.1:4040", "ftp://a", "http://", "http://[::", "http://a:99999"])
def test_an_address_that_is_none_is_an_error_with_a_next_step(url: str) -> None:
    with pytest.raises(ConfigError, match="Next: Give one such as"):
        with profiles_to(url, {}):
            pass
