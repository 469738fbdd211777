"""Latent attention against dense attention without a cache, and the memory of its KV against the cost record of the same shape."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from observability.engine.executor.kv_cache import Batch, Span
from observability.engine.executor.latent_kv import LatentKV
from observability.engine.executor.timing import StepTimer
from observability.engine.executor.torch_executor import TorchExecutor
from observability.engine.model.costs import MODELS, latent_cost
from observability.engine.model.latent import LatentDecoder, random_weights
from observability.engine.model.latent_config import TINY_MLA, LatentConfig, LayerType
from observability.engine.model.loading import LoadedModel, load_model
from observability.engine.types import EngineConfig, PromptSpan, Request, SamplingParams
from observability.errors import ConfigError, ModelError
from tests.model.running import Runner

FULL = replace(TINY_MLA, layer_types=("full_attention",) * 4)
MOSTLY_SLIDING = replace(TINY_MLA, layer_types=("sliding_attention", "sliding_attention", "full_attention"))
ONE_STEP_QUERIES = replace(FULL, q_lora_rank=None)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads of matrices this small would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def model_of(config: LatentConfig) -> LoadedModel:
    preset = load_model("tiny-mla")
    model = LatentDecoder(config, random_weights(config).__getitem__, device="cpu", dtype=torch.float32)
    return replace(preset, config=config, model=model)


def dense_logits(config: LatentConfig, tokens: Sequence[int]) -> Tensor:
    """Logits [tokens, vocab_size] of the preset's weights from the equations of DeepSeek-V2 (section 2.1), head by head in float64: no
    cache, no batch, no fused or absorbed projection, the rotation as a product of complex numbers."""
    w = {name: tensor.double() for name, tensor in random_weights(config).items()}
    count, nope, rope = len(tokens), config.qk_nope_head_dim, config.qk_rope_head_dim
    positions = torch.arange(count, dtype=torch.float64)
    pairs = torch.arange(rope // 2, dtype=torch.float64)
    turn = torch.polar(torch.ones(1).double(), torch.outer(positions, config.rope_theta ** (-2 * pairs / rope)))

    def norm(x: Tensor, name: str) -> Tensor:
        return w[name] * x / (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()

    def rotate(x: Tensor) -> Tensor:
        turned = torch.complex(*x.chunk(2, -1)) * turn
        return torch.cat([turned.real, turned.imag], -1)

    age = positions[:, None] - positions
    x = w["model.embed_tokens.weight"][list(tokens)]
    for i, kind in enumerate(config.layer_types):
        at = f"model.layers.{i}.self_attn."
        h = norm(x, f"model.layers.{i}.input_layernorm.weight")
        if config.q_lora_rank is None:
            q = h @ w[at + "q_proj.weight"].T
        else:
            q = norm(h @ w[at + "q_a_proj.weight"].T, at + "q_a_layernorm.weight") @ w[at + "q_b_proj.weight"].T
        latent, key = (h @ w[at + "kv_a_proj_with_mqa.weight"].T).split((config.kv_lora_rank, rope), -1)
        up = norm(latent, at + "kv_a_layernorm.weight") @ w[at + "kv_b_proj.weight"].T
        seen = (age >= 0) & (age < (config.sliding_window if kind == "sliding_attention" else math.inf))
        heads = []
        for own_q, own_up in zip(q.chunk(config.num_heads, -1), up.chunk(config.num_heads, -1), strict=True):
            scores = own_q[:, :nope] @ own_up[:, :nope].T + rotate(own_q[:, nope:]) @ rotate(key).T
            scores = (scores / math.sqrt(nope + rope)).masked_fill(~seen, -math.inf)
            heads.append(scores.softmax(-1) @ own_up[:, nope:])
        x = x + torch.cat(heads, -1) @ w[at + "o_proj.weight"].T
        h, mlp = norm(x, f"model.layers.{i}.post_attention_layernorm.weight"), f"model.layers.{i}.mlp."
        x = (
            x
            + (F.silu(h @ w[mlp + "gate_proj.weight"].T) * (h @ w[mlp + "up_proj.weight"].T))
            @ w[mlp + "down_proj.weight"].T
        )
    return norm(x, "model.norm.weight") @ w["lm_head.weight"].T


def assert_greedy(config: LatentConfig, request: Request) -> None:
    """Each token of the output is the dense model's best behind everything before it, by a clear margin."""
    assert not isinstance(request.prompt, PromptSpan)
    logits = dense_logits(config, [*request.prompt, *request.output])
    behind = logits[request.prompt_len - 1 : -1]
    best = behind.topk(2)
    assert (best.values[:, 0] - best.values[:, 1]).min() > 1e-4, "a tie says nothing"
    assert request.output == best.indices[:, 0].tolist(), request.request_id


def prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(0, 256, length).tolist() for length in lengths]


# -- the decoder --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [FULL, ONE_STEP_QUERIES], ids=["q_lora", "one_step_queries"])
def test_without_sliding_layers_it_is_the_deepseek_v3_of_transformers(config: LatentConfig) -> None:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    settings = {
        name: getattr(config, name)
        for name in ("vocab_size", "hidden_size", "intermediate_size", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim",
                     "qk_rope_head_dim", "v_head_dim", "rms_norm_eps")
    }  # fmt: skip
    settings |= {
        "num_hidden_layers": 4,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_heads,
    }
    dense = DeepseekV3Config(
        **settings, first_k_dense_replace=4, rope_interleave=False, max_position_embeddings=config.max_position
    )
    theirs: Any = DeepseekV3ForCausalLM(dense).eval()
    theirs.load_state_dict(random_weights(config), strict=True)
    [ids] = prompts([120])
    with torch.inference_mode():
        expected = theirs(torch.tensor([ids])).logits[0]
    assert torch.allclose(run_store(config, [ids], [[120]])[0], expected, atol=2e-4)
    assert torch.allclose(dense_logits(config, ids).float(), expected, atol=2e-4)


@given(st.integers(1, 50), st.integers(1, 9), st.integers(0, 2**20))
@settings(deadline=None, max_examples=40)
def test_both_forms_of_attention_agree(context: int, tokens: int, seed: int) -> None:
    """The queries of one sequence at once, expanded, are the same queries as sequences of their own, absorbed."""
    model = model_of(TINY_MLA).model
    assert isinstance(model, LatentDecoder)
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(tokens, 4, 24, generator=generator)
    states = torch.randn(context, TINY_MLA.state_width, generator=generator)
    mask = torch.rand(tokens, context, generator=generator) < 0.7
    mask[:, 0] = True
    for seen in (mask, torch.ones_like(mask)):
        expanded = model.expanded(1, q, states, seen)
        absorbed = model.absorbed(1, q, states.expand(tokens, -1, -1), None if seen.all() else seen)
        assert torch.allclose(expanded, absorbed, atol=1e-5, rtol=1e-4)


def test_the_preset_is_the_same_every_time() -> None:
    first, second = load_model("tiny-mla"), load_model("tiny-mla")
    assert (first.name, first.config) == ("tiny-mla", TINY_MLA)
    assert torch.equal(first.model.head, second.model.head)
    assert first.tokenizer.vocab_size == first.config.vocab_size


def test_shapes_that_do_not_fit_are_refused() -> None:
    for change, reason in (
        ({"kv_lora_rank": 0}, "kv_lora_rank is 0"),
        ({"q_lora_rank": 0}, "q_lora_rank is 0"),
        ({"qk_rope_head_dim": 7}, "needs pairs"),
        ({"layer_types": ()}, "num_layers is 0"),
        ({"layer_types": ("sliding_attention",)}, "no layer has full attention"),
        ({"sliding_window": 0}, "2 layers slide over a window of 0"),
    ):
        with pytest.raises(ModelError, match=reason):
            replace(TINY_MLA, **change)
    weights = random_weights(FULL) | {"model.norm.weight": torch.ones(3)}
    with pytest.raises(ModelError, match=r"model\.norm\.weight has shape \(3,\)"):
        LatentDecoder(FULL, weights.__getitem__, device="cpu", dtype=torch.float32)


# -- the store ----------------------------------------------------------------------------------------------------------


def run_store(
    config: LatentConfig, sequences: Sequence[Sequence[int]], schedules: Sequence[Sequence[int]], seats: int = 0
) -> list[Tensor]:
    """Logits [tokens, vocab_size] of each sequence, computed through the store by its schedule of chunk lengths, where 1 is a decode
    (but for the first). All sequences advance together; with fewer seats than sequences the others wait for one to be released."""
    seats = seats or len(sequences)
    size = 4
    own_blocks = -(-max(map(len, sequences)) // size)
    engine = EngineConfig(
        block_size=size, num_blocks=own_blocks * seats, max_num_seqs=seats, max_model_len=own_blocks * size,
        prefix_caching=config.supports_prefix_caching,
    )  # fmt: skip
    model = LatentDecoder(config, random_weights(config).__getitem__, device="cpu", dtype=torch.float32)
    model.prepare(engine.max_model_len)
    kv = LatentKV(model, engine, StepTimer(model.device))
    places = [np.random.default_rng(1).permutation(engine.num_blocks or 0)[i::seats] for i in range(seats)]
    found: list[list[Tensor]] = [[] for _ in sequences]
    waiting = list(range(len(sequences)))
    running: dict[int, tuple[Request, int, int]] = {}  # sequence -> request, seat, place in its schedule
    done = [0] * len(sequences)
    while waiting or running:
        free = set(range(seats)) - {seat for _, seat, _ in running.values()}
        while waiting and free:
            running[waiting.pop(0)] = (Request("r", [0], SamplingParams()), free.pop(), 0)
        chunks: list[tuple[int, Span]] = []
        decodes: list[tuple[int, Span]] = []
        for i, (request, seat, at) in running.items():
            tokens = schedules[i][at]
            blocks = places[seat][: -(-(done[i] + tokens) // size)]
            (decodes if tokens == 1 and at else chunks).append((i, Span(request, done[i], tokens, 0, blocks)))
        decodes.sort(key=lambda item: item[1].context)
        row = 0
        for _, span in (*chunks, *decodes):
            span.row = row
            row += span.tokens
        spans = [*chunks, *decodes]
        ids = [t for i, span in spans for t in sequences[i][span.start : span.context]]
        positions = np.concatenate([np.arange(span.start, span.context) for _, span in spans])
        with torch.inference_mode():
            kv.begin(Batch([span for _, span in chunks], [span for _, span in decodes]))
            logits = model.logits(model.forward(torch.tensor(ids), torch.from_numpy(positions), kv.attend))
        for i, span in spans:
            found[i].append(logits[span.rows])
            done[i] += span.tokens
            request, seat, at = running[i]
            running[i] = (request, seat, at + 1)
            if at + 1 == len(schedules[i]):
                kv.release(request)
                del running[i]
    assert kv._ring_of == {}
    assert sorted(kv._free_rings) == list(range(seats))
    return [torch.cat(parts) for parts in found]


@given(st.data())
@settings(deadline=None, max_examples=30)
def test_any_mix_of_chunks_and_decodes_is_dense_attention(data: st.DataObject) -> None:
    """Windows of a few tokens: chunks shorter than, equal to and longer than the window, decodes around its ends, rings that another
    sequence left full."""
    kinds: list[LayerType] = ["full_attention", "sliding_attention", "sliding_attention"]
    kinds = data.draw(st.permutations(kinds[: data.draw(st.integers(1, 3))]))
    config = replace(TINY_MLA, layer_types=tuple(kinds), sliding_window=data.draw(st.integers(1, 7)))
    schedules = data.draw(
        st.lists(st.lists(st.one_of(st.just(1), st.integers(1, 20)), min_size=1, max_size=12), min_size=1, max_size=4)
    )
    sequences = prompts([sum(schedule) for schedule in schedules], data.draw(st.integers(0, 1000)))
    found = run_store(config, sequences, schedules, seats=data.draw(st.integers(1, len(schedules))))
    for ids, logits in zip(sequences, found, strict=True):
        assert torch.allclose(logits, dense_logits(config, ids).float(), atol=1e-3)


def test_a_ring_holds_the_latest_window_at_positions_modulo_window() -> None:
    """Two turns and a half of the ring, one token at a time behind a chunk that wraps by itself."""
    config = replace(TINY_MLA, sliding_window=8)
    model = LatentDecoder(config, random_weights(config).__getitem__, device="cpu", dtype=torch.float32)
    engine = EngineConfig(num_blocks=4, max_model_len=32, max_num_seqs=2, prefix_caching=False)
    kv = LatentKV(model, engine, StepTimer(model.device))
    request = Request("r", [0], SamplingParams())
    states = torch.arange(28.0)[:, None] + torch.zeros(config.state_width)  # of position p: p everywhere
    first = 0
    for tokens in (11, *[1] * 17):
        span = Span(request, first, tokens, 0, np.arange(2))
        kv.begin(Batch([span], []) if tokens > 1 else Batch([], [span]))
        latent, key = states[first : span.context].split((config.kv_lora_rank, config.qk_rope_head_dim), 1)
        kv.attend(1, torch.zeros(tokens, 4, 24), latent, key)
        first = span.context
        ring = kv.rings[0].view(2, 8, -1)[kv._ring_of[request]]
        latest = range(first - 8, first)
        assert ring[:, 0].tolist() == [float(p) for p in sorted(latest, key=lambda p: p % 8)]
        assert (ring == ring[:, :1]).all()
    assert (kv.rings[0].view(2, 8, -1)[1 - kv._ring_of[request]] == 0).all(), "the other ring is another sequence's"


def test_a_sequence_cannot_begin_behind_tokens_that_its_window_never_saw() -> None:
    executor = TorchExecutor(
        load_model("tiny-mla"), EngineConfig(num_blocks=16, max_model_len=64, prefix_caching=False), None
    )
    span = Span(Request("late", [0], SamplingParams()), 16, 1, 0, np.arange(2))
    with pytest.raises(RuntimeError, match="late starts behind tokens"):
        executor.kv.begin(Batch([], [span]))


# -- the engine ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [TINY_MLA, FULL, MOSTLY_SLIDING], ids=["alternating", "full", "mostly_sliding"])
def test_greedy_under_load_is_dense_attention(config: LatentConfig) -> None:
    """Batched, prefilled in small chunks, preempted for lack of blocks, ten times the window long."""
    engine = EngineConfig(
        block_size=4, num_blocks=100, max_model_len=400, max_num_seqs=6, max_num_batched_tokens=24, prefix_caching=False
    )
    runner = Runner(model_of(config), engine)
    lengths = (330, 1, 31, 32, 33, 64, 90, 7, 50)
    params = [SamplingParams(max_tokens=40, ignore_eos=True)] * len(lengths)
    requests = runner.run(prompts(lengths), params)
    assert sum(r.num_preemptions for r in requests) > 0
    assert runner.executor.kinds["mixed"] > 10
    assert runner.executor.chunks["request-1"] > 10
    for request in requests:
        assert (request.outcome, len(request.output)) == ("length", 40)
        assert_greedy(config, request)


def test_prefix_hits_where_no_layer_slides() -> None:
    """Also behind blocks that were taken out and put back, as a host tier or a snapshot does."""
    runner = Runner(model_of(FULL), EngineConfig(block_size=4, num_blocks=64, max_model_len=200))
    [shared] = prompts([80])
    for tail in prompts([5, 30, 60], seed=1):
        content = runner.executor.export_blocks(range(64))
        assert isinstance(runner.executor.kv, LatentKV)
        runner.executor.kv.pool.fill_(math.nan)
        runner.executor.import_blocks(range(64), content)
        [request] = runner.run([shared + tail], [SamplingParams(max_tokens=20, ignore_eos=True)])
        assert request.num_cached == (80 if request.request_id != "request-1" else 0)
        assert_greedy(FULL, request)


def test_settings_that_do_not_fit_latent_states_are_refused() -> None:
    loaded = load_model("tiny-mla")
    assert not TINY_MLA.supports_prefix_caching
    assert FULL.supports_prefix_caching
    with pytest.raises(ConfigError, match="prefix_caching is on, but 2 of the model's 4 layers") as caught:
        TorchExecutor(loaded, EngineConfig(), None)
    assert "kvscope serve --engine prefix_caching=off" in str(caught.value.next_step)
    for change, reason in (
        ({"num_host_blocks": 64}, "num_host_blocks is 64, but 2 of the model's 4 layers"),
        ({"kv_dtype": "int8"}, "kv_dtype = int8"),
        ({"num_compressed_blocks": 512}, "num_compressed_blocks = 512"),
    ):
        with pytest.raises(ConfigError, match=reason):
            TorchExecutor(loaded, EngineConfig(prefix_caching=False, **change), None)


def test_rings_come_back_from_whoever_finishes_aborts_or_is_preempted() -> None:
    engine = EngineConfig(
        block_size=4, num_blocks=50, max_model_len=200, max_num_seqs=5, max_num_batched_tokens=30, prefix_caching=False
    )
    runner = Runner(load_model("tiny-mla"), engine)
    kv, scheduler = runner.executor.kv, runner.engine.scheduler
    assert isinstance(kv, LatentKV)
    requests = [
        Request(str(i), prompt, SamplingParams(max_tokens=30, ignore_eos=True), arrival=runner.executor.clock.now())
        for i, prompt in enumerate(prompts((100, 20, 60, 40, 33, 5, 90, 64, 12, 50)))
    ]
    for request in requests:
        runner.engine.add(request)
    steps = 0
    while runner.engine.step():
        steps += 1
        if steps % 9 == 0 and scheduler.num_running:  # decodes first, then a prefill half-way
            runner.engine.abort((scheduler.prefilling or scheduler.decoding)[-1])
        assert set(kv._ring_of) == {r for r in scheduler.running() if r.num_computed}
        assert sorted([*kv._ring_of.values(), *kv._free_rings]) == list(range(5))
    assert kv._ring_of == {}
    assert {"abort", "length"} == {r.outcome for r in requests}
    assert sum(r.num_preemptions for r in requests) > 0
    for request in requests:
        if request.output:
            assert_greedy(TINY_MLA, request)


# -- memory -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config", [TINY_MLA, FULL, MOSTLY_SLIDING, replace(TINY_MLA, sliding_window=100, kv_lora_rank=16)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_stores_tensors_have_the_bytes_of_the_cost_record(config: LatentConfig, dtype: torch.dtype) -> None:
    model = LatentDecoder(config, random_weights(config).__getitem__, device="cpu", dtype=dtype)
    loaded = replace(load_model("tiny-mla"), config=config, model=model)
    engine = EngineConfig(block_size=8, num_blocks=40, max_model_len=64, max_num_seqs=3, prefix_caching=False)
    executor = TorchExecutor(loaded, engine, None)
    assert isinstance(executor.kv, LatentKV)
    record, kv_format = latent_cost("same", config, source="test"), str(dtype).removeprefix("torch.")
    assert executor.kv.pool.nbytes == 40 * record.kv_bytes_per_block(kv_format, 8)
    assert executor.kv_bytes_per_block == record.kv_bytes_per_block(kv_format, 8)
    assert executor.kv.rings.nbytes == 3 * record.kv_fixed_bytes(kv_format)
    assert executor.kv_fixed_bytes_per_sequence == record.kv_fixed_bytes(kv_format)
    assert record.parameters == sum(w.numel() for w in random_weights(config).values())


def test_cost_records_are_published_figures() -> None:
    tiny = MODELS["tiny-mla"]
    assert tiny.kv_bytes_per_token("float32", 16) == 2 * (32 + 8) * 4
    assert tiny.kv_fixed_bytes("float32") == 2 * 32 * (32 + 8) * 4
    v3 = LatentConfig(
        vocab_size=129_280, hidden_size=7168, intermediate_size=18_432, num_heads=128, q_lora_rank=1536, kv_lora_rank=512,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, layer_types=("full_attention",) * 61, sliding_window=0,
        max_position=163_840,
    )  # fmt: skip
    ours, published = latent_cost("v3 with dense layers", v3, source="config.json"), MODELS["deepseek-v3"]
    assert ours.kv_bytes_per_token("bfloat16", 16) == published.kv_bytes_per_token("bfloat16", 16) == 70_272
    for decode in (False, True):
        assert ours.attention_flops(100, 7, decode=decode) == published.attention_flops(100, 7, decode=decode)


def test_memory_of_long_sequences_is_fixed_part_plus_slope(record_property: Any) -> None:
    """Blocks and rings that running sequences really hold, beside a grouped-query model of the same width, depth and heads."""
    count, length, size = 3, 1500, 16
    engine = EngineConfig(
        block_size=size, num_blocks=400, max_model_len=2048, max_num_seqs=4, prefix_caching=False, contiguous_below=0
    )
    held = {}
    for name in ("tiny-mla", "tiny"):
        runner = Runner(load_model(name), engine)
        for i, prompt in enumerate(prompts([length] * count)):
            request = Request(str(i), prompt, SamplingParams(max_tokens=50, ignore_eos=True))
            request.arrival = runner.executor.clock.now()
            runner.engine.add(request)
        while any(r.num_computed <= length for r in runner.engine.scheduler.running()) or runner.engine.num_waiting:
            runner.engine.step()
        running = list(runner.engine.scheduler.running())
        assert len(running) == count
        tokens = sum(r.num_computed for r in running)
        kv = runner.executor.kv
        rings = len(kv._ring_of) * kv.fixed_bytes_per_sequence if isinstance(kv, LatentKV) else 0
        held[name] = runner.engine.kv_state().active * runner.executor.kv_bytes_per_block + rings
        if name == "tiny-mla":
            record = MODELS[name]
            slope = record.kv_bytes_per_token("float32", 16)
            want = count * record.kv_fixed_bytes("float32") + slope * tokens
            assert want <= held[name] <= want + count * size * slope
        else:
            slope = 4 * 2 * 2 * 16 * 4  # layers x (key, value) x KV heads x head size x bytes
            assert slope * tokens <= held[name] <= slope * (tokens + count * size)
    ratio = held["tiny"] / held["tiny-mla"]
    record_property("grouped_query_to_latent_bytes", f"{ratio:.2f}")
    assert 1024 / 320 * 0.9 < ratio < 1024 / 320
