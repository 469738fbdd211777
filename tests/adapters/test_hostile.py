"""`kvscope doctor` on endpoints, addresses and tokens that mean harm or are broken: no traceback, no secret printed, no bomb goes off."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from exporters.adapters import checks, readings
from exporters.adapters.doctor import examine, recognize
from exporters.adapters.endpoint import Answer, without_secrets
from exporters.adapters.engines import ADAPTERS
from exporters.adapters.page import parse
from observability.cli import root
from observability.cli.doctor import plain
from observability.errors import ConfigError
from tests.adapters.serving import Server, page_of
from tests.adapters.test_endpoint import PAGE, QUEUE, codes, look, send
from tests.conftest import REPO

SECRET = "s3cret"


def doctor(*arguments: str) -> tuple[int, str]:
    """Exit code and all output; a mistake of the user is told as the `kvscope` command tells it."""
    done = CliRunner().invoke(root, ["doctor", *arguments])
    if isinstance(done.exception, ConfigError):
        return done.exception.exit_code, done.output + str(done.exception)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


ADDRESSES = [
    f"http://user:{SECRET}@127.0.0.1:9/metrics", f"ftp://user:{SECRET}@host/metrics", f"http://user:{SECRET}@[bad/",
    f"http://127.0.0.1:9/metrics?token={SECRET}&x={SECRET}", f"user:{SECRET}@127.0.0.1:9", "http://xn--/", "http://[::1", "http://h:99999/",
    "http://h:abc/", "http://127.0.0.1:0/", "/run/engine.sock", "unix:///run/engine.sock", "file:///etc/passwd", "[::1]:9", "http://\x1b[31mx/",
]  # fmt: skip


@pytest.mark.parametrize("address", ADDRESSES)
def test_no_address_brings_a_traceback_or_a_secret_onto_the_screen_and_json_stays_json(address: str) -> None:
    for arguments in ((), ("--json",)):
        code, text = doctor(address, "--interval", "0", "--timeout", "5", *arguments)
        assert code == 2
        assert SECRET not in text
        assert "\x1b" not in text
    found = json.loads(text)
    assert found["exit_code"] == 2
    assert found["findings"][0]["do"]


@pytest.mark.parametrize("arguments", [("--json",), ("--host", "--pid", "99999999", "--json")])
def test_a_mistake_in_the_command_is_json_where_json_was_asked_for(arguments: tuple[str, ...]) -> None:
    code, text = doctor(*arguments)
    assert code == json.loads(text)["exit_code"] == 2


def test_shown_addresses_keep_host_path_and_the_names_of_a_query() -> None:
    assert without_secrets("http://u:p@h:1/a@b?k=v&l=w") == "http://h:1/a@b?k=...&l=..."
    assert without_secrets("http://h/metrics") == "http://h/metrics"


def test_token_from_a_file_loses_its_line_break_and_a_broken_one_is_refused_unprinted(server: Server) -> None:
    server.pages["/metrics"] = PAGE
    assert examine(server.url(), token=f"{SECRET}\n", interval_seconds=0).engine == "vllm"
    assert server.sent["Authorization"] == f"Bearer {SECRET}"
    for token in (f"{SECRET}\nX: 1", f"{SECRET}ü"):
        code, text = doctor(server.url(), "--interval", "0", "--token", token)
        assert code == 2
        assert SECRET not in text


def test_redirect_is_shown_without_what_it_holds_of_secrets(server: Server) -> None:
    def away(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(302)
        handler.send_header("Location", f"http://u:{SECRET}@h/?token={SECRET}")
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    server.pages["/metrics"] = away
    assert SECRET not in "".join(plain(look(server)))


def test_time_limit_holds_where_the_name_server_hangs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import socket, time\nsocket.getaddrinfo = lambda *a, **k: time.sleep(300)\n"
    )
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "observability.cli", "doctor", "http://engine.example/metrics", "--timeout", "0.5", "--json"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{REPO}"}, cwd=REPO, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert json.loads(done.stdout)["findings"][0]["code"] == "timeout"
    assert time.monotonic() - started < 150  # and not the 300 s of the look-up


def test_gzip_of_several_members_is_read_to_its_end_and_junk_behind_it_is_bounded(server: Server) -> None:
    whole = PAGE.encode()
    server.pages["/metrics"] = send(gzip.compress(whole[:300]) + gzip.compress(whole[300:]), encoding="gzip")
    report = look(server)
    assert codes(report) & {"cut_off", "bad_lines"} == set()
    server.pages["/metrics"] = send(gzip.compress(whole) + b"\0" * 1000, encoding="gzip")
    assert codes(look(server)) == {"encoding"}


def test_what_an_endpoint_sends_stays_on_its_line_and_steers_no_terminal(server: Server) -> None:
    server.pages |= {
        "/metrics": PAGE.replace('model_name="m"', 'model_name=" \\n\x1b[31m "') + "# TYPE vllm:\x1b[2Jx counter\n# TYPE vllm:\x1b[2Jx gauge\n",
        "/version": json.dumps({"version": "\x1b[31m1\nerror: not so"}),
    }  # fmt: skip
    lines = plain(look(server))
    assert all(line.isprintable() for line in lines)
    assert not any(line.startswith("error") for line in lines)


BOMBS = {
    "300,000 labels in one line": "vllm:x{" + ",".join(f'l{i}="v"' for i in range(300_000)) + "} 1\n",
    "a label of 20 MB": 'vllm:x{a="' + "x" * (20 << 20) + '"} 1\n',
    "quotes": 'vllm:x{a="' * 100_000 + "\n",
    "a rank that is an id": 'vllm:x{engine="7587888312345678901"} 1\n' + 'vllm:x{engine="' + "9" * 5000 + '"} 1\n',
    "ranks of other scripts": 'vllm:x{engine="²"} 1\nvllm:x{engine="٣"} 1\n',
    "numbers too large to add": 'vllm:num_requests_running{engine="8"} 1.7e308\nvllm:num_requests_running{engine="9"} 1.7e308\n',
    "bounds that are no numbers": "".join(f'vllm:{name}_bucket{{le="{le}"}} 5\n' for name in ("request_queue_time_seconds", "time_to_first_token_seconds") for le in ("abc", "", "NaN", "-Inf", "1e999", "-3")),
}  # fmt: skip


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_on_the_page_takes_no_time_and_hides_nothing_else(server: Server, bomb: str) -> None:
    server.pages["/metrics"] = PAGE + BOMBS[bomb]
    report = look(server, timeout=20)
    assert report.engine == "vllm"
    assert report.exit_code == 1
    waiting = next(r for r in report.readings if r.name == "Requests waiting")
    assert waiting.status == "measured"
    json.loads(json.dumps([r.value for r in report.readings], allow_nan=False))
    assert max(map(len, plain(report))) < 2000


def test_a_page_that_takes_too_long_is_read_in_part_and_said_so() -> None:
    lines = "".join(f'vllm:request_success_total{{model_name="m{i}"}} 1\n' for i in range(50_000))
    page = parse(Answer("http://h", lines.encode(), ""), seconds=0.0)
    assert {finding.code for finding in page.findings} & {"too_many_series", "not_metrics"}
    page = parse(Answer("http://h", lines.encode(), ""), seconds=600)
    assert len(page.samples) == 50_000


_NUMBERS = st.sampled_from(["0", "1", "-5", "1e308", "-1e308", "NaN", "+Inf", "-Inf", "1e-320", "7", ""])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), engine=st.sampled_from(sorted(ADAPTERS)))
def test_no_values_on_a_page_make_a_check_or_a_reading_fail(data: st.DataObject, engine: str) -> None:
    lines = [line.rsplit(" ", 1)[0] for line in page_of(engine).splitlines()]
    kept = data.draw(st.lists(st.sampled_from(lines), unique=True, min_size=1))
    text = "".join(f"{line} {data.draw(_NUMBERS)}\n" for line in kept)
    page = parse(Answer("http://h", text.encode(), ""))
    recognize(page)
    adapter = ADAPTERS[engine]
    for check in checks.CHECKS:
        list(check(adapter, page))
    list(checks.frozen(adapter, page, page, 1.0))
    for reading in readings.read(adapter, page):
        json.dumps([reading.value, reading.low, reading.high], allow_nan=False)
        assert (reading.value is not None) >= (reading.status == "measured")


# -- TensorRT-LLM behind a proxy, or one that hides its models ---------------------------------------------------------------


def test_queue_below_a_prefix_is_known_by_what_lies_beside_it(server: Server) -> None:
    server.pages |= {"/team/metrics": QUEUE, "/team/prometheus/metrics": page_of("trtllm")}
    assert codes(look(server, "/team/metrics")) == {"trtllm_queue"}
    assert "/team/metrics" not in server.read
    assert look(server, "/team/prometheus/metrics").engine == "trtllm"


def test_queue_is_known_by_the_servers_paths_where_its_models_are_hidden(server: Server) -> None:
    server.pages |= {
        "/metrics": QUEUE,
        "/v1/models": send(b"", status=401),
        "/openapi.json": json.dumps({"paths": {"/metrics": {}, "/perf_metrics": {}, "/kv_cache_events": {}}}),
    }
    assert codes(look(server)) == {"trtllm_queue"}
    assert "/metrics" not in server.read
