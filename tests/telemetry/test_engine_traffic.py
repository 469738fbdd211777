"""A real engine under a load that fills its pool: every family moves, and all numbers reconcile with the requests (QD7, QA4)."""

from __future__ import annotations

import math
from collections import Counter, defaultdict

import numpy as np
import pytest

from observability import catalog as c
from observability.telemetry.recorder import RequestRecord, Telemetry
from tests.telemetry.bench import total, value

torch = pytest.importorskip("torch")

from observability.engine.clock import MonotonicClock, VirtualClock  # noqa: E402
from observability.engine.engine import Engine  # noqa: E402
from observability.engine.executor.hardware import GPUS  # noqa: E402
from observability.engine.executor.roofline import RooflineExecutor  # noqa: E402
from observability.engine.executor.torch_executor import TorchExecutor  # noqa: E402
from observability.engine.model.costs import MODELS  # noqa: E402
from observability.engine.model.loading import load_model  # noqa: E402
from observability.engine.types import EngineConfig, PromptSpan, Request, SamplingParams  # noqa: E402
from observability.errors import QueueFullError, RequestError  # noqa: E402

#: Families that must not move in a healthy run, or are constant by nature, or are those of foreign engines.
CONSTANT = {
    c.ENGINE,
    *c.FOREIGN_FAMILIES,
    c.ANOMALIES_TOTAL,
    c.KV_BLOCK_SIZE,
    c.KV_CAPACITY_BLOCKS,
    c.KV_BYTES_PER_TOKEN,
}
#: Of mechanisms that are switched off here, see test_mechanism_traffic.
OF_MECHANISMS = {
    c.KV_LAYOUT_CHANGES, c.KV_COMPRESSED_BLOCKS, c.KV_FIXED_BYTES, c.KV_FIXED_PER_SEQUENCE, c.KV_HOST_BLOCKS, c.KV_MOVED_BLOCKS, c.KV_MOVE_SECONDS,
    c.KV_COMPACTION_RECOVERED, c.KV_PREFETCH_BLOCKS, c.KV_SWITCH_LOSS, c.PREFILL_SPREAD, c.BATCH_SPLITS, c.QUEUE_PROMOTIONS,
    c.LIMIT_BATCHED_TOKENS, c.LIMIT_PREFILLS, c.CONTROLLER_CHANGES, c.REQUESTS_DEGRADED, c.SESSION_SNAPSHOTS, c.SESSION_STARTS, c.SESSION_TOKENS,
}  # fmt: skip
#: Need a crowded cache whose content is asked for again, see test_residency.
OF_RESIDENCY = {c.KV_REGRET, c.KV_EVICTION_MEMORY}
#: Nothing holds the engine up here, see test_stalls.
OF_STALLS = {c.STALLS, c.STALL_SECONDS, c.STALL_GAPS, c.STALL_GAP_SECONDS, c.STALL_GAP_SQUARES}
#: Written by the exporter, see test_exporter.
OF_THE_EXPORTER = {c.SCRAPE_SECONDS, c.SCRAPE_SERIES}
#: Of GPUs and copies to them, see tests/gpu; of forecasts, see tests/forecast/test_exporter.py.
OF_GPUS = {*c.HOST_FAMILIES, c.KV_COPY_SECONDS, *c.FORECAST_FAMILIES}


class Traffic:
    """Serves a load of three classes with shared prefixes; some clients leave while queued, prefilling and decoding."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        clock = MonotonicClock()
        self.records: list[RequestRecord] = []
        self.t = Telemetry(
            "tiny",
            executor="torch",
            virtual=False,
            device="cpu",
            kv_dtype="int8",
            clock=clock.now,
            on_finish=self.records.append,
        )
        config = EngineConfig(
            block_size=16, num_blocks=40, max_num_seqs=8, max_num_batched_tokens=96, max_model_len=320, max_queued=40,
            contiguous_below=120, kv_dtype="int8", quant_sample_rate=1.0, quant_compare_rate=0.5,
        )  # fmt: skip
        self.engine = Engine(config, TorchExecutor(load_model("tiny"), config, self.t, clock=clock), self.t)
        self.seen: dict[str, set[float]] = defaultdict(set)
        self.requests: list[Request] = []
        self.refused: Counter[str] = Counter()  # by outcome
        self.unaccounted: set[float] = set()  # received - ended - running - waiting, after each step

    def run(self) -> None:
        rng = np.random.default_rng(1)
        self.observe()
        shared = rng.integers(3, 250, 64).tolist()
        for i in range(40):
            own = rng.integers(3, 250, int(rng.integers(4, 160))).tolist()
            self.add(Request(
                f"r{i}", (shared + own) if i % 2 else own,
                SamplingParams(max_tokens=int(rng.integers(1, 80)), ignore_eos=True),
                request_class=c.CLASSES[i % 3], arrival=self.engine.executor.clock.now(), tenant=("", "acme", "zeta")[i % 3],
            ))  # fmt: skip
        self.add(
            Request("odd", shared, SamplingParams(), request_class="vip", arrival=self.engine.executor.clock.now())
        )
        self.add(Request("full", shared, SamplingParams(), arrival=self.engine.executor.clock.now()))
        self.add(Request("long", shared * 9, SamplingParams(), arrival=self.engine.executor.clock.now()))
        steps = 0
        while self.engine.step():
            steps += 1
            if steps in (1, 4, 12, 30):
                for held in (
                    self.engine.scheduler.waiting(),
                    self.engine.scheduler.prefilling,
                    self.engine.scheduler.decoding,
                ):
                    for request in list(held)[:1]:
                        self.engine.abort(request)
            self.engine.publish()
            self.observe()
            self.unaccounted.add(
                total(self.t, "kvscope_requests_received_total") - total(self.t, "kvscope_requests_total")
                - total(self.t, "kvscope_requests_running") - total(self.t, "kvscope_requests_waiting")
            )  # fmt: skip
            assert steps < 5000
        self.engine.step()
        self.observe()

    def add(self, request: Request) -> None:
        try:
            self.engine.add(request)
            self.requests.append(request)
        except QueueFullError:
            self.refused["rejected"] += 1
        except RequestError:
            self.refused["invalid"] += 1

    def observe(self) -> None:
        for family, rows in self.t.snapshot():
            self.seen[family.name].add(round(sum(row.value * (i + 1) for i, row in enumerate(rows)), 9))


@pytest.fixture(scope="module")
def traffic() -> Traffic:
    traffic = Traffic()
    traffic.run()
    return traffic


@pytest.mark.parametrize(
    "family",
    [f for f in c.FAMILIES if f not in CONSTANT | OF_THE_EXPORTER | OF_MECHANISMS | OF_RESIDENCY | OF_STALLS | OF_GPUS],
    ids=lambda f: f.name,
)
def test_every_family_changes_under_traffic(traffic: Traffic, family: c.Family) -> None:
    assert len(traffic.seen[family.name]) > 1, f"{family.name} never moved"


def test_a_healthy_run_has_no_anomaly(traffic: Traffic) -> None:
    anomalies = {reason: value(traffic.t, "kvscope_telemetry_anomalies_total", reason=reason) for reason in c.ANOMALIES}
    assert not any(anomalies.values()), anomalies


def test_at_every_step_what_was_received_has_ended_or_is_here(traffic: Traffic) -> None:
    assert traffic.unaccounted == {0.0}


def test_what_was_received_has_ended(traffic: Traffic) -> None:
    t = traffic.t
    assert (
        total(t, "kvscope_requests_received_total")
        == total(t, "kvscope_requests_total")
        == len(traffic.requests) + traffic.refused.total()
    )
    for outcome in c.REFUSED_OUTCOMES:
        assert total(t, "kvscope_requests_total", outcome=outcome) == traffic.refused[outcome] >= 1
    outcomes = [r.outcome for r in traffic.requests]
    for outcome in ("stop", "length", "abort", "error"):
        assert total(t, "kvscope_requests_total", outcome=outcome) == outcomes.count(outcome)
    assert outcomes.count("abort") >= 6
    assert total(t, "kvscope_requests_running") == total(t, "kvscope_requests_waiting") == 0


def test_token_counters_reconcile_with_the_requests(traffic: Traffic) -> None:
    t = traffic.t
    generated = [r.num_generated for r in traffic.requests]
    assert (
        total(t, "kvscope_generation_tokens_total")
        == sum(generated)
        == sum(r.generated_tokens for r in traffic.records)
    )
    prefilled = [r.prompt_len for r in traffic.requests if r.num_generated]
    assert total(t, "kvscope_prompt_tokens_total") == sum(prefilled)
    assert total(t, "kvscope_time_to_first_token_seconds_count") == len(prefilled)
    assert total(t, "kvscope_inter_token_latency_seconds_count") == sum(n - 1 for n in generated if n)
    assert total(t, "kvscope_kv_hit_tokens_total") == sum(r.num_cached for r in traffic.requests)
    computed = total(t, "kvscope_step_tokens_total")
    aborted_in_prefill = sum(r.prompt_len for r in traffic.requests if not r.num_generated)
    needed = sum(r.prompt_len - r.num_cached + r.num_generated - 1 for r in traffic.requests if r.num_generated)
    assert needed <= computed <= needed + aborted_in_prefill + total(t, "kvscope_kv_recomputed_tokens_total")


def test_what_tenants_have_is_what_their_requests_had(traffic: Traffic) -> None:
    t = traffic.t
    for tenant in ("acme", "zeta"):
        own = [r for r in traffic.requests if r.tenant == tenant]
        for outcome in c.OUTCOMES:
            ended = sum(r.outcome == outcome for r in own)
            shown = value(t, "kvscope_tenant_requests_total", tenant=tenant, outcome=outcome)
            assert shown == ended or (math.isnan(shown) and not ended)  # absent: no tenant had it
        firsts = [r for r in own if r.num_generated]
        assert value(t, "kvscope_tenant_time_to_first_token_seconds_count", tenant=tenant) == len(firsts)
        assert value(t, "kvscope_tenant_tokens_total", tenant=tenant, kind="prompt") == sum(
            r.prompt_len for r in firsts
        )
        generated = sum(r.num_generated for r in own)
        assert value(t, "kvscope_tenant_tokens_total", tenant=tenant, kind="generation") == generated > 0


def test_phases_of_real_requests_sum_to_their_latency(traffic: Traffic) -> None:
    assert len(traffic.records) == len(traffic.requests)
    for record in traffic.records:
        assert record.matrix.sum() == pytest.approx(
            record.finished - record.arrival, abs=1e-9 * max(1.0, record.finished)
        )
        assert record.matrix.min() >= 0.0
    served = [r for r in traffic.records if r.outcome in ("stop", "length")]
    exported = total(traffic.t, "kvscope_request_phase_seconds_total", gt="0")
    assert exported == pytest.approx(sum(r.finished - r.arrival for r in served))
    assert exported == pytest.approx(total(traffic.t, "kvscope_request_duration_seconds_sum"))
    assert any(r.preemptions for r in traffic.records)


def test_step_seconds_sum_to_the_engines_uptime(traffic: Traffic) -> None:
    t = traffic.t
    assert total(t, "kvscope_step_seconds_total") == pytest.approx(t.last - t.start)
    assert math.isclose(total(t, "kvscope_steps_total"), total(t, "kvscope_step_duration_seconds_count"))


def test_idle_gauges_match_an_empty_pool(traffic: Traffic) -> None:  # QG1
    t = traffic.t
    assert value(t, "kvscope_kv_blocks", state="active") == value(t, "kvscope_kv_stored_tokens") == 0
    assert (
        total(t, "kvscope_kv_blocks")
        == total(t, "kvscope_kv_region_blocks")
        == value(t, "kvscope_kv_capacity_blocks")
        == 40
    )
    assert total(t, "kvscope_kv_layout_blocks") == 0


def test_virtual_time_adds_up_too() -> None:
    """The same engine on the roofline executor, with runs of decode steps taken at once and long idle times."""
    clock = VirtualClock()
    config = EngineConfig(num_blocks=2000, max_num_seqs=16, max_model_len=8192, max_queued=500)
    records: list[RequestRecord] = []
    t = Telemetry(
        "llama",
        executor="roofline",
        virtual=True,
        device="h100",
        kv_dtype="auto",
        clock=clock.now,
        on_finish=records.append,
    )
    executor = RooflineExecutor(MODELS["llama-3-8b"], GPUS["H100"], config, t, clock=clock)
    rng = np.random.default_rng(2)
    arrivals = np.cumsum(rng.exponential(0.4, 400) + 100.0 * (rng.random(400) < 0.02))
    requests = [
        Request(f"v{i}", PromptSpan(length, tuple(rng.integers(0, 40, length // 512 + 1).tolist())),
                SamplingParams(max_tokens=int(rng.integers(1, 400))), arrival=float(arrival))
        for i, (arrival, length) in enumerate(zip(arrivals, rng.integers(50, 6000, 400).tolist(), strict=True))
    ]  # fmt: skip
    Engine(config, executor, t).run(requests)
    assert len(records) == 400
    assert {r.outcome for r in records} == {"length"}
    for record, request in zip(sorted(records, key=lambda r: int(r.request_id[1:])), requests, strict=True):
        assert record.arrival == request.arrival
        assert record.matrix.sum() == pytest.approx(record.finished - record.arrival, abs=1e-9 * record.finished)
        assert record.generated_tokens == request.params.max_tokens
    assert total(t, "kvscope_inter_token_latency_seconds_count") == sum(r.generated_tokens - 1 for r in records)
    itl_sum = sum(
        r.finished - (r.first_token or 0.0) for r in records
    )  # consecutive intervals add up to the decode time
    assert total(t, "kvscope_inter_token_latency_seconds_sum") == pytest.approx(itl_sum)
    assert total(t, "kvscope_step_seconds_total") == pytest.approx(clock.now())
    assert total(t, "kvscope_telemetry_anomalies_total") == 0
