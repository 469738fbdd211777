"""Cost records against published figures and sums done position by position."""

from __future__ import annotations

import pytest

from observability.engine.executor.hardware import GPUS, gpu_by_name
from observability.engine.model.costs import MODELS, AttentionGroup, ModelCost, model_by_name
from observability.errors import ConfigError

MIB = 2**20


@pytest.mark.parametrize(
    ("name", "kv_format", "slope", "window_mib"),
    [
        # layers x 2 x KV heads x head size x bytes
        ("smollm2-135m", "float32", 30 * 2 * 3 * 64 * 4, 0),
        ("llama-3-8b", "bfloat16", 131_072, 0),
        ("llama-3-70b", "bfloat16", 327_680, 0),
        # 61 layers x 1,152 B and x 656 B
        ("deepseek-v3", "bfloat16", 70_272, 0),
        ("deepseek-v3", "fp8", 40_016, 0),
        # published figures for V4: bytes per token, MiB of window per request
        ("deepseek-v4-pro", "bfloat16", 9_848, 7.6),
        ("deepseek-v4-pro", "fp8", 5_511, 4.35),
        ("deepseek-v4-flash", "bfloat16", 6_880, 5.4),
        ("deepseek-v4-flash", "fp8", 3_850, 3.07),
    ],
)
def test_kv_bytes_are_the_published_ones(name: str, kv_format: str, slope: float, window_mib: float) -> None:
    model = model_by_name(name)
    assert model.kv_bytes_per_token(kv_format, 16) == pytest.approx(slope, abs=0.5)
    assert model.kv_bytes_per_block(kv_format, 64) == pytest.approx(64 * slope, abs=32)
    assert model.kv_fixed_bytes(kv_format) / MIB == pytest.approx(window_mib, abs=0.03)


def test_a_million_tokens_of_v4_pro_take_the_published_gibibytes() -> None:
    assert MODELS["deepseek-v4-pro"].kv_bytes_per_token("bfloat16", 16) * 2**20 / 2**30 == pytest.approx(9.62, abs=0.01)
    assert MODELS["deepseek-v3"].kv_bytes_per_token("bfloat16", 16) * 2**20 / 2**30 == pytest.approx(68.6, abs=0.1)


def test_v4_pro_needs_27_percent_of_the_flops_of_v3_2_at_a_million_tokens() -> None:
    """The DeepSeek-V4 model card's claim. V3.2 by hand: 37 B active, of which the input table is only looked up; indexer of 64 heads x 128 over every token and
    layer; absorbed MLA (128 heads over 512 + 64, then 512) over the 2,048 tokens it picks."""
    n = 2**20
    v32 = 2 * (37e9 - 129_280 * 7168) + 61 * (2 * 64 * 128 * n + 2 * 128 * (512 + 64 + 512) * 2048)
    pro = MODELS["deepseek-v4-pro"]
    assert (pro.linear_flops(1, 1) + pro.attention_flops(n - 1, 1, decode=True)) / v32 == pytest.approx(0.27, abs=0.015)


def test_expert_parameters_are_those_of_the_published_layer_sizes() -> None:
    # layers x experts x 3 matrices x hidden x expert width; total and active counts are rounded in public
    assert MODELS["deepseek-v3"].expert_parameters == pytest.approx(58 * 256 * 3 * 7168 * 2048, rel=0.01)
    assert MODELS["deepseek-v4-flash"].expert_parameters == pytest.approx(43 * 256 * 3 * 4096 * 2048, rel=0.01)
    assert MODELS["deepseek-v4-pro"].expert_parameters == pytest.approx(61 * 384 * 3 * 7168 * 3072, rel=0.02)
    assert MODELS["llama-3-8b"].expert_parameters == 0.0


def test_parameters_of_dense_models_follow_from_their_sizes() -> None:
    def llama(layers: int, hidden: int, kv_width: int, mlp: int, vocabulary: int, tied: bool) -> int:
        layer = 2 * hidden * hidden + 2 * hidden * kv_width + 3 * hidden * mlp + 2 * hidden
        return layers * layer + hidden + vocabulary * hidden * (1 if tied else 2)

    assert MODELS["smollm2-135m"].parameters == llama(30, 576, 192, 1536, 49_152, tied=True)
    assert MODELS["llama-3-8b"].parameters == llama(32, 4096, 1024, 14_336, 128_256, tied=False)
    assert MODELS["llama-3-70b"].parameters == llama(80, 8192, 1024, 28_672, 128_256, tied=False)


def test_a_step_reads_the_experts_its_tokens_are_routed_to() -> None:
    model = MODELS["deepseek-v3"]
    table = 129_280 * 7168  # parameters of the input table, and of the output layer
    # fp8: one byte a parameter of the layers
    assert model.layer_bytes_read(1) == pytest.approx(37e9 - 2 * table, rel=1e-6)
    assert model.layer_bytes_read(10_000) == pytest.approx(671e9 - 2 * table, rel=1e-6)
    assert model.output_bytes == 2 * table  # bfloat16
    assert model.weight_bytes == pytest.approx(671e9 + 2 * table)
    untouched = 1.0
    for _ in range(32):
        untouched *= 1 - 8 / 256
    want = 671e9 - 2 * table - untouched * model.expert_parameters
    assert model.layer_bytes_read(32) == pytest.approx(want, rel=1e-6)
    # fp4 experts, 17 bytes for 32: of 1,576 G parameters in experts, a token reads 6 of 384
    pro = MODELS["deepseek-v4-pro"]
    experts = (1600e9 - 49e9) * 384 / 378
    want = 1600e9 - experts - 2 * table + experts * 6 / 384 * 17 / 32
    assert pro.layer_bytes_read(1) == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "vocabulary", "layers", "sampling"),
    [
        # all parameters but the input table; tied: the output layer is the input table
        ("llama-3-8b", 128_256, 8_030_261_248 - 2 * 128_256 * 4096, 128_256 * 4096),
        ("smollm2-135m", 49_152, 134_515_008 - 49_152 * 576, 49_152 * 576),
    ],
)
def test_only_tokens_that_yield_a_next_one_go_through_the_output_layer(
    name: str, vocabulary: int, layers: int, sampling: int
) -> None:
    model = MODELS[name]
    assert model.vocab_size == vocabulary
    assert model.linear_flops(8192, 0) == 2 * layers * 8192
    assert model.linear_flops(8192, 3) == 2 * layers * 8192 + 2 * sampling * 3
    assert model.layer_bytes_read(1) == model.layer_bytes_read(8192) == 2 * layers
    assert model.output_bytes == 2 * sampling
    assert model.weight_bytes == 2 * model.parameters


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize(("start", "tokens"), [(0, 1), (0, 300), (100, 64), (4000, 512), (4090, 10), (60_000, 3)])
def test_attention_of_a_chunk_is_the_sum_over_its_positions(model: ModelCost, start: int, tokens: int) -> None:
    total = 0.0
    for position in range(start, start + tokens):
        seen = position + 1
        for g in model.attention:
            states = min(seen, g.window)
            if g.tokens_per_state:
                states += min(seen / g.tokens_per_state, g.top_k or float("inf"))
                total += g.layers * g.index_flops_per_state * seen / g.tokens_per_state
            total += g.layers * g.flops_per_state * states
    assert model.attention_flops(start, tokens, decode=True) == pytest.approx(total, rel=1e-9)


def test_v3_prefills_in_expanded_and_decodes_in_absorbed_form() -> None:
    v3 = MODELS["deepseek-v3"]
    assert v3.attention_flops(999, 1) == 61 * 1000 * 2 * 128 * (192 + 128)
    assert v3.attention_flops(999, 1, decode=True) == 61 * 1000 * 2 * 128 * (576 + 512)
    llama = MODELS["llama-3-8b"]
    assert llama.attention_flops(999, 1) == llama.attention_flops(999, 1, decode=True) == 32 * 1000 * 4 * 32 * 128


def test_a_decode_reads_attended_states_and_every_indexer_key() -> None:
    group = AttentionGroup(
        layers=2, flops_per_state=1.0, state_bytes={"x": 100.0}, tokens_per_state=4, window=8, top_k=3, index_bytes={"x": 10.0}
    )  # fmt: skip
    model = ModelCost("toy", 1, 1, 0, False, "fp8", 2, 1, 1, 1, 1, 100, "x", (group,))
    # 40 tokens: 10 states of which 3 attended, 8 in the window, 10 indexer keys, 2 layers
    assert model.kv_read_bytes(40, "x", 16) == 2 * ((3 + 8) * 100 + 10 * 10)
    assert model.kv_bytes_per_token("x", 16) == 2 * (100 + 10) / 4
    assert model.kv_fixed_bytes("x") == 2 * 8 * 100


def test_every_number_names_its_source() -> None:
    for gpu in GPUS.values():
        fields = set(gpu.__dataclass_fields__) - {"name", "sources"}
        absent = {name for name in fields if getattr(gpu, name) is None}
        assert fields - absent <= set(gpu.sources), gpu.name
        assert all(gpu.sources.values())
    assert all(model.sources for model in MODELS.values())
    assert {"A10G", "A100-40", "A100-80", "H100", "H200"} <= set(GPUS)
    assert {"llama-3-8b", "llama-3-70b", "deepseek-v3", "deepseek-v4-pro", "deepseek-v4-flash"} <= set(MODELS)


def test_names_are_found_in_any_case_and_unknown_ones_list_the_known() -> None:
    assert gpu_by_name("h100") is GPUS["H100"]
    assert model_by_name("Llama-3-8B") is MODELS["llama-3-8b"]
    with pytest.raises(ConfigError, match="A10G, A100-40"):
        gpu_by_name("H1000")
    with pytest.raises(ConfigError, match="llama-3-8b"):
        model_by_name("gpt-2")
    with pytest.raises(ConfigError, match="bfloat16, fp8"):
        MODELS["deepseek-v3"].check_kv_format("int8")
