"""The Grafana-managed form of the alerts: what Grafana's reader takes, and the same alerts as in the Prometheus rules."""

from __future__ import annotations

import re
from typing import Any

import jsonschema
import pytest
import yaml

from alerts import grafana, rules
from alerts.links import board_uid
from tests.conftest import REPO

PROVISIONED = yaml.safe_load(grafana.provisioning_file())
RULES: list[dict[str, Any]] = [rule for group in PROVISIONED["groups"] for rule in group["rules"]]
PROMETHEUS = [rule for group in yaml.safe_load(rules.alert_file())["groups"] for rule in group["rules"]]

_DURATION = {"type": "string", "pattern": r"^(\d+(ms|s|m|h|d|w|y))+$"}
_TEXT = {"type": "string", "pattern": r"\S"}
_TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}


def _object(required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "required": required.split(), "properties": properties}


#: What Grafana's reader takes (pkg/services/provisioning/alerting/rules_types.go), of which it needs the required ones.
SCHEMA = _object(
    "apiVersion groups",
    apiVersion={"const": 1},
    groups={"type": "array", "minItems": 1, "items": _object(
        "name folder interval rules",
        orgId={"type": "integer", "minimum": 1}, name=_TEXT, folder=_TEXT, interval=_DURATION,
        rules={"type": "array", "minItems": 1, "items": _object(
            "uid title condition data",
            uid={"type": "string", "pattern": r"^[a-zA-Z0-9_-]{1,40}$"}, title={**_TEXT, "maxLength": 190}, condition=_TEXT,
            data={"type": "array", "minItems": 1, "items": _object(
                "refId datasourceUid model",
                refId=_TEXT, queryType={"type": "string"}, datasourceUid=_TEXT, model={"type": "object"},
                relativeTimeRange=_object("from to", **{"from": {"type": "integer"}, "to": {"type": "integer"}}),
            )},
            dashboardUid={"type": "string"}, panelId={"type": "integer"},
            noDataState={"enum": ["OK", "NoData", "Alerting", "KeepLast"]}, execErrState={"enum": ["OK", "Error", "Alerting", "KeepLast"]},
            keepFiringFor=_DURATION, annotations=_TEXTS, labels=_TEXTS, isPaused={"type": "boolean"},
            missing_series_evals_to_resolve={"type": "integer", "minimum": 0}, **{"for": _DURATION},
        )},
    )},
)  # fmt: skip


def test_the_file_is_one_that_grafana_reads() -> None:
    jsonschema.Draft202012Validator(SCHEMA).validate(PROVISIONED)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rule: rule.pop("title"), "'title' is a required property"),
        (lambda rule: rule.update(noDataState="No Data"), "is not one of"),
        (lambda rule: rule.update(grafana_alert={}), "Additional properties"),
    ],
)
def test_the_schema_refuses_what_the_reader_refuses(change: Any, message: str) -> None:
    """The faults of grafanalib's own rule classes."""
    broken = yaml.safe_load(grafana.provisioning_file())
    change(broken["groups"][0]["rules"][0])
    with pytest.raises(jsonschema.ValidationError, match=message):
        jsonschema.Draft202012Validator(SCHEMA).validate(broken)


def test_every_alert_is_there_with_the_same_expression_waiting_times_labels_and_annotations() -> None:
    assert len(RULES) == len(PROMETHEUS)
    ours = {(r["data"][0]["model"]["expr"], r["for"]): r for r in RULES}
    for theirs in PROMETHEUS:
        rule = ours[theirs["expr"], theirs["for"]]
        assert rule["title"].split()[0] == theirs["alert"]
        assert rule["keepFiringFor"] == theirs["keep_firing_for"]
        assert rule["labels"] == theirs["labels"]
        told = {name: text.replace("$values.A.Value", "$value") for name, text in rule["annotations"].items()}
        assert told == theirs["annotations"]


def test_templates_use_what_grafana_has() -> None:
    """`$value` would be a text of all queries, and `${x}` is taken for a variable of the environment."""
    for rule in RULES:
        for text in rule["annotations"].values():
            assert not re.search(r"\$value\b|\$\{", text)


def test_names_are_unique_and_boards_exist() -> None:
    assert len({rule["uid"] for rule in RULES}) == len({rule["title"] for rule in RULES}) == len(RULES)
    assert {rule["dashboardUid"] for rule in RULES} <= {board_uid(alert.board) for alert in rules.ALERTS}
    for rule in RULES:
        query, condition = rule["data"]
        assert rule["condition"] == condition["refId"]
        assert condition["model"]["expression"] == f"is_number(${query['refId']}) || is_inf(${query['refId']})"


def test_data_source_is_the_provisioned_one() -> None:
    sources = yaml.safe_load((REPO / "deploy/grafana/provisioning/datasources/prometheus.yml").read_text())[
        "datasources"
    ]
    assert {query["datasourceUid"] for rule in RULES for query in rule["data"]} == {"__expr__", sources[0]["uid"]}
