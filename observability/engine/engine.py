"""The engine: takes requests in, steps them through the executor, hands tokens out. One step is schedule, execute, commit.

Live: a loop.EngineThread calls step(); other threads call add() and abort(), which take effect between steps.
Virtual time: `run(requests)` feeds requests in order of arrival, jumps over idle time and lets the executor fast-forward
through runs of equal decode steps; `on_tick` is called at fixed intervals of virtual time, for whoever records gauges.
"""

from __future__ import annotations

import heapq
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np

from observability.catalog import COMPONENTS, STEP_KINDS
from observability.engine.controller import Controller
from observability.engine.kv.manager import KVManager
from observability.engine.scheduler import CLASS_INDEX, DECODE, Scheduler
from observability.engine.types import (
    EngineConfig,
    Executor,
    Limits,
    PromptSpan,
    Request,
    StepPlan,
    StepResult,
)
from observability.errors import ConfigError, KvscopeError, QueueFullError, RequestError, ServiceError
from observability.telemetry.cells import KVState
from observability.telemetry.mechanisms import LOAD
from observability.telemetry.recorder import Telemetry

_log = logging.getLogger(__name__)
_SCHEDULE, _SAMPLE, _EMIT, _IDLE, _KV_MOVE = (
    COMPONENTS.index(name) for name in ("schedule", "sample", "emit", "idle", "kv_move")
)
T = TypeVar("T")
_KIND = {name: i for i, name in enumerate(STEP_KINDS)}
_RECENT_ENDS = 32  # ended requests from which the waiting time of a refused client is estimated


class Engine:
    """One replica. `executor.clock` is the clock of all times; telemetry must have been made with its `now`.

    Raises ConfigError when the pool is unbounded and time is real.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        telemetry: Telemetry,
        eos_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        if config.num_blocks is None and not executor.clock.virtual:
            raise ConfigError("num_blocks is unbounded and time is real.", next_step="Give the number of KV blocks.")
        self.config = config
        self.executor = executor
        self.telemetry = telemetry
        self.kv = KVManager(config, telemetry, executor)
        self.limits = Limits(config.max_num_batched_tokens, config.max_num_seqs)
        self.scheduler = Scheduler(config, self.kv, telemetry, executor, self.limits)
        self.controller: Controller | None = None
        if config.controller is not None:
            self.controller = Controller(config.controller, config, telemetry, self.limits, executor.clock.now())
            self.scheduler.on_admit = self._degrade
        self.work = threading.Event()  # set when add(), abort() or close() left something for the engine's thread
        self._clock = executor.clock
        self._eos = eos_token_ids
        self._inbox: deque[Request] = deque()
        self._aborts: deque[tuple[Request, str, str | None]] = deque()
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._deadlines: list[
            tuple[float, int, Request]
        ] = []  # heap; entries of ended requests are dropped when they come up
        self._added = 0
        self._front = threading.Lock()  # held by add() and while the inbox is emptied
        self._closed: str | None = None
        self._idle = False
        self._ticking = False  # run() publishes gauges at its ticks, and nobody looks in between
        self._ends: deque[float] = deque(maxlen=_RECENT_ENDS)

    # -- any thread --------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queues `request`, which has arrived (`arrival` is now or earlier).

        Raises RequestError when it can never be served, QueueFullError when max_queued requests wait already, and ServiceError after
        close(); telemetry then counts it by the error's outcome. max_tokens is cut to what max_model_len leaves.
        """
        self.telemetry.received(request.request_class, request.tenant)
        try:
            self._check(request)
            with self._front:
                if self._closed is not None:
                    raise ServiceError(f"The engine has stopped: {self._closed}", next_step="Start it again.")
                waiting = len(self._inbox) + self.scheduler.num_waiting
                if waiting >= self.config.max_queued:
                    raise QueueFullError(
                        f"The queue is full: {waiting} requests wait.", retry_after_seconds=self._retry_after()
                    )
                request.limit = min(request.params.max_tokens, self.config.max_model_len - request.prompt_len)
                self._inbox.append(request)
        except KvscopeError as error:
            self.telemetry.refused(request.request_class, error.outcome, request.tenant)
            raise
        self.work.set()

    def _check(self, request: Request) -> None:
        length, most = request.prompt_len, self.config.max_model_len - 1
        if request.limit:
            raise RequestError(f"Request {request.request_id} was added before.", next_step="Make a new Request.")
        if request.request_class not in CLASS_INDEX:
            raise RequestError(
                f"{request.request_class!r} is not a request class.",
                param="request_class",
                next_step=f"Use one of {', '.join(CLASS_INDEX)}.",
            )
        if length < 1:
            raise RequestError("The prompt is empty.", param="prompt", next_step="Give at least one token.")
        if length > most:
            raise RequestError(
                f"The prompt has {length} tokens; at most {most} fit this model's context with one token to generate.",
                param="prompt",
                next_step="Shorten the prompt or raise max_model_len.",
            )
        prompt = request.prompt
        numbers = np.asarray(prompt.hash_ids if isinstance(prompt, PromptSpan) else prompt)
        if numbers.ndim != 1 or numbers.dtype.kind != "i":
            raise RequestError("The prompt holds something that is not a token id.", param="prompt")
        if isinstance(prompt, PromptSpan):
            if not self._clock.virtual:
                raise RequestError(
                    "The prompt is known only by its length.",
                    param="prompt",
                    next_step="Give token ids, or use virtual time.",
                )
            if len(prompt.hash_ids) * prompt.part_tokens < length:
                raise RequestError(
                    f"{len(prompt.hash_ids)} hashes of {prompt.part_tokens} tokens do not cover {length} tokens.",
                    param="prompt",
                )

    def _retry_after(self) -> float:
        """Seconds until the queue has probably moved by one place, from the rate at which requests ended of late; 1 to 60."""
        ends = list(self._ends)
        if len(ends) < 2:
            return 1.0
        return min(max((self._clock.now() - ends[0]) / len(ends), 1.0), 60.0)

    def abort(self, request: Request, outcome: str = "abort", error: str | None = None) -> None:
        """Ends `request` before the next step, in whatever state it is; "stop" is for a stop string that matched.

        Does nothing when it has ended already. Its on_token is called once more, with no token and the outcome.
        """
        self._aborts.append((request, outcome, error))
        self.work.set()

    def call(self, work: Callable[[], T]) -> Future[T]:
        """Has `work` done on the engine's thread, between two steps. Its result or exception goes into the future; a future of an
        engine that has stopped gets a ServiceError."""
        future: Future[T] = Future()
        with self._front:
            if self._closed is None:
                self._calls.append((work, future))
            else:
                future.set_exception(
                    ServiceError(f"The engine has stopped: {self._closed}", next_step="Start it again.")
                )
        self.work.set()
        return future

    def close(self, reason: str) -> None:
        """Refuses new requests from now on; `reason` goes into the error that they get."""
        with self._front:
            self._closed = reason
        self.work.set()

    @property
    def num_running(self) -> int:
        return self.scheduler.num_running

    @property
    def num_waiting(self) -> int:
        return len(self._inbox) + self.scheduler.num_waiting

    # -- the engine's thread ------------------------------------------------------------------------------------------

    def step(self, until: float | None = None) -> bool:
        """Runs one step, or in virtual time a run of equal steps up to the first end past `until`. False: nothing to do.

        While there is nothing to do, each call books the time since the last one as idle and keeps the gauges fresh.
        """
        self._pick_up()
        if self._deadlines:
            self._interrupt_late()
        if not self.scheduler.has_work:
            if self.kv.in_flight:
                self.kv.wait_for_flights()
                self.telemetry.lap(_KV_MOVE)
            self._stay_idle()
            return False
        self.telemetry.begin_step()
        plan = self.scheduler.schedule(self.telemetry.last)
        began = self.telemetry.lap(_SCHEDULE)
        if plan.prefill or plan.decode:
            result = self.executor.execute(plan, self._next_event(until) if plan.repeats > 1 else until)
            self._commit(plan, result, began)
        else:
            self.scheduler.wait_for_load()
            self.telemetry.mechanisms.moved(LOAD, 0, self.telemetry.lap(_KV_MOVE) - began)
        if self.controller is not None and self.telemetry.last >= self.controller.next_look:
            self.controller.look(self.telemetry.last, self.kv.device.utilization, self.scheduler.in_line())
        self._publish_if_due()
        return True

    def _next_event(self, until: float | None) -> float | None:
        """When a run of equal steps must end at the latest: what it is told, a load that ends, a deadline, a request that becomes
        overdue, a look of the controller."""
        events = [until, self.kv.next_arrival(), self._deadlines[0][0] if self._deadlines else None]
        events.append(self.scheduler.next_overdue())
        events.append(self.controller.next_look if self.controller is not None else None)
        return min((event for event in events if event is not None), default=None)

    def _interrupt_late(self) -> None:
        """Ends the requests whose deadline has passed."""
        now = self._clock.now()
        while self._deadlines and (self._deadlines[0][0] <= now or self._deadlines[0][2].outcome is not None):
            deadline, _, request = heapq.heappop(self._deadlines)
            if request.outcome is None:
                late = now - deadline
                self._end(
                    request,
                    "deadline",
                    f"The deadline passed {late:.3f} s ago; {request.num_generated} tokens were generated.",
                )

    def _degrade(self, request: Request) -> None:
        assert self.controller is not None
        self.controller.degrade(request, self.telemetry.last)

    def run_until_idle(self) -> None:
        """Steps until every request has ended."""
        while self.step():
            pass

    def run(
        self,
        requests: Iterable[Request],
        *,
        serial: bool = False,
        tick_seconds: float | None = None,
        on_tick: Callable[[float], None] | None = None,
    ) -> None:
        """Serves `requests`, sorted by arrival and read one ahead, in virtual time, until the last has ended.

        `serial` submits each one when the one before has ended, and sets its arrival to that moment. `on_tick(now)` is called
        at the first step end (or idle moment) at or past each multiple of `tick_seconds` since the start, with gauges just published;
        they are then published at ticks and at the end only.
        A request that is refused gets the outcome of the error ("rejected", "invalid") and the reason as its error.
        """
        if not self._clock.virtual:
            raise ConfigError("run() drives virtual time.", next_step="Use loop.EngineThread in real time.")
        self._ticking = tick_seconds is not None
        try:
            self._drive(iter(requests), serial, tick_seconds or math.inf, on_tick)
        finally:
            self._ticking = False
        self._stay_idle()
        self.publish()

    def _drive(
        self, source: Iterator[Request], serial: bool, tick_seconds: float, on_tick: Callable[[float], None] | None
    ) -> None:
        clock = self._clock
        pending = next(source, None)
        start = clock.now()
        next_tick = start + tick_seconds
        while True:
            now = clock.now()
            if now >= next_tick:
                self.publish()
                if on_tick is not None:
                    on_tick(now)
                ticks = (now - start) // tick_seconds
                while next_tick <= now:  # rounding may put the quotient one too low
                    ticks += 1.0
                    next_tick = start + ticks * tick_seconds
            while pending is not None and (not self._has_work if serial else pending.arrival <= now):
                if serial:
                    pending.arrival = now
                self._submit(pending)
                pending = next(source, None)
            next_arrival = math.inf if pending is None or serial else pending.arrival
            event = min(next_arrival, next_tick)
            if self._has_work:
                self.step(event if event < math.inf else None)
            elif pending is None:
                break
            else:
                self._stay_idle()
                # However long the gap, nothing happens in it: one jump, unless somebody wants to look at each tick.
                clock.wait_until(next_arrival if on_tick is None else event)
                self._stay_idle()

    @property
    def _has_work(self) -> bool:
        return bool(self._inbox) or self.scheduler.has_work

    def _submit(self, request: Request) -> None:
        try:
            self.add(request)
        except KvscopeError as error:
            request.outcome, request.error = error.outcome, str(error)

    def _pick_up(self) -> None:
        """Takes in what other threads left: new requests, then aborts, so that an abort finds its request."""
        if not self._inbox and not self._aborts and not self._calls:
            return
        self.telemetry.lap(_IDLE if self._idle else _SCHEDULE)
        self._idle = False
        aborts = [self._aborts.popleft() for _ in range(len(self._aborts))]
        with self._front:
            while self._inbox:
                request = self._inbox.popleft()
                self.kv.open_table(request)
                request.trace = self.telemetry.arrive(
                    request.request_id,
                    request.request_class,
                    request.prompt_len,
                    request.arrival,
                    request.span,
                    request.tenant,
                )
                self.scheduler.add(request)
                if request.deadline is not None:
                    self._added += 1
                    heapq.heappush(self._deadlines, (request.deadline, self._added, request))
            calls = [self._calls.popleft() for _ in range(len(self._calls))]
        for work, future in calls:
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as failure:
                future.set_exception(failure)
                if not isinstance(failure, Exception):
                    raise
        for request, outcome, error in aborts:
            if request.outcome is None and request.trace is not None:
                if outcome == "stop" and not request.num_generated:
                    outcome = "abort"  # there is no text in which a stop string could have matched
                self._end(request, outcome, error)

    def _stay_idle(self) -> None:
        if self._idle:
            self.telemetry.lap(_IDLE)
            self.telemetry.begin_step()  # an arrival from here on falls into idle time
            if self.controller is not None and self.telemetry.last >= self.controller.next_look:
                self.controller.look(self.telemetry.last, self.kv.device.utilization, ())  # silence lets limits go, too
            self._publish_if_due()
        else:
            if not self._ticking:
                self.publish()
            self.telemetry.lap(_SCHEDULE)
            self.telemetry.begin_step()
            self._idle = True

    def _commit(self, plan: StepPlan, result: StepResult, began: float) -> None:
        """Books what ran: stored and new tokens, requests that finished, blocks that became full; then delivers."""
        telemetry, scheduler, kv = self.telemetry, self.scheduler, self.kv
        ends, tokens, decode = result.ends, result.tokens, plan.decode
        steps = len(ends)
        now = telemetry.lap(_SAMPLE)
        prefill_tokens = 0
        got_token: list[Request] = []
        for chunk in plan.prefill:
            request, end = chunk.request, chunk.start + chunk.tokens
            assert request.table is not None
            assert request.trace is not None
            prefill_tokens += chunk.tokens
            again = min(end, request.table.recompute_tokens) - chunk.start
            if again > 0:
                telemetry.recomputed(again)
            request.num_computed = end
            if chunk.samples:
                request.num_generated += 1
                if self.controller is not None and request.num_generated == 1:
                    self.controller.first_token(now - request.arrival, now)
                telemetry.prefilled(request.trace)
                telemetry.transition(request.trace, DECODE)
                scheduler.to_decode(request)
                got_token.append(request)
        if steps > 1:
            kv.grow(decode, steps)
        for request in decode:
            request.num_computed += steps
            request.num_generated += steps
        got_token += decode
        traces = [request.trace for request in got_token]
        if steps > 1:
            telemetry.tokens_run(traces, ends)  # type: ignore[arg-type]
            durations = ends.copy()
            durations[1:] -= ends[:-1]
            durations[0] -= began
            telemetry.step(_KIND["decode"], 0, len(decode), durations)
        else:
            telemetry.tokens(traces, now)  # type: ignore[arg-type]
            telemetry.step(_KIND[plan.kind], prefill_tokens, len(decode), now - began)

        became_full = [chunk.request for chunk in plan.prefill]
        if tokens is None:
            # Generated blocks of unknown content match nothing: release() registers them in one go.
            done = {request: "length" for request in got_token if request.num_generated >= request.limit}
        else:
            size, done = self.config.block_size, {}
            for request, token in zip(got_token, tokens, strict=True):
                request.output.append(token)
                if self._stops(request, token):
                    done[request] = "stop"
                elif request.num_generated >= request.limit:
                    done[request] = "length"
            became_full += [request for request in decode if request.num_computed % size == 0]
        if became_full:
            kv.register(became_full)
        if done:
            scheduler.remove_decoded(done)
            for request, reason in done.items():
                request.outcome = reason
                telemetry.finish(request.trace, reason, now)  # type: ignore[arg-type]
                self._has_ended(request, now)
        for i, request in enumerate(got_token):
            if request.on_token is not None:
                for _ in range(steps - 1):
                    self._deliver(request, None, None)
                self._deliver(request, None if tokens is None else tokens[i], done.get(request))
        telemetry.lap(_EMIT)

    def _stops(self, request: Request, token: int) -> bool:
        params = request.params
        return token in params.stop_token_ids or (token in self._eos and not params.ignore_eos)

    def _end(self, request: Request, outcome: str, error: str | None = None) -> None:
        """Ends a request that gets no further token."""
        self.scheduler.remove(request)
        request.outcome, request.error = outcome, error
        if request.span is not None:
            request.span.error = error
        assert request.trace is not None
        now = self.telemetry.lap(_SCHEDULE)
        self.telemetry.finish(request.trace, outcome, now)
        self._has_ended(request, now)
        self._deliver(request, None, outcome)

    def _has_ended(self, request: Request, now: float) -> None:
        self._ends.append(now)
        if self.controller is not None:
            self.controller.ended(request, now)

    def _deliver(self, request: Request, token: int | None, reason: str | None) -> None:
        if request.on_token is None:
            return
        try:
            request.on_token(request, token, reason)
        except Exception as error:  # one client's fault must not cost the others their tokens
            _log.exception("on_token of request %s failed; the request ends", request.request_id)
            request.on_token = None
            self.abort(request, "error", f"on_token failed: {error}")

    def fail_running(self, error: str) -> None:
        """Ends every running request with outcome "error"; waiting ones stay. For the caller of step() when it raised."""
        for request in list(self.scheduler.running()):
            self._end(request, "error", error)

    def end_all(self, outcome: str, error: str | None = None) -> None:
        """Ends every request, running, waiting or just added."""
        self._pick_up()
        for request in [*self.scheduler.running(), *self.scheduler.waiting()]:
            self._end(request, outcome, error)
        self._stay_idle()

    # -- measuring ----------------------------------------------------------------------------------------------------

    def kv_state(self) -> KVState:
        """The KV pool now. Exact; to be called on the engine's thread, between steps."""
        return self.kv.state(self.scheduler.running())

    def _publish_if_due(self) -> None:
        if not self._ticking and self.telemetry.due():
            self.publish()

    def publish(self) -> None:
        """Gives telemetry new gauges."""
        scheduler = self.scheduler
        self.telemetry.publish(self.kv_state(), scheduler.running_by_class, scheduler.waiting_by_class)

    def check_integrity(self) -> None:
        """Raises IntegrityError, saying what is broken, unless pool, index, tables, queues and telemetry states agree."""
        self.scheduler.check_integrity()
