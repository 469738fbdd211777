"""The block pool against a plain model of it: sets, a list in LRU order, and loops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from observability.catalog import FREE_RUN_BOUNDS, REGIONS
from observability.engine.kv.pool import ACTIVE, EVICTABLE, FREE, BlockPool, IntegrityError


class PoolAgainstModel(RuleBasedStateMachine):
    """Random takes, shares, registrations and releases; the model knows which blocks each must touch."""

    @initialize(size=st.integers(1, 70))
    def start(self, size):
        self.pool = BlockPool(size)
        self.evicted: list[int] = []
        self.pool.on_evict = lambda blocks, keys: self.evicted.append(len(blocks))
        self.free, self.lru = set(range(size)), []  # lru: next to be evicted first
        self.holders: list[list[int]] = []
        self.key_of: dict[int, int] = {}  # cached blocks

    def refs(self, block: int) -> int:
        return sum(block in held for held in self.holders)

    def expect_evicted(self, blocks: list[int]) -> None:
        assert sum(self.evicted) == len(blocks)
        self.evicted.clear()
        for block in blocks:
            self.lru.remove(block)
            del self.key_of[block]

    @rule(share=st.floats(0, 1))
    def take(self, share):
        count = round(share * self.pool.allocatable)
        taken = self.pool.take(count).tolist()
        assert len(set(taken)) == count
        victims = self.lru[: max(0, count - len(self.free))]
        expected = set(victims) | (set(taken) & self.free)
        assert set(taken) == expected, "free blocks first, then the least recently used"
        self.expect_evicted(victims)
        self.free -= set(taken)
        if taken:
            self.holders.append(taken)

    @rule(count=st.integers(1, 12), more=st.integers(0, 6), avoid=st.booleans())
    def take_run(self, count, more, avoid):
        allocatable = self.free | set(self.lru)
        ranges = [(held[-1] + 1, held[-1] + 4) for held in self.holders] if avoid else []
        start = self.pool.find_run(count, count + more, ranges)
        fits = [b for b in range(self.pool.size) if allocatable >= set(range(b, b + count))]
        if start is None:
            assert not fits, "a run exists and was not found"
            return
        assert start in fits
        apart = allocatable - {b for low, high in ranges for b in range(low, high)}
        roomy = [b for b in range(self.pool.size) if apart >= set(range(b, b + count + more))]
        if roomy:
            assert start in roomy
            if any(self.free >= set(range(b, b + count + more)) for b in roomy):
                assert self.free >= set(range(start, start + count)), "cached content is kept while free runs are left"
        taken = self.pool.take_range(start, count).tolist()
        assert taken == list(range(start, start + count))
        self.expect_evicted([b for b in taken if b in self.lru])
        self.free -= set(taken)
        self.holders.append(taken)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data):
        held = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.pool.release(np.array(held))
        for block in reversed(held):
            if self.refs(block) == 0:
                if block in self.key_of:
                    self.lru.append(block)
                else:
                    self.free.add(block)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def register(self, data):
        held = data.draw(st.sampled_from(self.holders))
        blocks = [b for b in held if b not in self.key_of][:4]
        keys = data.draw(st.lists(st.integers(1, 30), min_size=len(blocks), max_size=len(blocks), unique=True))
        self.pool.register(np.array(blocks, dtype=np.int64), np.array(keys, dtype=np.uint64))
        for block, key in zip(blocks, keys, strict=True):
            old = next((b for b, k in self.key_of.items() if k == key), None)
            if old is None:
                self.key_of[block] = key
            elif old in self.lru:
                self.lru.remove(old)
                del self.key_of[old]
                self.free.add(old)
                self.key_of[block] = key

    @precondition(lambda self: self.key_of)
    @rule(data=st.data())
    def share(self, data):
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.key_of)), min_size=1, max_size=4, unique=True))
        keys = np.array([self.key_of[b] for b in blocks], dtype=np.uint64)
        assert self.pool.index.get(keys).tolist() == blocks
        self.pool.share(np.array(blocks))
        self.lru = [b for b in self.lru if b not in blocks]
        self.holders.append(blocks)

    @invariant()
    def agree(self):
        if not hasattr(self, "pool"):
            return
        pool = self.pool
        pool.check_integrity()
        states = [
            FREE if b in self.free else EVICTABLE if b in self.lru else ACTIVE for b in range(pool.size)
        ]  # fmt: skip
        assert pool.state.tolist() == states
        assert pool.refs.tolist() == [self.refs(b) for b in range(pool.size)]
        assert {int(b) for b in np.flatnonzero(pool.keyed)} == set(self.key_of)
        self.check_map(states)

    def check_map(self, states):
        size, lay = len(states), self.pool.address_map()
        runs, current = [], 0
        regions = np.zeros((REGIONS, 3), dtype=int)
        longest = [0] * REGIONS
        for i, state in enumerate([*states, ACTIVE]):
            if state != ACTIVE:
                current += 1
            elif current:
                runs.append(current)
                current = 0
            if i < size:
                regions[i * REGIONS // size, state] += 1
        for r in range(REGIONS):
            here = ["x" if s == ACTIVE else "o" for i, s in enumerate(states) if i * REGIONS // size == r]
            longest[r] = max(len(part) for part in "".join(here).split("x"))
        assert lay.largest_free_run == max(runs, default=0)
        assert list(lay.free_runs) == [sum(run <= b for run in runs) for b in (*FREE_RUN_BOUNDS, float("inf"))]
        assert lay.region_blocks.tolist() == regions.tolist()
        assert lay.region_free_run.tolist() == longest


PoolAgainstModel.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPoolAgainstModel = PoolAgainstModel.TestCase


def test_contiguous_placement_takes_the_smallest_free_run_that_fits():
    pool = BlockPool(32)
    everything = pool.take(32)
    assert sorted(everything.tolist()) == list(range(32))
    pool.release(np.array([3, 4, 5, 10, 11, 12, 13, 20, 21, 22, 23, 24, 25]))
    assert pool.find_run(2, 4) == 10
    assert pool.find_run(2, 3) == 3
    assert pool.find_run(2, 7) == 3, "without room to grow, any run that holds the prompt"
    assert pool.find_run(7, 7) is None


def test_contiguous_placement_gives_up_the_oldest_content():
    pool = BlockPool(16)
    for start, key in ((8, 1), (0, 9)):  # the upper half is released first
        blocks = pool.take_range(start, 8)
        pool.register(blocks, np.arange(key, key + 8, dtype=np.uint64))
        pool.release(blocks)
    assert pool.num_free == 0
    assert pool.find_run(4, 8) == 8


def test_a_sequence_continues_over_free_and_old_blocks_but_not_over_what_was_just_used():
    pool = BlockPool(32)
    for start, key in ((8, 1), (12, 5), (16, 9), (20, 13)):  # released in this order
        blocks = pool.take_range(start, 4)
        pool.register(blocks, np.arange(key, key + 4, dtype=np.uint64))
        pool.release(blocks)
    assert pool.can_continue(4, 4), "free"
    assert not pool.can_continue(6, 4), "nothing cached is given up while free blocks are left"
    held = pool.take(15)
    assert pool.num_free == 1
    assert pool.can_continue(8, 4), "oldest"
    assert pool.can_continue(12, 4)
    assert not pool.can_continue(20, 4), "newest"
    assert not pool.can_continue(12, 12)
    assert not pool.can_continue(22, 8), "in use"
    pool.release(held)
    assert not pool.can_continue(30, 3), "past the end"
    assert pool.can_continue(30, 2)


def test_a_cached_prefix_shrinks_from_its_end():
    pool = BlockPool(4)
    blocks = pool.take(4)
    pool.register(blocks, np.arange(1, 5, dtype=np.uint64))
    pool.release(blocks)
    pool.take(2)
    assert (pool.index.get(np.arange(1, 5, dtype=np.uint64)) >= 0).tolist() == [True, True, False, False]


def test_more_than_there_is_cannot_be_taken():
    with pytest.raises(IntegrityError, match="5 blocks were asked for with 4 allocatable"):
        BlockPool(4).take(5)


def test_an_unbounded_pool_grows_and_never_evicts():
    pool = BlockPool(None)
    for i in range(20):
        blocks = pool.take(300)
        pool.register(blocks, np.arange(i * 300 + 1, i * 300 + 301, dtype=np.uint64))
        pool.release(blocks)
        pool.check_integrity()
    assert pool.size == pool.num_evictable == 6000
    assert len(pool.index.match(np.arange(1, 6001, dtype=np.uint64))) == 6000
    plain = pool.take(10)
    pool.release(plain)
    assert sorted(pool.take(10).tolist()) == sorted(plain.tolist()), "blocks that cache nothing are used again"


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lambda p: p.refs.__setitem__(0, -1), "released more often than taken"),
        (lambda p: p.refs.__setitem__(p.held[0], 0), "active exactly while somebody holds it"),
        (lambda p: p.keyed.__setitem__(p.held[0], False), "exactly the cached blocks"),
        (lambda p: setattr(p, "num_free", 3), "the counters say"),
        (lambda p: p.keys.__setitem__(p.held[0], 99), "carries the key"),
        (lambda p: p.stamps.__setitem__(0, 77), "free queue"),
    ],
)
def test_check_integrity_says_what_is_broken(spoil, what):
    pool = BlockPool(8)
    pool.held = pool.take(2)
    pool.register(pool.held, np.array([5, 6], dtype=np.uint64))
    pool.check_integrity()
    spoil(pool)
    with pytest.raises(IntegrityError, match=what):
        pool.check_integrity()
