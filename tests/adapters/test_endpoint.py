"""`kvscope doctor` on endpoints that misbehave: a clear finding each, no traceback, within the timeout; and TensorRT-LLM's queue."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler

import pytest
from typer.testing import CliRunner

from exporters.adapters.doctor import Report, examine
from exporters.adapters.endpoint import MAX_BODY_BYTES
from observability.cli import root
from observability.cli.doctor import plain
from tests.adapters.serving import Server, page_of

PAGE = page_of("vllm")


def send(
    body: bytes, *, status: int = 200, encoding: str = "", length: int | None = None
) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        if encoding:
            handler.send_header("Content-Encoding", encoding)
        handler.send_header("Content-Length", str(len(body) if length is None else length))
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def redirect(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(302)
    handler.send_header("Location", "/elsewhere")
    handler.send_header("Content-Length", "0")
    handler.end_headers()


def endless(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.end_headers()
    for _ in range(MAX_BODY_BYTES // (1 << 20) + 8):
        handler.wfile.write(b'vllm:num_requests_running{model_name="m"} 1\n' * ((1 << 20) // 43))


def slow(server: Server, first: bytes, again: bytes) -> Callable[[BaseHTTPRequestHandler], None]:
    """Begins with `first` and then sends `again` every 50 ms until the test ends."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(first)
        while not server.ending.wait(0.05):
            handler.wfile.write(again)

    return answer


def look(server: Server, path: str = "/metrics", *, timeout: float = 5.0, interval: float = 0.0) -> Report:
    return examine(server.url(path), timeout_seconds=timeout, interval_seconds=interval)


def codes(report: Report) -> set[str]:
    return {finding.code for finding in report.findings}


BOMB = gzip.compress(b"a 1\n" * (1 << 20) * 20)  # 80 MiB in 80 kB

UNREADABLE = {
    "a web page": (b"<!DOCTYPE html><html><body>hello</body></html>", "not_metrics", "is a web page"),
    "JSON": (b'{"status": "ok"}', "not_metrics", "is JSON"),
    "prose": (b"this is not a page of metrics\n", "not_metrics", "is not in the Prometheus format"),
    "nothing": (b"", "not_metrics", "is empty"),
    "binary": (bytes(range(256)) * 40, "not_metrics", "is not in the Prometheus format"),
    "another exporter": (b"node_load1 0.5\n", "not_recognized", "of no engine that kvscope knows: it has node_load1"),
    "a 500": (send(b"boom", status=500), "status", "answers 500"),
    "a 401": (send(b"", status=401), "status", "answers 401"),
    "a redirect": (redirect, "redirect", "points to /elsewhere"),
    "half a response": (send(PAGE.encode(), length=10**6), "half_answer", "broke off"),
    "half a gzip stream": (send(gzip.compress(PAGE.encode())[:200], encoding="gzip"), "half_answer", "ends within its gzip stream"),
    "gzip that is none": (send(PAGE.encode(), encoding="gzip"), "encoding", "says gzip and is none"),
    "an unknown encoding": (send(b"x", encoding="br"), "encoding", "encoded as 'br'"),
    "a gzip bomb": (send(BOMB, encoding="gzip"), "too_large", "more than 64 MiB unpacked"),
    "a page without end": (endless, "too_large", "more than 64 MiB"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNREADABLE)
def test_unreadable_endpoint_is_one_clear_error_and_exit_code_2(server: Server, case: str) -> None:
    server.pages["/metrics"], code, words = UNREADABLE[case]  # type: ignore[assignment]
    report = look(server, timeout=20)
    [finding] = [finding for finding in report.findings if finding.level == "error"]
    assert finding.code == code
    assert words in finding.found
    assert finding.do
    assert report.exit_code == 2
    assert "/elsewhere" not in server.read


@pytest.mark.parametrize(
    ("first", "again"),
    [(b"", b""), (b"HTTP/1.1 200 OK\r\n", b"X-Slow: 1\r\n"), (b"HTTP/1.1 200 OK\r\n\r\n", b"a 1\n")],
    ids=["no answer", "slow headers", "slow body"],
)
def test_endpoint_that_hangs_or_trickles_is_given_up_within_the_timeout(
    server: Server, first: bytes, again: bytes
) -> None:
    server.pages["/metrics"] = slow(server, first, again)
    started = time.monotonic()
    report = look(server, timeout=0.5)
    assert codes(report) == {"timeout"}
    assert time.monotonic() - started < 8  # 0.5 s and what a busy machine adds


def test_closed_port_is_an_error_not_a_traceback(free_port: Callable[[], int]) -> None:
    address = f"http://127.0.0.1:{free_port()}/metrics"
    report = examine(address, interval_seconds=0)
    assert codes(report) == {"no_answer"}
    assert report.findings[0].found.startswith(f"{address} does not answer")
    assert report.exit_code == 2


def test_gzip_is_read_and_the_token_is_sent_to_the_endpoint_alone(server: Server) -> None:
    server.pages["/metrics"] = send(gzip.compress(PAGE.encode()), encoding="gzip")
    report = examine(server.url(), token="secret", interval_seconds=0)
    assert report.engine == "vllm"
    assert server.sent["Authorization"] == "Bearer secret"


# -- pages with faults that still can be read ------------------------------------------------------------------------------


FAULTY = {
    "a bad line": (PAGE + "vllm:what is this\n", "bad_lines"),
    "a cut line": (PAGE + 'vllm:num_requests_run', "cut_off"),
    "a changed type": ("# TYPE vllm:x counter\n# TYPE vllm:x gauge\n" + PAGE, "type_changed"),
    "a family twice": ("# TYPE vllm:x counter\n# TYPE vllm:x counter\n" + PAGE, "family_twice"),
    "a series twice": (PAGE + PAGE, "series_twice"),
    "another type": ("# TYPE vllm:num_requests_running counter\n" + PAGE, "other_type"),
    "NaN": (PAGE.replace('vllm:num_requests_waiting{model_name="m",engine="0"} 2', 'vllm:num_requests_waiting{model_name="m",engine="0"} NaN'), "not_a_number"),
    "bytes that are not UTF-8": (PAGE.encode() + b'vllm:y{a="\xff\xfe"} 1\n', "not_utf8"),
}  # fmt: skip


@pytest.mark.parametrize("case", FAULTY)
def test_faulty_page_is_read_as_far_as_it_goes_and_says_the_fault(server: Server, case: str) -> None:
    server.pages["/metrics"], code = FAULTY[case]
    report = look(server)
    assert report.engine == "vllm"
    assert code in codes(report)
    assert report.exit_code == 1
    running = next(r for r in report.readings if r.name == "Requests running")
    assert running.value == 7


def test_page_of_a_million_bad_lines_is_given_up_early(server: Server) -> None:
    server.pages["/metrics"] = "not a sample at all\n" * 300_000
    assert codes(look(server)) == {"not_metrics"}


# -- TensorRT-LLM --------------------------------------------------------------------------------------------------------------

QUEUE = json.dumps([{"iter": 7, "iterLatencyMS": 3.2, "numActiveRequests": 1}])


def test_tensorrt_queue_is_refused_by_name_and_not_read(server: Server) -> None:
    server.pages |= {"/metrics": QUEUE, "/prometheus/metrics": page_of("trtllm")}
    report = look(server)
    assert codes(report) == {"trtllm_queue"}
    assert "TensorRT-LLM's queue" in report.findings[0].found
    assert "/prometheus/metrics" in report.findings[0].do
    assert report.exit_code == 2
    assert "/metrics" not in server.read


def test_tensorrt_server_without_performance_metrics_is_known_by_its_models(server: Server) -> None:
    server.pages |= {"/metrics": QUEUE, "/v1/models": json.dumps({"data": [{"id": "m", "owned_by": "tensorrt_llm"}]})}
    assert codes(look(server)) == {"trtllm_queue"}
    assert "/metrics" not in server.read


def test_queue_that_nothing_gave_away_is_read_once_and_said_to_be_taken(server: Server) -> None:
    server.pages["/metrics"] = QUEUE
    report = look(server, interval=0.05)
    assert "took what was in it" in report.findings[0].found
    assert server.read.count("/metrics") == 1


def test_address_without_a_path_goes_to_the_metrics_that_are_safe_to_read(server: Server) -> None:
    server.pages |= {"/metrics": QUEUE, "/prometheus/metrics": page_of("trtllm")}
    report = look(server, "", interval=0.05)
    assert report.engine == "trtllm"
    assert "/metrics" not in server.read


# -- the command ------------------------------------------------------------------------------------------------------------------


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(root, ["doctor", *arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def test_command_prints_one_fact_a_line_into_a_pipe_and_json_on_demand(server: Server) -> None:
    server.pages |= {"/metrics": PAGE, "/version": '{"version": "0.32.0"}'}
    code, text = run(server.url(), "--interval", "0")
    report = look(server)
    assert code == report.exit_code
    assert text.splitlines() == plain(report)
    assert "engine: vLLM" in text
    assert "version: 0.32.0 [measured: from /version]" in text
    code, text = run(server.url(), "--interval", "0", "--json")
    found = json.loads(text)
    assert found["exit_code"] == code
    assert found["engine"] == "vllm"
    assert {reading["status"] for reading in found["readings"]} <= {"measured", "estimated", "unavailable"}


def test_command_ends_with_2_where_nothing_can_be_read(server: Server) -> None:
    assert run(server.url(), "--json")[0] == 2


@pytest.mark.parametrize("arguments", [(), ("http://127.0.0.1:1", "--host")])
def test_command_wants_one_thing_to_check(arguments: tuple[str, ...]) -> None:
    done = CliRunner().invoke(root, ["doctor", *arguments])
    assert "Name one thing to check" in str(done.exception)


@pytest.mark.parametrize("url", ["ftp://x", "http://", "mailto:x", ""])
def test_what_is_no_address_is_refused_with_an_example(url: str) -> None:
    done = CliRunner().invoke(root, ["doctor", url])
    assert "kvscope doctor http://127.0.0.1:8000/metrics" in str(done.exception)
