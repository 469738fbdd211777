"""Quantization: how far stored KV is from exact, what that does to attention and answers, and whether it is within its budget."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd
import streamlit as st

from observability.app import charts, queries, ui
from observability.app.ui import Content, Context, Panel
from observability.app.units import quantity, setting
from observability.objectives import QUANTIZATION_BUDGET as BUDGET
from observability.signals import BY_NAME, Signal

_STORED = "model_tensor_layer_group_scheme:kvscope_kv_quantization"
SQNR = BY_NAME[f"{_STORED}_sqnr:decibel_rate5m"]
LARGEST = BY_NAME[f"{_STORED}_maximum_error_ratio:p99_5m"]
ATTENTION = BY_NAME["model_layer_group_scheme:kvscope_kv_quantization_attention_error:ratio_rate5m"]
DIVERGENCE = BY_NAME["model_scheme:kvscope_kv_quantization_divergence:mean_rate5m"]
AGREED = BY_NAME["model_scheme:kvscope_kv_quantization_agreed:ratio_rate5m"]
OVER = BY_NAME["model:kvscope_request_quantization_error:over_budget_ratio_rate5m"]


@dataclass(frozen=True, slots=True)
class Limit:
    """One line of the budget: the worst series of `signal` stays at most (or, `least`, at least) at `value`."""

    title: str
    signal: Signal
    value: float
    least: bool = False

    def worst(self, frame: pd.DataFrame) -> float:
        return float(frame["value"].min() if self.least else frame["value"].max())

    def kept(self, value: float) -> bool:
        return value >= self.value if self.least else value <= self.value


LIMITS = (
    Limit("Stored KV", queries.QUANT_ERROR, BUDGET.stored_error),
    Limit("Attention output", ATTENTION, BUDGET.attention_error),
    Limit("Same likeliest token", AGREED, BUDGET.agreed, least=True),
    Limit("Divergence", DIVERGENCE, BUDGET.divergence_nats),
    Limit("Sequences over budget", OVER, BUDGET.sequences_over),
)


def _panel(
    key: str, question: str, unit: str, signal: Signal, labels: tuple[str, ...], note: str, budget: float | None = None,
    bounded: bool = False,
) -> Panel:  # fmt: skip
    return Panel(
        key, question, unit, (signal,),
        lambda source, view: queries.named_by(source, view, signal, *labels),
        lambda data, frame: charts.lines(data, signal.unit, frame, bounded=bounded),
        lines=() if budget is None else (charts.Line(budget, setting(budget, signal.unit)),), note=note, compared=True,
    )  # fmt: skip


_WHERE = ("tensor", "layer_group", "scheme")
ROWS = (
    (
        _panel(
            "stored", "How far is stored KV from exact?", "relative RMS error", queries.QUANT_ERROR, _WHERE,
            "Root of summed squared error over summed squared signal, on sampled live blocks, by tensor, layer group and scheme. Dashed: the budget.",
            BUDGET.stored_error,
        ),
        _panel(
            "sqnr", "How loud is the quantization noise?", "dB", SQNR, _WHERE,
            "10 log10 of squared signal over squared error. 40 dB is 1 % relative RMS; each bit of precision is worth about 6 dB.",
        ),
    ),
    (
        _panel(
            "largest", "Do outliers break the scale of a block?", "P99", LARGEST, _WHERE,
            "99th percentile over blocks of the largest error of a block over its RMS. High with a low relative RMS: single outliers stretch "
            "the scale that all values of the block share.",
        ),
        _panel(
            "attention", "What does it do to attention?", "relative error", ATTENTION, ("layer_group", "scheme"),
            "Error of the attention output over stored KV against exact KV for the same queries, on sampled decode steps. This is what later "
            "layers see.", BUDGET.attention_error,
        ),
        _panel(
            "over-budget", "Does error pile up in sequences?", "% of ended requests", OVER, (),
            f"Share of ended requests whose attention error, accumulated over their decode, is above {setting(BUDGET.attention_error, 'ratio')}. "
            "Dashed: what may be.", BUDGET.sequences_over,
        ),
    ),
    (
        _panel(
            "agreed", "Does the likeliest token stay the same?", "% of compared tokens", AGREED, ("scheme",),
            "Against exact KV. Below the budget greedy answers differ within a hundred tokens.", BUDGET.agreed, bounded=True,
        ),
        _panel(
            "divergence", "How far do the logits move?", "nats a token", DIVERGENCE, ("scheme",),
            "Mean KL divergence of the distribution over exact KV from that over stored KV.", BUDGET.divergence_nats,
        ),
    ),
)  # fmt: skip


def draw(context: Context) -> None:
    """The budget beside what is stored, then outliers and attention, then what it does to answers."""
    budget, *stored = st.columns(3)
    with budget:
        ui.text_card(
            context, "budget", "Is quantized KV within its budget?", "newest 5 min", [limit.signal for limit in LIMITS], _budget, height=200,
            note="Of each measure the worst series counts: tensor, layer group and scheme. A sequence is over when its accumulated attention error is.",
        )  # fmt: skip
    for column, panel in zip(stored, ROWS[0], strict=True):
        with column:
            ui.card(context, panel, 200)
    for row in ROWS[1:]:
        for column, panel in zip(st.columns(len(row)), row, strict=True):
            with column:
                ui.card(context, panel, 190)


def _budget(context: Context) -> Content:
    lines, found = [], []
    for limit in LIMITS:
        frame = queries.now_rows(queries.over_time(context.source, context.view, limit.signal), context.view)
        value = None if frame.empty else limit.worst(frame)
        kept = None if value is None else limit.kept(value)
        verdict, kind = {None: ("not measured", ""), True: ("✓ within", "better"), False: ("✕ over", "worse")}[kept]
        sign = "≥" if limit.least else "≤"
        lines.append(
            f"<tr><td>{limit.title}</td><td>{quantity(value, limit.signal.unit)}</td>"
            f'<td>{sign} {setting(limit.value, limit.signal.unit)}</td><td class="{kind}">{verdict}</td></tr>'
        )
        if value is not None:
            found.append({"measure": limit.title, "value": value, "budget": limit.value, "within": kept})
    if not found:
        return Content(absent=ui.why_absent(context, [queries.QUANT_ERROR]))
    head = "<tr><th></th><th>now</th><th>budget</th><th></th></tr>"
    return Content(f'<table class="plain">{head}{"".join(lines)}</table>', data=pd.DataFrame(found))
