"""The Prometheus endpoint: classic text and OpenMetrics 1.0 over what telemetry keeps, rendered off the engine's thread.

`MetricsApp` serves what text.py makes (mounted by the server, or alone by `start_exporter`); `TelemetryCollector` puts the same families into a prometheus_client registry that somebody else exposes.
"""

from __future__ import annotations

import asyncio
import gzip
import hmac
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any

import uvicorn
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, gzip_accepted
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST as CONTENT_TYPE_OPENMETRICS
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar as ClientExemplar
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from exporters.text import Exposition
from exporters.together import Source
from observability import catalog as c
from observability.errors import ServiceError
from observability.telemetry.snapshot import FamilySamples, Row
from observability.tls import Tls, scheme, uvicorn_options

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

#: Connections of an exporter, idle ones included; more are answered 503.
_MOST_CONNECTIONS = 1000
#: Between two parts of a rendering, each a fifth of a millisecond: a short step of the engine meets one of them at most.
_PAUSE_SECONDS = 0.006


class TelemetryCollector(Collector):
    """Families of `telemetry` for a prometheus_client registry. Exemplars show where that registry speaks OpenMetrics."""

    def __init__(self, telemetry: Source) -> None:
        self._telemetry = telemetry

    def collect(self) -> Iterable[Metric]:
        return metrics([({}, self._telemetry.snapshot())])


def metrics(readings: Iterable[tuple[Mapping[str, str], list[FamilySamples]]]) -> Iterable[Metric]:
    """prometheus_client's form of readings, one metric a family; each reading's labels go onto its samples."""
    found: dict[str, Metric] = {}
    for common, families in readings:
        for family, rows in families:
            metric = found.setdefault(family.name, Metric(family.name, family.help, family.kind))
            for suffix, values, value, exemplar in rows:
                names = (*family.labels, "le") if suffix == "_bucket" else family.labels
                attached = exemplar and ClientExemplar(dict(exemplar.labels), exemplar.value, exemplar.timestamp)
                labels = {**common, **dict(zip(names, values, strict=True))}
                metric.add_sample(family.name + suffix, labels, value, exemplar=attached)
    return found.values()


# -- HTTP -----------------------------------------------------------------------------------------------------------


def prefers_openmetrics(accept: str) -> bool:
    """Whether an Accept header asks for OpenMetrics 1.0 at least as much as for classic text. Malformed parts are ignored.

    prometheus_client's choose_encoder is not used: it ignores weights and raises on a malformed version.
    """
    openmetrics = text = 0.0
    for part in accept.split(","):
        media, *rest = (piece.strip() for piece in part.lower().split(";"))
        params = dict(piece.partition("=")[::2] for piece in rest)
        try:
            weight = float(params.get("q", "1"))
        except ValueError:
            continue
        if media == "application/openmetrics-text" and params.get("version", "1.0.0") == "1.0.0":
            openmetrics = max(openmetrics, weight)
        elif media in ("text/plain", "text/*", "*/*"):
            text = max(text, weight)
    return 0.0 < openmetrics >= text


class MetricsApp:
    """ASGI application that answers GET with the exposition of `telemetry`.

    Wire it as `Route("/metrics", app)`; a Mount would answer /metrics with a redirect.

    Scrapes that come while one of the same form is being rendered share its result, so that no number of scrapers can
    queue work. With `token`, requests need `Authorization: Bearer <token>`.

    A rendering holds the interpreter for a fraction of a millisecond at a time and sleeps in between, so that it does not stand in the
    way of an engine's thread in the same process.
    """

    def __init__(self, telemetry: Source, token: str | None = None, *, pause_seconds: float = _PAUSE_SECONDS) -> None:
        self._pause_seconds = pause_seconds
        self._authorization = f"Bearer {token}".encode() if token else None
        self._rendering: dict[tuple[bool, bool], asyncio.Task[bytes]] = {}  # by form and compression
        self._expositions = {form: Exposition(telemetry, openmetrics=form) for form in (False, True)}
        self._render_seconds = 0.0
        self._series = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await (await self._respond(scope["method"], Headers(scope=scope)))(scope, receive, send)

    async def _respond(self, method: str, headers: Headers) -> Response:
        if method not in ("GET", "HEAD"):
            return PlainTextResponse("Use GET.\n", 405, {"Allow": "GET, HEAD"})
        if self._authorization is not None:
            given = headers.get("authorization", "").encode()
            if not hmac.compare_digest(given, self._authorization):
                return PlainTextResponse("A bearer token is needed.\n", 401, {"WWW-Authenticate": "Bearer"})
        openmetrics = prefers_openmetrics(headers.get("accept", ""))
        packed = gzip_accepted(headers.get("accept-encoding", ""))
        body = await self._shared(openmetrics, packed)
        answer = {
            "Content-Type": CONTENT_TYPE_OPENMETRICS if openmetrics else CONTENT_TYPE_PLAIN_0_0_4,
            "Vary": "Accept, Accept-Encoding",
        }
        if packed:
            answer["Content-Encoding"] = "gzip"
        return Response(body, headers=answer)

    async def _shared(self, openmetrics: bool, packed: bool) -> bytes:
        """The exposition; whoever asks while it is made waits for the same."""
        key = openmetrics, packed
        task = self._rendering.get(key)
        if task is None:
            task = asyncio.create_task(self._packed(openmetrics) if packed else self._plain(openmetrics))
            self._rendering[key] = task
            task.add_done_callback(lambda _: self._rendering.pop(key, None))
        return await asyncio.shield(task)  # one scraper that leaves must not end it for the others

    async def _plain(self, openmetrics: bool) -> bytes:
        return await asyncio.to_thread(self._render, openmetrics)

    async def _packed(self, openmetrics: bool) -> bytes:
        return await asyncio.to_thread(gzip.compress, await self._shared(openmetrics, False), 1)

    def _render(self, openmetrics: bool) -> bytes:
        start = time.perf_counter()
        about: list[FamilySamples] = []
        if self._series:  # what the previous exposition took; before the first there is nothing to tell
            about.append(FamilySamples(c.SCRAPE_SECONDS, [Row("", (), self._render_seconds)]))
            about.append(FamilySamples(c.SCRAPE_SERIES, [Row("", (), self._series)]))
        body, self._series = self._expositions[openmetrics].render(about, pause_seconds=self._pause_seconds)
        self._render_seconds = time.perf_counter() - start
        return body


def metrics_app(telemetry: Source, token: str | None = None) -> MetricsApp:
    """ASGI application for /metrics; see MetricsApp."""
    return MetricsApp(telemetry, token)


class Exporter:
    """A running endpoint. `url` is where Prometheus scrapes; `stop` (or leaving a `with` block) ends it."""

    def __init__(self, url: str, server: uvicorn.Server, thread: threading.Thread, listener: socket.socket) -> None:
        self.url = url
        self._server = server
        self._thread = thread
        self._listener = listener

    def stop(self, timeout: float = 5.0) -> None:
        """Closes the socket and waits for the thread; open scrapes are cut off after `timeout` seconds."""
        self._server.should_exit = True
        self._thread.join(timeout)
        if self._thread.is_alive():
            self._server.force_exit = True
            self._thread.join(timeout)
        self._listener.close()  # a server told to stop before it had started leaves it open

    def __enter__(self) -> Exporter:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def start_exporter(
    telemetry: Source, host: str = "127.0.0.1", port: int = 0, *, token: str | None = None, tls: Tls | None = None
) -> Exporter:
    """Serves `telemetry` at http://host:port/metrics (https with `tls`) from a thread of its own; port 0 takes a free one.

    For whatever has no HTTP server. Beside an engine, process.start_exporter_process leaves the engine's steps alone. Raises ServiceError if
    the address cannot be taken.
    """
    listener = listen(host, port)
    server = metrics_server(MetricsApp(telemetry, token), tls)
    thread = threading.Thread(target=server.run, args=([listener],), name="kvscope-exporter", daemon=True)
    thread.start()
    return Exporter(metrics_url(listener, tls), server, thread, listener)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket for an exporter; port 0 takes a free one. Raises ServiceError if the address cannot be taken."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise ServiceError(
            f"The metrics exporter cannot listen on {host}:{port}: {error.strerror or error}.",
            next_step="Stop what uses this port, or choose another one.",
        ) from error
    return listener


def metrics_url(listener: socket.socket, tls: Tls | None = None) -> str:
    host, port = listener.getsockname()[:2]
    return f"{scheme(tls)}://[{host}]:{port}/metrics" if ":" in host else f"{scheme(tls)}://{host}:{port}/metrics"


def metrics_server(app: MetricsApp, tls: Tls | None = None) -> uvicorn.Server:
    """A server of nothing but `app` at /metrics, to be run on a listening socket."""
    config = uvicorn.Config(
        Starlette(routes=[Route("/metrics", app)]),
        log_config=None,
        access_log=False,
        lifespan="off",
        limit_concurrency=_MOST_CONNECTIONS,
        timeout_graceful_shutdown=2,
        **uvicorn_options(tls),  # type: ignore[arg-type]
    )
    return uvicorn.Server(config)
