"""docs/performance.md is what the kept results make, and the results cover every benchmark, each with settings and machine."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from typing import Any

import pytest

from tests.conftest import REPO

FOLDER = REPO / "benchmarks"
SHARED = {"figures", "page", "run"}
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in SHARED)
RUNS = [run for file in sorted((FOLDER / "results").glob("*.json")) for run in json.loads(file.read_text())["runs"]]


def test_the_page_is_what_the_results_make() -> None:
    done = subprocess.run([sys.executable, FOLDER / "page.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_page_has_every_benchmark_and_the_results_none_that_is_gone() -> None:
    page = (REPO / "docs/performance.md").read_text()
    assert re.findall(r"^## (\w+)$", page, re.MULTILINE) == NAMES
    assert {run["benchmark"] for run in RUNS} <= set(NAMES)


@pytest.mark.parametrize("run", [run for run in RUNS if "left_out" not in run], ids=lambda run: run["benchmark"])
def test_a_run_names_its_command_settings_and_machine(run: dict[str, object]) -> None:
    machine, rows = run["machine"], run["rows"]
    assert isinstance(machine, dict)
    assert {"processor", "cores", "memory_gib", "python", "packages"} <= set(machine)
    assert str(run["command"]).startswith(f"python benchmarks/{run['benchmark']}.py")
    assert ("--quick" in str(run["command"])) == run["quick"]
    assert isinstance(run["settings"], dict)
    assert not [
        each for each in (*map(str, run["settings"].values()), *str(run["command"]).split()) if each.startswith("/")
    ]
    assert rows
    page = (REPO / "docs/performance.md").read_text()
    assert str(run["command"]) in page or any(r["benchmark"] == run["benchmark"] and not r["quick"] for r in RUNS)


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_has_the_common_options(name: str) -> None:
    source = (FOLDER / f"{name}.py").read_text()
    assert "Parser(__doc__, quick=" in source
    assert "keep(" in source


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("run")


def test_a_run_comes_back_with_figures_and_without_where_it_was_kept(runner: Any) -> None:
    found = runner.run("vllm_plugin", True, 300.0)
    assert found["command"] == "python benchmarks/vllm_plugin.py --quick"
    assert found["quick"] is True
    assert all(row["value"] > 0 for row in found["rows"])
    assert "json" not in found["settings"]


def test_a_benchmark_that_takes_too_long_or_cannot_run_is_named_with_the_reason(
    runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert runner.run("vllm_plugin", True, 0.05)["left_out"].startswith("took longer than")
    monkeypatch.setenv("KVSCOPE_DATA", "/nowhere")
    assert "KVSCOPE_DATA" in runner.run("forecast", True, 60.0)["left_out"]
