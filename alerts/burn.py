"""Objectives to burn rates: recordings over seven windows and four alerts an objective (Google SRE workbook, chapter 5, table 5-8).

Each objective records three rates: events, bad ones, and the bad ones that it allows. Longer windows are means of these
5-minute rates, so a busy hour weighs more than a quiet one and a window of days costs no more than a read. Burn rate is
bad / allowed: 1 spends the budget of 30 days in 30 days.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from alerts.types import Alert, Recording, Severity
from observability import catalog as c
from observability import objectives as o
from observability.signals import WINDOW

LEVEL = "model_class_objective"
BY = ("model", "class")
#: An adapter's series carry the engine that they were read from; two engines may serve one model.
KEPT = (*BY, "objective", "engine")
#: The labels of an objective as kvscope's exporters call them.
NAMES = {label: label for label in BY}
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


@dataclass(frozen=True, slots=True)
class Rates:
    """PromQL of the events and the bad events a second of one objective."""

    objective: o.Objective
    total: str
    bad: str


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


def judged(objective: o.Objective, names: Mapping[str, str] = NAMES) -> list[str]:
    """Matchers of the models and classes that `objective` judges: those named, less those that have one of their own. One matcher a value
    and no regular expression, in which a dot, a plus or a bar of a model's name would mean something else. `names`: what a source calls
    the labels; those that it lacks are left out."""
    out = [f'{names[label]}="{value}"' for label, value in objective.applies_to.items() if label in names]
    for label, values in o.excluded(objective).items():
        out += [f'{names[label]}!="{value}"' for value in values if label in names]
    return out


def _rate(series: str, objective: o.Objective, matcher: str) -> str:
    return f"rate({series}{{{','.join((*judged(objective), matcher))}}}[{WINDOW}])"


def _sum(rates: str) -> str:
    return f"sum by ({', '.join(BY)}) ({rates})"


def _rates(objective: o.Objective) -> Rates:
    """PromQL of an objective's events and bad events a second."""
    if isinstance(objective, o.LatencyObjective):
        bucket = objective.family.series
        within = _rate(bucket, objective, f'le="{float(objective.threshold_seconds)}"')
        # an exporter without that bound, started with other objectives, is not judged: all its events would be bad
        total = _sum(_rate(bucket, objective, 'le="+Inf"') + f" and ignoring (le) {within}")
        return Rates(objective, total, f"{total} - {_sum(within)}")
    ended, failed = (
        _sum(_rate(c.REQUESTS.series, objective, 'outcome=~"' + "|".join(outcomes) + '"'))
        for outcomes in ((*o.GOOD_OUTCOMES, *o.BAD_OUTCOMES), o.BAD_OUTCOMES)
    )
    # `or 0 x`: a class that has not failed yet has no series of a bad outcome, which is none failed and not unknown
    return Rates(objective, ended, f"{failed}\nor 0 * {ended}")


def rate_recordings(found: Iterable[Rates]) -> Iterator[Recording]:
    """The three rates of each name of an objective. Objectives of one name share a rule: no two judge the same model and class, so `or`
    leaves none out, and Prometheus takes two rules with the same labels for one written twice."""
    by_name: dict[str, list[Rates]] = {}
    for each in found:
        by_name.setdefault(each.objective.name, []).append(each)
    for name, group in by_name.items():
        allowed = [f"{1 - each.objective.target:.6g} * {each.total}" for each in group]
        for series, parts in ((EVENTS, [x.total for x in group]), (BAD, [x.bad for x in group]), (ALLOWED, allowed)):
            yield Recording(series, "\nor ".join(parts), {"objective": name})


def recordings() -> Iterator[Recording]:
    """Rates of each objective, then the windows, which are the same for all."""
    yield from rate_recordings(_rates(objective) for objective in o.OBJECTIVES)
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


def _enough(name: str, window: str) -> str:
    """PromQL: at least as many events in `window` as the objective that judges them needs to prove anything."""
    parts = []
    for each in (x for x in o.OBJECTIVES if x.name == name):
        which = ",".join((*judged(each), f'objective="{name}"'))
        parts.append(f"{events(window)}{{{which}}} >= {each.min_events}")
    return parts[0] if len(parts) == 1 else f"({' or '.join(parts)})"


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
                    f"and {on} {_enough(name, pair.long)}"
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
