"""Rules and boards are read by every Prometheus from 2.42 on: no function that is newer or experimental, no syntax that came later, nothing that
3.0 reads in another way."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import promql_parser
import yaml

from tests.boards.promql import fill, nodes
from tests.conftest import REPO, wait_for

#: Functions of Prometheus 2.42 that are stable there and in 3.x (https://prometheus.io/docs/prometheus/2.42/querying/functions/). Left out: the
#: ones for native histograms (experimental in 2.42) and holt_winters (renamed and experimental since 3.0).
STABLE = {
    "abs", "absent", "absent_over_time", "ceil", "changes", "clamp", "clamp_max", "clamp_min", "count_over_time", "day_of_month",
    "day_of_week", "day_of_year", "days_in_month", "delta", "deriv", "exp", "floor", "histogram_quantile", "hour", "idelta", "increase",
    "irate", "label_join", "label_replace", "last_over_time", "ln", "log10", "log2", "max_over_time", "min_over_time", "minute", "month",
    "pi", "predict_linear", "present_over_time", "quantile_over_time", "rate", "resets", "round", "scalar", "sgn", "sort", "sort_desc",
    "sqrt", "stddev_over_time", "stdvar_over_time", "sum_over_time", "avg_over_time", "time", "timestamp", "vector", "year",
}  # fmt: skip
AGGREGATIONS = {
    "sum",
    "min",
    "max",
    "avg",
    "group",
    "stddev",
    "stdvar",
    "count",
    "count_values",
    "bottomk",
    "topk",
    "quantile",
}
RULES = sorted((REPO / "alerts/generated").rglob("*.yml"))
BOARDS = sorted((REPO / "dashboards/generated").glob("*.json"))


def of_rules() -> Iterator[tuple[str, str]]:
    for path in RULES:
        if path.parent.name == "grafana":  # Grafana's own form: its queries are those of the alerts
            continue
        for group in yaml.safe_load(path.read_text())["groups"]:
            for rule in group["rules"]:
                yield f"{path.name}: {rule.get('record') or rule['alert']}", rule["expr"]


def of_boards() -> Iterator[tuple[str, str]]:
    def walk(value: object) -> Iterator[str]:
        if isinstance(value, dict):
            for key, inner in value.items():
                if key == "expr" and isinstance(inner, str):
                    yield inner
                else:
                    yield from walk(inner)
        elif isinstance(value, list):
            for inner in value:
                yield from walk(inner)

    for path in BOARDS:
        for expr in walk(json.loads(path.read_text())):
            if "$" not in re.sub(r"\$\w+", "", expr):
                yield path.name, fill(expr)


QUERIES = dict.fromkeys([*of_rules(), *of_boards()])


def test_there_are_queries_of_both() -> None:
    assert len(QUERIES) > 500


def test_queries_use_only_functions_and_aggregations_that_are_stable_from_2_42_on() -> None:
    beyond = set()
    for where, expr in QUERIES:
        for node, _ in nodes(expr):
            if isinstance(node, promql_parser.Call) and node.func.name not in STABLE:
                beyond.add((where, node.func.name))
            if isinstance(node, promql_parser.AggregateExpr) and str(node.op).lower() not in AGGREGATIONS:
                beyond.add((where, str(node.op)))
    assert not beyond


def test_no_query_uses_syntax_or_a_reading_that_differs_between_2_42_and_3() -> None:
    for where, expr in QUERIES:
        bare = re.sub(r'"(?:[^"\\]|\\.)*"', '""', expr)
        assert '{"' not in re.sub(r"\s", "", bare), f"{where}: names in quotes came with 3.0"
        assert not re.search(r"\b(anchored|smoothed|fill|fill_left|fill_right)\b", bare), f"{where}: modifiers of 3.x"
        assert not re.search(r"\[[^\]]*[a-z(][-+*/][^\]]*\]", bare), f"{where}: arithmetic in durations came with 3.x"
        # 3.0 writes le="1.0" for what 2.x took as le="1"; a matcher must find both, or name what both write.
        for value in re.findall(r'\ble="([^"]*)"', expr):
            assert value == "+Inf" or "." in value, f'{where}: le="{value}" is not found by 3.x'


def test_a_prometheus_loads_every_rule_file_and_understands_every_query(
    program: Callable[[str], str],
    free_port: Callable[[], int],
    spawn: Callable[..., subprocess.Popen[bytes]],
    tmp_path: Path,
) -> None:
    """KVSCOPE_PROMETHEUS names another one than the installed; 2.42.0, 2.53.3 and 3.5.3 were tried."""
    files = [str(path) for path in RULES if path.parent.name != "grafana"]
    (tmp_path / "prometheus.yml").write_text(json.dumps({"rule_files": files}))
    address = f"127.0.0.1:{free_port()}"
    spawn(
        os.environ.get("KVSCOPE_PROMETHEUS") or program("prometheus"), f"--config.file={tmp_path / 'prometheus.yml'}",
        f"--storage.tsdb.path={tmp_path / 'data'}", f"--web.listen-address={address}",
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    with httpx.Client(base_url=f"http://{address}/api/v1", trust_env=False, timeout=60) as client:
        wait_for(lambda: client.get("/status/runtimeinfo").status_code == 200, 60, "Prometheus answers")
        groups = client.get("/rules").json()["data"]["groups"]
        assert {group["file"] for group in groups} == set(files)
        for where, expr in QUERIES:
            answer = client.post("/query", data={"query": expr})
            assert answer.status_code == 200, f"{where}: {answer.text}"
            told = answer.json()
            # infos say that a series looks like no counter; nothing may be said of a function's standing
            assert not told.get("warnings"), where
