"""Recording and alerting rules as data, and the Prometheus rule files made of them.

Recording rules are the signals of observability/signals.py plus the few series that only alerts need (another window, a
split by instance). Thresholds come from observability/objectives.py, so that a line on a board and an alert agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import yaml

from observability import catalog as c
from observability import objectives as o
from observability.signals import BY_NAME, SIGNALS, WINDOW, Aggregate, Gauge, LifetimeQuantile, Ratio

#: Where Grafana is reached from a browser; the compose file publishes it here. `kvscope generate --grafana-url` changes it.
GRAFANA_URL = "http://127.0.0.1:3000"
BOARD_UID = "kvscope-kv-cache-p99"
#: The scrape job of deploy/prometheus.yml; KvscopeSourceStale tells by it which targets are ours. Jobs of other engines add a dash and
#: the engine's name (`kvscope scrape-config`).
JOB = "kvscope"
INTERVAL = "15s"
MAX_RULES_PER_GROUP = 20

#: A page when the error budget of 30 days burns this many times too fast over both windows: 2 % of it within an hour
#: (Google SRE workbook, chapter 5, table 5-8).
BURN_RATE = 14.4
LONG_WINDOW = "1h"
#: Fewer requests than this within the long window prove nothing: a single slow one at night would page.
MIN_REQUESTS = 30


@dataclass(frozen=True)
class Recording:
    """One recorded series. `name` is level:metric:operation."""

    name: str
    expr: str


@dataclass(frozen=True)
class Alert:
    """One alert. `labels_kept` are the labels that its series carry; `description` may use them and the value."""

    name: str
    severity: Literal["critical", "warning", "info"]
    expr: str
    hold: str
    keep_firing: str
    summary: str
    description: str
    labels_kept: tuple[str, ...]


def runbook_uid(alert: str) -> str:
    """Uid of the Grafana page that shows the runbook of `alert`."""
    return f"kvscope-runbook-{alert.removeprefix('Kvscope').lower()}"


def runbook_url(alert: str, base: str = "") -> str:
    """Link to the runbook of `alert`; without `base` it is relative to the Grafana that shows it."""
    return f"{base}/d/{runbook_uid(alert)}"


def board_url(base: str = "") -> str:
    return f"{base}/d/{BOARD_UID}"


_TTFT = c.TIME_TO_FIRST_TOKEN.name
TTFT_ERROR_RATIO = f"model:{_TTFT}:error_ratio_rate{WINDOW}"
TTFT_ERROR_RATIO_LONG = f"model:{_TTFT}:error_ratio_rate{LONG_WINDOW}"
TTFT_REQUESTS_LONG = f"model:{_TTFT}:increase{LONG_WINDOW}"
RUNNING = "model:kvscope_requests_running:sum"
INSTANCE_KV_USAGE = "model_instance:kvscope_kv_usage:ratio"
INSTANCE_WAITING = "model_instance:kvscope_requests_waiting:sum"
INSTANCE_AGE = "model_instance:kvscope_last_update_age:seconds"

SURVIVAL = "model_pool_le:kvscope_kv_block_survival:ratio_rate5m"
_RESIDENCY = ("kv_block_", "kv_live_block_", "kv_idle_before_", "kv_reuse_gap_", "kv_regret")

_MI = ("model", "instance")
#: Series that only alerts (and the board's panels that show what alerts see) need. By instance, because one full or
#: frozen replica must not hide behind the others.
EXTRA_RECORDINGS = (
    Recording(TTFT_ERROR_RATIO_LONG, BY_NAME[TTFT_ERROR_RATIO].promql.replace(f"[{WINDOW}]", f"[{LONG_WINDOW}]")),
    Recording(TTFT_REQUESTS_LONG, f"sum by (model) (increase({_TTFT}_count[{LONG_WINDOW}]))"),
    Recording(
        INSTANCE_KV_USAGE,
        Ratio(
            Aggregate("sum", Gauge(c.KV_BLOCKS, {"state": "active"}), _MI),
            Aggregate("sum", Gauge(c.KV_CAPACITY_BLOCKS), _MI),
            _MI,
        ).promql(),
    ),
    Recording(INSTANCE_WAITING, Aggregate("sum", Gauge(c.REQUESTS_WAITING), _MI).promql()),
    # min: of several sources in one exporter the one that stopped longest ago counts
    Recording(INSTANCE_AGE, f"time() - {Aggregate('min', Gauge(c.LAST_UPDATE), _MI).promql()}"),
)

_BUDGET = round(1 - o.TTFT.target, 9)
_PAGE_RATIO = round(BURN_RATE * _BUDGET, 9)

ALERTS = (
    Alert(
        name="KvscopeTTFTBudgetBurn",
        severity="critical",
        expr=(
            f"{TTFT_ERROR_RATIO_LONG} > {_PAGE_RATIO:g}\n"
            f"and on (model, engine) {TTFT_ERROR_RATIO} > {_PAGE_RATIO:g}\n"
            f"and on (model, engine) {TTFT_REQUESTS_LONG} >= {MIN_REQUESTS}"
        ),
        hold="2m",
        keep_firing="5m",
        summary="Time to first token burns its error budget too fast.",
        description=(
            "{{ $value | humanizePercentage }} of the requests to {{ $labels.model }} in the last hour waited longer "
            f"than {o.TTFT.threshold_seconds:g} s for their first token; {_BUDGET * 100:g} % may. "
            f"Above {_PAGE_RATIO * 100:g} % the budget of 30 days is gone in about two days."
        ),
        labels_kept=("model",),
    ),
    Alert(
        name="KvscopeKVCacheExhausted",
        severity="warning",
        expr=(
            f"{INSTANCE_KV_USAGE} > {o.KV_USAGE_CRITICAL:g}\nand on (model, instance, engine) {INSTANCE_WAITING} > 0"
        ),
        hold="2m",
        keep_firing="5m",
        summary="The KV cache is full while requests wait.",
        description=(
            "Running requests hold {{ $value | humanizePercentage }} of the KV blocks of {{ $labels.model }} on "
            f"{{{{ $labels.instance }}}} (limit {o.KV_USAGE_CRITICAL * 100:g} %), and others wait for blocks."
        ),
        labels_kept=_MI,
    ),
    Alert(
        name="KvscopeSourceStale",
        severity="critical",
        expr=(
            f"{INSTANCE_AGE} > {o.STALE_AFTER_SECONDS:g}\n"
            f'or up{{job=~"{JOB}|{JOB}-.+"}} == 0\n'
            # engines read through adapters have no time of the last update, but they have running requests, be it 0
            f"or absent({c.LAST_UPDATE.name}) unless on () {RUNNING}"
        ),
        hold="2m",
        keep_firing="1m",
        summary="An engine no longer reports what it does.",
        description=(
            "{{ if $labels.model }}The telemetry of {{ $labels.model }} on {{ $labels.instance }} last wrote "
            "{{ $value | humanizeDuration }} ago"
            "{{ else if $labels.instance }}{{ $labels.instance }} does not answer scrapes (up is {{ $value }})"
            "{{ else }}Prometheus knows no kvscope source and no other engine at all (absent is {{ $value }}){{ end }}; "
            f"values older than {o.STALE_AFTER_SECONDS:g} s say nothing about now, and the other alerts are blind."
        ),
        labels_kept=("model", "instance", "job"),
    ),
)


# -- rule files -----------------------------------------------------------------------------------------------------


def recordings() -> dict[str, list[Recording]]:
    """All recorded series by area: one rule group each."""
    groups: dict[str, list[Recording]] = {
        "load": [],
        "latency": [],
        "tenants": [],
        "kv": [],
        "residency": [],
        "alerts": list(EXTRA_RECORDINGS),
    }
    latency = (f":{c.PHASE_SECONDS.name}:", *(f":{x.family.name}:" for x in o.LATENCY_OBJECTIVES))
    for signal in SIGNALS:
        area = (
            "latency"
            if any(name in signal.name for name in latency)
            else "tenants"
            if ":kvscope_tenant_" in signal.name
            else "residency"
            if any(name in signal.name for name in _RESIDENCY)
            else "kv"
            if ":kvscope_kv_" in signal.name
            else "load"
        )
        expr = signal.promql
        if isinstance(signal.expr, LifetimeQuantile):  # made of a series that its group has recorded just before
            expr = expr.replace(signal.expr.survival.promql(), SURVIVAL)
        groups[area].append(Recording(signal.name, expr))
    return groups


def recorded_names() -> set[str]:
    return {r.name for group in recordings().values() for r in group}


def rule_groups(area: str, rules: Sequence[dict[str, Any]], kind: str) -> Iterator[dict[str, Any]]:
    """Rule groups of at most MAX_RULES_PER_GROUP rules, in order."""
    parts = [rules[i : i + MAX_RULES_PER_GROUP] for i in range(0, len(rules), MAX_RULES_PER_GROUP)]
    for number, part in enumerate(parts, start=1):
        suffix = f"-{number}" if len(parts) > 1 else ""
        yield {"name": f"kvscope-{area}{suffix}-{kind}", "interval": INTERVAL, "rules": part}


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks."""


_Dumper.add_representer(
    str, lambda d, text: d.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)
)


def to_yaml(groups: Sequence[dict[str, Any]], source: str = "alerts/rules.py or observability/signals.py") -> str:
    """Text of a rule file; `source` is where a reader should change it."""
    body = yaml.dump({"groups": list(groups)}, Dumper=_Dumper, sort_keys=False, width=10_000)
    return f"# Made by `kvscope generate`; edit {source} instead.\n{body}"


def recording_file() -> str:
    """Text of kvscope-recording.yml."""
    out: list[dict[str, Any]] = []
    for area, rules in recordings().items():
        out += rule_groups(area, [{"record": r.name, "expr": r.expr} for r in rules], "recording")
    return to_yaml(out)


def alert_file(grafana_url: str = GRAFANA_URL) -> str:
    """Text of kvscope-alerts.yml, its links pointing to the Grafana at `grafana_url`."""
    rules = [
        {
            "alert": a.name,
            "expr": a.expr,
            "for": a.hold,
            "keep_firing_for": a.keep_firing,
            "labels": {"severity": a.severity},
            "annotations": {
                "summary": a.summary,
                "description": a.description,
                "runbook_url": runbook_url(a.name, grafana_url),
                "dashboard": board_url(grafana_url),
            },
        }
        for a in ALERTS
    ]
    return to_yaml(list(rule_groups("engine", rules, "alerts")))
