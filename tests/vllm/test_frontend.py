"""The observer around vLLM's front end, on classes of the same shape. The real ones are in tests/vllm_live."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from types import SimpleNamespace as Stats
from typing import Any

import pytest

from exporters.vllm.frontend import Frontend, Request, install
from exporters.vllm.recorder import Recorder, Settings
from exporters.vllm.siblings import Siblings
from tests.vllm.harness import finished, iteration, recorder, scheduler, source, total, values


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


# -- engines that have nothing to do --------------------------------------------------------------------------------------

UPDATED = ("kvscope_last_update_timestamp_seconds", "smol", "engine")
RUNNING = ("kvscope_requests_running", "smol", "standard")


def ranks(now: list[float], siblings: Siblings | None = None, **settings: bool) -> World:
    """A front end of two data-parallel ranks, by the clock `now`."""
    r = Recorder(source(), Settings(block_size=16, capacity_blocks=101, **settings), (0, 1), siblings)
    for observed in r.observed.values():
        observed.wall_clock = lambda: now[0]
    return World(r=r)


def said(world: World) -> list[tuple[float, float]]:
    """Time of the last update and requests running, by rank."""
    return [(found[UPDATED], found[RUNNING]) for name in "01" for found in (values(world.recorder.observed[name]),)]


def test_a_vllm_that_nobody_has_asked_yet_stays_fresh() -> None:
    now = [1000.0]
    world = ranks(now)
    for now[0] in (1000.0, 1015.0, 1600.0):
        assert said(world) == [(now[0], 0), (now[0], 0)]


def test_an_idle_rank_stays_fresh_while_another_works() -> None:
    now = [1000.0]
    world = ranks(now)
    world.add("long")
    world.recorder.record(scheduler(num_running_reqs=0, num_waiting_reqs=0), None, 1)
    for now[0] in (1000.0, 1100.0, 1300.0):
        world.recorder.record(scheduler(num_running_reqs=1, num_waiting_reqs=0), None, 0)
        assert said(world) == [(now[0], 1), (now[0], 0)]


def test_a_rank_whose_requests_are_all_aborted_reads_idle_while_another_works() -> None:
    now = [1000.0]
    world = ranks(now)
    for name in ("long", "a", "b"):
        world.add(name)
    world.recorder.record(scheduler(num_running_reqs=1, num_waiting_reqs=1), None, 1)
    world.processor.abort_requests(["a", "b"], True)
    now[0] = 1060.0
    world.recorder.record(scheduler(num_running_reqs=1, num_waiting_reqs=0), None, 0)
    assert said(world) == [(1060, 1), (1060, 0)]


@pytest.mark.parametrize("before", [0, 1], ids=["stopped at its first request", "stopped amid its work"])
def test_a_rank_that_hangs_grows_old_while_another_works(before: int) -> None:
    now = [1000.0]
    world = ranks(now)
    world.add("lost")
    world.recorder.record(scheduler(num_running_reqs=before, num_waiting_reqs=0), None, 1)
    world.add("long")
    for now[0] in (1001.0, 1100.0, 1300.0):
        world.recorder.record(scheduler(num_running_reqs=1, num_waiting_reqs=0), None, 0)
        assert said(world) == [(now[0], 1), (1000, before)]


def test_front_ends_in_several_processes_know_whether_all_of_them_are_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exporters.vllm.siblings._EVERY_SECONDS", 0.0)
    now = [1000.0]
    monkeypatch.setattr("os.getpid", lambda: 11)
    a = ranks(now, Siblings(tmp_path), several_processes=True)
    assert said(a) == [(1000, 0), (1000, 0)], "nobody has asked yet"
    a.add("short")  # from now on it watches its own processor
    a.processor.abort_requests(["short"], True)
    monkeypatch.setattr("os.getpid", lambda: 12)
    b = ranks(now, Siblings(tmp_path), several_processes=True)
    assert said(b) == [(1000, 0), (1000, 0)]
    a.add("long")
    said(a)
    for now[0] in (1050.0, 1200.0):  # b has nothing to do, and must not say that the engine of a has nothing to do
        a.recorder.record(scheduler(num_running_reqs=1, num_waiting_reqs=0), None, 0)
        assert said(a) == [(now[0], 1), (now[0], 0)]
        assert said(b)[0] == (1000, 0)
        assert said(b)[1] == (now[0], 0)
    now[0] = 1500.0  # the engine of a hangs
    assert [said(a)[0], said(b)[0]] == [(1200, 1), (1000, 0)]
    a.processor.abort_requests(["long"], True)
    said(a)
    assert said(b) == said(a) == [(1500, 0), (1500, 0)]


def test_a_front_end_that_has_ended_keeps_no_engine_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "kvscope-7.json"
    gone.write_text("[3, true, [[0, [990.0, 3]]]]")
    world = ranks([1000.0], Siblings(tmp_path), several_processes=True)
    found = values(world.recorder.observed["0"])
    assert UPDATED not in found, "its requests are in flight"
    os.utime(gone, (1000.0, 1000.0))
    monkeypatch.setattr("exporters.vllm.siblings._EVERY_SECONDS", 0.0)
    assert said(ranks([1000.0], Siblings(tmp_path), several_processes=True)) == [(1000, 0), (1000, 0)]


def test_a_folder_that_cannot_be_written_is_counted_and_raises_nothing(tmp_path: Path) -> None:
    world = ranks([1000.0], Siblings(tmp_path / "none"), several_processes=True)
    world.found()
    front = values(world.recorder.observed["frontend"])
    assert total(front, "kvscope_telemetry_anomalies_total", "record_error") > 0
    for rank in ("0", "1"):  # nobody knows what the others have in flight, however often it is asked for
        assert UPDATED not in values(world.recorder.observed[rank])


def test_a_broken_file_of_another_front_end_is_no_sign_of_idleness(tmp_path: Path) -> None:
    (tmp_path / "kvscope-1.json").write_text("[3, tr")
    (tmp_path / "kvscope-7.json").write_text("[7, true, [[0, [990.0, 7]]]]")
    world = ranks([1000.0], Siblings(tmp_path), several_processes=True)
    world.found()
    for rank in ("0", "1"):
        assert UPDATED not in values(world.recorder.observed[rank])


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
