"""One model on two engines, read from a Prometheus: each engine is a model of its own, and no value is ever that of the other."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from observability import objectives as o
from observability.errors import StoreError
from observability.forecast.series import read_series
from observability.signals import BY_NAME
from observability.store.prometheus import RUNNING, PrometheusSource

STEP = 60.0
SECONDS = 3 * 3600.0
KV = "model:kvscope_kv_usage:ratio"


@pytest.fixture
def now() -> float:
    return time.time() // STEP * STEP


@pytest.fixture
def source(
    program: Callable[[str], str], prometheus: Callable[..., str], tmp_path: Path, now: float
) -> Iterator[PrometheusSource]:
    """vLLM serves m (10) and solo (4), SGLang served m until half an hour ago (1), and kvscope's own engine serves bundled (2) and, besides vLLM, both (3)."""
    start, half = now - SECONDS, now - 1800
    series = {
        f'{RUNNING}{{model="m",engine="vllm"}}': (10, now),
        f'{RUNNING}{{model="m",engine="sglang"}}': (1, half),
        f'{RUNNING}{{model="solo",engine="vllm"}}': (4, now),
        f'{RUNNING}{{model="both",engine="vllm"}}': (5, now),
        f'{RUNNING}{{model="both"}}': (3, now),
        f'{RUNNING}{{model="bundled"}}': (2, now),
        'kvscope_engine_info{model="bundled",engine="0"}': (1, now),
        f'{KV}{{model="m",engine="vllm",cluster="a"}}': (0.5, now),
        f'{KV}{{model="m",engine="vllm",cluster="b"}}': (0.6, now),
        'ALERTS{alertname="KvscopeQueueGrowing",alertstate="firing",severity="warning",model="m",engine="vllm"}': (
            1,
            now,
        ),
        'ALERTS{alertname="KvscopeKVCacheExhausted",alertstate="firing",severity="warning",model="m",engine="sglang"}': (
            1,
            now,
        ),
        'ALERTS{alertname="KvscopeKVFragmented",alertstate="firing",severity="warning",model="both"}': (1, now),
        'ALERTS{alertname="KvscopeForecastStale",alertstate="firing",severity="warning",model="m"}': (1, now),
    }
    text = tmp_path / "series.om"
    with text.open("w") as lines:
        for at in range(int(start), int(now) + 1, int(STEP)):
            lines.writelines(f"{key} {value} {at}\n" for key, (value, until) in series.items() if at <= until)
        lines.write("# EOF\n")
    data, rules = tmp_path / "data", tmp_path / "rules.yml"
    subprocess.run(
        [program("promtool"), "tsdb", "create-blocks-from", "openmetrics", "--max-block-duration=400h", str(text), str(data)],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    known = [{"record": name, "expr": "nothing_at_all"} for name in (RUNNING, KV)]
    rules.write_text(json.dumps({"groups": [{"name": "signals", "interval": "1h", "rules": known}]}))
    opened = PrometheusSource(prometheus(data, json.dumps({"rule_files": [str(rules)]})))
    yield opened
    opened.close()


def values(frame: pd.DataFrame) -> dict[str, tuple[set[float], int]]:
    return {model: (set(rows["value"]), len(rows)) for model, rows in frame.groupby("model")}


def test_each_engine_of_a_model_is_read_by_itself(source: PrometheusSource, now: float) -> None:
    assert source.models() == ["both", "both on vllm", "bundled", "m on sglang", "m on vllm", "solo"]
    assert source.freshness() is not None
    start, points = now - 3600, 61
    expected = {
        "m on vllm": ({10}, points), "m on sglang": ({1}, 36), "solo": ({4}, points), "both": ({3}, points), "both on vllm": ({5}, points),
        "bundled": ({2}, points),
    }  # fmt: skip
    assert values(source.range(RUNNING, start, now, STEP)) == expected
    for model, found in expected.items():
        assert values(source.range(RUNNING, start, now, STEP, {"model": model})) == {model: found}
    assert values(source.latest(RUNNING, {"model": "m on vllm"})) == {"m on vllm": ({10}, 1)}
    assert source.engines("m on vllm") == source.engines("solo") == ["vllm"]
    assert source.engines("m on sglang") == ["sglang"]
    assert source.engines("both") == source.engines("bundled") == []
    fired = {
        model: {each.name for each in source.alerts(start, now, model)}
        for model in ("m on vllm", "both", "both on vllm")
    }
    assert fired == {
        "m on vllm": {"KvscopeQueueGrowing", "KvscopeForecastStale"}, "both": {"KvscopeKVFragmented"}, "both on vllm": set(),
    }  # fmt: skip
    assert source.exemplars("kvscope_request_duration_seconds", start, now, "m on vllm") == []


def test_a_name_that_means_two_engines_is_refused_and_says_which(source: PrometheusSource, now: float) -> None:
    with pytest.raises(StoreError, match="m is on several engines: sglang, vllm") as refused:
        source.range(RUNNING, now - 3600, now, STEP, {"model": "m"})
    assert "'m on sglang'" in refused.value.next_step


def test_forecasts_are_made_of_one_engine_each(source: PrometheusSource, now: float) -> None:
    found = {each.labels["model"]: each for each in read_series(source, BY_NAME[RUNNING], now, SECONDS)}
    assert {"m on vllm", "m on sglang"} <= set(found)
    assert set(found["m on vllm"].values[~pd.isna(found["m on vllm"].values)]) == {10}
    assert set(found["m on sglang"].values[~pd.isna(found["m on sglang"].values)]) == {1}


def test_series_that_another_label_tells_apart_are_refused_and_never_one_over_the_other(
    source: PrometheusSource, now: float
) -> None:
    with pytest.raises(StoreError, match="they differ in cluster"):
        source.range(KV, now - 3600, now, STEP, {"model": "m on vllm"})


def test_an_engine_s_share_of_a_model_is_held_to_the_model_s_objective(monkeypatch: pytest.MonkeyPatch) -> None:
    own = replace(o.TTFT, model="m", target=0.5)
    monkeypatch.setattr(o, "OBJECTIVES", (*o.OBJECTIVES, own))
    assert o.held_to("m on vllm", o.TTFT) is own
    assert o.held_to("solo", o.TTFT) is o.TTFT
