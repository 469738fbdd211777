"""Who runs in the next step: waiting requests, running requests, admission, preemption.

Continuous batching with chunked prefill (Orca, OSDI 2022; Sarathi-Serve, OSDI 2024): each step runs every decode, then as much prefill as
fits the limits, so that long prompts do not stall the tokens of others.

Order of waiting: preempted requests, then by class (batching.WaitingQueues). Only the head is considered; when the pool has no room for it,
nobody passes it. Among requests in prefill whose lengths are far apart the short ones run first (batching.split_prefill). Preemption
takes the request admitted last; its blocks go to the host where that is cheaper, else they are given up and computed again.
A request that runs alone always has enough blocks (EngineConfig), and the first of `decoding` is preempted last, so nothing can deadlock.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from itertools import chain, islice

from observability.catalog import CLASSES, COMPONENTS, PREEMPTION_REASONS, STATES
from observability.engine.arrivals import ArrivalModel
from observability.engine.batching import WaitingQueues, split_prefill
from observability.engine.kv.manager import KVManager
from observability.engine.kv.pool import IntegrityError
from observability.engine.types import Chunk, EngineConfig, Executor, Limits, Request, StepPlan
from observability.telemetry.recorder import Telemetry

_SCHEDULE = COMPONENTS.index("schedule")
QUEUED, KV_WAIT, PREFILL, DECODE, PREEMPTED, SWAPPED = (
    STATES.index(name) for name in ("queued", "kv_wait", "prefill", "decode", "preempted", "swapped")
)
_KV_EXHAUSTED, _KV_SWAP = (PREEMPTION_REASONS.index(name) for name in ("kv_exhausted", "kv_swap"))
CLASS_INDEX = {name: i for i, name in enumerate(CLASSES)}
_INTERACTIVE = "interactive"
_MAX_PASSED_OVER = 8  # steps in a row in which a request in prefill may compute nothing
_AHEAD = 4  # requests admitted to prefill although those before them fill the step: a short one may run first
_HORIZON_SECONDS = 10.0  # for which returns of prefixes are foreseen
_RESERVE_SECONDS = 1.0  # whose arrivals room is kept for
_WARM_SECONDS = 1.0  # between two looks at which prefixes will probably be asked for


class Scheduler:
    """Holds every request between add() and remove(): waiting, loading, prefilling or decoding. Used by the engine's thread only.

    `on_admit(request)` is called when a request is admitted for the first time.
    """

    def __init__(
        self, config: EngineConfig, kv: KVManager, telemetry: Telemetry, executor: Executor, limits: Limits
    ) -> None:
        self.config = config
        self.kv = kv
        self.limits = limits
        self.on_admit: Callable[[Request], None] | None = None
        self._telemetry = telemetry
        self._executor = executor
        self._virtual = executor.clock.virtual
        # Every decode runs in every step, so there are never more seats than tokens in a step.
        self._seats = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._preempted: OrderedDict[Request, None] = OrderedDict()
        self._queues = WaitingQueues(
            config.max_wait_seconds, class_queues=config.class_queues, on_overdue=self._became_overdue
        )
        # Each in order of admission, but for prefills that were finished out of turn.
        self.decoding: list[Request] = []
        self.prefilling: list[Request] = []
        self.loading: list[Request] = []  # admitted, and their blocks are on the way from the host
        self._passed_over: dict[Request, int] = {}  # by request in prefill, steps in a row without a token computed
        self.running_by_class = [0] * len(CLASSES)
        self.waiting_by_class = [0] * len(CLASSES)
        self._refused: tuple[Request, int] | None = None  # head without room, and device.releases when it was refused
        self._arrivals = ArrivalModel(_HORIZON_SECONDS) if config.predictive_admission else None
        self._warmed_at = executor.clock.now()

    @property
    def num_running(self) -> int:
        return len(self.decoding) + len(self.prefilling) + len(self.loading)

    @property
    def num_waiting(self) -> int:
        return len(self._preempted) + len(self._queues)

    @property
    def has_work(self) -> bool:
        return bool(self.decoding or self.prefilling or self.loading or self._preempted or self._queues)

    def running(self) -> Iterator[Request]:
        return chain(self.decoding, self.prefilling, self.loading)

    def waiting(self) -> Iterator[Request]:
        return chain(self._preempted, self._queues)

    def in_line(self) -> Iterator[Request]:
        """Requests that have no first token yet."""
        return chain(self._queues, self.loading, self.prefilling)

    def next_overdue(self) -> float | None:
        """When a waiting request may become the head by the passing of time alone."""
        return self._queues.next_overdue()

    def add(self, request: Request) -> None:
        """Puts a new request at the end of its queue."""
        self._queues.add(request)
        self.waiting_by_class[CLASS_INDEX[request.request_class]] += 1
        if self._arrivals is not None and request.table is not None:
            full = request.prompt_len // self.config.block_size
            keys = request.table.keys.get(0, full) if request.table.keys is not None and full else None
            self._arrivals.observe(request.arrival, request.request_class, request.prompt_len, keys)

    def _became_overdue(self, request: Request) -> None:
        self._telemetry.mechanisms.promoted(CLASS_INDEX[request.request_class])

    def remove(self, request: Request) -> None:
        """Takes a request out, in whatever state it is, and gives its blocks back."""
        if request in self._preempted or self._queues.remove(request):
            self._preempted.pop(request, None)
            self.kv.forget(request)
            self.waiting_by_class[CLASS_INDEX[request.request_class]] -= 1
            return
        for group in (self.decoding, self.prefilling, self.loading):
            if request in group:
                group.remove(request)
        self._leave_running(request)

    def remove_decoded(self, done: Collection[Request]) -> None:
        """Takes out several requests of `decoding` at once; `done` must look requests up fast."""
        self.decoding = [request for request in self.decoding if request not in done]
        for request in done:
            self._leave_running(request)

    def _leave_running(self, request: Request) -> None:
        self._executor.release(request)
        self.kv.release(request)
        self._passed_over.pop(request, None)
        self.running_by_class[CLASS_INDEX[request.request_class]] -= 1

    # -- one step ----------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan:
        """The next step at `now`. Call only with has_work; the plan is empty only while all that run wait for a load."""
        self.kv.compress(self.running())
        self.kv.compact(self.running())
        if self.loading:
            self._take_in_loaded()
        preempted = self._make_room()
        decode = self.decoding.copy()
        budget = max(self.limits.max_num_batched_tokens - len(decode), 0)
        if not preempted:
            self._admit(now, budget)
        if self.kv.host is not None:
            self._prefetch(now)
        prefill = self._fill(budget)
        if not prefill and not decode and not self.loading and not self.kv.in_flight:
            raise IntegrityError("requests are waiting, none runs, and none can be admitted")
        # After a preemption nobody was considered: whoever there is room for is admitted in the next step.
        repeats = self._repeats(decode) if self._virtual and decode and not prefill and not preempted else 1
        return StepPlan(prefill, decode, repeats)

    def _fill(self, budget: int) -> list[Chunk]:
        """Chunks for as much of the prefills as fits `budget` tokens."""
        prefill: list[Chunk] = []
        if not self.prefilling:
            return prefill
        chosen = self.prefilling
        if self.config.spread_limit and len(self.prefilling) > 1:
            split = split_prefill(
                [r.num_tokens - r.num_computed for r in self.prefilling], self.config.spread_limit,
                [self._passed_over.get(r, 0) for r in self.prefilling], _MAX_PASSED_OVER,
            )  # fmt: skip
            self._telemetry.mechanisms.batch_spread(split.spread)
            if len(split.chosen) < len(self.prefilling):
                self._telemetry.mechanisms.batch_split()
            chosen = [self.prefilling[i] for i in split.chosen]
        for request in chosen:
            if budget == 0:
                break
            budget -= self._add_chunk(prefill, request, budget)
        if self.config.spread_limit:
            runs = {chunk.request for chunk in prefill}
            for request in self.prefilling:
                self._passed_over[request] = 0 if request in runs else self._passed_over.get(request, 0) + 1
        return prefill

    def _add_chunk(self, prefill: list[Chunk], request: Request, budget: int) -> int:
        left = request.num_tokens - request.num_computed
        tokens = min(left, budget)
        if tokens < left and request.table.num_compressed:  # type: ignore[union-attr]
            # A chunk must not end inside a compressed block: it is quantized as a whole.
            tokens -= (request.num_computed + tokens) % self.config.block_size
        if tokens > 0:
            prefill.append(Chunk(request, request.num_computed, tokens, samples=tokens == left))
        return max(tokens, 0)

    def _make_room(self) -> bool:
        """Gives every decode the block that its next token needs, preempting from the end where there is none left."""
        needy = [r for r in self.decoding if r.num_computed >= r.table.capacity_tokens]  # type: ignore[union-attr]
        if not needy:
            return False
        self._telemetry.lap(_SCHEDULE)
        preempted = False
        while self.kv.pool.allocatable < len(needy):
            if self.kv.compress_harder(self.decoding):
                continue
            group = self.prefilling or self.decoding
            if self.kv.in_flight and len(self.decoding) + len(self.prefilling) == 1:
                self.kv.wait_for_flights()  # these blocks come back; what runs alone is not to make room for itself
                continue
            victim = group[-1]
            self._preempt(victim, group)
            if needy and needy[-1] is victim:
                needy.pop()
            preempted = True
        self.kv.grow(needy, 1)
        return preempted

    def _preempt(self, request: Request, group: list[Request]) -> None:
        """Takes the last of `group` out of the running requests."""
        table = request.table
        assert table is not None
        assert request.trace is not None
        computed = request.num_computed
        swapped = self.kv.swap_out(request)
        group.pop()
        table.recompute_tokens = max(table.recompute_tokens, computed)
        self._leave_running(request)
        request.num_preemptions += 1
        self._preempted[request] = None
        # Victims are taken from the end, so each one was admitted before those already there.
        self._preempted.move_to_end(request, last=False)
        self.waiting_by_class[CLASS_INDEX[request.request_class]] += 1
        self._telemetry.preempted(request.trace, _KV_SWAP if swapped else _KV_EXHAUSTED)

    # -- admission ---------------------------------------------------------------------------------------------------

    def _admit(self, now: float, budget: int) -> None:
        """Admits from the head of the line while prefills leave room in the step, and a few more that might run before them."""
        planned = sum(r.num_tokens - r.num_computed for r in self.prefilling)
        while self.num_running < self._seats and len(self.prefilling) + len(self.loading) < self.limits.max_prefills:
            if planned >= budget and not (self.config.spread_limit and len(self.prefilling) < _AHEAD):
                return
            head = self._admit_head(now)
            if head is None:
                return
            planned += head.num_tokens - head.num_computed

    def _admit_head(self, now: float) -> Request | None:
        """Admits the first waiting request if the pool has room for all its known tokens and for the growth of all decodes."""
        head = next(iter(self._preempted), None) or self._queues.head(now)
        if head is None:
            return None
        # Until blocks come back, the answer would be the same.
        if self.num_running and self._refused == (head, self.kv.device.releases):
            return None
        assert head.trace is not None
        again = head in self._preempted
        self._telemetry.lap(_SCHEDULE)
        blocks, seats = (0, 0) if again or not self.num_running else self._reserved_for_others(head, now)
        if self.num_running >= self._seats - seats:
            return None
        if not self.kv.admit(head, len(self.decoding) + blocks if self.num_running else 0):
            self._refused = (head, self.kv.device.releases)
            if not again and head.trace.state != KV_WAIT:
                self._telemetry.transition(head.trace, KV_WAIT)
            return None
        if again:
            del self._preempted[head]
        else:
            self._queues.remove(head)
            if self.on_admit is not None:
                self.on_admit(head)
        index = CLASS_INDEX[head.request_class]
        self.waiting_by_class[index] -= 1
        self.running_by_class[index] += 1
        assert head.table is not None
        if head.table.loading:
            self.loading.append(head)
            if not again and head.trace.state != KV_WAIT:
                self._telemetry.transition(head.trace, KV_WAIT)
        else:
            self._start(head)
        return head

    def _start(self, request: Request) -> None:
        self.prefilling.append(request)
        assert request.trace is not None
        self._telemetry.transition(request.trace, PREFILL)

    def _take_in_loaded(self) -> None:
        """Requests whose blocks have arrived go on to prefill."""
        self.kv.settle()
        waiting = []
        for request in self.loading:
            table = request.table
            assert table is not None
            if all(transfer.done() for transfer in table.loading):
                table.loading.clear()
                self._start(request)
            else:
                waiting.append(request)
        self.loading = waiting

    def wait_for_load(self) -> None:
        """Returns once some load has ended; to be called when the plan is empty."""
        if not self.loading:
            self.kv.wait_for_flights()
            return
        for transfer in self.loading[0].table.loading:  # type: ignore[union-attr]
            transfer.wait()

    def _reserved_for_others(self, head: Request, now: float) -> tuple[int, int]:
        """Blocks and seats that other classes leave to the interactive requests which will probably arrive soon, at most the warm-up
        share of all."""
        if self._arrivals is None or head.request_class == _INTERACTIVE or not self.kv.pool.bounded:
            return 0, 0
        if now - head.arrival >= self.config.max_wait_seconds:  # overdue: those it would make room for wait behind it
            return 0, 0
        tokens = self._arrivals.expected_tokens(now, _INTERACTIVE, _RESERVE_SECONDS)
        requests = self._arrivals.expected_requests(now, _INTERACTIVE, _RESERVE_SECONDS)
        share = self.config.prefetch_warmup_ratio
        blocks = min(math.ceil(tokens / self.config.block_size), int(share * self.kv.pool.size))
        return blocks, min(math.ceil(requests), int(share * self._seats))

    def _prefetch(self, now: float) -> None:
        """Brings back from the host what the next in line will hit, and what will probably be asked for."""
        self.kv.settle()
        size, spare = self.config.block_size, len(self.decoding)
        host = self.kv.host
        assert host is not None
        # The head is next. Those behind it may wait until what was brought for them is evicted again.
        sure = host.confidence >= self.config.prefetch_min_confidence
        ahead = self.config.prefetch_lookahead if sure else min(self.config.prefetch_lookahead, 1)
        for request in islice(self._queues, ahead):
            table = request.table
            assert table is not None
            hittable = (request.num_tokens - 1) // size
            if table.keys is not None and hittable and not table.looked_ahead:
                table.looked_ahead = True
                self.kv.prefetch(table.keys.get(0, hittable), spare)
        if self._arrivals is not None and self.config.prefetch_lookahead and now - self._warmed_at >= _WARM_SECONDS:
            self._warmed_at = now
            for candidate in self._arrivals.candidates(
                now, self.config.prefetch_min_confidence, self.config.prefetch_lookahead
            ):
                self.kv.prefetch(candidate.keys, spare)

    def _repeats(self, decode: list[Request]) -> int:
        """How often this decode-only step can run with nobody finishing, being admitted or being preempted.

        Waiting requests do not cut it short: the head was refused, decodes only take blocks, and seats and blocks come back when one
        finishes. Where another one becomes the head, Engine cuts the run (next_overdue).
        Blocks needed on the way are taken when the run has ended (Engine.commit), as far as it really went. Paged sequences get what single
        steps would give; contiguous ones among them may find another block adjacent than they would have found in between, and what acts
        between two steps (compression, compaction, prefetch) acts between two runs.
        """
        steps = min(r.limit - r.num_generated for r in decode)
        if self.kv.blocks_short(decode, steps) <= self.kv.pool.allocatable:
            return steps
        return 1 + min(r.table.capacity_tokens - r.num_computed - 1 for r in decode)  # type: ignore[union-attr]

    def to_decode(self, request: Request) -> None:
        """`request` has its prompt computed and its next token sampled."""
        self.prefilling.remove(request)
        self._passed_over.pop(request, None)
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
            ("loading", self.loading, (KV_WAIT, PREEMPTED, SWAPPED)),
            ("preempted", list(self._preempted), (PREEMPTED, SWAPPED)),
            ("queued", list(self._queues), (QUEUED, KV_WAIT)),
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
        self.kv.check_integrity(list(self.running()), list(self.waiting()))
