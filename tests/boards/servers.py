"""Stand-ins over real HTTP for servers that do not run here: Grafana's dashboard and folder API, and the ruler API of Mimir, each as its
documentation describes it (https://grafana.com/docs/grafana/latest/developers/http_api/, https://grafana.com/docs/mimir/latest/references/http-api/)."""

from __future__ import annotations

import http.server
import json
import threading
from typing import Any

import yaml

Json = dict[str, Any]


class Server:
    """Answers by `answer(method, path, headers, body) -> (status, body)` until closed."""

    def __init__(self) -> None:
        outer = self
        self.calls: list[tuple[str, str]] = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def _do(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                outer.calls.append((self.command, self.path))
                status, answer = outer.answer(self.command, self.path, dict(self.headers), body)
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                if 300 <= status < 400:
                    self.send_header("Location", "https://login.example.com/")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_DELETE = _do

            def log_message(self, *_: object) -> None:
                """Quiet."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, Any]:
        raise NotImplementedError

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Grafana(Server):
    """One organization; the tokens `editor` and `viewer`."""

    def __init__(self) -> None:
        super().__init__()
        self.folders: dict[str, str] = {}
        self.boards: dict[str, Json] = {}
        self.folder_of: dict[str, str] = {}
        self.messages: dict[str, str] = {}
        #: Replaces the answer to a path that begins so.
        self.forced: dict[str, tuple[int, Any]] = {}

    def answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, Any]:
        for start, forced in self.forced.items():
            if path.startswith(start):
                return forced
        if path == "/api/health":
            return 200, {"database": "ok", "version": "13.2.0", "commit": "abc"}
        token = headers.get("Authorization", "").removeprefix("Bearer ")
        if token not in ("editor", "viewer"):
            return 401, {"message": "Invalid API key"}
        if method == "POST" and token == "viewer":
            return 403, {"message": "You'll need additional permissions to perform this action."}
        sent = json.loads(body) if body else {}
        if path.startswith("/api/folders/"):
            uid = path.removeprefix("/api/folders/")
            return (200, {"uid": uid}) if uid in self.folders else (404, {"message": "folder not found"})
        if path == "/api/folders":
            self.folders[sent["uid"]] = sent["title"]
            return 200, sent
        if path.startswith("/api/dashboards/uid/"):
            board = self.boards.get(path.removeprefix("/api/dashboards/uid/"))
            return (
                (200, {"dashboard": board, "meta": {"version": board["version"]}})
                if board
                else (404, {"message": "Dashboard not found"})
            )
        if path == "/api/dashboards/db":
            return self._save(sent)
        return 404, {"message": "Not found"}

    def _save(self, sent: Json) -> tuple[int, Any]:
        board = sent["dashboard"]
        if not board.get("title"):
            return 400, {"message": "Dashboard title cannot be empty"}
        if sent.get("folderUid") and sent["folderUid"] not in self.folders:
            return 400, {"message": "folder not found"}
        old = self.boards.get(board["uid"])
        if old and not sent["overwrite"]:
            return 412, {"message": "The dashboard has been changed by someone else", "status": "version-mismatch"}
        title_taken = any(
            b["title"] == board["title"] and uid != board["uid"] and self.folder_of[uid] == sent["folderUid"]
            for uid, b in self.boards.items()
        )
        if title_taken and not sent["overwrite"]:
            return 412, {
                "message": "A dashboard with the same name in the folder already exists",
                "status": "name-exists",
            }
        self.boards[board["uid"]] = board | {"version": (old["version"] if old else 0) + 1}
        self.folder_of[board["uid"]], self.messages[board["uid"]] = sent["folderUid"], sent["message"]
        return 200, {"uid": board["uid"], "status": "success", "version": self.boards[board["uid"]]["version"]}


class Mimir(Server):
    """The ruler's configuration API below /prometheus, for tenant team-a."""

    ROOT = "/prometheus/config/v1/rules/"

    def __init__(self) -> None:
        super().__init__()
        self.namespaces: dict[str, dict[str, Json]] = {}

    def answer(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, Any]:
        if headers.get("X-Scope-Orgid", headers.get("X-Scope-OrgID")) != "team-a":
            return 401, b"no org id"
        if not path.startswith(self.ROOT):
            return 404, b"404 page not found"
        namespace, _, group = path.removeprefix(self.ROOT).partition("/")
        there = self.namespaces.setdefault(namespace, {})
        if method == "GET":
            return (
                (200, yaml.safe_dump({namespace: list(there.values())}).encode())
                if there
                else (404, b"no rule groups found")
            )
        if method == "POST":
            if headers["Content-Type"] != "application/yaml":
                return 400, b"unexpected content type"
            sent = yaml.safe_load(body)
            if len(sent["rules"]) > 20:
                return 400, b"per-user rules per rule group limit (limit: 20 actual: 21) exceeded"
            there[sent["name"]] = sent
            return 202, {"status": "success", "data": None, "errorType": "", "error": ""}
        return (202, {"status": "success"}) if there.pop(group, None) else (404, b"group does not exist")
