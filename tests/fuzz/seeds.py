"""Good inputs of every target, from which fuzzing starts: `python -m tests.fuzz.seeds` writes those that the corpus lacks."""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from tests.fuzz.targets import FOLDER_FILES, TARGETS, small_folder

CORPUS = Path(__file__).with_name("corpus")


def http_body() -> Iterator[bytes]:
    chat = {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}
    text = {"model": "m", "prompt": ["a", "b"], "max_tokens": 4, "stop": ["x"], "seed": 1, "stream": True}
    rest = {"stream_options": {"include_usage": True}, "service_tier": "flex", "priority": -1, "deadline_seconds": 1.5}
    more = {"session_id": "s", "temperature": 0.5, "top_p": 0.9, "ignore_eos": True, "logit_bias": {}, "n": 1}
    yield b"c" + json.dumps(chat | rest | {"max_completion_tokens": 3}).encode()
    yield b"t" + json.dumps(text | more).encode()
    yield b"t" + json.dumps({"model": "m", "prompt": [[1, 2], [3]]}).encode()


def http_headers() -> Iterator[bytes]:
    trace = b"traceparent: 00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01\ntracestate: vendor=1,other=2\nbaggage: k=v"
    yield trace + b"\naccept: application/openmetrics-text;version=1.0.0;q=0.5,text/plain;q=0.3"
    yield b"x-session-id: s\nx-tenant: t\xc3\xa4\nx-kvscope-class: interactive\naccept: */*"


def trace_file() -> Iterator[bytes]:
    line = {"timestamp": 0, "input_length": 600, "output_length": 9, "hash_ids": [0, 1]}
    yield "".join(json.dumps(line | {"timestamp": at}) + "\n" for at in (0, 100, 250.5)).encode()
    header = b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    yield header + b"2023-11-16 18:17:03.97,4808,10\r\n2023-11-16 18:17:04.0319600,3180,8\r\n"
    yield header + b"2024-05-10 00:00:00.009930+00:00,2162,5\n"


def block() -> Iterator[bytes]:
    from observability.engine.kv import codec

    values = np.random.default_rng(1).normal(0, 20, (2, 16, 5)).astype(np.int8)
    smooth = np.repeat(np.arange(40, dtype=np.int8)[:, None], 3, axis=1)
    noisy = np.random.default_rng(2).integers(-128, 128, (70, 3)).astype(np.int8)
    for array in (values, smooth, noisy):
        yield codec.encode(array)


def snapshot() -> Iterator[bytes]:
    from observability.engine.kv import snapshot as format

    rng = np.random.default_rng(1)
    tensors = {
        "k": rng.normal(0, 20, (2, 2, 4, 3)).astype(np.int8), "v": rng.normal(size=(2, 4)).astype(np.float32),
        "s": rng.normal(size=(2, 4)).astype(np.float16),
    }  # fmt: skip
    whole = format.dump(format.Snapshot("m", "f", "int8", 4, np.arange(8, dtype=np.int32), {"a": "b"}, tensors))
    yield b"r" + whole[24:]


def gguf() -> Iterator[bytes]:
    import gguf as writer_of

    from observability.engine.model.tokenizer import byte_tokenizer

    vocabulary = byte_tokenizer().backend.get_vocab()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        writer = writer_of.GGUFWriter(path, "llama")
        writer.add_block_count(1)
        writer.add_context_length(64)
        writer.add_embedding_length(4)
        writer.add_feed_forward_length(4)
        writer.add_head_count(1)
        writer.add_head_count_kv(1)
        writer.add_key_length(4)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list([*sorted(vocabulary, key=vocabulary.__getitem__)[:100], "ab"])
        writer.add_token_merges(["a b"])
        writer.add_eos_token_id(7)
        small, square = np.zeros(4, np.float32), np.zeros((4, 4), np.float16)
        writer.add_tensor("token_embd.weight", np.zeros((101, 4), np.float16))
        writer.add_tensor("output_norm.weight", small)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.0.{name}.weight", small)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
            writer.add_tensor(f"blk.0.{name}.weight", square)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        yield path.read_bytes()


def model_folder() -> Iterator[bytes]:
    good = small_folder()
    yield b"\0\0\0\0".join(good[name] for name in FOLDER_FILES[:3])
    header = json.dumps({"model.norm.weight": {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]}}).encode()
    yield b"\0\0\0\0" * 4 + struct.pack("<Q", len(header)) + header + bytes(32)
    token = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}}
    yield b"\0\0\0\0" * 3 + json.dumps(token).encode()
    hostile = json.loads(good["config.json"]) | {"auto_map": {"AutoModel": "evil.Model"}, "trust_remote_code": True}
    yield json.dumps(hostile).encode()


_PAGE = """# HELP vllm:num_requests_running Running.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="m"} 3
# TYPE vllm:e2e_request_latency_seconds histogram
vllm:e2e_request_latency_seconds_bucket{le="0.5",model_name="m"} 1
vllm:e2e_request_latency_seconds_bucket{le="+Inf",model_name="m"} 2
vllm:e2e_request_latency_seconds_sum{model_name="m"} 1.5
vllm:e2e_request_latency_seconds_count{model_name="m"} 2
"""


def exposition() -> Iterator[bytes]:
    from prometheus_client.exposition import generate_latest
    from prometheus_client.registry import CollectorRegistry

    from exporters.prometheus import TelemetryCollector
    from observability.telemetry.recorder import Telemetry

    yield b"p" + _PAGE.encode()
    yield b"o" + b'# TYPE a counter\na_total{b="c\\"d"} 1 1.5 # {trace_id="x"} 0.5 1.0\n# EOF\n'
    telemetry = Telemetry("m", executor="torch", virtual=False, device="cpu", kv_dtype="f", clock=lambda: 0.0)
    registry = CollectorRegistry()
    registry.register(TelemetryCollector(telemetry))
    lines = [line for line in generate_latest(registry).decode().split("\n") if line and not line.startswith("#")]
    yield b"p" + "\n".join(lines[::12]).encode() + b"\n"


def foreign_page() -> Iterator[bytes]:
    yield _PAGE.encode()
    yield b'# TYPE sglang:num_running_reqs gauge\nsglang:num_running_reqs{model_name="m"} 2\nsglang:token_usage 0.5\n'
    yield b"# TYPE llamacpp:prompt_tokens_total counter\nllamacpp:prompt_tokens_total 12\nllamacpp:kv_cache_usage_ratio 0.5\n"
    yield next(iter([*exposition()][2:]))[1:]


def kv_events() -> Iterator[bytes]:
    stored = {
        "type": "BlockStored",
        "block_hashes": [1, b"x"],
        "parent_block_hash": None,
        "token_ids": [1],
        "block_size": 16,
    }
    removed = {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"}
    encode = msgspec.msgpack.encode
    yield b"\0\0\0\0".join([encode([1.5, [stored]]), encode([2.5, [removed, ["AllBlocksCleared"]]])])
    yield encode([3.5, [["BlockStored", [7], None, [1], 16, None, "CPU"]]])


def objectives() -> Iterator[bytes]:
    yield b'[[objective]]\nname = "ttft"\ntarget = 0.95\nthreshold_seconds = 0.5\nmodel = "llama"\n'
    yield b'[[objective]]\nname = "availability"\nmin_events = 5\nclass = "interactive"\n'


def config_file() -> Iterator[bytes]:
    yield b'[serve]\nport = 9000\nmodel = "tiny"\nengine = { num_blocks = 512, controller = "on" }\n\n[app]\nsource = "a.db"\n'
    yield b'[boards.import]\nurl = "http://127.0.0.1:3000"\n\n[[objective]]\nname = "ttft"\ntarget = 0.95\nthreshold_seconds = 0.5\n'


def settings() -> Iterator[bytes]:
    yield b"latency=0.1,0.2,0.8,20\ninter_token=0.05,0.1\ntail=0,0.8"
    yield b"num_host_blocks=4096\ncontroller.p99_high_seconds=0.5\ncontroller=on\nprefix_caching=off\ncompaction_seconds=0.002"


def main() -> None:
    for name in TARGETS:
        folder = CORPUS / name
        folder.mkdir(parents=True, exist_ok=True)
        for i, seed in enumerate(globals()[name]()):
            (folder / f"good-{i}").write_bytes(seed)


if __name__ == "__main__":
    main()
