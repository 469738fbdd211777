"""A Prometheus server on a folder of its own."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.conftest import wait_for


@pytest.fixture
def prometheus(
    program: Callable[[str], str],
    free_port: Callable[[], int],
    spawn: Callable[..., subprocess.Popen[bytes]],
    tmp_path: Path,
) -> Callable[..., str]:
    """start(data folder, configuration) -> URL of a real Prometheus that answers."""

    def start(data: Path, config: str = "{}") -> str:
        file = tmp_path / "prometheus.yml"
        file.write_text(config)
        port = free_port()
        spawn(
            program("prometheus"), f"--config.file={file}", f"--storage.tsdb.path={data}",
            "--storage.tsdb.retention.time=100y", f"--web.listen-address=127.0.0.1:{port}",
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        url = f"http://127.0.0.1:{port}"
        wait_for(lambda: httpx.get(f"{url}/-/ready", trust_env=False).status_code == 200, 30, "Prometheus is ready")
        return url

    return start


def raw_samples(
    url: str, selector: str, at: float | None = None
) -> dict[tuple[str, tuple[tuple[str, str], ...]], list[tuple[float, float]]]:
    """Samples of every series of a range selector such as `{job="x"}[10m]`: (name, sorted labels) -> [(time, value)]."""
    answer = httpx.post(
        f"{url}/api/v1/query", data={"query": selector, "time": f"{at or time.time():.3f}"}, trust_env=False, timeout=30
    )
    answer.raise_for_status()
    out = {}
    for row in answer.json()["data"]["result"]:
        labels = dict(row["metric"])
        name = labels.pop("__name__")
        out[name, tuple(sorted(labels.items()))] = [(float(t), float(v)) for t, v in row["values"]]
    return out
