"""From the make-up of the slow requests to a sentence and to what to do about it. The rules are data.

A rule speaks about the state in which the slow requests spent most of their time and the component of the engine's
step that took most of that state's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from observability import catalog
from observability.app.p99 import Makeup
from observability.app.units import percent, quantity
from observability.objectives import KV_USAGE_WARNING

ANY = "*"


TTFT_RUNBOOK, ITL_RUNBOOK, DURATION_RUNBOOK = (f"Kvscope{name}BudgetBurn" for name in ("TTFT", "ITL", "Duration"))
_FULL, _QUEUE, _PREEMPTED, _QUANT = (
    "KvscopeKVCacheExhausted",
    "KvscopeQueueGrowing",
    "KvscopePreemptionStorm",
    "KvscopeQuantizationError",
)


@dataclass(frozen=True, slots=True)
class Rule:
    """Holds when `state` dominates and, in it, `component` (or any). The first rule that holds is told."""

    state: str
    component: str
    says: str
    do: Sequence[str]
    page: str  # where the evidence continues: url path of a page
    if_kv_full: bool | None = None  # True: only above KV_USAGE_WARNING, False: only below, None: either
    runbook: str = TTFT_RUNBOOK  # what to do in full: a page of alerts/runbooks


RULES: tuple[Rule, ...] = (
    Rule(
        "kv_wait", ANY, "They wait for KV blocks: the pool is too small for what is admitted.",
        ("Store KV as int8, or give the pool more blocks.", "Lower the number of running requests, so that those admitted finish.",
         "Send long prompts to another replica."), "kv-cache", runbook=_FULL,
    ),
    Rule(
        "queued", ANY, "They queue because the KV pool is full: nothing is admitted until a running request ends.",
        ("Store KV as int8, or give the pool more blocks.", "Add a replica, or send long prompts elsewhere.",
         "Look at the hit rate: shared prefixes that are evicted are computed and stored again."), "kv-cache", if_kv_full=True, runbook=_FULL,
    ),
    Rule(
        "queued", "forward_prefill", "They queue behind the prefill of other prompts while KV blocks are free.",
        ("Add a replica, or spread arrivals: the engine has more prompt tokens than it can compute.",
         "Raise the prefix hit rate: a hit is prefill that is not computed.",
         "Give short prompts a class that may overtake."), "kv-cache", if_kv_full=False, runbook=_QUEUE,
    ),
    Rule(
        "queued", ANY, "They queue for a place in the batch while KV blocks are free.",
        ("Raise the number of requests that may run at once, if ITL has room.",
         "Add a replica if running requests stay at their limit."), "batching", if_kv_full=False, runbook=_QUEUE,
    ),
    Rule(
        "queued", ANY, "They queue before they are admitted.",
        ("See on Now whether KV use or the number of running requests is at its limit.", "Add a replica or shed load."), "", runbook=_QUEUE,
    ),
    Rule(
        "prefill", "forward_prefill", "They compute their own prompt: long prompts or few prefix hits.",
        ("Look at the hit rate by prompt length: which prompts miss?", "Send long prompts to replicas of their own.",
         "Raise the tokens of a step if ITL has room: fewer, larger prefill chunks."), "kv-cache",
    ),
    Rule(
        "prefill", "forward_decode", "Their prefill shares each step with the decode of others.",
        ("Raise the tokens of a step, so that a prompt needs fewer steps.", "Lower the number of running requests."), "batching",
    ),
    Rule(
        "decode", "forward_prefill", "Their decode stalls while prompts of others are prefilled in the same steps.",
        ("Lower the tokens of a step (prefill chunk), so that a decode step waits less.",
         "Send long prompts to replicas of their own."), "batching", runbook=ITL_RUNBOOK,
    ),
    Rule(
        "decode", "forward_decode", "They decode: long outputs, or large batches that make each token slow.",
        ("Compare ITL with its objective: over it, lower the number of running requests; under it, outputs are long.",
         "Set or lower the output limit where clients allow it."), "batching", runbook=DURATION_RUNBOOK,
    ),
    Rule(
        "decode", "dequant", "Their decode reads quantized KV: dequantization takes more than the model.",
        ("Keep the recent window or this length class unquantized.",), "quantization", runbook=_QUANT,
    ),
    Rule(
        "preempted", ANY, "They were preempted: their KV blocks were given up and computed again.",
        ("Lower the number of running requests, so that those admitted keep their blocks.",
         "Store KV as int8, or give the pool more blocks."), "batching", runbook=_PREEMPTED,
    ),
    Rule(
        "swapped", ANY, "They wait for KV blocks that come back from host memory.",
        ("Prefetch earlier, or give the device pool more blocks.",), "kv-cache", runbook=_FULL,
    ),
    # Foreign engines tell the state alone.
    Rule(
        "prefill", catalog.UNTOLD, "They are in prefill: their own prompt, or steps shared with the decode of others.",
        ("Look at the hit rate by prompt length: which prompts miss?", "Compare the tokens of a step with the prompt lengths."), "kv-cache",
    ),
    Rule(
        "decode", catalog.UNTOLD, "They decode: long outputs, or large batches and prefills of others that make each token slow.",
        ("Compare ITL with its objective: over it, lower the number of running requests or the tokens of a step; under it, outputs are long.",), "batching", runbook=DURATION_RUNBOOK,
    ),
    Rule(
        "frontend", catalog.UNTOLD, "They wait outside the engine: tokenizing, transport or a blocked event loop of the API server.",
        ("Add API server processes, or move tokenizing to the client.", "Look for a blocked event loop in the server."), "",
    ),
)  # fmt: skip

#: Components that are the host's work around the model; when they dominate, the state matters less.
HOST_WORK = ("schedule", "kv_alloc", "kv_evict", "kv_move", "sample", "emit")
HOST_RULE = Rule(
    ANY, ANY, "The time goes to the engine's own work around the model, not to the model.",
    ("Profile the step loop: this part should be a few percent.", "Larger steps (more tokens each) have less of it per token."), "batching", runbook="KvscopeBusyLowThroughput",
)  # fmt: skip
IDLE_RULE = Rule(
    ANY, ANY, "They wait while the engine idles: something outside the step loop holds them.",
    ("Look at the clients and the network in front of the engine.", "Look for a blocked event loop in the server."), "", runbook="KvscopeSchedulerStuck",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Finding:
    """`headline` is the sentence, `evidence` the numbers behind it, `actions` what to do, `page` where to look next, `runbook` the
    page of alerts/runbooks with the whole procedure."""

    headline: str
    evidence: tuple[str, ...]
    actions: tuple[str, ...]
    page: str
    runbook: str


def explain(slow: Makeup, typical: Makeup | None, kv_usage: float | None) -> Finding | None:
    """What the slowest requests wait for. `typical` is the make-up to compare with; None when they took no time."""
    total = slow.seconds
    if not total > 0:
        return None
    by_state = slow.matrix.sum(axis=1)
    state = str(by_state.idxmax())
    component = str(slow.matrix.T[state].idxmax())
    by_component = slow.matrix.sum(axis=0)
    rule = _rule(state, component, str(by_component.idxmax()), kv_usage)

    in_state = slow.matrix.T[state]
    state_seconds, component_seconds = float(in_state.sum()), float(in_state.max())
    evidence = [
        f"{percent(state_seconds / total)} of their {quantity(total, 'seconds')} is spent {_PLACE[state]}"
        f" ({quantity(state_seconds, 'seconds')}).",
    ]
    if component != catalog.UNTOLD:
        evidence.append(
            f"{percent(component_seconds / state_seconds)} of that, {quantity(component_seconds, 'seconds')}, "
            f"{_DOING[component]}."
        )
    if typical is not None and typical.q < slow.q:
        growth = by_state - typical.matrix.sum(axis=1)
        grown = str(growth.idxmax())
        after = float(by_state[grown])
        before = after - float(growth[grown])
        if after > before:
            times = f", {after / before:.1f} times as much" if before > 0.01 * after else ""
            evidence.append(
                f"Against the slower half of all, time {_PLACE[grown]} grew most: "
                f"{quantity(before, 'seconds')} → {quantity(after, 'seconds')}{times}."
            )
    if kv_usage is not None and state in ("queued", "kv_wait", "preempted"):
        evidence.append(f"Running requests held {percent(kv_usage)} of the KV pool meanwhile.")
    return Finding(rule.says, tuple(evidence), tuple(rule.do), rule.page, rule.runbook)


def runbook(name: str) -> str:
    """The runbook of that name as Markdown."""
    return (resources.files("alerts") / "runbooks" / f"{name}.md").read_text(encoding="utf-8")


_PLACE = {
    "queued": "in the queue",
    "kv_wait": "waiting for KV blocks",
    "prefill": "in prefill",
    "decode": "in decode",
    "preempted": "preempted",
    "swapped": "swapped out",
    "frontend": "outside the engine",
}
_DOING = {
    "schedule": "while the engine scheduled",
    "kv_alloc": "while the engine allocated KV blocks",
    "kv_evict": "while the engine evicted KV blocks",
    "kv_move": "while the engine moved KV blocks",
    "dequant": "while the engine dequantized KV",
    "forward_prefill": "while the model ran prefill",
    "forward_decode": "while the model ran decode",
    "sample": "while the engine sampled tokens",
    "emit": "while the engine handed out tokens",
    "idle": "while the engine was idle",
}


def _rule(state: str, component: str, overall_component: str, kv_usage: float | None) -> Rule:
    if overall_component in HOST_WORK and component == overall_component:
        return HOST_RULE
    if component == "idle":
        return IDLE_RULE
    full = None if kv_usage is None else kv_usage >= KV_USAGE_WARNING
    for rule in RULES:
        if rule.state == state and rule.component in (ANY, component) and rule.if_kv_full in (None, full):
            return rule
    doing = f", {_DOING[component]}" if component != catalog.UNTOLD else ""
    return Rule(
        state, component, f"Most of their time is {_PLACE[state]}{doing}.",
        ("Compare with a quiet time of the same load.",), "",
    )  # fmt: skip
