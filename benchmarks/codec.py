"""How small KV that leaves the device gets, and how fast: the codec beside zstd on real keys and values, and whole snapshots.

    python benchmarks/codec.py                   SmolLM2-135M over 512 tokens of the README
    python benchmarks/codec.py --model tiny --tokens 256 --json codec.json

Keys are quantized per channel over each block of 16 tokens, values per token: int8 symmetric, int4 with a zero point, its levels 0..15
moved to -8..7. Raw is what the device stores: a byte a number for int8, half a byte for int4. Ratios are raw bytes / bytes; GB/s
count raw bytes too, on one thread, as the best of some runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
import zstandard
from torch import Tensor

from figures import Parser, keep
from figures import Row as Kept
from observability.engine.kv import codec
from observability.engine.kv.snapshot import Snapshot, dump, load
from observability.engine.model.fetch import FETCHABLE, fetch_model
from observability.engine.model.loading import LoadedModel, load_model

_BLOCK = 16
_REPEAT = 5
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Row:
    data: str
    method: str
    bytes: int
    ratio: float
    encode_gb_per_second: float
    decode_gb_per_second: float


@torch.inference_mode()
def keys_and_values(loaded: LoadedModel, tokens: int) -> np.ndarray:
    """float32 [blocks, layers, 2, kv_heads, block_size, head_dim] of the README's first tokens, as the model computes them."""
    ids = loaded.tokenizer.encode(Path(__file__).parents[1].joinpath("README.md").read_text())
    ids = ids[: min(tokens, len(ids)) // _BLOCK * _BLOCK]
    layers: list[Tensor] = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        layers.append(torch.stack([k, v]).transpose(1, 2))
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)

    loaded.model.prepare(len(ids))
    loaded.model.forward(torch.tensor(ids), torch.arange(len(ids)), attend)
    blocks = torch.stack(layers).unflatten(3, (-1, _BLOCK)).permute(3, 0, 1, 2, 4, 5)
    return blocks.float().contiguous().numpy()


def quantize(exact: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """int8 of the same shape; numbers that differ in `axis` alone share a scale."""
    if bits == 8:
        scale, zero = np.abs(exact).max(axis, keepdims=True) / 127, np.float32(0)
    else:
        zero = exact.min(axis, keepdims=True)
        scale = (exact.max(axis, keepdims=True) - zero) / 15
    levels = np.rint((exact - zero) / np.maximum(scale, np.finfo(np.float32).tiny))
    return (levels if bits == 8 else levels - 8).astype(np.int8)


def stored(values: np.ndarray, bits: int) -> bytes:
    """The bytes in which a device keeps them."""
    if bits == 8:
        return values.tobytes()
    low, high = values.reshape(-1, 2).T
    return ((low & 15) | (high << 4)).astype(np.int8).tobytes()


def best_seconds(call: Callable[[], _T]) -> tuple[float, _T]:
    seconds = []
    for _ in range(_REPEAT):
        start = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - start)
    return min(seconds), result


def measure(data: str, method: str, raw_bytes: int, encode: Callable[[], bytes], decode: Callable[[bytes], Any]) -> Row:
    encode_seconds, packed = best_seconds(encode)
    decode_seconds, _ = best_seconds(lambda: decode(packed))
    gigabytes = raw_bytes / 1e9
    return Row(
        data, method, len(packed), raw_bytes / len(packed), gigabytes / encode_seconds, gigabytes / decode_seconds
    )


def quantized_rows(data: str, values: np.ndarray, bits: int) -> list[Row]:
    raw = stored(values, bits)
    compress = zstandard.ZstdCompressor(level=3).compress
    decompress = zstandard.ZstdDecompressor().decompress

    def unpack(packed: bytes) -> np.ndarray:
        return codec.decode(packed, max_bytes=values.size)

    if not np.array_equal(unpack(codec.encode(values)), values):
        raise SystemExit(f"the codec changed {data}")
    return [
        measure(data, "codec", len(raw), lambda: codec.encode(values), unpack),
        measure(data, "zstd", len(raw), lambda: compress(raw), decompress),
        measure(
            data,
            "codec, zstd",
            len(raw),
            lambda: compress(codec.encode(values)),
            lambda packed: unpack(decompress(packed)),
        ),
    ]


def snapshot_row(scheme: str, tensors: dict[str, np.ndarray], tokens: int) -> Row:
    snapshot = Snapshot("benchmark", "", scheme, _BLOCK, np.zeros(tokens, np.int32), {}, tensors)
    raw_bytes = sum(tensor.nbytes for tensor in tensors.values())
    limit = raw_bytes + snapshot.tokens.nbytes
    return measure(scheme, "snapshot", raw_bytes, lambda: dump(snapshot), lambda packed: load(packed, max_bytes=limit))


def main() -> None:
    parser = Parser(__doc__, quick={"tokens": 256})
    parser.add_argument(
        "--model", default="smollm2-135m", help="as `kvscope serve` takes it; the default is fetched if it must"
    )
    parser.add_argument("--tokens", type=int, default=512)
    arguments = parser.parse_args()
    if (known := FETCHABLE.get(arguments.model)) is not None:
        fetch_model(known)
    kv = keys_and_values(load_model(arguments.model), arguments.tokens)
    keys, values = kv[:, :, 0], kv[:, :, 1]
    rows = []
    for bits in (8, 4):
        for name, exact, axis in (("keys", keys, -2), ("values", values, -1)):
            rows += quantized_rows(f"int{bits} {name}", quantize(exact, bits, axis), bits)
    tokens = len(kv) * _BLOCK
    rows.append(snapshot_row("float32", {"keys": keys, "values": values}, tokens))
    rows.append(snapshot_row("int8", {"keys": quantize(keys, 8, -2), "values": quantize(values, 8, -1)}, tokens))
    print(f"{arguments.model}, {tokens} tokens, {len(kv)} blocks")
    print(f"{'data':12} {'method':12} {'bytes':>12} {'ratio':>7} {'encode GB/s':>12} {'decode GB/s':>12}")
    for row in rows:
        print(
            f"{row.data:12} {row.method:12} {row.bytes:12,} {row.ratio:7.3f} "
            f"{row.encode_gb_per_second:12.3f} {row.decode_gb_per_second:12.3f}"
        )
    shown = [Kept(f"{row.data}, {row.method}: raw / packed bytes", row.ratio, "ratio") for row in rows]
    for row in rows:
        if row.method == "snapshot":
            shown.append(Kept(f"snapshot of {row.data}, written", row.encode_gb_per_second, "GB/s"))
            shown.append(Kept(f"snapshot of {row.data}, read and checked", row.decode_gb_per_second, "GB/s"))
    zstd = ".".join(map(str, zstandard.ZSTD_VERSION))
    keep(arguments, shown, {"rows": [asdict(row) for row in rows], "zstd": zstd})


if __name__ == "__main__":
    main()
