"""Reads vLLM's KV events (ZeroMQ, msgpack) on a thread of its own: nothing of it runs on vLLM's event loop.

vLLM numbers its batches. A gap in the numbers is asked back from the replay socket where vLLM has one; what cannot be had is
counted as lost, and the books of live blocks start anew.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import msgspec
import zmq

from exporters.vllm.kv_ledger import TIERS, KVLedger
from observability import catalog as c

_log = logging.getLogger(__name__)
_POLL_MILLISECONDS = 200
_REPLAY_SECONDS = 2.0
_HIGH_WATER = 100_000
_END = -1
#: At most this many batches are asked back at once; more are taken for lost (vLLM keeps 10,000 by default).
_MOST_REPLAYED = 100_000
RECEIVED, REPLAYED, LOST, MALFORMED = range(len(c.KV_EVENT_OUTCOMES))
#: Fields by position, of vLLM before 0.17, which sent events as arrays.
_BY_POSITION = {
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}
_decode = msgspec.msgpack.Decoder().decode


class KVEvents(threading.Thread):
    """Follows the events of one engine into `ledger`. `endpoint` and `replay` are addresses to connect to."""

    def __init__(
        self,
        endpoint: str,
        replay: str | None = None,
        topic: str = "",
        *,
        ledger: KVLedger | None = None,
        on_fault: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(name="kvscope-kv-events", daemon=True)
        self.ledger = KVLedger() if ledger is None else ledger
        self.batches = [0.0] * len(c.KV_EVENT_OUTCOMES)
        self.last_batch: float | None = None  # Unix time at which one came
        self._endpoint, self._replay, self._topic = endpoint, replay, topic
        self._on_fault = on_fault
        self._next: int | None = None
        self._done = threading.Event()

    def stop(self) -> None:
        """Ends the thread within about a second."""
        self._done.set()
        if self.is_alive():
            self.join(_REPLAY_SECONDS + 1.0)

    def run(self) -> None:
        context = zmq.Context()
        try:
            with context.socket(zmq.SUB) as socket:
                socket.setsockopt(zmq.RCVHWM, _HIGH_WATER)
                socket.setsockopt(zmq.LINGER, 0)
                socket.setsockopt_string(zmq.SUBSCRIBE, self._topic)
                socket.connect(self._endpoint)
                while not self._done.is_set():
                    if socket.poll(_POLL_MILLISECONDS):
                        self.take(socket.recv_multipart(), context)
        except Exception:
            self._on_fault()
            _log.exception("kvscope stopped reading vLLM's KV events")
        finally:
            context.term()

    def take(self, frames: list[bytes], context: zmq.Context[Any] | None = None) -> None:
        """One message: topic, 8 bytes of number, payload. What is none is counted as malformed."""
        if len(frames) != 3 or len(frames[1]) != 8:
            self.batches[MALFORMED] += 1
            return
        number = int.from_bytes(frames[1], "big")
        self.last_batch = time.time()
        if self._next is not None and number < self._next:  # vLLM's publisher started again
            self.ledger.clear()
            self._next = None
        expected = 0 if self._next is None else self._next
        if number > expected:
            self._fill(expected, number, context)
        self._next = number + 1
        self._apply(frames[2], RECEIVED)

    def _fill(self, first: int, before: int, context: zmq.Context[Any] | None) -> None:
        """Gets the batches [first, before) from the replay socket; if one is missing the books start anew."""
        missing = before - first
        if self._replay is not None and context is not None and missing <= _MOST_REPLAYED:
            for number, payload in self._replayed(first, context):
                if number != before - missing or missing == 0:
                    break  # vLLM no longer has the first ones, or has come to what was received
                self._apply(payload, REPLAYED)
                missing -= 1
        if missing:
            self.batches[LOST] += missing
            self.ledger.clear()

    def _replayed(self, first: int, context: zmq.Context[Any]) -> Iterator[tuple[int, bytes]]:
        deadline = time.monotonic() + _REPLAY_SECONDS
        with context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            assert self._replay is not None
            socket.connect(self._replay)
            socket.send_multipart((b"", first.to_bytes(8, "big")))
            while not self._done.is_set() and (left := deadline - time.monotonic()) > 0:
                if not socket.poll(int(min(left * 1000, _POLL_MILLISECONDS))):
                    continue
                frames = socket.recv_multipart()
                if len(frames) < 3 or len(frames[-2]) != 8:
                    return
                number = int.from_bytes(frames[-2], "big", signed=True)
                if number == _END:
                    return
                yield number, frames[-1]

    def _apply(self, payload: bytes, outcome: int) -> None:
        try:
            stamp, events, *_ = _decode(payload)
            when = float(stamp)
            for event in events:
                self._event(when, event)
        except Exception:
            self.batches[MALFORMED] += 1
            return
        self.batches[outcome] += 1

    def _event(self, when: float, event: Any) -> None:
        if isinstance(event, dict):
            kind = event.get("type")
        else:
            kind, *fields = event
            event = dict(zip(_BY_POSITION.get(kind, ()), fields, strict=False))
        if kind == "AllBlocksCleared":
            self.ledger.clear()
            return
        if kind not in ("BlockStored", "BlockRemoved"):  # of a later vLLM
            return
        tier = TIERS.get(event.get("medium") or "GPU")
        if tier is None or event.get("locality") == "REMOTE":
            return
        group = event.get("group_idx")
        keys: list[Hashable] = [(group, key) if group else key for key in event["block_hashes"]]
        if kind == "BlockStored":
            self.ledger.store(tier, keys, event["block_size"], when)
        else:
            self.ledger.remove(tier, keys, when)


def address_of(endpoint: str | None, rank: int) -> str | None:
    """Where to connect to what vLLM binds: its port plus the data-parallel rank, on this machine. None where there is none."""
    if not endpoint:
        return None
    endpoint = endpoint.replace("*", "127.0.0.1").replace("0.0.0.0", "127.0.0.1")
    if rank and endpoint.startswith("tcp://"):
        host, _, port = endpoint.rpartition(":")
        return f"{host}:{int(port) + rank}"
    return endpoint
