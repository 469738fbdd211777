"""The app holds a model to the objective that its alerts do: its own before the general one, which leaves out classes that have theirs; each
event counts once. The truth is counted request by request."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from observability import objectives
from observability.app import report
from observability.objectives import LATENCY_OBJECTIVES
from observability.signals import SIGNALS
from observability.store.embedded import EmbeddedStore, create
from tests.app import counted
from tests.app.counted import END, START, Ended
from tests.conftest import REPO

OWN = """
[[objective]]
name = "e2e"
model = "own"
threshold_seconds = 40.0
target = 0.95

[[objective]]
name = "availability"
model = "own"
target = 0.9

[[objective]]
name = "ttft"
class = "long_context"
threshold_seconds = 10.0
target = 0.95
"""


@pytest.fixture(scope="module")
def ended() -> list[Ended]:
    return counted.requests()


@pytest.fixture(scope="module")
def general(ended: list[Ended], tmp_path_factory: pytest.TempPathFactory) -> EmbeddedStore:
    """Recorded under the general objectives."""
    return counted.record(tmp_path_factory.mktemp("general") / "store.db", ended)


def under_own(folder: Path, code: tuple[str, ...], text: str = OWN) -> str:
    """What a process of its own prints under the objectives of `text`: they are read once."""
    (folder / "objectives.toml").write_text(text)
    environment = {
        **os.environ,
        objectives.ENVIRONMENT: str(folder / "objectives.toml"),
        "PYTHONPATH": str(REPO),
    }
    done = subprocess.run([sys.executable, *code], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the app says of a store that was recorded under OWN."""
    folder = tmp_path_factory.mktemp("own")
    write = f"from tests.app import counted; from pathlib import Path; counted.record(Path({str(folder / 'store.db')!r}), counted.requests())"
    under_own(folder, ("-c", write))
    found: dict[str, Any] = json.loads(under_own(folder, ("-m", "tests.app.counted", str(folder / "store.db"))))
    return found


def share(ended: list[Ended], over: Callable[[Ended], bool], weight: Callable[[Ended], int] = lambda _: 1) -> float:
    return sum(weight(each) for each in ended if over(each)) / sum(map(weight, ended))


def test_a_report_weighs_by_the_events_of_each_objective_and_not_by_the_load_that_arrives(
    general: EmbeddedStore, ended: list[Ended]
) -> None:
    view = report.span_view("other", START, END)
    mine = [each for each in ended if each.model == "other"]
    ttft, itl, e2e = (report.kept(general, view, each) for each in LATENCY_OBJECTIVES)
    assert e2e.share_over == pytest.approx(share(mine, lambda each: each.e2e > 20))
    assert ttft.share_over == pytest.approx(share(mine, lambda each: each.ttft > 0.8))
    assert itl.share_over == pytest.approx(share(mine, lambda each: each.itl > 0.1, lambda each: each.tokens))
    assert itl.share_over > share(mine, lambda each: each.itl > 0.1) + 0.4, "tokens, not requests"


@pytest.mark.parametrize("seconds", [300.0, 1000.0, 2850.0])
def test_a_span_of_no_whole_windows_counts_what_lies_inside(
    general: EmbeddedStore, ended: list[Ended], seconds: float
) -> None:
    for end in (END, END - 1200):
        mine = [each for each in ended if each.model == "other" and end - seconds < each.time <= end]
        found = report.kept(general, report.span_view("other", end - seconds, end), LATENCY_OBJECTIVES[2])
        assert found.share_over == pytest.approx(share(mine, lambda each: each.e2e > 20), abs=0.01)


def test_a_model_is_held_to_its_own_objective_everywhere(said: dict[str, Any], ended: list[Ended]) -> None:
    own, mine = said["own"], [each for each in ended if each.model == "own"]
    over = share(mine, lambda each: each.e2e > 40)
    assert 0.01 < over < 0.05 < share(mine, lambda each: each.e2e > 20), "met by its own, missed by the general one"
    assert own["kept"]["e2e"] == [pytest.approx(over), "met"]
    assert own["left"][2] == pytest.approx(1 - over / 0.05)
    assert own["left"][3] == pytest.approx(1 - share(mine, lambda each: each.e2e == 50) / 0.1)
    assert "over 40 s, 5 % allowed" in own["words"]["objective-e2e"]
    assert "failed, 10 % allowed" in own["words"]["objective-availability"]
    assert own["notes"]["objective-e2e"].startswith("Objective: 95 % at or under 40 s.")
    assert (own["lines"]["objective-e2e"], own["lines"]["objective-availability"]) == ([40.0], [pytest.approx(0.1)])
    assert own["quantiles"] == [0.8, 0.1, 40.0]
    assert own["threshold"] == own["forecast"] == 40.0
    assert 40.0 in own["report"]
    assert 20.0 not in own["report"]
    assert "Request duration burns its budget" not in own["marks"]


def test_the_general_objective_leaves_out_the_classes_that_have_their_own(
    said: dict[str, Any], ended: list[Ended]
) -> None:
    other = said["other"]
    judged = [each for each in ended if each.model == "other" and each.request_class != "long_context"]
    assert other["kept"]["ttft"] == [0.0, "met"]
    assert share(judged, lambda each: each.ttft > 0.8) == 0.0
    assert other["left"][0] == 1.0
    assert "Time to first token burns its budget" not in other["marks"]
    assert "Request duration burns its budget" in other["marks"]
    assert "leave out long_context" in other["notes"]["objective-ttft"]
    assert (
        '"verdict met">✓ met</em><span>0 % over 800 ms without long_context, 1 % allowed'
        in other["words"]["objective-ttft"]
    )
    assert other["classes"] == ["800 ms", "10 s long_context"]
    assert (other["quantiles"], other["week"]) == ([0.8, 0.1, 20.0], [0.8])
    assert other["kept"]["e2e"][1] == "missed"


#: The general objective of everybody changed.
CHANGED = '[[objective]]\nname = "e2e"\nthreshold_seconds = 40.0\ntarget = 0.95\n'


@pytest.mark.parametrize("text", [OWN, CHANGED])
def test_what_was_recorded_for_another_threshold_is_no_judgement(
    tmp_path: Path, general: EmbeddedStore, text: str
) -> None:
    store = create(tmp_path / "old.db")
    for signal in SIGNALS:
        if signal.name.startswith(f"model:{LATENCY_OBJECTIVES[2].family.name}:"):
            store.append(signal.name, general.range(signal.name, START, END, 15.0))
    found = json.loads(under_own(tmp_path, ("-m", "tests.app.counted", str(tmp_path / "old.db")), text))["own"]
    assert found["kept"]["e2e"] == [None, "unknown"]
    assert found["left"][2] is None
    assert ">not recorded</em><span>– over 40 s" in found["words"]["objective-e2e"]
    assert found["marks"] == []


def test_adapters_count_a_models_own_objective_too(program: Callable[[str], str], tmp_path: Path) -> None:
    text = under_own(tmp_path, ("-c", "from alerts.adapters import rule_file; print(rule_file('vllm'))"))
    (tmp_path / "rules.yml").write_text(text)
    checked = subprocess.run(
        [program("promtool"), "check", "rules", tmp_path / "rules.yml"], capture_output=True, text=True, timeout=60
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    rules = pd.Series(text.split("- record: ")).str.replace(r"\s+", " ", regex=True)
    of_e2e = rules[rules.str.contains("objective: e2e")]
    [bad] = of_e2e[of_e2e.str.startswith("model_class_objective:kvscope_objective_bad:rate5m")]
    rest, own = bad.split(" or sum by")
    assert 'model_name!="own",le=~"20' in rest
    assert 'model_name="own",le=~"40' in own
    [allowed] = of_e2e[of_e2e.str.startswith("model_class_objective:kvscope_objective_allowed:rate5m")]
    rest, own = allowed.split(" or 0.05 * ")
    assert 'model_name="own"' in own
    assert 'model_name="own"' not in rest
    assert rules.str.startswith("model:kvscope_request_duration_seconds:error_ratio_over_40s_rate5m").sum() == 1


def test_adapters_count_another_threshold_from_its_own_bound_alone(tmp_path: Path) -> None:
    """The bound below 20 s says nothing of 40 s: where an engine has no bound there, nothing is counted."""
    code = "from exporters.adapters import engines, promql; from observability import objectives as o, signals as s; "
    code += "own = o.held_to('own', o.E2E); a = engines.ADAPTERS['vllm']; f = a.latencies['e2e'].source; "
    code += "print(promql.threshold_rates(a, own, f, '5m')[1]); print(promql.threshold_rates(a, o.TTFT, a.latencies['ttft'].source, '5m')[1]); "
    code += "print(engines.capability('vllm', s.share_name(own, ())))"
    own, general, told = under_own(tmp_path, ("-c", code)).strip().splitlines()
    assert set(re.findall(r'le=~"(\d+)', own)) == {"40"}
    assert set(re.findall(r'le=~"(0[^"]+)0\*"', general)) == {r"0\\.8", r"0\\.75"}
    assert "partial" in told
    assert "only where 40 s is a bucket bound" in told
