"""`kvscope config`: every setting of a command with its value and where that comes from. Secrets are masked."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

_SECRET = re.compile(r"(^|_)(token|api_key|password|secret)$")
_USERINFO = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_MASK = "********"


def register(app: typer.Typer) -> None:
    # What stands behind the name of a command is that command's.
    settings = {"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False}
    app.command(context_settings=settings)(config)


@dataclass(frozen=True, slots=True)
class Setting:
    """One option: its name in the file, its variable, its value as text ("" for none) and where that comes from."""

    name: str
    value: str
    source: str
    variable: str


def config(
    context: typer.Context,
    command: Annotated[
        list[str] | None,
        typer.Argument(help="A command, and flags that you would give it. Default: what is set for any command."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the settings as JSON.")] = False,
) -> None:
    """Show settings, their values and where each comes from: a flag stands before the environment, that before the file, that before the
    default. The file is TOML, with a table for each command.

    Examples:

        kvscope config                              # what is set, for all commands

        kvscope config serve                        # all settings of one command

        kvscope config serve --port 9000 --json     # as with these flags; --json is the command's: give config's before the name

        kvscope --config ./kvscope.toml config --json serve
    """
    from observability.config import read

    top = context.find_root()
    file = read()
    if command:
        found = list(_of_command(top, command))
    else:
        found = [setting for setting in _all(top) if setting.source != "default"]
    unknown = [] if command else _unread(top)
    if as_json:
        shown = {
            "file": str(file.path),
            "exists": file.exists,
            "settings": [asdict(s) for s in found],
            "unread": unknown,
        }
        typer.echo(json.dumps(shown, indent=1))
        return
    typer.echo(f"# {file.path}" + ("" if file.exists else " (there is none)"))
    wide = [max((len(getattr(s, field)) for s in found), default=0) for field in ("name", "value")]
    for s in found:
        typer.echo(f"{s.name:{wide[0]}}  {s.value:{wide[1]}}  {s.source}")
    if not found:
        typer.echo("Nothing is set: every option has its default. `kvscope config serve` shows those of serve.")
    for name in unknown:
        typer.echo(f"{name} is set, and nothing reads it.", err=True)


def _of_command(top: Any, words: list[str]) -> Iterator[Setting]:
    """Settings of the command that the first of `words` name; the others are taken as its flags."""
    parent: Any = top
    names: list[str] = []
    while words and hasattr(parent.command, "commands"):
        name, *words = words
        sub = parent.command.get_command(parent, name)
        if sub is None:
            parent.fail(f"No such command {' '.join([*names, name])!r}.")
        names.append(name)
        # resilient: a required argument that is not there is no mistake here
        group = hasattr(sub, "commands")
        parent = sub.make_context(name, [] if group else list(words), parent=parent, resilient_parsing=True)
    yield from _settings(parent, ".".join(names))
    if hasattr(parent.command, "commands"):
        for name in parent.command.commands:
            yield from _of_command(top, [*names, name])


def _all(top: Any) -> Iterator[Setting]:
    yield from _settings(top, "")
    for name in top.command.commands:
        yield from _of_command(top, [name])


def _settings(context: Any, place: str) -> Iterator[Setting]:
    from observability.cli._commands import key

    for parameter in context.command.params:
        if not parameter.expose_value or parameter.name in ("as_json", "version"):
            continue
        source = context.get_parameter_source(parameter.name).name
        value = context.params.get(parameter.name)
        name = f"{place}.{key(parameter)}".lstrip(".")
        if value is None and source != "DEFAULT":
            _refuse(context, parameter, source)
        variable = _variable(context, parameter)
        told = {
            "COMMANDLINE": "flag", "ENVIRONMENT": f"environment {variable}", "DEFAULT_MAP": "file", "DEFAULT": "default",
        }  # fmt: skip
        yield Setting(name, _shown(parameter.name, value), told[source], variable)


def _refuse(context: Any, parameter: Any, source: str) -> None:
    """Tells what is wrong with a value that the option does not take, as its command would."""
    if source != "COMMANDLINE":
        raw, _ = parameter.consume_value(context, {})
        parameter.process_value(context, raw)
    context.fail(f"The value of {parameter.opts[0]} is not one that it takes.")


def _variable(context: Any, parameter: Any) -> str:
    """The environment variable that is read: the one that is set, or else the first of them; "" for an argument without one."""
    own = [parameter.envvar] if isinstance(parameter.envvar, str) else list(parameter.envvar or ())
    if parameter.param_type_name == "option" and context.auto_envvar_prefix:
        own.append(f"{context.auto_envvar_prefix}_{parameter.name}".upper())
    return next((name for name in own if os.environ.get(name)), own[0] if own else "")


def _shown(name: str, value: Any) -> str:
    if value is None or value == []:
        return ""
    if _SECRET.search(name):
        return _MASK
    text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return _USERINFO.sub(_MASK, text)


def _unread(top: Any) -> list[str]:
    """Variables of kvscope's prefix that no command reads, such as a misspelt one."""
    from observability.cli._commands import PREFIX

    known = {s.variable for s in _all(top)}
    return sorted(name for name in os.environ if name.startswith(f"{PREFIX}_") and name not in known)
