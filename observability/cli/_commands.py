"""Commands by name, imported when they are asked for, and where their options come from besides flags: the environment and one file."""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Iterator, Mapping, MutableMapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_group

from observability.config import OBJECTIVE, ConfigFile
from observability.errors import ConfigError

#: `--port` of `kvscope serve` is KVSCOPE_SERVE_PORT in the environment.
PREFIX = "KVSCOPE"
_FOLDER = Path(__file__).parent


class Commands(MutableMapping[str, Any]):
    """Name -> command, each from the module of this folder that is named after it."""

    def __init__(self) -> None:
        names = (m.name for m in pkgutil.iter_modules([str(_FOLDER)]) if not m.name.startswith("_"))
        self._loaded: dict[str, Any] = dict.fromkeys(name.replace("_", "-") for name in sorted(names))

    def __getitem__(self, name: str) -> Any:
        if self._loaded[name] is None:
            module = importlib.import_module(f"{__package__}.{name.replace('-', '_')}")
            alone = typer.Typer()
            module.register(alone)
            self._loaded[name] = _without_derived_variables(get_group(alone).commands[name])
        return self._loaded[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._loaded[name] = command

    def __delitem__(self, name: str) -> None:
        del self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._loaded)

    def __len__(self) -> int:
        return len(self._loaded)


def _without_derived_variables(command: Any) -> Any:
    """Help names a variable of its own only: the derived ones follow one rule, and would take a line for each option."""
    for parameter in command.params:
        if parameter.envvar is None:
            parameter.show_envvar = False
    for sub in getattr(command, "commands", {}).values():
        _without_derived_variables(sub)
    return command


class CommandGroup(TyperGroup):
    """The group of all commands."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = Commands()

    def make_context(self, *args: Any, **settings: Any) -> Any:
        """As the group's; KVSCOPE_VERSION, such as an image's tag, is no option of it."""
        for parameter in self.params:
            if parameter.envvar is None:
                parameter.allow_from_autoenv = parameter.show_envvar = False  # type: ignore[attr-defined]
        return super().make_context(*args, **settings)


def drop_service_links() -> None:
    """Kubernetes puts KVSCOPE_APP_PORT=tcp://10.0.0.1:80 into pods for a Service named kvscope-app: no port that anybody set."""
    for name, value in list(os.environ.items()):
        if name.startswith(f"{PREFIX}_") and "_PORT" in name and value.startswith(("tcp://", "udp://", "sctp://")):
            del os.environ[name]


class Tables(dict[str, Any]):
    """Defaults of a command's parameters by their Python names, from a file's tables; a subcommand's are checked when it runs.

    Raises ConfigError for a table or key that nothing reads, and for a value that the option does not take.
    """

    def __init__(
        self, command: Any, file: ConfigFile, tables: Mapping[str, Any] | None = None, place: str = ""
    ) -> None:
        super().__init__()
        self.command, self.file, self.place = command, file, place
        self._below: dict[str, Mapping[str, Any]] = {}
        keys = {key(parameter): parameter for parameter in command.params if parameter.expose_value}
        groups = getattr(command, "commands", {})
        for name, value in (file.tables if tables is None else tables).items():
            parameter = keys.get(name.replace("_", "-"))
            if parameter is not None and parameter.name not in ("config", "version"):
                self[parameter.name] = self._checked(name, parameter, value)
            elif name in groups and isinstance(value, Mapping):
                self._below[name] = value
            elif not (name == OBJECTIVE and not place):
                self._refuse(name, [*keys, *groups])

    def get(self, name: str, default: Any = None) -> Any:
        if name in self._below:
            place = f"{self.place}.{name}".lstrip(".")
            return Tables(self.command.commands[name], self.file, self._below[name], place)
        return super().get(name, default)

    def _refuse(self, name: str, known: list[str]) -> None:
        near = get_close_matches(name, known, n=3)
        where = f"table [{self.place}]" if self.place else "top"
        raise ConfigError(
            f"{self.file.path}: the {where} has {name!r}, which no option or command is called.",
            next_step=f"Did you mean {' or '.join(near)}?" if near else f"There are {', '.join(sorted(known))}.",
        )

    def _checked(self, name: str, parameter: Any, value: Any) -> Any:
        value = _as_option(parameter, value)
        try:
            parameter.process_value(typer.Context(self.command, resilient_parsing=True), value)
        except Exception as error:
            if not hasattr(error, "format_message"):  # of the command line's library: the value is no such thing
                raise
            at = f"[{self.place}] {name}" if self.place else name
            raise ConfigError(
                f"{self.file.path}: {at} = {value!r}: {error.message}".rstrip(".") + ".",  # type: ignore[attr-defined]
                next_step="Give it as the option takes it; --help of the command says how.",
            ) from error
        return value


def key(parameter: Any) -> str:
    """Name of a parameter in the file: of an option the long one without dashes, of an argument its own."""
    if parameter.param_type_name == "argument":
        return str(parameter.name).replace("_", "-")
    return str(max(parameter.opts, key=len)).lstrip("-")


def _as_option(parameter: Any, value: Any) -> Any:
    """What the command line would have been given: tables and lists for options that may be given more than once."""
    if isinstance(value, Mapping) and parameter.multiple:
        return [f"{name}={_text(each)}" for name, each in _flat(value)]
    if isinstance(value, list):
        return [_text(each) for each in value] if parameter.multiple or parameter.nargs != 1 else value
    return [_text(value)] if parameter.multiple else value


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        return ",".join(map(_text, value))
    return str(value)
