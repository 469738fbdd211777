"""Kept inputs and random damage to good ones: every parser takes them or refuses them as a user's fault, within its memory."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from observability.errors import KvscopeError
from tests.fuzz.seeds import CORPUS
from tests.fuzz.targets import TARGETS, run

KEPT = sorted(CORPUS.glob("*/*"))
#: For an input of a few KiB; the largest fixed cost is the decoder's own tables.
MOST_BYTES = 64 << 20
ODD = [
    b"\xff" * 8,
    b"\0" * 8,
    b"\0\0\0\0",
    b"9" * 400,
    b"{",
    b'"',
    b"[" * 200,
    b"NaN",
    b"-1",
    b"1e999",
    b"\xed\xa0\x80",
    b"../../x",
    b"$(x)",
]


def test_every_target_has_good_inputs_and_no_other_folder_is_there() -> None:
    assert {path.parent.name for path in KEPT} == set(TARGETS)
    for name in TARGETS:
        good = [path for path in KEPT if path.parent.name == name and path.name.startswith("good-")]
        assert len(good) >= 2 or name in ("gguf", "snapshot")
        assert any(run(TARGETS[name], path.read_bytes()) for path in good)
    assert sum(path.stat().st_size for path in KEPT) < 1 << 20


@pytest.mark.parametrize("path", KEPT, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_kept_input_is_taken_or_refused_within_its_memory(path: Path) -> None:
    run(TARGETS[path.parent.name], path.read_bytes())  # imports what the target needs
    tracemalloc.start()
    try:
        run(TARGETS[path.parent.name], path.read_bytes())
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_damage_at_random_places_is_no_crash(name: str, data: st.DataObject) -> None:
    damaged = bytearray(data.draw(st.sampled_from([p for p in KEPT if p.parent.name == name])).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at, cut = data.draw(st.integers(0, len(damaged))), data.draw(st.integers(0, 8))
        damaged[at : at + cut] = data.draw(st.one_of(st.sampled_from(ODD), st.binary(max_size=8)))
    run(TARGETS[name], bytes(damaged))


def test_a_fault_is_not_taken_for_a_refusal() -> None:
    def fails(_: bytes) -> None:
        raise IndexError

    def refuses(_: bytes) -> None:
        raise KvscopeError("no.", next_step="Give another.")

    with pytest.raises(IndexError):
        run(fails, b"")
    assert not run(refuses, b"")


# -- right values where a search found a wrong one -----------------------------------------------------------------------


def test_a_bucket_whose_bound_is_no_number_leaves_the_quantile_of_the_others() -> None:
    """As in Prometheus, which leaves such series out; a recorder must outlive its target's faults."""
    from observability.store.evaluate import Evaluator
    from observability.store.recorder import parse_exposition

    name, labels = "kvscope_request_duration_seconds_bucket", 'class="standard",model="m"'
    good = [(bound, share) for bound, share in (("0.5", 0.0), ("1.0", 1.0), ("+Inf", 1.0))]

    def page(count: float, extra: str) -> str:
        return "".join(f'{name}{{{labels},le="{le}"}} {share * count}\n' for le, share in good) + extra

    bad = f'{name}{{{labels},le="1:0"}} 7\n{name}{{{labels},le="nan"}} 7\n{name}{{{labels}}} 7\n'
    found = []
    for extra in ("", bad):
        evaluator = Evaluator()
        for at, count in ((0.0, 0.0), (15.0, 100.0), (30.0, 200.0)):
            scrape = parse_exposition(page(count, extra), "text/plain", "page")
            evaluator.scrape(at, scrape.series, scrape.values)
        found.append(evaluator.evaluate(30.0)["model:kvscope_request_duration_seconds:p99_5m"])
    assert found[0].labels == found[1].labels != []
    assert found[0].values == pytest.approx(found[1].values)
    assert found[0].values == pytest.approx(0.5 + 0.5 * 0.99)  # all between 0.5 and 1 s, by hand


def test_a_histogram_whose_every_bound_is_broken_is_told_and_no_crash() -> None:
    from exporters.adapters import checks
    from exporters.adapters.endpoint import Answer
    from exporters.adapters.engines import ADAPTERS
    from exporters.adapters.page import parse

    text = b'vllm:e2e_request_latency_seconds_bucket{le="x",model_name="m"} 1\nvllm:e2e_request_latency_seconds_sum{model_name="m"} 1\n'
    page = parse(Answer("http://engine/metrics", text, "text/plain"))
    codes = [finding.code for finding in checks.histograms(ADAPTERS["vllm"], page)]
    assert codes == ["broken_histogram"]


def test_a_quantile_of_counts_as_large_as_a_number_gets_lies_in_its_bucket() -> None:
    from exporters.adapters.readings import quantile

    huge = 1e308
    reading = quantile("p99", 0.99, [(12.0, 0.0), (20.0, huge), (float("inf"), huge)])
    assert reading.value == pytest.approx(12.0 + 8.0 * 0.99)
    reading = quantile("p50", 0.5, [(1.0, -huge), (2.0, huge), (float("inf"), huge)])
    assert reading.value == pytest.approx(1.75)  # three quarters of the way from -1e308 to 1e308
