"""Numbers that one metrics page holds, each with how far it can be trusted: measured, estimated with its bounds, or unavailable."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from exporters.adapters.endpoint import printable
from exporters.adapters.page import Page, Sample
from exporters.adapters.promql import names
from exporters.adapters.table import Adapter, Histogram, Level, Rate, Series, Share
from observability.objectives import LATENCY_OBJECTIVES
from observability.signals import QUANTILES


@dataclass(frozen=True, slots=True)
class Reading:
    """`value` lies in [`low`, `high`] (equal where measured; None where there is no bound on that side). `text` is what a person
    is shown: a number, or "below 300 ms" and "above 60 s" where the value is in the first or beyond the last bucket."""

    name: str
    status: Literal["measured", "estimated", "unavailable"]
    text: str
    unit: str = ""
    value: float | None = None
    low: float | None = None
    high: float | None = None
    reason: str = ""

    def __post_init__(self) -> None:  # a version, or a name, may be anything that an endpoint sent
        object.__setattr__(self, "text", printable(self.text))


def duration(seconds: float) -> str:
    """Three digits with the unit that fits."""
    for limit, factor, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms"), (math.inf, 1.0, "s")):
        if abs(seconds) < limit:
            return f"{seconds * factor:.3g} {unit}"
    return "inf"


def _matches(sample: Sample, where: str) -> bool:
    """Whether `sample` passes the PromQL matchers `where`."""
    for name, how, value in re.findall(r'(\w+)(=~|!~|!=|=)"([^"]*)"', where):
        has = sample.labels.get(name, "")
        hit = re.fullmatch(value, has) is not None if "~" in how else has == value
        if hit == how.startswith("!"):
            return False
    return True


def find(adapter: Adapter, page: Page, series: Series, suffix: str = "") -> list[Sample]:
    """Samples of a family under the first of its names that the page has, doubles of ranks and re-exports left out: as the
    recording rules read it."""
    for name in names(adapter, series.name, suffix):
        found = [s for s in page.by_name.get(name, ()) if _matches(s, adapter.where) and _matches(s, series.where)]
        if found:
            if not adapter.repeated_over:
                return found
            kept: dict[tuple[tuple[str, str], ...], Sample] = {}
            for sample in found:
                key = tuple(sorted((k, v) for k, v in sample.labels.items() if k not in adapter.repeated_over))
                if key not in kept or sample.value > kept[key].value:
                    kept[key] = sample
            return list(kept.values())
    return []


def total(adapter: Adapter, page: Page, of: Iterable[Series]) -> float | None:
    """Sum over all series, None where none is there."""
    found = [sample.value for series in of for sample in find(adapter, page, series) if math.isfinite(sample.value)]
    return _sum(found)


def _sum(found: list[float]) -> float | None:
    """None for the sum of nothing, and for one that no float can hold."""
    try:
        return math.fsum(found) if found else None
    except OverflowError:
        return None


def buckets(adapter: Adapter, page: Page, series: Series) -> list[tuple[float, float]]:
    """(upper bound in base units, cumulative count) ascending, summed over series; empty where the histogram is not there."""
    out: dict[float, float] = {}
    for sample in find(adapter, page, series, "_bucket"):
        try:
            bound = float(sample.labels.get("le", "nan"))
        except ValueError:
            continue
        if not math.isnan(bound) and math.isfinite(sample.value):
            out[bound * series.scale] = out.get(bound * series.scale, 0.0) + sample.value
    return sorted(out.items())


@dataclass(frozen=True, slots=True)
class Plan:
    """Bounds of one latency's buckets, in seconds and without +Inf, as they are on some series of `model`."""

    engine: str
    model: str
    title: str
    bounds: tuple[float, ...]


def plans(adapter: Adapter, page: Page) -> list[Plan]:
    """Every set of bucket bounds that the latencies on the page have, each once."""
    found: dict[Plan, None] = {}
    for objective in LATENCY_OBJECTIVES:
        if objective.name not in adapter.latencies:
            continue
        of = adapter.latencies[objective.name].source.of
        series: dict[tuple[tuple[str, str], ...], set[float]] = {}
        for sample in find(adapter, page, of, "_bucket"):
            try:
                bound = float(sample.labels.get("le", "nan")) * of.scale
            except ValueError:
                continue
            if math.isfinite(bound):
                key = tuple(sorted((k, v) for k, v in sample.labels.items() if k != "le"))
                series.setdefault(key, set()).add(bound)
        for labels, bounds in series.items():
            model = dict(labels).get(adapter.model_label or "model", "")
            found[Plan(adapter.engine, model, objective.title, tuple(sorted(bounds)))] = None
    return list(found)


def quantile(name: str, q: float, found: list[tuple[float, float]]) -> Reading:
    """Quantile `q` of a cumulative histogram, by linear interpolation within its bucket, with that bucket as its bounds."""
    if len(found) < 2 or not math.isinf(found[-1][0]):
        return Reading(name, "unavailable", "unavailable", reason="no histogram with a bucket +Inf is exported")
    count = found[-1][1]
    if count <= 0:
        return Reading(name, "unavailable", "unavailable", reason="nothing was observed since the engine started")
    rank = q * count
    index = next(i for i, (_, below) in enumerate(found) if below >= rank)
    high, upto = found[index]
    if index == 0:
        return Reading(name, "estimated", f"below {duration(high)}", "seconds", None, None, high, "in the first bucket")
    low, under = found[index - 1]
    if math.isinf(high):
        return Reading(
            name, "estimated", f"above {duration(low)}", "seconds", None, low, None, "beyond the last bucket bound"
        )
    # Halves, and the quotient first: counts on a page may be as large as a number gets.
    value = low + (high - low) * ((rank / 2 - under / 2) / (upto / 2 - under / 2))
    text = f"{duration(value)} (between {duration(low)} and {duration(high)})"
    return Reading(name, "estimated", text, "seconds", value, low, high, "interpolated within its bucket")


def _number(name: str, value: float | None, unit: str, reason: str) -> Reading:
    if value is None or not math.isfinite(value):
        why = reason if value is None else "larger than a number can hold"
        return Reading(name, "unavailable", "unavailable", unit, reason=why)
    return Reading(
        name, "measured", f"{value:.4g}" if unit == "ratio" else f"{value:,.0f} {unit}", unit, value, value, value
    )


def _gauge(adapter: Adapter, page: Page, name: str, signal: str, unit: str) -> Reading:
    feed = adapter.feeds.get(signal)
    if feed is None:
        return Reading(name, "unavailable", "unavailable", unit, reason="not exported by this engine")
    source = feed.source
    if isinstance(source, Share):
        ends = source.top, source.bottom
        top, bottom = (total(adapter, page, (x.of,) if isinstance(x, Level) else x.of) for x in ends)
        value = top / bottom if top is not None and bottom else None
        return _number(name, value, unit, "its families are not on the page")
    assert isinstance(source, Level)
    found = [s.value for s in find(adapter, page, source.of) if math.isfinite(s.value)]
    if source.minus is not None:
        found += [-s.value for s in find(adapter, page, source.minus) if math.isfinite(s.value)]
    if not found:
        return Reading(name, "unavailable", "unavailable", unit, reason="its family is not on the page")
    value = (_sum(found) or 0.0) * source.of.scale if _sum(found) is not None else math.inf
    if source.across == "mean" and len(found) > 1:
        mean, low, high = value / len(found), min(found), max(found)
        return Reading(name, "estimated", f"{mean:.4g} (ranks between {low:.4g} and {high:.4g})", unit, mean, low, high, "mean over ranks, whose pools may differ")  # fmt: skip
    return _number(name, value, unit, "")


def read(adapter: Adapter, page: Page) -> list[Reading]:
    """What the page says now, and what it says about the time since the engine started."""
    out = [
        _gauge(adapter, page, "Requests running", "model:kvscope_requests_running:sum", "requests"),
        _gauge(adapter, page, "Requests waiting", "model:kvscope_requests_waiting:sum", "requests"),
        _gauge(adapter, page, "KV pool in use", "model:kvscope_kv_usage:ratio", "ratio"),
    ]
    hit = adapter.feeds.get("model:kvscope_kv_hit:ratio_rate5m")
    name = "KV hit rate since start"
    if hit is None or not isinstance(hit.source, Share):
        out.append(Reading(name, "unavailable", "unavailable", "ratio", reason="not exported by this engine"))
    else:
        ends = hit.source.top, hit.source.bottom
        top, bottom = (total(adapter, page, x.of) if isinstance(x, Rate) else None for x in ends)
        if not bottom:
            out.append(Reading(name, "unavailable", "unavailable", "ratio", reason="nothing was looked up since the engine started"))  # fmt: skip
        elif top is None:
            out.append(Reading(name, "unavailable", "unavailable", "ratio", reason="hits are not on the page"))
        else:
            top = min(top, 1e300)  # so that no quotient is beyond a number
            text = f"{top / bottom:.4g} ({top:,.0f} of {bottom:,.0f} tokens)"
            out.append(Reading(name, "measured", text, "ratio", top / bottom, top / bottom, top / bottom))
    for objective in LATENCY_OBJECTIVES:
        source: Histogram | None = (
            adapter.latencies[objective.name].source if objective.name in adapter.latencies else None
        )
        for q in QUANTILES:
            label = f"{objective.title} p{q * 100:g} since start"
            if source is None:
                out.append(
                    Reading(label, "unavailable", "unavailable", "seconds", reason="not exported by this engine")
                )
            else:
                out.append(quantile(label, q, buckets(adapter, page, source.of)))
    return out
