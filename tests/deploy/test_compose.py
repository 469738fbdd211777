"""docker-compose.yml, the Dockerfile and what they mount, checked without a container engine."""

from __future__ import annotations

import fnmatch
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from jsonschema import Draft7Validator

from observability import catalog, cli

REPO = Path(__file__).resolve().parents[2]
COMPOSE = REPO / "docker-compose.yml"
BIN = Path(sys.executable).parent
Json = dict[str, Any]


class _NoDuplicates(yaml.SafeLoader):
    """Refuses a key that is given twice, of which YAML silently keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        assert len(keys) == len(set(keys)), f"duplicate key at {node.start_mark}"
        return super().construct_mapping(node, deep)


def load(path: Path) -> Json:
    return yaml.load(path.read_text(), Loader=_NoDuplicates)


SERVICES: dict[str, Json] = load(COMPOSE)["services"]
OURS = [name for name, service in SERVICES.items() if service["image"].startswith("kvscope:")]
#: Paths that the image of another project has.
IMAGE_FILES = {"pyroscope": ("/etc/pyroscope/config.yaml",)}
each_service = pytest.mark.parametrize("name", SERVICES)


def test_compose_file_fits_the_compose_specification() -> None:
    done = subprocess.run(
        [BIN / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", COMPOSE], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def test_compose_lint_finds_nothing_of_medium_severity_or_above() -> None:
    done = subprocess.run(
        [BIN / "compose-lint", "check", "--strict-config", "--fail-on", "medium", COMPOSE],
        capture_output=True, text=True, cwd=REPO,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_services_are_those_that_the_documents_promise() -> None:
    assert set(SERVICES) == {
        "secrets", "model", "engine", "load", "prometheus", "alertmanager", "grafana", "forecast", "app", "pyroscope", "collector",
    }  # fmt: skip


@each_service
def test_service_is_confined(name: str) -> None:
    service = SERVICES[name]
    assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+", service["image"]), "an exact version"
    assert int(service["user"].split(":")[0]) > 0
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert service["mem_limit"]
    assert service["pids_limit"]
    assert "privileged" not in service
    for port in service.get("ports", []):
        assert re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port)
    for key in service.get("environment", {}):
        assert not re.search(r"PASSWORD$|TOKEN$|KEY$", key), "secrets come as files"


@each_service
def test_service_that_stays_up_has_a_health_check_or_a_reason(name: str) -> None:
    service = SERVICES[name]
    if service["restart"] == "no":
        assert "ports" not in service
        return
    check = service["healthcheck"]
    if check.get("disable"):
        assert "ports" not in service
        lines = COMPOSE.read_text().split(f"\n  {name}:\n")[1].splitlines()
        index = next(i for i, line in enumerate(lines) if "healthcheck" in line)
        assert lines[index - 1].lstrip().startswith("# "), "says why there is none"
    else:
        assert check["test"][0] in ("CMD", "CMD-SHELL")
        ports = {port.split(":")[2] for port in service["ports"]}
        assert any(re.search(rf"127\.0\.0\.1:{port}\b", " ".join(check["test"])) for port in ports), (
            "asks the port that it serves"
        )


@each_service
def test_service_waits_for_services_that_exist_and_can_be_waited_for(name: str) -> None:
    for other, how in SERVICES[name].get("depends_on", {}).items():
        if how["condition"] == "service_healthy":
            assert not SERVICES[other]["healthcheck"].get("disable")
        else:
            assert how["condition"] == "service_completed_successfully"
            assert SERVICES[other]["restart"] == "no"


def _mounts(name: str) -> dict[str, str]:
    """Path in the container -> what lies there: a path of the repository, or a named volume."""
    mounts = {}
    for mount in SERVICES[name].get("volumes", []):
        source, target, *_ = mount.split(":")
        mounts[target] = source
    return mounts


@each_service
def test_every_mounted_path_exists(name: str) -> None:
    volumes = load(COMPOSE)["volumes"]
    for mount in SERVICES[name].get("volumes", []):
        source, target, *mode = mount.split(":")
        if source.startswith("."):
            assert (REPO / source).exists(), mount
            assert mode == ["ro"], f"{mount} lets a container write into the repository"
        else:
            assert source in volumes
        assert target.startswith("/")


@each_service
def test_every_path_that_a_service_names_is_mounted_or_writable(name: str) -> None:
    service = SERVICES[name]
    words = [*service.get("command", []), *map(str, service.get("environment", {}).values())]
    for word in words:
        for path in re.findall(r"(?:^|=|#)(/[\w./-]+)", word):
            if path not in IMAGE_FILES.get(name, ()):
                assert any(path == target or path.startswith(target + "/") for target in _mounts(name)), path


def _dry_parse(arguments: list[str]) -> Any:
    """The context of `kvscope ARGUMENTS`: parsed and checked by the real command, which is not run."""
    command, rest = typer.main.get_command(cli.root), list(arguments)
    while hasattr(command, "commands"):
        command = command.commands[rest.pop(0)]
    return command.make_context(command.name, rest)


@pytest.mark.parametrize("name", [name for name in OURS if name != "secrets"])
def test_kvscope_accepts_the_command_line(name: str) -> None:
    context = _dry_parse(SERVICES[name]["command"])
    assert context.command.name == {"engine": "serve", "load": "replay", "model": "get"}.get(name, name)
    assert not context.args


def test_a_wrong_option_would_be_noticed() -> None:
    with pytest.raises(Exception, match="No such option"):
        _dry_parse([*SERVICES["engine"]["command"], "--kv-block=3"])


def test_the_engine_runs_with_the_settings_of_the_demo() -> None:
    from observability.workload.history import CONFIG

    values = _dry_parse(SERVICES["engine"]["command"]).params
    for name, value in {
        "kv_dtype": CONFIG.kv_dtype, "kv_blocks": CONFIG.num_blocks, "max_model_len": CONFIG.max_model_len,
        "max_num_seqs": CONFIG.max_num_seqs, "max_num_batched_tokens": CONFIG.max_num_batched_tokens,
    }.items():  # fmt: skip
        assert values[name] == value


def test_one_volume_of_the_app_and_the_forecasts_holds_one_file() -> None:
    store = _dry_parse(SERVICES["forecast"]["command"]).params["store"]
    assert _dry_parse(SERVICES["app"]["command"]).params["source"].endswith(f"#{store}")
    assert _mounts("app")["/data"] == _mounts("forecast")["/data"]


def test_engine_load_prometheus_and_grafana_share_the_secrets_that_the_first_service_makes() -> None:
    [folder] = SERVICES["secrets"]["command"]
    made = set(re.search(r"for name in ([\w ]+);", (REPO / "deploy/image/secrets.sh").read_text())[1].split())  # type: ignore[index]
    used = {
        SERVICES["engine"]["environment"]["KVSCOPE_TOKEN_FILE"],
        SERVICES["load"]["environment"]["KVSCOPE_API_KEY_FILE"],
        SERVICES["forecast"]["environment"]["KVSCOPE_TOKEN_FILE"],
        SERVICES["grafana"]["environment"]["GF_SECURITY_ADMIN_PASSWORD__FILE"],
        *(
            job["authorization"]["credentials_file"]
            for job in load(REPO / "deploy/prometheus/prometheus.yml")["scrape_configs"]
            if job["job_name"].startswith("kvscope")
        ),
    }
    assert used == {f"{folder}/{name}" for name in made}
    for name in ("engine", "load", "forecast", "prometheus", "grafana"):
        assert _mounts(name)[folder] == "secrets"


def test_prometheus_scrapes_the_forecasts_where_they_are_served() -> None:
    from alerts.forecasts import FORECAST_JOB

    jobs = {job["job_name"]: job for job in load(REPO / "deploy/prometheus/prometheus.yml")["scrape_configs"]}
    options = _dry_parse(SERVICES["forecast"]["command"]).params
    assert options["serve"] is True
    assert options["every"] == "10m"
    assert jobs[FORECAST_JOB]["static_configs"] == [{"targets": [f"forecast:{options['port']}"]}]


def test_profiles_are_off_until_they_are_asked_for_and_then_go_to_the_server_of_that_profile() -> None:
    assert {n: s["profiles"] for n, s in SERVICES.items() if s.get("profiles")} == {
        "pyroscope": ["profiling"],
        "collector": ["otel"],
    }
    assert SERVICES["engine"]["environment"]["KVSCOPE_PROFILE_TO"] == "${KVSCOPE_PROFILE_TO:-}"
    [address] = re.findall(r"KVSCOPE_PROFILE_TO=(\S+) docker compose --profile profiling up", COMPOSE.read_text())
    assert address == "http://pyroscope:4040"
    assert SERVICES["pyroscope"]["ports"] == ["127.0.0.1:4040:4040"]
    [option] = [o for o in typer.main.get_command(cli.root).commands["serve"].params if o.name == "profile_to"]  # type: ignore[attr-defined]
    assert option.envvar == "KVSCOPE_PROFILE_TO"


def test_the_collector_takes_what_the_engine_sends_and_gives_it_to_prometheus() -> None:
    config = load(REPO / "deploy/otel/collector.yml")
    for pipeline in config["service"]["pipelines"].values():
        for kind in ("receivers", "processors", "exporters"):
            assert set(pipeline[kind]) <= config[kind].keys()
    assert set(config["service"]["extensions"]) <= config["extensions"].keys()
    [address] = re.findall(r"OTEL_EXPORTER_OTLP_ENDPOINT=(\S+) docker compose --profile otel up", COMPOSE.read_text())
    port = config["receivers"]["otlp"]["protocols"]["http"]["endpoint"].rpartition(":")[2]
    assert address == f"http://collector:{port}"
    assert config["exporters"]["otlphttp/prometheus"]["endpoint"] == "http://prometheus:9090/api/v1/otlp"
    assert "--web.enable-otlp-receiver" in SERVICES["prometheus"]["command"]
    # What Prometheus scrapes must not come a second time.
    [dropped] = config["processors"]["filter/scraped"]["metrics"]["exclude"]["metric_names"]
    assert all(re.fullmatch(dropped, family.name) for family in catalog.FAMILIES)
    assert not re.fullmatch(dropped, "gen_ai.server.request.duration")
    environment = SERVICES["engine"]["environment"]
    assert environment["OTEL_EXPORTER_OTLP_ENDPOINT"] == "${OTEL_EXPORTER_OTLP_ENDPOINT:-}"
    options = {o.envvar: o for o in typer.main.get_command(cli.root).commands["serve"].params}  # type: ignore[attr-defined]
    assert options["KVSCOPE_OTLP_HISTOGRAMS"].name == "otlp_histograms"
    assert environment["KVSCOPE_OTLP_HISTOGRAMS"] == "exponential"


# -- Dockerfile -----------------------------------------------------------------------------------------------------


def _copied() -> list[str]:
    sources = []
    for line in (REPO / "Dockerfile").read_text().splitlines():
        if line.startswith("COPY") and "--from=" not in line:
            sources += [word for word in shlex.split(line)[1:-1] if not word.startswith("--")]
    return sources


def test_everything_that_the_dockerfile_copies_is_there_and_not_ignored() -> None:
    lines = [line for line in (REPO / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    allowed = [line[1:] for line in lines if line.startswith("!")]
    for source in _copied():
        assert (REPO / source).exists(), source
        assert any(source == path or source.startswith(path + "/") for path in allowed), source
    assert not any(fnmatch.fnmatch(".git", path) or fnmatch.fnmatch(".venv", path) for path in allowed)


def test_the_image_has_every_package_of_the_distribution_and_no_root() -> None:
    text = (REPO / "Dockerfile").read_text()
    import tomllib

    find = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {pattern.rstrip("*") for pattern in find} <= set(_copied())
    assert re.search(r"^USER 10001:10001$", text, re.M)
    assert {SERVICES[name]["user"] for name in OURS} == {"10001:10001"}
    version = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["version"]
    assert {SERVICES[name]["image"] for name in OURS} == {f"kvscope:{version}"}


# -- Grafana's provisioning -----------------------------------------------------------------------------------------

#: Fields that Grafana's readers of provisioning files know (documentation, "Provision Grafana", 13.x).
DATASOURCES: Json = {
    "type": "object",
    "required": ["apiVersion", "datasources"],
    "additionalProperties": False,
    "properties": {
        "apiVersion": {"const": 1},
        "prune": {"type": "boolean"},
        "datasources": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["name", "uid", "type", "access", "url"],
                "additionalProperties": False,
                "properties": {
                    "name": {"type": "string"},
                    "uid": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,40}$"},
                    "type": {"const": "prometheus"},
                    "access": {"const": "proxy"},
                    "url": {"type": "string", "pattern": "^http://"},
                    "isDefault": {"type": "boolean"},
                    "editable": {"const": False},
                    "jsonData": {
                        "type": "object",
                        "additionalProperties": False,
                        "properties": {
                            "httpMethod": {"enum": ["GET", "POST"]},
                            "prometheusType": {"enum": ["Prometheus", "Mimir", "Cortex", "Thanos"]},
                            "prometheusVersion": {"type": "string"},
                            "timeInterval": {"type": "string", "pattern": "^[0-9]+(s|m)$"},
                        },
                    },
                },
            },
        },
    },
}
PROVIDERS: Json = {
    "type": "object",
    "required": ["apiVersion", "providers"],
    "additionalProperties": False,
    "properties": {
        "apiVersion": {"const": 1},
        "providers": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "required": ["name", "type", "options"],
                "additionalProperties": False,
                "properties": {
                    "name": {"type": "string"},
                    "orgId": {"type": "integer"},
                    "folder": {"type": "string"},
                    "folderUid": {"type": "string"},
                    "type": {"const": "file"},
                    "disableDeletion": {"type": "boolean"},
                    "allowUiUpdates": {"const": False},
                    "updateIntervalSeconds": {"type": "integer", "minimum": 10},
                    "options": {
                        "type": "object",
                        "required": ["path"],
                        "additionalProperties": False,
                        "properties": {"path": {"type": "string"}, "foldersFromFilesStructure": {"type": "boolean"}},
                    },
                },
            },
        },
    },
}
PROVISIONING = REPO / "deploy/grafana/provisioning"


@pytest.mark.parametrize(("folder", "schema"), [("datasources", DATASOURCES), ("dashboards", PROVIDERS)])
def test_provisioning_files_have_the_fields_that_grafana_reads(folder: str, schema: Json) -> None:
    files = list((PROVISIONING / folder).glob("*"))
    assert files
    for path in files:
        assert path.suffix in (".yml", ".yaml")
        assert [e.message for e in Draft7Validator(schema).iter_errors(load(path))] == []
        values = "\n".join(line.split("#")[0] for line in path.read_text().splitlines())
        assert not re.search(r"(?<!\$)\$(?!\$)", values), "a literal $ is written $$"


def test_boards_and_home_board_lie_where_grafana_looks() -> None:
    [provider] = load(PROVISIONING / "dashboards/kvscope.yml")["providers"]
    mounted = _mounts("grafana")
    boards = REPO / mounted[provider["options"]["path"]]
    assert len(list(boards.glob("*.json"))) >= 4
    home = Path(SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (boards / home.relative_to(provider["options"]["path"])).is_file()


def test_addresses_inside_the_network_are_services_on_the_ports_that_they_serve() -> None:
    [source] = load(PROVISIONING / "datasources/prometheus.yml")["datasources"]
    config = load(REPO / "deploy/prometheus/prometheus.yml")
    named = [source["url"], *(word for name in SERVICES for word in SERVICES[name].get("command", []))]
    named += [f"http://{t}" for job in config["scrape_configs"] for s in job["static_configs"] for t in s["targets"]]
    named += [
        f"http://{t}" for m in config["alerting"]["alertmanagers"] for s in m["static_configs"] for t in s["targets"]
    ]
    found = set()
    for text in named:
        for host, port in re.findall(r"http://([a-z]+):(\d+)", text):
            found.add(host)
            if "ports" in SERVICES[host]:
                assert f"127.0.0.1:{port}:{port}" in SERVICES[host]["ports"]
            else:  # for the other services alone
                assert f"--port={port}" in SERVICES[host]["command"]
    assert found == {"prometheus", "engine", "alertmanager", "forecast"}
    scrape = config["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == scrape
    from alerts.links import GRAFANA_URL, JOB

    assert config["scrape_configs"][0]["job_name"] == JOB
    assert SERVICES["grafana"]["environment"]["GF_SERVER_ROOT_URL"].rstrip("/") == GRAFANA_URL
