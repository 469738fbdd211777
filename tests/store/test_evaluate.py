"""The evaluator gives the numbers that a real Prometheus 2.42 gives on the same scrapes."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import pandas as pd
import pytest

from observability.signals import SIGNALS, Age, Signal, TailMean
from observability.store import embedded
from observability.store.embedded import EmbeddedStore, SignalBlock
from observability.store.evaluate import Evaluator, Key
from observability.store.prometheus import PrometheusSource
from tests.store.scrapes import FakeTarget, openmetrics

START = 1_704_103_200.0  # 2024-01-01 10:00 UTC


def record_scrapes(count: int, seed: int) -> dict[float, dict[Key, float]]:
    """Irregular intervals, one long gap, restarts, series that appear late, a few samples exactly on window bounds."""
    target, rng, now, scrapes = FakeTarget(seed), random.Random(seed), START, {}
    for i in range(count):
        scrapes[round(now, 3)] = target.scrape(now)
        regular = i % 50 < 20
        now += 15.0 if regular else rng.choice([1.017, 15.0, 15.2, 14.9, 40.0, 62.5, 155.0])
        if i == 60:
            now += 12 * 60
    return scrapes


Points = dict[tuple[tuple[str, str], ...], dict[float, float]]


def ask(client: httpx.Client, signal: Signal, times: np.ndarray) -> Points:
    """What Prometheus says at evenly spaced `times`, non-finite values left out.

    Make-up signals go through instant queries, as a rule does: in a range query Prometheus 2.42 walks series in random order,
    and of tail bounds with equal shares `bottomk` then picks any.
    """
    step = times[1] - times[0]
    if isinstance(signal.expr, TailMean):
        questions = [("query", {"time": f"{at:.3f}"}) for at in times[::5]]
    else:
        span = {"start": f"{times[0]:.3f}", "end": f"{times[-1]:.3f}", "step": f"{step:.3f}"}
        questions = [("query_range", span)]
    out: Points = {}
    for kind, when in questions:
        answer = client.post(f"/api/v1/{kind}", data={"query": signal.promql, **when})
        assert answer.status_code == 200, answer.text
        for row in answer.json()["data"]["result"]:
            points = out.setdefault(tuple(sorted(row["metric"].items())), {})
            for at, text in row.get("values") or [row["value"]]:
                if np.isfinite(value := float(text)):
                    points[round(float(at), 3)] = value
    return {labels: points for labels, points in out.items() if points}


def assert_same(signal: Signal, ours: Points, theirs: Points) -> None:
    assert ours.keys() == theirs.keys(), signal.name
    # time() - x loses the digits that both have in common
    tolerance = 1e-6 if isinstance(signal.expr, Age) else 1e-12
    for labels, points in theirs.items():
        mine = ours[labels]
        assert mine.keys() == points.keys(), (signal.name, labels)
        np.testing.assert_allclose(
            [mine[at] for at in points],
            list(points.values()),
            rtol=1e-9,
            atol=tolerance,
            err_msg=f"{signal.name} {labels}",
        )


def assert_sources_agree(signal: Signal, prometheus: PrometheusSource, store: EmbeddedStore, times: np.ndarray) -> None:
    if isinstance(signal.expr, TailMean):
        return  # see `ask`
    order = [*signal.by, "time"]
    frames = [
        source.range(signal.name, times[0], times[-1], times[1] - times[0]).sort_values(order, ignore_index=True)
        for source in (prometheus, store)
    ]
    tolerance = 1e-6 if isinstance(signal.expr, Age) else 1e-12
    pd.testing.assert_frame_equal(*frames, check_exact=False, rtol=1e-9, atol=tolerance, obj=signal.name)


def test_every_signal_equals_what_prometheus_answers_and_both_sources_agree(
    program: Callable[[str], str], prometheus: Callable[..., str], tmp_path: Path
) -> None:
    scrapes = record_scrapes(90, seed=5)
    text = tmp_path / "scrapes.om"
    text.write_text(openmetrics(scrapes))
    data = tmp_path / "data"
    subprocess.run(
        [program("promtool"), "tsdb", "create-blocks-from", "openmetrics", "--max-block-duration=400h", str(text), str(data)],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    url = prometheus(data)
    # On the scrapes' own grid, so that samples lie exactly on window bounds, and beside it.
    source = PrometheusSource(url)  # there are no rules: it computes signals on read
    with httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
        for first, step in ((START, 60.0), (START + 4.321, 71.7)):
            times = np.round(np.arange(first, max(scrapes) + 400, step), 3)
            evaluator, pending = Evaluator(), sorted(scrapes)
            ours: dict[str, Points] = {signal.name: {} for signal in SIGNALS}
            store = embedded.create(tmp_path / f"{step}.db")
            for i, at in enumerate(times.tolist()):
                while pending and pending[0] <= at:
                    time = pending.pop(0)
                    evaluator.scrape(time, list(scrapes[time]), np.array(list(scrapes[time].values())))
                evaluated = evaluator.evaluate(at)
                store.append_blocks(
                    {name: SignalBlock(np.array([at]), e.labels, e.values[None]) for name, e in evaluated.items()}
                )
                for name, found in evaluated.items():
                    if i % 5 and "tail_mean" in name:
                        continue
                    for labels, value in zip(found.labels, found.values.tolist(), strict=True):
                        if not np.isnan(value):
                            ours[name].setdefault(tuple(sorted(labels.items())), {})[at] = value
            for signal in SIGNALS:
                theirs = ask(client, signal, times)
                assert theirs, f"Prometheus has no value of {signal.name}: the test data does not cover it"
                assert_same(signal, ours[signal.name], theirs)
                assert_sources_agree(signal, source, store, times)
    source.close()


def test_replicas_count_with_their_own_blocks_and_share_their_time() -> None:
    """1000 blocks of 16 tokens and 10 of 256 are free, as many full; three engines lose 6 of 15 s each."""
    evaluator, names, counts = Evaluator(), [], []
    for instance, size, count in (("a", 16, 1000), ("b", 256, 10)):
        of = (("instance", instance), ("model", "m"))
        for family, more, value in (
            ("kvscope_kv_block_size_tokens", (), size),
            ("kvscope_kv_blocks", (("state", "free"),), count),
            ("kvscope_kv_blocks", (("state", "active"),), count),
            ("kvscope_kv_stored_tokens", (), size * count),
        ):
            names.append((family, (*of, *more)))
            counts.append(float(value))
    stalls: list[Key] = [("kvscope_stall_seconds_total", (("instance", i), ("model", "m"))) for i in "abc"]
    busy = [
        ("kvscope_step_seconds_total", (("component", "forward_decode"), ("instance", i), ("model", "m")))
        for i in "abc"
    ]
    for i in range(30):
        values = np.array([*counts, *([6.0 * i] * 3), *([13.5 * i] * 3)])
        evaluator.scrape(START + 15 * i, [*names, *stalls, *busy], values)
    found = evaluator.evaluate(START + 15 * 29)
    expected = {
        "model:kvscope_kv_free_tokens:sum": 18_560,
        "model:kvscope_kv_internal_fragmentation:ratio": 0,
        "model:kvscope_stall_seconds:rate5m": 0.4,
        "model_component:kvscope_step_seconds:rate5m": 2.7,  # engines
    }
    assert {name: found[name].values.tolist() for name in expected} == {
        name: [pytest.approx(value)] for name, value in expected.items()
    }
