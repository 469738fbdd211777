"""A second, independent reader of vLLM's KV events: what blocks it leaves is compared with the plug-in's books."""

from __future__ import annotations

import socket
from typing import Any

import msgspec
import zmq


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def history(replay: str) -> list[list[Any]]:
    """All batches since vLLM started, each [time, events, rank], asked from its replay socket."""
    batches: list[list[Any]] = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as s:
        s.setsockopt(zmq.LINGER, 0)
        s.connect(replay)
        s.send_multipart([b"", (0).to_bytes(8, "big")])
        while True:
            assert s.poll(5000), "no answer from the replay socket"
            frames = s.recv_multipart()
            if int.from_bytes(frames[-2], "big", signed=True) < 0:
                return batches
            batches.append(msgspec.msgpack.decode(frames[-1]))
