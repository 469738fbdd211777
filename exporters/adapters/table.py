"""What an adapter is made of: frozen records that say how one engine's metrics feed kvscope's signals. Data only.

An engine's table names its families as they are on the wire; promql.py makes the expressions. Rules of aggregation are part of the
data: counters and gauges of requests, tokens and blocks are summed over ranks and instances, a ratio is a sum over a sum, and a gauge
that is a ratio already is averaged with the reason said. Quantiles come from summed buckets, never from other quantiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from exporters.adapters.capability import YES, Capability


@dataclass(frozen=True, slots=True)
class Rename:
    """`old` became `new` in version `since` of the engine ("" where the version is not known). Both are read: of one target
    the new name counts, the old one only where the new one is absent."""

    new: str
    old: str
    since: str = ""


@dataclass(frozen=True, slots=True)
class Series:
    """One family of the engine without the engine's prefix, as on the wire (a counter with its `_total`, a histogram without
    `_bucket`). `where` is a PromQL matcher inside the braces. Values times `scale` are in base units."""

    name: str
    where: str = ""
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Rate:
    """Per-second increase, summed over all series of all `of`."""

    of: tuple[Series, ...]


@dataclass(frozen=True, slots=True)
class Level:
    """Newest value of gauges. `across` says how series of a model become one: their sum, or for ratios their mean (then the
    instance-level series takes the largest, so that one full rank does not hide)."""

    of: Series
    across: Literal["sum", "mean"] = "sum"
    minus: Series | None = None


@dataclass(frozen=True, slots=True)
class Share:
    """A sum over a sum, of the same kind."""

    top: Rate | Level
    bottom: Rate | Level


@dataclass(frozen=True, slots=True)
class Split:
    """One series a part: (value of `label`, what feeds it)."""

    label: str
    parts: tuple[tuple[str, Rate | Level | Share], ...]


@dataclass(frozen=True, slots=True)
class Histogram:
    """A latency histogram with the engine's own bucket bounds, in seconds after `of.scale`.

    `bound` is the bound at or below the default threshold of the objective that the engine has by default, as a regular expression of its
    `le` without a fraction of zeros ("0.75", "19.18.*"); "" where none is known. The exact threshold is used where a target has it.
    """

    of: Series
    bound: str = ""


@dataclass(frozen=True, slots=True)
class Latency:
    """What feeds the signals of a latency objective. `limits` holds for all of them, `resolution` for the quantiles, `share` for the
    share over the objective; "" where there is nothing to say."""

    source: Histogram
    limits: str = ""
    resolution: str = ""
    share: str = ""


Source = Rate | Level | Share | Split | Histogram


@dataclass(frozen=True, slots=True)
class Feed:
    """What feeds one signal and how well."""

    source: Source
    capability: Capability = YES


@dataclass(frozen=True, slots=True)
class Flag:
    """A setting of the engine that would make it export more. It is worth naming where none of the families `shown_by` exists."""

    setting: str
    gives: str
    shown_by: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Adapter:
    """One engine: how it is recognized, what its families are called, and which signal each feeds.

    `feeds` is by signal name, `latencies` by the name of a latency objective (ttft, itl, e2e), each of which stands for all signals
    of that objective. `lacks` gives the reason for signals that nothing feeds, by a part of the signal's name, first match first.
    """

    engine: str
    title: str
    #: Of every family, canonical first: `vllm:` on the engine's page, `vllm_` once something on the way has replaced colons.
    prefixes: tuple[str, ...]
    #: Where the engine's metrics are served.
    path: str
    port: int
    #: The engine's label that names the model; "" where it names none and the scrape job has to.
    model_label: str
    feeds: Mapping[str, Feed]
    latencies: Mapping[str, Latency] = field(default_factory=dict)
    renames: tuple[Rename, ...] = ()
    #: Matcher that every selector gets: leaves out re-exports and doubles.
    where: str = ""
    #: Labels of ranks that repeat each other's numbers (tensor and pipeline ranks): one of them counts.
    repeated_over: tuple[str, ...] = ()
    #: Labels of ranks that share the load: these are added up.
    ranks: tuple[str, ...] = ()
    #: A counter may be without `_total` on some ways of export.
    bare_counters: bool = False
    lacks: tuple[tuple[str, str], ...] = ()
    flags: tuple[Flag, ...] = ()
    #: Facts that a reader of the numbers should know.
    notes: tuple[str, ...] = ()
    #: Families that only this engine has, for recognizing it (without prefix); empty: the prefix says it.
    known_by: tuple[str, ...] = ()
    #: A JSON page of the same server and the field of it that holds the engine's version.
    version_page: tuple[str, str] | None = None

    def old_names(self, name: str) -> tuple[str, ...]:
        """Names that `name` had in earlier versions, newest first."""
        return tuple(r.old for r in self.renames if r.new == name)
