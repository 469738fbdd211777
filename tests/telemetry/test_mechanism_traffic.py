"""The engine with every mechanism switched on, in virtual time: each family of a mechanism moves, and is absent where it is off (QD7)."""

from __future__ import annotations

import math
import random
from collections import defaultdict

import pytest

from observability import catalog as c
from observability.engine.engine import Engine
from observability.engine.types import ControllerConfig
from tests.engine.support import assert_idle_and_whole, make_engine, make_request, tokens, value
from tests.telemetry.test_engine_traffic import OF_MECHANISMS

EVERYTHING = {
    "num_blocks": 60, "num_compressed_blocks": 40, "compressed_from": 64, "recent_window": 16, "contiguous_below": 40,
    "max_num_batched_tokens": 64, "max_model_len": 128, "num_host_blocks": 200, "compaction_seconds": 0.004,
    "max_wait_seconds": 0.5, "max_queued": 1000, "prefetch_warmup_ratio": 0.5, "predictive_admission": True,
    "controller": ControllerConfig(
        interval_seconds=0.05, window_seconds=0.5, min_requests=5, patience=2, min_batched_tokens=16
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def everything() -> tuple[Engine, dict[str, set[float]]]:
    engine = make_engine(**EVERYTHING)
    engine.executor.kv_fixed_bytes_per_sequence = 0
    dice, seen = random.Random(5), defaultdict(set)

    def observe() -> None:
        engine.publish()
        for family, rows in engine.telemetry.snapshot():
            numbers = [0.0 if math.isnan(row.value) else row.value * (i + 1) for i, row in enumerate(rows)]
            seen[family.name].add(round(sum(numbers), 9))

    talks = [tokens(i, 120) for i in range(8)]
    for step in range(900):
        if step < 700 and engine.num_waiting < 12 and dice.random() < 0.4:
            prompt = [*dice.choice(talks)[: dice.randrange(8, 100)], *tokens(1000 + step, dice.randrange(1, 9))]
            engine.add(make_request(
                prompt, dice.randrange(1, 60), request_class=dice.choice(c.CLASSES), tenant=dice.choice("abc"),
                arrival=engine.executor.clock.now(),
            ))  # fmt: skip
        engine.step()
        observe()
    engine.run_until_idle()
    observe()
    return engine, seen


@pytest.mark.parametrize(
    "family",
    sorted(
        OF_MECHANISMS
        - {c.KV_FIXED_BYTES, c.KV_FIXED_PER_SEQUENCE, c.SESSION_SNAPSHOTS, c.SESSION_STARTS, c.SESSION_TOKENS},
        key=lambda f: f.name,
    ),
    ids=lambda f: f.name,
)
def test_every_family_of_a_mechanism_changes_under_traffic(everything, family) -> None:
    _, seen = everything
    assert len(seen[family.name]) > 1, f"{family.name} never moved"


@pytest.mark.parametrize("reason", c.MOVES)
def test_blocks_were_moved_for_every_reason(everything, reason) -> None:
    assert value(everything[0], "kvscope_kv_moved_blocks", reason=reason) > 0


def test_moves_are_those_that_the_executor_made(everything) -> None:
    engine, _ = everything
    made = defaultdict(int)
    for kind, pairs in engine.executor.moves:
        made[kind] += len(pairs)
    told = {reason: value(engine, "kvscope_kv_moved_blocks", reason=reason) for reason in c.MOVES}
    assert made["copy"] == told["compaction"]
    assert made["compress"] == told["compress"]
    assert made["offload"] == told["offload"] + told["swap_out"]
    assert made["load"] == told["load"] + told["swap_in"]


def test_in_virtual_time_quantized_blocks_have_no_error(everything) -> None:
    """They hold no numbers, so nothing is measured: absent, not 0."""
    engine, seen = everything
    assert value(engine, "kvscope_kv_moved_blocks", reason="compress") > 0
    assert not any("quantization" in name for name in seen)


def test_the_run_was_healthy(everything) -> None:
    assert_idle_and_whole(everything[0])


def test_the_fixed_part_of_running_sequences_is_shown() -> None:
    engine = make_engine(num_host_blocks=0)
    engine.executor.kv_fixed_bytes_per_sequence = 100
    for i in range(3):
        engine.add(make_request(tokens(i, 8), 4))
    engine.step()
    engine.publish()
    blocks = value(engine, "kvscope_kv_blocks", state="active")
    assert value(engine, "kvscope_kv_fixed_bytes") == 300
    assert value(engine, "kvscope_kv_fixed_bytes_per_sequence") == 100
    assert value(engine, "kvscope_kv_bytes_per_token") * engine.config.block_size == engine.executor.kv_bytes_per_block
    assert value(engine, "kvscope_kv_bytes", kind="active") == blocks * 64 + 300
    assert value(engine, "kvscope_kv_bytes", kind="reserved") == 64 * 64 + 8 * 100  # a part for each of max_num_seqs
    engine.run_until_idle()
    assert engine.kv_state().fixed_bytes == 0 or engine.kv_state().fixed_bytes is None


@pytest.mark.parametrize(
    "family",
    sorted(OF_MECHANISMS - {c.KV_LAYOUT_CHANGES, c.KV_SWITCH_LOSS, c.PREFILL_SPREAD, c.BATCH_SPLITS, c.QUEUE_PROMOTIONS}, key=lambda f: f.name),
    ids=lambda f: f.name,
)  # fmt: skip
def test_what_is_switched_off_is_absent(family) -> None:
    engine = make_engine()
    engine.add(make_request(tokens(1, 8)))
    engine.run_until_idle()
    samples = {s.family.name: s.rows for s in engine.telemetry.snapshot()}
    assert not [row for row in samples.get(family.name, ()) if not math.isnan(row.value)]
