"""Every command in README.md and docs/ is run as it stands there, or is in LEFT_OUT with the reason and the place that runs it.

What differs from the page: ports and process ids are ones that there are, addresses of other servers are those of a real Prometheus and a stand-in for Grafana, paths
below /etc and /var lie in a folder of the test, the model is `tiny` where none is named, and traces are the first requests of real ones.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import httpx
import pytest

from tests.boards.servers import Grafana
from tests.conftest import REPO, wait_for

PAGES = (REPO / "README.md", *sorted((REPO / "docs").glob("*.md")))
PROGRAMS = r"(?:[A-Z_]+=\S+ )*(?:kvscope|make|pip|docker|kubectl|python|curl|export|vllm|promtool|git)\b"
#: Commands by pattern -> why they are not run here, and where they or their parts are.
LEFT_OUT = {
    r"make demo": "minutes, and never ends: tests/demo runs kvscope demo",
    r"make (test|lint|generate|fuzz|soak|faults|bench|bench-quick|test-vllm)\b": "this very run is one of them, the others take long: Makefile",
    r"docker compose|[A-Z_]+=\S+ docker compose|curl .*/api/": "needs Docker: tests/deploy runs the same servers and files without it",
    r"kubectl": "needs a cluster: tests/deploy/test_kubernetes.py checks what it applies",
    r"pip install": "downloads gigabytes; the light package from its wheel: tests/install",
    r"vllm serve": "needs vLLM: tests/vllm_live, by make test-vllm",
    r"export ": "sets a variable for the next command, which gets it",
    r"kvscope experiment": "minutes of virtual time: tests/workload/test_experiment.py",
    r"kvscope calibrate|kvscope replay generated --gpu calibrated": "minutes of measurements: tests/workload/test_calibrate.py",
    r"kvscope backtest": "minutes of model fits: tests/forecast/test_backtest.py",
    r"kvscope forecast": "a day of history first: tests/forecast/test_worker.py, tests/forecast/test_exporter.py",
    r"kvscope report": "a recorded span first: tests/app/test_report.py",
    r"kvscope incident kv-exhaustion": "minutes under load: tests/boards/test_incidents.py",
    r"kvscope profile --steps 100": "the real model: kvscope profile tiny is run",
    r"python benchmarks/": "minutes on a quiet machine: make bench",
}  # fmt: skip


def commands(page: Path) -> Iterator[str]:
    """Lines of indented blocks, and of fenced ones for a shell, that begin with a program."""
    text = page.read_text()
    fenced = re.findall(r"^```(?:bash|console|sh)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    rest = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for line in [
        *re.findall(r"^ {4,}(\S.*)$", rest, re.MULTILINE),
        *(line for block in fenced for line in block.splitlines()),
    ]:
        if re.match(PROGRAMS, line.removeprefix("$ ").strip()):
            yield line.removeprefix("$ ").strip()


ALL = list(dict.fromkeys(line for page in PAGES for line in commands(page)))
RUN = [line for line in ALL if not any(re.match(pattern, line) for pattern in LEFT_OUT)]


class Sandbox:
    """A folder with what the pages speak of, and a process that runs commands in it."""

    def __init__(
        self, folder: Path, zygote: subprocess.Popen[str], servers: dict[str, str], free_port: Callable[[], int]
    ) -> None:
        self.folder, self.zygote, self.servers, self.free_port = folder, zygote, servers, free_port

    def run(self, line: str) -> dict[str, object]:
        program, *words = shlex.split(line, comments=True)
        if program != "kvscope":
            done = subprocess.run([program, *words], cwd=REPO, capture_output=True, text=True)
            return {"code": done.returncode, "output": done.stdout + done.stderr, "up": True}
        text = shlex.join(words)
        for written, here in self.servers.items():
            text = text.replace(written, here)
        text = re.sub(r"(--(?:metrics-)?port) \d+", r"\1 0", text)
        text = re.sub(r"--pid \d+", f"--pid {os.getpid()}", text)
        text = re.sub(r"(?<=[ =])/(etc|var)/", f"{self.folder}/", text)
        argv = shlex.split(text)
        server = argv[0] in ("serve", "route", "gpu", "record", "app")
        if server and argv[0] in ("route", "gpu") and "--port" not in argv:
            argv += ["--port", "0"]
        if argv[0] == "app":
            argv += ["--port", str(self.free_port())]
        assert self.zygote.stdin is not None
        assert self.zygote.stdout is not None
        self.zygote.stdin.write(json.dumps({"argv": argv, "server": server}) + "\n")
        self.zygote.stdin.flush()
        return json.loads(self.zygote.stdout.readline())  # type: ignore[no-any-return]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture(scope="module")
def sandbox(
    tmp_path_factory: pytest.TempPathFactory, data_dir: Path, program: Callable[[str], str]
) -> Iterator[Sandbox]:
    folder = tmp_path_factory.mktemp("docs")
    with (data_dir / "traces/mooncake_conversation.jsonl").open() as file:
        (folder / "mooncake_conversation.jsonl").write_text("".join(islice(file, 150)))
    (folder / "kvscope.toml").write_text('[serve]\nmodel = "tiny"\nport = 0\n')
    (folder / "prometheus.yml").write_text(json.dumps({"rule_files": [str(folder / "prometheus/rules/*.yml")]}))
    grafana = Grafana()
    environment = {
        **os.environ, "PYTHONPATH": str(REPO), "KVSCOPE_CONFIG": str(folder / "kvscope.toml"), "XDG_DATA_HOME": str(folder),
        "KVSCOPE_GRAFANA_TOKEN": "editor", "OMP_NUM_THREADS": "1", "COLUMNS": "200", "NO_COLOR": "1",
    }  # fmt: skip
    url = f"http://127.0.0.1:{free_port()}"
    prometheus = subprocess.Popen(
        [program("prometheus"), f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'tsdb'}",
         f"--web.listen-address={url.removeprefix('http://')}", "--web.enable-lifecycle"],
        stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    zygote = subprocess.Popen(
        [sys.executable, "-m", "tests.docs.zygote"], cwd=folder, env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip

    try:
        wait_for(lambda: httpx.get(f"{url}/-/ready", trust_env=False).status_code == 200, 60, "Prometheus is ready")
        yield Sandbox(
            folder, zygote, {"https://grafana.example.com": grafana.url, "http://127.0.0.1:9090": url}, free_port
        )
    finally:
        for process in (zygote, prometheus):
            process.terminate()
            process.wait(20)
        grafana.close()


@pytest.mark.parametrize("line", RUN)
def test_a_command_of_the_docs_runs(sandbox: Sandbox, line: str) -> None:
    result = sandbox.run(line)
    assert result["code"] == 0, result["output"]
    assert result["up"], result["output"]


def test_what_is_left_out_occurs_and_names_a_place_that_is_there() -> None:
    for pattern, reason in LEFT_OUT.items():
        assert any(re.match(pattern, line) for line in ALL), f"no page has {pattern}"
        for path in re.findall(r"tests/[\w/]+(?:\.py)?", reason):
            assert (REPO / path).exists(), path
