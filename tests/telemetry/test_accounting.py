"""What one recorder call does to the numbers: phases, lookups, outcomes, anomalies, gauges (cases QH, QA, QB, QG, QK)."""

from __future__ import annotations

import logging
import math

import numpy as np
import pytest

from observability import catalog as c
from observability.telemetry.phases import StepClock
from tests.telemetry.bench import (
    COMPONENT,
    DECODE,
    KV_WAIT,
    PREEMPTED,
    PREFILL,
    QUEUED,
    Bench,
    ManualClock,
    kv_state,
    rows_of,
    total,
    value,
)


def quantile(bench: Bench, family: c.Family, q: float) -> float:
    """histogram_quantile over all classes, written out from its definition in the Prometheus documentation."""
    counts = [total(bench.t, f"{family.name}_bucket", le=str(float(b))) for b in family.bounds]
    rank = q * total(bench.t, f"{family.name}_count")
    for i, count in enumerate(counts):
        if count >= rank:
            low, below = (family.bounds[i - 1], counts[i - 1]) if i else (0.0, 0.0)
            return low + (family.bounds[i] - low) * (rank - below) / (count - below)
    return family.bounds[-1]


# -- phases -----------------------------------------------------------------------------------------------------------


def test_a_requests_seconds_land_in_the_state_and_component_where_they_were_spent() -> None:
    b = Bench()
    trace = b.submit()
    b.spend("schedule", 0.5)
    b.t.transition(trace, KV_WAIT)
    b.spend("forward_decode", 1.0)  # another request's decode, while this one waits for blocks
    b.t.transition(trace, PREFILL)
    b.spend("kv_alloc", 0.25)
    b.spend("forward_prefill", 2.0)
    b.t.transition(trace, DECODE)
    b.t.tokens([trace], b.clock.now)
    b.spend("forward_decode", 0.75)
    b.t.tokens([trace], b.clock.now)
    b.spend("emit", 0.125)
    b.t.finish(trace, "stop", b.clock.now)
    expected = np.zeros((len(c.STATES), len(c.COMPONENTS)))
    expected[QUEUED, COMPONENT["schedule"]] = 0.5
    expected[KV_WAIT, COMPONENT["forward_decode"]] = 1.0
    expected[PREFILL, COMPONENT["kv_alloc"]] = 0.25
    expected[PREFILL, COMPONENT["forward_prefill"]] = 2.0
    expected[DECODE, COMPONENT["forward_decode"]] = 0.75
    expected[DECODE, COMPONENT["emit"]] = 0.125
    record = b.t.finished[0]
    np.testing.assert_array_equal(record.matrix, expected)
    assert record.matrix.sum() == record.finished - record.arrival
    assert (record.scheduled, record.first_token, record.max_itl) == (1.5, 3.75, 0.75)
    assert not b.anomalies()


def test_an_arrival_inside_a_step_gets_its_share_of_that_step() -> None:
    b = Bench()
    b.t.begin_step()
    b.spend("forward_decode", 3.0)
    b.spend("sample", 1.0)
    b.t.begin_step()
    trace = b.submit(arrival=3.0)  # a quarter of the step was left
    b.t.transition(trace, PREFILL)
    queued = dict(zip(c.COMPONENTS, trace.matrix[: len(c.COMPONENTS)], strict=True))
    assert queued["forward_decode"] == pytest.approx(0.75)
    assert queued["sample"] == pytest.approx(0.25)
    assert sum(trace.matrix) == pytest.approx(1.0)


@pytest.mark.parametrize("arrival", [-5.0, 0.0, 0.5, 7.0, 39.5, 40.0, 40.25])
def test_phases_sum_to_the_latency_however_long_before_pick_up_a_request_arrived(arrival: float) -> None:
    b = Bench()
    for step in range(40):
        b.t.begin_step()
        b.spend("schedule", 0.25)
        b.spend("forward_decode" if step % 3 else "forward_prefill", 0.75)
    b.t.begin_step()
    b.clock.now += 0.5  # picked up between two laps
    trace = b.submit(arrival=arrival)
    b.serve(trace)
    record = b.t.finished[0]
    assert record.arrival == arrival
    assert record.matrix.min() >= 0.0
    assert record.matrix.sum() == pytest.approx(record.finished - arrival, abs=1e-9)
    assert not b.anomalies()


@pytest.mark.parametrize("end", [1.0, 1.25, 1.5, 2.0])
def test_a_finish_time_between_laps_is_attributed_exactly(end: float) -> None:
    b = Bench()
    trace = b.submit(arrival=0.0)
    b.t.transition(trace, PREFILL)
    b.t.begin_step()
    b.spend("forward_prefill", 1.0)
    b.t.tokens([trace], 1.0)
    b.spend("emit", 0.5)
    b.t.finish(trace, "length", end)
    assert b.t.finished[0].matrix.sum() == pytest.approx(end, abs=1e-12)
    assert sum(b.t.seconds) == pytest.approx(b.t.last - b.t.start)


def test_step_seconds_sum_to_the_time_since_start_even_over_a_clock_step() -> None:
    clock = ManualClock(100.0)
    steps = StepClock(clock)
    clock.now = 103.0
    assert steps.lap(0) == 103.0
    clock.now = 50.0  # suspended machine, broken clock source
    steps.lap(1)
    steps.lap_to(2, 51.5)
    steps.lap_to(2, math.nan)
    assert steps.seconds[:3] == [3.0, 0.0, 1.5]
    assert sum(steps.seconds) == steps.last - steps.start
    assert dict(zip(c.ANOMALIES, steps._anomalies, strict=True)) | {"clock_step": 1, "non_finite": 1} == dict(
        zip(c.ANOMALIES, steps._anomalies, strict=True)
    )


def test_tail_families_hold_the_requests_slower_than_each_bound() -> None:
    b = Bench()
    for prefill in (0.01, 0.4, 0.65, 0.9, 3.0):
        b.serve(b.submit(), queue=0.02, prefill=prefill, tokens=1)
    durations = [r.finished - r.arrival for r in b.t.finished]
    for bound in c.TAIL_BOUNDS:
        slower = [r for r, d in zip(b.t.finished, durations, strict=True) if d > bound]
        assert value(b.t, "kvscope_request_phase_requests_total", gt=f"{bound:g}") == len(slower)
        seconds = value(
            b.t, "kvscope_request_phase_seconds_total", gt=f"{bound:g}", state="prefill", component="forward_prefill"
        )
        assert seconds == pytest.approx(sum(r.matrix[PREFILL, COMPONENT["forward_prefill"]] for r in slower))
    assert value(b.t, "kvscope_request_phase_requests_total", gt="0") == total(
        b.t, "kvscope_request_duration_seconds_count"
    )


def test_a_request_without_any_latency_is_still_in_the_tail_family_that_counts_all() -> None:
    b = Bench()
    b.serve(b.submit(), queue=0.0, prefill=0.0, tokens=1)
    assert value(b.t, "kvscope_request_phase_requests_total", gt="0") == 1
    assert value(b.t, "kvscope_request_phase_requests_total", gt="0.1") == 0


# -- prefix cache (QH) ------------------------------------------------------------------------------------------------


def test_hits_count_once_however_often_scheduling_retries() -> None:  # QH2
    b = Bench()
    trace = b.submit(prompt=1000)
    for _ in range(50):  # blocked for 50 steps
        b.t.lookup(trace, 992, 480)
        b.spend("forward_decode", 0.01)
    assert total(b.t, "kvscope_kv_lookups_total") == 1
    assert total(b.t, "kvscope_kv_queried_tokens_total") == 1000
    assert total(b.t, "kvscope_kv_hittable_tokens_total") == 992
    assert total(b.t, "kvscope_kv_hit_tokens_total") == 480


def test_recomputation_after_preemption_is_neither_a_hit_nor_a_query() -> None:  # QH1
    b = Bench()
    trace = b.submit(prompt=1024)
    b.t.lookup(trace, 1008, 0)
    b.t.transition(trace, PREFILL)
    b.t.preempted(trace)
    b.t.recomputed(1024)
    b.t.lookup(trace, 1008, 1008)  # finds the blocks it had filled itself
    assert total(b.t, "kvscope_kv_hit_tokens_total") == 0
    assert total(b.t, "kvscope_kv_queried_tokens_total") == 1024
    assert total(b.t, "kvscope_kv_recomputed_tokens_total") == 1024
    assert total(b.t, "kvscope_preemptions_total") == 1
    assert trace.state == PREEMPTED


@pytest.mark.parametrize("repeat", [1024, 1025, 2047, 4096])
def test_hits_are_reported_against_hittable_tokens_too(repeat: int) -> None:  # QH4
    """Repeating a prompt: the last token is always computed, so a repeat of exactly one block can hit nothing."""
    b, block = Bench(), 1024
    hittable = (repeat - 1) // block * block
    first, second = b.submit(prompt=repeat), b.submit(prompt=repeat)
    b.t.lookup(first, hittable, 0)
    b.t.lookup(second, hittable, hittable)
    assert total(b.t, "kvscope_kv_hit_tokens_total") == {1024: 0, 1025: 1024, 2047: 1024, 4096: 3072}[repeat]
    assert total(b.t, "kvscope_kv_hittable_tokens_total") == 2 * hittable


def test_lookups_go_to_the_bucket_of_the_prompts_length() -> None:
    b = Bench()
    for prompt, bucket in ((2047, "0-2K"), (2048, "2K-8K"), (8192, "8K-32K"), (600_000, "512K+")):
        b.t.lookup(b.submit(prompt=prompt), prompt - 1, 16)
        assert value(b.t, "kvscope_kv_queried_tokens_total", length_bucket=bucket) == prompt
        assert value(b.t, "kvscope_kv_hit_tokens_total", length_bucket=bucket, tier="device") == 16


def test_the_host_tier_is_absent_until_something_came_from_it() -> None:
    b = Bench()
    assert math.isnan(value(b.t, "kvscope_kv_hit_tokens_total", length_bucket="0-2K", tier="host"))
    b.t.lookup(b.submit(), 96, 16, host_hit=16)
    assert value(b.t, "kvscope_kv_hit_tokens_total", length_bucket="0-2K", tier="host") == 16


# -- counters, outcomes, anomalies (QA) ---------------------------------------------------------------------------------


def test_negative_increments_are_counted_and_never_raised() -> None:  # QA1
    b = Bench()
    trace = b.submit(prompt=-5)
    b.t.recomputed(-1)
    b.t.evicted(-2)
    b.t.allocated(0, -3)
    b.t.prefilled(trace)
    b.t.lookup(b.submit(prompt=100), 50, 60)  # more hits than could be: misses would be negative
    b.t.step(0, -4, 0, 0.1)
    b.t.quant_error(0, "0-9", "int8", -1.0, 1.0, 0.1, 1)
    b.t.quant_compared(trace, "int8", -1.0, True, [])
    b.t.quant_compared(trace, "int8", 0.0, True, [("0-9", -1.0, 1.0)])
    assert b.anomalies() == {"negative_increment": 9}
    assert trace.quantization is None
    for name in (
        "kv_recomputed_tokens",
        "kv_evicted_blocks",
        "kv_allocated_blocks",
        "prompt_tokens",
        "kv_hit_tokens",
        "step_tokens",
    ):
        assert total(b.t, f"kvscope_{name}_total") == 0


@pytest.mark.parametrize("reached", ["nothing", "prefill"])
def test_a_missing_milestone_gives_no_sample_and_a_reason(reached: str) -> None:  # QA2
    b = Bench(start=1e6)  # an interval to an unset time would be the host's uptime
    trace = b.submit()
    b.spend("schedule", 0.1)
    if reached == "prefill":
        b.t.transition(trace, PREFILL)
    b.t.finish(trace, "stop", b.clock.now)
    assert b.anomalies() == {"missing_milestone": 1}
    for family in ("request_duration_seconds", "time_to_first_token_seconds"):
        assert total(b.t, f"kvscope_{family}_count") == total(b.t, f"kvscope_{family}_sum") == 0
    assert total(b.t, "kvscope_request_phase_requests_total") == 0
    assert total(b.t, "kvscope_requests_total", outcome="stop") == 1  # it did end


@pytest.mark.parametrize("outcome", ["abort", "error"])
def test_a_request_that_ends_before_its_first_token_is_no_anomaly(outcome: str) -> None:
    b = Bench()
    trace = b.submit()
    b.spend("idle", 0.1)
    b.t.finish(trace, outcome, b.clock.now)
    assert not b.anomalies()
    record = b.t.finished[0]
    assert (record.scheduled, record.first_token, record.max_itl, record.outcome) == (None, None, None, outcome)
    assert record.matrix.sum() == pytest.approx(0.1)


def test_milestones_out_of_order_give_no_sample() -> None:  # QA18
    b = Bench()
    trace = b.submit(arrival=0.0)
    b.spend("schedule", 1.0)
    b.t.transition(trace, PREFILL)
    b.t.tokens([trace], 0.5)  # first token before it was scheduled
    b.t.finish(trace, "stop", 1.0)
    assert b.anomalies() == {"milestone_order": 1}
    assert total(b.t, "kvscope_request_duration_seconds_count") == 0


@pytest.mark.parametrize("outcome", ["stop", "abort"])
def test_an_end_before_the_last_state_change_is_out_of_order(outcome: str) -> None:
    b = Bench()
    trace = b.submit(arrival=0.0)
    b.spend("schedule", 1.0)
    b.t.transition(trace, PREFILL)
    b.t.tokens([trace], 1.0)
    b.t.finish(trace, outcome, 0.25)
    assert b.anomalies() == {"milestone_order": 1}
    assert b.t.finished[0].matrix.min() >= 0.0


def test_a_second_finish_is_an_anomaly_and_counts_nothing() -> None:
    b = Bench()
    trace = b.submit()
    b.serve(trace)
    b.t.finish(trace, "abort", b.clock.now)
    b.t.transition(trace, DECODE)  # after the end
    assert b.anomalies() == {"duplicate_finish": 1, "milestone_order": 1}
    assert total(b.t, "kvscope_requests_total") == len(b.t.finished) == 1


def test_time_that_goes_back_or_is_not_a_number_gives_no_sample() -> None:
    b = Bench()
    early, late = b.submit(arrival=math.nan), b.submit(arrival=99.0)
    assert b.anomalies() == {"non_finite": 1, "negative_interval": 1}
    assert early.arrival == late.arrival == 0.0
    b.spend("forward_decode", 1.0)
    b.t.tokens([early], 1.0)
    b.t.tokens([early], 0.5)
    b.t.tokens_run([early], np.array([2.0, 1.5, 2.5]))
    assert b.anomalies() == {"non_finite": 1, "negative_interval": 3}
    assert total(b.t, "kvscope_inter_token_latency_seconds_count") == 2  # 0.5 -> 2.0 and 1.5 -> 2.5
    assert total(b.t, "kvscope_generation_tokens_total") == early.generated == 5
    b.spend("forward_decode", 2.0)
    b.t.tokens([early], math.inf)  # counted as a token of the last lap
    b.t.step(1, 0, 1, math.nan)
    b.t.step(1, 0, 1, np.array([0.1] * 20 + [-1.0]))
    b.t.quant_error(0, "0-9", "int8", math.nan, 1.0, 0.1, 1)
    b.t.quant_compared(early, "int8", math.inf, True, [])
    b.t.finish(early, "abort", math.nan)
    assert b.anomalies() == {"non_finite": 6, "negative_interval": 4}


def test_a_first_token_before_the_arrival_gives_no_sample() -> None:
    b = Bench(start=10.0)
    trace = b.submit()
    b.t.tokens([trace], 9.0)
    assert b.anomalies() == {"negative_interval": 1}
    assert total(b.t, "kvscope_time_to_first_token_seconds_count") == 0
    assert total(b.t, "kvscope_generation_tokens_total") == 1


def test_a_broken_call_is_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    b = Bench(on_finish=lambda record: 1 / 0)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            b.serve(b.submit())
        b.t.tokens([None], 1.0)  # type: ignore[list-item]
    assert b.anomalies() == {"record_error": 4}
    assert [r.message.split(" failed")[0] for r in caplog.records] == ["telemetry call finish", "telemetry call tokens"]
    assert len(b.t.finished) == total(b.t, "kvscope_requests_total") == 3


def test_counters_reconcile_with_the_records_of_requests() -> None:  # QA4
    """Clients leave in the queue, in prefill and in decode: what came in ended or is still here, token for token."""
    b = Bench()
    traces = [b.submit(request_class=c.CLASSES[i % 3], prompt=100 + i) for i in range(30)]
    for outcome in ("rejected", "invalid", "invalid"):
        b.t.received("standard")
        b.t.refused("standard", outcome)
    for i, trace in enumerate(traces):
        b.spend("schedule", 0.01)
        if i % 5 == 0:
            b.t.finish(trace, "abort", b.clock.now)  # in the queue
            continue
        b.t.transition(trace, PREFILL)
        b.spend("forward_prefill", 0.01)
        if i % 5 == 1:
            b.t.finish(trace, "abort", b.clock.now)
            continue
        b.t.prefilled(trace)
        b.t.transition(trace, DECODE)
        b.t.tokens([trace], b.clock.now)
        b.t.tokens_run([trace], b.clock.now + np.arange(1, 4) * 0.02)
        b.spend("forward_decode", 0.06)
        if i % 5 == 2:
            b.t.finish(trace, "abort", b.clock.now)
        elif i % 5 == 3:
            b.t.finish(trace, "length", b.clock.now)
    running = [sum(t.class_index == k and t.outcome is None for t in traces) for k in range(3)]
    b.t.publish(kv_state(), running, [0, 0, 0])
    for name in c.CLASSES:
        here = value(b.t, "kvscope_requests_running", **{"class": name}) + value(
            b.t, "kvscope_requests_waiting", **{"class": name}
        )
        ended = total(b.t, "kvscope_requests_total", **{"class": name})
        assert value(b.t, "kvscope_requests_received_total", **{"class": name}) == ended + here
    records = list(b.t.finished)
    still = [t for t in traces if t.outcome is None]
    assert total(b.t, "kvscope_requests_total", outcome="abort") == sum(r.outcome == "abort" for r in records) == 18
    assert total(b.t, "kvscope_requests_total", outcome="rejected") == 1
    assert total(b.t, "kvscope_requests_total", outcome="invalid") == 2
    reached = [r.prompt_tokens for r in records if r.first_token is not None] + [t.prompt_tokens for t in still]
    assert total(b.t, "kvscope_prompt_tokens_total") == sum(reached)
    generated = sum(r.generated_tokens for r in records) + sum(t.generated for t in still)
    assert total(b.t, "kvscope_generation_tokens_total") == generated
    firsts = total(b.t, "kvscope_time_to_first_token_seconds_count")
    assert total(b.t, "kvscope_inter_token_latency_seconds_count") == generated - firsts
    assert firsts == len(reached)
    assert total(b.t, "kvscope_request_duration_seconds_count") == sum(r.outcome in ("stop", "length") for r in records)
    assert not b.anomalies()


def test_prompt_tokens_count_once_although_a_preempted_request_prefills_again() -> None:
    b = Bench()
    trace = b.submit(prompt=300)
    b.t.prefilled(trace)
    b.t.preempted(trace)
    b.t.prefilled(trace)
    assert total(b.t, "kvscope_prompt_tokens_total") == 300


def test_an_unknown_class_or_outcome_folds_into_a_known_one_and_is_counted() -> None:
    b = Bench()
    trace = b.submit(request_class="../../etc/passwd\n" * 1000)
    b.t.finish(trace, "exploded", 0.0)
    assert value(b.t, "kvscope_requests_received_total", **{"class": "standard"}) == 1
    assert value(b.t, "kvscope_requests_total", **{"class": "standard", "outcome": "error"}) == 1
    assert value(b.t, "kvscope_label_folds_total", label="class") == 1
    assert value(b.t, "kvscope_label_folds_total", label="outcome") == 1


def test_quantization_series_are_capped() -> None:
    b = Bench(kv_dtype="int8")
    for i in range(1000):
        b.t.quant_error(i % 2, f"group {i}", "int8", 0.01, 100.0, 0.05, 10)
    groups = {
        dict(s.labels)["layer_group"] for s in b.t.layout if s.name == "kvscope_kv_quantization_sampled_elements_total"
    }
    assert len(groups) == 65
    assert total(b.t, "kvscope_kv_quantization_sampled_elements_total") == 10_000
    assert value(b.t, "kvscope_label_folds_total", label="layer_group") == 1000 - 64


# -- buckets (QB) -----------------------------------------------------------------------------------------------------


def test_two_millisecond_queue_times_read_as_two_milliseconds() -> None:  # QB1
    b = Bench()
    for trace in [b.submit(arrival=0.0) for _ in range(1000)]:
        b.t.tokens([trace], 0.002)
    assert quantile(b, c.TIME_TO_FIRST_TOKEN, 0.99) == pytest.approx(0.002, rel=0.1)
    assert quantile(b, c.TIME_TO_FIRST_TOKEN, 0.5) == pytest.approx(0.002, rel=0.15)


@pytest.mark.parametrize("seconds", [0.00101, 0.00201, 0.0033, 0.041, 0.79, 0.81, 1.15, 7.7, 42.0, 620.0])
def test_equal_latencies_read_within_one_bucket_of_26_percent(seconds: float) -> None:
    b = Bench()
    for trace in [b.submit(arrival=0.0) for _ in range(100)]:
        b.t.tokens([trace], seconds)
    for q in (0.5, 0.99):
        assert quantile(b, c.TIME_TO_FIRST_TOKEN, q) == pytest.approx(seconds, rel=0.26)


#: Read from the books of a pool, once there is one: see test_residency.
OF_RESIDENCY = {c.KV_EVICTED_AGES, c.KV_EXPOSED, c.KV_IDLE_BEFORE_EVICTION, c.KV_REUSE_GAP}


@pytest.mark.parametrize(
    "family", [f for f in c.FAMILIES if f.kind == "histogram" and f not in OF_RESIDENCY], ids=lambda f: f.name
)
def test_a_value_on_a_bound_is_inside_its_bucket(family: c.Family) -> None:
    """`le` includes the bound; one ulp more is outside. Checked on one bound a family, through the call that feeds it."""
    bound = family.bounds[len(family.bounds) // 2]
    for seconds, inside in ((bound, 1), (math.nextafter(bound, math.inf), 0)):
        b = Bench(kv_dtype="int8")
        if family is c.STEP_DURATION:
            b.t.step(0, 1, 0, seconds)
        elif family is c.KV_SWITCH_LOSS:
            b.t.mechanisms.context_switch(seconds)
        elif family is c.PREFILL_SPREAD:
            b.t.mechanisms.batch_spread(seconds)
        elif family is c.KV_QUANT_RELATIVE:
            b.t.quant_error(0, "0-9", "int8", seconds**2, 1.0, 0.0, 1)
        elif family is c.KV_QUANT_MAXIMUM:
            b.t.quant_error(0, "0-9", "int8", 0.0, 4.0, 2 * seconds, 1)
        elif family is c.REQUEST_QUANT_ERROR:
            trace = b.submit()
            b.t.quant_compared(trace, "int8", 0.0, True, [("0-9", seconds**2, 1.0)])
            b.t.finish(trace, "abort", 0.0)
        else:
            trace = b.submit(tenant="acme")
            b.t.transition(trace, PREFILL)
            if family is c.INTER_TOKEN_LATENCY:
                b.t.tokens([trace], 0.0)
            b.clock.now = seconds
            b.t.tokens([trace], seconds)
            b.t.finish(trace, "stop", seconds)
        if family in (c.KV_QUANT_RELATIVE, c.REQUEST_QUANT_ERROR) and not inside:
            continue  # the square root rounds the ulp away
        assert total(b.t, f"{family.name}_bucket", le=str(float(bound))) == inside
        assert total(b.t, f"{family.name}_bucket", le="+Inf") == 1


def test_an_interval_on_a_bound_is_inside_its_bucket_in_runs_too() -> None:
    b = Bench()
    b.t.tokens_run([b.submit(arrival=0.0)], np.array([0.0, 0.5, 1.0]))
    b.t.step(1, 0, 1, np.full(20, 0.4))
    assert total(b.t, "kvscope_inter_token_latency_seconds_bucket", le="0.5") == 2
    assert total(b.t, "kvscope_inter_token_latency_seconds_bucket", le="0.4") == 0
    assert total(b.t, "kvscope_step_duration_seconds_bucket", le="0.4") == 20
    assert total(b.t, "kvscope_step_duration_seconds_bucket", le="0.25") == 0


def test_a_run_of_tokens_counts_like_the_same_tokens_one_by_one() -> None:
    rng = np.random.default_rng(7)
    ends = 5.0 + np.cumsum(rng.lognormal(-4, 1, 200))
    one, run = Bench(), Bench()
    for b in (one, run):
        b.traces = [b.submit(request_class=c.CLASSES[i % 3]) for i in range(6)]  # type: ignore[attr-defined]
        b.t.tokens(b.traces[:4], 4.0)  # type: ignore[attr-defined]
    for end in ends:
        one.t.tokens(one.traces, float(end))  # type: ignore[attr-defined]
    run.t.tokens_run(run.traces, ends)  # type: ignore[attr-defined]
    np.testing.assert_allclose(run.t.values(), one.t.values(), rtol=1e-12)
    for left, right in zip(one.traces, run.traces, strict=True):  # type: ignore[attr-defined]
        assert (left.generated, left.first_token, left.last_token) == (
            right.generated,
            right.first_token,
            right.last_token,
        )
        assert left.max_itl == pytest.approx(right.max_itl)


def test_a_long_run_of_steps_counts_like_single_steps() -> None:
    durations = np.random.default_rng(3).lognormal(-5, 2, 100)
    one, run = Bench(), Bench()
    for seconds in durations:
        one.t.step(1, 0, 8, float(seconds))
    run.t.step(1, 0, 8, durations)
    np.testing.assert_allclose(run.t.values(), one.t.values(), rtol=1e-12)
    assert value(run.t, "kvscope_step_tokens_total", phase="decode") == 800


# -- gauges (QG, QK) --------------------------------------------------------------------------------------------------


def test_gauges_are_absent_before_they_are_known_and_read_idle_after_a_mass_abort() -> None:  # QG1
    b = Bench()
    names = {family.name for family, _ in b.t.snapshot()}
    assert not names & {f.name for f in c.FAMILIES if f.kind == "gauge"}
    traces = [b.submit() for _ in range(106)]
    b.t.publish(kv_state(free=1, active=63, stored=1000), [0, 106, 0], [0, 9, 0])
    assert total(b.t, "kvscope_requests_running") == 106
    for trace in traces:
        b.t.finish(trace, "abort", b.clock.now)
    b.spend("emit", 5.0)
    assert b.t.due()
    b.t.publish(kv_state(), [0, 0, 0], [0, 0, 0])
    assert total(b.t, "kvscope_requests_running") == total(b.t, "kvscope_requests_waiting") == 0
    assert value(b.t, "kvscope_kv_blocks", state="active") == value(b.t, "kvscope_kv_stored_tokens") == 0
    assert value(b.t, "kvscope_kv_blocks", state="free") == value(b.t, "kvscope_kv_capacity_blocks") == 64
    assert value(b.t, "kvscope_last_update_timestamp_seconds", source="engine") == 1_700_000_005.0


@pytest.mark.parametrize(("virtual", "interval"), [(False, 0.25), (True, 1.0)])
def test_gauges_are_due_at_their_interval(virtual: bool, interval: float) -> None:
    b = Bench(virtual=virtual)
    assert b.t.due()  # never published
    b.t.publish(kv_state(), [0, 0, 0], [0, 0, 0])
    b.spend("idle", interval * 0.75)
    assert not b.t.due()
    b.spend("idle", interval * 0.25)
    assert b.t.due()


@pytest.mark.parametrize(("tokens", "blocks"), [(17, 2), (400, 25)])
def test_internal_fragmentation_follows_from_stored_tokens_and_blocks(tokens: int, blocks: int) -> None:  # QK1
    b = Bench()
    b.t.publish(kv_state(free=64 - blocks, active=blocks, stored=tokens), [0, 1, 0], [0, 0, 0])
    slots = value(b.t, "kvscope_kv_blocks", state="active") * value(b.t, "kvscope_kv_block_size_tokens")
    fragmentation = 1 - value(b.t, "kvscope_kv_stored_tokens") / slots
    assert fragmentation == pytest.approx({17: 15 / 32, 400: 0.0}[tokens])
    assert value(b.t, "kvscope_kv_bytes", kind="active") == blocks * 1024
    assert value(b.t, "kvscope_kv_bytes", kind="reserved") == 64 * 1024
    assert total(b.t, "kvscope_kv_region_blocks", state="active") == blocks


def test_an_unbounded_pool_has_no_capacity_no_free_blocks_and_no_regions() -> None:
    b = Bench()
    b.t.publish(kv_state(capacity=None, free=0, evictable=5, active=3), [0, 0, 0], [0, 0, 0])
    present = {family.name: rows_of(b.t.snapshot(), family.name) for family, _ in b.t.snapshot()}
    for family in (
        c.KV_CAPACITY_BLOCKS,
        c.KV_LARGEST_FREE_RUN,
        c.KV_FREE_RUNS,
        c.KV_REGION_BLOCKS,
        c.KV_REGION_FREE_RUN,
    ):
        assert family.name not in present
    assert {labels[1] for _, labels in present["kvscope_kv_blocks"]} == {"evictable", "active"}
    assert {labels[1] for _, labels in present["kvscope_kv_bytes"]} == {"resident", "active"}


# -- what exists ------------------------------------------------------------------------------------------------------


OF_SWITCHED_OFF = {
    c.KV_MOVED_BLOCKS, c.KV_MOVE_SECONDS, c.KV_COMPACTION_RECOVERED, c.KV_PREFETCH_BLOCKS, c.CONTROLLER_CHANGES,
    c.REQUESTS_DEGRADED, c.SESSION_SNAPSHOTS, c.SESSION_STARTS, c.SESSION_TOKENS,
    c.KV_COPY_SECONDS,
}  # fmt: skip
OF_TENANTS = {c.TENANT_REQUESTS, c.TENANT_TTFT, c.TENANT_TOKENS}


def test_counters_of_a_mechanism_exist_with_zero_once_it_is_on() -> None:
    b = Bench()
    b.t.mechanisms.expect(moves=range(len(c.MOVES)), prefetch=True, controller=True, sessions=True, copies=True)
    shown = {family: rows for family, rows in b.t.snapshot() if family in OF_SWITCHED_OFF}
    assert shown.keys() == OF_SWITCHED_OFF
    assert all(row.value == 0 for rows in shown.values() for row in rows)


def test_counters_exist_with_zero_from_the_start() -> None:
    b = Bench()
    names = {family.name for family, rows in b.t.snapshot() if any(row.suffix in ("_total", "_count") for row in rows)}
    expected = {f.name for f in c.FAMILIES if f.kind in ("counter", "histogram") and "quantization" not in f.name}
    others = (*c.HOST_FAMILIES, *c.FOREIGN_FAMILIES, *c.FORECAST_FAMILIES)
    assert names == expected - {f.name for f in (*OF_SWITCHED_OFF, *OF_RESIDENCY, *OF_TENANTS, *others)}
    assert all(row.value == 0 for family, rows in b.t.snapshot() if family.kind != "info" for row in rows)
    states = {labels[1] for _, labels in rows_of(b.t.snapshot(), "kvscope_request_phase_seconds")}
    assert states == {"queued", "kv_wait", "prefill", "decode"}


def test_swapped_and_preempted_series_appear_once_they_occurred() -> None:
    b = Bench()
    b.t.preempted(b.submit())
    states = {labels[1] for _, labels in rows_of(b.t.snapshot(), "kvscope_request_phase_seconds")}
    assert states == {"queued", "kv_wait", "prefill", "decode", "preempted"}


def test_columns_keep_their_place_when_series_are_added() -> None:
    b = Bench(kv_dtype="int8")
    before, values = list(b.t.layout), b.t.values()
    b.t.quant_error(0, "0-9", "int8", 0.01, 100.0, 0.05, 10)
    after = b.t.layout
    assert len(values) == len(before) < len(after) == len(b.t.values())
    assert after[: len(before)] == before
    assert len(set(after)) == len(after)


def test_a_snapshot_holds_exactly_the_columns_that_exist() -> None:
    b = Bench(kv_dtype="int8")
    b.t.quant_error(0, "0-9", "int8", 0.01, 100.0, 0.05, 10)
    b.t.publish(kv_state(free=60, active=4, stored=50), [0, 2, 0], [1, 0, 0])
    b.serve(b.submit())
    columns = {
        (s.name, tuple(v for _, v in s.labels)): v
        for s, v in zip(b.t.layout, b.t.values(), strict=True)
        if not math.isnan(v)
    }
    rows = {(family.name + row.suffix, row.labels): row.value for family, rows in b.t.snapshot() for row in rows}
    assert rows == columns


def test_engine_info_marks_simulated_time() -> None:
    for virtual, clock in ((True, "virtual"), (False, "real")):
        (_, labels), one = next(iter(rows_of(Bench(virtual=virtual).t.snapshot(), "kvscope_engine").items()))
        assert one == 1
        assert labels[:5] == ("m", "torch", clock, "cpu", "auto")
        assert labels[5][0].isdigit()
