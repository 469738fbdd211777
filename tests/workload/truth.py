"""Ten-line computations that the tests of this folder compare with, each apart from the code under test."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

BOUNDS = {"0-2K": 2048, "2K-8K": 8192, "8K-32K": 32768, "32K-128K": 131072, "128K-512K": 524288, "512K+": 10**9}


def mooncake_prompts(path: Path, limit: int | None = None) -> list[tuple[int, list[int]]]:
    """(prompt tokens, hash ids) of each line."""
    lines = path.read_text().splitlines()[:limit]
    return [(row["input_length"], row["hash_ids"]) for row in map(json.loads, lines)]


def hits_of_unbounded_cache(
    prompts: Iterable[tuple[int, Sequence[int]]], part_tokens: int = 512, block: int = 16
) -> dict[str, tuple[int, int]]:
    """(queried, hit) tokens by length bucket: one request at a time, nothing ever evicted, one token left to compute."""
    seen: set[int] = set()
    result = dict.fromkeys(BOUNDS, (0, 0))
    for tokens, hash_ids in prompts:
        shared = 0
        while shared < len(hash_ids) and hash_ids[shared] in seen:
            shared += 1
        seen.update(hash_ids)
        hit = min(shared * part_tokens, tokens - 1) // block * block
        bucket = next(name for name, bound in BOUNDS.items() if tokens < bound)
        result[bucket] = (result[bucket][0] + tokens, result[bucket][1] + hit)
    return result


def hit_rate(by_bucket: dict[str, tuple[int, int]]) -> float:
    return sum(hit for _, hit in by_bucket.values()) / sum(queried for queried, _ in by_bucket.values())
