"""The load controller acts on trouble, lets go when it is over, and neither swings nor locks itself in."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from observability.engine.controller import Controller
from observability.engine.types import ControllerConfig, DegradeRecord, EngineConfig, Limits, Request
from observability.telemetry.recorder import Telemetry
from observability.telemetry.tracing import Tracing
from tests.engine.support import make_request

CONFIG = ControllerConfig()  # a look a second, windows of 30 s, patience 3
ENGINE = EngineConfig()  # 2048 tokens, 32 sequences
FULL = (2048, 32)
CALM, HIGH = 0.5, 0.9  # utilization
FAST, SLOW = 0.1, 5.0  # seconds to first token


class Bench:
    """A controller over real telemetry, and the engine's side of its interface: one look a second unless told otherwise."""

    def __init__(self, config: ControllerConfig = CONFIG, engine: EngineConfig = ENGINE) -> None:
        self.now = 100.0
        self.telemetry = Telemetry(
            "test", executor="test", virtual=True, device="test", kv_dtype="auto", clock=lambda: self.now
        )
        self.limits = Limits(engine.max_num_batched_tokens, engine.max_num_seqs)
        self.config = config
        self.controller = Controller(config, engine, self.telemetry, self.limits, self.now)
        self.history: list[tuple[float, tuple[int, int]]] = [(self.now, self.current)]

    @property
    def current(self) -> tuple[int, int]:
        return self.limits.max_num_batched_tokens, self.limits.max_prefills

    def look(
        self,
        utilization: float = CALM,
        first_tokens: Sequence[float] = (),
        ok: int = 0,
        failed: int = 0,
        affected: Iterable[Request] = (),
        looks: int = 1,
    ) -> tuple[int, int]:
        """So many looks, before each of which these requests got a first token or ended. Returns the limits afterwards."""
        for _ in range(looks):
            self.now = max(self.controller.next_look, self.now)
            for seconds in first_tokens:
                self.controller.first_token(seconds, self.now)
            for outcome in ["stop"] * ok + ["error"] * failed:
                self.end(outcome)
            self.observe(utilization, affected)
        return self.current

    def observe(self, utilization: float, affected: Iterable[Request]) -> None:
        self.controller.look(self.now, utilization, affected)
        if self.current != self.history[-1][1]:
            self.history.append((self.now, self.current))

    def end(self, outcome: str, waited: float = 1.0, tokens: int = 4) -> None:
        request = make_request(range(8), arrival=self.now - waited)
        request.num_generated, request.outcome = tokens, outcome
        self.controller.ended(request, self.now)

    def request(self, waited: float = 0.0) -> Request:
        request = make_request(range(8), arrival=self.now - waited)
        request.trace = self.telemetry.arrive(request.request_id, "standard", 8, request.arrival)
        return request

    @property
    def num_changes(self) -> int:
        return len(self.history) - 1

    def changed(self) -> Counter[tuple[str, str]]:
        """What telemetry shows: changes by rule and action."""
        return Counter(
            {
                row.labels[1:]: int(row.value)
                for samples in self.telemetry.snapshot()
                if samples.family.name == "kvscope_controller_changes"
                for row in samples.rows
                if row.value
            }
        )

    def shown(self, family: str) -> list[float]:
        return [r.value for s in self.telemetry.snapshot() if s.family.name == family for r in s.rows]


def serial(bench: Bench) -> bool:
    return bench.limits.max_prefills == 1


# -- utilization ---------------------------------------------------------------------------------------------------------


def test_scarce_blocks_shrink_the_token_budget_step_by_step_down_to_its_floor():
    bench = Bench()
    assert [bench.look(HIGH)[0] for _ in range(12)] == [2048, 2048, 1024] + [1024, 1024, 512] + [512, 512] + [256] * 4


def test_the_token_budget_grows_back_when_blocks_are_free_again():
    bench = Bench()
    bench.look(HIGH, looks=9)
    assert [bench.look(CALM)[0] for _ in range(9)] == [256, 256, 512, 512, 512, 1024, 1024, 1024, 2048]
    assert bench.changed() == {("kv_utilization", "tighten"): 3, ("kv_utilization", "relax"): 3}
    assert bench.look(CALM, looks=100) == FULL


def test_between_the_bounds_nothing_changes_and_looks_count_anew():
    bench = Bench()
    for _ in range(20):
        bench.look(HIGH, looks=2)
        assert bench.look(0.8) == FULL
    bench.look(HIGH, looks=3)
    for _ in range(20):
        bench.look(CALM, looks=2)
        assert bench.look(0.8) == (1024, 32)


@pytest.mark.parametrize(
    ("engine", "floor"),
    [
        (EngineConfig(), 256),
        (EngineConfig(max_num_seqs=400), 416),  # all decodes, and a block of prefill
        (EngineConfig(max_num_batched_tokens=100), 100),  # never above the engine's own
    ],
)
def test_decodes_and_a_block_of_prefill_always_fit_the_token_budget(engine, floor):
    bench = Bench(engine=engine)
    assert bench.look(HIGH, looks=20)[0] == floor


# -- P99 -----------------------------------------------------------------------------------------------------------------


def test_slow_first_tokens_lead_to_serial_admission_and_fast_ones_out_of_it():
    bench = Bench()
    bench.look(first_tokens=[FAST] * 20, looks=40)
    assert [bench.look(first_tokens=[SLOW] * 20)[1] for _ in range(3)] == [32, 32, 1]
    # The slow ones count for a window; then three looks a step.
    seen = [bench.look(first_tokens=[FAST] * 20)[1] for _ in range(50)]
    assert list(dict.fromkeys(seen)) == [1, 2, 4, 8, 16, 32]
    assert [seen.count(limit) for limit in (2, 4, 8, 16)] == [3, 3, 3, 3]
    assert bench.changed() == {("p99_latency", "tighten"): 1, ("p99_latency", "relax"): 5}


def test_too_few_requests_say_nothing_about_p99():
    bench = Bench()
    for _ in range(200):
        bench.look(first_tokens=[SLOW])
        assert bench.look(looks=1) == FULL  # 15 or 16 in each window of 30 looks


def test_one_slow_request_among_few_does_not_act():
    bench = Bench()
    bench.look(first_tokens=[FAST] * 30)
    assert bench.look(first_tokens=[SLOW]) == FULL
    assert bench.look(looks=20) == FULL


def test_requests_that_wait_for_a_first_token_count_as_soon_as_they_are_slow():
    bench = Bench()
    waiting = [bench.request() for _ in range(30)]
    seen = [bench.look(affected=waiting) for _ in range(3)]
    assert seen == [FULL, FULL, (2048, 1)], "no request ever got a first token, and still P99 is known to be bad"


def test_preempted_requests_that_have_their_first_token_do_not_count_as_waiting():
    bench = Bench()
    preempted = [bench.request() for _ in range(30)]
    for request in preempted:
        request.num_generated = 3
    assert bench.look(affected=preempted, looks=30) == FULL


def test_clients_that_gave_up_before_their_first_token_count_as_slow_and_not_as_failed():
    bench = Bench()
    for _ in range(3):
        bench.look()
        for _ in range(10):
            bench.end("abort", waited=SLOW, tokens=0)
    assert bench.look(looks=3) == (2048, 1)
    assert bench.changed() == {("p99_latency", "tighten"): 1}


@settings(max_examples=25, deadline=None)
@given(st.integers(20, 1000), st.integers(0, 12))
def test_p99_is_high_when_one_in_a_hundred_and_one_more_are_slow(count, slow):
    bench = Bench()
    bench.look(first_tokens=[SLOW] * slow + [FAST] * (count - slow))
    bench.look(looks=2)
    assert serial(bench) == (100 * (slow - 1) >= count - 1)


# -- no lock-in ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p99", [0.46, 0.61, 60.0])
def test_serial_admission_ends_however_long_p99_stays_where_it_is(p99):
    bench = Bench()
    bench.look(first_tokens=[SLOW] * 20, looks=3)
    assert serial(bench)
    assert max(spells(bench, lambda: bench.look(first_tokens=[p99] * 20), looks=1000)) <= 5 * 60 + 10


def spells(bench: Bench, look: Callable[[], object], looks: int) -> list[int]:
    """Lengths, in looks, of the times that the engine spent in serial admission."""
    lengths = [0]
    for _ in range(looks):
        look()
        if serial(bench):
            lengths[-1] += 1
        elif lengths[-1]:
            lengths.append(0)
    return lengths


def test_serial_admission_that_does_not_help_is_tried_more_and_more_rarely():
    bench = Bench()
    bench.look(first_tokens=[SLOW] * 20, looks=2000)
    starts = [now for now, (_, prefills) in bench.history if prefills == 1]
    gaps = np.diff(starts)
    assert len(starts) <= 7
    assert (gaps[1:] >= 1.3 * gaps[:-1]).all()


def test_after_good_times_serial_admission_is_tried_at_once_again():
    bench = Bench()
    bench.look(first_tokens=[SLOW] * 20, looks=500)
    bench.look(first_tokens=[FAST] * 20, looks=60)
    assert bench.current == FULL
    assert [bench.look(first_tokens=[SLOW] * 20)[1] for _ in range(3)] == [32, 32, 1]


def test_serial_admission_stays_while_p99_keeps_falling():
    bench = Bench()
    bench.look(first_tokens=[SLOW] * 20, looks=3)
    p99 = SLOW
    while p99 > 0.7:
        p99 *= 0.99  # a quarter in a window
        bench.look(first_tokens=[p99] * 20)
        assert serial(bench)


def test_no_limit_is_held_for_lack_of_traffic():
    bench = Bench()
    bench.look(HIGH, first_tokens=[SLOW] * 20, looks=9)
    assert bench.current == (256, 1)
    assert bench.look(first_tokens=[], looks=80) == FULL


# -- error rate ------------------------------------------------------------------------------------------------------------


def test_errors_after_a_tightening_go_back_to_the_settings_without_errors_in_one_step():
    bench = Bench()
    bench.look(ok=5, looks=40)
    bench.look(HIGH, first_tokens=[SLOW] * 20, ok=5, looks=6)
    assert bench.current == (512, 1)
    bench.look(0.8, failed=30)
    assert bench.look(0.8, failed=5, looks=2) == FULL
    assert bench.changed()["error_rate", "rollback"] == 1
    # And for one window nothing else moves them, whatever it sees.
    assert bench.look(HIGH, first_tokens=[SLOW] * 20, ok=50, looks=30) == FULL
    assert bench.look(HIGH, first_tokens=[SLOW] * 20, ok=50, looks=3) == (1024, 1)


def test_errors_after_a_relaxing_go_back_to_the_tight_settings_without_errors():
    bench = Bench()
    bench.look(HIGH, looks=6)
    bench.look(0.8, ok=5, looks=40)
    assert bench.current == (512, 32)
    assert bench.look(CALM, ok=5, looks=6) == FULL
    bench.look(CALM, failed=30)
    assert bench.look(CALM, failed=5, looks=2) == (512, 32)
    assert bench.look(CALM, ok=50, looks=30) == (512, 32)
    assert bench.look(CALM, ok=50, looks=6) == FULL, "the rules let go as ever when their time has come"


def test_errors_at_the_stable_settings_change_nothing():
    bench = Bench()
    assert bench.look(failed=5, ok=5, looks=500) == FULL
    assert not bench.changed()


def test_too_few_ended_requests_and_aborts_say_nothing_about_errors():
    bench = Bench()
    bench.look(HIGH, looks=3)
    for _ in range(15):
        bench.end("error")
    for _ in range(100):
        bench.end("abort")
    assert bench.look(0.8, looks=10) == (1024, 32)


def test_aborts_do_not_dilute_the_error_rate():
    bench = Bench()
    bench.look(HIGH, looks=3)
    for outcome, count in (("error", 2), ("stop", 20), ("abort", 1000)):
        for _ in range(count):
            bench.end(outcome)
    assert bench.look(0.8, looks=3) == FULL


def test_settings_are_stable_only_after_a_full_window_without_errors():
    bench = Bench()
    bench.look(HIGH, looks=3)
    bench.look(0.8, ok=5, looks=26)
    bench.look(HIGH, looks=3)  # at the last of which 1024 would have to stand for one look more
    assert bench.look(0.8, failed=30, looks=3) == FULL


def test_rollbacks_that_do_not_help_become_rare():
    """Errors that have nothing to do with the limits must not keep the engine in tight ones."""
    bench = Bench()
    bench.look(HIGH, looks=9)
    bench.look(0.8, ok=5, looks=40)
    tight = sum(bench.look(CALM, ok=5, failed=5) != FULL for _ in range(2000))
    assert bench.changed()["error_rate", "rollback"] <= 7
    assert tight < 400


def test_once_the_errors_have_ended_a_rollback_is_possible_again():
    bench = Bench()
    bench.look(HIGH, looks=6)
    bench.look(0.8, ok=5, looks=40)
    bench.look(CALM, ok=5, looks=6)
    bench.look(CALM, ok=5, failed=5, looks=50)  # the rollback to 512 did not help
    assert bench.changed()["error_rate", "rollback"] == 1
    bench.look(HIGH, ok=50, looks=33)
    assert bench.current[0] < 2048
    bench.look(HIGH, failed=200, looks=3)
    assert bench.changed()["error_rate", "rollback"] == 2


def test_limits_that_a_rollback_tightened_are_let_go_even_if_utilization_and_p99_stay_between_their_bounds():
    bench = Bench()
    bench.look(HIGH, first_tokens=[SLOW] * 20, looks=6)
    bench.look(0.8, first_tokens=[FAST] * 20, ok=5, looks=31)  # stable, and P99 is about to say that it is well
    assert bench.current == (512, 1)
    bench.look(CALM, first_tokens=[FAST] * 20, ok=5, looks=20)
    assert bench.current == FULL
    bench.look(CALM, first_tokens=[0.5] * 20, failed=100, looks=3)
    assert bench.current == (512, 1)
    limits = [bench.look(0.8, first_tokens=[0.5] * 20, ok=5) for _ in range(400)]
    assert limits[200] == (512, 1)
    assert limits[-1] == FULL


# -- what is told ---------------------------------------------------------------------------------------------------------


def test_limits_are_shown_from_the_start_and_after_each_change():
    bench = Bench()
    shown = [(bench.shown("kvscope_limit_batched_tokens"), bench.shown("kvscope_limit_prefills"))]
    bench.look(HIGH, first_tokens=[SLOW] * 20, looks=3)
    shown.append((bench.shown("kvscope_limit_batched_tokens"), bench.shown("kvscope_limit_prefills")))
    assert shown == [([2048.0], [32.0]), ([1024.0], [1.0])]


def test_each_affected_request_is_noted_once_a_rule_and_only_while_a_rule_holds():
    bench = Bench()
    before, waiting = bench.request(), bench.request()
    bench.look(affected=[before, waiting])
    bench.controller.degrade(before, bench.now)
    bench.look(HIGH, affected=[waiting], looks=3)
    acted = bench.now
    bench.look(HIGH, first_tokens=[SLOW] * 20, affected=[waiting], looks=3)
    serial_since = bench.now
    bench.look(0.8, affected=[waiting], looks=5)
    admitted = bench.request()
    bench.controller.degrade(admitted, bench.now)
    assert before.degraded == []
    assert waiting.degraded == [
        DegradeRecord(waiting.request_id, "kv_utilization", acted),
        DegradeRecord(waiting.request_id, "p99_latency", serial_since),
    ]
    assert [record.degrade_reason for record in admitted.degraded] == ["kv_utilization", "p99_latency"]
    assert waiting.trace.degraded == ("kv_utilization", "p99_latency")
    assert bench.shown("kvscope_requests_degraded") == [2.0, 2.0, 0.0]
    bench.look(looks=100)
    assert bench.current == FULL
    after = bench.request()
    bench.look(affected=[after])
    bench.controller.degrade(after, bench.now)
    assert after.degraded == []


def test_requests_under_limits_that_a_rollback_tightened_name_the_error_rate():
    bench = Bench()
    bench.look(HIGH, looks=6)
    bench.look(0.8, ok=5, looks=40)
    bench.look(CALM, ok=5, looks=6)
    waiting = bench.request()
    bench.look(CALM, failed=30, affected=[waiting], looks=4)
    assert [record.degrade_reason for record in waiting.degraded] == ["error_rate"]


def test_the_span_of_a_degraded_request_hears_of_it():
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    bench = Bench()
    request = bench.request()
    tracing = Tracing.of("tiny", lambda: bench.now, provider)
    assert tracing is not None
    request.span = tracing.call("chat", {}, None).start("r", "standard", bench.now)
    bench.look(HIGH, affected=[request], looks=12)
    bench.telemetry.finish(bench.telemetry.arrive("r", "standard", 8, bench.now, request.span), "abort", bench.now)
    tracing.close()
    (span,) = exporter.get_finished_spans()
    (event,) = [event for event in span.events if event.name == "kvscope.degraded"]
    (degraded,) = request.degraded
    assert event.attributes is not None
    assert event.attributes["kvscope.degrade_reason"] == degraded.degrade_reason == "kv_utilization"
    assert span.start_time is not None
    assert abs(span.start_time / 1e9 - time.time()) < 60
    assert event.timestamp - span.start_time == pytest.approx((degraded.degrade_timestamp - request.arrival) * 1e9)
    assert event.attributes["kvscope.degrade_timestamp"] == pytest.approx(event.timestamp / 1e9, abs=1e-5)


# -- a queue that answers to the limits ------------------------------------------------------------------------------------


class Queue:
    """Serves requests in steps of 50 ms under the limits: one budget of tokens a step for decodes and prefill, blocks from admission to end.

    Written for these tests, without engine or scheduler. `thrash` is the share of prefill lost for each request beside the first in
    prefill; faults are set from outside while it runs.
    """

    STEP = 0.05

    def __init__(self, rate: float, prompt: int, output: int, *, capacity: int = 16384, thrash: float = 0.0) -> None:
        self.bench = Bench()
        self.rate, self.prompt, self.output = rate, prompt, output
        self.capacity, self.thrash = capacity, thrash
        self.taken = 0  # tokens of the pool that a fault holds
        self.stalled = False
        self.waiting: list[Request] = []
        self.prefilling: list[Request] = []
        self.decoding: list[Request] = []
        self.p99: list[float] = []
        self._due = 0.0
        self._recent: list[tuple[float, float]] = []

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / self.STEP)):
            self._step()

    def _step(self) -> None:
        bench, limits = self.bench, self.bench.limits
        bench.now += self.STEP
        self._due += self.rate * self.STEP
        while self._due >= 1.0:
            self._due -= 1.0
            self.waiting.append(bench.request())
        held = self.taken + sum(self.prompt + r.num_generated for r in self.prefilling + self.decoding)
        if not self.stalled:
            while (
                self.waiting
                and len(self.prefilling) < limits.max_prefills
                and len(self.prefilling) + len(self.decoding) < ENGINE.max_num_seqs
                and held + self.prompt + self.output <= self.capacity
            ):
                held += self.prompt
                self.prefilling.append(self.waiting.pop(0))
                bench.controller.degrade(self.prefilling[-1], bench.now)
            self._serve(limits.max_num_batched_tokens - len(self.decoding))
        if bench.now >= bench.controller.next_look:
            bench.observe(held / self.capacity, iter([*self.waiting, *self.prefilling]))
            self._recent = [(when, s) for when, s in self._recent if when > bench.now - 30.0]
            if self._recent:
                self.p99.append(sorted(s for _, s in self._recent)[int(0.99 * (len(self._recent) - 1))])

    def _serve(self, budget: int) -> None:
        bench = self.bench
        for request in self.decoding:
            request.num_generated += 1
        for request in [r for r in self.decoding if r.num_generated >= self.output]:
            self.decoding.remove(request)
            request.outcome = "length"
            bench.controller.ended(request, bench.now)
        useful = budget / (1.0 + self.thrash * max(len(self.prefilling) - 1, 0))
        share = useful / max(len(self.prefilling), 1)
        for request in list(self.prefilling):
            request.num_computed += math.ceil(share)
            if request.num_computed >= self.prompt:
                self.prefilling.remove(request)
                self.decoding.append(request)
                request.num_generated = 1
                seconds = bench.now - request.arrival
                self._recent.append((bench.now, seconds))
                bench.controller.first_token(seconds, bench.now)


def first_change(bench: Bench) -> float:
    return bench.history[1][0]


def test_a_pool_that_shrinks_under_load_is_met_within_patience_and_left_behind_afterwards():
    queue = Queue(rate=6.0, prompt=600, output=40)
    queue.run(60)
    assert queue.bench.num_changes == 0
    queue.taken = 14000
    began = queue.bench.now
    queue.run(60)
    assert began + 2.0 <= first_change(queue.bench) <= began + 6.0
    assert min(tokens for _, (tokens, _) in queue.bench.history) < 2048
    queue.taken = 0
    queue.run(200)
    assert queue.bench.current == FULL
    assert not queue.waiting


def test_prefills_that_slow_each_other_down_for_good_are_rescued_by_serial_admission():
    """15 prompts a second are served one by one; once 32 have piled up, thrashing leaves room for 8 a second, and only less of it helps."""
    queue = Queue(rate=15.0, prompt=2000, output=5, capacity=10**6, thrash=0.05)
    queue.run(60)
    assert queue.bench.num_changes == 0
    queue.stalled = True
    queue.run(2)
    queue.stalled = False
    began = queue.bench.now
    queue.run(20)
    assert first_change(queue.bench) <= began + 4.0
    assert serial(queue.bench)
    queue.run(180)
    assert queue.bench.current == FULL
    assert not queue.waiting
    assert queue.p99[-1] < CONFIG.p99_low_seconds
    assert queue.bench.changed() == {("p99_latency", "tighten"): 1, ("p99_latency", "relax"): 5}


def test_a_stall_does_not_leave_the_engine_in_serial_admission_that_cannot_keep_up():
    """30 short prompts a second are no load in parallel, but one in a step is too few: serial admission makes the queue grow for ever."""
    queue = Queue(rate=30.0, prompt=40, output=10)
    queue.run(60)
    assert queue.bench.num_changes == 0
    queue.stalled = True
    queue.run(5)
    queue.stalled = False
    queue.run(25)
    assert serial(queue.bench)
    assert len(queue.waiting) > 100
    queue.run(200)
    assert queue.bench.current == FULL
    assert not queue.waiting
    assert queue.p99[-1] < CONFIG.p99_low_seconds


def test_a_budget_so_small_that_prompts_hold_their_blocks_for_long_is_given_up():
    """Two long prompts fill the pool for as long as their prefill takes, so shrinking the budget keeps blocks scarce."""
    queue = Queue(rate=2.0, prompt=7000, output=2, capacity=16000)
    queue.run(60)
    queue.rate = 6.0
    queue.run(60)
    queue.rate = 2.0
    queue.run(600)
    assert len(queue.waiting) < 10
    assert queue.bench.current[0] == 2048


# -- steady loads ------------------------------------------------------------------------------------------------------------

HALF_HOUR = 1800  # looks; a change and its reversal at each chance would be 600 changes
NOISE = (0.0, 0.02)


def assert_settled(bench: Bench) -> None:
    assert bench.num_changes <= 25
    assert sum(now > bench.now - HALF_HOUR / 2 for now, _ in bench.history) <= 10


@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize("response", [0.0, 0.3, 1.0])  # utilization = level x (budget / full) ** response
@pytest.mark.parametrize("level", [0.7, 0.84, 0.85, 0.86, 1.2])
def test_the_budget_settles_under_a_steady_load(level, response, noise):
    bench, rng = Bench(), np.random.default_rng(1)
    for _ in range(HALF_HOUR):
        utilization = level * (bench.limits.max_num_batched_tokens / 2048) ** response + noise * rng.standard_normal()
        bench.look(min(max(utilization, 0.0), 1.0))
    assert_settled(bench)


@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize("gain", [0.3, 1.0, 3.0])  # of P99 in serial admission
@pytest.mark.parametrize("level", [0.6, 0.65, 2.0])
def test_admission_settles_under_a_steady_load(level, gain, noise):
    bench, rng = Bench(), np.random.default_rng(1)
    for _ in range(HALF_HOUR):
        serial_share = 1.0 - math.log(bench.limits.max_prefills, 32)
        bench.look(first_tokens=[level * gain**serial_share * math.exp(noise * rng.standard_normal())])
    assert_settled(bench)


@pytest.mark.parametrize("failing", [(2048,), (1024,), (1024, 2048)])
def test_limits_settle_where_both_errors_and_utilization_answer_to_them(failing):
    bench, rng = Bench(), np.random.default_rng(1)
    for _ in range(HALF_HOUR):
        tokens = bench.limits.max_num_batched_tokens
        bench.look(0.87 * (tokens / 2048) ** 0.4, ok=1, failed=int(tokens in failing and rng.random() < 0.2))
    assert_settled(bench)


# -- any signals ---------------------------------------------------------------------------------------------------------------

shares = st.one_of(st.sampled_from([0.7, 0.85]), st.floats(0.0, 1.0))
latencies = st.none() | st.sampled_from([0.45, 0.6]) | st.floats(0.0, 5.0)
stretches = st.lists(st.tuples(shares, latencies, st.integers(1, 12)), max_size=25)


@settings(max_examples=60, deadline=None)
@given(stretches, st.sampled_from([0.3, 0.5, 0.9]))
def test_each_limit_moves_only_after_patience_looks_beyond_a_bound_or_at_the_end_of_a_trial(signals, shrink_factor):
    """A window of one look, so that a P99 is what this look was given."""
    bench = Bench(ControllerConfig(window_seconds=1.0, min_requests=1, shrink_factor=shrink_factor))
    seen: list[tuple[float, float | None]] = []
    before, tightened = bench.current, [-math.inf, -math.inf]
    for utilization, p99, looks in signals:
        for _ in range(looks):
            seen.append((utilization, p99))
            after = bench.look(utilization, first_tokens=[] if p99 is None else [p99])
            for i, (low, high) in enumerate(((0.7, 0.85), (0.45, 0.6))):
                last = [look[i] for look in seen[-3:]]
                if after[i] < before[i]:
                    assert len(last) == 3
                    assert all(value is not None and value > high for value in last)
                    assert after[i] == (max(256, int(before[i] * shrink_factor)) if i == 0 else 1)
                    tightened[i] = bench.now
                elif after[i] > before[i]:
                    undone = after[i] == FULL[i] and bench.now >= tightened[i] + 2.0
                    assert undone or all(value is None or value < low for value in last)
            before = after
            assert 256 <= after[0] <= 2048
            assert 1 <= after[1] <= 32


requests = st.tuples(st.integers(0, 8), st.integers(0, 3))  # that went well, that failed
loads = st.lists(
    st.tuples(shares, st.lists(st.floats(0.0, 5.0), max_size=4), requests, st.integers(1, 40)), max_size=20
)


@settings(max_examples=25, deadline=None)
@given(loads)
def test_whatever_happened_calm_brings_the_full_limits_back(signals):
    bench = Bench()
    for utilization, first_tokens, (ok, failed), looks in signals:
        for _ in range(looks):
            tokens, prefills = bench.look(utilization, first_tokens, ok, failed)
            assert 256 <= tokens <= 2048
            assert 1 <= prefills <= 32
    # A rollback and the longest wait before a relaxing, each at most 16 windows, and five steps.
    calm = 0
    while bench.current != FULL:
        bench.look(CALM, first_tokens=[FAST] * 2, ok=2)
        calm += 1
    assert calm <= 2 * 16 * 30 + 60
    shown = (bench.shown("kvscope_limit_batched_tokens"), bench.shown("kvscope_limit_prefills"))
    assert shown == ([2048.0], [32.0])


@settings(max_examples=20, deadline=None)
@given(loads, st.floats(0.0, 1.0), st.floats(0.0, 5.0))
def test_whatever_happened_no_signal_holds_a_limit_for_ever(signals, utilization, p99):
    bench = Bench()
    for share, first_tokens, (ok, failed), looks in signals:
        bench.look(share, first_tokens, ok, failed, looks=looks)
    free = [False, False]
    for _ in range(5 * 2 * 16 * 30):
        limits = bench.look(utilization, first_tokens=[p99])
        free = [was or now == most for was, now, most in zip(free, limits, FULL, strict=True)]
        if all(free):
            return
    raise AssertionError(f"never let go: {free}")
