"""Models load from Hugging Face directories and GGUF files with the logits that transformers computes, and bad ones say why not."""

from __future__ import annotations

import contextlib
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from observability.engine.model.fetch import fetch_model
from observability.engine.model.gguf_file import GGUFFile
from observability.engine.model.loading import LoadedModel, load_model
from observability.engine.model.tokenizer import byte_tokenizer
from observability.errors import ModelError

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def causal(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of one sequence, written out."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("ihd,jhd->hij", q, k) * q.shape[-1] ** -0.5
    future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(future, -torch.inf).softmax(-1), v)


@torch.inference_mode()
def logits(loaded: LoadedModel, ids: list[int]) -> Tensor:
    loaded.model.prepare(len(ids))
    return loaded.model.logits(loaded.model.forward(torch.tensor(ids), torch.arange(len(ids)), causal))


def small_llama(**changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    settings = {
        "vocab_size": 300,
        "hidden_size": 96,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "initializer_range": 0.08,  # logits of about 1: float32 then agrees to a few 1e-6
        "eos_token_id": [7, 9],
    } | changes
    return LlamaForCausalLM(LlamaConfig(**settings)).eval()


@pytest.fixture
def directory(tmp_path: Path) -> Callable[..., Path]:
    def make(model: Any, **kwargs: Any) -> Path:
        folder = tmp_path / "small"
        model.save_pretrained(folder, **kwargs)
        byte_tokenizer().backend.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
        return folder

    return make


IDS = [5, 17, 256, 3, 99, 0, 42, *range(100, 220)]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"rope_parameters": LLAMA3},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}},
        {"num_key_value_heads": 6, "head_dim": 8},
    ],
)
@torch.inference_mode()
def test_a_saved_directory_gives_transformers_logits(directory: Callable[..., Path], changes: dict[str, Any]) -> None:
    model = small_llama(**changes)
    loaded = load_model(directory(model))
    torch.testing.assert_close(logits(loaded, IDS), model(torch.tensor([IDS])).logits[0], atol=1e-5, rtol=1e-5)
    assert loaded.name == "small"
    assert loaded.eos_token_ids == {7, 9}


@torch.inference_mode()
def test_a_sharded_directory_and_older_rope_settings(directory: Callable[..., Path]) -> None:
    model = small_llama(rope_parameters=LLAMA3)
    folder = directory(model, max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    settings = json.loads((folder / "config.json").read_text())
    rope = settings.pop("rope_parameters")
    settings |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}  # as transformers 4 wrote it
    (folder / "config.json").write_text(json.dumps(settings))
    wanted = model(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(logits(load_model(folder), IDS), wanted, atol=1e-5, rtol=1e-5)
    (folder / "config.json").write_text(json.dumps(settings | {"rope_scaling": None}))
    assert not torch.allclose(logits(load_model(folder), IDS), wanted, atol=1e-3)


def write_gguf(
    path: Path, model: Any, *, kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32, rope_freqs: Any = None
) -> None:
    """Writes a transformers Llama as llama.cpp's converter does, q and k rows reordered."""
    c = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_key_length(c.head_dim)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    vocabulary = byte_tokenizer().backend.get_vocab()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*sorted(vocabulary, key=vocabulary.__getitem__), "Ġt"])
    writer.add_token_merges(["Ġ t"])
    writer.add_eos_token_id(258)
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", rope_freqs)
    names = {"embed_tokens": "token_embd", "lm_head": "output", "model.norm": "output_norm"}
    parts = {
        "input_layernorm": "attn_norm",
        "q_proj": "attn_q",
        "k_proj": "attn_k",
        "v_proj": "attn_v",
        "o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "gate_proj": "ffn_gate",
        "up_proj": "ffn_up",
        "down_proj": "ffn_down",
    }
    for name, tensor in model.state_dict().items():
        array = tensor.numpy()
        if "layers." in name:
            part = next(p for p in parts if p in name)
            new = f"blk.{name.split('.')[2]}.{parts[part]}.weight"
        else:
            new = next(f"{v}.weight" for k, v in names.items() if k in name)
        for part, heads in (("q_proj", c.num_attention_heads), ("k_proj", c.num_key_value_heads)):
            if part in name:
                array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        array = np.ascontiguousarray(array)
        if array.ndim == 2 and kind != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(new, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(new, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@torch.inference_mode()
def test_a_gguf_file_gives_the_logits_of_the_model_it_was_made_from(tmp_path: Path) -> None:
    model = small_llama()
    write_gguf(tmp_path / "m.gguf", model)
    loaded = load_model(tmp_path / "m.gguf")
    torch.testing.assert_close(logits(loaded, IDS), model(torch.tensor([IDS])).logits[0], atol=1e-5, rtol=1e-5)
    assert loaded.eos_token_ids == {258}
    assert loaded.name == "m"


@torch.inference_mode()
def test_a_gguf_file_with_rope_factors(tmp_path: Path) -> None:
    """llama.cpp writes Llama 3.1's scaling as one divisor a frequency."""
    model = small_llama(rope_parameters=LLAMA3)
    plain = 1.0 / 10000.0 ** (np.arange(0, 16, 2) / 16)
    factors = plain / model.model.rotary_emb.inv_freq.numpy()
    assert factors.max() > 7
    write_gguf(tmp_path / "m.gguf", model, rope_freqs=factors.astype(np.float32))
    wanted = model(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(logits(load_model(tmp_path / "m.gguf"), IDS), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_1", "F16", "BF16"])
def test_quantized_gguf_tensors_read_as_the_gguf_package_reads_them(tmp_path: Path, kind: str) -> None:
    model = small_llama()
    write_gguf(tmp_path / "m.gguf", model, kind=gguf.GGMLQuantizationType[kind])
    file = GGUFFile(tmp_path / "m.gguf")
    for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors:
        wanted = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(file.tensor(tensor.name), wanted.reshape(file.tensors[tensor.name].shape))
    assert logits(load_model(tmp_path / "m.gguf"), IDS).isfinite().all()


@torch.inference_mode()
def test_the_default_model_has_transformers_logits(smollm2: LoadedModel, transformers_model: Any) -> None:
    ids = smollm2.tokenizer.encode("The capital of France is Paris, and the capital of Italy is")
    torch.testing.assert_close(
        logits(smollm2, ids), transformers_model(torch.tensor([ids])).logits[0], atol=1e-3, rtol=1e-4
    )


def test_tiny_is_the_same_every_time(tiny: LoadedModel) -> None:
    ids = tiny.tokenizer.encode("hello")
    assert torch.equal(logits(load_model("tiny"), ids), logits(tiny, ids))


def test_other_types(directory: Callable[..., Path]) -> None:
    loaded = load_model(directory(small_llama()), dtype=torch.bfloat16)
    assert loaded.model.embedding.dtype == torch.bfloat16
    assert logits(loaded, IDS).dtype == torch.float32


# -- what cannot be loaded -------------------------------------------------------------------------------------------


def refused(path: Path | str, reason: str) -> ModelError:
    with pytest.raises(ModelError, match=reason) as caught:
        load_model(path)
    assert caught.value.next_step
    return caught.value


def test_unknown_names_and_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "smollm2-135m" in refused("no-such-model", "no known name and no such path").next_step
    refused(tmp_path / "nowhere", "no such path")
    (tmp_path / "notes.txt").write_text("x")
    refused(tmp_path / "notes.txt", "no model")
    refused(tmp_path, "no config.json")
    monkeypatch.setenv("KVSCOPE_MODELS", str(tmp_path))
    assert "kvscope model get" in refused("smollm2-135m", "not fetched yet").next_step
    if not torch.cuda.is_available():
        with pytest.raises(ModelError, match="No CUDA device"):
            load_model("tiny", device="cuda")


def test_pickled_weights_are_never_read(directory: Callable[..., Path], tmp_path: Path) -> None:
    folder = directory(small_llama())
    (folder / "model.safetensors").unlink()
    refused(folder, "no model.safetensors")

    class Trap:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "trapped",))

    torch.save(Trap(), folder / "pytorch_model.bin")
    assert "safetensors" in refused(folder, "pickle").next_step
    assert not (tmp_path / "trapped").exists()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}, "MixtralForCausalLM is not supported"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2}}, "yarn"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "factor"),
        ({"hidden_size": None}, "TypeError"),
        ({"num_key_value_heads": 4}, "do not fit"),
        ({"num_hidden_layers": 0}, "num_layers is 0"),
        ({"num_hidden_layers": 10**9}, "num_layers is 1000000000"),
        ({"num_hidden_layers": 4}, "lacks tensors.*layers.3"),
        ({"hidden_size": 48}, "has shape"),
        ({"rms_norm_eps": "wide"}, "ValueError"),
    ],
)
def test_settings_that_do_not_fit(directory: Callable[..., Path], changes: dict[str, Any], reason: str) -> None:
    folder = directory(small_llama())
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | changes))
    refused(folder, reason)


def test_broken_files_of_a_directory(directory: Callable[..., Path]) -> None:
    folder = directory(small_llama())
    whole = (folder / "model.safetensors").read_bytes()
    for content in (b"", whole[:100], whole[: len(whole) // 2], b"\xff" * 1000):
        (folder / "model.safetensors").write_bytes(content)
        refused(folder, "model.safetensors cannot be read")
    (folder / "model.safetensors").write_bytes(whole)
    for name in ("tokenizer.json", "config.json", "tokenizer_config.json"):
        kept = (folder / name).read_bytes()
        (folder / name).write_bytes(b'{"half": ')
        refused(folder, f"{name} cannot be read")
        (folder / name).write_bytes(kept)
    (folder / "tokenizer.json").unlink()
    refused(folder, "no tokenizer.json")


def test_an_index_cannot_point_outside_the_folder(directory: Callable[..., Path], tmp_path: Path) -> None:
    folder = directory(small_llama(), max_shard_size="60KB")
    index = folder / "model.safetensors.index.json"
    entries = json.loads(index.read_text())
    first = next(iter(entries["weight_map"].values()))
    shutil.move(folder / first, tmp_path / first)
    entries["weight_map"] = {name: f"../{file}" for name, file in entries["weight_map"].items()}
    index.write_text(json.dumps(entries))
    refused(folder, "is listed in .* and missing")
    index.write_text(json.dumps({}))
    refused(folder, "no weight_map")


@pytest.fixture(scope="module")
def small_gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write_gguf(path, small_llama())
    return path.read_bytes()


def test_a_truncated_gguf_file_at_any_length(small_gguf: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    for length in {0, 3, 4, 12, 23, 24, *range(30, len(small_gguf), len(small_gguf) // 40)}:
        path.write_bytes(small_gguf[:length])
        refused(path, "cannot be read|not a whole GGUF file|is not a GGUF file")


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_gguf_file_is_an_error_or_a_model_never_a_crash(
    small_gguf: bytes, tmp_path: Path, data: st.DataObject
) -> None:
    """Header bytes replaced at random: loads, or raises ModelError; no other exception, no hang, no huge allocation."""
    damaged = bytearray(small_gguf)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, 6000))
        piece = data.draw(
            st.sampled_from([b"\xff" * 8, b"\x00" * 8, struct.pack("<Q", 1 << 40), b"\x09", b"\x01", b"zzzz"])
        )
        damaged[at : at + len(piece)] = piece
    path = tmp_path / "damaged.gguf"
    path.write_bytes(bytes(damaged))
    with contextlib.suppress(ModelError):
        load_model(path)


def test_a_gguf_file_of_another_architecture(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "b.gguf", "bert")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refused(tmp_path / "b.gguf", "architecture bert is not supported")


def test_a_gguf_file_without_its_metadata_or_tensors(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.zeros((10, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refused(tmp_path / "m.gguf", "metadata is incomplete")


def test_the_default_models_file_cut_short(smollm2: LoadedModel, tmp_path: Path) -> None:
    with open(fetch_model(), "rb") as whole, open(tmp_path / "half.gguf", "wb") as half:
        half.write(whole.read(50_000_000))
    refused(tmp_path / "half.gguf", "past the end of the file")


def test_the_written_out_attention_is_attention() -> None:
    q, k, v = torch.randn(7, 4, 8), torch.randn(7, 2, 8), torch.randn(7, 2, 8)
    wanted = F.scaled_dot_product_attention(
        q.transpose(0, 1),
        k.repeat_interleave(2, 1).transpose(0, 1),
        v.repeat_interleave(2, 1).transpose(0, 1),
        is_causal=True,
    )
    torch.testing.assert_close(causal(0, q, k, v), wanted.transpose(0, 1))
