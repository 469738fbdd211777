"""docs/metrics.md is the catalogue."""

from __future__ import annotations

import subprocess
import sys

from observability import catalog as c
from observability.telemetry.reference import reference
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
