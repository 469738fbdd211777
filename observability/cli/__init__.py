"""The `kvscope` command. Each module of this folder adds its commands by `register(app)` and imports heavy parts late."""

from __future__ import annotations

import importlib
import pkgutil
import sys

import typer
from rich.console import Console

from observability.errors import KvscopeError

app = typer.Typer(
    name="kvscope",
    help="Says why the P99 of an LLM inference service is bad, with numbers that are right.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

root = app  # importing cli/app.py below binds the name `app` to that module
#: What is wrong with the environment, found while loading the commands; told by `main` as any other error.
_broken: KvscopeError | None = None
try:
    for _module in pkgutil.iter_modules(__path__):
        if not _module.name.startswith("_"):  # __main__ runs the command, it adds none
            importlib.import_module(f"{__name__}.{_module.name}").register(root)
except KvscopeError as error:
    _broken = error


def main() -> None:
    """Runs the command line; a KvscopeError becomes its message on standard error and its exit code."""
    try:
        if _broken is not None:
            raise _broken
        root()
    except KvscopeError as error:
        console = Console(stderr=True, highlight=False)
        console.print("error:", style="bold red", end=" ")
        console.print(error.reason, markup=False)
        if error.next_step:
            console.print("next: ", style="bold", end=" ")
            console.print(error.next_step, markup=False)
        sys.exit(error.exit_code)
