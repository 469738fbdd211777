"""kill -9 of any process at random moments, under load: what one scrape interval could lose is the most that is lost.

KVSCOPE_KILLS=100 (make faults) kills a hundred times, the router, the second replica and the app too; by default each of FEW once.
"""

from __future__ import annotations

import os
import random
import sqlite3
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import wait_for
from tests.faults.fleet import INTERVAL, Fleet, http

FEW = ("recorder", "writer", "replica0", "exporter", "prometheus")
KILLS = int(os.environ.get("KVSCOPE_KILLS", "0"))
SEED = int(os.environ.get("KVSCOPE_FAULT_SEED", "1"))
#: A machine with other work takes up to this long to do what is due.
LATE = 10.0
SESSIONS = [f"session {i}" for i in range(4)]


@dataclass(frozen=True)
class Seen:
    """One request as the client saw it: status 0 is a connection that broke."""

    began: float
    ended: float
    session: str
    turn: int
    status: int
    replica: str
    text: str


class Clients(threading.Thread):
    """Conversations through the router, one request after the other; each turn repeats the turns before it."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.url, self.done, self.seen = url, threading.Event(), []  # type: ignore[var-annotated]

    def run(self) -> None:
        turns = Counter[str]()
        with http() as client:
            while not self.done.wait(0.05):
                for session in SESSIONS:
                    turn = turns[session] % 6
                    turns[session] += 1
                    body = {"model": "tiny", "prompt": f"{session} " + "and so on " * (turn + 3), "max_tokens": 6, "ignore_eos": True, "temperature": 0}  # fmt: skip
                    began, status, replica, text = time.time(), 0, "", ""
                    try:
                        answer = client.post(self.url, json=body, headers={"X-Session-ID": session})
                        status, replica = answer.status_code, answer.headers.get("x-kvscope-replica", "")
                        if status == 200:
                            text = answer.json()["choices"][0]["text"]
                    except Exception:
                        pass
                    self.seen.append(Seen(began, time.time(), session, turn, status, replica, text))


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, program: Callable[[str], str]) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("fleet"))
    try:
        fleet.start(prometheus=program("prometheus"), app=KILLS > 0)
        yield fleet
    finally:
        fleet.stop()


def check_store(path: Path) -> None:
    with sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=60) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    db.close()


@dataclass
class Kill:
    victim: str
    at: float


def kill_and_restart(fleet: Fleet, victim: str) -> Kill:
    member = fleet.members[victim]
    if victim == "recorder":  # its target may have been away a moment ago, of which there is nothing to record
        wait_for(lambda: time.time() - fleet.newest() < 5 * INTERVAL, 60, "the recorder records")
    newest, said, samples = fleet.newest(), fleet.said(), stored_samples(fleet)
    at = time.time()
    member.kill()
    check_store(fleet.store)
    if victim == "recorder":
        assert fleet.newest() >= newest, "what was stored stays"
        assert at - fleet.newest() <= INTERVAL + LATE, "no more than a step is lost"
    if victim == "writer":
        assert said <= fleet.said() <= fleet.rows_written() <= fleet.said() + 1, "what it said was stored is there"
    member.start()
    member.wait()
    if victim == "prometheus":
        assert stored_samples(fleet) >= samples, "all scrapes up to the last are there"
    if victim.startswith("replica"):
        wait_for(fleet.both_up, 60, "the replica gets requests again")
    return Kill(victim, at)


def stored_samples(fleet: Fleet) -> int:
    found = fleet.query("sum(count_over_time(up[2h]))")
    return int(float(found[0]["value"][1])) if found else 0


def lives_of(fleet: Fleet, replica: str) -> list[tuple[float, float]]:
    """(time of the last scrape, requests received by then) of each life of a replica, from the samples that Prometheus has."""
    instance = fleet.url(replica).removeprefix("http://")
    query = f'kvscope_requests_received_total{{instance="{instance}",class="standard"}}[2h]'
    lives: list[tuple[float, float]] = []
    for row in fleet.query(query):
        for at, text in row["values"]:
            value = float(text)
            if lives and value >= lives[-1][1]:
                lives[-1] = (float(at), value)
            else:
                lives.append((float(at), value))
    return lives


def test_what_is_killed_loses_no_more_than_a_scrape_interval(fleet: Fleet) -> None:
    rng = random.Random(SEED)
    clients = Clients(fleet.url("router") + "/v1/completions")
    clients.start()
    kills: list[Kill] = []
    victims = sorted(fleet.members) if KILLS else FEW
    order = [victims[i % len(victims)] for i in range(KILLS or len(FEW))]
    rng.shuffle(order)
    for victim in order:
        time.sleep(rng.uniform(0.2, 1.5))
        answered = sum(seen.status == 200 for seen in clients.seen)
        kills.append(kill_and_restart(fleet, victim))
        wait_for(lambda n=answered: sum(s.status == 200 for s in clients.seen) > n + 4, 60, "requests are answered")  # type: ignore[misc]
    clients.done.set()
    clients.join(60)
    seen: list[Seen] = clients.seen
    quiet = time.time()
    wait_for(lambda: all(lives[-1][0] > quiet + INTERVAL for lives in (lives_of(fleet, "replica0"), lives_of(fleet, "replica1"))), 60, "scraped after the end")  # fmt: skip

    # a session goes on with the same tokens, from a snapshot or computed again
    texts = defaultdict(set)
    for one in seen:
        if one.status == 200:
            texts[one.session, one.turn].add(one.text)
    assert all(len(found) == 1 for found in texts.values()), "every answer to the same prompt is the same"
    # only requests that were under way when a replica or the router died were not answered
    deaths = [kill for kill in kills if kill.victim.startswith("repl") or kill.victim == "router"]
    for one in seen:
        if one.status != 200:
            assert one.status in (0, 502, 503)
            assert any(one.began - LATE - 60 < kill.at < one.ended + LATE for kill in deaths), one
    # a replica's counter begins anew with each life, and no life lost more than what came after its last scrape
    for index, replica in enumerate(("replica0", "replica1")):
        lives = lives_of(fleet, replica)
        ends = [kill.at for kill in kills if kill.victim == replica]
        assert len(lives) <= len(ends) + 1
        served = [one for one in seen if one.status == 200 and one.replica == str(index)]
        if len(lives) == len(ends) + 1:  # else one was too short for a scrape
            for (scraped_at, received), began, end in zip(lives, [0.0, *ends], [*ends, quiet], strict=True):
                known = sum(began < one.began and one.ended < scraped_at for one in served)
                assert received >= known
                away = [kill.at for kill in kills if kill.victim == "prometheus" and abs(kill.at - end) < 2 * LATE]
                assert scraped_at > end - INTERVAL - LATE or away
        instance = fleet.url(replica).removeprefix("http://")
        found = fleet.query(f'resets(kvscope_requests_received_total{{instance="{instance}",class="standard"}}[2h])')
        assert int(float(found[0]["value"][1])) == len(lives) - 1
        rates = fleet.query(f'rate(kvscope_requests_received_total{{instance="{instance}",class="standard"}}[2h])')
        assert 0 <= float(rates[0]["value"][1]) < 200
