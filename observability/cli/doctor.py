"""`kvscope doctor`: checks what kvscope stands on and says what to change. `--host` looks at this machine and its GPUs."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from observability.errors import ConfigError

if TYPE_CHECKING:
    from exporters.gpu.host import Check

_EXIT = {"ok": 0, "unknown": 0, "warning": 1, "broken": 2}
_MARK = {"ok": "[green]ok[/]", "unknown": "[dim]?[/]", "warning": "[yellow]change[/]", "broken": "[red]broken[/]"}


def register(app: typer.Typer) -> None:
    app.command()(doctor)


def doctor(
    host: Annotated[
        bool, typer.Option("--host", help="Check this machine: card, driver, PCIe, NUMA, memory repairs, power.")
    ] = False,
    pid: Annotated[
        int | None,
        typer.Option(min=1, help="With --host: the process whose CPUs should lie beside the GPU. Default: this one."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the checks as JSON.")] = False,
) -> None:
    """Check what kvscope stands on, and say what to change. Exit code: 0 nothing to change, 1 something costs speed, 2 something is broken.

    Examples:

        kvscope doctor --host

        kvscope doctor --host --pid 4242 --json
    """
    if not host:
        raise ConfigError("Nothing to check was named.", next_step="Give --host.")
    check_this_host(pid, as_json)


def check_this_host(pid: int | None, as_json: bool) -> None:
    """Prints the checks of this machine and ends with their exit code."""
    from pathlib import Path

    from exporters.gpu.host import check_host
    from exporters.gpu.nvml import opened

    if pid is not None and not Path(f"/proc/{pid}").exists():
        raise ConfigError(f"There is no process {pid}.", next_step="Give the id of a running one.")
    with opened() as source:
        checks = check_host(source, pid=pid)
    code = max(_EXIT[check.status] for check in checks)
    if as_json:
        typer.echo(json.dumps({"exit_code": code, "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        _print(checks)
    raise typer.Exit(code)


def _print(checks: list[Check]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("", "GPU", "Check", "Found"):
        table.add_column(title, overflow="fold")
    for check in checks:
        table.add_row(_MARK[check.status], check.gpu, check.name, escape(check.found))
        if check.do:
            table.add_row("", "", "", f"[bold]{escape(check.do)}[/]")
    Console(highlight=False).print(table)
