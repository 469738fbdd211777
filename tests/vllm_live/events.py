"""A second, independent reader of vLLM's KV events: what blocks it leaves is compared with the plug-in's books."""

from __future__ import annotations

import socket

import msgspec
import zmq


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Follower:
    """Asks the whole history from the replay socket whenever `blocks` is called."""

    def __init__(self, endpoint: str, replay: str) -> None:
        self.replay = replay

    def history(self) -> list[dict[str, object]]:
        """All events of all batches so far."""
        events: list[dict[str, object]] = []
        with zmq.Context() as context, context.socket(zmq.REQ) as s:
            s.setsockopt(zmq.LINGER, 0)
            s.connect(self.replay)
            s.send((0).to_bytes(8, "big"))
            while True:
                assert s.poll(5000), "no answer from the replay socket"
                frames = s.recv_multipart()
                if int.from_bytes(frames[-2], "big", signed=True) < 0:
                    return events
                events += msgspec.msgpack.decode(frames[-1])[1]
