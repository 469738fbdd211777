"""Sampling: the right distribution, nothing banned, and reproducible by seed whatever else is in the batch."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from torch import Tensor

from observability.engine.executor.sampling import sample
from observability.engine.types import Request, SamplingParams
from observability.errors import ModelError


def request(name: str = "r", generated: int = 0, **params: object) -> Request:
    made = Request(name, [1], SamplingParams(**params))  # type: ignore[arg-type]
    made.num_generated = generated
    return made


def draws(logits: Tensor, count: int, **params: object) -> Counter[int]:
    rows = logits.expand(count, -1)
    return Counter(sample(rows, [request(seed=i, **params) for i in range(count)], 0))


LOGITS = torch.tensor([2.0, 1.0, 0.5, -1.0, 0.0, -30.0])


@pytest.mark.parametrize(
    ("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (2.0, 1.0), (1.0, 0.8), (0.7, 0.5), (1.3, 0.95)]
)
def test_frequencies_follow_the_distribution(temperature: float, top_p: float) -> None:
    count = 4000
    p = np.exp(LOGITS.double().numpy() / temperature)
    p /= p.sum()
    order = np.argsort(-p)
    keep = order[: int(np.searchsorted(np.cumsum(p[order]), top_p - 1e-12)) + 1]  # smallest set with at least top_p
    wanted = np.zeros(len(p))
    wanted[keep] = p[keep] / p[keep].sum()
    found = draws(LOGITS, count, temperature=temperature, top_p=top_p)
    assert set(found) <= set(keep.tolist())
    for token, share in enumerate(wanted):
        assert found[token] / count == pytest.approx(share, abs=4.5 * (share * (1 - share) / count) ** 0.5 + 1e-9)


def test_greedy_takes_the_largest_and_the_first_of_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [5.0, 1.0, 2.0]])
    assert sample(logits, [request(), request()], 0) == [1, 0]


def test_an_extreme_temperature_or_top_p_is_greedy() -> None:
    assert set(draws(LOGITS, 50, temperature=1e-9)) == {0}
    assert set(draws(LOGITS, 50, temperature=2.0, top_p=1e-9)) == {0}


@torch.inference_mode()
def test_a_seeded_request_draws_the_same_whatever_else_is_in_the_batch() -> None:
    logits = torch.randn(200, 5000, generator=torch.Generator().manual_seed(0))
    for top_p in (1.0, 0.9):
        alone = sample(logits[7:8], [request("mine", 5, temperature=1.0, seed=11, top_p=top_p)], 0)
        for place, others in ((0, 3), (2, 40), (150, 160)):
            rows = logits[torch.randint(0, 200, (others,))]
            requests = [
                request(f"o{i}", i, temperature=0.9 * (i % 2), top_p=0.5 + 0.1 * (i % 6)) for i in range(others)
            ]
            rows = torch.cat([rows[:place], logits[7:8], rows[place:]])
            requests.insert(place, request("another name", 5, temperature=1.0, seed=11, top_p=top_p))
            assert sample(rows, requests, place)[min(place, others)] == alone[0]


def test_other_seeds_and_other_places_draw_otherwise() -> None:
    flat = torch.zeros(1, 100_000)
    by_seed = {sample(flat, [request(temperature=1.0, seed=s)], 0)[0] for s in range(50)}
    by_place = {sample(flat, [request(generated=n, temperature=1.0, seed=3)], 0)[0] for n in range(50)}
    unseeded = {sample(flat, [request(f"r{n}", temperature=1.0)], 0)[0] for n in range(50)}
    by_engine = {sample(flat, [request(temperature=1.0)], n)[0] for n in range(50)}
    assert min(map(len, (by_seed, by_place, unseeded, by_engine))) >= 49


def test_no_token_is_banned() -> None:
    """Each id, special ones included, is drawn as often as its probability says."""
    found = draws(torch.zeros(20), 4000, temperature=1.0)
    assert set(found) == set(range(20))
    assert sum((found[i] - 200) ** 2 / 200 for i in range(20)) < 43.8  # chi-squared, 19 degrees of freedom, 0.1 %


def test_a_wide_nucleus_goes_past_the_first_candidates() -> None:
    logits = torch.zeros(3000) + torch.arange(3000) * -1e-6
    found = draws(logits, 600, temperature=1.0, top_p=0.9)
    assert max(found) < 2701
    assert max(found) > 2000


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_are_an_error(bad: float) -> None:
    logits = torch.zeros(2, 4)
    logits[1, 2] = bad
    with pytest.raises(ModelError, match="not finite for request second"):
        sample(logits, [request("first"), request("second")], 0)
