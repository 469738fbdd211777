"""Generation by the real engine and the real model equals transformers' token for token, however requests are batched."""

from __future__ import annotations

import random

import numpy as np
import pytest

from observability.engine.model.loading import LoadedModel
from observability.engine.types import EngineConfig, Request, SamplingParams
from tests.model.conftest import Greedy
from tests.model.prompts import PROMPTS
from tests.model.running import Runner

pytestmark = pytest.mark.timeout(900)  # transformers' part takes minutes where other work shares the cores


def serve(runner: Runner, wanted: list[Greedy]) -> list[Request]:
    """Serves the prompts at once and asserts the tokens."""
    requests = runner.run([g.prompt for g in wanted], [SamplingParams(max_tokens=g.max_tokens) for g in wanted])
    different = [
        (len(g.prompt), g.tokens, r.output) for g, r in zip(wanted, requests, strict=True) if r.output != g.tokens
    ]
    assert not different
    assert all(r.outcome in ("stop", "length") for r in requests)
    return requests


def test_the_prompts_are_far_from_ties(reference: list[Greedy]) -> None:
    assert len(reference) >= 20
    assert [len(g.prompt) for g in reference] == list(PROMPTS)
    assert min(PROMPTS) == 3
    assert max(PROMPTS) == 3000
    assert min(g.margin for g in reference) > 0.005  # logits agree to about 0.0003


def test_alone_with_prefix_hits_and_both_layouts(smollm2: LoadedModel, reference: list[Greedy]) -> None:
    runner = Runner(smollm2, EngineConfig(num_blocks=600, contiguous_below=600))
    cached = {}
    for wanted in reference:
        (request,) = serve(runner, [wanted])
        cached[len(wanted.prompt)] = request.num_cached
    assert cached[1000] >= 640  # the 700-token prompt, all but its ending
    assert cached[3000] >= 944
    assert runner.executor.layouts["contiguous"] > 0
    assert runner.executor.layouts["paged"] > 0
    assert set(runner.executor.kinds) == {"prefill", "decode"}


def test_mixed_in_one_batch_in_chunks(smollm2: LoadedModel, reference: list[Greedy]) -> None:
    runner = Runner(
        smollm2, EngineConfig(num_blocks=600, max_num_batched_tokens=192, contiguous_below=600, prefix_caching=False)
    )
    mixed = random.Random(1).sample([g for g in reference if len(g.prompt) < 3000], len(reference) - 1)
    requests = serve(runner, mixed)
    chunks = runner.executor.chunks
    assert max(chunks.values()) > 5
    assert runner.executor.kinds["mixed"] > 10
    assert runner.executor.layouts["contiguous"] > 0
    assert runner.executor.layouts["paged"] > 0
    assert all(r.num_cached == 0 for r in requests)


def test_with_preemption_in_a_small_pool(smollm2: LoadedModel, reference: list[Greedy]) -> None:
    short = [g for g in reference if len(g.prompt) <= 65]
    for prefix_caching in (True, False):
        config = EngineConfig(
            block_size=4, num_blocks=50, max_model_len=200, max_num_batched_tokens=64, prefix_caching=prefix_caching
        )
        runner = Runner(smollm2, config)
        requests = serve(runner, short)
        assert sum(r.num_preemptions for r in requests) > 0
        assert runner.executor.kinds["mixed"] > 0


def test_again_from_cache(smollm2: LoadedModel, reference: list[Greedy]) -> None:
    """A prompt served twice takes its whole blocks from the cache the second time and gives the same tokens."""
    wanted = [g for g in reference if 30 < len(g.prompt) <= 300]
    runner = Runner(smollm2, EngineConfig(num_blocks=600))
    first = serve(runner, wanted)
    second = serve(runner, wanted)
    assert all(r.num_cached < r.prompt_len for r in first)
    assert [r.num_cached for r in second] == [(r.prompt_len - 1) // 16 * 16 for r in second]


def test_int8_greedy_agrees_with_float32_mostly(
    smollm2: LoadedModel, reference: list[Greedy], record_property: pytest.FixtureRequest
) -> None:
    """The share of prompts whose whole generation is equal, and of tokens before the first difference."""
    wanted = [g for g in reference if len(g.prompt) <= 511]
    config = EngineConfig(num_blocks=600, kv_dtype="int8", quant_sample_rate=0.05)
    runner = Runner(smollm2, config)
    requests = runner.run([g.prompt for g in wanted], [SamplingParams(max_tokens=g.max_tokens) for g in wanted])
    same = sum(r.output == g.tokens for r, g in zip(requests, wanted, strict=True))
    agreed = sum(
        int(np.cumprod([a == b for a, b in zip(r.output, g.tokens, strict=False)]).sum())
        for r, g in zip(requests, wanted, strict=True)
    )
    tokens = sum(len(g.tokens) for g in wanted)
    record_property("int8_equal_generations", f"{same}/{len(wanted)}")  # type: ignore[operator]
    record_property("int8_agreeing_tokens", f"{agreed}/{tokens}")  # type: ignore[operator]
    print(f"int8: {same} of {len(wanted)} generations equal, {agreed} of {tokens} tokens before a first difference")  # noqa: T201
    assert agreed / tokens > 0.9
