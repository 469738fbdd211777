"""The load controller: moves the scheduler's limits when the engine is in trouble, and back when the trouble is over.

The engine tells it about first tokens and ends, and calls look() about once an interval. Three rules:

- kv_utilization: too many blocks held shrinks max_num_batched_tokens, so that prompts take blocks more slowly.
- p99_latency: a P99 of time to first token too high falls back to serial admission, one request in prefill at a time.
- error_rate: too many failing requests take both limits back to where requests last did not fail.

What a rule sees answers to its limit, so hysteresis alone neither ends a to and fro between two limits nor gives up one that causes what the
rule sees: serial admission slow enough to keep P99 high, a budget so small that prompts hold their blocks for long. Hence two guards:
letting go that had to be taken back makes the next one wait, twice as long each time (_Hysteresis), and a limit is held on trial, so that
one which does not help is given up (_Trial).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from itertools import chain
from typing import Literal

import numpy as np

from observability.catalog import CONTROLLER_ACTIONS, CONTROLLER_RULES
from observability.engine.types import ControllerConfig, DegradeRecord, EngineConfig, Limits, Request
from observability.telemetry.recorder import Telemetry

_UTILIZATION, _LATENCY, _ERRORS = (
    CONTROLLER_RULES.index(name) for name in ("kv_utilization", "p99_latency", "error_rate")
)
_TIGHTEN, _RELAX, _ROLLBACK = (CONTROLLER_ACTIONS.index(name) for name in ("tighten", "relax", "rollback"))
_MOST_KEPT = 8192  # first tokens, and ends, of the window: at higher rates the newest ones speak for it
_MAX_FACTOR = 16  # longest wait as a multiple of the shortest
_FORGET_FACTOR = 16  # times the shortest wait, without a failure, until it is the shortest again
_SETTLED_HOLDS = 5  # times as long an action stands that brought its value between the bounds
_IMPROVED = 0.9  # of the value before: less counts as better

Verdict = Literal["tighten", "relax", "undo"]  # undo: the engine's own limit again
_ACTION: dict[Verdict, int] = {"tighten": _TIGHTEN, "relax": _RELAX, "undo": _RELAX}


class _Backoff:
    """Factor of a wait: doubles with each failure, 1 again when none came for long; the longer the wait, the longer that takes."""

    def __init__(self, config: ControllerConfig) -> None:
        self._forget_seconds = _FORGET_FACTOR * (config.window_seconds + config.patience * config.interval_seconds)
        self._factor = 1
        self._failed_at = -math.inf

    def factor(self, now: float) -> int:
        if now - self._failed_at >= self._forget_seconds * self._factor:
            self._factor = 1
        return self._factor

    def failed(self, now: float) -> None:
        self._factor = min(2 * self.factor(now), _MAX_FACTOR)
        self._failed_at = now

    def forget(self) -> None:
        self._factor = 1


class _Hysteresis:
    """Says "tighten" after `patience` looks in a row above `high`, "relax" after as many below `low`, None otherwise.

    After a tightening that took a relaxing back, it does not say "relax" again for a window; after the next such one for three, then seven.
    An unknown value says nothing, until a window has passed without any known one: then it is as good as a low one, or a rule would hold
    on for lack of traffic.
    """

    def __init__(self, low: float, high: float, config: ControllerConfig, now: float) -> None:
        self.low, self.high, self._config = low, high, config
        self._backoff = _Backoff(config)
        self._above = self._below = 0  # looks in a row
        self._relaxed = False  # the last move was one
        self._relax_from = now
        self._known_at = now

    def look(self, value: float | None, now: float) -> Verdict | None:
        if value is not None:
            self._known_at = now
            above, below = value > self.high, value < self.low
        else:
            above, below = False, now - self._known_at >= self._config.window_seconds
        self._above = self._above + 1 if above else 0
        self._below = self._below + 1 if below else 0
        if self._above >= self._config.patience:
            return "tighten"
        return "relax" if self._below >= self._config.patience and now >= self._relax_from else None

    def rest(self, now: float) -> None:
        """Looks count from here, and so does silence."""
        self._above = self._below = 0
        self._known_at = now

    def moved(self, verdict: Verdict, now: float) -> None:
        """Limits were moved as it said, or an action was undone."""
        if verdict == "tighten":
            if self._relaxed:
                self._backoff.failed(now)
            self._relax_from = now + (self._backoff.factor(now) - 1) * self._config.window_seconds
        self._relaxed = verdict == "relax"
        self._above = self._below = 0


class _Trial:
    """An action on trial: it stands for so many windows, and may go on while the value keeps falling.

    One that did not help is barred for a cool-down that doubles each time. One that did may come back at once, and then stands twice as
    long. Either way a load that never changes sees about as many actions as the logarithm of its time, until _MAX_FACTOR.
    """

    def __init__(self, config: ControllerConfig, windows: int) -> None:
        self._shortest_hold = windows * config.window_seconds
        self._backoff = _Backoff(config)
        self._first = self._best = math.inf
        self._hold = math.inf
        self._judged_at = math.inf  # the judgement before the next one, or the start
        self._barred_until = -math.inf
        self._helped = False  # at its last end

    @property
    def running(self) -> bool:
        return self._judged_at < math.inf

    def allowed(self, now: float) -> bool:
        return now >= self._barred_until

    def start(self, value: float, now: float) -> None:
        """The action was taken, or taken one step further."""
        if not self.running:
            self._first = self._best = value
            self._hold = self._shortest_hold * (self._backoff.factor(now) if self._helped else 1)
        self._judged_at = now

    def due(self, now: float, holds: int = 1) -> bool:
        return now - self._judged_at >= holds * self._hold

    def extend_if_better(self, value: float, now: float) -> bool:
        """Whether `value` is clearly lower than at the last judgement; the trial then goes on."""
        better = value <= _IMPROVED * self._best
        if better:
            self._best, self._judged_at = value, now
        return better

    def has_helped(self, value: float) -> bool:
        """Whether `value` is clearly lower than at the start."""
        return value <= _IMPROVED * self._first

    def end(self, now: float, *, helped: bool) -> None:
        self.stop()
        self._helped = helped
        if not helped:
            # First of all, what may have queued up for the action has to be gone and forgotten.
            self._barred_until = now + 2 * self._shortest_hold * self._backoff.factor(now)
        self._backoff.failed(now)

    def stop(self) -> None:
        """Ends it without a judgement."""
        self._judged_at = math.inf

    def unbar(self) -> None:
        """What the action did not help against is over."""
        self._barred_until = -math.inf

    def forget(self) -> None:
        """All is well without the action: next time starts afresh."""
        self.stop()
        self.unbar()
        self._backoff.forget()
        self._helped = False


class _Rule:
    """A rule that owns one limit, with both guards."""

    def __init__(self, low: float, high: float, config: ControllerConfig, now: float) -> None:
        self._hysteresis = _Hysteresis(low, high, config, now)
        # Until one window is over, the value still speaks of the time before, and until the next, of what that left behind.
        self._trial = _Trial(config, windows=2)

    def look(self, value: float | None, now: float) -> Verdict | None:
        """What to do with the limit; moved() is due once it was done. A value below `low` needs no trial: it lets go soon anyway."""
        low, high = self._hysteresis.low, self._hysteresis.high
        verdict = self._hysteresis.look(value, now)
        if value is not None and value >= low and self._trial.due(now, 1 if value > high else _SETTLED_HOLDS):
            if value > high and self._trial.extend_if_better(value, now):
                return None
            self._trial.end(now, helped=value <= high or self._trial.has_helped(value))
            return "undo"
        return None if verdict == "tighten" and not self._trial.allowed(now) else verdict

    def moved(self, verdict: Verdict, value: float | None, now: float) -> None:
        self._hysteresis.moved(verdict, now)
        if verdict == "tighten" and value is not None:
            self._trial.start(value, now)

    def healthy(self) -> None:
        """The value is low without the limit being held below the engine's own."""
        self._trial.forget()

    def rest(self, now: float) -> None:
        self._hysteresis.rest(now)

    def overruled(self, value: float | None, now: float, *, held: bool) -> None:
        """A rollback set the limit. If that holds it back, this rule has to find out when it can go."""
        self._trial.stop()
        if held:
            self._trial.start(self._hysteresis.high if value is None else value, now)


class Controller:
    """Load controller of one engine, used by its thread only. All times are seconds on the engine's clock.

    `limits` holds the engine's own limits and is moved in place, never beyond them: max_num_batched_tokens not below
    max(min_batched_tokens, max_num_seqs + block_size), so that a block of prefill fits beside all decodes, and max_prefills not below 1.
    """

    def __init__(
        self, config: ControllerConfig, engine: EngineConfig, telemetry: Telemetry, limits: Limits, now: float
    ) -> None:
        self.next_look = now + config.interval_seconds  # look() is due at the first step end at or past it
        self._config = config
        self._telemetry = telemetry
        self._limits = limits
        self._most_tokens, self._most_prefills = limits.max_num_batched_tokens, limits.max_prefills
        self._least_tokens = min(
            self._most_tokens, max(config.min_batched_tokens, engine.max_num_seqs + engine.block_size)
        )
        self._tokens_rule, self._prefills_rule = _UTILIZATION, _LATENCY  # which lowered that limit last
        self._holding: tuple[int, ...] = ()  # rules that hold a limit below the engine's own
        self._moved_at = now
        # Before any window has passed, the engine's own settings are the only ones that somebody vouched for.
        self._stable = (self._most_tokens, self._most_prefills)
        self._first_tokens: deque[tuple[float, float]] = deque(maxlen=_MOST_KEPT)  # when, time to first token
        self._ends: deque[tuple[float, bool]] = deque(maxlen=_MOST_KEPT)  # when, failed
        self._utilization = _Rule(config.utilization_low, config.utilization_high, config, now)
        self._latency = _Rule(config.p99_low_seconds, config.p99_high_seconds, config, now)
        self._errors = _Hysteresis(config.error_rate_low, config.error_rate_high, config, now)
        self._rollback = _Trial(config, windows=1)
        telemetry.mechanisms.limits(limits.max_num_batched_tokens, limits.max_prefills)

    # -- what happens between two looks ------------------------------------------------------------------------------

    def first_token(self, seconds: float, now: float) -> None:
        """A request got its first token, `seconds` after it arrived."""
        self._first_tokens.append((now, seconds))

    def ended(self, request: Request, now: float) -> None:
        """`request` has ended; `outcome` is set. An abort is the client's choice: it neither failed nor went well.

        Whatever the outcome, one that has waited too long for a first token, in vain, was slow.
        """
        if request.outcome != "abort":
            self._ends.append((now, request.outcome == "error"))
        if not request.num_generated and now - request.arrival > self._config.p99_high_seconds:
            self._first_tokens.append((now, now - request.arrival))

    def degrade(self, request: Request, now: float) -> None:
        """Notes on `request`, once a rule, that it is served under limits which a rule holds below the engine's own."""
        for rule in self._holding:
            reason = CONTROLLER_RULES[rule]
            if any(record.degrade_reason == reason for record in request.degraded):
                continue
            request.degraded.append(DegradeRecord(request.request_id, reason, now))
            assert request.trace is not None
            self._telemetry.degraded(request.trace, rule)
            if request.span is not None:
                request.span.degraded(reason, now)

    # -- a look ------------------------------------------------------------------------------------------------------

    def look(self, now: float, utilization: float, affected: Iterable[Request]) -> None:
        """Moves limits where a rule says so. `utilization` is the share of KV blocks that requests hold.

        `affected` are the requests waiting or in prefill, read once: how long they have waited counts, and each is noted as degraded
        while a rule holds.
        """
        self.next_look = now + self._config.interval_seconds
        requests = list(affected)
        p99, error_rate = self._p99_seconds(requests, now), self._error_rate(now)
        self._look_at_errors(error_rate, utilization, p99, now)
        if self._rollback.running:
            self._utilization.rest(now)
            self._latency.rest(now)
        else:
            self._look_at_utilization(utilization, now)
            self._look_at_latency(p99, now)
        if self._holding:
            for request in requests:
                self.degrade(request, now)

    def _p99_seconds(self, requests: Iterable[Request], now: float) -> float | None:
        """P99 of time to first token over the window; None: too few to say.

        Requests still without one count with their age as soon as that is too high: it can only grow, and when nobody gets a first token
        any more, they alone say so. The quantile is an observed value, at least the second highest of two or more: a single slow request
        never acts.
        """
        _drop_until(self._first_tokens, now - self._config.window_seconds)
        ages = (now - request.arrival for request in requests if not request.num_generated)
        slow = [age for age in ages if age > self._config.p99_high_seconds]
        count = len(self._first_tokens) + len(slow)
        if count < self._config.min_requests:
            return None
        values = chain((seconds for _, seconds in self._first_tokens), slow)
        return float(np.quantile(np.fromiter(values, np.float64, count), 0.99, method="lower"))

    def _error_rate(self, now: float) -> float | None:
        _drop_until(self._ends, now - self._config.window_seconds)
        count = len(self._ends)
        return sum(failed for _, failed in self._ends) / count if count >= self._config.min_requests else None

    def _look_at_utilization(self, utilization: float, now: float) -> None:
        verdict, factor = self._utilization.look(utilization, now), self._config.shrink_factor
        tokens, prefills = self._limits.max_num_batched_tokens, self._limits.max_prefills
        if verdict == "tighten":
            tokens = max(int(tokens * factor), self._least_tokens)
        elif verdict == "relax":
            tokens = min(max(math.ceil(tokens / factor), tokens + 1), self._most_tokens)
        elif verdict == "undo":
            tokens = self._most_tokens
        if verdict is not None and self._move(_UTILIZATION, _ACTION[verdict], now, tokens, prefills):
            self._utilization.moved(verdict, utilization, now)
        if verdict == "relax" and tokens == self._most_tokens:
            self._utilization.healthy()

    def _look_at_latency(self, p99: float | None, now: float) -> None:
        verdict = self._latency.look(p99, now)
        tokens, prefills = self._limits.max_num_batched_tokens, self._limits.max_prefills
        if verdict == "tighten":
            prefills = 1
        elif verdict == "relax":
            prefills = min(2 * prefills, self._most_prefills)
        elif verdict == "undo":
            prefills = self._most_prefills
        if verdict is not None and self._move(_LATENCY, _ACTION[verdict], now, tokens, prefills):
            self._latency.moved(verdict, p99, now)
        if verdict == "relax" and prefills == self._most_prefills:
            self._latency.healthy()

    def _look_at_errors(self, error_rate: float | None, utilization: float, p99: float | None, now: float) -> None:
        """A rollback stands for one window, longer if it helped and had to be repeated. The other rules rest meanwhile, then let go."""
        config, limits, trial = self._config, self._limits, self._rollback
        verdict = self._errors.look(error_rate, now)
        if (
            error_rate is not None
            and error_rate < config.error_rate_low
            and now - self._moved_at >= config.window_seconds
        ):
            self._stable = (limits.max_num_batched_tokens, limits.max_prefills)
        if trial.running:
            if trial.due(now):
                trial.end(now, helped=error_rate is None or trial.has_helped(error_rate))
        elif verdict == "relax":
            trial.unbar()
        elif verdict == "tighten" and error_rate is not None and trial.allowed(now):
            tokens, prefills = limits.max_num_batched_tokens, limits.max_prefills
            if self._move(_ERRORS, _ROLLBACK, now, *self._stable):
                self._errors.moved(verdict, now)
                trial.start(error_rate, now)
                if limits.max_num_batched_tokens != tokens:
                    held = limits.max_num_batched_tokens < self._most_tokens
                    self._utilization.overruled(utilization, now, held=held)
                if limits.max_prefills != prefills:
                    self._latency.overruled(p99, now, held=limits.max_prefills < self._most_prefills)

    def _move(self, rule: int, action: int, now: float, tokens: int, prefills: int) -> bool:
        """Sets and publishes both limits. False: they were there already."""
        limits = self._limits
        if (tokens, prefills) == (limits.max_num_batched_tokens, limits.max_prefills):
            return False
        if tokens < limits.max_num_batched_tokens:
            self._tokens_rule = rule
        if prefills < limits.max_prefills:
            self._prefills_rule = rule
        limits.max_num_batched_tokens, limits.max_prefills = tokens, prefills
        holds = ((self._tokens_rule, tokens < self._most_tokens), (self._prefills_rule, prefills < self._most_prefills))
        self._holding = tuple(sorted({holder for holder, below in holds if below}))
        self._moved_at = now
        self._telemetry.mechanisms.controller_changed(rule, action)
        self._telemetry.mechanisms.limits(tokens, prefills)
        return True


def _drop_until(samples: deque[tuple[float, float]] | deque[tuple[float, bool]], when: float) -> None:
    while samples and samples[0][0] <= when:
        samples.popleft()
