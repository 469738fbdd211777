"""From token ids on the engine's thread to text on the event loop: hand-over, detokenization, stop strings.

Engine thread --TokenInbox.put--> event loop --Detokenizer.push--> text --StopStrings.push--> text safe to send.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

REPLACEMENT = "\ufffd"
#: UTF-8 characters have at most 4 bytes and a token at least one, so an unfinished character sits in the last 3 tokens.
_MAX_UNFINISHED_TOKENS = 3
#: A longer run of undecodable text is broken output rather than one unfinished character.
_MAX_HELD_TOKENS = 32


class Detokenizer:
    """Turns token ids into text as they come; the pieces joined are `decode(all ids)`.

    A piece that ends in U+FFFD is held back, because the next token may complete the character. Each push decodes a
    short window only: it starts one clean piece early, for decoders that treat the first token of a text differently
    (prefix and read offsets, the method of text-generation-inference). `decode` maps ids to text, special tokens left out.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._context = 0  # ids of the window whose text was handed out before; kept as context
        self._emitted = 0  # characters of decode(window) already handed out

    def push(self, token: int) -> str:
        """The text that `token` makes certain; "" while a character is unfinished."""
        self._window.append(token)
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT):
            return self._cut_broken(text) if len(self._window) - self._context > _MAX_HELD_TOKENS else ""
        piece = text[self._emitted :]
        if not piece:
            self._window.pop()  # adds no text (a special token); as context it would make the next token look first
            return ""
        del self._window[: self._context]
        self._context = len(self._window)
        self._emitted = len(self._decode(self._window))
        return piece

    def flush(self) -> str:
        """The text still held, when no more tokens come: an unfinished character shows as U+FFFD."""
        piece = self._decode(self._window)[self._emitted :] if self._window else ""
        self._window, self._context, self._emitted = [], 0, 0
        return piece

    def _cut_broken(self, text: str) -> str:
        """Hands out the start of a long undecodable run, cut between characters, so that the window stays short."""
        for cut in range(len(self._window) - _MAX_UNFINISHED_TOKENS - 1, self._context, -1):
            head = self._decode(self._window[:cut])
            if len(head) >= self._emitted and head + self._decode(self._window[cut:]) == text:
                piece = head[self._emitted :]
                del self._window[:cut]
                self._context = self._emitted = 0
                return piece
        return ""


class StopStrings:
    """Passes text on until one of `stops` is complete; text that may be the start of one is held back.

    The stop string that is complete first wins (of two complete at once, the longer); neither it nor anything after it
    is passed on. How the text is split into pieces makes no difference.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that is certain not to belong to a stop string; sets `matched` when one is complete."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        held = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := held.find(stop)) >= 0]
        if found:
            _, at, self.matched = min(found)
            self._held = ""
            return held[:at]
        keep = next(
            (n for n in range(min(self._longest - 1, len(held)), 0, -1) if self._starts_a_stop(held[-n:])),
            0,
        )
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def flush(self) -> str:
        """The text still held, when no more comes."""
        held, self._held = self._held, ""
        return held

    def _starts_a_stop(self, text: str) -> bool:
        return any(stop.startswith(text) for stop in self._stops)


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One call of `Request.on_token`: choice `index` got `token` (None: nothing), and ended by `outcome` (None: goes on)."""

    index: int
    token: int | None
    outcome: str | None


class Wakeups:
    """Wakes inboxes from the engine's thread with at most one pending call on the event loop, however many tokens."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._ready: deque[TokenInbox] = deque()
        self._scheduled = False

    def notify(self, inbox: TokenInbox) -> None:
        self._ready.append(inbox)
        if not self._scheduled:
            self._scheduled = True
            # A closed loop has no readers left; the engine must not fail for it.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        # Cleared first: a notify from now on schedules another call, so that no inbox is left asleep.
        self._scheduled = False
        while self._ready:
            self._ready.popleft().wake()


class TokenInbox:
    """The tokens of all choices of one HTTP request, from the engine's thread to the event loop.

    `put` never blocks. The inbox is bounded by the request itself: at most max_tokens ids for each choice, also when the
    client reads slowly or not at all.
    """

    def __init__(self, wakeups: Wakeups) -> None:
        self._wakeups = wakeups
        self._events: deque[TokenEvent] = deque()
        self._ready = asyncio.Event()

    def put(self, event: TokenEvent) -> None:
        """Called on the engine's thread."""
        self._events.append(event)
        self._wakeups.notify(self)

    def wake(self) -> None:
        self._ready.set()

    async def take(self) -> list[TokenEvent]:
        """All events so far, in order; waits for at least one."""
        while not self._events:
            self._ready.clear()
            if not self._events:  # put() may have come between the two checks
                await self._ready.wait()
        return [self._events.popleft() for _ in range(len(self._events))]
