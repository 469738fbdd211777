"""load_model: a name, a Hugging Face Llama directory or a GGUF file becomes weights, tokenizer and settings in memory.
No pickle is read and no code of a model is run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from observability.engine.model import fetch
from observability.engine.model.gguf_file import GGUFFile
from observability.engine.model.latent import LatentDecoder, random_weights
from observability.engine.model.latent_config import TINY_MLA, LatentConfig
from observability.engine.model.llama import Llama, ModelConfig, RopeScaling
from observability.engine.model.tokenizer import (
    Tokenizer,
    byte_tokenizer,
    from_directory,
    from_gguf,
    read_json,
    refuse_own_code,
)
from observability.errors import ModelError

TINY = ModelConfig(
    vocab_size=259, hidden_size=64, intermediate_size=128, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16, max_position=8192
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run. `name` is what clients and metric labels call it."""

    name: str
    config: ModelConfig | LatentConfig
    model: Llama | LatentDecoder
    tokenizer: Tokenizer
    eos_token_ids: frozenset[int]


def load_model(name_or_path: str | Path, *, device: str = "cpu", dtype: torch.dtype = torch.float32) -> LoadedModel:
    """Loads `smollm2-135m`, a Hugging Face Llama directory, a .gguf file, or random weights with one token a byte: `tiny` (Llama) and
    `tiny-mla` (latent attention, every second layer sliding).

    Weights are converted to `dtype` on `device`. Raises ModelError with a next step when the model is not there, is broken, or
    is of a kind that this engine does not run.
    """
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ModelError(
            "No CUDA device is available to this PyTorch.",
            next_step="Use device cpu, or install a CUDA build of torch.",
        )
    if str(name_or_path) == "tiny":
        return _tiny(device, dtype)
    if str(name_or_path) == "tiny-mla":
        weights = random_weights(TINY_MLA)
        return _of_bytes("tiny-mla", LatentDecoder(TINY_MLA, weights.__getitem__, device=device, dtype=dtype))
    if (known := fetch.FETCHABLE.get(str(name_or_path))) is not None:
        path = fetch.model_path(known)
        if not path.is_file():
            raise ModelError(
                f"Model {known.name} is not fetched yet ({path} is missing).", next_step="Run `kvscope model get`."
            )
        return _load_gguf(path, known.name, device, dtype)
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return _load_directory(path, device, dtype)
    if path.suffix == ".gguf" and path.is_file():
        return _load_gguf(path, path.stem, device, dtype)
    if path.exists():
        raise ModelError(
            f"{path} is no model: neither a directory nor a .gguf file.",
            next_step="Give the directory that holds config.json.",
        )
    raise ModelError(
        f"There is no model {str(name_or_path)!r}: no known name and no such path.",
        next_step=f"Use {', '.join(fetch.FETCHABLE)}, tiny, tiny-mla, or the path of a Hugging Face Llama directory or a GGUF file.",
    )


# -- Hugging Face directories ---------------------------------------------------------------------------------------


def _load_directory(folder: Path, device: str, dtype: torch.dtype) -> LoadedModel:
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{folder} has no config.json, so it is no Hugging Face model directory.",
            next_step="Give the directory that holds config.json, or the path of the .gguf file itself.",
        )
    settings = read_json(folder / "config.json")
    config = _config_from_json(settings, str(folder / "config.json"))
    tokenizer = from_directory(folder)
    files = _safetensors_files(folder)
    missing = [name for name in config.tensor_shapes() if name not in files]
    if missing:
        raise _missing(str(folder), missing)

    def read(name: str) -> Tensor:
        try:
            with safe_open(files[name], framework="pt") as archive:
                tensor: Tensor = archive.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{files[name]} cannot be read: {error}.", next_step="Fetch the file again.") from error
        if not tensor.is_floating_point():
            raise ModelError(
                f"{folder}: tensor {name} holds {tensor.dtype}.", next_step="Use weights that are not quantized."
            )
        return tensor

    model = Llama(config, read, device=device, dtype=dtype)
    generation = folder / "generation_config.json"
    eos = (read_json(generation) if generation.is_file() else {}).get("eos_token_id", settings.get("eos_token_id"))
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    return LoadedModel(folder.resolve().name, config, model, tokenizer, frozenset(int(i) for i in ids))


def _config_from_json(settings: Mapping[str, Any], source: str) -> ModelConfig:
    refuse_own_code(settings, source)
    architectures = settings.get("architectures") or [settings.get("model_type")]
    if not set(architectures) <= {"LlamaForCausalLM", "llama"} or settings.get("model_type", "llama") != "llama":
        raise ModelError(
            f"{source}: architecture {', '.join(map(str, architectures))} is not supported.",
            next_step="Use a LlamaForCausalLM model.",
        )
    for key, value in (
        ("attention_bias", False),
        ("mlp_bias", False),
        ("hidden_act", "silu"),
        ("quantization_config", None),
    ):
        if settings.get(key, value) not in (value, None):
            raise ModelError(
                f"{source}: {key} is {settings[key]!r}; this engine runs {value!r} only.",
                next_step="Use a plain Llama checkpoint in float16, bfloat16 or float32.",
            )
    try:
        hidden, heads = int(settings["hidden_size"]), int(settings["num_attention_heads"])
        # transformers 5 writes rope_parameters; earlier versions wrote rope_theta and rope_scaling
        rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
        return ModelConfig(
            vocab_size=int(settings["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(settings["intermediate_size"]),
            num_layers=int(settings["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(settings.get("num_key_value_heads") or heads),
            head_dim=int(settings.get("head_dim") or hidden // heads),
            max_position=int(settings.get("max_position_embeddings", 2048)),
            rope_theta=float(rope.get("rope_theta", settings.get("rope_theta", 10000.0))),
            rope_scaling=_scaling_from_json(rope, source),
            rms_norm_eps=float(settings.get("rms_norm_eps", 1e-6)),
            tie_word_embeddings=bool(settings.get("tie_word_embeddings", False)),
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(
            f"{source}: {type(error).__name__} {error}.", next_step="Compare the file with the original model's."
        ) from error


def _scaling_from_json(rope: Mapping[str, Any], source: str) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", factor=float(rope["factor"]))
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            factor=float(rope["factor"]),
            low_freq_factor=float(rope["low_freq_factor"]),
            high_freq_factor=float(rope["high_freq_factor"]),
            original_max_position=int(rope["original_max_position_embeddings"]),
        )
    raise ModelError(
        f"{source}: rope type {kind!r} is not supported.",
        next_step="Use a model with rope type default, linear or llama3.",
    )


def _safetensors_files(folder: Path) -> dict[str, Path]:
    """File of each tensor, by the sharded index or by the one file's own header."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        entries = read_json(index).get("weight_map")
        if not isinstance(entries, dict):
            raise ModelError(f"{index} has no weight_map.", next_step="Fetch the file again.")
        files = {name: folder / Path(str(file)).name for name, file in entries.items()}  # never outside the folder
        absent = sorted({str(path) for path in files.values() if not path.is_file()})
        if absent:
            raise ModelError(
                f"{absent[0]} is listed in {index.name} and missing.", next_step="Fetch the rest of the model."
            )
        return files
    if single.is_file():
        try:
            with safe_open(single, framework="pt") as archive:
                return dict.fromkeys(archive.keys(), single)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{single} cannot be read: {error}.", next_step="Fetch the file again.") from error
    pickled = sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pt")) + sorted(folder.glob("*.pth"))
    if pickled:
        raise ModelError(
            f"{folder} holds its weights as pickle ({pickled[0].name}), which can run code and is not read.",
            next_step="Fetch the safetensors files, or save the model as such by transformers' save_pretrained.",
        )
    raise ModelError(f"{folder} has no model.safetensors.", next_step="Fetch the model's weights into it.")


# -- GGUF -----------------------------------------------------------------------------------------------------------


def _load_gguf(path: Path, name: str, device: str, dtype: torch.dtype) -> LoadedModel:
    file = GGUFFile(path)
    config = _config_from_gguf(file)
    tokenizer = from_gguf(file.metadata, str(path))
    names = {tensor: _gguf_name(tensor) for tensor in config.tensor_shapes()}
    missing = [gguf_name for gguf_name in names.values() if gguf_name not in file.tensors]
    if missing:
        raise _missing(str(path), missing)

    def read(tensor: str) -> Tensor:
        array = file.tensor(names[tensor])
        for projection, heads in (("q_proj", config.num_heads), ("k_proj", config.num_kv_heads)):
            if projection in tensor and array.shape[0] == heads * config.head_dim:
                array = _unpermute(array, heads)
        return torch.from_numpy(array)

    model = Llama(config, read, device=device, dtype=dtype)
    ends = (file.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom"))
    return LoadedModel(name, config, model, tokenizer, frozenset(i for i in ends if isinstance(i, int)))


def _config_from_gguf(file: GGUFFile) -> ModelConfig:
    data = file.metadata
    architecture = data.get("general.architecture")
    if architecture != "llama" or data.get("llama.expert_count"):
        kind = f"{architecture} with experts" if architecture == "llama" else architecture
        raise ModelError(f"{file.path}: architecture {kind} is not supported.", next_step="Use a dense Llama model.")
    try:
        heads, hidden = data["llama.attention.head_count"], data["llama.embedding_length"]
        return ModelConfig(
            # the embedding has the last word: some converters pad it past the vocabulary
            vocab_size=file.tensors["token_embd.weight"].shape[0],
            hidden_size=hidden,
            intermediate_size=data["llama.feed_forward_length"],
            num_layers=data["llama.block_count"],
            num_heads=heads,
            num_kv_heads=data.get("llama.attention.head_count_kv", heads),
            head_dim=data.get("llama.attention.key_length")
            or data.get("llama.rope.dimension_count")
            or hidden // heads,
            max_position=data["llama.context_length"],
            rope_theta=data.get("llama.rope.freq_base", 10000.0),
            rope_scaling=_scaling_from_gguf(file),
            rms_norm_eps=data["llama.attention.layer_norm_rms_epsilon"],
            tie_word_embeddings="output.weight" not in file.tensors,
        )
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise ModelError(
            f"{file.path}: metadata is incomplete ({error}).", next_step="Fetch or convert the file again."
        ) from error


def _scaling_from_gguf(file: GGUFFile) -> RopeScaling | None:
    kind = file.metadata.get("llama.rope.scaling.type", "none")
    if "rope_freqs.weight" in file.tensors:  # how llama.cpp's converter writes Llama 3.1's scaling
        return RopeScaling("factors", factors=tuple(file.tensor("rope_freqs.weight").ravel().tolist()))
    if kind == "none":
        return None
    if kind == "linear":
        return RopeScaling("linear", factor=float(file.metadata["llama.rope.scaling.factor"]))
    raise ModelError(
        f"{file.path}: rope scaling {kind!r} is not supported.", next_step="Use a model with none or linear scaling."
    )


def _gguf_name(name: str) -> str:
    """GGUF's name of a tensor that Hugging Face calls `name` (llama.cpp, gguf-py/gguf/tensor_mapping.py)."""
    top = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in top:
        return top[name]
    _, _, layer, rest = name.split(".", 3)
    parts = {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    return f"blk.{layer}.{parts[rest.removesuffix('.weight')]}.weight"


def _unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undoes llama.cpp's reordering of q and k rows (convert_hf_to_gguf.py, LlamaModel.permute), which pairs neighbours for
    the rotation; this decoder, as transformers', pairs the two halves of a head. [heads x head_dim, hidden] in and out."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _missing(source: str, names: list[str]) -> ModelError:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ModelError(
        f"{source} lacks tensors that a Llama model needs: {', '.join(names[:3])}{more}.",
        next_step="Fetch the whole model again.",
    )


# -- tiny -----------------------------------------------------------------------------------------------------------


def _tiny(device: str, dtype: torch.dtype) -> LoadedModel:
    """Random weights of a fixed seed; scaled so that its greedy choices are far from ties."""
    generator = torch.Generator().manual_seed(20)
    shapes = TINY.tensor_shapes()

    def read(name: str) -> Tensor:
        shape = shapes[name]
        if len(shape) == 1:
            return torch.ones(shape)
        scale = 1.0 if "embed" in name else 2.0 * shape[-1] ** -0.5
        return torch.randn(shape, generator=generator) * scale

    return _of_bytes("tiny", Llama(TINY, read, device=device, dtype=dtype))


def _of_bytes(name: str, model: Llama | LatentDecoder) -> LoadedModel:
    tokenizer = byte_tokenizer()
    eos = tokenizer.backend.token_to_id("<|im_end|>")
    assert eos is not None
    return LoadedModel(name, model.config, model, tokenizer, frozenset({eos}))
