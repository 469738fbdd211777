"""Executors whose results can be foretold, so that tests know what the engine must hand out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from observability.engine.clock import VirtualClock
from observability.engine.engine import Engine
from observability.engine.types import EngineConfig, PromptSpan, Request, SamplingParams, StepPlan, StepResult
from observability.telemetry.recorder import Telemetry

VOCABULARY = 5


def chain(tokens: Sequence[int]) -> list[int]:
    """A value for each position that depends on all tokens up to it, as the KV of a causal model does."""
    values, value = [], 1
    for token in tokens:
        value = (value * 6364136223846793005 + token + 1442695040888963407) % 2**61
        values.append(value)
    return values


def next_token(tokens: Sequence[int]) -> int:
    """What the model of these tests samples behind `tokens`."""
    return chain(tokens)[-1] // 7 % VOCABULARY


def generate(prompt: Sequence[int], limit: int, stop: frozenset[int] = frozenset()) -> list[int]:
    """The output that `prompt` must get, computed without engine, cache or batching."""
    tokens = list(prompt)
    for _ in range(limit):
        tokens.append(next_token(tokens))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]


class Trip:
    """A load on its way in virtual time."""

    def __init__(self, clock: VirtualClock, ready_at: float, arrive: Callable[[], None]) -> None:
        self.ready_at: float | None = ready_at
        self._clock, self._when, self._arrive = clock, ready_at, arrive
        self.arrived = False

    def done(self) -> bool:
        if not self.arrived and self._clock.now() >= self._when:
            self.arrived = True
            self._arrive()
        return self.arrived

    def wait(self) -> None:
        self._clock.wait_until(self._when)
        self.done()


class _Moves:
    """Moves of blocks that cost time and, with `stored`, content: what is on its way can be read only once it has arrived."""

    kv_bytes_per_block = 64
    kv_bytes_per_compressed_block = 16
    kv_fixed_bytes_per_sequence = 0
    move_seconds = 0.001  # each block
    prefill_seconds = 0.01  # each token, as estimated
    clock: VirtualClock
    block_size = 0

    def __init__(self) -> None:
        self.stored: dict[tuple[int, int], int] = {}
        self.slots: dict[int, dict[int, int]] = {}
        self.moves: list[tuple[str, list[tuple[int, int]]]] = []
        self._trips: list[Trip] = []

    def _arrivals(self) -> None:
        self._trips = [trip for trip in self._trips if not trip.done()]

    def _content(self, block: int) -> dict[int, int]:
        return {i: self.stored[block, i] for i in range(self.block_size) if (block, i) in self.stored}

    def _write(self, block: int, content: dict[int, int]) -> None:
        for i in range(self.block_size):
            self.stored.pop((block, i), None)
        self.stored.update(((block, i), value) for i, value in content.items())

    def _spend(self, kind: str, pairs: Sequence[tuple[int, int]]) -> None:
        self._arrivals()
        self.moves.append((kind, list(pairs)))
        self.clock.wait_until(self.clock.now() + self.move_seconds * len(pairs))

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        contents = [self._content(source) for source, _ in pairs]
        for (_, target), content in zip(pairs, contents, strict=True):
            self._write(target, content)
        self._spend("copy", pairs)

    def compress_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            content = self._content(source)
            assert not self.block_size or len(content) == self.block_size or not self.stored, "only full blocks"
            self._write(target, content)
        self._spend("compress", pairs)

    def offload_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for block, slot in pairs:
            self.slots[slot] = self._content(block)
        self._spend("offload", pairs)

    def load_blocks(self, pairs: Sequence[tuple[int, int]]) -> Trip:
        self.moves.append(("load", list(pairs)))
        for _, block in pairs:
            self._write(block, {})

        def arrive() -> None:
            for slot, block in pairs:
                self._write(block, self.slots[slot])

        trip = Trip(self.clock, self.clock.now() + self.move_seconds * len(pairs), arrive)
        self._trips.append(trip)
        return trip

    def export_blocks(self, blocks: Sequence[int]) -> dict[str, np.ndarray]:
        rows = [[self.stored[block, i] for i in range(self.block_size)] for block in blocks]
        return {"kv": np.array(rows, dtype=np.int64).reshape(len(blocks), self.block_size)}

    def import_blocks(self, blocks: Sequence[int], payload: dict[str, np.ndarray]) -> None:
        for block, row in zip(blocks, payload["kv"].tolist(), strict=True):
            self._write(block, dict(enumerate(row)))

    def recompute_seconds(self, tokens: int) -> float:
        return tokens * self.prefill_seconds

    def transfer_seconds(self, blocks: int) -> float:
        return blocks * self.move_seconds

    def copy_seconds(self, blocks: int) -> float:
        return blocks * self.move_seconds

    def release(self, request: Request) -> None:
        pass


class CheckingExecutor(_Moves):
    """A model whose KV is one number by position. Each step checks that the blocks of a request hold exactly the KV of its own tokens
    before it reads them, so a block that is shared wrongly, given away too early or never computed fails the step."""

    device = "test"

    def __init__(self, block_size: int, step_seconds: float = 0.01) -> None:
        self.clock = VirtualClock()
        self.block_size = block_size
        super().__init__()
        self.step_seconds = step_seconds
        self.plans: list[tuple[list[tuple[str, int, int]], list[str]]] = []
        self.fail: Exception | None = None

    def execute(self, plan: StepPlan, until: float | None) -> StepResult:
        if self.fail is not None:
            raise self.fail
        self._arrivals()
        self.plans.append(
            ([(c.request.request_id, c.start, c.tokens) for c in plan.prefill], [r.request_id for r in plan.decode])
        )
        tokens = [
            token
            for chunk in plan.prefill
            for token in self._forward(chunk.request, chunk.start, chunk.tokens, chunk.samples)
        ]
        for request in plan.decode:
            tokens += self._forward(request, request.num_computed, 1, True)
        self.clock.wait_until(self.clock.now() + self.step_seconds)
        return StepResult(np.array([self.clock.now()]), tokens)

    def _forward(self, request: Request, start: int, count: int, samples: bool) -> list[int]:
        assert not isinstance(request.prompt, PromptSpan)
        assert request.table is not None
        known = [*request.prompt, *request.output]
        assert start + count <= len(known)
        assert samples == (start + count == len(known)), "a token is sampled exactly when all known tokens are stored"
        values, size, blocks = chain(known), self.block_size, request.table.blocks
        for i in range(start, start + count):
            self.stored[blocks[i // size], i % size] = values[i]
        for i in range(start + count):
            assert self.stored[blocks[i // size], i % size] == values[i], (
                f"{request.request_id} reads foreign KV at {i}"
            )
        return [next_token(known)] if samples else []


class TimedExecutor(_Moves):
    """Virtual time with a constant cost by step and by prefill token. Fast-forwards unless told not to."""

    device = "test"

    def __init__(self, step_seconds: float = 0.02, token_seconds: float = 1e-5, *, fast_forward: bool = True) -> None:
        super().__init__()
        self.clock = VirtualClock()
        self.step_seconds = step_seconds
        self.token_seconds = token_seconds
        self.fast_forward = fast_forward

    def execute(self, plan: StepPlan, until: float | None) -> StepResult:
        seconds = self.step_seconds + self.token_seconds * sum(chunk.tokens for chunk in plan.prefill)
        # Summed one by one: a run must end at the very same float as single steps.
        ends = [self.clock.now() + seconds]
        while self.fast_forward and len(ends) < plan.repeats and (until is None or ends[-1] < until):
            ends.append(ends[-1] + seconds)
        self.clock.wait_until(ends[-1])
        return StepResult(np.array(ends), None)


def make_engine(
    executor: CheckingExecutor | TimedExecutor | None = None, *, eos: frozenset[int] = frozenset(), **settings: object
) -> Engine:
    """An engine over real telemetry; by default with the checking executor, blocks of 4 tokens and a small pool."""
    small = {"block_size": 4, "num_blocks": 64, "max_model_len": 128, "max_num_batched_tokens": 32, "max_num_seqs": 8}
    config = EngineConfig(**{**small, **settings})  # type: ignore[arg-type]
    executor = executor or CheckingExecutor(config.block_size)
    telemetry = Telemetry(
        "test",
        executor="test",
        virtual=True,
        device="test",
        kv_dtype=config.kv_dtype,
        clock=executor.clock.now,
        wall_clock=executor.clock.now,
        keep_finished=100_000,
    )
    return Engine(config, executor, telemetry, eos)  # type: ignore[arg-type]


def tokens(seed: int, count: int) -> list[int]:
    """`count` token ids drawn from a wide range, so that two seeds share no block."""
    return np.random.default_rng(seed).integers(0, 1 << 30, count).tolist()


_names: Iterator[int] = iter(range(10**9))


def make_request(prompt: Sequence[int] | PromptSpan, max_tokens: int = 4, **fields: object) -> Request:
    params = SamplingParams(max_tokens=max_tokens, stop_token_ids=fields.pop("stop", frozenset()))  # type: ignore[arg-type]
    return Request(f"r{next(_names)}", prompt, params, **fields)  # type: ignore[arg-type]


class Exposition:
    """What the exporter would write now."""

    def __init__(self, engine: Engine) -> None:
        self.families = {samples.family.name: samples for samples in engine.telemetry.snapshot()}

    def value(self, family: str, **labels: str) -> float:
        """Sum of a family's samples over the label values given."""
        samples = self.families[family]
        rows = [
            row.value
            for row in samples.rows
            if row.suffix in ("", "_total")
            and labels.items() <= dict(zip(samples.family.labels, row.labels, strict=False)).items()
        ]
        assert rows, f"{family} has no sample with {labels}"
        return sum(rows)


def value(engine: Engine, family: str, **labels: str) -> float:
    return Exposition(engine).value(family, **labels)


def assert_idle_and_whole(engine: Engine) -> None:
    """Nothing leaked, nothing lost: what must hold when every request has ended."""
    engine.check_integrity()
    assert engine.num_running == engine.num_waiting == 0
    pool = engine.kv.pool
    assert pool.num_active == 0
    assert pool.num_free + pool.num_evictable == pool.size
    shown = Exposition(engine)
    assert shown.value("kvscope_requests_received") == shown.value("kvscope_requests")
    assert shown.value("kvscope_requests_running") == shown.value("kvscope_requests_waiting") == 0
    assert shown.value("kvscope_kv_blocks", state="active") == 0
    assert shown.value("kvscope_telemetry_anomalies") == 0
    for record in engine.telemetry.finished:
        assert abs(record.matrix.sum() - (record.finished - record.arrival)) < 1e-6
        assert (record.matrix >= -1e-12).all()
