"""The observer around vLLM's front end, on classes of the same shape. The real ones are in tests/vllm_live."""

from __future__ import annotations

import gc
from types import SimpleNamespace as Stats
from typing import Any

import pytest

from exporters.vllm.frontend import Frontend, Request, install
from exporters.vllm.recorder import Recorder
from tests.vllm.harness import finished, iteration, recorder, source, total, values


class World:
    """One vLLM front end: classes of its own, so that each test installs the observer anew."""

    def __init__(self, classes: tuple[str, ...] = ("standard",), r: Recorder | None = None) -> None:
        class Processor:
            def __init__(self) -> None:
                self.request_states: dict[str, Any] = {}

            def add_request(self, request: Any, prompt: str | None, parent_req: Any = None) -> str:
                """vLLM's own words."""
                if request.request_id == "refused":
                    raise ValueError("vLLM refuses this")
                self.request_states.setdefault(request.request_id, state())
                return "added"

            def abort_requests(self, request_ids: Any, internal: bool) -> list[str]:
                return [i for i in request_ids if self.request_states.pop(i, None) is not None]

        class Iteration:
            def update_from_events(self, req_id: str, events: Any, is_prefilling: bool, *rest: Any) -> None:
                pass

        self.recorder = r or recorder()
        self.frontend = Frontend(classes, self.recorder.received, self.recorder.aborted, self.recorder.fault)
        self.installed = install(self.frontend, Processor, Iteration)
        self.recorder.watch(self.frontend)
        self.processor, self.iteration = Processor(), Iteration()

    def add(self, request_id: str, priority: int = 0, external: str | None = None) -> None:
        request = Stats(request_id=request_id, priority=priority, external_req_id=external)
        assert self.processor.add_request(request, None, parent_req=None) == "added"

    def finish(self, request_id: str, external: str, **fields: Any) -> None:
        del self.processor.request_states[request_id]
        self.recorder.record(None, iteration(finished_requests=[finished(request_id=external, **fields)]))

    def found(self) -> dict[tuple[Any, ...], float]:
        return values(next(iter(self.recorder.observed.values())))


def state(**changes: Any) -> Stats:
    stats = Stats(first_token_latency=0.25, num_generation_tokens=7)
    return Stats(**{"is_prefilling": True, "prompt_len": 100, "num_cached_tokens": 0, "stats": stats, **changes})


def test_an_abort_counts_once_and_what_vllm_answers_is_passed_on() -> None:
    world = World()
    for name in ("a", "b", "c"):
        world.add(name)
    assert world.processor.abort_requests(["a", "nobody"], internal=True) == ["a"]
    assert world.processor.abort_requests(iter(["a", "b"]), True) == ["b"]
    world.finish("c", "c")
    found = world.found()
    assert total(found, "kvscope_requests_received_total") == 3
    assert total(found, "kvscope_requests_total", "abort") == 2
    assert total(found, "kvscope_requests_total", "length") == 1
    assert world.frontend.requests == world.frontend._by_external == {}


def test_a_request_aborted_after_its_prefill_still_counts_its_lookup() -> None:
    world = World()
    world.add("early")
    world.add("late")
    world.processor.request_states["late"].is_prefilling = False
    world.processor.request_states["late"].num_cached_tokens = 64
    world.processor.abort_requests(["early", "late"], True)
    found = world.found()
    assert total(found, "kvscope_kv_lookups_total") == 1
    assert total(found, "kvscope_kv_hit_tokens_total") == 64


def test_when_everything_is_aborted_the_gauges_say_idle() -> None:
    from tests.vllm.harness import scheduler

    world = World()
    for i in range(106):
        world.add(str(i))
    world.recorder.record(scheduler(num_running_reqs=106, num_waiting_reqs=0, kv_cache_usage=0.99), None)
    assert world.found()["kvscope_requests_running", "smol", "standard"] == 106
    world.processor.abort_requests([str(i) for i in range(106)], True)
    found = world.found()
    assert found["kvscope_requests_running", "smol", "standard"] == 0
    assert found["kvscope_kv_blocks", "smol", "active"] == 0
    assert found["kvscope_kv_blocks", "smol", "allocatable"] == 100


def test_samples_of_one_prompt_end_one_by_one() -> None:
    world = World()
    for i in range(3):
        world.add(f"{i}_p", external="p")
    world.finish("1_p", "p")
    assert set(world.frontend.requests) == {"0_p", "2_p"}
    world.processor.abort_requests(["0_p", "2_p"], True)
    assert (
        total(world.found(), "kvscope_requests_total") == total(world.found(), "kvscope_requests_received_total") == 3
    )


def test_a_further_chunk_of_a_request_is_not_a_new_request() -> None:
    world = World()
    world.add("a")
    world.add("a")
    assert total(world.found(), "kvscope_requests_received_total") == 1


def test_preempted_time_is_taken_out_of_the_state_in_which_it_fell() -> None:
    world = World()
    world.add("a")
    queued, scheduled, preempted = (lambda t, k=k: Stats(type=k, timestamp=t) for k in (1, 2, 3))
    world.iteration.update_from_events("a", [queued(10.0), scheduled(10.1), preempted(10.2), scheduled(10.3)], True)
    world.iteration.update_from_events("a", [preempted(10.5), scheduled(10.75)], False, None, None)
    world.iteration.update_from_events("unknown", [preempted(1.0)], False)
    world.finish("a", "a", e2e_latency=1.0, queued_time=0.1, prefill_time=0.3, decode_time=0.5)
    found = world.found()
    phases = {k[2]: v for k, v in found.items() if k[0] == "kvscope_request_phase_seconds_total" and k[-1] == "0"}
    assert phases == pytest.approx({"frontend": 0.1, "queued": 0.1, "prefill": 0.2, "decode": 0.25, "preempted": 0.35})


def test_priorities_become_classes_and_totals_say_that_theirs_is_unknown() -> None:
    from observability import catalog as c
    from tests.vllm.harness import scheduler

    world = World(c.CLASSES, recorder(classes=c.CLASSES, class_of_totals="unknown"))
    for name, priority in (("urgent", -5), ("plain", 0), ("batch", 9), ("gone", 9)):
        world.add(name, priority)
    world.processor.request_states["gone"].is_prefilling = False
    world.recorder.record(
        scheduler(num_running_reqs=4),
        iteration(time_to_first_tokens_iter=[0.25], inter_token_latencies_iter=[0.02, 0.03]),
    )
    assert world.found()["kvscope_requests_running", "smol", "unknown"] == 4
    assert ("kvscope_requests_running", "smol", "standard") not in world.found()
    world.processor.abort_requests(["gone"], True)
    for name in ("urgent", "plain", "batch"):
        world.finish(name, name)
    found = world.found()
    for name, ended in (("interactive", 1), ("standard", 1), ("long_context", 2)):
        assert found["kvscope_requests_received_total", "smol", name] == ended
        assert total(found, "kvscope_requests_total", name) == ended
        assert found["kvscope_time_to_first_token_seconds_count", "smol", name] == ended
        assert found["kvscope_prompt_tokens_total", "smol", name] == 100 * ended
    assert found["kvscope_generation_tokens_total", "smol", "long_context"] == 9 + 7
    assert found["kvscope_inter_token_latency_seconds_count", "smol", "unknown"] == 2
    assert total(found, "kvscope_telemetry_anomalies_total") == 0


def test_vllm_s_own_errors_pass_and_the_observer_s_never_do() -> None:
    world = World()
    with pytest.raises(ValueError, match="vLLM refuses this"):
        world.add("refused")
    assert world.frontend.requests == {}
    world.add("a")
    world.frontend.on_received = world.frontend.on_abort = None  # type: ignore[assignment]
    world.add("b")
    assert world.processor.abort_requests(["a", "b"], True) == ["a", "b"]
    world.iteration.update_from_events("a", None, True)
    assert total(world.found(), "kvscope_telemetry_anomalies_total", "record_error") >= 2


def test_a_vllm_without_these_functions_leaves_them_out() -> None:
    frontend = Frontend(("standard",), lambda _: None, lambda _: None, lambda _: None)

    class Bare:
        pass

    class Half(Bare):
        def add_request(self) -> None: ...

        def abort_requests(self) -> None: ...

    assert install(frontend, Bare, Bare) == (False, False)
    assert install(frontend, Half, Bare) == (True, False)
    told = {"kvscope_requests_received": ("no", "vLLM's front end was not found")}
    r = recorder(outcomes=("stop", "length", "error", "rejected"), families=source().families | told)
    r.record(None, iteration(finished_requests=[finished()]))
    names = {key[0] for key in values(r.observed["0"])}
    assert "kvscope_requests_received_total" not in names
    assert total(values(r.observed["0"]), "kvscope_requests_total", "length") == 1


def test_the_wrapped_functions_keep_their_names_and_hold_no_engine_alive() -> None:
    world = World()
    assert type(world.processor).add_request.__doc__ == "vLLM's own words."
    assert type(world.processor).add_request.__name__ == "add_request"
    world.add("a")
    import weakref

    gone = weakref.ref(world.processor)
    world.processor = None  # type: ignore[assignment]
    gc.collect()
    assert gone() is None
    assert isinstance(world.frontend.requests["a"], Request)
