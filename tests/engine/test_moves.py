"""Where KV goes when the device is full: host tier, prefetch, swapping, compression, compaction. Content is checked at every step."""

from __future__ import annotations

import pytest

from observability.catalog import STATES
from observability.engine.kv.prefix import TokenKeys
from observability.engine.kv.table import COMPRESSED, CONTIGUOUS, PAGED
from observability.engine.types import PromptSpan
from observability.errors import ServiceError
from tests.engine.support import (
    Exposition,
    TimedExecutor,
    assert_idle_and_whole,
    generate,
    make_engine,
    make_request,
    tokens,
    value,
)


def serve(engine, *requests):
    for request in requests:
        request.arrival = engine.executor.clock.now()
        engine.add(request)
    while engine.step():
        engine.check_integrity()
    for request in requests:
        assert request.output == generate(request.prompt, request.limit)


def prefetched(engine):
    return {o: value(engine, "kvscope_kv_prefetch_blocks", outcome=o) for o in ("issued", "useful", "late", "wasted")}


def seconds_in(engine, request, state):
    (record,) = [r for r in engine.telemetry.finished if r.request_id == request.request_id]
    return record.matrix[STATES.index(state)].sum()


# -- host tier ---------------------------------------------------------------------------------------------------------------


def test_an_evicted_prefix_is_hit_in_the_host_tier():
    engine = make_engine(num_blocks=32, max_model_len=128, num_host_blocks=64, contiguous_below=0, prefetch_lookahead=0)
    prompt = tokens(1, 41)
    serve(engine, make_request(prompt))
    serve(engine, make_request(tokens(2, 120)))
    assert value(engine, "kvscope_kv_evicted_blocks") > 0
    again = make_request([*prompt[:40], *tokens(3, 5)])
    serve(engine, again)
    assert again.num_cached == 40
    shown = Exposition(engine)
    host = shown.value("kvscope_kv_hit_tokens", tier="host")
    assert host == 4 * shown.value("kvscope_kv_moved_blocks", reason="load") > 0
    assert shown.value("kvscope_kv_hit_tokens", tier="device") == 40 - host
    assert shown.value("kvscope_kv_moved_blocks", reason="offload") == shown.value("kvscope_kv_evicted_blocks")
    assert shown.value("kvscope_kv_host_blocks", state="pinned") == 0
    assert seconds_in(engine, again, "kv_wait") == pytest.approx(host / 4 * engine.executor.move_seconds)
    assert_idle_and_whole(engine)


def test_blocks_of_the_next_in_line_come_back_before_their_turn():
    engine = make_engine(
        num_blocks=40, max_num_seqs=1, num_host_blocks=64, contiguous_below=0, prefetch_warmup_ratio=1.0
    )
    prompt = tokens(1, 41)
    serve(engine, make_request(prompt))
    serve(engine, make_request(tokens(2, 120)))
    again = make_request([*prompt[:40], *tokens(4, 3)])
    serve(engine, make_request(tokens(3, 8), 30), again)
    outcome = prefetched(engine)
    assert outcome["issued"] == outcome["useful"] > 0
    assert outcome["late"] == outcome["wasted"] == 0
    assert again.num_cached == 40
    assert value(engine, "kvscope_kv_hit_tokens", tier="host") == 4 * outcome["useful"]
    assert seconds_in(engine, again, "kv_wait") == 0, "it found its blocks on the device"
    assert_idle_and_whole(engine)


def test_a_request_whose_prefetch_is_on_the_way_waits_for_it_and_that_is_late():
    engine = make_engine(
        num_blocks=40, max_num_seqs=1, num_host_blocks=64, contiguous_below=0, prefetch_warmup_ratio=1.0
    )
    prompt = tokens(1, 41)
    serve(engine, make_request(prompt))
    serve(engine, make_request(tokens(2, 120)))
    engine.executor.move_seconds = 0.1
    serve(engine, make_request(tokens(3, 8), 3), again := make_request([*prompt[:40], *tokens(4, 3)]))
    outcome = prefetched(engine)
    assert outcome["issued"] == outcome["late"] > 0
    assert seconds_in(engine, again, "kv_wait") > 0
    assert value(engine, "kvscope_kv_move_seconds", reason="load") > 0, "the engine had nothing else to do"
    assert_idle_and_whole(engine)


def test_prefetched_blocks_that_are_evicted_unused_are_wasted():
    engine = make_engine(
        num_blocks=40, max_num_seqs=1, num_host_blocks=64, contiguous_below=0, prefetch_warmup_ratio=1.0
    )
    prompt = tokens(1, 41)
    serve(engine, make_request(prompt))
    serve(engine, make_request(tokens(2, 120)))
    running, gone = make_request(tokens(3, 8), 30), make_request([*prompt[:40], *tokens(4, 3)])
    engine.add(running)
    engine.add(gone)
    for _ in range(20):
        engine.step()
    engine.abort(gone)
    engine.run_until_idle()
    issued = prefetched(engine)["issued"]
    assert issued > 0
    serve(engine, make_request(tokens(5, 124)), make_request(tokens(6, 124)))
    assert prefetched(engine) == {"issued": issued, "useful": 0, "late": 0, "wasted": issued}
    assert_idle_and_whole(engine)


def test_unused_prefetched_blocks_stay_within_their_share_of_the_pool():
    engine = make_engine(
        num_blocks=40, max_num_seqs=1, num_host_blocks=99, contiguous_below=0, prefetch_warmup_ratio=0.1
    )
    prompts = [tokens(i, 61) for i in range(3)]
    for prompt in prompts:
        serve(engine, make_request(prompt))
    serve(engine, make_request(tokens(9, 124)))
    engine.add(make_request(tokens(3, 8), 30))
    for prompt in prompts:
        engine.add(make_request(prompt))
    for _ in range(10):
        engine.step()
        assert engine.kv.host.prefetched.sum() <= 4
    assert prefetched(engine)["issued"] == 4
    engine.run_until_idle()
    assert_idle_and_whole(engine)


# -- swapping ----------------------------------------------------------------------------------------------------------------


def crowd(engine):
    requests = [make_request(tokens(i, 30), 60) for i in range(3)]
    serve(engine, *requests)
    return requests


def test_a_preempted_sequence_is_swapped_and_not_computed_again():
    engine = make_engine(num_blocks=40, num_host_blocks=64, contiguous_below=0, prefix_caching=False)
    requests = crowd(engine)
    shown = Exposition(engine)
    preempted = [r for r in requests if r.num_preemptions]
    assert preempted
    assert shown.value("kvscope_preemptions", reason="kv_swap") == sum(r.num_preemptions for r in requests)
    assert shown.value("kvscope_preemptions", reason="kv_exhausted") == 0
    assert shown.value("kvscope_kv_moved_blocks", reason="swap_out") == shown.value(
        "kvscope_kv_moved_blocks", reason="swap_in"
    )
    assert shown.value("kvscope_kv_recomputed_tokens") < 4 * len(preempted), "only what filled no block"
    assert all(seconds_in(engine, r, "swapped") > 0 for r in preempted)
    assert all(seconds_in(engine, r, "preempted") == 0 for r in requests)
    assert_idle_and_whole(engine)


@pytest.mark.parametrize("settings", [{"swapping": False}, {"num_host_blocks": 0}])
def test_without_swapping_it_is_computed_again(settings):
    engine = make_engine(
        **{"num_blocks": 40, "num_host_blocks": 64, "contiguous_below": 0, "prefix_caching": False} | settings
    )
    crowd(engine)
    assert value(engine, "kvscope_preemptions", reason="kv_exhausted") > 0
    assert value(engine, "kvscope_kv_recomputed_tokens") > 16
    assert_idle_and_whole(engine)


def test_what_is_cheaper_to_compute_again_is_not_swapped():
    engine = make_engine(num_blocks=40, num_host_blocks=64, contiguous_below=0, prefix_caching=False)
    engine.executor.prefill_seconds = (
        2 * engine.executor.move_seconds / 4 * 0.9
    )  # a token costs less than its way out and back
    crowd(engine)
    assert value(engine, "kvscope_preemptions", reason="kv_swap") == 0
    assert value(engine, "kvscope_preemptions", reason="kv_exhausted") > 0
    engine = make_engine(num_blocks=40, num_host_blocks=64, contiguous_below=0, prefix_caching=False)
    engine.executor.prefill_seconds = 2 * engine.executor.move_seconds / 4 * 1.1
    crowd(engine)
    assert value(engine, "kvscope_preemptions", reason="kv_swap") > 0


def test_a_swapped_request_that_is_aborted_gives_its_host_slots_back():
    engine = make_engine(num_blocks=40, num_host_blocks=64, contiguous_below=0, prefix_caching=False)
    requests = [make_request(tokens(i, 30), 60) for i in range(3)]
    for request in requests:
        engine.add(request)
    while not engine.kv.host.pool.num_active:
        engine.step()
    for request in requests:
        engine.abort(request)
    engine.step()
    assert engine.kv.host.pool.num_active == 0
    assert_idle_and_whole(engine)


# -- compression -------------------------------------------------------------------------------------------------------------

LONG = {
    "num_blocks": 24, "num_compressed_blocks": 40, "compressed_from": 32, "recent_window": 8, "contiguous_below": 16,
    "max_num_batched_tokens": 40, "max_model_len": 160,
}  # fmt: skip


def test_a_long_prompt_keeps_only_its_recent_window_exact():
    engine = make_engine(**LONG)
    request = make_request(tokens(1, 101), 8)
    engine.add(request)
    engine.step()
    table = request.table
    assert table.layout == COMPRESSED
    exact = [i for i, block in enumerate(table.blocks) if block < 24]
    assert exact == list(range((101 - 8) // 4, 26)), "blocks that begin within the window or after it"
    while engine.step():
        engine.check_integrity()
    assert request.output == generate(request.prompt, 8)
    assert_idle_and_whole(engine)


def test_a_sequence_that_grows_long_is_compressed_from_its_old_end_on():
    engine = make_engine(**LONG)
    request = make_request(tokens(1, 10), 60)
    engine.add(request)
    layouts = []
    while engine.step():
        engine.check_integrity()
        if request.table.blocks:
            layouts.append(request.table.layout)
            if request.num_computed > 33:
                old = (request.num_computed - 1 - 8) // 4
                assert all(block >= 24 for block in request.table.blocks[:old])
                assert all(block < 24 for block in request.table.blocks[old + 1 :])
    assert sorted(set(layouts), key=layouts.index) == [CONTIGUOUS, PAGED, COMPRESSED]
    assert request.output == generate(request.prompt, 60)
    assert value(engine, "kvscope_kv_layout_changes", layout="compressed") == 1
    assert value(engine, "kvscope_kv_moved_blocks", reason="compress") == (68 - 8) // 4
    assert_idle_and_whole(engine)


def test_compressed_content_serves_long_sequences_only():
    engine = make_engine(**LONG)
    prompt = tokens(1, 101)
    serve(engine, make_request(prompt))
    long, short = make_request([*prompt, *tokens(2, 20)]), make_request([*prompt[:16], *tokens(3, 4)])
    serve(engine, long)
    assert long.num_cached >= 92
    serve(engine, short)
    assert short.num_cached == 0, "its layout is exact, and these blocks lie quantized"
    assert_idle_and_whole(engine)


def test_compressed_blocks_go_to_the_host_and_come_back():
    engine = make_engine(**LONG, num_host_blocks=80, prefetch_lookahead=0)
    prompt = tokens(1, 101)
    serve(engine, make_request(prompt))
    serve(engine, make_request(tokens(2, 150)))
    again = make_request([*prompt, *tokens(3, 10)])
    serve(engine, again)
    assert again.num_cached > 80
    assert value(engine, "kvscope_kv_hit_tokens", tier="host") > 0
    assert_idle_and_whole(engine)


# -- compaction --------------------------------------------------------------------------------------------------------------


def fragmented(**settings):
    """An engine whose free blocks lie between those of long-running paged sequences, and the requests that hold these."""
    engine = make_engine(
        num_blocks=48, max_num_seqs=12, max_num_batched_tokens=200, contiguous_below=16, prefix_caching=False,
        **settings,
    )  # fmt: skip
    requests = [make_request(tokens(i, 17), 40 if i % 2 else 1) for i in range(9)]
    for request in requests:
        engine.add(request)
    for _ in range(3):
        engine.step()
    return engine, [r for r in requests if r.outcome is None]


def run_of(engine, length):
    request = make_request(tokens(99, length), 2)
    engine.add(request)
    engine.step()
    return request


@pytest.mark.parametrize("budget", [0.0, 0.004, 1.0])
def test_compaction_makes_room_for_adjacent_blocks_in_bounded_slices(budget):
    engine, held = fragmented(compaction_seconds=budget)
    engine.kv._wanted_run = 20
    before = engine.kv.pool.address_map().largest_free_run
    assert before < 20
    run = before
    for _ in range(12):
        engine.step()
        engine.check_integrity()
        run = max(run, engine.kv.pool.address_map().largest_free_run)
    copies = [pairs for kind, pairs in engine.executor.moves if kind == "copy"]
    if not budget:
        assert copies == []
        assert run < 20
    else:
        assert max(map(len, copies)) <= max(1, round(budget / engine.executor.move_seconds))
        assert run >= 20
        shown = Exposition(engine)
        moved = sum(map(len, copies))
        assert shown.value("kvscope_kv_moved_blocks", reason="compaction") == moved
        assert shown.value("kvscope_kv_move_seconds", reason="compaction") == pytest.approx(
            moved * engine.executor.move_seconds
        )
        assert shown.value("kvscope_kv_compaction_recovered_blocks") >= run - before
    while engine.step():
        engine.check_integrity()
    for request in held:
        assert request.output == generate(request.prompt, request.limit)
    assert_idle_and_whole(engine)


def test_what_compaction_overwrites_is_saved_to_the_host_first():
    engine = make_engine(
        num_blocks=48, max_num_seqs=12, max_num_batched_tokens=200, contiguous_below=16, num_host_blocks=90,
        compaction_seconds=1.0, prefetch_lookahead=0,
    )  # fmt: skip
    old = [tokens(100 + i, 17) for i in range(10)]
    serve(engine, *(make_request(prompt, 1) for prompt in old))  # every block is cached content now, or free
    requests = [make_request(tokens(i, 17), 40 if i % 2 else 1) for i in range(8)]
    for request in requests:
        engine.add(request)
    for _ in range(3):
        engine.step()
    engine.kv._wanted_run = 24
    for _ in range(6):
        engine.step()
        engine.check_integrity()
    assert value(engine, "kvscope_kv_moved_blocks", reason="compaction") > 0
    again = [make_request([*prompt, *tokens(7, 3)], 1) for prompt in old]
    serve(engine, *again)  # the checking executor reads what comes back
    assert sum(r.num_cached for r in again) > 0
    assert_idle_and_whole(engine)


def test_blocks_shared_with_a_contiguous_sequence_stay_where_they_are():
    engine = make_engine(
        num_blocks=48, max_num_seqs=12, max_num_batched_tokens=200, contiguous_below=24, compaction_seconds=1.0
    )
    prefix = tokens(1, 16)
    first = make_request([*prefix, *tokens(2, 4)], 3)
    sharer = make_request([*prefix, *tokens(3, 40)], 30)
    engine.add(first)
    engine.step()
    engine.add(sharer)
    engine.step()
    assert first.table.layout == CONTIGUOUS
    assert set(first.table.blocks[:4]) <= set(sharer.table.blocks)
    engine.kv._wanted_run = 40
    while engine.step():
        engine.check_integrity()  # adjacency included
    assert sharer.output == generate(sharer.prompt, 30)
    assert_idle_and_whole(engine)


# -- reservation, as before paging ------------------------------------------------------------------------------------------


def test_reserving_for_the_longest_sequence_wastes_what_it_does_not_need():
    engine = make_engine(num_blocks=64, max_model_len=128, reservation="max_model_len", prefix_caching=False)
    requests = [make_request(tokens(i, 9), 4) for i in range(3)]
    for request in requests:
        engine.add(request)
    engine.step()
    state = engine.kv_state()
    assert state.active == 64, "two reservations of 32 blocks fill the pool"
    assert state.stored_tokens == 18
    assert engine.num_waiting == 1
    engine.run_until_idle()
    assert all(r.output == generate(r.prompt, 4) for r in requests)
    assert_idle_and_whole(engine)


# -- sessions ----------------------------------------------------------------------------------------------------------------


def keys_of(known):
    return TokenKeys(known, [], 4).get(0, len(known) // 4)


def test_a_prefix_exported_by_one_engine_is_hit_in_another():
    first, second = make_engine(contiguous_below=0), make_engine(contiguous_below=0)
    turn = make_request(tokens(1, 30), 12)
    serve(first, turn)
    known = [*turn.prompt, *turn.output]
    count, payload = first.kv.export_prefix(keys_of(known))
    assert count == 10
    assert first.kv.cached_blocks(keys_of(known)) == 10
    assert second.kv.cached_blocks(keys_of(known)) == 0
    assert second.kv.import_prefix(keys_of(known), payload) == 10
    second.check_integrity()
    following = make_request([*known, *tokens(2, 6)], 5)
    serve(second, following)
    assert following.num_cached == 40
    assert second.kv.import_prefix(keys_of(known), payload) == 10, "what is there already is kept"
    assert_idle_and_whole(second)


def test_an_import_takes_what_fits_and_leaves_running_requests_alone():
    first, second = make_engine(num_blocks=64), make_engine(num_blocks=32)
    turn = make_request(tokens(1, 100), 8)
    serve(first, turn)
    known = [*turn.prompt, *turn.output]
    running = make_request(tokens(2, 60), 20)
    second.add(running)
    second.step()
    cached = second.kv.import_prefix(keys_of(known), first.kv.export_prefix(keys_of(known))[1])
    assert 0 < cached < 107 // 4
    second.check_integrity()
    second.run_until_idle()
    assert running.output == generate(running.prompt, 20)
    assert_idle_and_whole(second)


def test_work_for_the_engines_thread_is_done_between_steps_and_a_cancelled_one_is_not():
    engine = make_engine()
    done, cancelled = engine.call(lambda: 7), engine.call(lambda: 8)
    assert cancelled.cancel()
    failed = engine.call(lambda: 1 / 0)
    engine.step()
    assert done.result(0) == 7
    assert isinstance(failed.exception(0), ZeroDivisionError)
    engine.close("it was told to stop.")
    assert isinstance(engine.call(lambda: 9).exception(0), ServiceError)


def test_virtual_time_stops_a_run_of_decodes_when_a_load_arrives():
    executor = TimedExecutor()
    executor.move_seconds = 0.005
    engine = make_engine(executor, num_blocks=60, num_host_blocks=90, contiguous_below=0, prefetch_lookahead=0)

    def ask(part, length, max_tokens, arrival):
        return make_request(PromptSpan(length, (part,), 512), max_tokens, arrival=arrival)

    engine.run([ask(1, 81, 1, 0.0), ask(2, 120, 1, 10.0), ask(3, 120, 1, 20.0)])
    again = ask(1, 81, 1, 30.1)
    engine.run([ask(4, 8, 60, 30.0), again])
    (record,) = [r for r in engine.telemetry.finished if r.request_id == again.request_id]
    loads = [len(pairs) for kind, pairs in executor.moves if kind == "load"]
    assert loads
    waited = record.matrix[STATES.index("kv_wait")].sum()
    assert loads[-1] * 0.005 <= waited < loads[-1] * 0.005 + 2 * executor.step_seconds, (
        "until the step in which it arrived"
    )
    assert_idle_and_whole(engine)
