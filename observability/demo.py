"""The demo as a whole: model, simulated history, engine, load, recorder, forecasts and app, as one supervised set."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path

from platformdirs import user_data_path
from rich.console import Console
from rich.table import Table

from observability.supervise import Service, Supervisor, check_port_free

HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """What `kvscope demo` was asked for. `data_dir` None is the user's data folder."""

    data_dir: Path | None
    model: str
    engine_port: int
    app_port: int
    forecast_port: int
    days: float
    load: bool


def run_demo(settings: DemoSettings) -> None:
    """Starts everything, prints the addresses, and returns when asked to stop. Raises ServiceError when a part fails."""
    console = Console(stderr=True)
    data_dir = settings.data_dir or user_data_path("kvscope")
    store = data_dir / "kvscope.sqlite"
    data_dir.mkdir(parents=True, exist_ok=True)
    check_port_free(HOST, settings.engine_port, "The engine")
    check_port_free(HOST, settings.app_port, "The app")
    check_port_free(HOST, settings.forecast_port, "The forecasts")
    engine_url, app_url = f"http://{HOST}:{settings.engine_port}", f"http://{HOST}:{settings.app_port}"
    started = time.monotonic()
    with Supervisor(data_dir / "logs") as supervisor:
        try:
            _prepare(settings, store)
            for service in _services(settings, store, engine_url, app_url):
                with console.status(f"Starting {service.name} ..."):
                    supervisor.start(service)
            _announce(
                console,
                engine_url,
                app_url,
                settings.forecast_port,
                store,
                data_dir / "logs",
                time.monotonic() - started,
            )
            supervisor.watch()
        except KeyboardInterrupt:
            pass
        console.print("Stopping ...")
    console.print(f"Stopped. Nothing is left running; the history stays in {store}.", soft_wrap=True)


def _prepare(settings: DemoSettings, store: Path) -> None:
    """Fetches the model and fills the history up to now where it is missing. Both show their progress."""
    from observability.engine.model.fetch import fetch_model
    from observability.workload.history import make_history

    if settings.model == "smollm2-135m":
        fetch_model()
    make_history(store, days=settings.days, model=_served_name(settings.model))


def _served_name(model: str) -> str:
    """The `model` label that the engine will give its series, so that the simulated ones join them."""
    path = Path(model)
    return path.stem if path.is_file() else path.resolve().name if path.is_dir() else model


def _services(settings: DemoSettings, store: Path, engine_url: str, app_url: str) -> list[Service]:
    from observability.workload.history import CONFIG

    kvscope = (sys.executable, "-m", "observability.cli")
    engine_options = (
        "--kv-dtype", CONFIG.kv_dtype, "--kv-blocks", str(CONFIG.num_blocks),
        "--max-model-len", str(CONFIG.max_model_len), "--max-num-seqs", str(CONFIG.max_num_seqs),
        "--max-num-batched-tokens", str(CONFIG.max_num_batched_tokens),
    )  # fmt: skip
    services = [
        Service(
            "engine",
            (*kvscope, "serve", settings.model, "--port", str(settings.engine_port), *engine_options),
            ready_url=f"{engine_url}/health",
        ),
        Service("recorder", (*kvscope, "record", "--url", f"{engine_url}/metrics", "--store", str(store))),
        Service(
            "forecasts",
            (
                *kvscope,
                "forecast",
                "--store",
                str(store),
                "--every",
                "10m",
                "--serve",
                "--host",
                HOST,
                "--port",
                str(settings.forecast_port),
            ),
        ),
        Service(
            "app",
            (
                *kvscope,
                "app",
                "--source",
                str(store),
                "--port",
                str(settings.app_port),
                "--endpoint",
                f"{engine_url}/metrics",
            ),
            ready_url=f"{app_url}/_stcore/health",
        ),
    ]
    if settings.load:
        load = ("replay", "generated", "--preset", "laptop", "--url", engine_url, "--span", str(14 * 86400))
        services.insert(2, Service("load", (*kvscope, *load)))
    return services


def _announce(
    console: Console, engine_url: str, app_url: str, forecast_port: int, store: Path, logs: Path, seconds: float
) -> None:
    table = Table(box=None, show_header=False, padding=(0, 2))
    table.add_row("App", app_url)
    table.add_row("OpenAI endpoint", f"{engine_url}/v1")
    table.add_row("Metrics", f"{engine_url}/metrics")
    table.add_row("Forecasts", f"http://{HOST}:{forecast_port}/metrics")
    table.add_row("History", str(store))
    table.add_row("Logs", str(logs))
    console.print(f"[bold]kvscope is running[/bold] after {seconds:.0f} s. Ctrl-C stops all of it.")
    console.print(table)
