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
        start, until = moment(self.start, zone), ""
        if self.end is not None:
            end = moment(self.end, zone)
            until = f" to {end:%H:%M}" if end.date() == start.date() else f" to {end:%-d %b %H:%M}"
        return f"{start:%-d %b %H:%M}{until}, {self.kind}: {self.text}"
