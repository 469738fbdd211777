"""`kvscope forecast`: forecasts the next hour of load, KV use and P99 from a recorded history, once or on a schedule."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from observability.cli._tls import TlsCert, TlsKey
from observability.errors import ConfigError
from observability.tls import Tls

if TYPE_CHECKING:
    from rich.console import Console

    from observability.forecast.pooled import Trained
    from observability.forecast.spread import Pool
    from observability.forecast.worker import Run

EXAMPLES = """
Examples:

  kvscope forecast                                        once, from the user's data folder

  kvscope forecast --store ./history.sqlite --every 10m   after each 10 minutes, until Ctrl-C

  kvscope forecast --signal ttft_p99 --json | jq .scores

  kvscope forecast --source prometheus:http://127.0.0.1:9090 --store ./forecasts.sqlite --every 10m

  kvscope forecast --every 10m --serve                    and as Prometheus metrics at http://127.0.0.1:9402/metrics

  kvscope forecast --train                                train the pooled network on what is recorded, such as once a day from cron

  kvscope forecast --every 10m --serve --model pooled     and serve its forecasts: half stack, half network

  kvscope forecast --jobs 8                               thousands of series: on 8 processes (--dask ADDRESS: on a Dask cluster)
"""
SIGNAL_NAMES = ("requests", "kv_usage", "kv_free_tokens", "kv_free_requests", "queue", "ttft_p99", "e2e_p99")
_UNITS = {"requests/s": "/s", "ratio": "", "requests": "", "tokens": "", "seconds": " s"}
_UNIT_SECONDS = {"m": 60, "h": 3600}


def register(app: typer.Typer) -> None:
    app.command("forecast", epilog=EXAMPLES)(forecast)


def forecast(
    store: Annotated[
        Path | None,
        typer.Option(
            help="File of a recorder; the forecasts go into it. Default: the recorded history in the user's data folder."
        ),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(help="Where to read instead, as prometheus:URL; --store then holds the forecasts alone."),
    ] = None,
    every: Annotated[
        str | None,
        typer.Option(help="Go on until Ctrl-C: 10m, 30m, 1h ..., aligned to the clock (UTC). Without it: once."),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--signal", help=f"Forecast this alone; may be repeated: {', '.join(SIGNAL_NAMES)}."),
    ] = None,
    train: Annotated[
        bool,
        typer.Option(
            "--train",
            help="Train the pooled network on the recorded series and store its weights beside --store; forecasts nothing.",
        ),
    ] = False,
    model: Annotated[
        str,
        typer.Option(
            help="Whose forecasts are served and alerted on: auto, prophet, last_value, seasonal_naive or pooled. All are made and stored."
        ),
    ] = "auto",
    serve: Annotated[
        bool,
        typer.Option(
            help="With --every: serve the forecasts as Prometheus metrics, for the board Forecast and its alerts."
        ),
    ] = False,
    host: Annotated[str, typer.Option(help="Address to serve on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to serve on; 0 takes a free one.")] = 9402,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="KVSCOPE_TOKEN", help="Scrapers must send this as `Authorization: Bearer`.", show_default=False
        ),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow an address that other machines reach, without a token.")
    ] = False,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    jobs: Annotated[int, typer.Option(min=1, max=256, help="Processes that forecast.")] = 1,
    dask: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Dask scheduler whose workers forecast instead.", show_default=False),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the forecasts and scores as JSON, one line a run.")
    ] = False,
) -> None:
    """Forecast the next hour of load, KV use and P99 by several models, and say how far past forecasts were off.

    Each forecast is six steps of 10 minutes with a 95 % interval. The first run also makes the hourly forecasts that are missing
    in the last day, so that the error of both models is known at once.
    """
    from platformdirs import user_data_path

    # Matrices of a forecast are small: threads of the linear algebra only wait for one another, for minutes on a busy machine.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    path = store or user_data_path("kvscope") / "kvscope.sqlite"
    every_seconds = None if every is None else _every(every)
    names = _names(only or SIGNAL_NAMES)
    token = (token or "").strip() or None
    tls = Tls.of(tls_cert, tls_key)
    _check_model(model)
    if train:
        if every_seconds is not None:
            raise ConfigError(
                "--train is done once.", next_step="Leave --every out; a running worker takes the new weights."
            )
        _train(source or str(path), path, names, as_json)
        return
    if serve:
        _check_serving(every_seconds, host, token, insecure)
    with _quiet_end() if every_seconds else contextlib.nullcontext():
        from rich.console import Console

        from observability.forecast.pooled import path_beside, trained_beside
        from observability.forecast.series import FORECAST_SIGNALS
        from observability.forecast.worker import open_pair, run_forever, run_once
        from observability.store.forecasts import POOLED

        def trained() -> Trained | None:
            return trained_beside(path) if model == POOLED or path_beside(path).exists() else None

        signals = [FORECAST_SIGNALS[name] for name in names]
        console = Console(stderr=True, highlight=False)
        pool = _pool(jobs, dask)
        with _bar(console) as progress, contextlib.ExitStack() as ending:
            if every_seconds is None:
                with pool() as executor:
                    run = run_once(
                        *open_pair(source or str(path), path),
                        signals,
                        progress=progress,
                        pool=executor,
                        trained=trained(),
                    )
            else:
                publish, failed = _serve(ending, host, port, token, model, tls) if serve else _unserved
                report: Callable[[Run], None] = _print_json if as_json else lambda run: _print_line(console, run)
                run_forever(
                    source or str(path), path, signals, every_seconds, report=report, progress=progress, publish=publish,
                    failed=failed, pool=pool, trained=trained,
                    say=lambda text: console.print(text, markup=False, soft_wrap=True),
                )  # fmt: skip
        if as_json:
            _print_json(run)
        else:
            _print_table(run)


def _check_model(model: str) -> None:
    """Raises ConfigError."""
    from observability.store.forecasts import MODEL_TITLES

    if model not in MODEL_TITLES:
        raise ConfigError(
            f"--model {model!r} is not a forecast model.", next_step=f"Give one of {', '.join(MODEL_TITLES)}."
        )


def _train(source: str, path: Path, names: list[str], as_json: bool) -> None:
    """Trains on what `source` holds and stores the weights beside the store at `path`. Raises StoreError, ServiceError, ConfigError."""
    from observability.forecast.pooled import path_beside, save
    from observability.forecast.series import FORECAST_SIGNALS
    from observability.forecast.worker import train_once
    from observability.store.open import open_source

    network = train_once(open_source(source), [FORECAST_SIGNALS[name] for name in names])
    file = path_beside(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    save(network, file)
    told = {"file": str(file), "series": network.series, "examples": network.examples, "until": _moment(network.until)}
    text = f"Trained on {network.examples} hours of {network.series} series up to {told['until']}: {file}"
    typer.echo(json.dumps(told) if as_json else text)


def _check_serving(every_seconds: float | None, host: str, token: str | None, insecure: bool) -> None:
    """Raises ConfigError."""
    from observability.cli.serve import is_loopback

    if every_seconds is None:
        raise ConfigError(
            "--serve needs a schedule: forecasts that are made once grow old.", next_step="Add --every 10m."
        )
    if token is None and not insecure and not is_loopback(host):
        raise ConfigError(
            f"{host} can be reached from other machines, and no token is set.",
            next_step="Set KVSCOPE_TOKEN, serve on 127.0.0.1, or give --insecure.",
        )


#: What is told of each run, and of each that failed.
_Told = tuple["Callable[[Run], None]", "Callable[[], None]"]
_unserved: _Told = (lambda run: None, lambda: None)


def _serve(ending: contextlib.ExitStack, host: str, port: int, token: str | None, model: str, tls: Tls | None) -> _Told:
    """Serves what it is told, from a thread of its own, until `ending` closes. Raises ServiceError."""
    from exporters.forecast import ForecastMetrics
    from exporters.prometheus import start_exporter

    metrics = ForecastMetrics(model)
    exporter = ending.enter_context(start_exporter(metrics, host, port, token=token, tls=tls))
    typer.echo(f"Forecast metrics at {exporter.url}; Ctrl-C ends it.", err=True)
    return metrics.publish, metrics.failed


def _pool(jobs: int, address: str | None) -> Pool:
    """Who makes the forecasts. Raises ConfigError."""
    from observability.forecast import spread

    if address is not None and jobs > 1:
        raise ConfigError("--jobs and --dask exclude each other.", next_step="Give one of them.")
    if address is not None:
        return spread.dask(address)
    return spread.processes(jobs) if jobs > 1 else spread.in_this_process


def _every(text: str) -> float:
    """Seconds of `10m` or `1h`. Raises ConfigError."""
    match = re.fullmatch(r"(\d{1,4})([mh])", text.strip())
    seconds = int(match[1]) * _UNIT_SECONDS[match[2]] if match else 0
    if seconds == 0 or seconds % 600 or 86400 % seconds:
        raise ConfigError(
            f"--every {text!r} is not a multiple of 10 minutes that divides a day.",
            next_step="Give 10m, 20m, 30m or 1h: forecasts are made on a 10-minute grid.",
        )
    return float(seconds)


def _names(only: list[str] | tuple[str, ...]) -> list[str]:
    """The signals asked for, each once, in the order of SIGNAL_NAMES. Raises ConfigError."""
    for name in only:
        if name not in SIGNAL_NAMES:
            raise ConfigError(
                f"--signal {name!r} is not forecast.", next_step=f"Give one of {', '.join(SIGNAL_NAMES)}."
            )
    return [name for name in SIGNAL_NAMES if name in only]


@contextlib.contextmanager
def _quiet_end() -> Iterator[None]:
    """SIGINT and SIGTERM end the block at once, whatever it is doing, as a normal end of the program."""

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one must not interrupt the end
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


@contextlib.contextmanager
def _bar(console: Console) -> Iterator[Callable[[int, int], None]]:
    """A bar over the forecasts made afterwards, on a terminal only."""
    if not console.is_terminal:
        yield lambda done, total: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("measuring past forecasts"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", visible=False)
        yield lambda done, total: bar.update(task, completed=done, total=total, visible=done < total)


def _print_json(run: Run) -> None:
    typer.echo(json.dumps(run.as_json(), allow_nan=False))
    sys.stdout.flush()


def _print_line(console: Console, run: Run) -> None:
    refused = [each for each in run.forecasts if each.refused]
    made = f"{len(run.forecasts) - len(refused)} forecasts"
    later = f", {run.hindcasts} of the last day made afterwards" if run.hindcasts else ""
    console.print(f"{_moment(run.at)} {made}{later} in {run.seconds:.1f} s", markup=False, soft_wrap=True)
    for reason in dict.fromkeys(f"{each.signal} {_labels(each.labels)}: {each.refused}" for each in refused):
        console.print(f"  not forecast: {reason}", markup=False, soft_wrap=True)
    for series, reason in run.unmeasured:
        console.print(
            f"  past not measured: {series.signal.name} {_labels(series.labels)}: {reason}",
            markup=False,
            soft_wrap=True,
        )


def _print_table(run: Run) -> None:
    from rich.console import Console
    from rich.table import Table

    from observability.forecast.series import FORECAST_SIGNALS
    from observability.store.forecasts import MODEL_TITLES

    short = {each.name: (name, each.unit) for name, each in FORECAST_SIGNALS.items()}
    scored = {(s.signal.name, _labels(s.labels), score.model): score for s, each in run.scored for score in each}
    table = Table(title=f"The hour after {_moment(run.at)}", title_justify="left", box=None, pad_edge=False)
    for name in ("Series", "Model", "In 1 h", "95 % interval", "Mean error", "95 % covers"):
        table.add_column(name, justify="left" if name in ("Series", "Model") else "right", no_wrap=name != "Series")
    remarks = []
    for each in sorted(run.forecasts, key=lambda f: (list(short).index(f.signal), _labels(f.labels), f.model)):
        (name, unit), labels = short[each.signal], _labels(each.labels)
        score = scored[each.signal, labels, each.model]
        numbers = ("-", "-")
        if not each.refused:
            low, high = each.interval()
            numbers = (f"{each.median[-1]:.3g}{_UNITS[unit]}", f"{low[-1]:.3g} to {high[-1]:.3g}")
        known = (f"{score.mae:.3g}", f"{score.coverage:.0%}") if score.targets else ("-", "-")
        table.add_row(f"{name} {labels}", MODEL_TITLES[each.model], *numbers, *known)
        said = [f"not forecast: {each.refused}"] if each.refused else [each.note] if each.note else []
        if "simulated" in each.flags:
            said.append("learned from simulated history")
        remarks += [f"{name} {labels}: {text}" for text in said]
    remarks += [
        f"{short[s.signal.name][0]} {_labels(s.labels)}: past not measured: {reason}" for s, reason in run.unmeasured
    ]
    out = Console(highlight=False)
    out.print(table)
    for text in dict.fromkeys(remarks):
        out.print(text, markup=False, soft_wrap=True)


def _labels(labels: Mapping[str, str]) -> str:
    return ", ".join(labels.values())


def _moment(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M} UTC"
