"""Rules and the Alertmanager configuration on a faster clock, so that an incident of an hour passes in two minutes.

Every duration of a rule becomes shorter by one factor: ranges, `for`, `keep_firing_for`, intervals. What is compared with yesterday is
compared with `YESTERDAY_SECONDS` ago. Two numbers stand for durations and follow: events of an interval (`15 * sum_over_time`) and growth in
ten minutes (`* 600`). What does not change: thresholds in seconds (a latency, the age of the last update) and rates a second, which are of
the engine's time; so floors of traffic are as many times higher as the windows are shorter, and an alert that fires here would fire on the
real clock with the same engine state.
"""

from __future__ import annotations

import re
from typing import Any

from alerts import burn

FACTOR = 20.0
YESTERDAY_SECONDS = 60
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def seconds(duration: str) -> float:
    return sum(float(number) * _UNITS[unit] for number, unit in re.findall(r"(\d+)([smhd])", duration))


def faster(duration: str) -> str:
    """Prometheus's and Alertmanager's form of a duration FACTOR times as short, in whole milliseconds."""
    return f"{round(seconds(duration) / FACTOR * 1000)}ms"


def _expr(text: str) -> str:
    text = text.replace("offset 1d", f"offset {YESTERDAY_SECONDS}s")
    text = text.replace(
        f"{burn.INTERVAL_SECONDS} * sum_over_time", f"{burn.INTERVAL_SECONDS / FACTOR:g} * sum_over_time"
    )
    text = text.replace(") * 600 >", f") * {600 / FACTOR:g} >")
    return re.sub(r"\[(\d+[smhd])\]", lambda m: f"[{faster(m[1])}]", text)


def rules(parsed: dict[str, Any]) -> dict[str, Any]:
    """A parsed rule file on the faster clock."""
    groups = []
    for group in parsed["groups"]:
        changed = []
        for rule in group["rules"]:
            more = {key: faster(rule[key]) for key in ("for", "keep_firing_for") if key in rule}
            changed.append({**rule, "expr": _expr(rule["expr"]), **more})
        groups.append({**group, "interval": faster(group["interval"]), "rules": changed})
    return {"groups": groups}


def alertmanager(parsed: dict[str, Any], webhook: str) -> dict[str, Any]:
    """An Alertmanager configuration on the faster clock; each receiver tells `webhook`/its name."""

    def route(old: dict[str, Any]) -> dict[str, Any]:
        new = {
            key: faster(value) if key in ("group_wait", "group_interval", "repeat_interval") else value
            for key, value in old.items()
        }
        if "routes" in old:
            new["routes"] = [route(child) for child in old["routes"]]
        return new

    receivers = [
        {**r, "webhook_configs": [{"url": f"{webhook}{r['name']}", "send_resolved": True}]} for r in parsed["receivers"]
    ]
    return {**parsed, "route": route(parsed["route"]), "receivers": receivers}
