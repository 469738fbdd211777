"""`kvscope rules`: what it writes, what its check finds, a real Prometheus that loads the files, and a stand-in for Mimir's ruler."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from observability.cli import root, rules
from observability.errors import ConfigError, KvscopeError, ServiceError
from tests.boards.live import free_address, wait_until_ready
from tests.boards.servers import Mimir

REPO = Path(__file__).resolve().parents[2]


def run(*arguments: str, **env: str) -> tuple[str, BaseException | None]:
    done = CliRunner().invoke(root, ["rules", *arguments], env=env)
    return done.output, None if done.exit_code == 0 else done.exception


# -- write and check ------------------------------------------------------------------------------------------------


def test_files_of_the_repository_are_what_the_command_writes(tmp_path: Path) -> None:
    assert run("write", str(tmp_path))[1] is None
    for path in tmp_path.rglob("*.yml"):
        assert path.read_text() == (REPO / "alerts/generated" / path.relative_to(tmp_path)).read_text()


def test_only_the_chosen_engines_are_written_and_links_lead_to_the_named_grafana(tmp_path: Path) -> None:
    _, error = run("write", str(tmp_path), "--engine", "vllm", "--grafana-url", "https://grafana.example.com/")
    assert error is None
    written = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.yml")}
    assert written == {"kvscope-recording.yml", "kvscope-alerts.yml", "adapters/vllm.yml"}
    alerts = (tmp_path / "kvscope-alerts.yml").read_text()
    assert "https://grafana.example.com/d/kvscope-kv-cache" in alerts
    assert "127.0.0.1" not in alerts
    output, error = run("check", str(tmp_path), "--grafana-url", "https://grafana.example.com", "--json")
    assert error is None
    assert {row["state"] for row in json.loads(output)["files"].values()} == {"current"}


def test_as_resources_of_the_operator_the_rules_are_the_same(tmp_path: Path) -> None:
    assert run("write", str(tmp_path), "--engine", "vllm", "--kubernetes")[1] is None
    made = {path.name: yaml.safe_load(path.read_text()) for path in tmp_path.iterdir()}
    assert set(made) == {"kvscope-recording.yaml", "kvscope-alerts.yaml", "kvscope-vllm.yaml"}
    plain = yaml.safe_load((REPO / "alerts/generated/adapters/vllm.yml").read_text())
    assert made["kvscope-vllm.yaml"]["spec"] == plain
    assert len({body["metadata"]["name"] for body in made.values()}) == 3


def test_check_accepts_edited_rules_and_finds_what_cannot_work(program: Callable[[str], str], tmp_path: Path) -> None:
    program("promtool")
    run("write", str(tmp_path), "--engine", "kvscope")
    recording = tmp_path / "kvscope-recording.yml"
    recording.write_text(recording.read_text().replace("interval: 15s", "interval: 30s"))
    mine = [
        {"record": "team:mine:sum", "expr": "sum(model:kvscope_requests_running:sum)"},
        {"record": "model:kvscope_mine:sum", "expr": "sum by (model) (kvscope_requests_running)"},
        {"record": "team:both:sum", "expr": "sum(model:kvscope_mine:sum)"},
        {"alert": "Old", "expr": "kvscope_cache_hits_total > 0"},
        {"alert": "Cut", "expr": "sum(("},
    ]
    (tmp_path / "mine.yml").write_text(yaml.safe_dump({"groups": [{"name": "mine", "rules": mine}]}))
    (tmp_path / "list.yml").write_text("- 1\n")
    output, error = run("check", str(tmp_path), "--json")
    assert isinstance(error, KvscopeError)
    found = json.loads(output)["files"]
    assert found["kvscope-recording.yml"] == {"state": "differs", "faults": []}
    assert found["kvscope-alerts.yml"] == {"state": "current", "faults": []}
    assert "is no rule file" in found["list.yml"]["faults"][0]
    old, *promtool = found["mine.yml"]["faults"]
    assert old == "Old asks for kvscope_cache_hits_total, which nothing exports or records"
    assert any("parse expression" in line for line in promtool), promtool


def test_arguments_that_cannot_work_are_named(tmp_path: Path) -> None:
    for arguments, named in (
        (["write", str(tmp_path), "--engine", "vlm"], "vlm"),
        (["write", str(tmp_path), "--grafana-url", "grafana:3000"], "grafana:3000"),
        (["check", str(tmp_path)], "has no rule file"),
        (["upload", "--url", "http://127.0.0.1", "--user", "1"], "--user"),
    ):
        _, error = run(*arguments)
        assert isinstance(error, ConfigError), arguments
        assert named in error.reason


# -- a real Prometheus ----------------------------------------------------------------------------------------------


@pytest.fixture
def start(
    program: Callable[[str], str], spawn: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> Callable[..., str]:
    def prometheus(*flags: str) -> str:
        address = free_address()
        (tmp_path / "prometheus.yml").write_text("rule_files: [rules/*.yml]\n")
        spawn(
            program("prometheus"), f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data",
            f"--web.listen-address={address}", *flags, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        wait_until_ready(f"http://{address}")
        return f"http://{address}"

    return prometheus


def test_a_prometheus_reads_the_files_again_and_is_asked_what_it_has(start: Callable[..., str], tmp_path: Path) -> None:
    url = start("--web.enable-lifecycle")
    output, error = run("reload", "--url", url, "--dry-run", "--json")
    assert isinstance(error, KvscopeError)
    assert set(json.loads(output).values()) == {"missing"}
    run("write", str(tmp_path / "rules"), "--engine", "kvscope")
    output, error = run("reload", "--url", url, "--engine", "kvscope", "--json")
    assert error is None, output
    assert set(json.loads(output).values()) == {"loaded"}
    broken = tmp_path / "rules/kvscope-alerts.yml"
    broken.write_text("groups: 7\n")
    _, error = run("reload", "--url", url)
    assert isinstance(error, ServiceError)
    assert "500" in error.reason
    assert "goes on with the old one" in error.next_step


def test_a_prometheus_that_may_not_be_reloaded_says_how_to_allow_it(start: Callable[..., str]) -> None:
    _, error = run("reload", "--url", start())
    assert isinstance(error, ServiceError)
    assert "Lifecycle API is not enabled" in error.reason
    assert "--web.enable-lifecycle" in error.next_step


# -- a ruler --------------------------------------------------------------------------------------------------------


@pytest.fixture
def mimir() -> Iterator[Mimir]:
    server = Mimir()
    yield server
    server.close()


def upload(mimir: Mimir, *arguments: str) -> tuple[dict[str, Any], BaseException | None]:
    output, error = run("upload", "--url", mimir.url, "--tenant", "team-a", "--engine", "kvscope", "--json", *arguments)
    return (json.loads(output) if error is None else {}), error


def test_a_ruler_gets_every_group_once_and_loses_ours_that_are_no_more(mimir: Mimir) -> None:
    groups = rules.groups_of(rules.chosen(["kvscope"]))
    said, _ = upload(mimir, "--dry-run")
    assert said == dict.fromkeys(groups, "would be created")
    assert mimir.namespaces["kvscope"] == {}
    said, _ = upload(mimir)
    assert said == dict.fromkeys(groups, "created")
    assert mimir.namespaces["kvscope"] == groups
    there = mimir.namespaces["kvscope"]
    there["kvscope-gone-recording"] = {"name": "kvscope-gone-recording", "rules": []}
    there["theirs"] = {"name": "theirs", "rules": []}
    first = next(iter(groups))
    there[first] = {**there[first], "rules": there[first]["rules"][:1]}
    said, _ = upload(mimir)
    changed = {name: word for name, word in said.items() if word != "current"}
    assert changed == {first: "replaced", "kvscope-gone-recording": "removed"}
    assert there == {**groups, "theirs": {"name": "theirs", "rules": []}}


def test_a_ruler_that_refuses_is_named_with_the_next_step(mimir: Mimir) -> None:
    _, error = run("upload", "--url", mimir.url, KVSCOPE_RULER_TOKEN="secret")
    assert isinstance(error, ServiceError)
    assert "401 no org id" in error.reason
    assert "KVSCOPE_RULER_TOKEN" in error.next_step
    assert "secret" not in str(error)
    _, error = upload(mimir, "--path", "/api/v1/rules")
    assert isinstance(error, ServiceError)
    assert "/prometheus/config/v1/rules" in error.next_step


def test_groups_stay_within_the_limits_that_mimir_has_by_default() -> None:
    """20 rules a group, 70 groups a tenant (ruler_max_rules_per_rule_group, ruler_max_rule_groups_per_tenant)."""
    groups = rules.groups_of(rules.chosen(["kvscope", "vllm", "sglang"]))
    assert max(len(group["rules"]) for group in groups.values()) <= 20
    assert len(groups) <= 70


def test_every_command_shows_examples() -> None:
    for command in ("write", "check", "reload", "upload"):
        assert "Examples:" in run(command, "--help")[0]
