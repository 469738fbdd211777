"""Imports go one way, as docs/architecture.md says: each part only knows what it is built on."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.conftest import REPO

DATA = {"catalog", "objectives", "signals", "errors", "addresses", "tls"}
#: What each part may import of ours. The command line and the demo wire everything and are left out.
MAY_IMPORT = {
    "observability/catalog.py": set(),
    "observability/config.py": {"errors"},
    "observability/objectives.py": {"catalog", "errors", "config"},
    "observability/signals.py": {"catalog", "objectives"},
    "observability/buckets.py": {"catalog", "objectives", "errors"},
    "observability/telemetry": (DATA - {"signals", "objectives"}) | {"buckets"},
    "observability/engine": {*DATA, "telemetry", "records"},
    "observability/store": {*DATA, "telemetry"},
    "observability/workload": {*DATA, "telemetry", "engine", "store", "records"},
    "observability/forecast": {*DATA, "store"},
    "observability/app": {*DATA, "store", "forecast", "supervise", "adapters", "records"},
    "exporters": {*DATA, "telemetry", "adapters", "records"},
    "exporters/forecast.py": {*DATA, "telemetry", "store", "forecast"},
    "exporters/adapters": DATA,
    "alerts": {*DATA, "adapters"},
    "dashboards": {*DATA, "alerts", "adapters"},
}
#: Tables that are data alone, in the folder of the part that acts on them.
RECORDS = (
    "exporters.gpu.health",
    "exporters.gpu.reading",
    "observability.engine.executor.hardware",
    "observability.engine.model.costs",
)


def parts_imported(path: Path) -> set[str]:
    """First level of each import of ours: `store` for observability.store.source, `alerts` for alerts.rules."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        else:
            continue
        for module in modules:
            top, _, rest = module.partition(".")
            # the names that a reader may choose from, and what takes off a GPU's health: tables, as signals are
            if module.startswith(RECORDS):
                found.add("records")
            elif top == "observability":
                found.add(rest.split(".")[0])
            # tables of other engines and of the plug-in: data, as signals are
            elif module.startswith(("exporters.adapters", "exporters.vllm.capabilities")):
                found.add("adapters")
            elif top in ("exporters", "alerts", "dashboards"):
                found.add(top)
    return found


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_a_part_imports_only_what_it_is_built_on(part: str) -> None:
    path = REPO / part
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    files = [file for file in files if file == path or file.relative_to(REPO).as_posix() not in MAY_IMPORT]
    own = path.stem
    assert files
    for file in files:
        beyond = parts_imported(file) - MAY_IMPORT[part] - {own}
        assert not beyond, f"{file.relative_to(REPO)} imports {sorted(beyond)}"
