"""OpenTelemetry's SDK, set up for one engine: its spans, gen_ai.server.* metrics and kvscope's own families, pushed over OTLP/HTTP.

The SDK's threads read, encode and send; the engine never waits for a collector. Needs `kvscope[otlp]`. See docs/opentelemetry.md.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any, Literal
from urllib.parse import urlsplit

from exporters.together import Source
from observability import catalog as c
from observability.addresses import without_secrets
from observability.errors import ConfigError
from observability.telemetry.exponential import EXPONENTIAL_SCALE, Exponential
from observability.telemetry.recorder import Telemetry
from observability.telemetry.snapshot import Exemplar as NotedExemplar
from observability.telemetry.snapshot import Row
from observability.telemetry.tracing import GEN_AI_HISTOGRAMS, OUTPUT_TOKEN

try:
    from opentelemetry.exporter.otlp.proto.http import Compression
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.metrics import CallbackOptions, Observation
    from opentelemetry.sdk.metrics import Exemplar, MeterProvider
    from opentelemetry.sdk.metrics.export import (
        AggregationTemporality,
        Buckets,
        ExponentialHistogram,
        ExponentialHistogramDataPoint,
        Gauge,
        Histogram,
        HistogramDataPoint,
        Metric,
        MetricExportResult,
        MetricsData,
        NumberDataPoint,
        PeriodicExportingMetricReader,
        ResourceMetrics,
        ScopeMetrics,
        Sum,
    )
    from opentelemetry.sdk.metrics.view import (
        ExplicitBucketHistogramAggregation,
        ExponentialBucketHistogramAggregation,
        View,
    )
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
except ImportError as missing:
    raise ConfigError(
        f"OTLP needs OpenTelemetry's SDK: {missing}.", next_step="Install it: pip install 'kvscope[otlp]'."
    ) from missing

#: advised: bounds of the GenAI conventions; extended: kvscope's, up to 640 s; exponential: base-2 buckets, which a Prometheus with OTLP
#: ingest stores as native histograms, for gen_ai.server.* and kvscope's latency families.
HistogramForm = Literal["advised", "extended", "exponential"]

_CUMULATIVE = AggregationTemporality.CUMULATIVE
_PUSH_SECONDS = 15.0  # between two pushes of metrics, unless OTEL_METRIC_EXPORT_INTERVAL says otherwise
_MAX_BUCKETS = 640  # 20 doublings at scale 5: 0.6 ms to 640 s without a change of scale
_UNITS = {"": "", "seconds": "s", "bytes": "By", "ratio": "1"}  # UCUM; other units are annotations, such as {tokens}
_SIGNALS = ("TRACES", "METRICS")


class Otlp:
    """Running exporters. Give `tracer_provider` and `meter_provider` to Tracing.of(); None: this signal is switched off."""

    def __init__(self, tracer_provider: TracerProvider | None, meter_provider: MeterProvider | None) -> None:
        self.tracer_provider, self.meter_provider = tracer_provider, meter_provider

    def close(self, timeout: float = 5.0) -> None:
        """Sends what is left; a collector that does not answer gets `timeout` seconds."""
        providers = [p for p in (self.tracer_provider, self.meter_provider) if p is not None]
        threads = [threading.Thread(target=provider.shutdown, daemon=True) for provider in providers]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + timeout
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0.0))


def wanted(endpoint: str | None) -> bool:
    """Whether `endpoint` or the environment names a collector, and OTEL_SDK_DISABLED does not forbid it."""
    named = endpoint or any(_env(f"EXPORTER_OTLP_{part}ENDPOINT") for part in ("", "TRACES_", "METRICS_"))
    return bool(named) and _env("SDK_DISABLED").lower() != "true"


def start_otlp(
    telemetry: Telemetry,
    endpoint: str | None = None,
    *,
    source: Source | None = None,
    form: HistogramForm = "advised",
    instance: str = "",
) -> Otlp:
    """Pushes to the collector at `endpoint`, a base URL such as http://127.0.0.1:4318; None: where OTEL_EXPORTER_OTLP_ENDPOINT says.
    `source` has the families, if there are more than `telemetry` has.

    The OTEL_* variables of the SDK hold: headers, timeout, sampler, resource, batching. `instance` is the service.instance.id
    unless OTEL_RESOURCE_ATTRIBUTES gives one. Raises ConfigError for an endpoint or a variable that asks for something else.
    """
    _check_environment()
    started = Otlp(None, None)
    try:
        resource = _resource(instance)
        if _env("TRACES_EXPORTER") != "none":
            spans = OTLPSpanExporter(_url(endpoint, "TRACES"), compression=_compression("TRACES"))
            started.tracer_provider = TracerProvider(resource=resource, shutdown_on_exit=False)
            started.tracer_provider.add_span_processor(BatchSpanProcessor(spans))
        if _env("METRICS_EXPORTER") != "none":
            exponential = telemetry.keep_exponential() if form == "exponential" else {}
            exporter = _MetricExporter(telemetry, source or telemetry, exponential, _url(endpoint, "METRICS"))
            interval = None if _env("METRIC_EXPORT_INTERVAL") else _PUSH_SECONDS * 1e3
            reader = PeriodicExportingMetricReader(exporter, interval)
            views = _views(form, telemetry)
            started.meter_provider = MeterProvider([reader], resource, shutdown_on_exit=False, views=views)
            _tell_engine(started.meter_provider, telemetry)
    except ConfigError:
        started.close()
        raise
    except ValueError as error:  # of the SDK, about a variable that it reads
        started.close()
        raise ConfigError(
            f"OpenTelemetry's SDK refuses its settings: {' '.join(str(error).split())}",
            next_step=f"Correct or unset it; set are {', '.join(sorted(n for n in os.environ if n.startswith('OTEL_')))}.",
        ) from error
    return started


# -- settings ------------------------------------------------------------------------------------------------------


def _env(name: str) -> str:
    return os.environ.get(f"OTEL_{name}", "").strip()


def _check_environment() -> None:
    for name in ("EXPORTER_OTLP_PROTOCOL", *(f"EXPORTER_OTLP_{signal}_PROTOCOL" for signal in _SIGNALS)):
        if _env(name) not in ("", "http/protobuf"):
            raise ConfigError(
                f"OTEL_{name} is {_env(name)!r}; kvscope speaks http/protobuf only.",
                next_step="Unset it and name the collector's HTTP port, usually 4318.",
            )
    for name in _DURATIONS:
        if (text := _env(name)) and not _positive(text):
            raise ConfigError(  # the SDK would start with it, and every push would fail
                f"OTEL_{name} is {text!r}; it must be a number above 0.", next_step="Correct or unset it."
            )
    if _env("METRICS_EXEMPLAR_FILTER").lower() not in ("", "trace_based", "always_on", "always_off"):
        raise ConfigError(  # from the SDK it would come when a thread of its own runs already
            f"OTEL_METRICS_EXEMPLAR_FILTER is {_env('METRICS_EXEMPLAR_FILTER')!r}.",
            next_step="Set it to trace_based, always_on or always_off.",
        )
    for name in (f"{signal}_EXPORTER" for signal in _SIGNALS):
        if _env(name) not in ("", "otlp", "none"):
            raise ConfigError(f"OTEL_{name} is {_env(name)!r}.", next_step="Set it to otlp or none.")


#: What the SDK waits for, in seconds or milliseconds.
_DURATIONS = (
    "EXPORTER_OTLP_TIMEOUT", "EXPORTER_OTLP_TRACES_TIMEOUT", "EXPORTER_OTLP_METRICS_TIMEOUT", "METRIC_EXPORT_INTERVAL",
    "METRIC_EXPORT_TIMEOUT", "BSP_SCHEDULE_DELAY", "BSP_EXPORT_TIMEOUT",
)  # fmt: skip


def _positive(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False


def _url(endpoint: str | None, signal: str) -> str | None:
    """Of one signal's path; None: the SDK takes it from the environment, where the signal's own variable goes first."""
    own = _env(f"EXPORTER_OTLP_{signal}_ENDPOINT")
    base = own or endpoint or _env("EXPORTER_OTLP_ENDPOINT")
    try:
        parts = urlsplit(base)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets that do not close, a port that is no number
        usable = False
    if not usable:
        raise ConfigError(
            f"{without_secrets(base)!r} is not the URL of an OTLP collector.",
            next_step="Give one such as http://127.0.0.1:4318.",
        )
    return None if own or not endpoint else f"{endpoint.rstrip('/')}/v1/{signal.lower()}"


def _compression(signal: str) -> Compression | None:
    chosen = _env(f"EXPORTER_OTLP_{signal}_COMPRESSION") or _env("EXPORTER_OTLP_COMPRESSION")
    return None if chosen else Compression.Gzip


def _resource(instance: str) -> Resource:
    ours = {"service.name": "kvscope", "service.version": version("kvscope")}
    if instance:
        ours["service.instance.id"] = instance
    given = OTELResourceDetector().detect().attributes
    return Resource.create({name: value for name, value in ours.items() if name not in given})


def _views(form: HistogramForm, telemetry: Telemetry) -> Sequence[View]:
    names = [name for name, _, _ in GEN_AI_HISTOGRAMS]
    if form == "exponential":
        aggregation = ExponentialBucketHistogramAggregation(_MAX_BUCKETS, EXPONENTIAL_SCALE)
        return [View(instrument_name=name, aggregation=aggregation) for name in names]
    if form == "extended":
        buckets = telemetry.buckets
        bounds = {OUTPUT_TOKEN[0]: buckets.inter_token}
        return [
            View(
                instrument_name=name,
                aggregation=ExplicitBucketHistogramAggregation(bounds.get(name, buckets.latency)),
            )
            for name in names
        ]
    return ()  # the instruments advise the conventions' bounds


def _tell_engine(meter_provider: MeterProvider, telemetry: Telemetry) -> None:
    """kvscope_engine_info, which always has a value: the SDK's reader exports nothing while no instrument has one."""

    def observe(_: CallbackOptions) -> Iterable[Observation]:
        return [
            Observation(row.value, _attributes(c.ENGINE, row))
            for family, rows in telemetry.snapshot()
            if family is c.ENGINE
            for row in rows
        ]

    meter = meter_provider.get_meter("kvscope", version("kvscope"))
    meter.create_observable_gauge(f"{c.ENGINE.name}_info", [observe], description=c.ENGINE.help)


# -- kvscope's families as OTLP metrics ------------------------------------------------------------------------------


class _MetricExporter(OTLPMetricExporter):
    """Adds a reading of the recorder to what the SDK collected, and sends both."""

    def __init__(
        self, telemetry: Telemetry, source: Source, exponential: Mapping[str, Exponential], url: str | None
    ) -> None:
        super().__init__(url, compression=_compression("METRICS"))
        self._started_ns, self._source, self._exponential = int(telemetry.started * 1e9), source, exponential
        self._scope = InstrumentationScope("kvscope.engine", version("kvscope"))

    def export(
        self, metrics_data: MetricsData, timeout_millis: float | None = 10_000, **kwargs: Any
    ) -> MetricExportResult:
        read = to_metrics(self._source, self._started_ns, self._exponential)
        ours = ScopeMetrics(self._scope, read, self._scope.schema_url or "")
        resources = [
            ResourceMetrics(of.resource, [*of.scope_metrics, ours], of.schema_url)
            for of in metrics_data.resource_metrics
        ]
        return super().export(MetricsData(resources), timeout_millis, **kwargs)


def to_metrics(source: Source, started_ns: int, exponential: Mapping[str, Exponential]) -> list[Metric]:
    """One reading of `source`: counters as cumulative monotonic sums since `started_ns`, gauges, histograms. All but the engine's info
    family, which the SDK has.

    Names, units and labels are such that Prometheus's OTLP receiver makes the very series of a scrape of them. Families in
    `exponential` have those buckets instead of their own.
    """
    now = time.time_ns()
    return [
        Metric(
            family.name + ("_info" if family.kind == "info" else ""),
            family.help,
            unit_of(family),
            _data(family, rows, exponential.get(family.name), started_ns, now),
        )
        for family, rows in source.snapshot()
        if family is not c.ENGINE
    ]


def unit_of(family: c.Family) -> str:
    """UCUM. One that the name does not end with is an annotation, which receivers do not put into the name."""
    unit = _UNITS.get(family.unit)
    if unit is None or (family.unit and not family.name.endswith(f"_{family.unit}")):
        return "{" + family.unit.replace(" ", "_") + "}"
    return unit


def _data(family: c.Family, rows: list[Row], exponential: Exponential | None, start: int, now: int) -> Any:
    if exponential is not None:
        return ExponentialHistogram(list(_exponential_points(family, rows, exponential, now)), _CUMULATIVE)
    if family.kind == "histogram":
        return Histogram(list(_histogram_points(family, rows, start, now)), _CUMULATIVE)
    points = [NumberDataPoint(_attributes(family, row), start, now, row.value) for row in rows]
    return Sum(points, _CUMULATIVE, is_monotonic=True) if family.kind == "counter" else Gauge(points)


def _attributes(family: c.Family, row: Row) -> dict[str, str]:
    return dict(zip(family.labels, row.labels, strict=False))  # a bucket row has its bound behind them


def _by_label_set(rows: list[Row]) -> Iterator[tuple[list[Row], float, int]]:
    """(bucket rows, sum, count) of each label set; the rows of one come together, in this order."""
    buckets: list[Row] = []
    total = 0.0
    for row in rows:
        if row.suffix == "_bucket":
            buckets.append(row)
        elif row.suffix == "_sum":
            total = row.value
        else:
            yield buckets, total, int(row.value)
            buckets = []


def _histogram_points(family: c.Family, rows: list[Row], start: int, now: int) -> Iterator[HistogramDataPoint]:
    for buckets, total, count in _by_label_set(rows):
        counts, before = [], 0
        for row in buckets:
            counts.append(int(row.value) - before)
            before = int(row.value)
        bounds = [float(row.labels[-1]) for row in buckets[:-1]]
        exemplars = [_exemplar(row.exemplar) for row in buckets if row.exemplar is not None]
        # Smallest and largest are not kept: absent, not 0.
        yield HistogramDataPoint(
            _attributes(family, buckets[0]), start, now, count, total, counts, bounds, None, None, exemplars  # type: ignore[arg-type]
        )  # fmt: skip


def _exponential_points(
    family: c.Family, rows: list[Row], exponential: Exponential, now: int
) -> Iterator[ExponentialHistogramDataPoint]:
    noted = {
        buckets[0].labels[:-1]: [_exemplar(row.exemplar) for row in buckets if row.exemplar is not None]
        for buckets, _, _ in _by_label_set(rows)
    }
    for labels, zero, first, counts, total in exponential.read():
        if labels not in noted:  # a class of which no request has come: absent here as on a scrape
            continue
        yield ExponentialHistogramDataPoint(
            dict(zip(family.labels, labels, strict=True)), exponential.start_ns, now, zero + sum(counts), total,
            EXPONENTIAL_SCALE, zero, Buckets(first, counts), Buckets(0, []), 0, None, None, noted[labels],  # type: ignore[arg-type]
        )  # fmt: skip


def _exemplar(noted: NotedExemplar) -> Exemplar:
    ids = dict(noted.labels)
    trace, span = ids.pop("trace_id", None), ids.pop("span_id", None)
    return Exemplar(
        ids, noted.value, int(noted.timestamp * 1e9), span and int(span, 16), trace and int(trace, 16)  # type: ignore[arg-type]
    )  # fmt: skip
