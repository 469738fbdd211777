"""Compaction: which blocks to move where, so that adjacent room comes back, and the move itself in the pool's books.

Sequences in the contiguous layout need runs of adjacent blocks, and free space falls to pieces. Between two steps the manager asks
plan_compaction() for one slice of moves, tells the pool by move_blocks(), has the executor copy the content and rewrites the tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from observability.engine.kv.pool import ACTIVE, EVICTABLE, FREE, BlockPool
from observability.engine.kv.prefix import Blocks


class CompactionPlan(NamedTuple):
    """Block `sources[i]` is to be moved to block `targets[i]`; both are empty when there is nothing to do."""

    sources: Blocks
    targets: Blocks


_NOTHING = CompactionPlan(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))


def plan_compaction(
    pool: BlockPool,
    movable: npt.NDArray[np.bool_],
    target_run: int,
    max_moves: int,
    protect: Sequence[tuple[int, int]] = (),
) -> CompactionPlan:
    """The next slice of moves towards a run of `target_run` adjacent allocatable blocks in a bounded pool, at most `max_moves`.

    movable: `[pool.size]`, which active blocks may be moved. protect: half-open ranges that take no moved block. Nothing is planned when
    there is such a run already, or none can be made.

    Clears the window that needs the fewest moves and, of those, holds the least cached content. Moved blocks go to free blocks outside,
    smallest hole first so that they break no larger one, then to those whose cached content was used longest ago (it is lost). Never to
    the longest run, nor to a run that touches the window: so no slice makes the longest run shorter.

    Repeated calls converge: a slice of k moves leaves its window with k fewer to go, and one that needed fewest before now needs fewest
    by k. Of the others that could be cleared, a window only keeps up with it by holding the very same sources and none of the targets, so
    what was moved stays where it is.
    """
    open_ = pool.state != ACTIVE
    run_start, run_end = _run_around(open_)
    run_length = run_end - run_start
    longest = int(run_length.max(initial=0))
    if longest >= target_run or target_run > pool.size or max_moves < 1:
        return _NOTHING
    eligible = open_.copy()
    for start, end in protect:
        eligible[start:end] = False
    if longest:
        at = int(run_length.argmax())
        eligible[run_start[at] : run_end[at]] = False

    # Window w is [w, w + target_run); the runs that touch it reach from left[w] to right[w].
    windows = np.arange(pool.size - target_run + 1)
    ends = windows + target_run
    left = np.where(windows > 0, np.where(open_[windows - 1], run_start[windows - 1], windows), windows)
    beyond = np.minimum(ends, pool.size - 1)
    right = np.where((ends < pool.size) & open_[beyond], run_end[beyond], ends)
    moves = _between(~open_, windows, ends)
    room = int(np.count_nonzero(eligible)) - _between(eligible, left, right)
    possible = np.flatnonzero((_between(~open_ & ~movable, windows, ends) == 0) & (moves <= room))
    if not possible.size:
        return _NOTHING
    cached = _between(pool.state == EVICTABLE, windows, ends)
    cost = moves * (target_run + 1) + cached
    window = int(possible[cost[possible].argmin()])
    end = window + target_run

    # A slice clears what is next to the longest run inside the window, so that each slice already gives back some adjacent room.
    sources = window + np.flatnonzero(~open_[window:end])
    inside = np.minimum(run_end[window:end], end) - np.maximum(run_start[window:end], window)
    middle = window + int(np.where(open_[window:end], inside, 0).argmax())
    sources = sources[np.argsort(np.abs(sources - middle), kind="stable")][:max_moves]

    eligible[left[window] : right[window]] = False
    free = np.flatnonzero(eligible & (pool.state == FREE))
    free = free[np.argsort(run_length[free], kind="stable")]
    cached_lru = pool._lru.live(pool.stamps)
    targets = np.concatenate((free, cached_lru[eligible[cached_lru]]))[: len(sources)]
    return CompactionPlan(np.sort(sources), np.sort(targets))


def move_blocks(pool: BlockPool, sources: Blocks, targets: Blocks) -> None:
    """`targets[i]` takes over holders, key and index entry of `sources[i]`, which becomes free.

    sources: distinct and active. targets: distinct and allocatable; what they cached is evicted, and is still in place while on_evict
    runs. So the caller copies the content after this call, before any block is taken, and rewrites the tables of all holders.
    """
    cached = targets[pool.state[targets] == EVICTABLE]
    if cached.size:
        pool._forget(cached)
    keyed = pool.keyed[sources]
    pool.index.replace(sources[keyed], targets[keyed])
    pool.keys[targets] = pool.keys[sources]
    pool.keyed[targets] = keyed
    pool.keyed[sources] = False
    if pool.ledger is not None:
        pool.ledger.carry(sources[keyed], targets[keyed])
    refs = pool.refs[sources]
    pool._activate(targets)
    pool.refs[targets] = refs
    pool.refs[sources] = 0
    pool.num_active -= len(sources)
    pool._offer_free(sources)


def _run_around(mask: npt.NDArray[np.bool_]) -> tuple[Blocks, Blocks]:
    """Start and end (excluded) of the run of true values that each true element lies in; equal for false ones."""
    index = np.arange(len(mask))
    start = np.maximum.accumulate(np.where(mask, 0, index + 1))
    end = np.minimum.accumulate(np.where(mask, len(mask), index)[::-1])[::-1]
    return np.where(mask, start, index), np.where(mask, end, index)


def _between(mask: npt.NDArray[np.bool_], starts: Blocks, ends: Blocks) -> Blocks:
    """How many values of `mask` are true in each [starts[i], ends[i])."""
    counts = np.concatenate(([0], np.cumsum(mask)))
    return counts[ends] - counts[starts]
