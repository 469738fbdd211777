"""Who is served when: classes, bounded wait, spread of prefills, deadlines, room kept for what is expected, the controller's limits."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from observability.engine.types import ControllerConfig, EngineConfig, PromptSpan
from observability.errors import ConfigError
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


def first_tokens(engine):
    return {r.request_id: r.first_token for r in engine.telemetry.finished}


# -- classes -----------------------------------------------------------------------------------------------------------------


def steady_interactive_load(engine, until):
    """Keeps interactive requests waiting at all times and steps until `until()`; says how long that took."""
    start, seed = engine.executor.clock.now(), 100
    while not until():
        while engine.num_waiting < 6:
            seed += 1
            engine.add(
                make_request(tokens(seed, 12), 3, request_class="interactive", arrival=engine.executor.clock.now())
            )
        engine.step()
        assert seed < 3000, "it starves"
    return engine.executor.clock.now() - start


@pytest.mark.parametrize("request_class", ["standard", "long_context"])
def test_a_steady_load_of_a_higher_class_delays_a_request_by_the_bound_only(request_class):
    engine = make_engine(max_num_seqs=2, max_wait_seconds=1.0, max_queued=1000)
    request = make_request(tokens(1, 12), 1, request_class=request_class)
    engine.add(request)
    waited = steady_interactive_load(engine, lambda: request.outcome is not None)
    assert 1.0 <= waited < 1.2
    assert value(engine, "kvscope_queue_promotions", **{"class": request_class}) == 1


def test_without_class_queues_it_is_first_come_first_served():
    engine = make_engine(max_num_seqs=1, class_queues=False)
    requests = [
        make_request(tokens(i, 8), 2, request_class=name)
        for i, name in enumerate(("long_context", "standard", "interactive"))
    ]
    for request in requests:
        engine.add(request)
    engine.run_until_idle()
    assert list(first_tokens(engine)) == [r.request_id for r in requests]


# -- spread of prefills ------------------------------------------------------------------------------------------------------


def mixed_prefills(limit):
    engine = make_engine(num_blocks=300, max_model_len=512, max_num_batched_tokens=40, spread_limit=limit)
    long = make_request(tokens(0, 400), 1)
    short = [make_request(tokens(i, 12), 1) for i in (1, 2, 3)]
    for request in (long, *short):
        engine.add(request)
    engine.run_until_idle()
    assert all(r.output == generate(r.prompt, 1) for r in (long, *short))
    assert_idle_and_whole(engine)
    return engine, long, short


def test_short_prefills_do_not_wait_for_the_chunks_of_a_much_longer_one():
    engine, long, short = mixed_prefills(4.0)
    times = first_tokens(engine)
    assert max(times[r.request_id] for r in short) < times[long.request_id] / 2
    shown = Exposition(engine)
    assert shown.value("kvscope_prefill_batch_splits") >= 1
    engine, long, short = mixed_prefills(0.0)
    times = first_tokens(engine)
    assert min(times[r.request_id] for r in short) >= times[long.request_id], "off: in order of admission"
    assert value(engine, "kvscope_prefill_batch_splits") == 0


def test_a_long_prefill_gets_its_turn_among_ever_new_short_ones():
    engine = make_engine(
        num_blocks=300, max_model_len=512, max_num_batched_tokens=24, spread_limit=4.0, max_queued=1000
    )
    long = make_request(tokens(0, 400), 1)
    engine.add(long)
    seed, steps = 0, 0
    while long.outcome is None:
        while engine.num_waiting < 4:
            seed += 1
            engine.add(make_request(tokens(seed, 12), 1, arrival=engine.executor.clock.now()))
        engine.step()
        steps += 1
        assert steps < 9 * (400 // 12 + 1), "it must compute something at least every ninth step"
    assert long.output == generate(long.prompt, 1)


# -- deadlines ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["queued", "prefill", "decode"])
def test_a_request_past_its_deadline_ends_between_two_steps_and_gives_its_blocks_back(state):
    settings = {"queued": {"max_num_seqs": 1}, "prefill": {"max_num_batched_tokens": 4}, "decode": {}}[state]
    engine = make_engine(**settings)
    other = make_request(tokens(1, 4), 60)
    late = make_request(tokens(2, 60), 30, deadline=0.095)  # a step takes 0.01 s
    heard = []
    late.on_token = lambda r, token, reason: heard.append((token, reason))
    engine.add(other)
    engine.add(late)
    if state != "queued":
        engine.add(make_request(tokens(3, 4), 1))
    while late.outcome is None:
        before = engine.executor.clock.now()
        engine.step()
        engine.check_integrity()
    assert late.outcome == "deadline"
    assert 0.09 <= before <= 0.1, "not before, and not a step later than it must be"
    assert heard[-1] == (None, "deadline")
    assert "The deadline passed" in late.error
    engine.run_until_idle()
    assert other.output == generate(other.prompt, 60)
    assert value(engine, "kvscope_requests", outcome="deadline") == 1
    assert_idle_and_whole(engine)


def test_in_virtual_time_a_run_of_decodes_stops_at_a_deadline():
    engine = make_engine(TimedExecutor(), max_model_len=256)
    request = make_request(PromptSpan(8, (1,), 512), 200, deadline=1.0)
    engine.run([request])
    assert request.outcome == "deadline"
    assert engine.executor.clock.now() == pytest.approx(1.0, abs=0.021)
    assert_idle_and_whole(engine)


def test_a_deadline_that_is_met_changes_nothing():
    engine = make_engine()
    request = make_request(tokens(1, 8), 4, deadline=100.0)
    engine.add(request)
    engine.run_until_idle()
    assert request.outcome == "length"
    assert value(engine, "kvscope_requests", outcome="deadline") == 0


# -- what is expected --------------------------------------------------------------------------------------------------------


def test_room_is_kept_for_interactive_requests_that_arrive_regularly():
    def waits(predictive):
        engine = make_engine(
            num_blocks=40, max_num_batched_tokens=256, contiguous_below=0, prefix_caching=False,
            predictive_admission=predictive, prefetch_warmup_ratio=0.3,
        )  # fmt: skip
        for i in range(20):  # ten interactive requests of 20 tokens a second
            engine.executor.clock.wait_until(i / 10)
            engine.add(make_request(tokens(i, 20), 1, request_class="interactive", arrival=i / 10))
            engine.run_until_idle()
        now = engine.executor.clock.now()
        for i in range(5):
            engine.add(make_request(tokens(50 + i, 30), 20, request_class="standard", arrival=now))
        engine.step()
        urgent = make_request(tokens(99, 20), 1, request_class="interactive", arrival=engine.executor.clock.now())
        engine.add(urgent)
        engine.step()
        at_once = urgent.outcome is not None
        engine.run_until_idle()
        assert_idle_and_whole(engine)
        return not at_once

    assert waits(False)
    assert not waits(True)


def test_seats_are_kept_for_interactive_requests_that_arrive_regularly():
    engine = make_engine(
        num_blocks=400, max_num_seqs=10, max_num_batched_tokens=400, contiguous_below=0, predictive_admission=True,
        prefetch_warmup_ratio=0.3,
    )  # fmt: skip
    for i in range(20):
        engine.executor.clock.wait_until(i / 10)
        engine.add(make_request(tokens(i, 4), 1, request_class="interactive", arrival=i / 10))
        engine.run_until_idle()
    now = engine.executor.clock.now()
    for i in range(20):
        engine.add(make_request(tokens(50 + i, 4), 20, request_class="standard", arrival=now))
    engine.step()
    assert engine.num_running == 7, (
        "three of ten seats: a second brings ten requests, and at most the warm-up share is kept"
    )
    urgent = [make_request(tokens(90 + i, 4), 20, request_class="interactive", arrival=now) for i in range(4)]
    for request in urgent:
        engine.add(request)
    engine.step()
    assert engine.num_running == 10
    engine.run_until_idle()
    assert_idle_and_whole(engine)


def test_a_request_that_would_leave_too_little_room_still_runs_when_nothing_else_does():
    engine = make_engine(num_blocks=32, contiguous_below=0, predictive_admission=True, prefetch_warmup_ratio=1.0)
    for i in range(20):
        engine.executor.clock.wait_until(i / 10)
        engine.add(make_request(tokens(i, 100), 1, request_class="interactive", arrival=i / 10))
        engine.run_until_idle()
    request = make_request(tokens(77, 100), 2, arrival=2.0)
    engine.add(request)
    engine.run_until_idle()
    assert request.outcome == "length"


def test_an_overdue_request_is_not_held_back_for_those_that_wait_behind_it():
    engine = make_engine(
        num_blocks=400, max_num_seqs=2, max_num_batched_tokens=400, contiguous_below=0, predictive_admission=True,
        prefetch_warmup_ratio=0.5, max_wait_seconds=0.2,
    )  # fmt: skip
    for i in range(20):
        engine.executor.clock.wait_until(i / 10)
        engine.add(make_request(tokens(i, 4), 1, request_class="interactive", arrival=i / 10))
        engine.run_until_idle()
    now = engine.executor.clock.now()
    running = make_request(tokens(50, 4), 100, request_class="standard", arrival=now)
    waiting = make_request(tokens(51, 4), 100, request_class="standard", arrival=now)
    engine.add(running)
    engine.add(waiting)
    engine.step()
    assert engine.num_running == 1, "the other seat is kept"
    while engine.executor.clock.now() < now + 0.25:
        engine.step()
    assert engine.num_running == 2


# -- change of class or tenant -----------------------------------------------------------------------------------------------


def test_a_change_of_tenant_that_evicts_the_others_prefixes_shows_what_it_cost():
    engine = make_engine(num_blocks=32, contiguous_below=0)
    chat = tokens(1, 60)

    def ask(prompt, tenant):
        request = make_request(prompt, 1, tenant=tenant, arrival=engine.executor.clock.now())
        engine.add(request)
        engine.run_until_idle()
        return request.num_cached / ((len(prompt) - 1) // 4 * 4)

    def losses():
        rows = {s.family.name: s.rows for s in engine.telemetry.snapshot()}["kvscope_kv_context_switch_hit_loss_ratio"]
        return {row.suffix: row.value for row in rows if row.suffix in ("_sum", "_count")}

    ratios = [ask(chat, "a") for _ in range(6)]
    remembered = ratios[0]
    for ratio in ratios[1:]:
        remembered += 0.2 * (ratio - remembered)
    assert losses() == {"_sum": 0, "_count": 0}, "nobody else was served yet"
    ask(tokens(2, 120), "b")
    assert losses()["_count"] == 0, "of b nothing was known before"
    back = ask(chat, "a")
    assert losses() == {"_sum": pytest.approx(remembered - back), "_count": 1}
    assert remembered - back > 0.5


# -- controller --------------------------------------------------------------------------------------------------------------


def test_the_engine_serves_under_the_controllers_limits_and_says_so_on_each_request():
    control = ControllerConfig(
        interval_seconds=0.05, window_seconds=0.5, min_requests=5, patience=2, min_batched_tokens=8
    )
    engine = make_engine(
        num_blocks=48,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_queued=1000,
        prefix_caching=False,
        controller=control,
    )
    for i in range(60):
        engine.add(make_request(tokens(i, 40), 12))
    most = []
    while engine.step():
        prefills, decodes = engine.executor.plans[-1]
        most.append((sum(count for _, _, count in prefills) + len(decodes), engine.limits.max_num_batched_tokens))
        engine.check_integrity()
    shown = Exposition(engine)
    assert shown.value("kvscope_controller_changes", action="tighten") > 0
    degraded = [r for r in engine.telemetry.finished if r.degraded]
    assert shown.value("kvscope_requests_degraded") == sum(len(r.degraded) for r in degraded) > 0
    assert min(limit for _, limit in most) < 64
    assert all(ran <= max(limit, before) for (_, before), (ran, limit) in pairwise(most))
    assert shown.value("kvscope_limit_batched_tokens") == engine.limits.max_num_batched_tokens
    assert_idle_and_whole(engine)


# -- settings that contradict each other -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"num_compressed_blocks": 600, "contiguous_below": 9000}, ("contiguous_below", "compressed_from")),
        ({"num_compressed_blocks": 600, "recent_window": 9000}, ("recent_window", "compressed_from")),
        ({"num_compressed_blocks": 600, "recent_window": 8}, ("recent_window", "block_size")),
        ({"num_compressed_blocks": 600, "kv_dtype": "int8"}, ("kv_dtype", "num_compressed_blocks")),
        ({"num_compressed_blocks": 600, "max_num_batched_tokens": 40}, ("max_num_batched_tokens", "max_num_seqs")),
        ({"num_compressed_blocks": 10}, ("num_compressed_blocks", "max_model_len")),
        ({"num_host_blocks": 2}, ("prefetch_lookahead", "num_host_blocks")),
        ({"num_blocks": None, "num_host_blocks": 64}, ("num_host_blocks", "num_blocks")),
        ({"num_blocks": None, "compaction_seconds": 0.001}, ("compaction_seconds", "num_blocks")),
        ({"num_blocks": None, "reservation": "max_model_len"}, ("reservation", "num_blocks")),
        ({"reservation": "max_model_len"}, ("reservation", "prefix_caching")),
        ({"prefetch_min_confidence": 1.5}, ("prefetch_min_confidence",)),
        ({"spread_limit": 0.5}, ("spread_limit",)),
        ({"compaction_seconds": -1.0}, ("compaction_seconds",)),
        ({"max_wait_seconds": 0.0}, ("max_wait_seconds",)),
        ({"spread_limit": math.nan}, ("spread_limit",)),
        ({"compaction_seconds": math.nan}, ("compaction_seconds",)),
        ({"compaction_seconds": math.inf}, ("compaction_seconds",)),
        ({"max_wait_seconds": math.nan}, ("max_wait_seconds",)),
        ({"recent_window": -5}, ("recent_window",)),
    ],
)
def test_settings_that_contradict_each_other_are_refused_with_the_pair_named(settings, named):
    with pytest.raises(ConfigError) as refused:
        EngineConfig(**settings)
    assert all(name in str(refused.value) for name in named)


@pytest.mark.parametrize(
    "settings",
    [
        {"utilization_low": 0.9},
        {"p99_low_seconds": 0.7},
        {"error_rate_low": 0.0},
        {"window_seconds": 0.5},
        {"shrink_factor": 1.0},
        {"shrink_factor": 1e-320},
        {"interval_seconds": math.nan},
        {"p99_high_seconds": math.nan},
        {"patience": 0},
    ],
)
def test_controller_bounds_out_of_order_are_refused(settings):
    (name,) = settings
    with pytest.raises(ConfigError, match=name):
        ControllerConfig(**settings)
