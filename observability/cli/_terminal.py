"""What commands share: a progress bar, and a look at whether a result can be written before the work that makes it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from observability.errors import ConfigError


class Show(Protocol):
    def __call__(self, done: int, total: int, what: str | None = None) -> None:
        """`done` of `total` are through; `what` replaces the words in front of the bar."""


@contextlib.contextmanager
def progress_bar(what: str, noun: str) -> Iterator[Show | None]:
    """A bar on standard error, on a terminal only (None elsewhere)."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn(noun), TimeElapsedColumn(),
        TextColumn("left"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)

        def show(done: int, total: int, what: str | None = None) -> None:
            bar.update(task, completed=done, total=total, description=what)

        yield show


def check_writable(path: Path, next_step: str) -> None:
    """Before work that may take long. Raises ConfigError."""
    try:
        path.open("a").close()
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}.", next_step=next_step) from None
