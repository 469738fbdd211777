"""Clients that leave or stop reading, at every stage: nothing is lost, served twice or left running, and the books agree."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from observability.engine.model.loading import LoadedModel, load_model
from observability.engine.server import ServerSettings
from observability.engine.types import StepPlan, StepResult
from tests.conftest import wait_for
from tests.server.harness import RunningServer, serving


def send(
    server: RunningServer, *, path: str = "/v1/completions", receive_buffer: int | None = None, **body: Any
) -> socket.socket:
    """A plain socket on which the request has been sent and nothing read."""
    s = socket.socket()
    if receive_buffer is not None:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    s.settimeout(30)
    s.connect(("127.0.0.1", server.port))
    data = json.dumps({"model": "tiny", "temperature": 0, "ignore_eos": True, **body}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    s.sendall(head.encode() + data)
    return s


def read_events(s: socket.socket, count: int) -> bytes:
    data = b""
    while data.count(b"data: ") < count:
        part = s.recv(4096)
        assert part, "the server closed the stream"
        data += part
    return data


def reset(s: socket.socket) -> None:
    """Closes by RST, as a process that was killed with unread data does."""
    s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    s.close()


@contextlib.contextmanager
def slow_server(**config: Any) -> Iterator[RunningServer]:
    """Steps of at least 10 ms, so that a client can leave in the middle of anything."""
    with serving(load_model("tiny"), **config) as server:
        real = server.engine.executor.execute

        def execute(plan: StepPlan, until: float | None = None) -> StepResult:
            time.sleep(0.01)
            return real(plan, until)

        server.engine.executor.execute = execute
        yield server


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("leave", [socket.socket.close, reset])
def test_leaving_in_decode_aborts(stream: bool, leave: Any) -> None:
    with slow_server() as server:
        s = send(server, prompt="decode", max_tokens=2000, stream=stream)
        wait_for(lambda: server.books().generation_tokens >= 3, 10, "decoding")
        if stream:
            assert b'"text"' in read_events(s, 2)
        leave(s)
        books = server.check_books()
        assert books.ended["abort"] == books.received == 1
        assert books.prompt_tokens == len("decode")
        assert 3 <= books.generation_tokens < 2000


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_in_prefill_aborts_and_counts_no_prompt(stream: bool) -> None:
    with slow_server(max_num_batched_tokens=16) as server:
        s = send(server, prompt="p" * 3000, max_tokens=5, stream=stream)
        wait_for(lambda: server.engine.num_running == 1 and server.engine.kv_state().active > 2, 10, "prefilling")
        s.close()
        books = server.check_books()
        assert books.ended["abort"] == books.received == 1
        assert (books.prompt_tokens, books.generation_tokens) == (0, 0)
        assert server.records[0].first_token is None
        assert server.records[0].scheduled is not None


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_in_the_queue_aborts_before_the_request_is_ever_scheduled(stream: bool) -> None:
    with slow_server(max_num_seqs=1) as server:
        first = send(server, prompt="first", max_tokens=300, stream=True)
        wait_for(lambda: server.engine.num_running == 1, 10, "the first runs")
        second = send(server, prompt="second", max_tokens=300, stream=stream)
        wait_for(lambda: server.engine.num_waiting == 1, 10, "the second waits")
        second.close()
        wait_for(lambda: server.engine.num_waiting == 0, 10, "the second is gone")
        assert server.engine.num_running == 1
        assert server.records[0].outcome == "abort"
        assert server.records[0].scheduled is None
        first.close()
        books = server.check_books()
        assert books.ended["abort"] == books.received == 2
        assert books.prompt_tokens == len("first")


def test_leaving_before_the_body_is_complete_is_no_request(tiny: LoadedModel) -> None:
    with serving(tiny) as server:
        with socket.create_connection(("127.0.0.1", server.port)) as s:
            s.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 90\r\n\r\n{"
            )
            time.sleep(0.2)
        time.sleep(0.2)
        assert server.check_books().received == 0


def test_five_streams_closed_after_64_bytes_reconcile() -> None:
    """QA4: counters of tokens and records of requests tell the same story when every client leaves."""
    with slow_server() as server:
        sockets = [send(server, prompt=f"{i}" * 602, max_tokens=500, stream=True) for i in range(5)]
        for s in sockets:
            while len(s.recv(64)) == 0:
                pass
            s.close()
        books = server.check_books()
        assert books.ended["abort"] == books.received == 5
        done = [record for record in server.records if record.first_token is not None]
        assert books.prompt_tokens == 602 * len(done)


def test_a_client_that_leaves_does_not_disturb_the_others() -> None:
    with slow_server() as server:
        truth = (
            server.client()
            .completions.create(model="tiny", prompt="steady", max_tokens=60, temperature=0)
            .choices[0]
            .text
        )
        leaver = send(server, prompt="leaver", max_tokens=1000, stream=True)
        read_events(leaver, 1)
        stream = server.client().completions.create(
            model="tiny", prompt="steady", max_tokens=60, temperature=0, stream=True
        )
        pieces = []
        for i, chunk in enumerate(stream):
            pieces.append(chunk.choices[0].text)
            if i == 10:
                leaver.close()
        assert "".join(pieces) == truth
        server.check_books()


def test_random_leavers_among_readers() -> None:
    """48 clients at once, half of which leave at a random moment; all others get every token exactly once."""
    rng = random.Random(4)
    with serving(
        load_model("tiny"), max_num_seqs=8, max_num_batched_tokens=64, num_blocks=300, max_model_len=1024
    ) as server:
        failures: list[str] = []

        def reader(number: int) -> None:
            tokens = 20 + number
            s = send(
                server,
                prompt=f"reader {number} " * 5,
                max_tokens=tokens,
                stream=True,
                stream_options={"include_usage": True},
            )
            data = b""
            while b"data: [DONE]" not in data:
                part = s.recv(65536)
                if not part:
                    break
                data += part
            s.close()
            events = [json.loads(line[6:]) for line in data.split(b"\n") if line.startswith(b"data: {")]
            texts = [event for event in events if event["choices"]]
            if len(texts) != tokens or events[-1]["usage"]["completion_tokens"] != tokens:
                failures.append(f"reader {number}: {len(texts)} events of {tokens}")

        def leaver(number: int, wait: float) -> None:
            s = send(server, prompt=f"leaver {number} " * 20, max_tokens=700, stream=number % 2 == 0)
            time.sleep(wait)
            (reset if number % 3 == 0 else socket.socket.close)(s)

        threads = [threading.Thread(target=reader, args=(i,)) for i in range(24)]
        threads += [threading.Thread(target=leaver, args=(i, rng.uniform(0, 1.0))) for i in range(24)]
        rng.shuffle(threads)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert failures == []
        books = server.check_books()
        assert books.received == 48
        assert books.ended["length"] + books.ended["abort"] == 48
        assert books.ended["length"] >= 24
        assert sorted(r.generated_tokens for r in server.records if r.outcome == "length")[:24] == list(range(20, 44))


def test_a_client_that_stops_reading_is_aborted_and_holds_nobody_up(tiny: LoadedModel) -> None:
    """Small socket buffers: the server meets back-pressure after some hundred events."""
    with serving(tiny, ServerSettings(stall_seconds=1.0, grace_seconds=1.0), send_buffer=4096) as server:
        stalled = send(server, prompt="stalled", max_tokens=4000, stream=True, receive_buffer=4096)
        wait_for(lambda: server.books().generation_tokens > 20, 10, "decoding")
        began = time.monotonic()
        other = server.client().completions.create(model="tiny", prompt="other", max_tokens=50, temperature=0)
        assert other.usage.completion_tokens > 0
        wait_for(lambda: server.records and server.records[-1].outcome == "abort", 20, "the stalled stream is aborted")
        assert time.monotonic() - began > 0.5
        books = server.check_books()
        assert (books.received, books.ended["abort"]) == (2, 1)
        assert books.generation_tokens < 4000
        stalled.close()
