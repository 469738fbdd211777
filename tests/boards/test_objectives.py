"""Objectives of one's own: what the file may say, that no event counts twice, and that rules follow it."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from alerts import burn
from observability import catalog, objectives
from observability.errors import ConfigError
from observability.objectives import LatencyObjective, Objective, excluded, parse
from tests.conftest import REPO

PAGE = (REPO / "docs/objectives.md").read_text()
[EXAMPLE] = re.findall(r"```toml\n(.*?)```", PAGE, re.S)


def test_the_example_of_the_page_says_what_the_page_says() -> None:
    found = {(x.name, x.model, x.request_class): x for x in parse(EXAMPLE, "example")}
    general, long = found["ttft", "", ""], found["ttft", "", "long_context"]
    large = found["e2e", "llama-3-70b", ""]
    assert isinstance(general, LatencyObjective)
    assert isinstance(long, LatencyObjective)
    assert isinstance(large, LatencyObjective)
    assert (general.threshold_seconds, general.target) == (2.0, 0.99)
    assert (long.threshold_seconds, long.target) == (10.0, 0.95)
    assert (large.threshold_seconds, large.min_events) == (40.0, 100)
    assert found["availability", "", ""] == next(x for x in objectives.OBJECTIVES if x.name == "availability")


@pytest.mark.parametrize("objective", objectives.OBJECTIVES, ids=lambda x: x.name)
def test_the_page_lists_the_defaults(objective: Objective) -> None:
    [row] = [line for line in PAGE.splitlines() if line.startswith(f"| `{objective.name}` |")]
    assert f"{objective.target * 100:g} % of {objective.events}" in row
    assert f"{objective.min_events} {objective.events}" in row
    if isinstance(objective, LatencyObjective):
        assert f" {objective.threshold_seconds:g} s" in row


def test_the_page_lists_the_pairs_of_windows() -> None:
    rows = re.findall(r"^\| ([\d.]+) \| (\d+) (\w)\w* \| (\d+) (\w)\w* \| (\w+) \|", PAGE, re.M)
    assert [(float(b), long + u, short + v, severity) for b, long, u, short, v, severity in rows] == [
        (p.burn, p.long, p.short, p.severity) for p in burn.PAIRS
    ]


def test_every_event_counts_for_exactly_one_objective_of_a_name() -> None:
    text = "".join(
        f'[[objective]]\nname = "ttft"\n{key} = "{value}"\n'
        for key, value in (("model", "a"), ("model", "b"), ("class", "interactive"), ("class", "standard"))
    )
    found = [x for x in parse(text, "test") if x.name == "ttft"]
    for model, request_class in itertools.product(("a", "b", "c"), catalog.CLASSES):
        labels = {"model": model, "class": request_class}
        counted = [
            x for x in found
            if all(labels[k] == v for k, v in x.applies_to.items())
            and not any(labels[k] in values for k, values in excluded(x, found).items())
        ]  # fmt: skip
        assert len(counted) == 1, (labels, counted)
        expected = model if model in "ab" else request_class if request_class != "long_context" else ""
        assert (counted[0].model or counted[0].request_class) == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("objective = 3", "no [[objective]] table"),
        ("[[objective", "is not TOML"),
        ('[[objective]]\nname = "p99"', "ttft, itl, e2e, availability"),
        ('[[objective]]\nname = "ttft"\ntarget = 99', "target = 0.99"),
        ('[[objective]]\nname = "ttft"\ntarget = true', "target = True"),
        ('[[objective]]\nname = "ttft"\nthreshold_seconds = 0', "between 0.0001 and 100,000"),
        ('[[objective]]\nname = "ttft"\nthreshold_seconds = nan', "between 0.0001 and 100,000"),
        ('[[objective]]\nname = "ttft"\nthreshold_seconds = 1e6', "between 0.0001 and 100,000"),
        ('[[objective]]\nname = "ttft"\nthreshold_seconds = 1.2345678', "such as 1.23457"),
        ('[[objective]]\nname = "ttft"\nmin_events = -1', "min_events -1 is below 0"),
        ('[[objective]]\nname = "ttft"\nthreshold = 0.8', "It takes target, threshold_seconds"),
        ('[[objective]]\nname = "availability"\nthreshold_seconds = 1', "It takes target, min_events"),
        ('[[objective]]\nname = "ttft"\nclass = "gold"', "interactive, standard, long_context"),
        ('[[objective]]\nname = "ttft"\nclass = "standard"\nmodel = "m"', "Name one of the two"),
        ('[[objective]]\nname = "ttft"\nmodel = \'a"} or vector(1) #\'', "cannot be a label"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused_with_the_next_step(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(text, "mine.toml")
    assert says in str(error.value)


def test_rules_follow_the_file_and_promtool_accepts_them(program: Callable[[str], str], tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text(EXAMPLE)
    write = "from alerts import rules; print(rules.recording_file())"
    environment = {**os.environ, objectives.ENVIRONMENT: str(mine), "PYTHONPATH": str(REPO)}
    done = subprocess.run([sys.executable, "-c", write], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    rules = tmp_path / "rules.yml"
    rules.write_text(done.stdout)
    checked = subprocess.run([program("promtool"), "check", "rules", rules], capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert 'le="2.0"' in done.stdout
    assert '{class="long_context",le="10.0"}' in done.stdout
    assert '{class!~"long_context",le="2.0"}' in done.stdout
    assert '{model="llama-3-70b",le="40.0"}' in done.stdout
    assert "0.05 * sum by (model, class)" in done.stdout


def test_a_file_that_is_not_there_is_refused_by_every_command(tmp_path: Path) -> None:
    environment = {**os.environ, objectives.ENVIRONMENT: str(tmp_path / "none.toml"), "PYTHONPATH": str(REPO)}
    argv = [sys.executable, "-m", "observability.cli", "rules", "check", str(tmp_path)]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert objectives.ENVIRONMENT in done.stderr
