"""What happens for the first time is in the rates of the next scrape: its series had a 0 before, so nothing is born with the first in it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from exporters.vllm.capabilities import families
from observability import catalog as c
from observability.store.evaluate import Evaluator
from observability.telemetry.observed import Observed, Source
from observability.telemetry.recorder import Telemetry
from tests.telemetry.bench import Bench

BY_LENGTH = "model_length_bucket:kvscope_request_length_phase_{}:p99_tail_mean5m"
BY_STATE = "model_state_component:kvscope_request_phase_seconds:p99_tail_mean5m"


def own() -> tuple[Telemetry, Callable[[float, int], None]]:
    """kvscope's engine: a recorder, and what serves a request that takes so long with so long a prompt."""
    b = Bench()
    return b.t, lambda seconds, prompt: b.serve(b.submit(prompt=prompt), queue=0.0, prefill=seconds, tokens=1)


def foreign() -> tuple[Observed, Callable[[float, int], None]]:
    """An engine that hands over finished statistics."""
    source = Source("m", "vllm", "cuda", "auto", "0.32", families(prefix_cache=True, frontend=True))
    seen = Observed(source)
    return seen, lambda seconds, prompt: seen.served(0, seconds, [0.0, 0.0, seconds, 0.0], prompt)


@pytest.mark.parametrize("engine", [own, foreign])
def test_the_first_slow_requests_of_a_length_are_all_of_the_tail(
    engine: Callable[[], tuple[Telemetry | Observed, Callable[[float, int], None]]],
) -> None:
    """Five short requests a scrape, and once, between two scrapes, three of a length that nobody had asked before: 60 s each."""
    recorder, serve = engine()
    evaluator = Evaluator()
    for i in range(40):
        for _ in range(5):
            serve(1.0, 500)
        for _ in range(3 if i == 29 else 0):
            serve(60.0, 100_000)
        evaluator.scrape(15.0 * i, recorder.layout, recorder.values(), nan_is_absent=True)
    found = evaluator.evaluate(15.0 * 39)
    for kind, truth in (("requests", 1.0), ("seconds", 60.0)):
        told = found[BY_LENGTH.format(kind)]
        shares = {labels["length_bucket"]: value for labels, value in zip(told.labels, told.values, strict=True)}
        assert shares == pytest.approx(dict.fromkeys(c.LENGTH_BUCKETS, 0.0) | {"32K-128K": truth})
    states = found[BY_STATE]
    assert sum(value for value in states.values if value == value) == pytest.approx(60.0)
