"""`kvscope incident`: a live engine in which a fault begins at a given time, to try alerts, runbooks and people on."""

from __future__ import annotations

import json
import signal
import threading
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from observability.errors import ConfigError, ServiceError

if TYPE_CHECKING:
    from observability.workload.incident import Incident

EXAMPLES = """
Examples:

  kvscope incident --list                                 what can go wrong, and the alert that must find it

  kvscope incident kv-exhaustion --port 9400              let a Prometheus with alerts/generated scrape 127.0.0.1:9400

  kvscope incident slow-periodic-job --after 120 --lasts 900 --every 30

  kvscope incident stuck-scheduler --json --duration 600
"""
_LOOK_SECONDS = 0.5
_EVALUATIONS_SECONDS = 45.0  # a scrape, two evaluations and the delivery, at the intervals of deploy/


def register(app: typer.Typer) -> None:
    app.command(epilog=EXAMPLES)(incident)


def incident(
    name: Annotated[str | None, typer.Argument(help="Which incident; --list tells them.", show_default=False)] = None,
    list_all: Annotated[bool, typer.Option("--list", help="List the incidents and end.")] = False,
    model: Annotated[
        str, typer.Option(help="tiny, smollm2-135m, or the path of a Llama directory or GGUF file.")
    ] = "tiny",
    label: Annotated[
        str | None,
        typer.Option(
            help="Label `model` of its series, to tell several at once apart. [default: the model's name]",
            show_default=False,
        ),
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of /metrics on 127.0.0.1; 0 takes a free one.")
    ] = 9400,
    after: Annotated[float, typer.Option(min=0.0, help="Seconds until the fault begins.")] = 60.0,
    lasts: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Seconds that the fault lasts; the load goes on after it. Default: until the end.",
            show_default=False,
        ),
    ] = None,
    duration: Annotated[
        float | None,
        typer.Option(min=0.0, help="Seconds after which it all ends. Default: at Ctrl-C.", show_default=False),
    ] = None,
    every: Annotated[float, typer.Option(min=1.5, help="Seconds between the runs of slow-periodic-job.")] = 30.0,
    seed: Annotated[int, typer.Option(help="Of the load and of the model's random weights.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line: what happens, and when.")] = False,
) -> None:
    """Run a live engine under a moderate load, break one of its mechanisms, and say which alert must fire and when."""
    from observability.workload import incident as incidents

    if list_all:
        _list(incidents.INCIDENTS, every, as_json)
        return
    if name is None:
        raise ConfigError("Which incident?", next_step="Name one; `kvscope incident --list` tells them.")
    chosen = incidents.find(name)
    from exporters.prometheus import start_exporter
    from observability.engine.clock import MonotonicClock
    from observability.engine.model.loading import load_model
    from observability.telemetry.recorder import Telemetry

    clock = MonotonicClock()
    config = incidents.engine_config(chosen)
    loaded = load_model(model)
    stored = str(loaded.model.dtype).removeprefix("torch.") if config.kv_dtype == "auto" else config.kv_dtype
    telemetry = Telemetry(
        label or loaded.name, executor="torch", virtual=False, device="cpu", kv_dtype=stored, clock=clock.now
    )
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    exporter = start_exporter(telemetry, port=port)
    engine = incidents.IncidentEngine(chosen, loaded, telemetry, clock, seed)
    began = time.monotonic()

    def tell(state: str, text: str, **more: Any) -> None:
        if as_json:
            typer.echo(json.dumps({"state": state, "seconds": round(time.monotonic() - began, 3), **more}))
        else:
            typer.echo(f"{time.monotonic() - began:7.1f} s  {text}")

    def wait(until: float | None) -> bool:
        """True: go on; False: the end has come."""
        ends = [x for x in (until, duration) if x is not None]
        while not ends or time.monotonic() - began < min(ends):
            left = min(ends) - (time.monotonic() - began) if ends else _LOOK_SECONDS
            if stop.wait(min(max(left, 0.0), _LOOK_SECONDS)):
                return False
            if not engine.thread.alive:
                raise ServiceError(
                    f"The engine has stopped: {engine.thread.error}", next_step="Start the incident again."
                )
        return until is not None and (duration is None or until < duration)

    engine.start()
    expected = _expected(chosen, every)
    try:
        tell(
            "healthy", f"{telemetry.model} runs under load, metrics at {exporter.url}; the fault begins in {after:g} s",
            incident=chosen.name, metrics=exporter.url, model=telemetry.model, **expected,
        )  # fmt: skip
        if not wait(after):
            return
        engine.inject(every)
        tell(
            "fault",
            f"{chosen.what} {chosen.alert} must fire within {expected['within_seconds']:.0f} s"
            + (f"; it needs {chosen.needs}" if chosen.needs else ""),
        )
        if not wait(None if lasts is None else after + lasts):
            return
        engine.end()
        tell("over", "The fault is over; the alert must resolve")
        wait(None)
    finally:
        engine.stop()
        exporter.stop()
        ends = ", ".join(f"{count} {outcome}" for outcome, count in sorted(engine.ended.items())) or "none"
        tell("stopped", f"Stopped. Requests ended: {ends}", requests=engine.ended)


def _expected(incident: Incident, every: float) -> dict[str, Any]:
    """Which alert, its severity, and the seconds from the fault to its firing."""
    from alerts import rules
    from observability.workload.incident import onset_seconds

    rule = rules.named(incident.alert)
    hold = float(rule.hold[:-1]) * {"s": 1, "m": 60, "h": 3600}[rule.hold[-1]]
    return {
        "alert": incident.alert,
        "severity": rule.severity,
        "within_seconds": onset_seconds(incident, every) + incident.shows_seconds + hold + _EVALUATIONS_SECONDS,
    }


def _list(incidents: tuple[Incident, ...], every: float, as_json: bool) -> None:
    rows = [{"incident": x.name, "what": x.what, "needs": x.needs, **_expected(x, every)} for x in incidents]
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("Incident", "What goes wrong", "Alert", "Within", box=None, padding=(0, 2, 0, 0))
    for row in rows:
        needs = f" Needs {row['needs']}." if row["needs"] else ""
        table.add_row(row["incident"], f"{row['what']}{needs}", row["alert"], f"{row['within_seconds']:.0f} s")
    Console().print(table)
