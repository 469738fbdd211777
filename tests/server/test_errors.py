"""Bad input and a bad engine: the OpenAI error object with the right status, counted, and never a 500 for a client's fault."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from observability.engine import server as server_module
from observability.engine.model.loading import LoadedModel, load_model
from observability.engine.server import ServerSettings
from observability.engine.types import StepPlan, StepResult
from tests.conftest import wait_for
from tests.server.harness import RunningServer, serving

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
COMPLETION = {"model": "tiny", "prompt": "x", "max_tokens": 2}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """A short context, so that no body can ask for much; whatever is asked of it, the books agree afterwards."""
    with serving(load_model("tiny"), num_blocks=64, max_model_len=128) as running:
        yield running
        running.check_books()


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=20, trust_env=False) as client:
        yield client


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The error object, with exactly OpenAI's fields."""
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"temperature": 2.1}, "temperature", "invalid_value"),
        ({"temperature": -0.1}, "temperature", "invalid_value"),
        ({"temperature": "hot"}, "temperature", "invalid_type"),
        ({"top_p": 0}, "top_p", "invalid_value"),
        ({"top_p": 1.01}, "top_p", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_tokens": -5}, "max_tokens", "invalid_value"),
        ({"max_tokens": 1.5}, "max_tokens", "invalid_type"),
        ({"max_tokens": True}, "max_tokens", "invalid_type"),
        ({"max_tokens": 128}, "prompt", "context_length_exceeded"),
        ({"max_tokens": 10**30}, "prompt", "context_length_exceeded"),
        ({"prompt": "x" * 128}, "prompt", "context_length_exceeded"),
        ({"prompt": ""}, "prompt", "invalid_value"),
        ({"prompt": []}, "prompt", "invalid_value"),
        ({"prompt": [[]]}, "prompt", "invalid_value"),
        ({"prompt": [1, 2, 259]}, "prompt", "invalid_value"),
        ({"prompt": [-1]}, "prompt", "invalid_value"),
        ({"prompt": [1, "a"]}, "prompt", "invalid_type"),
        ({"prompt": None}, "prompt", "invalid_type"),
        ({"prompt": ["a"] * 257}, "prompt", "invalid_value"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop", "invalid_value"),
        ({"stop": ""}, "stop", "invalid_value"),
        ({"stop": ["x" * 257]}, "stop", "invalid_value"),
        ({"stop": 5}, "stop", "invalid_type"),
        ({"seed": 2**63}, "seed", "invalid_value"),
        ({"n": 2}, "n", "unsupported_parameter"),
        ({"best_of": 3}, "best_of", "unsupported_parameter"),
        ({"echo": True}, "echo", "unsupported_parameter"),
        ({"logprobs": 5}, "logprobs", "unsupported_parameter"),
        ({"suffix": "end"}, "suffix", "unsupported_parameter"),
        ({"presence_penalty": 0.5}, "presence_penalty", "unsupported_parameter"),
        ({"logit_bias": {"5": -100}}, "logit_bias", "unsupported_parameter"),
        ({"stream": "yes"}, "stream", "invalid_type"),
        ({"stream_options": 3}, "stream_options", "invalid_type"),
    ],
)  # fmt: skip
def test_a_bad_value_is_400_and_names_its_field(
    http: httpx.Client, server: RunningServer, change: dict[str, Any], param: str, code: str
) -> None:
    answer = http.post(server.url + "/v1/completions", json=COMPLETION | change)
    error = error_of(answer)
    assert answer.status_code == 400
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 128}]}, "messages"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"logprobs": True}, "logprobs"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_a_bad_chat_value_is_400_and_names_its_field(
    http: httpx.Client, server: RunningServer, change: dict[str, Any], param: str
) -> None:
    answer = http.post(server.url + "/v1/chat/completions", json=CHAT | change)
    assert answer.status_code == 400
    assert error_of(answer)["param"] == param


def test_neutral_values_of_unsupported_fields_are_accepted(http: httpx.Client, server: RunningServer) -> None:
    neutral = {
        "n": 1,
        "echo": False,
        "logprobs": None,
        "best_of": 1,
        "presence_penalty": 0,
        "logit_bias": {},
        "user": "me",
    }
    assert http.post(server.url + "/v1/completions", json=COMPLETION | neutral).status_code == 200
    chat = {"n": 1, "logprobs": False, "tools": [], "response_format": {"type": "text"}, "metadata": {"a": "b"}}
    assert http.post(server.url + "/v1/chat/completions", json=CHAT | chat).status_code == 200


def test_the_client_package_raises_its_own_errors(http: httpx.Client, server: RunningServer) -> None:
    client = server.client()
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-4", prompt="x")
    assert missing.value.code == "model_not_found"
    assert missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as too_long:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "long " * 100}])
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="n is not supported"):
        client.completions.create(model="tiny", prompt="x", n=2)


def test_unknown_routes_and_methods_answer_with_error_objects(http: httpx.Client, server: RunningServer) -> None:
    for method, path, status in [
        ("GET", "/v1/embeddings", 404),
        ("GET", "/", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/health", 405),
    ]:
        answer = http.request(method, server.url + path)
        assert answer.status_code == status
        error_of(answer)
        assert ("allow" in answer.headers) == (status == 405)


def raw_post(
    http: httpx.Client, server: RunningServer, content: bytes, path: str = "/v1/completions"
) -> httpx.Response:
    return http.post(server.url + path, content=content, headers={"Content-Type": "application/json"})


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"model": "tiny", "prompt": "x",}', b"\xff\xfe", b"nonsense", b"[" * 5000]
)
def test_malformed_json_is_400(http: httpx.Client, server: RunningServer, content: bytes) -> None:
    answer = raw_post(http, server, content)
    assert answer.status_code == 400
    assert "JSON" in error_of(answer)["message"]


@pytest.mark.parametrize("content", [b"[]", b"3", b"null", b'"text"'])
def test_json_that_is_no_object_is_400(http: httpx.Client, server: RunningServer, content: bytes) -> None:
    assert "object" in error_of(raw_post(http, server, content))["message"]


def test_a_body_that_is_no_json_by_its_type_is_415(http: httpx.Client, server: RunningServer) -> None:
    """A web page can send text/plain to a local server without asking; it cannot send application/json."""
    for headers in ({"Content-Type": "text/plain"}, {}):
        answer = http.post(server.url + "/v1/completions", content=json.dumps(COMPLETION).encode(), headers=headers)
        assert answer.status_code == 415
        error_of(answer)


def test_what_cannot_be_served_as_asked_is_received_and_invalid_once_and_never_rejected(
    http: httpx.Client, server: RunningServer
) -> None:
    """The queue had room for each of them: they say nothing of how available the server is."""
    before = server.check_books()
    http.post(server.url + "/v1/completions", json=COMPLETION | {"temperature": 9})
    http.post(server.url + "/v1/completions", json=COMPLETION | {"model": "other"})
    raw_post(http, server, b"{")
    http.post(server.url + "/v1/completions", content=b"{}", headers={"Content-Type": "text/plain"})
    http.post(server.url + "/v1/completions", json=COMPLETION | {"n": 3})
    http.post(server.url + "/v1/completions", json=COMPLETION | {"prompt": []})
    http.post(server.url + "/v1/completions", json=COMPLETION | {"prompt": "x" * 100_000})
    after = server.check_books()
    assert after.received - before.received == 7
    assert after.ended["invalid"] - before.ended["invalid"] == 7
    assert after.ended["rejected"] == before.ended["rejected"]


# -- bodies ---------------------------------------------------------------------------------------------------------

ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, -1, 2**31, 2**64, 10**400, 0.5, 1e308, 1e-308]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    st.lists(st.one_of(st.integers(-5, 300), st.text(max_size=3), st.none()), max_size=3),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=2),
)
FIELDS = (
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "seed", "stop", "stream",
    "stream_options", "n", "echo", "logprobs", "priority", "service_tier", "ignore_eos", "tools", "logit_bias", "user",
)  # fmt: skip
MESSAGES = st.lists(
    st.fixed_dictionaries({}, optional={"role": st.sampled_from(["user", "system", "x", 3]), "content": ODD}),
    max_size=3,
)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(["/v1/completions", "/v1/chat/completions"]),
    st.dictionaries(st.sampled_from(FIELDS), ODD, max_size=4),
    st.one_of(st.none(), MESSAGES),
)
def test_no_json_body_gives_a_server_error(
    http: httpx.Client, server: RunningServer, path: str, change: dict[str, Any], messages: list[Any] | None
) -> None:
    body: dict[str, Any] = {**COMPLETION, **CHAT, **change}
    if messages is not None:
        body["messages"] = messages
    answer = raw_post(http, server, json.dumps(body).encode(), path)
    assert answer.status_code in (200, 400, 404)
    if answer.status_code != 200:
        error_of(answer)


@settings(max_examples=100, deadline=None)
@given(
    st.one_of(
        st.binary(max_size=60), st.text(max_size=40).map(lambda text: f'{{"model":"tiny","prompt":"{text}"}}'.encode())
    )
)
def test_no_bytes_give_a_server_error(http: httpx.Client, server: RunningServer, content: bytes) -> None:
    assert raw_post(http, server, content).status_code in (200, 400, 404)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("field", ["temperature", "top_p"])
def test_numbers_that_are_none_are_400(http: httpx.Client, server: RunningServer, field: str, number: str) -> None:
    answer = raw_post(http, server, f'{{"model":"tiny","prompt":"x","{field}":{number}}}'.encode())
    assert answer.status_code == 400
    error_of(answer)


@pytest.mark.parametrize("escape", ["\\ud800", "\\udfff x", "\\ud83d"])
def test_half_a_surrogate_pair_is_400(http: httpx.Client, server: RunningServer, escape: str) -> None:
    assert raw_post(http, server, f'{{"model":"tiny","prompt":"{escape}"}}'.encode()).status_code == 400


def test_a_body_over_the_limit_is_413_whether_announced_or_chunked(http: httpx.Client, tiny: LoadedModel) -> None:
    with serving(tiny, ServerSettings(max_body_bytes=10_000, grace_seconds=1)) as server:
        large = json.dumps(COMPLETION | {"prompt": "x" * 20_000}).encode()
        announced = raw_post(http, server, large)

        def chunks() -> Iterator[bytes]:
            for start in range(0, len(large), 1000):
                yield large[start : start + 1000]

        chunked = http.post(
            server.url + "/v1/completions",
            content=chunks(),
            headers={"Content-Type": "application/json"},
        )
        for answer in (announced, chunked):
            assert answer.status_code == 413
            assert error_of(answer)["code"] == "body_too_large"
        assert raw_post(http, server, json.dumps(COMPLETION).encode()).status_code == 200
        assert server.check_books().ended["invalid"] == 2


def test_a_body_that_never_comes_is_408(http: httpx.Client, tiny: LoadedModel) -> None:
    with (
        serving(tiny, ServerSettings(body_seconds=0.3, grace_seconds=1)) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=10) as s,
    ):
        s.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n{"
        )
        assert s.recv(4096).startswith(b"HTTP/1.1 408 ")


def test_token_is_needed_on_the_api_and_metrics_but_not_for_health(http: httpx.Client, tiny: LoadedModel) -> None:
    with serving(tiny, ServerSettings(token="secret", grace_seconds=1)) as server:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret"}):
            answer = http.get(server.url + "/v1/models", headers=headers)
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            assert error_of(answer)["code"] == "invalid_api_key"
            assert http.post(server.url + "/v1/completions", json=COMPLETION, headers=headers).status_code == 401
            assert http.get(server.url + "/metrics", headers=headers).status_code == 401
        right = {"Authorization": "Bearer secret"}
        assert http.post(server.url + "/v1/completions", json=COMPLETION, headers=right).status_code == 200
        assert http.get(server.url + "/metrics", headers=right).status_code == 200
        assert http.get(server.url + "/health").status_code == 200
        assert server.check_books().received == 1


# -- a full queue, a dead engine ------------------------------------------------------------------------------------


def slow_down(server: RunningServer, seconds: float) -> None:
    """Each step of the engine takes at least this long."""
    real = server.engine.executor.execute

    def execute(plan: StepPlan, until: float | None = None) -> StepResult:
        time.sleep(seconds)
        return real(plan, until)

    server.engine.executor.execute = execute


def test_a_full_queue_is_429_with_retry_after(http: httpx.Client, tiny: LoadedModel) -> None:
    with serving(tiny, max_num_seqs=1, max_queued=2) as server:
        slow_down(server, 0.01)
        client = server.client(timeout=30)
        long = {"model": "tiny", "prompt": "x", "max_tokens": 3000, "stream": True, "extra_body": {"ignore_eos": True}}
        streams = [client.completions.create(**long)]
        wait_for(lambda: server.engine.num_running == 1, 5, "the first runs")
        streams += [client.completions.create(**long), client.completions.create(**long)]
        with pytest.raises(openai.RateLimitError) as full:
            client.completions.create(model="tiny", prompt="x")
        assert full.value.status_code == 429
        assert int(full.value.response.headers["retry-after"]) >= 1
        assert full.value.code == "queue_full"
        for stream in streams:
            stream.close()
        books = server.check_books()
        assert (books.received, books.ended["rejected"], books.ended["abort"]) == (4, 1, 3)


def test_several_prompts_are_queued_together_or_not_at_all(http: httpx.Client, tiny: LoadedModel) -> None:
    with serving(tiny, max_num_seqs=1, max_queued=4) as server:
        slow_down(server, 0.01)
        client = server.client(timeout=30)
        stream = client.completions.create(
            model="tiny", prompt=["a", "b"], max_tokens=3000, stream=True, extra_body={"ignore_eos": True}
        )
        wait_for(lambda: (server.engine.num_running, server.engine.num_waiting) == (1, 1), 5, "one runs, one waits")
        with pytest.raises(openai.RateLimitError):
            client.completions.create(model="tiny", prompt=["c", "d", "e", "f"], max_tokens=5)
        wait_for(lambda: server.engine.num_waiting == 1, 5, "the three that had room are gone")
        stream.close()
        books = server.check_books()
        assert (books.received, books.ended["rejected"], books.ended["abort"]) == (6, 1, 5)


def test_a_failed_step_is_500_for_those_it_ran_and_a_broken_engine_is_503(
    http: httpx.Client, tiny: LoadedModel
) -> None:
    with serving(tiny) as server:
        client = server.client(timeout=20)

        def broken(plan: StepPlan, until: float | None = None) -> StepResult:
            raise RuntimeError("the device is gone")

        real = server.engine.executor.execute
        server.engine.executor.execute = broken
        with pytest.raises(openai.InternalServerError) as failed:
            client.completions.create(model="tiny", prompt="x")
        assert failed.value.status_code == 500
        assert "the device is gone" in failed.value.message
        with pytest.raises(openai.APIError, match="the device is gone"):
            list(client.completions.create(model="tiny", prompt="x", stream=True))
        server.engine.executor.execute = real
        assert client.completions.create(model="tiny", prompt="x", max_tokens=1).choices[0].finish_reason == "length"

        server.engine.executor.execute = broken
        for _ in range(3):
            with pytest.raises(openai.InternalServerError):
                client.completions.create(model="tiny", prompt="x")
        wait_for(lambda: not server.thread.alive, 5, "the engine gives up")
        health = http.get(server.url + "/health")
        assert health.status_code == 503
        assert "the device is gone" in health.json()["reason"]
        with pytest.raises(openai.InternalServerError) as refused:
            client.completions.create(model="tiny", prompt="x")
        assert refused.value.status_code == 503
        books = server.books()
        assert books.received == sum(books.ended.values()) == 7
        assert (books.ended["error"], books.ended["length"], books.ended["rejected"]) == (5, 1, 1)


def test_a_stuck_engine_fails_the_health_check(
    http: httpx.Client, tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "STALE_AFTER_SECONDS", 1.0)
    with serving(tiny) as server:
        go_on = threading.Event()
        real = server.engine.executor.execute

        def stuck(plan: StepPlan, until: float | None = None) -> StepResult:
            go_on.wait(20)
            return real(plan, until)

        server.engine.executor.execute = stuck
        with server.client(timeout=20).completions.create(model="tiny", prompt="x", stream=True) as stream:
            wait_for(lambda: http.get(server.url + "/health").status_code == 503, 5, "stuck")
            assert "has not finished a step" in http.get(server.url + "/health").json()["reason"]
            go_on.set()
            list(stream)
        assert http.get(server.url + "/health").status_code == 200
        server.check_books()
