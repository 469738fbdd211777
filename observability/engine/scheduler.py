"""Who runs in the next step: waiting requests, running requests, admission, preemption.

Continuous batching with chunked prefill (Orca, OSDI 2022; Sarathi-Serve, OSDI 2024): each step runs every decode, then as much prefill as
fits max_num_batched_tokens, so that long prompts do not stall the tokens of others.

Order of waiting: preempted requests, then class interactive, then the rest, each first come first served. Only the head is considered; when
the pool has no room for it, nobody passes it. Preemption gives up all blocks of the request admitted last and computes them again later.
A request that runs alone always has enough blocks (EngineConfig), so the one admitted first always proceeds and nothing can deadlock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator
from itertools import chain

from observability.catalog import CLASSES, COMPONENTS, STATES
from observability.engine.kv.manager import KVManager
from observability.engine.kv.pool import IntegrityError
from observability.engine.types import Chunk, EngineConfig, Executor, Request, StepPlan
from observability.telemetry.recorder import Telemetry

_SCHEDULE = COMPONENTS.index("schedule")
QUEUED, KV_WAIT, PREFILL, DECODE, PREEMPTED = (
    STATES.index(name) for name in ("queued", "kv_wait", "prefill", "decode", "preempted")
)
CLASS_INDEX = {name: i for i, name in enumerate(CLASSES)}
_INTERACTIVE = "interactive"


class Scheduler:
    """Holds every request between add() and remove(): waiting, prefilling or decoding. Used by the engine's thread only."""

    def __init__(self, config: EngineConfig, kv: KVManager, telemetry: Telemetry, executor: Executor) -> None:
        self.config = config
        self.kv = kv
        self._telemetry = telemetry
        self._executor = executor
        self._virtual = executor.clock.virtual
        # Every decode runs in every step, so there are never more seats than tokens in a step.
        self._seats = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._preempted: OrderedDict[Request, None] = OrderedDict()
        self._interactive: OrderedDict[Request, None] = OrderedDict()
        self._standard: OrderedDict[Request, None] = OrderedDict()
        # In order of admission; all of `decoding` were admitted before all of `prefilling`, since prefill is first come first served.
        self.decoding: list[Request] = []
        self.prefilling: list[Request] = []
        self.running_by_class = [0] * len(CLASSES)
        self.waiting_by_class = [0] * len(CLASSES)
        self._refused: tuple[Request, int] | None = None  # head without room, and pool.releases when it was refused

    @property
    def num_running(self) -> int:
        return len(self.decoding) + len(self.prefilling)

    @property
    def num_waiting(self) -> int:
        return len(self._preempted) + len(self._interactive) + len(self._standard)

    @property
    def has_work(self) -> bool:
        return bool(self.decoding or self.prefilling or self._preempted or self._interactive or self._standard)

    def running(self) -> Iterator[Request]:
        return chain(self.decoding, self.prefilling)

    def waiting(self) -> Iterator[Request]:
        return chain(self._preempted, self._interactive, self._standard)

    def add(self, request: Request) -> None:
        """Puts a new request at the end of its queue."""
        queue = self._interactive if request.request_class == _INTERACTIVE else self._standard
        queue[request] = None
        self.waiting_by_class[CLASS_INDEX[request.request_class]] += 1

    def remove(self, request: Request) -> None:
        """Takes a request out, in whatever state it is, and gives its blocks back."""
        for queue in (self._preempted, self._interactive, self._standard):
            if request in queue:
                del queue[request]
                self.waiting_by_class[CLASS_INDEX[request.request_class]] -= 1
                return
        (self.decoding if request in self.decoding else self.prefilling).remove(request)
        self._leave_running(request)

    def remove_decoded(self, done: Collection[Request]) -> None:
        """Takes out several requests of `decoding` at once; `done` must look requests up fast."""
        self.decoding = [request for request in self.decoding if request not in done]
        for request in done:
            self._leave_running(request)

    def _leave_running(self, request: Request) -> None:
        self._executor.release(request)
        self.kv.release(request)
        self.running_by_class[CLASS_INDEX[request.request_class]] -= 1

    # -- one step ----------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """The next step. Call only with has_work; the plan is never empty."""
        preempted = self._make_room()
        decode = self.decoding.copy()
        budget = self.config.max_num_batched_tokens - len(decode)
        prefill: list[Chunk] = []
        for request in self.prefilling:
            if budget == 0:
                break
            budget -= self._add_chunk(prefill, request, budget)
        if not preempted:
            while budget > 0 and self.num_running < self._seats and (head := self._admit_head()) is not None:
                budget -= self._add_chunk(prefill, head, budget)
        if not prefill and not decode:
            raise IntegrityError("requests are waiting, none runs, and none can be admitted")
        repeats = self._repeats(decode) if self._virtual and not prefill else 1
        return StepPlan(prefill, decode, repeats)

    def _add_chunk(self, prefill: list[Chunk], request: Request, budget: int) -> int:
        left = request.num_tokens - request.num_computed
        tokens = min(left, budget)
        prefill.append(Chunk(request, request.num_computed, tokens, samples=tokens == left))
        return tokens

    def _make_room(self) -> bool:
        """Gives every decode the block that its next token needs, preempting from the end where there is none left."""
        needy = [r for r in self.decoding if r.num_computed >= r.table.capacity_tokens]  # type: ignore[union-attr]
        if not needy:
            return False
        self._telemetry.lap(_SCHEDULE)
        preempted = False
        while self.kv.pool.allocatable < len(needy):
            victim = (self.prefilling or self.decoding).pop()
            if needy and needy[-1] is victim:
                needy.pop()
            self._preempt(victim)
            preempted = True
        self.kv.grow(needy, 1)
        return preempted

    def _preempt(self, request: Request) -> None:
        table = request.table
        assert table is not None
        assert request.trace is not None
        table.recompute_tokens = max(table.recompute_tokens, request.num_computed)
        self._leave_running(request)
        request.num_preemptions += 1
        self._preempted[request] = None
        # Victims are taken from the end, so each one was admitted before those already there.
        self._preempted.move_to_end(request, last=False)
        self.waiting_by_class[CLASS_INDEX[request.request_class]] += 1
        self._telemetry.preempted(request.trace)

    def _admit_head(self) -> Request | None:
        """Admits the first waiting request if the pool has room for all its known tokens and for the growth of all decodes."""
        queue = self._preempted or self._interactive or self._standard
        if not queue:
            return None
        head = next(iter(queue))
        # Until blocks come back, the answer would be the same.
        if self._refused == (head, self.kv.pool.releases):
            return None
        assert head.trace is not None
        self._telemetry.lap(_SCHEDULE)
        if not self.kv.admit(head, spare=len(self.decoding)):
            self._refused = (head, self.kv.pool.releases)
            if queue is not self._preempted and head.trace.state != KV_WAIT:
                self._telemetry.transition(head.trace, KV_WAIT)
            return None
        del queue[head]
        index = CLASS_INDEX[head.request_class]
        self.waiting_by_class[index] -= 1
        self.running_by_class[index] += 1
        self.prefilling.append(head)
        self._telemetry.transition(head.trace, PREFILL)
        return head

    def _repeats(self, decode: list[Request]) -> int:
        """How often this decode-only step can run with nobody finishing, being admitted or being preempted.

        Waiting requests do not cut it short: decodes only take blocks, and seats and blocks come back when one finishes.
        Blocks needed on the way are taken when the run has ended (Engine.commit), as far as it really went. Paged sequences get what single
        steps would give; contiguous ones among them may find another block adjacent than they would have found in between.
        """
        steps = min(r.limit - r.num_generated for r in decode)
        if self.kv.blocks_short(decode, steps) <= self.kv.pool.allocatable:
            return steps
        return 1 + min(r.table.capacity_tokens - r.num_computed - 1 for r in decode)  # type: ignore[union-attr]

    def to_decode(self, request: Request) -> None:
        """`request` has its prompt computed and its next token sampled."""
        self.prefilling.remove(request)
        self.decoding.append(request)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every request is in one place, with the state and the blocks that belong there."""
        everyone = [*self.running(), *self.waiting()]
        if len(set(everyone)) != len(everyone):
            raise IntegrityError("a request is in two places")
        for request in everyone:
            if request.outcome is not None or request.trace is None or request.table is None:
                raise IntegrityError(f"{request.request_id} is held and has ended or was never picked up")
        for name, requests, states in (
            ("decoding", self.decoding, (DECODE,)),
            ("prefilling", self.prefilling, (PREFILL,)),
            ("preempted", list(self._preempted), (PREEMPTED,)),
            ("queued", [*self._interactive, *self._standard], (QUEUED, KV_WAIT)),
        ):
            for r in requests:
                if r.trace.state not in states:  # type: ignore[union-attr]
                    raise IntegrityError(f"{r.request_id} is {name}, telemetry has it in {STATES[r.trace.state]}")  # type: ignore[union-attr]
        for r in self.decoding:
            if r.num_computed != r.num_tokens - 1 or not 0 < r.num_generated < r.limit:
                raise IntegrityError(f"{r.request_id} decodes with {r.num_computed} of {r.num_tokens} tokens stored")
        for r in self.prefilling:
            if r.num_computed >= r.num_tokens:
                raise IntegrityError(f"{r.request_id} is prefilling with nothing left to compute")
        for r in self.waiting():
            if r.num_computed or r.table.blocks:  # type: ignore[union-attr]
                raise IntegrityError(f"{r.request_id} waits and holds blocks")
        for name, requests, told in (
            ("running", list(self.running()), self.running_by_class),
            ("waiting", list(self.waiting()), self.waiting_by_class),
        ):
            counted = [sum(CLASS_INDEX[r.request_class] == i for r in requests) for i in range(len(CLASSES))]
            if counted != told:
                raise IntegrityError(f"{name} requests by class are {counted}, the counters say {told}")
        self.kv.check_integrity(list(self.running()))
