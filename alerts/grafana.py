"""The alerts as Grafana-managed rules: a file for Grafana's provisioning/alerting, for those whose alerts Grafana evaluates and sends.

The expressions are those of the Prometheus rules and read the same recorded series, so the recording rules are needed as well. grafanalib's
own rule classes print fields that Grafana's reader refuses (no title); FileRule prints those it reads
(grafana/pkg/services/provisioning/alerting/rules_types.go).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from grafanalib.core import AlertFileBasedProvisioning, AlertGroup

from alerts.links import GRAFANA_URL, board_uid, board_url, runbook_url
from alerts.rules import ALERTS, INTERVAL, MAX_RULES_PER_GROUP, Dumper
from alerts.types import Alert

#: Of deploy/grafana/provisioning/datasources.
DATASOURCE_UID = "prometheus"
FOLDER = "kvscope"
_EXPRESSIONS = "__expr__"
_LOOK_BACK_SECONDS = 600


@dataclass
class FileRule:
    """One rule in the form of Grafana's provisioning files; grafanalib's AlertGroup sets `rule_group`."""

    uid: str
    title: str
    expr: str
    hold: str
    keep_firing: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    dashboard_uid: str
    rule_group: str = ""

    def to_json_data(self) -> dict[str, Any]:
        return {
            "uid": self.uid,
            "title": self.title,
            "condition": "B",
            "data": [
                {
                    "refId": "A",
                    "relativeTimeRange": {"from": _LOOK_BACK_SECONDS, "to": 0},
                    "datasourceUid": DATASOURCE_UID,
                    "model": {"refId": "A", "expr": self.expr, "instant": True, "range": False, "editorMode": "code"},
                },
                {
                    "refId": "B",
                    "relativeTimeRange": {"from": 0, "to": 0},
                    "datasourceUid": _EXPRESSIONS,
                    # The expression has compared already: whatever it leaves is an alert, also a 0 such as that of up == 0.
                    "model": {"refId": "B", "type": "math", "expression": "is_number($A) || is_inf($A)"},
                },
            ],
            "dashboardUid": self.dashboard_uid,
            # no series is what a comparison that nothing meets leaves
            "noDataState": "OK",
            "execErrState": "Error",
            "for": self.hold,
            "keepFiringFor": self.keep_firing,
            "labels": dict(self.labels),
            "annotations": dict(self.annotations),
            "isPaused": False,
        }


def _uid(alert: Alert) -> str:
    return "kvscope-" + re.sub(r"[^a-z0-9]+", "-", alert.id.removeprefix("Kvscope").lower())


def _text(template: str) -> str:
    """A Prometheus template in Grafana's words: there `$value` is a text of all queries, `$values.A.Value` the number."""
    return template.replace("$value", "$values.A.Value")


def _rule(alert: Alert, base: str) -> FileRule:
    return FileRule(
        uid=_uid(alert),
        title=alert.id,
        expr=alert.expr,
        hold=alert.hold,
        keep_firing=alert.keep_firing,
        labels={"severity": alert.severity, **alert.labels},
        annotations={
            "summary": alert.summary,
            "description": _text(alert.description),
            "runbook_url": runbook_url(alert.name, base),
            "dashboard": board_url(alert.board, base),
        },
        dashboard_uid=board_uid(alert.board),
    )


def provisioning_file(grafana_url: str = GRAFANA_URL, alerts: Sequence[Alert] = ALERTS) -> str:
    """Text of grafana/kvscope-alerts.yml, its links pointing to the Grafana at `grafana_url`."""
    areas: dict[str, list[FileRule]] = {}
    for alert in alerts:
        areas.setdefault(alert.area, []).append(_rule(alert, grafana_url))
    groups = []
    for area, rules in areas.items():
        for number, start in enumerate(range(0, len(rules), MAX_RULES_PER_GROUP), start=1):
            part = rules[start : start + MAX_RULES_PER_GROUP]
            name = f"kvscope-{area}" + (f"-{number}" if len(rules) > MAX_RULES_PER_GROUP else "")
            group = AlertGroup(name=name, rules=part, folder=FOLDER, evaluateInterval=INTERVAL)
            groups.append({"orgId": 1, **group.to_json_data()})
    body = yaml.dump(AlertFileBasedProvisioning(groups).to_json_data(), Dumper=Dumper, sort_keys=False, width=10_000)
    return f"# Made by `kvscope generate`; edit alerts/*.py instead.\n{body}"
