"""`kvscope profile` writes a trace with the engine's regions, whose times hang together; nothing of it stays on the engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from observability.catalog import COMPONENTS  # noqa: E402
from observability.cli.profile import _engine, _Load  # noqa: E402
from observability.engine.profiling import named, regions  # noqa: E402

STEPS = 15
PHASES = ("schedule", "forward_prefill", "forward_decode", "forward_mixed", "emit")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What the command printed, and the events named kvscope.* of the trace that it wrote."""
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    command = [
        "profile",
        "tiny",
        "--steps",
        str(STEPS),
        "--out",
        str(path),
        "--json",
        "--kv-dtype",
        "int8",
        "--output-tokens",
        "12",
    ]
    answer = subprocess.run(
        [sys.executable, "-m", "observability.cli", *command], capture_output=True, text=True, timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    events = json.loads(path.read_text())["traceEvents"]
    return json.loads(answer.stdout), [
        e for e in events if str(e.get("name")).startswith("kvscope.") and e.get("ph") == "X"
    ]


def test_kv_and_forward_regions_are_in_the_trace(recorded) -> None:
    printed, events = recorded
    calls = Counter(event["name"].removeprefix("kvscope.") for event in events)
    assert calls["step"] == calls["schedule"] == calls["emit"] == STEPS
    assert calls["forward_prefill"] + calls["forward_decode"] + calls["forward_mixed"] == STEPS
    assert calls["forward_decode"] > 0
    assert calls["forward_mixed"] > 0
    assert calls["kv_attend"] == 4 * STEPS, "once a layer"
    assert calls["kv_gather"] == STEPS
    assert {"kv_alloc", "kv_index", "kv_free", "logits"} <= calls.keys()
    assert {name: found["calls"] for name, found in printed["regions"].items()} == calls


def test_phases_add_up_to_their_step(recorded) -> None:
    _, events = recorded
    steps = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] == "kvscope.step")
    spent: dict[int, float] = defaultdict(float)
    for event in events:
        if event["name"].removeprefix("kvscope.") in PHASES:
            [index] = [i for i, (b, e) in enumerate(steps) if b <= event["ts"] and event["ts"] + event["dur"] <= e + 1]
            spent[index] += event["dur"]
    whole = sum(end - begin for begin, end in steps)
    assert set(spent) == set(range(STEPS)), "each phase lies within a step"
    assert all(spent[i] <= end - begin + 5 for i, (begin, end) in enumerate(steps))
    assert 0.9 * whole < sum(spent.values()) <= whole * 1.001


def test_printed_seconds_are_those_of_the_trace(recorded) -> None:
    printed, events = recorded
    for name, found in printed["regions"].items():
        total = sum(event["dur"] for event in events if event["name"] == f"kvscope.{name}") / 1e6
        assert found["seconds"] == pytest.approx(total, rel=0.02, abs=1e-4), name


def test_regions_take_the_time_that_telemetry_counts() -> None:
    """Laps of the step clock and calls of methods are two ways to measure the same steps."""
    torch.set_num_threads(1)
    engine = _engine("tiny", "cpu", 4, 60, 10, "auto")
    load = _Load(engine, 4, 60, 10)
    load.run(3, None)
    spent: dict[str, float] = defaultdict(float)

    @contextmanager
    def enter(name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        spent[name] += time.perf_counter() - began

    before = dict(zip(COMPONENTS, engine.telemetry.seconds, strict=True))
    with named(regions(engine), enter):
        load.run(25, None)
    counted = {name: s - before[name] for name, s in zip(COMPONENTS, engine.telemetry.seconds, strict=True)}
    forward = sum(spent[name] for name in PHASES if name.startswith("forward"))
    laps = sum(counted[name] for name in ("forward_prefill", "forward_decode", "dequant", "sample"))
    assert forward == pytest.approx(laps, rel=0.05)
    assert spent["step"] == pytest.approx(sum(counted.values()), rel=0.1)


def test_an_engine_has_its_own_methods_again_when_a_profile_ends() -> None:
    engine = _engine("tiny", "cpu", 2, 20, 4, "auto")
    owners = {id(point.owner): point.owner for point in regions(engine)}
    before = {key: dict(vars(owner)) for key, owner in owners.items()}
    with pytest.raises(RuntimeError), named(regions(engine), lambda name: torch.profiler.record_function(name)):
        assert all(point.method in vars(point.owner) for point in regions(engine))
        raise RuntimeError
    assert {key: vars(owner).keys() for key, owner in owners.items()} == {key: of.keys() for key, of in before.items()}


def test_a_place_that_cannot_be_written_is_told_before_the_work(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "observability.cli",
        "profile",
        "tiny",
        "--out",
        str(tmp_path / "no" / "trace.json"),
    ]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 2
    assert "cannot be written" in answer.stderr
