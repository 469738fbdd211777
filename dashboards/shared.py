"""What the rows of a board share: selectors, colours, and one short function for each recurring shape of panel."""

from __future__ import annotations

from typing import Any

from alerts import burn, rules, splits
from alerts.links import runbook_url
from dashboards.panels import Json, Query, TimeSeries, link
from observability import catalog as c
from observability import objectives as o

TTFT_BURN = burn.alert_name(o.TTFT.name)
AVAILABILITY_BURN = burn.alert_name("availability")
KV_EXHAUSTED, STALE, QUEUE_GROWING = "KvscopeKVCacheExhausted", "KvscopeSourceStale", "KvscopeQueueGrowing"
UNHEALTHY, LINK_ERRORS, MEMORY_ERRORS = "KvscopeGPUUnhealthy", "KvscopeGPULinkErrors", "KvscopeGPUMemoryErrors"
RECORDED = rules.recorded_names()

#: One colour for each state and component, on every panel.
STATE_COLORS = dict(
    zip(c.SHOWN_STATES, ("purple", "orange", "blue", "green", "red", "dark-yellow", "light-purple"), strict=True)
)
COMPONENT_COLORS = {
    "schedule": "light-purple", "kv_alloc": "light-orange", "kv_evict": "dark-orange", "kv_move": "dark-yellow",
    "dequant": "light-red", "forward_prefill": "blue", "forward_decode": "green", "sample": "light-blue",
    "emit": "light-green", "idle": "#808080", c.UNTOLD: "light-yellow",
}  # fmt: skip
OUTCOME_COLORS = {
    "received": "purple", "stop": "green", "length": "blue", "abort": "yellow", "error": "red", "rejected": "orange",
    "deadline": "dark-red", "invalid": "#808080",
}  # fmt: skip
BLOCK_COLORS = {"free": "#808080", "evictable": "yellow", "active": "blue", c.ALLOCATABLE: "#a0a0a0"}
#: Lengths are ordered: from pale to deep.
LENGTH_COLORS = dict(
    zip(c.LENGTH_BUCKETS, ("#e0b400", "#7ad151", "#22a884", "#2a88ae", "#5b6abf", "#9b59b6"), strict=True)
)

#: Families whose buckets carry exemplars: one sample a request, unlike inter-token latency.
WITH_EXEMPLARS = (c.TIME_TO_FIRST_TOKEN, c.REQUEST_DURATION)
#: Selectors of raw families, by what a family's labels allow.
MODEL = 'model=~"$model"'
INSTANCE = 'instance=~"$instance"'
OF_INSTANCE = f"{MODEL},{INSTANCE}"
OF_CLASS = f'{OF_INSTANCE},class=~"$class"'

STACKED: Json = {"fillOpacity": 45, "lineWidth": 0, "stacking": {"group": "A", "mode": "normal"}}
LINES: Json = {"fillOpacity": 0}
NAMED_LEGEND: Json = {"legend": {"calcs": ["lastNotNull"], "displayMode": "table", "placement": "right"}}
NO_QUANT = "No quantization error: the engine stores KV unquantized (kv_dtype=auto)"
NO_TENANTS = "No tenants: requests name none"
NO_GPU = "No GPU on these hosts"
NO_BOUND = "No bounded KV pool"
NO_TRAFFIC = "No requests in the last 5 minutes"


def signal(name: str) -> str:
    """Selector of a recorded series for the chosen models. Raises KeyError for a name that no rule records."""
    if name not in RECORDED:
        raise KeyError(f"{name} is not recorded")
    return f"{name}{{{MODEL}}}"


def rate(family: c.Family, by: str, where: str = OF_INSTANCE) -> str:
    """Summed rate of a counter (or of a histogram's buckets) over $__rate_interval."""
    return f"sum by ({by}) (rate({family.series}{{{where}}}[$__rate_interval]))"


def raw_rate(family: c.Family, by: str) -> str:
    """Summed rate of a counter that has no model, over $__rate_interval."""
    return rate(family, by, INSTANCE)


def worst_p99(family: c.Family, by: str = "", split: str = "class", where: str = OF_CLASS) -> str:
    """p99 over 5 minutes of the slowest of what is chosen, split by one label if given."""
    chosen = known(f"{splits.quantile(family, split)}{{{where}}}")
    return f"max by ({by}) ({chosen})" if by else f"max({chosen})"


def quantile_now(q: float, family: c.Family) -> str:
    """The quantile at the end of the time shown. Read from the buckets themselves, for these alone have exemplars; worked out once and not
    for each point, for over a fleet they are many."""
    return f"histogram_quantile({q:g}, sum by (le) (rate({family.series}{{{OF_CLASS}}}[$__rate_interval] @ end())))"


def buckets(family: c.Family, *by: str) -> list[Query]:
    """Measurements a second by bucket, for a heatmap, of the chosen models and (with `by` class) classes."""
    where = ",".join([MODEL, *(f'{label}=~"${label}"' for label in by)])
    expr = f"sum by (le) ({splits.bucket_rates(family, *by)}{{{where}}})"
    return [Query(expr=expr, format="heatmap", legendFormat="{{le}}")]


def query(expr: str, legend: str) -> Query:
    return Query(expr=expr, legendFormat=legend)


def about(alert: str, title: str, description: str) -> Json:
    """What every panel has: the question, what is shown and what to do, and the runbook of the alert it belongs to."""
    return {"title": title, "description": description, "links": [link(f"Runbook: {alert}", runbook_url(alert))]}


def known(expr: str) -> str:
    """`expr` without the series that are NaN, such as a ratio 0 / 0 in a bucket without traffic: NaN > -1 is false.

    Not >= 0: the extrapolation of rates can put a ratio that is 0 a hair below.
    """
    return f"{expr} > -1"


def lines(alert: str, title: str, description: str, unit: str, *queries: Query, **fields: Any) -> TimeSeries:
    """Lines from zero, without fill. The axis reaches at least 1 (one request, one event), 1 %, or `up_to`."""
    up_to = fields.pop("up_to", {"short": 1, "ops": 1, "reqps": 1, "percentunit": 0.01}.get(unit))
    custom = {**LINES, **({} if up_to is None else {"axisSoftMax": up_to}), **fields.pop("custom", {})}
    fields.setdefault("min", 0)
    return TimeSeries(**about(alert, title, description), targets=list(queries), unit=unit, custom=custom, **fields)


def stack(alert: str, title: str, description: str, unit: str, *queries: Query, **fields: Any) -> TimeSeries:
    """Areas on top of each other: for parts that add up to something."""
    custom = {**STACKED, **fields.pop("custom", {})}
    return TimeSeries(
        **about(alert, title, description), targets=list(queries), unit=unit, min=0, custom=custom, **fields
    )


def limits(*steps: tuple[float, str]) -> Json:
    """Fields of `lines` that draw a dashed line at each limit, and keep the highest one in sight."""
    return {
        "thresholds": [(None, "transparent"), *steps],
        "custom": {"thresholdsStyle": {"mode": "dashed"}},
        "up_to": steps[-1][0] * 1.25,
    }
