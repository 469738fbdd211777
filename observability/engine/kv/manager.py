"""What a request's KV costs and where it goes: prefix lookup, layout rules, growth, release, moves, and the pool's measured state.

The scheduler asks here and takes nothing from a pool itself. kv/device.py numbers the blocks: exact ones first, then quantized ones of long
sequences. Time goes to kv_alloc, kv_evict and kv_move.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import numpy as np

from observability.catalog import COMPONENTS, REGRET_WINDOWS, TIERS
from observability.engine.kv.compaction import move_blocks, plan_compaction
from observability.engine.kv.device import DevicePools
from observability.engine.kv.host import HostTier, host_keys
from observability.engine.kv.measure import check, measure
from observability.engine.kv.pool import EVICTABLE, AddressMap, BlockPool
from observability.engine.kv.prefix import BlockKeys, Blocks, Keys, SpanKeys, TokenKeys
from observability.engine.kv.residency import EvictionMemory, Ledger
from observability.engine.kv.table import COMPRESSED, CONTIGUOUS, PAGED, BlockTable
from observability.engine.types import EngineConfig, Executor, Payload, PromptSpan, Request, Transfer
from observability.telemetry import mechanisms as m
from observability.telemetry.cells import KVState
from observability.telemetry.phases import PREEMPTED, SWAPPED
from observability.telemetry.recorder import Telemetry

_KV_ALLOC, _KV_EVICT, _KV_MOVE = (COMPONENTS.index(name) for name in ("kv_alloc", "kv_evict", "kv_move"))
_HOST = TIERS.index("host")
_log = logging.getLogger(__name__)
_NONE: Blocks = np.empty(0, dtype=np.int64)
_COMPRESS_AT_ONCE = 256  # blocks, between two steps
_CONTEXTS = 256  # classes and tenants whose hit ratio is remembered
_CONTEXT_WEIGHT = 0.2  # of the newest request in it
_MEMORY_BLOCKS = (4096, 1 << 18)  # least and most evictions that are remembered: four for each block there is
_REGRET_SECONDS = np.array(tuple(REGRET_WINDOWS.values()), dtype=np.float64)


def _leading(found: Blocks) -> Blocks:
    """Those before the first that is absent (-1)."""
    absent = np.flatnonzero(found < 0)
    return found[: absent[0]] if absent.size else found


class KVManager:
    """Gives blocks to requests and takes them back. Counts of blocks are exact at every moment between two calls."""

    def __init__(self, config: EngineConfig, telemetry: Telemetry, executor: Executor) -> None:
        self.config = config
        self.device = DevicePools(config.num_blocks, config.num_compressed_blocks)
        self.pool, self.compressed = self.device.exact, self.device.compressed
        self.pool.on_evict = self._evicted
        self.host: HostTier | None = None
        self._telemetry = telemetry
        self.executor = executor
        self.contiguous: dict[BlockTable, None] = {}  # tables of running requests in the contiguous layout
        self._serial = 0
        self.map: tuple[int, AddressMap] | None = None  # of the pool's version
        self._keep_failed = False
        self._orphans: list[tuple[list[Transfer], Blocks]] = []  # blocks whose request left while data was coming in
        self._wanted_run = 0  # blocks: the longest run that was looked for in vain since the last compaction
        self._contexts: dict[tuple[str, str], float] = {}  # hit ratio by class and tenant, newest last
        self._context: tuple[str, str] | None = None  # of the request admitted last
        if self.compressed is not None:
            self.compressed.on_evict = self._evicted_compressed
        moves = []
        if config.num_host_blocks:
            self.host = HostTier(config.num_host_blocks, self.device.size, executor, telemetry)
            self.pool.on_replace = self.host.replaced
            self.host.pool.on_evict = self._evicted_from_host
            telemetry.expect(tiers=(_HOST,), states=(SWAPPED,) if config.swapping else ())
            moves += [m.OFFLOAD, m.LOAD] + ([m.SWAP_OUT, m.SWAP_IN] if config.swapping else [])
        if self.compressed is not None:
            moves.append(m.COMPRESS)
            telemetry.expect(layouts=(COMPRESSED,))
        if config.compaction_seconds:
            moves.append(m.COMPACTION)
        self.evictions: EvictionMemory | None = None
        if self.pool.bounded:  # an unbounded one never evicts, and nobody has to give way
            telemetry.expect(states=(PREEMPTED,))
            existing = [pool for pool in self.pools if pool is not None]
            for pool in existing:
                pool.ledger = Ledger(pool.size, executor.clock.now)
            least, most = _MEMORY_BLOCKS
            self.evictions = EvictionMemory(min(max(4 * sum(pool.size for pool in existing), least), most))
        telemetry.mechanisms.expect(moves=moves, prefetch=bool(self.host and config.prefetch_lookahead))

    @property
    def pools(self) -> tuple[BlockPool, BlockPool | None, BlockPool | None]:
        """By catalog.POOLS."""
        return self.pool, self.compressed, None if self.host is None else self.host.pool

    def open_table(self, request: Request) -> None:
        """Gives a new request its (empty) block table."""
        keys: BlockKeys | None = None
        if self.config.prefix_caching:
            self._serial += 1
            if isinstance(request.prompt, PromptSpan):
                keys = SpanKeys(request.prompt, self.config.block_size, self._serial)
            else:
                keys = TokenKeys(request.prompt, request.output, self.config.block_size)
        request.table = BlockTable(self.config.block_size, keys)

    # -- eviction --------------------------------------------------------------------------------------------------

    def _evicted(self, blocks: Blocks, keys: Keys) -> None:
        self._remember(keys)
        self._telemetry.evicted(len(blocks))
        self._telemetry.lap(_KV_EVICT)
        self._keep(blocks, keys)

    def _evicted_compressed(self, blocks: Blocks, keys: Keys) -> None:
        self._remember(host_keys(keys, True))
        self._telemetry.evicted(len(blocks))
        self._telemetry.lap(_KV_EVICT)
        self._keep(blocks + self.device.first_compressed, host_keys(keys, True))

    def _evicted_from_host(self, slots: Blocks, keys: Keys) -> None:
        self._remember(keys)

    def _remember(self, keys: Keys) -> None:
        if self.evictions is not None:
            self.evictions.add(keys, self.executor.clock.now())

    def _regret(self, keys: Keys, found: int, old: int) -> np.ndarray:
        """How many more leading blocks of `keys` than the `found` ones would have been found had nothing been evicted within each of
        REGRET_WINDOWS: those evicted since, and those that still lie behind them. `old` as in _match. int64 [windows]"""
        regret = np.zeros(len(_REGRET_SECONDS), dtype=np.int64)
        if self.evictions is None:
            return regret
        now, going = self.executor.clock.now(), np.ones(len(_REGRET_SECONDS), dtype=bool)
        evicted_within = ~going
        start, window = found, 1  # what is missing was never here, as a rule
        while start < len(keys) and going.any():
            some = keys[start : start + window]
            times = self.evictions.times(some)
            if old:
                times = np.maximum(times, self.evictions.times(host_keys(some, True)))
            recent = now - times <= _REGRET_SECONDS[:, None]  # [windows, keys]
            usable = recent if recent.all() else recent | self._is_here(some, start, old)
            lengths = np.where(usable.all(axis=1), len(some), usable.argmin(axis=1))
            within = np.arange(len(some)) < lengths[:, None]
            evicted_within |= going & (recent & within).any(axis=1)
            regret[going] += lengths[going]
            going &= lengths == len(some)
            start, window = start + window, max(64, window * 4)
        return np.where(evicted_within, regret, 0)

    def _is_here(self, keys: Keys, first: int, old: int) -> np.ndarray:
        """Which of the blocks from `first` on a request could use if those before them were there. bool [keys]"""
        here = (self.device.find(keys) if old else self.pool.index.get(keys)) >= 0
        if self.host is not None:
            here |= self.host.pool.index.get(host_keys(keys, np.arange(first, first + len(keys)) < old)) >= 0
        return here

    def _keep(self, blocks: Blocks, keys: Keys) -> None:
        if self.host is None:
            return
        try:
            self.host.keep(blocks, keys)
        except Exception:  # cached content is lost, and nothing else
            if not self._keep_failed:
                self._keep_failed = True
                _log.exception("evicted blocks could not be kept in host memory; further failures are not told")

    # -- taking ----------------------------------------------------------------------------------------------------

    def admit(self, request: Request, spare: int) -> bool:
        """Takes blocks for all known tokens of a waiting request and sets num_computed to what prefix cache, host tier or its own
        swapped blocks serve; what comes from the host is on its way (table.loading).

        False, with nothing changed, when that would leave fewer than `spare` allocatable blocks. The lookup is counted here, for
        a request's first admission only.
        """
        table, size = request.table, self.config.block_size
        assert table is not None
        self.settle()
        if self.config.reservation == "max_model_len":
            return self._reserve(request)
        if table.slots:
            return self._swap_in(request, spare)
        known = request.num_tokens
        # One token at least must be computed to sample the next: the last block is never a hit when it would cover all tokens.
        hittable = (known - 1) // size
        old = self._compressed_blocks_of(known)
        hits, slots, kinds = self._match(table, hittable, old)
        found = len(hits) + len(slots)
        if not self._has_room(known, hits, old, spare):
            if not old or not (hits.size or slots.size):
                return False
            # Exact hits of a long sequence may be more than the exact pool can spare for it.
            hits, slots, kinds = _NONE, _NONE, kinds[:0]
            if not self._has_room(known, hits, old, spare):
                return False
        counted = request.trace is not None and request.num_generated == 0 and request.num_preemptions == 0
        regret = None
        if counted and table.keys is not None and found < hittable:
            regret = self._regret(table.keys.get(0, hittable), found, old) * size
        if hits.size:
            self.device.share(hits)
            table.extend(hits.tolist())
            table.num_compressed = int(np.count_nonzero(hits >= self.device.first_compressed)) if old else 0
        from_host = self._hit_host(table, hits) + len(slots)
        if self.host is not None and slots.size:
            self.host.pool.share(slots)  # not to be evicted while blocks are taken
        if old:
            table.layout = COMPRESSED
            self._extend_by_kind(table, len(hits), -(-known // size), kinds, old)
        else:
            self._place(request, -(-known // size) - len(hits))
        table.num_registered = len(hits)
        if slots.size:
            self._load(table, len(hits), slots, m.LOAD)
            table.num_registered += len(slots)
        request.num_computed = cached = table.num_registered * size
        if counted:
            assert request.trace is not None
            request.num_cached = cached
            if table.keys is not None:
                self._telemetry.lookup(request.trace, hittable * size, cached, from_host * size)
                if regret is not None:
                    self._telemetry.regretted(regret.tolist())
                self._note_context(request, hittable * size)
        return True

    def _compressed_blocks_of(self, tokens: int) -> int:
        """Leading blocks that a sequence of so many tokens keeps quantized."""
        if self.compressed is None or tokens <= self.config.compressed_from:
            return 0
        return (tokens - self.config.recent_window) // self.config.block_size

    def _match(self, table: BlockTable, hittable: int, old: int) -> tuple[Blocks, Blocks, np.ndarray]:
        """Device blocks of the longest cached prefix, host slots of what follows it, and which slots hold a compressed block."""
        if table.keys is None or not hittable:
            return _NONE, _NONE, np.empty(0, dtype=bool)
        keys = table.keys.get(0, hittable)
        hits = _leading(self.device.find(keys)) if old else self.pool.index.match(keys)
        if self.host is None or len(hits) == hittable:
            return hits, _NONE, np.empty(0, dtype=bool)
        # Of a compressed sequence, old blocks come back compressed, and the recent ones exact.
        kinds = np.arange(len(hits), hittable) < old
        slots = self.host.find(host_keys(keys[len(hits) :], kinds))
        return hits, slots, kinds[: len(slots)]

    def _has_room(self, known: int, hits: Blocks, old: int, spare: int) -> bool:
        quantized = max(old - len(hits), 0)
        fresh = -(-known // self.config.block_size) - len(hits) - quantized
        return self.device.has_room(fresh, quantized, hits, spare)

    def _extend_by_kind(self, table: BlockTable, first: int, last: int, loaded: np.ndarray, old: int) -> None:
        """Takes blocks [first, last) of a compressed sequence: quantized up to `old`, then exact; those loaded by their own kind."""
        quantized = np.arange(first, last) < old
        quantized[: len(loaded)] = loaded
        table.extend(self.device.take(quantized).tolist())
        table.num_compressed += int(np.count_nonzero(quantized))
        self._telemetry.allocated(COMPRESSED, last - first)
        self._telemetry.lap(_KV_ALLOC)

    def _place(self, request: Request, fresh: int) -> None:
        """The layout rule: sequences below `contiguous_below` tokens take adjacent blocks where there are any."""
        table, pool = request.table, self.pool
        assert table is not None
        if request.num_tokens < self.config.contiguous_below:
            # The last token of a sequence is never stored.
            expected_tokens = min(request.prompt_len + request.limit - 1, self.config.contiguous_below)
            expected = -(-max(expected_tokens, request.num_tokens) // self.config.block_size)
            start: int | None
            if table.blocks:
                first, start = table.blocks[0], table.blocks[-1] + 1
                adjacent = table.blocks == list(range(first, first + len(table.blocks)))
                if not (adjacent and pool.can_continue(start, fresh)):
                    start = None
            else:
                avoid = [(t.blocks[-1] + 1, t.reserved_end) for t in self.contiguous]
                start = pool.find_run(fresh, expected, avoid)
                if start is None:
                    self._wanted_run = max(self._wanted_run, fresh)
            if start is not None:
                self._take_run(table, start, fresh, start + expected - len(table.blocks))
                return
            self._telemetry.layout_fallback()
        table.extend(pool.take(fresh).tolist())
        self._telemetry.allocated(PAGED, fresh)
        self._telemetry.lap(_KV_ALLOC)

    def _take_run(self, table: BlockTable, start: int, count: int, reserved_end: int) -> None:
        self._telemetry.lap(_KV_ALLOC)
        table.extend(self.pool.take_range(start, count).tolist())
        table.layout = CONTIGUOUS
        table.reserved_end = reserved_end
        self.contiguous[table] = None
        self._telemetry.allocated(CONTIGUOUS, count)
        self._telemetry.lap(_KV_ALLOC)

    def _reserve(self, request: Request) -> bool:
        """Adjacent blocks for the longest sequence that could be, whatever this one will need."""
        table, count = request.table, -(-self.config.max_model_len // self.config.block_size)
        assert table is not None
        start = self.pool.find_run(count, count)
        if start is None:
            self._wanted_run = max(self._wanted_run, count)
            return False
        self._take_run(table, start, count, start + count)
        request.num_computed = 0
        return True

    def _note_context(self, request: Request, hittable_tokens: int) -> None:
        """What a change of class or tenant costs: others have evicted the prefixes of the one that comes back."""
        if not hittable_tokens:
            return
        context, ratio = (request.request_class, request.tenant), request.num_cached / hittable_tokens
        before = self._contexts.pop(context, None)
        if before is not None and self._context not in (None, context):
            self._telemetry.mechanisms.context_switch(before - ratio)
        self._contexts[context] = ratio if before is None else before + _CONTEXT_WEIGHT * (ratio - before)
        self._context = context
        if len(self._contexts) > _CONTEXTS:
            del self._contexts[next(iter(self._contexts))]

    def blocks_short(self, requests: Iterable[Request], steps: int) -> int:
        """Blocks that `requests` lack to store `steps` more tokens each."""
        size, short = self.config.block_size, 0
        for request in requests:
            lack = request.num_computed + steps - request.table.capacity_tokens  # type: ignore[union-attr]
            if lack > 0:
                short += -(-lack // size)
        return short

    def grow(self, requests: Sequence[Request], steps: int) -> None:
        """Takes the blocks that `requests` lack to store `steps` more tokens each; at most `pool.allocatable` of them."""
        size, pool, telemetry = self.config.block_size, self.pool, self._telemetry
        bound = self.config.contiguous_below
        paged: list[tuple[BlockTable, int]] = []
        for request in requests:
            table = request.table
            assert table is not None
            count = -(-(request.num_computed + steps - table.capacity_tokens) // size)
            while count > 0 and table.layout == CONTIGUOUS:
                adjacent = table.blocks[-1] + 1
                if table.capacity_tokens >= bound:  # it has grown out of the layout; its blocks stay where they are
                    self._leave_contiguous(table)
                    telemetry.mechanisms.layout_changed(PAGED)
                elif pool.can_continue(adjacent, 1):
                    table.extend(pool.take_range(adjacent, 1).tolist())
                    telemetry.allocated(CONTIGUOUS, 1)
                    count -= 1
                else:
                    telemetry.layout_fallback()
                    self._leave_contiguous(table)
            if count > 0:
                paged.append((table, count))
        if paged:
            total = sum(count for _, count in paged)
            blocks = pool.take(total).tolist()
            for table, count in paged:
                table.extend(blocks[:count])
                del blocks[:count]
                telemetry.allocated(table.layout, count)
        telemetry.lap(_KV_ALLOC)

    def _leave_contiguous(self, table: BlockTable) -> None:
        del self.contiguous[table]
        self.pool.unreserve(table.blocks[-1] + 1, table.reserved_end)
        table.layout, table.reserved_end = PAGED, 0

    # -- giving back -----------------------------------------------------------------------------------------------

    def register(self, requests: Iterable[Request]) -> None:
        """Makes blocks that have become full findable by others."""
        if not self.config.prefix_caching:
            return
        size = self.config.block_size
        blocks: list[int] = []
        new_keys = []
        for request in requests:
            table = request.table
            assert table is not None
            assert table.keys is not None
            full = request.num_computed // size
            if full > table.num_registered:
                blocks += table.blocks[table.num_registered : full]
                new_keys.append(table.keys.get(table.num_registered, full))
                table.num_registered = full
        if new_keys:
            # equal prompts may have become full in the same step
            distinct = len(new_keys) == 1
            self.device.register(np.array(blocks, dtype=np.int64), np.concatenate(new_keys), distinct=distinct)

    def release(self, request: Request) -> None:
        """Takes all blocks back; what was computed stays cached for as long as nobody needs the room."""
        table = request.table
        if table is not None and table.blocks:
            if not table.loading:
                self.register((request,))
                self._offer_again(table)
            self._abandon(table)
            self.settle()
        request.num_computed = 0

    def forget(self, request: Request) -> None:
        """A waiting request has ended: what it has on the host is given up."""
        table = request.table
        if table is not None and table.slots:
            assert self.host is not None
            self.host.pool.release(np.array(table.slots, dtype=np.int64))
            table.slots.clear()

    def _offer_again(self, table: BlockTable) -> None:
        """Registers full blocks that stayed private because an equal block was indexed, which may be gone by now."""
        if not table.num_registered or table.keys is None:
            return
        blocks = np.array(table.blocks[: table.num_registered], dtype=np.int64)
        private = ~self.device.keyed(blocks)
        if private.any():
            self.device.register(blocks[private], table.keys.get(0, table.num_registered)[private], distinct=True)

    # -- the host tier ---------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Books the loads that have ended; prefetched blocks are cached content from here on."""
        if self.host is None:
            return
        for blocks in self.host.settle():
            self.device.release(blocks)
        if self._orphans:
            landed = [all(transfer.done() for transfer in transfers) for transfers, _ in self._orphans]
            for done, (_, blocks) in zip(landed, self._orphans, strict=True):
                if done:
                    self.device.release(blocks)
            self._orphans = [orphan for done, orphan in zip(landed, self._orphans, strict=True) if not done]

    def _hit_host(self, table: BlockTable, hits: Blocks) -> int:
        """Blocks among `hits` that were prefetched; the table waits for those on their way."""
        if self.host is None or not hits.size:
            return 0
        waiting, prefetched = self.host.hit(hits)
        table.loading += waiting
        return prefetched

    def _load(self, table: BlockTable, first: int, slots: Blocks, reason: int) -> None:
        """Starts to bring `slots`, which are pinned, to blocks [first, ...) of the table. Others may share and await them."""
        assert self.host is not None
        blocks = np.array(table.blocks[first : first + len(slots)], dtype=np.int64)
        try:
            transfer = self.host.load(slots, blocks, reason)
        except Exception:  # the request stays where it was, without blocks
            self.host.pool.release(slots)
            self._abandon(table)
            raise
        if table.keys is not None:
            self.device.register(blocks, table.keys.get(first, first + len(slots)), distinct=True)
        table.loading.append(transfer)

    def _abandon(self, table: BlockTable) -> None:
        """Takes a table's blocks back; what has not arrived is not touched before."""
        if table.layout == CONTIGUOUS:
            self._leave_contiguous(table)
        blocks = np.array(table.blocks, dtype=np.int64)
        if all(transfer.done() for transfer in table.loading):
            self.device.release(blocks)
        else:
            self._orphans.append((list(table.loading), blocks))
        table.clear()

    @property
    def orphans(self) -> list[Blocks]:
        """Blocks that no request holds any more and that data is still coming in to."""
        return [blocks for _, blocks in self._orphans]

    @property
    def in_flight(self) -> bool:
        """Whether device blocks are held for loads that no running request waits for."""
        return bool(self._orphans) or (self.host is not None and any(flight.held for flight in self.host.flights))

    def wait_for_flights(self) -> None:
        """Returns once every load has ended, with its blocks booked."""
        if self.host is not None:
            self.host.wait()
            self.settle()

    def next_arrival(self) -> float | None:
        """In virtual time, when the next load ends."""
        return None if self.host is None else self.host.next_arrival()

    def prefetch(self, keys: Keys, spare: int) -> None:
        """Brings what follows the cached prefix of `keys` back from the host, ahead of a request for it, as far as the share of
        unused prefetched blocks and `spare` allocatable ones allow. Exact blocks only."""
        assert self.host is not None
        hits = self.pool.index.match(keys)
        if len(hits) == len(keys):
            return
        behind = keys[len(hits) :]
        again = np.flatnonzero(self.pool.index.get(behind) >= 0)  # cached behind a gap: not to be brought a second time
        slots = self.host.find(host_keys(behind[: again[0]] if again.size else behind, False))
        most = int(self.config.prefetch_warmup_ratio * self.pool.size) - int(np.count_nonzero(self.host.prefetched))
        room = self.pool.allocatable - self.pool.num_revived(hits) - spare
        slots = slots[: max(min(most, room), 0)]
        if not slots.size:
            return
        self.pool.share(hits, hit=False)  # not to be evicted for what follows them
        self.host.pool.share(slots)
        blocks = self.pool.take(len(slots))
        self.pool.release(hits)
        self._telemetry.allocated(PAGED, len(blocks))
        try:
            self.host.load(slots, blocks, m.LOAD, held=True)
        except Exception:
            self.pool.release(blocks)
            self.host.pool.release(slots)
            raise
        self.pool.register(blocks, behind[: len(slots)])

    def swap_out(self, request: Request) -> bool:
        """Moves the full blocks of a running request to the host, if that and the way back cost less than computing them again.

        False: nothing has changed, and its blocks are to be given up.
        """
        table, host = request.table, self.host
        assert table is not None
        full = request.num_computed // self.config.block_size
        if host is None or not self.config.swapping or not full or table.loading or full > host.pool.allocatable:
            return False
        if self.executor.kv_fixed_bytes_per_sequence:  # a part of its KV lies outside the blocks
            return False
        if 2.0 * self.executor.transfer_seconds(full) >= self.executor.recompute_seconds(request.num_computed):
            return False
        blocks = np.array(table.blocks[:full], dtype=np.int64)
        quantized = blocks >= self.device.first_compressed
        keys = np.empty(0, dtype=np.uint64)
        if table.keys is not None:
            keys = host_keys(table.keys.get(0, full), quantized)
        self._telemetry.lap(_KV_ALLOC)
        table.slots = host.seat(blocks, keys).tolist()
        table.swapped_compressed = quantized.tolist()
        self.release(request)
        return True

    def _swap_in(self, request: Request, spare: int) -> bool:
        """Takes blocks for a swapped request: those that are still cached on the device are shared, the others come back."""
        table, host, size = request.table, self.host, self.config.block_size
        assert table is not None
        assert host is not None
        known, stored = request.num_tokens, len(table.slots)
        old = self._compressed_blocks_of(known)
        total = -(-known // size)
        quantized = np.arange(total) < old
        quantized[:stored] = table.swapped_compressed
        hits = _NONE
        if table.keys is not None:
            keys = table.keys.get(0, stored)
            hits = _leading(self.device.find(keys, quantized[:stored]))
        missing = quantized[len(hits) :]
        fresh = len(missing) - int(np.count_nonzero(missing))
        if not self.device.has_room(fresh, len(missing) - fresh, hits, spare):
            return False
        if hits.size:
            self.device.share(hits)
            table.extend(hits.tolist())
            table.num_compressed = int(np.count_nonzero(quantized[: len(hits)]))
            self._hit_host(table, hits)
        if quantized.any():
            table.layout = COMPRESSED
            self._extend_by_kind(table, len(hits), total, missing, 0)
        else:
            table.extend(self.pool.take(fresh).tolist())
            self._telemetry.allocated(PAGED, fresh)
            self._telemetry.lap(_KV_ALLOC)
        slots = np.array(table.slots, dtype=np.int64)
        table.slots.clear()
        host.pool.release(slots[: len(hits)])
        table.num_registered = len(hits)
        if len(hits) < stored:
            self._load(table, len(hits), slots[len(hits) :], m.SWAP_IN)
            table.num_registered = stored if table.keys is not None else 0
        request.num_computed = stored * size
        return True

    # -- sessions --------------------------------------------------------------------------------------------------

    def cached_blocks(self, keys: Keys) -> int:
        """How many leading blocks with these keys are here: on the device, exact or compressed, and then on the host."""
        count = len(_leading(self.device.find(keys)))
        if self.host is not None:
            count += len(self.host.find(host_keys(keys[count:], False)))
        return count

    def export_prefix(self, keys: Keys) -> tuple[int, Payload]:
        """How many leading blocks with these keys lie exact on the device, and their content by tensor, the first axis blocks."""
        blocks = self.pool.index.match(keys)
        if self.host is not None:
            blocks = blocks[
                : np.argmax(np.append(self.host.flight_of[blocks] >= 0, True))
            ]  # as far as they have arrived
        return len(blocks), self.executor.export_blocks(blocks.tolist()) if len(blocks) else {}

    def import_prefix(self, keys: Keys, payload: Payload) -> int:
        """Puts the content of leading blocks, as export_prefix gave it, into the cache under their keys, as far as there is room; returns
        how many of them are cached now. Raises ValueError when the content does not fit."""
        if not payload:
            return 0
        count = len(next(iter(payload.values())))
        if count > len(keys):
            raise ValueError(f"{count} blocks are given with {len(keys)} keys")
        keys = keys[:count]
        known = self.pool.index.get(keys)
        missing = np.flatnonzero(known < 0)[: self.pool.allocatable]
        held = known[known >= 0]
        self.pool.share(held, hit=False)
        missing = missing[: self.pool.allocatable]
        blocks = self.pool.take(len(missing))
        try:
            if len(missing):
                self.executor.import_blocks(blocks.tolist(), {name: rows[missing] for name, rows in payload.items()})
                self.pool.register(blocks, keys[missing])
                self._telemetry.allocated(PAGED, len(blocks))
        finally:
            self.pool.release(blocks)
            self.pool.release(held)
        return len(self.pool.index.match(keys))

    # -- between two steps -----------------------------------------------------------------------------------------

    def compress(self, requests: Iterable[Request]) -> None:
        """Quantizes blocks of long sequences that have left the recent window, a bounded number of them."""
        if self.compressed is None:
            return
        size, left = self.config.block_size, min(_COMPRESS_AT_ONCE, self.compressed.allocatable)
        sources: list[int] = []
        places: list[tuple[BlockTable, int]] = []
        touched: list[Request] = []
        for request in requests:
            table = request.table
            assert table is not None
            if request.num_computed <= self.config.compressed_from or table.loading:
                continue
            if table.layout != COMPRESSED:
                if table.layout == CONTIGUOUS:
                    self._leave_contiguous(table)
                table.layout = COMPRESSED
                self._telemetry.mechanisms.layout_changed(COMPRESSED)
            old = (request.num_computed - self.config.recent_window) // size
            if table.compress_next < old:
                touched.append(request)
            while table.compress_next < old and left:
                at = table.compress_next
                block = table.blocks[at]
                # A block that others hold stays exact: they read it, and it would cost room twice.
                if block < self.device.first_compressed and self.pool.refs[block] == 1:
                    sources.append(block)
                    places.append((table, at))
                    left -= 1
                table.compress_next += 1
        if not sources:
            return
        self.register(touched)
        taken = self.compressed.take(len(sources))
        targets = taken + self.device.first_compressed
        began = self._telemetry.lap(_KV_ALLOC)
        try:
            self.executor.compress_blocks(list(zip(sources, targets.tolist(), strict=True)))
        except Exception:
            self.compressed.release(taken)
            raise
        self._telemetry.mechanisms.moved(m.COMPRESS, len(sources), self.executor.clock.now() - began)
        self._telemetry.allocated(COMPRESSED, len(sources))
        keys: list[Keys] = []
        for (table, at), target in zip(places, targets.tolist(), strict=True):
            table.blocks[at] = target
            table.num_compressed += 1
            if table.keys is not None:
                keys.append(table.keys.get(at, at + 1))
        if keys:
            self.device.register(targets, np.concatenate(keys), distinct=False)
        self.pool.release(np.array(sources, dtype=np.int64))
        self._telemetry.lap(_KV_MOVE)

    def compress_harder(self, requests: Sequence[Request]) -> bool:
        """Also old blocks that were shared when their turn came and are not any more; whether that made room."""
        if self.compressed is None:
            return False
        before = self.pool.allocatable
        for request in requests:
            if request.table is not None:
                request.table.compress_next = 0
        self.compress(requests)
        return self.pool.allocatable > before

    def compact(self, requests: Iterable[Request]) -> None:
        """One slice of compaction, if a run of adjacent blocks was looked for in vain: moves blocks of paged sequences together."""
        if not self.config.compaction_seconds or not self._wanted_run:
            return
        each = self.executor.copy_seconds(1)
        slice_blocks = int(self.config.compaction_seconds / each) if each > 0 else self.pool.size
        if slice_blocks < 1:
            return
        movable = np.zeros(self.pool.size, dtype=bool)
        tables: list[tuple[BlockTable, Blocks]] = []
        flights = self.host.flights if self.host is not None else ()
        fixed = [flight.blocks[flight.blocks < self.pool.size] for flight in flights]
        for request in requests:
            table = request.table
            assert table is not None
            blocks = np.array(table.blocks, dtype=np.int64)
            exact = blocks[blocks < self.pool.size]
            if table.layout == CONTIGUOUS or table.loading:
                fixed.append(exact)  # whoever shares a block with them leaves it where it is
            else:
                tables.append((table, blocks))
                movable[exact] = True
        if fixed:
            movable[np.concatenate(fixed)] = False
        protect = [(t.blocks[-1] + 1, t.reserved_end) for t in self.contiguous]
        sources, targets = plan_compaction(self.pool, movable, self._wanted_run, slice_blocks, protect)
        if not len(sources):
            self._wanted_run = 0
            return
        before = self.pool.address_map().largest_free_run
        cached = targets[self.pool.state[targets] == EVICTABLE]
        if cached.size:
            self.pool.drop(cached)  # first: what the targets held goes to the host
        began = self._telemetry.lap(_KV_ALLOC)
        self.executor.copy_blocks(list(zip(sources.tolist(), targets.tolist(), strict=True)))
        move_blocks(self.pool, sources, targets)
        moved_to = np.arange(self.device.size)
        moved_to[sources] = targets
        is_source = np.zeros(len(moved_to), dtype=bool)
        is_source[sources] = True
        for table, blocks in tables:
            if is_source[blocks].any():
                table.blocks[:] = moved_to[blocks].tolist()
        self._telemetry.mechanisms.recovered(self.pool.address_map().largest_free_run - before)
        now = self._telemetry.lap(_KV_MOVE)
        self._telemetry.mechanisms.moved(m.COMPACTION, len(sources), now - began)

    # -- measuring -------------------------------------------------------------------------------------------------

    def state(self, running: Iterable[Request]) -> KVState:
        """Exact measurements of the pools between two steps (kv/measure.py)."""
        return measure(self, running)

    def check_integrity(self, running: Sequence[Request], waiting: Iterable[Request] = ()) -> None:
        """Raises IntegrityError unless pools, indices and the tables of all requests agree."""
        check(self, running, waiting)
