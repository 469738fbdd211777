"""How long cached KV lives, and what its eviction costs: lifetimes against known distributions, and every count against one made by hand."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from observability import catalog as c
from observability.engine.engine import Engine
from observability.engine.kv.host import host_keys
from observability.engine.kv.manager import KVManager
from observability.engine.kv.pool import BlockPool
from observability.engine.kv.residency import EvictionMemory, Ledger
from observability.engine.types import ControllerConfig, PromptSpan
from observability.store.evaluate import Evaluator
from observability.telemetry.recorder import Telemetry
from tests.engine.support import TimedExecutor, make_engine, make_request, tokens
from tests.telemetry.bench import kv_state

# -- lifetimes that are known ---------------------------------------------------------------------------------------------

Draw = Callable[[np.random.Generator, int], np.ndarray]
Cdf = Callable[[float], float]


def _lognormal_cdf(age: float, median: float, sigma: float) -> float:
    return 0.5 * (1.0 + math.erf(math.log(age / median) / sigma / math.sqrt(2.0)))


LIFETIMES: dict[str, tuple[Draw, Cdf]] = {
    "exponential": (lambda rng, n: rng.exponential(150.0, n), lambda t: 1.0 - math.exp(-t / 150.0)),
    "Weibull, most die young": (
        lambda rng, n: 150.0 * rng.weibull(0.6, n),
        lambda t: 1.0 - math.exp(-((t / 150.0) ** 0.6)),
    ),
    "Weibull, all die at about the same age": (
        lambda rng, n: 180.0 * rng.weibull(6.0, n),
        lambda t: 1.0 - math.exp(-((t / 180.0) ** 6.0)),
    ),
    "two kinds of blocks": (
        lambda rng, n: np.where(rng.random(n) < 0.4, rng.lognormal(math.log(8), 0.4, n), rng.lognormal(math.log(210), 0.15, n)),
        lambda t: 0.4 * _lognormal_cdf(t, 8.0, 0.4) + 0.6 * _lognormal_cdf(t, 210.0, 0.15),
    ),
}  # fmt: skip


def quantile_of(cdf: Cdf, q: float) -> float:
    low, high = 1e-6, 1e6
    for _ in range(100):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if cdf(middle) < q else (low, middle)
    return low


def live_through(draw: Draw, horizon: float, blocks: int, seed: int) -> tuple[Ledger, np.ndarray, np.ndarray]:
    """Lives that begin evenly over `horizon` and are told to a ledger in order of time, up to the horizon; births and deaths of all."""
    rng = np.random.default_rng(seed)
    births = np.sort(rng.uniform(0.0, horizon, blocks))
    deaths = births + draw(rng, blocks)
    now = 0.0
    ledger = Ledger(blocks, lambda: now)
    events = [(t, i, True) for i, t in enumerate(births)] + [
        (t, i, False) for i, t in enumerate(deaths) if t <= horizon
    ]
    for at, block, born in sorted(events):
        now = at
        one = np.array([block])
        if born:
            ledger.begin(one)
            ledger.idle(one)
        else:
            ledger.end(one)
    now = horizon
    return ledger, births, deaths


def evaluated(ledgers: list[Ledger], seconds: float) -> dict[str, dict[tuple[str, ...], float]]:
    """Signals over a fleet: one series of each instance, from 0 to what its ledger says `seconds` later."""
    evaluator = Evaluator()
    series, values = [], []
    for number, ledger in enumerate(ledgers):
        t = Telemetry("m", executor="test", virtual=True, device="cpu", kv_dtype="auto", clock=lambda: 0.0)
        t.publish(replace(kv_state(), residency=(ledger.residency(), None, None)), [0, 0, 0], [0, 0, 0])
        for (name, labels), value in zip(t.layout, t.values(), strict=True):
            series.append((name, (*labels, ("instance", str(number)))))
            values.append(value)
    now = np.array(values)
    counters = np.array([name.endswith(("_total", "_bucket", "_sum", "_count")) for name, _ in series])
    evaluator.scrape(1000.0, series, np.where(counters, now * 0.0, now), nan_is_absent=True)
    evaluator.scrape(1000.0 + seconds, series, now, nan_is_absent=True)
    out: dict[str, dict[tuple[str, ...], float]] = {}
    for name, found in evaluator.evaluate(1000.0 + seconds).items():
        if "kv_block_" in name:
            keys = [tuple(labels[x] for x in ("le", "pool") if x in labels) for labels in found.labels]
            out[name] = {k: v for k, v in zip(keys, found.values.tolist(), strict=True) if not math.isnan(v)}
    return out


SURVIVAL = "model_pool_le:kvscope_kv_block_survival:ratio_rate5m"
LIFETIME = "model_pool:kvscope_kv_block_lifetime_seconds:p{}_5m"


@pytest.mark.parametrize("name", LIFETIMES)
def test_a_known_lifetime_is_recovered_within_5_percent_while_most_blocks_are_still_alive(name: str) -> None:
    draw, cdf = LIFETIMES[name]
    horizon = 1.06 * quantile_of(cdf, 0.9 if "same age" in name or "kinds" in name else 0.63)
    fleet = [live_through(draw, horizon, 7000, seed) for seed in (1, 2, 3)]
    alive = sum(int((deaths > horizon).sum()) for _, _, deaths in fleet) / 21_000
    assert alive > 0.5
    signals = evaluated([ledger for ledger, _, _ in fleet], 250.0)
    survival = {float(le): share for (le, _), share in signals[SURVIVAL].items()}
    assert max(survival) >= 0.6 * horizon
    for le, share in survival.items():
        if le < 0.9 * horizon:
            assert share == pytest.approx(1.0 - cdf(le), rel=0.05, abs=0.01), le
    true = quantile_of(cdf, 0.5)
    assert signals[LIFETIME.format(50)][("exact",)] == pytest.approx(true, rel=0.05)
    # What evictions alone would say, as engines do that observe a block when it leaves:
    gone = np.concatenate([(deaths - births)[deaths <= horizon] for _, births, deaths in fleet])
    assert np.median(gone) < 0.9 * true


def test_no_quantile_is_told_that_no_block_has_reached() -> None:
    ledger, _, deaths = live_through(LIFETIMES["exponential"][0], 60.0, 4000, 5)  # a third dies within the minute
    assert 0.6 < (deaths > 60.0).mean() < 0.9
    signals = evaluated([ledger], 60.0)
    assert signals[SURVIVAL]["40.0", "exact"] == pytest.approx(math.exp(-40 / 150), rel=0.05)
    assert LIFETIME.format(50) not in signals or not signals[LIFETIME.format(50)]
    assert ("160.0", "exact") not in signals[SURVIVAL]


def test_a_pool_in_which_nothing_was_evicted_yet_is_known_to_keep_its_content() -> (
    None
):  # QK4: an idle cache shows something
    ledger, _, _ = live_through(lambda rng, n: np.full(n, 1e9), 50.0, 300, 1)
    signals = evaluated([ledger], 60.0)
    assert signals[SURVIVAL]["25.0", "exact"] == 1.0
    younger, exposed = ledger.residency().series
    assert younger[-1] == 300
    assert exposed[0] > 290


def test_an_age_on_a_bound_is_inside_its_interval_and_an_idle_engine_starts_from_0() -> None:
    engine = make_engine()
    engine.step()
    for family in (c.KV_LIVE_AGES, c.KV_EVICTED_AGES, c.KV_EXPOSED, c.KV_IDLE_BEFORE_EVICTION, c.KV_REUSE_GAP):
        assert set(told(engine, family, "exact").values()) == {0.0}, family.name
    at = c.AGE_BOUNDS.index(60.0)
    for age, place in ((60.0, at), (60.000001, at + 1)):
        now = 100.0
        ledger = Ledger(3, lambda: now)  # noqa: B023
        everything = np.arange(3)
        ledger.begin(everything)
        ledger.idle(everything)
        now += age
        ledger.reuse(everything[:1])
        ledger.end(everything[:2])
        books = ledger.residency()
        younger, exposed = books.series
        assert np.flatnonzero(books.evicted).tolist() == np.flatnonzero(books.idle.counts).tolist() == [place]
        assert np.flatnonzero(books.gaps.counts).tolist() == [place]
        assert younger[c.SPELL_BOUNDS.index(60.0)] == (age == 60.0)
        assert exposed[at] == 3.0
        assert exposed[at + 1] == pytest.approx(0.0 if age == 60.0 else 2.0, abs=1e-6)


# -- books by hand --------------------------------------------------------------------------------------------------------


class Diary:
    """Lives and idle spells of one pool's cached content, block by block, kept beside the pool by watching its index and its holders."""

    def __init__(self, pool: BlockPool, now: Callable[[], float]) -> None:
        self.pool, self.now = pool, lambda: int(now() * 1e6)
        self.born: dict[int, int] = {}  # by key
        self.idle: dict[int, int] = {}
        self.lives: list[tuple[int, int]] = []
        self.idle_before_eviction: list[int] = []
        self.gaps: list[int] = []
        index, insert, remove, move = pool.index, pool.index.insert, pool.index.remove, pool.index.replace
        release, share = pool.release, pool.share
        moving = [False]

        def inserted(keys: np.ndarray, blocks: np.ndarray) -> None:
            if not moving[0]:
                self.born.update((key, self.now()) for key in keys.tolist())
            insert(keys, blocks)

        def removed(blocks: np.ndarray) -> None:
            if not moving[0]:
                for key in pool.keys[blocks].tolist():
                    self.lives.append((self.born.pop(key), self.now()))
                    self.idle_before_eviction.append(self.now() - self.idle.pop(key))
            remove(blocks)

        def replaced(old: np.ndarray, new: np.ndarray) -> None:
            for key in pool.keys[old].tolist():
                self.idle.pop(key, None)
            moving[0] = True
            move(old, new)
            moving[0] = False

        def released(blocks: np.ndarray) -> None:
            for block in blocks.tolist():
                if pool.refs[block] == 1 and pool.keyed[block]:
                    self.idle[int(pool.keys[block])] = self.now()
            release(blocks)

        def shared(blocks: np.ndarray, *, hit: bool = True) -> None:
            for block in blocks.tolist():
                since = self.idle.pop(int(pool.keys[block]), None)
                if since is not None and hit:
                    self.gaps.append(self.now() - since)
            share(blocks, hit=hit)

        index.insert, index.remove, index.replace = inserted, removed, replaced  # type: ignore[method-assign]
        pool.release, pool.share = released, shared  # type: ignore[method-assign]

    def exposure(self, low: float, high: float) -> float:
        now = self.now()
        ended = sum(end - born > low or low == 0.0 for born, end in self.lives)
        live = sum(min(max((now - born) - low, 0.0) / (high - low), 1.0) for born in self.born.values())
        return ended + live


def told(engine: Engine, family: c.Family, pool: str) -> dict[str, float]:
    """Values of a family of one pool by its last label, or by suffix where it has none."""
    engine.publish()
    rows = next(samples.rows for samples in engine.telemetry.snapshot() if samples.family is family)
    return {row.labels[2] if len(row.labels) > 2 else row.suffix: row.value for row in rows if row.labels[1] == pool}


def spread(seconds: list[float], bounds: tuple[float, ...], *, cumulative: bool = True) -> list[int]:
    """Counts by `bounds`, one value after the other."""
    counts = [0] * (len(bounds) + 1)
    for value in seconds:
        at = next((i for i, bound in enumerate(bounds) if value <= bound), len(bounds))
        for i in range(at, len(counts) if cumulative else at + 1):
            counts[i] += 1
    return counts


def assert_books_agree(engine: Engine, name: str, diary: Diary) -> None:
    ages = [(diary.now() - born) / 1e6 for born in diary.born.values()]
    assert list(told(engine, c.KV_LIVE_AGES, name).values()) == spread(ages, c.SPELL_BOUNDS)
    lived = [(end - born) / 1e6 for born, end in diary.lives]
    assert list(told(engine, c.KV_EVICTED_AGES, name).values()) == spread(lived, c.AGE_BOUNDS, cumulative=False)
    bounds = [0.0, *(bound * 1e6 for bound in c.AGE_BOUNDS)]
    exposed = told(engine, c.KV_EXPOSED, name).values()
    expected = [diary.exposure(low, high) for low, high in pairwise(bounds)]
    assert list(exposed) == pytest.approx(expected, rel=1e-9, abs=1e-9)
    for family, spells in ((c.KV_IDLE_BEFORE_EVICTION, diary.idle_before_eviction), (c.KV_REUSE_GAP, diary.gaps)):
        shown = told(engine, family, name)
        assert [v for k, v in shown.items() if k not in ("_sum", "_count")] == spread(
            [s / 1e6 for s in spells], family.bounds
        )
        assert shown["_count"] == len(spells)
        assert shown["_sum"] == pytest.approx(sum(spells) / 1e6, abs=1e-6)


class RegretByHand:
    """Goes through the blocks of each admitted request one by one, as the cache stood before: what would a larger one have served?"""

    def __init__(self, engine: Engine) -> None:
        self.kv: KVManager = engine.kv
        self.now = engine.executor.clock.now
        self.evicted: dict[tuple[str, int], float] = {}
        self.tokens = dict.fromkeys(c.REGRET_WINDOWS, 0)
        for name, pool in zip(c.POOLS, self.kv.pools, strict=True):
            if pool is not None:
                self._watch(name, pool)
        admit = self.kv.admit

        def admitted(request, spare):  # type: ignore[no-untyped-def]
            first = request.num_generated == 0 and request.num_preemptions == 0
            expected = self._look_up(request) if first else {}
            done = admit(request, spare)
            if done:
                for window, blocks in expected.items():
                    self.tokens[window] += blocks * self.kv.config.block_size
            return done

        self.kv.admit = admitted  # type: ignore[method-assign]

    def _watch(self, name: str, pool: BlockPool) -> None:
        told_before = pool.on_evict

        def evicted(blocks: np.ndarray, keys: np.ndarray) -> None:
            kept = keys if name != "compressed" else host_keys(keys, True)
            self.evicted.update((int(key), self.now()) for key in kept)  # type: ignore[misc]
            assert told_before is not None
            told_before(blocks, keys)

        pool.on_evict = evicted

    def _look_up(self, request) -> dict[str, int]:  # type: ignore[no-untyped-def]
        kv, size = self.kv, self.kv.config.block_size
        keys = [int(k) for k in request.table.keys.get(0, (request.num_tokens - 1) // size)]
        old = 0
        if kv.compressed is not None and request.num_tokens > kv.config.compressed_from:
            old = (request.num_tokens - kv.config.recent_window) // size
        device, compressed, host = ({int(k) for k in p.index.items()[0]} if p is not None else set() for p in kv.pools)

        def packed(key: int) -> int:
            return int(host_keys(np.array([key], dtype=np.uint64), True)[0])

        def on_device(i: int) -> bool:
            return keys[i] in device or (old > 0 and keys[i] in compressed)

        def on_host(i: int) -> bool:
            return (packed(keys[i]) if i < old else keys[i]) in host

        at = 0
        while at < len(keys) and on_device(at):
            at += 1
        while at < len(keys) and on_host(at):
            at += 1
        out = {}
        for window, seconds in c.REGRET_WINDOWS.items():
            end, any_evicted = at, False
            while end < len(keys):
                times = [self.evicted.get(keys[end], -math.inf)]  # type: ignore[call-overload]
                if old:
                    times.append(self.evicted.get(packed(keys[end]), -math.inf))  # type: ignore[call-overload]
                recent = self.now() - max(times) <= seconds
                if not (recent or on_device(end) or on_host(end)):
                    break
                any_evicted |= recent
                end += 1
            out[window] = end - at if any_evicted else 0
        return out


CROWDED = {
    "num_blocks": 60, "num_compressed_blocks": 40, "compressed_from": 64, "recent_window": 16, "contiguous_below": 40,
    "max_num_batched_tokens": 64, "max_model_len": 128, "compaction_seconds": 0.004, "max_queued": 1000,
    "prefetch_warmup_ratio": 0.5, "predictive_admission": True,
    "controller": ControllerConfig(
        interval_seconds=0.05, window_seconds=0.5, min_requests=5, patience=2, min_batched_tokens=16
    ),
}  # fmt: skip


def crowd(engine: Engine, seed: int, steps: int) -> Iterator[int]:
    """Talks that come back, with pauses of seconds to minutes, on pools that hold a fraction of them."""
    dice = random.Random(seed)
    talks = [tokens(i, 120) for i in range(14)]
    clock = engine.executor.clock
    for step in range(steps):
        if engine.num_waiting < 12 and dice.random() < 0.4:
            prompt = [*dice.choice(talks)[: dice.randrange(8, 100)], *tokens(1000 + step, dice.randrange(1, 9))]
            engine.add(
                make_request(prompt, dice.randrange(1, 20), request_class=dice.choice(c.CLASSES), arrival=clock.now())
            )
        if dice.random() < 0.02:
            clock.wait_until(clock.now() + dice.choice([3.0, 40.0, 200.0]))
        engine.step()
        yield step
    engine.run_until_idle()


@pytest.mark.parametrize("host", [0, 90])
def test_each_life_counts_once_whatever_moves_compresses_swaps_or_prefetches_blocks(host: int) -> None:
    engine = make_engine(**CROWDED, num_host_blocks=host)
    diaries = {
        name: Diary(pool, engine.executor.clock.now)
        for name, pool in zip(c.POOLS, engine.kv.pools, strict=True)
        if pool is not None
    }
    for step in crowd(engine, 3, 700):
        engine.check_integrity()
        if step % 50 == 0:
            for name, diary in diaries.items():
                assert_books_agree(engine, name, diary)
    for name, diary in diaries.items():
        assert_books_agree(engine, name, diary)
        assert diary.lives
        assert len(diary.gaps) > 20
    evicted = sum(sum(told(engine, c.KV_EVICTED_AGES, name).values()) for name in ("exact", "compressed"))
    [(_, shown)] = [(f, rows) for f, rows in engine.telemetry.snapshot() if f is c.KV_EVICTED_BLOCKS]
    assert shown[0].value == evicted > 100
    for name, pool in zip(c.POOLS, engine.kv.pools, strict=True):
        if pool is not None:
            assert told(engine, c.KV_LIVE_AGES, name)["+Inf"] == len(pool.index) == np.count_nonzero(pool.keyed)
        else:
            assert not told(engine, c.KV_LIVE_AGES, name)


@pytest.mark.parametrize("host", [0, 40])
@pytest.mark.parametrize("compressed", [0, 40])
def test_regret_counts_what_a_cache_without_the_last_evictions_would_have_served(
    host: int, compressed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("observability.engine.kv.manager._MEMORY_BLOCKS", (1 << 18, 1 << 18))  # forgets nothing
    settings = CROWDED | {"num_compressed_blocks": compressed, "compressed_from": 64 if compressed else 0}
    settings |= {"prefetch_lookahead": 0}
    engine = make_engine(**settings, num_host_blocks=host)
    by_hand = RegretByHand(engine)
    for _ in crowd(engine, 8, 900):
        pass
    rows = next(samples.rows for samples in engine.telemetry.snapshot() if samples.family is c.KV_REGRET)
    shown = {row.labels[1]: row.value for row in rows}
    assert shown == by_hand.tokens
    assert 0 < shown["1m"] < shown["10m"] <= shown["1h"]


def test_a_preempted_requests_own_blocks_are_not_regretted() -> None:  # they are counted as recomputed
    engine = make_engine(num_blocks=34, max_num_seqs=4, contiguous_below=0)
    for i in range(4):
        engine.add(make_request(tokens(i, 30), 60))
    engine.run_until_idle()
    assert any(record.preemptions for record in engine.telemetry.finished)
    rows = next(samples.rows for samples in engine.telemetry.snapshot() if samples.family is c.KV_REGRET)
    assert [row.value for row in rows] == [0, 0, 0]


def test_an_unbounded_pool_has_no_residency() -> None:  # it never evicts
    engine = make_engine(TimedExecutor(), num_blocks=None)
    engine.add(make_request(PromptSpan(40, (1, 2, 3, 4, 5), 8), 4))
    engine.run_until_idle()
    names = {samples.family.name for samples in engine.telemetry.snapshot()}
    assert not names & {f.name for f in (c.KV_LIVE_AGES, c.KV_EVICTED_AGES, c.KV_EXPOSED, c.KV_REUSE_GAP)}
    assert c.KV_REGRET.name in names


# -- the memory of evictions ------------------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 40), st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=25, unique=True), max_size=40))
def test_the_newest_evictions_are_remembered_and_no_more(capacity: int, batches: list[list[int]]) -> None:
    memory = EvictionMemory(capacity)
    for number in range(len(batches)):
        memory.add(np.array(batches[number], dtype=np.uint64), float(number))
        # Whole batches, from the newest back, as long as they fit.
        fits = number + 1
        while fits and sum(map(len, batches[fits - 1 : number + 1])) <= capacity:
            fits -= 1
        known = {key: float(i) for i in range(fits, number + 1) for key in batches[i]}
        forgotten = [i for i in range(fits) if set(batches[i]).difference(*batches[i + 1 : number + 1])]
        keys = np.arange(1, 61, dtype=np.uint64)
        assert memory.times(keys).tolist() == [known.get(key, -math.inf) for key in range(1, 61)]
        assert len(memory) == len(known) <= capacity
        reach = memory.reach(float(number))
        assert reach is None or forgotten
        if forgotten:  # never more than is true
            assert reach is not None
            assert reach <= number - max(forgotten)


def test_a_memory_that_is_too_small_says_how_far_back_it_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("observability.engine.kv.manager._MEMORY_BLOCKS", (8, 8))
    engine = make_engine(num_blocks=32, contiguous_below=0)
    for i in range(6):
        engine.add(make_request(tokens(i, 100), 1))
        engine.run_until_idle()
        engine.executor.clock.wait_until(engine.executor.clock.now() + 5.0)
    engine.publish()
    rows = next(samples.rows for samples in engine.telemetry.snapshot() if samples.family is c.KV_EVICTION_MEMORY)
    assert 0 < rows[0].value <= 10.1
    assert next(rows for f, rows in engine.telemetry.snapshot() if f is c.KV_REGRET)[0].value == 0, (
        "no prefix came back"
    )


# -- bytes ---------------------------------------------------------------------------------------------------------------------


def test_bytes_are_those_of_every_pool() -> None:  # QK3, QK8
    engine = make_engine(**CROWDED, num_host_blocks=30)
    groups: dict[str, set[float]] = defaultdict(set)
    for _ in crowd(engine, 4, 300):
        engine.publish()
        exact, compressed, host = engine.kv.pools
        assert compressed is not None
        assert host is not None
        samples = {f.name: rows for f, rows in engine.telemetry.snapshot()}
        shown = {row.labels[1]: row.value for row in samples[c.KV_BYTES.name]}
        states = [[np.count_nonzero(p.state == s) for s in range(3)] for p in (exact, compressed)]
        assert shown["reserved"] == 60 * 64 + 40 * 16
        assert shown["resident"] == sum(64 * e for e in states[0][1:]) + sum(16 * e for e in states[1][1:])
        assert shown["active"] == 64 * states[0][2] + 16 * states[1][2]
        for kind, value in shown.items():
            groups[kind].add(value)
    assert len(groups["resident"]) > 5
    assert len(groups["active"]) > 5
