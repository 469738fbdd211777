"""`kvscope history`: days of simulated history in a store, to try app and forecasts without waiting for days."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command()(history)


def history(
    store: Annotated[
        Path | None, typer.Option(help="File to fill. Default: kvscope.sqlite in the user's data folder.")
    ] = None,
    days: Annotated[float, typer.Option(min=0.1, max=14.0, help="How far back it goes.")] = 3.0,
    model: Annotated[str, typer.Option(help="Model label of the series.")] = "smollm2-135m",
    seed: Annotated[int, typer.Option(min=0, help="Another seed, another load.")] = 0,
) -> None:
    """Fill a store with simulated history (virtual time) up to now, one point a minute.

    The generated load runs through the bundled engine on a modelled CPU, its telemetry and the recorder: the live pipeline
    with another clock. What the store already holds is kept. Pages mark the span as simulated.

    Examples:

        kvscope history

        kvscope history --store ./week.sqlite --days 7
    """
    from platformdirs import user_data_path

    from observability.workload.history import make_history

    path = store or user_data_path("kvscope") / "kvscope.sqlite"
    made = make_history(path, days=days, model=model, seed=seed)
    typer.echo(
        f"{made.steps:,} minutes and {made.requests:,} requests simulated (virtual time) in {made.wall_seconds:.0f} s: {path}"
    )
