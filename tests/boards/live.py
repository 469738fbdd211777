"""A real engine under load, its exporter, a real Prometheus with the generated rules, and a real Alertmanager."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pandas as pd
import torch

from alerts import adapters, rules
from alerts.forecasts import FORECAST_JOB
from alerts.links import JOB
from exporters.forecast import ForecastMetrics
from exporters.prometheus import Exporter, start_exporter
from observability import catalog
from observability.engine.clock import MonotonicClock
from observability.engine.engine import Engine
from observability.engine.executor.torch_executor import TorchExecutor
from observability.engine.loop import EngineThread
from observability.engine.model.loading import load_model
from observability.engine.types import EngineConfig, Request, SamplingParams
from observability.errors import KvscopeError
from observability.forecast.series import FORECAST_SIGNALS
from observability.forecast.worker import run_once
from observability.store.embedded import create
from observability.telemetry.recorder import Telemetry
from tests.gpu.conftest import HEALTHY

MODEL = "tiny"
POOL = 64
CONFIG = EngineConfig(
    block_size=16, num_blocks=POOL, max_num_seqs=8, max_num_batched_tokens=256, max_model_len=512,
    max_queued=256, contiguous_below=256, kv_dtype="int8", quant_sample_rate=0.2,
)  # fmt: skip


def free_address() -> str:
    """A loopback address with a port that was free a moment ago."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{s.getsockname()[1]}"


class LoadedEngine:
    """The tiny model on the CPU with int8 KV, and a thread that sends it requests."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        clock = MonotonicClock()
        self.telemetry = Telemetry(
            MODEL, executor="torch", virtual=False, device="cpu", kv_dtype="int8", clock=clock.now
        )
        executor = TorchExecutor(load_model(MODEL), CONFIG, self.telemetry, clock=clock)
        self.engine = Engine(CONFIG, executor, self.telemetry)
        self.thread = EngineThread(self.engine)
        self.exporter: Exporter = start_exporter(self.telemetry)
        self.overload, self.paused = threading.Event(), threading.Event()
        self._stop = threading.Event()
        self._load = threading.Thread(target=self._send, name="load", daemon=True)
        self._job = threading.Thread(target=self._stall, name="job", daemon=True)

    def start(self) -> None:
        self.thread.start()
        self._load.start()
        self._job.start()

    def stop(self) -> None:
        self._stop.set()
        self._load.join(10)
        self._job.join(10)
        self.thread.stop()
        self.exporter.stop()

    def _stall(self) -> None:
        """A job that holds up the engine's thread for 0.3 s every 1.3 s."""
        while not self._stop.wait(1.0):
            with contextlib.suppress(KvscopeError):  # the engine has stopped
                self.engine.call(lambda: time.sleep(0.3)).result()

    def _send(self) -> None:
        """A few requests at a time, short and of three classes; in overload, hundreds that need half of the pool each."""
        rng = np.random.default_rng(7)
        shared = rng.integers(3, 250, 96).tolist()
        number = 0
        while not self._stop.is_set():
            limit = 0 if self.paused.is_set() else 150 if self.overload.is_set() else 3
            if self.engine.num_waiting + self.engine.num_running >= limit:
                self._stop.wait(0.01)
                continue
            number += 1
            if self.overload.is_set():
                prompt, tokens = rng.integers(3, 250, 490).tolist(), 22
            else:
                own = rng.integers(3, 250, int(rng.integers(4, 200))).tolist()
                prompt, tokens = (shared + own if number % 3 else own), int(rng.integers(2, 40))
            request = Request(
                f"r{number}",
                prompt,
                SamplingParams(max_tokens=tokens, ignore_eos=True),
                request_class=catalog.CLASSES[number % 3],
                tenant=f"team-{number % 2}",
                arrival=self.engine.executor.clock.now(),
            )
            self.engine.add(request)
            if number % 20 == 0:
                self.engine.abort(request)


@dataclass
class Webhook:
    """Receives Alertmanager's notifications on the loopback."""

    server: http.server.ThreadingHTTPServer = field(init=False)
    told: list[tuple[str, dict[str, Any]]] = field(default_factory=list)  # path without its slash, alert

    def __post_init__(self) -> None:
        received = self.told

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                received.extend((self.path.strip("/"), alert) for alert in body["alerts"])
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Quiet."""

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}/"

    @property
    def alerts(self) -> list[dict[str, Any]]:
        return [alert for _, alert in self.told]

    def firing(self) -> dict[str, dict[str, Any]]:
        return {a["labels"]["alertname"]: a for a in list(self.alerts) if a["status"] == "firing"}

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@dataclass
class Prometheus:
    url: str

    def get(self, path: str, **params: Any) -> Any:
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=params, timeout=20).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def value(self, expr: str) -> float:
        [sample] = self.get("query", query=expr)["result"]
        return float(sample["value"][1])


def start_gpu_exporter(spawn: Callable[..., Any], folder: Path, library: Path) -> str:
    """`kvscope gpu` over the scripted driver of tests/gpu: one card in the middle of work, on which a program failed (XID 31)."""
    script, address = folder / "nvml.txt", free_address()
    values = {**HEALTHY, "event0.gpu": 0, "event0.xid": 31}
    script.write_text("".join(f"{key} {value}\n" for key, value in values.items()))
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library), "NVML_SCRIPT": str(script)}
    port = address.rpartition(":")[2]
    argv = [sys.executable, "-m", "observability.cli", "gpu", "--port", port, "--interval", "1s"]
    with (folder / "gpu.log").open("wb") as log:
        spawn(*argv, env=environment, stdout=log, stderr=subprocess.STDOUT)
    return address


def start_forecast_exporter(folder: Path) -> Exporter:
    """The forecasts of a store with five hours of every signal that is forecast: a KV pool that is nearly full, and waves."""
    store = create(folder / "forecasts.sqlite")
    now = time.time()
    times = np.arange(now - 5 * 3600, now + 1, 60.0) // 60 * 60
    rng = np.random.default_rng(3)
    for signal in FORECAST_SIGNALS.values():
        values = 5 + np.sin(times / 3000) + rng.normal(0, 0.1, len(times))
        if signal.bounds[1] == 1.0:
            values = np.clip(0.93 + 0.03 * rng.normal(0, 1, len(times)), 0, 1)
        stamps = pd.to_datetime(times, unit="s", utc=True)
        store.append(signal.name, pd.DataFrame({"time": stamps, "model": MODEL, "value": values}))
    metrics = ForecastMetrics()
    run_once(store, store, list(FORECAST_SIGNALS.values()), publish=metrics.publish)
    return start_exporter(metrics)


def start_prometheus(
    spawn: Callable[..., Any],
    program: Callable[[str], str],
    folder: Path,
    targets: list[str],
    *,
    engines: Mapping[str, str] = {},
    address: str,
    alertmanager: str | None = None,
    forecasts: str | None = None,
    cors: bool = False,
) -> Prometheus:
    """Prometheus on `address` with the generated rules: scrapes each second, evaluates each second, holds alerts for two.

    `engines` are read through adapters: engine -> target.
    """
    files = {"recording.yml": rules.recording_file(), "alerts.yml": rules.alert_file()}
    files |= {f"{engine}.yml": adapters.rule_file(engine) for engine in engines}
    for name, text in files.items():
        quick = text.replace(f"interval: {rules.INTERVAL}", "interval: 1s").replace("for: 2m", "for: 2s")
        for interval in (rules.SLOW_INTERVAL, adapters.CAPABILITY_INTERVAL):
            quick = quick.replace(f"interval: {interval}", "interval: 1s")
        (folder / name).write_text(quick)
    config: dict[str, Any] = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": list(files),
        "scrape_configs": [
            {"job_name": JOB, "static_configs": [{"targets": targets}]},
            *({"job_name": FORECAST_JOB, "static_configs": [{"targets": [at]}]} for at in filter(None, (forecasts,))),
            *({"job_name": f"{JOB}-{engine}", "static_configs": [{"targets": [at]}]} for engine, at in engines.items()),
        ],
    }
    if alertmanager:
        config["alerting"] = {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]}
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    with (folder / "prometheus.log").open("wb") as log:
        spawn(
            program("prometheus"), f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address={address}", "--enable-feature=exemplar-storage",
            *(["--web.cors.origin=.*"] if cors else []), stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
    return Prometheus(f"http://{address}")


def start_alertmanager(
    spawn: Callable[..., Any], program: Callable[[str], str], folder: Path, address: str, webhook: str
) -> None:
    config = {
        "route": {"receiver": "test", "group_by": ["alertname"], "group_wait": "0s", "group_interval": "1s"},
        "receivers": [{"name": "test", "webhook_configs": [{"url": webhook}]}],
    }
    (folder / "alertmanager.yml").write_text(json.dumps(config))
    with (folder / "alertmanager.log").open("wb") as log:
        spawn(
            program("prometheus-alertmanager"), f"--config.file={folder}/alertmanager.yml",
            f"--storage.path={folder}/alertmanager", f"--web.listen-address={address}", "--cluster.listen-address=",
            stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def wait_until_ready(url: str, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/-/ready", timeout=2).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise TimeoutError(f"{url} is not ready within {seconds} s")
