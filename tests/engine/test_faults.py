"""What goes wrong between two steps: loads that hold the last blocks, moves that fail, requests that leave while data comes in."""

from __future__ import annotations

import pytest

from observability.engine.loop import EngineThread
from tests.conftest import wait_for
from tests.engine.support import (
    CheckingExecutor,
    assert_idle_and_whole,
    generate,
    make_engine,
    make_request,
    tokens,
    value,
)

HOST = {
    "num_blocks": 32,
    "max_model_len": 128,
    "num_host_blocks": 64,
    "contiguous_below": 0,
    "max_num_batched_tokens": 128,
}


def add(engine, prompt, max_tokens=1):
    request = make_request(prompt, max_tokens, arrival=engine.executor.clock.now())
    engine.add(request)
    return request


def finish(engine, *requests):
    while engine.step():
        engine.check_integrity()
    for request in requests:
        assert request.output == generate(request.prompt, request.limit)
    assert_idle_and_whole(engine)


# -- blocks that are on their way -----------------------------------------------------------------------------------------------


def test_when_a_prefetch_holds_the_blocks_that_the_next_one_needs_the_engine_waits_for_it():
    engine = make_engine(**HOST, swapping=False)
    first = tokens(1, 32)
    add(engine, first)
    engine.run_until_idle()
    add(engine, tokens(2, 127))
    engine.run_until_idle()
    engine.executor.move_seconds = 1.0
    running = add(engine, tokens(3, 20), 3)
    engine.step()
    finish(engine, running, add(engine, tokens(4, 126), 2), add(engine, [*first, 5], 2))


def test_what_is_cached_behind_a_gap_is_not_brought_a_second_time():
    engine = make_engine(**HOST, max_num_seqs=1)
    prompt = tokens(1, 20)
    add(engine, prompt)
    engine.run_until_idle()
    add(engine, tokens(2, 127))
    engine.run_until_idle()
    add(engine, prompt[:5])  # its first block alone is computed again
    engine.run_until_idle()
    engine.executor.move_seconds = 1.0
    requests = [add(engine, tokens(3, 112), 2), add(engine, tokens(4, 9), 2), add(engine, [*prompt, 9])]
    finish(engine, *requests)


def test_a_request_that_leaves_during_its_load_does_not_stop_the_others():
    engine = make_engine(**HOST, prefetch_lookahead=0)
    prompt = tokens(1, 61)
    add(engine, prompt)
    engine.run_until_idle()
    add(engine, tokens(2, 124))
    engine.run_until_idle()
    engine.executor.move_seconds = 1.0
    other = add(engine, tokens(3, 8), 40)
    engine.step()
    leaves = add(engine, prompt)
    engine.step()
    assert leaves in engine.scheduler.loading
    engine.abort(leaves)
    before = engine.executor.clock.now()
    engine.step()
    engine.check_integrity()
    assert leaves.outcome == "abort"
    assert engine.executor.clock.now() - before == pytest.approx(0.01), "one step"
    finish(engine, other)


@pytest.mark.parametrize("num_blocks", range(9, 14))
def test_a_long_sequence_that_runs_alone_fits_however_much_of_its_prefix_was_cached_exact(num_blocks):
    engine = make_engine(
        num_blocks=num_blocks, num_compressed_blocks=32, compressed_from=32, recent_window=4, contiguous_below=0,
        max_num_seqs=2,
    )  # fmt: skip
    prompt = tokens(1, 32)
    add(engine, prompt)
    engine.run_until_idle()
    finish(engine, add(engine, [*prompt, *tokens(2, 4)], 20))


def test_a_prefetch_that_mostly_fails_is_left_to_the_head_of_the_line():
    engine = make_engine(**HOST, max_num_seqs=1)
    host = engine.kv.host
    assert host.confidence == 1.0
    host._resolved(0, 1000)
    assert host.confidence < 0.1
    prompts = [tokens(i, 25) for i in range(4)]
    for prompt in prompts:
        add(engine, prompt)
    engine.run_until_idle()
    add(engine, tokens(10, 124))
    engine.run_until_idle()
    add(engine, tokens(50, 8), 20)
    for prompt in prompts:
        add(engine, prompt)
    for _ in range(4):
        engine.step()
    assert 0 < value(engine, "kvscope_kv_prefetch_blocks", outcome="issued") <= 6, "of the first in line only"
    engine.run_until_idle()
    assert_idle_and_whole(engine)


# -- moves that fail --------------------------------------------------------------------------------------------------------


class Failing(CheckingExecutor):
    """Raises at one call of one kind of move."""

    def __init__(self, kind: str, call: int) -> None:
        super().__init__(4)
        self.kind, self.calls_left, self.failed = kind, call, False

    def _maybe(self, kind: str) -> None:
        if kind == self.kind and not self.failed:
            self.calls_left -= 1
            if self.calls_left < 0:
                self.failed = True
                raise RuntimeError(f"{kind} failed")

    def copy_blocks(self, pairs):
        self._maybe("copy")
        super().copy_blocks(pairs)

    def compress_blocks(self, pairs):
        self._maybe("compress")
        super().compress_blocks(pairs)

    def offload_blocks(self, pairs):
        self._maybe("offload")
        super().offload_blocks(pairs)

    def load_blocks(self, pairs):
        self._maybe("load")
        return super().load_blocks(pairs)


@pytest.mark.parametrize("kind", ["copy", "compress", "offload", "load"])
@pytest.mark.parametrize("call", [0, 1, 3, 6])
def test_after_a_move_that_failed_the_books_agree_and_the_others_are_served(kind, call):
    executor = Failing(kind, call)
    engine = make_engine(
        executor, num_blocks=40, num_compressed_blocks=40, compressed_from=64, recent_window=16, contiguous_below=40,
        max_num_batched_tokens=64, max_model_len=128, num_host_blocks=120, compaction_seconds=0.01, max_queued=1000,
    )  # fmt: skip
    talks = [tokens(i, 110) for i in range(5)]
    requests = []
    for i in range(60):
        requests.append(add(engine, [*talks[i * 7 % 5][: 20 + i * 13 % 80], *tokens(100 + i, 3)], 1 + i % 25))
        if i % 3 == 0:
            engine.kv._wanted_run = 12
        for _ in range(2):
            try:
                engine.step()
            except RuntimeError as error:
                engine.fail_running(str(error))
            engine.check_integrity()
    while True:
        try:
            if not engine.step():
                break
        except RuntimeError as error:
            engine.fail_running(str(error))
        engine.check_integrity()
    if kind != "copy":  # whether compaction gets to act depends on what lies where
        assert executor.failed
    assert {r.outcome for r in requests} <= {"length", "error"}
    assert sum(r.outcome == "length" for r in requests) > 30
    for request in requests:
        if request.outcome == "length":
            assert request.output == generate(request.prompt, request.limit)
    assert_idle_and_whole(engine)


def test_a_swap_out_that_fails_loses_no_request():
    engine = make_engine(num_blocks=32, num_host_blocks=64, contiguous_below=0, max_num_batched_tokens=128)
    engine.executor.prefill_seconds = 10

    def fail(pairs):
        raise RuntimeError("out of memory")

    engine.executor.offload_blocks = fail
    heard = {}
    requests = [make_request(tokens(i, 60), 60) for i in (1, 2)]
    for request in requests:
        request.on_token = lambda r, token, reason: heard.update({r.request_id: reason} if reason else {})
        engine.add(request)
    thread = EngineThread(engine)
    thread.start()
    wait_for(lambda: len(heard) == 2, 20, "both requests to end")
    assert set(heard.values()) == {"error"}
    later = make_request(tokens(3, 8), 4, arrival=engine.executor.clock.now())
    engine.add(later)
    wait_for(lambda: later.outcome is not None, 20, "the next request")
    assert later.outcome == "length"
    assert thread.alive
    thread.stop()
    assert_idle_and_whole(engine)
