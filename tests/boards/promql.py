"""PromQL as the tests see it: variables filled in, parsed, walked."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import promql_parser

from observability import catalog
from observability.signals import SIGNALS

VARIABLES = {"$__rate_interval": "1m", "$__interval": "15s", "$__range": "1h"}
#: Labels that the scrape adds to every series.
TARGET_LABELS = {"instance", "job"}
#: Series that Prometheus makes itself, with their labels.
PROMETHEUS_SERIES = {"up": set[str](), "ALERTS": {"alertname", "alertstate", "severity", "model"}}


def fill(expr: str, values: Mapping[str, str] = {}, *, rate_interval: str = "1m") -> str:
    """`expr` with Grafana's variables replaced; a label variable not in `values` becomes `.+`, as "All" does."""
    expr = expr.replace("$__rate_interval", rate_interval)
    for name, value in VARIABLES.items():
        expr = expr.replace(name, value)
    return re.sub(r"\$(\w+)", lambda match: values.get(match[1], ".+"), expr)


def nodes(expr: str) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Each node of the parsed `expr` with the nodes above it, nearest last."""

    def walk(node: Any, above: tuple[Any, ...]) -> Iterator[tuple[Any, tuple[Any, ...]]]:
        yield node, above
        for child in ("lhs", "rhs", "expr", "param", "vector_selector"):
            if getattr(node, child, None) is not None:
                yield from walk(getattr(node, child), (*above, node))
        for argument in getattr(node, "args", None) or ():
            yield from walk(argument, (*above, node))

    yield from walk(promql_parser.parse(expr), ())


def selectors(expr: str) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """The vector selectors of `expr`, each with the nodes above it."""
    for node, above in nodes(expr):
        if isinstance(node, promql_parser.VectorSelector):
            yield node, above


def function_names(above: tuple[Any, ...]) -> list[str]:
    return [node.func.name for node in above if isinstance(node, promql_parser.Call)]


def known_series() -> dict[str, set[str]]:
    """Name -> labels of everything a query may ask for: exported, recorded, made by Prometheus."""
    from alerts import adapters, rules

    known = {name: set(labels) for name, labels in PROMETHEUS_SERIES.items()}
    for family in catalog.FAMILIES:
        known[family.series] = {*family.labels} | ({"le"} if family.kind == "histogram" else set())
        if family.kind == "histogram":
            known |= {f"{family.name}_{part}": set(family.labels) for part in ("count", "sum")}
    known[adapters.CAPABILITY] = {"engine", "signal", "status", "reason"}
    known |= {signal.name: set(signal.by) for signal in SIGNALS}
    for extra in rules.EXTRA_RECORDINGS:
        level = extra.name.split(":")[0]
        known[extra.name] = {
            part.replace("-", "_") for part in level.replace("length_bucket", "length-bucket").split("_")
        }
    return known
