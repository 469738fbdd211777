"""`kvscope calibrate`: fits virtual time to this machine, and checks it against real time on the same load."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from observability.cli._terminal import progress_bar

if TYPE_CHECKING:
    from observability.engine.executor.calibrated import Calibration
    from observability.workload.calibrate import Check

EXAMPLES = """
Examples:

  kvscope calibrate                                      smollm2-135m on this machine, a minute or two

  kvscope calibrate --check                              the same load in real and in virtual time

  kvscope replay generated --gpu calibrated --preset laptop
"""


def register(app: typer.Typer) -> None:
    app.command(epilog=EXAMPLES)(calibrate)


def calibrate(
    model: Annotated[str, typer.Option(help="Model to measure: smollm2-135m, tiny, or a path.")] = "smollm2-135m",
    kv_dtype: Annotated[Literal["auto", "int8"], typer.Option(help="How KV is stored.")] = "auto",
    threads: Annotated[
        int | None,
        typer.Option(min=1, max=os.cpu_count() or 1, help="Threads of torch. Default: as many as it takes here."),
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, max=256, help="Largest batch to measure.")] = 8,
    max_num_batched_tokens: Annotated[
        int, typer.Option(min=64, max=8192, help="Most tokens in a step to measure.")
    ] = 512,
    quick: Annotated[bool, typer.Option("--quick", help="Measure each step once: a quarter of the time.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Measure nothing new: compare real and virtual time on one load.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json",
            dir_okay=False,
            help="Where the calibration is kept. Default: calibration-MODEL.json in kvscope's data folder.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")] = False,
) -> None:
    """Measure steps of the engine here and fit virtual time to them, for `kvscope replay --gpu calibrated`.

    The machine should have nothing else to do meanwhile: the load average is kept with the result.
    """
    from observability.engine.executor.calibrated import default_path, load_calibration
    from observability.errors import ConfigError
    from observability.workload import calibrate as work

    if output is not None and output.suffix != ".json":
        raise ConfigError(f"{output} does not end in .json.", next_step="Name it FILE.json, so that --gpu takes it.")
    if check:
        calibration = load_calibration(str(output or default_path(model, kv_dtype)), kv_dtype=kv_dtype)
        with progress_bar("serving", "requests") as on_progress:
            checked = work.check(calibration, model=model, on_progress=on_progress)
        if as_json:
            typer.echo(_json(checked))
        else:
            _print_check(calibration, checked)
        return
    with progress_bar("measuring", "shapes") as on_progress:
        calibration = work.measure(
            model, kv_dtype=kv_dtype, threads=threads, rounds=work.QUICK_ROUNDS if quick else work.ROUNDS,
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, on_progress=on_progress,
        )  # fmt: skip
    path = output or default_path(calibration.model, kv_dtype)
    calibration.save(path)
    if as_json:
        typer.echo(calibration.model_dump_json(indent=2))
    else:
        _print(calibration, path)


def _load(average: float | None) -> str:
    return "load average unknown" if average is None else f"load average {average:.1f}"


def _print(calibration: Calibration, path: Path) -> None:
    errors = ", ".join(f"{kind} {error:.0%}" for kind, error in calibration.median_relative_error.items())
    typer.echo(f"{calibration.description}; {_load(calibration.load_average)}")
    typer.echo(f"{calibration.steps_measured} steps; median error of the fit: {errors}")
    typer.echo(f"written to {path}")


def _print_check(calibration: Calibration, checked: Check) -> None:
    from rich.console import Console
    from rich.table import Table

    kinds = ", ".join(f"{kind} {error:.0%}" for kind, error in checked.step_error_by_kind.items())
    typer.echo(f"{calibration.description}; {_load(calibration.load_average)} then, {_load(checked.load_average)} now")
    typer.echo(
        f"{checked.steps} steps of {checked.requests} requests: median error {checked.median_step_error:.1%} ({kinds}), "
        f"median difference {checked.median_step_difference:+.1%}"
    )
    if checked.step_noise is not None:
        typer.echo(f"equal steps of the real run were {checked.step_noise:.1%} from their median")
    table = Table("seconds", "real", "virtual", "difference", box=None)
    for latency, name in (("ttft", "time to first token"), ("duration", "request duration")):
        for quantile in ("p50", "p99"):
            table.add_row(
                f"{name} {quantile}",
                f"{checked.real[latency][quantile]:.3f}",
                f"{checked.virtual[latency][quantile]:.3f}",
                f"{checked.difference(latency, quantile):+.1%}",
            )
    Console().print(table)


def _json(checked: Check) -> str:
    import json

    return json.dumps(asdict(checked), indent=2, allow_nan=False)
