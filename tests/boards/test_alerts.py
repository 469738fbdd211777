"""Every alert in the real promtool: fires, stays silent, recovers, low traffic, counter reset, missing series."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from alerts import burn, rules
from alerts.links import GRAFANA_URL, board_url, runbook_url
from tests.boards.alert_cases import CASES, AlertCase, Course, State
from tests.boards.promql import selectors

RECORDED = [
    rule for group in yaml.safe_load(rules.recording_file())["groups"] for rule in group["rules"]
]  # in the order of evaluation
ALERT_RULES = [rule for group in yaml.safe_load(rules.alert_file())["groups"] for rule in group["rules"]]


def test_every_alert_has_its_cases() -> None:
    have = {(case.alert, *case.which.values()) for case in CASES}
    assert have == {(alert.name, *alert.labels.values()) for alert in rules.ALERTS}


def _rule(case: AlertCase) -> dict[str, Any]:
    [rule] = [r for r in ALERT_RULES if r["alert"] == case.alert and case.which.items() <= r["labels"].items()]
    return rule


def _rule_file(case: AlertCase) -> str:
    """The alert and the recordings that it needs, evaluated at the case's interval; the text of the rules is the real one."""
    rule, wanted = _rule(case), {s.name for s, _ in selectors(_rule(case)["expr"])}
    needed: list[dict[str, Any]] = []
    for recorded in reversed(RECORDED):
        if recorded["record"] in wanted:
            needed.insert(0, recorded)
            wanted |= {s.name for s, _ in selectors(recorded["expr"])}
    text = yaml.safe_dump(
        {"groups": [{"name": "all", "interval": f"{case.interval}s", "rules": [*needed, rule]}]}, sort_keys=False
    )
    return text.replace(f"{burn.INTERVAL_SECONDS} * sum_over_time", f"{case.interval} * sum_over_time")


def _values(course: Course, states: Sequence[State], *, interval: int, resets: Sequence[int] = ()) -> str:
    """Samples of `course`, one for each of `states`; a counter starts again from 0 at each of `resets`."""
    out, total, ramp = [], 0.0, 0.0
    for at, state in enumerate(states):
        if course.kind == "counter":
            total = 0.0 if at in resets else total + (state or 0.0) * interval / 15
        elif course.kind == "clock":
            total = at * interval if state else total
        elif course.kind == "ramp":
            ramp = ramp + state * interval / 15 if state is not None and state != course.well else 0.0
            total = (course.well or 0.0) + ramp
        else:
            total = state or 0.0
        out.append("_" if state is None else f"{total:.10g}")
    return " ".join(out)


def _test(
    case: AlertCase, name: str, parts: Sequence[tuple[str, float]], resets: Sequence[float] = ()
) -> dict[str, Any]:
    """A promtool test in which all series pass through `parts`: (well, bad, few or none; minutes)."""
    per_minute = 60 / case.interval
    series = []
    for course in case.courses:
        states: list[State] = []
        for what, minutes in parts:
            states += [None if what == "none" else getattr(course, what)] * round(minutes * per_minute)
        at = [round(m * per_minute) for m in resets]
        values = _values(course, states, interval=case.interval, resets=at)
        if set(values) - {"_", " "}:
            series.append({"series": course.series, "values": values})
    return {
        "name": name,
        "interval": f"{case.interval}s",
        "input_series": series,
        "promql_expr_test": [],
        "alert_rule_test": [],
    }


def _time(minutes: float) -> str:
    return f"{round(minutes * 60)}s"


def _expect(case: AlertCase, test: dict[str, Any], minutes: float, state: str | None) -> None:
    """At `minutes` the alert is in `state`; None is neither pending nor firing."""
    sample = []
    if state:
        labels = {"alertname": case.alert, "alertstate": state, **case.labels}
        sample = [{"labels": "ALERTS{" + ",".join(f'{k}="{v}"' for k, v in labels.items()) + "}", "value": 1}]
    test["promql_expr_test"].append({"expr": "ALERTS", "eval_time": _time(minutes), "exp_samples": sample})


def _promtool(program: Callable[[str], str], folder: Path, case: AlertCase, test: dict[str, Any]) -> None:
    (folder / "rules.yml").write_text(_rule_file(case))
    body = {"rule_files": ["rules.yml"], "evaluation_interval": f"{case.interval}s", "tests": [test]}
    (folder / "test.yml").write_text(yaml.safe_dump(body, width=10**9))
    done = subprocess.run(
        [program("promtool"), "test", "rules", folder / "test.yml"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def _ids(case: AlertCase) -> str:
    return " ".join((case.alert, *case.which.values()))


@pytest.mark.parametrize("case", CASES, ids=_ids)
def test_alert_waits_fires_says_what_is_wrong_and_ends(
    program: Callable[[str], str], tmp_path: Path, case: AlertCase
) -> None:
    rule = _rule(case)
    test = _test(case, "course", [("well", case.settle), ("bad", case.steady), ("well", case.recovers + 1)])
    _expect(case, test, case.settle - 1, None)
    _expect(case, test, case.settle + case.pending, "pending")
    _expect(case, test, case.settle + case.fires, "firing")
    test["alert_rule_test"].append(
        {
            "alertname": case.alert,
            "eval_time": _time(case.settle + case.steady - case.interval / 60),
            "exp_alerts": [
                {
                    "exp_labels": dict(case.labels),
                    "exp_annotations": {
                        "summary": rule["annotations"]["summary"],
                        "description": case.description,
                        "runbook_url": runbook_url(case.alert, GRAFANA_URL),
                        "dashboard": board_url(rules.named(case.alert).board, GRAFANA_URL),
                    },
                }
            ],
        }
    )
    _expect(case, test, case.settle + case.steady + case.recovers, None)
    _promtool(program, tmp_path, case, test)


#: Rules of one window differ by their objective alone: the long ones are taken through everything once.
THOROUGH = [case for case in CASES if case.interval < 120 or case.alert == burn.alert_name("ttft")]


@pytest.mark.parametrize("case", [case for case in THOROUGH if case.few], ids=_ids)
def test_alert_stays_silent_at_too_little_traffic(
    program: Callable[[str], str], tmp_path: Path, case: AlertCase
) -> None:
    test = _test(case, "few", [("few", case.settle + case.steady)])
    for share in (0.3, 0.6, 1.0):
        _expect(case, test, (case.settle + case.steady) * share - 1, None)
    _promtool(program, tmp_path, case, test)


@pytest.mark.parametrize("case", THOROUGH, ids=_ids)
def test_counter_resets_neither_raise_nor_end_an_alert(
    program: Callable[[str], str], tmp_path: Path, case: AlertCase
) -> None:
    quiet, during = case.settle / 2, case.settle + (case.fires + case.steady) / 2
    parts = [("well", case.settle), ("bad", case.steady)]
    test = _test(case, "reset", parts, resets=[quiet, case.settle - 3, during])
    for minutes in (quiet + 1, quiet + 3, case.settle - 1):
        _expect(case, test, minutes, None)
    for minutes in (during + case.interval / 60, case.settle + case.steady - case.interval / 60):
        _expect(case, test, minutes, "firing")
    _promtool(program, tmp_path, case, test)


@pytest.mark.parametrize("case", THOROUGH, ids=_ids)
def test_without_its_series_only_the_alert_on_missing_sources_fires(
    program: Callable[[str], str], tmp_path: Path, case: AlertCase
) -> None:
    test = _test(case, "none", [("well", case.settle), ("none", case.steady)])
    state = "firing" if case.fires_without_series else None
    minutes = case.settle + case.steady - 1
    if state:  # no source at all: there is no label to carry
        case = AlertCase(
            **{
                **{f: getattr(case, f) for f in case.__dataclass_fields__},
                "labels": {"severity": case.labels["severity"]},
            }
        )
    _expect(case, test, minutes, state)
    _promtool(program, tmp_path, case, test)


def test_thresholds_by_hand_are_those_of_the_rules() -> None:
    """The cases above were worked out from these."""
    assert [(p.burn, p.long, p.short) for p in burn.PAIRS] == [
        (14.4, "1h", "5m"), (6, "6h", "30m"), (3, "1d", "2h"), (1, "3d", "6h"),
    ]  # fmt: skip
    assert all(re.fullmatch(r"\d+[mh]", alert.hold) for alert in rules.ALERTS)
