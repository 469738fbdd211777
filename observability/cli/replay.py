"""`kvscope replay`: a recorded or generated load against a simulated GPU, a real model in process, or a running server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from observability.cli._terminal import check_writable, progress_bar
from observability.errors import ConfigError, KvscopeError

if TYPE_CHECKING:
    from observability.workload.results import ReplayResult
    from observability.workload.traces import TraceRequest

_TARGET, _ENGINE, _LOAD = "Target (default: --gpu H100 --model llama-3-8b)", "Engine (not with --url)", "Load"
_DAY_SECONDS = 86_400.0
_SERVER = "Server (with --url)"


def register(app: typer.Typer) -> None:
    app.command()(replay)


def replay(
    context: typer.Context,
    load: Annotated[
        str, typer.Argument(metavar="FILE|generated", help="A Mooncake JSONL or Azure CSV trace, or the built-in load.")
    ],
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="Simulate this GPU in virtual time: A10G, A100-40, A100-80, H100, H200, cpu-laptop; or `calibrated`: this machine as `kvscope calibrate` measured it, or a calibration's FILE.json.",
            rich_help_panel=_TARGET,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Cost model for --gpu, such as llama-3-8b or deepseek-v3. With a calibration: the model it was made with.",
            rich_help_panel=_TARGET,
        ),
    ] = None,
    tensor_parallel: Annotated[int, typer.Option(help="GPUs that share each layer.", rich_help_panel=_TARGET)] = 1,
    torch: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Run this model here in real time: smollm2-135m, tiny, or a path.",
            rich_help_panel=_TARGET,
        ),
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="Send to this OpenAI-compatible server in real time.", rich_help_panel=_TARGET)
    ] = None,
    serial: Annotated[
        bool,
        typer.Option(
            "--serial", help="One request at a time, each after the one before has ended; arrival times are ignored."
        ),
    ] = False,
    json_to: Annotated[
        str | None,
        typer.Option(
            "--json",
            metavar="OUT|-",
            help="Write the result as JSON to a file, or to standard output in place of the tables.",
        ),
    ] = None,
    unbounded: Annotated[
        bool, typer.Option("--unbounded", help="KV cache without limit (virtual time only).", rich_help_panel=_ENGINE)
    ] = False,
    kv_blocks: Annotated[
        int | None,
        typer.Option(min=1, help="KV blocks. Default: what fits the GPU; 4096 with --torch.", rich_help_panel=_ENGINE),
    ] = None,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens a KV block holds.", rich_help_panel=_ENGINE)] = 16,
    kv_dtype: Annotated[
        Literal["auto", "int8"], typer.Option(help="How KV is stored.", rich_help_panel=_ENGINE)
    ] = "auto",
    max_model_len: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Longest prompt plus output; longer prompts are refused. Default: the model's context, at most 131072 with --gpu, which admits the recorded traces.",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    max_num_seqs: Annotated[
        int | None,
        typer.Option(min=1, help="Requests in a batch. Default: 256, with --torch 8.", rich_help_panel=_ENGINE),
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens in a step. Default: 8192, with --torch 512.", rich_help_panel=_ENGINE),
    ] = None,
    prefix_caching: Annotated[bool, typer.Option(help="Reuse KV of shared prefixes.", rich_help_panel=_ENGINE)] = True,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="A mechanism of the engine, such as num_host_blocks=50000 or controller=on; may be given more than once. docs/engine.md lists them.",
            rich_help_panel=_ENGINE,
            show_default=False,
        ),
    ] = None,
    time_scale: Annotated[float, typer.Option(help="10 replays ten times as fast.", rich_help_panel=_LOAD)] = 1.0,
    length_scale: Annotated[
        float,
        typer.Option(
            help="0.1 makes prompts and outputs a tenth as long; shared prefixes stay shared.", rich_help_panel=_LOAD
        ),
    ] = 1.0,
    limit: Annotated[int | None, typer.Option(min=1, help="Only so many requests.", rich_help_panel=_LOAD)] = None,
    start: Annotated[
        float, typer.Option(min=0, help="Skip what arrives before this second of the load.", rich_help_panel=_LOAD)
    ] = 0.0,
    span: Annotated[
        float | None,
        typer.Option(
            help="Only so many seconds of the load. Default for `generated`: 3600, unless --limit is given.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            help="Of `generated`: recorded (3.4 requests/s as in the Mooncake trace) or laptop. Default: laptop with --torch, else recorded.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    requests_per_second: Annotated[
        float | None,
        typer.Option(
            help="Of `generated`: mean rate. From --span 86400 on it follows the time of day.", rich_help_panel=_LOAD
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of `generated`: another seed, another load.", rich_help_panel=_LOAD)] = 0,
    served_model: Annotated[
        str | None, typer.Option(help="Model to ask for. Default: the first of /v1/models.", rich_help_panel=_SERVER)
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="KVSCOPE_API_KEY", show_envvar=True, help="Bearer token.", rich_help_panel=_SERVER),
    ] = None,
    max_concurrency: Annotated[int, typer.Option(min=1, help="Most open requests.", rich_help_panel=_SERVER)] = 256,
    timeout: Annotated[
        float, typer.Option(help="Give a request up after so many seconds without a byte.", rich_help_panel=_SERVER)
    ] = 600.0,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos", help="Ask for the recorded output length (vLLM, SGLang, kvscope).", rich_help_panel=_SERVER
        ),
    ] = False,
) -> None:
    """Replay a load and say what latency, cache hits and KV use come of it.

    With --gpu nothing is run: time is virtual, worked out from the GPU's and the model's published figures and assumed
    efficiencies and overhead, and a recorded hour takes seconds. With --torch and --url it takes the time that it takes.

    Examples:

        kvscope replay mooncake.jsonl --gpu H100 --model llama-3-8b

        kvscope replay mooncake.jsonl --serial --unbounded --json hits.json

        kvscope replay mooncake.jsonl --gpu H200 --model llama-3-70b --tensor-parallel 4 --time-scale 2

        kvscope replay mooncake.jsonl --time-scale 0.4 --engine num_host_blocks=50000 --engine compaction_seconds=0.002

        kvscope replay generated --gpu calibrated --preset laptop --limit 20

        kvscope replay generated --torch smollm2-135m --limit 20

        kvscope replay generated --preset laptop --url http://127.0.0.1:8000 --span 120
    """  # fmt: skip
    _check_targets(context, gpu=gpu, torch=torch, url=url)
    engine_options: dict[str, Any] = {
        "tensor_parallel": tensor_parallel, "kv_blocks": kv_blocks, "unbounded": unbounded, "block_size": block_size,
        "kv_dtype": kv_dtype, "max_model_len": max_model_len, "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens, "prefix_caching": prefix_caching,
    }  # fmt: skip
    if engine:
        from observability.engine.settings import parse_settings

        engine_options["engine"] = parse_settings(engine)
        for name in engine_options["engine"].keys() & engine_options.keys():
            raise ConfigError(
                f"--engine {name} has an option of its own.", next_step=f"Use --{name.replace('_', '-')}."
            )
    source = _Load(
        load, time_scale, length_scale, limit, start, span, preset, requests_per_second, seed,
        laptop=torch is not None, now=time.time() if torch or url else 0.0,
    )  # fmt: skip
    if json_to not in (None, "-"):
        check_writable(Path(json_to), "Give --json another path, or -.")
    total = source.count()
    if not total:
        raise source.nothing_arrives()
    with progress_bar("replaying", "requests") as show:
        on_end = None if show is None else partial(show, total=total)
        if url is not None:
            from observability.workload.replay_http import HttpSettings, replay_http

            settings = HttpSettings(
                url, served_model=served_model, api_key=api_key, max_concurrency=max_concurrency, timeout_seconds=timeout,
                ignore_eos=ignore_eos, serial=serial,
            )  # fmt: skip
            result = replay_http(source.requests(), settings, describe=source.describe(), on_end=on_end)
        else:
            from observability.engine.executor.calibrated import is_calibration, load_calibration
            from observability.workload.replay import InProcess, replay_in_process

            if gpu is not None and model is None and is_calibration(gpu):
                model = load_calibration(gpu, kv_dtype=kv_dtype).model
            target = InProcess(
                gpu=None if torch else gpu or "H100",
                model=torch or model or "llama-3-8b",
                serial=serial,
                **engine_options,
            )
            result = replay_in_process(source.requests(), target, describe=source.describe(), on_end=on_end)
    _write(result, json_to)
    if not any(result.outcomes[outcome] for outcome in ("stop", "length")):
        reasons = "; ".join(result.reasons) or "no reason was given"
        raise KvscopeError(
            f"No request of {result.requests} was served: {reasons}.", next_step="Look at the reasons above."
        )


def _check_targets(context: typer.Context, *, gpu: str | None, torch: str | None, url: str | None) -> None:
    """One target; and nothing that it would leave unused."""
    named = [f"--{name}" for name, value in (("gpu", gpu), ("torch", torch), ("url", url)) if value is not None]
    if len(named) > 1:
        raise ConfigError(f"{' and '.join(named)} are different targets.", next_step="Give one of them.")
    for parameter in context.command.params:
        name, panel = str(parameter.name), getattr(parameter, "rich_help_panel", None)
        unused = panel == (_ENGINE if url else _SERVER)
        unused |= name in ("model", "tensor_parallel", "unbounded") and bool(torch or url)
        source = context.get_parameter_source(name)
        if unused and source is not None and source.name == "COMMANDLINE":
            raise ConfigError(
                f"--{name.replace('_', '-')} has no effect with {named[0] if named else '--gpu'}.",
                next_step="Leave it out.",
            )


@dataclass(frozen=True)
class _Load:
    """The load as asked for; read twice, first to check and count it, then to replay it."""

    source: str
    time_scale: float
    length_scale: float
    limit: int | None
    start: float
    span: float | None
    preset: str | None
    requests_per_second: float | None
    seed: int
    laptop: bool
    now: float  # Unix seconds at which the load begins

    @property
    def generated(self) -> bool:
        return self.source == "generated"

    def requests(self) -> Iterator[TraceRequest]:
        from observability.workload.traces import read_trace

        if self.generated:
            return self._generate()
        if self.preset is not None or self.requests_per_second is not None:
            raise ConfigError(
                "--preset and --requests-per-second shape the built-in load.", next_step="Leave them out with a file."
            )
        return read_trace(
            self.source, time_scale=self.time_scale, length_scale=self.length_scale, limit=self.limit,
            start_seconds=self.start, span_seconds=self.span,
        )  # fmt: skip

    def _generate(self) -> Iterator[TraceRequest]:
        from observability.workload.generate import PRESETS, generate_load
        from observability.workload.traces import window

        preset = self.preset or ("laptop" if self.laptop else "recorded")
        if preset not in PRESETS:
            raise ConfigError(f"There is no preset {preset!r}.", next_step=f"Use one of {', '.join(PRESETS)}.")
        settings = PRESETS[preset]
        settings = replace(settings, length_scale=settings.length_scale * self.length_scale)
        if self.requests_per_second is not None:
            settings = replace(settings, requests_per_second=self.requests_per_second)
        return window(
            generate_load(settings, self.seed, start_time=self.start_time), time_scale=self.time_scale, limit=self.limit,
            start_seconds=self.start, span_seconds=self.span_seconds,
        )  # fmt: skip

    @property
    def start_time(self) -> float | None:
        """For the time of day of the built-in load. Days have that shape; of less, every part has the mean rate that was asked for."""
        return self.now if (self.span_seconds or 0.0) >= _DAY_SECONDS else None

    @property
    def span_seconds(self) -> float | None:
        """The built-in load never ends: it takes an hour of it unless asked otherwise."""
        return 3600.0 if self.generated and self.span is None and self.limit is None else self.span

    def count(self) -> int:
        """How many requests there are; raises TraceError before anything is sent if one cannot be read."""
        return sum(1 for _ in self.requests())

    def nothing_arrives(self) -> KvscopeError:
        """Why there is no request, of a load whose count() is 0."""
        from observability.workload.traces import read_trace

        part = f"from {self.start:g} s on" if self.span is None else f"in the {self.span:g} s from {self.start:g} s on"
        if self.generated:
            return ConfigError(
                f"No request of the built-in load arrives {part}.", next_step="Give a longer --span, or a higher rate."
            )
        end = max(request.arrival_seconds for request in read_trace(self.source))
        return ConfigError(
            f"No request arrives {part}: {self.source} ends at {end:,.1f} s.",
            next_step="Give a --start before that." if self.start > end else "Give a longer --span.",
        )

    def describe(self) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "load": self.source, "time_scale": self.time_scale, "length_scale": self.length_scale, "limit": self.limit,
            "start_seconds": self.start, "span_seconds": self.span_seconds,
        }  # fmt: skip
        if self.generated:
            preset = self.preset or ("laptop" if self.laptop else "recorded")
            shown |= {
                "preset": preset,
                "requests_per_second": self.requests_per_second,
                "seed": self.seed,
                "start_time": self.start_time,
            }
        return shown


def _write(result: ReplayResult, json_to: str | None) -> None:
    if json_to == "-":
        typer.echo(result.to_json())
        return
    from observability.workload.report import print_result

    print_result(result)
    if json_to is not None:
        Path(json_to).write_text(result.to_json() + "\n", encoding="utf-8")
