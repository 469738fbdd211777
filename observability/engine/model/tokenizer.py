"""Text to token ids and back: tokenizer.json of a Hugging Face directory, the byte-level BPE of a GGUF file, or one token a byte.
Chat templates come from outside and run in jinja2's sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from observability.errors import ModelError, RequestError

#: ChatML, as SmolLM2 and many others are trained with.
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class Tokenizer:
    """A tokenizer and its chat template. Thread-safe: nothing changes after construction."""

    def __init__(self, backend: Backend, chat_template: str | None, special: Mapping[str, str | None]) -> None:
        self.backend = backend
        self.vocab_size = backend.get_vocab_size()
        self._special = dict(special)  # bos_token, eos_token: what templates may ask for
        self._template = _compile(chat_template) if chat_template is not None else None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. `add_special_tokens` adds what the model wants around a text (often a BOS, often nothing).
        Special tokens written out in the text are read as such, as transformers does."""
        return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are no valid UTF-8 become U+FFFD."""
        return str(self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def render_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """The prompt text of a conversation by the model's template. Raises RequestError when the model has none or refuses it."""
        if self._template is None:
            raise RequestError(
                "This model has no chat template.",
                param="messages",
                next_step="Use /v1/completions with a plain prompt.",
            )
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **self._special
            )
        except (
            jinja2.TemplateError,
            TypeError,
            KeyError,
            ValueError,
            AttributeError,
            IndexError,
            OverflowError,
        ) as error:
            raise RequestError(
                f"The model's chat template refuses these messages: {error}.",
                param="messages",
                next_step="Give each message a role and a text content, in an order that the model knows.",
            ) from error

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation up to where the assistant answers. The template itself writes any BOS."""
        return self.encode(self.render_chat(messages), add_special_tokens=False)


# -- chat templates -------------------------------------------------------------------------------------------------


def _compile(source: str) -> jinja2.Template:
    # what templates written for transformers expect: these two options, loop controls, these names
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ModelError(
            f"The model's chat template cannot be compiled: {error}.",
            next_step="Correct chat_template in the model's files.",
        ) from error


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


# -- sources --------------------------------------------------------------------------------------------------------

#: GPT-2's split is what ByteLevel does by itself. Names are llama.cpp's (src/llama-vocab.cpp), which hold for GGUF files.
_LLAMA3_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GGUF_PRE_TOKENIZERS = ("smollm", "gpt-2", "llama3", "llama-v3", "llama-bpe")
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4


def from_gguf(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    """The byte-level BPE that a GGUF file's metadata describes. Raises ModelError for another kind of tokenizer."""
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2" or pre not in _GGUF_PRE_TOKENIZERS:
        raise ModelError(
            f"{source}: its tokenizer ({kind}, pre-tokenizer {pre}) is not supported; byte-level BPE with pre-tokenizer "
            f"{', '.join(_GGUF_PRE_TOKENIZERS)} is.",
            next_step="Use the model's Hugging Face directory with its tokenizer.json.",
        )
    try:
        tokens: list[str] = metadata["tokenizer.ggml.tokens"]
        merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
        types: list[int] = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
        model = models.BPE(
            {token: i for i, token in enumerate(tokens)}, merges, ignore_merges=pre not in ("smollm", "gpt-2")
        )
        backend = Backend(model)
        special = {
            f"{name}_token": tokens[metadata[f"tokenizer.ggml.{name}_token_id"]]
            for name in ("bos", "eos")
            if f"tokenizer.ggml.{name}_token_id" in metadata
        }
    except Exception as error:  # the tokenizers library raises plain Exception for a merge of unknown tokens
        raise ModelError(
            f"{source}: its tokenizer metadata is broken ({error}).", next_step="Fetch the file again."
        ) from error
    if pre == "smollm":  # each digit by itself before GPT-2's split
        before = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    elif pre == "gpt-2":
        before = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    else:
        split = pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), behavior="isolated")
        before = [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    backend.pre_tokenizer = pre_tokenizers.Sequence(before)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [
            AddedToken(t, special=True, normalized=False)
            for t, kind in zip(tokens, types, strict=False)
            if kind == _CONTROL
        ]
    )
    backend.add_tokens(
        [AddedToken(t, normalized=False) for t, kind in zip(tokens, types, strict=False) if kind == _USER_DEFINED]
    )
    if metadata.get("tokenizer.ggml.add_bos_token") and "bos_token" in special:
        bos = special["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, metadata["tokenizer.ggml.bos_token_id"])]
        )
    return Tokenizer(backend, metadata.get("tokenizer.chat_template"), special)


def from_directory(folder: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face directory: tokenizer.json, and the chat template where one of three files has it."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            f"{folder} has no tokenizer.json.",
            next_step="Load it once by transformers' AutoTokenizer and save it there with save_pretrained.",
        )
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the tokenizers library raises plain Exception
        raise ModelError(f"{path} cannot be read: {error}.", next_step="Fetch the file again.") from error
    backend.no_truncation()
    backend.no_padding()
    settings = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    refuse_own_code(settings, f"{folder}/tokenizer_config.json")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several by name; the one without a purpose is "default"
        template = next(
            (t.get("template") for t in template if isinstance(t, dict) and t.get("name") == "default"), None
        )
    if (folder / "chat_template.jinja").is_file():
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    if template is not None and not isinstance(template, str):
        raise ModelError(f"{folder}/tokenizer_config.json: chat_template is no text.", next_step="Correct the file.")
    special: dict[str, str | None] = {}
    for name in ("bos_token", "eos_token"):
        token = settings.get(name)
        special[name] = token.get("content") if isinstance(token, dict) else token
    return Tokenizer(backend, template, special)


def byte_tokenizer() -> Tokenizer:
    """One token a byte (ids 0 to 255, in the order of the byte-level alphabet), then <|endoftext|>, <|im_start|>, <|im_end|>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    )
    return Tokenizer(backend, CHATML, {"bos_token": None, "eos_token": "<|im_end|>"})


def refuse_own_code(settings: Mapping[str, Any], source: str) -> None:
    """Raises ModelError for settings that name Python code of the model's own: it is never run, and without it results may be others."""
    if settings.get("auto_map"):
        raise ModelError(
            f"{source}: auto_map names code of the model's own, which is not run.",
            next_step="Use a model whose architecture needs none, or take auto_map out if its results are the same without.",
        )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a model directory. Raises ModelError when there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}.", next_step="Fetch the file again.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object.", next_step="Fetch the file again.")
    return value
