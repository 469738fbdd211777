"""Runs commands of kvscope, each in a forked process of its own with the heavy modules loaded: one JSON job a line in, one result a line out.

A job has `argv`, and `server` for a command that serves until Ctrl-C: it is interrupted once an address that it printed has answered.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy
import pandas
import torch

import observability.cli
from observability.engine import server
from observability.engine.executor import torch_executor
from observability.workload import replay

LOADED = (numpy, pandas, torch, server, torch_executor, replay)
SECONDS = 120


def answers(output: str) -> bool:
    """Whether one of the addresses that a server printed answers (a refusal is an answer), its health or metrics first."""
    urls = re.findall(r"http://[^\s;]+", output)
    for url in sorted(urls, key=lambda url: ("/health" not in url, "/metrics" not in url)):
        try:
            urllib.request.urlopen(url, timeout=5).read()
        except urllib.error.HTTPError:
            return True
        except OSError:
            continue
        return True
    return False


def child(argv: list[str], file: Path) -> None:
    out = os.open(file, os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["kvscope", *argv]
    observability.cli.main()


def run(job: dict[str, object], file: Path) -> dict[str, object]:
    pid = os.fork()
    if not pid:
        code = 1
        try:
            child(job["argv"], file)  # type: ignore[arg-type]
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        finally:
            sys.stdout.flush()
            os._exit(code)
    end, up = time.monotonic() + SECONDS, not job["server"]
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        output = file.read_text(errors="replace") if file.exists() else ""
        if done:
            return {"code": os.waitstatus_to_exitcode(status), "output": output, "up": up}
        if time.monotonic() > end:
            os.killpg(pid, signal.SIGKILL)
        elif job["server"] and (up or (re.search("Ctrl-C|in your browser", output) and answers(output))):
            up = True
            os.kill(pid, signal.SIGINT)  # again until it ends: it may not have been listening for one yet
            time.sleep(0.3)
        time.sleep(0.05)


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for number, line in enumerate(sys.stdin):
            result = run(json.loads(line), Path(folder) / str(number))
            sys.stdout.write(json.dumps(result) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
