"""`kvscope backtest`: how well each forecast model would have done on one's own recorded history."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from observability.forecast.series import GridSeries
    from observability.forecast.study import Study

EXAMPLES = """
Examples:

  kvscope backtest --source ./history.sqlite --signal kv_usage

  kvscope backtest --source http://127.0.0.1:9090 --signal ttft_p99 --days 3 --plot ttft.html

  kvscope backtest --source load.csv --signal requests --model auto --model prophet --json
"""
_MAX_DAYS = 30.0


def register(app: typer.Typer) -> None:
    app.command("backtest", epilog=EXAMPLES)(backtest)


def backtest(
    source: Annotated[
        str,
        typer.Option(
            help="Where the history is: the file of a recorder, the address of a Prometheus, or a CSV file with the columns ds,y."
        ),
    ],
    only: Annotated[str, typer.Option("--signal", help="What to forecast, as `kvscope forecast --signal` names it.")],
    models: Annotated[
        list[str] | None,
        typer.Option("--model", help="Forecast model; may be repeated. Default: all but Prophet, which takes minutes."),
    ] = None,
    of: Annotated[
        str | None, typer.Option(help="Served model, where the history holds several.", show_default=False)
    ] = None,
    days: Annotated[
        float, typer.Option(min=0.5, max=_MAX_DAYS, help="Days back from the newest value to forecast from.")
    ] = 7.0,
    every: Annotated[int, typer.Option(min=10, max=720, help="Minutes between two forecasts, in tens.")] = 60,
    plot: Annotated[
        Path | None,
        typer.Option(help="Write an HTML page with the courses here; it needs no network.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """Make the forecasts of the past anew, each from what was known then, and compare them with what came.

    Ratios are to the last value with its own past errors; below 1 is better. Bands are calibrated on line, as `kvscope forecast` does.
    """
    from observability.cli._terminal import check_writable, progress_bar
    from observability.cli.forecast import SIGNAL_NAMES
    from observability.errors import ConfigError
    from observability.store.forecasts import MODELS

    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")  # small matrices: threads only wait for one another
    if only not in SIGNAL_NAMES:
        raise ConfigError(f"--signal {only!r} is not forecast.", next_step=f"Give one of {', '.join(SIGNAL_NAMES)}.")
    wanted = models or [name for name in MODELS if name != "prophet"]
    for name in wanted:
        if name not in MODELS:
            raise ConfigError(
                f"--model {name!r} is not a forecast model.", next_step=f"Give one of {', '.join(MODELS)}."
            )
    if every % 10:
        raise ConfigError(f"--every {every} is not a multiple of 10 minutes.", next_step="Give 10, 30, 60 ...")
    if plot is not None:
        check_writable(plot, "Give --plot a path in a folder that you may write to.")

    from observability.forecast.limits import limits_of
    from observability.forecast.study import origins_of, study

    series = _series(source, only, of, days)
    origins = origins_of(series, days, every * 60.0)
    with progress_bar("forecasting", "forecasts") as show:
        found = study(
            series, wanted, origins, limits=limits_of(series.signal.name, series.labels.get("model", "")),
            progress=show if show is not None else lambda done, total: None,
        )  # fmt: skip
    if plot is not None:
        _plot(found, plot)
    if as_json:
        typer.echo(json.dumps(found.as_json(), allow_nan=False))
    else:
        _print(found, plot)


def _series(source: str, only: str, of: str | None, days: float) -> GridSeries:
    """The one series that is meant. Raises StoreError or ConfigError."""
    from observability.errors import ConfigError, StoreError
    from observability.forecast.series import FORECAST_SIGNALS, WINDOW_SECONDS, read_series
    from observability.forecast.study import read_csv
    from observability.store.open import PROMETHEUS, open_source

    signal = FORECAST_SIGNALS[only]
    if source.lower().endswith(".csv"):
        return read_csv(Path(source), signal)
    opened = open_source(f"{PROMETHEUS}{source}" if source.startswith(("http://", "https://")) else source)
    found = read_series(opened, signal, time.time(), days * 86400 + WINDOW_SECONDS)
    chosen = [each for each in found if of is None or of in each.labels.values()]
    if not chosen:
        names = sorted({each.labels["model"] for each in found})
        raise StoreError(
            f"{opened.describe()} has no {signal.name}" + (f" of {of}." if of else "."),
            next_step=f"Give --of one of {', '.join(names)}." if names else "Record an engine with `kvscope record`.",
        )
    if len(chosen) > 1:
        names = sorted(", ".join(each.labels.values()) for each in chosen)
        raise ConfigError(
            f"The history holds {signal.name} of {len(names)} models.",
            next_step=f"Give --of one of {', '.join(names)}.",
        )
    return chosen[0]


def _print(found: Study, plot: Path | None) -> None:
    from rich.console import Console
    from rich.table import Table

    from observability.store.forecasts import MODEL_TITLES

    series = found.series
    name = ", ".join([series.signal.title, *series.labels.values()])
    simulated = " (simulated history)" if series.simulated else ""
    table = Table(title=f"{name}{simulated}, one hour ahead", title_justify="left", box=None, pad_edge=False)
    heads = (
        "Model", f"Mean error, {series.signal.unit}", "MAE ratio", "CRPS ratio", "50 % covers", "80 %", "95 %", "Width ratio",
        "Brier skill", "CPU ms", "Forecasts",
    )  # fmt: skip
    for head in heads:
        table.add_column(head, justify="left" if head == "Model" else "right", no_wrap=head == "Model")
    for row in found.rows:
        table.add_row(
            MODEL_TITLES[row.model], f"{row.mae:.3g}", _ratio(row.mae_ratio), _ratio(row.crps_ratio),
            *(f"{share:.1%}" for share in (row.cover_50, row.cover_80, row.cover_95)), _ratio(row.width_ratio),
            _ratio(row.brier_skill), f"{row.milliseconds:.1f}", str(row.origins),
        )  # fmt: skip
    out = Console(highlight=False)
    out.print(table)
    out.print(
        f"Ratios are to the last value, below 1 is better. Brier skill: of the chance of going {'below' if found.limit.below else 'above'} {found.limit.value:.3g} "
        f"{series.signal.unit} ({found.limit.name}), above 0 is better than saying how often it came.",
        markup=False,
    )
    if plot is not None:
        out.print(f"Courses: {plot}", markup=False, soft_wrap=True)


def _ratio(value: float) -> str:
    return f"{value:z.2f}" if math.isfinite(value) else "-"


def _plot(found: Study, path: Path) -> None:
    """A page with what came and each model's forecast of one hour before, with its 95 % band. Raises ConfigError without plotly."""
    from observability.errors import ConfigError
    from observability.store.forecasts import MODEL_TITLES

    try:
        import plotly.graph_objects as go
    except ImportError as error:
        raise ConfigError(
            "plotly is not installed here.", next_step='Install it: pip install "kvscope[app]".'
        ) from error

    series = found.series
    made = next(iter(found.made.values()))
    shown = series.ends > made[0].origin - 86400
    figure = go.Figure()
    for place, (model, each) in enumerate(found.made.items()):
        at = _times([float(one.times[-1]) for one in each])
        ends = [[float(one.interval(0.95)[side][-1]) for one in each] for side in (0, 1)]
        common = {"legendgroup": model, "visible": True if place == 0 else "legendonly", "x": at}
        figure.add_scatter(y=ends[0], mode="lines", line={"width": 0}, showlegend=False, hoverinfo="skip", **common)
        figure.add_scatter(
            y=ends[1],
            mode="lines",
            line={"width": 0},
            fill="tonexty",
            name=f"{MODEL_TITLES[model]}: 95 % band",
            **common,
        )
        figure.add_scatter(
            y=[float(one.median[-1]) for one in each],
            mode="lines",
            name=f"{MODEL_TITLES[model]}: an hour before",
            **common,
        )
    values = [value if math.isfinite(value) else None for value in series.values[shown].tolist()]
    figure.add_scatter(
        x=_times(series.ends[shown].tolist()), y=values, mode="lines", name="what came", line={"color": "black"}
    )
    figure.add_hline(y=found.limit.value, line={"dash": "dot"}, annotation_text=found.limit.name)
    title = ", ".join([series.signal.title, *series.labels.values()])
    figure.update_layout(
        title=f"{title}: forecast one hour before, and what came", xaxis_title="UTC", yaxis_title=series.signal.unit
    )
    figure.write_html(path, include_plotlyjs=True, full_html=True)


def _times(seconds: Sequence[float]) -> list[str]:
    from datetime import UTC, datetime

    return [datetime.fromtimestamp(at, UTC).isoformat() for at in seconds]
