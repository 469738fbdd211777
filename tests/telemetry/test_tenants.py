"""Series by tenant: exact for the first that come, bounded for all, never confused (cases QC)."""

from __future__ import annotations

import math
import threading

import pytest

from observability import catalog as c
from observability.telemetry.tenants import MAX_TENANT_LABEL, tenant_label
from tests.telemetry.bench import Bench, kv_state, total, value


def tenants_of(b: Bench) -> list[str]:
    return [
        row.labels[1] for f, rows in b.t.snapshot() if f is c.TENANT_TOKENS for row in rows if row.labels[2] == "prompt"
    ]


def test_there_are_no_series_by_tenant_until_one_is_named() -> None:
    b = Bench()
    b.serve(b.submit())
    assert not {f.name for f, _ in b.t.snapshot()} & {c.TENANT_REQUESTS.name, c.TENANT_TTFT.name, c.TENANT_TOKENS.name}
    b.serve(b.submit(tenant="acme"))
    assert tenants_of(b) == ["acme"]


def test_a_tenant_has_the_outcomes_first_tokens_and_tokens_of_its_requests_and_no_other() -> None:  # QC6
    b = Bench()
    for tenant, prefill, tokens in (("acme", 0.4, 3), ("zeta", 2.0, 5), ("acme", 1.0, 4), ("", 9.0, 7)):
        b.serve(b.submit(tenant=tenant, prompt=100 * tokens), queue=0.0, prefill=prefill, tokens=tokens)
    gone = b.submit(tenant="acme", prompt=5)
    b.t.finish(gone, "abort", b.clock.now)
    name = "kvscope_tenant_requests_total"
    absent = [math.nan] * 4  # outcomes that no tenant had
    assert [value(b.t, name, tenant="acme", outcome=o) for o in c.OUTCOMES] == pytest.approx(
        [0, 2, 1, *absent], nan_ok=True
    )
    assert [value(b.t, name, tenant="zeta", outcome=o) for o in c.OUTCOMES] == pytest.approx(
        [0, 1, 0, *absent], nan_ok=True
    )
    ttft = "kvscope_tenant_time_to_first_token_seconds"
    assert [value(b.t, f"{ttft}_bucket", tenant="acme", le=le) for le in ("0.2", "0.4", "0.8", "2.0", "+Inf")] == [
        0, 1, 1, 2, 2,
    ]  # fmt: skip
    assert value(b.t, f"{ttft}_sum", tenant="acme") == pytest.approx(1.4)
    assert value(b.t, "kvscope_tenant_tokens_total", tenant="acme", kind="prompt") == 700
    assert value(b.t, "kvscope_tenant_tokens_total", tenant="acme", kind="generation") == 7
    assert value(b.t, "kvscope_tenant_tokens_total", tenant="zeta", kind="generation") == 5
    assert total(b.t, "kvscope_requests_total") == 5


def test_tenants_beyond_the_most_share_other_and_each_of_their_requests_counts_as_a_fold() -> None:
    b = Bench(max_tenants=2)
    for tenant in ("a", "b", "c", "d", "a", "c"):
        b.serve(b.submit(tenant=tenant))
    assert tenants_of(b) == ["a", "b", "other"]
    assert value(b.t, "kvscope_tenant_requests_total", tenant="a", outcome="length") == 2
    assert value(b.t, "kvscope_tenant_requests_total", tenant="other", outcome="length") == 3
    assert value(b.t, "kvscope_label_folds_total", label="tenant") == 3


def test_a_tenant_that_calls_itself_other_takes_no_ones_place() -> None:
    b = Bench(max_tenants=2)
    for tenant in ("other", "a", "b", "other", "c"):
        b.serve(b.submit(tenant=tenant))
    assert tenants_of(b) == ["other", "a", "b"]
    assert value(b.t, "kvscope_tenant_requests_total", tenant="other", outcome="length") == 3


def test_tenants_can_be_switched_off() -> None:
    b = Bench(max_tenants=0)
    b.serve(b.submit(tenant="acme"))
    b.t.received("standard", "acme")
    b.t.refused("standard", "rejected", "acme")
    assert tenants_of(b) == []
    assert value(b.t, "kvscope_label_folds_total", label="tenant") == 0


def test_a_tenant_whose_requests_were_all_refused_shows_with_the_next_gauges() -> None:
    b = Bench()
    for _ in range(3):
        b.t.received("standard", "acme")
        b.t.refused("standard", "rejected", "acme")
    b.t.publish(kv_state(), [0, 0, 0], [0, 0, 0])
    b.t.received("standard", "acme")
    b.t.refused("standard", "invalid", "acme")
    assert value(b.t, "kvscope_tenant_requests_total", tenant="acme", outcome="rejected") == 3
    assert value(b.t, "kvscope_tenant_requests_total", tenant="acme", outcome="invalid") == 1
    assert total(b.t, "kvscope_tenant_tokens_total") == 0


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("acme", "acme"),
        ("  acme\t", "acme"),
        ('a"b\\c\nd', 'a"b\\c\nd'),
        ("日本語", "日本語"),
        ("lone \ud800 surrogate", "lone ? surrogate"),
        ("x" * 64, "x" * 64),
    ],
)
def test_a_name_stays_what_it_is_unless_it_is_no_text(name: str, label: str) -> None:
    assert tenant_label(name) == label


def test_a_long_name_is_cut_and_told_from_others_with_the_same_beginning() -> None:
    labels = {tenant_label("x" * 10_000 + str(i)) for i in range(100)}
    assert len(labels) == 100
    assert {len(label) for label in labels} == {MAX_TENANT_LABEL}


def test_names_that_become_the_same_label_are_one_tenant() -> None:
    b = Bench()
    for tenant in ("acme", " acme ", "acme\n"):
        b.serve(b.submit(tenant=tenant))
    b.serve(b.submit(tenant="  "))
    assert tenants_of(b) == ["acme"]
    assert value(b.t, "kvscope_tenant_requests_total", tenant="acme", outcome="length") == 3


def test_threads_that_submit_at_once_lose_no_request_of_a_tenant() -> None:
    b = Bench(max_tenants=5)

    def submit(offset: int) -> None:
        for i in range(3000):
            b.t.received("standard", f"t{(i + offset) % 12}")
            b.t.refused("standard", "rejected", f"t{(i + offset) % 12}")

    threads = [threading.Thread(target=submit, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        b.t.publish(kv_state(), [0, 0, 0], [0, 0, 0])
        b.serve(b.submit())
    b.t.publish(kv_state(), [0, 0, 0], [0, 0, 0])
    assert len(tenants_of(b)) == 6
    assert total(b.t, "kvscope_tenant_requests_total", outcome="rejected") == 12_000
    kept = sum(total(b.t, "kvscope_tenant_requests_total", tenant=t) for t in tenants_of(b) if t != "other")
    assert kept + value(b.t, "kvscope_label_folds_total", label="tenant") == 12_000
    assert len(set(b.t.layout)) == len(b.t.layout)
    assert not b.anomalies()


def test_a_name_of_spaces_is_no_tenant_even_when_others_share_a_series() -> None:
    b = Bench(max_tenants=1)
    for tenant in ("acme", "zeta", " ", "\t"):
        b.serve(b.submit(tenant=tenant))
        b.t.refused("standard", "rejected", tenant)
    name = "kvscope_tenant_requests_total"
    assert tenants_of(b) == ["acme", "other"]
    assert [value(b.t, name, tenant="other", outcome=o) for o in ("length", "rejected")] == [1, 1]
