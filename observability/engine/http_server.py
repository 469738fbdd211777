"""The HTTP side that knows nothing of OpenAI: the listening socket, event streams that notice a client that left, shutdown."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, Protocol, TypeVar

import uvicorn
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from observability.errors import ServiceError
from observability.tls import Tls, uvicorn_options

_log = logging.getLogger(__name__)
T = TypeVar("T")


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, so that a taken port is known before a model is loaded; port 0 takes a free one.

    Clients that connect early wait until the server accepts. Raises ServiceError when the address cannot be taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ServiceError(f"The host {host!r} is not known: {error}.", next_step="Give another --host.") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except OSError as error:
        listener.close()
        raise ServiceError(
            f"The server cannot listen on {host}:{port}: {error.strerror or error}.",
            next_step="Stop what uses this port, or choose another one with --port.",
        ) from error
    return listener


class Drainable(Protocol):
    """What can be shut down gently (server.Service)."""

    def drain(self) -> None: ...

    def abort_all(self) -> None: ...


class HttpServer(uvicorn.Server):
    """uvicorn around `app`. At shutdown, requests in flight have `grace_seconds` before `service` aborts them."""

    def __init__(self, app: ASGIApp, service: Drainable, *, grace_seconds: float, tls: Tls | None = None) -> None:
        self._service = service
        self._grace_seconds = grace_seconds
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                lifespan="on",
                server_header=False,
                # Longer than clients keep idle connections (httpx: 5 s): who closes first must not be the one that is about to be asked.
                timeout_keep_alive=75,
                # Aborted streams still end with an error event; uvicorn cuts off what does not.
                timeout_graceful_shutdown=int(grace_seconds) + 5,
                **uvicorn_options(tls),  # type: ignore[arg-type]
            )
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.drain()
        abort = asyncio.get_running_loop().call_later(self._grace_seconds, self._service.abort_all)
        try:
            await super().shutdown(sockets)
        finally:
            abort.cancel()


class EventStream(Response):
    """A stream of server-sent events. `on_end` is called once it is over: all sent, the client gone, or nothing read for
    `stall_seconds`."""

    def __init__(
        self,
        events: AsyncIterator[bytes],
        *,
        stall_seconds: float,
        on_end: Callable[[], None],
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers}, media_type="text/event-stream"
        )
        del self.headers["content-length"]
        self._events, self._stall_seconds, self._on_end = events, stall_seconds, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_gone(self._send_all(send), receive)
        except ClientDisconnect:
            pass
        except TimeoutError:  # returning early makes uvicorn close the connection
            _log.warning("a client read nothing for %g s; its request was aborted", self._stall_seconds)
        finally:
            self._on_end()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for part in self._events:
            async with asyncio.timeout(self._stall_seconds):
                await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def until_gone(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """Runs `work`. Raises ClientDisconnect, with `work` cancelled, when the client leaves first."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = (worker := asyncio.create_task(work)), asyncio.create_task(gone())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            raise ClientDisconnect
        return worker.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
