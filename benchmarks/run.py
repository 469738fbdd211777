"""Runs all benchmarks one after the other, keeps their figures in one file and writes docs/performance.md from it: `make bench`.

    python benchmarks/run.py                          all, in full: about an hour on a quiet machine of two cores
    python benchmarks/run.py --quick                  all, short and less steady: at most ten minutes
    python benchmarks/run.py --only startup engine    these alone; the other runs of the file stay

Results: benchmarks/results/full.json and quick.json, each run with its settings, machine, load and moment. A benchmark that cannot run here,
or takes longer than its limit, is named in the file with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import page

FOLDER = Path(__file__).resolve().parent
REPO = FOLDER.parent
#: Seconds that one benchmark, and that all of them, may take.
LIMITS = {"quick": (150.0, 600.0), "full": (3600.0, 4 * 3600.0)}


def series() -> Path:
    """Folder of recorded series: below KVSCOPE_DATA, or `shared` beside the repository, as tests look for it."""
    return Path(os.environ.get("KVSCOPE_DATA", REPO.parent / "shared")) / "series"


def arguments(name: str) -> list[str] | str:
    """What `name` is run with, or why it cannot run here."""
    if name == "boards" and not (shutil.which("prometheus") and shutil.which("promtool")):
        return "Prometheus is not installed"
    if name == "forecast":
        return ["--series", str(series())] if series().is_dir() else "recorded series are not here (KVSCOPE_DATA)"
    return []


def run(name: str, quick: bool, limit: float) -> dict[str, Any]:
    """The run that benchmark `name` kept, or `left_out` with the reason."""
    given = arguments(name)
    if isinstance(given, str):
        return {"benchmark": name, "left_out": given}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.json"
        command = [
            sys.executable,
            str(FOLDER / f"{name}.py"),
            *given,
            *(["--quick"] if quick else []),
            "--json",
            str(file),
        ]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")])}
        process = subprocess.Popen(command, cwd=REPO, env=environment, start_new_session=True)
        try:
            code = process.wait(limit)
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as error:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, KeyboardInterrupt):
                raise
            return {"benchmark": name, "left_out": f"took longer than {limit:.0f} s"}
        if code or not file.is_file():
            return {"benchmark": name, "left_out": f"ended with exit code {code}"}
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short runs with less steady figures, ten minutes at most")
    parser.add_argument("--only", nargs="+", choices=page.names(), metavar="NAME", help=f"of {', '.join(page.names())}")
    options = parser.parse_args()
    profile = "quick" if options.quick else "full"
    file = page.RESULTS / f"{profile}.json"
    kept = {run["benchmark"]: run for run in page.read(file)}
    each, whole = LIMITS[profile]
    end = time.monotonic() + whole
    if options.quick:
        print("QUICK: short runs; their figures are less steady than those of `make bench`.", flush=True)
    for name in options.only or page.names():
        left = end - time.monotonic()
        print(f"\n== {name}", flush=True)
        if left < 5:
            kept[name] = {"benchmark": name, "left_out": f"the {whole:.0f} s of the whole run were used up"}
        else:
            kept[name] = run(name, options.quick, min(each, left))
        if "left_out" in kept[name]:
            print(f"left out: {kept[name]['left_out']}", flush=True)
        page.write(file, [kept[one] for one in sorted(kept) if one in page.names()])
    print(f"\n{'QUICK ' if options.quick else ''}ratios")
    for one in page.read(file):
        for row in one.get("rows", []):
            if row["unit"] == "ratio":
                print(f"{one['benchmark']:18}{page.number(row['value']):>10}  {row['name']}")
        if "left_out" in one:
            print(f"{one['benchmark']:18}{'-':>10}  left out: {one['left_out']}")
    page.PAGE.write_text(page.text(), encoding="utf-8")
    print(f"\nwritten: {file.relative_to(REPO)}, {page.PAGE.relative_to(REPO)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
