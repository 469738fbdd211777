"""Error budgets: how much of what an objective allows is spent, and how fast, over the last 30 days of what the source has.

The same sums as alerts/burn.py records: bad events over allowed ones, so a busy hour weighs more than a quiet one.
"""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from observability.app import queries
from observability.app.derived import shared
from observability.app.view import View
from observability.objectives import BAD_OUTCOMES, GOOD_OUTCOMES, LatencyObjective, Objective
from observability.store.source import SeriesSource

#: Rates are over five minutes: read each five minutes they count every event once.
STEP = 300.0
BUDGET_SECONDS = 30 * 86400.0
#: Burn rate over an hour above which an incident is under way (alerts/burn.py pages there).
FAST_BURN = 14.4
#: Burn rates that page when both windows (seconds) have them: the critical ones of alerts/burn.py.
PAGING = ((FAST_BURN, 3600.0, 300.0), (6.0, 6 * 3600.0, 1800.0))


@dataclass(frozen=True, slots=True)
class Budget:
    """Of one objective: share `left` (below 0: overspent), burn rates over the last hour and six hours (1 spends 30 days' budget in 30 days;
    None without events), and the `days` that it is worked out from."""

    left: float
    burn_1h: float | None
    burn_6h: float | None
    days: float


def rates(source: SeriesSource, objective: Objective, start: float, end: float, where: dict[str, str]) -> pd.DataFrame:
    """Columns events and bad (per second) by time, each five minutes; without times at which events, but not which of them were bad, are
    known: another threshold was recorded then."""
    if isinstance(objective, LatencyObjective):
        events, over = (
            source.range(signal.name, start, end, STEP, where).set_index("time")["value"]
            for signal in (queries.events_signal(objective), queries.over_threshold_signal(objective))
        )
        frame = pd.DataFrame({"events": events, "bad": events * over})
        return frame[frame["bad"].notna() | ~(frame["events"] > 0)].fillna(0.0)
    outcomes = source.range(queries.outcomes_signal(objective).name, start, end, STEP, where)
    ended, bad = (
        outcomes[outcomes["outcome"].isin(kinds)].groupby("time")["value"].sum()
        for kinds in ((*GOOD_OUTCOMES, *BAD_OUTCOMES), BAD_OUTCOMES)
    )
    return pd.DataFrame({"events": ended, "bad": bad}).fillna(0.0)


def budget(source: SeriesSource, view: View, objective: Objective) -> Budget | None:
    """The budget of `objective` at the end of the view; None where the source has no events of it."""
    return _budget(source, view.model, view.end // STEP * STEP, objective)


@shared
def _budget(source: SeriesSource, model: str, end: float, objective: Objective) -> Budget | None:
    frame = rates(source, objective, end - BUDGET_SECONDS, end, {"model": model})
    allowed = 1 - objective.target

    def burn(seconds: float) -> float | None:
        part = frame[frame.index > pd.Timestamp(end - seconds, unit="s", tz="UTC")]
        events = float(part["events"].sum())
        return float(part["bad"].sum()) / (allowed * events) if events > 0 else None

    spent = burn(BUDGET_SECONDS)
    if spent is None:
        return None
    days = (end - frame.index.min().timestamp()) / 86400.0
    return Budget(1 - spent, burn(3600.0), burn(6 * 3600.0), days)
