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
#: Relative RMS error of stored KV that greedy decoding tolerates in practice (int8 sits near 0.005 to 0.01).
QUANT_ERROR_WARNING = 0.02
#: A source that has not written for this long is frozen.
STALE_AFTER_SECONDS = 60.0
