"""`kvscope boards`: what it writes, what its check finds, and what it does to a Grafana. The Grafana is a stand-in over real HTTP."""

from __future__ import annotations

import http.server
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from observability.cli import boards, root
from observability.errors import ConfigError, KvscopeError, ServiceError
from tests.boards.servers import Grafana


def run(*arguments: str, token: str | None = "editor") -> tuple[str, BaseException | None]:
    done = CliRunner().invoke(root, ["boards", *arguments], env={"KVSCOPE_GRAFANA_TOKEN": token})
    assert token is None or token not in done.output
    return done.output, None if done.exit_code == 0 else done.exception


@pytest.fixture
def grafana() -> Iterator[Grafana]:
    server = Grafana()
    yield server
    server.close()


def test_import_creates_the_folder_and_every_board_and_page_in_it(grafana: Grafana) -> None:
    output, error = run("import", "--url", grafana.url + "/", "--message", "first", "--json")
    assert error is None
    every = {name: json.loads(text) for name, text in boards.files().items()}
    assert json.loads(output) == dict.fromkeys(every, "created")
    assert grafana.folders == {"kvscope": "kvscope"}
    assert {uid: board["title"] for uid, board in grafana.boards.items()} == {
        b["uid"]: b["title"] for b in every.values()
    }
    assert set(grafana.folder_of.values()) == {"kvscope"}
    assert set(grafana.messages.values()) == {"first"}
    assert all(board["id"] is None for board in grafana.boards.values())


def test_boards_that_are_there_are_replaced_only_when_told_to(grafana: Grafana) -> None:
    run("import", "--url", grafana.url, "--board", "p99")
    before = dict(grafana.boards)
    _, error = run("import", "--url", grafana.url, "--board", "p99")
    assert isinstance(error, ServiceError)
    assert "version 1" in error.reason
    assert "--overwrite" in error.next_step
    assert grafana.boards == before
    output, error = run("import", "--url", grafana.url, "--board", "p99", "--board", "overview", "--overwrite")
    assert error is None
    assert [line.split() for line in output.splitlines()] == [["replaced", "p99.json"], ["created", "overview.json"]]
    assert grafana.boards["kvscope-p99"]["version"] == 2


def test_a_dry_run_changes_nothing_and_says_what_would_happen(grafana: Grafana) -> None:
    run("import", "--url", grafana.url, "--board", "p99")
    grafana.calls.clear()
    output, error = run("import", "--url", grafana.url, "--board", "p99", "--board", "batching", "--dry-run", "--json")
    assert error is None
    assert json.loads(output) == {"p99.json": "exists, needs --overwrite", "batching.json": "would create"}
    assert {method for method, _ in grafana.calls} == {"GET"}


@pytest.mark.parametrize(
    ("token", "forced", "said", "next_step"),
    [
        ("wrong", {}, "401 Invalid API key", "service account token"),
        ("viewer", {}, "403 You'll need additional permissions", "role Editor"),
        ("editor", {"/api/dashboards/db": (412, {"message": "Already provisioned", "status": "plugin-dashboard"})}, "412 Already provisioned", "--overwrite"),
        ("editor", {"/api/dashboards/db": (500, b"<html><body>oops</body></html>")}, "500 Internal Server Error", "log"),
        ("editor", {"/api/dashboards/db": (404, {"message": "Not found"})}, "404 Not found", "a path such as /grafana"),
        ("editor", {"/api/health": (200, b"<html>login</html>")}, "not JSON", "login page"),
        ("editor", {"/api/health": (200, {"status": "ok"})}, "is not a Grafana", "in a browser"),
        ("editor", {"/api/health": (302, b"")}, "302", "https://login.example.com/"),
    ],
)  # fmt: skip
def test_a_refusal_says_what_was_refused_and_what_to_do(
    grafana: Grafana, token: str, forced: dict[str, Any], said: str, next_step: str
) -> None:
    grafana.forced = forced
    _, error = run("import", "--url", grafana.url, token=token)
    assert isinstance(error, ServiceError)
    assert said in error.reason
    assert next_step in error.next_step
    assert token not in str(error)
    if "/api/dashboards/db" in forced:
        assert "0 of" in error.reason


def test_nobody_at_the_address_is_an_error(free_port: Any) -> None:
    _, error = run("import", "--url", f"http://127.0.0.1:{free_port()}")
    assert isinstance(error, ServiceError)
    assert "cannot be reached" in error.reason


@pytest.mark.parametrize("drip", [False, True], ids=["silent", "a byte at a time"])
def test_a_server_that_never_ends_its_answer_does_not_hold_the_command(drip: bool) -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            for _ in range(200):
                time.sleep(0.05)
                if drip:
                    try:
                        self.wfile.write(b" ")
                    except OSError:
                        return

        def log_message(self, *_: object) -> None:
            """Quiet."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        began = time.monotonic()
        _, error = run("import", "--url", f"http://127.0.0.1:{server.server_address[1]}", "--timeout", "0.4")
        assert isinstance(error, ServiceError)
        assert "within 0.4 s" in error.reason
        assert time.monotonic() - began < 6  # the server would go on for 10 s
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("arguments", "token", "named"),
    [
        (["--url", "grafana:3000"], "editor", "grafana:3000"),
        (["--url", "http://admin:hunter2@127.0.0.1"], "editor", "--url carries a user"),
        (["--url", "http://127.0.0.1", "--folder-uid", "a/b"], "editor", "a/b"),
        (["--url", "http://127.0.0.1", "--board", "p98"], "editor", "p98"),
        (["--url", "http://127.0.0.1"], None, "No token"),
        (["--url", "http://127.0.0.1"], "two\nlines", "Authorization"),
    ],
)
def test_arguments_that_cannot_work_are_named(arguments: list[str], token: str | None, named: str) -> None:
    _, error = run("import", *arguments, token=token)
    assert isinstance(error, ConfigError)
    assert named in error.reason
    assert "hunter2" not in str(error)


# -- write and check ------------------------------------------------------------------------------------------------


def test_what_is_written_passes_the_check_and_is_current(tmp_path: Path) -> None:
    assert run("write", str(tmp_path))[1] is None
    output, error = run("check", str(tmp_path), "--json")
    assert error is None
    assert {row["state"] for row in json.loads(output).values()} == {"current"}
    repo = Path(__file__).resolve().parents[2] / "dashboards/generated"
    assert all((repo / path.name).read_text() == path.read_text() for path in tmp_path.iterdir())


def test_check_accepts_an_edited_board_and_finds_what_no_version_could_show(tmp_path: Path) -> None:
    run("write", str(tmp_path), "--board", "p99", "--board", "batching")
    edited = json.loads((tmp_path / "p99.json").read_text()) | {"title": "Ours"}
    (tmp_path / "p99.json").write_text(json.dumps(edited))
    panel = {"title": "Old", "targets": [{"expr": 'sum(rate(kvscope_cache_hits_total{a="kvscope_b"}[5m]))'}]}
    row = {"title": "Row", "panels": [panel | {"title": "Inside"}]}
    (tmp_path / "mine.json").write_text(
        json.dumps({"title": "Mine", "uid": "kvscope-batching", "panels": [panel, row]})
    )
    (tmp_path / "cut.json").write_text('{"title": "Cu')
    (tmp_path / "list.json").write_text("[]")
    output, error = run("check", str(tmp_path), "--json")
    assert isinstance(error, KvscopeError)
    found = json.loads(output.splitlines()[0] if output.startswith("{}") else output)
    assert found["p99.json"] == {"state": "differs", "faults": []}
    assert found["batching.json"] == {"state": "current", "faults": []}
    assert "cannot be read as JSON" in found["cut.json"]["faults"][0]
    assert "is not a board" in found["list.json"]["faults"][0]
    assert found["mine.json"]["state"] == "yours"
    assert found["mine.json"]["faults"] == [
        "has the uid kvscope-batching of batching.json",
        "panel 'Old' asks for kvscope_cache_hits_total, which nothing exports or records",
        "panel 'Inside' asks for kvscope_cache_hits_total, which nothing exports or records",
    ]


def test_an_empty_folder_is_no_folder_of_boards(tmp_path: Path) -> None:
    _, error = run("check", str(tmp_path))
    assert isinstance(error, ConfigError)
    assert "kvscope boards write" in error.next_step


def test_every_command_shows_examples() -> None:
    for command in ("write", "check", "import"):
        assert "Examples:" in run(command, "--help")[0]


def test_a_port_that_speaks_something_else_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet() -> None:
            connection, _ = listener.accept()
            connection.sendall(b"220 mail.example.com ESMTP\r\n")
            connection.close()

        threading.Thread(target=greet, daemon=True).start()
        _, error = run("import", "--url", f"http://127.0.0.1:{listener.getsockname()[1]}", "--timeout", "2")
    assert isinstance(error, ServiceError)
    assert "cannot be reached" in error.reason
