"""OpenTelemetry of a server: a span for each request and the gen_ai.server.* metrics. API only; exporters/otlp.py sets the SDK up.

event loop: Tracing.call() -> Call.start() -> Request.span. Engine's thread: RequestSpan.entered(), note(), ended(), which only take
notes. A thread of its own builds span and measurements from them, so that a step never waits for either.
Names and attributes: docs/opentelemetry.md.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from queue import SimpleQueue
from typing import Any, NamedTuple

from opentelemetry import metrics, propagate, trace
from opentelemetry.context import Context, get_current
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from observability import catalog as c
from observability.telemetry.requests import RequestRecord

_log = logging.getLogger(__name__)
Value = str | bool | int | float | list[str]

PROVIDER = "kvscope"
#: gen_ai.server.* histograms: name, description, advised bounds in seconds (GenAI conventions, development status).
DURATION = (
    "gen_ai.server.request.duration", "Generative AI server request duration.",
    (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
)  # fmt: skip
FIRST_TOKEN = (
    "gen_ai.server.time_to_first_token", "Time to generate first token for successful responses.",
    (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)  # fmt: skip
OUTPUT_TOKEN = (
    "gen_ai.server.time_per_output_token", "Time per output token generated after the first token for successful responses.",
    (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)  # fmt: skip
GEN_AI_HISTOGRAMS = (DURATION, FIRST_TOKEN, OUTPUT_TOKEN)
#: error.type of requests that ended after they were queued; a refused one has the code of its error answer.
ERROR_TYPES = {"abort": "aborted", "error": "engine_error", "deadline": "deadline_exceeded"}
FIRST_TOKEN_EVENT, DEGRADED_EVENT = "kvscope.first_token", "kvscope.degraded"
_ENTERED = tuple(f"kvscope.{state}" for state in c.STATES)
_PHASE = tuple(f"kvscope.phase.{state}_seconds" for state in c.STATES)
_SERVED = ("stop", "length")
_MAX_UNWRITTEN = 10_000  # ended requests whose span is not built yet; more are given up
_MAX_MODEL_CHARS = 80


class Refusal(NamedTuple):
    """The end of a request that was never queued."""

    finished: float  # on the engine's clock
    code: str
    reason: str


class Tracing:
    """Makes the spans of one server. `clock` is the engine's, `model` the served one. Close it once the engine has stopped."""

    def __init__(self, model: str, clock: Callable[[], float], tracer: trace.Tracer, meter: metrics.Meter) -> None:
        self.model, self.clock, self.tracer = model, clock, tracer
        self._duration, self._first_token, self._output_token = (
            meter.create_histogram(name, "s", text, explicit_bucket_boundaries_advisory=bounds)
            for name, text, bounds in GEN_AI_HISTOGRAMS
        )
        self._unwritten: SimpleQueue[tuple[RequestSpan, RequestRecord | Refusal] | None] = SimpleQueue()
        self._gave_up = False
        self._writer = threading.Thread(target=self._write_all, name="spans", daemon=True)
        self._writer.start()

    @classmethod
    def of(
        cls,
        model: str,
        clock: Callable[[], float],
        tracer_provider: trace.TracerProvider | None = None,
        meter_provider: metrics.MeterProvider | None = None,
    ) -> Tracing | None:
        """With the providers given, or with the process's own; None where those do nothing, so that it costs nothing."""
        tracers = tracer_provider or trace.get_tracer_provider()
        meters = meter_provider or metrics.get_meter_provider()
        if all(type(provider).__module__.startswith(_API_MODULES) for provider in (tracers, meters)):
            return None
        name, release = "kvscope", version("kvscope")
        return cls(model, clock, tracers.get_tracer(name, release), meters.get_meter(name, release))

    def call(self, operation: str, headers: Mapping[str, str], address: tuple[str, int | None] | None) -> Call:
        """An HTTP request came in that asks for `operation` (gen_ai.operation.name).

        Its spans are children of the span that is current here, or else of the one that its W3C headers name.
        """
        context = get_current()
        if trace.get_current_span(context).get_span_context().is_valid:
            return Call(self, operation, context, SpanKind.INTERNAL, address)
        return Call(self, operation, propagate.extract(headers, context), SpanKind.SERVER, address)

    def close(self, timeout: float = 5.0) -> None:
        """Builds the spans that are left; gives up after `timeout` seconds."""
        self._unwritten.put(None)
        self._writer.join(timeout)

    def put(self, span: RequestSpan, end: RequestRecord | Refusal) -> None:
        """Has `span` built. Any thread."""
        if self._unwritten.qsize() < _MAX_UNWRITTEN:
            self._unwritten.put((span, end))
        elif not self._gave_up:
            self._gave_up = True
            _log.warning("more than %d requests ended before their spans were built; spans are missing", _MAX_UNWRITTEN)

    def _write_all(self) -> None:
        while (item := self._unwritten.get()) is not None:
            span, end = item
            try:
                span.write(end)
                self._measure(span, end)
            except Exception:  # whatever a span processor does, the next request gets its span
                _log.exception("the span of request %s could not be written", span.request_id)

    def _measure(self, span: RequestSpan, end: RequestRecord | Refusal) -> None:
        attributes, error = span.call.measured(), span.error_type(end)
        # In the span's context, from which the SDK takes exemplars of sampled requests.
        context = trace.set_span_in_context(span.span, span.call.context)
        served = {**attributes, "error.type": error} if error else attributes
        self._duration.record(max(end.finished - span.arrival, 0.0), served, context)
        if isinstance(end, Refusal) or error or end.first_token is None:
            return
        self._first_token.record(max(end.first_token - end.arrival, 0.0), attributes, context)
        if end.generated_tokens > 1 and end.last_token is not None:
            seconds = max(end.last_token - end.first_token, 0.0)
            self._output_token.record(seconds / (end.generated_tokens - 1), attributes, context)


#: Where the providers of the API live, which do nothing.
_API_MODULES = ("opentelemetry.trace", "opentelemetry.metrics")


@dataclass(slots=True)
class Call:
    """One HTTP request: what its spans have in common. The server fills in what it learns from the body."""

    tracing: Tracing
    operation: str
    context: Context
    kind: SpanKind
    address: tuple[str, int | None] | None  # of the socket that it came in by
    model: str | None = None  # as the client names it
    response_id: str = ""
    stream: bool = False
    attributes: dict[str, Value] = field(default_factory=dict)

    def measured(self) -> dict[str, Any]:
        """Attributes of its measurements. A model that is not served is left out: clients must not make series."""
        model = self.tracing.model
        named = {"gen_ai.request.model": model, "gen_ai.response.model": model} if self.model == model else {}
        return {"gen_ai.operation.name": self.operation, "gen_ai.provider.name": PROVIDER, **named, **self._server()}

    def _server(self) -> dict[str, Any]:
        if self.address is None:
            return {}
        host, port = self.address
        return {"server.address": host} if port is None else {"server.address": host, "server.port": port}

    def start(self, request_id: str, request_class: str, arrival: float) -> RequestSpan:
        """The span of one request that arrived at `arrival` (engine's clock)."""
        model = (self.model or "")[:_MAX_MODEL_CHARS]
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": self.operation,
            "gen_ai.provider.name": PROVIDER,
            **({"gen_ai.request.model": model} if model else {}),
            **({"gen_ai.request.stream": True} if self.stream else {}),
            **self._server(),
            **self.attributes,
            **({"kvscope.request.id": request_id} if request_id else {}),
            "kvscope.request.class": request_class,
        }
        now, now_ns = self.tracing.clock(), time.time_ns()
        zero_ns = now_ns - round(now * 1e9)
        span = self.tracing.tracer.start_span(
            f"{self.operation} {model}".rstrip(),
            self.context,
            self.kind,
            attributes,
            start_time=zero_ns + round(min(arrival, now) * 1e9),
        )
        return RequestSpan(self, span, request_id, min(arrival, now), zero_ns)


class RequestSpan:
    """Notes for the span of one request. Times are seconds on the engine's clock, put on the wall clock by one anchor a span: whatever
    the wall clock does meanwhile, no interval of it is negative.

    Made on the event loop; then the engine's thread writes, until ended() or refused() hand it over.
    """

    __slots__ = ("_notes", "_zero_ns", "arrival", "call", "error", "request_id", "span", "span_id", "trace_id")

    def __init__(self, call: Call, span: Span, request_id: str, arrival: float, zero_ns: int) -> None:
        self.call, self.span, self.request_id, self.arrival = call, span, request_id, arrival
        self.error: str | None = None  # what the engine says about the end
        context = span.get_span_context()
        #: In hex; "" when the trace is not kept.
        self.trace_id = f"{context.trace_id:032x}" if span.is_recording() and context.trace_flags.sampled else ""
        self.span_id = f"{context.span_id:016x}"
        self._zero_ns = zero_ns
        self._notes: list[tuple[float, str, dict[str, Value] | None]] = [(arrival, _ENTERED[0], None)]

    def entered(self, state: int, when: float) -> None:
        """The request is in `state` (index in catalog.STATES) from `when` on."""
        self._notes.append((when, _ENTERED[state], None))

    def degraded(self, reason: str, when: float) -> None:
        """The load controller serves it under reduced limits since `when`."""
        attributes: dict[str, Value] = {
            "kvscope.degrade_reason": reason,
            "kvscope.degrade_timestamp": self._wall_ns(when) / 1e9,
        }
        self._notes.append((when, DEGRADED_EVENT, attributes))

    def ended(self, record: RequestRecord) -> None:
        self.call.tracing.put(self, record)

    def refused(self, code: str, reason: str) -> None:
        """It was never queued: the client got an error with this code."""
        self.call.tracing.put(self, Refusal(self.call.tracing.clock(), code, reason))

    def _wall_ns(self, when: float) -> int:
        return self._zero_ns + round(max(when, self.arrival) * 1e9)

    @staticmethod
    def error_type(end: RequestRecord | Refusal) -> str | None:
        return end.code if isinstance(end, Refusal) else ERROR_TYPES.get(end.outcome)

    def write(self, end: RequestRecord | Refusal) -> None:
        """Builds the span and ends it. Not on the engine's thread: an event takes about 5 us."""
        span = self.span
        if span.is_recording():
            if isinstance(end, Refusal):
                span.set_status(Status(StatusCode.ERROR, end.reason))
            else:
                self._describe(span, end)
            if (error := self.error_type(end)) is not None:
                span.set_attribute("error.type", error)
        span.end(self._wall_ns(end.finished))

    def _describe(self, span: Span, record: RequestRecord) -> None:
        notes = self._notes
        if record.first_token is not None:
            notes.append((record.first_token, FIRST_TOKEN_EVENT, None))
        for when, name, attributes in sorted(notes, key=lambda note: note[0]):
            span.add_event(name, attributes, self._wall_ns(when))
        seconds = record.matrix.sum(axis=1).tolist()
        passed = {name for _, name, _ in notes}
        span.set_attributes(
            {
                "gen_ai.response.id": self.call.response_id,
                "gen_ai.response.model": self.call.tracing.model,
                "gen_ai.usage.input_tokens": record.prompt_tokens,
                "gen_ai.usage.output_tokens": record.generated_tokens,
                "kvscope.request.outcome": record.outcome,
                "kvscope.request.preemptions": record.preemptions,
            }
        )
        # A state that it never was in is absent, not 0.
        span.set_attributes({_PHASE[i]: seconds[i] for i, entered in enumerate(_ENTERED) if entered in passed})
        if record.scheduled is not None:  # before that nobody has looked
            span.set_attribute("gen_ai.usage.cache_read.input_tokens", record.cached_tokens)
        if record.outcome in _SERVED or (record.outcome == "deadline" and record.generated_tokens):
            span.set_attribute("gen_ai.response.finish_reasons", [record.outcome])
        if self.call.stream and record.first_token is not None:
            span.set_attribute("gen_ai.response.time_to_first_chunk", record.first_token - record.arrival)
        if record.max_itl is not None:
            span.set_attribute("kvscope.request.max_inter_token_seconds", record.max_itl)
        if record.outcome not in _SERVED:
            span.set_status(Status(StatusCode.ERROR, self.error or record.outcome))
