"""Bucket plans: bounds of the latency histograms and of the make-up of slow requests, the default ones or an operator's, checked.

Thresholds of objectives, the default ones and one's own, are always among the bounds, since rules count what lies at or under them exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from observability import catalog as c
from observability.errors import ConfigError
from observability.objectives import OBJECTIVES, TTFT, LatencyObjective

#: Most bounds of each: a bound costs one series for each class (tail: for each state and component).
MOST = {"latency": 300, "inter_token": 300, "tail": 64}
_LOWEST, _HIGHEST = 1e-6, 1e6  # seconds
#: Bounds that each must have: thresholds of objectives, and for the tail "all requests".
_FAMILIES = {
    "latency": (c.REQUEST_DURATION, c.TIME_TO_FIRST_TOKEN),
    "inter_token": (c.INTER_TOKEN_LATENCY,),
    "tail": (),
}
NEEDED = {
    name: {o.threshold_seconds for o in OBJECTIVES if isinstance(o, LatencyObjective) and o.family in families} or {0.0}
    for name, families in _FAMILIES.items()
}


#: Of time to first token by tenant; tenants have no objective of their own.
TENANT_TTFT = tuple(sorted({*c.TENANT_TTFT_BOUNDS, TTFT.threshold_seconds}))


def _with_needed(name: str, bounds: Iterable[float]) -> tuple[float, ...]:
    return tuple(sorted({*bounds, *NEEDED[name]}))


def _check(name: str, bounds: Sequence[float]) -> None:
    if len(bounds) > MOST[name]:
        raise ConfigError(f"Buckets {name}: {len(bounds)} bounds.", next_step=f"Give at most {MOST[name]}.")
    before = -1.0
    for bound in bounds:
        if not (_LOWEST <= bound <= _HIGHEST or (bound == 0.0 and name == "tail")):  # also refuses NaN
            raise ConfigError(
                f"Buckets {name}: {bound:g} is no bound.",
                next_step=f"Give seconds between {_LOWEST:g} and {_HIGHEST:g}; what is slower than the last has a bucket of its own.",
            )
        if bound <= before:
            raise ConfigError(
                f"Buckets {name}: {bound:g} does not lie above {before:g}.", next_step="Give them in ascending order."
            )
        before = bound


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """Bounds in seconds, ascending. `latency`: upper bounds of request duration and time to first token; `inter_token`: of
    inter-token latency; `tail`: lower bounds `gt` of the make-up families, 0 first.

    Raises ConfigError for bounds that are not positive, finite and ascending, too many, or without a threshold of an objective.
    All replicas of a model must have the same plan: buckets with different bounds cannot be added.
    """

    latency: tuple[float, ...] = _with_needed("latency", c.LATENCY_BOUNDS)
    inter_token: tuple[float, ...] = _with_needed("inter_token", c.ITL_BOUNDS)
    tail: tuple[float, ...] = c.TAIL_BOUNDS

    def __post_init__(self) -> None:
        for name, needed in NEEDED.items():
            bounds: tuple[float, ...] = getattr(self, name)
            _check(name, bounds)
            if missing := needed - {*bounds}:
                raise ConfigError(
                    f"Buckets {name} lack {min(missing):g} s, from which an objective is measured.",
                    next_step="Make the plan with observability.buckets.bucket_plan, which adds it.",
                )


def bucket_plan(settings: Iterable[str] = ()) -> BucketPlan:
    """The default plan with the bounds of `settings`, such as "latency=0.1,0.5,1,5" (names: latency, inter_token, tail); what
    objectives need is added. Bounds are kept to six digits, as labels show them. Raises ConfigError."""
    chosen: dict[str, tuple[float, ...]] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if name not in MOST or not equals:
            raise ConfigError(
                f"{setting[:80]!r} is no set of buckets.",
                next_step=f"Write NAME=SECONDS,SECONDS,... with NAME one of {', '.join(MOST)}.",
            )
        if name in chosen:
            raise ConfigError(f"Buckets {name} are given twice.", next_step="Give them once.")
        try:
            bounds = [float(f"{float(part):.6g}") for part in text.split(",")]
        except ValueError:
            raise ConfigError(
                f"Buckets {name}: {text[:80]!r} is no list of numbers.", next_step="Give seconds, such as 0.1,0.5,1."
            ) from None
        _check(name, bounds)
        chosen[name] = _with_needed(name, bounds)
    return BucketPlan(**chosen)
