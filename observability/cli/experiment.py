"""`kvscope experiment`: what each mechanism of the engine buys on a load, mechanism by mechanism."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from observability.cli._terminal import check_writable, progress_bar
from observability.errors import ConfigError

if TYPE_CHECKING:
    from observability.workload.experiment import ExperimentResult
    from observability.workload.traces import TraceRequest

EXAMPLES = """
Examples:

  kvscope experiment p99-plan --trace mooncake.jsonl --gpu H100 --model llama-3-8b

  kvscope experiment p99-plan --trace mooncake.jsonl --capacity --ablation --json plan.json --plot plan.html

  kvscope experiment p99-plan --arms paging,prefix-cache,host-tier --saturate paging

  kvscope experiment p99-plan --trace mooncake.jsonl --max-model-len 32768 --max-num-batched-tokens 1024

  kvscope experiment p99-plan --torch smollm2-135m
"""
_LIMIT, _REAL_LIMIT = 2000, 16
_REAL_ARMS = "paging,prefix-cache,compression"
_LOAD_FACTOR = 0.92
_TARGET, _LOAD, _OUTPUT = "Target", "Load", "Output"

experiments = typer.Typer(no_args_is_help=True, help="Compare settings of the engine on one load.")


def register(app: typer.Typer) -> None:
    app.add_typer(experiments, name="experiment")


@experiments.callback()
def _group() -> None:
    """Compare settings of the engine on one load."""


@experiments.command("p99-plan", epilog=EXAMPLES)
def p99_plan(
    context: typer.Context,
    trace: Annotated[
        str,
        typer.Option(
            metavar="FILE|generated",
            help="A Mooncake JSONL or Azure CSV trace, or the built-in load.",
            rich_help_panel=_LOAD,
        ),
    ] = "generated",
    arms: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="Mechanisms to add to the baseline, in their own order: paging, contiguous, prefix-cache, compression, compaction, host-tier, predictive, spread, classes, swapping, controller. Default: all; with --torch paging, prefix-cache and compression.",
        ),
    ] = None,
    ablation: Annotated[bool, typer.Option("--ablation", help="Also all but one mechanism, for each of them.")] = False,
    capacity: Annotated[
        bool,
        typer.Option(
            "--capacity", help="Also find the highest rate that each arm sustains; about eight replays more an arm."
        ),
    ] = False,
    saturate: Annotated[
        str,
        typer.Option(
            metavar="ARM",
            help="Set the load near saturation of this arm: baseline, or the one that a mechanism completes.",
        ),
    ] = "baseline",
    load_factor: Annotated[
        str,
        typer.Option(
            metavar="auto|SHARE", help="Share of the rate that the arm sustains; auto is 0.92.", rich_help_panel=_LOAD
        ),
    ] = "auto",
    time_scale: Annotated[
        float | None,
        typer.Option(help="Replay the load this much faster; saturation is not looked for.", rich_help_panel=_LOAD),
    ] = None,
    length_scale: Annotated[
        float,
        typer.Option(
            help="0.1 makes prompts and answers, and the bounds of layouts, a tenth as long.", rich_help_panel=_LOAD
        ),
    ] = 1.0,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Most requests. Default: 2000, with --torch 16.", rich_help_panel=_LOAD)
    ] = None,
    span: Annotated[
        float | None, typer.Option(help="Only so many seconds of the load as recorded.", rich_help_panel=_LOAD)
    ] = None,
    seed: Annotated[int, typer.Option(help="Of `generated`: another seed, another load.", rich_help_panel=_LOAD)] = 0,
    gpu: Annotated[
        str | None, typer.Option(metavar="NAME", help="GPU to simulate. Default: H100.", rich_help_panel=_TARGET)
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Cost model for --gpu. Default: llama-3-8b.", rich_help_panel=_TARGET)
    ] = None,
    torch: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Run this model here in real time instead, such as smollm2-135m.",
            rich_help_panel=_TARGET,
        ),
    ] = None,
    kv_blocks: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="KV blocks of the device. Default: what fits; with --torch three of the longest sequences.",
            rich_help_panel=_TARGET,
        ),
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens in a step, in every arm. Default: 8192, with --torch 512.", rich_help_panel=_TARGET
        ),
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Leave longer requests out of the load; what the baseline reserves. Default: the longest request, rounded up.",
            rich_help_panel=_TARGET,
        ),
    ] = None,
    host_ratio: Annotated[
        float, typer.Option(help="Host blocks by device block, with the host tier.", rich_help_panel=_TARGET)
    ] = 2.0,
    json_to: Annotated[
        Path | None,
        typer.Option(
            "--json", metavar="FILE", dir_okay=False, help="Write all figures and settings.", rich_help_panel=_OUTPUT
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.html",
            dir_okay=False,
            help="Write bar charts as a page that works offline.",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
) -> None:
    """Add the engine's mechanisms one at a time, on one load and the same KV memory, and say what each buys.

    By default nothing is run: time is virtual, worked out from the GPU's and the model's published figures and assumed
    efficiencies and overhead. The load is slowed until the baseline is near saturation, and every arm then serves that
    same load.
    """  # fmt: skip
    from observability.workload.experiment import MECHANISM_NAMES, ExperimentSettings, run_experiment
    from observability.workload.experiment_report import plot_html, print_experiment
    from observability.workload.replay import InProcess

    if torch is not None and (gpu is not None or model is not None):
        raise ConfigError("--torch and --gpu or --model are different targets.", next_step="Give one of them.")
    if time_scale is not None and load_factor != "auto":
        raise ConfigError("--time-scale and --load-factor both set the load.", next_step="Give one of them.")
    if trace != "generated" and _given(context, "seed"):
        raise ConfigError("--seed is for the built-in load.", next_step="Leave it out with a file.")
    chosen = arms if arms is not None else _REAL_ARMS if torch else ",".join(MECHANISM_NAMES)
    settings = ExperimentSettings(
        arms=tuple(name.strip() for name in chosen.split(",") if name.strip() not in ("", "baseline")),
        ablation=ablation,
        saturate=saturate,
        load_factor=_load_factor(load_factor),
        time_scale=time_scale,
        capacity=capacity,
        host_ratio=host_ratio,
    )
    if plot is not None and plot.suffix not in (".html", ".htm"):
        raise ConfigError(f"{plot} is no page.", next_step="Give --plot a name that ends in .html.")
    for path in (json_to, plot):
        if path is not None:
            check_writable(path, "Give another path.")
    limit = limit or (_REAL_LIMIT if torch else _LIMIT)
    load = list(_load(trace, length_scale, limit, span, seed, laptop=torch is not None))
    target = InProcess(
        model=torch or model or "llama-3-8b",
        gpu=None if torch else gpu or "H100",
        kv_blocks=kv_blocks,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    describe: dict[str, Any] = {
        "load": trace, "length_scale": length_scale, "limit": limit, "span_seconds": span, "seed": seed,
    }  # fmt: skip
    with progress_bar("reading the load", "requests") as show:
        on_progress = None if show is None else lambda what, done, total: show(done, total, what)
        result = run_experiment(load, target, settings, describe=describe, on_progress=on_progress)
    print_experiment(result)
    _write(result, json_to)
    if plot is not None:
        plot.write_text(plot_html(result), encoding="utf-8")


def _given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _load_factor(text: str) -> float:
    if text == "auto":
        return _LOAD_FACTOR
    try:
        return float(text)
    except ValueError:
        raise ConfigError(
            f"--load-factor is {text!r}.", next_step="Give auto, or a share of the sustainable rate such as 0.9."
        ) from None


def _load(
    source: str, length_scale: float, limit: int, span: float | None, seed: int, *, laptop: bool
) -> Iterator[TraceRequest]:
    """The load as recorded, or the built-in one; with a real model that of a laptop."""
    from observability.workload.generate import PRESETS, generate_load
    from observability.workload.traces import read_trace, window

    if source != "generated":
        return read_trace(source, length_scale=length_scale, limit=limit, span_seconds=span)
    preset = PRESETS["laptop" if laptop else "recorded"]
    preset = replace(preset, length_scale=preset.length_scale * length_scale)
    return window(generate_load(preset, seed), limit=limit, span_seconds=span)


def _write(result: ExperimentResult, json_to: Path | None) -> None:
    if json_to is not None:
        json_to.write_text(result.to_json() + "\n", encoding="utf-8")
