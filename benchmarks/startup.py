"""How long the command takes to start, and what importing the light package costs, beside Python itself and the libraries that it must load.

    python benchmarks/startup.py
    python benchmarks/startup.py --rounds 30 --json startup.json

Each is a fresh process; the variants take turns, and the best of each counts, since what else the machine does only adds. CPU seconds are
those of the whole process. With warm byte code and a warm page cache: the first start on a machine takes longer.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from figures import Parser, Row, keep

REPO = Path(__file__).resolve().parent.parent
STARTS = {
    "python": "pass",
    "typer and rich, which every command needs": "import typer, rich.console",
    "import observability.cli": "import observability.cli",
    "kvscope version": "import sys; sys.argv = ['kvscope', 'version']; from observability.cli import main; main()",
    "import the doctor": "import exporters.adapters.doctor",
    "import the exporter": "import exporters.prometheus",
}
TARGET_MS = 300


def start(code: str) -> tuple[float, float]:
    """(seconds by the clock, CPU seconds) of one process that runs `code`."""
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    before, began = os.times(), time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, stdout=subprocess.DEVNULL)
    after = os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    return time.perf_counter() - began, spent


def main() -> None:
    parser = Parser(__doc__, quick={"rounds": 4})
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in STARTS}
    for number in range(options.rounds + 1):
        for name, code in STARTS.items():
            found = start(code)
            if number:  # the first round writes byte code and warms the cache
                taken[name].append(found)
    best = {name: (min(clock for clock, _ in runs), min(cpu for _, cpu in runs)) for name, runs in taken.items()}
    python = best["python"][0]
    rows = []
    for name, (clock, cpu) in best.items():
        print(f"{name:44} {1e3 * clock:8.0f} ms {1e3 * cpu:8.0f} ms CPU {clock / python:8.1f} x python")
        rows.append(Row(f"{name}, CPU", 1e3 * cpu, "ms"))
    light, base = best["import observability.cli"], best["typer and rich, which every command needs"]
    print(f"\nimport of the light package: {1e3 * light[0]:.0f} ms (target {TARGET_MS})")
    rows.insert(0, Row("import observability.cli / typer and rich alone, CPU", light[1] / base[1], "ratio"))
    rows.insert(
        1, Row(f"import observability.cli / the {TARGET_MS} ms it may take", 1e3 * light[0] / TARGET_MS, "ratio")
    )
    keep(
        options,
        rows,
        {name: {"clock": [a for a, _ in runs], "cpu": [b for _, b in runs]} for name, runs in taken.items()},
    )


if __name__ == "__main__":
    main()
