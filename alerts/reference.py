"""Signals and alerts as pages of documentation: docs/signals.md and docs/alerts.md, written by `kvscope generate`."""

from __future__ import annotations

from collections.abc import Iterator

from alerts.rules import ALERT_NAMES, ALERTS, EXTRA_RECORDINGS, named
from observability.signals import SIGNALS

_SIGNALS = f"""\
# Signals

Every series that kvscope derives, made from `observability/signals.py` by `kvscope generate`. Do not edit this page. Recording rules
(`alerts/generated/kvscope-recording.yml`), boards, alerts, app and forecasts read these names; the embedded store evaluates the same
expressions, which stand in that file. A name is `level:metric:operation`: the level names the labels that are left. Rules record {len(EXTRA_RECORDINGS)} more series
for alerts alone: the same over other windows, burn rates of objectives. [metrics.md](metrics.md) has what they are made of.
"""

_ALERTS = """\
# Alerts

Every alert, made from `alerts/` by `kvscope generate`. Do not edit this page. Each has a runbook: what it means, how to confirm it, what to
do. Grafana shows the runbooks as pages, too, to which the alerts link. Objectives and their thresholds: [objectives.md](objectives.md).
"""


def signals_page() -> str:
    """Signals by metric, each with unit and labels."""
    return "\n".join([_SIGNALS, *_signals()]) + "\n"


def _signals() -> Iterator[str]:
    yield "| Signal | Is | Unit | Labels |"
    yield "|---|---|---|---|"
    for signal in SIGNALS:
        yield f"| `{signal.name}` | {signal.title} | {signal.unit} | {', '.join(signal.by) or '-'} |"


def alerts_page() -> str:
    """Alerts by severity, each with what it says and its runbook."""
    lines = [_ALERTS, "| Alert | Severity | Says | Held for | Runbook |", "|---|---|---|---|---|"]
    order = ("critical", "warning", "info")
    for name in sorted(ALERT_NAMES, key=lambda name: (order.index(named(name).severity), name)):
        rules = [alert for alert in ALERTS if alert.name == name]
        severities = ", ".join(dict.fromkeys(alert.severity for alert in rules))
        holds = ", ".join(dict.fromkeys(alert.hold for alert in rules))
        runbook = f"[runbook](../alerts/runbooks/{name}.md)"
        lines.append(f"| `{name}` | {severities} | {rules[0].summary} | {holds} | {runbook} |")
    return "\n".join(lines) + "\n"
