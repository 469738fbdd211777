"""Objectives to burn rates: recordings over seven windows and four alerts an objective (Google SRE workbook, chapter 5, table 5-8).

Each objective records three rates: events, bad ones, and the bad ones that it allows. Longer windows are means of these
5-minute rates, so a busy hour weighs more than a quiet one and a window of days costs no more than a read. Burn rate is
bad / allowed: 1 spends the budget of 30 days in 30 days.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from alerts.types import Alert, Recording, Severity
from observability import catalog as c
from observability import objectives as o
from observability.signals import WINDOW

LEVEL = "model_class_objective"
BY = ("model", "class")
#: An adapter's series carry the engine that they were read from; two engines may serve one model.
KEPT = (*BY, "objective", "engine")
EVENTS = f"{LEVEL}:kvscope_objective_events:rate{WINDOW}"
BAD = f"{LEVEL}:kvscope_objective_bad:rate{WINDOW}"
ALLOWED = f"{LEVEL}:kvscope_objective_allowed:rate{WINDOW}"
BUDGET_LEFT = f"{LEVEL}:kvscope_objective_budget_left:ratio30d"


@dataclass(frozen=True, slots=True)
class Pair:
    """Fires while the burn rate is above `burn` over both windows: the long one proves it, the short one ends it soon."""

    severity: Severity
    burn: float
    long: str
    short: str
    hold: str
    keep_firing: str
    spent: str  # share of the 30-day budget that is gone when it fires


PAIRS = (
    Pair("critical", 14.4, "1h", "5m", "2m", "5m", "2 % of it goes in an hour"),
    Pair("critical", 6.0, "6h", "30m", "15m", "15m", "5 % of it goes in six hours"),
    Pair("warning", 3.0, "1d", "2h", "1h", "30m", "10 % of it goes in a day"),
    Pair("warning", 1.0, "3d", "6h", "3h", "1h", "10 % of it goes in three days"),
)
#: Evaluation interval of these rules: a sum of rates over it is a number of events, also where the series is younger than the window.
INTERVAL_SECONDS = 15
WINDOWS = ("5m", "30m", "1h", "2h", "6h", "1d", "3d")


def burn(window: str) -> str:
    """Name of the burn rate over `window`."""
    return f"{LEVEL}:kvscope_objective_burn:ratio_rate{window}"


def error(window: str) -> str:
    """Name of the share of bad events over `window`."""
    return f"{LEVEL}:kvscope_objective_error:ratio_rate{window}"


def events(window: str) -> str:
    """Name of the number of events in `window`."""
    return f"{LEVEL}:kvscope_objective_events:increase{window}"


def _matchers(objective: o.Objective, **more: str) -> str:
    """Selector of the models and classes that `objective` is for: those named, less those that have one of their own."""
    pairs = [f'{label}="{value}"' for label, value in objective.applies_to.items()]
    pairs += [f'{label}!~"{"|".join(values)}"' for label, values in o.excluded(objective).items()]
    pairs += [f'{label}="{value}"' if "|" not in value else f'{label}=~"{value}"' for label, value in more.items()]
    return "{" + ",".join(pairs) + "}"


def _rate(series: str, matchers: str) -> str:
    return f"sum by ({', '.join(BY)}) (rate({series}{matchers}[{WINDOW}]))"


def _rates(objective: o.Objective) -> tuple[str, str]:
    """PromQL of an objective's events and bad events a second."""
    if isinstance(objective, o.LatencyObjective):
        bucket = objective.family.series
        total = _rate(bucket, _matchers(objective, le="+Inf"))
        good = _rate(bucket, _matchers(objective, le=str(float(objective.threshold_seconds))))
        return total, f"{total} - {good}"
    ended = _rate(c.REQUESTS.series, _matchers(objective, outcome="|".join((*o.GOOD_OUTCOMES, *o.BAD_OUTCOMES))))
    # `or 0 x`: a class that has not failed yet has no series of a bad outcome, which is none failed and not unknown
    failed = _rate(c.REQUESTS.series, _matchers(objective, outcome="|".join(o.BAD_OUTCOMES)))
    return ended, f"{failed}\nor 0 * {ended}"


def recordings() -> Iterator[Recording]:
    """Rates of each objective, then the windows, which are the same for all."""
    for objective in o.OBJECTIVES:
        total, bad = _rates(objective)
        labels = {"objective": objective.name}
        yield Recording(EVENTS, total, labels)
        yield Recording(BAD, bad, labels)
        yield Recording(ALLOWED, f"{1 - objective.target:.6g} * {total}", labels)
    for window in WINDOWS:
        mean = "{}" if window == WINDOW else f"avg_over_time({{}}[{window}])"
        bad, allowed, total = (mean.format(series) for series in (BAD, ALLOWED, EVENTS))
        yield Recording(error(window), f"{bad} / ({total} > 0)")
        yield Recording(burn(window), f"{bad} / ({allowed} > 0)")
    for pair in PAIRS:
        yield Recording(events(pair.long), f"{INTERVAL_SECONDS} * sum_over_time({EVENTS}[{pair.long}])")


def slow_recordings() -> Iterator[Recording]:
    """What changes over weeks and is evaluated each five minutes."""
    yield Recording(BUDGET_LEFT, f"1 - avg_over_time({BAD}[30d]) / (avg_over_time({ALLOWED}[30d]) > 0)")


def alert_name(objective: str) -> str:
    """Name of the alerts of the objective called `objective`."""
    return f"Kvscope{o.SHORT_TITLES[objective]}BudgetBurn"


#: Engines read through adapters have no classes.
_CLASS = "{{ with $labels.class }}{{ . }} {{ end }}"


def _what(objective: o.Objective) -> tuple[str, str]:
    """Summary, and what the bad share is, in words."""
    if isinstance(objective, o.LatencyObjective):
        return (
            f"{objective.title} burns its error budget too fast.",
            f"of the {'' if objective.events == 'requests' else f'{objective.events} of '}{_CLASS}requests to {{{{ $labels.model }}}} took longer than the objective allows",
        )
    return (
        "Failed requests burn the error budget too fast.",
        f"of the {_CLASS}requests to {{{{ $labels.model }}}} failed, were refused or ran out of time",
    )


def alerts() -> Iterator[Alert]:
    """Four alerts for each named objective, two severities; more than one objective of a name shares them."""
    for name in dict.fromkeys(objective.name for objective in o.OBJECTIVES):
        objective = next(x for x in o.OBJECTIVES if x.name == name)
        summary, what = _what(objective)
        for pair in PAIRS:
            match = f'{{objective="{name}"}}'
            on = f"on ({', '.join(KEPT)})"
            yield Alert(
                name=alert_name(name),
                severity=pair.severity,
                expr=(
                    f"{burn(pair.long)}{match} > {pair.burn:g}\n"
                    f"and {on} {burn(pair.short)}{match} > {pair.burn:g}\n"
                    f"and {on} {events(pair.long)}{match} >= {objective.min_events}"
                ),
                hold=pair.hold,
                keep_firing=pair.keep_firing,
                summary=summary,
                description=(
                    f"Over {pair.long} the error budget burns {{{{ $value | humanize }}}} times as fast as it may: too many {what}. "
                    f"Above {pair.burn:g} for {pair.long} and {pair.short}, {pair.spent}."
                ),
                labels_kept=KEPT,
                labels={"window": pair.long},
                area="objectives",
                board="overview",
            )
