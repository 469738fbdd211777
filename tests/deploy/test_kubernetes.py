"""The kustomize base: built as kustomize does it, each resource checked against a schema, and what it holds against the repository's files."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator
from kubernetes_validate import validate

from alerts.links import JOB
from dashboards.kubernetes import FOLDER
from observability.cli import boards, rules

REPO = Path(__file__).resolve().parents[2]
Json = dict[str, Any]
OPERATOR: Json = json.loads((Path(__file__).parent / "schemas/prometheus-operator.json").read_text())
#: Version of Kubernetes whose schemas a ConfigMap is held to.
KUBERNETES = "1.36"
MIB = 1 << 20
#: kubectl apply keeps the whole resource in an annotation, and annotations end here.
ANNOTATIONS = 256 * 1024


def build(folder: Path) -> list[Json]:
    """Resources of a kustomization: of the fields that ours use, and no other."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert set(kustomization) <= {"apiVersion", "kind", "resources", "configMapGenerator", "generatorOptions"}
    found = []
    for name in kustomization.get("resources", ()):
        path = (folder / name).resolve()
        found += build(path) if path.is_dir() else [yaml.safe_load(path.read_text())]
    options = kustomization.get("generatorOptions", {})
    assert options.get("disableNameSuffixHash", True), "names that change leave old boards behind"
    for made in kustomization.get("configMapGenerator", ()):
        metadata = {"name": made["name"], "labels": options["labels"], "annotations": options["annotations"]}
        data = {file: (folder / file).read_text() for file in made["files"]}
        assert all("/" not in file for file in made["files"]), "kustomize reads no file outside its folder"
        found.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})
    return found


RESOURCES = build(REPO / FOLDER)
each = pytest.mark.parametrize("resource", RESOURCES, ids=lambda r: f"{r['kind']} {r['metadata']['name']}")


def of_kind(kind: str) -> list[Json]:
    return [resource for resource in RESOURCES if resource["kind"] == kind]


def faults(resource: Json) -> list[str]:
    kind = resource["kind"]
    if kind == "ConfigMap":
        try:
            validate(resource, KUBERNETES, strict=True)
        except Exception as error:  # its own error class is made at run time
            return [str(error)]
        return []
    return [f"{e.json_path}: {e.message}" for e in Draft7Validator(OPERATOR["definitions"][kind]).iter_errors(resource)]


@each
def test_resource_fits_its_schema(resource: Json) -> None:
    assert faults(resource) == []
    assert re.fullmatch(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", resource["metadata"]["name"])


@pytest.mark.parametrize(
    ("kind", "spoil"),
    [
        ("ConfigMap", lambda r: r["data"].update(number=1)),
        ("ConfigMap", lambda r: r.update(spec={})),
        ("PodMonitor", lambda r: r["spec"].pop("selector")),
        ("PodMonitor", lambda r: r["spec"]["podMetricsEndpoints"][0].update(scrapeInterval="15s")),
        ("PodMonitor", lambda r: r["spec"].update(bodySizeLimit="64 MB")),
        ("PodMonitor", lambda r: r["spec"]["podMetricsEndpoints"][0]["relabelings"][0].update(target_label="job")),
        ("PrometheusRule", lambda r: r["spec"]["groups"][0].update(interval="15 s")),
        ("PrometheusRule", lambda r: r["spec"]["groups"][0]["rules"][0].pop("expr")),
        ("PrometheusRule", lambda r: r["spec"]["groups"][0]["rules"][0].update(hold="2m")),
    ],
)
def test_the_schemas_find_a_planted_fault(kind: str, spoil: Any) -> None:
    resource = json.loads(json.dumps(of_kind(kind)[0]))
    assert faults(resource) == []
    spoil(resource)
    assert faults(resource)


def test_rules_are_those_that_prometheus_loads() -> None:
    made = {resource["metadata"]["name"]: resource["spec"] for resource in of_kind("PrometheusRule")}
    for name in (rules.RECORDING, rules.ALERTS):
        assert made.pop(name.removesuffix(".yml")) == yaml.safe_load((REPO / "alerts/generated" / name).read_text())
    assert not made


def test_every_board_is_in_a_config_map_that_the_sidecar_finds_and_the_cluster_takes() -> None:
    maps = of_kind("ConfigMap")
    held = {file: text for resource in maps for file, text in resource["data"].items()}
    assert held == boards.files()
    assert len({resource["metadata"]["name"] for resource in maps}) == len(maps) == len(held)
    assert all(resource["metadata"]["labels"]["grafana_dashboard"] == "1" for resource in maps)
    for resource in RESOURCES:
        size = len(json.dumps(resource))
        assert size < MIB
        assert size < ANNOTATIONS, f"{resource['metadata']['name']} needs kubectl apply --server-side"


def test_the_job_of_scraped_pods_is_the_one_that_alerts_look_for() -> None:
    [monitor] = of_kind("PodMonitor")
    [endpoint] = monitor["spec"]["podMetricsEndpoints"]
    given = {r["targetLabel"]: r.get("replacement") for r in endpoint["relabelings"]}
    assert given["job"] == JOB
    assert set(given) == {"job", "instance"}


def test_kustomize_itself_builds_the_same() -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed; the build above stands in for it")
    done = subprocess.run([kubectl, "kustomize", str(REPO / FOLDER)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr

    def by_name(resources: list[Json]) -> dict[tuple[str, str], Json]:
        return {(r["kind"], r["metadata"]["name"]): r for r in resources}

    assert by_name(list(yaml.safe_load_all(done.stdout))) == by_name(RESOURCES)
