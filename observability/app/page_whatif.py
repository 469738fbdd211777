"""What if: one load on two settings of the engine, side by side, in virtual time. The work is done by a process beside the app."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

import pandas as pd
import streamlit as st

from observability import catalog
from observability.app import charts, queries, ui, whatif
from observability.app.charts import BLUE, ORANGE, Line, axis_unit
from observability.app.ui import Content, Context
from observability.app.units import ABSENT, percent, quantity, setting
from observability.app.whatif import MAX_TRACE_BYTES, Job
from observability.engine.executor.hardware import GPUS, group_sizes
from observability.engine.model.costs import MODELS
from observability.errors import KvscopeError
from observability.objectives import LatencyObjective

GENERATED, UPLOADED = "generated", "a trace of yours"
LAYOUTS = {
    "contiguous": "adjacent below 2K, any above", "paged": "any blocks (paged)", "compressed": "int8 from 8K tokens on",
    "reserved": "longest length reserved",
}  # fmt: skip
#: KV as it is computed, by format.
_OWN = {"float32": "32 bit", "bfloat16": "16 bit", "fp8": "fp8"}
SIDES = ("before", "after")
_HEIGHT = 230
_MOST_GPUS = 64
_SAME_SPEED = (
    "Virtual time reads adjacent and scattered blocks at the same speed: contiguous and paged give the same latencies."
)


def draw(context: Context) -> None:
    """The load, both settings, and what comes of them."""
    load, trace = _load(context)
    thresholds = {
        objective.name: objective.threshold_seconds for objective in queries.held_latencies(context.view.model)
    }
    question: dict[str, Any] = {"load": load, "thresholds": thresholds}
    for column, side in zip(st.columns(2), SIDES, strict=True):
        with column:
            question[side] = _setting(side)
    key = whatif.key_of(_asked(question), trace)
    with st.container(key="whatif-do", horizontal=True, vertical_alignment="center", gap="small"):
        ready = trace is not None or load["kind"] == GENERATED
        asked = st.button("Replay both in virtual time", type="primary", key="whatif-start", disabled=not ready)
        differs = [name for name in question["before"] if question["before"][name] != question["after"][name]]
        st.html(f'<span class="until">{_difference(question, differs)}</span>')
    if asked:
        whatif.comparisons().start(_asked(question), trace)
    job = whatif.comparisons().find(key)
    busy = job is not None and job.state in ("waiting", "running")
    st.fragment(_outcome, run_every=1.0 if busy else None)(context, key)


def _asked(question: Mapping[str, Any]) -> dict[str, Any]:
    """The question as the worker reads it."""
    return {**question, "load": {name: value for name, value in question["load"].items() if name != "kind"}}


def _load(context: Context) -> tuple[dict[str, Any], bytes | None]:
    """The load that was chosen, and the trace that was given."""
    with st.container(border=True, key="card-whatif-load"):
        st.html('<h3 class="question">Which load?</h3>')
        row = st.container(key="whatif-load", horizontal=True, vertical_alignment="bottom", gap="small")
        kind = row.segmented_control(
            "Load", [GENERATED, UPLOADED], default=GENERATED, key="load", bind="query-params", required=True, width=250
        )
        trace = None
        load: dict[str, Any] = {"kind": kind}
        if kind == UPLOADED:
            file = row.file_uploader(
                "Mooncake JSONL or Azure CSV", key="trace", max_upload_size=MAX_TRACE_BYTES >> 20, width=420
            )
            if file is not None:
                trace = file.getvalue()
            load["time_scale"] = row.number_input(
                "Times as fast",
                0.001,
                1000.0,
                1.0,
                key="speed",
                bind="query-params",
                width=130,
                help="10 replays ten times as fast.",
            )
        else:
            load["requests_per_second"] = row.number_input(
                "Requests a second", 0.001, 10_000.0, 1.0, format="%.3f", key="qps", bind="query-params", width=150, help="Mean rate. "
                "Conversations with shared prefixes and bursts, as in the Mooncake trace.",
            )  # fmt: skip
            load["seed"] = row.number_input(
                "Seed", 0, 10_000, 0, key="seed", bind="query-params", width=100, help="Another seed, another load."
            )
        load["limit"] = row.number_input(
            "Requests",
            2,
            20_000,
            600,
            step=100,
            key="requests",
            bind="query-params",
            width=120,
            help="The first so many of the load.",
        )
        now = _measured(context)
        if now and kind == GENERATED:
            row.html(f'<p class="told">Measured now: {now}</p>')
    return load, trace


def _measured(context: Context) -> str:
    """The newest request rate of the model, in words; empty without one."""
    if not context.view.model:
        return ""
    try:
        value = queries.current(queries.over_time(context.source, context.view, queries.REQUESTS), context.view)
    except KvscopeError:
        return ""
    return "" if value is None else escape(f"{quantity(value, 'requests/s')} of {context.view.model}")


def models_for(gpu: str) -> list[str]:
    """Models whose KV is known in the format that this GPU computes in."""
    return [name for name, model in MODELS.items() if _own_format(gpu, name) in model.kv_formats]


def kv_for(gpu: str, model: str) -> dict[str, str]:
    """KV precisions of the model there, by name, as Setting.kv_dtype has them."""
    choices = {_OWN[_own_format(gpu, model)]: "auto"}
    return choices | {"int8": "int8"} if "int8" in MODELS[model].kv_formats else choices


def layouts_for(model: str, kv_dtype: str) -> list[str]:
    """Of LAYOUTS, those that go with the model and the KV precision: what is int8 already is not compressed to it."""
    compressed = kv_dtype == "auto" and "int8" in MODELS[model].kv_formats
    return [name for name in LAYOUTS if compressed or name != "compressed"]


def groups_for(gpu: str, model: str) -> list[int]:
    """Numbers of GPUs that a replica can have."""
    return [size for size in group_sizes(GPUS[gpu], MODELS[model].heads) if size <= _MOST_GPUS]


def _own_format(gpu: str, model: str) -> str:
    """Of KV that is stored as it is computed: the model's own, on a device without short floats float32."""
    return MODELS[model].kv_format if "bfloat16" in GPUS[gpu].peak_flops else "float32"


def _setting(side: str) -> dict[str, Any]:
    """The controls of one side; returns what they say, by the worker's names."""

    def key(name: str) -> str:
        return f"{side}_{name}"

    with st.container(border=True, key=f"card-whatif-{side}"):
        st.html(f'<h3 class="question">{side.capitalize()}</h3>')
        top = st.container(horizontal=True, gap="small", key=f"whatif-{side}-1")
        gpu = top.selectbox(
            "GPU", list(GPUS), index=list(GPUS).index("H100"), key=key("gpu"), bind="query-params", width=120
        )
        models = models_for(gpu)
        model = top.selectbox(
            "Model",
            models,
            index=models.index("llama-3-8b"),
            key=key("model"),
            bind="query-params",
            width=160,
        )
        tensor_parallel = top.selectbox(
            "GPUs a replica", groups_for(gpu, model), key=key("tp"), bind="query-params", width=120,
            help=f"They share the {MODELS[model].heads} heads of each layer evenly.",
        )  # fmt: skip
        replicas = top.number_input(
            "Replicas", 1, 32, 1 if side == "before" else 2, key=key("replicas"), bind="query-params", width=110
        )
        low = st.container(horizontal=True, gap="small", key=f"whatif-{side}-2")
        precisions = kv_for(gpu, model)
        kv = low.selectbox(
            "KV precision", list(precisions), key=key("kv"), bind="query-params", width=120,
            help="As computed, or int8 where the model's KV is known in it.",
        )  # fmt: skip
        layout = low.selectbox(
            "KV layout", layouts_for(model, precisions[kv]), key=key("layout"), bind="query-params", width=160,
            help="; ".join(f"{k}: {v}" for k, v in LAYOUTS.items())
            + ". Compressed goes with KV as computed, of models whose KV is known in int8. "
            + _SAME_SPEED,
        )  # fmt: skip
        seqs = low.number_input(
            "Batch limit",
            1,
            4096,
            256,
            key=key("seqs"),
            bind="query-params",
            width=120,
            help="Requests that run at once.",
        )
        tokens = low.number_input(
            "Tokens a step", 16, 1 << 20, 8192, step=512, key=key("tokens"), bind="query-params", width=130
        )
    return {
        "gpu": gpu, "model": model, "tensor_parallel": tensor_parallel, "kv_dtype": precisions[kv], "layout": layout, "max_num_seqs": seqs,
        "max_num_batched_tokens": tokens, "replicas": replicas,
    }  # fmt: skip


_NAMES = {
    "gpu": "GPU", "model": "model", "tensor_parallel": "GPUs a replica", "kv_dtype": "KV precision", "layout": "KV layout",
    "max_num_seqs": "batch limit", "max_num_batched_tokens": "tokens a step", "replicas": "replicas",
}  # fmt: skip


def _difference(question: Mapping[str, Any], differs: list[str]) -> str:
    if not differs:
        return "Both sides are the same."
    told = "; ".join(
        f"{_NAMES[name]} {_shown(question['before'], name)} → {_shown(question['after'], name)}" for name in differs
    )
    layouts = {question[side]["layout"] for side in SIDES}
    return escape(f"{told}. {_SAME_SPEED}" if layouts == {"contiguous", "paged"} else told)


def _shown(setting: Mapping[str, Any], name: str) -> str:
    value = setting[name]
    if value == "auto":
        return _OWN[_own_format(setting["gpu"], setting["model"])]
    return f"{value:,}" if isinstance(value, int) else str(value)


def _outcome(context: Context, key: str) -> None:
    """What is known of the question that the page shows: progress, a failure, or the answer."""
    job = whatif.comparisons().find(key)
    if job is None:
        st.html('<p class="told">Nothing runs until you press the button. Both settings then serve the same requests on the cost model of the GPU; '
                "no model is run, and what is shown is simulated.</p>")  # fmt: skip
        return
    if job.state in ("waiting", "running"):
        waits = (
            "Waits for another comparison to end" if job.state == "waiting" else f"Replaying: {job.what or 'starting'}"
        )
        with st.container(horizontal=True, vertical_alignment="center", gap="small", key="whatif-progress"):
            st.progress(job.share, text=f"{waits} · {job.share:.0%}")
            st.button("Cancel", key="whatif-cancel", on_click=whatif.comparisons().cancel, args=(key,))
        return
    if job.state == "cancelled":
        ui.banner("info", "Cancelled.", "Press the button to start again.")
        return
    if job.state == "failed":
        ui.banner("error", job.reason, job.next_step)
        return
    assert job.answer is not None
    _answer(context, job)


def _answer(context: Context, job: Job) -> None:
    answer = job.answer
    assert answer is not None
    ui.banner(
        "info", "Simulated: virtual time, no model was run.",
        f"{answer['requests']:,} requests at {quantity(answer['rate'], 'requests/s')} over {quantity(answer['span_seconds'], 'seconds')} "
        f"({answer['prompt_tokens']:,} prompt and {answer['output_tokens']:,} answer tokens), "
        f"worked out in {quantity(answer['wall_seconds'], 'seconds')} from {_worked_out_from(answer)}.",
    )  # fmt: skip
    for title, text in cautions(answer):
        ui.banner("warning", title, text)
    held = queries.held_latencies(context.view.model)
    for column, objective in zip(st.columns(len(held)), held, strict=True):
        with column:
            ui.text_card(
                context, f"whatif-{objective.name}", f"{objective.title}: before and after?", "simulated percentiles", [],
                lambda _, o=objective: latency(answer, o), height=_HEIGHT,  # type: ignore[misc]
                note="Exact quantiles over all served requests of all replicas; inter-token latency over all tokens.",
            )  # fmt: skip
    left, right = st.columns([1, 1])
    with left:
        ui.text_card(
            context,
            "whatif-makeup",
            "What are the slowest 1 % made of?",
            "mean seconds, simulated",
            [],
            lambda _: makeup(answer),
            height=_HEIGHT,
        )
    with right:
        ui.text_card(
            context, "whatif-figures", "And the rest?", "simulated", [], lambda _: figures(answer), height=_HEIGHT
        )


def _worked_out_from(answer: Mapping[str, Any]) -> str:
    return "; ".join(dict.fromkeys(answer[side]["worked_out_from"] for side in SIDES))


def _same_requests(answer: Mapping[str, Any]) -> bool:
    before, after = (answer[side] for side in SIDES)
    return before["served"] == after["served"] and before["answer_tokens"] == after["answer_tokens"]


def cautions(answer: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What to mind of the comparison: title and text of each."""
    told = [(f"{side.capitalize()}:", note) for side in SIDES for note in answer[side]["notes"]]
    if _same_requests(answer):
        return told
    served = "; ".join(
        f"{side}: {answer[side]['served']:,} of {answer[side]['requests']:,} requests and {answer[side]['answer_tokens']:,} answer tokens"
        for side in SIDES
    )
    return [("The sides did not serve the same: their latencies are not of the same requests.", f"{served}."), *told]


def latency(answer: Mapping[str, Any], objective: LatencyObjective) -> Content:
    """P99 of both sides in words and the percentiles of both as lines."""
    sides = {side: answer[side] for side in SIDES}
    p99 = {side: (each["latency"][objective.name] or {}).get("p99") for side, each in sides.items()}
    if any(value is None for value in p99.values()):
        return Content(absent="One of the sides served no request: look at what was refused.")
    over = {side: each["over"][objective.name] for side, each in sides.items()}
    ratio = p99["after"] / p99["before"] if p99["before"] else 1.0
    change = (
        "the same"
        if abs(ratio - 1) < 0.005
        else f"{'▲' if ratio > 1 else '▼'} {abs(ratio - 1) * 100:.0f} %"
        if ratio < 2
        else f"▲ {ratio:.1f} times"
    )
    of = "" if _same_requests(answer) else f" of {sides['before']['served']:,} → {sides['after']['served']:,} requests"
    limit = setting(objective.threshold_seconds, "seconds")
    words = (
        f'<div class="figure"><b>{quantity(p99["before"], "seconds")} → {quantity(p99["after"], "seconds")}</b><span>P99{of}, {change}</span></div>'
        f'<p class="limits">Over {limit}: {percent(over["before"])} → <b>{percent(over["after"])}</b>, {setting(1 - objective.target, "ratio")} allowed</p>'
    )
    table = pd.DataFrame(
        {
            "percentile": answer["percentiles"],
            **{side: each["percentiles"][objective.name] for side, each in sides.items()},
        }
    )
    return Content(words, _percentile_lines(table, Line(objective.threshold_seconds, limit)), data=_said(answer, table))


def _percentile_lines(table: pd.DataFrame, line: Line) -> charts.Drawing:
    sheet = charts.Sheet(_HEIGHT, hovermode="x unified")
    top = float(table[list(SIDES)].to_numpy().max())
    factor, unit = axis_unit("seconds", top)
    for side, colour, dash in (("before", BLUE, "dot"), ("after", ORANGE, "solid")):
        sheet.add(
            "scatter",
            x=[f"{p:g}" for p in table["percentile"]], y=table[side] * factor, mode="lines", name=side,
            line={"color": colour, "width": 2, "dash": dash},
            customdata=[quantity(v, "seconds") for v in table[side]], hovertemplate="%{customdata}",
        )  # fmt: skip
    if line.value <= 1.1 * top:
        sheet.rule(charts.OBJECTIVE_LINE, "dash", y=line.value * factor)
        sheet.note(
            line.label,
            charts.OBJECTIVE_LINE,
            x=1,
            y=line.value * factor,
            yref="y",
            xanchor="left",
            yanchor="middle",
            xshift=2,
        )
        sheet.margin["r"] = 6 + 6 * len(line.label)
    sheet.x |= {"type": "category", "tickvals": ["10", "50", "90", "99"], "ticktext": ["P10", "P50", "P90", "P99"]}
    sheet.y |= {
        "range": [0, max(top, line.value if line.value <= 1.1 * top else 0) * factor * 1.08],
        "ticksuffix": f" {unit}",
    }
    return sheet.figure()


def makeup(answer: Mapping[str, Any]) -> Content:
    """The slowest 1 % of both sides by state."""
    rows = {}
    for side in SIDES:
        states = answer[side]["makeup"].get("slowest_1_percent")
        if states:
            rows[side] = pd.Series({state: states.get(state, 0.0) for state in catalog.STATES})
    if not rows or not any(parts.sum() > 0 for parts in rows.values()):
        return Content(absent="No request was served.")
    return Content(
        figure=charts.makeup_bars(rows, _HEIGHT),
        data=_said(answer, pd.DataFrame(rows).rename_axis("state").reset_index()),
    )


def _said(answer: Mapping[str, Any], data: pd.DataFrame) -> pd.DataFrame:
    """`data` with the clock of its figures, so that a file of it says that they are simulated."""
    data.insert(0, "clock", answer["clock"])
    return data


def figures(answer: Mapping[str, Any]) -> Content:
    """HTML table of what both sides have beside latencies."""

    def row(name: str, unit: str, values: Mapping[str, Any]) -> tuple[str, str, Any, Any]:
        return name, unit, values["before"], values["after"]

    def each(field: str) -> dict[str, Any]:
        return {side: answer[side][field] for side in SIDES}

    listed = [
        row("Requests served", "requests", each("served")), row("Requests refused", "requests", each("refused")),
        row("Tokens a second, all replicas", "tokens/s", each("tokens_per_second")), row("Until the last request ended", "seconds", each("duration_seconds")),
        row("Room of a replica's KV pool", "tokens", each("kv_tokens")), row("KV pools held, mean", "ratio", each("kv_usage_mean")),
        row("Most of a KV pool held", "ratio", each("kv_usage_max")), row("KV hit rate", "ratio", each("hit_rate")),
        row("Preemptions", "", each("preemptions")),
    ]  # fmt: skip
    body = "".join(
        f"<tr><td>{name}</td><td>{_figure(before, unit)}</td><td>{_figure(after, unit)}</td></tr>"
        for name, unit, before, after in listed
    )
    reasons = "".join(
        f"<li>{side}: {count:,} × {escape(reason)}</li>"
        for side in SIDES
        for reason, count in answer[side]["reasons"].items()
    )
    data = _said(answer, pd.DataFrame(listed, columns=["figure", "unit", "before", "after"]))
    return Content(
        f'<table class="plain"><tr><th></th><th>before</th><th>after</th></tr>{body}</table><ul class="notes">{reasons}</ul>',
        data=data,
    )


def _figure(value: float | None, unit: str) -> str:
    if value is None:
        return ABSENT
    return f"{value:,}" if unit in ("", "requests", "tokens") else quantity(value, unit)
