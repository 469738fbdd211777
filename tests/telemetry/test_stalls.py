"""Stalls of the step loop: counted once, without idle time, and their gaps tell a clock from chance."""

from __future__ import annotations

import numpy as np
import pytest

from alerts import symptoms
from observability import catalog as c
from observability.telemetry import phases as p
from observability.telemetry.recorder import Telemetry
from tests.telemetry.bench import value

DECODE = c.STEP_KINDS.index("decode")
PREFILL = c.STEP_KINDS.index("prefill")


class Loop:
    """A step loop on a clock of our own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.t = Telemetry("m", executor="test", virtual=False, device="cpu", kv_dtype="auto", clock=lambda: self.now)

    def step(self, seconds: float, kind: int = DECODE, before: float = 0.0) -> None:
        """`before` passes in the loop and not in the step."""
        self.now += before
        began = self.t.lap(p.SCHEDULE)
        self.now += seconds
        self.t.lap(p.EMIT)
        self.t.step(kind, 0, 1, self.now - began)

    def idle(self, seconds: float) -> None:
        self.now += seconds
        self.t.lap(p.IDLE)

    def run(self, until: float, seconds: float = 0.01) -> None:
        while self.now < until:
            self.step(seconds)

    def told(self, family: c.Family) -> float:
        return value(self.t, family.series)

    def variation(self) -> float:
        """As the alert works it out."""
        count, total, squares = map(self.told, (c.STALL_GAPS, c.STALL_GAP_SECONDS, c.STALL_GAP_SQUARES))
        return float(np.sqrt(max(squares * count / total**2 - 1, 0)))


@pytest.fixture
def loop() -> Loop:
    loop = Loop()
    loop.run(2.0)
    return loop


def test_a_stall_counts_whether_it_lies_in_a_step_or_between_two(loop: Loop) -> None:
    loop.step(0.3)
    loop.run(5.0)
    loop.step(0.01, before=0.4)
    loop.run(6.0)
    assert loop.told(c.STALLS) == 2
    assert loop.told(c.STALL_SECONDS) == pytest.approx(0.3 + 0.41)


def test_idle_time_is_no_stall(loop: Loop) -> None:
    for _ in range(5):
        loop.idle(60.0)
        loop.run(loop.now + 1.0)
    assert loop.told(c.STALLS) == 0


def test_slow_steps_in_a_row_are_one_stall(loop: Loop) -> None:
    for _ in range(6):
        loop.step(0.2)
    loop.run(5.0)
    assert (loop.told(c.STALLS), loop.told(c.STALL_SECONDS)) == (1, pytest.approx(1.2))


def test_usual_is_what_a_step_of_its_kind_takes(loop: Loop) -> None:
    """Prefills of 0.3 s among decodes of 10 ms are how this engine works; so are steps that have been slower for a while."""
    for _ in range(40):
        loop.step(0.3, PREFILL)
        loop.run(loop.now + 0.1)
    assert loop.told(c.STALLS) == 0
    loop.run(loop.now + 30.0, seconds=0.2)
    assert loop.told(c.STALLS) == 1
    before = loop.told(c.STALL_SECONDS)
    loop.run(loop.now + 30.0, seconds=0.2)
    assert loop.told(c.STALL_SECONDS) == before


def test_a_step_that_is_short_for_anybody_is_no_stall(loop: Loop) -> None:
    loop.run(4.0, seconds=0.001)
    loop.step(0.049)
    loop.run(5.0, seconds=0.001)
    assert loop.told(c.STALLS) == 0


def test_a_run_of_steps_in_virtual_time_counts_what_went_before_it(loop: Loop) -> None:
    loop.now += 0.5
    loop.t.lap(p.SCHEDULE)
    loop.now += 0.2
    loop.t.lap(p.EMIT)
    loop.t.step(DECODE, 0, 1, np.full(20, 0.01))
    assert (loop.told(c.STALLS), loop.told(c.STALL_SECONDS)) == (1, pytest.approx(0.51))


def _stalls(loop: Loop, starts: np.ndarray, lengths: np.ndarray) -> None:
    for start, length in zip(starts, lengths, strict=True):
        loop.run(start)
        loop.step(length)
        loop.step(0.01)


@pytest.mark.parametrize("seed", range(20))
def test_a_job_with_jitter_is_periodic_although_hiccups_come_between(loop: Loop, seed: int) -> None:
    rng = np.random.default_rng(seed)
    job = 10.0 * np.arange(1, 16) + rng.normal(0, 0.8, 15)
    hiccups = rng.uniform(12, 150, 20)
    starts = np.concatenate((job, hiccups))
    lengths = np.concatenate((rng.uniform(0.4, 0.5, 15), rng.uniform(0.06, 0.15, 20)))
    order = np.argsort(starts)
    _stalls(loop, starts[order], lengths[order])
    assert loop.told(c.STALL_GAPS) >= symptoms.PERIODIC_GAPS
    assert loop.variation() < symptoms.PERIODIC
    mean = loop.told(c.STALL_GAP_SECONDS) / loop.told(c.STALL_GAPS)
    assert mean == pytest.approx(10.0, rel=0.15)


@pytest.mark.parametrize("seed", range(20))
def test_stalls_by_chance_are_not_periodic(loop: Loop, seed: int) -> None:
    rng = np.random.default_rng(seed)
    starts = 5 + np.cumsum(rng.exponential(10.0, 16) + 0.5)
    _stalls(loop, starts, np.full(16, 0.4))
    assert loop.told(c.STALLS) == 16
    assert loop.variation() > symptoms.PERIODIC


def test_sums_of_gaps_are_those_of_the_stalls(loop: Loop) -> None:
    rng = np.random.default_rng(3)
    starts = 5 + np.cumsum(rng.uniform(2.0, 9.0, 12))
    began = []
    for start in starts:
        loop.run(start)
        began.append(loop.now)
        loop.step(0.4)
        loop.step(0.01)
    gaps = np.diff(began)
    # The last gap waits for its neighbour; of the others count those up to three times as long as either neighbour.
    before, after = np.insert(gaps[:-2], 0, np.inf), gaps[1:]
    counted = gaps[:-1][gaps[:-1] <= 3 * np.minimum(before, after)]
    assert 8 <= len(counted) <= 10
    assert loop.told(c.STALL_GAPS) == len(counted)
    assert loop.told(c.STALL_GAP_SECONDS) == pytest.approx(counted.sum())
    assert loop.told(c.STALL_GAP_SQUARES) == pytest.approx((counted**2).sum())
    assert loop.variation() == pytest.approx(counted.std() / counted.mean())


@pytest.mark.parametrize("silence", [30.0, 300.0])
def test_the_silence_before_a_job_and_while_it_rests_is_no_gap_of_it(loop: Loop, silence: float) -> None:
    first = 5 + silence + 3.0 * np.arange(7)
    second = first[-1] + silence + 3.0 * np.arange(7)
    _stalls(loop, np.concatenate(([5.0], first, second)), np.full(15, 0.4))
    assert loop.told(c.STALL_GAPS) == 6 + 6 - 1  # the last of them is not confirmed yet
    assert loop.told(c.STALL_GAP_SECONDS) == pytest.approx(3.0 * 11, abs=0.2)
    assert loop.variation() < 0.05
