"""`kvscope doctor` on kvscope's own pages: numbers with their status, and what is wrong by construction, as for other engines."""

from __future__ import annotations

import time

import pytest

from exporters.adapters.doctor import examine
from exporters.adapters.endpoint import Answer
from exporters.adapters.engines import BUNDLED, PLUGIN
from exporters.adapters.own import stale
from exporters.adapters.page import parse
from exporters.prometheus import start_exporter
from tests.adapters.serving import Server, page_of
from tests.adapters.test_doctor import finding, reading
from tests.adapters.test_endpoint import codes, look
from tests.telemetry.test_exporter import busy


def test_readings_of_the_bundled_engine_are_what_its_recorder_was_told() -> None:
    bench = busy()
    with start_exporter(bench.t) as exporter:
        report = examine(exporter.url, interval_seconds=0)
    assert report.engine == BUNDLED
    assert reading(report, "Requests running").value == 2  # busy() publishes [0, 2, 0] and [1, 0, 0]
    assert reading(report, "Requests waiting").value == 1
    assert reading(report, "KV pool in use").value == pytest.approx(3 / 64)  # 3 active, 1 evictable and 60 free blocks
    assert {r.status for r in report.readings} <= {"measured", "estimated", "unavailable"}
    slow = reading(report, "Time to first token p99 since start")
    assert slow.status == "estimated"
    assert slow.low is not None
    assert slow.high is not None
    # requests of busy() have a prefill of 0, 0.05 ... 0.55 s, the slowest of 12 is the 99th percentile
    assert slow.high >= 0.55
    assert slow.low <= 0.65


def page(*, running: float = 1, written: float = 0.0, more: str = "") -> str:
    return (
        'kvscope_engine_info{model="m",version="0.1.0"} 1\n'
        f'kvscope_requests_running{{model="m",class="standard"}} {running}\n'
        f'kvscope_last_update_timestamp_seconds{{model="m",source="engine"}} {written}\n{more}'
    )


FAULTS = {
    "a histogram of zeros": ('# TYPE kvscope_time_to_first_token_seconds histogram\nkvscope_time_to_first_token_seconds_bucket{model="m",class="standard",le="+Inf"} 208\n'
        'kvscope_time_to_first_token_seconds_sum{model="m",class="standard"} 0\nkvscope_time_to_first_token_seconds_count{model="m",class="standard"} 208\n', "sum_is_zero", "208 observations"),
    "refused measurements": ('kvscope_telemetry_anomalies_total{model="m",reason="negative_interval"} 3\n', "refused_measurements", "negative_interval 3"),
    "another type": ("# TYPE kvscope_requests_running counter\n", "other_type", "declared as counter"),
    "two writers": ('kvscope_requests_running{model="m",class="standard"} 9\n', "series_twice", "1 series"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("beside", ["", page_of("vllm")], ids=[BUNDLED, PLUGIN])
def test_what_is_wrong_by_construction_is_found_on_own_pages_too(server: Server, fault: str, beside: str) -> None:
    more, code, words = FAULTS[fault]
    server.pages["/metrics"] = page(more=more) + beside
    report = look(server)
    assert report.engine == (PLUGIN if beside else BUNDLED)
    assert words in finding(report, code)
    assert report.exit_code == 1
    assert reading(report, "Requests running").value == 1


def test_a_source_that_writes_no_more_is_found_and_one_that_writes_is_not(server: Server) -> None:
    server.pages["/metrics"] = page(written=time.time() - 3600)
    assert "3,6" in finding(look(server, interval=0.05), "stale_source")
    server.pages["/metrics"] = page(written=time.time())
    assert codes(look(server, interval=0.05)) == set()


def test_kv_events_that_do_not_come_are_told_while_tokens_are_computed_alone() -> None:
    now = time.time()
    events = f'kvscope_last_update_timestamp_seconds{{model="m",source="kv_events"}} {now - 90}\n'
    tokens = 'kvscope_generation_tokens_total{model="m",class="standard"}'
    idle, later = (
        parse(Answer("http://h", page(written=now, more=f"{events}{tokens} {n}\n").encode(), "")) for n in (5, 9)
    )
    assert list(stale(idle, idle, now)) == []
    (told,) = stale(idle, later, now)
    assert (told.level, told.code) == ("note", "no_kv_events")
    assert "90 s ago" in told.found
