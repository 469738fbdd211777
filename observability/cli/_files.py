"""Files that commands make from code: how those in a folder compare with them, writing those that differ, and the series they name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from observability.errors import ConfigError

_SERIES = re.compile(r"(?<![\w:/.-])(?:[a-z_]+:)?kvscope_[a-z0-9_]*[a-z0-9](?::[a-z0-9_]+)?(?![\w:/.-])")


def compare(folder: Path, files: Mapping[str, str], *, owned: Iterable[str] = ()) -> dict[str, str]:
    """current, stale or missing for each of `files` below `folder`, and unknown for each other file in the `owned` folders below it."""
    state = {}
    for name, text in files.items():
        path = folder / name
        if not path.is_file():
            state[name] = "missing"
        else:
            state[name] = "current" if path.read_text(encoding="utf-8", errors="replace") == text else "stale"
    for parent in owned:
        for path in sorted((folder / parent).glob("*")):
            name = path.relative_to(folder).as_posix()
            if name not in files and path.is_file():
                state[name] = "unknown"
    return state


def write(folder: Path, files: Mapping[str, str], state: dict[str, str]) -> None:
    """Writes what is not current by `state`, which then says written. Raises ConfigError."""
    for name, text in files.items():
        if state[name] == "current":
            continue
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be written: {error.strerror}.", next_step="Name a folder that you may write to."
            ) from error
        state[name] = "written"


def known_series() -> set[str]:
    """Every series that an exporter of kvscope has or its rules record."""
    from alerts import adapters, rules
    from exporters.adapters.engines import ADAPTERS
    from observability import catalog

    out = set(rules.recorded_names()) | {adapters.CAPABILITY}
    for adapter in ADAPTERS.values():
        out |= {name for found in adapters.groups(adapter).values() for name, _ in found}
    for family in catalog.FAMILIES:
        out.add(family.series)
        if family.kind == "histogram":
            out |= {f"{family.name}{part}" for part in ("_bucket", "_sum", "_count")}
    return out


def unknown_series(expr: str, known: set[str]) -> list[str]:
    """Series of kvscope that `expr` names and nothing has: of an older version, or misspelt. Text in quotes is left out."""
    return sorted(set(_SERIES.findall(re.sub(r'"(?:[^"\\]|\\.)*"', '""', expr))) - known)
