"""What the plug-in makes of vLLM's statistics, whole and broken. Nothing is ever raised, and what is unknown stays absent."""

from __future__ import annotations

import math
from enum import IntEnum
from types import SimpleNamespace as Stats
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporters.vllm.capabilities import FAMILIES, families
from exporters.vllm.recorder import Recorder, Settings
from observability import catalog as c
from tests.vllm.harness import finished, iteration, recorder, scheduler, source, total, values


class Reason(IntEnum):
    """As vLLM's FinishReason: an integer whose text is the reason."""

    STOP = 0
    LENGTH = 1
    REPETITION = 4

    def __str__(self) -> str:
        return self.name.lower()


def test_intervals_and_first_tokens_fall_into_the_bucket_that_holds_them() -> None:
    r = recorder()
    ttft, itl = [0.0009, 0.3, 0.81, 700.0], [0.02] * 30 + [0.5, 0.00001]
    r.record(None, iteration(time_to_first_tokens_iter=ttft, inter_token_latencies_iter=itl, num_generation_tokens=36))
    found = values(r.observed["0"])
    for family, seconds in ((c.TIME_TO_FIRST_TOKEN, ttft), (c.INTER_TOKEN_LATENCY, itl)):
        for bound in (*family.bounds, math.inf):
            le = "+Inf" if bound == math.inf else str(float(bound))
            assert found[f"{family.name}_bucket", "smol", "standard", le] == sum(s <= bound for s in seconds)
        assert found[f"{family.name}_sum", "smol", "standard"] == pytest.approx(sum(seconds))
    assert found["kvscope_generation_tokens_total", "smol", "standard"] == 36


@given(st.lists(st.tuples(*[st.floats(0, 20)] * 4), min_size=1, max_size=20))
def test_the_make_up_of_any_tail_adds_up_to_its_latency(requests: list[tuple[float, ...]]) -> None:
    r = recorder()
    latencies = []
    for parts in requests:
        latencies.append(sum(parts))
        fields = dict(zip(("queued_time", "prefill_time", "decode_time"), parts, strict=False))
        r.record(None, iteration(finished_requests=[finished(e2e_latency=latencies[-1], **fields)]))
    found = values(r.observed["0"])
    for bound in c.TAIL_BOUNDS:
        slower = [x for x in latencies if x > bound or bound == 0.0]
        assert found["kvscope_request_phase_requests_total", "smol", f"{bound:g}"] == len(slower)
        parts_sum = sum(
            v for k, v in found.items() if k[0] == "kvscope_request_phase_seconds_total" and k[-1] == f"{bound:g}"
        )
        assert parts_sum == pytest.approx(sum(slower), abs=1e-6)
    assert total(found, "kvscope_telemetry_anomalies_total") == 0


@pytest.mark.parametrize(("tokens", "blocks"), [(16, 0), (17, 1), (32, 1), (33, 2), (1, 0)])
def test_a_hittable_token_is_in_a_whole_block_that_leaves_one_to_compute(tokens: int, blocks: int) -> None:
    r = recorder()
    r.record(None, iteration(finished_requests=[finished(num_prompt_tokens=tokens, num_cached_tokens=0)]))
    assert total(values(r.observed["0"]), "kvscope_kv_hittable_tokens_total") == 16 * blocks


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"queued_time": -81234.5}, "missing_milestone"),  # scheduled never set: 0 - queued
        ({"prefill_time": 81234.5}, "milestone_order"),  # scheduled never set: first token - 0
        ({"decode_time": -0.2}, "missing_milestone"),
        ({"decode_time": math.nan}, "unreadable_field"),
        ({"prefill_time": "0.3"}, "unreadable_field"),
        ({"queued_time": None}, "unreadable_field"),
    ],
)
def test_a_time_that_was_never_set_gives_no_make_up_and_an_anomaly(fields: dict[str, Any], reason: str) -> None:
    r = recorder()
    r.record(None, iteration(finished_requests=[finished(**fields)]))
    found = values(r.observed["0"])
    assert found["kvscope_telemetry_anomalies_total", "smol", reason] == 1
    assert total(found, "kvscope_request_phase_seconds_total") == 0
    assert total(found, "kvscope_request_phase_requests_total") == 0
    assert found["kvscope_request_duration_seconds_count", "smol", "standard"] == 1  # that was measured by itself


def test_reasons_by_name_and_what_a_future_vllm_calls_otherwise() -> None:
    r = recorder()
    reasons = [Reason.STOP, Reason.LENGTH, Reason.REPETITION, "abort", "error", "evicted_by_moonlight"]
    r.record(None, iteration(finished_requests=[finished(finish_reason=x) for x in reasons]))
    found = values(r.observed["0"])
    outcomes = {o: found["kvscope_requests_total", "smol", "standard", o] for o in ("stop", "length", "abort", "error")}
    assert outcomes == {"stop": 2, "length": 1, "abort": 1, "error": 2}
    assert found["kvscope_label_folds_total", "outcome"] == 1
    assert found["kvscope_request_duration_seconds_count", "smol", "standard"] == 3


def test_preempted_lookups_are_recomputation_and_never_hits() -> None:
    r = recorder()
    cache = Stats(requests=0, queries=0, hits=0, preempted_requests=2, preempted_queries=500, preempted_hits=320)
    r.record(scheduler(prefix_cache_stats=cache), iteration(num_preempted_reqs=2))
    found = values(r.observed["0"])
    assert found["kvscope_kv_recomputed_tokens_total", "smol", "kv_exhausted"] == 180
    assert found["kvscope_preemptions_total", "smol", "kv_exhausted"] == 2
    assert total(found, "kvscope_kv_queried_tokens_total") == total(found, "kvscope_kv_hit_tokens_total") == 0


def test_steps_exist_once_vllm_is_asked_to_log_them() -> None:
    r = recorder()
    r.record(scheduler(), None)
    assert not any(key[0].startswith("kvscope_step") for key in values(r.observed["0"]))
    for prefills, decodes in ((1, 0), (0, 3), (2, 2)):
        details = Stats(
            num_ctx_requests=prefills, num_ctx_tokens=100 * prefills, num_generation_requests=decodes,
            num_generation_tokens=decodes, elapsed_ms=12.5, is_dummy=False,
        )  # fmt: skip
        r.record(scheduler(iteration_details=details), None)
    found = values(r.observed["0"])
    assert [found["kvscope_steps_total", "smol", kind] for kind in c.STEP_KINDS] == [1, 1, 1]
    assert found["kvscope_step_duration_seconds_sum", "smol", "mixed"] == pytest.approx(0.0125)
    assert found["kvscope_step_tokens_total", "smol", "prefill"] == 300
    assert found["kvscope_step_tokens_total", "smol", "decode"] == 5


def test_what_vllm_cannot_tell_is_absent_and_says_why() -> None:
    r = recorder()
    r.record(scheduler(), iteration(finished_requests=[finished()]))
    found = values(r.observed["0"])
    names = {key[0] for key in found}
    marked = {key[3]: key[4:] for key in found if key[0] == "kvscope_source_family_info"}
    assert set(marked) == {family.name for family in c.FAMILIES}
    for family in c.FAMILIES:
        status, reason = marked[family.name]
        assert (status == "yes") == (reason == "")
        shown = any(name.startswith(family.name) and name.removeprefix(family.name) in
                    ("", "_total", "_info", "_bucket", "_sum", "_count") for name in names)  # fmt: skip
        if status == "no":
            assert not shown, family.name
        elif family not in (c.STEPS, c.STEP_DURATION, c.STEP_TOKENS):
            assert shown, family.name
    assert set(FAMILIES) <= set(marked)


def test_without_prefix_caching_there_is_no_hit_rate() -> None:
    r = recorder(families=families(prefix_cache=False, frontend=True))
    r.record(scheduler(), iteration(finished_requests=[finished(num_cached_tokens=0)]))
    assert not any(
        key[0].startswith(("kvscope_kv_lookups", "kvscope_kv_h", "kvscope_kv_q")) for key in values(r.observed["0"])
    )


def test_each_engine_of_a_data_parallel_vllm_has_series_of_its_own() -> None:
    r = Recorder(source(), Settings(block_size=16, capacity_blocks=101), engines=(0, 1))
    r.record(scheduler(num_running_reqs=3), iteration(finished_requests=[finished()]), 0)
    r.record(scheduler(num_running_reqs=5), None, 1)
    r.received(0)
    running = {name: values(o).get(("kvscope_requests_running", "smol", "standard")) for name, o in r.observed.items()}
    assert running == {"0": 3, "1": 5, "frontend": None}
    assert [total(values(o), "kvscope_requests_total") for o in r.observed.values()] == [1, 0, 0]
    assert [total(values(o), "kvscope_requests_received_total") for o in r.observed.values()] == [0, 0, 1]


def test_an_engine_that_nobody_announced_is_an_anomaly() -> None:
    r = recorder()
    r.record(scheduler(), iteration(), 7)
    assert total(values(r.observed["0"]), "kvscope_telemetry_anomalies_total", "record_error") == 1


# -- broken, missing and future fields ------------------------------------------------------------------------------------

BROKEN = (None, "many", -1, 1e400, math.nan, [], object(), b"\x00", {"a": 1}, True, 10**400, (1, 2), Stats())


class Hostile:
    """Raises whatever one does with it."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __bool__(self) -> bool:
        raise RuntimeError("bool")

    __iter__ = __eq__ = __lt__ = __float__ = __str__ = __len__ = __bool__  # type: ignore[assignment]
    __hash__ = object.__hash__


def healthy(r: Recorder) -> None:
    """The recorder still takes a good iteration, and shows no number that is none."""
    before = total(values(r.observed["0"]), "kvscope_requests_total", "length")
    r.record(
        scheduler(), iteration(finished_requests=[finished()], num_generation_tokens=3, time_to_first_tokens_iter=[0.1])
    )
    found = values(r.observed["0"])
    assert total(found, "kvscope_requests_total", "length") == before + 1
    assert found["kvscope_requests_running", "smol", "standard"] == 2
    assert all(type(v) in (int, float) and 0 <= v < 1e300 for v in found.values()), found


FIELDS = [(make, name) for make in (scheduler, iteration, finished) for name in vars(make())]


@pytest.mark.parametrize(("make", "name"), FIELDS, ids=[f"{make.__name__}.{name}" for make, name in FIELDS])
def test_any_field_may_be_missing_or_of_another_kind(make: Any, name: str) -> None:
    r = recorder()
    for value in (*BROKEN, Hostile(), "missing"):
        stats = make(**{name: value})
        if value == "missing" if isinstance(value, str) else False:
            delattr(stats, name)
        if make is scheduler:
            r.record(stats, iteration(time_to_first_tokens_iter=[0.1]))
        elif make is iteration:
            r.record(scheduler(), stats)
        else:
            r.record(scheduler(), iteration(finished_requests=[stats, finished()]))
    healthy(r)


@pytest.mark.parametrize("stats", [*BROKEN, Hostile], ids=lambda _: "")
def test_whole_objects_of_another_kind(stats: Any) -> None:
    r = recorder()
    stats = Hostile() if stats is Hostile else stats
    r.record(stats, stats, 0)
    r.record(
        scheduler(prefix_cache_stats=stats, iteration_details=stats),
        iteration(finished_requests=[stats], inter_token_latencies_iter=[stats, 0.1]),
    )
    r.record(scheduler(), iteration(), stats)
    healthy(r)


def test_fields_of_a_future_vllm_are_ignored() -> None:
    r = recorder()
    r.record(scheduler(num_dreaming_reqs=4), iteration(finished_requests=[finished(mood="calm")], hyper_tokens=[1, 2]))
    healthy(r)
    assert total(values(r.observed["0"]), "kvscope_telemetry_anomalies_total") == 0


def test_a_gauge_whose_field_is_gone_is_absent_and_not_its_last_value() -> None:
    r = recorder()
    r.record(scheduler(), None)
    stats = scheduler()
    del stats.kv_cache_usage, stats.num_running_reqs
    r.record(stats, None)
    found = values(r.observed["0"])
    assert ("kvscope_requests_running", "smol", "standard") not in found
    assert ("kvscope_kv_blocks", "smol", "active") not in found
    assert found["kvscope_requests_waiting", "smol", "standard"] == 1
    assert found["kvscope_telemetry_anomalies_total", "smol", "unreadable_field"] == 2


@pytest.mark.parametrize("name", ["num_running_reqs", "num_waiting_reqs", "num_skipped_waiting_reqs"])
def test_a_number_larger_than_any_float_is_no_number(name: str) -> None:
    r = recorder()
    r.record(scheduler(**{name: 10**400}), None)
    assert all(float(value) < 1e300 for value in values(r.observed["0"]).values())
