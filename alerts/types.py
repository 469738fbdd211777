"""What a recorded series and an alert are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Severity = Literal["critical", "warning", "info"]


@dataclass(frozen=True)
class Recording:
    """One recorded series. `name` is level:metric:operation; `labels` are set by the rule."""

    name: str
    expr: str
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Alert:
    """One alerting rule. `labels_kept` are the labels that its series carry; `description` may use them and the value.

    Rules of one `name` share a runbook and differ in `labels`. `area` is the rule group, `board` the board that shows
    the same numbers. A critical alert means that a person must act now.
    """

    name: str
    severity: Severity
    expr: str
    hold: str
    keep_firing: str
    summary: str
    description: str
    labels_kept: tuple[str, ...]
    area: str
    board: str
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """Name, and what tells it from others of its name."""
        return " ".join((self.name, *self.labels.values()))
