"""An exposition that keeps its lines says at every moment what one made from nothing says."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from exporters import text
from exporters.text import Exposition, render
from exporters.together import Together
from observability import catalog as c
from observability.engine.kv.residency import Ledger
from observability.telemetry.snapshot import FamilySamples, Row
from tests.telemetry.bench import PREFILL, Bench, kv_state


class Cards:
    """Another source, one of whose families the recorder has, too."""

    def __init__(self) -> None:
        self.reads = 0

    def snapshot(self) -> list[FamilySamples]:
        self.reads += 1
        return [
            FamilySamples(c.LAST_UPDATE, [Row("", ("", "gpu"), 1_700_000_000.5 + self.reads // 2)]),
            FamilySamples(c.SCRAPE_SERIES, [Row("", (), float(self.reads // 2))]),
        ]


@pytest.mark.parametrize("openmetrics", [False, True])
def test_kept_lines_are_those_of_a_fresh_rendering_whatever_moves_appears_or_goes(openmetrics: bool) -> None:
    b, dice = Bench(kv_dtype="int8"), random.Random(3)
    alone, both = (
        Exposition(b.t, openmetrics=openmetrics),
        Exposition(Together([b.t, Cards()]), openmetrics=openmetrics),
    )
    fresh = Together([b.t, Cards()])
    sizes = set()
    for i in range(60):
        match dice.randrange(7):
            case 0:
                b.serve(b.submit(request_class=dice.choice(c.CLASSES), prompt=700), prefill=dice.random())
            case 1:
                b.t.preempted(b.submit())  # a state that did not exist
            case 2:
                b.t.quant_error(dice.randrange(2), f"{i}-{i}", "int8", 0.01, 100.0, 0.05, 10)  # new columns
            case 3:
                b.t.publish(kv_state(free=60, active=4, stored=dice.randrange(50)), [0, 2, 0], [1, 0, 0])
            case 4:
                ledger = Ledger(4, b.clock)
                ledger.begin(np.arange(3))
                b.t.publish(replace(kv_state(), residency=(ledger.residency(), None, None)), [0, 0, 0], [0, 0, 0])
            case 5:
                b.t.publish(kv_state(capacity=None), [0, 0, 0], [0, 0, 0])  # series that go
            case 6:
                b.t.transition(b.submit(), PREFILL)
        if dice.random() < 0.7:  # some scrapes see several changes, some none
            body, series = alone.render()
            assert body == render(b.t.snapshot(), openmetrics=openmetrics)
            assert series == sum(not line.startswith(b"#") for line in body.splitlines())
            assert both.render()[0] == render(fresh.snapshot(), openmetrics=openmetrics)
            sizes.add(series)
    assert len(sizes) > 5


def test_a_rendering_pauses_after_some_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a thread which waits for the interpreter has it after a fraction of a millisecond."""
    b = Bench()
    exposition = Exposition(b.t, openmetrics=False)
    made = [0]
    slices: list[int] = []
    number = text._number

    def counted(value: float) -> str:
        made[0] += 1
        return number(value)

    def slept(seconds: float) -> None:
        assert seconds == 0.25
        slices.append(made[0])
        made[0] = 0

    monkeypatch.setattr(text, "_number", counted)
    monkeypatch.setattr(text.time, "sleep", slept)
    _, series = exposition.render(pause_seconds=0.25)
    assert sum(slices) == series > 900
    assert max(slices) <= text._LINES_AT_ONCE < 300
    slices.clear()
    b.serve(b.submit(), prefill=0.1)
    assert exposition.render(pause_seconds=0.25)[1] == series
    assert 10 < sum(slices) < series / 2, "only what moved is made anew"
