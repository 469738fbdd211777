"""The `kvscope` command. The module `scrape_config` of this folder adds the command `scrape-config` by `register(app)`, and so on; a module is
imported when its command is asked for, and imports heavy parts later still."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from observability import config as configuration
from observability.cli._commands import PREFIX, CommandGroup, Tables, drop_service_links
from observability.errors import ConfigError, KvscopeError
from observability.extras import extra_for

root = typer.Typer(
    name="kvscope",
    cls=CommandGroup,
    help="Says why the P99 of an LLM inference service is bad, with numbers that are right.",
    epilog="Every option can be set in the environment or in one file, too: `kvscope config`.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": PREFIX},
)


def _read_config(context: typer.Context, file: Path | None) -> Path | None:
    if context.resilient_parsing:  # completion of a command line that is not finished
        return file
    drop_service_links()
    if file is not None:
        os.environ[configuration.ENVIRONMENT] = str(file)  # processes started from here read the same one
    found = configuration.read()
    context.default_map = Tables(context.command, found)
    return file


def _told(variable: str, *, is_file: bool = False) -> object:
    """A callback that hands an option on to every part and process that reads `variable`."""

    def tell(context: typer.Context, value: Path | None) -> Path | None:
        if value is not None and not context.resilient_parsing:
            if is_file and not value.is_file():
                raise ConfigError(f"{variable} names {value}, which is no file.", next_step="Correct or unset it.")
            os.environ[variable] = str(value)
        return value

    return tell


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"kvscope {version('kvscope')}")
        raise typer.Exit


@root.callback()
def _options(
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", envvar=configuration.ENVIRONMENT, is_eager=True, callback=_read_config, show_default=False,
            help="Configuration file. Default: kvscope.toml in the user's configuration folder, if there is one.",
        ),
    ] = None,
    objectives: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", envvar="KVSCOPE_OBJECTIVES", callback=_told("KVSCOPE_OBJECTIVES", is_file=True), show_default=False,
            help="File of objectives of your own, in place of the configuration file's.",
        ),
    ] = None,
    models: Annotated[
        Path | None,
        typer.Option(
            metavar="DIRECTORY", envvar="KVSCOPE_MODELS", callback=_told("KVSCOPE_MODELS"), show_default=False,
            help="Folder of fetched models. Default: models in the user's cache folder.",
        ),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Show the version and exit.")
    ] = False,
) -> None:  # fmt: skip
    """Says why the P99 of an LLM inference service is bad, with numbers that are right."""


def main() -> None:
    """Runs the command line; a KvscopeError becomes its message on standard error and its exit code."""
    try:
        try:
            root(prog_name="kvscope")  # also for `python -m observability.cli`
        except ModuleNotFoundError as error:
            extra = extra_for(error.name or "")
            if extra is None:
                raise
            raise ConfigError(
                f"This needs the package {error.name}, which is not installed here.",
                next_step=f'Install it: pip install "kvscope[{extra}]".',
            ) from error
    except KvscopeError as error:
        from rich.console import Console

        console = Console(stderr=True, highlight=False)
        # Soft wraps: what is copied from an error, a path or a command, stays in one piece.
        console.print("error:", style="bold red", end=" ")
        console.print(error.reason, markup=False, soft_wrap=True)
        if error.next_step:
            console.print("next: ", style="bold", end=" ")
            console.print(error.next_step, markup=False, soft_wrap=True)
        sys.exit(error.exit_code)
