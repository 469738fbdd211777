"""The kustomize base deploy/kubernetes: rules as PrometheusRule, boards as ConfigMaps that Grafana's sidecar finds by their label."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import yaml

from alerts.rules import dump

FOLDER = "deploy/kubernetes"
#: What kustomize makes of dashboards/generated: it reads files only below a kustomization, so this one lies beside the boards.
BOARDS = "dashboards/generated/kustomization.yaml"
_MADE = "# Made by `kvscope generate`.\n"
LABELS = {"app.kubernetes.io/name": "kvscope", "app.kubernetes.io/part-of": "kvscope"}


def prometheus_rule(name: str, rules: str) -> str:
    """The rule file with text `rules` as a PrometheusRule called `name`."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    body = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": name, "labels": LABELS},
        "spec": {"groups": yaml.load(rules, Loader=loader)["groups"]},
    }
    return _MADE + dump(body)


def boards_kustomization(boards: Iterable[str]) -> str:
    """One ConfigMap for each file of `boards`: together they would not fit into the 1 MiB that one may hold."""
    body = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "generatorOptions": {
            "disableNameSuffixHash": True,
            "labels": {"grafana_dashboard": "1"},
            "annotations": {"grafana_folder": "kvscope"},
        },
        "configMapGenerator": [
            {"name": f"kvscope-board-{file.removesuffix('.json').removeprefix('kvscope-')}", "files": [file]}
            for file in boards
        ],
    }
    return _MADE + yaml.safe_dump(body, sort_keys=False, width=10_000)


def files(rules: Mapping[str, str], boards: Iterable[str]) -> dict[str, str]:
    """Path below the repository -> text, of rule files by name and the names of the boards' files."""
    out = {
        f"{FOLDER}/{name.removesuffix('.yml')}.yaml": prometheus_rule(name.removesuffix(".yml"), text)
        for name, text in rules.items()
    }
    return out | {BOARDS: boards_kustomization(boards)}
