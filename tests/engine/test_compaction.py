"""Compaction against a plain search over all windows, and under random use: nobody's content moves unnoticed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from observability.engine.kv.compaction import move_blocks, plan_compaction
from observability.engine.kv.pool import ACTIVE, EVICTABLE, BlockPool


class PoolInUse:
    """A pool with its holders' tables and what is stored in each block, under compaction."""

    def __init__(self, size: int) -> None:
        self.pool = BlockPool(size)
        self.tables: list[list[int]] = []
        self.stored: dict[int, int] = {}  # by block
        self.expected: list[list[int]] = []  # content by table
        self.evicted: list[int] = []
        self.pool.on_evict = self._evict
        self._next = 1

    def _evict(self, blocks: np.ndarray, keys: np.ndarray) -> None:
        assert [self.stored[block] for block in blocks.tolist()] == keys.tolist(), "content is still there to be saved"
        self.evicted.append(len(blocks))

    def hold(self, blocks: list[int]) -> None:
        for block in blocks:
            self.stored[block] = self._next
            self._next += 1
        self.tables.append(blocks)
        self.expected.append([self.stored[block] for block in blocks])

    def take(self, count: int) -> None:
        if count:
            self.hold(self.pool.take(count).tolist())

    def take_range(self, start: int, count: int) -> None:
        self.hold(self.pool.take_range(start, count).tolist())

    def release(self, which: int, keep: bool) -> None:
        """Gives a table back; `keep` caches its content."""
        blocks = np.array(self.tables.pop(which))
        contents = self.expected.pop(which)
        if keep:
            new = ~self.pool.keyed[blocks] & (self.pool.refs[blocks] == 1)
            self.pool.register(blocks[new], np.array(contents, dtype=np.uint64)[new])
        self.pool.release(blocks)

    def share(self, which: int, count: int) -> None:
        """A new holder of the first blocks of a table, found in the index."""
        blocks = np.array(self.tables[which][:count])
        contents = self.expected[which][:count]
        new = ~self.pool.keyed[blocks]
        self.pool.register(blocks[new], np.array(contents, dtype=np.uint64)[new])
        found = self.pool.index.match(np.array(contents, dtype=np.uint64))
        assert found.tolist() == blocks.tolist()
        self.pool.share(found)
        self.tables.append(blocks.tolist())
        self.expected.append(contents.copy())

    def move(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """What the manager does with a plan: books, copy, tables."""
        new_home = dict(zip(sources.tolist(), targets.tolist(), strict=True))
        move_blocks(self.pool, sources, targets)
        self.stored.update({target: self.stored[source] for source, target in new_home.items()})
        self.tables = [[new_home.get(block, block) for block in table] for table in self.tables]

    def longest_run(self) -> int:
        return max(map(len, "".join("x" if s == ACTIVE else "o" for s in self.pool.state).split("x")))

    def check(self) -> None:
        self.pool.check_integrity()
        held = np.zeros(self.pool.size, dtype=int)
        for table, contents in zip(self.tables, self.expected, strict=True):
            assert [self.stored[block] for block in table] == contents, "a holder reads foreign content"
            held[table] += 1
        assert held.tolist() == self.pool.refs.tolist()
        keys, blocks = self.pool.index.items()
        assert [self.stored[block] for block in blocks.tolist()] == keys.tolist(), "the index points to other content"


@st.composite
def pools_in_use(draw: st.DrawFn) -> PoolInUse:
    use = PoolInUse(draw(st.integers(4, 60)))
    for _ in range(draw(st.integers(1, 25))):
        action = draw(st.sampled_from(["take", "take", "release", "release", "share"]))
        if action == "take":
            use.take(draw(st.integers(0, min(8, use.pool.allocatable))))
        elif use.tables:
            which = draw(st.integers(0, len(use.tables) - 1))
            if action == "release":
                use.release(which, draw(st.booleans()))
            else:
                use.share(which, draw(st.integers(1, len(use.tables[which]))))
    use.evicted.clear()
    use.check()
    return use


def immovable(draw: st.DataObject, size: int) -> np.ndarray:
    share = draw.draw(st.sampled_from([0.0, 0.0, 0.1, 0.4]))
    seed = draw.draw(st.integers(0, 1000))
    return np.random.default_rng(seed).random(size) >= share


@settings(max_examples=250, deadline=None)
@given(use=pools_in_use(), target_run=st.integers(1, 30), max_moves=st.integers(1, 6), data=st.data())
def test_slices_converge_lose_nothing_and_never_move_a_block_twice(use, target_run, max_moves, data):
    movable = immovable(data, use.pool.size)
    protect = data.draw(st.lists(st.tuples(st.integers(0, 59), st.integers(0, 8)), max_size=3))
    protect = [(start, start + length) for start, length in protect]
    longest, moved = use.longest_run(), set()
    first = plan_compaction(use.pool, movable, target_run, use.pool.size, protect)
    for _ in range(use.pool.size + 1):
        plan = plan_compaction(use.pool, movable, target_run, max_moves, protect)
        sources, targets = plan.sources.tolist(), plan.targets.tolist()
        assert len(sources) == len(targets) <= max_moves
        if not sources:
            break
        assert len(set(sources) | set(targets)) == 2 * len(sources)
        assert all(movable[b] and use.pool.state[b] == ACTIVE for b in sources)
        assert all(use.pool.state[b] != ACTIVE for b in targets)
        assert not any(start <= b < end for b in targets for start, end in protect)
        assert not moved & set(sources), "what was moved stays where it is"
        lost = sum(use.pool.state[b] == EVICTABLE for b in targets)
        use.move(plan.sources, plan.targets)
        moved |= set(targets)
        assert sum(use.evicted) == lost
        use.evicted.clear()
        use.check()
        assert use.longest_run() >= longest, "no slice makes the longest run shorter"
        longest = use.longest_run()
    else:
        raise AssertionError("moves without end")
    if len(first.sources):
        assert longest >= target_run
        assert len(moved) == len(first.sources), "slices move no more than one go would"


@settings(max_examples=150, deadline=None)
@given(use=pools_in_use(), target_run=st.integers(1, 30), data=st.data())
def test_a_plan_needs_the_fewest_moves_of_all_windows(use, target_run, data):
    """Every window tried one by one, with room for its blocks anywhere outside it that spares the longest run and its neighbours."""
    pool = use.pool
    movable = immovable(data, pool.size)
    open_ = {b for b in range(pool.size) if pool.state[b] != ACTIVE}
    runs, run = [], []
    for b in range(pool.size + 1):
        if b in open_:
            run.append(b)
        elif run:
            runs.append(run)
            run = []
    spared = max(runs, key=len, default=[])
    fewest = None
    for start in range(pool.size - target_run + 1):
        window = set(range(start, start + target_run))
        if any(b not in open_ and not movable[b] for b in window):
            continue
        around = {*window, start - 1, start + target_run}
        room = {b for run in runs if run is not spared and not around & set(run) for b in run}
        moves = len(window - open_)
        if moves <= len(room) and (fewest is None or moves < fewest):
            fewest = moves
    plan = plan_compaction(pool, movable, target_run, pool.size)
    assert len(plan.sources) == (0 if len(spared) >= target_run else fewest or 0)
    if len(plan.sources):
        use.move(plan.sources, plan.targets)
        use.check()
        assert use.longest_run() >= target_run


def layout(picture: str) -> PoolInUse:
    """`.` free, `#` held by a table of its own, `c` cached, the leftmost used longest ago."""
    use = PoolInUse(len(picture))
    for at, sign in enumerate(picture):
        if sign != ".":
            use.take_range(at, 1)
    for at, sign in enumerate(picture):
        if sign == "c":
            use.release(use.tables.index([at]), keep=True)
    assert "".join(".c#"[s] for s in use.pool.state) == picture
    use.evicted.clear()
    return use


def plan_of(
    picture: str, target_run: int, max_moves: int = 100, fixed: str = "", **options: object
) -> list[tuple[int, int]]:
    use = layout(picture)
    movable = np.array([sign != "x" for sign in fixed.ljust(len(picture))])
    plan = plan_compaction(use.pool, movable, target_run, max_moves, **options)  # type: ignore[arg-type]
    return list(zip(plan.sources.tolist(), plan.targets.tolist(), strict=True))


@pytest.mark.parametrize(
    ("picture", "target_run", "moves", "why"),
    [
        ("..#..##.##...##.", 5, [(2, 7)], "the one block that divides two runs goes to the smallest hole"),
        ("....##.", 4, [], "there is such a run"),
        ("....##.", 8, [], "the pool is smaller"),
        ("##.##.##", 4, [], "two free blocks make no run of four"),
        ("..#..##c##.#", 5, [(2, 10)], "free before cached"),
        ("..#..##c##c#", 5, [(2, 7)], "of cached ones the one used longest ago"),
        ("c.#..##..#..##.", 5, [(9, 14)], "of two equal windows the one with less cached content"),
    ],
)
def test_the_plan_of_a_layout(picture, target_run, moves, why):
    assert plan_of(picture, target_run) == moves, why


def test_blocks_that_must_stay_and_ranges_that_must_stay_free_are_left_alone():
    picture = "..#..##.##...##."
    assert plan_of(picture, 5, fixed="  x") == [(5, 0), (6, 15)]
    assert plan_of(picture, 5, protect=[(6, 8)]) == [(2, 15)]
    assert plan_of(picture, 5, protect=[(0, 16)]) == []


def test_what_a_move_carries():
    use = layout("#.c#.")
    use.share(0, 1)
    pool = use.pool
    refs, key = int(pool.refs[0]), int(pool.keys[0])
    assert (refs, bool(pool.keyed[0]), bool(pool.keyed[3])) == (2, True, False)
    use.move(np.array([0, 3]), np.array([2, 4]))
    use.check()
    assert use.evicted == [1]
    assert (pool.num_free, pool.num_evictable, pool.num_active) == (3, 0, 2)
    assert (int(pool.refs[2]), int(pool.refs[4])) == (2, 1)
    assert pool.index.get(np.array([key], dtype=np.uint64)).tolist() == [2]
    assert not pool.keyed[4]
    use.release(0, keep=True)
    use.release(0, keep=True)
    use.release(0, keep=False)
    use.check()
    assert pool.take(5).tolist() == [0, 1, 2, 3, 4]
