"""Recordings that boards read for a choice of instances and classes, and for distributions.

Over a fleet, and over a day, the buckets of all replicas are hundreds of millions of samples. A panel reads instead one quantile for each
instance and class, of which the worst is shown, or the buckets of a whole model.
"""

from __future__ import annotations

from alerts.types import Recording
from observability import catalog as c
from observability.signals import WINDOW


def quantile(family: c.Family, by: str) -> str:
    """Name of the recorded p99 of a histogram by model, instance and the label `by`."""
    return f"model_instance_{by}:{family.name}:p99_{WINDOW}"


def bucket_rates(family: c.Family, *by: str) -> str:
    """Name of the recorded rate of a histogram's buckets by model, `by` and le."""
    return f"{'_'.join(('model', *by, 'le'))}:{family.series}:rate{WINDOW}"


def _p99(family: c.Family, by: str) -> Recording:
    expr = f"histogram_quantile(0.99, sum by (model, instance, {by}, le) (rate({family.series}[{WINDOW}])))"
    return Recording(quantile(family, by), expr)


def _buckets(family: c.Family, *by: str) -> Recording:
    labels = ", ".join(("model", *by, "le"))
    return Recording(bucket_rates(family, *by), f"sum by ({labels}) (rate({family.series}[{WINDOW}]))")


RECORDINGS: tuple[Recording, ...] = (
    _p99(c.TIME_TO_FIRST_TOKEN, "class"),
    _p99(c.INTER_TOKEN_LATENCY, "class"),
    _p99(c.REQUEST_DURATION, "class"),
    _p99(c.STEP_DURATION, "kind"),
    _buckets(c.TIME_TO_FIRST_TOKEN, "class"),
    _buckets(c.KV_QUANT_RELATIVE),
    _buckets(c.REQUEST_QUANT_ERROR),
)
