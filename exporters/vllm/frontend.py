"""Requests on their way into and out of vLLM's front end: what its statistics leave out.

vLLM drops an aborted request without a word to its statistics, tells no priority, and counts the time that a request was
preempted as prefill or decode. `install` puts an observer around three of its functions; each calls the original first and
returns what it returned. A fault of the observer is counted and never reaches vLLM. Where a function is not found, what it
would have told stays absent.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

_SCHEDULED, _PREEMPTED = 2, 3  # vllm.v1.engine.EngineCoreEventType


class Request:
    """A request in flight. `state` is vLLM's own record of it, read only when the request ends."""

    __slots__ = (
        "class_index",
        "external_id",
        "preempted_at",
        "preempted_decode",
        "preempted_prefill",
        "request_id",
        "state",
    )

    def __init__(self, request_id: str, external_id: str, class_index: int, state: Any) -> None:
        self.request_id = request_id
        self.external_id = external_id
        self.class_index = class_index
        self.state = state
        self.preempted_at: float | None = None
        self.preempted_prefill = self.preempted_decode = 0.0


def class_of(priority: object) -> str:
    """kvscope's class of a vLLM priority: lower is earlier, 0 is the default."""
    if type(priority) is not int or priority == 0:
        return "standard"
    return "interactive" if priority < 0 else "long_context"


class Frontend:
    """Requests in flight of one vLLM front end. Runs on the event loop of vLLM, like everything that calls it."""

    def __init__(
        self,
        classes: tuple[str, ...],
        on_received: Callable[[int], None],
        on_abort: Callable[[Request], None],
        on_fault: Callable[[str], None],
    ) -> None:
        self.classes = classes
        self.on_received, self.on_abort, self.on_fault = on_received, on_abort, on_fault
        self.requests: dict[str, Request] = {}
        self._by_external: dict[str, list[str]] = {}
        self._processor: weakref.ref[Any] | None = None

    @property
    def bound(self) -> bool:
        """Whether a request has shown that vLLM calls what is watched."""
        return self._processor is not None

    def in_flight(self) -> int:
        """Requests that came in and have not ended."""
        processor = self._processor() if self._processor is not None else None
        return len(self.requests if processor is None else processor.request_states)

    def added(self, processor: Any, request: Any) -> None:
        """vLLM took `request` (its EngineCoreRequest) in. A further chunk of a known request is not a new one."""
        if self._processor is None:
            self._processor = weakref.ref(processor)
        request_id = request.request_id
        if request_id in self.requests:
            return
        name = class_of(getattr(request, "priority", 0))
        index = self.classes.index(name if name in self.classes else self.classes[0])
        external = getattr(request, "external_req_id", None) or request_id
        self.requests[request_id] = Request(request_id, external, index, processor.request_states.get(request_id))
        self._by_external.setdefault(external, []).append(request_id)
        self.on_received(index)

    def aborted(self, request_ids: list[str]) -> None:
        """vLLM let these go before they ended."""
        for request_id in request_ids:
            if (request := self._pop(request_id)) is not None:
                self.on_abort(request)

    def finished(self, external_id: str) -> Request | None:
        """The request that vLLM reports as finished under the id that the client gave; None if it is not known.

        Samples of one prompt (n > 1) share that id: the one that vLLM no longer holds is the one that finished.
        """
        ids = self._by_external.get(external_id)
        if not ids:
            return None
        held = {} if self._processor is None else getattr(self._processor(), "request_states", {})
        return self._pop(next((i for i in ids if i not in held), ids[0]))

    def events(self, request_id: str, events: Any, in_prefill: bool) -> None:
        """Adds up how long a request was preempted, from the engine's events (their clock is monotonic)."""
        request = self.requests.get(request_id)
        if request is None:
            return
        for event in events:
            if event.type == _PREEMPTED:
                request.preempted_at = event.timestamp
            elif event.type == _SCHEDULED and request.preempted_at is not None:
                away, request.preempted_at = event.timestamp - request.preempted_at, None
                if in_prefill:
                    request.preempted_prefill += away
                else:
                    request.preempted_decode += away

    def _pop(self, request_id: str) -> Request | None:
        request = self.requests.pop(request_id, None)
        if request is not None:
            ids = self._by_external[request.external_id]
            ids.remove(request_id)
            if not ids:
                del self._by_external[request.external_id]
        return request


# -- the observer around vLLM's functions -----------------------------------------------------------------------------------

#: Front ends by the OutputProcessor that they watch; the newest one without a processor takes the next that shows up, because
#: vLLM makes its stat loggers right after its processor.
_watched: weakref.WeakKeyDictionary[Any, Frontend] = weakref.WeakKeyDictionary()
_unbound: list[weakref.ref[Frontend]] = []


def _frontend_of(processor: Any) -> Frontend | None:
    found = _watched.get(processor)
    while found is None and _unbound:
        found = _unbound.pop()()
        if found is not None:
            _unbound.clear()
            _watched[processor] = found
    return found


def _observe(owner: type, name: str, note: Callable[..., None]) -> bool:
    """Puts `note(result, self, *args)` behind a function of `owner`, once. False if there is no such function."""
    original = getattr(owner, name, None)
    if not callable(original):
        return False
    if getattr(original, "_kvscope", False):
        return True

    @functools.wraps(original)
    def observed(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        try:
            note(result, self, *args, **kwargs)
        except Exception:
            for frontend in list(_watched.values()):
                frontend.on_fault(name)
        return result

    observed._kvscope = True  # type: ignore[attr-defined]
    setattr(owner, name, observed)
    return True


def _added(_: object, processor: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    if (frontend := _frontend_of(processor)) is not None:
        frontend.added(processor, request)


def _aborted(result: list[str], processor: Any, *args: Any, **kwargs: Any) -> None:
    if result and (frontend := _watched.get(processor)) is not None:
        frontend.aborted(result)


def _events(_: object, stats: Any, req_id: str, events: Any, is_prefilling: bool, *args: Any, **kwargs: Any) -> None:
    for frontend in list(_watched.values()):
        frontend.events(req_id, events, is_prefilling)


def install(frontend: Frontend, output_processor: type, iteration_stats: type) -> tuple[bool, bool]:
    """Watches vLLM's OutputProcessor and IterationStats for `frontend`: whether requests, and preempted time, will be told."""
    requests = _observe(output_processor, "add_request", _added) and _observe(
        output_processor, "abort_requests", _aborted
    )
    preempted = requests and _observe(iteration_stats, "update_from_events", _events)
    if requests:
        _unbound.append(weakref.ref(frontend))
    return requests, preempted
