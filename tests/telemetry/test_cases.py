"""docs/cases.md against the repository, and cases that concern every family at once."""

from __future__ import annotations

import ast
import re
from collections import Counter

import pytest

from observability import catalog as c
from observability.telemetry.recorder import Telemetry
from tests.conftest import REPO
from tests.telemetry.bench import total
from tests.telemetry.test_engine_traffic import Traffic
from tests.telemetry.test_exporter import busy

#: What kvscope's own telemetry does, and what is done about other engines.
OWN, OTHERS = (
    [[cell.strip() for cell in line.split("|")[1:-1]] for line in part.splitlines() if re.match(r"\| Q", line)]
    for part in (REPO / "docs/cases.md").read_text().split("## Engines read through adapters")
)
ROWS = OWN + OTHERS


def test_each_case_is_listed_once() -> None:
    assert len(OWN) > 45
    for rows in (OWN, OTHERS):
        listed = Counter(case for row in rows for case in row[0].split(", "))
        assert {case for case, times in listed.items() if times > 1} == set()
        assert all(re.fullmatch(r"Q[A-Z]\d+", case) for case in listed)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].replace(", ", "+"))
def test_a_case_is_proven_by_a_test_that_exists_or_says_why_it_cannot_occur(row: list[str]) -> None:
    case, symptom, instead, proof = row
    assert symptom
    assert instead
    if proof == "-":
        assert instead.startswith("cannot occur")
        return
    found = re.fullmatch(r"`(tests/\S+\.py)::(test_\w+)`", proof)
    assert found, f"{case}: {proof} names no test"
    tree = ast.parse((REPO / found[1]).read_text())
    assert found[2] in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, proof


def test_no_family_is_a_ratio_of_traffic_in_a_gauge() -> None:  # QH12
    gauges = [f for f in c.FAMILIES if f.kind == "gauge" and f not in (*c.HOST_FAMILIES, *c.FORECAST_FAMILIES)]
    assert not [f.name for f in gauges if "ratio" in f.name or "rate" in f.name.split("_") or f.unit == "ratio"]


def test_every_sample_has_exactly_the_labels_of_its_family() -> None:  # QG12
    for family, rows in busy().t.snapshot():
        for row in rows:
            assert len(row.labels) == len(family.labels) + (row.suffix == "_bucket"), family.name
    for family in c.FAMILIES:
        assert len({*family.labels}) == len(family.labels)
        if family not in (c.SCRAPE_SECONDS, c.SCRAPE_SERIES, c.LABEL_FOLDS, *c.HOST_FAMILIES, *c.FORECAST_FAMILIES):
            assert family.labels[0] == "model", family.name


def test_names_end_in_their_unit() -> None:  # QG18
    measured = [f for f in c.FAMILIES if f.unit in ("seconds", "bytes", "tokens", "ratio", "blocks")]
    odd = {f for f in measured if not re.search(rf"_{f.unit}(_|$)", f.name)}
    assert odd == {c.KV_QUANT_RELATIVE}, "whose `relative` says it"
    assert not [f.name for f in c.FAMILIES if "percent" in f.name or f.name.endswith(("_ms", "_total"))]
    assert all(max(f.bounds) <= 1.0 for f in (c.KV_SWITCH_LOSS, c.KV_QUANT_RELATIVE))


def value_of(telemetry: Telemetry, expression: str) -> float:
    """Value of sums of series joined by + and -, each with matchers of = and =~ (alternatives only)."""
    result = 0.0
    for sign, name, matchers in re.findall(r"([+-]?) ?sum\((\w+)(?:\{(.*?)\})?\)", expression):
        choices = [(label, text.split("|")) for label, text in re.findall(r'(\w+)=~?"(.*?)"', matchers)]
        if choices:
            (label, options), *more = choices
            assert not more
            found = sum(total(telemetry, name, **{label: option}) for option in options)
        else:
            found = total(telemetry, name)
        result += -found if sign == "-" else found
    return result


@pytest.mark.parametrize(("left", "right"), c.IDENTITIES)
def test_identities_of_the_reference_hold_under_traffic(left: str, right: str, traffic: Traffic) -> None:  # QA19
    assert value_of(traffic.t, left) == pytest.approx(value_of(traffic.t, right), rel=1e-9)
    assert value_of(traffic.t, left) > 0


@pytest.fixture(scope="module")
def traffic() -> Traffic:
    traffic = Traffic()
    traffic.run()
    return traffic
