"""The catalogue as a page of documentation: `python -m observability.telemetry.reference > docs/metrics.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from observability import catalog as c
from observability.catalog import Family

_LABELS: tuple[tuple[str, str], ...] = (
    ("model", "the served model; one per engine"),
    ("class", ", ".join(c.CLASSES)),
    ("tenant", "as clients name it, up to 64 characters; from the 21st on `other`"),
    ("kind (tenant tokens)", ", ".join(c.TENANT_TOKEN_KINDS)),
    ("outcome", ", ".join(c.OUTCOMES)),
    ("state (requests)", ", ".join(c.STATES)),
    ("component", ", ".join(c.COMPONENTS)),
    ("gt", ", ".join(f"{bound:g}" for bound in c.TAIL_BOUNDS)),
    ("length_bucket", ", ".join(c.LENGTH_BUCKETS) + " (prompt tokens, upper bound excluded)"),
    ("tier", ", ".join(c.TIERS)),
    ("state (blocks)", ", ".join(c.BLOCK_STATES)),
    ("layout", ", ".join(c.LAYOUTS)),
    ("region", f"{c.REGION_LABELS[0]} to {c.REGION_LABELS[-1]}, in address order"),
    ("pool", ", ".join(c.POOLS)),
    ("age", f"{', '.join(c.AGE_LABELS)}: upper end of an interval in seconds, included"),
    ("window", ", ".join(c.REGRET_WINDOWS)),
    ("tensor", ", ".join(c.TENSORS)),
    ("layer_group", "layers by their first and last number, such as 00-09; `other` beyond a bounded number of groups"),
    ("scheme", "how KV is stored, such as int8"),
    ("rule", ", ".join(c.CONTROLLER_RULES)),
    ("action", ", ".join(c.CONTROLLER_ACTIONS)),
    ("phase", "prefill, decode"),
    ("label", "the label whose values were folded: class, outcome, layer_group, tenant"),
    ("le", "upper bound of a bucket, or of a cumulative distribution in a gauge"),
    ("executor, clock, device, kv_dtype, version", "of the engine; clock is real or virtual (simulated time)"),
    (
        "source, family, status",
        "who feeds an exporter; a family of it; yes, partial or no, or what a target is against its bound",
    ),
    ("kind (steps)", ", ".join(c.STEP_KINDS)),
    ("reason (preemptions)", ", ".join(c.PREEMPTION_REASONS)),
    ("reason (anomalies)", ", ".join(c.ANOMALIES)),
    ("gpu, uuid, mig", "index and UUID of a GPU; its instance in MIG mode, else none"),
    ("kind (NVLink errors)", ", ".join(c.GPU_NVLINK_ERRORS)),
    ("kind (memory repairs)", ", ".join(c.GPU_REPAIRS)),
    ("name, driver, bus", "of a GPU, as its driver tells them"),
    ("sensor, limit, domain, bound, direction, xid", "of a GPU: what is measured or limited; see the family"),
    ("flag", ", ".join(c.GPU_REPAIR_FLAGS)),
    ("reason (throttle seconds)", ", ".join(c.GPU_THROTTLES)),
    ("reason (clock reasons)", ", ".join(c.GPU_CLOCK_REASONS)),
    ("unit (profiled)", ", ".join(c.GPU_PROFILED)),
    ("reason (read failures)", ", ".join(c.GPU_READ_FAILURES)),
    ("target", ", ".join(c.HARDWARE_TARGETS)),
    ("overlap", ", ".join(c.COPY_OVERLAPS)),
    ("signal", "what is forecast: requests, kv_usage, queue, ttft_p99, ..."),
    ("forecaster", "the model that forecasts: auto, prophet, last_value, seasonal_naive"),
    ("horizon", ", ".join(c.FORECAST_HORIZONS) + ": end of the 10 minutes that are forecast"),
    (
        "quantile",
        ", ".join(f"{q:g}" for q in c.FORECAST_QUANTILES)
        + "; of times "
        + ", ".join(f"{q:g}" for q in c.FORECAST_TIME_QUANTILES),
    ),
    ("limit (forecasts)", "an objective by its name, kv_usage_warning, kv_exhaustion"),
    ("band", ", ".join(map(str, c.FORECAST_BANDS)) + " (percent)"),
    ("status (forecasts)", ", ".join(c.FORECAST_STATUSES)),
    ("history", "real, or simulated where a part of it comes from virtual time"),
    ("reason (forecast failures)", ", ".join(c.FORECAST_FAILED)),
    ("outcome (forecast runs)", ", ".join(c.FORECAST_RUN_OUTCOMES)),
)

_INTRODUCTION = """\
# Metrics

Every family that kvscope exports, made from `observability/catalog.py` by
`python -m observability.telemetry.reference > docs/metrics.md`. Do not edit this page.

Counters and histograms exist from the start with 0 for every label value that can occur; the latency histograms of a class, and all of a
tenant, from its first request on; a tenant's `error`, `rejected`, `deadline` and `invalid` once some tenant had one. A series that has no source is
absent, never 0: state `preempted` of an unbounded pool, state `swapped`, tier `host` and layout `compressed` unless settings allow them,
quantization families unless KV is stored quantized, pools that an engine does not have, and capacity, free blocks, address regions and
residency of an unbounded pool.
Each histogram `x` has `x_bucket` with a label `le`, `x_sum` and `x_count`. Request duration and time to first token carry
exemplars (`trace_id`, or `request_id` without tracing) for a scraper that asks for OpenMetrics.
"""


_BUCKETS = """\
Upper bounds; `+Inf` follows. Thresholds of objectives are always bounds. Those of request duration, time to first token,
inter-token latency and `gt` can be chosen: `kvscope serve --buckets`, or `KVSCOPE_BUCKETS`.

Each bound of request duration and time to first token is at most 1/7 above the one before. A quantile of latencies between 1 ms
and 640 s is within 5 % wherever the density of latencies changes by less than 4.3 times inside one bucket, as it does for
lognormal, gamma, Weibull and Pareto latencies with a coefficient of variation of 0.3 or more, and for random mixtures of two.
Where all requests take the same time, or at a hard limit such as a timeout, the error can reach the width of a bucket, 1/7.
`model:kvscope_time_to_first_token_seconds:overflow_ratio_rate5m` (and that of the other two) is the share above the highest
bound: when it is above 1 - q, the quantile q shown is a floor. `first_bucket_ratio_rate5m` is the share in the lowest bucket.
"""


def query(family: Family) -> str:
    """A query to begin with, in PromQL: what there was in the last five minutes, over all instances."""
    by = family.labels[:2]
    kept = f" by ({', '.join(by)})" if by else ""
    match family.kind:
        case "counter":
            return f"sum{kept} (rate({family.series}[5m]))"
        case "histogram":
            return f"histogram_quantile(0.99, sum by ({', '.join((*by, 'le'))}) (rate({family.series}[5m])))"
        case "gauge":
            return f"max{kept} ({family.series})"
        case "info":
            return family.series


def reference(families: Sequence[Family] = c.FAMILIES) -> str:
    """The page in Markdown."""
    return _INTRODUCTION + "\n" + "\n".join(_lines(families)) + "\n"


def _lines(families: Sequence[Family]) -> Iterator[str]:
    yield "## Families\n"
    yield "| Series | Kind | Unit | Labels | Meaning | Query |"
    yield "|---|---|---|---|---|---|"
    for family in families:
        labels = ", ".join(f"`{label}`" for label in family.labels)
        help = family.help.replace("|", "\\|")
        yield f"| `{family.series}` | {family.kind} | {family.unit} | {labels} | {help} | `{query(family)}` |"
    yield "\n## Label values\n"
    yield "| Label | Values |"
    yield "|---|---|"
    for label, values in _LABELS:
        yield f"| `{label.split()[0]}`{label[len(label.split()[0]) :]} | {values} |"
    yield "\n## Identities\n"
    yield "What holds while an engine is idle, as long as `kvscope_telemetry_anomalies_total` is 0. If it does not, requests are lost or"
    yield "counted twice.\n"
    yield "| Left | Right |"
    yield "|---|---|"
    for left, right in c.IDENTITIES:
        yield f"| `{left}` | `{right}` |".replace("stop|length", "stop\\|length")
    yield "\n## Buckets\n"
    yield _BUCKETS
    yield "| Family | Bounds |"
    yield "|---|---|"
    for family in families:
        if family.bounds:
            yield f"| `{family.name}` | {' '.join(f'{bound:g}' for bound in family.bounds)} |"


if __name__ == "__main__":
    sys.stdout.write(reference())
