"""kvscope's own families as a table, so that `kvscope doctor` reads and checks the page of the bundled engine and of the vLLM plug-in
as it does those of other engines. No rules are made of it: Prometheus records these signals from signals.py."""

from __future__ import annotations

import time
from collections.abc import Iterator

from exporters.adapters.endpoint import Finding
from exporters.adapters.page import Page
from exporters.adapters.table import Adapter, Feed, Histogram, Latency, Level, Rate, Series, Share
from observability import catalog as c
from observability import objectives as o

PREFIX = "kvscope_"


def _series(family: c.Family, where: str = "") -> Series:
    return Series(family.series.removeprefix(PREFIX), where)


OWN = Adapter(
    engine="kvscope",
    title="kvscope",
    prefixes=(PREFIX,),
    path="/metrics",
    port=8000,
    model_label="model",
    ranks=("engine",),
    feeds={
        "model:kvscope_requests_running:sum": Feed(Level(_series(c.REQUESTS_RUNNING))),
        "model:kvscope_requests_waiting:sum": Feed(Level(_series(c.REQUESTS_WAITING))),
        "model:kvscope_kv_usage:ratio": Feed(
            Share(Level(_series(c.KV_BLOCKS, 'state="active"')), Level(_series(c.KV_CAPACITY_BLOCKS)))
        ),
        "model:kvscope_kv_hit:ratio_rate5m": Feed(
            Share(Rate((_series(c.KV_HIT_TOKENS),)), Rate((_series(c.KV_QUERIED_TOKENS),)))
        ),
        "model:kvscope_prompt_tokens:rate5m": Feed(Rate((_series(c.PROMPT_TOKENS),))),
        "model:kvscope_generation_tokens:rate5m": Feed(Rate((_series(c.GENERATION_TOKENS),))),
    },
    latencies={
        objective.name: Latency(Histogram(Series(objective.family.name.removeprefix(PREFIX))))
        for objective in o.LATENCY_OBJECTIVES
    },
)


def refused(page: Page) -> Iterator[Finding]:
    """Measurements that kvscope's telemetry refused."""
    found = sorted(
        (s.labels.get("reason", ""), s.value) for s in page.by_name.get(c.ANOMALIES_TOTAL.series, ()) if s.value > 0
    )
    if found:
        said = ", ".join(f"{reason} {count:,.0f}" for reason, count in found)
        yield Finding(
            "warning", "refused_measurements", f"Measurements were refused since the start, by reason: {said}.", "What they would have told is missing; docs/metrics.md says what each reason means."
        )  # fmt: skip


def stale(before: Page, after: Page, now: float | None = None) -> Iterator[Finding]:
    """Sources whose gauges were last written long ago and not between the two looks either. KV events that do not come are one only while
    tokens are computed."""
    now = time.time() if now is None else now
    computes = _tokens(before) != _tokens(after)
    old, new = (
        {tuple(sorted(s.labels.items())): s.value for s in page.by_name.get(c.LAST_UPDATE.series, ())}
        for page in (before, after)
    )
    for labels, written in new.items():
        if old.get(labels) == written and now - written > o.STALE_AFTER_SECONDS:
            source = ", ".join(f"{name} {value}" for name, value in labels)
            if ("source", "kv_events") in labels:
                if computes:
                    yield Finding(
                        "note", "no_kv_events", f"Tokens are computed, and the newest KV event of {source} came {now - written:,.0f} s ago: either every block was stored already, or lifetimes and evictions of blocks end there.",
                        "Compare kvscope_kv_event_batches_total with vLLM's --kv-events-config, and look for kvscope in its log.",
                    )  # fmt: skip
                continue
            yield Finding(
                "warning", "stale_source", f"The gauges of {source} were last written {now - written:,.0f} s ago.", "Look whether the engine hangs; if it runs, compare the clocks of both machines."
            )  # fmt: skip


def _tokens(page: Page) -> float:
    """Tokens of prompts and answers so far."""
    return sum(s.value for f in (c.PROMPT_TOKENS, c.GENERATION_TOKENS) for s in page.by_name.get(f.series, ()))
