"""Recording and alerting rules: the real promtool, the rules of the known rule linters, and the runbooks."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from alerts import rules
from dashboards import kv_cache_p99, runbooks
from dashboards.panels import Panel
from observability import objectives
from observability.signals import SIGNALS
from tests.boards.promql import TARGET_LABELS, known_series, nodes, selectors

REPO = Path(__file__).resolve().parents[2]
GENERATED = REPO / "alerts" / "generated"
TESTS = sorted((REPO / "alerts" / "tests").glob("*.yml"))
FILES = {
    "kvscope-recording.yml": rules.recording_file(),
    "kvscope-alerts.yml": rules.alert_file(),
}
GROUPS = [group for text in FILES.values() for group in yaml.safe_load(text)["groups"]]
RULES = [rule for group in GROUPS for rule in group["rules"]]
KNOWN = known_series()


def _promtool(program: Callable[[str], str], *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program("promtool"), *map(str, arguments)], capture_output=True, text=True, timeout=120)


def test_promtool_accepts_the_rule_files(program: Callable[[str], str]) -> None:
    done = _promtool(program, "check", "rules", "--lint=all", "--lint-fatal", *sorted(GENERATED.glob("*.yml")))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.stem)
def test_promtool_runs_the_rule_tests(program: Callable[[str], str], path: Path) -> None:
    done = _promtool(program, "test", "rules", path)
    assert done.returncode == 0, done.stdout + done.stderr


def _cases() -> dict[str, dict[str, int]]:
    """Alert -> how often the rule tests see it fire, stay silent, and be pending."""
    seen: dict[str, dict[str, int]] = {a.name: {"fires": 0, "silent": 0, "pending": 0} for a in rules.ALERTS}
    for path in TESTS:
        for test in yaml.safe_load(path.read_text())["tests"]:
            for case in test.get("alert_rule_test", []):
                seen[case["alertname"]]["fires" if case["exp_alerts"] else "silent"] += 1
            for case in test.get("promql_expr_test", []):
                for sample in case["exp_samples"]:
                    if 'alertstate="pending"' in sample["labels"]:
                        seen[re.search(r'alertname="(\w+)"', sample["labels"])[1]]["pending"] += 1  # type: ignore[index]
    return seen


@pytest.mark.parametrize("alert", [a.name for a in rules.ALERTS])
def test_alert_has_a_test_that_it_fires_is_pending_and_stays_silent(alert: str) -> None:
    assert all(_cases()[alert].values()), _cases()[alert]


def test_every_recorded_series_has_a_value_worked_out_by_hand() -> None:
    files = sorted((REPO / "alerts/tests").glob("recording*.yml"))  # one a area: recording_<area>.yml
    tests = [test for path in files for test in yaml.safe_load(path.read_text())["tests"]]
    cases = [case for test in tests for case in test["promql_expr_test"]]
    assert {s.name for case in cases for s, _ in selectors(case["expr"])} == rules.recorded_names()
    assert all(case["exp_samples"] for case in cases)


def test_recorded_names_are_the_signals_and_a_few_more() -> None:
    names = [rule["record"] for rule in RULES if "record" in rule]
    assert len(names) == len(set(names))
    assert set(names) == {s.name for s in SIGNALS} | {r.name for r in rules.EXTRA_RECORDINGS}
    for name in names:
        assert re.fullmatch(r"[a-z_]+:kvscope_[a-z0-9_]+:[a-z0-9_]+", name), name


@pytest.mark.parametrize("signal", SIGNALS, ids=lambda signal: signal.name)
def test_level_of_a_recorded_name_is_the_labels_left(signal: Any) -> None:
    assert signal.name.split(":")[0] == "_".join(signal.by)


def test_groups_are_small_quick_and_named_alike() -> None:
    assert len({group["name"] for group in GROUPS}) == len(GROUPS)
    for group in GROUPS:
        assert len(group["rules"]) <= 20
        assert re.fullmatch(r"kvscope-[a-z0-9-]+-(recording|alerts)", group["name"])
        assert len(group["name"]) <= 40
        assert group["interval"] == "15s"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("record", rule.get("alert")))
def test_rule_asks_only_for_what_is_exported_or_recorded(rule: dict[str, Any]) -> None:
    for selector, _ in selectors(rule["expr"]):
        assert selector.name in KNOWN
        matchers = selector.matchers.matchers
        assert {m.name for m in matchers} <= KNOWN[selector.name] | TARGET_LABELS
        for matcher in matchers:
            if matcher.name == "le":  # a threshold that is no bucket bound would count nothing, for ever
                bounds = {str(float(b)) for x in objectives.LATENCY_OBJECTIVES for b in x.family.bounds} | {"+Inf"}
                assert matcher.value in bounds


@pytest.mark.parametrize("alert", rules.ALERTS, ids=lambda alert: alert.name)
def test_alert_follows_the_rules_for_alerts(alert: rules.Alert) -> None:
    [rule] = [rule for rule in RULES if rule.get("alert") == alert.name]
    assert re.fullmatch(r"Kvscope[A-Z][A-Za-z]+", alert.name)
    assert len(alert.name) <= 40
    assert rule["labels"] == {"severity": alert.severity}
    assert alert.severity in ("critical", "warning", "info")
    minutes = re.fullmatch(r"(\d+)m", rule["for"])
    assert minutes
    assert int(minutes[1]) >= 1  # at least two scrapes of 15 s
    assert rule["keep_firing_for"]
    assert any(
        isinstance(n, promql_parser.BinaryExpr) and str(n.op) in (">", ">=", "==", "<") for n, _ in nodes(rule["expr"])
    )
    notes = rule["annotations"]
    assert set(notes) == {"summary", "description", "runbook_url", "dashboard"}
    assert re.fullmatch(r"[A-Z][^{}]*\.", notes["summary"])
    assert "$value" in notes["description"]
    assert set(re.findall(r"\$labels\.(\w+)", notes["description"])) <= set(alert.labels_kept)
    assert notes["runbook_url"].endswith(f"/d/{runbooks.board(alert).uid}")
    assert notes["dashboard"].endswith(f"/d/{kv_cache_p99.board().uid}")


def test_links_of_alerts_follow_the_address_of_grafana() -> None:
    for rule in yaml.safe_load(rules.alert_file("https://grafana.example.com"))["groups"][0]["rules"]:
        assert rule["annotations"]["runbook_url"].startswith("https://grafana.example.com/d/")
        assert rule["annotations"]["dashboard"].startswith("https://grafana.example.com/d/")


# -- runbooks -------------------------------------------------------------------------------------------------------

SECTIONS = ["What it means", "How to confirm", "Causes, by likelihood", "Action", "How to know it worked"]


def test_each_alert_has_a_runbook_and_each_runbook_an_alert() -> None:
    assert {path.stem for path in runbooks.FOLDER.glob("*.md")} == {alert.name for alert in rules.ALERTS}


@pytest.mark.parametrize("alert", rules.ALERTS, ids=lambda alert: alert.name)
def test_runbook_has_its_headings_and_speaks_of_this_alert(alert: rules.Alert) -> None:
    text = runbooks.text(alert.name)
    assert re.findall(r"^# (.+)$", text, re.M) == [alert.name]
    assert re.findall(r"^## (.+)$", text, re.M) == SECTIONS
    assert f"{alert.summary} Severity: {alert.severity}." in text


@pytest.mark.parametrize("alert", rules.ALERTS, ids=lambda alert: alert.name)
def test_runbook_names_panels_queries_and_series_that_exist(alert: rules.Alert) -> None:
    text = runbooks.text(alert.name)
    titles = {p.title for p in kv_cache_p99.board()._iter_panels() if isinstance(p, Panel)}
    quoted = set(re.findall(r'"([^"]+\?)"', text))
    assert len(quoted) >= 3
    assert quoted <= titles
    queries = [
        line.strip() for line in text.splitlines() if line.startswith("    ") and not line.strip().startswith("curl")
    ]
    assert queries
    for query in [*queries, *re.findall(r"`([a-z_]+:kvscope_[^`]+|up\{[^`]+)`", text)]:
        for selector, _ in selectors(query):
            assert selector.name in KNOWN
    causes = text.split("## Causes, by likelihood")[1].split("##")[0]
    assert causes.count('"') + causes.count("`") >= 2 * len(re.findall(r"^\d+\. ", causes, re.M)), (
        "a cause without a way to tell"
    )


def test_numbers_in_the_runbooks_are_those_of_the_rules() -> None:
    burn = runbooks.text("KvscopeTTFTBudgetBurn")
    assert f"More than {rules.BURN_RATE * (1 - objectives.TTFT.target) * 100:.1f} % of the requests" in burn
    assert f"longer than {objectives.TTFT.threshold_seconds:g} s" in burn
    assert f"below {rules.MIN_REQUESTS} requests an hour" in burn
    assert f"more than {objectives.KV_USAGE_CRITICAL * 100:g} % of the KV blocks for 2 minutes" in runbooks.text(
        "KvscopeKVCacheExhausted"
    )
    stale = runbooks.text("KvscopeSourceStale")
    assert f"older than {objectives.STALE_AFTER_SECONDS:g} s (frozen)" in stale
    assert f"scrape job `{rules.JOB}`" in stale
