"""docs/hardware.md against the code: the table of findings, targets, reasons."""

from __future__ import annotations

import re

from exporters.gpu.health import TARGETS, table
from observability.signals import BY_NAME
from tests.conftest import REPO

PAGE = (REPO / "docs/hardware.md").read_text()


def test_the_table_of_findings_is_that_of_the_code() -> None:
    written = re.search(r"<!-- health table.*?-->\n(.*?)<!-- end", PAGE, re.DOTALL)
    assert written is not None
    assert written[1] == table(), "python -c 'from exporters.gpu.health import table; print(table())'"


def test_targets_have_their_thresholds_and_signals() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\d+) % \| `([\w:]+)` \|", PAGE, re.MULTILINE)
    assert {name: int(percent) / 100 for name, percent, _ in rows} == TARGETS
    assert all(signal in BY_NAME for _, _, signal in rows)
