"""`kvscope doctor`: checks what kvscope stands on and says what to change. A URL is looked at as an engine's metrics endpoint, `--host` looks
at this machine and its GPUs."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from observability.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from exporters.adapters.doctor import Report
    from exporters.adapters.endpoint import Finding
    from exporters.gpu.host import Check

_EXIT = {"ok": 0, "unknown": 0, "warning": 1, "broken": 2}
_MARK = {"ok": "[green]ok[/]", "unknown": "[dim]?[/]", "warning": "[yellow]change[/]", "broken": "[red]broken[/]"}


def register(app: typer.Typer) -> None:
    app.command()(doctor)


def doctor(
    urls: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[URL]...",
            help="Metrics endpoint of an engine to look at; without a path its usual one. Of several replicas it also says whether their numbers add up.",
            show_default=False,
        ),
    ] = None,
    host: Annotated[
        bool, typer.Option("--host", help="Check this machine: card, driver, PCIe, NUMA, memory repairs, power.")
    ] = False,
    pid: Annotated[
        int | None,
        typer.Option(min=1, help="With --host: the process whose CPUs should lie beside the GPU. Default: this one."),
    ] = None,
    token: Annotated[
        str | None, typer.Option(envvar="KVSCOPE_TOKEN", help="Bearer token of the endpoint.", show_default=False)
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, max=300, help="Seconds that one answer may take.")] = 10.0,
    interval: Annotated[
        float, typer.Option(min=0, max=300, help="Seconds between the two looks that tell frozen gauges; 0: one look.")
    ] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
) -> None:
    """Check what kvscope stands on, and say what to change: an engine's metrics endpoint, or this machine.

    Of an endpoint: which engine it is, which signals it feeds, which settings would add more, and what is wrong with its numbers.

    Exit code: 0 nothing to change, 1 something is wrong or costs speed, 2 something is broken or cannot be read.

    Examples:

        kvscope doctor http://127.0.0.1:8000/metrics

        kvscope doctor https://llm.example.com/metrics --token "$TOKEN" --interval 10 --json

        kvscope doctor http://10.0.0.5:8000/metrics http://10.0.0.6:8000/metrics

        kvscope doctor --host

        kvscope doctor --host --pid 4242 --json
    """
    try:
        if bool(urls) == host:
            raise ConfigError("Name one thing to check.", next_step="Give the URL of a metrics endpoint, or --host.")
        if urls:
            check_endpoints(urls, token, timeout, interval, as_json)
        else:
            check_this_host(pid, as_json)
    except ConfigError as error:
        if as_json:  # who reads JSON reads it on a mistake as well
            said = {"level": "error", "code": "not_asked_right", "found": error.reason, "do": error.next_step}
            typer.echo(json.dumps({"exit_code": error.exit_code, "findings": [said]}, indent=2))
            raise typer.Exit(error.exit_code) from None
        raise


_LEVEL = {"error": "[red]error[/]", "warning": "[yellow]warning[/]", "note": "[dim]note[/]"}
_STATUS = {"fed": "[green]yes[/]", "partial": "[yellow]in part[/]", "missing": "[red]missing[/]", "no": "[dim]no[/]"}


def check_endpoints(urls: Sequence[str], token: str | None, timeout: float, interval: float, as_json: bool) -> None:
    """Prints what a look at each of `urls`, and at all of them together, gave and ends with the exit code of the worst."""
    import sys

    from exporters.adapters.doctor import examine, together

    reports = [examine(url, token=token, timeout_seconds=timeout, interval_seconds=interval) for url in urls]
    common = together(reports)
    code = max(1 if common else 0, *(report.exit_code for report in reports))
    if as_json:
        found = [{"exit_code": report.exit_code, **asdict(report)} for report in reports]
        several = {"exit_code": code, "endpoints": found, "findings": [asdict(finding) for finding in common]}
        typer.echo(json.dumps(several if len(found) > 1 else found[0], indent=2))
    elif sys.stdout.isatty():
        for report in reports:
            _print_report(report)
        _print_findings(common)
    else:
        typer.echo("\n".join([line for report in reports for line in plain(report)] + _plain_findings(common)))
    raise typer.Exit(code)


def plain(report: Report) -> list[str]:
    """`report` as lines for a file or a pipe: one fact a line, its kind first."""
    out = [f"endpoint: {report.url}", f"engine: {report.title or 'not recognized'}"]
    out += (
        [f"version: {report.version.text} [{report.version.status}: {report.version.reason}]"] if report.engine else []
    )
    for reading in report.readings:
        out.append(
            f"{reading.name}: {reading.text} [{reading.status}{': ' + reading.reason if reading.reason else ''}]"
        )
    for state in report.signals:
        out.append(f"signal {state.status}: {state.title}{': ' + state.reason if state.reason else ''}")
    out += [f"setting: {flag.setting}: {flag.gives}" for flag in report.flags]
    return out + _plain_findings(report.findings)


def _plain_findings(findings: Sequence[Finding]) -> list[str]:
    return [f"{each.level}: {each.found}{' Next: ' + each.do if each.do else ''}" for each in findings]


def _print_report(report: Report) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    about = f", version {report.version.text} ({report.version.reason})" if report.engine else ""
    console.print(f"[bold]{escape(report.url)}[/]: {escape(report.title or 'not recognized')}{escape(about)}")
    if report.readings:
        table = Table("Now and since the engine started", "", "How sure", box=None, pad_edge=False)
        for reading in report.readings:
            sure = f"{reading.status}{': ' + reading.reason if reading.reason else ''}"
            table.add_row(escape(reading.name), escape(reading.text), f"[dim]{escape(sure)}[/]")
        console.print(table, "")
    if report.signals:
        table = Table("Signal", "Fed", "Why", box=None, pad_edge=False)
        order = list(_STATUS)
        for state in sorted(report.signals, key=lambda state: order.index(state.status)):
            table.add_row(escape(state.title), _STATUS[state.status], f"[dim]{escape(state.reason)}[/]")
        console.print(table, "")
    for flag in report.flags:
        console.print(f"[bold]{escape(flag.setting)}[/] would add: {escape(flag.gives)}")
    _print_findings(report.findings)
    if report.engine and not report.findings:
        console.print("[green]No finding.[/]")


def _print_findings(findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False)
    for finding in findings:
        console.print(f"{_LEVEL[finding.level]} {escape(finding.found)}")
        if finding.do:
            console.print(f"        [bold]{escape(finding.do)}[/]")


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
