"""The router: sessions stay on their replica, come back with it, and outlive it; clients get whole answers or a clear error."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from observability.cli import root
from observability.cli.route import metrics_of
from observability.engine.http_server import HttpServer, listen
from observability.engine.model.loading import load_model
from observability.engine.router import Ring, Router, RouterSettings, create_router_app
from observability.engine.server import ServerSettings
from observability.errors import ConfigError
from tests.conftest import wait_for
from tests.server.harness import HTTP, RunningServer, serving
from tests.server.processes import Process, route, serve

WORDS = "What was said before, in many words, so that it fills some blocks of keys and values. " * 3


def ask(url: str, session: str | None, prompt: str = "x", **fields: Any) -> httpx.Response:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "ignore_eos": True, "temperature": 0, **fields}
    headers = {} if session is None else {"X-Session-ID": session}
    return HTTP.post(url + "/v1/completions", json=body, headers=headers)


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def cached_in(answer: httpx.Response) -> int:
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def place(answer: httpx.Response) -> int:
    """Which replica answered."""
    return int(answer.headers["x-kvscope-replica"])


def up(url: str) -> list[bool]:
    health = HTTP.get(url + "/health").json()
    return [replica["up"] for replica in health["replicas"]]


# -- the ring ----------------------------------------------------------------------------------------------------------

IDS = [f"session {i}" for i in range(4000)]


def homes(ring: Ring, down: frozenset[str] = frozenset()) -> list[str]:
    return [next(name for name in ring.preference(session) if name not in down) for session in IDS]


@pytest.mark.parametrize("count", [2, 3, 8])
def test_only_the_sessions_of_a_replica_that_leaves_move_and_spread_over_the_others(count: int) -> None:
    names = [f"http://10.0.0.{i}:8000" for i in range(count)]
    before = homes(Ring(names))
    after = homes(Ring(names), frozenset(names[:1]))
    moved = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert {old for old, _ in moved} == {names[0]}
    assert 0.6 / count < len(moved) / len(IDS) < 1.5 / count
    assert {new for _, new in moved} == set(names[1:])
    assert after == homes(Ring(names[1:]))  # leaving one out is the ring that never had it


def test_a_replica_that_joins_takes_its_share_from_all_and_moves_nothing_else() -> None:
    names = [f"http://10.0.0.{i}:8000" for i in range(5)]
    before, after = homes(Ring(names[:4])), homes(Ring(names))
    moved = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert {new for _, new in moved} == {names[4]}
    assert {old for old, _ in moved} == set(names[:4])
    assert 0.12 < len(moved) / len(IDS) < 0.3


@settings(deadline=None)
@given(session=st.text(st.characters(), max_size=50), count=st.integers(1, 6))
def test_any_id_has_an_order_of_all_replicas(session: str, count: int) -> None:
    names = [f"r{i}" for i in range(count)]
    order = list(Ring(names).preference(session))
    assert sorted(order) == names
    assert order == list(Ring(names[::-1]).preference(session))  # however they are listed


# -- replicas as processes ----------------------------------------------------------------------------------------------


class Fleet:
    """Two replicas that share snapshots, on fixed ports, and a router."""

    def __init__(self, stack: contextlib.ExitStack, ports: list[int], snapshots: Path) -> None:
        self._stack, self._ports, self._snapshots = stack, ports, snapshots
        self.urls = [f"http://127.0.0.1:{port}" for port in ports]
        self.replicas = [self._start(i) for i in range(len(ports))]
        options = [option for url in self.urls for option in ("--replica", url)]
        self.router = stack.enter_context(route("--port", "0", "--check-interval", "0.1", *options))
        self.router.wait_up()
        self.url = self.router.url
        self.wait_all_up()

    def _start(self, index: int) -> Process:
        return self._stack.enter_context(
            serve("--port", str(self._ports[index]), "--snapshot-dir", str(self._snapshots))
        )

    def kill(self, index: int) -> None:
        assert self.replicas[index].end(signal.SIGKILL) == -signal.SIGKILL

    def restart(self, index: int) -> None:
        self.replicas[index] = self._start(index)

    def wait_all_up(self) -> None:
        wait_for(lambda: all(up(self.url)), 60, "all replicas up")

    def snapshots_written(self) -> int:
        return sum(HTTP.get(url + "/health").json()["snapshots"]["saves"]["written"] for url in self.urls)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    listeners = [listen("127.0.0.1", 0) for _ in range(2)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    with contextlib.ExitStack() as stack:
        yield Fleet(stack, ports, tmp_path_factory.mktemp("snapshots"))


@pytest.fixture(scope="module")
def undisturbed() -> Iterator[RunningServer]:
    """A replica that serves every turn itself."""
    with serving(load_model("tiny")) as server:
        yield server


def test_twenty_sessions_stay_where_their_kv_is(fleet: Fleet) -> None:
    prompts = {f"affinity {i}": f"{i} {WORDS}" for i in range(20)}
    seen: dict[str, set[int]] = {session: set() for session in prompts}
    for turn in range(3):
        for session in prompts:
            answer = ask(fleet.url, session, prompts[session])
            seen[session].add(place(answer))
            if turn:
                assert cached_in(answer) >= len(WORDS) // 16 * 16
            prompts[session] += f" turn {turn}"
    assert all(len(places) == 1 for places in seen.values())
    assert set.union(*seen.values()) == {0, 1}
    for url in fleet.urls:  # nothing had to come from a snapshot
        assert HTTP.get(url + "/health").json()["snapshots"]["resumes"]["imported"] == 0


def test_a_killed_replica_costs_its_sessions_nothing_and_gets_them_back(
    fleet: Fleet, undisturbed: RunningServer
) -> None:
    sampling = {"temperature": 0.9, "seed": 3, "max_tokens": 24}
    written = fleet.snapshots_written()
    first = ask(fleet.url, "mortal", WORDS, **sampling)
    home, other = place(first), 1 - place(first)
    assert text_of(first) == text_of(ask(undisturbed.url, "mortal", WORDS, **sampling))
    wait_for(lambda: fleet.snapshots_written() > written, 10, "snapshot written")

    fleet.kill(home)
    second = ask(fleet.url, "mortal", WORDS + "Go on.", **sampling)
    assert place(second) == other
    assert text_of(second) == text_of(ask(undisturbed.url, "mortal", WORDS + "Go on.", **sampling))
    assert cached_in(second) == len(WORDS) // 16 * 16
    assert up(fleet.url) == [index == other for index in range(2)]

    fleet.restart(home)
    fleet.wait_all_up()
    third = ask(fleet.url, "mortal", WORDS + "Go on. And then?", **sampling)
    assert place(third) == home
    assert text_of(third) == text_of(ask(undisturbed.url, "mortal", WORDS + "Go on. And then?", **sampling))
    assert cached_in(third) >= len(WORDS) // 16 * 16


def test_a_replica_that_hangs_loses_its_requests_and_a_stream_says_so(fleet: Fleet) -> None:
    settings = RouterSettings(check_seconds=0.05, check_timeout_seconds=0.4, hung_checks=2)
    with routing(fleet.urls, settings) as router:
        home = place(ask(router.url, "hung"))
        events = iter(stream(router.url, "hung", max_tokens=8000))
        next(events)
        fleet.replicas[home].send(signal.SIGSTOP)
        try:
            with pytest.raises(openai.APIError, match="does not answer"):
                list(events)
            assert place(ask(router.url, "hung")) == 1 - home
        finally:
            fleet.replicas[home].send(signal.SIGCONT)
        wait_for(lambda: all(up(router.url)), 10, "replica back")
        assert place(ask(router.url, "hung")) == home


def test_death_in_the_middle_ends_a_stream_with_an_error_and_repeats_what_was_not_begun(
    fleet: Fleet, undisturbed: RunningServer
) -> None:
    """Runs last: it leaves one replica dead."""
    fleet.wait_all_up()
    home = place(ask(fleet.url, "doomed"))
    with ThreadPoolExecutor() as pool:
        events = iter(stream(fleet.url, "doomed", max_tokens=8000))
        next(events)
        whole = pool.submit(ask, fleet.url, "doomed", max_tokens=300)
        busy = fleet.urls[home] + "/health"
        wait_for(lambda: HTTP.get(busy).json()["running"] == 2, 20, "both requests running")
        fleet.kill(home)
        with pytest.raises(openai.APIError, match="ends early"):
            list(events)
        assert place(whole.result()) == 1 - home
        assert text_of(whole.result()) == text_of(ask(undisturbed.url, "doomed", max_tokens=300))
    assert text_of(ask(fleet.url, "doomed")) == text_of(ask(undisturbed.url, "doomed"))
    metrics = HTTP.get(fleet.url + "/metrics").text
    assert f'kvscope_router_requests_total{{outcome="broken",replica="{fleet.urls[home]}"}} 1.0' in metrics
    # More than once where it was dying and still looked up.
    assert re.search(rf'kvscope_router_requests_total{{outcome="lost",replica="{fleet.urls[home]}"}} [12]\.0', metrics)
    assert f'kvscope_router_replica_up{{replica="{fleet.urls[home]}"}} 0.0' in metrics
    assert f'kvscope_router_replica_up{{replica="{fleet.urls[1 - home]}"}} 1.0' in metrics
    assert fleet.router.end() == 0
    assert "Traceback" not in fleet.router.output


def stream(url: str, session: str, **kwargs: Any) -> openai.Stream[Any]:
    client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=60)
    extra = {"ignore_eos": True, "session_id": session}  # the body may name it too
    return client.completions.create(model="tiny", prompt="x", temperature=0, stream=True, extra_body=extra, **kwargs)


# -- a router and replicas in this process ------------------------------------------------------------------------------


class routing:
    """Context manager: a router on a free port."""

    def __init__(self, urls: list[str], settings: RouterSettings | None = None) -> None:
        self.router = Router(urls, settings or RouterSettings(check_seconds=0.05))
        self._listener = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        app = create_router_app(self.router, metrics_of(self.router))
        self.http = HttpServer(app, self.router, grace_seconds=1.0)
        self._thread = threading.Thread(target=self.http.run, args=([self._listener],), daemon=True)

    def __enter__(self) -> routing:
        self._thread.start()
        wait_for(lambda: self.http.started, 10, "router start")
        return self

    def __exit__(self, *_: object) -> None:
        self.http.should_exit = True
        self._thread.join(15)
        assert not self._thread.is_alive(), "the router did not stop"
        assert [replica.open_requests for replica in self.router.replicas] == [0] * len(self.router.replicas)


def test_what_a_replica_answers_comes_through_as_it_is() -> None:
    with (
        serving(load_model("tiny"), ServerSettings(token="secret")) as server,
        routing([server.url]) as router,
    ):
        for kwargs in ({"headers": {"Authorization": "Bearer secret"}}, {}):
            direct = HTTP.get(server.url + "/v1/models", **kwargs)
            routed = HTTP.get(router.url + "/v1/models", **kwargs)
            assert (routed.status_code, routed.json()) == (direct.status_code, direct.json())
        assert routed.headers["www-authenticate"] == "Bearer"
        client = openai.OpenAI(base_url=router.url + "/v1", api_key="secret", max_retries=0)
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other", prompt="x")
        message = {"role": "user", "content": "Hello"}
        whole = client.chat.completions.create(model="tiny", messages=[message], max_tokens=9, temperature=0)
        pieces = client.chat.completions.create(
            model="tiny", messages=[message], max_tokens=9, temperature=0, stream=True
        )
        assert "".join(event.choices[0].delta.content for event in pieces) == whole.choices[0].message.content
        assert HTTP.get(router.url + "/v1/models/a%2Fb%20c").status_code == 401


def test_a_full_queue_is_passed_on_with_its_retry_after() -> None:
    with (
        serving(load_model("tiny"), max_num_seqs=1, max_queued=1) as server,
        serving(load_model("tiny")) as idle,
        routing([server.url, idle.url]) as router,
    ):
        session = next(s for s in IDS if next(router.router._ring.preference(s)) == server.url)
        # one runs, one waits: of twelve at once some are refused, however slow the machine
        with ThreadPoolExecutor(12) as pool:
            answers = [f.result() for f in [pool.submit(ask, router.url, session, max_tokens=300) for _ in range(12)]]
        assert {answer.status_code for answer in answers} == {200, 429}
        assert all(int(a.headers["retry-after"]) >= 1 for a in answers if a.status_code == 429)


def test_without_a_session_the_replica_with_the_fewest_open_requests_is_taken() -> None:
    with (
        serving(load_model("tiny")) as a,
        serving(load_model("tiny")) as b,
        routing([a.url, b.url]) as router,
    ):
        with HTTP.stream(
            "POST",
            router.url + "/v1/completions",
            json={"model": "tiny", "prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True},
        ) as busy:
            parts = busy.iter_raw()  # letting go of it would close the connection
            next(parts)
            assert {place(ask(router.url, None)) for _ in range(4)} == {1 - int(busy.headers["x-kvscope-replica"])}
        a.wait_idle()  # the client left: its request was aborted at the replica
        b.wait_idle()
        assert a.books().ended["abort"] + b.books().ended["abort"] == 1
        assert {place(ask(router.url, None)) for _ in range(4)} == {0, 1}


def test_a_replica_that_shuts_down_ends_its_streams_and_gets_no_new_requests() -> None:
    with (
        serving(load_model("tiny"), ServerSettings(grace_seconds=30)) as a,
        serving(load_model("tiny")) as b,
        routing([a.url, b.url]) as router,
    ):
        session = next(s for s in IDS if next(router.router._ring.preference(s)) == a.url)
        events = iter(stream(router.url, session, max_tokens=250))
        next(events)
        a.http.should_exit = True
        wait_for(lambda: up(router.url) == [False, True], 10, "replica out of the ring")
        assert place(ask(router.url, session)) == 1
        assert len(list(events)) == 249


def test_no_replica_is_503_with_retry_after(free_port: Callable[[], int]) -> None:
    with routing([f"http://127.0.0.1:{free_port()}"]) as router:
        answer = ask(router.url, "s")
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["code"] == "no_replica"
        health = HTTP.get(router.url + "/health")
        assert health.status_code == 503
        assert "cannot be reached" in health.json()["replicas"][0]["reason"]


def test_bodies_are_bounded_and_other_paths_are_not_passed_on() -> None:
    with serving(load_model("tiny")) as server:
        with routing([server.url], RouterSettings(max_body_bytes=1000)) as router:
            assert ask(router.url, "s", "x" * 1000).status_code == 413
            assert HTTP.get(router.url + "/docs").status_code == 404
            host, port = router.url.removeprefix("http://").split(":")
            with socket.create_connection((host, int(port))) as raw:  # clients tidy such a path up by themselves
                raw.sendall(b"GET /v1/../metrics HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
                assert raw.makefile("rb").readline().split()[1] == b"404"


@pytest.mark.parametrize("answer", [b"no HTTP at all\r\n\r\n", b"HTTP/1.1 999 Strange\r\ncontent-length: 2\r\n\r\n{}"])
def test_a_replica_that_is_healthy_by_its_own_account_and_answers_garbage_costs_no_request(answer: bytes) -> None:
    class Sick(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.wfile.write(answer)
            self.close_connection = True

        def log_message(self, *args: object) -> None:
            pass

    sick = ThreadingHTTPServer(("127.0.0.1", 0), Sick)
    thread = threading.Thread(target=sick.serve_forever, daemon=True)
    thread.start()
    urls = [f"http://127.0.0.1:{sick.server_address[1]}"]
    try:
        with serving(load_model("tiny")) as good, routing([*urls, good.url]) as router:
            texts = {text_of(ask(router.url, session, max_tokens=3)) for session in IDS[:6]}
            assert len(texts) == 1
        with routing(urls) as router:
            alone = HTTP.post(router.url + "/v1/completions", json={"model": "tiny", "prompt": "x"})
            assert alone.status_code == 502
            assert "only replica" in alone.json()["error"]["message"]
    finally:
        sick.shutdown()
        sick.server_close()
        thread.join()


def test_a_replica_that_cuts_an_event_in_half_costs_the_half_only() -> None:
    """Against a bare socket: what the client gets are whole events, then the error."""
    whole, half = b'data: {"n": 1}\n\n', b'data: {"n": '

    async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET /health"):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
        else:
            requests.append(head.lower())
            writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
                b"connection: close, x-private\r\nx-private: 1\r\nx-public: 2\r\n\r\n"
            )
            for part in (whole + half,):
                writer.write(b"%x\r\n%s\r\n" % (len(part), part))
            await writer.drain()
        writer.close()

    requests: list[bytes] = []
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    server = asyncio.run_coroutine_threadsafe(asyncio.start_server(serve_one, "127.0.0.1", 0), loop).result(5)
    try:
        with routing([f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"]) as router:
            headers = {"X-Session-ID": "s", "Connection": "close, x-hop", "X-Hop": "1", "X-End": "2"}
            answer = HTTP.post(router.url + "/v1/completions", json={}, headers=headers)
        first, error, done, rest = answer.content.split(b"\n\n")
        assert first + b"\n\n" == whole
        assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "replica_failed"
        assert (done, rest) == (b"data: [DONE]", b"")
        assert "x-private" not in answer.headers
        assert answer.headers["x-public"] == "2"
        assert b"x-end: 2" in requests[0]
        assert b"x-hop" not in requests[0]
    finally:
        loop.call_soon_threadsafe(server.close)
        time.sleep(0.1)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)
        loop.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--replica", "localhost:8000"], "base URL"),
        (["--replica", "http://h:1/v1"], "base URL"),
        (["--replica", "http://user:secret@h:1"], "base URL"),
        (["--replica", "http://h:1", "--replica", "http://h:1/"], "twice"),
        (["--replica", "http://h:1", "--host", "0.0.0.0"], "--insecure"),
    ],
)
def test_bad_settings_are_told_with_a_next_step(options: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        root(["route", "--port", "0", *options], standalone_mode=False)
    assert words in str(raised.value)
    assert raised.value.next_step
