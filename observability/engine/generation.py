"""One HTTP request as the engine sees it: one engine request a choice, and the text that each has yielded so far."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from observability.engine import openai_types as wire
from observability.engine.engine import Engine
from observability.engine.openai_types import ApiError
from observability.engine.streaming import Detokenizer, StopStrings, TokenEvent, TokenInbox, Wakeups
from observability.engine.types import Request, SamplingParams
from observability.errors import KvscopeError
from observability.telemetry.tracing import Call

_SERVED = ("stop", "length", "deadline")  # outcomes after which a client has its text, or what there is of it


@dataclass(frozen=True, slots=True)
class Delta:
    """What one token added to choice `index`. `finish_reason` comes with the last; `first` marks the first."""

    index: int
    text: str
    finish_reason: str | None
    first: bool


class Choice:
    """One engine request and its text. `tokens` counts what was generated up to the end of `text`."""

    def __init__(self, index: int, request: Request, decode: Callable[[list[int]], str]) -> None:
        self.index = index
        self.request = request
        self.tokens = 0
        self.finish_reason: str | None = None
        self._pieces: list[str] = []
        self._detokenizer = Detokenizer(decode)
        self._stops = StopStrings(request.params.stop)

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def advance(self, event: TokenEvent) -> Delta:
        """Takes one event. Raises ApiError when the engine gave the request up."""
        if event.outcome is not None and event.outcome not in _SERVED:
            raise self._failure(event.outcome)
        first = self.tokens == 0
        piece = ""
        if event.token is not None:
            self.tokens += 1
            if event.outcome != "stop":  # the token that made the engine stop (end of sequence) is no text
                piece = self._stops.push(self._detokenizer.push(event.token))
        if event.outcome is not None:
            piece += self._stops.push(self._detokenizer.flush())
            piece += self._stops.flush()
            self.finish_reason = event.outcome
        if self._stops.matched is not None:
            self.finish_reason = "stop"
        self._pieces.append(piece)
        return Delta(self.index, piece, self.finish_reason, first)

    def _failure(self, outcome: str) -> ApiError:
        if outcome == "abort":
            return wire.unavailable("The server aborted the request, because it is shutting down.")
        reason = f"The engine failed on this request: {self.request.error or outcome}."
        return ApiError(500, reason, type="server_error", code="engine_error")


class Generation:
    """The choices of one HTTP request. submit(), then deltas() or run(), and close() in any case.

    `on_close` is called once, by the first close(). All methods belong to the event loop.
    """

    def __init__(
        self,
        engine: Engine,
        wakeups: Wakeups,
        decode: Callable[[list[int]], str],
        *,
        identity: str,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        request_class: str,
        arrival: float,
        deadline: float | None = None,
        tenant: str = "",
        session_id: str = "",
        call: Call | None = None,
    ) -> None:
        self.identity = identity
        self.created = int(time.time())
        self.on_close: Callable[[], None] | None = None
        self._engine, self._call = engine, call
        self._inbox = TokenInbox(wakeups)
        self._open = len(prompts)
        self._added = 0  # choices that the engine has taken
        self.choices = [
            Choice(
                index,
                Request(
                    identity if len(prompts) == 1 else f"{identity}-{index}",
                    prompt,
                    params,
                    request_class,
                    arrival,
                    self._deliver_to(index),
                    deadline,
                    tenant,
                    session_id,
                ),
                decode,
            )
            for index, prompt in enumerate(prompts)
        ]

    def _deliver_to(self, index: int) -> Callable[[Request, int | None, str | None], None]:
        put = self._inbox.put
        return lambda request, token, outcome: put(TokenEvent(index, token, outcome))

    def submit(self) -> None:
        """Adds all choices to the engine, or none: when one is refused, those added before are aborted and its error raised."""
        for choice in self.choices:
            request = choice.request
            if self._call is not None:
                request.span = self._call.start(request.request_id, request.request_class, request.arrival)
            try:
                self._engine.add(request)
            except KvscopeError as error:
                if request.span is not None:
                    request.span.refused(wire.error_code(error), str(error))
                self.close()
                raise
            self._added += 1

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """What each token added, as many tokens at once as are there, until all choices are finished. Raises ApiError."""
        while self._open:
            batch = []
            for event in await self._inbox.take():
                choice = self.choices[event.index]
                if event.outcome == "deadline" and not any(c.tokens for c in self.choices):
                    raise wire.deadline_exceeded("The deadline passed before a token was generated.")
                if choice.finish_reason is not None:
                    continue  # tokens that were under way when a stop string matched
                delta = choice.advance(event)
                batch.append(delta)
                if delta.finish_reason is not None:
                    self._open -= 1
                    if event.outcome is None:
                        self._engine.abort(choice.request, outcome="stop")
            if batch:
                yield batch

    async def run(self) -> None:
        """Waits until all choices are finished. Raises ApiError when the engine gave one up."""
        async for _ in self.deltas():
            pass

    def abort(self) -> None:
        """Asks the engine to end what it still has of this request; whoever reads deltas() gets an error."""
        for choice in self.choices[: self._added]:
            if choice.finish_reason is None:
                self._engine.abort(choice.request)
        self._added = 0

    def close(self) -> None:
        """Nobody reads any more: aborts what is left. Safe to call at any time, more than once."""
        self.abort()
        if self.on_close is not None:
            done, self.on_close = self.on_close, None
            done()

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object over all choices."""
        requests = [choice.request for choice in self.choices]
        return wire.usage(
            sum(request.prompt_len for request in requests),
            sum(choice.tokens for choice in self.choices),
            sum(request.num_cached for request in requests),
        )
