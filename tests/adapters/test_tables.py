"""Adapter tables, the matrix made of them, and the rule files: complete, accepted by promtool, and never two samples of one series."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from alerts import adapters, burn, rules, symptoms
from exporters.adapters import promql
from exporters.adapters.capability import Capability
from exporters.adapters.engines import ADAPTERS, BUNDLED, PLUGIN, TITLES, capability
from exporters.adapters.table import Level, Share, Split
from observability import catalog
from observability.objectives import LATENCY_OBJECTIVES
from observability.signals import BY_NAME, SIGNALS
from tests.boards.promql import selectors
from tests.conftest import REPO

FILES = {path: yaml.safe_load(text) for path, text in adapters.rule_files().items()}
ALERT_SERIES = {symptoms.KV_USAGE, symptoms.WAITING, symptoms.RUNNING, *map(symptoms.overflow_rate, LATENCY_OBJECTIVES)}
BURN_SERIES = {burn.EVENTS, burn.BAD, burn.ALLOWED}


def recorded(engine: str) -> dict[str, str]:
    """Recorded name -> expression of an engine's rule file, capabilities left out."""
    found = [r for g in FILES[f"{adapters.FOLDER}/{engine}.yml"]["groups"] for r in g["rules"]]
    return {r["record"]: r["expr"] for r in found if r["record"] not in {adapters.CAPABILITY, *BURN_SERIES}}


@pytest.mark.parametrize("path", FILES)
def test_promtool_accepts_the_rules_of_every_engine(program: Callable[[str], str], path: str) -> None:
    command = [program("promtool"), "check", "rules", "--lint=all", "--lint-fatal", str(REPO / path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("engine", TITLES)
def test_every_engine_says_of_every_signal_whether_it_feeds_it(engine: str) -> None:
    for signal in SIGNALS:
        found = capability(engine, signal.name)
        assert found.status in ("yes", "partial", "no")
        assert bool(found.reason) == (found.status != "yes")
        assert not found.reason.endswith(".")


def test_bundled_engine_feeds_every_signal_and_the_plug_in_no_block_address() -> None:
    assert {capability(BUNDLED, s.name).status for s in SIGNALS} == {"yes"}
    assert capability(PLUGIN, "model_region:kvscope_kv_region_usage:ratio").status == "no"


def test_a_capability_without_its_reason_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a reason"):
        Capability("no")
    with pytest.raises(ValueError, match="takes no reason"):
        Capability("yes", "because")


@pytest.mark.parametrize("engine", ADAPTERS)
def test_matrix_and_rules_agree_on_what_is_fed(engine: str) -> None:
    fed = {name for name in BY_NAME if capability(engine, name).status != "no"}
    buckets = {promql.bucket_record(x) for x in LATENCY_OBJECTIVES}
    assert set(recorded(engine)) - ALERT_SERIES - buckets == fed


@pytest.mark.parametrize("path", FILES)
def test_every_recorded_series_carries_its_engine_and_each_rule_has_its_own_labels(path: str) -> None:
    engine = path.split("/")[-1].removesuffix(".yml")
    found = [rule for group in FILES[path]["groups"] for rule in group["rules"]]
    assert all(rule["labels"]["engine"] == engine for rule in found)
    keys = [(rule["record"], tuple(sorted(rule["labels"].items()))) for rule in found]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize("path", FILES)
def test_groups_are_small_and_read_their_own_buckets_in_order(path: str) -> None:
    for group in FILES[path]["groups"]:
        assert len(group["rules"]) <= rules.MAX_RULES_PER_GROUP
        assert re.fullmatch(r"kvscope-[a-z0-9-]+-recording", group["name"])
        assert len(group["name"]) <= 40
        seen: set[str] = set()
        for rule in group["rules"]:
            asked = {s.name for s, _ in selectors(rule["expr"]) if ":kvscope_" in s.name}
            assert asked <= seen, f"{rule['record']} reads {asked} before its group has recorded it"
            seen.add(rule["record"])


@pytest.mark.parametrize("engine", ADAPTERS)
def test_only_the_level_of_the_signal_is_left_of_the_engines_labels(engine: str) -> None:
    for name, expr in recorded(engine).items():
        kept = set(re.findall(r"\b(?:sum|avg|max) by \(([^)]*)\)", expr))
        static = set(re.findall(r'label_replace\([^"]*.*?, "(\w+)", "[^$"]+", "", ""\)', expr)) - {"part"}
        if "histogram_quantile" in expr or ":kvscope_" in expr.replace(name, ""):
            continue  # from recorded buckets, whose own level is checked here
        labels = {label.strip() for group in kept for label in group.split(",")} | static
        level = name.split(":")[0]
        expected = {"model", "instance"} if level == "model_instance" else set(level.split("_"))
        assert labels == expected, name


@pytest.mark.parametrize("engine", ADAPTERS)
def test_ratios_are_sums_over_sums_and_a_mean_of_ratios_says_so(engine: str) -> None:
    for name, feed in ADAPTERS[engine].feeds.items():
        if BY_NAME[name].unit != "ratio":
            continue
        if isinstance(feed.source, Share):
            assert " / " in recorded(engine)[name]
            assert "avg" not in recorded(engine)[name]
        else:
            assert isinstance(feed.source, Level)
            assert feed.source.across == "mean"
            assert feed.capability.status == "partial"


@pytest.mark.parametrize("engine", ADAPTERS)
def test_label_values_are_those_of_the_catalogue(engine: str) -> None:
    values = {"outcome": catalog.OUTCOMES, "state": catalog.BLOCK_STATES, "phase": ("prefill", "decode")}
    for feed in ADAPTERS[engine].feeds.values():
        if isinstance(feed.source, Split):
            parts = [value for value, _ in feed.source.parts]
            assert set(parts) <= set(values[feed.source.label])
            assert len(parts) == len(set(parts))


@pytest.mark.parametrize("engine", ADAPTERS)
def test_no_gauge_of_a_hit_rate_is_read(engine: str) -> None:
    for expr in recorded(engine).values():
        assert not re.search(r"hit_rate|reuse_rate", expr)


def test_both_forms_of_a_colon_are_read_and_both_names_of_a_renamed_family() -> None:
    usage = recorded("vllm")["model:kvscope_kv_usage:ratio"]
    for name in ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "vllm_kv_cache_usage_perc"):
        assert name in usage
    assert usage.index("vllm:kv_cache_usage_perc") < usage.index("vllm:gpu_cache_usage_perc")
    assert "ray_vllm_kv_cache_usage_perc" in recorded("ray")["model:kvscope_kv_usage:ratio"]


CASES = sorted((REPO / "alerts/tests/adapters").glob("*.yml"))


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_promtool_gets_the_values_worked_out_by_hand(program: Callable[[str], str], path: Path) -> None:
    done = subprocess.run([program("promtool"), "test", "rules", str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("engine", ADAPTERS)
def test_every_series_of_an_engine_has_a_value_worked_out_by_hand(engine: str) -> None:
    [test] = yaml.safe_load((REPO / f"alerts/tests/adapters/{engine}.yml").read_text())["tests"]
    cases = test["promql_expr_test"]
    tested = {s.name for case in cases for s, _ in selectors(case["expr"])} - {adapters.CAPABILITY}
    assert tested == set(recorded(engine))
    assert all(case["exp_samples"] for case in cases)


@pytest.mark.parametrize("engine", ADAPTERS)
def test_objectives_of_an_engine_count_what_its_error_ratio_divides(engine: str) -> None:
    """The ratio's value is worked out by hand above; the rates are its parts, so they need no values of their own."""
    found = list(adapters.objective_recordings(ADAPTERS[engine]))
    assert {r.labels["objective"] for r in found} == set(ADAPTERS[engine].latencies)
    for name in ADAPTERS[engine].latencies:
        events, bad, allowed = (r.expr for r in found if r.labels["objective"] == name)
        objective = next(x for x in LATENCY_OBJECTIVES if x.name == name)
        ratio = recorded(engine)[f"model:{objective.family.name}:error_ratio_rate5m"]
        assert bad.startswith(f"{events} - ")
        assert ratio == f"1 - {bad.removeprefix(f'{events} - ')} / {events}"
        assert allowed == f"{1 - objective.target:.6g} * {events}"
