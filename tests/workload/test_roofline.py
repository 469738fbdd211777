"""The roofline executor against step times worked out by hand, on a toy GPU and model with round numbers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from observability import catalog
from observability.engine.clock import VirtualClock
from observability.engine.executor.hardware import GPU, GPUS
from observability.engine.executor.roofline import RooflineExecutor, StepCost, fit_num_blocks
from observability.engine.executor.virtual import ChunkShape, StepShape
from observability.engine.model.costs import MODELS, AttentionGroup, ModelCost
from observability.engine.types import Chunk, EngineConfig, PromptSpan, Request, SamplingParams, StepPlan
from observability.errors import ConfigError
from observability.telemetry.recorder import Telemetry

# 1 TFLOP/s and 100 GB/s attainable; 3 ms overhead a step
TOY_GPU = GPU(
    name="toy", peak_flops={"bfloat16": 2e12}, memory_bytes=10e9, memory_bandwidth=200e9, pcie_bandwidth=10e9,
    nvlink_bandwidth=50e9, compute_fraction=0.5, memory_fraction=0.5, schedule_seconds=0.0015, sample_seconds=0.0005,
    emit_seconds=0.001, sources={},
)  # fmt: skip
# 1.1 G parameters of 2 bytes: 1 G in layers, 0.05 G each in input table and output layer;
# 4 layers, 8 heads of 64 with 2 KV heads: 4 x 2 x 2 x 64 x 2 = 2,048 B a token
TOY = ModelCost(
    name="toy", parameters=1.1e9, active_parameters=1.1e9, vocab_size=100_000, tied_embeddings=False, weight_dtype="bfloat16",
    layers=4, hidden_size=500, heads=8, kv_heads=2, head_dim=64, max_context=10_000, kv_format="bfloat16",
    attention=(AttentionGroup(4, 4.0 * 8 * 64, {"bfloat16": 512.0}),),
)  # fmt: skip
CONFIG = EngineConfig(block_size=16, num_blocks=1024, max_model_len=8192)


def decoding(*computed: int) -> list[Request]:
    requests = []
    for n in computed:
        request = Request(f"r{n}", PromptSpan(n, tuple(range(-(-n // 512)))), SamplingParams(max_tokens=1000))
        request.num_computed = n
        requests.append(request)
    return requests


def executor(
    model: ModelCost = TOY, gpu: GPU = TOY_GPU, config: EngineConfig = CONFIG, **options: object
) -> RooflineExecutor:
    return RooflineExecutor(model, gpu, config, **options)  # type: ignore[arg-type]


def cost_of(
    run: RooflineExecutor,
    chunks: Sequence[tuple[int, int] | tuple[int, int, bool]],
    visible: Sequence[int],
    packed_tokens: int = 0,
) -> StepCost:
    """Of a step of chunks as (first position, tokens[, samples]) and of decodes by the tokens that each attends to."""
    shape = StepShape(tuple(ChunkShape(*chunk) for chunk in chunks), tuple(visible), packed_tokens)
    return run.roofline.step_cost(shape)


def test_a_decode_step_is_bound_by_reading_weights_and_kv() -> None:
    [end] = executor().execute(StepPlan([], decoding(1000, 3000)), None).ends
    # reads 2e9 B of layers and 0.1e9 B of output layer, (1001 + 3001) tokens of KV, writes 2 tokens: at 100 GB/s
    memory = (2.1e9 + (1001 + 3001 + 2) * 2048) / 100e9
    assert end == pytest.approx(0.003 + memory, rel=1e-12)
    assert end == pytest.approx(0.0240820, abs=1e-7)


def test_a_prefill_step_is_bound_by_arithmetic_with_a_quadratic_part() -> None:
    [request] = decoding(0)
    [end] = executor().execute(StepPlan([Chunk(request, 0, 2000, samples=True)], []), None).ends
    # 2 x 1e9 FLOPs a token, 2 x 0.05e9 for the one that the last yields; each of the positions 1..2000 sees so many tokens,
    # 4 layers x 4 x 8 x 64 FLOPs each
    flops = 2e9 * 2000 + 0.1e9 + 4 * 4 * 8 * 64 * (2000 * 2001 / 2)
    assert end == pytest.approx(0.003 + flops / 1e12, rel=1e-12)


def test_a_later_chunk_attends_to_what_is_cached() -> None:
    cost = cost_of(executor(), [(6000, 512)], [])
    flops = 2e9 * 512 + 0.1e9 + 4 * 4 * 8 * 64 * sum(range(6001, 6513))
    assert cost.compute_seconds == pytest.approx(flops / 1e12, rel=1e-12)
    assert cost.memory_seconds == pytest.approx((2.1e9 + 6512 * 2048) / 100e9, rel=1e-12)


def test_a_chunk_that_yields_no_token_leaves_the_output_layer_alone() -> None:
    cost = cost_of(executor(), [(6000, 512, False)], [])
    flops = 2e9 * 512 + 4 * 4 * 8 * 64 * sum(range(6001, 6513))
    assert cost.compute_seconds == pytest.approx(flops / 1e12, rel=1e-12)
    assert cost.memory_seconds == pytest.approx((2e9 + 6512 * 2048) / 100e9, rel=1e-12)
    # computing 4,500 tokens again takes three chunks, of which the last one yields the token that follows
    run = executor(config=replace(CONFIG, max_num_batched_tokens=2000))
    parts = [(0, 2000, False), (2000, 2000, False), (4000, 500, True)]
    assert run.recompute_seconds(4500) == pytest.approx(sum(cost_of(run, [part], []).seconds + 0.003 for part in parts))


def test_tied_embeddings_are_one_table_which_the_output_layer_reads() -> None:
    tied = executor(replace(TOY, tied_embeddings=True, parameters=1.05e9, active_parameters=1.05e9))
    for chunks, visible in (([(0, 100)], [5000] * 10), ([(0, 100, False)], []), ([], [7])):
        assert cost_of(tied, chunks, visible) == cost_of(executor(), chunks, visible)
    room, tied_room = (fit_num_blocks(run.roofline.model, TOY_GPU, CONFIG) for run in (executor(), tied))
    assert room == int((9e9 - 2.2e9) // (16 * 2048))
    assert tied_room == int((9e9 - 2.1e9) // (16 * 2048))


def test_a_prefill_of_llama_3_8b_takes_the_time_of_its_layers_and_of_one_row_of_logits() -> None:
    run = executor(MODELS["llama-3-8b"], GPUS["H100"], EngineConfig(num_blocks=None))
    # parameters of a layer by its matrices, and two norms; a final norm
    layer = 4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 14_336 + 2 * 4096
    flops = 2 * (32 * layer + 4096) * 8192 + 2 * 4096 * 128_256
    flops += 32 * 4 * 4096 * sum(range(1, 8193))
    cost = cost_of(run, [(0, 8192)], [])
    assert cost.compute_seconds == pytest.approx(flops / (0.6 * 989.5e12), rel=1e-12)
    assert cost.compute_seconds == pytest.approx(0.222, abs=5e-4)


def test_a_mixed_step_reads_the_weights_once_and_is_shared_by_cost() -> None:
    cost = cost_of(executor(), [(0, 100)], [5000] * 10)
    prefill_flops = 2e9 * 100 + 0.1e9 + 8192 * 5050
    decode_flops = 2.1e9 * 10 + 8192 * 50_000
    assert cost.compute_seconds == pytest.approx((prefill_flops + decode_flops) / 1e12)
    assert cost.memory_seconds == pytest.approx((2.1e9 + (100 + 50_000 + 10) * 2048) / 100e9)
    assert cost.seconds == cost.compute_seconds  # 0.2216 s against 0.022 s
    assert cost.prefill_share == pytest.approx(prefill_flops / (prefill_flops + decode_flops))
    # bound by memory: layers by tokens, output layer by sampled ones, KV to whom it belongs
    for samples, of_output in ((True, 1 / 9), (False, 0.0)):
        small = cost_of(executor(), [(0, 2, samples)], [5000] * 8)
        assert small.seconds == small.memory_seconds
        prefill = 2e9 * 2 / 10 + 0.1e9 * of_output + 2 * 2048
        decode = 2e9 * 8 / 10 + 0.1e9 * (1 - of_output) + (40_000 + 8) * 2048
        assert small.prefill_share == pytest.approx(prefill / (prefill + decode))


def test_two_gpus_halve_the_work_and_pay_for_all_reduces() -> None:
    one, two = (cost_of(executor(tensor_parallel=n), [(0, 1000)], []) for n in (1, 2))
    assert two.compute_seconds == pytest.approx(one.compute_seconds / 2)
    # 2 all-reduces x 4 layers x 1000 tokens x 500 x 2 B, of which each GPU sends 2 x 1/2, at 50 GB/s
    assert two.link_seconds == pytest.approx(2 * 4 * 1000 * 500 * 2 / 50e9)
    assert one.link_seconds == 0.0
    # 4 GPUs hold 2 KV heads: each reads half of the KV, a quarter of the weights
    four = cost_of(executor(tensor_parallel=4), [], [4000])
    assert four.memory_seconds == pytest.approx((2.1e9 / 4 + (4000 + 1) * 2048 / 2) / 100e9)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("contexts", [(10,), (1, 120, 4000, 70_000), tuple(range(100, 3300, 50))])
def test_a_run_of_repeats_takes_the_time_of_single_steps(name: str, contexts: tuple[int, ...]) -> None:
    model = MODELS[name]
    config = EngineConfig(num_blocks=None, max_num_seqs=64)
    gpu, tp = GPUS["H200"], 1 if model.layers < 43 else 8
    run = executor(model, gpu, config, tensor_parallel=min(tp, model.heads))
    ends = run.execute(StepPlan([], decoding(*contexts), repeats=300), None).ends
    single = executor(model, gpu, config, tensor_parallel=min(tp, model.heads))
    requests, one_by_one = decoding(*contexts), []
    for _ in range(300):
        one_by_one.append(float(single.execute(StepPlan([], requests), None).ends[0]))
        for request in requests:
            request.num_computed += 1
    assert len(ends) == 300
    assert ends == pytest.approx(one_by_one, rel=1e-9)
    assert run.clock.now() == ends[-1]


def test_a_run_stops_at_the_first_end_past_the_next_arrival() -> None:
    whole = executor().execute(StepPlan([], decoding(100), repeats=50), None).ends
    between = (whole[9] + whole[10]) / 2
    cut = executor().execute(StepPlan([], decoding(100), repeats=50), between).ends
    assert np.array_equal(cut, whole[:11])
    at = executor().execute(StepPlan([], decoding(100), repeats=50), float(whole[9])).ends
    assert np.array_equal(at, whole[:10])  # who arrives just then need not wait for another step
    assert len(executor().execute(StepPlan([], decoding(100), repeats=50), 0.0).ends) == 1


def test_the_time_of_each_step_goes_to_its_components() -> None:
    clock = VirtualClock()
    telemetry = Telemetry(
        "toy", executor="roofline", virtual=True, device="toy", kv_dtype="auto", clock=clock.now, wall_clock=clock.now
    )
    run = executor(telemetry=telemetry, clock=clock)
    [prefilling] = decoding(0)
    run.execute(StepPlan([Chunk(prefilling, 0, 100, samples=True)], decoding(5000)), None)
    run.execute(StepPlan([], decoding(5000, 2000), repeats=20), None)
    seconds = dict(zip(catalog.COMPONENTS, telemetry.seconds, strict=True))
    assert sum(seconds.values()) == pytest.approx(clock.now(), rel=1e-12)
    assert seconds["schedule"] == pytest.approx(21 * 0.0015)
    assert seconds["sample"] == pytest.approx(21 * 0.0005)
    assert seconds["emit"] == pytest.approx(21 * 0.001)
    mixed = cost_of(run, [(0, 100)], [5001])
    assert seconds["forward_prefill"] == pytest.approx(mixed.seconds * mixed.prefill_share)
    alone = sum(cost_of(run, [], [5001 + i, 2001 + i]).seconds for i in range(20))
    assert seconds["forward_decode"] == pytest.approx(mixed.seconds * (1 - mixed.prefill_share) + alone)


def test_more_work_never_takes_less_time() -> None:
    run = executor(MODELS["deepseek-v4-pro"], GPUS["H200"], EngineConfig(num_blocks=None), tensor_parallel=16)
    lengths = [1, 100, 128, 129, 1000, 4096, 10_000, 100_000, 1_000_000]
    for shorter, longer in itertools.pairwise(lengths):
        assert cost_of(run, [], [longer]).seconds >= cost_of(run, [], [shorter]).seconds
        assert cost_of(run, [(0, longer)], []).seconds >= cost_of(run, [(0, shorter)], []).seconds


def test_blocks_are_what_memory_leaves_beside_the_weights() -> None:
    config = EngineConfig(block_size=16, num_blocks=None)
    # 80 GB x 0.9 - 16.06 GB, by 16 x 131,072 B
    assert fit_num_blocks(MODELS["llama-3-8b"], GPUS["H100"], config) == int((72e9 - 16_060_522_496) // (16 * 131_072))
    # two GPUs: half of the weights and of each block on each
    two = int((72e9 - 141_107_412_992 / 2) // (16 * 327_680 / 2))
    assert fit_num_blocks(MODELS["llama-3-70b"], GPUS["H100"], config, tensor_parallel=2) == two
    # one latent head: every GPU of the group holds all of the KV
    weights = 671e9 + 2 * 129_280 * 7168  # fp8, but input table and output layer in bfloat16
    eight = int((0.9 * 141e9 - weights / 8) // (16 * 70_272))
    assert fit_num_blocks(MODELS["deepseek-v3"], GPUS["H200"], config, tensor_parallel=8) == eight
    with pytest.raises(ConfigError, match="leaves no room for KV"):
        fit_num_blocks(MODELS["llama-3-70b"], GPUS["H100"], config)


def test_blocks_are_what_compressed_ones_leave() -> None:
    model, gpu = MODELS["llama-3-8b"], GPUS["H100"]
    config = EngineConfig(num_compressed_blocks=10_000, max_model_len=131_072)
    packed = executor(model, gpu, config).kv_bytes_per_compressed_block
    left = 72e9 - 16_060_522_496 - 10_000 * packed
    assert fit_num_blocks(model, gpu, config) == int(left // (16 * 131_072))
    with pytest.raises(ConfigError, match="9,999,999 compressed blocks on 1 x H100"):
        fit_num_blocks(model, gpu, replace(config, num_compressed_blocks=9_999_999))


def test_settings_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="do not fit H100"):
        executor(MODELS["llama-3-8b"], GPUS["H100"], EngineConfig(num_blocks=1_000_000))
    with pytest.raises(ConfigError, match="must divide the 32 heads"):
        executor(MODELS["llama-3-8b"], GPUS["H100"], tensor_parallel=3)
    with pytest.raises(ConfigError, match="no KV format 'int8'"):
        executor(MODELS["deepseek-v3"], GPUS["H200"], EngineConfig(num_blocks=None, kv_dtype="int8"), tensor_parallel=8)
    with pytest.raises(ConfigError, match="must divide the 9 heads") as refused:
        executor(MODELS["smollm2-135m"], GPUS["H100"], tensor_parallel=2)
    assert refused.value.next_step == "Use one of 1, 3, 9."
    with pytest.raises(ConfigError, match="cannot be grouped"):
        executor(MODELS["smollm2-135m"], GPUS["cpu-laptop"], tensor_parallel=3)


def test_int8_halves_llamas_kv_but_for_the_scales_and_a_cpu_keeps_float32() -> None:
    config = EngineConfig(num_blocks=None, kv_dtype="int8")
    # 32 layers of 8 KV heads: an int8 for each of 2 x 128 numbers and a float32 scale of values a token, one a key channel
    block = 32 * 8 * (16 * (2 * 128 + 4) + 128 * 4)
    llama = executor(MODELS["llama-3-8b"], GPUS["H100"], config)
    assert llama.kv_bytes_per_block == block == 1_196_032
    one, more = (cost_of(llama, [], [visible]).memory_seconds for visible in (1000, 1160))
    assert (more - one) * 0.8 * 3.35e12 == pytest.approx(10 * block)
    room = fit_num_blocks(MODELS["llama-3-8b"], GPUS["H100"], config)
    assert room == int((72e9 - 16_060_522_496) // block) == 748_320 // 16
    laptop = executor(MODELS["smollm2-135m"], GPUS["cpu-laptop"])
    assert laptop.kv_bytes_per_block == 16 * 46_080
    bandwidth = GPUS["cpu-laptop"].memory_bandwidth * GPUS["cpu-laptop"].memory_fraction
    assert cost_of(laptop, [], [1]).memory_seconds == pytest.approx((4 * 134_515_008 + 2 * 46_080) / bandwidth)


def test_the_laptop_record_gives_back_what_was_measured() -> None:
    laptop = executor(MODELS["smollm2-135m"], GPUS["cpu-laptop"])
    assert 512 / laptop.execute(StepPlan([Chunk(decoding(0)[0], 0, 512, True)], []), None).ends[0] == pytest.approx(
        271, rel=0.02
    )
    for batch, seconds in ((1, 0.049), (8, 0.096)):
        before = laptop.clock.now()
        [end] = laptop.execute(StepPlan([], decoding(*[512] * batch)), None).ends
        assert end - before == pytest.approx(seconds, rel=0.02)


def test_where_nothing_overlaps_a_step_takes_the_time_of_arithmetic_and_memory_together() -> None:
    run = executor(gpu=replace(TOY_GPU, overlapped=False))
    both, either = (cost_of(one, [(0, 100)], [5000] * 10) for one in (run, executor()))
    assert both.seconds == pytest.approx(either.compute_seconds + either.memory_seconds)
    ends = run.execute(StepPlan([], decoding(1000, 3000), repeats=3), None).ends
    for i, duration in enumerate(np.diff(ends, prepend=0.0)):
        memory = (2.1e9 + (4002 + 2 * i + 2) * 2048) / 100e9
        compute = (2 * 2.1e9 + 4 * 4 * 8 * 64 * (4002 + 2 * i)) / 1e12
        assert duration == pytest.approx(0.003 + memory + compute, rel=1e-12)
    # 100 of 110 tokens are prefill: its share of each resource, weighted by the time of each
    flops = 2e9 * 100 + 0.1e9 + 8192 * 5050
    kv = 100 * 2048
    of_memory = (2e9 * 100 / 110 + 0.1e9 / 11 + kv) / (2.1e9 + (100 + 50_000 + 10) * 2048)
    of_flops = flops / (flops + 2.1e9 * 10 + 8192 * 50_000)
    want = (of_flops * both.compute_seconds + of_memory * both.memory_seconds) / both.seconds
    assert both.prefill_share == pytest.approx(want)


# -- moves ---------------------------------------------------------------------------------------------------------------


def moving_executor(gpu: str = "H100") -> RooflineExecutor:
    config = EngineConfig(num_blocks=2000, max_model_len=4096, num_host_blocks=4000)
    return RooflineExecutor(MODELS["llama-3-8b"], GPUS[gpu], config)


def test_blocks_leave_through_a_copy_on_the_device_and_the_link_carries_them_beside_the_steps() -> None:
    executor = moving_executor()
    block, link, memory = executor.kv_bytes_per_block, 64e9 * 0.8, 3.35e12 * 0.8
    executor.offload_blocks([(i, i) for i in range(100)])
    assert executor.clock.now() == pytest.approx(2 * 100 * block / memory)
    executor.offload_blocks([(i, i) for i in range(100, 1100)])  # more than may be on their way at once
    assert executor.clock.now() == pytest.approx(2 * 100 * block / memory + (1100 - 256) * block / link)


def test_a_block_comes_back_when_it_has_left_and_the_loads_before_it_have_arrived() -> None:
    executor = moving_executor()
    one = executor.transfer_seconds(1)
    executor.offload_blocks([(i, i) for i in range(200)])
    left = executor.copy_seconds(200) + 200 * one
    first = executor.load_blocks([(0, 500), (1, 501)])
    second = executor.load_blocks([(2, 502)])
    assert (first.ready_at, second.ready_at) == pytest.approx((left + 2 * one, left + 3 * one))
    assert not first.done()
    first.wait()
    assert first.done()
    assert not second.done()
    assert executor.clock.now() == pytest.approx(left + 2 * one)


def test_where_host_and_device_share_a_memory_a_move_is_the_engines_own_work() -> None:
    config = EngineConfig(num_blocks=2000, max_model_len=4096, num_host_blocks=4000)
    executor = RooflineExecutor(MODELS["smollm2-135m"], GPUS["cpu-laptop"], config)
    executor.offload_blocks([(i, i) for i in range(100)])
    assert executor.clock.now() == pytest.approx(executor.transfer_seconds(100))


def test_compressed_blocks_cost_their_own_bytes_on_the_link_and_save_reading() -> None:
    config = EngineConfig(
        num_blocks=2000,
        max_model_len=32_768,
        num_host_blocks=4000,
        num_compressed_blocks=2048,
        max_num_batched_tokens=8192,
    )
    executor = RooflineExecutor(MODELS["llama-3-8b"], GPUS["H100"], config)
    exact, packed = executor.kv_bytes_per_block, executor.kv_bytes_per_compressed_block
    assert exact == 16 * 131_072
    assert packed == 1_196_032
    executor.offload_blocks([(0, 0), (2000, 1)])
    executor.clock.wait_until(1.0)
    transfer = executor.load_blocks([(0, 10), (1, 2001)])
    assert transfer.ready_at == pytest.approx(1.0 + (exact + packed) / (64e9 * 0.8))
    plain, less = (cost_of(executor, [], [16_000], tokens) for tokens in (0, 8000))
    saved = 8000 * (exact - packed) / 16 / (3.35e12 * 0.8)
    assert plain.memory_seconds - less.memory_seconds == pytest.approx(saved)


def test_no_more_than_the_whole_step_is_put_down_to_prefill_where_chunks_read_packed_blocks() -> None:
    """What packed blocks save is more than what the decode reads; a share above 1 would book time that has not passed."""
    gpu, model = GPUS["A10G"], MODELS["llama-3-8b"]
    config = EngineConfig(
        num_blocks=1024, num_compressed_blocks=2048, compressed_from=8192, max_model_len=32_768, max_num_seqs=8
    )
    cost = cost_of(executor(model, gpu, config), [(30_000, 16)], [64], packed_tokens=29_000)
    assert cost.memory_seconds > cost.compute_seconds
    assert 0.9 < cost.prefill_share <= 1.0
