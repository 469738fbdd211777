"""docs/performance.md from benchmarks/results/*.json, and the file format of the results.

python benchmarks/page.py             writes the page
python benchmarks/page.py --check     exit code 1 when it is not what the results make
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER / "results"
PAGE = FOLDER.parent / "docs" / "performance.md"
#: Files of this folder that measure nothing.
SHARED = {"figures", "page", "run"}
HEAD = """\
# Performance

Generated from `benchmarks/results/` by `python benchmarks/page.py`; `make bench` runs everything anew (`make bench-quick`: at most ten
minutes, less steady) and writes both. Figures are of one machine, named with each; ratios compare two things within the same run and
carry over best. Each benchmark's `--help` says what exactly is measured, and its file is the method.
"""


def names() -> list[str]:
    """Benchmarks by the name of their file."""
    return sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in SHARED)


def read(file: Path) -> list[dict[str, Any]]:
    """Runs of a results file, by benchmark; none where there is no file."""
    return json.loads(file.read_text(encoding="utf-8"))["runs"] if file.is_file() else []


def write(file: Path, runs: Sequence[dict[str, Any]]) -> None:
    """Keeps `runs` in `file`, the whole or nothing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_suffix(".new")
    new.write_text(json.dumps({"profile": file.stem, "runs": list(runs)}, indent=1) + "\n", encoding="utf-8")
    new.replace(file)


def number(value: float) -> str:
    """Three digits that count; four near 1, where ratios differ late."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}" if 0.9 < value < 1.1 else f"{value:.3g}"


def title(name: str) -> str:
    """First sentence of the benchmark's own docstring."""
    doc = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))) or name
    return doc.splitlines()[0].rstrip(".")


def machine(one: dict[str, Any]) -> str:
    told = one["machine"]
    packages = ", ".join(f"{name} {version}" for name, version in told["packages"].items())
    where = f"{told['processor']}, {told['cores']} cores, {told['memory_gib']:g} GiB"
    return f"{where}{', ' + told['gpu'] if 'gpu' in told else ''}; Python {told['python']}, {packages}"


def section(name: str, one: dict[str, Any]) -> str:
    out = [f"## {name}\n", f"{title(name)}.\n"]
    if "left_out" in one:
        return "\n".join([*out, f"No figures: {one['left_out']}.\n"])
    if one["quick"]:
        out.append("**Quick run**: short, less steady.\n")
    out.append(f"    {one['command']}\n")
    out += ["| Figure | Value | Unit |", "|---|---|---|"]
    out += [f"| {row['name']} | {number(row['value'])} | {row['unit']} |" for row in one["rows"]]
    before, after = one["load_average"]
    out.append(f"\n{one['began'][:10]}, {one['seconds']:.0f} s, load average {before:g} before and {after:g} after.\n")
    return "\n".join(out)


def text() -> str:
    """The page. A full run stands before a quick one."""
    runs: dict[str, dict[str, Any]] = {name: {"left_out": "not run yet"} for name in names()}
    runs |= {one["benchmark"]: one for profile in ("quick", "full") for one in sorted_runs(profile)}
    machines = list(dict.fromkeys(machine(one) for one in runs.values() if "machine" in one))
    told = "".join(f"Machine: {one}.\n" for one in machines)
    return "\n".join([HEAD, told, *(section(name, runs[name]) for name in names())]).rstrip() + "\n"


def sorted_runs(profile: str) -> list[dict[str, Any]]:
    """Runs of a profile; of the full one only those with figures, so that they do not hide a quick one's."""
    return [one for one in read(RESULTS / f"{profile}.json") if profile == "quick" or "left_out" not in one]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 when the page is out of date")
    made = text()
    if not parser.parse_args().check:
        PAGE.write_text(made, encoding="utf-8")
        return 0
    if not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != made:
        print(f"{PAGE.name} is out of date: run python benchmarks/page.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
