"""KV events over real ZeroMQ sockets: what is lost is seen, asked back where it can be, and never makes the books negative."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from exporters.vllm.kv_events import LOST, MALFORMED, RECEIVED, REPLAYED, KVEvents, address_of
from exporters.vllm.kv_ledger import KVLedger
from observability import catalog as c
from tests.conftest import wait_for

GPU, CPU = 0, 1


def stored(*hashes: Any, medium: str | None = "GPU", **more: Any) -> dict[str, Any]:
    """As vLLM 0.32 sends it; fields that kvscope does not read are there, too."""
    return {
        "type": "BlockStored", "block_hashes": list(hashes), "parent_block_hash": None, "token_ids": [1] * 16 * len(hashes),
        "block_size": 16, "lora_id": None, "medium": medium, "lora_name": None, "hyper_field": {"of": "tomorrow"}, **more,
    }  # fmt: skip


def removed(*hashes: Any, medium: str | None = "GPU", **more: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": medium, **more}


CLEARED = {"type": "AllBlocksCleared"}


def batch(number: int, *events: Any, ts: float = 1000.0) -> list[bytes]:
    return [b"", number.to_bytes(8, "big"), msgspec.msgpack.encode([ts, list(events), 0])]


class Publisher:
    """vLLM's side: a PUB socket, and a ROUTER that answers with the batches that it still has."""

    def __init__(self, folder: Path, keeps: int = 10_000) -> None:
        self.endpoint, self.replay = f"ipc://{folder}/events", f"ipc://{folder}/replay"
        self.context = zmq.Context()
        self.pub = self.context.socket(zmq.PUB)
        self.pub.bind(self.endpoint)
        self.kept: list[list[bytes]] = []
        self.keeps, self.number, self.asked = keeps, 0, 0
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def publish(self, *events: Any, ts: float = 1000.0, lost: bool = False) -> None:
        frames = batch(self.number, *events, ts=ts)
        self.number += 1
        self.kept = [*self.kept, frames][-self.keeps :]
        if not lost:
            self.pub.send_multipart(frames)

    def _serve(self) -> None:
        with self.context.socket(zmq.ROUTER) as router:
            router.setsockopt(zmq.LINGER, 0)
            router.bind(self.replay)
            while not self.done.is_set():
                if not router.poll(50):
                    continue
                client, _, first = router.recv_multipart()
                self.asked += 1
                for frames in self.kept:
                    if frames[1] >= first:
                        router.send_multipart([client, b"", *frames])
                router.send_multipart([client, b"", b"", (-1).to_bytes(8, "big", signed=True), b""])

    def close(self) -> None:
        self.done.set()
        self.thread.join(5)
        self.pub.close(0)
        self.context.term()


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Publisher]:
    made = Publisher(tmp_path)
    yield made
    made.close()


def follow(publisher: Publisher, replay: bool = True) -> KVEvents:
    """A reader that has joined: subscriptions take a moment to reach a publisher."""
    reader = KVEvents(publisher.endpoint, publisher.replay if replay else None)
    reader.start()

    def heard() -> bool:
        publisher.publish(CLEARED)
        return reader.batches[RECEIVED] > 0

    wait_for(heard, 10, "the first batch")
    return reader


def caught_up(reader: KVEvents, publisher: Publisher) -> None:
    wait_for(lambda: reader._next == publisher.number, 10, "the newest batch")


def test_blocks_are_followed_without_sampling(publisher: Publisher) -> None:
    reader = follow(publisher)
    publisher.publish(stored(*range(10)), stored(99, medium=None), ts=1000.0)
    publisher.publish(removed(0, 1, 2), stored("h", medium="CPU"), ts=1030.0)
    caught_up(reader, publisher)
    reader.stop()
    ledger = reader.ledger
    assert set(ledger.born[GPU]) == {3, 4, 5, 6, 7, 8, 9, 99}
    assert set(ledger.born[CPU]) == {"h"}
    assert sum(ledger.evicted_ages[GPU]) == 3
    assert ledger.evicted_ages[GPU][next(i for i, bound in enumerate(c.AGE_BOUNDS) if bound >= 30)] == 3
    assert reader.batches[LOST] == reader.batches[MALFORMED] == 0


def test_a_gap_is_asked_back_and_nothing_is_missing(publisher: Publisher) -> None:
    reader = follow(publisher)
    publisher.publish(stored(1, 2, 3))
    publisher.publish(removed(1), lost=True)
    publisher.publish(stored(4), lost=True)
    publisher.publish(stored(5))
    caught_up(reader, publisher)
    reader.stop()
    assert set(reader.ledger.born[GPU]) == {2, 3, 4, 5}
    assert reader.batches[REPLAYED] >= 2
    assert reader.batches[LOST] == 0
    assert sum(reader.batches[o] for o in (RECEIVED, REPLAYED)) == publisher.number


def test_a_gap_that_cannot_be_asked_back_is_counted_and_the_books_start_anew(publisher: Publisher) -> None:
    reader = follow(publisher, replay=False)
    publisher.publish(stored(1, 2, 3))
    caught_up(reader, publisher)
    before = reader.batches[LOST]
    publisher.publish(removed(1), lost=True)
    publisher.publish(stored(4))
    caught_up(reader, publisher)
    publisher.publish(removed(2))  # known to nobody any more
    caught_up(reader, publisher)
    reader.stop()
    assert reader.batches[LOST] - before == 1
    assert set(reader.ledger.born[GPU]) == {4}
    assert reader.ledger.unmatched == 1
    assert sum(reader.ledger.evicted_ages[GPU]) == 0


def test_a_replay_that_lacks_the_first_ones_is_no_replay(publisher: Publisher) -> None:
    publisher.keeps = 2
    reader = follow(publisher)
    for i in range(5):
        publisher.publish(stored(i), lost=True)
    publisher.publish(stored(5))
    caught_up(reader, publisher)
    reader.stop()
    assert reader.batches[LOST] >= 5
    assert set(reader.ledger.born[GPU]) == {5}


def test_who_joins_late_gets_what_was_before(publisher: Publisher) -> None:
    for i in range(20):
        publisher.publish(stored(i), lost=True)
    reader = follow(publisher)
    caught_up(reader, publisher)
    reader.stop()
    assert reader.batches[LOST] == 0
    assert reader.ledger.stored[GPU] == 20


def test_a_publisher_that_starts_again_is_no_gap() -> None:
    reader = KVEvents("inproc://unused")
    for number in range(3):
        reader.take(batch(number, stored(number)))
    reader.take(batch(0, stored("new")))
    assert set(reader.ledger.born[GPU]) == {"new"}
    assert reader.batches[LOST] == 0


@pytest.mark.parametrize(
    "frames",
    [
        [], [b""], [b"", b"short", b""], [b"", bytes(8), b""], [b"", bytes(8), b"\xc1"], [b"", bytes(8), b"\x93\x01\x02\x03"],
        [b"", bytes(8), msgspec.msgpack.encode("text")], [b"", bytes(8), msgspec.msgpack.encode([1.0, [[]], 0])],
        [b"", bytes(8), msgspec.msgpack.encode([1.0, [{"type": "BlockStored"}], 0])], [b"", bytes(8), b"", b""],
        [b"", bytes(8), msgspec.msgpack.encode(["noon", [], 0])], [b"", bytes(8), msgspec.msgpack.encode([1.0, [stored([1])], 0])],
    ],
)  # fmt: skip
def test_a_batch_that_is_none_is_counted_as_malformed(frames: list[bytes]) -> None:
    reader = KVEvents("inproc://unused")
    reader.take(frames)
    assert reader.batches[MALFORMED] == 1
    reader.take(batch(1, stored(1)))
    assert set(reader.ledger.born[GPU]) == {1}


def test_events_of_older_and_later_versions_and_other_places() -> None:
    reader = KVEvents("inproc://unused")
    reader.take(batch(0, ["BlockStored", [1, 2], None, [0] * 32, 16, None], ["BlockRemoved", [1]], ["AllBlocksDreamt", 3],
                      {"type": "BlockPinned", "block_hashes": [2]}, stored(7, medium="STORAGE"), stored(8, locality="REMOTE")))  # fmt: skip
    assert set(reader.ledger.born[GPU]) == {2}
    assert reader.batches[RECEIVED] == 1


def test_what_comes_back_after_its_eviction_is_regretted_by_how_long_ago_it_was() -> None:
    ledger = KVLedger()
    ledger.store(GPU, "abcd", 16, 0.0)
    ledger.remove(GPU, "abc", 100.0)
    ledger.store(GPU, "a", 16, 130.0)  # within a minute
    ledger.store(GPU, "b", 16, 600.0)  # within ten
    ledger.store(GPU, "c", 16, 5000.0)  # longer ago than any window
    ledger.store(GPU, "d", 16, 5001.0)  # told again, never evicted
    assert dict(zip(c.REGRET_WINDOWS, ledger.regret_tokens, strict=True)) == {"1m": 16, "10m": 32, "1h": 32}


def test_what_the_host_still_has_is_not_computed_again() -> None:
    ledger = KVLedger()
    ledger.store(GPU, "a", 16, 0.0)
    ledger.store(CPU, "a", 16, 1.0)
    ledger.remove(GPU, "a", 2.0)
    ledger.store(GPU, "a", 16, 3.0)
    assert ledger.regret_tokens == [0.0] * len(c.REGRET_WINDOWS)


def test_memory_of_evictions_is_bounded_and_says_how_far_it_reaches() -> None:
    ledger = KVLedger(remembered=10)
    assert ledger.reach() is None
    for i in range(30):
        ledger.store(GPU, [i], 16, float(i))
        ledger.remove(GPU, [i], float(i))
    assert len(ledger._evictions) == 10
    assert ledger.reach() == 29.0 - 19.0


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["store", "remove"]), st.sampled_from([GPU, CPU]), st.lists(st.integers(0, 8), max_size=4)),
        st.tuples(st.just("clear"), st.just(0), st.just([])),
    ),
    max_size=60,
)  # fmt: skip


@given(EVENTS)
def test_no_order_of_events_makes_a_tier_negative(events: list[tuple[str, int, list[int]]]) -> None:
    ledger, live, gone = KVLedger(), [set[int](), set[int]()], Counter[int]()
    for when, (what, tier, keys) in enumerate(events):
        if what == "clear":
            ledger.clear()
            live = [set(), set()]
        elif what == "store":
            ledger.store(tier, keys, 16, float(when))
            live[tier] |= set(keys)
        else:
            ledger.remove(tier, keys, float(when))
            gone[tier] += len(live[tier] & set(keys))
            live[tier] -= set(keys)
        assert [set(born) for born in ledger.born] == live
        assert [sum(ages) for ages in ledger.evicted_ages] == [gone[GPU], gone[CPU]] == ledger.removed


def test_addresses_to_connect_to_what_vllm_binds() -> None:
    assert address_of("tcp://*:5557", 0) == "tcp://127.0.0.1:5557"
    assert address_of("tcp://0.0.0.0:5557", 2) == "tcp://127.0.0.1:5559"
    assert address_of("ipc:///tmp/x", 0) == "ipc:///tmp/x"
    assert address_of(None, 0) is address_of("", 1) is None


def test_a_reader_without_a_publisher_stops_at_once(tmp_path: Path) -> None:
    reader = KVEvents(f"ipc://{tmp_path}/nobody")
    reader.start()
    start = time.monotonic()
    reader.stop()
    assert not reader.is_alive()
    assert time.monotonic() - start < 3
