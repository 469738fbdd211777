"""The order of waiting requests and the split of prefill batches, against their promises and against plain recomputation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from observability.catalog import CLASSES
from observability.engine.batching import WaitingQueues, split_prefill
from observability.engine.types import Request
from tests.engine.support import make_request

MAX_WAIT = 10.0


def waiting(request_class: str, arrival: float) -> Request:
    return make_request([1], request_class=request_class, arrival=arrival)


def admit_all(queues: WaitingQueues, now: float) -> list[Request]:
    admitted = []
    while (head := queues.head(now)) is not None:
        assert queues.remove(head)
        admitted.append(head)
    return admitted


def test_interactive_overtakes_standard_and_both_overtake_long_context():
    queues = WaitingQueues(MAX_WAIT)
    requests = [
        waiting(name, at)
        for at, name in enumerate(
            ("long_context", "standard", "interactive", "standard", "interactive", "long_context")
        )
    ]
    for request in requests:
        queues.add(request)
    expected = [requests[i] for i in (2, 4, 1, 3, 0, 5)]
    assert list(queues) == expected
    assert admit_all(queues, now=6.0) == expected
    assert len(queues) == 0


def test_without_class_queues_requests_go_first_come_first_served():
    told: list[Request] = []
    queues = WaitingQueues(MAX_WAIT, class_queues=False, on_overdue=told.append)
    requests = [waiting(name, at) for at, name in enumerate((*CLASSES, *CLASSES[::-1]))]
    for request in requests:
        queues.add(request)
    assert list(queues) == requests
    assert admit_all(queues, now=100.0) == requests
    assert told == [], "nobody can be overtaken, so nobody is promoted"


def test_an_overdue_request_goes_before_all_that_are_not_and_is_reported_once():
    told: list[Request] = []
    queues = WaitingQueues(MAX_WAIT, on_overdue=told.append)
    old_long, old_standard = waiting("long_context", 0.0), waiting("standard", 1.0)
    fresh = waiting("interactive", 9.0)
    for request in (old_long, old_standard, fresh):
        queues.add(request)
    assert queues.head(9.9) is fresh
    assert told == []
    assert queues.head(10.0) is old_long
    assert queues.head(10.5) is old_long
    assert told == [old_long]
    assert queues.head(11.0) is old_long
    assert told == [old_long, old_standard]
    assert list(queues) == [old_long, old_standard, fresh]
    assert queues.remove(old_long)
    assert not queues.remove(old_long)
    assert admit_all(queues, now=11.0) == [old_standard, fresh]
    assert told == [old_long, old_standard]


ARRIVALS = st.lists(
    st.tuples(st.floats(0, 8), st.sampled_from(CLASSES), st.booleans()), max_size=40
)  # gap, class, whether the client gives up


@settings(max_examples=150, deadline=None)
@given(arrivals=ARRIVALS, served=st.lists(st.integers(1, 3), min_size=1, max_size=10), step=st.floats(0.1, 12))
def test_nobody_waits_longer_than_the_bound_and_the_admissions_of_those_before(arrivals, served, step):
    """A server that admits 1..3 requests at each step, against a plain sort by the rule at every admission."""
    requests, clock = [], 0.0
    for gap, name, leaves in arrivals:
        clock += gap
        requests.append((waiting(name, clock), leaves))
    overdue_told: list[Request] = []
    queues = WaitingQueues(MAX_WAIT, on_overdue=overdue_told.append)
    arrived: list[Request] = []
    admitted: list[tuple[Request, float]] = []
    gone: set[Request] = set()
    now, turn = 0.0, 0
    while requests or len(queues):
        while requests and requests[0][0].arrival <= now:
            request, leaves = requests.pop(0)
            queues.add(request)
            arrived.append(request)
            if leaves:
                queues.remove(request)
                gone.add(request)
        for _ in range(served[turn % len(served)]):
            left = [r for r in arrived if r not in gone]
            overdue = [r for r in left if now - r.arrival >= MAX_WAIT]
            expected = min(
                overdue or left,
                key=lambda r: (r.arrival if overdue else 0.0, CLASSES.index(r.request_class), r.arrival),
                default=None,
            )
            head = queues.head(now)
            assert (head is None) == (expected is None)
            if head is None or expected is None:
                break
            assert (head.arrival, head.request_class) == (expected.arrival, expected.request_class)
            assert len(queues) == len(list(queues)) == len(left)
            assert set(queues) == set(left)
            queues.remove(head)
            gone.add(head)
            admitted.append((head, now))
        now, turn = now + step, turn + 1
    order = [request for request, _ in admitted]
    for place, (request, _) in enumerate(admitted):
        passed = sum(when >= request.arrival + MAX_WAIT for _, when in admitted[:place])
        before = sum(r.arrival <= request.arrival for r in arrived if r is not request)
        assert passed <= before, "once overdue, only requests that arrived before may pass"
    assert len(set(overdue_told)) == len(overdue_told)
    late = {r for r, when in admitted if when - r.arrival >= MAX_WAIT}
    assert late == set(overdue_told) & set(order)


def spread_of(lengths: list[int]) -> float:
    return float(np.quantile(lengths, 0.75) / np.quantile(lengths, 0.25))


LENGTHS = st.lists(st.one_of(st.integers(1, 60), st.integers(1, 100_000)), min_size=1, max_size=32)


@settings(max_examples=300, deadline=None)
@given(lengths=LENGTHS, limit=st.sampled_from([0.0, 1.0, 2.0, 4.0, 10.0]))
def test_a_split_runs_short_requests_whose_own_spread_is_within_the_limit(lengths, limit):
    chosen, spread = split_prefill(lengths, limit, [0] * len(lengths), 8)
    assert spread == pytest.approx(spread_of(lengths))
    if limit == 0 or spread <= limit:
        assert chosen == list(range(len(lengths)))
        return
    assert 0 < len(chosen) < len(lengths)
    assert chosen == sorted(chosen), "in order of admission"
    taken = [lengths[i] for i in chosen]
    ascending = sorted(lengths)
    assert sorted(taken) == ascending[: len(chosen)]
    assert spread_of(taken) <= limit * (1 + 1e-9)
    for more in range(len(chosen) + 1, len(lengths)):
        quartile = np.quantile(ascending[:more], 0.25)
        assert ascending[more - 1] > limit * quartile * (1 - 1e-9), "a longer request would have been in line with them"


def test_the_long_ones_run_when_one_of_them_was_passed_over_too_often():
    lengths = [100, 20_000, 120, 9_000, 90, 24_000, 110]
    assert split_prefill(lengths, 4.0, [0, 7, 0, 3, 0, 7, 0], 8).chosen == [0, 2, 4, 6]
    assert split_prefill(lengths, 4.0, [0, 0, 0, 0, 0, 8, 0], 8).chosen == [5, 1, 3]
    assert split_prefill(lengths, 4.0, [0, 8, 0, 9, 0, 4, 0], 8).chosen == [3, 1, 5], "the longest without a turn first"
    assert split_prefill(lengths, 4.0, [8, 8, 0, 0, 0, 0, 0], 8).chosen == [0, 1, 3, 5], "all that waited too long"
    assert split_prefill(lengths, 4.0, [0, 0, 0, 0, 8, 0, 0], 8).chosen == [4, 0, 2, 6], (
        "a short one leads the short ones"
    )


def test_an_empty_batch_and_a_single_request_have_nothing_to_split():
    assert split_prefill([], 4.0, [], 8) == ([], 1.0)
    assert split_prefill([70_000], 4.0, [0], 8) == ([0], 1.0)


@settings(max_examples=100, deadline=None)
@given(lengths=LENGTHS, limit=st.sampled_from([1.0, 2.0, 4.0]), max_passed_over=st.integers(1, 8))
def test_every_request_has_a_turn_in_so_many_steps(lengths, limit, max_passed_over):
    """Lengths stay as they are, which is the worst case for a long request."""
    without = [0] * len(lengths)
    for _ in range(4 * (max_passed_over + 1)):
        chosen = split_prefill(lengths, limit, without, max_passed_over).chosen
        assert len(set(chosen)) == len(chosen) > 0
        without = [0 if i in chosen else steps + 1 for i, steps in enumerate(without)]
        assert max(without) <= max_passed_over


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.one_of(st.integers(1, 60), st.integers(1, 3000)), min_size=1, max_size=12),
    budget=st.integers(64, 4096),
    max_passed_over=st.integers(1, 8),
)
def test_prefill_ends_for_everybody_while_short_prompts_keep_coming(prompts, budget, max_passed_over):
    """Each step gives `budget` tokens in the order chosen and one more short prompt arrives."""
    left, without = list(prompts), [0] * len(prompts)
    # Each chunk of a long request waits for its turn among all, at worst.
    bound = (sum(-(-tokens // budget) for tokens in prompts) + 1) * (max_passed_over + len(prompts) + 1)
    for _ in range(bound):
        left.append(5)
        without.append(0)
        live = [i for i, tokens in enumerate(left) if tokens]
        chosen = split_prefill([left[i] for i in live], 4.0, [without[i] for i in live], max_passed_over).chosen
        room = budget
        for i in live:
            without[i] += 1
        for i in (live[k] for k in chosen):
            tokens = min(left[i], room)
            if tokens:
                left[i] -= tokens
                room -= tokens
                without[i] = 0
        if not any(left[: len(prompts)]):
            return
    raise AssertionError(f"{left[: len(prompts)]} tokens are left after {bound} steps")
