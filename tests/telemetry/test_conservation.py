"""Phases add up: whatever happens to a request and however it ends, its seconds by state and component sum to its latency, and the make-up
of the slowest requests that Prometheus reads is the one of these requests themselves.

Loads are crowded on purpose: a pool that is too small for them, a host tier behind it, requests that leave in every state, steps and moves
that fail. What a request spent in each state is also taken down by a watcher that knows only the clock.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from exporters.text import render
from observability import catalog as c
from observability.engine.engine import Engine
from observability.telemetry.recorder import RequestRecord, Telemetry
from tests.engine.support import CheckingExecutor, TimedExecutor, assert_idle_and_whole, make_engine, make_request
from tests.engine.test_mechanisms import engines, load
from tests.telemetry.bench import total

torch = pytest.importorskip("torch")

from observability.engine.clock import MonotonicClock  # noqa: E402
from observability.engine.executor.torch_executor import TorchExecutor  # noqa: E402
from observability.engine.model.loading import load_model  # noqa: E402
from observability.engine.types import EngineConfig, PromptSpan, Request, SamplingParams  # noqa: E402

SERVED = ("stop", "length")
#: Too small for the loads below; what does not fit is swapped to the host.
CROWDED = {
    "num_blocks": 24, "num_host_blocks": 40, "max_model_len": 64, "max_num_batched_tokens": 12, "max_num_seqs": 6,
    "max_queued": 1000, "contiguous_below": 0,
}  # fmt: skip


class Watch:
    """Follows each request of `engine` by the calls that tell its states, and notes the time at each with `now`."""

    def __init__(self, engine: Engine, now: Callable[[], float]) -> None:
        self.records: list[RequestRecord] = []
        self.state_seconds: dict[str, Counter[int]] = defaultdict(Counter)
        self.ended_in: Counter[tuple[str, str]] = Counter()  # (state, outcome)
        self._state: dict[str, tuple[int, float]] = {}
        t = engine.telemetry
        t.on_finish = self.records.append
        arrive, transition, finish = t.arrive, t.transition, t.finish

        def watched_arrive(request_id, request_class, prompt, arrival, *rest, **more):  # type: ignore[no-untyped-def]
            self._state[request_id] = (0, arrival)
            return arrive(request_id, request_class, prompt, arrival, *rest, **more)

        def watched_transition(trace, state):  # type: ignore[no-untyped-def]
            self._leave(trace.request_id, state, now())
            transition(trace, state)

        def watched_finish(trace, outcome, at):  # type: ignore[no-untyped-def]
            self.ended_in[c.STATES[self._state[trace.request_id][0]], outcome] += 1
            self._leave(trace.request_id, -1, at)
            finish(trace, outcome, at)

        t.arrive, t.transition, t.finish = watched_arrive, watched_transition, watched_finish  # type: ignore[method-assign]

    def _leave(self, request_id: str, to: int, when: float) -> None:
        state, since = self._state[request_id]
        self.state_seconds[request_id][state] += when - since  # type: ignore[assignment]
        self._state[request_id] = (to, when)

    def check(self, requests: int, telemetry: Telemetry) -> None:
        assert len(self.records) == requests
        for record in self.records:
            scale = 1e-9 * max(1.0, record.finished)
            assert abs(record.matrix.sum() - (record.finished - record.arrival)) < scale
            assert record.matrix.min() >= -1e-12
            seconds = self.state_seconds[record.request_id]
            for state, row in enumerate(record.matrix):
                assert abs(row.sum() - seconds[state]) < scale, (record.request_id, c.STATES[state])
        served = [r for r in self.records if r.outcome in SERVED]
        exported = np.zeros((len(c.STATES), len(c.COMPONENTS)))
        for state, component, seconds in tail_rows(telemetry, "0"):
            exported[c.STATES.index(state), c.COMPONENTS.index(component)] = seconds
        np.testing.assert_allclose(exported, np.sum([r.matrix for r in served], axis=0), atol=1e-7)
        assert total(telemetry, "kvscope_telemetry_anomalies_total") == 0


def samples(telemetry: Telemetry) -> list:  # type: ignore[type-arg]
    text = render(telemetry.snapshot(), openmetrics=False).decode()
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def tail_rows(telemetry: Telemetry, gt: str) -> list[tuple[str, str, float]]:
    """(state, component, seconds) of one bound, out of the exposition's text."""
    return [
        (s.labels["state"], s.labels["component"], s.value)
        for s in samples(telemetry)
        if s.name == "kvscope_request_phase_seconds_total" and s.labels["gt"] == gt
    ]


def fail_sometimes(executor: object, dice: random.Random, share: float) -> None:
    """Steps and moves of `executor` raise from time to time, before they do anything."""
    for name in ("execute", "copy_blocks", "compress_blocks", "offload_blocks", "load_blocks"):
        work = getattr(executor, name)

        def failing(*args, work=work, name=name):  # type: ignore[no-untyped-def]
            if dice.random() < share:
                raise RuntimeError(f"{name} failed")
            return work(*args)

        setattr(executor, name, failing)


def step(engine: Engine) -> bool:
    try:
        return engine.step()
    except RuntimeError as error:
        engine.fail_running(str(error))
        return True


def drive(engine: Engine, operations: list[tuple]) -> list[Request]:  # type: ignore[type-arg]
    requests: list[Request] = []
    clock = engine.executor.clock
    for operation, *arguments in operations:
        if operation == "add":
            prompt, max_tokens, request_class, patience = arguments
            back = 0.003 * (len(requests) % 3)  # picked up a while after it came
            request = make_request(
                prompt, max_tokens, request_class=request_class, arrival=max(clock.now() - back, 0.0)
            )
            request.deadline = None if patience is None else clock.now() + patience
            engine.add(request)
            requests.append(request)
        elif operation == "step":
            for _ in range(arguments[0]):
                step(engine)
        elif requests:
            engine.abort(requests[arguments[0] % len(requests)], arguments[1])
    while step(engine):
        engine.check_integrity()
    return requests


@settings(max_examples=25, deadline=None)
@given(engines, st.integers(0, 2**32), st.sampled_from([0.0, 0.0, 0.03]))
def test_phases_sum_to_latency_under_any_settings_and_any_load(config, seed, failures) -> None:  # type: ignore[no-untyped-def]
    engine = make_engine(**config)
    fail_sometimes(engine.executor, random.Random(seed), failures)
    watch = Watch(engine, engine.executor.clock.now)
    requests = drive(engine, load(seed))
    watch.check(len(requests), engine.telemetry)
    assert_idle_and_whole(engine)


def abort_in(engine: Engine, dice: random.Random, share: float) -> None:
    """Some clients leave, whatever state their request is in."""
    for held in (engine.scheduler.waiting(), engine.scheduler.running()):
        for request in list(held):
            if dice.random() < share:
                engine.abort(request)


@pytest.fixture(scope="module")
def crowds() -> list[tuple[Engine, Watch, int]]:
    """Seeded crowded loads in virtual time, with and without swapping, with aborts, deadlines and failures in every state."""
    out = []
    for seed in range(16):
        dice = random.Random(seed)
        swapping = seed % 2 == 0
        executor = CheckingExecutor(4)
        executor.move_seconds = 0.02
        engine = make_engine(
            executor, **CROWDED | {"swapping": swapping, "prefix_caching": seed % 4 < 2, "prefetch_lookahead": 0}
        )
        if seed % 4 == 3:
            fail_sometimes(executor, dice, 0.01)
        watch, added = Watch(engine, executor.clock.now), 0
        talks = [[dice.randrange(1000) for _ in range(40)] for _ in range(3)]
        for _ in range(400):
            if engine.num_waiting < 8 and dice.random() < 0.5:
                prompt = [*dice.choice(talks)[: dice.randrange(4, 36)], *(dice.randrange(1000) for _ in range(4))]
                request = make_request(prompt, dice.randrange(1, 24), arrival=executor.clock.now())
                if dice.random() < 0.2:
                    request.deadline = executor.clock.now() + dice.uniform(0.02, 1.5)
                engine.add(request)
                added += 1
            step(engine)
            abort_in(engine, dice, 0.01)
        while step(engine):
            pass
        out.append((engine, watch, added))
    return out


def test_phases_sum_to_latency_in_crowds_where_requests_wait_swap_and_start_again(crowds) -> None:  # type: ignore[no-untyped-def]
    for engine, watch, added in crowds:
        watch.check(added, engine.telemetry)
        assert_idle_and_whole(engine)
    spent = sum((np.sum([r.matrix for r in watch.records], axis=0) for _, watch, _ in crowds))
    assert (spent.sum(axis=1) > 0.1).all(), dict(zip(c.STATES, spent.sum(axis=1), strict=True))


@pytest.mark.parametrize("state", c.STATES)
@pytest.mark.parametrize("outcome", ["abort", "deadline"])
def test_requests_of_the_crowds_ended_in_every_state(crowds, state, outcome) -> None:  # type: ignore[no-untyped-def]
    assert sum(watch.ended_in[state, outcome] for _, watch, _ in crowds) > 0


def test_requests_of_the_crowds_failed_while_they_ran(crowds) -> None:  # type: ignore[no-untyped-def]
    for state in ("prefill", "decode"):
        assert sum(watch.ended_in[state, "error"] for _, watch, _ in crowds) > 0


def test_phases_sum_to_latency_where_virtual_time_takes_runs_of_steps_at_once() -> None:
    executor = TimedExecutor()
    executor.move_seconds = 0.004
    engine = make_engine(
        executor, num_blocks=60, num_host_blocks=90, contiguous_below=0, max_model_len=128, max_num_batched_tokens=40
    )
    watch, dice, requests = Watch(engine, executor.clock.now), random.Random(3), []
    taken: list[int] = []
    execute = executor.execute

    def counted(*args):  # type: ignore[no-untyped-def]
        result = execute(*args)
        taken.append(len(result.ends))
        return result

    executor.execute = counted  # type: ignore[method-assign]
    for i in range(120):
        prompt = PromptSpan(dice.randrange(4, 90), (dice.randrange(12),), 512)
        requests.append(Request(f"r{i}", prompt, SamplingParams(max_tokens=dice.randrange(1, 38)), arrival=i * 0.13))
        requests[-1].deadline = requests[-1].arrival + 0.6 if i % 9 == 0 else None
    engine.run(requests)
    watch.check(120, engine.telemetry)
    assert total(engine.telemetry, "kvscope_steps_total") == sum(taken) > len(taken) + 100
    reached = {c.STATES[s] for r in watch.records for s in np.flatnonzero(r.matrix.sum(axis=1))}
    assert reached >= {"queued", "prefill", "decode", "swapped"}


# -- a real model in real time --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real() -> tuple[Engine, Watch, int]:
    """The tiny model under a crowded load on the torch executor, first with swapping and then without."""
    torch.set_num_threads(1)
    clock, model = MonotonicClock(), load_model("tiny")
    config = EngineConfig(
        block_size=16, num_blocks=24, num_host_blocks=60, max_num_seqs=6, max_num_batched_tokens=48, max_model_len=256,
        max_queued=200, contiguous_below=0, num_compressed_blocks=40, compressed_from=128, recent_window=32, prefetch_lookahead=0,
    )  # fmt: skip
    telemetry = Telemetry("tiny", executor="torch", virtual=False, device="cpu", kv_dtype="float32", clock=clock.now)
    executor = TorchExecutor(model, config, telemetry, clock=clock)
    engine = Engine(config, executor, telemetry)
    watch, dice, added = Watch(engine, lambda: telemetry.last), random.Random(1), 0
    execute = executor.execute
    talks = [[dice.randrange(3, 250) for _ in range(120)] for _ in range(4)]

    def reached() -> bool:
        return bool((sum((r.matrix for r in watch.records), np.zeros((len(c.STATES), 1))).sum(axis=1) > 0).all())

    # How often which state is reached in a thousand turns is the machine's affair: a slow one takes some turns more.
    for turn in range(5000):
        if turn >= 1000 and reached():
            break
        cheap = (turn // 40) % 2  # what a sequence that has to give way costs to compute again: nothing, or much
        executor.recompute_seconds = lambda tokens, cheap=cheap: 0.0 if cheap else 1e3  # type: ignore[method-assign]
        if engine.num_waiting < 8 and not 880 <= turn < 1000:
            talk = (
                [dice.randrange(3, 250) for _ in range(120)] if added % 5 == 2 else dice.choice(talks)
            )  # new: nothing is cached
            prompt = [*talk[: dice.randrange(8, 120)], *(dice.randrange(3, 250) for _ in range(8))]
            params = SamplingParams(max_tokens=dice.randrange(1, 60), ignore_eos=True)
            request = Request(f"r{added}", prompt, params, arrival=clock.now())
            if added % 7 == 0:
                request.deadline = clock.now() + dice.uniform(0.0, 0.3)
            engine.add(request)
            added += 1
        if turn in (90, 210, 500, 700):
            executor.execute = lambda *_: (_ for _ in ()).throw(RuntimeError("out of memory"))  # type: ignore[method-assign]
        step(engine)
        executor.execute = execute  # type: ignore[method-assign]
        abort_in(engine, dice, 0.01)
    while step(engine):
        pass
    engine.check_integrity()
    return engine, watch, added


def test_phases_of_a_real_model_sum_to_latency_however_its_requests_end(real) -> None:  # type: ignore[no-untyped-def]
    engine, watch, added = real
    watch.check(added, engine.telemetry)
    outcomes = Counter(r.outcome for r in watch.records)
    assert outcomes["length"] > 50
    assert min(outcomes[outcome] for outcome in ("abort", "error", "deadline")) > 0


@pytest.mark.parametrize("state", c.STATES)
def test_the_real_load_reached_every_state(real, state) -> None:  # type: ignore[no-untyped-def]
    _, watch, _ = real
    assert sum(r.matrix[c.STATES.index(state)].sum() for r in watch.records) > 0


def test_a_real_prefill_in_chunks_took_several_steps(real) -> None:  # type: ignore[no-untyped-def]
    engine, watch, _ = real
    long = [r for r in watch.records if r.outcome == "length" and r.prompt_tokens - r.cached_tokens > 96]
    assert long
    assert total(engine.telemetry, "kvscope_steps_total", kind="mixed") > 10


# -- make-up of the slowest requests ----------------------------------------------------------------------------------------


def make_up(telemetry: Telemetry, q: float) -> tuple[float, int, np.ndarray]:
    """By the rule of signals.TailMean, out of the exposition's text: the bound chosen, how many requests are above it, and their mean
    seconds [states, components]."""
    counts = {s.labels["gt"]: s.value for s in samples(telemetry) if s.name == "kvscope_request_phase_requests_total"}
    gt = max((gt for gt, count in counts.items() if count >= (1 - q) * counts["0"]), key=float)
    mean = np.zeros((len(c.STATES), len(c.COMPONENTS)))
    for state, component, seconds in tail_rows(telemetry, gt):
        mean[c.STATES.index(state), c.COMPONENTS.index(component)] = seconds / counts[gt]
    return float(gt), int(counts[gt]), mean


def loads_with_tails(crowds, real) -> Iterator[tuple[str, Telemetry, list[RequestRecord]]]:  # type: ignore[no-untyped-def]
    for i, (engine, watch, _) in enumerate([*crowds, real]):
        yield f"load {i}", engine.telemetry, [r for r in watch.records if r.outcome in SERVED]


@pytest.mark.parametrize("q", [0.5, 0.9, 0.95, 0.99, 0.999])
def test_the_make_up_in_the_exposition_is_that_of_the_requests_above_its_bound(crowds, real, q) -> None:  # type: ignore[no-untyped-def]
    """Exactly the requests slower than a bound `gt`, and `gt` is the bound next below the quantile: gt < quantile <= next bound."""
    for name, telemetry, served in loads_with_tails(crowds, real):
        gt, count, mean = make_up(telemetry, q)
        slower = [r for r in served if r.finished - r.arrival > gt or gt == 0.0]
        assert count == len(slower) >= (1 - q) * len(served), name
        np.testing.assert_allclose(mean, np.mean([r.matrix for r in slower], axis=0), atol=1e-8, err_msg=name)
        latencies = sorted(r.finished - r.arrival for r in served)
        assert mean.sum() == pytest.approx(np.mean(latencies[-count:]))
        quantile = latencies[min(int(q * len(latencies)), len(latencies) - 1)]
        above = [bound for bound in c.TAIL_BOUNDS if bound > gt]
        assert gt < quantile <= above[0], name
