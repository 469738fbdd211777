"""Rows about the engine: load and pressure, steps, the split by class and instance, and the exporter itself."""

from __future__ import annotations

from alerts import rules
from dashboards.panels import RED, YELLOW, Line, Query, Section, TimeSeries, color_overrides
from dashboards.shared import (
    COMPONENT_COLORS,
    KV_EXHAUSTED,
    NAMED_LEGEND,
    NO_BOUND,
    OF_CLASS,
    OF_INSTANCE,
    STALE,
    TTFT_BURN,
    known,
    limits,
    lines,
    quantile,
    query,
    rate,
    signal,
    stack,
)
from observability import catalog as c
from observability import objectives as o


def pressure() -> Section:
    """What comes in, what waits, what is given up, how it ends."""
    queue = lines(
        KV_EXHAUSTED,
        "How many requests run, and how many wait?",
        "Requests in prefill or decode, and requests queued, waiting for KV blocks or preempted. Waiting while running is at "
        "its limit: max_num_seqs or the KV pool holds them back.",
        "short",
        *(query(signal(f"model:kvscope_requests_{kind}:sum"), kind) for kind in ("running", "waiting")),
        overrides=color_overrides({"running": "green", "waiting": "orange"}),
    )
    pushed_back = lines(
        KV_EXHAUSTED,
        "Are requests pushed back?",
        "Requests per second that were preempted (put back in the queue for lack of blocks), and that wanted adjacent blocks "
        "and went paged (layout fallback). Steady preemption: lower max_num_seqs or enlarge the pool.",
        "reqps",
        query(signal("model:kvscope_preemptions:rate5m"), "preempted"),
        query(rate(c.KV_LAYOUT_FALLBACKS, "model"), "layout fallback"),
    )
    given_up = lines(
        KV_EXHAUSTED,
        "What KV is given up?",
        "Per second: cached blocks evicted for other use, and tokens computed again after a preemption. Eviction with a "
        "falling hit rate: the cache is too small for the prefixes in use. Recomputation is work done twice.",
        "ops",
        query(signal("model:kvscope_kv_evicted_blocks:rate5m"), "evicted blocks"),
        query(rate(c.KV_RECOMPUTED_TOKENS, "model"), "recomputed tokens"),
    )
    ends = lines(
        TTFT_BURN,
        "How do requests end?",
        "Requests ended per second by outcome, and requests received. stop and length are served; abort: the client left; "
        "error: the engine failed it; rejected: the queue was full; deadline: it passed the time its client gave it. Received above the sum of the rest for long: work "
        "piles up.",
        "reqps",
        query(signal("model:kvscope_requests_received:rate5m"), "received"),
        query(signal("model_outcome:kvscope_requests:rate5m"), "{{outcome}}"),
        overrides=color_overrides(
            {
                "received": "purple",
                "stop": "green",
                "length": "blue",
                "abort": YELLOW,
                "error": RED,
                "rejected": "orange",
                "deadline": "dark-red",
            }
        ),
    )
    return Section("$model: load and pressure", [Line(8, [queue, pushed_back, given_up, ends])], repeat_for="model")


def steps() -> Section:
    """Where the engine's own time goes."""
    time = stack(
        TTFT_BURN,
        "What does the engine spend its time on?",
        "Seconds per second by step component; one engine adds up to 100 %, two to 200 %. Little idle: no capacity left. A "
        "large share outside forward_prefill and forward_decode is overhead worth a profile.",
        "percentunit",
        query(signal("model_component:kvscope_step_seconds:rate5m"), "{{component}}"),
        overrides=color_overrides(COMPONENT_COLORS),
        options=NAMED_LEGEND,
    )
    duration = lines(
        TTFT_BURN,
        "How long does a step take?",
        "99th percentile of the duration of one model step by what it held, over the chosen instances. Every running request "
        "waits for the whole step: long mixed steps raise inter-token latency. Lower max_num_batched_tokens to shorten "
        "them.",
        "s",
        query(known(quantile(0.99, c.STEP_DURATION, "kind", OF_INSTANCE)), "{{kind}} p99"),
        when_empty="No model steps in this time",
    )
    tokens = lines(
        TTFT_BURN,
        "How many tokens does the model compute?",
        "Tokens run through the model per second, prefill and decode, recomputation included. Falling while requests wait: "
        "steps became slower. Rising prefill with the same load: fewer hits.",
        "si:tok/s",
        query(signal("model_phase:kvscope_step_tokens:rate5m"), "{{phase}}"),
        overrides=color_overrides({"prefill": "blue", "decode": "green"}),
    )
    return Section("$model: engine steps", [Line(9, [time, duration, tokens])], repeat_for="model")


def _p99(family: c.Family, by: str, title: str, text: str) -> TimeSeries:
    return lines(
        TTFT_BURN,
        title,
        text,
        "s",
        Query(expr=known(quantile(0.99, family, by)), legendFormat=f"{{{{{by}}}}}", exemplar=True),
        when_empty="No first tokens in this time",
    )


def split() -> Section:
    """The same symptoms by class and by instance."""
    by_class = _p99(
        c.TIME_TO_FIRST_TOKEN,
        "class",
        "Which class waits for its first token?",
        "p99 of time to first token by priority class, of the chosen classes and instances. Only the lowest class slow: "
        "priorities do their work. All slow: capacity.",
    )
    by_instance = _p99(
        c.TIME_TO_FIRST_TOKEN,
        "instance",
        "Which instance is slow?",
        "p99 of time to first token by instance, of the chosen classes and instances. One apart from the rest: look at that "
        "machine, or at how load is spread. All alike: look at the load.",
    )
    full = lines(
        KV_EXHAUSTED,
        "Which instance is full?",
        "KV blocks held by requests over the pool, by chosen instance; the lines are the warning and the alert's threshold. "
        "Uneven: the router does not see KV use.",
        "percentunit",
        query(f"{rules.INSTANCE_KV_USAGE}{{{OF_INSTANCE}}}", "{{instance}}"),
        max=1,
        when_empty=NO_BOUND,
        **limits((o.KV_USAGE_WARNING, YELLOW), (o.KV_USAGE_CRITICAL, RED)),
    )
    queues = lines(
        KV_EXHAUSTED,
        "Which class queues?",
        "Requests waiting by priority class, over the chosen classes and instances. interactive should be near 0 whatever "
        "the others do.",
        "short",
        query(f"sum by (class) ({c.REQUESTS_WAITING.series}{{{OF_CLASS}}})", "{{class}}"),
    )
    return Section(
        "$model: split by class and instance",
        [Line(8, [by_class, by_instance, full, queues])],
        collapsed=True,
        repeat_for="model",
    )


def exporter() -> Section:
    """Freshness, anomalies and cost of the telemetry."""
    of_instance = '{instance=~"$instance"}'
    written = lines(
        STALE,
        "When did each source last write?",
        "Seconds since each source last wrote its values. A saw-tooth near 0 is well; a ramp is a frozen engine. The red "
        f"line is the threshold of {STALE}.",
        "s",
        query(f"time() - {c.LAST_UPDATE.series}{{{OF_INSTANCE}}}", "{{instance}} {{source}}"),
        **limits((o.STALE_AFTER_SECONDS, RED)),
    )
    refused = lines(
        STALE,
        "Were measurements refused or corrected?",
        "Telemetry anomalies per second by reason: negative intervals, missing milestones, clock steps, non-finite values. "
        "Should stay 0; anything else is a fault of the engine or its clock, worth a bug report with the reason.",
        "ops",
        query(rate(c.ANOMALIES_TOTAL, "reason"), "{{reason}}"),
    )
    cost = lines(
        STALE,
        "What does a scrape cost?",
        "Time that the exporter took to render its previous answer, by instance. It runs outside the step loop; if it grows, "
        "look at the number of series.",
        "s",
        query(f"{c.SCRAPE_SECONDS.series}{of_instance}", "{{instance}}"),
    )
    series = lines(
        STALE,
        "How many series are exported?",
        "Series in the exporter's previous answer, by instance. Labels are bounded, so this is nearly flat; growth means a "
        "new model or class.",
        "short",
        query(f"{c.SCRAPE_SERIES.series}{of_instance}", "{{instance}}"),
    )
    return Section("Can the measurements be trusted?", [Line(8, [written, refused, cost, series])], collapsed=True)
