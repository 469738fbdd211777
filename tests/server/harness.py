"""A real server of the tiny model in this process, and its books: what telemetry and the engine say happened."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import torch
from opentelemetry.trace import TracerProvider

from exporters.otlp import Otlp
from exporters.prometheus import metrics_app
from observability.catalog import OUTCOMES, REFUSED_OUTCOMES
from observability.engine.clock import MonotonicClock
from observability.engine.engine import Engine
from observability.engine.executor.torch_executor import TorchExecutor
from observability.engine.http_server import HttpServer, listen
from observability.engine.loop import EngineThread
from observability.engine.model.loading import LoadedModel
from observability.engine.server import ServerSettings, create_app
from observability.engine.sessions import SessionStore, weights_fingerprint
from observability.engine.types import EngineConfig
from observability.telemetry.recorder import RequestRecord, Telemetry
from observability.telemetry.tracing import Tracing
from tests.conftest import wait_for

torch.set_num_threads(1)
#: For many small requests: a client made for each would read certificates each time.
HTTP = httpx.Client(trust_env=False, timeout=60, limits=httpx.Limits(max_keepalive_connections=0))


@dataclass
class Books:
    """One reading of the counters, summed over classes."""

    received: int
    ended: dict[str, int]
    prompt_tokens: int
    generation_tokens: int
    running: int
    waiting: int


@dataclass
class RunningServer:
    url: str
    port: int
    thread: EngineThread
    telemetry: Telemetry
    loaded: LoadedModel
    http: HttpServer
    otlp: Otlp | None
    records: list[RequestRecord] = field(default_factory=list, repr=False)

    @property
    def engine(self) -> Engine:
        return self.thread.engine

    def client(self, **kwargs: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", **{"api_key": "none", "max_retries": 0, **kwargs})

    def async_client(self, **kwargs: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url + "/v1", **{"api_key": "none", "max_retries": 0, **kwargs})

    def wait_idle(self, seconds: float = 20.0) -> None:
        """Waits until the engine has no request and has published that."""
        wait_for(lambda: self.engine.num_running == 0 and self.engine.num_waiting == 0, seconds, "engine idle")
        began = time.time()
        wait_for(lambda: self._last_update() > began, 5.0, "gauges published after going idle")

    def _last_update(self) -> float:
        return next(
            row.value
            for f in self.telemetry.snapshot()
            if f.family.name.endswith("last_update_timestamp_seconds")
            for row in f.rows
        )

    def books(self) -> Books:
        rows: dict[str, list[Any]] = {f.family.name: f.rows for f in self.telemetry.snapshot()}

        def total(name: str) -> int:
            return int(sum(row.value for row in rows[name]))

        ended = dict.fromkeys(OUTCOMES, 0)
        for row in rows["kvscope_requests"]:
            ended[row.labels[2]] += int(row.value)
        return Books(
            total("kvscope_requests_received"),
            ended,
            total("kvscope_prompt_tokens"),
            total("kvscope_generation_tokens"),
            total("kvscope_requests_running"),
            total("kvscope_requests_waiting"),
        )

    def check_books(self) -> Books:
        """The identities that hold once idle: every request ended once, every block came back, tokens agree with records."""
        self.wait_idle()
        books, kv = self.books(), self.engine.kv_state()
        assert books.received == sum(books.ended.values()) + books.running + books.waiting
        assert (books.running, books.waiting) == (0, 0)
        assert kv.active == 0
        assert kv.free + kv.evictable == kv.capacity_blocks
        self.engine.check_integrity()
        assert len(self.records) == sum(n for outcome, n in books.ended.items() if outcome not in REFUSED_OUTCOMES)
        assert len({record.request_id for record in self.records}) == len(self.records)
        assert books.generation_tokens == sum(record.generated_tokens for record in self.records)
        assert books.prompt_tokens == sum(r.prompt_tokens for r in self.records if r.first_token is not None)
        anomalies = [f for f in self.telemetry.snapshot() if f.family.name == "kvscope_telemetry_anomalies"]
        assert sum(row.value for f in anomalies for row in f.rows) == 0
        return books


class serving:
    """Context manager: a server on a free port, stopped at the end whatever happened."""

    def __init__(
        self,
        loaded: LoadedModel,
        settings: ServerSettings | None = None,
        *,
        send_buffer: int | None = None,
        snapshots: Path | None = None,
        tracers: TracerProvider | None = None,
        otlp: Callable[[Telemetry], Otlp] | None = None,
        **config: Any,
    ) -> None:
        self._settings = settings or ServerSettings(grace_seconds=2.0)
        clock = MonotonicClock()
        engine_config = EngineConfig(**{"num_blocks": 512, "max_model_len": 4096, **config})
        records: list[RequestRecord] = []
        telemetry = Telemetry(
            loaded.name,
            executor="torch",
            virtual=False,
            device="cpu",
            kv_dtype="float32",
            clock=clock.now,
            on_finish=records.append,
        )
        executor = TorchExecutor(loaded, engine_config, telemetry, clock=clock)
        thread = EngineThread(Engine(engine_config, executor, telemetry, loaded.eos_token_ids))
        self._sessions = None
        if snapshots is not None:
            self._sessions = SessionStore(
                snapshots,
                thread.engine,
                model=loaded.name,
                fingerprint=weights_fingerprint(loaded),
                kv_scheme=engine_config.kv_dtype,
                max_bytes=1 << 30,
            )
        metrics = metrics_app(telemetry, self._settings.token)
        self._otlp = otlp(telemetry) if otlp is not None else None
        meters = None
        if self._otlp is not None:
            tracers, meters = self._otlp.tracer_provider, self._otlp.meter_provider
        self._tracing = Tracing.of(loaded.name, clock.now, tracers, meters)
        app = create_app(thread, loaded, telemetry, self._settings, metrics, self._sessions, self._tracing)
        self._listener = listen("127.0.0.1", 0)
        if send_buffer is not None:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        port = self._listener.getsockname()[1]
        http = HttpServer(app, app.state.service, grace_seconds=self._settings.grace_seconds)
        self.server = RunningServer(
            f"http://127.0.0.1:{port}", port, thread, telemetry, loaded, http, self._otlp, records
        )
        self._http_thread = threading.Thread(target=http.run, args=([self._listener],), daemon=True)

    def __enter__(self) -> RunningServer:
        self.server.thread.start()
        self._http_thread.start()
        wait_for(lambda: self.server.http.started, 10.0, "server start")
        return self.server

    def __exit__(self, *_: object) -> None:
        self.server.http.should_exit = True
        self._http_thread.join(15.0)
        assert not self._http_thread.is_alive(), "the HTTP server did not stop"
        if self._sessions is not None:
            self._sessions.close()
        if self.server.thread.alive:
            self.server.thread.stop()
        if self._tracing is not None:
            self._tracing.close()
        if self._otlp is not None:
            self._otlp.close()
