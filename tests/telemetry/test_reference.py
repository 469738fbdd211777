"""docs/metrics.md is the catalogue."""

from __future__ import annotations

import subprocess
import sys

import promql_parser
import pytest

from observability import catalog as c
from observability.telemetry.reference import query, reference
from tests.boards.promql import selectors
from tests.conftest import REPO


def test_the_page_in_the_docs_is_current() -> None:
    command = [sys.executable, "-m", "observability.telemetry.reference"]
    page = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, cwd=REPO).stdout
    assert (REPO / "docs/metrics.md").read_text() == page, (
        "run: python -m observability.telemetry.reference > docs/metrics.md"
    )


def test_every_family_is_on_the_page() -> None:
    page = reference()
    for family in c.FAMILIES:
        assert f"| `{family.series}` | {family.kind} |" in page


def test_every_label_is_explained_and_every_bucket_bound_shown() -> None:
    page = reference()
    labels = page[page.index("## Label values") : page.index("## Identities")]
    explained = {
        word.strip("`,") for line in labels.splitlines() for word in line.split("|")[1:2] for word in word.split()
    }
    assert {label for family in c.FAMILIES for label in family.labels} <= explained
    for family in c.FAMILIES:
        if family.bounds:
            assert f"| `{family.name}` | {' '.join(f'{bound:g}' for bound in family.bounds)} |" in page


@pytest.mark.parametrize("family", c.FAMILIES, ids=lambda family: family.name)
def test_the_query_of_a_family_is_promql_over_its_series_and_labels(family: c.Family) -> None:
    text = query(family)
    promql_parser.parse(text)
    (selector, _), *rest = selectors(text)
    assert selector.name == family.series
    assert not rest
    kept = text[text.index(" by (") + 5 :].split(")")[0].split(", ") if " by (" in text else []
    assert {*kept} <= {*family.labels, "le"}
