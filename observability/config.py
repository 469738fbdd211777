"""The one configuration file: where it lies and its tables. Built on the errors alone; objectives and the command line read it.

TOML. Keys at the top are options of `kvscope` itself, a table is named after a command (`[serve]`, `[boards.import]`) and holds its options,
`[[objective]]` tables are objectives of your own. An environment variable stands before the file, a flag before both.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from observability.errors import ConfigError

ENVIRONMENT = "KVSCOPE_CONFIG"
OBJECTIVE = "objective"


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """`path` is where it lies or would lie; `tables` is empty where there is none."""

    path: Path
    tables: Mapping[str, Any] = field(default_factory=dict)
    exists: bool = False


def default_path() -> Path:
    """Where the file is looked for when nothing names one."""
    import platformdirs  # late: most runs name no file and some have no home

    return platformdirs.user_config_path("kvscope") / "kvscope.toml"


def read() -> ConfigFile:
    """The file that KVSCOPE_CONFIG names, or the one at the default place if there is one.

    Raises ConfigError when a named file is missing, or a file cannot be read or is not TOML.
    """
    named = os.environ.get(ENVIRONMENT)
    path = Path(named) if named else default_path()
    try:
        return parsed(path)
    except FileNotFoundError as error:
        if not named:
            return ConfigFile(path)
        raise ConfigError(
            f"The configuration file {path} does not exist.", next_step=f"Correct {ENVIRONMENT} or --config."
        ) from error


def parsed(path: Path) -> ConfigFile:
    """The file at `path`. Raises FileNotFoundError where there is none, and ConfigError when it cannot be read or is not TOML."""
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(path) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"The configuration file {path} cannot be read: {error}.",
            next_step=f"Make it a readable text file, or name another one by --config or {ENVIRONMENT}.",
        ) from error
    return ConfigFile(path, toml(text, str(path), "docs/configuration.md"), exists=True)


def toml(text: str, source: str, page: str) -> dict[str, Any]:
    """The tables of a TOML text. Raises ConfigError, which names `source` and the page with an example."""
    try:
        return tomllib.loads(text)
    except (
        ValueError,
        RecursionError,
    ) as error:  # ValueError: not TOML, or a number of thousands of digits; recursion: a thousand brackets
        raise ConfigError(f"{source} is not TOML: {error}.", next_step=f"See {page} for an example.") from error
