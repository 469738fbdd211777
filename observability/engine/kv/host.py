"""Host memory as a second tier: a cache of blocks evicted from the device, the seat of swapped-out sequences, and what is on its way back."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from observability.catalog import COMPONENTS
from observability.engine.kv.pool import BlockPool
from observability.engine.kv.prefix import Blocks, Keys
from observability.engine.types import Executor, Transfer
from observability.telemetry import mechanisms as m
from observability.telemetry.recorder import Telemetry

_KV_MOVE = COMPONENTS.index("kv_move")
_PRIOR_BLOCKS = 64  # taken as used before anything is known
_REMEMBERED_BLOCKS = 16_384  # past which what is known of prefetched blocks counts half
#: Quantized content of the same tokens is other content: it has keys of its own.
_COMPRESSED = np.uint64(0xA24BAED4963EE407)


def host_keys(keys: Keys, compressed: np.ndarray | bool) -> Keys:
    """Keys in the host index of blocks that are known by `keys` on the device, `compressed` or exact."""
    return np.maximum(np.where(compressed, keys ^ _COMPRESSED, keys), np.uint64(1))


@dataclass(frozen=True, slots=True, eq=False)
class Flight:
    """A load on its way from `slots` to device `blocks`. `held`: the tier holds these blocks, since no request asked for them yet."""

    transfer: Transfer
    blocks: Blocks
    slots: Blocks
    held: bool


class HostTier:
    """`num_blocks` slots in host memory, each with room for one block; a slot is pinned while a load or a swapped sequence needs it.

    Follows the content of `device_blocks` blocks that came back: on its way, and then prefetched until somebody hits it.
    """

    def __init__(self, num_blocks: int, device_blocks: int, executor: Executor, telemetry: Telemetry) -> None:
        self.pool = BlockPool(num_blocks)
        self.prefetched = np.zeros(device_blocks, dtype=bool)  # brought back ahead of use, and nobody has used it yet
        self.flight_of = np.full(device_blocks, -1, dtype=np.int64)  # number of the load that a block waits for
        self._flights: dict[int, Flight] = {}
        self._next_flight = 0
        self._used = self._decided = 0.0  # prefetched blocks, with the old ones fading
        self._executor = executor
        self._telemetry = telemetry

    @property
    def counts(self) -> tuple[int, int, int]:
        """Slots by catalog.HOST_STATES."""
        return self.pool.num_free, self.pool.num_evictable, self.pool.num_active

    # -- to the host -----------------------------------------------------------------------------------------------

    def find(self, keys: Keys) -> Blocks:
        """Slots of the longest prefix of host `keys` that lies here."""
        return self.pool.index.match(keys)

    def keep(self, blocks: Blocks, keys: Keys) -> None:
        """Copies device blocks that are about to be evicted, in that order, unless their content is here. At most what fits: of a
        sequence the first blocks are evicted last and are worth most."""
        self.replaced(blocks)
        new = self.pool.index.get(keys) < 0
        blocks, keys = blocks[new], keys[new]
        room = min(len(blocks), self.pool.allocatable)
        if room:
            blocks, keys = blocks[-room:][::-1], keys[-room:][::-1]
            slots = self._offload(blocks, m.OFFLOAD)
            self.pool.register(slots, keys)
            self.pool.release(slots)

    def seat(self, blocks: Blocks, keys: Keys) -> Blocks:
        """Copies all `blocks` of a sequence to slots that stay pinned; the first len(keys) of them can be found by others."""
        slots = self._offload(blocks, m.SWAP_OUT)
        self.pool.register(slots[: len(keys)], keys)
        return slots

    def _offload(self, blocks: Blocks, reason: int) -> Blocks:
        slots = self.pool.take(len(blocks))
        began = self._executor.clock.now()
        try:
            self._executor.offload_blocks(list(zip(blocks.tolist(), slots.tolist(), strict=True)))
        except Exception:
            self.pool.release(slots)
            raise
        self._telemetry.mechanisms.moved(reason, len(blocks), self._executor.clock.now() - began)
        self._telemetry.lap(_KV_MOVE)
        return slots

    # -- and back --------------------------------------------------------------------------------------------------

    @property
    def flights(self) -> Collection[Flight]:
        return self._flights.values()

    def load(self, slots: Blocks, blocks: Blocks, reason: int, *, held: bool = False) -> Transfer:
        """Starts to bring pinned `slots` to device `blocks`, which nobody may read or write before."""
        began = self._executor.clock.now()
        transfer = self._executor.load_blocks(list(zip(slots.tolist(), blocks.tolist(), strict=True)))
        self._telemetry.mechanisms.moved(reason, len(blocks), self._executor.clock.now() - began)
        self._telemetry.lap(_KV_MOVE)
        self._flights[self._next_flight] = Flight(transfer, blocks, slots, held)
        self.flight_of[blocks] = self._next_flight
        self._next_flight += 1
        if held:
            self.prefetched[blocks] = True
            self._telemetry.mechanisms.prefetch(m.ISSUED, len(blocks))
        return transfer

    def settle(self) -> list[Blocks]:
        """Books the loads that have ended; returns the device blocks that the tier held for them and holds no longer."""
        landed: list[Blocks] = []
        for number, flight in list(self._flights.items()):
            if flight.transfer.done():
                del self._flights[number]
                self.flight_of[flight.blocks] = -1
                self.pool.release(flight.slots)
                if flight.held:
                    landed.append(flight.blocks)
        return landed

    def wait(self) -> None:
        """Returns once every load has ended."""
        for flight in self._flights.values():
            flight.transfer.wait()

    def next_arrival(self) -> float | None:
        """In virtual time, when the next load ends."""
        times = [f.transfer.ready_at for f in self._flights.values() if f.transfer.ready_at is not None]
        return min(times, default=None)

    def hit(self, blocks: Blocks) -> tuple[list[Transfer], int]:
        """A sequence shares device `blocks`: the loads that it has to wait for, and how many blocks it owes to prefetch."""
        flights = self.flight_of[blocks]
        waiting = [self._flights[number].transfer for number in np.unique(flights[flights >= 0]).tolist()]
        first_use = self.prefetched[blocks]
        prefetched, late = int(np.count_nonzero(first_use)), int(np.count_nonzero(first_use & (flights >= 0)))
        if prefetched:
            self.prefetched[blocks] = False
            self._resolved(prefetched, prefetched)
            self._telemetry.mechanisms.prefetch(m.LATE, late)
            self._telemetry.mechanisms.prefetch(m.USEFUL, prefetched - late)
        return waiting, prefetched

    def replaced(self, blocks: Blocks) -> None:
        """The content of device `blocks` is given up: what was prefetched in vain is wasted."""
        wasted = int(np.count_nonzero(self.prefetched[blocks]))
        if wasted:
            self.prefetched[blocks] = False
            self._resolved(0, wasted)
            self._telemetry.mechanisms.prefetch(m.WASTED, wasted)

    @property
    def confidence(self) -> float:
        """Share of the blocks prefetched of late that were used; 1 while little is known."""
        return (self._used + _PRIOR_BLOCKS) / (self._decided + _PRIOR_BLOCKS)

    def _resolved(self, used: int, blocks: int) -> None:
        self._used += used
        self._decided += blocks
        if self._decided > _REMEMBERED_BLOCKS:
            self._used, self._decided = self._used / 2.0, self._decided / 2.0
