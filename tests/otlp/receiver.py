"""A real OTLP/HTTP receiver: decodes what is posted with OpenTelemetry's own protobuf and keeps it."""

from __future__ import annotations

import contextlib
import gzip
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span


def values(pairs: Any) -> dict[str, Any]:
    """KeyValue messages as a dict."""

    def value(any_value: Any) -> Any:
        kind = any_value.WhichOneof("value")
        if kind == "array_value":
            return [value(one) for one in any_value.array_value.values]
        return getattr(any_value, kind)

    return {pair.key: value(pair.value) for pair in pairs}


class Receiver:
    """Context manager. `refusals` answers so many posts with 503 first; `hangs` never answers."""

    def __init__(self, *, refusals: int = 0, hangs: bool = False) -> None:
        self.traces: list[ExportTraceServiceRequest] = []
        self.metrics: list[ExportMetricsServiceRequest] = []
        self.headers: list[dict[str, str]] = []
        self.posts = 0
        released = self._released = threading.Event()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver.posts += 1
                if hangs:
                    released.wait(60)
                    return
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if receiver.posts <= refusals:
                    self.send_response(503)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                assert self.headers["Content-Type"] == "application/x-protobuf"
                receiver.headers.append(dict(self.headers.items()))
                if self.path == "/v1/traces":
                    receiver.traces.append(ExportTraceServiceRequest.FromString(body))
                    answer = ExportTraceServiceResponse().SerializeToString()
                else:
                    assert self.path == "/v1/metrics"
                    receiver.metrics.append(ExportMetricsServiceRequest.FromString(body))
                    answer = ExportMetricsServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Receiver:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    def spans(self) -> list[Span]:
        return [s for r in self.traces for of in r.resource_spans for scope in of.scope_spans for s in scope.spans]

    def resources(self) -> list[dict[str, Any]]:
        spans = [values(of.resource.attributes) for r in self.traces for of in r.resource_spans]
        return spans + [values(of.resource.attributes) for r in self.metrics for of in r.resource_metrics]

    def last(self) -> dict[str, Metric]:
        """The newest push of metrics, by name."""
        return {metric.name: metric for metric in metrics_in(self.metrics[-1])}


class Scripted:
    """Context manager: takes connections and answers each request with raw pieces, ten a second; none: it hangs."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.posts = 0
        self._done = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._pieces = pieces
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> Scripted:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)

    def _accept(self) -> None:
        while not self._done.is_set():
            with contextlib.suppress(OSError):
                connection, _ = self._listener.accept()
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while connection.recv(1 << 16):
                self.posts += 1
                for i, piece in enumerate(self._pieces):
                    if i and self._done.wait(0.1):
                        return
                    connection.sendall(piece)


def metrics_in(request: ExportMetricsServiceRequest) -> Iterator[Metric]:
    for of in request.resource_metrics:
        for scope in of.scope_metrics:
            yield from scope.metrics
