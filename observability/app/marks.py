"""What happened beside the engine and is marked in every time chart: deploys and incidents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from observability.app.view import moment

Kind = Literal["deploy", "incident"]


@dataclass(frozen=True, slots=True)
class Mark:
    """A deploy (one moment: `end` is None) or an incident from `start` to `end` (Unix seconds), and what it was."""

    kind: Kind
    start: float
    end: float | None
    text: str

    def told(self, zone: str) -> str:
        """The mark in words: 29 Nov 14:02 to 14:40, incident: KvscopeTTFTBudgetBurn."""
        until = "" if self.end is None else f" to {moment(self.end, zone):%H:%M}"
        return f"{moment(self.start, zone):%-d %b %H:%M}{until}, {self.kind}: {self.text}"
