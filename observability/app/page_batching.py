"""Batching: what a step yields, who waits and is put back, and what the controller did about it."""

from __future__ import annotations

import streamlit as st

from observability import catalog
from observability.app import charts, queries, ui
from observability.app.ui import Context, Panel
from observability.app.units import setting
from observability.objectives import OBJECTIVES, TTFT, LatencyObjective, held_to, left_out
from observability.signals import BY_NAME, Signal

_FORWARD = (queries.STEP_TOKENS, queries.STEP_TIME)
DURATION = BY_NAME["model_kind:kvscope_step_duration_seconds:p99_5m"]
SPREAD = {name: BY_NAME[f"model:kvscope_prefill_batch_spread_ratio:{name.lower()}_5m"] for name in ("P50", "P99")}
SPLITS = BY_NAME["model:kvscope_prefill_batch_splits:rate5m"]
CLASS_WAITING = BY_NAME["model_class:kvscope_requests_waiting:sum"]
CLASS_RUNNING = BY_NAME["model_class:kvscope_requests_running:sum"]
CLASS_TTFT = BY_NAME[f"model_class:{TTFT.family.name}:p99_5m"]
PROMOTIONS = BY_NAME["model_class:kvscope_queue_promotions:rate5m"]
PREEMPTED = BY_NAME["model_reason:kvscope_preemptions:rate5m"]
RECOMPUTED = BY_NAME["model_reason:kvscope_kv_recomputed_tokens:rate5m"]
LIMIT_TOKENS = BY_NAME["model:kvscope_limit_batched_tokens:min"]
LIMIT_PREFILLS = BY_NAME["model:kvscope_limit_prefills:min"]
CHANGES = BY_NAME["model_rule_action:kvscope_controller_changes:rate5m"]
DEGRADED = BY_NAME["model_rule:kvscope_requests_degraded:rate5m"]


def _lines(
    key: str, question: str, unit: str, signal: Signal, labels: tuple[str, ...], note: str, *lines: charts.Line
) -> Panel:
    return Panel(
        key, question, unit, (signal,), lambda source, view: queries.named_by(source, view, signal, *labels),
        lambda data, frame: charts.lines(data, signal.unit, frame), lines=lines, note=note, compared=True,
    )  # fmt: skip


EFFICIENCY = (
    Panel(
        "efficiency", "What does a second yield?", "tok/s of forward pass", _FORWARD, queries.tokens_per_forward_second,
        lambda data, frame: charts.lines(data, "tokens/s", frame), compared=True,
        note="Tokens that the model computed, over the seconds it spent in forward passes. A fall at the same load: smaller batches, longer "
        "contexts, or a slow device.",
    ),
    Panel(
        "batch", "How large is a step?", "tokens a step", (queries.STEP_TOKENS, queries.STEPS), queries.tokens_per_step,
        lambda data, frame: charts.stacked(data, "tokens", frame, order=("decode", "prefill")), compared=True,
        note="Tokens of a mean step, of prompts and of decodes (one a running request). Few with many requests waiting: the limit of tokens or "
        "of requests holds the batch back.",
    ),
    Panel(
        "step-time", "Where does time go?", "% of its time", (queries.STEP_TIME,), queries.step_shares,
        lambda data, frame: charts.stacked(data, "ratio", frame, order=catalog.SHOWN_COMPONENTS, share=True),
        note="By step component, over all of the model's engines; together 100 %. Little idle: no capacity left.",
    ),
    _lines("step-duration", "How long does a step take?", "P99", DURATION, ("kind",), "By what the step held. Every running request waits for the whole step."),
)  # fmt: skip


def queues(model: str) -> tuple[Panel, ...]:
    """Who waits, runs and is slow, by priority class."""
    return (
        _lines("class-waiting", "Which class waits?", "requests", CLASS_WAITING, ("class",), "Requests queued, waiting for KV blocks or preempted, by priority class."),
        _lines("class-running", "Which class runs?", "requests", CLASS_RUNNING, ("class",), "Requests in prefill or decode by priority class."),
        _lines(
            "class-ttft", "Which class is slow?", "TTFT P99", CLASS_TTFT, ("class",),
            "Time to first token by priority class. Only the lowest class slow: priorities do their work. All slow: capacity.",
            *class_limits(model),
        ),
        _lines("promotions", "Does anybody wait too long?", "/s", PROMOTIONS, ("class",), "Requests that were overdue in their queue and went to the front."),
    )  # fmt: skip


def class_limits(model: str) -> list[charts.Line]:
    """When first tokens of `model` are late, also for the classes that have an objective of their own."""
    held = held_to(model, TTFT)
    own = [x for x in OBJECTIVES if x.name == held.name and x.request_class in left_out(held)]
    return [
        charts.Line(x.threshold_seconds, " ".join((setting(x.threshold_seconds, "seconds"), x.request_class)).strip())
        for x in (held, *own)
        if isinstance(x, LatencyObjective)
    ]


PRESSURE = (
    Panel(
        "spread", "How uneven are prompts?", "q75 / q25", tuple(SPREAD.values()),
        lambda source, view: queries.several_over_time(source, view, SPREAD),
        lambda data, frame: charts.lines(data, "times", frame), compared=True,
        note="Spread of the lengths left to compute among requests in prefill, at each step with two or more. The engine leaves long prompts "
        "out of a batch above its limit (4 by default).",
    ),
    _lines("splits", "Are long prompts left out?", "steps/s", SPLITS, (), "Steps that left long prefills out for the spread of the batch."),
    _lines("preempted", "Is anybody put back?", "/s", PREEMPTED, ("reason",), "Running requests that gave up their KV blocks, by reason."),
    _lines("recomputed", "How much work is done twice?", "tok/s", RECOMPUTED, ("reason",), "Tokens computed again because their KV blocks were given up."),
)  # fmt: skip
CONTROLLER = (
    _lines("limit-tokens", "How large may a step be?", "tokens", LIMIT_TOKENS, (), "As the load controller has it now, of the engine with the least."),
    _lines("limit-prefills", "How many prompts at once?", "requests", LIMIT_PREFILLS, (), "As the load controller has it now; 1 is serial admission."),
    _lines("changes", "What was changed?", "changes/s", CHANGES, ("rule", "action"), "Changes of limits by the rule that asked for them."),
    _lines("degraded", "Who was affected?", "requests/s", DEGRADED, ("rule",), "Requests that ran under lowered limits, by rule."),
)  # fmt: skip


def draw(context: Context) -> None:
    """Efficiency, classes, pressure, controller: a row each."""
    for row in (EFFICIENCY, queues(context.view.model), PRESSURE, CONTROLLER):
        for column, panel in zip(st.columns(len(row)), row, strict=True):
            with column:
                ui.card(context, panel, 165)
