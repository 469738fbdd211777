"""Keys agree exactly where prefixes agree, and the index is a dict."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from observability.engine.kv.prefix import PrefixIndex, SpanKeys, TokenKeys
from observability.engine.types import PromptSpan

few_tokens = st.lists(st.integers(0, 1), min_size=1, max_size=24)


@given(st.lists(few_tokens, min_size=2, max_size=6), st.integers(1, 5))
def test_token_keys_are_equal_exactly_where_all_tokens_up_to_the_blocks_end_are(prompts, block_size):
    seen: dict[int, tuple[int, ...]] = {}
    content: dict[tuple[int, ...], int] = {}
    for prompt in prompts:
        full = len(prompt) // block_size
        for i, key in enumerate(TokenKeys(prompt, [], block_size).get(0, full).tolist()):
            prefix = tuple(prompt[: (i + 1) * block_size])
            assert seen.setdefault(key, prefix) == prefix
            assert content.setdefault(prefix, key) == key


@given(few_tokens, few_tokens, st.integers(1, 5), st.data())
def test_token_keys_do_not_depend_on_where_the_prompt_ends_or_in_what_pieces_they_are_asked_for(
    prompt, output, block_size, data
):
    whole = prompt + output
    full = len(whole) // block_size
    at_once = TokenKeys(whole, [], block_size).get(0, full)
    keys = TokenKeys(prompt, output, block_size)
    cut = data.draw(st.integers(0, full))
    assert np.concatenate((keys.get(0, cut), keys.get(cut, full))).tolist() == at_once.tolist()


def test_a_block_that_is_not_full_has_no_key():
    with pytest.raises(ValueError, match="not full"):
        TokenKeys([1, 2, 3], [], 2).get(0, 2)


spans = st.builds(
    lambda ids, short: PromptSpan(max(1, len(ids) * 8 - short), tuple(ids), 8),
    st.lists(st.integers(-2, 1), min_size=1, max_size=5),
    st.integers(0, 7),
)


@given(st.lists(spans, min_size=2, max_size=6), st.sampled_from([2, 4, 8, 16, 3]))
def test_span_keys_are_equal_exactly_as_far_as_hash_ids_agree(prompts, block_size):
    seen: dict[int, tuple] = {}
    content: dict[tuple, int] = {}
    for serial, span in enumerate(prompts):
        full = span.length // block_size
        keys = SpanKeys(span, block_size, serial).get(0, full + 3).tolist()  # three generated blocks
        assert len(set(keys)) == len(keys)
        for i, key in enumerate(keys):
            end = (i + 1) * block_size
            prefix = (serial, end) if i >= full else (span.hash_ids[: -(-end // 8)], end)
            assert seen.setdefault(key, prefix) == prefix
            assert content.setdefault(prefix, key) == key


# Few low bits, so that buckets overflow; high bits tell keys apart.
keys_in_few_buckets = st.builds(lambda low, high: low | high << 40, st.integers(0, 3), st.integers(1, 60))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["insert", "remove", "replace"]), st.sets(keys_in_few_buckets)), max_size=30))
def test_the_index_behaves_as_a_dict(operations):
    index, truth, block = PrefixIndex(1), {}, 0
    for operation, chosen in operations:
        chosen = {k for k in chosen if (k in truth) != (operation == "insert")}
        keys = np.array(sorted(chosen), dtype=np.uint64)
        blocks = np.arange(block, block + len(keys))
        block += len(keys)
        if operation == "remove":
            index.remove(np.array([truth.pop(key) for key in keys.tolist()], dtype=np.int64))
        elif operation == "insert":
            index.insert(keys, blocks)
            truth.update(zip(keys.tolist(), blocks.tolist(), strict=True))
        else:
            index.replace(np.array([truth[key] for key in keys.tolist()], dtype=np.int64), blocks)
            truth.update(zip(keys.tolist(), blocks.tolist(), strict=True))
        found, held = index.items()
        assert dict(zip(found.tolist(), held.tolist(), strict=True)) == truth
        assert len(index) == len(truth) == len(found)
        everything = sorted({*truth, *chosen, 12345})
        assert index.get(np.array(everything, dtype=np.uint64)).tolist() == [truth.get(k, -1) for k in everything]


def test_the_index_grows_and_survives_long_churn():
    index, random = PrefixIndex(64), np.random.default_rng(0)
    live = np.empty(0, dtype=np.uint64)
    for i in range(300):
        new = random.integers(1, 2**63, 40).astype(np.uint64)
        index.insert(new, np.arange(40 * i, 40 * i + 40))
        live = np.concatenate((live, new))
        if len(live) > 1000:
            index.remove(index.get(live[:200]))
            assert (index.get(live[:200]) == -1).all()
            live = live[200:]
        assert (index.get(live) >= 0).all()
    assert len(index) == len(live)


@given(st.lists(st.booleans(), max_size=400))
def test_match_ends_at_the_first_absent_key(present):
    index = PrefixIndex()
    keys = np.arange(1, len(present) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    chosen = np.flatnonzero(present)
    index.insert(keys[chosen], chosen)
    until = present.index(False) if False in present else len(present)
    assert index.match(keys).tolist() == list(range(until))
