"""docs/autoscaling.md: what a scaler computes per replica from each snippet, worked out by hand (case QG20)."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from tests.conftest import REPO

#: Requests that wait at each replica, and the share of its KV blocks that requests hold.
WAITING = (8, 2, 0, 6)
ACTIVE = (950, 100, 0, 400)


def snippets() -> list[Any]:
    return [
        yaml.safe_load(text)
        for text in re.findall(r"```yaml\n(.*?)```", (REPO / "docs/autoscaling.md").read_text(), re.DOTALL)
    ]


def answer(program: Callable[[str], str], tmp_path: Path, expr: str, value: float) -> None:
    """Prometheus with four replicas and kvscope's rules answers `expr` with one sample of `value`."""
    series = []
    for index, (waiting, active) in enumerate(zip(WAITING, ACTIVE, strict=True)):
        labels = f'job="kvscope",instance="r{index}"'
        series += [
            {"series": f'kvscope_requests_waiting{{model="MODEL",class="standard",{labels}}}', "values": f"{waiting}x40"},
            {"series": f'kvscope_kv_blocks{{model="MODEL",state="active",{labels}}}', "values": f"{active}x40"},
            {"series": f'kvscope_kv_capacity_blocks{{model="MODEL",{labels}}}', "values": "1000x40"},
            {"series": f'kvscope_requests_waiting{{model="other",class="standard",{labels}}}', "values": "100x40"},
        ]  # fmt: skip
    test = {
        "rule_files": [str(REPO / f"alerts/generated/kvscope-{name}.yml") for name in ("recording", "alerts")],
        "evaluation_interval": "15s",
        "tests": [{"interval": "15s", "input_series": series, "promql_expr_test": [
            {"expr": expr, "eval_time": "9m", "exp_samples": [{"labels": "{}", "value": value}]}]}],
    }  # fmt: skip
    path = tmp_path / "test.yml"
    path.write_text(yaml.safe_dump(test, width=10_000))
    done = subprocess.run([program("promtool"), "test", "rules", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_scaler_divides_once_and_the_value_per_replica_is_right(
    program: Callable[[str], str], tmp_path: Path
) -> None:
    keda, kv, adapter, hpa = snippets()
    [trigger] = keda["spec"]["triggers"]
    assert trigger["metricType"] == "AverageValue"
    answer(program, tmp_path, trigger["metadata"]["query"], sum(WAITING))  # KEDA divides: 16 / 4 replicas = 4 each
    assert sum(WAITING) / len(WAITING) == float(trigger["metadata"]["threshold"])
    assert kv[0]["metricType"] == "Value"
    answer(program, tmp_path, kv[0]["metadata"]["query"], max(ACTIVE) / 1000)
    assert all(t["metadata"]["ignoreNullValues"] == "false" for t in (trigger, kv[0]))
    [rule] = adapter["externalRules"]
    [metric] = hpa["spec"]["metrics"]
    assert metric["external"]["target"]["type"] == "AverageValue"
    assert metric["external"]["metric"]["name"] == rule["name"]["as"]
    [(label, value)] = metric["external"]["metric"]["selector"]["matchLabels"].items()
    answer(program, tmp_path, rule["metricsQuery"].replace("<<.LabelMatchers>>", f'{label}="{value}"'), sum(WAITING))
