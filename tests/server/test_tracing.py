"""Spans of a live server: one a request, with what the engine's own record says, in the caller's trace, however the request ends."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from opentelemetry import context, trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from opentelemetry.trace import SpanKind, StatusCode

from observability import catalog
from observability.engine.model.loading import load_model
from observability.engine.server import ServerSettings
from observability.telemetry.recorder import RequestRecord
from observability.telemetry.tracing import Tracing
from tests.conftest import wait_for
from tests.server.harness import HTTP, RunningServer, serving
from tests.server.test_router import routing

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=abc,other=1"}
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hello there"}], "max_tokens": 5}


@dataclass
class Traced:
    server: RunningServer
    exporter: InMemorySpanExporter = field(repr=False)

    def spans(self, count: int = 1) -> list[ReadableSpan]:
        """The spans ended since the last call, once there are `count`."""
        wait_for(lambda: len(self.exporter.get_finished_spans()) >= count, 10, f"{count} spans")
        spans = list(self.exporter.get_finished_spans())
        self.exporter.clear()
        assert len(spans) == count
        return spans

    def record(self, span: ReadableSpan) -> RequestRecord:
        (record,) = [r for r in self.server.records if r.request_id == attributes(span)["kvscope.request.id"]]
        return record

    def post(self, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
        return HTTP.post(self.server.url + path, json=body, headers=headers)


@contextlib.contextmanager
def traced(**config: Any) -> Iterator[Traced]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with serving(load_model("tiny"), tracers=provider, **config) as server:
        yield Traced(server, exporter)


@pytest.fixture(scope="module")
def running() -> Iterator[Traced]:
    with traced() as at:
        yield at


@pytest.fixture
def at(running: Traced) -> Traced:
    running.exporter.clear()
    return running


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def check_span_tells_what_the_record_tells(span: ReadableSpan, record: RequestRecord) -> None:
    said = attributes(span)
    assert span.start_time is not None
    assert span.end_time is not None
    start = span.start_time

    def since_arrival(when: float) -> float:
        return (when - record.arrival) * 1e9

    close = {"rel": 1e-9, "abs": 1000}  # nanoseconds: a wall clock near 2e18 ns, an engine clock in float64 seconds
    assert span.end_time - start == pytest.approx(since_arrival(record.finished), **close)
    events: dict[str, list[int]] = {}
    for event in span.events:
        events.setdefault(event.name, []).append(event.timestamp)
    assert events["kvscope.queued"] == [start]
    for name, when in (("kvscope.prefill", record.scheduled), ("kvscope.first_token", record.first_token)):
        if when is None:
            assert name not in events
        else:
            assert events[name][0] - start == pytest.approx(since_arrival(when), **close)
    assert len(events.get("kvscope.preempted", [])) + len(events.get("kvscope.swapped", [])) == record.preemptions
    times = [event.timestamp for event in span.events]
    assert times == sorted(times)
    assert all(start <= when <= span.end_time for when in times)

    # The seconds of each phase, worked out from the events alone: each state lasts until the next one begins.
    states = [(e.name.removeprefix("kvscope."), e.timestamp) for e in span.events if e.name != "kvscope.first_token"]
    lasted: dict[str, float] = {}
    for (state, began), (_, ended) in zip(states, [*states[1:], ("", span.end_time)], strict=True):
        lasted[state] = lasted.get(state, 0.0) + (ended - began) / 1e9
    phases = {name: value for name, value in said.items() if name.startswith("kvscope.phase.")}
    assert phases.keys() == {f"kvscope.phase.{state}_seconds" for state in lasted}
    for state, seconds in lasted.items():
        assert phases[f"kvscope.phase.{state}_seconds"] == pytest.approx(seconds, abs=1e-5)
    assert sum(phases.values()) == pytest.approx(record.finished - record.arrival, abs=1e-5)

    assert said["gen_ai.usage.input_tokens"] == record.prompt_tokens
    assert said["gen_ai.usage.output_tokens"] == record.generated_tokens
    if record.scheduled is not None:
        assert said["gen_ai.usage.cache_read.input_tokens"] == record.cached_tokens
    assert said["kvscope.request.outcome"] == record.outcome
    assert said["kvscope.request.class"] == record.request_class
    assert said["gen_ai.provider.name"] == "kvscope"
    assert said["server.address"] == "127.0.0.1"


# -- what a span says --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_request_has_one_span_with_what_its_answer_and_its_record_say(at: Traced, stream: bool) -> None:
    client, body = at.server.client(), {**CHAT, "temperature": 0.5, "seed": 7, "stop": ["never there"]}
    if stream:
        parts = list(client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}))
        answer, usage = parts[0], parts[-1].usage
        reason = next(p.choices[0].finish_reason for p in reversed(parts) if p.choices)
    else:
        whole = client.chat.completions.create(**body)
        answer, usage, reason = whole, whole.usage, whole.choices[0].finish_reason
    (span,) = at.spans()
    said, record = attributes(span), at.record(span)
    check_span_tells_what_the_record_tells(span, record)
    assert (span.name, span.kind, span.parent) == ("chat tiny", SpanKind.SERVER, None)
    assert said["gen_ai.operation.name"] == "chat"
    assert said["gen_ai.request.model"] == said["gen_ai.response.model"] == answer.model == "tiny"
    assert said["gen_ai.response.id"] == answer.id
    assert said["gen_ai.usage.input_tokens"] == usage.prompt_tokens
    assert said["gen_ai.usage.output_tokens"] == usage.completion_tokens
    assert said["gen_ai.usage.cache_read.input_tokens"] == usage.prompt_tokens_details.cached_tokens
    assert list(said["gen_ai.response.finish_reasons"]) == [reason]
    assert (said["gen_ai.request.max_tokens"], said["gen_ai.request.temperature"]) == (5, 0.5)
    assert (said["gen_ai.request.seed"], list(said["gen_ai.request.stop_sequences"])) == (7, ["never there"])
    assert said["server.port"] == at.server.port
    assert said.get("gen_ai.request.stream") == (True if stream else None)
    first = said.get("gen_ai.response.time_to_first_chunk")
    assert record.first_token is not None
    assert first == (pytest.approx(record.first_token - record.arrival) if stream else None)
    assert "error.type" not in said
    assert span.status.status_code == StatusCode.UNSET


def test_each_prompt_of_a_completion_request_has_its_span_in_the_callers_trace(at: Traced) -> None:
    answer = at.post(
        "/v1/completions", {"model": "tiny", "prompt": ["one", "two and more"], "max_tokens": 3}, **SAMPLED
    )
    spans = at.spans(2)
    assert {s.name for s in spans} == {"text_completion tiny"}
    assert {attributes(s)["gen_ai.response.id"] for s in spans} == {answer.json()["id"]}
    for span in spans:
        check_span_tells_what_the_record_tells(span, at.record(span))
        assert span.context is not None
        assert f"{span.context.trace_id:032x}" == TRACE
    assert sum(attributes(s)["gen_ai.usage.input_tokens"] for s in spans) == answer.json()["usage"]["prompt_tokens"]


def test_session_and_tenant_are_named(at: Traced) -> None:
    at.post("/v1/chat/completions", CHAT, **{"X-Session-ID": "s-1", "X-Tenant": "t", "x-kvscope-class": "interactive"})
    said = attributes(at.spans()[0])
    assert (said["gen_ai.conversation.id"], said["kvscope.tenant"]) == ("s-1", "t")
    assert said["kvscope.request.class"] == "interactive"


# -- whose trace it is -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_the_span_continues_the_trace_of_the_http_request(at: Traced, stream: bool) -> None:
    at.post("/v1/chat/completions", {**CHAT, "stream": stream}, **SAMPLED)
    (span,) = at.spans()
    assert span.parent is not None
    assert (f"{span.parent.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
    assert span.parent.is_remote
    assert span.context is not None
    assert dict(span.context.trace_state) == {"vendor": "abc", "other": "1"}
    assert span.kind == SpanKind.SERVER


@pytest.mark.parametrize("stream", [False, True])
def test_a_router_passes_the_callers_trace_on(at: Traced, stream: bool) -> None:
    with routing([at.server.url]) as router:
        HTTP.post(router.url + "/v1/chat/completions", json={**CHAT, "stream": stream}, headers=SAMPLED)
    (span,) = at.spans()
    assert span.parent is not None
    assert (f"{span.parent.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
    assert span.parent.trace_state.to_header() == SAMPLED["tracestate"]


@pytest.mark.parametrize(
    "traceparent", ["", "nonsense", f"00-{'0' * 32}-{PARENT}-01", f"ff-{TRACE}-{PARENT}-01", "00-" + "f" * 5000]
)
def test_a_malformed_traceparent_begins_a_trace_of_its_own(at: Traced, traceparent: str) -> None:
    assert at.post("/v1/chat/completions", CHAT, traceparent=traceparent, tracestate="=,,=" * 50).status_code == 200
    (span,) = at.spans()
    assert span.parent is None


def test_under_a_span_of_an_http_instrumentation_it_is_an_internal_child() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing = Tracing.of("tiny", lambda: 1.0, provider)
    assert tracing is not None
    with provider.get_tracer("http").start_as_current_span("POST /v1/chat/completions") as outer:
        tracing.call("chat", SAMPLED, None).start("r", "standard", 1.0).refused("queue_full", "full")
    tracing.close()
    inner = next(s for s in exporter.get_finished_spans() if s.name == "chat")
    assert inner.kind == SpanKind.INTERNAL
    assert inner.parent is not None
    assert inner.parent.span_id == outer.get_span_context().span_id


def test_a_trace_that_the_caller_does_not_keep_has_no_span_and_no_exemplar() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider(sampler=ParentBased(ALWAYS_OFF))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with serving(load_model("tiny"), tracers=provider) as server:
        at = Traced(server, exporter)
        at.post("/v1/chat/completions", CHAT, traceparent=f"00-{TRACE}-{PARENT}-00")
        at.post("/v1/chat/completions", CHAT, **SAMPLED)
        at.spans(1)
        labels = {e.labels[0] for e in exemplars(server)}
    kept, other = server.records[1], server.records[0]
    assert ("trace_id", TRACE) in labels
    assert labels <= {("trace_id", TRACE), ("request_id", other.request_id)}
    assert ("request_id", kept.request_id) not in labels


def exemplars(server: RunningServer) -> list[Any]:
    return [row.exemplar for family in server.telemetry.snapshot() for row in family.rows if row.exemplar is not None]


def test_exemplars_of_duration_and_first_token_name_traces_that_were_exported(at: Traced) -> None:
    at.post("/v1/chat/completions", CHAT, **SAMPLED)
    (span,) = at.spans()
    record = at.record(span)
    assert record.first_token is not None
    assert span.context is not None
    labels = (("trace_id", TRACE), ("span_id", f"{span.context.span_id:016x}"))
    values = {round(e.value, 9) for e in exemplars(at.server) if e.labels == labels}
    assert {round(record.finished - record.arrival, 9), round(record.first_token - record.arrival, 9)} <= values


# -- how it ends ---------------------------------------------------------------------------------------------------------


def failed(span: ReadableSpan, error_type: str) -> None:
    assert span.status.status_code == StatusCode.ERROR
    assert attributes(span)["error.type"] == error_type
    assert span.start_time is not None
    assert span.end_time is not None
    assert span.end_time >= span.start_time
    assert all(span.start_time <= event.timestamp <= span.end_time for event in span.events)


def test_a_client_that_leaves_ends_its_span_as_aborted(at: Traced) -> None:
    with HTTP.stream(
        "POST", at.server.url + "/v1/chat/completions",
        json={**CHAT, "max_tokens": 3000, "stream": True, "ignore_eos": True}, headers=SAMPLED,
    ) as response:  # fmt: skip
        next(response.iter_bytes())
    (span,) = at.spans()
    failed(span, "aborted")
    check_span_tells_what_the_record_tells(span, at.record(span))
    assert "gen_ai.response.finish_reasons" not in attributes(span)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"model": "gpt-9"}, "model_not_found"),
        ({"max_tokens": 10**30}, "context_length_exceeded"),
        ({"max_tokens": 0}, "invalid_value"),
        ({"seed": 10**40}, "invalid_value"),
        ({"messages": 3}, "invalid_type"),
        ({"deadline_seconds": -1.0}, "invalid_value"),
    ],
)
def test_a_refused_request_has_a_span_that_names_the_code_of_its_error(
    at: Traced, change: dict[str, Any], code: str
) -> None:
    answer = at.post("/v1/chat/completions", CHAT | change, **SAMPLED).json()["error"]
    (span,) = at.spans()
    failed(span, code)
    assert answer["code"] == code
    assert answer["message"].startswith((span.status.description or "?").split(" ")[0])
    assert "gen_ai.response.id" not in attributes(span)


def test_what_is_not_authorized_leaves_no_span() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with serving(load_model("tiny"), ServerSettings(token="secret", grace_seconds=1.0), tracers=provider) as server:
        assert HTTP.post(server.url + "/v1/chat/completions", json=CHAT, headers=SAMPLED).status_code == 401
    assert exporter.get_finished_spans() == ()


def test_a_deadline_ends_the_span_with_the_error_that_the_client_gets(at: Traced) -> None:
    answer = at.post("/v1/chat/completions", {**CHAT, "deadline_seconds": 1e-6})
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    (span,) = at.spans()
    failed(span, "deadline_exceeded")
    check_span_tells_what_the_record_tells(span, at.record(span))
    assert "The deadline passed" in (span.status.description or "")


def test_a_full_queue_and_a_failing_step_end_their_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    with traced(max_num_seqs=1, max_queued=1) as at:
        hold, entered, execute = threading.Event(), threading.Event(), at.server.engine.executor.execute

        def wait(*args: Any, hold: threading.Event = hold, entered: threading.Event = entered) -> Any:
            entered.set()
            hold.wait(20)
            raise RuntimeError("the device is gone")

        monkeypatch.setattr(at.server.engine.executor, "execute", wait)
        answers: list[httpx.Response] = []
        clients = [threading.Thread(target=lambda: answers.append(at.post("/v1/chat/completions", CHAT))) for _ in "ab"]
        clients[0].start()
        assert entered.wait(10)
        clients[1].start()
        wait_for(lambda: at.server.engine.num_waiting == 1, 10, "the queue full")
        assert at.post("/v1/chat/completions", CHAT).status_code == 429
        (refused,) = at.spans()
        failed(refused, "queue_full")
        monkeypatch.setattr(at.server.engine.executor, "execute", execute)
        hold.set()
        for client in clients:
            client.join(20)
        spans = {s.status.status_code: s for s in at.spans(2)}
        failed(spans[StatusCode.ERROR], "engine_error")
        assert "the device is gone" in (spans[StatusCode.ERROR].status.description or "")
        for span in spans.values():
            check_span_tells_what_the_record_tells(span, at.record(span))


def test_preempted_requests_tell_each_time_and_their_phases_still_add_up() -> None:
    with traced(num_blocks=12, block_size=16, max_model_len=160, max_num_seqs=4, prefix_caching=False) as at:
        body = {"model": "tiny", "prompt": "x" * 30, "max_tokens": 100, "ignore_eos": True}
        clients = [threading.Thread(target=at.post, args=("/v1/completions", body)) for _ in range(4)]
        for client in clients:
            client.start()
        for client in clients:
            client.join(60)
        spans = at.spans(4)
        assert sum(attributes(s)["kvscope.request.preemptions"] for s in spans) > 0
        for span in spans:
            check_span_tells_what_the_record_tells(span, at.record(span))


def test_a_shutdown_ends_the_spans_of_requests_in_flight() -> None:
    with traced() as at:
        body = {**CHAT, "max_tokens": 3000, "ignore_eos": True}
        client = threading.Thread(target=at.post, args=("/v1/chat/completions", body))
        client.start()
        wait_for(lambda: at.server.engine.num_running == 1, 10, "running")
        exporter = at.exporter
    client.join(10)
    (span,) = exporter.get_finished_spans()
    failed(span, "aborted")


# -- what it costs when nobody listens ---------------------------------------------------------------------------------


def test_without_an_sdk_a_server_makes_no_span_and_does_not_look_for_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("touched OpenTelemetry")

    before = threading.enumerate()
    with serving(load_model("tiny")) as server:
        for owner, name in (
            (trace.NoOpTracer, "start_span"),
            (trace.ProxyTracer, "start_span"),
            (context, "get_current"),
        ):
            monkeypatch.setattr(owner, name, forbidden)
        monkeypatch.setattr("opentelemetry.propagate.extract", forbidden)
        monkeypatch.setattr("opentelemetry.trace.get_current_span", forbidden)
        assert "spans" not in {thread.name for thread in threading.enumerate() if thread not in before}
        assert HTTP.post(server.url + "/v1/chat/completions", json=CHAT, headers=SAMPLED).status_code == 200
        assert HTTP.post(server.url + "/v1/chat/completions", json=CHAT | {"model": "no"}).status_code == 404
        labels = [label for exemplar in exemplars(server) for label, _ in exemplar.labels]
    assert set(labels) == {"request_id"}


def test_every_state_and_outcome_has_its_name() -> None:
    from observability.telemetry import tracing

    assert len(tracing._ENTERED) == len(tracing._PHASE) == len(catalog.STATES)
    assert {*tracing.ERROR_TYPES, *tracing._SERVED, *catalog.REFUSED_OUTCOMES} == set(catalog.OUTCOMES)
