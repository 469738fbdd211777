"""Tables to PromQL: what Prometheus records for one engine, under the names of kvscope's signals. Pure functions.

Of one target (job and instance) the first name that exists counts, in the order canonical prefix and newest name first, so that a
version that exports old and new names at once, or both forms of a colon, is never counted twice. Ranks that repeat each other are
reduced to one before anything is added up.
"""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal

from exporters.adapters.table import Adapter, Feed, Histogram, Level, Rate, Series, Share, Split
from observability.objectives import DEFAULT_THRESHOLDS, LATENCY_OBJECTIVES, LatencyObjective
from observability.signals import (
    BY_NAME,
    QUANTILES,
    WINDOW,
    Signal,
    counted,
    events_name,
    of_every_class,
    share_name,
)

M = ("model",)
MI = ("model", "instance")


def bucket_record(objective: LatencyObjective) -> str:
    """Name of the recorded rates of buckets that quantiles of `objective` are worked out from."""
    return f"model_le:{objective.family.name}_bucket:rate{WINDOW}"


def names(adapter: Adapter, name: str, suffix: str = "") -> list[str]:
    """Every spelling of a family that is accepted, best first."""
    out = []
    for prefix in adapter.prefixes:
        for known in (name, *adapter.old_names(name)):
            out.append(f"{prefix}{known}{suffix}")
            if adapter.bare_counters and known.endswith("_total"):
                out.append(f"{prefix}{known.removesuffix('_total')}")
    return out


def vector(adapter: Adapter, series: Series, *, window: str = "", suffix: str = "", where: str = "") -> str:
    """The series of one family with the label `model`, as rates over `window` or as newest values."""
    match = _where(adapter.where, series.where, where)
    found = []
    for name in names(adapter, series.name, suffix):
        text = name + (f"{{{match}}}" if match else "")
        found.append(f"rate({text}[{window}])" if window else text)
    out = " or on (job, instance) ".join(found)
    if adapter.repeated_over:
        out = f"max without ({', '.join(adapter.repeated_over)}) ({out})"
    if adapter.model_label not in ("", "model"):
        out = f'label_replace({out}, "model", "$1", "{adapter.model_label}", "(.+)")'
    return out


def expression(
    adapter: Adapter, source: Rate | Level | Share | Split, by: tuple[str, ...] = M, window: str = WINDOW
) -> str:
    """What is recorded for a signal with the labels `by` (a Split adds its own)."""
    over = f"by ({', '.join(by)})"
    match source:
        case Rate(of):
            parts = [vector(adapter, series, window=window) for series in of]
            if (
                len(parts) > 1
            ):  # told apart by a label of ours, or `or` would drop the second for having the labels of the first
                parts = [f'label_replace({text}, "part", "{i}", "", "")' for i, text in enumerate(parts)]
            return _scaled(f"sum {over} ({' or '.join(parts)})", of[0].scale)
        case Level(of, across, minus):
            how = "sum" if across == "sum" else "max" if "instance" in by else "avg"
            text = _scaled(f"{how} {over} ({vector(adapter, of)})", of.scale)
            return f"{text} - {how} {over} ({vector(adapter, minus)})" if minus else text
        case Share(top, bottom):
            return f"{expression(adapter, top, by, window)} / {expression(adapter, bottom, by, window)}"
        case Split(label, parts_of):
            return " or ".join(
                f'label_replace({expression(adapter, part, by, window)}, "{label}", "{value}", "", "")'
                for value, part in parts_of
            )


def latency(adapter: Adapter, objective: LatencyObjective, source: Histogram) -> Iterator[tuple[str, str]]:
    """(recorded name, expression) of all signals of a latency objective, the recorded buckets first."""
    name, engine = objective.family.name, f'engine="{adapter.engine}"'
    buckets = f"{bucket_record(objective)}{{{engine}}}"
    yield (
        bucket_record(objective),
        f"sum by (model, le) ({vector(adapter, source.of, window=WINDOW, suffix='_bucket')})",
    )
    # Buckets are cumulative: the least is the first, the largest counts all.
    finite, total = f'{bucket_record(objective)}{{{engine},le!="+Inf"}}', f"max by (model) ({buckets})"
    lowest = f"model:{name}:first_bucket_ratio_rate{WINDOW}"
    yield lowest, f"min by (model) ({finite}) / {total}"
    # Where the quantile lies in the first bucket the factor lifts it to that bucket's bound, which it is at most; beyond the last
    # bound histogram_quantile gives that bound by itself.
    for q in QUANTILES:
        inside = f"histogram_quantile({q:g}, {buckets}) * on (model) group_left () clamp_min({lowest}{{{engine}}} / {q:g}, 1)"
        yield f"model:{name}:p{q * 100:g}_5m", _scaled(inside, source.of.scale, compound=True)
    every = vector(adapter, source.of, window=WINDOW, suffix="_bucket", where='le="+Inf"')
    events = f"sum by (model) ({every})"
    measured: dict[str, str] = {}
    for each, classes in counted(objective):  # engines without classes have none to leave out
        judged, good = threshold_rates(adapter, each, source, WINDOW)
        measured |= {events_name(each, classes): events, share_name(each, classes): f"1 - {good} / {judged}"}
    yield from measured.items()
    yield f"model:{name}:overflow_ratio_rate{WINDOW}", f"1 - max by (model) ({finite}) / {total}"


def threshold_rates(
    adapter: Adapter, objective: LatencyObjective, source: Histogram, window: str, models: str = ""
) -> tuple[str, str]:
    """Rates of the events that are judged and of those within the objective's threshold: exact where the target has that bucket bound, else,
    of a threshold that nobody changed, from the bound below. A target that has neither is in none of the two: all its events would be bad.
    `models`: matchers of the models that the objective is for."""
    patterns = [pattern.replace("\\", "\\\\") for pattern in bound_patterns(objective, source)]  # in a string of PromQL
    good = " or on (job, instance) ".join(
        vector(adapter, source.of, window=window, suffix="_bucket", where=_where(models, f'le=~"{pattern}"'))
        for pattern in patterns
    )
    every = vector(adapter, source.of, window=window, suffix="_bucket", where=_where(models, 'le="+Inf"'))
    return f"sum by (model) (({every}) and on (job, instance) ({good}))", f"sum by (model) ({good})"


def bound_patterns(objective: LatencyObjective, source: Histogram) -> list[str]:
    """What `le` of the bucket that holds the good events is, as regular expressions, best first."""
    exact = f"{Decimal(f'{objective.threshold_seconds / source.of.scale:.6g}'):f}"
    bounds = [exact.replace(".", r"\.")]
    if source.bound not in ("", exact) and objective.threshold_seconds == DEFAULT_THRESHOLDS[objective.name]:
        bounds.append(source.bound if "\\" in source.bound else source.bound.replace(".", r"\."))
    return [bound + ("0*" if "." in bound else r"(\.0+)?") for bound in bounds]  # "1", "1.0" and "1.00" are one bound


def _where(*parts: str) -> str:
    return ",".join(part for part in parts if part)


def _scaled(text: str, scale: float, *, compound: bool = False) -> str:
    if scale == 1.0:
        return text
    return f"({text}) * {scale:g}" if compound else f"{text} * {scale:g}"


def objective_of(signal: Signal) -> LatencyObjective | None:
    """The latency objective that `signal` is worked out for."""
    for objective in LATENCY_OBJECTIVES:
        if of_every_class(signal.name).startswith(f"model:{objective.family.name}:"):
            return objective
    return None


def recorded(adapter: Adapter) -> list[tuple[str, str]]:
    """(recorded name, expression) of everything `adapter` feeds, in the order of the signals."""
    unknown = set(adapter.feeds) - set(BY_NAME)
    if unknown:
        raise ValueError(f"{adapter.engine} feeds signals that there are not: {sorted(unknown)}")
    out: list[tuple[str, str]] = []
    done: set[str] = set()
    for signal in BY_NAME.values():
        objective = objective_of(signal)
        if objective is not None and objective.name in adapter.latencies and objective.name not in done:
            done.add(objective.name)
            out += latency(adapter, objective, adapter.latencies[objective.name].source)
        feed: Feed | None = adapter.feeds.get(of_every_class(signal.name))
        if feed is not None:
            assert not isinstance(feed.source, Histogram)
            out.append((signal.name, expression(adapter, feed.source)))
    return out
