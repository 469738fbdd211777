"""One request as the recorder sees it: notes while it is in flight, and what remains when it has ended."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, sqrt
from typing import TYPE_CHECKING

import numpy as np

from observability import catalog as c
from observability.telemetry.phases import QUEUED
from observability.telemetry.tenants import Tenant

if TYPE_CHECKING:
    from observability.telemetry.tracing import RequestSpan

#: OpenMetrics allows 128 characters for all names and values of an exemplar's labels.
_MAX_EXEMPLAR_ID = 100


@dataclass(slots=True)
class QuantizationError:
    """What quantized KV cost one request, added up over those of its decoded tokens that were compared with exact KV."""

    scheme: str
    compared_tokens: int = 0
    agreed_tokens: int = 0  # whose likeliest token is the same
    divergence_nats: float = 0.0  # sum of KL(exact || stored)
    squared_error: float = 0.0  # of the attention output of sampled layers
    squared_signal: float = 0.0

    @property
    def relative(self) -> float | None:
        """Relative RMS error of the attention output; None where nothing was recomputed."""
        return sqrt(self.squared_error / self.squared_signal) if self.squared_signal > 0.0 else None


@dataclass(frozen=True, slots=True, eq=False)
class RequestRecord:
    """What one ended request went through. Times are seconds on the engine's clock; None: never reached."""

    request_id: str
    request_class: str
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    arrival: float
    scheduled: float | None
    first_token: float | None
    finished: float
    outcome: str
    preemptions: int
    matrix: np.ndarray  # float64 [STATES, COMPONENTS], seconds; sums to `finished - arrival`
    max_itl: float | None  # longest time between two of its tokens
    degraded: tuple[str, ...] = ()  # rules of the load controller under which it was served
    last_token: float | None = None
    quantization: QuantizationError | None = None  # None: none of its tokens was compared with exact KV


class RequestTrace:
    """The recorder's notes on one request in flight. Made by Telemetry.arrive; the engine only passes it back."""

    __slots__ = (
        "arrival", "cached_tokens", "class_index", "degraded", "exemplar", "first_token", "generated", "last_token", "length_bucket",
        "looked_up", "mark", "matrix", "max_itl", "outcome", "preemptions", "prefilled", "prompt_tokens", "quantization", "request_id",
        "scheduled", "since", "span", "state", "tenant",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        class_index: int,
        prompt_tokens: int,
        arrival: float,
        mark: list[float],
        span: RequestSpan | None,
        tenant: Tenant | None,
    ) -> None:
        self.request_id = request_id
        self.class_index = class_index
        self.prompt_tokens = prompt_tokens
        self.length_bucket = c.length_bucket(prompt_tokens)
        self.arrival = self.since = arrival
        self.mark = mark  # the vector at `since`, the start of the current state
        self.state = QUEUED
        self.matrix = [0.0] * (len(c.STATES) * len(c.COMPONENTS))
        self.scheduled: float | None = None
        self.first_token: float | None = None
        self.last_token: float | None = None
        self.generated = 0
        self.cached_tokens = 0
        self.preemptions = 0
        self.max_itl = -inf
        self.looked_up = False
        self.prefilled = False
        self.degraded: tuple[str, ...] = ()
        self.outcome: str | None = None
        self.span = span  # hears of each state and of the end
        self.quantization: QuantizationError | None = None
        self.tenant = tenant  # whose numbers it adds to
        # Ids come from clients: one that an exemplar cannot hold is left out.
        self.exemplar: tuple[tuple[str, str], ...] = ()
        if span is not None and span.trace_id:
            self.exemplar = (("trace_id", span.trace_id), ("span_id", span.span_id))
        elif 0 < len(request_id) <= _MAX_EXEMPLAR_ID:
            self.exemplar = (("request_id", request_id),)
