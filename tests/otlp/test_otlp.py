"""What a collector gets, decoded from the wire: spans and metrics equal the engine's records; a dead collector costs no request."""

from __future__ import annotations

import json
import math
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality, ExponentialHistogramDataPoint, Metric

from exporters.otlp import HistogramForm, start_otlp, unit_of, wanted
from observability import catalog as c
from observability.engine.model.loading import load_model
from observability.errors import ConfigError
from observability.telemetry import tracing
from observability.telemetry.exponential import EXPONENTIAL_SCALE, Exponential
from observability.telemetry.recorder import RequestRecord, Telemetry
from tests.conftest import REPO, wait_for
from tests.otlp.receiver import Receiver, Scripted, metrics_in, values
from tests.server.harness import HTTP, RunningServer, serving
from tests.server.processes import serve
from tests.telemetry.bench import Bench

CUMULATIVE = AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SAMPLED = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 6}


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


def traffic(server: RunningServer) -> None:
    """Served, refused, aborted and late requests."""
    for i in range(4):
        assert HTTP.post(
            server.url + "/v1/chat/completions", json=CHAT | {"max_tokens": 1 + i}, headers=SAMPLED
        ).is_success
    body = {"model": "tiny", "prompt": ["a b c", "d"], "max_tokens": 4, "ignore_eos": True}
    assert HTTP.post(server.url + "/v1/completions", json=body).is_success
    assert HTTP.post(server.url + "/v1/chat/completions", json=CHAT | {"model": "m" * 500}).status_code == 404
    assert HTTP.post(server.url + "/v1/chat/completions", json=CHAT | {"deadline_seconds": 1e-6}).status_code == 504
    long = CHAT | {"max_tokens": 3000, "ignore_eos": True, "stream": True}
    with HTTP.stream("POST", server.url + "/v1/chat/completions", json=long) as response:
        next(response.iter_bytes())
    server.wait_idle()


def push(form: HistogramForm) -> tuple[Receiver, RunningServer]:
    with Receiver() as receiver:

        def otlp(telemetry: Telemetry) -> Any:
            return start_otlp(telemetry, receiver.url, form=form, instance="here:1")

        with serving(load_model("tiny"), otlp=otlp) as server:
            traffic(server)
    return receiver, server


@pytest.fixture(scope="module", params=["advised", "extended", "exponential"])
def pushed(request: pytest.FixtureRequest) -> tuple[HistogramForm, Receiver, RunningServer]:
    return request.param, *push(request.param)


SERVED = ("stop", "length")
#: From records: what each gen_ai.server.* histogram is made of, by error.type.
TRUTH: dict[str, Callable[[RequestRecord], float | None]] = {
    "gen_ai.server.request.duration": lambda r: r.finished - r.arrival,
    "gen_ai.server.time_to_first_token": lambda r: r.first_token - r.arrival if r.first_token and r.outcome in SERVED else None,
    "gen_ai.server.time_per_output_token": lambda r: (
        (r.finished - r.first_token) / (r.generated_tokens - 1)
        if r.first_token and r.generated_tokens > 1 and r.outcome in SERVED
        else None
    ),
}  # fmt: skip
ERROR_TYPE = {"stop": None, "length": None, "abort": "aborted", "deadline": "deadline_exceeded"}


# -- what arrives --------------------------------------------------------------------------------------------------------


def test_every_request_has_one_span_on_the_wire_and_the_refused_one_too(pushed: Any) -> None:
    _, receiver, server = pushed
    spans = {values(s.attributes).get("kvscope.request.id", ""): s for s in receiver.spans()}
    assert len(receiver.spans()) == len(spans) == len(server.records) + 1
    assert values(spans.pop("").attributes)["error.type"] == "model_not_found"
    for record in server.records:
        span = spans[record.request_id]
        said = values(span.attributes)
        assert span.end_time_unix_nano - span.start_time_unix_nano == pytest.approx(
            (record.finished - record.arrival) * 1e9, abs=1000
        )
        assert said["gen_ai.usage.output_tokens"] == record.generated_tokens
        assert said.get("error.type") == ERROR_TYPE[record.outcome]
        total = sum(seconds for name, seconds in said.items() if name.startswith("kvscope.phase."))
        assert total == pytest.approx(record.finished - record.arrival, abs=1e-6)
        for name in (
            "gen_ai.operation.name",
            "gen_ai.provider.name",
            "gen_ai.request.model",
            "server.address",
            "server.port",
        ):
            assert name in said
        assert abs(span.start_time_unix_nano / 1e9 - time.time()) < 600
    assert sum(s.trace_id.hex() == TRACE for s in receiver.spans()) == 4


@pytest.mark.parametrize("name", TRUTH)
def test_gen_ai_histograms_hold_one_observation_a_request_as_its_record_says(pushed: Any, name: str) -> None:
    form, receiver, server = pushed
    metric = receiver.last()[name]
    assert metric.unit == "s"
    histogram = metric.exponential_histogram if form == "exponential" else metric.histogram
    assert histogram.aggregation_temporality == CUMULATIVE
    expected: dict[tuple[str, str | None], list[float]] = {}
    for record in server.records:
        value = TRUTH[name](record)
        operation = "chat" if record.request_id.startswith("chatcmpl") else "text_completion"
        if value is not None:
            expected.setdefault((operation, ERROR_TYPE[record.outcome]), []).append(value)
    points = {}
    for point in histogram.data_points:
        said = values(point.attributes)
        assert said["gen_ai.provider.name"] == "kvscope"
        assert said["server.port"] == server.port
        # A name that a client made up makes no series.
        assert said.get("gen_ai.request.model", "tiny") == said.get("gen_ai.response.model", "tiny") == "tiny"
        points[said["gen_ai.operation.name"], said.get("error.type")] = point
    if name == "gen_ai.server.request.duration":
        refused = points.pop(("chat", "model_not_found"))
        assert refused.count == 1
        # received = everything with a duration
        counted = sum(p.count for p in points.values()) + refused.count
        assert counted == server.books().received
    assert points.keys() == expected.keys()
    for key, point in points.items():
        assert point.count == len(expected[key])
        assert point.sum == pytest.approx(sum(expected[key]), rel=1e-6)
        if form == "exponential":
            assert point.scale == EXPONENTIAL_SCALE
            assert buckets_of(point) == counted_exponentially(expected[key])
        else:
            assert list(point.bucket_counts) == counted_between(expected[key], point.explicit_bounds)


def counted_between(observed: list[float], bounds: Any) -> list[int]:
    counts = [0] * (len(bounds) + 1)
    for value in observed:
        counts[sum(value > bound for bound in bounds)] += 1
    return counts


def buckets_of(point: ExponentialHistogramDataPoint) -> dict[int, int]:
    counts = point.positive.bucket_counts
    return {point.positive.offset + i: count for i, count in enumerate(counts) if count}


def counted_exponentially(observed: list[float]) -> dict[int, int]:
    """By searching for the bucket, without a logarithm."""
    edges = [2.0 ** (i / 2**EXPONENTIAL_SCALE) for i in range(-2000, 2000)]
    counts: dict[int, int] = {}
    for value in observed:
        index = bisect_left(edges, value) - 1 - 2000
        counts[index] = counts.get(index, 0) + 1
    return counts


def test_bounds_are_those_of_the_conventions_or_kvscopes_own(pushed: Any) -> None:
    form, receiver, _ = pushed
    if form == "exponential":
        return
    for name, _, advised in tracing.GEN_AI_HISTOGRAMS:
        (bounds,) = {tuple(point.explicit_bounds) for point in receiver.last()[name].histogram.data_points}
        extended = c.ITL_BOUNDS if name.endswith("per_output_token") else c.LATENCY_BOUNDS
        assert bounds == (advised if form == "advised" else extended)
        if form == "extended":
            assert bounds[-1] >= 80


def test_exemplars_lead_to_spans_that_were_sent_and_lie_in_their_bucket(pushed: Any) -> None:
    form, receiver, _ = pushed
    sent = {(span.trace_id, span.span_id): span for span in receiver.spans()}
    found = 0
    for name, metric in receiver.last().items():
        kind = metric.WhichOneof("data")
        if kind not in ("histogram", "exponential_histogram"):
            continue
        for point in getattr(metric, kind).data_points:
            for exemplar in point.exemplars:
                assert (exemplar.trace_id, exemplar.span_id) in sent, name
                found += 1
                if kind == "histogram":
                    assert point.bucket_counts[bisect_left(point.explicit_bounds, exemplar.as_double)] > 0
                else:
                    assert counted_exponentially([exemplar.as_double]).keys() <= buckets_of(point).keys()
    names = {"kvscope_request_duration_seconds", "kvscope_time_to_first_token_seconds", *TRUTH}
    assert found > len(names)
    assert form in ("advised", "extended", "exponential")


def test_kvscopes_families_arrive_as_a_scrape_would_show_them(pushed: Any) -> None:
    form, receiver, server = pushed
    got = receiver.last()
    exponential = {
        "kvscope_request_duration_seconds",
        "kvscope_time_to_first_token_seconds",
        "kvscope_inter_token_latency_seconds",
    }
    for family, rows in server.telemetry.snapshot():
        metric = got[family.name + ("_info" if family.kind == "info" else "")]
        kind = metric.WhichOneof("data")
        points = {
            tuple(values(p.attributes)[label] for label in family.labels): p for p in getattr(metric, kind).data_points
        }
        expected = {row.labels[: len(family.labels)] for row in rows}
        assert points.keys() == expected, family.name
        if family.kind == "counter":
            assert kind == "sum"
            assert metric.sum.is_monotonic
            assert metric.sum.aggregation_temporality == CUMULATIVE
        if family.kind in ("counter", "info"):
            for row in rows:
                if family.name != "kvscope_step_seconds":  # goes on while idle
                    assert (points[row.labels].as_double or points[row.labels].as_int) == row.value, family.name
        if family.kind == "histogram":
            assert kind == (
                "exponential_histogram" if form == "exponential" and family.name in exponential else "histogram"
            )
            for row in rows:
                if row.suffix in ("_count", "_sum"):
                    assert getattr(points[row.labels], row.suffix[1:]) == pytest.approx(row.value), family.name
                elif kind == "histogram":
                    *labels, le = row.labels
                    point = points[tuple(labels)]
                    bound = math.inf if le == "+Inf" else float(le)
                    below = sum(
                        n
                        for n, b in zip(point.bucket_counts, [*point.explicit_bounds, math.inf], strict=True)
                        if b <= bound
                    )
                    assert below == row.value
    requests = {tuple(values(p.attributes).values())[2]: 0 for p in got["kvscope_requests"].sum.data_points}
    for point in got["kvscope_requests"].sum.data_points:
        requests[values(point.attributes)["outcome"]] += int(point.as_double)
    outcomes = [record.outcome for record in server.records] + ["invalid"]
    assert requests == {outcome: outcomes.count(outcome) for outcome in c.OUTCOMES}


def test_resource_names_service_version_and_instance(pushed: Any) -> None:
    _, receiver, _ = pushed
    for resource in receiver.resources():
        assert resource["service.name"] == "kvscope"
        assert resource["service.instance.id"] == "here:1"
        assert resource["service.version"]


def test_counters_never_fall_and_have_one_start_from_push_to_push() -> None:
    with Receiver() as receiver:
        with serving(load_model("tiny"), otlp=lambda telemetry: start_otlp(telemetry, receiver.url)) as server:
            provider = server.otlp.meter_provider
            assert provider is not None
            for _ in range(3):
                HTTP.post(server.url + "/v1/chat/completions", json=CHAT)
                provider.force_flush()
    pushes = [{m.name: m for m in metrics_in(request)} for request in receiver.metrics]
    assert len(pushes) >= 3
    last: dict[Any, float] = {}
    starts = set()
    for metrics in pushes:
        for name, metric in metrics.items():
            for point in metric.sum.data_points if metric.WhichOneof("data") == "sum" else ():
                key = name, str(sorted(values(point.attributes).items()))
                assert point.as_double >= last.get(key, 0.0)
                last[key] = point.as_double
                starts.add(point.start_time_unix_nano)
                assert point.time_unix_nano > point.start_time_unix_nano
    assert len(starts) == 1


# -- names -----------------------------------------------------------------------------------------------------------------

NAME = r"(?:gen_ai|kvscope|server|error)\.[a-z_.]*[a-z_]"


def test_the_page_names_what_spans_and_metrics_carry_and_nothing_else(pushed: Any) -> None:
    _, receiver, _ = pushed
    page = set(re.findall(rf"`({NAME})`", (REPO / "docs/opentelemetry.md").read_text()))
    code = {*tracing._ENTERED, *tracing._PHASE}
    for file in ("observability/telemetry/tracing.py", "observability/engine/server.py"):
        code |= set(re.findall(rf'"({NAME})"', (REPO / file).read_text()))
    assert page == code
    sent = {event.name for span in receiver.spans() for event in span.events} | set(TRUTH)
    sent |= {name for span in receiver.spans() for name in values(span.attributes)}
    assert sent <= page


# -- names in Prometheus ---------------------------------------------------------------------------------------------------


def prometheus_name(family: c.Family) -> str:
    """What an OTLP receiver of Prometheus calls it: its rules (UCUM unit, then `total` or `ratio`, at the end), written anew."""
    words = [word for word in re.split(r"[^a-zA-Z0-9]+", family.name) if word]
    unit = {"s": "seconds", "By": "bytes", "1": "", "": ""}.get(
        unit_of(family), "" if unit_of(family).startswith("{") else "?"
    )
    if unit and unit not in words:
        words.append(unit)
    if family.kind == "counter":
        words = [word for word in words if word != "total"] + ["total"]
    if family.kind == "gauge" and unit_of(family) == "1":
        words = [word for word in words if word != "ratio"] + ["ratio"]
    return "_".join(words)


@pytest.mark.parametrize("family", [f for f in c.FAMILIES if f.kind != "info"], ids=lambda family: family.name)
def test_a_family_has_the_same_name_in_prometheus_whether_pushed_or_scraped(family: c.Family) -> None:
    scraped = family.name + ("_total" if family.kind == "counter" else "")
    assert prometheus_name(family) == scraped


# -- exponential buckets ---------------------------------------------------------------------------------------------------


def quantile_of(point: ExponentialHistogramDataPoint, q: float) -> float:
    """By geometric interpolation within the bucket, as Prometheus does for native histograms."""
    rank, before = q * point.count, point.zero_count
    for i, count in enumerate(point.positive.bucket_counts):
        if count and before + count >= rank:
            share = (rank - before) / count
            return 2.0 ** ((point.positive.offset + i + share) / 2**point.scale)
        before += count
    raise AssertionError("no such rank")


@pytest.mark.parametrize("spread", [0.1, 1.0, 2.5])
def test_quantiles_from_the_pushed_buckets_are_within_the_error_that_the_scale_allows(spread: float) -> None:
    rng = np.random.default_rng(int(spread * 10))
    now = [0.0]
    telemetry = Telemetry("m", executor="torch", virtual=False, device="cpu", kv_dtype="f", clock=lambda: now[0])
    durations, intervals = np.clip(rng.lognormal(0.0, spread, 3000), 1e-3, 640.0), []
    with Receiver() as receiver:
        otlp = start_otlp(telemetry, receiver.url, form="exponential")
        for i, seconds in enumerate(durations.tolist()):
            trace = telemetry.arrive(str(i), "standard", 8, now[0])
            telemetry.transition(trace, c.STATES.index("prefill"))
            arrived = now[0]
            now[0] += seconds * 0.4
            telemetry.tokens([trace], telemetry.lap(0))
            before = now[0]
            now[0] = arrived + seconds
            telemetry.tokens([trace], telemetry.lap(0))
            intervals.append(now[0] - before)
            telemetry.finish(trace, "stop", now[0])
        ran = telemetry.arrive("run", "interactive", 8, now[0])
        ends = now[0] + np.cumsum(rng.lognormal(-4.0, spread, 5000))
        telemetry.tokens_run([ran], ends)
        otlp.close()
        got = receiver.last()
    widest = 2.0 ** (1 / 2**EXPONENTIAL_SCALE)  # 2.2 %
    for name, klass, truth in (
        ("kvscope_request_duration_seconds", "standard", durations),
        ("kvscope_time_to_first_token_seconds", "standard", durations * 0.4),
        ("kvscope_inter_token_latency_seconds", "standard", np.array(intervals)),
        ("kvscope_inter_token_latency_seconds", "interactive", np.diff(ends)),
    ):
        (point,) = [p for p in got[name].exponential_histogram.data_points if values(p.attributes)["class"] == klass]
        assert point.count == len(truth)
        assert point.sum == pytest.approx(truth.sum(), rel=1e-9)
        for q in (0.01, 0.5, 0.9, 0.99, 0.999):
            true = float(np.quantile(truth, q, method="inverted_cdf"))
            assert true / widest * 0.999 <= quantile_of(point, q) <= true * widest * 1.001, (name, q)


@settings(deadline=None)
@given(st.lists(st.floats(2e-6, 1e5), min_size=1, max_size=60), st.integers(1, 5))
def test_an_observation_is_in_the_bucket_whose_bounds_hold_it(observed: list[float], count: int) -> None:
    one, many = Exponential([("a",), ("b",)]), Exponential([("a",), ("b",)])
    for value in observed:
        one.add(1, value, count)
    many.add_many(1, np.array(observed), count)
    for cells in (one, many):
        (_, zero_a, _, counts_a, sum_a), (labels, zero, first, counts, total) = cells.read()
        assert (zero_a, counts_a, sum_a) == (0, [], 0)
        assert (labels, zero) == (("b",), 0)
        assert total == pytest.approx(sum(observed) * count)
        placed = {first + i: n for i, n in enumerate(counts) if n}
        assert sum(placed.values()) == len(observed) * count
        for value in observed:
            # A bound itself may go to either side of it by rounding.
            near = {math.ceil(math.log(value * (1 + e), 2) * 32) - 1 for e in (-1e-12, 0.0, 1e-12)}
            assert near & placed.keys()


def test_zero_and_what_is_beyond_the_last_bucket_are_counted() -> None:
    cells = Exponential([()])
    for value in (0.0, 1e-9, 1e9):
        cells.add(0, value)
    cells.add_many(0, np.array([0.0, 1e-9, 1e9]))
    ((_, zero, _, counts, _),) = cells.read()
    assert (zero, sum(counts)) == (4, 2)


# -- collectors that do not work, settings that make no sense --------------------------------------------------------------


BUSY = b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 86400\r\nContent-Length: 0\r\n\r\n"
REDIRECT = b"HTTP/1.1 308 x\r\nLocation: /v1/traces\r\nContent-Length: 0\r\n\r\n"
ENDLESS = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000000\r\n\r\n"
ANSWERS = {
    "hanging": [], "busy": [BUSY], "garbage": [b"\x00\xff" * 1000], "redirecting": [REDIRECT], "dripping": [ENDLESS, *[b"x"] * 600],
}  # fmt: skip


@pytest.mark.parametrize("kind", ["refusing", *ANSWERS])
def test_a_dead_collector_costs_no_request_and_a_bounded_time_at_the_end(kind: str) -> None:
    with Scripted(ANSWERS.get(kind, [])) as receiver, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # not listening
        url = receiver.url if kind != "refusing" else f"http://127.0.0.1:{closed.getsockname()[1]}"
        with serving(load_model("tiny"), otlp=lambda telemetry: start_otlp(telemetry, url)) as server:
            provider = server.otlp.meter_provider
            assert provider is not None
            flush = threading.Thread(target=provider.force_flush, daemon=True)
            flush.start()  # the collector has what it hangs on before requests come
            for _ in range(5):
                assert HTTP.post(server.url + "/v1/chat/completions", json=CHAT, headers=SAMPLED).is_success
            server.check_books()
            began = time.monotonic()
            server.otlp.close(0.5)
            assert time.monotonic() - began < 4
        assert receiver.posts > 0 or kind == "refusing"


def test_spans_that_a_collector_could_not_take_at_first_arrive_later() -> None:
    with Receiver(refusals=1) as receiver:
        with serving(load_model("tiny"), otlp=lambda telemetry: start_otlp(telemetry, receiver.url)) as server:
            assert HTTP.post(server.url + "/v1/chat/completions", json=CHAT, headers=SAMPLED).is_success
            assert server.otlp.tracer_provider is not None
            wait_for(lambda: server.otlp.tracer_provider.force_flush() and receiver.spans(), 15, "spans")
    assert [span.trace_id.hex() for span in receiver.spans()] == [TRACE]


@pytest.mark.parametrize(
    ("endpoint", "variables", "named"),
    [
        ("localhost:4318", {}, "'localhost:4318'"),
        ("ftp://x", {}, "'ftp://x'"),
        ("http://x", {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "OTEL_EXPORTER_OTLP_PROTOCOL"),
        ("http://x", {"OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "http/json"}, "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL"),
        ("http://x", {"OTEL_TRACES_EXPORTER": "console"}, "OTEL_TRACES_EXPORTER"),
        ("http://x", {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "nowhere"}, "'nowhere'"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(
    endpoint: str, variables: dict[str, str], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    telemetry = Telemetry("m", executor="torch", virtual=False, device="cpu", kv_dtype="f", clock=time.monotonic)
    with pytest.raises(ConfigError, match=re.escape(named)) as caught:
        start_otlp(telemetry, endpoint)
    assert caught.value.next_step


def test_a_signal_can_be_switched_off_and_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    telemetry = Telemetry("m", executor="torch", virtual=False, device="cpu", kv_dtype="f", clock=time.monotonic)
    with Receiver() as receiver:
        monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
        otlp = start_otlp(telemetry, receiver.url)
        assert otlp.meter_provider is None
        assert otlp.tracer_provider is not None
        otlp.close()
        monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
        monkeypatch.setenv("OTEL_METRICS_EXPORTER", "otlp")
        otlp = start_otlp(telemetry, receiver.url)
        assert otlp.tracer_provider is None
        otlp.close()
        assert receiver.metrics
    assert wanted(receiver.url)
    assert not wanted(None)
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert not wanted(receiver.url)


def test_engine_and_server_load_no_sdk() -> None:
    code = (
        "import sys, json, observability.cli.serve, observability.engine.server, observability.engine.engine, observability.telemetry.tracing;"
        "print(json.dumps([m for m in sys.modules if m.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout) == [], done.stderr


# -- the command -----------------------------------------------------------------------------------------------------------


def test_kvscope_serve_pushes_with_the_variables_of_opentelemetry_and_flushes_when_it_stops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Receiver() as receiver:
        for name, value in {
            "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20secret",
            "OTEL_SERVICE_NAME": "chat-backend",
            "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test",
        }.items():
            monkeypatch.setenv(name, value)
        options = ("--port", "0", "--otlp-endpoint", receiver.url, "--otlp-histograms", "exponential")
        with serve(*options) as process:
            process.wait_up()
            assert HTTP.post(process.url + "/v1/chat/completions", json=CHAT, headers=SAMPLED).is_success
            assert process.end(signal.SIGTERM) == 0, process.output
    assert [span.trace_id.hex() for span in receiver.spans()] == [TRACE]
    got: dict[str, Metric] = receiver.last()
    (duration,) = got["gen_ai.server.request.duration"].exponential_histogram.data_points
    assert duration.count == 1
    assert got["kvscope_requests_received"].sum.data_points
    assert {headers["authorization"] for headers in receiver.headers} == {"Bearer secret"}
    for resource in receiver.resources():
        assert resource["service.name"] == "chat-backend"
        assert resource["deployment.environment.name"] == "test"
        assert resource["service.instance.id"].endswith(":" + process.url.rpartition(":")[2])


def test_kvscope_serve_stops_in_time_with_a_collector_that_hangs() -> None:
    with Receiver(hangs=True) as receiver:
        with serve("--port", "0", "--otlp-endpoint", receiver.url) as process:
            process.wait_up()
            assert HTTP.post(process.url + "/v1/chat/completions", json=CHAT).is_success
            began = time.monotonic()
            assert process.end(signal.SIGTERM) == 0, process.output
            assert time.monotonic() - began < 15  # 5 s for the collector, the rest for a slow machine
    assert "Traceback" not in process.output


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("METRIC_EXPORT_INTERVAL", "-5"),
        ("METRIC_EXPORT_INTERVAL", "0"),
        ("BSP_MAX_QUEUE_SIZE", "-1"),
        ("SPAN_ATTRIBUTE_COUNT_LIMIT", "-3"),
        ("ATTRIBUTE_VALUE_LENGTH_LIMIT", "long"),
        ("METRICS_EXEMPLAR_FILTER", "some"),
        *(
            (f"{of}_TIMEOUT", text)
            for of in ("EXPORTER_OTLP", "EXPORTER_OTLP_TRACES", "EXPORTER_OTLP_METRICS", "METRIC_EXPORT", "BSP_EXPORT")
            for text in ("-1", "0", "nan", "10s")
        ),
        ("EXPORTER_OTLP_METRICS_ENDPOINT", "http://[::1"),
        ("EXPORTER_OTLP_METRICS_ENDPOINT", "http://collector:port"),
    ],
)
def test_a_variable_that_makes_no_sense_is_named_and_leaves_nothing_running(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    monkeypatch.setenv(f"OTEL_{name}", text)
    before = set(threading.enumerate())
    with pytest.raises(ConfigError) as told:
        start_otlp(Bench().t, "http://127.0.0.1:9")
    assert name in str(told.value) or text in str(told.value)
    wait_for(lambda: set(threading.enumerate()) <= before, 5, "the threads of the SDK to end")
