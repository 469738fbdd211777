"""HTTP replay against scripted servers on a real socket: what the client saw is what is reported, losses included."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from observability.engine.clock import MonotonicClock
from observability.engine.engine import Engine
from observability.engine.executor.torch_executor import TorchExecutor
from observability.engine.loop import EngineThread
from observability.engine.model.loading import load_model
from observability.engine.server import ServerSettings, create_app
from observability.engine.types import EngineConfig, PromptSpan
from observability.errors import ConfigError, ServiceError, TraceError
from observability.telemetry.recorder import Telemetry
from observability.workload.replay_http import HttpSettings, replay_http
from observability.workload.traces import TraceRequest
from tests.conftest import wait_for


@dataclass
class Script:
    """How the server treats its n-th completion, from 0: 'ok', 'busy', 'refuse', 'cut', 'error', 'pairs', 'silent', 'fail'."""

    by_number: Callable[[int], str] = lambda n: "ok"
    gap: float = 0.02
    first: float = 0.0  # seconds that the first token takes longer
    usage: bool = True
    bodies: list[dict[str, Any]] = field(default_factory=list)
    sent: list[list[float]] = field(default_factory=list)  # times of the tokens of each body, by this server's clock
    open: int = 0
    most_open: int = 0


def make_app(script: Script) -> Starlette:
    async def models(request: Request) -> JSONResponse:
        return JSONResponse({"data": [{"id": "scripted"}]})

    async def completions(request: Request) -> Any:
        body = await request.json()
        number = len(script.bodies)
        script.bodies.append(body | {"at": time.monotonic()})
        script.sent.append([])
        how = script.by_number(number)
        if how == "busy":
            return JSONResponse({"error": {"message": "queue is full"}}, status_code=429)
        if how == "refuse":
            return JSONResponse({"error": {"message": "prompt is longer than the context"}}, status_code=400)
        if how == "fail":
            return JSONResponse({"error": {"message": "internal"}}, status_code=500)
        return StreamingResponse(stream(body, how, script.sent[number]), media_type="text/event-stream")

    async def stream(body: dict[str, Any], how: str, sent: list[float]) -> AsyncIterator[str]:
        script.open += 1
        script.most_open = max(script.most_open, script.open)
        try:
            tokens = body["max_tokens"]
            step = 2 if how == "pairs" else 1
            for i in range(0, tokens, step):
                await asyncio.sleep(30.0 if how == "silent" else script.gap + (0.0 if i else script.first))
                if how == "cut" and i == 1:
                    return
                if how == "error" and i == 1:
                    yield 'data: {"error": {"message": "engine failed"}}\n\n'
                    return
                finish = "length" if i + step >= tokens else None
                sent.append(time.monotonic())
                yield "data: " + json.dumps({"choices": [{"text": " word" * step, "finish_reason": finish}]}) + "\n\n"
            if script.usage:
                prompt = len(body["prompt"].split())
                usage = {
                    "prompt_tokens": prompt,
                    "completion_tokens": tokens,
                    "prompt_tokens_details": {"cached_tokens": prompt // 2},
                }
                yield "data: " + json.dumps({"choices": [], "usage": usage}) + "\n\n"
            yield "data: [DONE]\n\n"
        finally:
            script.open -= 1

    return Starlette(routes=[Route("/v1/models", models), Route("/v1/completions", completions, methods=["POST"])])


@contextmanager
def serving(script: Script) -> Iterator[str]:
    with serving_app(make_app(script)) as url:
        yield url


@contextmanager
def serving_app(app: Starlette) -> Iterator[str]:
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_for(lambda: server.started, 10, "scripted server")
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)


def load(n: int, every: float = 0.0, tokens: int = 4, prompt: int = 600) -> list[TraceRequest]:
    return [TraceRequest(i * every, PromptSpan(prompt, (0, i + 1)), tokens) for i in range(n)]


def test_latencies_tokens_and_hits_are_what_the_server_gave() -> None:
    """Against the server's own clock: it saw each request a little later and each token a little earlier than the client."""
    script = Script(gap=0.2, first=0.7)
    with serving(script) as url:
        result = replay_http(load(4, every=0.1), HttpSettings(url))
    assert result.clock == "real"
    assert result.outcomes == {
        "stop": 0,
        "length": 4,
        "abort": 0,
        "error": 0,
        "rejected": 0,
        "deadline": 0,
        "invalid": 0,
        "lost": 0,
    }
    ttft, total, itl = (
        result.latency[k] for k in ("time_to_first_token_seconds", "end_to_end_seconds", "inter_token_seconds")
    )
    assert ttft is not None
    assert total is not None
    assert itl is not None
    began = [body["at"] for body in script.bodies]
    near = 0.25  # of seconds a busy machine may take for a socket; first and last token are further apart
    firsts = sorted(sent[0] - at for sent, at in zip(script.sent, began, strict=True))
    assert firsts[0] <= ttft["max"] < firsts[-1] + near
    wholes = sorted(sent[-1] - at for sent, at in zip(script.sent, began, strict=True))
    assert wholes[0] <= total["max"] < wholes[-1] + near
    gaps = [later - sooner for sent in script.sent for sooner, later in itertools.pairwise(sent)]
    assert itl["count"] == len(gaps) == 4 * 3
    assert itl["p50"] == pytest.approx(np.median(gaps), rel=0.3)
    ended = max(sent[-1] for sent in script.sent)
    assert ended - began[0] == pytest.approx(result.duration_seconds, abs=near)
    assert (result.prompt_tokens, result.generated_tokens) == (2400, 16)
    assert result.kv.by_length_bucket["0-2K"] == {"queried_tokens": 2400, "hittable_tokens": None, "hit_tokens": 1200}
    assert result.kv.hit_rate == 0.5
    assert result.phases is None
    assert result.preemptions is None


def test_every_failure_is_counted_by_kind_with_its_reason() -> None:
    kinds = ["ok", "busy", "refuse", "cut", "error", "fail", "ok"]
    with serving(Script(by_number=lambda n: kinds[n])) as url:
        result = replay_http(load(7), HttpSettings(url, serial=True))
    assert result.outcomes == {
        "stop": 0,
        "length": 2,
        "abort": 0,
        "error": 2,
        "rejected": 1,
        "deadline": 0,
        "invalid": 1,
        "lost": 1,
    }
    assert sum(result.outcomes.values()) == result.requests == 7
    assert result.reasons == {
        "HTTP 429: queue is full": 1,
        "HTTP 400: prompt is longer than the context": 1,
        "stream ended with finish_reason None": 1,
        "engine failed": 1,
        "HTTP 500: internal": 1,
    }


def test_a_server_that_falls_silent_is_given_up_as_lost() -> None:
    with serving(Script(by_number=lambda n: "silent")) as url:
        result = replay_http(load(1), HttpSettings(url, timeout_seconds=0.3))
    assert result.outcomes["lost"] == 1
    assert result.reasons == {"ReadTimeout": 1}
    assert result.latency["end_to_end_seconds"] is None
    assert result.kv.hit_rate is None


def test_open_requests_are_bounded_and_the_wait_for_room_is_shown() -> None:
    script = Script(gap=0.05)
    with serving(script) as url:
        result = replay_http(load(8), HttpSettings(url, max_concurrency=2))
    assert script.most_open == 2
    delay = result.latency["send_delay_seconds"]
    assert delay is not None
    waited = script.bodies[-1]["at"] - script.bodies[0]["at"]
    assert waited > 0.6  # the last pair waits for three pairs of 0.2 s
    assert delay["max"] == pytest.approx(waited, abs=0.25)
    assert result.outcomes["length"] == 8


def test_requests_go_out_at_their_time_and_not_when_others_end() -> None:
    script = Script(gap=0.5)
    with serving(script) as url:
        began = time.monotonic()
        replay_http(load(5, every=0.1), HttpSettings(url))
    for i, body in enumerate(script.bodies):
        assert body["at"] - began >= 0.1 * i
    assert script.bodies[-1]["at"] < script.sent[0][-1], "the first, which takes 2 s, was not waited for"


def test_serial_replay_has_one_request_open() -> None:
    script = Script(gap=0.01)
    with serving(script) as url:
        replay_http(load(5), HttpSettings(url, serial=True))
    assert script.most_open == 1


def test_prompts_share_their_recorded_prefix() -> None:
    script = Script(gap=0.0)
    with serving(script) as url:
        replay_http(load(2), HttpSettings(url + "/v1/", ignore_eos=True))
    one, other = (body["prompt"].split() for body in script.bodies)
    assert len(one) == len(other) == 600
    assert one[:512] == other[:512]
    assert one[512:528] != other[512:528]
    assert script.bodies[0]["max_tokens"] == 4
    assert script.bodies[0]["ignore_eos"] is True
    assert script.bodies[0]["model"] == "scripted"


def test_hits_and_token_latencies_that_the_server_does_not_tell_are_unknown() -> None:
    with serving(Script(usage=False)) as url:
        result = replay_http(load(2), HttpSettings(url))
    assert result.outcomes["length"] == 2
    assert result.kv.hit_tokens is None
    assert result.kv.by_length_bucket["0-2K"] == dict.fromkeys(("queried_tokens", "hittable_tokens", "hit_tokens"))
    assert result.generated_tokens is None
    with serving(Script(by_number=lambda n: "pairs")) as url:
        result = replay_http(load(2), HttpSettings(url))
    assert result.latency["inter_token_seconds"] is None  # two tokens a chunk
    assert result.latency["time_to_first_token_seconds"] is not None


def test_a_server_that_is_not_there_is_named(free_port: Callable[[], int]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ServiceError, match="cannot be reached") as caught:
        replay_http(load(1), HttpSettings(url))
    assert url in caught.value.reason
    assert caught.value.next_step
    with pytest.raises(ConfigError, match="not an http URL"):
        HttpSettings("localhost:8000")


def test_a_load_that_breaks_off_ends_what_is_in_flight_and_then_fails() -> None:
    def broken() -> Iterator[TraceRequest]:
        yield from load(2)
        raise TraceError("line 3: is empty.")

    ended: list[int] = []
    with serving(Script(gap=0.05)) as url, pytest.raises(TraceError, match="line 3"):
        replay_http(broken(), HttpSettings(url), on_end=ended.append)
    assert ended == [1, 2]


def test_the_bundled_server_tells_hits_and_gives_the_recorded_lengths() -> None:
    """The real server on a real (random-weight) model: client and engine agree about tokens, hits and outcomes."""
    loaded = load_model("tiny")
    config = EngineConfig(num_blocks=1024, max_model_len=8192)
    clock = MonotonicClock()
    telemetry = Telemetry("tiny", executor="torch", virtual=False, device="cpu", kv_dtype="auto", clock=clock.now)
    thread = EngineThread(
        Engine(config, TorchExecutor(loaded, config, telemetry, clock=clock), telemetry, loaded.eos_token_ids)
    )
    thread.start()
    try:
        app = create_app(thread, loaded, telemetry, ServerSettings())
        with serving_app(app) as url:
            requests = [TraceRequest(0.1 * i, PromptSpan(300 + i, (0, i + 1), 256), 5) for i in range(6)]
            requests.append(TraceRequest(0.7, PromptSpan(3000, tuple(range(100, 112)), 256), 5))
            result = replay_http(requests, HttpSettings(url, ignore_eos=True))
    finally:
        thread.stop()
    # A token a byte here: 3,000 words do not fit 8,192 tokens.
    assert result.outcomes == {
        "stop": 0,
        "length": 6,
        "abort": 0,
        "error": 0,
        "rejected": 0,
        "deadline": 0,
        "invalid": 1,
        "lost": 0,
    }
    [(reason, times)] = result.reasons.items()
    assert reason.startswith("HTTP 400: ")
    assert times == 1
    assert result.generated_tokens == 30
    served = [r for r in telemetry.finished if r.outcome == "length"]
    assert result.prompt_tokens == sum(r.prompt_tokens for r in served)
    assert result.kv.hit_tokens == sum(r.cached_tokens for r in served) > 0
    slowest = max(r.finished - r.arrival for r in served)
    assert result.latency["end_to_end_seconds"]["max"] >= slowest  # type: ignore[index]
