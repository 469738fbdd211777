"""Every mechanism at once on random loads: whatever is moved where, each request gets exactly its own tokens, once, and nothing leaks."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from observability.catalog import CLASSES
from observability.engine.types import ControllerConfig
from tests.engine.support import (
    VOCABULARY,
    Exposition,
    TimedExecutor,
    assert_idle_and_whole,
    generate,
    make_engine,
    make_request,
)


def load(seed: int) -> list[tuple]:
    """Crowded random operations: bursts of requests that share prefixes of a few conversations, steps, now and then an abort."""
    dice = random.Random(seed)
    talks = [[dice.randrange(2) for _ in range(47)] for _ in range(4)]
    busy = dice.choice((0.2, 0.5, 0.8))
    operations: list[tuple] = []
    for _ in range(120):
        draw = dice.random()
        if draw < busy:
            shared = dice.choice(talks)[: dice.randrange(1, 48)]
            prompt = [*shared, *(dice.randrange(2) for _ in range(dice.randrange(48 - len(shared))))]
            patience = dice.uniform(0.05, 2.0) if dice.random() < 0.1 else None
            operations.append(("add", prompt, dice.randrange(1, 25), dice.choice(CLASSES), patience))
        elif draw < 0.95:
            operations.append(("step", dice.randrange(1, 7)))
        else:
            operations.append(("abort", dice.randrange(60), dice.choice(("abort", "stop"))))
    return operations


compressed = st.fixed_dictionaries(
    {
        "num_compressed_blocks": st.integers(16, 24),
        "compressed_from": st.sampled_from([16, 24]),
        "recent_window": st.sampled_from([4, 8]),
        "contiguous_below": st.sampled_from([0, 12]),
        "max_num_batched_tokens": st.integers(12, 40),
        "num_blocks": st.integers(8, 24),
    }
)
exact = st.fixed_dictionaries(
    {
        "contiguous_below": st.sampled_from([0, 30, 1000]),
        "max_num_batched_tokens": st.integers(1, 40),
        "num_blocks": st.integers(16, 40),
    }
)
others = st.fixed_dictionaries(
    {
        "max_num_seqs": st.integers(2, 8),
        "max_queued": st.just(1000),
        "prefix_caching": st.booleans(),
        "max_model_len": st.just(64),
        "num_host_blocks": st.sampled_from([0, 4, 16, 60]),
        "swapping": st.booleans(),
        "prefetch_lookahead": st.integers(0, 3),
        "prefetch_warmup_ratio": st.sampled_from([0.0, 0.2, 1.0]),
        "compaction_seconds": st.sampled_from([0.0, 0.001, 0.01]),
        "spread_limit": st.sampled_from([0.0, 1.0, 4.0]),
        "class_queues": st.booleans(),
        "max_wait_seconds": st.sampled_from([0.05, 30.0]),
        "predictive_admission": st.booleans(),
        "controller": st.none()
        | st.just(ControllerConfig(interval_seconds=0.02, window_seconds=0.2, min_requests=2, min_batched_tokens=1)),
    }
)
engines = (
    st.tuples(exact | compressed, others)
    .map(lambda parts: {**parts[0], **parts[1]})
    .map(lambda config: config | {"prefetch_lookahead": min(config["prefetch_lookahead"], config["num_host_blocks"])})
)


@settings(max_examples=60, deadline=None)
@given(engines, st.integers(0, 2**32).map(load), st.sets(st.integers(0, VOCABULARY - 1), max_size=1))
def test_every_request_gets_its_own_tokens_whatever_is_moved(config, operations, stop):
    engine = make_engine(**config)
    heard: dict[str, list[tuple[int | None, str | None]]] = {}
    requests = []
    for operation, *arguments in operations:
        if operation == "add":
            prompt, max_tokens, request_class, patience = arguments
            now = engine.executor.clock.now()
            request = make_request(prompt, max_tokens, request_class=request_class, arrival=now, stop=frozenset(stop))
            request.deadline = None if patience is None else now + patience
            request.on_token = lambda r, token, reason: heard.setdefault(r.request_id, []).append((token, reason))
            engine.add(request)
            requests.append(request)
        elif operation == "step":
            for _ in range(arguments[0]):
                engine.step()
                engine.check_integrity()
        elif requests:
            engine.abort(requests[arguments[0] % len(requests)], arguments[1])
    while engine.step():
        engine.check_integrity()
    assert_idle_and_whole(engine)

    for request in requests:
        reference = generate(request.prompt, request.limit, frozenset(stop))
        events = heard[request.request_id]
        assert [reason for _, reason in events if reason] == [request.outcome], "each request ends once"
        delivered = [token for token, _ in events if token is not None]
        assert delivered == request.output == reference[: len(delivered)]
        if request.outcome in ("stop", "length") and events[-1][0] is not None:
            assert delivered == reference
        if request.outcome == "deadline":
            assert request.deadline is not None
    shown = Exposition(engine)
    if config["num_host_blocks"]:
        assert engine.kv.host.pool.num_active == 0, "no host slot stays pinned"
        issued, useful, late, wasted = (
            shown.value("kvscope_kv_prefetch_blocks", outcome=outcome) if config["prefetch_lookahead"] else 0
            for outcome in ("issued", "useful", "late", "wasted")
        )
        assert issued == useful + late + wasted + engine.kv.host.prefetched.sum()


@pytest.mark.parametrize(
    ("options", "there"),
    [
        ({"num_blocks": None}, set()),
        ({}, {"preempted"}),
        ({"num_host_blocks": 32}, {"preempted", "swapped", "host"}),
        ({"num_host_blocks": 32, "swapping": False}, {"preempted", "host"}),
        (
            {"num_compressed_blocks": 32, "contiguous_below": 16, "compressed_from": 64, "recent_window": 16},
            {"preempted", "compressed"},
        ),
    ],
)
def test_what_settings_allow_counts_from_0_before_it_happens_and_the_rest_is_absent(
    options: dict[str, object], there: set[str]
) -> None:
    engine = make_engine(TimedExecutor(), **options)
    shown = {f.family.name: {row.labels[1:] for row in f.rows if row.value == 0.0} for f in engine.telemetry.snapshot()}
    states = {labels[0] for labels in shown["kvscope_request_phase_seconds"]}
    tiers = {labels[1] for labels in shown["kvscope_kv_hit_tokens"]}
    layouts = {labels[0] for labels in shown["kvscope_kv_allocated_blocks"]}
    assert states == {"queued", "kv_wait", "prefill", "decode"} | there & {"preempted", "swapped"}
    assert tiers == {"device"} | there & {"host"}
    assert layouts == {"contiguous", "paged"} | there & {"compressed"}
