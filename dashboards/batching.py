"""The board "Batching": what runs and waits, what is given up, and where the engine's own time goes."""

from __future__ import annotations

from alerts import symptoms
from dashboards.frame import frame
from dashboards.panels import Board, Line, Section, color_overrides, unit_override
from dashboards.shared import (
    COMPONENT_COLORS,
    KV_EXHAUSTED,
    NAMED_LEGEND,
    OF_INSTANCE,
    OUTCOME_COLORS,
    TTFT_BURN,
    known,
    lines,
    query,
    rate,
    signal,
    stack,
    worst_p99,
)
from observability import catalog as c

BUSY, PERIODIC_STALL = "KvscopeBusyLowThroughput", "KvscopePeriodicStall"


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
        "suffix: blocks/s",
        query(signal("model:kvscope_kv_evicted_blocks:rate5m"), "evicted blocks"),
        query(rate(c.KV_RECOMPUTED_TOKENS, "model"), "recomputed tokens"),
        overrides=[unit_override("recomputed tokens", "suffix: tok/s")],
        up_to=1,
    )
    ends = lines(
        TTFT_BURN,
        "How do requests end?",
        "Requests ended per second by outcome, and requests received. stop and length are served; abort: the client left; "
        "error: the engine failed it; rejected: the queue was full or the server not ready; invalid: it could not be served as asked; "
        "deadline: it passed the time its client gave it. Received above the sum of the rest for long: work "
        "piles up.",
        "reqps",
        query(signal("model:kvscope_requests_received:rate5m"), "received"),
        query(signal("model_outcome:kvscope_requests:rate5m"), "{{outcome}}"),
        overrides=color_overrides(OUTCOME_COLORS),
    )
    return Section("$model: load and pressure", [Line(8, [queue, pushed_back, given_up, ends])], repeat_for="model")


def steps() -> Section:
    """Where the engine's own time goes."""
    seconds = signal("model_component:kvscope_step_seconds:rate5m")
    time = stack(
        TTFT_BURN,
        "What does the engine spend its time on?",
        "Share of the engines' time by step component, over all of the model's instances; together 100 %. Little idle: no capacity left. "
        "A large share outside forward_prefill and forward_decode is overhead worth a profile.",
        "percentunit",
        query(f"{seconds} / on (model) group_left () sum by (model) ({seconds})", "{{component}}"),
        max=1,
        overrides=color_overrides(COMPONENT_COLORS),
        options=NAMED_LEGEND,
    )
    duration = lines(
        TTFT_BURN,
        "How long does a step take?",
        "99th percentile over 5 minutes of the duration of one model step by what it held, of the slowest chosen instance. Every running request "
        "waits for the whole step: long mixed steps raise inter-token latency. Lower max_num_batched_tokens to shorten "
        "them.",
        "s",
        query(worst_p99(c.STEP_DURATION, "kind", "kind", OF_INSTANCE), "{{kind}} p99"),
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
    per_second = lines(
        BUSY,
        "What does a second of computing yield?",
        "Tokens computed for each second of forward passes, by instance, and at the same time yesterday. A fall while the device "
        f"is busy: smaller batches, longer contexts, or a slow device; {BUSY} fires below "
        f"{symptoms.LOW_THROUGHPUT * 100:g} % of yesterday's.",
        "si:tok/s",
        query(known(f"{symptoms.PER_FORWARD_SECOND}{{{OF_INSTANCE}}}"), "{{instance}}"),
        query(known(f"{symptoms.PER_FORWARD_SECOND}{{{OF_INSTANCE}}} offset 1d"), "{{instance}} yesterday"),
    )
    lost = lines(
        PERIODIC_STALL,
        "How much time is lost in stalls?",
        "Share of the engines' time that passes in steps (with what holds the loop up before them) of over 50 ms and over 5 times the usual step of "
        "their kind. Every running request waits through a stall. Idle time is none.",
        "percentunit",
        query(signal("model:kvscope_stall_seconds:rate5m"), "in stalls"),
    )
    regular = lines(
        PERIODIC_STALL,
        "Does anything stop the engine at regular times?",
        "Mean gap between large stalls in the last hour, by instance, where the gaps vary by less than "
        f"{symptoms.PERIODIC * 100:g} % (chance: about 100 %) and are at least {symptoms.PERIODIC_GAPS}. A line is the period of the job to look "
        f"for; {PERIODIC_STALL} fires with it.",
        "s",
        query(
            f"{symptoms.STALL_PERIOD}{{{OF_INSTANCE}}} and on (model, instance, engine) "
            f"{symptoms.STALL_VARIATION}{{{OF_INSTANCE}}} < {symptoms.PERIODIC:g} and on (model, instance, engine) "
            f"{symptoms.STALL_GAPS}{{{OF_INSTANCE}}} >= {symptoms.PERIODIC_GAPS}",
            "{{instance}}",
        ),
        when_empty="No regular stalls in the last hour",
    )
    return Section(
        "$model: engine steps",
        [Line(9, [time, duration]), Line(8, [tokens, per_second]), Line(7, [lost, regular])],
        repeat_for="model",
    )


def board() -> Board:
    return frame("batching", "What runs, what waits, and where does the engine's own time go?", [pressure(), steps()])
