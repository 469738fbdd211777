"""The OpenAI-compatible HTTP server of one engine: routes, authorization, bounded bodies, streaming, shutdown.

HTTP request -> openai_types (checked body) -> Generation (one engine request a choice) -> JSON or server-sent events.
The engine runs on its own thread; all of this runs on one event loop, and long prompts are tokenized in worker threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hmac import compare_digest
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from observability.engine import openai_types as wire
from observability.engine.generation import Generation
from observability.engine.http_api import EXCEPTION_HANDLERS, read_body
from observability.engine.http_server import EventStream, until_gone
from observability.engine.loop import EngineThread
from observability.engine.openai_types import ApiError, ChatBody, CompletionBody, GenerationBody
from observability.engine.streaming import Wakeups
from observability.errors import ConfigError, KvscopeError
from observability.objectives import STALE_AFTER_SECONDS
from observability.telemetry.recorder import Telemetry
from observability.telemetry.tracing import Tracing

if TYPE_CHECKING:
    from observability.engine.model.loading import LoadedModel
    from observability.engine.sessions import SessionStore

_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions; chat may use what the context leaves
_INLINE_BODY_BYTES = 4096  # parsing and tokenizing more than this leaves the event loop
#: Made once: json.dumps with these settings would make an encoder for every token.
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Limits of the HTTP side. `token`: what clients must send as `Authorization: Bearer`; None asks for nothing."""

    token: str | None = field(default=None, repr=False)
    max_body_bytes: int = 4 * 1024 * 1024
    body_seconds: float = 30.0  # to receive a request's body
    stall_seconds: float = 60.0  # without the client reading a byte of a stream
    grace_seconds: float = 10.0  # for running requests at shutdown

    def __post_init__(self) -> None:
        if self.token is not None and not (self.token.isascii() and self.token.isprintable() and " " not in self.token):
            raise ConfigError(
                "The token holds characters that an HTTP header cannot carry.",
                next_step="Use ASCII letters, digits and punctuation.",
            )


def create_app(
    thread: EngineThread,
    loaded: LoadedModel,
    telemetry: Telemetry,
    settings: ServerSettings,
    metrics: ASGIApp | None = None,
    sessions: SessionStore | None = None,
    tracing: Tracing | None = None,
) -> Starlette:
    """The ASGI application in front of `thread`, which the caller starts and stops. `metrics` answers /metrics; `sessions`, which
    the caller closes, keeps and brings back what requests of a session have computed; `tracing`, which the caller closes as well,
    makes their spans.

    `app.state.service` is its Service.
    """
    service = Service(thread, loaded, telemetry, settings, sessions, tracing)
    routes = [
        Route("/v1/completions", service.completions, methods=["POST"]),
        Route("/v1/chat/completions", service.chat_completions, methods=["POST"]),
        Route("/v1/models", service.models, methods=["GET"]),
        Route("/v1/models/{model:path}", service.model, methods=["GET"]),
        Route("/health", service.health, methods=["GET"]),
    ]
    if metrics is not None:
        routes.append(Route("/metrics", metrics))
    app = Starlette(routes=routes, exception_handlers=EXCEPTION_HANDLERS, lifespan=service.lifespan)
    app.router.redirect_slashes = False
    app.state.service = service
    return app


@dataclass(frozen=True, slots=True)
class _Format:
    """How one endpoint writes its objects. `operation` is its gen_ai.operation.name."""

    operation: str
    prefix: str
    object: str
    chunk_object: str
    choice: Callable[[int, str, str | None], dict[str, Any]]
    delta: Callable[[int, str, str | None, bool], dict[str, Any]]  # index, text, finish reason, whether it is the first


def _completion_delta(index: int, text: str, finish_reason: str | None, first: bool) -> dict[str, Any]:
    return wire.completion_choice(index, text, finish_reason)


def _chat_delta(index: int, text: str, finish_reason: str | None, first: bool) -> dict[str, Any]:
    role = {"role": "assistant"} if first else {}
    return wire.chat_delta(index, {**role, "content": text}, finish_reason)


_COMPLETION = _Format(
    "text_completion", "cmpl", "text_completion", "text_completion", wire.completion_choice, _completion_delta
)
_CHAT = _Format("chat", "chatcmpl", "chat.completion", "chat.completion.chunk", wire.chat_choice, _chat_delta)


class Service:
    """The endpoints. One event loop calls everything; the engine's thread only puts tokens into inboxes."""

    def __init__(
        self,
        thread: EngineThread,
        loaded: LoadedModel,
        telemetry: Telemetry,
        settings: ServerSettings,
        sessions: SessionStore | None,
        tracing: Tracing | None,
    ) -> None:
        self._thread, self._engine, self._sessions, self._tracing = thread, thread.engine, sessions, tracing
        self._loaded, self._telemetry, self._settings = loaded, telemetry, settings
        self._clock = thread.engine.executor.clock
        self._started = int(time.time())
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")
        self._active: set[Generation] = set()
        self._wakeups: Wakeups | None = None
        self._draining = False
        config = thread.engine.config
        identity = f"{version('kvscope')} {loaded.name} {config} {thread.engine.executor.device}"
        self._fingerprint = "fp_" + hashlib.blake2b(identity.encode(), digest_size=5).hexdigest()

    @contextlib.asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self._wakeups = Wakeups(asyncio.get_running_loop())
        try:
            yield
        finally:
            self.abort_all()
            self._pool.shutdown(wait=False, cancel_futures=True)

    def drain(self) -> None:
        """Refuses new requests with 503 from now on; those in flight go on."""
        self._draining = True

    def abort_all(self) -> None:
        """Aborts every request in flight; their clients get an error."""
        for generation in self._active:
            generation.abort()

    # -- endpoints ----------------------------------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        self._authorize(request)
        return JSONResponse({"object": "list", "data": [self._model_object()]})

    async def model(self, request: Request) -> Response:
        self._authorize(request)
        self._check_model(request.path_params["model"])
        return JSONResponse(self._model_object())

    async def health(self, request: Request) -> Response:
        """200 while requests are served; 503 and the reason when the engine is dead, stuck or shutting down."""
        age = max(0.0, self._clock.now() - self._telemetry.last)
        reason = None
        if self._draining:
            reason = "The server is shutting down."
        elif not self._thread.alive:
            reason = f"The engine's thread is not running ({self._thread.error or 'it was stopped'})."
        elif age > STALE_AFTER_SECONDS:
            reason = f"The engine has not finished a step for {age:.0f} s."
        body = {
            "status": "ok" if reason is None else "unavailable",
            "reason": reason,
            "model": self._loaded.name,
            "running": self._engine.num_running,
            "waiting": self._engine.num_waiting,
            "last_update_age_seconds": round(age, 3),
            "last_step_error": self._thread.error,
            "snapshots": self._sessions.counts if self._sessions is not None else None,
        }
        return JSONResponse(body, 200 if reason is None else 503, {"Cache-Control": "no-store"})

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, CompletionBody, _COMPLETION)

    async def chat_completions(self, request: Request) -> Response:
        return await self._generate(request, ChatBody, _CHAT)

    # -- one generation -----------------------------------------------------------------------------------------------

    async def _generate(self, request: Request, kind: type[GenerationBody], form: _Format) -> Response:
        self._authorize(request)
        header = request.headers.get("x-kvscope-class")
        request_class = wire.request_class(header, None)
        received = self._clock.now()
        call = None
        if self._tracing is not None:
            call = self._tracing.call(form.operation, request.headers, request.scope.get("server"))
        try:
            raw = await self._read_body(request)
            arrival = self._clock.now()
            if self._draining:
                raise wire.unavailable("The server is shutting down.")
            body = await self._off_loop(len(raw), wire.parse_body, kind, raw)
            request_class = wire.request_class(header, body)
            if call is not None:
                call.model, call.stream = body.model, bool(body.stream)
            self._check_model(body.model)
            prompts = await self._off_loop(len(raw), self._tokenize, body)
            params = body.sampling(self._max_tokens(body, max(map(len, prompts))))
            deadline = body.deadline(arrival)
            session_id = wire.session_id(request.headers.get("x-session-id"), body)
            tenant = wire.tenant(request.headers.get("x-tenant"))
            # A session is one conversation: requests of several prompts are not what a snapshot could continue.
            sessions = self._sessions if session_id and len(prompts) == 1 else None
            if sessions is not None:
                await sessions.resume(session_id, prompts[0])
                if self._draining:
                    raise wire.unavailable("The server is shutting down.")
        except KvscopeError as error:
            # It never reaches Engine.add(), which counts all others.
            named = wire.tenant_name(request.headers.get("x-tenant"))
            self._telemetry.received(request_class, named)
            self._telemetry.refused(request_class, error.outcome, named)
            if call is not None:
                call.start("", request_class, received).refused(wire.error_code(error), str(error))
            raise
        assert self._wakeups is not None  # set before the first request (lifespan)
        identity = f"{form.prefix}-{uuid.uuid4().hex}"
        if call is not None:
            call.response_id, call.attributes = identity, _asked(body, session_id, tenant)
        generation = Generation(
            self._engine,
            self._wakeups,
            self._loaded.tokenizer.decode,
            identity=identity,
            prompts=prompts,
            params=params,
            request_class=request_class,
            arrival=arrival,
            deadline=deadline,
            tenant=tenant,
            session_id=session_id,
            call=call,
        )
        generation.submit()
        self._active.add(generation)

        def on_close() -> None:
            self._active.discard(generation)
            choice = generation.choices[0]
            if sessions is not None and choice.finish_reason is not None:
                sessions.save(session_id, [*prompts[0], *choice.request.output])

        generation.on_close = on_close
        headers = {"x-request-id": generation.identity}
        if body.stream:
            return EventStream(
                self._events(generation, form, body.include_usage),
                stall_seconds=self._settings.stall_seconds,
                on_end=generation.close,
                headers=headers,
            )
        try:
            await until_gone(generation.run(), request.receive)
        finally:
            generation.close()
        choices = [form.choice(choice.index, choice.text, choice.finish_reason) for choice in generation.choices]
        answer = self._envelope(generation, form.object) | {"choices": choices, "usage": generation.usage()}
        return JSONResponse(answer, headers=headers)

    async def _events(self, generation: Generation, form: _Format, include_usage: bool) -> AsyncIterator[bytes]:
        """Server-sent events: one a token, as many at once as are there; then usage if asked for, then [DONE]."""
        envelope = self._envelope(generation, form.chunk_object)
        if include_usage:
            envelope["usage"] = None
        try:
            async for deltas in generation.deltas():
                yield b"".join(
                    _event(envelope | {"choices": [form.delta(d.index, d.text, d.finish_reason, d.first)]})
                    for d in deltas
                )
            if include_usage:
                yield _event(envelope | {"choices": [], "usage": generation.usage()})
        except KvscopeError as error:
            yield _event(wire.api_error(error).body())
        yield b"data: [DONE]\n\n"

    def _envelope(self, generation: Generation, kind: str) -> dict[str, Any]:
        return {
            "id": generation.identity,
            "object": kind,
            "created": generation.created,
            "model": self._loaded.name,
            "system_fingerprint": self._fingerprint,
        }

    # -- checks -------------------------------------------------------------------------------------------------------

    def _authorize(self, request: Request) -> None:
        if self._settings.token is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not compare_digest(given.strip().encode(), self._settings.token.encode()):
            raise ApiError(
                401,
                "The API key is missing or wrong.",
                type="authentication_error",
                code="invalid_api_key",
                next_step="Send the server's token as `Authorization: Bearer`.",
                headers={"WWW-Authenticate": "Bearer"},
            )

    async def _read_body(self, request: Request) -> bytes:
        """The whole body. Raises ApiError when it is not JSON by its type (415), too large (413) or too slow (408).

        The type is required: without it a web page could send requests to a local server without the browser asking first.
        """
        media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media != "application/json" and not media.endswith("+json"):
            raise ApiError(
                415, f"Content-Type {media[:80]!r} is not JSON.", next_step="Send Content-Type: application/json."
            )
        return await read_body(request, max_bytes=self._settings.max_body_bytes, seconds=self._settings.body_seconds)

    async def _off_loop(self, size: int, call: Callable[..., T], *args: Any) -> T:
        """`call(*args)`, in a worker thread when `size` bytes would hold the event loop up."""
        if size <= _INLINE_BODY_BYTES:
            return call(*args)
        return await asyncio.get_running_loop().run_in_executor(self._pool, call, *args)

    def _check_model(self, name: str) -> None:
        if name != self._loaded.name:
            raise ApiError(
                404,
                f"The model {name[:80]!r} does not exist here.",
                param="model",
                code="model_not_found",
                next_step=f"Use {self._loaded.name!r}.",
            )

    def _model_object(self) -> dict[str, Any]:
        return {
            "id": self._loaded.name,
            "object": "model",
            "created": self._started,
            "owned_by": "kvscope",
            "max_model_len": self._engine.config.max_model_len,
        }

    def _tokenize(self, body: GenerationBody) -> list[list[int]]:
        """Token ids of each choice. Raises ApiError or RequestError for prompts that cannot be served."""
        if isinstance(body, ChatBody):
            return [self._loaded.tokenizer.encode_chat([message.for_template() for message in body.messages])]
        assert isinstance(body, CompletionBody)
        prompts: Sequence[str | list[int]] = body.prompts()
        most = self._engine.config.max_queued
        if len(prompts) > most:
            raise ApiError(
                400,
                f"prompt has {len(prompts)} entries; at most {most} can be queued.",
                param="prompt",
                code="invalid_value",
            )
        return [self._loaded.tokenizer.encode(p) if isinstance(p, str) else self._checked_ids(p) for p in prompts]

    def _checked_ids(self, ids: list[int]) -> list[int]:
        size = self._loaded.config.vocab_size
        if ids and not (min(ids) >= 0 and max(ids) < size):
            raise ApiError(400, f"prompt holds a token id outside 0..{size - 1}.", param="prompt", code="invalid_value")
        return ids

    def _max_tokens(self, body: GenerationBody, prompt_tokens: int) -> int:
        """Tokens to generate after a prompt. Raises ApiError when they, or one after the prompt, pass the context."""
        room = self._engine.config.max_model_len - prompt_tokens
        param, asked = body.token_limit()
        if asked is not None and asked < 1:
            raise ApiError(400, f"{param} = {asked}; it must be at least 1.", param=param, code="invalid_value")
        if room < 1 or (asked is not None and asked > room):
            raise ApiError(
                400,
                f"This model's maximum context length is {self._engine.config.max_model_len} tokens; the prompt has "
                f"{prompt_tokens} and {asked or 'at least 1'} are to be generated.",
                param="messages" if isinstance(body, ChatBody) else "prompt",
                code="context_length_exceeded",
                next_step=f"Shorten the prompt or lower {param}.",
            )
        if asked is not None:
            return asked
        return room if isinstance(body, ChatBody) else min(room, _DEFAULT_COMPLETION_TOKENS)


def _asked(body: GenerationBody, session_id: str, tenant: str) -> dict[str, Any]:
    """What a request's span says of the request, once that is checked: what the client set, nothing else."""
    asked = {
        "gen_ai.request.max_tokens": body.token_limit()[1],
        "gen_ai.request.temperature": body.temperature,
        "gen_ai.request.top_p": body.top_p,
        "gen_ai.request.seed": body.seed,
        "gen_ai.request.stop_sequences": [body.stop] if isinstance(body.stop, str) else body.stop,
        "gen_ai.conversation.id": session_id or None,
        "kvscope.tenant": tenant or None,
    }
    return {name: value for name, value in asked.items() if value is not None}


def _event(data: Mapping[str, Any]) -> bytes:
    return f"data: {_encode(data)}\n\n".encode()
