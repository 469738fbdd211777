"""Telemetry: the object that the engine tells what it does. Plain lists, no locks, no label dictionaries, no exceptions.

A request goes received -> arrive -> transition ... tokens -> finish. Everything but `received` and `refused` is called on
the engine's thread; `snapshot` and `values` may be called from any thread at any time. They take no lock: a reading costs the
engine no more than the interpreter's thread switches.
"""

from __future__ import annotations

import functools
import logging
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from math import inf, isfinite
from typing import TYPE_CHECKING, Concatenate, ParamSpec

import numpy as np

from observability import catalog as c
from observability.buckets import BucketPlan
from observability.telemetry import phases as p
from observability.telemetry.cells import Cells, KVState, Published
from observability.telemetry.exponential import Exponential
from observability.telemetry.requests import QuantizationError, RequestRecord, RequestTrace
from observability.telemetry.snapshot import Exemplar, Histograms
from observability.telemetry.tenants import DEFAULT_MAX_TENANTS, Tenants

if TYPE_CHECKING:
    from observability.telemetry.tracing import RequestSpan

__all__ = ["KVState", "RequestRecord", "RequestTrace", "Telemetry"]

_log = logging.getLogger(__name__)
_CLASS_INDEX = {name: i for i, name in enumerate(c.CLASSES)}
_STANDARD = _CLASS_INDEX["standard"]
_OUTCOME_INDEX = {name: i for i, name in enumerate(c.OUTCOMES)}
_ERROR = _OUTCOME_INDEX["error"]
_SERVED = frozenset((_OUTCOME_INDEX["stop"], _OUTCOME_INDEX["length"]))
_HOST = c.TIERS.index("host")
_COMPONENTS = len(c.COMPONENTS)
_DEFAULT_BUCKETS = BucketPlan()

P = ParamSpec("P")


def _guarded(
    record: Callable[Concatenate[Telemetry, P], None],
) -> Callable[Concatenate[Telemetry, P], None]:
    """A fault in a record call is counted as `record_error` and logged once a call name; it never reaches the engine."""

    @functools.wraps(record)
    def call(self: Telemetry, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            record(self, *args, **kwargs)
        except Exception:
            self._anomalies[p.RECORD_ERROR] += 1
            if record.__name__ not in self._reported:
                self._reported.add(record.__name__)
                _log.exception("telemetry call %s failed; later failures of it are only counted", record.__name__)

    return call


class Telemetry(Cells):
    """Recorder of one engine. `virtual` marks simulated time; `wall_clock` gives Unix seconds for timestamps.

    `finished` keeps the newest `keep_finished` RequestRecords; `on_finish` is called with each one on the engine's thread.
    """

    def __init__(
        self,
        model: str,
        *,
        executor: str,
        virtual: bool,
        device: str,
        kv_dtype: str,
        clock: Callable[[], float],
        wall_clock: Callable[[], float] = time.time,
        keep_finished: int = 1024,
        on_finish: Callable[[RequestRecord], None] | None = None,
        buckets: BucketPlan = _DEFAULT_BUCKETS,
        max_tenants: int = DEFAULT_MAX_TENANTS,
    ) -> None:
        super().__init__(model, clock, (executor, "virtual" if virtual else "real", device, kv_dtype), buckets)
        self.finished: deque[RequestRecord] = deque(maxlen=keep_finished)
        self.on_finish = on_finish
        self._wall_clock = wall_clock
        self.started = wall_clock()  # Unix seconds since which everything is counted
        self.publish_interval_seconds = 1.0 if virtual else 0.25
        self._published_at = -inf
        self._tenants = Tenants(model, max_tenants)
        self._tenants_shown = 0
        self._reported: set[str] = set()
        self._busy_before = 0.0  # engine's time without idle time, up to the last step

    # -- requests: the threads that submit ------------------------------------------------------------------------

    @_guarded
    def received(self, request_class: str, tenant: str = "") -> None:
        """A request came in, whatever becomes of it. A tenant beyond the first `max_tenants` is counted as `other`."""
        with self._front:
            index = self._fold_class(request_class)
            self._received[index] += 1
            self._class_used[index] = True
            if tenant:
                self._folds[3] += self._tenants.admit(tenant)[1]

    @_guarded
    def refused(self, request_class: str, outcome: str, tenant: str = "") -> None:
        """A received request was refused before it was queued: it ends here, as `rejected` or `invalid`."""
        index = _OUTCOME_INDEX[outcome]
        with self._front:
            self._refused[_CLASS_INDEX.get(request_class, _STANDARD) * len(c.OUTCOMES) + index] += 1
            if (known := self._tenants.find(tenant)) is not None:
                known.has_been_refused(index)

    def _fold_class(self, request_class: str) -> int:
        index = _CLASS_INDEX.get(request_class)
        if index is None:
            self._folds[0] += 1
            return _STANDARD
        return index

    # -- requests: the engine's thread ----------------------------------------------------------------------------

    def arrive(
        self,
        request_id: str,
        request_class: str,
        prompt_tokens: int,
        arrival: float,
        span: RequestSpan | None = None,
        tenant: str = "",
    ) -> RequestTrace:
        """The engine picks a request up, which has been queued since `arrival` (engine clock). Unknown classes are standard.

        `span` is told of its states and its end; the id of its trace, if that is kept, goes into exemplars.
        """
        if not (isinstance(arrival, int | float) and isfinite(arrival)):
            self._anomalies[p.NON_FINITE] += 1
            arrival = self.last
        elif arrival > self.last:
            if arrival > self._clock():
                self._anomalies[p.NEGATIVE_INTERVAL] += 1
                arrival = self.last
            else:
                self.lap_to(p.SCHEDULE, arrival)
        class_index = _CLASS_INDEX.get(request_class, _STANDARD)
        self._class_used[class_index] = True  # also without `received`
        if len(self._tenants.seen) > self._tenants_shown:
            self._show_tenants()
        known = self._tenants.find(tenant)
        return RequestTrace(request_id, class_index, prompt_tokens, arrival, self.vector_at(arrival), span, known)

    def _show_tenants(self) -> None:
        """Those who came since the last call get their series, at the end of the layout."""
        new = self._tenants.seen[self._tenants_shown :]
        self._tenants_shown += len(new)
        self._layout = self._layout.extended(block for tenant in new for block in tenant.blocks(self.model))

    @_guarded
    def transition(self, trace: RequestTrace, state: int) -> None:
        """`trace` enters `state` (index in STATES) at the last lap; the time before goes to the state it leaves."""
        if trace.outcome is not None:
            self._anomalies[p.MILESTONE_ORDER] += 1
            return
        self._leave(trace, self.last, self.seconds.copy())
        trace.state = state
        self._state_used[state] = True
        if trace.span is not None:
            trace.span.entered(state, self.last)
        if trace.scheduled is None and state == p.PREFILL:
            trace.scheduled = self.last

    def _leave(self, trace: RequestTrace, when: float, vector: list[float]) -> None:
        row, matrix, at = trace.mark, trace.matrix, trace.state * _COMPONENTS
        for i, seconds in enumerate(vector):
            matrix[at + i] += seconds - row[i]
        trace.mark, trace.since = vector, when

    @_guarded
    def lookup(self, trace: RequestTrace, hittable: int, hit: int, host_hit: int = 0) -> None:
        """Result of the prefix lookup in tokens; `host_hit` of the `hit` tokens came from the host tier. Counts once a request,
        however often scheduling retries."""
        if trace.looked_up:
            return
        trace.looked_up = True
        if not 0 <= host_hit <= hit <= hittable <= trace.prompt_tokens:  # some misses would be negative
            self._anomalies[p.NEGATIVE_INCREMENT] += 1
            return
        bucket = trace.length_bucket
        trace.cached_tokens = hit
        self._lookups[bucket] += 1
        self._queried[bucket] += trace.prompt_tokens
        self._hittable[bucket] += hittable
        at = bucket * len(c.TIERS)
        self._hits[at] += hit - host_hit
        if host_hit:
            self._tier_used[_HOST] = True
            self._hits[at + _HOST] += host_hit

    @_guarded
    def regretted(self, tokens: Sequence[int]) -> None:
        """Tokens missed in a lookup for evictions within each of REGRET_WINDOWS. To be called once a lookup that is counted."""
        for i, missed in enumerate(tokens):
            self._add(self._regret, i, missed)

    def expect(self, *, states: Iterable[int] = (), tiers: Iterable[int] = (), layouts: Iterable[int] = ()) -> None:
        """Requests and blocks can come to be in these (indices in STATES, TIERS and LAYOUTS): they are counted from 0 on."""
        for used, indices in ((self._state_used, states), (self._tier_used, tiers), (self._layout_used, layouts)):
            for index in indices:
                used[index] = True

    @_guarded
    def preempted(self, trace: RequestTrace, reason: int = 0) -> None:
        """A running request goes back to the queue (index in PREEMPTION_REASONS). Enters the state `preempted` or `swapped`."""
        trace.preemptions += 1
        self._preemptions[reason] += 1
        self.transition(trace, p.SWAPPED if reason == p.KV_SWAP else p.PREEMPTED)

    @_guarded
    def recomputed(self, tokens: int, reason: int = 0) -> None:
        """`tokens` had been computed before and their blocks were given up (index in PREEMPTION_REASONS)."""
        self._add(self._recomputed, reason, tokens)

    @_guarded
    def degraded(self, trace: RequestTrace, rule: int) -> None:
        """The controller degraded a request (index in CONTROLLER_RULES); counts once a request and rule."""
        name = c.CONTROLLER_RULES[rule]
        if name not in trace.degraded:
            trace.degraded = (*trace.degraded, name)
            self.mechanisms.degraded(rule)

    @_guarded
    def prefilled(self, trace: RequestTrace) -> None:
        """The whole prompt is computed or cached. Counts once a request: after a preemption it is not a new prompt."""
        if not trace.prefilled:
            trace.prefilled = True
            self._add(self._prompt_tokens, trace.class_index, trace.prompt_tokens)
            if trace.tenant is not None:
                trace.tenant.tokens[0] += max(trace.prompt_tokens, 0)

    @_guarded
    def tokens(self, traces: Sequence[RequestTrace], now: float) -> None:
        """Each of `traces` got one token at `now`: its first, or one an inter-token latency after its last."""
        if not -inf < now < inf:
            self._anomalies[p.NON_FINITE] += 1
            now = self.last
        # Requests that decoded in the same steps share one interval, so most of a batch is one increment a class.
        shared: float | None = None
        interval = 0.0
        weights = [0] * len(c.CLASSES)
        for trace in traces:
            last = trace.last_token
            trace.last_token = now
            trace.generated += 1
            if last != shared:
                if last is None:
                    self._first_token(trace, now)
                    continue
                if shared is not None:
                    self._intervals(interval, weights)
                shared, interval, weights = last, now - last, [0] * len(c.CLASSES)
            elif last is None:
                self._first_token(trace, now)
                continue
            weights[trace.class_index] += 1
            if interval > trace.max_itl:
                trace.max_itl = interval
        if shared is not None:
            self._intervals(interval, weights)

    def _intervals(self, interval: float, weights: list[int]) -> None:
        """Counts weights[class] tokens that came `interval` after their predecessor."""
        if interval < 0.0:
            self._anomalies[p.NEGATIVE_INTERVAL] += sum(weights)
        bucket = bisect_left(self._itl.bounds, interval)
        cells, stride = self._itl.cells, self._itl.stride
        for i, weight in enumerate(weights):
            if weight:
                self._generation_tokens[i] += weight
                if interval >= 0.0:
                    cells[i * stride + bucket] += weight
                    cells[(i + 1) * stride - 1] += weight * interval
                    if self._itl.exponential is not None:
                        self._itl.exponential.add(i, interval, weight)

    def _first_token(self, trace: RequestTrace, now: float) -> None:
        trace.first_token = now
        self._generation_tokens[trace.class_index] += 1
        self._observe(self._ttft, trace, now - trace.arrival)
        if trace.tenant is not None and now >= trace.arrival:
            trace.tenant.first_token(now - trace.arrival)

    def _observe(self, histograms: Histograms, trace: RequestTrace, seconds: float) -> None:
        if seconds < 0.0:
            self._anomalies[p.NEGATIVE_INTERVAL] += 1
            return
        bucket, i, stride = bisect_left(histograms.bounds, seconds), trace.class_index, histograms.stride
        histograms.cells[i * stride + bucket] += 1
        histograms.cells[(i + 1) * stride - 1] += seconds
        if histograms.exponential is not None:
            histograms.exponential.add(i, seconds)
        if histograms.exemplars is not None and trace.exemplar:
            histograms.exemplars[i * (stride - 1) + bucket] = Exemplar(trace.exemplar, seconds, self._wall_clock())

    @_guarded
    def tokens_run(self, traces: Sequence[RequestTrace], ends: np.ndarray) -> None:
        """Each of `traces` got one token at each of `ends` (float64, ascending): `tokens` for a run of equal steps."""
        if len(ends) == 0:
            return
        self.tokens(traces, float(ends[0]))
        if len(ends) == 1 or not traces:
            return
        intervals = np.diff(ends)
        bad = ~((intervals >= 0.0) & (intervals < inf))
        if bad.any():
            self._anomalies[p.NEGATIVE_INTERVAL] += int(np.count_nonzero(bad)) * len(traces)
            intervals = intervals[~bad]
        counts = np.bincount(np.searchsorted(self._itl.bounds, intervals))
        used = [(int(i), int(counts[i])) for i in np.flatnonzero(counts)]
        total, longest = float(intervals.sum()), float(intervals.max(initial=-inf))
        weights, last, more = [0] * len(c.CLASSES), float(ends[-1]), len(ends) - 1
        for trace in traces:
            weights[trace.class_index] += 1
            trace.generated += more
            trace.last_token = last
            if longest > trace.max_itl:
                trace.max_itl = longest
        cells, stride = self._itl.cells, self._itl.stride
        for i, weight in enumerate(weights):
            if weight:
                self._generation_tokens[i] += weight * more
                for bucket, count in used:
                    cells[i * stride + bucket] += weight * count
                cells[(i + 1) * stride - 1] += weight * total
                if self._itl.exponential is not None:
                    self._itl.exponential.add_many(i, intervals, weight)

    def keep_exponential(self) -> dict[str, Exponential]:
        """From now on counts request duration, time to first token and inter-token latency in exponential buckets as well, for OTLP.
        By family name; asked for again, the same."""
        for histograms in (self._duration, self._ttft, self._itl):
            if histograms.exponential is None:
                histograms.exponential = Exponential(histograms.label_sets)
        kept = (self._duration, self._ttft, self._itl)
        return {h.family.name: h.exponential for h in kept if h.exponential is not None}

    @_guarded
    def finish(self, trace: RequestTrace, outcome: str, now: float) -> None:
        """`trace` ends at `now`, in whatever state it is. Only `stop` and `length` feed duration and phases.

        A served request without a scheduled time or a first token, or with milestones out of order, gives no duration
        sample and an anomaly instead: an interval to a time that was never set would be the host's uptime.
        """
        if trace.outcome is not None:
            self._anomalies[p.DUPLICATE_FINISH] += 1
            return
        index = _OUTCOME_INDEX.get(outcome)
        if index is None:
            self._folds[1] += 1
            index = _ERROR
        trace.outcome = outcome = c.OUTCOMES[index]
        self._ended[trace.class_index * len(c.OUTCOMES) + index] += 1
        if trace.tenant is not None:
            trace.tenant.has_ended(index)
            trace.tenant.tokens[1] += trace.generated
        if not isfinite(now):
            self._anomalies[p.NON_FINITE] += 1
            now = self.last
        if now > self.last:
            self.lap_to(p.EMIT, now)
        ordered = now >= trace.since
        if ordered:
            self._leave(trace, now, self.vector_at(now))
        scheduled, first, last = trace.scheduled, trace.first_token, trace.last_token
        matrix = np.array(trace.matrix)
        if index in _SERVED:
            if scheduled is None or first is None or last is None:
                self._anomalies[p.MISSING_MILESTONE] += 1
            elif not (ordered and trace.arrival <= scheduled <= first <= last <= now):
                self._anomalies[p.MILESTONE_ORDER] += 1
            else:
                duration = now - trace.arrival
                self._observe(self._duration, trace, duration)
                slower_than = max(bisect_left(self._tail_bounds, duration) - 1, 0)
                self._tail_requests[slower_than] += 1
                self._tail_seconds[slower_than] += matrix
                self._tail_lengths[0, slower_than, trace.length_bucket] += 1.0
                self._tail_lengths[1, slower_than, trace.length_bucket] += duration
        elif not ordered:
            self._anomalies[p.MILESTONE_ORDER] += 1
        record = RequestRecord(
            trace.request_id, c.CLASSES[trace.class_index], trace.prompt_tokens, trace.cached_tokens, trace.generated,
            trace.arrival, scheduled, first, now, outcome, trace.preemptions,
            matrix.reshape(len(c.STATES), _COMPONENTS), trace.max_itl if trace.max_itl >= 0.0 else None, trace.degraded,
            last,
            trace.quantization,
        )  # fmt: skip
        if trace.quantization is not None:
            self.quantization.ended(trace.quantization)
        self.finished.append(record)
        if trace.span is not None:
            trace.span.ended(record)
        if self.on_finish is not None:
            self.on_finish(record)

    # -- steps and the KV pool --------------------------------------------------------------------------------------

    @_guarded
    def step(self, kind: int, prefill_tokens: int, decode_tokens: int, durations: np.ndarray | float) -> None:
        """Model steps of one kind (index in STEP_KINDS), each of which took one of `durations` and ran these many tokens.

        Token counts are for one step: a run of n equal steps passes n durations and the tokens of one of them.
        """
        if isinstance(durations, (float, int)):  # not float | int, which makes a type at each call
            few = [durations]
            count = 1
        else:
            steps = np.asarray(durations, dtype=np.float64)
            count = len(steps)
            few = steps.tolist() if count < 16 else []
        if prefill_tokens < 0 or decode_tokens < 0:
            self._anomalies[p.NEGATIVE_INCREMENT] += 1
        else:
            self._step_tokens[0] += prefill_tokens * count
            self._step_tokens[1] += decode_tokens * count
        self._steps[kind] += count
        cells, stride = self._step_duration.cells, self._step_duration.stride
        for seconds in few:
            if 0.0 <= seconds < inf:
                cells[kind * stride + bisect_left(c.STEP_BOUNDS, seconds)] += 1
                cells[(kind + 1) * stride - 1] += seconds
            else:
                self._anomalies[p.NEGATIVE_INTERVAL if isfinite(seconds) else p.NON_FINITE] += 1
        if count >= 16:
            good = steps[(steps >= 0.0) & (steps < inf)]
            self._anomalies[p.NEGATIVE_INTERVAL] += count - len(good)
            counts = np.bincount(np.searchsorted(c.STEP_BOUNDS, good))
            for i in np.flatnonzero(counts):
                cells[kind * stride + int(i)] += int(counts[i])
            cells[(kind + 1) * stride - 1] += float(good.sum())
        busy = self.last - self.start - self.seconds[p.IDLE]
        worked, self._busy_before = busy - self._busy_before, busy
        if count == 1:
            self._stalls.observe(kind, worked, self.last)
        elif (
            count
        ):  # virtual time: the first has what went before it, and of the equal ones after it the longest stands for all
            after = float(steps[1:].sum())
            self._stalls.observe(kind, worked - after, self.last - after)
            self._stalls.observe(kind, float(steps[1:].max()), self.last)

    def _add(self, values: list[float], index: int, amount: float) -> None:
        if amount >= 0 and amount != inf:
            values[index] += amount
        else:
            self._anomalies[p.NEGATIVE_INCREMENT if amount < 0 else p.NON_FINITE] += 1

    @_guarded
    def allocated(self, layout: int, blocks: int) -> None:
        """`blocks` were handed out to a table of `layout` (index in LAYOUTS)."""
        self._layout_used[layout] = True
        self._add(self._allocated, layout, blocks)

    @_guarded
    def evicted(self, blocks: int) -> None:
        """The content of `blocks` cached blocks was given up."""
        self._add(self._evicted, 0, blocks)

    @_guarded
    def layout_fallback(self) -> None:
        """A request meant for adjacent blocks found none and went paged."""
        self._fallbacks[0] += 1

    @_guarded
    def quant_error(
        self,
        tensor: int,
        layer_group: str,
        scheme: str,
        squared_error: float,
        squared_signal: float,
        maximum: float,
        elements: int,
    ) -> None:
        """One measured block: sums over its sampled elements of (dequantized - exact)^2 and exact^2, and the largest |error|.

        `tensor` is an index in TENSORS. Relative RMS error = sqrt(squared_error / squared_signal); an all-zero block has none.
        """
        if not (isfinite(squared_error) and isfinite(squared_signal) and isfinite(maximum)):
            self._anomalies[p.NON_FINITE] += 1
        elif min(squared_error, squared_signal, maximum, elements) < 0:
            self._anomalies[p.NEGATIVE_INCREMENT] += 1
        else:
            new = self.quantization.error(tensor, layer_group, scheme, squared_error, squared_signal, maximum, elements)
            if new:
                self._layout = self._layout.extended(new)

    @_guarded
    def quant_compared(
        self,
        trace: RequestTrace,
        scheme: str,
        divergence: float,
        agreed: bool,
        attention: Sequence[tuple[str, float, float]],
    ) -> None:
        """One decoded token of `trace` was also computed with the exact values of all its quantized blocks.

        `divergence` is KL(exact || stored) in nats, `agreed` whether the likeliest token is the same. `attention` has, by layer group,
        the sums over sampled layers of (attention output over stored KV - over exact KV)^2 and of the latter's squares.
        """
        sums = [number for _, *pair in attention for number in pair]
        if not all(map(isfinite, (divergence, *sums))):
            self._anomalies[p.NON_FINITE] += 1
            return
        if divergence < 0.0 or min(sums, default=0.0) < 0.0:
            self._anomalies[p.NEGATIVE_INCREMENT] += 1
            return
        own = trace.quantization
        if own is None:
            own = trace.quantization = QuantizationError(scheme)
        own.compared_tokens += 1
        own.agreed_tokens += agreed
        own.divergence_nats += divergence
        for _, squared_error, squared_signal in attention:
            own.squared_error += squared_error
            own.squared_signal += squared_signal
        new = self.quantization.compared(scheme, divergence, agreed, attention)
        if new:
            self._layout = self._layout.extended(new)

    # -- gauges -----------------------------------------------------------------------------------------------------

    def due(self) -> bool:
        """Whether gauges should be published again: 0.25 s after the last time, or 1 s of virtual time."""
        return self.last - self._published_at >= self.publish_interval_seconds

    @_guarded
    def publish(self, kv: KVState, running: Sequence[int], waiting: Sequence[int]) -> None:
        """New gauges: the pool, and requests running and waiting by class. To be called at step ends when due(), when
        the engine goes idle, and about once a second while it stays idle, so that `last update` tells frozen from idle."""
        if len(self._tenants.seen) > self._tenants_shown:  # of a tenant whose requests were all refused
            self._show_tenants()
        self._published = Published(self._wall_clock(), kv, tuple(running), tuple(waiting))
        self._published_at = self.last
