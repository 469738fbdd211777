"""A secret that was given in an address, a header or a variable is shown nowhere: not in output, errors, metrics, pages or reports."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from observability.addresses import without_secrets
from tests.conftest import REPO, wait_for
from tests.otlp.receiver import Scripted

CANARY = "canary-5f1e8a"
CLI = (sys.executable, "-m", "observability.cli")
ENV = {"NO_COLOR": "1", "COLUMNS": "300", "OMP_NUM_THREADS": "1"}


def run(*argv: str, **env: str) -> str:
    """All that a command prints."""
    done = subprocess.run([*CLI, *argv], capture_output=True, text=True, timeout=120, env=os.environ | ENV | env)
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def refusing() -> Iterator[int]:
    """A port that nothing listens on."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@pytest.fixture(scope="module")
def unauthorized() -> Iterator[Scripted]:
    with Scripted([b"HTTP/1.1 401 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"]) as server:
        yield server


#: Commands that take an address; {} is where it stands. Each ends by itself with an error that names the address.
ENDING = [
    ("doctor", "{}/metrics", "--interval", "0"),
    ("replay", "generated", "--preset", "laptop", "--url", "{}", "--limit", "1"),
    ("route", "--replica", "{}"),
    ("app", "--source", "prometheus:{}", "--endpoint", "ftp{}"),
    ("forecast", "--source", "prometheus:{}"),
    ("rules", "push", "--url", "{}"),
    ("boards", "import", "--url", "{}"),
    ("serve", "tiny", "--port", "0", "--otlp-endpoint", "ftp:{}"),
    ("serve", "tiny", "--port", "0", "--profile-to", "ftp:{}"),
    ("record", "--url", "ftp:{}"),
    ("record", "--url", "{}/[", "--interval", "0"),
]


@pytest.mark.parametrize("command", ENDING, ids=lambda command: " ".join(command[:2]))
def test_an_error_about_an_address_does_not_show_what_it_carries(
    command: tuple[str, ...], refusing: int, tmp_path: Path
) -> None:
    address = f"http://user:{CANARY}@127.0.0.1:{refusing}"
    argv = [part.format(address) for part in command]
    if command[0] == "forecast":
        argv += ["--store", str(tmp_path / "f.sqlite")]
    said = run(*argv, KVSCOPE_TOKEN=CANARY, KVSCOPE_API_KEY=CANARY, GRAFANA_TOKEN=CANARY)
    assert said.strip()
    assert CANARY not in said
    assert "Traceback" not in said


def test_a_recorder_shows_its_target_without_the_password(
    unauthorized: Scripted, spawn: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    url = unauthorized.url.replace("http://", f"http://user:{CANARY}@") + f"/metrics?key={CANARY}"
    log = tmp_path / "log"
    with log.open("wb") as out:
        process = spawn(
            *CLI, "record", "--url", url, "--store", str(tmp_path / "s.sqlite"), "--interval", "500ms", stdout=out, stderr=out,
            env=os.environ | ENV | {"KVSCOPE_TOKEN": CANARY},
        )  # fmt: skip
    wait_for(lambda: "answered 401" in log.read_text(), 60, "the refusal is told")
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    assert CANARY not in log.read_text()
    for file in tmp_path.iterdir():
        assert CANARY.encode() not in file.read_bytes()


def test_a_server_keeps_its_secrets_and_its_clients(
    refusing: int, spawn: Callable[..., subprocess.Popen[bytes]], free_port: Callable[[], int], tmp_path: Path
) -> None:
    """The token, the collector's and the profiler's password and headers in its environment; a client's key, prompt, session."""
    port, log = free_port(), tmp_path / "log"
    secret_url = f"http://user:{CANARY}@127.0.0.1:{refusing}"
    env = {
        "KVSCOPE_TOKEN": f"{CANARY}-token", "OTEL_EXPORTER_OTLP_HEADERS": f"authorization=Basic%20{CANARY}",
        "OTEL_EXPORTER_OTLP_ENDPOINT": secret_url, "KVSCOPE_PROFILE_TO": secret_url, "OTEL_METRIC_EXPORT_INTERVAL": "500",
        "OTEL_BSP_SCHEDULE_DELAY": "200",
    }  # fmt: skip
    with log.open("wb") as out:
        process = spawn(
            *CLI, "serve", "tiny", "--port", str(port), "--snapshot-dir", str(tmp_path / "sessions"), stdout=out, stderr=out,
            env=os.environ | ENV | env,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    wait_for(lambda: httpx.get(url + "/health", trust_env=False).status_code == 200, 60, "health")
    answers: list[httpx.Response] = []
    right = {"Authorization": f"Bearer {CANARY}-token"}
    body = {"model": "tiny", "prompt": "hi", "max_tokens": 3}
    with httpx.Client(base_url=url, trust_env=False, timeout=30) as client:
        answers.append(client.get(f"/v1/models?key={CANARY}", headers={"Authorization": f"Bearer {CANARY}"}))
        answers.append(
            client.post("/v1/completions", content=b"{", headers=right | {"X-Api-Key": CANARY, "Cookie": CANARY})
        )
        answers.append(
            client.post("/v1/completions", json=body | {"user": CANARY}, headers=right | {"X-Session-ID": CANARY})
        )
        answers.append(client.get(f"/none?token={CANARY}", headers=right))
        answers.append(client.get("/health"))
        answers.append(client.get("/metrics", headers=right))
        openmetrics = right | {"Accept": "application/openmetrics-text;version=1.0.0"}
        answers.append(client.get("/metrics", headers=openmetrics))
    assert [answer.status_code for answer in answers] == [401, 415, 200, 404, 200, 200, 200]
    for answer in answers:
        assert CANARY not in answer.text
        assert CANARY not in str(answer.headers)
    wait_for(lambda: "metrics batch" in log.read_text(), 30, "a push that failed is told")
    process.send_signal(signal.SIGTERM)
    assert process.wait(40) == 0
    assert CANARY not in log.read_text()
    for path in (
        tmp_path / "sessions"
    ).iterdir():  # names of sessions are hashed; what was said in them is their content
        assert CANARY not in path.name


def test_the_report_of_a_replay_holds_neither_key_nor_password() -> None:
    from observability.engine.model.loading import load_model
    from observability.engine.server import ServerSettings
    from observability.engine.types import PromptSpan
    from observability.workload.replay_http import HttpSettings, replay_http
    from observability.workload.traces import TraceRequest
    from tests.server.harness import serving

    with serving(load_model("tiny")) as server:
        url = server.url.replace("http://", f"http://user:{CANARY}@")
        settings = HttpSettings(url, api_key=CANARY)
        result = replay_http([TraceRequest(0.0, PromptSpan(4, (1,), 512), 2)], settings)
    assert result.outcomes["length"] == 1
    assert CANARY not in json.dumps(result.settings)
    assert CANARY not in repr(settings).replace(url, "") + repr(ServerSettings(token=CANARY))
    assert CANARY not in repr(result)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://a:b@host:1/x?token=s&u=v#f", "http://host:1/x?token=...&u=...#f"),
        ("a:b@host/x", "host/x"),
        ("http://a:p@ss@host", "http://host"),
        ("http://host/path@x", "http://host/path@x"),
        ("https://host", "https://host"),
    ],
)
def test_an_address_is_shown_without_user_password_and_values(url: str, shown: str) -> None:
    assert without_secrets(url) == shown


def test_tokens_are_compared_in_constant_time() -> None:
    """No == between a token and what a client sent: in every file that reads the header Authorization."""
    readers = [
        path for part in ("observability", "exporters") for path in (REPO / part).rglob("*.py")
        if re.search(r"headers\.get\(\"authorization\"", path.read_text())
    ]  # fmt: skip
    assert {path.name for path in readers} >= {"server.py", "prometheus.py"}
    for path in readers:
        assert "compare_digest" in path.read_text(), path
