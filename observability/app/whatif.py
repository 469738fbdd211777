"""Comparisons in virtual time, each in a process of its own (observability/workload/whatif.py), shared by all viewers of the app.

A comparison is known by its question: who asks the same finds its answer, and a link to the page shows it while it is kept. Pages only look
at what is there; the threads that talk to the processes are here.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import streamlit as st

log = logging.getLogger(__name__)
WORKER = (sys.executable, "-m", "observability.workload.whatif")
MAX_SECONDS = 300.0
#: Processes at once, questions that wait for one, answers that are kept.
RUNNING, WAITING, KEPT = 1, 8, 64
#: Largest trace that may be given, bytes.
MAX_TRACE_BYTES = 32 << 20
_LONGEST_LINE = 4 << 20

State = Literal["waiting", "running", "done", "failed", "cancelled"]


@dataclass(slots=True)
class Job:
    """One question on its way. `share` of it is done, by now at `what`; `answer` is there when it is done; `reason` and `next_step` say why
    it failed."""

    key: str
    state: State = "waiting"
    what: str = ""
    share: float = 0.0
    answer: Mapping[str, Any] | None = None
    reason: str = ""
    next_step: str = ""
    process: subprocess.Popen[str] | None = field(default=None, repr=False)


def key_of(question: Mapping[str, Any], trace: bytes | None) -> str:
    """What a question is known by: the same for the same question and trace."""
    told = json.dumps(question, sort_keys=True).encode()
    return hashlib.sha256(told + b"\0" + (b"" if trace is None else hashlib.sha256(trace).digest())).hexdigest()[:20]


class Comparisons:
    """Starts, follows, cancels and keeps comparisons. Safe to use from any thread."""

    def __init__(self, worker: Sequence[str] = WORKER, *, max_seconds: float = MAX_SECONDS) -> None:
        self._worker, self._max_seconds = tuple(worker), max_seconds
        self._jobs: dict[str, Job] = {}
        self._lock = threading.Lock()
        self._slots = threading.Semaphore(RUNNING)

    def find(self, key: str) -> Job | None:
        """The comparison of that key, if it is known."""
        with self._lock:
            return self._jobs.get(key)

    def start(self, question: Mapping[str, Any], trace: bytes | None = None) -> Job:
        """Starts the comparison unless it runs or is answered already; at most WAITING wait, more are refused at once."""
        key = key_of(question, trace)
        with self._lock:
            known = self._jobs.get(key)
            if known is not None and known.state in ("waiting", "running", "done"):
                return known
            job = self._jobs[key] = Job(key)
            if sum(each.state == "waiting" for each in self._jobs.values()) > WAITING:
                job.state, job.reason, job.next_step = (
                    "failed",
                    "Too many comparisons wait already.",
                    "Try again in some minutes.",
                )
                return job
            for old in [each.key for each in self._jobs.values() if each.state not in ("waiting", "running")][:-KEPT]:
                del self._jobs[old]
        threading.Thread(target=self._run, args=(job, dict(question), trace), name="comparison", daemon=True).start()
        return job

    def cancel(self, key: str) -> None:
        """Ends a comparison that waits or runs."""
        with self._lock:
            job = self._jobs.get(key)
            if job is None or job.state not in ("waiting", "running"):
                return
            job.state = "cancelled"
            process = job.process
        if process is not None:
            _end(process)

    # -- in a thread of the comparison --------------------------------------------------------------------------------

    def _run(self, job: Job, question: dict[str, Any], trace: bytes | None) -> None:
        with self._slots:
            try:
                with tempfile.TemporaryDirectory(prefix="kvscope-") as folder:
                    if trace is not None:
                        path = Path(folder) / "trace"
                        path.write_bytes(trace)
                        question["load"] = {**question["load"], "path": str(path)}
                    self._follow(job, question)
            except Exception:
                log.exception("comparison %s failed", job.key)
                self._fail(job, "The comparison failed.", "The log of the app has the reason.")

    def _follow(self, job: Job, question: Mapping[str, Any]) -> None:
        with self._lock:
            if job.state != "waiting":
                return  # cancelled meanwhile
            job.state = "running"
            job.process = process = subprocess.Popen(
                self._worker, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            )  # fmt: skip
        late = threading.Event()

        def stop() -> None:
            late.set()
            _end(process)

        timer = threading.Timer(self._max_seconds, stop)
        timer.start()
        errors: list[str] = []
        reader = threading.Thread(target=lambda: errors.append(process.stderr.read()[-4000:]), daemon=True)  # type: ignore[union-attr]
        reader.start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(question) + "\n")
                process.stdin.flush()
            while line := process.stdout.readline(_LONGEST_LINE):
                self._hear(job, json.loads(line))
            code = process.wait()
        finally:
            timer.cancel()
            _end(process)
            reader.join(5)
            for pipe in (process.stdin, process.stdout, process.stderr):
                with contextlib.suppress(OSError):
                    pipe.close()  # type: ignore[union-attr]
            job.process = None
        if late.is_set():
            self._fail(
                job,
                f"The comparison took more than {self._max_seconds:g} s and was ended.",
                "Lower the number of requests.",
            )
        elif job.state == "running":
            log.error("comparison %s ended with %s: %s", job.key, code, "".join(errors))
            self._fail(
                job,
                f"The comparison's process ended early (code {code}).",
                "Lower the number of requests; the log of the app has the reason.",
            )

    def _hear(self, job: Job, said: Mapping[str, Any]) -> None:
        with self._lock:
            if job.state != "running":
                return
            if "answer" in said:
                job.answer, job.share, job.state = said["answer"], 1.0, "done"
            elif "reason" in said:
                job.reason, job.next_step, job.state = said["reason"], said.get("next_step", ""), "failed"
            else:
                job.what, job.share = said["what"], float(said["share"])

    def _fail(self, job: Job, reason: str, next_step: str) -> None:
        with self._lock:
            if job.state in ("waiting", "running"):
                job.state, job.reason, job.next_step = "failed", reason, next_step


def _end(process: subprocess.Popen[str]) -> None:
    """Kills what is left of a process and waits for it."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)


@st.cache_resource(show_spinner=False)
def comparisons() -> Comparisons:
    """Those of this process."""
    return Comparisons()
