"""Whatever vLLM hands over, in any order: nothing is raised, no counter goes down or stops being a number, and the page parses."""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace as Stats
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from exporters.vllm.exposition import EngineCollector, Exposition
from exporters.vllm.recorder import Recorder, Settings
from tests.vllm.harness import finished, iteration, recorder, scheduler, source


class Raises:
    """A property of a future vLLM that fails when it is read."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __str__(self) -> str:
        raise RuntimeError("str")


_ODD = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.just(10**400), st.just(1.7e308), st.text(max_size=3), st.just(Raises()),
    st.lists(st.one_of(st.floats(), st.none(), st.just(10**400)), max_size=3), st.just(Stats()),
)  # fmt: skip


def broken(make: Any) -> st.SearchStrategy[Any]:
    """`make()` with some fields replaced by anything or gone."""

    def build(changes: dict[str, Any], gone: set[str]) -> Any:
        made = make()
        for name, value in changes.items():
            setattr(made, name, value)
        for name in gone & set(vars(made)):
            delattr(made, name)
        return made

    names = st.sampled_from(sorted(vars(make())))
    return st.builds(build, st.dictionaries(names, _ODD, max_size=4), st.sets(names, max_size=2))


CALL = st.tuples(
    st.one_of(broken(scheduler), _ODD),
    st.one_of(broken(iteration), st.builds(lambda some: iteration(finished_requests=some), st.lists(broken(finished), max_size=3)), _ODD),
    st.one_of(st.integers(0, 2), _ODD.filter(lambda x: not isinstance(x, (list, Stats)))),
)  # fmt: skip


def counters(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.endswith(("_total", "_count", "_bucket", "_sum"))
    }


def shown(r: Recorder) -> str:
    registry = CollectorRegistry()
    registry.register(EngineCollector(r.observed))
    return generate_latest(registry).decode()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(calls=st.lists(CALL, min_size=1, max_size=6))
def test_no_statistics_raise_or_take_a_counter_back(calls: list[tuple[Any, Any, Any]]) -> None:
    r = Recorder(source(), Settings(block_size=16, capacity_blocks=100), (0, 1))
    before = counters(shown(r))
    assert before
    for scheduler_stats, iteration_stats, index in calls:
        r.record(scheduler_stats, iteration_stats, index)
        now = counters(shown(r))
        assert all(math.isfinite(value) for value in now.values()), {
            k: v for k, v in now.items() if not math.isfinite(v)
        }
        assert all(now[key] >= value for key, value in before.items())
        before = now


def test_scrapes_beside_the_event_loop_see_no_counter_go_back_and_end_with_all_of_it() -> None:
    r = recorder()
    done = threading.Event()
    faults: list[Any] = []

    def scrape() -> None:
        before: dict[Any, float] = {}
        while not done.is_set():
            now = counters(shown(r))
            faults.extend((key, value, now.get(key)) for key, value in before.items() if now.get(key, -1.0) < value)
            before = now

    threads = [threading.Thread(target=scrape) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(1000):
        r.record(
            scheduler(),
            iteration(num_generation_tokens=3, inter_token_latencies_iter=[0.01, 0.02], finished_requests=[finished()]),
        )
    done.set()
    for thread in threads:
        thread.join()
    assert faults == []
    assert (
        counters(shown(r))[
            "kvscope_generation_tokens_total", (("class", "standard"), ("engine", "0"), ("model", "smol"))
        ]
        == 3000
    )


def test_an_engine_that_starts_again_in_the_process_begins_at_zero_and_shows_each_series_once() -> None:
    registry = CollectorRegistry()
    for _ in range(3):
        r = recorder()
        Exposition(r.observed, registry)
        r.record(None, iteration(num_generation_tokens=5))
        text = generate_latest(registry).decode()
        assert text.count("kvscope_generation_tokens_total{") == 1
        assert 'kvscope_generation_tokens_total{class="standard",engine="0",model="smol"} 5.0' in text
