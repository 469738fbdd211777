"""The engine's promises one by one: counts, fragmentation, layouts, order, limits, aborts. Case numbers are those of the case list
in the project's notes on other engines' metrics (QH: hit rate, QG: gauges, QK: KV accounting)."""

from __future__ import annotations

import pytest

from observability.catalog import STATES
from observability.engine.kv.pool import IntegrityError
from observability.engine.kv.table import CONTIGUOUS, PAGED
from observability.engine.types import PromptSpan, SamplingParams
from observability.errors import ConfigError, QueueFullError, RequestError, ServiceError
from tests.engine.support import (
    CheckingExecutor,
    Exposition,
    TimedExecutor,
    assert_idle_and_whole,
    generate,
    make_engine,
    make_request,
    tokens,
    value,
)


def run_all(engine, requests):
    for request in requests:
        engine.add(request)
    while engine.step():
        engine.check_integrity()
    assert_idle_and_whole(engine)


# -- hit rate ---------------------------------------------------------------------------------------------------------


def test_qh1_preemption_adds_nothing_to_hits_and_queries():
    """Random prompts share nothing, so the hit rate is 0 however often requests are preempted and find their own old blocks."""
    engine = make_engine(num_blocks=32, max_num_batched_tokens=128)
    requests = [make_request(tokens(i, 24), 40) for i in range(30)]
    run_all(engine, requests)
    shown = Exposition(engine)
    assert shown.value("kvscope_preemptions") == sum(r.num_preemptions for r in requests) > 5
    assert shown.value("kvscope_kv_lookups") == 30
    assert shown.value("kvscope_kv_queried_tokens") == 30 * 24
    assert shown.value("kvscope_kv_hittable_tokens") == 30 * 20
    assert shown.value("kvscope_kv_hit_tokens") == 0
    assert shown.value("kvscope_prompt_tokens") == 30 * 24


def test_recomputed_tokens_are_what_preempted_requests_compute_twice():
    engine = make_engine(num_blocks=32, max_num_batched_tokens=128, prefix_caching=False)
    requests = [make_request(tokens(i, 24), 40) for i in range(12)]
    run_all(engine, requests)
    computed: dict[tuple[str, int], int] = {}
    for prefill, _ in engine.executor.plans:
        for name, start, count in prefill:
            for position in range(start, start + count):
                computed[name, position] = computed.get((name, position), 0) + 1
    assert any(r.num_preemptions for r in requests)
    again = sum(times - 1 for times in computed.values()) + decoded_twice(engine, computed)
    assert value(engine, "kvscope_kv_recomputed_tokens") == again > 0


def decoded_twice(engine, prefilled) -> int:
    """Positions first computed by a decode step and then by a prefill."""
    at: dict[str, int] = {}
    decoded = set()
    for prefill, decode in engine.executor.plans:
        for name in decode:
            decoded.add((name, at[name]))
            at[name] += 1
        for name, start, count in prefill:
            at[name] = start + count
    return sum(position in decoded for position in prefilled)


def test_qh2_a_request_blocked_for_50_steps_is_looked_up_once():
    engine = make_engine(num_blocks=32, max_num_batched_tokens=256, contiguous_below=0)
    shared = tokens(0, 32)
    first = make_request([*shared, *tokens(1, 8)], 60)
    blocked = make_request([*shared, *tokens(2, 90)], 4)  # 23 more blocks; 22 are left
    engine.add(first)
    engine.step()
    engine.add(blocked)
    for _ in range(50):
        engine.step()
        engine.check_integrity()
        assert blocked.table.blocks == []
    assert value(engine, "kvscope_kv_lookups") == 1
    engine.run_until_idle()
    assert_idle_and_whole(engine)
    shown = Exposition(engine)
    assert shown.value("kvscope_kv_lookups") == 2
    assert shown.value("kvscope_kv_queried_tokens") == 40 + 122
    assert shown.value("kvscope_kv_hit_tokens") == 32 == blocked.num_cached
    record = next(r for r in engine.telemetry.finished if r.request_id == blocked.request_id)
    assert record.matrix[1].sum() > 0.49, "it waited for KV blocks, and that is where its time went"


@pytest.mark.parametrize(("blocks", "more"), [(1, 0), (1, 1), (2, 0), (2, 1), (5, 0), (5, 1), (4, 15)])
def test_qh4_a_repeated_prompt_hits_all_whole_blocks_that_leave_one_token(blocks, more):
    size = 16
    prompt = tokens(blocks, blocks * size + more)
    engine = make_engine(block_size=size, num_blocks=64)
    run_all(engine, [make_request(prompt, 2)])
    again = make_request(prompt, 2)
    run_all(engine, [again])
    expected = (blocks if more else blocks - 1) * size
    shown = Exposition(engine)
    assert again.num_cached == shown.value("kvscope_kv_hit_tokens") == expected
    assert shown.value("kvscope_kv_hittable_tokens") == 2 * expected, "a perfect cache hits everything that is hittable"


def test_blocks_of_generated_tokens_are_hit_by_a_following_turn():
    engine = make_engine()
    first = make_request(tokens(1, 10), 12)
    run_all(engine, [first])
    second = make_request([*first.prompt, *first.output, *tokens(2, 5)], 4)
    run_all(engine, [second])
    assert second.num_cached == 20, "21 tokens of the first turn were stored: its last token never is"


def test_a_prefix_is_shared_while_it_is_in_use():
    engine = make_engine(contiguous_below=0)
    shared = tokens(0, 16)
    requests = [make_request([*shared, *tokens(i, 6)], 20) for i in (1, 2)]
    engine.add(requests[0])
    engine.step()
    engine.add(requests[1])
    engine.step()
    state = engine.kv_state()
    assert requests[0].table.blocks[:4] == requests[1].table.blocks[:4]
    assert state.active == len({*requests[0].table.blocks, *requests[1].table.blocks})
    assert sum(state.layout_blocks) == sum(len(r.table.blocks) for r in requests)
    assert state.stored_tokens == 16 + (requests[0].num_computed - 16) + (requests[1].num_computed - 16)
    engine.run_until_idle()
    assert_idle_and_whole(engine)


# -- KV accounting --------------------------------------------------------------------------------------------------------


def test_a_block_that_stayed_private_is_cached_once_its_indexed_twin_is_evicted():
    engine = make_engine(num_blocks=16, max_model_len=64, contiguous_below=0)
    prompt = tokens(1, 9)
    brief, long = make_request(prompt, 1), make_request(prompt, 9)
    for request in (brief, long):  # computed in one step: one of each pair of equal blocks is indexed
        engine.add(request)
    engine.step()
    held = engine.kv.pool.keyed[long.table.blocks[:2]]
    assert brief.outcome == "length"
    assert not held.any(), "the first of two equal prompts is indexed; this test is about the second"
    engine.add(make_request(tokens(2, 48), 2))  # takes every free block and evicts the last of the two
    engine.step()
    assert engine.kv.pool.num_evictable == 1
    engine.run_until_idle()
    again = make_request(prompt, 1)
    engine.add(again)
    engine.run_until_idle()
    assert again.num_cached == 8
    assert_idle_and_whole(engine)


def test_qk1_internal_fragmentation_of_17_token_prompts_in_16_token_blocks():
    engine = make_engine(block_size=16, num_blocks=64, max_num_batched_tokens=1024, prefix_caching=False)
    for i in range(8):
        engine.add(make_request(tokens(i, 17), 10))
    engine.step()
    state = engine.kv_state()
    assert (state.active, state.stored_tokens) == (16, 8 * 17)
    assert 1 - state.stored_tokens / (state.active * state.block_size) == 1 - 17 / 32


def test_stored_tokens_are_what_the_model_stored():
    """The truth is counted in the executor: distinct (block, slot) pairs written for the blocks now in use."""
    engine = make_engine(num_blocks=40, max_num_batched_tokens=9)
    shared = tokens(0, 13)
    for i in range(6):
        engine.add(make_request([*shared[: 3 * i], *tokens(i + 1, 9)], 10))
    while engine.step():
        live = set()
        for request in engine.scheduler.running():
            live |= {(request.table.blocks[i // 4], i % 4) for i in range(request.num_computed)}
        state = engine.kv_state()
        assert state.stored_tokens == len(live)
        assert live <= set(engine.executor.stored)
        assert state.free + state.evictable + state.active == 40
        assert state.region_blocks.sum(axis=0).tolist() == [state.free, state.evictable, state.active]
    assert_idle_and_whole(engine)


def test_qg1_a_mass_abort_leaves_idle_gauges():
    engine = make_engine(num_blocks=64, max_num_seqs=4, max_num_batched_tokens=200)
    requests = [make_request(tokens(i, 30), 50) for i in range(20)]
    for request in requests:
        engine.add(request)
    for _ in range(3):
        engine.step()
    engine.publish()
    assert value(engine, "kvscope_requests_running") == 4
    assert value(engine, "kvscope_requests_waiting") == 16
    for request in requests:
        engine.abort(request)
    assert not engine.step()
    assert_idle_and_whole(engine)
    shown = Exposition(engine)
    assert shown.value("kvscope_requests", outcome="abort") == 20
    assert shown.value("kvscope_kv_layout_blocks") == 0
    assert shown.value("kvscope_kv_stored_tokens") == 0
    assert shown.value("kvscope_last_update_timestamp_seconds") == engine.executor.clock.now()


# -- layouts ----------------------------------------------------------------------------------------------------------------


def test_short_sequences_are_contiguous_and_long_ones_paged():
    engine = make_engine(contiguous_below=40, max_num_batched_tokens=200)
    short, long = make_request(tokens(1, 20), 19), make_request(tokens(2, 40), 4)
    engine.add(short)
    engine.add(long)
    engine.step()
    assert (short.table.layout, long.table.layout) == (CONTIGUOUS, PAGED)
    while engine.step():
        engine.check_integrity()  # adjacency included
    shown = Exposition(engine)
    assert shown.value("kvscope_kv_allocated_blocks", layout="contiguous") == 10
    assert shown.value("kvscope_kv_allocated_blocks", layout="paged") == 11
    assert shown.value("kvscope_kv_layout_fallbacks") == 0


def test_a_sequence_that_grows_past_the_bound_becomes_paged_and_keeps_its_blocks():
    engine = make_engine(contiguous_below=40)
    request = make_request(tokens(1, 30), 40)
    engine.add(request)
    engine.step()
    before = list(request.table.blocks)
    layouts = []
    while engine.step():
        engine.check_integrity()
        if request.table.blocks:
            layouts.append((len(request.table.blocks) * 4, request.table.layout))
            assert request.table.blocks[: len(before)] == before
    assert {layout for capacity, layout in layouts if capacity <= 40} == {CONTIGUOUS}
    assert {layout for capacity, layout in layouts if capacity > 40} == {PAGED}
    assert value(engine, "kvscope_kv_layout_changes", layout="paged") == 1
    assert value(engine, "kvscope_kv_layout_fallbacks") == 0
    assert engine.executor.moves == []


def test_a_sequence_that_finds_no_adjacent_block_goes_on_paged():
    engine = make_engine(num_blocks=32, contiguous_below=1000)
    growing = make_request(tokens(1, 8), 30)
    engine.add(growing)
    engine.step()
    assert growing.table.layout == CONTIGUOUS
    taken = engine.kv.pool.take_range(growing.table.blocks[-1] + 3, 1)
    while growing.table.layout == CONTIGUOUS:
        assert engine.step()
    held = growing.table.blocks.copy()
    engine.kv.pool.release(taken)
    assert held[:4] == list(range(held[0], held[0] + 4))
    assert held[4] != held[0] + 4
    engine.run_until_idle()
    assert growing.output == generate(growing.prompt, 30)
    assert value(engine, "kvscope_kv_layout_fallbacks") == 1
    assert_idle_and_whole(engine)


def test_contiguous_sequences_leave_each_other_room_to_grow():
    engine = make_engine(num_blocks=64, contiguous_below=1000, max_num_batched_tokens=200)
    run_all(engine, [make_request(tokens(i, 8), 24) for i in range(8)])  # 8 x 8 blocks: exactly full
    assert value(engine, "kvscope_kv_layout_fallbacks") == 0


def test_an_unbounded_pool_keeps_sequences_contiguous_and_reuses_their_unused_room():
    engine = make_engine(TimedExecutor(), num_blocks=None, contiguous_below=1000, max_num_batched_tokens=200)
    requests = [make_request(PromptSpan(8, (i,)), 24) for i in range(6)]
    for request in requests:
        engine.add(request)
    engine.step(until=0.05)
    assert {r.table.layout for r in requests} == {CONTIGUOUS}
    for request in requests:
        engine.abort(request)
    while engine.step():
        engine.check_integrity()
    size = engine.kv.pool.size
    assert size == 6 * 8
    engine.kv.pool.take(engine.kv.pool.num_free)
    assert engine.kv.pool.size == size


# -- order, budgets, preemption -------------------------------------------------------------------------------------------------


def test_decodes_go_first_and_long_prompts_are_cut_in_chunks():
    engine = make_engine(max_num_batched_tokens=10)
    early, late = make_request(tokens(1, 8), 20), make_request(tokens(2, 30), 4)
    engine.add(early)
    engine.step()
    engine.add(late)
    for _ in range(4):
        engine.step()
    chunks = [prefill for prefill, decode in engine.executor.plans[1:]]
    assert [decode for _, decode in engine.executor.plans[1:]] == [[early.request_id]] * 4
    assert [(start, count) for [(_, start, count)] in chunks] == [(0, 9), (9, 9), (18, 9), (27, 3)]
    engine.run_until_idle()
    assert_idle_and_whole(engine)


def test_interactive_requests_overtake_in_the_queue():
    engine = make_engine(max_num_seqs=1)
    requests = [
        make_request(tokens(i, 4), 2, request_class=c) for i, c in enumerate(("standard", "standard", "interactive"))
    ]
    run_all(engine, requests)
    order = [record.request_id for record in engine.telemetry.finished]
    assert order == [requests[i].request_id for i in (2, 0, 1)]


def test_the_request_admitted_last_is_preempted_and_comes_back_first():
    engine = make_engine(num_blocks=32, max_num_batched_tokens=200)
    requests = [make_request(tokens(i, 30), 40) for i in range(6)]
    for request in requests:
        engine.add(request)
    while not any(r.num_preemptions for r in requests):
        engine.step()
    running = [r for r in requests if r in set(engine.scheduler.running())]
    preempted = [r for r in requests if r.num_preemptions]
    assert requests[: len(running) + len(preempted)] == running + preempted
    engine.run_until_idle()
    assert_idle_and_whole(engine)
    for request in requests:
        assert request.output == generate(request.prompt, 40)
    assert requests[0].num_preemptions == 0, "the one admitted first always proceeds"


def test_a_request_that_fills_the_whole_pool_finishes():
    engine = make_engine(num_blocks=16, max_model_len=64)
    requests = [make_request(tokens(i, 33), 31) for i in range(3)]
    run_all(engine, requests)
    assert [r.outcome for r in requests] == ["length"] * 3
    assert [len(r.output) for r in requests] == [31] * 3


def test_more_seats_than_tokens_in_a_step_still_decode_together():
    run_all(make_engine(max_num_seqs=8, max_num_batched_tokens=3), [make_request(tokens(i, 9), 9) for i in range(8)])


# -- limits and errors -----------------------------------------------------------------------------------------------------------


def test_max_tokens_is_cut_to_the_context():
    engine = make_engine(max_model_len=32)
    request = make_request(tokens(1, 30), 100)
    run_all(engine, [request])
    assert (request.outcome, len(request.output)) == ("length", 2)


@pytest.mark.parametrize(
    ("prompt", "param", "reason"),
    [
        ([], "prompt", "empty"),
        (list(range(128)), "prompt", "128 tokens; at most 127"),
        ([1, 2.5], "prompt", "not a token id"),
        (["a"], "prompt", "not a token id"),
        (PromptSpan(100, (1,), 64), "prompt", "do not cover 100 tokens"),
    ],
)
def test_prompts_that_cannot_be_served_are_refused_and_counted(prompt, param, reason):
    engine = make_engine()
    with pytest.raises(RequestError, match=reason) as caught:
        engine.add(make_request(prompt))
    assert caught.value.param == param
    assert value(engine, "kvscope_requests", outcome="invalid") == 1
    assert value(engine, "kvscope_requests", outcome="rejected") == 0
    assert not engine.step()
    assert_idle_and_whole(engine)


def test_an_unknown_class_is_refused():
    with pytest.raises(RequestError, match="'vip' is not a request class") as caught:
        make_engine().add(make_request([1], request_class="vip"))
    assert "interactive" in str(caught.value)


def test_a_request_is_added_once():
    engine, request = make_engine(), make_request([1])
    engine.add(request)
    with pytest.raises(RequestError, match="added before"):
        engine.add(request)


def test_a_full_queue_refuses_and_says_when_to_come_back():
    engine = make_engine(max_queued=3, max_num_seqs=1)
    requests = [make_request(tokens(i, 4), 8) for i in range(3)]
    for request in requests:
        engine.add(request)
    with pytest.raises(QueueFullError, match="3 requests wait") as caught:
        engine.add(make_request([1]))
    assert caught.value.retry_after_seconds == 1.0
    engine.run_until_idle()
    for request in [make_request(tokens(i, 4), 100) for i in range(3)]:
        engine.add(request)
    engine.executor.clock.wait_until(60.0)
    with pytest.raises(QueueFullError) as caught:
        engine.add(make_request([1]))
    assert caught.value.retry_after_seconds == pytest.approx(20.0, rel=0.02), "three ended in about 60 s"
    assert value(engine, "kvscope_requests", outcome="rejected") == 2


def test_unbounded_kv_and_length_only_prompts_need_virtual_time():
    class RealClockExecutor(CheckingExecutor):
        def __init__(self):
            super().__init__(4)
            self.clock.virtual = False

    with pytest.raises(ConfigError, match="unbounded"):
        make_engine(RealClockExecutor(), num_blocks=None)
    engine = make_engine(RealClockExecutor())
    with pytest.raises(RequestError, match="known only by its length"):
        engine.add(make_request(PromptSpan(8, (1,))))
    with pytest.raises(ConfigError, match="virtual time"):
        engine.run(iter(()))


def test_a_closed_engine_refuses():
    engine = make_engine()
    engine.close("maintenance.")
    with pytest.raises(ServiceError, match="maintenance"):
        engine.add(make_request([1]))
    assert value(engine, "kvscope_requests", outcome="rejected") == 1


# -- ends ---------------------------------------------------------------------------------------------------------------------------


def test_stop_and_eos_tokens_end_a_request():
    prompt = tokens(3, 9)
    reference = generate(prompt, 50)
    eos = reference[4]
    cut = reference[: reference.index(eos) + 1]
    for stop, eos_ids, ignore, expected in (
        (frozenset({eos}), frozenset(), False, cut),
        (frozenset(), frozenset({eos}), False, cut),
        (frozenset(), frozenset({eos}), True, reference),
    ):
        engine = make_engine(eos=eos_ids)
        request = make_request(prompt, 50)
        request.params = SamplingParams(max_tokens=50, stop_token_ids=stop, ignore_eos=ignore)
        run_all(engine, [request])
        assert request.output == expected
        assert request.outcome == ("length" if ignore else "stop")


@pytest.mark.parametrize("state", ["queued", "kv_wait", "prefill", "decode", "preempted"])
def test_a_request_can_be_aborted_in_every_state(state):
    engine = make_engine(num_blocks=32, max_num_batched_tokens=16)
    load = [make_request(tokens(i, 40), 60) for i in range(5)]
    heard = []
    for request in load:
        request.on_token = lambda r, token, reason: heard.append((r, token, reason))
        engine.add(request)
    victim = None
    for _ in range(400):
        if state == "queued" and not engine.telemetry.last:
            victim = load[0]  # still in the inbox
            break
        engine.step()
        victim = next((r for r in load if r.outcome is None and r.trace.state == STATES.index(state)), None)
        if victim is not None:
            break
    assert victim is not None, f"no request was ever {state}"
    tokens_before = len(victim.output)
    engine.abort(victim)
    engine.abort(victim)  # twice is once
    engine.step()
    engine.check_integrity()
    assert (victim.outcome, len(victim.output)) == ("abort", tokens_before)
    engine.run_until_idle()
    engine.abort(victim)
    engine.step()
    assert_idle_and_whole(engine)
    assert [(t, r) for who, t, r in heard if who is victim and r] == [(None, "abort")]
    assert {r.outcome for r in load if r is not victim} == {"length"}
    record = next(r for r in engine.telemetry.finished if r.request_id == victim.request_id)
    assert record.outcome == "abort"
    if state in ("kv_wait", "prefill", "preempted"):  # the others were aborted at the moment at which they got there
        assert record.matrix[STATES.index(state)].sum() > 0


def test_a_matched_stop_string_ends_a_request_as_served():
    engine = make_engine()
    request = make_request(tokens(1, 9), 50)
    request.on_token = lambda r, token, reason: r.num_generated == 3 and engine.abort(r, "stop")
    run_all(engine, [request])
    assert (request.outcome, len(request.output)) == ("stop", 3)
    shown = Exposition(engine)
    assert shown.value("kvscope_requests", outcome="stop") == 1
    assert shown.value("kvscope_request_phase_requests", gt="0") == 1


def test_a_callback_that_raises_costs_only_its_own_request(caplog):
    engine = make_engine()
    bad, good = make_request(tokens(1, 9), 10), make_request(tokens(2, 9), 10)

    def fail(request, token, reason):
        raise RuntimeError("client is gone")

    bad.on_token = fail
    run_all(engine, [bad, good])
    assert (bad.outcome, bad.error) == ("error", "on_token failed: client is gone")
    assert good.output == generate(good.prompt, 10)
    assert "client is gone" in caplog.text


def test_check_integrity_notices_a_leaked_block_and_a_lost_request():
    engine = make_engine()
    request = make_request(tokens(1, 9), 10)
    engine.add(request)
    engine.step()
    lost = request.table.blocks.pop()
    with pytest.raises(IntegrityError, match="tokens stored"):
        engine.check_integrity()
    request.table.capacity_tokens -= 4
    with pytest.raises(IntegrityError, match=f"stored|block {lost} is held by 0 running requests and counts 1"):
        engine.check_integrity()
    request.table.extend([lost])
    engine.check_integrity()
    engine.scheduler.decoding.clear()
    with pytest.raises(IntegrityError, match="the counters say"):
        engine.check_integrity()
