"""The numbers that telemetry keeps, and how each becomes series. recorder.py writes them, this file reads them.

Counters and histograms exist from the start with 0 for every label value that can occur, so that a rate sees the first
increment: one that is born with a request in it loses that request. What depends on settings (preemption, swapping, a host tier,
quantized KV) is absent unless the engine expects it or until it occurs, as are the latency histograms of a class until its first
request comes in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from math import nan
from threading import Lock
from typing import NamedTuple

import numpy as np

from observability import catalog as c
from observability.buckets import BucketPlan
from observability.telemetry.mechanisms import COMPRESS, Mechanisms
from observability.telemetry.phases import StepClock
from observability.telemetry.quantization import Quantization
from observability.telemetry.residency import PoolResidency, residency_blocks
from observability.telemetry.snapshot import Block, FamilySamples, Histograms, Layout, Series, counters, gauges
from observability.telemetry.stalls import Stalls

#: States that exist in every engine; the others get their series when they are expected, or when a request first enters them.
_ALWAYS_IN_USE = ("queued", "kv_wait", "prefill", "decode")
_COMPONENTS = len(c.COMPONENTS)
_KV_MOVE, _DEQUANT = c.COMPONENTS.index("kv_move"), c.COMPONENTS.index("dequant")
#: bool [STATES, COMPONENTS]: what has no series unless it occurs
_NEVER_IDLE = np.array([[s != "queued" and x == "idle" for x in c.COMPONENTS] for s in c.STATES])
#: KV that is stored as computed: nothing is dequantized.
_EXACT_KV = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class KVState:
    """The KV pool at one instant. Treated as immutable: arrays must not be written to after it was handed over."""

    capacity_blocks: int | None  # None: unbounded
    block_size: int  # tokens
    bytes_per_block: int
    free: int
    evictable: int
    active: int
    layout_blocks: Sequence[int]  # table entries by catalog.LAYOUTS
    stored_tokens: int  # in active blocks, a shared block counted once
    largest_free_run: int  # blocks
    free_runs: Sequence[int]  # runs of at most FREE_RUN_BOUNDS[i] blocks, cumulative, +Inf last
    region_blocks: np.ndarray  # int [REGIONS, 3], by BLOCK_STATES
    region_free_run: np.ndarray  # int [REGIONS]
    compressed: Sequence[int] | None = None  # blocks by BLOCK_STATES; None: no such blocks
    bytes_per_compressed_block: int = 0
    host: Sequence[int] | None = None  # blocks by HOST_STATES; None: no host tier
    fixed_bytes: int | None = None  # of running requests beside blocks; None: the model has no such part
    fixed_reserved_bytes: int = 0  # of as many requests as can run
    fixed_bytes_per_sequence: int | None = None  # of one of them; None: the model has no such part
    residency: Sequence[PoolResidency | None] = (None,) * len(c.POOLS)  # by POOLS; None: no such pool, or unbounded
    eviction_memory_seconds: float | None = None  # None: no eviction was forgotten

    @property
    def resident_bytes(self) -> int:
        """Of blocks with content, and fixed parts."""
        _, evictable, active = self.compressed or (0, 0, 0)
        exact = (self.evictable + self.active) * self.bytes_per_block
        return exact + (evictable + active) * self.bytes_per_compressed_block + (self.fixed_bytes or 0)

    @property
    def active_bytes(self) -> int:
        """Of blocks held by requests, and fixed parts."""
        compressed = self.compressed[2] if self.compressed else 0
        return (
            self.active * self.bytes_per_block + compressed * self.bytes_per_compressed_block + (self.fixed_bytes or 0)
        )

    @property
    def reserved_bytes(self) -> int | None:
        """Of the pools and of the fixed parts of as many requests as can run; None when the pool is unbounded."""
        return None if self.pool_bytes is None else self.pool_bytes + self.fixed_reserved_bytes

    @property
    def pool_bytes(self) -> int | None:
        """Of all blocks; None when the pool is unbounded."""
        if self.capacity_blocks is None:
            return None
        return (
            self.capacity_blocks * self.bytes_per_block + sum(self.compressed or ()) * self.bytes_per_compressed_block
        )


class Published(NamedTuple):
    """The newest gauges: one tuple, so that a reader sees all of one instant."""

    unix_time: float
    kv: KVState
    running: tuple[int, ...]  # by catalog.CLASSES
    waiting: tuple[int, ...]


class Cells(StepClock):
    """Every value of one engine, by family. `engine_labels`: executor, clock, device, kv_dtype of kvscope_engine_info."""

    def __init__(
        self, model: str, clock: Callable[[], float], engine_labels: tuple[str, ...], buckets: BucketPlan
    ) -> None:
        super().__init__(clock)
        self.model = model = model.encode("utf-8", "replace").decode()  # of a path, it may hold what is no text
        self.buckets = buckets
        self._engine_labels = (model, *engine_labels, _version())
        self._published: Published | None = None
        self.mechanisms = Mechanisms(model)
        classes, lengths = len(c.CLASSES), len(c.LENGTH_BUCKETS)
        # Written by the threads that submit; they share a lock that neither the engine nor a scrape takes.
        self._front = Lock()
        self._received = [0.0] * classes
        self._refused = [0.0] * (classes * len(c.OUTCOMES))
        self._folds = [0.0] * 4  # class, outcome, layer_group, tenant
        # Written by the engine's thread.
        self._ended = [0.0] * (classes * len(c.OUTCOMES))
        self._prompt_tokens = [0.0] * classes
        self._generation_tokens = [0.0] * classes
        self._preemptions = [0.0] * len(c.PREEMPTION_REASONS)
        self._recomputed = [0.0] * len(c.PREEMPTION_REASONS)
        self._lookups, self._queried, self._hittable = ([0.0] * lengths for _ in range(3))
        self._hits = [0.0] * (lengths * len(c.TIERS))
        self._allocated = [0.0] * len(c.LAYOUTS)
        self._evicted = [0.0]
        self._regret = [0.0] * len(c.REGRET_WINDOWS)
        self._fallbacks = [0.0]
        self._steps = [0.0] * len(c.STEP_KINDS)
        self._step_tokens = [0.0, 0.0]  # prefill, decode
        self._stalls = Stalls()
        # Served requests by the highest tail bound that they exceed: not cumulative, cumulated when read.
        self._tail_bounds = buckets.tail
        self._tail_seconds = np.zeros((len(buckets.tail), len(c.STATES) * _COMPONENTS))
        self._tail_requests = np.zeros(len(buckets.tail))
        # The same by prompt length: requests and seconds.
        self._tail_lengths = np.zeros((2, len(buckets.tail), len(c.LENGTH_BUCKETS)))
        # What exists beyond the minimum, expected of settings or learned from traffic. Flags only ever go from False to True.
        self._state_used = [state in _ALWAYS_IN_USE for state in c.STATES]
        self._class_used = [name == "standard" for name in c.CLASSES]  # by the threads that submit
        self._tier_used = [tier == "device" for tier in c.TIERS]
        self._layout_used = [layout in ("contiguous", "paged") for layout in c.LAYOUTS]

        by_class = [(model, name) for name in c.CLASSES]
        used = self._class_used
        self._duration = Histograms(c.REQUEST_DURATION, by_class, bounds=buckets.latency, used=used, exemplars=True)
        self._ttft = Histograms(c.TIME_TO_FIRST_TOKEN, by_class, bounds=buckets.latency, used=used, exemplars=True)
        self._itl = Histograms(c.INTER_TOKEN_LATENCY, by_class, bounds=buckets.inter_token, used=used)
        self._step_duration = Histograms(c.STEP_DURATION, [(model, kind) for kind in c.STEP_KINDS])
        self.quantization = Quantization(model, self._folds)
        self._layout = Layout(tuple(self._blocks()))

    @property
    def layout(self) -> list[Series]:
        """Identity of every column of `values`. Only ever grows at its end (a longer list replaces it); do not modify."""
        return self._layout.series

    def values(self) -> np.ndarray:
        """One reading of every series, float64; column i is `layout[i]`, NaN where the series does not exist (yet).

        It may be shorter than a `layout` that is asked for afterwards, never in another order. Counters never decrease.
        """
        return self._layout.values(self._published)

    def columns(self, pause_seconds: float = 0.0) -> tuple[Layout, np.ndarray]:
        """`values`, and the layout that has exactly these columns. With `pause_seconds` the reading is spread over some tens of milliseconds,
        in which other threads of the interpreter go on; the gauges are still those of one instant, as is each histogram."""
        layout = self._layout
        return layout, layout.values(self._published, pause_seconds)

    def snapshot(self) -> list[FamilySamples]:
        """The same reading as rows by family, with exemplars, in catalogue order."""
        return self._layout.samples(self._published)

    def _blocks(self) -> Iterable[Block]:
        m = self.model
        by_model = [(m,)]
        by_class = [(m, name) for name in c.CLASSES]
        by_length = [(m, bucket) for bucket in c.LENGTH_BUCKETS]
        by_reason = [(m, reason) for reason in c.PREEMPTION_REASONS]
        by_layout = [(m, layout) for layout in c.LAYOUTS]

        yield Block(c.ENGINE, (("_info", self._engine_labels),), lambda _: (1.0,))
        yield counters(c.REQUESTS_RECEIVED, by_class, self._received)
        outcomes = tuple(("_total", (m, name, outcome)) for name in c.CLASSES for outcome in c.OUTCOMES)
        yield Block(c.REQUESTS, outcomes, lambda _: self._read_ended())
        yield from (h.block() for h in (self._duration, self._ttft, self._itl))
        yield counters(c.PROMPT_TOKENS, by_class, self._prompt_tokens)
        yield counters(c.GENERATION_TOKENS, by_class, self._generation_tokens)
        yield gauges(c.REQUESTS_RUNNING, by_class, lambda g: g.running)
        yield gauges(c.REQUESTS_WAITING, by_class, lambda g: g.waiting)
        yield counters(c.PREEMPTIONS, by_reason, self._preemptions)

        above = [f"{bound:g}" for bound in self._tail_bounds]
        tail = tuple(
            ("_total", (m, state, component, gt)) for gt in above for state in c.STATES for component in c.COMPONENTS
        )
        yield Block(c.PHASE_SECONDS, tail, lambda _: self._read_tail_seconds())
        yield Block(c.PHASE_REQUESTS, tuple(("_total", (m, gt)) for gt in above), lambda _: self._read_tail_requests())

        lengths = tuple(("_total", (m, bucket, gt)) for gt in above for bucket in c.LENGTH_BUCKETS)
        yield Block(c.PHASE_LENGTH_SECONDS, lengths, lambda _: self._read_tail_lengths(1))
        yield Block(c.PHASE_LENGTH_REQUESTS, lengths, lambda _: self._read_tail_lengths(0))

        yield counters(c.KV_LOOKUPS, by_length, self._lookups)
        yield counters(c.KV_QUERIED_TOKENS, by_length, self._queried)
        yield counters(c.KV_HITTABLE_TOKENS, by_length, self._hittable)
        by_tier = tuple(("_total", (m, bucket, tier)) for bucket in c.LENGTH_BUCKETS for tier in c.TIERS)
        yield Block(c.KV_HIT_TOKENS, by_tier, lambda _: _where(self._hits, self._tier_used * len(c.LENGTH_BUCKETS)))
        yield counters(c.KV_RECOMPUTED_TOKENS, by_reason, self._recomputed)

        # An unbounded pool has no free blocks, no capacity and no addresses: absent, not 0.
        def bounded(g: Published, values: Iterable[float], count: int) -> Iterable[float]:
            return values if g.kv.capacity_blocks is not None else (nan,) * count

        yield gauges(
            c.KV_BLOCKS, [(m, state) for state in c.BLOCK_STATES],
            lambda g: (*bounded(g, (g.kv.free,), 1), g.kv.evictable, g.kv.active),
        )  # fmt: skip
        yield gauges(
            c.KV_LAYOUT_BLOCKS, by_layout,
            lambda g: _where([*g.kv.layout_blocks, *(0,) * (len(c.LAYOUTS) - len(g.kv.layout_blocks))], self._layout_used),
        )  # fmt: skip
        yield gauges(c.KV_CAPACITY_BLOCKS, by_model, lambda g: bounded(g, (g.kv.capacity_blocks or 0,), 1))
        yield gauges(c.KV_BLOCK_SIZE, by_model, lambda g: (g.kv.block_size,))
        yield gauges(
            c.KV_BYTES, [(m, kind) for kind in ("reserved", "resident", "active")],
            lambda g: (nan if g.kv.reserved_bytes is None else g.kv.reserved_bytes, g.kv.resident_bytes, g.kv.active_bytes),
        )  # fmt: skip
        yield gauges(c.KV_STORED_TOKENS, by_model, lambda g: (g.kv.stored_tokens,))
        yield gauges(c.KV_LARGEST_FREE_RUN, by_model, lambda g: bounded(g, (g.kv.largest_free_run,), 1))
        run_bounds = [*(str(bound) for bound in c.FREE_RUN_BOUNDS), "+Inf"]
        yield gauges(
            c.KV_FREE_RUNS, [(m, le) for le in run_bounds], lambda g: bounded(g, g.kv.free_runs, len(run_bounds))
        )
        regions = [(m, region, state) for region in c.REGION_LABELS for state in c.BLOCK_STATES]
        yield gauges(
            c.KV_REGION_BLOCKS, regions, lambda g: bounded(g, g.kv.region_blocks.ravel().tolist(), len(regions))
        )
        yield gauges(
            c.KV_REGION_FREE_RUN, [(m, region) for region in c.REGION_LABELS],
            lambda g: bounded(g, g.kv.region_free_run.tolist(), c.REGIONS),
        )  # fmt: skip
        allocated = tuple(("_total", labels) for labels in by_layout)
        yield Block(c.KV_ALLOCATED_BLOCKS, allocated, lambda _: _where(self._allocated, self._layout_used))
        yield counters(c.KV_EVICTED_BLOCKS, by_model, self._evicted)
        yield counters(c.KV_LAYOUT_FALLBACKS, by_model, self._fallbacks)
        yield from self.mechanisms.kv_blocks()
        absent = (nan,) * 3
        yield gauges(
            c.KV_COMPRESSED_BLOCKS, [(m, state) for state in c.BLOCK_STATES],
            lambda g: absent if g.kv.compressed is None else g.kv.compressed,
        )  # fmt: skip
        yield gauges(c.KV_FIXED_BYTES, by_model, lambda g: (nan if g.kv.fixed_bytes is None else g.kv.fixed_bytes,))
        yield gauges(c.KV_BYTES_PER_TOKEN, by_model, lambda g: (g.kv.bytes_per_block / g.kv.block_size or nan,))
        yield gauges(c.KV_FIXED_PER_SEQUENCE, by_model, lambda g: (g.kv.fixed_bytes_per_sequence or nan,))
        yield gauges(
            c.KV_HOST_BLOCKS, [(m, state) for state in c.HOST_STATES],
            lambda g: absent if g.kv.host is None else g.kv.host,
        )  # fmt: skip
        yield from self.mechanisms.move_blocks()
        yield from residency_blocks(m)
        yield counters(c.KV_REGRET, [(m, window) for window in c.REGRET_WINDOWS], self._regret)
        yield gauges(
            c.KV_EVICTION_MEMORY, by_model,
            lambda g: (nan if g.kv.eviction_memory_seconds is None else g.kv.eviction_memory_seconds,),
        )  # fmt: skip

        yield counters(c.STEP_SECONDS, [(m, component) for component in c.COMPONENTS], self.seconds)
        yield counters(c.STEPS, [(m, kind) for kind in c.STEP_KINDS], self._steps)
        yield self._step_duration.block()
        yield counters(c.STEP_TOKENS, [(m, "prefill"), (m, "decode")], self._step_tokens)
        yield from self._stalls.blocks(m)
        yield from self.mechanisms.batching_blocks()
        yield from self.mechanisms.session_blocks()
        _, _, clock, device, *_ = self._engine_labels
        yield from self.mechanisms.copy_blocks(device, virtual=clock == "virtual")
        yield gauges(c.LAST_UPDATE, [(m, "engine")], lambda g: (g.unix_time,))
        yield counters(c.ANOMALIES_TOTAL, [(m, reason) for reason in c.ANOMALIES], self._anomalies)
        yield counters(c.LABEL_FOLDS, [("class",), ("outcome",), ("layer_group",), ("tenant",)], self._folds)

    def _read_ended(self) -> list[float]:
        return [ended + refused for ended, refused in zip(self._ended, self._refused, strict=True)]

    def _read_tail_seconds(self) -> list[float]:
        # From the highest bound down, so that each sum adds the same non-decreasing terms in the same order: monotone.
        above = np.cumsum(self._tail_seconds[::-1], axis=0)[::-1].reshape(-1, len(c.STATES), _COMPONENTS)
        above[:, [not used for used in self._state_used]] = nan
        above[:, :, [not used for used in self._components_used()]] = nan
        # An engine is idle while a request is on its way to it, and never with one that it has begun.
        above[:, (above[0] == 0.0) & _NEVER_IDLE] = nan
        flat: list[float] = above.ravel().tolist()
        return flat

    def _components_used(self) -> list[bool]:
        """Components that the engine's settings allow or that it has done; the rest has no series in the make-up."""
        used = [True] * _COMPONENTS
        quantized = self._engine_labels[4] not in _EXACT_KV or self.mechanisms.expects_move(COMPRESS)
        used[_DEQUANT] = quantized or self.seconds[_DEQUANT] > 0.0
        used[_KV_MOVE] = self.mechanisms.expects_move(*range(len(c.MOVES))) or self.seconds[_KV_MOVE] > 0.0
        return used

    def _read_tail_lengths(self, which: int) -> list[float]:
        above = np.cumsum(self._tail_lengths[:, ::-1], axis=1)[:, ::-1]
        flat: list[float] = above[which].ravel().tolist()
        return flat

    def _read_tail_requests(self) -> list[float]:
        counts: list[float] = np.cumsum(self._tail_requests[::-1])[::-1].tolist()
        return counts


def _where(values: Sequence[float], used: Sequence[bool]) -> list[float]:
    return [value if keep else nan for value, keep in zip(values, used, strict=True)]


def _version() -> str:
    try:
        return version("kvscope")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "unknown"
