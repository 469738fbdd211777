"""`kvscope demo`: a real model under a generated load, with recorder, forecasts and app, on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command()(demo)


def demo(
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder for recorded history and logs. Default: the user's data folder.")
    ] = None,
    model: Annotated[str, typer.Option(help="Model to serve: smollm2-135m, or a path.")] = "smollm2-135m",
    engine_port: Annotated[int, typer.Option(help="Port of the OpenAI endpoint and /metrics.")] = 8000,
    app_port: Annotated[int, typer.Option(help="Port of the app.")] = 8501,
    forecast_port: Annotated[int, typer.Option(help="Port of the forecasts' /metrics.")] = 9402,
    days: Annotated[
        float, typer.Option(min=0.1, max=14, help="Days of simulated history made at the first start.")
    ] = 3.0,
    load: Annotated[bool, typer.Option(help="Send the generated load to the engine.")] = True,
) -> None:
    """Start everything on this machine and keep it running until Ctrl-C.

    \b
    kvscope demo                          # app on http://127.0.0.1:8501
    kvscope demo --engine-port 9000       # another port for the engine
    """
    from observability.demo import DemoSettings, run_demo

    run_demo(
        DemoSettings(
            data_dir=data_dir,
            model=model,
            engine_port=engine_port,
            app_port=app_port,
            forecast_port=forecast_port,
            days=days,
            load=load,
        )
    )
