"""What the API server processes of one vLLM tell each other: how many requests each has in flight, and the last word it had of each engine.

vLLM gives the statistics of a step to one of them, so none knows by itself whether an engine has nothing to do. Each writes a small file
beside those of prometheus_client; one that is no longer written is of a process that has ended.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

_GONE_SECONDS = 10.0
_EVERY_SECONDS = 0.5


class Word(NamedTuple):
    """What an engine told last: Unix time, and the requests that ran or waited. Time 0: it has told nothing yet."""

    time: float = 0.0
    requests: float = 0.0


class Told(NamedTuple):
    """What one front end knows. `bound`: a request has shown that it sees them all. `words` by engine index."""

    in_flight: int
    bound: bool
    words: Mapping[int, Word]


class Siblings:
    """The front ends that write into `folder`."""

    def __init__(self, folder: Path) -> None:
        self._mine = folder / f"kvscope-{os.getpid()}.json"
        self._others: list[Told] = []
        self._next = 0.0
        self._known = False  # the last exchange went well

    def exchange(self, mine: Told) -> list[Told]:
        """What every front end knows, this one first. Files are written and read at most twice a second. Raises OSError, and ValueError or
        TypeError of a broken file, until an exchange goes well again: without the others nobody knows who is idle."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _EVERY_SECONDS
            self._known = False
            written = self._mine.with_suffix(".new")
            written.write_text(json.dumps((mine.in_flight, mine.bound, list(mine.words.items()))))
            written.replace(self._mine)
            paths = set(self._mine.parent.glob("kvscope-*.json")) - {self._mine}
            self._others = [told for path in paths if (told := _read(path)) is not None]
            self._known = True
        elif not self._known:
            raise OSError("the last exchange failed")
        return [mine, *self._others]


def _read(path: Path) -> Told | None:
    """What the front end that writes `path` knows; None if it has ended."""
    try:
        if time.time() - path.stat().st_mtime > _GONE_SECONDS:
            return None
        in_flight, bound, words = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return Told(in_flight, bound, {index: Word(*word) for index, word in words})
