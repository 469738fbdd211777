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

from alerts import burn, rules, symptoms
from alerts.links import JOB
from alerts.types import Alert
from dashboards import runbooks
from dashboards.boards import BOARDS
from dashboards.panels import Panel
from observability import catalog, objectives, signals
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


def test_every_recorded_series_has_a_value_worked_out_by_hand() -> None:
    files = sorted((REPO / "alerts/tests").glob("recording*.yml"))  # one a area: recording_<area>.yml
    tests = [test for path in files for test in yaml.safe_load(path.read_text())["tests"]]
    cases = [case for test in tests for case in test["promql_expr_test"]]
    assert {s.name for case in cases for s, _ in selectors(case["expr"])} == rules.recorded_names()
    assert all(case["exp_samples"] for case in cases)


def test_life_tables_of_a_fleet_are_read_once_for_all_ages_and_give_the_same_survival(
    program: Callable[[str], str], tmp_path: Path
) -> None:
    read = [s.name for rule in RULES for s, _ in selectors(rule["expr"])]
    assert read.count(catalog.KV_EVICTED_AGES.series) == read.count(catalog.KV_EXPOSED.series) == 1
    # Three engines, of which one restarts; blocks of up to 100 s, the oldest but one all evicted.
    series = []
    known = catalog.AGE_LABELS[: catalog.AGE_LABELS.index("100") + 1]
    for i in range(3):
        for n, age in enumerate(catalog.AGE_LABELS[:-1]):
            labels = f'{{model="m",instance="{i}",pool="exact",age="{age}"}}'
            exposed, evicted = (300 - 7 * n - i, (n * 5 + i) % 17 + 1) if age in known else (0, 0)
            evicted = exposed if age == known[-2] else evicted
            for family, step in ((catalog.KV_EXPOSED, exposed), (catalog.KV_EVICTED_AGES, evicted)):
                values = f"0+{step}x20 0+{step}x20" if i == 1 else f"0+{step}x41"
                series.append({"series": family.series + labels, "values": values})
    direct = signals.Survival().promql()
    case = [
        {"expr": f"count({rules.SURVIVAL})", "count": len(known)},
        {"expr": f"count({direct})", "count": len(known)},
        {"expr": f"count(abs({rules.SURVIVAL} - ({direct})) < 1e-12)", "count": len(known)},
    ]
    expected = [{"expr": x["expr"], "eval_time": "10m", "exp_samples": [{"value": x["count"]}]} for x in case]
    path = tmp_path / "survival.yml"
    files = {"rule_files": [str(GENERATED / "kvscope-recording.yml")], "evaluation_interval": "15s"}
    test = {"interval": "15s", "input_series": series, "promql_expr_test": expected}
    path.write_text(yaml.safe_dump({**files, "tests": [test]}))
    done = _promtool(program, "test", "rules", path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_recorded_names_are_the_signals_and_a_few_more() -> None:
    found = [(rule["record"], *rule.get("labels", {}).values()) for rule in RULES if "record" in rule]
    assert len(found) == len(set(found))
    names = {name for name, *_ in found}
    assert names == {s.name for s in SIGNALS} | {r.name for r in rules.EXTRA_RECORDINGS}
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
        assert group["interval"] == ("5m" if "-budget-" in group["name"] else "15s")


@pytest.mark.parametrize(
    "rule", RULES, ids=lambda rule: " ".join([rule.get("record", rule.get("alert")), *rule.get("labels", {}).values()])
)
def test_rule_asks_only_for_what_is_exported_or_recorded(rule: dict[str, Any]) -> None:
    for selector, _ in selectors(rule["expr"]):
        assert selector.name in KNOWN
        matchers = selector.matchers.matchers
        assert {m.name for m in matchers} <= KNOWN[selector.name] | TARGET_LABELS
        for matcher in matchers:
            if matcher.name == "le":  # a threshold that is no bucket bound would count nothing, for ever
                bounds = {str(float(b)) for x in objectives.LATENCY_OBJECTIVES for b in x.family.bounds} | {"+Inf"}
                assert matcher.value in bounds


@pytest.mark.parametrize("alert", rules.ALERTS, ids=lambda alert: alert.id)
def test_alert_follows_the_rules_for_alerts(alert: Alert) -> None:
    [rule] = [r for r in RULES if r.get("alert") == alert.name and alert.labels.items() <= r["labels"].items()]
    assert re.fullmatch(r"Kvscope[A-Z][A-Za-z]+", alert.name)
    assert len(alert.name) <= 40
    assert rule["labels"] == {"severity": alert.severity, **alert.labels}
    assert alert.severity in ("critical", "warning", "info")
    count, _ = re.fullmatch(r"(\d+)([mh])", rule["for"]).groups()  # type: ignore[union-attr]
    assert int(count) >= 1  # at least two scrapes of 15 s
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
    assert notes["dashboard"].endswith(f"/d/{BOARDS[alert.board]().uid}")


def test_links_of_alerts_follow_the_address_of_grafana() -> None:
    for rule in [
        r for g in yaml.safe_load(rules.alert_file("https://grafana.example.com"))["groups"] for r in g["rules"]
    ]:
        assert rule["annotations"]["runbook_url"].startswith("https://grafana.example.com/d/")
        assert rule["annotations"]["dashboard"].startswith("https://grafana.example.com/d/")


# -- runbooks -------------------------------------------------------------------------------------------------------

SECTIONS = ["What it means", "How to confirm", "Causes, by likelihood", "Action", "How to know it worked"]


def test_each_alert_has_a_runbook_and_each_runbook_an_alert() -> None:
    assert {path.stem for path in runbooks.FOLDER.glob("*.md")} == set(rules.ALERT_NAMES)


@pytest.mark.parametrize("name", rules.ALERT_NAMES)
def test_runbook_has_its_headings_and_speaks_of_this_alert(name: str) -> None:
    text = runbooks.text(name)
    assert re.findall(r"^# (.+)$", text, re.M) == [name]
    assert re.findall(r"^## (.+)$", text, re.M) == SECTIONS
    severities = " or ".join(dict.fromkeys(alert.severity for alert in rules.ALERTS if alert.name == name))
    assert f"{rules.named(name).summary} Severity: {severities}." in text


@pytest.mark.parametrize("name", rules.ALERT_NAMES)
def test_runbook_names_panels_queries_and_series_that_exist(name: str) -> None:
    text = runbooks.text(name)
    titles = {p.title for board in BOARDS.values() for p in board()._iter_panels() if isinstance(p, Panel)}
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
    ttft = runbooks.text("KvscopeTTFTBudgetBurn")
    first, second, third, fourth = (pair.burn for pair in burn.PAIRS)
    assert f"above {first:g} over the last hour and the last 5 minutes, or above {second:g}" in ttft
    assert f"above {third:g} over a day and 2 hours, or above {fourth:g} over 3 days" in ttft
    for objective in objectives.OBJECTIVES:
        text = runbooks.text(burn.alert_name(objective.name))
        assert f"allow{'s' if 'allows' in text else ''} ({round(1 - objective.target, 9) * 100:g} %)" in text
        assert f"elow {objective.min_events} " in text or f"elow\n{objective.min_events} " in text
        if isinstance(objective, objectives.LatencyObjective):
            assert f"{objective.threshold_seconds:g} s" in text
    drop = runbooks.text("KvscopeHitRateDrop")
    assert f"below {symptoms.HIT_RATE_DROP * 100:g} % of what it was" in drop
    assert f"at least {symptoms.MIN_LOOKUPS} lookups" in drop
    for name in ("KvscopeKVFragmented", "KvscopeCompactionBehind"):
        assert f"more than {symptoms.FALLBACKS_MATTER * 100:g} % of the requests" in runbooks.text(name)
    assert f"more than {symptoms.PREEMPTION_STORM:g} times for each request" in runbooks.text("KvscopePreemptionStorm")
    assert f"was above {objectives.QUANT_ERROR_WARNING * 100:g} %" in runbooks.text("KvscopeQuantizationError")
    busy = runbooks.text("KvscopeBusyLowThroughput")
    assert f"more than {symptoms.BUSY * 100:g} % of its time" in busy
    assert symptoms.LOW_THROUGHPUT == 0.5
    assert "less than half of the tokens" in busy
    assert f"More than {symptoms.OVERFLOW * 100:g} % of the latencies" in runbooks.text("KvscopeLatencyOverflow")
    assert f"more than {symptoms.QUEUE_GROWTH} in 10 minutes" in runbooks.text("KvscopeQueueGrowing")
    assert f"more than {objectives.KV_USAGE_CRITICAL * 100:g} % of the KV blocks for 2 minutes" in runbooks.text(
        "KvscopeKVCacheExhausted"
    )
    stale = runbooks.text("KvscopeSourceStale")
    assert f"older than {objectives.STALE_AFTER_SECONDS:g} s (frozen)" in stale
    assert f"scrape job `{JOB}`" in stale
