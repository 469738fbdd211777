"""`kvscope scrape-config`: what it prints is a Prometheus configuration that promtool accepts, for every engine and for several."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from exporters.adapters.engines import ADAPTERS, TITLES
from observability.cli import root
from observability.errors import ConfigError


def printed(*arguments: str) -> str:
    done = CliRunner().invoke(root, ["scrape-config", *arguments])
    assert done.exit_code == 0, done.exception
    return done.output


def test_promtool_accepts_what_is_printed_for_all_engines_at_once(
    program: Callable[[str], str], tmp_path: Path
) -> None:
    assert CliRunner().invoke(root, ["rules", "write", str(tmp_path)]).exit_code == 0
    arguments = ["--rules", str(tmp_path)]
    for i, engine in enumerate(TITLES):
        arguments += [
            "--engine",
            engine,
            "--target",
            f"{engine}=10.0.0.{i}:8000",
            "--target",
            f"{engine}=host-{i}:9000",
        ]
        if engine in ADAPTERS and not ADAPTERS[engine].model_label:
            arguments += ["--model", f"{engine}=m{i}"]
    (tmp_path / "prometheus.yml").write_text(printed(*arguments))
    command = [program("promtool"), "check", "config", str(tmp_path / "prometheus.yml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    found = yaml.safe_load((tmp_path / "prometheus.yml").read_text())
    assert [job["job_name"] for job in found["scrape_configs"]] == [
        "kvscope",
        *(f"kvscope-{e}" for e in list(TITLES)[1:]),
    ]
    assert len(found["rule_files"]) == 2 + len(TITLES) - 1


def test_tensorrt_is_scraped_where_reading_takes_nothing_away() -> None:
    [job] = yaml.safe_load(printed("--engine", "trtllm", "--target", "h:8000"))["scrape_configs"]
    assert job["metrics_path"] == "/prometheus/metrics"


def test_engine_whose_metrics_name_no_model_gets_it_from_the_job() -> None:
    found = json.loads(printed("--engine", "llamacpp", "--target", "h:8080", "--model", "qwen3-8b", "--json"))
    assert found["scrape_configs"][0]["static_configs"] == [{"targets": ["h:8080"], "labels": {"model": "qwen3-8b"}}]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--engine", "nim", "--target", "h:1"], "There is no engine 'nim'"),
        (["--engine", "vllm", "--target", "http://h:1/metrics"], "is not host:port"),
        (["--engine", "vllm", "--target", "h:99999"], "is not host:port"),
        (["--engine", "tgi", "--target", "h:1"], "does not name its model"),
        (["--engine", "vllm", "--target", "h:1", "--model", "m"], "names its models itself"),
        (["--engine", "vllm", "--engine", "tgi", "--target", "h:1"], "which engine it is for"),
        (["--engine", "vllm", "--engine", "sglang", "--target", "vllm=h:1"], "No target for sglang"),
        (["--engine", "tgi", "--target", "h:1", "--model", ""], "cannot be a label"),
    ],
)
def test_what_would_not_work_is_refused_with_the_next_step(arguments: list[str], words: str) -> None:
    done = CliRunner().invoke(root, ["scrape-config", *arguments])
    assert isinstance(done.exception, ConfigError)
    assert words in done.exception.reason
    assert done.exception.next_step
