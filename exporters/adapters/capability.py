"""Which engine can feed which signal, and why not: what boards and the app ask before they show "No data".

Pure data and lookups. The matrix covers the bundled engine, the vLLM plug-in and every adapter of engines.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Status = Literal["yes", "partial", "no"]
#: What the recorded capability series holds for each status, so that a board can colour by value.
VALUE: Mapping[Status, float] = {"yes": 1.0, "partial": 0.5, "no": 0.0}


@dataclass(frozen=True, slots=True)
class Capability:
    """Whether an engine can feed a signal. `reason` is empty for yes; for partial it says what is missing or approximate, for no
    why there is nothing. It is shown to people as it stands: one clause, no full stop."""

    status: Status
    reason: str = ""

    def __post_init__(self) -> None:
        if bool(self.reason) == (self.status == "yes"):
            raise ValueError(
                f"{self.status!r} {'needs a' if self.status != 'yes' else 'takes no'} reason: {self.reason!r}"
            )


YES = Capability("yes")


def partial(reason: str) -> Capability:
    return Capability("partial", reason)


def no(reason: str) -> Capability:
    return Capability("no", reason)
