"""Service objectives as data: what is promised, and the bucket bound that measures it. Imports the catalogue only.

Rules, boards and the app take their thresholds from here, so that a line on a chart and an alert never disagree.
"""

from __future__ import annotations

from dataclasses import dataclass

from observability import catalog
from observability.catalog import Family


@dataclass(frozen=True, slots=True)
class LatencyObjective:
    """`target` of the requests stay at or under `threshold_seconds`, which is always a bucket bound of `family`."""

    name: str
    title: str
    family: Family
    threshold_seconds: float
    target: float

    def __post_init__(self) -> None:
        if self.threshold_seconds not in self.family.bounds:
            raise ValueError(f"{self.name}: {self.threshold_seconds} s is not a bucket bound of {self.family.name}")


TTFT = LatencyObjective("ttft", "Time to first token", catalog.TIME_TO_FIRST_TOKEN, 0.8, 0.99)
ITL = LatencyObjective("itl", "Inter-token latency", catalog.INTER_TOKEN_LATENCY, 0.1, 0.99)
E2E = LatencyObjective("e2e", "Request duration", catalog.REQUEST_DURATION, 20.0, 0.99)
LATENCY_OBJECTIVES = (TTFT, ITL, E2E)

#: Share of the KV pool held by running requests above which the next long prompt is likely to wait or preempt.
KV_USAGE_WARNING = 0.85
KV_USAGE_CRITICAL = 0.95


@dataclass(frozen=True, slots=True)
class QuantizationBudget:
    """What quantized KV may cost in accuracy. The first two are relative RMS errors; `attention_error`, which is also what one
    sequence may accumulate, is a bucket bound of kvscope_request_quantization_error_ratio."""

    stored_error: float  # of keys and values, of any layer group
    attention_error: float  # of the attention output
    agreed: float  # least share of tokens whose likeliest token stays the same
    divergence_nats: float  # mean KL(exact || stored) a token
    sequences_over: float  # share of sequences above attention_error

    def __post_init__(self) -> None:
        if self.attention_error not in catalog.REQUEST_QUANT_ERROR.bounds:
            raise ValueError(f"{self.attention_error} is not a bucket bound of {catalog.REQUEST_QUANT_ERROR.name}")


#: int8 of SmolLM2-135M is within it, int4 is not.
QUANTIZATION_BUDGET = QuantizationBudget(
    stored_error=0.02, attention_error=0.02, agreed=0.99, divergence_nats=0.001, sequences_over=0.01
)
#: Relative RMS error of stored KV that greedy decoding tolerates in practice (int8 sits near 0.005 to 0.01).
QUANT_ERROR_WARNING = QUANTIZATION_BUDGET.stored_error
#: A source that has not written for this long is frozen.
STALE_AFTER_SECONDS = 60.0
