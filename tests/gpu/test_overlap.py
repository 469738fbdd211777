"""Copies beside steps: what of their time was hidden, against a count on a fine grid; series and status as the engine has them."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from observability.engine.executor.overlap import CopyOverlap, hidden_time
from tests.telemetry.bench import Bench, rows_of


def test_hidden_time_is_what_a_fine_grid_counts() -> None:
    dice = random.Random(3)
    for _ in range(200):
        edges = sorted(dice.sample(range(200), 8))
        steps = [(edges[i], edges[i + 1]) for i in range(0, 8, 2)]
        copies = [(begin, begin + dice.randrange(1, 60)) for begin in dice.sample(range(180), 3)]
        counted = sum(any(b <= t < e for b, e in steps) for begin, end in copies for t in range(begin, end))
        assert hidden_time(copies, steps) == counted


@dataclass
class Event:
    """Happens at `at` (ms) of a GPU whose time is `gpu[0]`."""

    at: float
    gpu: list[float]

    def query(self) -> bool:
        return self.gpu[0] >= self.at

    def synchronize(self) -> None:
        self.gpu[0] = max(self.gpu[0], self.at)

    def elapsed_time(self, other: Event) -> float:
        return other.at - self.at


def test_a_copy_counts_once_it_has_ended_and_over_all_steps_beside_it() -> None:
    gpu, times = [0.0], iter([0, 10, 50, 20, 30, 35, 60, 60])
    overlap = CopyOverlap(lambda: Event(next(times), gpu))
    overlap.rebase()  # 0
    with overlap.copy():  # 10 to 50
        pass
    overlap.begin_step()  # 20
    overlap.end_step()  # 30
    assert overlap.take() == (0.0, 0.0), "it is on its way"
    overlap.begin_step()  # 35
    overlap.end_step()  # 60
    assert overlap.take() == pytest.approx((0.025, 0.015))  # 20-30 and 35-50 hidden; 10-20 and 30-35 exposed
    assert overlap.take() == (0.0, 0.0)


def test_steps_without_a_copy_cost_no_event() -> None:
    made: list[Event] = []

    def record() -> Event:
        made.append(Event(0.0, [0.0]))
        return made[-1]

    overlap = CopyOverlap(record)
    for _ in range(3):
        overlap.begin_step()
        overlap.end_step()
        assert overlap.take() == (0.0, 0.0)
    assert made == []


def test_a_copy_without_a_step_is_exposed() -> None:
    gpu, times = [100.0], iter([0, 10, 40])
    overlap = CopyOverlap(lambda: Event(next(times), gpu))
    overlap.rebase()
    with overlap.copy():
        pass
    assert overlap.take() == pytest.approx((0.0, 0.03))


@pytest.mark.parametrize(
    ("settings", "status", "reason"),
    [
        ({"virtual": True, "device": "H100"}, "unavailable", "virtual_time"),
        ({"device": "cpu"}, "unavailable", "no_gpu"),
        ({"device": "cuda:0"}, "unavailable", "no_host_tier"),
    ],
)
def test_an_engine_that_cannot_measure_overlap_says_why(settings: dict[str, object], status: str, reason: str) -> None:
    families = Bench(**settings).t.snapshot()
    assert rows_of(families, "kvscope_hardware_target") == {("_info", ("copy_compute_overlap", status, reason)): 1.0}
    assert rows_of(families, "kvscope_kv_copy_seconds") == {}


def test_on_a_gpu_with_a_host_tier_overlap_is_measured_from_the_first_copy_on() -> None:
    telemetry = Bench(device="cuda:0").t
    telemetry.mechanisms.expect(copies=True)
    [(_, labels)] = rows_of(telemetry.snapshot(), "kvscope_hardware_target")
    assert labels == ("copy_compute_overlap", "unavailable", "no_copies")
    telemetry.mechanisms.copied(0.3, 0.1)
    telemetry.mechanisms.copied(0.1, 0.0)
    [(_, labels)] = rows_of(telemetry.snapshot(), "kvscope_hardware_target")
    assert labels == ("copy_compute_overlap", "measured", "none")
    copies = rows_of(telemetry.snapshot(), "kvscope_kv_copy_seconds")
    assert copies == {("_total", ("m", "hidden")): pytest.approx(0.4), ("_total", ("m", "exposed")): pytest.approx(0.1)}
