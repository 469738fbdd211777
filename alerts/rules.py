"""All recording and alerting rules, and the Prometheus rule files made of them.

Recording rules are the signals of observability/signals.py plus the few series that only alerts need: other windows, a
split by instance (symptoms.py, splits.py), burn rates (burn.py). Alerts are in burn.py, symptoms.py and forecasts.py. Thresholds come from
observability/objectives.py, so that a line on a board and an alert agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from alerts import burn, forecasts, splits, symptoms
from alerts.links import GRAFANA_URL, board_url, runbook_url
from alerts.types import Alert, Recording
from observability import catalog as c
from observability import objectives as o
from observability.signals import SIGNALS, LifetimeQuantile, Survival

INTERVAL = "15s"
#: For what changes over weeks, and reads as long a window.
SLOW_INTERVAL = "5m"
MAX_RULES_PER_GROUP = 20

SURVIVAL = "model_pool_le:kvscope_kv_block_survival:ratio_rate5m"
#: What survival is made of: read from all engines once, not for each age.
HAZARD = Recording("model_pool_age:kvscope_kv_block_hazard:ratio_rate5m", Survival.hazard())

EXTRA_RECORDINGS: tuple[Recording, ...] = (
    HAZARD,
    *splits.RECORDINGS,
    *symptoms.RECORDINGS,
    *symptoms.OVERFLOWS,
    *forecasts.RECORDINGS,
    *burn.recordings(),
    *burn.slow_recordings(),
)
ALERTS: tuple[Alert, ...] = (*burn.alerts(), *symptoms.ALERTS, *forecasts.ALERTS)
#: One runbook for each.
ALERT_NAMES: tuple[str, ...] = tuple(dict.fromkeys(alert.name for alert in ALERTS))


def named(name: str) -> Alert:
    """The first rule of the alert `name`; KeyError if there is none."""
    for alert in ALERTS:
        if alert.name == name:
            return alert
    raise KeyError(name)


# -- rule files -----------------------------------------------------------------------------------------------------


#: Where a signal is recorded: the first area that has a part of its name; those of no area are load.
_AREAS: dict[str, tuple[str, ...]] = {
    "latency": (
        f":{c.PHASE_SECONDS.name}:",
        ":kvscope_request_length_phase_",
        *(f":{x.family.name}:" for x in o.LATENCY_OBJECTIVES),
    ),
    "tenants": (":kvscope_tenant_",),
    "residency": ("kv_block_", "kv_live_block_", "kv_idle_before_", "kv_reuse_gap_", "kv_regret"),
    "gpu": (":kvscope_gpu_", ":kvscope_hardware_", ":kvscope_kv_copy_"),
    "kv": (":kvscope_kv_", ":kvscope_request_quantization_"),
}


def recordings() -> dict[str, list[Recording]]:
    """All recorded series by area: one rule group each, in the order of evaluation."""
    groups: dict[str, list[Recording]] = {"load": [], **{area: [] for area in _AREAS}}
    for signal in SIGNALS:
        area = next((area for area, parts in _AREAS.items() if any(part in signal.name for part in parts)), "load")
        expr = signal.promql
        if isinstance(signal.expr, Survival):
            groups[area].append(HAZARD)
            expr = signal.expr.promql(HAZARD.name)
        elif isinstance(signal.expr, LifetimeQuantile):  # made of a series that its group has recorded just before
            expr = expr.replace(signal.expr.survival.promql(), SURVIVAL)
        groups[area].append(Recording(signal.name, expr))
    return groups | {
        "splits": list(splits.RECORDINGS),
        "symptoms": list(symptoms.RECORDINGS),
        "overflow": list(symptoms.OVERFLOWS),
        "forecasts": list(forecasts.RECORDINGS),
        "objectives": list(burn.recordings()),
        "budget": list(burn.slow_recordings()),
    }


def recorded_names() -> set[str]:
    return {r.name for group in recordings().values() for r in group}


def rule_groups(area: str, rules: Sequence[dict[str, Any]], kind: str) -> Iterator[dict[str, Any]]:
    """Rule groups of at most MAX_RULES_PER_GROUP rules, in order."""
    parts = [rules[i : i + MAX_RULES_PER_GROUP] for i in range(0, len(rules), MAX_RULES_PER_GROUP)]
    for number, part in enumerate(parts, start=1):
        suffix = f"-{number}" if len(parts) > 1 else ""
        interval = SLOW_INTERVAL if area == "budget" else INTERVAL
        yield {"name": f"kvscope-{area}{suffix}-{kind}", "interval": interval, "rules": part}


class Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks."""


Dumper.add_representer(
    str, lambda d, text: d.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)
)


def dump(body: dict[str, Any]) -> str:
    """YAML of `body`, each expression on one line."""
    return yaml.dump(body, Dumper=Dumper, sort_keys=False, width=10_000)


def to_yaml(
    groups: Sequence[dict[str, Any]], source: str = "alerts/*.py, observability/signals.py or objectives.py"
) -> str:
    """Text of a rule file; `source` is where a reader should change it."""
    return f"# Made by `kvscope generate`; edit {source} instead.\n{dump({'groups': list(groups)})}"


def _recording(r: Recording) -> dict[str, Any]:
    return {"record": r.name, "expr": r.expr} | ({"labels": dict(r.labels)} if r.labels else {})


def recording_file() -> str:
    """Text of kvscope-recording.yml."""
    out: list[dict[str, Any]] = []
    for area, rules in recordings().items():
        out += rule_groups(area, [_recording(r) for r in rules], "recording")
    return to_yaml(out)


def alert_file(grafana_url: str = GRAFANA_URL) -> str:
    """Text of kvscope-alerts.yml, its links pointing to the Grafana at `grafana_url`."""
    areas: dict[str, list[dict[str, Any]]] = {}
    for a in ALERTS:
        rule = {
            "alert": a.name,
            "expr": a.expr,
            "for": a.hold,
            "keep_firing_for": a.keep_firing,
            "labels": {"severity": a.severity, **a.labels},
            "annotations": {
                "summary": a.summary,
                "description": a.description,
                "runbook_url": runbook_url(a.name, grafana_url),
                "dashboard": board_url(a.board, grafana_url),
            },
        }
        areas.setdefault(a.area, []).append(rule)
    return to_yaml([group for area, rules in areas.items() for group in rule_groups(area, rules, "alerts")])
