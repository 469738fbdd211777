"""What the arrival model expects, against loads whose rates and chances of return are known."""

from __future__ import annotations

import heapq
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from observability.catalog import CLASSES
from observability.engine.arrivals import ArrivalModel

HORIZON = 20.0


@cache
def keys_of(prefix: int, blocks: int) -> np.ndarray:
    """Chain keys of a prompt's first blocks: those of one prefix agree as far as both reach."""
    return np.random.default_rng(prefix).integers(1, 2**63, 64).astype(np.uint64)[:blocks]


# -- prompt tokens -----------------------------------------------------------------------------------------------------


def test_expected_tokens_are_rate_times_mean_length_of_the_class():
    """Poisson arrivals of known rate; the estimate is averaged over many moments, since each carries the noise of a minute."""
    rng = np.random.default_rng(1)
    model, now, estimates = ArrivalModel(HORIZON), 0.0, []
    for i in range(20_000):
        now += rng.exponential(1 / 5)
        name, tokens = ("interactive", rng.integers(50, 150)) if rng.random() < 0.8 else ("standard", 1000)
        model.observe(now, name, int(tokens), None)
        if i > 1000 and i % 20 == 0:
            estimates.append([model.expected_tokens(now, name, 10.0) for name in ("interactive", "standard")])
    mean = np.mean(estimates, axis=0)
    assert mean == pytest.approx([5 * 0.8 * 99.5 * 10, 5 * 0.2 * 1000 * 10], rel=0.05)
    assert model.expected_tokens(now, "long_context", 10.0) == 0.0


def test_nothing_is_expected_before_five_arrivals_nor_extrapolated_from_a_burst():
    model = ArrivalModel(HORIZON)
    for i in range(4):
        model.observe(i * 0.001, "interactive", 100, None)
        assert model.expected_tokens(i * 0.001, "interactive", 10.0) == 0.0
    model.observe(0.004, "interactive", 100, None)
    expected = model.expected_tokens(0.004, "interactive", 10.0)
    assert 0 < expected < 500, "what came in 4 ms is not expected each 4 ms"


def test_what_is_expected_halves_with_each_half_life_of_silence():
    model = ArrivalModel(HORIZON, half_life_seconds=30.0)
    for i in range(1000):
        model.observe(float(i), "standard", 200, None)
    at_once = model.expected_tokens(999.0, "standard", 5.0)
    assert at_once == pytest.approx(1000, rel=0.05)
    assert model.expected_tokens(1029.0, "standard", 5.0) == pytest.approx(at_once / 2)
    assert model.expected_tokens(1089.0, "standard", 5.0) == pytest.approx(at_once / 8)


# -- prefixes that return ----------------------------------------------------------------------------------------------


class KnownLoad:
    """Prefixes that return with chance `chances[uses - 1]` after a gap (lognormal around 15 s), else never. Arrivals of new ones are
    Poisson. `turns`: each use is longer by two blocks, as in a conversation."""

    def __init__(self, chances: list[float], *, turns: bool, seed: int, sigma: float = 0.7) -> None:
        self.chances, self.turns, self.sigma = chances, turns, sigma
        self.rng = np.random.default_rng(seed)
        self.uses: dict[int, tuple[int, float]] = {}  # by the last key of the latest prompt: uses, time

    def chance(self, uses: int) -> float:
        return self.chances[min(uses, len(self.chances)) - 1]

    def share_by(self, gap: np.ndarray) -> np.ndarray:
        """Share of gaps that are over by then: from many draws, not from a formula."""
        return np.searchsorted(self.gaps, gap) / len(self.gaps)

    def run(self, model: ArrivalModel, seconds: float, rate: float) -> float:
        self.gaps = np.sort(15 * np.exp(self.sigma * np.random.default_rng(99).standard_normal(200_000)))
        news = np.cumsum(self.rng.exponential(1 / rate, int(seconds * rate * 1.2)))
        due = [(at, i, 1) for i, at in enumerate(news[news < seconds].tolist())]
        heapq.heapify(due)
        while due and due[0][0] < seconds:
            now, prefix, uses = heapq.heappop(due)
            keys = keys_of(prefix, 2 * uses if self.turns else 5)
            if self.turns and uses > 1:
                self.uses.pop(int(keys[-3]))
            self.uses[int(keys[-1])] = (uses, now)
            model.observe(now, "standard", 16 * len(keys), keys)
            if self.rng.random() < self.chance(uses):
                heapq.heappush(due, (now + 15 * np.exp(self.sigma * self.rng.standard_normal()), prefix, uses + 1))
        return seconds

    def true_confidence(self, end: int, now: float) -> float:
        uses, last = self.uses[end]
        chance, idle = self.chance(uses), now - last
        over, soon = self.share_by(np.array([idle, idle + HORIZON]))
        return chance * (soon - over) / (1 - chance * over)


@pytest.mark.parametrize("turns", [False, True])
def test_confidence_is_the_known_chance_of_return(turns):
    load = KnownLoad([0.6, 0.9, 0.7, 0.3, 0.0], turns=turns, seed=2)
    model = ArrivalModel(HORIZON, memory=8192)
    now = load.run(model, seconds=1000.0, rate=5.0)
    shown = {int(c.keys[-1]): c.confidence for c in model.candidates(now, 0.0, 10_000)}
    watched = [end for end, (_, last) in load.uses.items() if now - last < 60]
    assert len(watched) > 200
    errors = np.array([abs(shown.get(end, 0.0) - load.true_confidence(end, now)) for end in watched])
    assert errors.max() < 0.05


def test_candidates_return_as_often_as_their_confidence_says():
    """Asked in the middle of a load, compared with what then happens."""
    load = KnownLoad([0.4, 0.9, 0.97, 0.97, 0.0], turns=False, seed=5)
    model, asked, told = ArrivalModel(HORIZON), [], []
    seen: dict[int, list[float]] = {}

    class Watched:
        def observe(self, now: float, name: str, tokens: int, keys: np.ndarray) -> None:
            seen.setdefault(int(keys[-1]), []).append(now)
            if len(asked) < now // 20:
                asked.append(now)
                told.append(model.candidates(now, 0.6, 10_000))
            model.observe(now, name, tokens, keys)

    end = load.run(Watched(), seconds=1500.0, rate=3.0)  # type: ignore[arg-type]
    confidences, came = [], []
    for now, found in zip(asked, told, strict=True):
        if 300 < now < end - HORIZON:
            confidences += [c.confidence for c in found]
            came += [any(now <= at < now + HORIZON for at in seen[int(c.keys[-1])]) for c in found]
    assert len(came) > 200
    assert min(confidences) >= 0.6
    assert np.mean(came) == pytest.approx(np.mean(confidences), abs=0.05)


def test_prefixes_of_prompts_that_never_return_are_no_candidates():
    load = KnownLoad([0.0], turns=False, seed=3)
    model = ArrivalModel(HORIZON)
    now = load.run(model, seconds=100.0, rate=10.0)
    assert len(model) > 500
    assert model.candidates(now, 0.0, 10) == []


def test_new_prompts_are_no_candidates_beside_those_in_regular_use():
    """One prefix every 5 s among prompts that are never seen again."""
    model, now = ArrivalModel(HORIZON), 0.0
    for i in range(400):
        now += 1.0
        prefix = 0 if i % 5 == 0 else i
        model.observe(now, "standard", 80, keys_of(prefix, 5))
    (regular,) = model.candidates(now, 0.7, 10)
    assert regular.keys.tolist() == keys_of(0, 5).tolist()
    assert regular.confidence > 0.9
    assert model.candidates(now + 1000.0, 0.7, 10) == [], "it has been away for longer than ever"


def test_a_few_returns_do_not_make_a_rule():
    model = ArrivalModel(HORIZON)
    for now in (0.0, 5.0, 10.0):
        model.observe(now, "standard", 80, keys_of(1, 5))
    assert model.candidates(10.0, 0.7, 10) == []


def test_the_longest_prompt_of_a_conversation_stands_for_all_its_turns():
    model = ArrivalModel(HORIZON)
    for conversation in range(60):
        for turn in range(4):
            model.observe(conversation * 20.0 + turn * 5.0, "standard", 80, keys_of(conversation, 3 + 2 * turn))
    now = 1200.0
    for turn in range(3):
        model.observe(now + turn * 5.0, "standard", 80, keys_of(1000, 3 + 2 * turn))
    (current,) = model.candidates(now + 10.0, 0.7, 10)
    assert current.keys.tolist() == keys_of(1000, 7).tolist()
    assert len(model) == 2 * 61, "of each conversation, the last prompt and the one before it"


def test_of_several_branches_the_common_part_is_the_candidate():
    """Prompts that share 4 blocks and part behind them, after one that ended there."""
    model, stem = ArrivalModel(HORIZON), keys_of(0, 4)
    for i in range(60):
        branch = np.concatenate((stem, keys_of(i, 64)[60:])) if i else stem
        model.observe(i * 5.0, "standard", 100, branch)
    (found,) = model.candidates(295.0, 0.7, 10)
    assert found.keys.tolist() == stem.tolist()


def test_the_likeliest_come_first_and_no_more_than_asked_for():
    load = KnownLoad([0.5, 0.7, 0.9], turns=False, seed=4)
    model = ArrivalModel(HORIZON)
    now = load.run(model, seconds=200.0, rate=5.0)
    everything = [c.confidence for c in model.candidates(now, 0.0, 10_000)]
    assert everything == sorted(everything, reverse=True)
    assert [c.confidence for c in model.candidates(now, 0.0, 7)] == everything[:7]
    assert [c.confidence for c in model.candidates(now, 0.6, 10_000)] == [c for c in everything if c >= 0.6]
    assert model.candidates(now, 0.0, 0) == []


@settings(max_examples=60, deadline=None)
@given(
    arrivals=st.lists(
        st.tuples(st.floats(-0.5, 1e5), st.integers(0, 6), st.integers(0, 64), st.sampled_from(CLASSES)), max_size=60
    ),
    memory=st.integers(1, 8),
)
def test_memory_is_bounded_and_confidences_are_probabilities(arrivals, memory):
    """Whatever arrives, also when two clients' clocks of arrival disagree a little."""
    model, now = ArrivalModel(HORIZON, memory=memory), 0.0
    ends: dict[int, float] = {}  # when last asked for
    for gap, prefix, blocks, name in arrivals:
        now += gap
        keys = keys_of(prefix, blocks)
        model.observe(now, name, 16 * blocks, keys)
        assert len(model) <= memory
        for candidate in model.candidates(now, 0.0, 100):
            assert 0.0 < candidate.confidence < 1.0
        if blocks:
            ends[int(keys[-1])] = now
            assert model._index.get(keys[-1:])[0] >= 0, "what was used last is remembered"
    # The index, the slots and the counts tell one story.
    held = [keys for keys in model._keys if keys is not None]
    assert len(held) == len(model) == int(np.isfinite(model._last).sum()) == memory - len(model._vacant)
    assert sum(map(len, held)) == model._num_keys
    assert {int(keys[-1]) for keys in held} <= set(ends)


def test_long_prompts_push_out_others_rather_than_take_more_memory():
    model = ArrivalModel(HORIZON, memory=8)
    rng = np.random.default_rng(0)
    for i in range(20):
        model.observe(float(i), "long_context", 16 * 1000, rng.integers(1, 2**63, 1000).astype(np.uint64))
        assert model._num_keys <= 8 * 256
    assert len(model) == 2
    model.observe(21.0, "long_context", 16 * 3000, rng.integers(1, 2**63, 3000).astype(np.uint64))
    assert len(model) == 2, "a prompt longer than the memory is not remembered"
