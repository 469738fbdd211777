"""What OpenTelemetry costs: on the engine's thread with and without spans and exponential buckets, and what other threads do for it.

    python benchmarks/tracing.py [--json FILE]

Variants take turns, so that what else the machine does meets all of them; medians, and ratios within the run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from opentelemetry import metrics
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.sdk.metrics.export import MetricsData, ResourceMetrics, ScopeMetrics
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from exporters.otlp import to_metrics
from figures import Parser, Row, keep
from observability import catalog as c
from observability.telemetry.recorder import Telemetry
from observability.telemetry.tracing import RequestSpan, Tracing

PREFILL, DECODE = c.STATES.index("prefill"), c.STATES.index("decode")
FORWARD = c.COMPONENTS.index("forward_decode")


class Nowhere(SpanExporter):
    def export(self, spans: Any) -> SpanExportResult:
        return SpanExportResult.SUCCESS


class Kept(Tracing):
    """Ended spans stay in the queue until `write_one`, so that each side is timed by itself."""

    def _write_all(self) -> None:
        pass

    @property
    def unwritten(self) -> SimpleQueue[Any]:
        return self._unwritten

    def write_one(self) -> None:
        span, end = self._unwritten.get()
        span.write(end)
        self._measure(span, end)


def recorder(exponential: bool) -> Telemetry:
    t = Telemetry("m", executor="torch", virtual=False, device="cpu", kv_dtype="int8", clock=time.perf_counter)
    if exponential:
        t.keep_exponential()
    return t


def life(t: Telemetry, span: RequestSpan | None) -> None:
    """One request from arrival to end, two tokens."""
    request = t.arrive("r", "standard", 700, t.last, span)
    t.lookup(request, 688, 256)
    t.transition(request, PREFILL)
    t.prefilled(request)
    t.transition(request, DECODE)
    t.tokens([request], t.lap(FORWARD))
    t.tokens([request], t.lap(FORWARD))
    t.finish(request, "length", t.last)


def medians_us(
    calls: dict[str, Callable[[], object]], rounds: int, before: Callable[[], object] = lambda: None
) -> dict[str, float]:
    times: dict[str, list[int]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            before()
            start = time.perf_counter_ns()
            call()
            times[name].append(time.perf_counter_ns() - start)
    return {name: statistics.median(taken) / 1e3 for name, taken in times.items()}


def measure() -> dict[str, float]:
    """Figures by name; the unit is the end of the name."""
    plain, both = recorder(False), recorder(True)
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(Nowhere()))
    tracing = Kept("m", time.perf_counter, provider.get_tracer("bench"), metrics.NoOpMeterProvider().get_meter("bench"))
    call = tracing.call("chat", {}, ("127.0.0.1", 8000))
    call.model = "m"
    ready: list[RequestSpan] = []
    unused: list[RequestSpan] = []  # kept, so that freeing them is not timed

    def make() -> None:
        ready.append(call.start("r", "standard", plain.last))

    out: dict[str, float] = {}
    # Each variant finds the caches as a span's making leaves them.
    lives = medians_us(
        {"none": lambda: (unused.append(ready.pop()), life(plain, None)), "span": lambda: life(plain, ready.pop())},
        3000,
        before=make,
    )
    out["request_without_span_us"], out["request_with_span_us"] = lives["none"], lives["span"]
    out["request_with_span_ratio"] = lives["span"] / lives["none"]

    batches = {}
    for name, t in (("own", plain), ("exponential", both)):
        requests = [t.arrive(str(i), c.CLASSES[i % 2], 700, t.last) for i in range(32)]
        t.tokens(requests, t.lap(FORWARD))
        batches[name] = lambda t=t, requests=requests: t.tokens(requests, t.lap(FORWARD))  # type: ignore[misc]
    steps = medians_us(batches, 5000)
    out["tokens_32_running_us"], out["tokens_32_running_exponential_us"] = steps["own"], steps["exponential"]
    out["tokens_exponential_more_us"] = steps["exponential"] - steps["own"]

    out |= {f"{name}_us": us for name, us in medians_us({"start_span": make}, 1000).items()}
    while tracing.unwritten.qsize() < 1000:
        life(plain, ready.pop() if ready else call.start("r", "standard", plain.last))
    out |= {f"{name}_us": us for name, us in medians_us({"build_span": tracing.write_one}, 1000).items()}

    scope, resource = InstrumentationScope("kvscope.engine"), Resource({})

    def push() -> bytes:
        read = to_metrics(plain, 0, {})
        data = MetricsData([ResourceMetrics(resource, [ScopeMetrics(scope, read, "")], "")])
        return encode_metrics(data).SerializeToString()

    out["push_us"], out["push_bytes"] = medians_us({"push": push}, 50)["push"], len(push())
    out["series"] = sum(len(rows) for _, rows in plain.snapshot())
    provider.shutdown()
    return out


def main() -> None:
    options = Parser(__doc__, quick={}).parse_args()
    figures = measure()
    for name, figure in figures.items():
        print(f"{name:40} {figure:12,.2f}")
    rows = [
        Row("recording a request with a span / without", figures["request_with_span_ratio"], "ratio"),
        Row("recording a request with a span", figures["request_with_span_us"], "us"),
        Row("a step of 32 requests, exponential histograms more", figures["tokens_exponential_more_us"], "us"),
        Row("building a span, on another thread", figures["build_span_us"], "us"),
        Row("one push of all metrics, on another thread", figures["push_us"], "us"),
    ]
    keep(options, rows, figures)


if __name__ == "__main__":
    main()
