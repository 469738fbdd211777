"""Objectives of one's own: what the file may say, that no event counts twice, and that rules follow it."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

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


WRITE = """
import sys
from pathlib import Path
from alerts import adapters, rules
for name, text in (("recording", rules.recording_file()), ("alerts", rules.alert_file()), ("vllm", adapters.rule_file("vllm"))):
    Path(sys.argv[1], name + ".yml").write_text(text)
"""


def write_rules(objectives_text: str, folder: Path) -> None:
    """Writes recording.yml, alerts.yml and vllm.yml as they are under these objectives."""
    mine = folder / "mine.toml"
    mine.write_text(objectives_text)
    environment = {**os.environ, objectives.ENVIRONMENT: str(mine), "PYTHONPATH": str(REPO)}
    argv = [sys.executable, "-c", WRITE, str(folder)]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@dataclass(frozen=True)
class Expected:
    """What `expr` gives at `minutes`, by labels."""

    expr: str
    minutes: float
    samples: Mapping[str, float]


def hold(promtool: str, folder: Path, series: Mapping[str, str], expected: Iterable[Expected]) -> None:
    """promtool evaluates the rules in `folder` over `series`, a sample each 15 s, and finds what is expected."""
    files = [folder / name for name in ("vllm.yml", "recording.yml", "alerts.yml")]
    groups = [g["name"] for file in files for g in yaml.safe_load(file.read_text())["groups"]]
    test = {
        "rule_files": [str(file) for file in files],
        "evaluation_interval": "15s",
        "group_eval_order": groups,
        "tests": [
            {
                "interval": "15s",
                "input_series": [{"series": name, "values": values} for name, values in series.items()],
                "promql_expr_test": [
                    {
                        "expr": each.expr,
                        "eval_time": f"{round(each.minutes * 60)}s",
                        "exp_samples": [{"labels": labels, "value": value} for labels, value in each.samples.items()],
                    }
                    for each in expected
                ],
            }
        ],
    }
    (folder / "test.yml").write_text(yaml.safe_dump(test))
    done = subprocess.run([promtool, "test", "rules", folder / "test.yml"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


#: Names that mean something else, or nothing, as regular expressions, and those that they would be taken for.
ODD = ("base+lora", "qwen2.5-7b", "coder-c++", ".*", "a|b", "org/model:v1(beta)[x]", "$model", "^m")
LIKE = ("basse", "qwen2-5-7b", "coder-c", "a", "b", "m")


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rules under an objective of 2 s for each odd name, of 10 s for a class, and the general one of 0.8 s."""
    folder = tmp_path_factory.mktemp("odd")
    tables = [f'name = "{name}"\nmodel = "{model}"\n' for model in ODD for name in ("ttft", "availability")]
    tables += ['name = "ttft"\nclass = "long_context"\nthreshold_seconds = 10.0\n', 'name = "e2e"\nmodel = "a"\n']
    own = "threshold_seconds = 2.0\ntarget = 0.9\n"
    text = "".join(f"[[objective]]\n{x}{own if 'ttft' in x and 'model' in x else ''}" for x in tables)
    write_rules(text, folder)
    return folder


def test_models_whose_names_look_like_regular_expressions_are_judged_once_each(
    odd: Path, program: Callable[[str], str]
) -> None:
    """Each request takes 1 s: bad of the general objective, good of a model's and of the class's."""
    series, every, bad = {}, {}, {}
    for model, request_class in itertools.product((*ODD, *LIKE), ("standard", "long_context")):
        labels = f'model="{model}",class="{request_class}"'
        for le, count in (("0.8", 0), ("2.0", 3), ("10.0", 3), ("+Inf", 3)):
            series[f'kvscope_time_to_first_token_seconds_bucket{{{labels},instance="a",le="{le}"}}'] = f"0+{count}x60"
        series[f'kvscope_requests_total{{{labels},instance="a",outcome="stop"}}'] = "0+3x60"
        first, ended = (f'{{{labels},objective="{name}"}}' for name in ("ttft", "availability"))
        bad[first] = 0.2 if model in LIKE and request_class == "standard" else 0.0
        every |= {first: 0.2, ended: 0.2}
    hold(
        program("promtool"), odd, series,
        [
            Expected(f"round({burn.EVENTS}, 0.001)", 10, every),
            Expected(f'round({burn.BAD}{{objective="ttft"}}, 0.001)', 10, bad),
            Expected(f'round({burn.burn("5m")}{{objective="ttft"}}, 0.1)', 10, {k: 100.0 if v else 0.0 for k, v in bad.items()}),
        ],
    )  # fmt: skip


def test_models_of_another_engine_whose_names_look_like_regular_expressions_are_judged_once_each(
    odd: Path, program: Callable[[str], str]
) -> None:
    series, events, bad = {}, {}, {}
    for model in (*ODD, *LIKE):
        for le, count in (("0.75", 0), ("2.0", 3), ("+Inf", 3)):
            name = f'vllm:time_to_first_token_seconds_bucket{{model_name="{model}",job="v",instance="a",le="{le}"}}'
            series[name] = f"0+{count}x60"
        key = f'{{model="{model}",objective="ttft",engine="vllm"}}'
        events[key], bad[key] = 0.2, 0.2 if model in LIKE else 0.0
    hold(
        program("promtool"), odd, series,
        [Expected(f"round({burn.EVENTS}, 0.001)", 10, events), Expected(f"round({burn.BAD}, 0.001)", 10, bad)],
    )  # fmt: skip


def test_promtool_finds_no_rule_twice_under_own_objectives(odd: Path, program: Callable[[str], str]) -> None:
    files = [odd / f"{name}.yml" for name in ("recording", "alerts", "vllm")]
    for lint in ("duplicate-rules", "all"):
        argv = [program("promtool"), "check", "rules", f"--lint={lint}", "--lint-fatal", *files]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "duplicate" not in done.stdout + done.stderr


@pytest.mark.parametrize(("an_hour", "fires"), [(36, False), (90, False), (130, True)])
def test_an_alert_waits_for_the_events_of_the_objective_that_judges_them(
    tmp_path: Path, program: Callable[[str], str], an_hour: int, fires: bool
) -> None:
    """All requests to llama-3-70b take too long, as do those to another model, whose general objective needs 30."""
    write_rules(EXAMPLE, tmp_path)
    series = {
        f'kvscope_request_duration_seconds_bucket{{model="{model}",class="standard",instance="a",le="{le}"}}': f"0+{count / 240}x260"
        for model in ("llama-3-70b", "other")
        for le, count in (("20.0", 0), ("40.0", 0), ("+Inf", an_hour))
    }
    key = 'ALERTS{{alertname="KvscopeDurationBudgetBurn",alertstate="firing",severity="critical",objective="e2e",window="1h",class="standard",model="{}"}}'
    expected = {key.format("other"): 1.0} | ({key.format("llama-3-70b"): 1.0} if fires else {})
    hold(program("promtool"), tmp_path, series, [Expected('ALERTS{window="1h",alertstate="firing"}', 64, expected)])


def test_an_engine_that_lacks_the_bound_of_an_objective_is_not_judged_and_spoils_no_other(
    tmp_path: Path, program: Callable[[str], str]
) -> None:
    """A replica started before the objective, or a vLLM of other buckets: of the rest 1 in 10 is over 1.5 s."""
    write_rules('[[objective]]\nname = "ttft"\nthreshold_seconds = 1.5\n', tmp_path)
    series, ours, theirs = {}, "kvscope_time_to_first_token_seconds_bucket", "vllm:time_to_first_token_seconds_bucket"
    for model, instance, bound in (("m", "new", "1.5"), ("m", "old", "1.4"), ("n", "old", "1.4")):
        for le, count in ((bound, 9), ("+Inf", 10)):
            series[f'{ours}{{model="{model}",class="standard",instance="{instance}",le="{le}"}}'] = (
                f"0+{1.5 * count}x60"
            )
            series[f'{theirs}{{model_name="{model}",job="v",instance="{instance}",le="{le}"}}'] = f"0+{1.5 * count}x60"
    own, foreign = '{model="m",class="standard",objective="ttft"}', '{model="m",engine="vllm",objective="ttft"}'
    share = "model:kvscope_time_to_first_token_seconds:error_ratio_over_1_5s_rate5m"
    hold(
        program("promtool"), tmp_path, series,
        [
            Expected(f"round({burn.EVENTS}, 0.001)", 10, {own: 1.0, foreign: 1.0}),
            Expected(f"round({burn.BAD}, 0.001)", 10, {own: 0.1, foreign: 0.1}),
            Expected(f"round({burn.burn('5m')}, 0.001)", 10, {own: 10.0, foreign: 10.0}),
            Expected(f'round({share}{{engine="vllm"}}, 0.001)', 10, {'{model="m",engine="vllm"}': 0.1}),
            Expected(  # what was measured is all of it
                f'round({share.replace("error_ratio_over_1_5s_", "")}{{engine="vllm"}}, 0.001)', 10,
                {'{model="m",engine="vllm"}': 2.0, '{model="n",engine="vllm"}': 1.0},
            ),
        ],
    )  # fmt: skip


def test_boards_under_other_thresholds_read_what_their_rules_record(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    changed = {"ttft": 1.5, "itl": 0.25, "e2e": 45.0}
    mine.write_text("".join(f'[[objective]]\nname = "{x}"\nthreshold_seconds = {y}\n' for x, y in changed.items()))
    done = subprocess.run(
        [sys.executable, "-m", "observability.cli", "generate", str(tmp_path)], capture_output=True, text=True, timeout=240,
        env={**os.environ, objectives.ENVIRONMENT: str(mine)}, cwd=REPO,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    groups = yaml.safe_load((tmp_path / "alerts/generated/kvscope-recording.yml").read_text())["groups"]
    recorded = {rule["record"] for group in groups for rule in group["rules"]}
    read = set()
    for board in (tmp_path / "dashboards/generated").glob("*.json"):
        exprs = re.findall(r'"expr": "((?:[^"\\]|\\.)*)"', board.read_text())
        read |= {name for expr in exprs for name in re.findall(r"model[a-z_]*:kvscope_[a-z0-9_]+:[a-z0-9_]+", expr)}
    assert read - recorded == set()
    shares = {name for name in read if "error_ratio_over" in name}
    assert {re.search(r"over_(\w+)s_rate5m", name)[1] for name in shares} == {"1_5", "0_25", "45"}  # type: ignore[index]


def test_rules_follow_the_file_and_promtool_accepts_them(program: Callable[[str], str], tmp_path: Path) -> None:
    write_rules(EXAMPLE, tmp_path)
    rules = tmp_path / "recording.yml"
    checked = subprocess.run([program("promtool"), "check", "rules", rules], capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    text = rules.read_text()
    assert 'le="2.0"' in text
    assert '{class="long_context",le="10.0"}' in text
    assert '{class!="long_context",le="2.0"}' in text
    assert '{model="llama-3-70b",le="40.0"}' in text
    assert "0.05 * sum by (model, class)" in text


def test_a_file_that_is_not_there_is_refused_by_every_command(tmp_path: Path) -> None:
    environment = {**os.environ, objectives.ENVIRONMENT: str(tmp_path / "none.toml"), "PYTHONPATH": str(REPO)}
    argv = [sys.executable, "-m", "observability.cli", "rules", "check", str(tmp_path)]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert objectives.ENVIRONMENT in done.stderr
