"""make fuzz: a coverage-guided search (atheris, libFuzzer) over every target, each in a process of its own.

python -m tests.fuzz.run [--cases 1000000] [--jobs 2] [--only TARGET ...] [--out FOLDER]

Cases are divided over targets. An exception other than KvscopeError, 10 s for one input or 2 GiB of memory end a target with the
input in FOLDER; put it into tests/fuzz/corpus/TARGET once its fault is corrected.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.fuzz.seeds import CORPUS
from tests.fuzz.targets import TARGETS, run

#: Files that targets read by path lie in memory where the system has such a folder.
_MEMORY_FOLDER = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
SECONDS_AN_INPUT, MEMORY_MIB, MAX_LEN = 10, 2048, 4096
#: Instrumented on import: what we wrote. Libraries below are exercised, not followed.
_FOLLOWED = ["observability", "exporters"]


def child(name: str, arguments: list[str]) -> None:
    """Fuzzes one target in this process; libFuzzer ends it."""
    import atheris

    with atheris.instrument_imports(include=_FOLLOWED):
        for seed in sorted((CORPUS / name).iterdir()):
            run(TARGETS[name], seed.read_bytes())  # targets import when they run
    atheris.Setup([f"fuzz-{name}", *arguments], lambda data: run(TARGETS[name], data))
    atheris.Fuzz()


def search(name: str, cases: int, out: Path) -> dict[str, Any]:
    found = out / name
    found.mkdir(parents=True, exist_ok=True)
    arguments = [
        f"-runs={cases}", f"-timeout={SECONDS_AN_INPUT}", f"-rss_limit_mb={MEMORY_MIB}", f"-max_len={MAX_LEN}",
        f"-artifact_prefix={found}/", "-print_final_stats=1", "-close_fd_mask=0",
    ]  # fmt: skip
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"fuzz-{name}-", dir=_MEMORY_FOLDER) as grown:
        argv = [
            sys.executable,
            "-m",
            "tests.fuzz.run",
            "--child",
            name,
            *arguments,
            f"{grown}/corpus",
            str(CORPUS / name),
        ]
        env = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": grown}
        os.mkdir(f"{grown}/corpus")
        with (found / "log").open("wb") as log:
            code = subprocess.run(argv, stdout=log, stderr=subprocess.STDOUT, env=env, check=False).returncode
    text = (found / "log").read_text(errors="replace")
    done = re.search(r"stat::number_of_executed_units: (\d+)", text)
    inputs = sorted(path.name for path in found.iterdir() if path.name != "log")
    told = {
        "target": name,
        "cases": int(done[1]) if done else 0,
        "seconds": round(time.monotonic() - began),
        "exit": code,
    }
    print(json.dumps(told | {"inputs": inputs}), flush=True)  # noqa: T201
    return told | {"inputs": inputs}


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[3:])
    asked = argparse.ArgumentParser(description="Coverage-guided fuzzing of every parser.")
    asked.add_argument("--cases", type=int, default=1_000_000)
    asked.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    asked.add_argument("--only", nargs="+", choices=sorted(TARGETS), default=list(TARGETS))
    asked.add_argument("--out", type=Path, default=Path("artifacts/fuzz"))
    chosen = asked.parse_args()
    each = -(-chosen.cases // len(chosen.only))
    for name in chosen.only:
        shutil.rmtree(chosen.out / name, ignore_errors=True)
    with ThreadPoolExecutor(chosen.jobs) as pool:
        results = list(pool.map(lambda name: search(name, each, chosen.out), chosen.only))
    failed = [result["target"] for result in results if result["exit"] or result["inputs"] or not result["cases"]]
    print(f"{sum(result['cases'] for result in results):,} cases; faults in: {', '.join(failed) or 'none'}")  # noqa: T201
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
