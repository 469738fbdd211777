"""Hardware: is a GPU the reason? Health with what takes from it, how hard it works, and what holds it back."""

from __future__ import annotations

from html import escape

import pandas as pd
import streamlit as st

from exporters.gpu.health import FINDINGS, TARGETS
from observability.app import charts, hardware, ui
from observability.app.hardware import LOOK_BELOW, UNHEALTHY_BELOW, GpuHealth
from observability.app.ui import Content, Context, Panel
from observability.app.units import percent, setting
from observability.app.view import moment
from observability.errors import KvscopeError
from observability.signals import Signal

GPU_COMMANDS = ("kvscope gpu", "kvscope doctor --host")
_TOP, _CHART = 190, 190


def _gpu_panel(
    key: str, question: str, unit: str, signal: Signal, note: str, *, by: str = "", target: float = 0.0
) -> Panel:
    lines = (charts.Line(target, setting(target, "ratio")),) if target else ()
    return Panel(
        key, question, unit, (signal,),
        lambda source, view: hardware.gpus_over_time(source, view, signal, by),
        lambda data, frame: charts.lines(data, signal.unit, frame, bounded=signal.unit == "ratio"),
        lines=lines, note=note, compared=True,
    )  # fmt: skip


HEALTH = _gpu_panel(
    "gpu-health", "When did the health change?", "health", hardware.HEALTH,
    "1 less the penalties of what was found, at least 0. Below the dashed line a GPU needs a look, below 50 % it is unhealthy. A gap: no reading.",
    target=LOOK_BELOW,
)  # fmt: skip
PANELS = (
    _gpu_panel(
        "gpu-utilization", "How busy is each GPU?", "% of time", hardware.UTILIZATION,
        "sm: a kernel was running; memory: device memory was being read or written. 100 % sm says only that some kernel ran.", by="unit",
    ),
    Panel(
        "gpu-memory", "How full is device memory?", "% used", (hardware.MEMORY,), hardware.memory_used,
        lambda data, frame: charts.lines(data, "ratio", frame, bounded=True), compared=True,
        note="Used, with what driver and firmware reserve, of all memory of the GPU.",
    ),
    _gpu_panel(
        "gpu-throttled", "What holds clocks down?", "% of time", hardware.THROTTLED,
        "Share of time that clocks were held down. power: at its limit. thermal: cooling. sync_boost, board_limit: other GPUs or the board decide.",
        by="reason",
    ),
    _gpu_panel(
        "gpu-dram", "Is decode bound by memory?", "memory active, % of time", hardware.DRAM_ACTIVE,
        "Share of time with the memory interface active, from hardware counters. Decode should be bound by memory: above the dashed line.",
        target=TARGETS["dram_active"],
    ),
    _gpu_panel("gpu-l2", "Do reads hit the L2 cache?", "% of reads", hardware.L2_HIT, "From hardware counters.", target=TARGETS["l2_hit"]),
)  # fmt: skip
OVERLAP = Panel(
    "copy-overlap", "Do copies hide beside steps?", "% of copy time", (hardware.OVERLAP,),
    lambda source, view: source.range(hardware.OVERLAP.name, view.start, view.end, view.step, view.where).drop(columns="model"),
    lambda data, frame: charts.lines(data, "ratio", frame, bounded=True),
    lines=(charts.Line(TARGETS["copy_compute_overlap"], setting(TARGETS["copy_compute_overlap"], "ratio")),), compared=True,
    note="Share of the time of copies between device and host memory during which a step was running. Below the dashed line offloading "
    "and prefetch hold steps up.",
)  # fmt: skip


def draw(context: Context) -> None:
    """Health and its reasons, then work, limits and targets; without a GPU, why and what to run."""
    try:
        health = hardware.gpu_health(context.source, context.view)
    except KvscopeError:  # each card says it in its place
        health = None
    if health == []:
        _no_gpu(context)
        left, right = st.columns([3, 2])
        with left:
            _targets_card(context)
        with right:
            ui.card(context, OVERLAP, _TOP)
        return
    left, right = st.columns([3, 2])
    with left:
        ui.text_card(
            context, "gpu-findings", "Is each GPU well, and if not, why?", "newest reading", [hardware.HEALTH, hardware.PENALTY],
            _health,
            note="Health is 1 less the penalties of all findings, at least 0. Findings and penalties are a table of kvscope's "
            "(docs/hardware.md); what could not be read is neither there nor absent.",
        )  # fmt: skip
    with right:
        ui.card(context, HEALTH, _TOP)
    for row in (PANELS[:3], PANELS[3:]):
        for column, panel in zip(st.columns(3), (*row, OVERLAP)[:3], strict=True):
            with column:
                ui.card(context, panel, _CHART)
    _targets_card(context)


def _no_gpu(context: Context) -> None:
    reasons = hardware.target_states(context.source, context.view)
    said = list(dict.fromkeys(map(hardware.why_unavailable, reasons.loc[reasons["status"] != "measured", "reason"])))
    why = f" The engine says: {'; '.join(said)}." if said else ""
    ui.banner(
        "info", "No GPU was read in this range.",
        f"{context.source.describe()} has no reading of a GPU.{why} On a host with GPUs `kvscope serve` reads them by itself; "
        "beside another engine run the first of these and let Prometheus scrape it; the second says what is wrong with the host:",
        GPU_COMMANDS,
    )  # fmt: skip


def _targets_card(context: Context) -> None:
    ui.text_card(
        context, "hardware-targets", "Which hardware figures are measured here?", "newest", [hardware.TARGETS], _targets,
        note="A figure that is not measured is absent everywhere, never 0.",
    )  # fmt: skip


def _targets(context: Context) -> Content:
    states = hardware.target_states(context.source, context.view)
    if states.empty:
        return Content(absent="No exporter reports hardware targets: `kvscope serve` and `kvscope gpu` do.")
    rows = "".join(
        f"<tr><td>{escape(hardware.TARGET_TITLES.get(target, target))}</td><td>{hosts:,.0f}</td>"
        f'<td class="{"" if status == "measured" else "worse"}">{escape(status)}</td>'
        f"<td>{'' if status == 'measured' else ui.with_code(hardware.why_unavailable(reason))}</td></tr>"
        for target, hosts, status, reason in zip(
            states["target"], states["value"], states["status"], states["reason"], strict=True
        )
    )
    head = "<tr><th>figure</th><th>hosts</th><th></th><th>why</th></tr>"
    return Content(f'<table class="plain words">{head}{rows}</table>', data=states)


def _health(context: Context) -> Content:
    health = hardware.gpu_health(context.source, context.view)
    return Content(health_html(health, context), data=_findings(health))


def health_html(health: list[GpuHealth], context: Context) -> str:
    """HTML: each GPU with its score, what takes from it, and what to do."""
    out = []
    for gpu in health:
        kind, word = verdict(gpu.score)
        when = (
            "" if gpu.current else f" · not read since {moment(gpu.time.timestamp(), context.view.zone):%-d %b %H:%M}"
        )
        taken = "".join(
            f"<li><b>−{each.penalty * 100:.0f}</b> {escape(each.condition)} <code>{escape(each.reason)}</code><br>"
            f'<span class="do">{ui.with_code(each.do)}</span></li>'
            for each in gpu.taken
        )
        nothing = "<li>Nothing was found.</li>" if not gpu.taken else ""
        out.append(
            f'<div class="gpu"><div class="figure"><span>{escape(gpu.name)}</span><b>{percent(gpu.score)}</b>'
            f'<em class="verdict {kind}">{word}</em><span>{gpu.looked_for} of {len(FINDINGS)} findings '
            f'could be looked for{when}</span></div><ul class="taken">{taken}{nothing}</ul></div>'
        )
    return "".join(out)


def verdict(score: float) -> tuple[str, str]:
    """(class, words) of a health score."""
    if score < UNHEALTHY_BELOW:
        return "missed", "✕ unhealthy"
    return ("near", "▲ needs a look") if score < LOOK_BELOW else ("met", "✓ well")


def _findings(health: list[GpuHealth]) -> pd.DataFrame:
    rows = [
        (gpu.name, gpu.score, each.reason, each.penalty, each.condition, each.do)
        for gpu in health
        for each in (gpu.taken or (hardware.Taken("none", 0.0, "", ""),))
    ]
    return pd.DataFrame(rows, columns=["gpu", "health", "reason", "penalty", "condition", "do"])
