"""A Pyroscope server as far as pushes go: takes push.v1.PusherService/Push and reads the profiles in it.

Messages: https://github.com/grafana/pyroscope/blob/main/api/push/v1/push.proto and
https://github.com/google/pprof/blob/main/proto/profile.proto; only the fields that are read.
"""

from __future__ import annotations

import gzip
import http.server
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_STRING, _BYTES, _INT, _UINT, _MESSAGE = 9, 12, 3, 4, 11
#: message -> fields: (name, number, type, repeated, message type)
_MESSAGES: dict[str, list[tuple[str, int, int, bool, str]]] = {
    "Push": [("series", 1, _MESSAGE, True, "Series")],
    "Series": [("labels", 1, _MESSAGE, True, "Pair"), ("samples", 2, _MESSAGE, True, "Raw")],
    "Pair": [("name", 1, _STRING, False, ""), ("value", 2, _STRING, False, "")],
    "Raw": [("profile", 1, _BYTES, False, "")],
    "Profile": [
        ("sample_type", 1, _MESSAGE, True, "ValueType"), ("sample", 2, _MESSAGE, True, "Sample"), ("location", 4, _MESSAGE, True, "Location"),
        ("function", 5, _MESSAGE, True, "Function"), ("strings", 6, _STRING, True, ""), ("period", 12, _INT, False, ""),
    ],
    "ValueType": [("type", 1, _INT, False, ""), ("unit", 2, _INT, False, "")],
    "Sample": [("location_id", 1, _UINT, True, ""), ("value", 2, _INT, True, ""), ("label", 3, _MESSAGE, True, "Label")],
    "Label": [("key", 1, _INT, False, ""), ("str", 2, _INT, False, "")],
    "Location": [("id", 1, _UINT, False, ""), ("line", 4, _MESSAGE, True, "Line")],
    "Line": [("function_id", 1, _UINT, False, "")],
    "Function": [("id", 1, _UINT, False, ""), ("name", 2, _INT, False, "")],
}  # fmt: skip


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="pushes.proto", package="pushes", syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field_name, number, kind, repeated, of in fields:
            message.field.add(
                name=field_name, number=number, type=kind, label=3 if repeated else 1, type_name=f".pushes.{of}" if of else None  # type: ignore[arg-type]
            )  # fmt: skip
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"pushes.{name}")) for name in _MESSAGES}


_CLASS = _classes()


@dataclass
class Pyroscope:
    """Listens on the loopback until stop()."""

    server: http.server.ThreadingHTTPServer = field(init=False)
    labels: list[dict[str, str]] = field(default_factory=list)  # of each series pushed
    samples: Counter[str] = field(default_factory=Counter)  # by phase, "" without one
    functions: Counter[tuple[str, str]] = field(default_factory=Counter)  # samples by (phase, function on the stack)
    periods: set[int] = field(default_factory=set)  # nanoseconds
    pushes: int = 0

    def __post_init__(self) -> None:
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.path == "/push.v1.PusherService/Push":
                    outer.take(gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Quiet."""

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def take(self, body: bytes) -> None:
        for series in _CLASS["Push"].FromString(body).series:
            labels = {pair.name: pair.value for pair in series.labels}
            self.labels.append(labels)
            for raw in series.samples:
                data = raw.profile
                self._read(
                    _CLASS["Profile"].FromString(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data), labels
                )
        self.pushes += 1

    def _read(self, profile: Any, labels: dict[str, str]) -> None:
        text = profile.strings
        functions = {function.id: text[function.name] for function in profile.function}
        at = {location.id: [functions[line.function_id] for line in location.line] for location in profile.location}
        self.periods.add(profile.period)
        for sample in profile.sample:
            own = {text[label.key]: text[label.str] for label in sample.label}
            phase = own.get("phase", labels.get("phase", ""))
            count = round(sample.value[0] / profile.period)  # values are nanoseconds
            self.samples[phase] += count
            for name in {name for location in sample.location_id for name in at[location]}:
                self.functions[phase, name] += count

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()
