"""Random loads on small pools: whatever happens, each request gets exactly its own tokens, once, and nothing leaks."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from observability.catalog import CLASSES
from observability.engine.types import PromptSpan
from tests.engine.support import (
    VOCABULARY,
    CheckingExecutor,
    Exposition,
    TimedExecutor,
    assert_idle_and_whole,
    generate,
    make_engine,
    make_request,
)

# Two token ids, so that random prompts share prefixes of all lengths.
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=47)
adds = st.tuples(
    st.just("add"), prompts, st.integers(1, 24), st.sampled_from(["interactive", "standard", "long_context"])
)
steps = st.tuples(st.just("step"), st.integers(1, 6))
aborts = st.tuples(st.just("abort"), st.integers(0, 30), st.sampled_from(["abort", "stop"]))
engines = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(16, 40),
        "max_num_seqs": st.integers(1, 8),
        "max_num_batched_tokens": st.integers(1, 40),
        "contiguous_below": st.sampled_from([0, 30, 1000]),
        "prefix_caching": st.booleans(),
        "max_model_len": st.just(64),
    }
)


@example(  # an equal block is held, its twin stays private, and the indexed one is evicted first
    config={
        "num_blocks": 16,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 13,
        "contiguous_below": 30,
        "prefix_caching": True,
        "max_model_len": 64,
    },
    operations=[
        ("add", [1, 0, 0, 1, 0, 1], 4, "interactive"),
        ("step", 1),
        ("add", [0, 0], 4, "standard"),
        ("add", [0, 0, 0], 19, "standard"),
        ("add", [1, 0, 0, 1, 0, 1], 6, "interactive"),
        ("add", [0] * 10, 4, "interactive"),
        ("step", 1),
        ("step", 4),
    ],
    stop=set(),
)
@settings(max_examples=150, deadline=None)
@given(
    engines, st.lists(st.one_of(adds, steps, aborts), max_size=40), st.sets(st.integers(0, VOCABULARY - 1), max_size=1)
)
def test_every_request_gets_its_own_tokens_once_and_no_block_leaks(config, operations, stop):
    engine = make_engine(**config)
    heard: dict[str, list[tuple[int | None, str | None]]] = {}
    requests = []
    for operation, *arguments in operations:
        if operation == "add":
            prompt, max_tokens, request_class = arguments
            request = make_request(
                prompt,
                max_tokens,
                request_class=request_class,
                arrival=engine.executor.clock.now(),
                stop=frozenset(stop),
            )
            request.on_token = lambda r, token, reason: heard.setdefault(r.request_id, []).append((token, reason))
            engine.add(request)
            requests.append(request)
        elif operation == "step":
            for _ in range(arguments[0]):
                engine.step()
                engine.check_integrity()
        elif requests:
            engine.abort(requests[arguments[0] % len(requests)], arguments[1])
    engine.run_until_idle()
    assert_idle_and_whole(engine)

    for request in requests:
        reference = generate(request.prompt, request.limit, frozenset(stop))
        events = heard[request.request_id]
        assert [reason for _, reason in events if reason] == [request.outcome], "each request ends once"
        assert events[-1][1] == request.outcome
        delivered = [token for token, _ in events if token is not None]
        assert delivered == request.output == reference[: len(delivered)]
        if events[-1][0] is not None:
            assert delivered == reference
            assert request.outcome == ("stop" if delivered[-1] in stop else "length")
    ended = [r.request_id for r in engine.telemetry.finished]
    assert sorted(ended) == sorted(r.request_id for r in requests)
    value = Exposition(engine).value
    assert value("kvscope_generation_tokens") == sum(len(r.output) for r in requests)
    looked_up = [r for r in requests if r.trace.looked_up]
    if config["prefix_caching"]:
        assert value("kvscope_kv_lookups") == len(looked_up) >= len([r for r in requests if r.output])
        assert value("kvscope_kv_queried_tokens") == sum(r.prompt_len for r in looked_up)
        assert value("kvscope_kv_hit_tokens") == sum(r.num_cached for r in requests)
    else:
        assert value("kvscope_kv_lookups") == 0
    assert value("kvscope_preemptions") == sum(r.num_preemptions for r in requests)


@settings(max_examples=80, deadline=None)
@given(engines, st.lists(st.tuples(prompts, st.integers(1, 24)), min_size=1, max_size=12))
def test_a_step_never_exceeds_its_budgets_and_runs_every_decode(config, load):
    engine = make_engine(**config)
    executor: CheckingExecutor = engine.executor
    for prompt, max_tokens in load:
        engine.add(make_request(prompt, max_tokens))
    while True:
        decoding = [r.request_id for r in engine.scheduler.decoding]
        preempted = engine.scheduler.num_waiting
        if not engine.step():
            break
        prefill, decode = executor.plans[-1]
        assert sum(tokens for _, _, tokens in prefill) + len(decode) <= config["max_num_batched_tokens"]
        assert len({name for name, *_ in prefill} | set(decode)) == len(prefill) + len(decode) <= config["max_num_seqs"]
        if engine.scheduler.num_waiting <= preempted:
            assert decode == decoding
    assert_idle_and_whole(engine)


loads = st.lists(
    st.tuples(
        st.floats(0, 3),  # seconds since the previous arrival
        st.integers(1, 80),
        st.lists(st.integers(0, 1), min_size=10, max_size=10),
        st.integers(1, 60),
    ),
    min_size=1,
    max_size=15,
)


@settings(max_examples=50, deadline=None)
@given(engines, loads, st.booleans(), st.sampled_from([None, 0.7]))
def test_fast_forward_gives_what_single_steps_give(config, load, unbounded, tick_seconds):
    # Where a block lies may differ, and with it which sequences stay adjacent: the paged layout must agree in everything.
    def run(fast_forward):
        settings = config | {
            "contiguous_below": 0,
            "max_model_len": 150,
            "num_blocks": None if unbounded else config["num_blocks"] + 22,
        }
        engine = make_engine(TimedExecutor(fast_forward=fast_forward), **settings)
        requests, clock = [], 0.0
        for gap, length, ids, max_tokens in load:
            clock += gap
            requests.append(make_request(PromptSpan(length, tuple(ids), 8), max_tokens, arrival=clock))
        seen = []
        engine.run(
            iter(requests),
            tick_seconds=tick_seconds,
            on_tick=lambda now: (seen.append((now, engine.num_running, engine.num_waiting)), engine.check_integrity()),
        )
        engine.check_integrity()
        if not unbounded:
            assert_idle_and_whole(engine)
        # By position, as the two runs draw different names.
        order = {r.request_id: i for i, r in enumerate(requests)}
        ended = sorted(
            (order[r.request_id], r.arrival, r.scheduled, r.first_token, r.finished, r.generated_tokens, r.preemptions)
            for r in engine.telemetry.finished
        )
        names = (
            "generation_tokens",
            "kv_hit_tokens",
            "kv_recomputed_tokens",
            "kv_allocated_blocks",
            "kv_evicted_blocks",
            "kv_layout_fallbacks",
            "steps",
            "step_tokens",
        )
        value = Exposition(engine).value
        counters = {name: value(f"kvscope_{name}") for name in names}
        return ended, counters, seen, engine.executor.clock.now()

    assert run(True) == run(False)


@pytest.mark.parametrize(
    "more",
    [{}, {"max_wait_seconds": 0.5}, {"max_wait_seconds": 0.5, "max_num_seqs": 3}],
    ids=["preemptions", "overdue requests", "few seats"],
)
def test_in_a_crowded_pool_a_run_of_steps_ends_where_a_waiting_request_can_be_admitted(
    more: dict[str, object],
) -> None:
    small = {"contiguous_below": 0, "num_blocks": 44, "max_model_len": 150} | more
    preempted = 0
    for seed in (14, 29, 37, 50, 118, *range(20)):
        ended = []
        for fast_forward in (True, False):
            rng, clock = random.Random(seed), 0.0
            engine = make_engine(TimedExecutor(fast_forward=fast_forward), **small)
            requests = []
            for _ in range(rng.randint(3, 15)):
                clock += rng.choice([0, 0.05, 0.3, 1.0, 3.0]) * rng.random()
                prompt = PromptSpan(rng.randint(1, 80), tuple(rng.randint(0, 1) for _ in range(10)), 8)
                tokens, name = rng.randint(1, 60), rng.choice(CLASSES)
                deadline = clock + rng.choice([0.1, 0.5, 1, 2, 5]) if rng.random() < 0.2 else None
                requests.append(make_request(prompt, tokens, arrival=clock, request_class=name, deadline=deadline))
            engine.run(iter(requests))
            assert_idle_and_whole(engine)
            order = {request.request_id: i for i, request in enumerate(requests)}
            found = sorted(
                (order[r.request_id], r.scheduled, r.first_token, r.finished, r.outcome, r.preemptions)
                for r in engine.telemetry.finished
            )
            ended.append((found, Exposition(engine).value("kvscope_steps")))
            preempted += sum(r.preemptions for r in engine.telemetry.finished)
        assert ended[0] == ended[1], seed
    assert preempted > 20
