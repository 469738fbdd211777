"""`kvscope serve` as a process: addresses, limits, refusals before the model is loaded, a clean end."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from observability.cli import root
from observability.errors import ConfigError, KvscopeError, ModelError, ServiceError
from tests.conftest import wait_for

KVSCOPE = (sys.executable, "-m", "observability.cli")
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "200"}


class Served:
    """A running `kvscope serve`; `output` grows with what it prints."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.output = ""
        threading.Thread(target=self._read, daemon=True).start()
        found = wait_for(lambda: re.search(r"API +(http://\S+)/v1", self.output), 60, "address printed")
        self.url = found.group(1)
        wait_for(lambda: httpx.get(self.url + "/health", trust_env=False).status_code == 200, 10, "healthy")

    def _read(self) -> None:
        for line in self.process.stdout:
            self.output += line.decode()
        self.process.stdout.close()

    def end(self, number: int) -> int:
        self.process.send_signal(number)
        return self.process.wait(20)


@pytest.fixture
def serve(spawn: Callable[..., subprocess.Popen[bytes]]) -> Callable[..., Served]:
    def start(*options: str, **env: str) -> Served:
        return Served(
            spawn(
                *KVSCOPE,
                "serve",
                "tiny",
                "--port",
                "0",
                *options,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=ENV | env,
            )
        )

    return start


def run(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*KVSCOPE, *argv], capture_output=True, text=True, timeout=60, env=ENV | env, check=False)


def stream(served: Served, **kwargs: Any) -> openai.Stream[Any]:
    client = openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0, timeout=30)
    return client.completions.create(
        model="tiny", prompt="x", temperature=0, stream=True, extra_body={"ignore_eos": True}, **kwargs
    )


def test_sigterm_lets_a_running_request_finish_and_exits_0(serve: Callable[..., Served]) -> None:
    served = serve("--grace", "60")
    events = iter(stream(served, max_tokens=200))
    next(events)
    served.process.send_signal(signal.SIGTERM)
    assert len([event for event in events if event.choices]) == 199
    assert served.process.wait(80) == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(served.url + "/health", trust_env=False)


def test_sigint_ends_a_request_that_outlasts_the_grace_period_by_an_error_and_exits_0(
    serve: Callable[..., Served],
) -> None:
    served = serve("--grace", "0.2")
    events = iter(stream(served, max_tokens=8000))
    next(events)
    began = time.monotonic()
    served.process.send_signal(signal.SIGINT)
    with pytest.raises(openai.APIError, match="shutting down"):
        list(events)
    assert served.process.wait(20) == 0
    assert time.monotonic() - began < 10
    assert "Traceback" not in served.output


def test_settings_reach_the_engine_and_the_token_comes_from_the_environment(serve: Callable[..., Served]) -> None:
    served = serve(
        "--kv-memory", "2MiB", "--block-size", "32", "--kv-dtype", "int8", "--max-num-seqs", "2", KVSCOPE_TOKEN="secret"
    )  # fmt: skip
    headers = {"Authorization": "Bearer secret"}
    assert httpx.get(served.url + "/v1/models", trust_env=False).status_code == 401
    model = httpx.get(served.url + "/v1/models", headers=headers, trust_env=False).json()["data"][0]
    metrics = httpx.get(served.url + "/metrics", headers=headers, trust_env=False).text
    blocks = int(re.search(r"^kvscope_kv_capacity_blocks\{.*\} (\d+)$", metrics, re.M).group(1))
    reserved = int(re.search(r'^kvscope_kv_bytes\{.*kind="reserved"\} (\d+)$', metrics, re.M).group(1))
    assert 2 * 2**20 * (1 - 1 / blocks) < reserved <= 2 * 2**20
    assert model["max_model_len"] == min(8192, blocks * 32)
    assert 'kv_dtype="int8"' in metrics
    client = openai.OpenAI(base_url=served.url + "/v1", api_key="secret", max_retries=0)
    assert client.completions.create(model="tiny", prompt="x", max_tokens=3, temperature=0).usage.completion_tokens > 0
    assert "secret" not in served.output
    assert served.end(signal.SIGTERM) == 0


def test_a_taken_port_is_told_before_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = run("serve", "/no/such/model", "--port", str(taken.getsockname()[1]))
    assert result.returncode == 1
    assert "cannot listen on 127.0.0.1:" in result.stderr
    assert "--port" in result.stderr
    assert "model" not in result.stderr
    assert "Traceback" not in result.stderr


def test_an_open_address_needs_a_token() -> None:
    result = run("serve", "tiny", "--host", "0.0.0.0")
    assert result.returncode == 2
    assert "KVSCOPE_TOKEN" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (["/no/such/model", "--port", "0"], ModelError, "/no/such/model"),
        (["tiny", "--host", "::"], ConfigError, "--insecure"),
        (["tiny", "--host", "no-such-host.invalid", "--insecure"], ServiceError, "no-such-host.invalid"),
        (["tiny", "--port", "0", "--kv-memory", "lots"], ConfigError, "512MiB"),
        (["tiny", "--port", "0", "--kv-memory", "10B"], ConfigError, "holds no block"),
        (["tiny", "--kv-memory", "1GiB", "--kv-blocks", "5"], ConfigError, "Give one of them"),
        (["tiny", "--port", "0", "--kv-blocks", "4", "--max-model-len", "512"], ConfigError, "num_blocks"),
        (["tiny", "--port", "0", "--max-model-len", "9000", "--kv-blocks", "600"], ConfigError, "max_model_len"),
        (["tiny", "--port", "0", "--token", "with space"], ConfigError, "token"),
    ],
)
def test_bad_settings_are_told_with_a_next_step(options: list[str], error: type[KvscopeError], words: str) -> None:
    with pytest.raises(error) as raised:
        root(["serve", *options], standalone_mode=False)
    assert words in str(raised.value)
    assert raised.value.next_step


def test_help_shows_examples_and_every_limit() -> None:
    text = run("serve", "--help").stdout
    for words in (
        "kvscope serve",
        "--kv-memory",
        "--max-queued",
        "--contiguous-below",
        "KVSCOPE_TOKEN",
        "x-kvscope-class",
    ):
        assert words in text


def test_a_metrics_port_serves_the_engine_and_ends_with_the_server(serve: Callable[..., Served]) -> None:
    served = serve("--metrics-port", "0", "--token", "s3cret")
    headers = {"Authorization": "Bearer s3cret"}
    alone = re.search(r"metrics .*, (http://\S+)", served.output).group(1)
    ask = {"model": "tiny", "prompt": "x", "max_tokens": 3, "ignore_eos": True}
    httpx.post(served.url + "/v1/completions", json=ask, headers=headers, timeout=60, trust_env=False)
    assert httpx.get(alone, timeout=60, trust_env=False).status_code == 401
    both = [
        httpx.get(url, headers=headers, timeout=60, trust_env=False).text for url in (alone, served.url + "/metrics")
    ]
    tokens = [
        re.search(r"^kvscope_generation_tokens_total\{.*standard.*\} (\d+)$", text, re.M).group(1) for text in both
    ]
    assert tokens == ["3", "3"]
    assert served.end(signal.SIGTERM) == 0
    with pytest.raises(httpx.TransportError):
        httpx.get(alone, trust_env=False)


def test_a_taken_metrics_port_is_named_before_the_model_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused = run("serve", "no-such-model", "--port", "0", "--metrics-port", str(port))
    assert refused.returncode != 0
    assert f"127.0.0.1:{port}" in refused.stderr
