"""Recording rules of other engines' adapters: the same series as kvscope-recording.yml records, made from the engine's own names.

Each recorded series carries `engine`, so that one model served by two engines never gives two samples of one series; series of the
bundled engine have no such label. Beside the signals a file records the capability of its engine, signal by signal.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from alerts import burn, rules, symptoms
from alerts.types import Recording
from exporters.adapters import promql
from exporters.adapters.capability import VALUE
from exporters.adapters.engines import ADAPTERS, BUNDLED, TITLES, capability
from exporters.adapters.table import Adapter, Histogram
from observability import objectives as o
from observability.signals import BY_NAME, WINDOW

#: Value 1, 0.5 or 0 for yes, partial or no, with labels engine, signal, status and reason (none where the signal is fed fully).
CAPABILITY = "engine_signal:kvscope_capability:info"
#: Constants need no quick interval; it stays below the lookback of 5 minutes.
CAPABILITY_INTERVAL = "1m"
FOLDER = "alerts/generated/adapters"


def objective_recordings(adapter: Adapter) -> Iterator[Recording]:
    """The three rates that burn rates are made of (alerts/burn.py), for each latency objective that is fed but those of classes: an
    engine without classes has one budget a model."""
    yield from burn.rate_recordings(_rates(adapter))


def _rates(adapter: Adapter) -> Iterator[burn.Rates]:
    for objective in o.OBJECTIVES:
        if (
            isinstance(objective, o.LatencyObjective)
            and not objective.request_class
            and objective.name in adapter.latencies
        ):
            models = ",".join(burn.judged(objective, {"model": adapter.model_label or "model"}))
            source = adapter.latencies[objective.name].source
            total, good = promql.threshold_rates(adapter, objective, source, WINDOW, models)
            yield burn.Rates(objective, total, f"{total} - {good}")


def _alert_recordings(adapter: Adapter) -> list[tuple[str, str]]:
    """The series by instance that alerts read."""
    out = []
    for name, signal in (
        (symptoms.KV_USAGE, "model:kvscope_kv_usage:ratio"),
        (symptoms.WAITING, "model:kvscope_requests_waiting:sum"),
        (symptoms.RUNNING, "model:kvscope_requests_running:sum"),
    ):
        if signal in adapter.feeds:
            source = adapter.feeds[signal].source
            assert not isinstance(source, Histogram)
            out.append((name, promql.expression(adapter, source, promql.MI)))
    return out


def _overflow(adapter: Adapter, objective: o.LatencyObjective) -> tuple[str, str]:
    """The rate above the top bucket bound, which an alert reads."""
    buckets = f'{promql.bucket_record(objective)}{{engine="{adapter.engine}"'
    return symptoms.overflow_rate(objective), f'max by (model) ({buckets}}}) - max by (model) ({buckets},le!="+Inf"}})'


def groups(adapter: Adapter) -> dict[str, list[tuple[str, str]]]:
    """(recorded name, expression) by area. Buckets and the quantiles that read them share a group: it evaluates in order."""
    out: dict[str, list[tuple[str, str]]] = {"load": []}
    out |= {x.name: [] for x in o.LATENCY_OBJECTIVES}
    out["kv"] = []
    for name, expr in promql.recorded(adapter):
        area = next((x.name for x in o.LATENCY_OBJECTIVES if f":{x.family.name}" in name), None)
        out[area or ("kv" if ":kvscope_kv_" in name else "load")].append((name, expr))
    for objective in o.LATENCY_OBJECTIVES:
        if objective.name in adapter.latencies:
            out[objective.name].append(_overflow(adapter, objective))
    out["alerts"] = _alert_recordings(adapter)
    return {area: found for area, found in out.items() if found}


def capability_rules(engine: str) -> list[dict[str, Any]]:
    """One constant a signal, so that a panel can tell "not exported" from "no traffic"."""
    out = []
    for signal in BY_NAME:
        found = capability(engine, signal)
        labels = {"engine": engine, "signal": signal, "status": found.status}
        if found.reason:
            labels["reason"] = found.reason
        out.append({"record": CAPABILITY, "expr": f"vector({VALUE[found.status]:g})", "labels": labels})
    return out


def rule_file(engine: str) -> str:
    """Text of the rule file of `engine`: an adapter's, or the capabilities alone of the vLLM plug-in, whose series
    kvscope-recording.yml makes."""
    out: list[dict[str, Any]] = []
    for area, found in groups(ADAPTERS[engine]).items() if engine in ADAPTERS else ():
        recorded = [{"record": name, "expr": expr, "labels": {"engine": engine}} for name, expr in found]
        out += rules.rule_groups(f"{engine}-{area}", recorded, "recording")
    if engine in ADAPTERS:
        objectives = [
            {"record": r.name, "expr": r.expr, "labels": {**r.labels, "engine": engine}}
            for r in objective_recordings(ADAPTERS[engine])
        ]
        out += rules.rule_groups(f"{engine}-objectives", objectives, "recording") if objectives else ()
    constants = list(rules.rule_groups(f"{engine}-feeds", capability_rules(engine), "recording"))
    out += [{**group, "interval": CAPABILITY_INTERVAL} for group in constants]
    return rules.to_yaml(out, f"exporters/adapters/{engine.replace('-', '_')}.py")


def rule_files() -> dict[str, str]:
    """Path below the repository -> text."""
    return {f"{FOLDER}/{engine}.yml": rule_file(engine) for engine in TITLES if engine != BUNDLED}
