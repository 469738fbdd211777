"""The configuration files of deploy/, read by the real programs with the compose file's own flags, and one scrape with the
shared secret from end to end. Only paths, ports and host names are put in the machine's own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import yaml

from alerts import rules
from alerts.links import JOB
from tests.conftest import wait_for

REPO = Path(__file__).resolve().parents[2]
DEPLOY = REPO / "deploy"
SERVICES = yaml.safe_load((REPO / "docker-compose.yml").read_text())["services"]
ENVIRONMENT = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    folder = tmp_path / "secrets"
    folder.mkdir()
    subprocess.run([DEPLOY / "image/secrets.sh", folder], check=True, env=ENVIRONMENT, capture_output=True)
    return folder


def _prometheus_config(secrets: Path, engine: str = "engine:8000", itself: str = "127.0.0.1:9090") -> str:
    text = (DEPLOY / "prometheus/prometheus.yml").read_text()
    for old, new in {
        "/etc/prometheus/rules": str(REPO / "alerts/generated"), "/run/kvscope": str(secrets), "engine:8000": engine,
        "127.0.0.1:9090": itself,
    }.items():  # fmt: skip
        assert old in text
        text = text.replace(old, new)
    return text


def test_promtool_accepts_the_configuration_with_its_rules(
    program: Callable[[str], str], tmp_path: Path, secrets: Path
) -> None:
    config = tmp_path / "prometheus.yml"
    config.write_text(_prometheus_config(secrets))
    done = subprocess.run([program("promtool"), "check", "config", config], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules.ALERTS)} rules found" in done.stdout


def test_amtool_accepts_the_configuration(program: Callable[[str], str]) -> None:
    config = DEPLOY / "alertmanager/alertmanager.yml"
    done = subprocess.run([program("amtool"), "check-config", config], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for severity, receiver in {"critical": "page", "warning": "ticket", "info": "log"}.items():
        route = subprocess.run(
            [program("amtool"), "config", "routes", "test", f"--config.file={config}", f"severity={severity}"],
            capture_output=True, text=True,
        )  # fmt: skip
        assert route.stdout.strip() == receiver


@pytest.mark.parametrize(
    ("labels", "receiver"),
    [
        ({"alertname": "KvscopeSchedulerStuck", "severity": "critical", "model": "m", "instance": "a:1"}, "page"),
        (
            {
                "alertname": "KvscopeTTFTBudgetBurn",
                "severity": "critical",
                "model": "m",
                "class": "standard",
                "window": "1h",
            },
            "page",
        ),
        (
            {
                "alertname": "KvscopeTTFTBudgetBurn",
                "severity": "warning",
                "model": "m",
                "class": "standard",
                "window": "3d",
            },
            "ticket",
        ),
        ({"alertname": "KvscopePeriodicStall", "severity": "warning"}, "ticket"),
        ({"alertname": "SomebodyElses"}, "log"),
    ],
)
def test_alerts_go_where_their_severity_says(
    program: Callable[[str], str], labels: dict[str, str], receiver: str
) -> None:
    config = DEPLOY / "alertmanager/alertmanager.yml"
    argv = [program("amtool"), "config", "routes", "test", f"--config.file={config}", f"--verify.receivers={receiver}"]
    done = subprocess.run([*argv, *(f"{k}={v}" for k, v in labels.items())], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_severity_of_the_rules_has_a_route_and_inhibitions_name_real_alerts() -> None:
    config = yaml.safe_load((DEPLOY / "alertmanager/alertmanager.yml").read_text())
    routed = {matcher for route in config["route"]["routes"] for matcher in route["matchers"]}
    assert routed == {f'severity="{alert.severity}"' for alert in rules.ALERTS}
    named = set(re.findall(r"Kvscope\w+", json.dumps(config["inhibit_rules"])))
    assert named <= set(rules.ALERT_NAMES)
    assert config["route"]["group_by"] == ["alertname", "model"]


def test_secrets_are_random_kept_and_readable_by_the_services(secrets: Path) -> None:
    first = {path.name: path.read_text() for path in secrets.iterdir()}
    assert set(first) == {"kvscope_token", "grafana_admin_password"}
    assert len(set(first.values())) == 2
    assert all(len(text) >= 43 and text == text.strip() for text in first.values())
    assert all(path.stat().st_mode & 0o777 == 0o444 for path in secrets.iterdir())
    subprocess.run([DEPLOY / "image/secrets.sh", secrets], check=True, env=ENVIRONMENT, capture_output=True)
    assert {path.name: path.read_text() for path in secrets.iterdir()} == first


def test_entrypoint_says_which_secret_is_missing(tmp_path: Path) -> None:
    environment = {**ENVIRONMENT, "KVSCOPE_TOKEN_FILE": str(tmp_path / "none")}
    done = subprocess.run([DEPLOY / "image/entrypoint.sh", "--help"], env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert "KVSCOPE_TOKEN_FILE" in done.stderr
    assert "next:" in done.stderr


def test_alertmanager_starts_with_the_compose_flags(
    program: Callable[[str], str],
    free_port: Callable[[], int],
    spawn: Callable[..., subprocess.Popen[bytes]],
    tmp_path: Path,
) -> None:
    address = f"127.0.0.1:{free_port()}"
    paths = {"/etc/alertmanager": DEPLOY / "alertmanager", "/alertmanager": tmp_path}
    flags = [_moved(flag, paths) for flag in SERVICES["alertmanager"]["command"]]
    spawn(
        program("prometheus-alertmanager"), *flags, f"--web.listen-address={address}",
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    wait_for(lambda: httpx.get(f"http://{address}/-/ready").status_code == 200, 20, "alertmanager")


def _moved(flag: str, paths: dict[str, Path]) -> str:
    """`flag` with the first container path in it that `paths` knows replaced by the machine's own."""
    name, _, value = flag.partition("=")
    for old, new in paths.items():
        if value.startswith(old):
            return f"{name}={new}{value.removeprefix(old)}"
    return flag


def test_prometheus_scrapes_the_engine_with_the_shared_token(
    program: Callable[[str], str],
    free_port: Callable[[], int],
    spawn: Callable[..., subprocess.Popen[bytes]],
    tmp_path: Path,
    secrets: Path,
) -> None:
    """The engine's own command line (with the tiny model) behind the image's entrypoint; Prometheus with its compose flags."""
    pytest.importorskip("torch")
    engine, prometheus = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    changes = {"smollm2-135m": "tiny", "--host=0.0.0.0": "--host=0.0.0.0", "--port=8000": f"--port={engine[10:]}"}
    command = [changes.get(word, word) for word in SERVICES["engine"]["command"]]
    command = [word for word in command if not word.startswith("--max-model-len")]  # tiny's context is shorter
    with (tmp_path / "engine.log").open("wb") as log:
        spawn(
            str(DEPLOY / "image/entrypoint.sh"), *command, stdout=log, stderr=log,
            env={**ENVIRONMENT, "KVSCOPE_TOKEN_FILE": str(secrets / "kvscope_token")},
        )  # fmt: skip
    config = tmp_path / "prometheus.yml"
    config.write_text(
        _prometheus_config(secrets, engine, prometheus)
        .replace("interval: 5s", "interval: 1s")
        .replace("timeout: 4s", "timeout: 1s")
    )
    paths = {"/etc/prometheus/prometheus.yml": config, "/prometheus": tmp_path / "data"}
    # Debian's Prometheus knows no OTLP, so that this flag is not tried here.
    flags = [_moved(flag, paths) for flag in SERVICES["prometheus"]["command"] if flag != "--web.enable-otlp-receiver"]
    with (tmp_path / "prometheus.log").open("wb") as log:
        spawn(program("prometheus"), *flags, f"--web.listen-address={prometheus}", stdout=log, stderr=log)
    wait_for(lambda: httpx.get(f"http://{engine}/health").status_code == 200, 60, "the engine")
    assert httpx.get(f"http://{engine}/metrics").status_code == 401

    def up() -> bool:
        answer = httpx.get(f"http://{prometheus}/api/v1/query", params={"query": f'up{{job="{JOB}"}}'}).json()
        return [sample["value"][1] for sample in answer["data"]["result"]] == ["1"]

    wait_for(up, 30, "a scrape that the engine accepts")
    groups = httpx.get(f"http://{prometheus}/api/v1/rules").json()["data"]["groups"]
    assert {rule["name"] for group in groups for rule in group["rules"]} == rules.recorded_names() | {
        alert.name for alert in rules.ALERTS
    }
