"""The configuration file: a flag stands before the environment, that before the file, that before the default, for every command; what nothing
reads is refused; secrets are masked."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from observability import objectives
from observability.cli import root
from observability.cli._commands import key
from observability.errors import ConfigError
from tests.conftest import REPO

GROUP: Any = typer.main.get_command(root)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "kvscope.toml"


def settings(file: Path, *words: str, **environment: str) -> dict[str, tuple[str, str]]:
    """Name -> (value, source) of `kvscope config --json WORDS`."""
    done = CliRunner().invoke(root, ["--config", str(file), "config", "--json", *words], env=environment)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return {s["name"]: (s["value"], s["source"]) for s in json.loads(done.stdout)["settings"]}


def test_flag_stands_before_environment_before_file_before_default(file: Path) -> None:
    file.write_text("[serve]\nport = 9001\n")
    assert settings(file, "serve")["serve.port"] == ("9001", "file")
    own = {"KVSCOPE_SERVE_PORT": "9002"}
    assert settings(file, "serve", **own)["serve.port"] == ("9002", "environment KVSCOPE_SERVE_PORT")
    assert settings(file, "serve", "--port", "9003", **own)["serve.port"] == ("9003", "flag")
    file.write_text("")
    assert settings(file, "serve")["serve.port"] == ("8000", "default")


def test_a_command_runs_with_what_config_shows(file: Path, tmp_path: Path) -> None:
    file.write_text(f'[rules.write]\nfolder = "{tmp_path / "rules"}"\nkubernetes = true\nengine = ["vllm"]\n')
    done = CliRunner().invoke(root, ["--config", str(file), "rules", "write"])
    assert done.exit_code == 0, done.output
    assert any("kind: PrometheusRule" in path.read_text() for path in (tmp_path / "rules").rglob("*.y*ml"))


def test_options_that_may_be_repeated_are_written_as_a_table(file: Path) -> None:
    file.write_text(
        "[serve.engine]\nnum_host_blocks = 4096\ncontroller.p99_high_seconds = 1.5\nprefix_caching = false\n"
        "[serve.buckets]\nlatency = [0.1, 0.4]\n"
    )
    found = settings(file, "serve")
    assert found["serve.engine"][0] == "num_host_blocks=4096, controller.p99_high_seconds=1.5, prefix_caching=off"
    assert found["serve.buckets"] == ("latency=0.1,0.4", "file")


def test_without_a_command_only_what_is_set_is_shown(file: Path) -> None:
    file.write_text('[record]\ninterval = "30s"\n[boards.import]\nfolder = "team"\n')
    found = settings(file)
    assert {name: value for name, (value, source) in found.items() if source == "file"} == {
        "record.interval": "30s",
        "boards.import.folder": "team",
    }
    assert "default" not in {source for _, source in found.values()}


def test_secrets_are_masked_and_other_names_with_token_in_them_are_not(file: Path) -> None:
    file.write_text('[serve]\ntoken = "hush"\n[boards.import]\nurl = "http://me:hush@grafana:3000"\n')
    done = CliRunner().invoke(
        root,
        ["--config", str(file), "config", "--json"],
        env={"KVSCOPE_RULER_TOKEN": "hush", "KVSCOPE_API_KEY": "hush"},
    )
    assert "hush" not in done.output
    shown = {s["name"]: s["value"] for s in json.loads(done.stdout)["settings"]}
    assert shown["serve.token"] == shown["rules.upload.token"] == shown["replay.api-key"] == "********"
    assert shown["boards.import.url"] == "http://********@grafana:3000"
    assert settings(file, "serve")["serve.max-num-batched-tokens"] == ("2048", "default")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[serve]\nprot = 1\n", "port"),
        ("serv = 1\n", "serve"),
        ("[boards.imprt]\nurl = 'x'\n", "import"),
        ("[serve]\nport = 'many'\n", "port"),
        ("[serve]\nport = 70000\n", "port"),
        ("[serve\n", "TOML"),
    ],
)
def test_what_nothing_reads_or_no_option_takes_is_refused(file: Path, text: str, named: str) -> None:
    file.write_text(text)
    done = CliRunner().invoke(root, ["--config", str(file), "config", "serve" if "serv" in text else "boards"])
    assert isinstance(done.exception, ConfigError)
    assert str(file) in done.exception.reason
    assert named in str(done.exception)
    assert done.exception.next_step


@pytest.mark.parametrize(
    ("seconds", "told"), [("0.00001", "between 0.0001 and 100,000"), ("0.1234567", "such as 0.123457")]
)
def test_an_objective_whose_threshold_can_be_no_bucket_bound_is_refused(file: Path, seconds: str, told: str) -> None:
    file.write_text(f"[[objective]]\nname = 'ttft'\nthreshold_seconds = {seconds}\n")
    done = subprocess.run(  # a process of its own: objectives are read once
        [sys.executable, "-m", "observability.cli", "--config", str(file), "config"],
        capture_output=True, text=True, cwd=REPO,
    )  # fmt: skip
    assert done.returncode == 2
    assert told in " ".join(done.stderr.split())


def test_a_bad_value_in_the_environment_names_its_option(file: Path) -> None:
    file.write_text("")
    done = CliRunner().invoke(root, ["--config", str(file), "config", "serve"], env={"KVSCOPE_SERVE_PORT": "many"})
    assert done.exit_code == 2
    assert "--port" in done.output


def test_a_file_that_is_named_and_missing_is_an_error_and_a_default_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = CliRunner().invoke(root, ["--config", str(tmp_path / "none.toml"), "version"])
    assert isinstance(done.exception, ConfigError)
    monkeypatch.delenv("KVSCOPE_CONFIG")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert CliRunner().invoke(root, ["version"]).exit_code == 0
    (tmp_path / "kvscope").mkdir()
    (tmp_path / "kvscope/kvscope.toml").write_text("[serve]\nport = 9009\n")
    done = CliRunner().invoke(root, ["config", "--json", "serve"])
    assert {"name": "serve.port", "value": "9009", "source": "file", "variable": "KVSCOPE_SERVE_PORT"} in json.loads(
        done.stdout
    )["settings"]


def test_objectives_come_from_the_same_file_and_a_file_of_their_own_stands_before_it(
    file: Path, tmp_path: Path
) -> None:
    file.write_text("[[objective]]\nname = 'ttft'\nthreshold_seconds = 1.0\n")
    own = tmp_path / "objectives.toml"
    own.write_text("[[objective]]\nname = 'ttft'\nthreshold_seconds = 0.5\n")
    code = "from observability.objectives import TTFT; print(TTFT.threshold_seconds)"
    for more, seconds in (({}, "1.0"), ({"KVSCOPE_OBJECTIVES": str(own)}, "0.5")):
        environment = {**os.environ, "KVSCOPE_CONFIG": str(file), **more}
        done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=REPO, capture_output=True, text=True)
        assert done.stdout.strip() == seconds, done.stderr


def test_kubernetes_service_links_set_no_port(file: Path) -> None:
    file.write_text("")
    found = settings(file, "app", KVSCOPE_APP_PORT="tcp://10.0.0.1:80", KVSCOPE_APP_SERVICE_HOST="10.0.0.1")
    assert found["app.port"] == ("8501", "default")


def test_a_misspelt_variable_is_told(file: Path) -> None:
    file.write_text("")
    done = CliRunner().invoke(root, ["--config", str(file), "config", "--json"], env={"KVSCOPE_SERVE_PROT": "1"})
    assert "KVSCOPE_SERVE_PROT" in json.loads(done.stdout)["unread"]


def all_commands(group: Any = GROUP, place: str = "") -> dict[str, Any]:
    out = {}
    for name, command in group.commands.items():
        at = f"{place} {name}".strip()
        out |= all_commands(command, at) if hasattr(command, "commands") else {at: command}
    return out


def test_every_command_is_in_the_module_that_is_named_after_it() -> None:
    for name in GROUP.commands:
        assert GROUP.commands[name].name == name  # raises KeyError where the module adds another


def test_keys_of_a_command_are_unique_so_that_a_file_means_one_option() -> None:
    for name, command in all_commands().items():
        keys = [key(p) for p in command.params]
        assert len(keys) == len(set(keys)), name


def test_the_example_of_the_page_is_accepted(file: Path) -> None:
    [text] = re.findall(r"```toml\n(.*?)```", (REPO / "docs/configuration.md").read_text(), re.DOTALL)
    file.write_text(text)
    found = settings(file)
    assert found["record.interval"] == ("30s", "file")
    objectives.parse(text, "the page")
