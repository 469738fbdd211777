"""What a forecast is: quantiles of the next hour of one series, who made them, and what to know before trusting them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np

T = TypeVar("T")
STEP_SECONDS = 600
HORIZON_STEPS = 6
HORIZON_SECONDS = HORIZON_STEPS * STEP_SECONDS
#: Probabilities of the stored quantiles; the ends bound the 95 % interval.
LEVELS = (0.025, 0.05, 0.1, 0.15, 0.25, 0.35, 0.5, 0.65, 0.75, 0.85, 0.9, 0.95, 0.975)
#: Model -> its name for people. Where several are run they are run, listed and shown in this order.
MODEL_TITLES = {
    "auto": "Auto stack",
    "prophet": "Prophet + AR(1)",
    "last_value": "Last value",
    "seasonal_naive": "Yesterday",
    "pooled": "Pooled network",
}
#: Runs where one was trained on the series (forecast/pooled.py); the others need nothing and run always.
POOLED = "pooled"
MODELS = tuple(name for name in MODEL_TITLES if name != POOLED)
DEFAULT_MODEL = "auto"

#: stale: the newest observation is over 20 minutes old. constant: the series did not move in the window.
#: short_history: less than the model wants, said in the note. gaps: over a fifth of the window is absent.
#: simulated: part of the window comes from virtual time. outliers: points far off were pulled in before the fit.
#: fallback: the model named could not be used, and the note says which one was instead and why.
Flag = Literal["stale", "constant", "short_history", "gaps", "simulated", "outliers", "fallback"]


def level_column(level: float) -> str:
    """Column of a stored quantile, such as `q0.025`."""
    return f"q{level:g}"


#: Columns of SeriesSource.forecasts before the signal's labels. One row a step; `time` is the end of the 10 minutes that
#: are forecast, whose mean the quantiles are about; `origin` is the end of the last observed step. `hindcast` marks one made
#: afterwards, from data up to its origin, to measure the model. `breaches`: the forecast's, the same tuple in each of its rows. A
#: refusal has one row, step 0, without quantiles.
FRAME_COLUMNS = (
    "origin", "time", "step", *map(level_column, LEVELS), "flags", "note", "refused", "hindcast", "breaches",
)  # fmt: skip


def beyond(values: np.ndarray, limit: float, below: bool) -> np.ndarray:
    """Which of `values` have passed `limit`, upwards or downwards; NaN has not."""
    return values < limit if below else values > limit


def shared_origins(made: Mapping[str, Collection[T]]) -> set[T]:
    """Origins, by model, that every model with any has, so that errors can be compared. The pooled model, which begins when one was first
    trained, is compared on those of them that it has."""
    some = [set(origins) for model, origins in made.items() if origins and model != POOLED]
    return set.intersection(*some) if some else set()


@dataclass(frozen=True)
class Breach:
    """How likely a series is to pass a limit within the next hour.

    `name`: of the objective or limit; `limit` in the signal's unit; `below`: it is passed downwards. `chances`: probability that one of the
    steps up to h is beyond the limit, non-decreasing [HORIZON_STEPS]; that is the distribution of the first passage. `raw`: the same as the
    paths say it, before it was calibrated on stored outcomes.
    """

    name: str
    limit: float
    raw: tuple[float, ...]
    chances: tuple[float, ...]
    below: bool = False

    @property
    def chance(self) -> float:
        """Of being beyond the limit at any time of the hour."""
        return self.chances[-1]

    def passed(self, values: np.ndarray) -> np.ndarray:
        """Which of `values` are beyond the limit; absent ones are not."""
        return beyond(values, self.limit, self.below)

    def seconds_until(self, share: float = 0.5) -> float | None:
        """Time by whose end the limit is passed with probability `share`, in seconds; None: more than an hour."""
        reached = [step for step, chance in enumerate(self.chances, start=1) if chance >= share]
        return float(reached[0] * STEP_SECONDS) if reached else None


@dataclass(frozen=True)
class Forecast:
    """The next HORIZON_STEPS means over 10 minutes of one series.

    `origin`: Unix seconds, end of the last grid step; target h covers (origin + (h - 1) * 600, origin + h * 600].
    `quantiles`: float64 [HORIZON_STEPS, len(LEVELS)], finite, sorted along the levels, inside the signal's bounds; empty
    [0, len(LEVELS)] when the forecast was refused, with the reason in `refused`. `stretch`: the factor by which calibration on
    past outcomes had widened the quantiles about the median.
    """

    signal: str
    labels: Mapping[str, str]
    model: str
    origin: float
    quantiles: np.ndarray
    flags: tuple[Flag, ...] = ()
    note: str = ""
    refused: str = ""
    hindcast: bool = False
    stretch: float = 1.0
    breaches: tuple[Breach, ...] = ()

    @property
    def times(self) -> np.ndarray:
        """Ends of the forecast steps, Unix seconds, float64 [steps]."""
        return self.origin + STEP_SECONDS * np.arange(1, len(self.quantiles) + 1, dtype=np.float64)

    @property
    def median(self) -> np.ndarray:
        """float64 [steps]."""
        return self.quantiles[:, LEVELS.index(0.5)]

    def interval(self, share: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper ends of the central interval, each float64 [steps]; share is 0.5, 0.7, 0.8, 0.9 or 0.95."""
        tail = round((1.0 - share) / 2.0, 6)
        return self.quantiles[:, LEVELS.index(tail)], self.quantiles[:, LEVELS.index(round(1.0 - tail, 6))]


@dataclass(frozen=True)
class Score:
    """How past forecasts of one series by one model compare with what came: mean absolute error in the signal's unit, and
    the share of observed targets inside the 95 % interval. `targets` were observed; NaN where there is none."""

    model: str
    mae: float
    coverage: float
    targets: int
    origins: int
