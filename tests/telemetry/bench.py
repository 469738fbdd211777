"""A recorder on a clock that the test moves, and readers that look a value up by name and labels."""

from __future__ import annotations

import math

import numpy as np

from observability import catalog as c
from observability.telemetry.recorder import KVState, RequestTrace, Telemetry
from observability.telemetry.snapshot import FamilySamples

QUEUED, KV_WAIT, PREFILL, DECODE, PREEMPTED, SWAPPED = range(len(c.STATES))
COMPONENT = {name: i for i, name in enumerate(c.COMPONENTS)}


class ManualClock:
    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Bench:
    """Telemetry `t` under test; `spend` moves the clock and tells the recorder what the time went to."""

    def __init__(self, start: float = 0.0, **settings: object) -> None:
        self.clock = ManualClock(start)
        options = {"executor": "torch", "virtual": False, "device": "cpu", "kv_dtype": "auto", **settings}
        self.t = Telemetry("m", clock=self.clock, wall_clock=lambda: 1_700_000_000.0 + self.clock.now, **options)  # type: ignore[arg-type]
        self.ids = 0

    def spend(self, component: str, seconds: float) -> None:
        self.clock.now += seconds
        self.t.lap(COMPONENT[component])

    def submit(
        self,
        *,
        request_class: str = "standard",
        prompt: int = 100,
        arrival: float | None = None,
        tenant: str = "",
    ) -> RequestTrace:
        self.ids += 1
        self.t.received(request_class, tenant)
        came = self.clock.now if arrival is None else arrival
        return self.t.arrive(f"req-{self.ids}", request_class, prompt, came, tenant=tenant)

    def serve(
        self, trace: RequestTrace, *, queue: float = 0.1, prefill: float = 0.2, itl: float = 0.05, tokens: int = 3
    ) -> None:
        """Takes `trace` alone through queue, prefill and decode to its end."""
        self.spend("schedule", queue)
        self.t.transition(trace, PREFILL)
        self.spend("forward_prefill", prefill)
        self.t.transition(trace, DECODE)
        self.t.prefilled(trace)
        self.t.tokens([trace], self.clock.now)
        for _ in range(tokens - 1):
            self.spend("forward_decode", itl)
            self.t.tokens([trace], self.clock.now)
        self.t.finish(trace, "length", self.clock.now)

    def anomalies(self) -> dict[str, float]:
        rows = rows_of(self.t.snapshot(), c.ANOMALIES_TOTAL.name)
        return {labels[1]: value for (_, labels), value in rows.items() if value}


def rows_of(families: list[FamilySamples], name: str) -> dict[tuple[str, tuple[str, ...]], float]:
    """Rows of one family by (suffix, label values); empty if the family is absent."""
    return {(row.suffix, row.labels): row.value for family, rows in families if family.name == name for row in rows}


def value(telemetry: Telemetry, name: str, **labels: str) -> float:
    """The one series with this full name and these labels, NaN if it is absent (read through `values`)."""
    found = [
        i
        for i, series in enumerate(telemetry.layout)
        if series.name == name and labels.items() <= dict(series.labels).items()
    ]
    assert len(found) == 1, f"{name}{labels}: {len(found)} series"
    return float(telemetry.values()[found[0]])


def total(telemetry: Telemetry, name: str, **labels: str) -> float:
    """Sum over all existing series with this full name and these labels."""
    values = telemetry.values()
    found = [
        v for series, v in zip(telemetry.layout, values, strict=True)
        if series.name == name and labels.items() <= dict(series.labels).items() and not math.isnan(v)
    ]  # fmt: skip
    assert found, f"{name}{labels} is absent"
    return float(sum(found))


def kv_state(
    *, capacity: int | None = 64, free: int = 64, evictable: int = 0, active: int = 0, stored: int = 0
) -> KVState:
    """A pool whose active blocks lie first, then evictable, then free ones."""
    regions = np.zeros((c.REGIONS, len(c.BLOCK_STATES)), dtype=np.int64)
    order = [2] * active + [1] * evictable + [0] * free
    for block, state in enumerate(order):
        regions[block * c.REGIONS // max(len(order), 1), state] += 1
    run = free + evictable
    return KVState(
        capacity_blocks=capacity, block_size=16, bytes_per_block=1024, free=free, evictable=evictable, active=active,
        layout_blocks=(active, 0), stored_tokens=stored, largest_free_run=run,
        free_runs=[int(0 < run <= bound) for bound in (*c.FREE_RUN_BOUNDS, math.inf)],
        region_blocks=regions, region_free_run=regions[:, :2].sum(axis=1),
    )  # fmt: skip
