"""A real HTTP server whose pages a test sets, well-behaved or not, and pages made of the series in alerts/tests/adapters.

Only the vLLM page is a real capture; pages of the other engines are made from the names that each engine documents.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import yaml

from tests.conftest import REPO

CAPTURE = "captures/vllm-0.32-cpu-metrics.txt"
Answer = Callable[[BaseHTTPRequestHandler], None]


def page_of(engine: str, instance: str | None = None) -> str:
    """Exposition of an engine's series from its rule test, at 15 minutes: of one instance, or of the first."""
    [test] = yaml.load((REPO / f"alerts/tests/adapters/{engine}.yml").read_text(), yaml.BaseLoader)["tests"]
    lines, first = [], instance  # BaseLoader above: 0x80 is a series of promtool, not a hexadecimal number
    for entry in test["input_series"]:
        here = re.search(r'instance="(\w+)"', entry["series"])
        assert here
        first = first or here[1]
        if here[1] == first:
            series = re.sub(r',?\b(job|instance)="\w+"', "", entry["series"])
            start, step = re.fullmatch(r"([\d.]+)(\+[\d.]+)?x80", str(entry["values"])).groups()  # type: ignore[union-attr]
            lines.append(f"{series} {float(start) + 60 * float(step or 0):g}")
    return "\n".join(lines) + "\n"


class Server(ThreadingHTTPServer):
    """Serves `pages`: path -> text, bytes, or a function that answers by itself. `read` lists the paths asked for, `headers` the last
    request's headers."""

    daemon_threads = True

    def __init__(self) -> None:
        self.pages: dict[str, str | bytes | Answer] = {}
        self.read: list[str] = []
        self.ending = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.read.append(self.path)
                server.sent = self.headers
                page = server.pages.get(self.path)
                if page is None:
                    self.send_error(404)
                elif callable(page):
                    page(self)
                else:
                    body = page.encode() if isinstance(page, str) else page
                    self.send_response(200)
                    self.send_header("Content-Type", "text/plain; version=0.0.4")
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"

    def url(self, path: str = "/metrics") -> str:
        return f"http://{self.address}{path}"

    def handle_error(self, *_: object) -> None:
        """A client that gives up is part of the test."""

    def end(self) -> None:
        self.ending.set()
        self.shutdown()
        self.server_close()
