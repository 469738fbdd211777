"""Every parser that reads what others wrote, as a function of bytes. A target may raise KvscopeError and nothing else, within the
time and memory that its caller sets. tests/fuzz/test_corpus.py runs the kept inputs, tests/fuzz/run.py (make fuzz) looks for new ones.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import struct
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from observability.errors import KvscopeError

#: What a reader may hand out for an input of a few KiB.
MAX_BYTES = 1 << 20


@cache
def _file(name: str) -> Path:
    """A file of this process that a target overwrites."""
    folder = tempfile.TemporaryDirectory(prefix="kvscope-fuzz-")
    _folders.append(folder)
    return Path(folder.name) / name


_folders: list[Any] = []  # removed when the process ends


# -- HTTP ----------------------------------------------------------------------------------------------------------------


@cache
def _tokenizer() -> Any:
    from observability.engine.model.tokenizer import byte_tokenizer

    return byte_tokenizer()


def http_body(data: bytes) -> None:
    """A body as the server takes it apart; the first byte chooses the endpoint."""
    from observability.engine.openai_types import ChatBody, CompletionBody, parse_body, request_class, session_id

    body = parse_body(ChatBody if data[:1] == b"c" else CompletionBody, data[1:])
    if isinstance(body, ChatBody):
        _tokenizer().encode_chat([message.for_template() for message in body.messages])
    else:
        for prompt in body.prompts():
            if isinstance(prompt, str):
                _tokenizer().encode(prompt)
    body.sampling(body.token_limit()[1] or 16)
    body.deadline(0.0)
    session_id(None, body)
    assert request_class(None, body) in ("interactive", "standard", "long_context")


def http_headers(data: bytes) -> None:
    """Header lines: of traces, of content negotiation, of class, session and tenant."""
    from opentelemetry import propagate, trace
    from starlette.datastructures import Headers

    from exporters.prometheus import prefers_openmetrics
    from observability.engine.openai_types import CompletionBody, request_class, session_id, tenant

    raw = [tuple(part.strip() for part in line.split(b":", 1)) for line in data.split(b"\n") if b":" in line]
    headers = Headers(raw=[(name.lower(), value) for name, value in raw])
    trace.get_current_span(propagate.extract(headers)).get_span_context()
    prefers_openmetrics(headers.get("accept", ""))
    request_class(headers.get("x-kvscope-class"), None)
    session_id(headers.get("x-session-id"), CompletionBody(model="m", prompt="p"))
    tenant(headers.get("x-tenant")).encode()


# -- files ---------------------------------------------------------------------------------------------------------------


def trace_file(data: bytes) -> None:
    from observability.workload.traces import read_trace

    path = _file("trace")
    path.write_bytes(data)
    for request in read_trace(path, length_scale=0.5):
        assert request.arrival_seconds >= 0
        assert request.output_tokens >= 1
        assert len(request.prompt.hash_ids) == -(-request.prompt.length // request.prompt.part_tokens)


def block(data: bytes) -> None:
    from observability.engine.kv import codec

    values = codec.decode(data, max_bytes=MAX_BYTES)
    assert values.nbytes <= MAX_BYTES
    assert np.array_equal(codec.decode(codec.encode(values, axis=0), max_bytes=MAX_BYTES), values)


def snapshot(data: bytes) -> None:
    """Any bytes behind a checksum that fits; the envelope's length is that of the rest unless the first byte says otherwise."""
    from observability.engine.kv import snapshot as format

    body = data[1:] if data[:1] == b"r" else struct.pack("<I", len(data)) + data
    digest = hashlib.blake2b(body, digest_size=16).digest()
    loaded = format.load(b"KVSNAP\r\n" + digest + body, max_bytes=MAX_BYTES)
    assert sum(tensor.nbytes for tensor in loaded.tensors.values()) + loaded.tokens.nbytes <= MAX_BYTES
    again = format.load(format.dump(loaded), max_bytes=MAX_BYTES)
    assert np.array_equal(again.tokens, loaded.tokens)


def gguf(data: bytes) -> None:
    """A model file as `kvscope serve FILE` loads it."""
    from observability.engine.model.loading import load_model

    path = _file("model.gguf")
    path.write_bytes(data)
    load_model(path)


def model_folder(data: bytes) -> None:
    """config.json, tokenizer.json, tokenizer_config.json, generation_config.json and model.safetensors, cut at NUL NUL; a missing
    part is the right one."""
    from observability.engine.model.loading import load_model

    good = small_folder()
    folder = _file("config.json").parent
    parts = data.split(b"\0\0\0\0", len(FOLDER_FILES) - 1)
    for i, name in enumerate(FOLDER_FILES):
        (folder / name).write_bytes(parts[i] if i < len(parts) and parts[i] else good[name])
    load_model(folder)


FOLDER_FILES = (
    "config.json", "tokenizer_config.json", "generation_config.json", "tokenizer.json", "model.safetensors"
)  # fmt: skip


@cache
def small_folder() -> dict[str, bytes]:
    """A Llama of a few weights as a Hugging Face folder."""
    import torch
    from safetensors.torch import save

    from observability.engine.model.llama import ModelConfig

    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 259, "hidden_size": 8,
        "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
        "max_position_embeddings": 64, "rope_theta": 10000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
        "eos_token_id": 258,
    }  # fmt: skip
    shapes = ModelConfig(
        vocab_size=259, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4, max_position=64,
        tie_word_embeddings=True,
    ).tensor_shapes()  # fmt: skip
    return {
        "config.json": json.dumps(config).encode(),
        "tokenizer_config.json": b'{"chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}", "eos_token": "<|im_end|>"}',
        "generation_config.json": b'{"eos_token_id": [258]}',
        "tokenizer.json": _tokenizer().backend.to_str().encode(),
        "model.safetensors": save({name: torch.zeros(shape) for name, shape in shapes.items()}),
    }


# -- pages of other engines ----------------------------------------------------------------------------------------------


def exposition(data: bytes) -> None:
    """A page as the recorder reads it, evaluates it twice and stores it."""
    from observability.store.evaluate import Evaluator
    from observability.store.recorder import parse_exposition

    kind = "application/openmetrics-text" if data[:1] == b"o" else "text/plain"
    scrape = parse_exposition(data[1:].decode("utf-8", errors="replace"), kind, "page")
    assert len(scrape.series) == len(scrape.values)
    evaluator = Evaluator()
    for at in (0.0, 15.0):
        evaluator.scrape(at, scrape.series, scrape.values)
        evaluator.evaluate(at)


def foreign_page(data: bytes) -> None:
    """A page as `kvscope doctor` reads it."""
    from exporters.adapters import checks, readings
    from exporters.adapters.doctor import recognize
    from exporters.adapters.endpoint import Answer
    from exporters.adapters.engines import ADAPTERS
    from exporters.adapters.own import OWN, refused, stale
    from exporters.adapters.page import parse

    page = parse(Answer("http://engine/metrics", data, "text/plain"))
    found = list(page.findings)
    engine = recognize(page)
    if engine:
        adapter = ADAPTERS.get(engine)
        for check in checks.CHECKS:
            found += check(adapter or OWN, page)
        if adapter is None:
            found += [*refused(page), *stale(page, page)]
        else:
            found += checks.frozen(adapter, page, page, 2.0)
        readings.read(adapter or OWN, page)
    assert all((finding.found + finding.do).isprintable() for finding in found)


def kv_events(data: bytes) -> None:
    """Messages of vLLM's KV events, cut at NUL NUL; numbers follow one another."""
    from exporters.vllm.kv_events import KVEvents

    events = KVEvents("inproc://none")
    for number, payload in enumerate(data.split(b"\0\0\0\0")):
        events.take([b"", number.to_bytes(8, "big"), payload])
    assert min(events.ledger.stored) >= 0 <= min(events.ledger.removed)


# -- settings ------------------------------------------------------------------------------------------------------------


def objectives(data: bytes) -> None:
    from observability.objectives import parse

    parse(data.decode("utf-8", errors="replace"), "objectives.toml")


def config_file(data: bytes) -> None:
    """The configuration file, down to each table's options."""
    from typer.main import get_command

    from observability import config
    from observability.cli import root
    from observability.cli._commands import Tables

    path = _file("kvscope.toml")
    path.write_bytes(data)
    file = config.parsed(path)
    tables = Tables(get_command(root), file)
    for name in file.tables:
        below = tables.get(name)
        if isinstance(below, Tables):
            for inner in file.tables[name]:
                below.get(inner)


def settings(data: bytes) -> None:
    """Engine settings and bucket plans, one a line."""
    from observability.buckets import bucket_plan
    from observability.engine.settings import parse_settings, with_settings
    from observability.engine.types import EngineConfig

    lines = data.decode("utf-8", errors="replace").split("\n")
    with contextlib.suppress(KvscopeError):
        bucket_plan(lines)
    with_settings(EngineConfig(num_blocks=1024), parse_settings(lines))


Target = Callable[[bytes], None]
TARGETS: dict[str, Target] = {
    target.__name__: target
    for target in (
        http_body, http_headers, trace_file, block, snapshot, gguf, model_folder, exposition, foreign_page, kv_events, objectives,
        config_file, settings,
    )
}  # fmt: skip


def run(target: Target, data: bytes) -> bool:
    """Whether the input was taken; False: refused as it should be."""
    try:
        target(data)
    except KvscopeError:
        return False
    return True
