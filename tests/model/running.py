"""Runs prompts through a real engine with the torch executor, noting what occurred on the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from observability.catalog import LAYOUTS
from observability.engine.clock import MonotonicClock
from observability.engine.engine import Engine
from observability.engine.executor.torch_executor import TorchExecutor
from observability.engine.model.loading import LoadedModel
from observability.engine.types import EngineConfig, Request, SamplingParams, StepPlan, StepResult
from observability.telemetry.recorder import Telemetry


class WatchedExecutor(TorchExecutor):
    """The executor, noting the layouts of sequences, the chunks of each prompt, and the kinds of steps."""

    def __init__(
        self, loaded: LoadedModel, config: EngineConfig, telemetry: Telemetry, *, clock: MonotonicClock
    ) -> None:
        super().__init__(loaded, config, telemetry, clock=clock)
        self.layouts: Counter[str] = Counter()
        self.chunks: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()

    def execute(self, plan: StepPlan, until: float | None = None) -> StepResult:
        for request in [*(chunk.request for chunk in plan.prefill), *plan.decode]:
            assert request.table is not None
            self.layouts[LAYOUTS[request.table.layout]] += 1
        self.chunks.update(chunk.request.request_id for chunk in plan.prefill)
        self.kinds[plan.kind] += 1
        return super().execute(plan, until)


class Runner:
    """An engine of `loaded` under `config`; `run` serves prompts, all added at once."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig) -> None:
        clock = MonotonicClock()
        self.telemetry = Telemetry(
            loaded.name, executor="torch", virtual=False, device="cpu", kv_dtype=config.kv_dtype, clock=clock.now
        )
        self.executor = WatchedExecutor(loaded, config, self.telemetry, clock=clock)
        self.engine = Engine(config, self.executor, self.telemetry, loaded.eos_token_ids)
        self._count = 0

    def run(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Request]:
        requests = []
        for prompt, own in zip(prompts, params, strict=True):
            self._count += 1
            request = Request(f"request-{self._count}", prompt, own, arrival=self.executor.clock.now())
            self.engine.add(request)
            requests.append(request)
        self.engine.run_until_idle()
        self.engine.check_integrity()
        return requests
