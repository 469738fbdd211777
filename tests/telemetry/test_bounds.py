"""What clients send cannot make the exposition grow, break or lie: a million tenants, hostile names, unknown models (cases QC, QB6)."""

from __future__ import annotations

import json
import subprocess
import tracemalloc
from collections.abc import Callable
from dataclasses import replace

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from exporters.text import render
from observability import catalog as c
from observability.buckets import MOST, BucketPlan
from observability.engine.kv.residency import Ledger
from observability.telemetry.recorder import Telemetry
from observability.telemetry.tenants import DEFAULT_MAX_TENANTS, MAX_TENANT_LABEL, tenant_label
from tests.telemetry.bench import PREEMPTED, SWAPPED, Bench, kv_state, total, value

#: Series of one engine, gauges included: in the default settings, with everything switched on and every tenant there may be, and what
#: each further class of requests adds.
DEFAULT_BUDGET, FULL_BUDGET, CLASS_BUDGET = 1500, 2600, 325

HOSTILE = (
    'quote " and \\ backslash', "line\nbreak", "carriage\rreturn", "tab\tand\x0bvertical", "nul\x00byte", "\x1b[31mescape",
    "}{,=", 'a",le="+Inf"} 99\nkvscope_requests_total{x="', "# EOF\n", "\\n", "\\", '"', "日本語 🙂", "\u2028\u2029\x85\x1c", "\ufeffbom",
    "lone \ud800 surrogate", "\udcff\udcfe", "e\u0301", "x" * 10_000, "🙂" * 2_500, " ", "../../etc/passwd", "{{ .Labels }}", "<script>",
)  # fmt: skip


def series_of(telemetry: Telemetry) -> int:
    return sum(len(rows) for _, rows in telemetry.snapshot())


def per_tenant() -> int:
    outcomes = 3  # stop, length, abort
    return outcomes + len(c.TENANT_TTFT_BOUNDS) + 3 + len(c.TENANT_TOKEN_KINDS)


# -- budget ---------------------------------------------------------------------------------------------------------------


def test_an_engine_in_default_settings_stays_within_its_budget_of_series() -> None:  # QB6
    b = Bench()
    for i in range(9):
        b.serve(b.submit(prompt=90_000 * i))
    b.t.preempted(b.submit())
    b.t.publish(kv_state(active=4, free=60, stored=50), [0, 1, 0], [0, 0, 0])
    assert 1000 < series_of(b.t) < DEFAULT_BUDGET


def test_an_engine_with_everything_on_and_every_tenant_stays_within_its_budget_of_series() -> None:
    b = Bench(kv_dtype="int8")
    b.t.mechanisms.expect(moves=range(len(c.MOVES)), prefetch=True, controller=True, sessions=True)
    b.t.mechanisms.limits(2048, 32)
    b.t.expect(states=(PREEMPTED, SWAPPED), tiers=range(len(c.TIERS)), layouts=range(len(c.LAYOUTS)))
    for i in range(DEFAULT_MAX_TENANTS + 9):
        b.serve(b.submit(tenant=f"tenant {i}"))
    b.t.preempted(b.submit(), 0)
    b.t.preempted(b.submit(), 1)
    b.t.transition(b.submit(), SWAPPED)
    for tensor in range(len(c.TENSORS)):
        for group in ("00-09", "10-19", "20-29"):
            b.t.quant_error(tensor, group, "int8", 0.01, 100.0, 0.1, 64)
    attention = [(group, 0.1, 10.0) for group in ("00-09", "10-19", "20-29")]
    b.t.quant_compared(b.submit(), "int8", 0.01, True, attention)
    state = kv_state(free=60, evictable=1, active=3, stored=40)
    state = replace(
        state,
        compressed=(5, 2, 1),
        bytes_per_compressed_block=256,
        host=(9, 1, 0),
        fixed_bytes=512,
        fixed_bytes_per_sequence=256,
    )
    lives = Ledger(64, b.clock).residency()
    b.t.publish(replace(state, residency=(lives, lives, lives), eviction_memory_seconds=60.0), [0, 2, 0], [1, 0, 0])
    assert not b.anomalies()
    series = series_of(b.t)
    assert 2000 < series < FULL_BUDGET
    assert {f.name for f, _ in b.t.snapshot()} >= {
        f.name for f in c.FAMILIES if f.name.startswith("kvscope_kv") and f not in c.FOREIGN_FAMILIES
    } - {c.KV_COPY_SECONDS.name}  # of a GPU
    for name in ("interactive", "long_context"):
        b.serve(b.submit(request_class=name))
    assert series < series_of(b.t) <= series + 2 * CLASS_BUDGET


def test_the_largest_bucket_plan_has_a_known_most_of_series() -> None:
    plan = BucketPlan(
        latency=tuple(sorted({0.8, 20.0, *(100.0 + i for i in range(MOST["latency"] - 2))})),
        inter_token=tuple(sorted({0.1, *(1.0 + i for i in range(MOST["inter_token"] - 1))})),
        tail=tuple(float(i) for i in range(MOST["tail"])),
    )
    more = len(Bench(buckets=plan).t.layout) - len(Bench().t.layout)
    assert more < 3 * len(c.CLASSES) * 300 + MOST["tail"] * (len(c.STATES) * len(c.COMPONENTS) + 1)


# -- tenants --------------------------------------------------------------------------------------------------------------


def test_a_million_tenants_take_the_memory_and_the_series_of_twenty() -> None:
    b = Bench(keep_finished=16)
    for i in range(2_000):  # whole lives of requests
        b.serve(b.submit(tenant=f"tenant-{i}"), tokens=1)
    series = series_of(b.t)
    for i in range(2_000, 900_000):
        b.t.received("standard", f"tenant-{i}")
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for i in range(900_000, 1_000_000):
            b.t.received("standard", f"tenant-{i}" + "x" * (i % 3 * 40))
            if i % 50 == 0:
                b.serve(b.t.arrive(f"r{i}", "standard", 10, b.clock.now, tenant=f"tenant-{i}"), tokens=1)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 100_000, "bytes for 100,000 more tenants"
    assert series_of(b.t) == series
    assert total(b.t, "kvscope_label_folds_total", label="tenant") == 1_000_000 - DEFAULT_MAX_TENANTS
    tenants = {row.labels[1] for f, rows in b.t.snapshot() if f is c.TENANT_TOKENS for row in rows}
    assert tenants == {*(f"tenant-{i}" for i in range(DEFAULT_MAX_TENANTS)), "other"}
    assert value(b.t, "kvscope_tenant_requests_total", tenant="other", outcome="length") == 2_000 - 20 + 2_000
    assert not b.anomalies()


@pytest.mark.parametrize("openmetrics", [False, True])
def test_hostile_names_come_out_of_the_reference_parsers_as_they_went_in(openmetrics: bool) -> None:
    b = Bench(max_tenants=100)
    for name in HOSTILE:
        trace = b.submit(tenant=name)
        b.serve(trace)
        b.serve(b.t.arrive(name, name, 10, b.clock.now, tenant=name))  # as an id and as a class, too
    text = render(b.t.snapshot(), openmetrics=openmetrics).decode()
    families = list((parse_openmetrics if openmetrics else parse_text)(text))
    read = [s for family in families for s in family.samples if s.name.startswith("kvscope_tenant_requests")]
    want = {tenant_label(name) for name in HOSTILE} - {""}
    assert {s.labels["tenant"] for s in read} == want
    assert len(read) == len(want) * 3  # stop, length, abort
    assert max(map(len, want)) == MAX_TENANT_LABEL
    assert {s.value for s in read if s.labels["outcome"] == "length"} == {2.0}
    known = {f.name for f in c.FAMILIES}
    assert {family.name for family in families} - known - {f"{name}_info" for name in known} == set()
    assert sum(len(family.samples) for family in families) == series_of(b.t)


def test_promtool_accepts_hostile_names(program: Callable[[str], str]) -> None:
    b = Bench(max_tenants=100)
    for name in HOSTILE:
        b.serve(b.submit(tenant=name))
    text = render(b.t.snapshot(), openmetrics=False)
    result = subprocess.run([program("promtool"), "check", "metrics"], input=text, capture_output=True, timeout=60)
    assert (result.returncode, (result.stdout + result.stderr).decode()) == (0, "")


@pytest.mark.parametrize("name", ["caf\udce9", 'a"b\\c\nd'])
def test_a_model_whose_name_is_no_text_or_needs_escapes_is_exported(name: str) -> None:
    t = Telemetry(name, executor="torch", virtual=False, device="cpu", kv_dtype="auto", clock=lambda: 0.0)
    for openmetrics, parse in ((False, parse_text), (True, parse_openmetrics)):
        families = list(parse(render(t.snapshot(), openmetrics=openmetrics).decode()))
        models = {s.labels.get("model") for f in families for s in f.samples} - {None}
        assert models == {name.encode("utf-8", "replace").decode()}
    json.dumps([s.labels for s in t.layout], ensure_ascii=False).encode()  # stores and JSON take it as well


# -- through the server ---------------------------------------------------------------------------------------------------


def test_models_tenants_and_classes_that_clients_make_up_reach_no_label_through_the_server() -> None:  # QC1, QC3, QC4
    pytest.importorskip("torch")
    from observability.engine.model.loading import load_model
    from tests.server.harness import serving

    with (
        serving(load_model("tiny")) as server,
        httpx.Client(base_url=server.url, trust_env=False, timeout=30) as client,
    ):

        def ask(model: str, tenant: bytes, kind: bytes) -> int:
            body = {"model": model, "prompt": "hi", "max_tokens": 1}
            headers = [(b"content-type", b"application/json"), (b"x-tenant", tenant), (b"x-kvscope-class", kind)]
            return client.post("/v1/completions", content=json.dumps(body), headers=headers).status_code

        assert ask("tiny", b"acme", b"standard") == 200
        server.wait_idle()
        before = series_of(server.telemetry)
        statuses = [ask(f"gpt-{i}", b"tenant-%d" % i, b"class-%d" % i) for i in range(40)]
        statuses += [ask('m"}\n', name, name) for name in (b"\xff\xfe", b'quote"\\', b"caf\xe9", b"t" * 10_000, b"")]
        assert {*statuses} == {404}
        assert client.get("/v1/completions/../secret?key=hunter2").status_code == 404
        assert ask("tiny", "größe".encode(), b"standard") == 200
        server.wait_idle()
        text = client.get("/metrics").text
        samples = [s for family in parse_text(text) for s in family.samples]
        assert {s.labels["model"] for s in samples if "model" in s.labels} == {"tiny"}
        assert {s.labels["class"] for s in samples if "class" in s.labels} == {*c.CLASSES}
        tenants = {s.labels["tenant"] for s in samples if "tenant" in s.labels}
        assert tenants == {"acme", *(f"tenant-{i}" for i in range(DEFAULT_MAX_TENANTS - 1)), "other"}
        assert series_of(server.telemetry) == before + DEFAULT_MAX_TENANTS * per_tenant() + (
            DEFAULT_MAX_TENANTS + 1
        )  # one was invalid
        refused = [
            s.value for s in samples if s.name == "kvscope_tenant_requests_total" and s.labels["outcome"] == "invalid"
        ]
        assert sum(refused) == 44, "each but the one without a tenant"
        assert value(server.telemetry, "kvscope_label_folds_total", label="tenant") == 26
