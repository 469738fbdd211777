"""One address for several replicas: a session stays on its replica, found by consistent hashing, and outlives the replica's death.

client -> read the body -> session id -> replicas in the ring's order, those that are up -> answer, passed on as it comes.
A request goes to another replica as long as the client has seen no byte of an answer; later its stream ends with an error event.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from uhashring import HashRing  # type: ignore[import-untyped]

from observability.addresses import trusted, without_secrets
from observability.engine.http_api import EXCEPTION_HANDLERS, read_body
from observability.engine.http_server import EventStream, until_gone
from observability.engine.openai_types import MAX_SESSION_ID_CHARS, ApiError
from observability.errors import ConfigError

_log = logging.getLogger(__name__)

#: What became of a request at a replica. lost: the replica failed before its answer began; broken: while it was passed on;
#: client_gone: the client left first. "unavailable" is counted for requests that no replica could take.
OUTCOMES = ("answered", "refused", "lost", "broken", "client_gone")
UNAVAILABLE = ("", "unavailable")

_INLINE_BODY_BYTES = 4096  # parsing more than this leaves the event loop
_MAX_ANSWER_BYTES = 32 << 20  # of an answer that is no stream, which is kept until it is whole
_MAX_EVENT_BYTES = 1 << 20  # of one server-sent event
_POINTS = 160  # of a replica on the ring: loads differ by about 1 / sqrt(160) = 8 %
#: RFC 9110, section 7.6.1, and what the connection to the other side sets itself.
_HOP_BY_HOP = {
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
    "transfer-encoding", "upgrade", "host", "content-length", "accept-encoding", "expect", "date", "server",
}  # fmt: skip
_NO_RETRY = {"x-should-retry": "false"}  # OpenAI's clients repeat a 5xx by themselves otherwise


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """Limits of the router. A replica whose /health gives no answer for `hung_checks` checks in a row counts as hung: it gets no new
    requests and loses those it has. One that refuses connections or says that it is unavailable gets no new ones."""

    max_body_bytes: int = 4 * 1024 * 1024
    body_seconds: float = 30.0
    stall_seconds: float = 60.0  # without the client reading a byte of a stream
    check_seconds: float = 1.0  # between two looks at a replica's health
    check_timeout_seconds: float = 3.0
    hung_checks: int = 3
    connect_seconds: float = 3.0


class ReplicaLost(Exception):
    """The replica stopped answering. `reached`: it may have begun to work on the request."""

    def __init__(self, reason: str, *, reached: bool) -> None:
        super().__init__(reason)
        self.reached = reached


class Replica:
    """One replica as the router sees it. `up`: it gets requests; `reason` says why not."""

    def __init__(self, index: int, url: str) -> None:
        self.index, self.url = index, url
        self.up = False
        self.reason: str | None = "The replica has not been looked at yet."
        self.open_requests = 0
        self.missed_checks = 0
        self.checking = asyncio.Lock()
        self._waits: set[asyncio.Timeout] = set()

    @contextlib.asynccontextmanager
    async def wait(self) -> AsyncIterator[None]:
        """Around waiting for bytes of this replica. Raises ReplicaLost when it fails, or once cut_off() is called."""
        try:
            async with asyncio.timeout(None) as scope:
                self._waits.add(scope)
                try:
                    yield
                finally:
                    self._waits.discard(scope)
        except TimeoutError:
            raise ReplicaLost(self.reason or "The replica was cut off.", reached=True) from None
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise ReplicaLost(f"The replica cannot be connected to ({_text(error)}).", reached=False) from error
        except httpx.TransportError as error:
            raise ReplicaLost(f"The connection to the replica broke ({_text(error)}).", reached=True) from error

    def cut_off(self) -> None:
        """Ends the waits of all requests at this replica."""
        now = asyncio.get_running_loop().time()
        for scope in self._waits:
            if not scope.expired():
                scope.reschedule(now)

    def close_one(self) -> None:
        self.open_requests -= 1

    def set_state(self, up: bool, reason: str | None) -> None:
        if up != self.up:
            _log.warning("replica %s is %s", self.url, "up" if up else f"down: {reason}")
        self.up, self.reason = up, reason

    def state(self) -> dict[str, Any]:
        return {"url": self.url, "up": self.up, "reason": self.reason, "open_requests": self.open_requests}


def check_urls(urls: Sequence[str]) -> list[str]:
    """The replicas' base URLs, without a slash at the end. Raises ConfigError for none, for twins and for what is no base URL."""
    checked: list[str] = []
    for url in urls:
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL:
            raise ConfigError(
                f"{without_secrets(url)!r} is not a URL.", next_step="Give one such as http://host:8000."
            ) from None
        if (
            parsed.scheme not in ("http", "https")
            or not parsed.host
            or parsed.path not in ("", "/")
            or parsed.query
            or parsed.fragment
            or parsed.userinfo
        ):
            raise ConfigError(
                f"{without_secrets(url)!r} is not the base URL of a replica.",
                next_step="Give scheme, host and port, as in http://host:8000.",
            )
        base = str(parsed).rstrip("/")
        if base in checked:
            raise ConfigError(f"The replica {base} is given twice.", next_step="Give each replica once.")
        checked.append(base)
    if not checked:
        raise ConfigError("There is no replica to route to.", next_step="Give --replica URL at least once.")
    return checked


class Ring:
    """Consistent hashing of session ids over names. Whoever leaves out names that are down gets the ring without them: only the
    sessions of those go elsewhere, and come back with them."""

    def __init__(self, names: Sequence[str]) -> None:
        self._ring = HashRing(list(names), vnodes=_POINTS, hash_fn=_hash)

    def preference(self, session_id: str) -> Iterator[str]:
        """All names, in the order in which `session_id` would go to them."""
        for node in self._ring.range(session_id):
            yield node["nodename"]


def _hash(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(errors="surrogatepass"), digest_size=8).digest(), "big")


class Router:
    """The proxy. `counts[replica URL, outcome]` counts requests; see OUTCOMES and UNAVAILABLE. One event loop calls everything."""

    def __init__(self, urls: Sequence[str], settings: RouterSettings) -> None:
        self.replicas = [Replica(i, url) for i, url in enumerate(check_urls(urls))]
        self.counts: Counter[tuple[str, str]] = Counter()
        self._by_url = {replica.url: replica for replica in self.replicas}
        self._ring = Ring(list(self._by_url))
        self._settings = settings
        self._turn = 0  # spreads requests without a session over equally busy replicas
        self._draining = False
        self._closing: set[asyncio.Task[None]] = set()
        self._client: httpx.AsyncClient
        self._checks: httpx.AsyncClient

    @contextlib.asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Looks at all replicas once, then in the background."""
        settings = self._settings
        # How long an answer takes is up to the model.
        timeout = httpx.Timeout(30.0, connect=settings.connect_seconds, read=None)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=2.0)
        # Checks open a connection each: that a replica still listens is what they are to find out.
        fresh = httpx.Limits(max_keepalive_connections=0)
        context = trusted()
        async with (
            httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False, verify=context) as self._client,
            httpx.AsyncClient(
                timeout=settings.check_timeout_seconds, limits=fresh, trust_env=False, verify=context
            ) as self._checks,
        ):
            await asyncio.gather(*(self._check(replica) for replica in self.replicas))
            watchers = [asyncio.create_task(self._watch(replica)) for replica in self.replicas]
            try:
                yield
            finally:
                for watcher in watchers:
                    watcher.cancel()
                await asyncio.gather(*watchers, return_exceptions=True)

    def drain(self) -> None:
        """Refuses new requests with 503 from now on; open ones go on."""
        self._draining = True

    def abort_all(self) -> None:
        """Ends every open request; clients of streams get an error event."""
        for replica in self.replicas:
            replica.set_state(False, "The router is shutting down.")
            replica.cut_off()

    def close_later(self, stack: contextlib.AsyncExitStack) -> None:
        """Closes what a stream held, from where nothing can be awaited."""
        task = asyncio.create_task(stack.aclose())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    # -- health ------------------------------------------------------------------------------------------------------

    async def _watch(self, replica: Replica) -> None:
        while True:
            await asyncio.sleep(self._settings.check_seconds)
            try:
                await self._check(replica)
            except Exception:  # whatever a replica sends must not end the watch
                _log.exception("looking at replica %s failed", replica.url)

    async def _check(self, replica: Replica) -> None:
        hung, status = False, None
        try:
            async with self._checks.stream("GET", replica.url + "/health") as answer:
                status = answer.status_code
            reason = f"The replica's health is {status}."
        except httpx.TimeoutException:
            replica.missed_checks += 1
            if replica.up and replica.missed_checks < self._settings.hung_checks:
                return
            hung, reason = True, "The replica does not answer."
        except httpx.HTTPError as error:
            reason = f"The replica cannot be reached ({_text(error)})."
        if self._draining:
            return
        replica.set_state(status == 200, None if status == 200 else reason)
        if hung:
            replica.cut_off()
        else:
            replica.missed_checks = 0

    async def health(self, request: Request) -> Response:
        """200 while a replica is up."""
        ok = not self._draining and any(replica.up for replica in self.replicas)
        body = {
            "status": "ok" if ok else "unavailable",
            "reason": None if ok else "The router is shutting down." if self._draining else "No replica is up.",
            "replicas": [replica.state() for replica in self.replicas],
        }
        return JSONResponse(body, 200 if ok else 503, {"Cache-Control": "no-store"})

    # -- requests ----------------------------------------------------------------------------------------------------

    async def forward(self, request: Request) -> Response:
        """Answers with what a replica answers; 503 when none is up."""
        settings = self._settings
        body = await read_body(request, max_bytes=settings.max_body_bytes, seconds=settings.body_seconds)
        session = await self._session(request, body)
        if self._draining:
            raise self._unavailable("The router is shutting down.")
        return await until_gone(self._try_replicas(request, body, session), request.receive)

    async def _session(self, request: Request, body: bytes) -> str:
        named = request.headers.get("x-session-id") or ""
        if not named and "json" in request.headers.get("content-type", "") and b'"session_id"' in body:
            if len(body) > _INLINE_BODY_BYTES:
                named = await asyncio.to_thread(_session_in, body)
            else:
                named = _session_in(body)
        return named if len(named) <= MAX_SESSION_ID_CHARS else ""  # the replica refuses it

    def _candidates(self, session: str) -> list[Replica]:
        """All replicas, the one to try first in front."""
        if session:
            return [self._by_url[url] for url in self._ring.preference(session)]
        self._turn += 1
        count = len(self.replicas)
        return sorted(self.replicas, key=lambda replica: (replica.open_requests, (replica.index - self._turn) % count))

    async def _try_replicas(self, request: Request, body: bytes, session: str) -> Response:
        """The first answer. A request that was on a replica when it died goes to one other at most: it may be what kills them."""
        lost_on: set[str] = set()
        refusal: Response | None = None
        for replica in self._candidates(session):
            for again in (False, True):
                if not replica.up:
                    break
                try:
                    answer = await self._send(replica, request, body)
                except ReplicaLost as loss:
                    self.counts[replica.url, "lost"] += 1
                    if loss.reached:
                        lost_on.add(replica.url)
                    _log.warning("replica %s lost a request: %s", replica.url, loss)
                    if len(lost_on) > 1:
                        raise ApiError(
                            502,
                            "Two replicas failed on this request.",
                            type="server_error",
                            code="replica_failed",
                            next_step="See the replicas' logs.",
                            headers=_NO_RETRY,
                        ) from None
                    async with replica.checking:  # one look does for all requests that were lost with it
                        if replica.up:
                            await self._check(replica)
                    if again or not loss.reached:
                        break
                    # Still up: an idle connection that it had just closed. The session stays where its KV is.
                else:
                    if answer.status_code != 503:
                        return answer
                    refusal = answer  # it is shutting down or its engine is dead: another one may take the request
                    break
        if refusal is not None:
            return refusal
        if lost_on:
            raise ApiError(
                502,
                "The only replica that is up failed on this request.",
                type="server_error",
                code="replica_failed",
                next_step="See the replica's log.",
                headers=_NO_RETRY,
            )
        self.counts[UNAVAILABLE] += 1
        raise self._unavailable("The router is shutting down." if self._draining else "No replica is up.")

    async def _send(self, replica: Replica, request: Request, body: bytes) -> Response:
        """The answer of `replica`: whole, or a stream whose first event is there. Raises ReplicaLost."""
        upstream = self._upstream(replica, request, body)
        replica.open_requests += 1
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(replica.close_one)
            try:
                async with replica.wait():
                    response = await self._client.send(upstream, stream=True)
                stack.push_async_callback(response.aclose)
                if response.status_code not in _STATUSES:
                    raise ReplicaLost(f"The replica answers with status {response.status_code}.", reached=True)
                headers = [*_end_to_end(response.headers.raw), (b"x-kvscope-replica", str(replica.index).encode())]
                kind = response.headers.get("content-type", "")
                if response.status_code != 200 or not kind.startswith("text/event-stream"):
                    answer = Response(await _whole(replica, response), response.status_code)
                    answer.raw_headers = [*headers, (b"content-length", str(len(answer.body)).encode())]
                    self.counts[replica.url, "answered" if response.status_code < 400 else "refused"] += 1
                    return answer
                events = _Events(replica, response)
                first = await events.next()
            except asyncio.CancelledError:
                self.counts[replica.url, "client_gone"] += 1
                raise
            passage = _Passage(self, replica, events, first, stack.pop_all())
        stream = EventStream(
            passage.parts(), stall_seconds=self._settings.stall_seconds, on_end=passage.end, headers={}
        )
        stream.raw_headers = headers
        return stream

    def _upstream(self, replica: Replica, request: Request, body: bytes) -> httpx.Request:
        path, query = request.scope["raw_path"], request.scope["query_string"]
        try:
            url = httpx.URL(replica.url).copy_with(raw_path=path + (b"?" + query if query else b""))
        except httpx.InvalidURL as error:
            raise ApiError(400, f"The URL cannot be passed on: {error}.") from None
        if not url.raw_path.startswith(b"/v1/"):  # what /v1/../metrics becomes
            raise ApiError(404, "There is no such path.", code="unknown_url")
        headers = _end_to_end(request.scope["headers"])
        headers.append((b"accept-encoding", b"identity"))  # events are to be recognized
        return self._client.build_request(request.method, url, headers=headers, content=body or None)

    def _unavailable(self, reason: str) -> ApiError:
        return ApiError(
            503,
            reason,
            type="server_error",
            code="no_replica",
            next_step="See /health of the router.",
            headers={"Retry-After": str(max(1, round(self._settings.check_seconds)))},
        )


_STATUSES = frozenset(map(int, HTTPStatus))


class _Events:
    """The server-sent events of an answer, as many whole ones at a time as are there: a broken one would break its reader."""

    def __init__(self, replica: Replica, response: httpx.Response) -> None:
        self._replica = replica
        self._chunks = response.aiter_raw()
        self._rest = b""

    async def next(self) -> bytes | None:
        """None at the end. Raises ReplicaLost."""
        while True:
            async with self._replica.wait():
                chunk = await anext(self._chunks, None)
            if chunk is None:
                rest, self._rest = self._rest, b""
                return rest or None
            data = self._rest + chunk
            end = max(data.rfind(mark) + len(mark) if mark in data else 0 for mark in (b"\n\n", b"\r\n\r\n"))
            self._rest = data[end:]
            if end:
                return data[:end]
            if len(data) > _MAX_EVENT_BYTES:
                raise ReplicaLost(f"The replica sent an event of more than {_MAX_EVENT_BYTES} bytes.", reached=True)


class _Passage:
    """One stream on its way to the client. Both its ends are closed by end(), whoever ended it."""

    def __init__(
        self, router: Router, replica: Replica, events: _Events, first: bytes | None, stack: contextlib.AsyncExitStack
    ) -> None:
        self._router, self._replica, self._events, self._first, self._stack = router, replica, events, first, stack
        self._outcome = "client_gone"

    async def parts(self) -> AsyncIterator[bytes]:
        part = self._first
        try:
            while part is not None:
                yield part
                part = await self._events.next()
            self._outcome = "answered"
        except ReplicaLost as loss:
            self._outcome = "broken"
            _log.warning("replica %s broke a stream: %s", self._replica.url, loss)
            error = ApiError(
                502,
                f"The answer ends early. {loss}",
                type="server_error",
                code="replica_failed",
                next_step="Send the request again.",
            )
            yield f"data: {json.dumps(error.body())}\n\ndata: [DONE]\n\n".encode()

    def end(self) -> None:
        self._router.counts[self._replica.url, self._outcome] += 1
        self._router.close_later(self._stack)


async def _whole(replica: Replica, response: httpx.Response) -> bytes:
    parts, size = [], 0
    async with replica.wait():
        async for part in response.aiter_raw():
            parts.append(part)
            size += len(part)
            if size > _MAX_ANSWER_BYTES:
                raise ApiError(
                    502,
                    f"The answer is larger than {_MAX_ANSWER_BYTES} bytes.",
                    type="server_error",
                    code="answer_too_large",
                    next_step="Ask for less at once, or for a stream.",
                    headers=_NO_RETRY,
                )
    return b"".join(parts)


def _session_in(body: bytes) -> str:
    """The field `session_id` of a JSON body; "" when there is none, or the replica will refuse the body."""
    with contextlib.suppress(ValueError, RecursionError):
        parsed = json.loads(body)
        if isinstance(parsed, dict) and isinstance(parsed.get("session_id"), str):
            return str(parsed["session_id"])
    return ""


def _end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Without those that are for one connection only."""
    listed = list(headers)
    named = {
        token.strip().lower()
        for name, value in listed
        if name.lower() == b"connection"
        for token in value.decode("latin-1").split(",")
    }
    return [
        (name, value)
        for name, value in listed
        if (key := name.decode("latin-1").lower()) not in _HOP_BY_HOP and key not in named
    ]


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__


def create_router_app(router: Router, metrics: Callable[[Request], Awaitable[Response]]) -> Starlette:
    """The ASGI application of `router`; `metrics` answers /metrics."""
    routes = [
        Route("/v1/{path:path}", router.forward, methods=["GET", "POST"]),
        Route("/health", router.health, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
    ]
    app = Starlette(routes=routes, exception_handlers=EXCEPTION_HANDLERS, lifespan=router.lifespan)
    app.router.redirect_slashes = False
    return app
