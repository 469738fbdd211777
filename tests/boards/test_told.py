"""A panel that an engine cannot feed says so, and the row of reasons names each signal: "No data" never stands for "not exported"."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards.boards import BOARDS
from dashboards.panels import Panel
from dashboards.told import MODELS, ROW, SEE_ROW, asked, reasons_query
from exporters.adapters.engines import ADAPTERS, capability
from observability.signals import SIGNALS
from tests.conftest import REPO

WITH_MODELS = ("overview", "p99", "kv-cache", "quantization", "batching", "trends")


def panels_of(name: str) -> list[Any]:
    return [
        p for row in BOARDS[name]().panels for p in (row, *(getattr(row, "panels", None) or ())) if isinstance(p, Panel)
    ]


@pytest.mark.parametrize("name", WITH_MODELS)
def test_no_panel_leaves_open_whether_its_engine_exports_it(name: str) -> None:
    for panel in panels_of(name):
        text = "".join(query.expr for query in panel.targets or ())
        signals = [signal.name for signal in SIGNALS if signal.name in text]
        lacking = {engine for engine in ADAPTERS for signal in signals if capability(engine, signal).status == "no"}
        if lacking and 'model=~"$model"' in text and "kvscope_source_family" not in text:
            assert SEE_ROW in panel.when_empty, (panel.title, lacking)
    assert [row.title for row in BOARDS[name]().panels].count(ROW) == 1


def test_models_of_every_engine_can_be_chosen() -> None:
    [model] = [v for v in BOARDS["p99"]().templating.list if v.name == "model"]
    assert model.query == f"label_values({MODELS}, model)"
    assert all("model:kvscope_requests_running:sum" in adapter.feeds for adapter in ADAPTERS.values())


@pytest.mark.parametrize("engine", ["llamacpp", "vllm"])
def test_row_of_reasons_lists_what_the_engine_of_the_chosen_model_cannot_feed_and_of_no_other(
    program: Callable[[str], str], tmp_path: Path, engine: str
) -> None:
    """Prometheus answers the row's query as the matrix says, with two engines and kvscope's own source in one database."""
    panels = [
        panel
        for panel in panels_of("kv-cache")
        if panel.targets and "kvscope_source_family" not in panel.targets[0].expr
    ]
    signals, _ = asked(panels)
    expected = [
        {"labels": f'{{__name__="engine_signal:kvscope_capability:info",engine="{engine}",signal="{name}",status="{can.status}",reason="{can.reason}"}}',
         "value": 0.5 if can.status == "partial" else 0}
        for name in signals if (can := capability(engine, name)).status != "yes"
    ]  # fmt: skip
    assert len(expected) > 5
    family = 'kvscope_source_family_info{model="own",instance="c",source="vllm",family="kvscope_kv_hit_tokens",status="no",reason="prefix caching is off"}'
    test = {
        "rule_files": [str(REPO / f"alerts/generated/adapters/{name}.yml") for name in ("llamacpp", "vllm")],
        "evaluation_interval": "15s",
        "tests": [{
            "interval": "15s",
            "input_series": [
                {"series": 'llamacpp:requests_processing{model="llamacpp",job="l",instance="a"}', "values": "1x40"},
                {"series": 'vllm:num_requests_running{model_name="vllm",engine="0",job="v",instance="b"}', "values": "1x40"},
                {"series": family, "values": "1x40"},
            ],
            "promql_expr_test": [
                {"expr": reasons_query(panels).replace("$model", engine).replace("$instance", ".+"), "eval_time": "5m", "exp_samples": expected},
                {"expr": reasons_query(panels).replace("$model", "own").replace("$instance", ".+"), "eval_time": "5m", "exp_samples": [
                    {"labels": '{source="vllm",family="kvscope_kv_hit_tokens",status="no",reason="prefix caching is off"}', "value": 1}
                ]},
            ],
        }],
    }  # fmt: skip
    path = tmp_path / "test.yml"
    path.write_text(yaml.safe_dump(test, width=10_000))
    done = subprocess.run([program("promtool"), "test", "rules", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
