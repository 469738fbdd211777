"""What a quantile read from the buckets is worth, and bucket plans of an operator (cases QB)."""

from __future__ import annotations

import ast
import itertools
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from exporters.text import render
from observability import catalog as c
from observability.buckets import MOST, NEEDED, BucketPlan, bucket_plan
from observability.errors import ConfigError
from observability.objectives import LATENCY_OBJECTIVES
from observability.store.evaluate import Evaluator, bucket_quantile
from tests.conftest import REPO
from tests.telemetry.bench import Bench, total, value

BOUNDS = np.array(c.LATENCY_BOUNDS)
LOWEST, HIGHEST = 0.001, 640.0
QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)


def read(q: float, below: np.ndarray) -> float:
    """What Prometheus reads from buckets of which the part `below` [bounds] of all observations lies at or under each bound."""
    with_infinity = np.append(BOUNDS, math.inf)
    counts = np.append(below, 1.0)[None]
    return float(bucket_quantile(q, with_infinity, counts, np.ones(counts.shape, dtype=bool))[0])


def worst_error(distribution: object, quantiles: tuple[float, ...] = QUANTILES) -> float:
    """Largest relative error over the quantiles that lie between 1 ms and 640 s. The truth is the distribution's own."""
    worst = 0.0
    for q in quantiles:
        truth = float(distribution.ppf(q))  # type: ignore[attr-defined]
        if LOWEST <= truth <= HIGHEST:
            worst = max(worst, abs(read(q, distribution.cdf(BOUNDS)) / truth - 1.0))  # type: ignore[attr-defined]
    return worst


class Mixture:
    """Of scipy distributions, as a service with two kinds of requests has."""

    def __init__(self, parts: list[tuple[float, object]]) -> None:
        self.parts = parts

        self._grid = np.exp(np.linspace(np.log(1e-4), np.log(1e4), 40_001))  # steps of 0.05 %
        self._below = self.cdf(self._grid)

    def cdf(self, x: np.ndarray | float) -> np.ndarray:
        return sum(weight * part.cdf(x) for weight, part in self.parts)  # type: ignore[attr-defined, return-value]

    def ppf(self, q: float) -> float:
        return float(np.interp(q, self._below, self._grid))


def single(family: str, scale: float, shape: float) -> object:
    """A distribution with a coefficient of variation of 0.3 or more; `shape` in [0, 1] goes from the narrowest to the widest."""
    match family:
        case "lognormal":
            return stats.lognorm(0.3 + 1.7 * shape, scale=scale)
        case "gamma":
            return stats.gamma(11.0 - 10.6 * shape, scale=scale / 5)
        case "weibull":
            return stats.weibull_min(3.7 - 3.1 * shape, scale=scale)
        case "pareto":
            return stats.pareto(4.4 - 3.2 * shape, scale=scale)
        case "lomax":
            return stats.lomax(6.0 - 4.8 * shape, scale=scale)
    raise ValueError(family)


FAMILIES = ("lognormal", "gamma", "weibull", "pareto", "lomax")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_quantile_of_random_latencies_is_within_5_percent_between_1_ms_and_640_s(family: str) -> None:
    """Coefficient of variation of 0.3 or more, medians from about 2 ms to 100 s, quantiles 0.5 to 0.999."""
    dice = np.random.default_rng(3)
    checked = 0
    for _ in range(400):
        distribution = single(family, float(np.exp(dice.uniform(np.log(0.002), np.log(100)))), float(dice.random()))
        error = worst_error(distribution)
        assert error <= 0.05
        checked += error > 0.0
    assert checked > 390


def test_two_kinds_of_requests_together_are_read_within_5_percent_too() -> None:
    """Random mixtures, the second kind up to 150 times slower, of any share between 5 % and 95 %."""
    dice, checked = np.random.default_rng(4), 0
    for _ in range(200):
        scale, apart, weight = (float(np.exp(dice.uniform(a, b))) for a, b in ((-5, 2), (0, 5), (-3, -0.05)))
        kinds = [single(str(dice.choice(FAMILIES[:3])), size, float(dice.random())) for size in (scale, scale * apart)]
        error = worst_error(Mixture([(weight, kinds[0]), (1.0 - weight, kinds[1])]))
        assert error <= 0.05
        checked += error > 0.0
    assert checked > 190


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, len(c.LATENCY_BOUNDS) - 1),
    st.lists(st.floats(1.0, 4.3), min_size=1, max_size=12),
    st.floats(0.001, 1.0),
)
def test_the_error_is_below_5_percent_wherever_density_changes_less_than_4_3_times_in_a_bucket(
    bucket: int, densities: list[float], rank: float
) -> None:
    """Any density inside one bucket, as steps. (Analytically: with a ratio r of the highest to the lowest density the most is
    (sqrt(r) - 1) / (sqrt(r) + 1) of the bucket's width, and a width is at most 1/7 of the bucket's lower bound.)"""
    low, high = BOUNDS[bucket - 1], BOUNDS[bucket]
    edges = np.linspace(low, high, len(densities) + 1)
    mass = np.concatenate([[0.0], np.cumsum(densities)]) / np.sum(densities)
    truth = float(np.interp(rank, mass, edges))
    below = (np.arange(len(BOUNDS)) >= bucket).astype(float)
    assert abs(read(rank, below) / truth - 1.0) <= 0.05


@pytest.mark.parametrize("width", [0.0, 0.05, 1.0])
def test_an_end_that_no_latency_passes_costs_at_most_the_width_of_a_bucket(width: float) -> None:
    """Uniform latencies up to a timeout: just under it density falls to nothing inside a bucket."""
    errors = [
        worst_error(stats.uniform(end * (1 - width), max(end * width, 1e-12)), (0.5, 0.9, 0.99, 0.999))
        for end in np.exp(np.linspace(np.log(0.002), np.log(600), 500))
    ]
    assert 0.05 < max(errors) <= 1 / 7


def test_equal_latencies_are_read_within_one_seventh_and_no_plan_of_buckets_can_do_much_better() -> None:
    """The adversary of every histogram: all requests take the same time, just above a bound."""
    worst = 0.0
    for low in BOUNDS[:-1]:
        truth = math.nextafter(low, math.inf)
        for q in (0.5, 0.99, 1.0):
            worst = max(worst, abs(read(q, (truth <= BOUNDS).astype(float)) / truth - 1.0))
    assert 0.14 < worst <= 1 / 7 + 1e-9
    assert max(high / low for low, high in itertools.pairwise(c.LATENCY_BOUNDS)) <= 1 + 1 / 7 + 1e-9


@pytest.mark.parametrize("sigma", [0.3, 0.8, 1.5])
def test_quantiles_through_recorder_exposition_and_evaluator_match_the_latencies_themselves(sigma: float) -> None:
    latencies = np.random.default_rng(5).lognormal(-0.5, sigma, 20_000)
    b, evaluator = Bench(), Evaluator()
    evaluator.scrape(1000.0, [(s.name, s.labels) for s in b.t.layout], b.t.values(), nan_is_absent=True)
    for seconds in latencies.tolist():
        b.t.tokens([b.submit(arrival=0.0)], seconds)
    evaluator.scrape(1015.0, [(s.name, s.labels) for s in b.t.layout], b.t.values(), nan_is_absent=True)
    found = evaluator.evaluate(1015.0)
    for name, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        shown = found[f"model:kvscope_time_to_first_token_seconds:{name}_5m"].values[0]
        assert shown == pytest.approx(float(np.quantile(latencies, q)), rel=0.05)


# -- what the buckets cannot show ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seconds", "lowest", "above"), [(0.0005, 1.0, 0.0), (0.3, 0.0, 0.0), (700.0, 0.0, 1.0)])
@pytest.mark.parametrize("buckets", [(), ("latency=0.002,0.5,600",)])
def test_the_share_below_and_above_all_bounds_is_a_signal_whatever_the_bounds(
    seconds: float, lowest: float, above: float, buckets: tuple[str, ...]
) -> None:  # QB1, QB2, QB3
    b, evaluator = Bench(buckets=bucket_plan(buckets)), Evaluator()
    for at in (1000.0, 1015.0):
        evaluator.scrape(at, [(s.name, s.labels) for s in b.t.layout], b.t.values(), nan_is_absent=True)
        for _ in range(4):
            b.t.tokens([b.submit(arrival=0.0)], seconds)
            b.t.tokens([b.submit(arrival=0.0)], 0.6)
    found = evaluator.evaluate(1015.0)
    family = c.TIME_TO_FIRST_TOKEN.name
    assert found[f"model:{family}:first_bucket_ratio_rate5m"].values[0] == pytest.approx(lowest / 2)
    assert found[f"model:{family}:overflow_ratio_rate5m"].values[0] == pytest.approx(above / 2)
    assert found[f"model:{family}:error_ratio_rate5m"].values[0] == pytest.approx(above / 2)


# -- plans of an operator -----------------------------------------------------------------------------------------------


def test_objectives_are_bounds_of_the_default_plan_and_of_any_other() -> None:
    for plan in (BucketPlan(), bucket_plan(["latency=0.5,0.6", "inter_token=5", "tail=3"])):
        for name, needed in NEEDED.items():
            assert needed <= {*getattr(plan, name)}
    assert bucket_plan(["latency=0.5,0.6"]).latency == (0.5, 0.6, 0.8, 20.0)
    assert bucket_plan(["tail=3"]).tail == (0.0, 3.0)
    assert {o.threshold_seconds for o in LATENCY_OBJECTIVES} == set().union(*NEEDED.values()) - {0.0}


OWN = """
from observability.buckets import BucketPlan, bucket_plan
from tests.telemetry.bench import Bench
for plan in (BucketPlan(), bucket_plan(), bucket_plan(["latency=0.5,1.5,3,20"])):
    print(plan.latency)
print(bucket_plan().inter_token)
b = Bench()
b.serve(b.submit(tenant="t"), queue=0.0, prefill=1.4, itl=0.03, tokens=2)
print({(f.family.name, row.labels[-1]) for f in b.t.snapshot() for row in f.rows if row.suffix == "_bucket"})
"""


def test_a_threshold_of_ones_own_becomes_a_bound_of_every_plan(tmp_path: Path) -> None:
    """1.5 s, 33 ms and 7.7 s are no bounds of the catalogue."""
    mine = tmp_path / "mine.toml"
    tables = ('"ttft"\nthreshold_seconds = 1.5', '"itl"\nmodel = "m"\nthreshold_seconds = 0.033', '"e2e"\nclass = "long_context"\nthreshold_seconds = 7.7')  # fmt: skip
    mine.write_text("".join(f"[[objective]]\nname = {table}\n" for table in tables))
    environment = {**os.environ, "KVSCOPE_OBJECTIVES": str(mine), "PYTHONPATH": str(REPO)}
    done = subprocess.run([sys.executable, "-c", OWN], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    default, same, chosen, inter_token, exported = map(ast.literal_eval, done.stdout.splitlines())
    assert default == same == tuple(sorted({*c.LATENCY_BOUNDS, 1.5, 7.7}))
    assert chosen == (0.5, 1.5, 3.0, 7.7, 20.0)
    assert inter_token == tuple(sorted({*c.ITL_BOUNDS, 0.033}))
    wanted = {(c.TIME_TO_FIRST_TOKEN, "1.5"), (c.INTER_TOKEN_LATENCY, "0.033"), (c.REQUEST_DURATION, "7.7"), (c.TENANT_TTFT, "1.5")}  # fmt: skip
    assert {(family.name, le) for family, le in wanted} <= exported


def test_every_bound_of_the_make_up_is_a_bound_of_request_duration() -> None:
    assert {*c.TAIL_BOUNDS} - {0.0} <= {*c.LATENCY_BOUNDS}


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("latency", "is no set of buckets"),
        ("speed=1", "is no set of buckets"),
        ("latency=", "no list of numbers"),
        ("latency=1,two", "no list of numbers"),
        ("latency=1,,2", "no list of numbers"),
        ("latency=2,1", "1 does not lie above 2"),
        ("latency=1,1.0000001", "1 does not lie above 1"),
        ("latency=0,1", "0 is no bound"),
        ("latency=-1", "-1 is no bound"),
        ("latency=nan", "nan is no bound"),
        ("latency=1,inf", "inf is no bound"),
        ("latency=" + ",".join(map(str, range(1, 302))), "301 bounds"),
        ("tail=" + ",".join(map(str, range(1, 66))), "65 bounds"),
    ],
)
def test_bounds_that_make_no_buckets_are_refused_with_the_reason(setting: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as refused:
        bucket_plan([setting])
    assert refused.value.next_step


def test_a_plan_is_refused_when_given_twice_or_without_what_objectives_need() -> None:
    with pytest.raises(ConfigError, match="twice"):
        bucket_plan(["tail=1", "tail=2"])
    with pytest.raises(ConfigError, match=r"lack 0\.8 s"):
        BucketPlan(latency=(0.1, 20.0))


def test_other_buckets_reach_histograms_make_up_and_exposition() -> None:
    b = Bench(buckets=bucket_plan(["latency=0.05,0.4", "inter_token=0.02", "tail=0.3,0.9"]))
    for prefill in (0.01, 0.45, 1.5):
        b.serve(b.submit(), queue=0.0, prefill=prefill, itl=0.03, tokens=2)
    for le, count in (("0.05", 1), ("0.4", 1), ("0.8", 2), ("20.0", 3), ("+Inf", 3)):
        assert total(b.t, "kvscope_request_duration_seconds_bucket", le=le) == count
    assert [total(b.t, "kvscope_inter_token_latency_seconds_bucket", le=le) for le in ("0.02", "0.1")] == [0, 3]
    assert [value(b.t, "kvscope_request_phase_requests_total", gt=gt) for gt in ("0", "0.3", "0.9")] == [3, 2, 1]
    assert len([s for s in b.t.layout if s.name == "kvscope_request_phase_requests_total"]) == 3
    text = render(b.t.snapshot(), openmetrics=False).decode()
    assert 'kvscope_request_duration_seconds_bucket{model="m",class="standard",le="0.05"} 1' in text


def test_the_largest_plan_costs_what_it_says() -> None:
    def series(plan: BucketPlan) -> int:
        return len(Bench(buckets=plan).t.layout)

    small = bucket_plan(["latency=1", "inter_token=1", "tail=1"])
    for name, per_bound in (
        ("latency", 2 * len(c.CLASSES)),
        ("inter_token", len(c.CLASSES)),
        ("tail", len(c.STATES) * len(c.COMPONENTS) + 1 + 2 * len(c.LENGTH_BUCKETS)),
    ):
        more = bucket_plan([*(f"{n}=1" for n in MOST if n != name), f"{name}=1,2,3,4"])
        assert series(more) - series(small) == 3 * per_bound
