"""Random but consistent scrapes of two engines, for the tests that compare with a real Prometheus.

Counters come from simulated requests, so that cumulative families (buckets, tail bounds) hang together as an exporter's do.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import Counter, defaultdict

from observability import catalog as c
from observability.catalog import Family
from observability.store.evaluate import Key

#: The large engine does not export these buckets, which other exporters leave out when they are empty.
MISSING_BUCKETS = (("le", "0.315"), ("le", "0.4"), ("le", "0.05"))


def key(family: Family, *values: str) -> Key:
    names = (*family.labels, "le") if family.kind == "histogram" else family.labels
    return family.series, tuple(zip(names, values, strict=True))


class FakeEngine:
    """One engine's exposition. `step` lets some requests pass; `restart` sets every counter to 0."""

    def __init__(self, model: str, seed: int) -> None:
        self.model = model
        self.random = random.Random(seed)
        self.classes = ["standard"]
        self.values: dict[Key, float] = {}
        self.restart()

    def restart(self) -> None:
        self.values.clear()
        self.counts: Counter[str] = Counter()
        self.histograms: dict[tuple[Family, tuple[str, ...]], list[float]] = {}

    def add(self, family: Family, amount: float, *labels: str) -> None:
        name = key(family, self.model, *labels)
        self.values[name] = self.values.get(name, 0.0) + amount

    def observe(self, family: Family, value: float, *labels: str) -> None:
        cells = self.histograms.setdefault((family, labels), [0.0] * (len(family.bounds) + 1))
        cells[bisect_left(family.bounds, value)] += 1
        total = 0.0
        for bound, count in zip([*map(float, family.bounds), "+Inf"], cells, strict=True):
            total += count
            self.values[key(family, self.model, *labels, str(bound))] = total

    def step(self, requests: int, *, quantized: bool) -> None:
        rng = self.random
        for _ in range(requests):
            request_class = rng.choice(self.classes)
            self.add(c.REQUESTS_RECEIVED, 1, request_class)
            self.add(c.REQUESTS, 1, request_class, rng.choice(c.OUTCOMES))
            duration = rng.lognormvariate(0.5, 1.3)
            self.observe(c.REQUEST_DURATION, duration, request_class)
            stalled = self.model == "large" and rng.random() < 0.05  # above the highest bound
            self.observe(c.TIME_TO_FIRST_TOKEN, 700.0 if stalled else rng.lognormvariate(-1, 1.2), request_class)
            tenant = rng.choice(("acme", "other"))
            self.add(c.TENANT_REQUESTS, 1, tenant, rng.choice(c.OUTCOMES))
            self.add(c.TENANT_TOKENS, rng.randrange(900), tenant, rng.choice(c.TENANT_TOKEN_KINDS))
            self.observe(c.TENANT_TTFT, rng.lognormvariate(-0.5, 1.0), tenant)
            for _ in range(8):
                self.observe(c.INTER_TOKEN_LATENCY, rng.lognormvariate(-3, 0.8), request_class)
            parts: dict[tuple[str, str], float] = defaultdict(float)
            for _ in range(5):
                parts[rng.choice(c.STATES[:2]), rng.choice(c.COMPONENTS[4:7])] += duration / 5
            prompt = int(rng.lognormvariate(8, 1.5))
            length = c.LENGTH_BUCKETS[c.length_bucket(prompt)]
            for bound in c.TAIL_BOUNDS:
                slower = duration > bound
                self.add(c.PHASE_REQUESTS, slower, f"{bound:g}")
                self.add(c.PHASE_LENGTH_REQUESTS, slower, length, f"{bound:g}")
                self.add(c.PHASE_LENGTH_SECONDS, duration * slower, length, f"{bound:g}")
                for (state, component), seconds in parts.items():
                    self.add(c.PHASE_SECONDS, seconds * slower, state, component, f"{bound:g}")
            self.add(c.PROMPT_TOKENS, prompt, request_class)
            self.add(c.GENERATION_TOKENS, 9, request_class)
            self.add(c.KV_QUERIED_TOKENS, prompt, length)
            self.add(c.KV_HITTABLE_TOKENS, prompt // 16 * 16, length)
            self.add(c.KV_HIT_TOKENS, rng.randrange(prompt + 1), length, "device")
            self.add(c.STALLS, duration > 5)
            self.add(c.STALL_SECONDS, duration / 5 if duration > 5 else 0)
            self.add(c.PREEMPTIONS, rng.random() < 0.1, "kv_exhausted")
            self.add(c.KV_EVICTED_BLOCKS, rng.randrange(5))
            self.add(c.KV_PREFETCH_BLOCKS, rng.randrange(5), rng.choice(("issued", "useful", "late", "wasted")))
            self.add(c.KV_MOVED_BLOCKS, rng.randrange(9), rng.choice(("compaction", "offload", "load")))
            self.add(c.KV_LAYOUT_FALLBACKS, rng.random() < 0.2)
            self.add(c.KV_RECOMPUTED_TOKENS, rng.randrange(200), "kv_exhausted")
            kind = rng.choice(("prefill", "decode", "mixed"))
            self.add(c.STEPS, 1, kind)
            self.observe(c.STEP_DURATION, rng.lognormvariate(-4, 1), kind)
            self.observe(c.PREFILL_SPREAD, 1 + rng.lognormvariate(0, 1))
            self.add(c.BATCH_SPLITS, rng.random() < 0.2)
            self.add(c.QUEUE_PROMOTIONS, rng.random() < 0.1, request_class)
            self.add(
                c.CONTROLLER_CHANGES,
                rng.random() < 0.1,
                rng.choice(c.CONTROLLER_RULES),
                rng.choice(c.CONTROLLER_ACTIONS),
            )
            self.add(c.REQUESTS_DEGRADED, rng.random() < 0.1, rng.choice(c.CONTROLLER_RULES))
            self.add(c.STEP_TOKENS, prompt, "prefill")
            self.add(c.STEP_TOKENS, 9, "decode")
            if quantized:
                for tensor in c.TENSORS:
                    signal = rng.uniform(50, 100)
                    self.add(c.KV_QUANT_SIGNAL, signal, tensor, "00-09", "int8")
                    self.add(c.KV_QUANT_ERROR, signal * rng.uniform(2e-5, 9e-5), tensor, "00-09", "int8")
                    self.observe(c.KV_QUANT_MAXIMUM, rng.uniform(0.02, 0.2), tensor, "00-09", "int8")
                self.add(c.KV_QUANT_ATTENTION_SIGNAL, signal, "00-09", "int8")
                self.add(c.KV_QUANT_ATTENTION_ERROR, signal * rng.uniform(2e-5, 9e-5), "00-09", "int8")
                self.add(c.KV_QUANT_COMPARED, 3, "int8")
                self.add(c.KV_QUANT_AGREED, rng.randrange(2, 4), "int8")
                self.add(c.KV_QUANT_DIVERGENCE, rng.expovariate(1000.0), "int8")
                self.observe(c.REQUEST_QUANT_ERROR, rng.lognormvariate(-4, 0.5), "int8")
            self.lives()
            for i, window in enumerate(c.REGRET_WINDOWS):
                self.add(c.KV_REGRET, i + rng.randrange(prompt // 4 + 1), window)
        for component in c.COMPONENTS:
            self.add(c.STEP_SECONDS, rng.random(), component)
        for reason in c.ANOMALIES:
            self.add(c.ANOMALIES_TOTAL, rng.random() < 0.05, reason)

        # without a model: the GPU of the host
        hidden = rng.random()
        self.add(c.KV_COPY_SECONDS, hidden, "hidden")
        self.add(c.KV_COPY_SECONDS, 1 - hidden, "exposed")

    def lives(self) -> None:
        """Some blocks move through the life table. Of the large engine hardly any are evicted, so its median lifetime is unknown; nothing of
        the small one's host tier reaches a minute."""
        rng = self.random
        for pool, longest in (("exact", 20), ("host", 12)):
            for _ in range(3):
                reached = rng.randrange(longest)
                for age in c.AGE_LABELS:  # all of them exist from the start
                    self.add(c.KV_EVICTED_AGES, 0, pool, age)
                for age in c.AGE_LABELS[:-1]:
                    self.add(c.KV_EXPOSED, 0, pool, age)
                for age in c.AGE_LABELS[:reached]:
                    self.add(
                        c.KV_EXPOSED, rng.uniform(0.5, 1.0), pool, age
                    )  # so that no survival is exactly a quantile
                if rng.random() < (0.9 if self.model == "small" else 0.3):
                    self.add(c.KV_EXPOSED, 1, pool, c.AGE_LABELS[reached])
                    self.add(c.KV_EVICTED_AGES, 1, pool, c.AGE_LABELS[reached])
                    self.observe(c.KV_IDLE_BEFORE_EVICTION, rng.lognormvariate(1, 2), pool)
                else:
                    self.add(c.KV_EXPOSED, rng.random(), pool, c.AGE_LABELS[reached])
                    self.observe(c.KV_REUSE_GAP, rng.lognormvariate(0, 2), pool)

    def gauges(self, now: float) -> None:
        rng, model = self.random, self.model

        def put(family: Family, value: float, *labels: str) -> None:
            self.values[key(family, model, *labels)] = value

        regions = {region: rng.choices(range(17), k=3) for region in c.REGION_LABELS}
        blocks = [float(sum(region[i] for region in regions.values())) for i in range(3)]
        for i, state in enumerate(c.BLOCK_STATES):
            put(c.KV_BLOCKS, blocks[i], state)
            for region, counts in regions.items():
                put(c.KV_REGION_BLOCKS, counts[i], region, state)
        for region, counts in regions.items():
            put(c.KV_REGION_FREE_RUN, rng.randint(0, counts[0] + counts[1]), region)
        put(c.KV_CAPACITY_BLOCKS, sum(blocks))
        put(c.KV_BLOCK_SIZE, 16)
        for kind in ("reserved", "resident", "active"):
            put(c.KV_BYTES, rng.randrange(1 << 30), kind)
        put(c.KV_STORED_TOKENS, rng.uniform(0.3, 1.0) * 16 * blocks[2])
        put(c.KV_LARGEST_FREE_RUN, rng.randint(0, int(blocks[0] + blocks[1])))
        for layout in ("contiguous", "paged"):
            put(c.KV_LAYOUT_BLOCKS, rng.randrange(300), layout)
        live = 0
        for bound in (*map(float, c.AGE_BOUNDS), "+Inf"):
            live += rng.randrange(3)
            put(c.KV_LIVE_AGES, live, "exact", str(bound))
        runs = 0
        for bound in (*c.FREE_RUN_BOUNDS, "+Inf"):
            runs += rng.randrange(3)
            put(c.KV_FREE_RUNS, runs, str(bound))
        for request_class in self.classes:
            put(c.REQUESTS_RUNNING, rng.randrange(30), request_class)
            put(c.REQUESTS_WAITING, rng.randrange(4), request_class)
        put(c.LIMIT_BATCHED_TOKENS, rng.choice((512, 1024)))
        put(c.LIMIT_PREFILLS, rng.choice((1, 4)))
        put(c.SOURCE_FAMILY, 1, "vllm", c.KV_BLOCKS.name, "partial", "free and evictable together, as allocatable")
        put(c.LAST_UPDATE, now - rng.random(), "engine")
        put(c.ENGINE, 1, "roofline", "virtual" if model == "large" else "real", "cpu", "auto", "1")


class FakeTarget:
    """Two engines behind one endpoint: idle at first, classes and quantized KV that appear late, restarts."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.engines = [FakeEngine("small", seed + 1), FakeEngine("large", seed + 2)]
        self.scrapes = 0
        self.throttled = {"0": 0.0, "1": 0.0}

    def scrape(self, now: float) -> dict[Key, float]:
        self.scrapes += 1
        for engine in self.engines:
            if self.scrapes > 25:
                engine.classes = ["standard", "interactive", "long_context"]
            idle = self.scrapes % 40 > 30 and engine.model == "small"
            requests = 0 if idle else self.random.randrange(5)
            if self.random.random() < 0.03:
                engine.restart()
            engine.step(requests, quantized=self.scrapes > 15)
            engine.gauges(now)
        values = {k: v for engine in self.engines for k, v in engine.values.items()} | self.gpus()
        return {k: v for k, v in values.items() if not (("model", "large") in k[1] and k[1][-1] in MISSING_BUCKETS)}

    def gpus(self) -> dict[Key, float]:
        """Two GPUs of the host; the second has no profiler and its throttling starts anew now and then."""
        rng = self.random
        values = {key(c.HARDWARE_STATUS, "dram_active", "measured", "none"): 1.0}
        if self.scrapes > 30:
            values[key(c.HARDWARE_STATUS, "l2_hit", "unavailable", "no_profiler")] = 1.0
        for index in ("0", "1"):
            gpu = (index, f"GPU-{index}", "none")
            values[key(c.GPU_HEALTH, *gpu)] = rng.random()
            values[key(c.GPU_PENALTY, *gpu, "hot")] = rng.choice((0.0, 0.1))
            for unit in ("sm", "memory"):
                values[key(c.GPU_UTILIZATION, *gpu, unit)] = rng.random()
            values[key(c.GPU_MEMORY, *gpu, "used")] = rng.randrange(1 << 36)
            throttled = key(c.GPU_THROTTLED, *gpu, "power")
            self.throttled[index] = 0.0 if rng.random() < 0.03 else self.throttled[index] + rng.random()
            values[throttled] = self.throttled[index]
            if index == "0":
                for unit in ("dram", "l2_hit"):
                    values[key(c.GPU_PROFILED_RATIO, *gpu, unit)] = rng.random()
        return values


def sample_line(name: Key) -> str:
    labels = ",".join(f'{label}="{value}"' for label, value in name[1])
    return f"{name[0]}{{{labels}}}"


def openmetrics(scrapes: dict[float, dict[Key, float]]) -> str:
    """All scrapes as one OpenMetrics text with timestamps, one family at a time, each series in time order."""
    series: dict[Key, list[tuple[float, float]]] = {}
    for time, values in scrapes.items():
        for name, value in values.items():
            series.setdefault(name, []).append((time, value))
    lines = [f"{sample_line(name)} {value!r} {time:.3f}" for name in sorted(series) for time, value in series[name]]
    return "\n".join([*lines, "# EOF\n"])
