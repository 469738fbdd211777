"""Random event sequences: phases sum to latency, buckets to counts, and the exported tail to the requests themselves."""

from __future__ import annotations

import math
from bisect import bisect_left

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from observability import catalog as c
from observability.telemetry.recorder import RequestRecord, RequestTrace
from tests.telemetry.bench import DECODE, KV_WAIT, PREFILL, Bench, rows_of, total, value

SERVED = ("stop", "length")
#: Durations of laps: from below clock resolution to minutes, and exact zero.
LAPS = st.one_of(st.just(0.0), st.floats(1e-7, 1e-2), st.floats(1e-3, 30.0))


class Load:
    """A small engine's worth of events, driven by hypothesis: up to 8 requests over steps with random laps."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.b = Bench(start=draw(st.sampled_from([0.0, 12_345.678, 5e5])))
        self.live: list[RequestTrace] = []

    def run(self) -> Bench:
        draw, b = self.draw, self.b
        for _ in range(draw(st.integers(1, 25))):
            b.t.begin_step()
            for _ in range(draw(st.integers(0, 2))):
                back = draw(st.floats(0.0, 3.0))
                self.live.append(b.submit(request_class=draw(st.sampled_from(c.CLASSES)), arrival=b.clock.now - back))
            b.spend(draw(st.sampled_from(c.COMPONENTS)), draw(LAPS))
            self._change_states()
            b.spend(draw(st.sampled_from(c.COMPONENTS)), draw(LAPS))
            decoding = [t for t in self.live if t.state == DECODE]
            if decoding and draw(st.booleans()):
                ends = b.clock.now + np.cumsum(draw(st.lists(st.floats(1e-4, 1.0), min_size=1, max_size=40)))
                b.clock.now = float(ends[-1])
                b.t.lap(c.COMPONENTS.index("forward_decode"))
                b.t.tokens_run(decoding, ends)
            elif decoding:
                b.t.tokens(decoding, b.clock.now)
            self._end_some()
        for trace in self.live:
            b.t.finish(trace, draw(st.sampled_from(("stop", "length", "abort"))), b.clock.now)
        return b

    def _change_states(self) -> None:
        for trace in self.live:
            match self.draw(st.integers(0, 4)):
                case 0:
                    self.b.t.transition(trace, KV_WAIT)
                case 1 if trace.state == DECODE:
                    self.b.t.preempted(trace)
                case 2:
                    self.b.t.transition(trace, PREFILL)
                case 3 if trace.scheduled is not None:
                    self.b.t.prefilled(trace)
                    self.b.t.transition(trace, DECODE)

    def _end_some(self) -> None:
        for trace in list(self.live):
            if self.draw(st.integers(0, 5)) == 0:
                self.live.remove(trace)
                self.b.t.finish(trace, self.draw(st.sampled_from(c.OUTCOMES)), self.b.clock.now)


@st.composite
def loads(draw: st.DrawFn) -> Bench:
    return Load(draw).run()


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(loads())
def test_any_sequence_of_events_adds_up(b: Bench) -> None:
    t = b.t
    assert math.isclose(sum(t.seconds), t.last - t.start, abs_tol=1e-9 * max(t.last, 1.0))
    for record in t.finished:
        scale = max(1.0, abs(record.finished))
        assert abs(record.matrix.sum() - (record.finished - record.arrival)) < 1e-9 * scale
        assert record.matrix.min() >= 0.0

    for samples in t.snapshot():
        if samples.family.kind == "histogram":
            check_histogram(rows_of([samples], samples.family.name))
    served = [r for r in t.finished if r.outcome in SERVED]
    unmeasured = sum(b.anomalies().get(reason, 0) for reason in ("missing_milestone", "milestone_order"))
    assert total(t, "kvscope_request_duration_seconds_count") == len(served) - unmeasured
    assert total(t, "kvscope_requests_received_total") == len(t.finished) == total(t, "kvscope_requests_total")
    assert total(t, "kvscope_generation_tokens_total") == sum(r.generated_tokens for r in t.finished)
    assert set(b.anomalies()) <= {"missing_milestone"}  # requests that "stop" before they were scheduled
    check_tail(b, [r for r in served if r.scheduled is not None and r.first_token is not None])


def check_histogram(rows: dict[tuple[str, tuple[str, ...]], float]) -> None:
    for (suffix, labels), count in rows.items():
        if suffix == "_count":
            buckets = [v for (s, ls), v in rows.items() if s == "_bucket" and ls[:-1] == labels]
            assert buckets == sorted(buckets)
            assert buckets[-1] == count
            assert (rows["_sum", labels] > 0.0) <= (count > 0)


def check_tail(b: Bench, measured: list[RequestRecord]) -> None:
    assert value(b.t, "kvscope_request_phase_requests_total", gt="0") == len(measured)
    rows = rows_of(b.t.snapshot(), "kvscope_request_phase_seconds")
    for gt, bound in ((f"{bound:g}", bound) for bound in c.TAIL_BOUNDS):
        # gt=0 counts every served request, also one that took no time at all
        slower = [r.matrix for r in measured if r.finished - r.arrival > bound or bound == 0.0]
        expected = np.sum(slower, axis=0) if slower else np.zeros((len(c.STATES), len(c.COMPONENTS)))
        for (_, (_, state, component, row_gt)), seconds in rows.items():
            if row_gt == gt:
                want = expected[c.STATES.index(state), c.COMPONENTS.index(component)]
                assert seconds == pytest.approx(want, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("q", [0.5, 0.9, 0.95, 0.99, 0.999])
def test_the_make_up_of_the_slowest_requests_can_be_read_from_the_tail_families(q: float) -> None:
    """By the rule of signals.TailMean: the tightest bound that still holds the slowest 1 - q. The truth comes from records."""
    rng = np.random.default_rng(11)
    b = Bench(keep_finished=4000)
    for queue, prefill, itl in zip(
        rng.lognormal(-2.5, 1.2, 3000), rng.lognormal(-1.5, 0.6, 3000), rng.lognormal(-4, 0.4, 3000), strict=True
    ):
        b.serve(b.submit(), queue=queue, prefill=prefill, itl=itl, tokens=10)
    durations = np.array([r.finished - r.arrival for r in b.t.finished])
    share = {
        gt: value(b.t, "kvscope_request_phase_requests_total", gt=f"{gt:g}") / len(durations) for gt in c.TAIL_BOUNDS
    }
    bound = max(gt for gt in c.TAIL_BOUNDS if share[gt] >= 1 - q)
    exact = float(np.quantile(durations, q))
    at = bisect_left(c.TAIL_BOUNDS, exact)
    assert bound == c.TAIL_BOUNDS[at - 1]  # the bound right below the quantile: no coarser than the bucket plan
    slow = [r for r, d in zip(b.t.finished, durations, strict=True) if d > bound]
    truth = np.mean([r.matrix for r in slow], axis=0)
    exported = np.array([
        [
            np.nan_to_num(value(b.t, "kvscope_request_phase_seconds_total", gt=f"{bound:g}", state=state, component=component))
            for component in c.COMPONENTS
        ]
        for state in c.STATES
    ])  # fmt: skip
    made_up = exported / value(b.t, "kvscope_request_phase_requests_total", gt=f"{bound:g}")
    np.testing.assert_allclose(made_up, truth, atol=1e-9)
    assert made_up.sum() == pytest.approx(np.mean([d for d in durations if d > bound]))
