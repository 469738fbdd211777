"""`kvscope record`: scrapes one metrics endpoint and keeps its signals in a file, for app and forecasts without a Prometheus."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from observability.errors import ConfigError

if TYPE_CHECKING:
    from observability.errors import StoreError

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def register(app: typer.Typer) -> None:
    app.command()(record)


def record(
    url: Annotated[str, typer.Option(help="Metrics endpoint to scrape.")] = "http://127.0.0.1:8000/metrics",
    store: Annotated[
        Path | None, typer.Option(help="File to write. Default: kvscope.sqlite in the user's data folder.")
    ] = None,
    interval: Annotated[str, typer.Option(help="Time between scrapes, such as 15s or 1m.")] = "15s",
    token: Annotated[
        str | None, typer.Option(envvar="KVSCOPE_TOKEN", help="Bearer token of the endpoint.", show_default=False)
    ] = None,
) -> None:
    """Record the signals of an engine until Ctrl-C. An endpoint that dies and returns is picked up again by itself.

    Examples:

        kvscope record

        kvscope record --url http://127.0.0.1:9000/metrics --store ./live.sqlite --interval 30s
    """
    import signal
    import threading

    from platformdirs import user_data_path

    from observability.store import embedded
    from observability.store.recorder import HttpTarget
    from observability.store.recorder import record as run

    seconds = parse_interval(interval)
    path = store or user_data_path("kvscope") / "kvscope.sqlite"
    # A target that hangs must not keep the recorder from ending within the 10 s that supervisors wait.
    target = HttpTarget(url, token=token, timeout_seconds=min(seconds, 8.0))
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    file = embedded.create(path)

    def on_change(failure: StoreError | None) -> None:
        typer.echo(
            f"{target.name} answers." if failure is None else f"{failure}\nTrying again every {interval}.", err=True
        )

    def on_store(failure: StoreError | None) -> None:
        told = (
            f"{failure}\nWhat is observed meanwhile is kept for an hour at 15 s."
            if failure
            else "The store is written again."
        )
        typer.echo(told, err=True)

    with file.recording():
        typer.echo(f"Recording {target.name} into {path} every {interval}; Ctrl-C ends it.", err=True)
        run(target, file, seconds, stop, on_change=on_change, on_store=on_store)
        typer.echo(f"Ended; the recorded history stays in {path}.", err=True)
    target.close()


def parse_interval(text: str) -> float:
    """Seconds of a duration such as 500ms, 15s, 1m. Raises ConfigError outside 0.5 s to 5 min."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h)", text.strip())
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not 0.5 <= seconds <= 300.0:
        raise ConfigError(
            f"{text!r} is not an interval between 0.5 s and 5 min.", next_step="Give one such as 15s or 1m."
        )
    return seconds
