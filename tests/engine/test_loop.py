"""The engine's thread: clients in other threads, failures, stopping."""

from __future__ import annotations

import random
import threading
import time

import pytest

from observability.engine.loop import EngineThread
from observability.errors import ServiceError
from tests.conftest import wait_for
from tests.engine.support import (
    CheckingExecutor,
    Exposition,
    assert_idle_and_whole,
    generate,
    make_engine,
    make_request,
    tokens,
)


class RealTimeExecutor(CheckingExecutor):
    """Takes real time, so that threads interleave with steps."""

    def __init__(self):
        super().__init__(4)
        self.clock = RealClock()

    def execute(self, plan, until):
        time.sleep(0.0005)
        return super().execute(plan, until)


class RealClock:
    virtual = False

    def now(self):
        return time.monotonic()

    def wait_until(self, when):
        pass


@pytest.fixture
def thread():
    thread = EngineThread(make_engine(RealTimeExecutor(), max_num_seqs=6, num_blocks=40))
    yield thread
    thread.stop()
    assert not thread.alive


class Client:
    """Collects what on_token hands out and waits for the end."""

    def __init__(self, prompt, max_tokens=8):
        self.tokens, self.ends, self.ended = [], [], threading.Event()
        self.request = make_request(prompt, max_tokens, arrival=time.monotonic())
        self.request.on_token = self.on_token

    def on_token(self, request, token, reason):
        if token is not None:
            self.tokens.append(token)
        if reason is not None:
            self.ends.append(reason)
            self.ended.set()

    def wait(self):
        assert self.ended.wait(20), "the client was left waiting"
        return self.ends


def test_many_clients_that_come_and_go_get_their_tokens_once(thread):
    thread.start()
    clients: list[Client] = []

    def visit(seed):
        dice = random.Random(seed)
        for i in range(8):
            client = Client(tokens(dice.randrange(5), dice.randrange(1, 40)), dice.randrange(1, 30))
            client.request.arrival = time.monotonic()
            clients.append(client)
            thread.engine.add(client.request)
            if dice.random() < 0.4:
                time.sleep(dice.random() * 0.02)
                thread.engine.abort(client.request)
            elif i % 2:
                client.wait()

    visitors = [threading.Thread(target=visit, args=(seed,)) for seed in range(6)]
    for visitor in visitors:
        visitor.start()
    for visitor in visitors:
        visitor.join()
    for client in clients:
        assert len(client.wait()) == 1
        reference = generate(client.request.prompt, client.request.limit)
        assert client.tokens == reference[: len(client.tokens)]
        assert client.ends[0] == ("length" if client.tokens == reference else "abort")
    thread.stop()
    assert_idle_and_whole(thread.engine)
    assert len(thread.engine.telemetry.finished) == 48


def test_an_idle_engine_waits_and_keeps_its_gauges_fresh(thread):
    thread.start()
    client = Client(tokens(1, 8))
    thread.engine.add(client.request)
    client.wait()
    cpu = time.process_time()

    def updated():
        return Exposition(thread.engine).value("kvscope_last_update_timestamp_seconds")

    before = updated()
    wait_for(lambda: updated() > before, 5, "idle gauges")
    time.sleep(0.3)
    assert time.process_time() - cpu < 0.25, "an idle engine must not spin"


def test_a_failed_step_ends_the_running_requests_and_the_next_ones_are_served(thread):
    running = [Client(tokens(i, 8), 1000) for i in range(2)]
    executor = thread.engine.executor
    for client in running:
        hear = client.request.on_token

        def lose_the_device_after_both_have_tokens(request, token, finished, hear=hear):
            hear(request, token, finished)
            if all(c.tokens for c in running) and executor.fail is None and finished is None:
                executor.fail = RuntimeError("device lost")

        client.request.on_token = lose_the_device_after_both_have_tokens
        thread.engine.add(client.request)
    thread.start()
    assert [c.wait() for c in running] == [["error"]] * 2
    assert running[0].request.error == "RuntimeError: device lost"
    thread.engine.executor.fail = None
    assert thread.alive
    later = Client(tokens(3, 8))
    thread.engine.add(later.request)
    assert later.wait() == ["length"]
    assert later.tokens == generate(later.request.prompt, 8)
    wait_for(lambda: thread.error is None, 5, "the error to be cleared")
    assert Exposition(thread.engine).value("kvscope_requests", outcome="error") == 2


def test_a_broken_executor_ends_everybody_and_refuses_the_next(thread):
    thread.engine.executor.fail = RuntimeError("device lost")
    clients = [Client(tokens(i, 8)) for i in range(30)]
    for client in clients:
        thread.engine.add(client.request)
    thread.start()
    assert {tuple(c.wait()) for c in clients} == {("error",)}
    wait_for(lambda: not thread.alive, 10, "the thread to give up")
    assert thread.error == "RuntimeError: device lost"
    with pytest.raises(ServiceError, match="device lost"):
        thread.engine.add(Client(tokens(1, 4)).request)
    assert_idle_and_whole(thread.engine)


def test_stop_aborts_running_waiting_and_just_added_requests(thread):
    clients = [Client(tokens(i, 8), 1000) for i in range(12)]
    thread.start()
    for client in clients:
        thread.engine.add(client.request)
    thread.stop()
    assert {tuple(c.wait()) for c in clients} == {("abort",)}
    with pytest.raises(ServiceError, match="told to stop"):
        thread.engine.add(Client(tokens(1, 4)).request)
    assert_idle_and_whole(thread.engine)


def test_requests_added_before_start_are_ended_by_a_stop_without_start():
    thread = EngineThread(make_engine(RealTimeExecutor()))
    client = Client(tokens(1, 8))
    thread.engine.add(client.request)
    thread.stop()
    assert client.wait() == ["abort"]
