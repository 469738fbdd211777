"""`kvscope profile`: a torch profiler trace of some steps of the bundled engine, with KV and forward regions named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from observability.cli._terminal import Show, check_writable, progress_bar
from observability.errors import ConfigError

if TYPE_CHECKING:
    from observability.engine.engine import Engine

_PREFIX = "kvscope."
_WARM_UP_STEPS = 5  # the first steps allocate and compile


def register(app: typer.Typer) -> None:
    app.command()(profile)


def profile(
    model: Annotated[
        str, typer.Argument(help="smollm2-135m, tiny, or the path of a Llama directory or GGUF file.")
    ] = "smollm2-135m",
    steps: Annotated[int, typer.Option(min=1, max=10_000, help="Steps to record.")] = 50,
    out: Annotated[Path, typer.Option(help="Trace to write, in the Chrome format.")] = Path("kvscope-trace.json"),
    device: Annotated[str, typer.Option(help="cpu, or cuda.")] = "cpu",
    running: Annotated[int, typer.Option(min=1, max=256, help="Requests that run at once.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=1, max=8192, help="Tokens of a prompt.")] = 200,
    output_tokens: Annotated[int, typer.Option(min=1, max=8192, help="Tokens of an answer.")] = 32,
    kv_dtype: Annotated[Literal["auto", "int8"], typer.Option(help="int8 stores keys and values quantized.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the times by region as JSON.")] = False,
) -> None:
    """Record some steps of the bundled engine under a generated load. The trace opens in https://ui.perfetto.dev or chrome://tracing.

    Regions: kvscope.step, in it schedule, forward_prefill, forward_decode or forward_mixed, and emit; in these kv_alloc, kv_index,
    kv_free, kv_gather, kv_attend (storing keys and values and attending to them, once a layer), kv_move and logits.

    Examples:

        kvscope profile tiny --steps 20

        kvscope profile --steps 100 --running 16 --kv-dtype int8 --out trace.json
    """
    check_writable(out, "Give another --out.")
    import torch

    from observability.engine.profiling import named, regions

    engine = _engine(model, device, running, prompt_tokens, output_tokens, kv_dtype)
    load = _Load(engine, running, prompt_tokens, output_tokens)
    with progress_bar(f"Profiling {model}", "steps") as show:
        load.run(_WARM_UP_STEPS, None)
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device.startswith("cuda"):
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        region = lambda name: torch.profiler.record_function(_PREFIX + name)  # noqa: E731
        with torch.profiler.profile(activities=activities) as profiler, named(regions(engine), region):
            load.run(steps, show)
    profiler.export_chrome_trace(str(out))
    times = {
        event.key.removeprefix(_PREFIX): {"calls": event.count, "seconds": event.cpu_time_total / 1e6}
        for event in profiler.key_averages()
        if event.key.startswith(_PREFIX) and event.cpu_time_total
    }
    if as_json:
        typer.echo(
            json.dumps(
                {"model": model, "device": device, "steps": steps, "trace": str(out), "regions": times}, indent=2
            )
        )
    else:
        _print(times, steps, out)


class _Load:
    """Keeps `running` requests in the engine; a third of them share the first half of their prompt."""

    def __init__(self, engine: Engine, running: int, prompt_tokens: int, output_tokens: int) -> None:
        import numpy as np

        self._engine, self._running = engine, running
        self._prompt, self._output = prompt_tokens, output_tokens
        self._random = np.random.default_rng(0)
        self._shared = self._tokens(prompt_tokens // 2)
        self._number = 0

    def _tokens(self, count: int) -> list[int]:
        vocabulary: int = self._engine.executor.vocab_size  # type: ignore[attr-defined]
        return [int(token) for token in self._random.integers(3, vocabulary, count)]

    def run(self, steps: int, show: Show | None) -> None:
        for step in range(steps):
            while self._engine.num_running + self._engine.num_waiting < self._running:
                self._add()
            self._engine.step()
            if show is not None:
                show(step + 1, steps)

    def _add(self) -> None:
        from observability.engine.types import Request, SamplingParams

        self._number += 1
        shared = self._shared if self._number % 3 == 0 else []
        # answers of different lengths, so that prefills and decodes meet
        output = max(1, int(self._output * self._random.uniform(0.5, 1.5)))
        self._engine.add(
            Request(
                f"profile-{self._number}",
                shared + self._tokens(self._prompt - len(shared)),
                SamplingParams(max_tokens=output, ignore_eos=True),
                arrival=self._engine.executor.clock.now(),
            )
        )


def _engine(
    model: str, device: str, running: int, prompt_tokens: int, output_tokens: int, kv_dtype: Literal["auto", "int8"]
) -> Engine:
    from observability.engine.clock import MonotonicClock
    from observability.engine.engine import Engine
    from observability.engine.executor.torch_executor import TorchExecutor
    from observability.engine.model.loading import load_model
    from observability.engine.types import EngineConfig
    from observability.telemetry.recorder import Telemetry

    loaded = load_model(model, device=device)
    longest = prompt_tokens + 2 * output_tokens
    if longest > loaded.config.max_position:
        raise ConfigError(
            f"{longest} tokens of prompt and answer are more than the {loaded.config.max_position} of {loaded.name}'s context.",
            next_step="Lower --prompt-tokens or --output-tokens.",
        )
    blocks = 2 * running * -(-longest // 16)
    config = EngineConfig(
        block_size=16, num_blocks=blocks, max_num_seqs=running, max_model_len=longest, max_queued=running, kv_dtype=kv_dtype
    )  # fmt: skip
    clock = MonotonicClock()
    telemetry = Telemetry(
        loaded.name, executor="torch", virtual=False, device=device, kv_dtype=kv_dtype, clock=clock.now
    )
    return Engine(config, TorchExecutor(loaded, config, telemetry, clock=clock), telemetry)


def _print(times: dict[str, dict[str, Any]], steps: int, out: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    whole = times["step"]["seconds"]
    table = Table(box=None, pad_edge=False)
    for title in ("Region", "Calls", "ms a step", "Share of step"):
        table.add_column(title, justify="left" if title == "Region" else "right")
    for name, found in sorted(times.items(), key=lambda item: -item[1]["seconds"]):
        seconds = found["seconds"]
        table.add_row(name, f"{found['calls']:,}", f"{seconds / steps * 1000:.3f}", f"{seconds / whole:.1%}")
    console = Console(highlight=False)
    console.print(table)
    console.print(
        f"Recording costs time of its own: shares are nearer to the truth than times.\n{out} opens in https://ui.perfetto.dev."
    )
