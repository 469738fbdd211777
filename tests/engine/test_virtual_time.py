"""Engine.run: arrivals in virtual time, serial replay, ticks, and a recorded trace against a ten-line script."""

from __future__ import annotations

import json

import pytest

from observability.engine.types import PromptSpan
from tests.engine.support import Exposition, TimedExecutor, assert_idle_and_whole, make_engine, make_request, value


def test_idle_time_is_jumped_over_and_booked_as_idle():
    engine = make_engine(TimedExecutor(step_seconds=0.5, token_seconds=0.0))
    requests = [make_request(PromptSpan(8, (i,)), 2, arrival=at) for i, at in enumerate((10.0, 100.0, 100.2))]
    engine.run(iter(requests))
    assert_idle_and_whole(engine)
    finished = [r.finished for r in engine.telemetry.finished]
    assert finished == [11.0, 101.0, 101.5]
    assert [r.arrival for r in engine.telemetry.finished] == [10.0, 100.0, 100.2]
    assert value(engine, "kvscope_step_seconds", component="idle") == pytest.approx(10 + 89)
    assert value(engine, "kvscope_step_seconds") == pytest.approx(101.5)


def test_serial_replay_runs_one_request_at_a_time():
    engine = make_engine(TimedExecutor(step_seconds=0.5, token_seconds=0.0))
    engine.run((make_request(PromptSpan(8, (i,)), 4, arrival=float(i)) for i in range(3)), serial=True)
    assert [(r.arrival, r.finished) for r in engine.telemetry.finished] == [(0.0, 2.0), (2.0, 4.0), (4.0, 6.0)]


def test_requests_are_read_one_ahead():
    engine = make_engine(TimedExecutor(), max_queued=2)
    read = []

    def source():
        for i in range(50):
            read.append(i)
            yield make_request(PromptSpan(8, (i,)), 4, arrival=i * 10.0)

    ahead = []
    engine.run(source(), tick_seconds=10.0, on_tick=lambda now: ahead.append(len(read) - now / 10.0))
    assert len(engine.telemetry.finished) == 50
    assert max(ahead) <= 2


def test_ticks_come_once_at_each_interval_with_fresh_gauges():
    engine = make_engine(TimedExecutor(step_seconds=0.75, token_seconds=0.0))
    seen = []

    def on_tick(now):
        shown = Exposition(engine)
        assert shown.value("kvscope_last_update_timestamp_seconds") == now
        seen.append((now, shown.value("kvscope_requests_running")))

    engine.run([make_request(PromptSpan(8, (1,)), 8, arrival=5.0)], tick_seconds=2.0, on_tick=on_tick)
    assert [now for now, _ in seen] == [2.0, 4.0, 6.5, 8.0, 10.25]
    assert [running for _, running in seen] == [0, 0, 1, 1, 1]


def test_ticks_that_no_float_holds_exactly_come_once_each_and_time_goes_on():
    engine, seen = make_engine(TimedExecutor()), []
    engine.run([make_request(PromptSpan(8, (1,)), 2, arrival=700.0)], tick_seconds=0.7, on_tick=seen.append)
    assert len(seen) == 1000
    assert seen == pytest.approx([0.7 * (i + 1) for i in range(1000)], abs=0.021)
    assert seen == sorted(set(seen))


def test_what_is_refused_is_marked_and_the_others_go_on():
    engine = make_engine(TimedExecutor(), max_queued=1, max_num_seqs=1)
    requests = [make_request(PromptSpan(n, (1,)), 4, arrival=0.0) for n in (8, 500, 8)]
    engine.run(iter(requests))
    assert [r.outcome for r in requests] == ["length", "invalid", "rejected"]
    assert "500 tokens" in requests[1].error
    assert "queue is full" in requests[2].error
    assert value(engine, "kvscope_requests", outcome="rejected") == 1
    assert value(engine, "kvscope_requests", outcome="invalid") == 1


# -- a recorded trace --------------------------------------------------------------------------------------------------

LIMIT = 600


@pytest.fixture(scope="module")
def lines(data_dir):
    with (data_dir / "traces" / "mooncake_conversation.jsonl").open() as file:
        return [json.loads(line) for line, _ in zip(file, range(LIMIT), strict=False)]


def replay(lines, *, serial, num_blocks, contiguous_below=2048):
    engine = make_engine(
        TimedExecutor(step_seconds=0.02),
        block_size=16,
        num_blocks=num_blocks,
        max_model_len=130_000,
        max_num_batched_tokens=8192,
        max_num_seqs=128,
        max_queued=10_000,
        contiguous_below=contiguous_below,
    )
    engine.run(
        (
            make_request(
                PromptSpan(line["input_length"], tuple(line["hash_ids"])),
                line["output_length"],
                arrival=line["timestamp"] / 1e3,
            )
            for line in lines
        ),
        serial=serial,
    )
    engine.check_integrity()
    shown = Exposition(engine)
    assert shown.value("kvscope_generation_tokens") == sum(line["output_length"] for line in lines)
    assert shown.value("kvscope_kv_queried_tokens") == sum(line["input_length"] for line in lines)
    assert shown.value("kvscope_telemetry_anomalies") == 0
    return shown.value("kvscope_kv_hit_tokens")


def test_serial_replay_on_an_unbounded_pool_hits_what_ten_lines_of_script_say(lines):
    seen, expected = set(), 0
    for line in lines:
        parts = line["hash_ids"]
        known = next((i for i, part in enumerate(parts) if part not in seen), len(parts))
        expected += min(known * 512, (line["input_length"] - 1) // 16 * 16)
        seen.update(parts)
    hits = replay(lines, serial=True, num_blocks=None)
    assert hits == pytest.approx(expected, rel=0.002)
    assert replay(lines, serial=False, num_blocks=None) <= hits
    # A smaller pool never hits more: with one request at a time, LRU keeps a subset of what a larger pool keeps.
    rates = [replay(lines, serial=True, num_blocks=n, contiguous_below=0) for n in (8_200, 20_000, 60_000)]
    assert rates == sorted(rates)
    assert 0 < rates[0] < rates[-1] <= hits
    placed = [replay(lines, serial=True, num_blocks=n) for n in (8_200, 60_000)]
    assert placed == sorted(placed)
    assert placed[-1] <= hits
