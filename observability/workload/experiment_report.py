"""What an experiment came to, for people: tables, verdicts beside the plan's claims, findings worked out from the numbers, and a plot.

Every view says `virtual time` or `real time`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from observability.errors import ConfigError
from observability.workload.experiment import BASELINE, ArmResult, ExperimentResult
from observability.workload.report import seconds_text

_FILE_WIDTH = 120  # of output that goes to a file or a pipe
_NOTABLE = 0.05  # relative change from which a mechanism is said to have done something
_NOTHING = 0.01  # below which, in every figure, it is said to have done nothing
_MOST = 0.5
_WIDE_RANGE = 20.0  # from which bars of P99 need a logarithmic axis


# -- claims ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Claim:
    """What the plan says of going from the baseline to all mechanisms; `target` is the change to be met: relative, or in points."""

    title: str
    claim: str
    value: Callable[[ArmResult], float | None]
    target: float
    kind: Literal["relative", "points"]


CLAIMS = (
    Claim("P99 time to first token", "820 to 490 ms (-40 %)", lambda a: a.figures.ttft_p99_seconds, -0.40, "relative"),
    Claim("P99 end to end", "820 to 490 ms (-40 %)", lambda a: a.figures.end_to_end_p99_seconds, -0.40, "relative"),
    Claim("throughput capacity", "+15 %", lambda a: a.capacity_requests_per_second, 0.15, "relative"),
    Claim("KV memory use (useful / held)", "68 to 83 % (+15 points)", lambda a: a.figures.useful_ratio, 0.15, "points"),
)  # fmt: skip


class Verdict(NamedTuple):
    """`change` in the claim's kind; `met` None: not measured."""

    claim: Claim
    before: float | None
    after: float | None
    change: float | None
    met: bool | None


def verdicts(result: ExperimentResult) -> list[Verdict]:
    """Each claim beside what the last arm has against the baseline."""
    first, last = result.arms[0], result.arms[-1]
    found = []
    for claim in CLAIMS:
        before, after = claim.value(first), claim.value(last)
        change = change_of(before, after) if claim.kind == "relative" else _difference(before, after)
        met = None if change is None else change <= claim.target if claim.target < 0 else change >= claim.target
        found.append(Verdict(claim, before, after, change, met))
    return found


def change_of(before: float | None, after: float | None) -> float | None:
    """Relative change; None where one is unknown or there is nothing to relate to."""
    return None if before is None or after is None or before == 0 else after / before - 1.0


def _difference(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before


# -- findings ----------------------------------------------------------------------------------------------------------------


class _Effect(NamedTuple):
    """What one mechanism changed: in P99 of time to first token and end to end and in capacity relative, in memory use by points."""

    name: str
    ttft: float | None
    end_to_end: float | None
    capacity: float | None
    useful: float | None
    hit_rate: float | None

    @property
    def size(self) -> float:
        return max((abs(x) for x in self[1:] if isinstance(x, float)), default=0.0)


def _effect(name: str, before: ArmResult, after: ArmResult) -> _Effect:
    old, new = before.figures, after.figures
    return _Effect(
        name,
        change_of(old.ttft_p99_seconds, new.ttft_p99_seconds),
        change_of(old.end_to_end_p99_seconds, new.end_to_end_p99_seconds),
        change_of(before.capacity_requests_per_second, after.capacity_requests_per_second),
        _difference(old.useful_ratio, new.useful_ratio),
        _difference(old.hit_rate or 0.0, new.hit_rate or 0.0),
    )


def findings(result: ExperimentResult) -> list[str]:
    """Sentences that follow from the figures."""
    first, last = result.arms[0], result.arms[-1]
    said = [_overall(result, first, last)]
    steps = [_effect(str(b.arm.differs_by), a, b) for a, b in pairwise(result.arms)]
    said += _sorted_out(steps, "Added in this order", "lowered", "raised")
    best = min(result.arms, key=lambda a: a.figures.end_to_end_p99_seconds or float("inf"))
    if best is not last and best.figures.end_to_end_p99_seconds is not None:
        said.append(
            f"The lowest P99 end to end is that of '{best.arm.name}' ({_time(best.figures.end_to_end_p99_seconds)}), "
            f"not of the last arm ({_time(last.figures.end_to_end_p99_seconds)})."
        )
    said.append(_kv_share(first))
    if result.no_limit is not None:
        said.append(_cost_of_memory(first, last, result.no_limit))
    if result.ablation:
        without = [_effect(str(a.arm.differs_by), a, last) for a in result.ablation]
        said += _sorted_out(without, "Beside all others", "lowers", "raises")
    return said


def _overall(result: ExperimentResult, first: ArmResult, last: ArmResult) -> str:
    parts = []
    for verdict in verdicts(result):
        if verdict.change is None:
            continue
        amount = _points(verdict.change) if verdict.claim.kind == "points" else _percent(verdict.change)
        parts.append(f"{verdict.claim.title} {amount} ({'met' if verdict.met else 'not met'})")
    return f"From '{first.arm.name}' to '{last.arm.name}': {'; '.join(parts)}."


def _sorted_out(effects: Sequence[_Effect], intro: str, lowered: str, raised: str) -> list[str]:
    """Who helped, who harmed and who did nothing, by the two P99s and capacity."""
    helped: list[str] = []
    harmed: list[str] = []
    nothing: list[str] = []
    for e in effects:
        changes = {
            "P99 time to first token": e.ttft,
            "P99 end to end": e.end_to_end,
            "capacity": None if e.capacity is None else -e.capacity,
        }
        notable = {name: x for name, x in changes.items() if x is not None and abs(x) >= _NOTABLE}
        for name, x in notable.items():
            shown = _percent(-x if name == "capacity" else x)
            (helped if x < 0 else harmed).append(f"{e.name} ({name} {shown})")
        if e.size < _NOTHING:
            nothing.append(e.name)
    said = []
    if helped:
        said.append(f"{intro}, these helped: {', '.join(helped)}.")
    if harmed:
        said.append(f"{intro}, these made it worse: {', '.join(harmed)}.")
    if nothing:
        said.append(
            f"{intro}, these changed no P99, capacity, memory use or hit rate by {_NOTHING:.0%} or more on this load: "
            f"{', '.join(nothing)}."
        )
    return said


def _kv_share(baseline: ArmResult) -> str:
    figures = baseline.figures
    if figures.kv_management_ratio is None or figures.queued_ratio is None or figures.head_blocked_ratio is None:
        return "No request was served, so that nothing can be said of the slowest."
    behind = figures.queued_ratio * figures.head_blocked_ratio
    most = "most" if figures.kv_management_ratio > _MOST else "not most"
    return (
        f"KV management is {figures.kv_management_ratio:.1%} of the time of the baseline's slowest 1 %, {most} of it; "
        f"{figures.queued_ratio:.1%} is the queue, whose head waited for KV {figures.head_blocked_ratio:.0%} of the whole time. "
        f"Counting the queue behind it in that proportion, KV comes to about {figures.kv_management_ratio + behind:.0%}."
    )


def _cost_of_memory(first: ArmResult, last: ArmResult, no_limit: ArmResult) -> str:
    def cost(arm: ArmResult) -> str:
        ttft, end_to_end = arm.figures.ttft_p99_seconds, arm.figures.end_to_end_p99_seconds
        return f"{_time(ttft)} and {_time(end_to_end)}"

    return (
        f"With KV memory without end and no other mechanism, P99 to first token and end to end would be {cost(no_limit)}; "
        f"with '{first.arm.name}' they are {cost(first)}, with '{last.arm.name}' {cost(last)}."
    )


# -- tables ------------------------------------------------------------------------------------------------------------------


def print_experiment(result: ExperimentResult, console: Console | None = None) -> None:
    """Writes tables, verdicts and findings to standard output. Colour only on a terminal."""
    console = console or Console(highlight=False)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    clock = _clock(result)
    console.print(f"[bold]What each mechanism buys[/bold], in {clock}", end="")
    console.print(f" ({result.settings['model']} on {result.settings['device']})", markup=False)
    for note in result.notes:
        console.print(f"  {note}", markup=False, style="yellow")
    console.print(_load_text(result), markup=False)
    console.print(f"\n[bold]Latency ({clock})[/bold], change against the baseline")
    console.print(_latency_table(result))
    console.print(f"[bold]Throughput ({clock})[/bold]: at this load, and the highest rate that is sustained")
    console.print(_throughput_table(result))
    console.print(
        f"[bold]Share of the slowest 1 % in KV management and queue ({clock})[/bold]; of all time, the queue's head"
    )
    console.print(_wait_table(result))
    console.print(f"[bold]P99 time to first token by class ({clock})[/bold]")
    console.print(_class_table(result))
    console.print(f"[bold]KV memory ({clock})[/bold], means over time; useful is stored / held")
    console.print(_memory_table(result))
    console.print(f"[bold]Claims[/bold], '{result.arms[0].arm.name}' to '{result.arms[-1].arm.name}' ({clock})")
    console.print(_verdict_table(result))
    console.print(f"[bold]Findings ({clock})[/bold]")
    for sentence in findings(result):
        console.print(f"- {sentence}", markup=False)


def _load_text(result: ExperimentResult) -> str:
    load, sizes = result.load, result.sizes
    classes = ", ".join(f"{count:,} {name}" for name, count in load.classes.items() if count)
    lines = [
        f"Load: {load.requests:,} requests ({classes}), {load.prompt_tokens:,} prompt and {load.generated_tokens:,} answer "
        f"tokens, {load.requests_per_second:.3g} requests/s (time scale {load.time_scale:.3g})"
    ]
    if load.saturation_requests_per_second is not None:
        share = load.requests_per_second / load.saturation_requests_per_second
        how = "bisection" if result.clock == "virtual" else "all requests at once"
        lines[0] += (
            f": {share:.0%} of the {load.saturation_requests_per_second:.3g} requests/s that '{load.saturated}' sustains ({how})"
        )
    lines.append(_step_text(result))
    lines.append(
        f"KV memory: {sizes.kv_bytes / 1e9:.3g} GB on the device in every arm ({sizes.num_blocks:,} blocks of {sizes.block_size} "
        f"tokens); the baseline reserves {sizes.max_model_len:,} tokens a sequence (longest request: {load.longest_tokens:,})"
    )
    if sizes.compressed_blocks:
        lines.append(
            f"With compression: {sizes.exact_blocks:,} exact and {sizes.compressed_blocks:,} int8 blocks"
            + (f", {sizes.lost_bytes:,} bytes unused" if sizes.lost_bytes else ", the same bytes")
        )
    return "\n".join(lines)


def _step_text(result: ExperimentResult) -> str:
    engine = result.arms[0].replay.settings
    return (
        f"Steps: at most {engine['max_num_batched_tokens']:,} tokens and {engine['max_num_seqs']:,} sequences in every arm "
        "(the controller may take less)"
    )


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right")
    return table


def _rows(result: ExperimentResult) -> list[list[ArmResult]]:
    """Groups of arms: cumulative, leave-one-out, the reference."""
    return [group for group in (result.arms, result.ablation, [result.no_limit] if result.no_limit else []) if group]


def _arm_table(result: ExperimentResult, columns: Sequence[str], cells: Callable[[ArmResult], Sequence[str]]) -> Table:
    table = _table(*columns)
    for group in _rows(result):
        for arm in group:
            table.add_row(arm.arm.name, *cells(arm))
        table.add_section()
    return table


def _latency_table(result: ExperimentResult) -> Table:
    base = result.arms[0].figures

    def cells(arm: ArmResult) -> Sequence[str]:
        f = arm.figures
        return (
            _time(f.ttft_p50_seconds), _time(f.ttft_p99_seconds), _against(base.ttft_p99_seconds, f.ttft_p99_seconds, arm),
            _time(f.end_to_end_p50_seconds), _time(f.end_to_end_p99_seconds),
            _against(base.end_to_end_p99_seconds, f.end_to_end_p99_seconds, arm),
        )  # fmt: skip

    return _arm_table(result, ("TTFT P50", "TTFT P99", "", "E2E P50", "E2E P99", ""), cells)


def _throughput_table(result: ExperimentResult) -> Table:
    base = result.arms[0].capacity_requests_per_second

    def cells(arm: ArmResult) -> Sequence[str]:
        capacity = arm.capacity_requests_per_second
        rates = _rate(arm.figures.requests_per_second), _whole(arm.figures.tokens_per_second)
        return (*rates, _rate(capacity), _against(base, capacity, arm))

    return _arm_table(result, ("requests/s", "tokens/s", "capacity, requests/s", ""), cells)


def _wait_table(result: ExperimentResult) -> Table:
    def cells(arm: ArmResult) -> Sequence[str]:
        f = arm.figures
        shares = _share(f.kv_management_ratio), _share(f.queued_ratio), _share(f.head_blocked_ratio)
        return (*shares, _whole(f.preemptions), _whole(f.recomputed_tokens))

    columns = ("KV", "queue", "head waits for KV", "preempted", "recomputed")
    return _arm_table(result, columns, cells)


def _class_table(result: ExperimentResult) -> Table:
    classes = [name for name, count in result.load.classes.items() if count]

    def cells(arm: ArmResult) -> Sequence[str]:
        return [_time(arm.figures.ttft_p99_seconds_by_class[name]) for name in classes]

    return _arm_table(result, [f"{name} ({result.load.classes[name]:,})" for name in classes], cells)


def _memory_table(result: ExperimentResult) -> Table:
    def cells(arm: ArmResult) -> Sequence[str]:
        f = arm.figures
        return [
            _share(x)
            for x in (
                f.stored_ratio, f.held_ratio, f.useful_ratio, f.cached_ratio, f.internal_fragmentation_ratio,
                f.external_fragmentation_ratio, f.hit_rate,
            )
        ]  # fmt: skip

    columns = ("stored", "held", "useful", "kept", "internal fragm.", "external fragm.", "hit rate")
    return _arm_table(result, columns, cells)


def _verdict_table(result: ExperimentResult) -> Table:
    table = _table("claim", "before", "after", "change", "verdict")
    for claim, before, after, change, met in verdicts(result):
        points = claim.kind == "points"
        show = _share if points else _rate if "capacity" in claim.title else _time
        amount = None if change is None else _points(change) if points else _percent(change)
        table.add_row(
            claim.title,
            claim.claim,
            show(before),
            show(after),
            amount or "-",
            "not measured: --capacity" if met is None else "met" if met else "not met",
        )
    figures = result.arms[0].figures
    share = figures.kv_management_ratio
    table.add_row(
        f"KV management in P99 of '{BASELINE}'", f"most of it (> {_MOST:.0%})", _share(share), "", "",
        "unknown" if share is None else "met" if share > _MOST else "not met",
    )  # fmt: skip
    return table


def _clock(result: ExperimentResult) -> str:
    return "virtual time" if result.clock == "virtual" else "real time"


def _against(before: float | None, after: float | None, arm: ArmResult) -> str:
    change = change_of(before, after)
    return "" if change is None or arm.arm.name == BASELINE else _percent(change)


def _percent(change: float) -> str:
    return f"{100 * change:+.0f} %"


def _points(change: float) -> str:
    return f"{100 * change:+.0f} points"


def _time(value: float | None) -> str:
    return "-" if value is None else seconds_text(value)


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


# -- plot --------------------------------------------------------------------------------------------------------------------


def plot_html(result: ExperimentResult) -> str:
    """A page that needs nothing from elsewhere: bars by arm of P99, and of throughput and memory use.

    Raises ConfigError when plotly is not installed.
    """
    try:
        import plotly.graph_objects as go
        from plotly.subplots import make_subplots
    except ImportError:
        raise ConfigError(
            "A plot needs plotly, which is not installed.", next_step="pip install 'kvscope[app]'"
        ) from None

    clock, arms = _clock(result), [arm for group in _rows(result) for arm in group]
    names = [arm.arm.name for arm in arms]
    capacity = any(arm.capacity_requests_per_second is not None for arm in arms)
    throughput = [arm.capacity_requests_per_second if capacity else arm.figures.requests_per_second for arm in arms]
    what = "highest sustainable rate" if capacity else "served at this load"
    figure = make_subplots(
        rows=2, cols=1, vertical_spacing=0.22, specs=[[{}], [{"secondary_y": True}]],
        subplot_titles=(f"P99 latency, {clock}", f"Throughput ({what}) and KV memory use, {clock}"),
    )  # fmt: skip
    for name, values in (
        ("P99 time to first token", [arm.figures.ttft_p99_seconds for arm in arms]),
        ("P99 end to end", [arm.figures.end_to_end_p99_seconds for arm in arms]),
    ):
        figure.add_trace(go.Bar(name=name, x=names, y=values), row=1, col=1)
    # Bars of two axes would cover each other: each trace leaves the other's place free.
    figure.add_trace(go.Bar(name="requests/s", x=names, y=throughput, offsetgroup="throughput"), row=2, col=1)
    useful = [arm.figures.useful_ratio for arm in arms]
    figure.add_trace(
        go.Bar(name="useful / held KV bytes", x=names, y=useful, offsetgroup="memory"), row=2, col=1, secondary_y=True
    )
    figure.update_yaxes(title_text=f"seconds of {clock}", row=1, col=1)
    known = [x for arm in arms for x in (arm.figures.ttft_p99_seconds, arm.figures.end_to_end_p99_seconds) if x]
    if known and max(known) > _WIDE_RANGE * min(known):
        figure.update_yaxes(title_text=f"seconds of {clock}, logarithmic", type="log", row=1, col=1)
    figure.update_yaxes(title_text="requests/s", row=2, col=1, secondary_y=False)
    figure.update_yaxes(title_text="share", tickformat=".0%", range=[0, 1], dtick=0.25, row=2, col=1, secondary_y=True)
    title = f"{result.settings['model']} on {result.settings['device']}: {result.load.requests:,} requests at {result.load.requests_per_second:.3g}/s, {clock}"
    figure.update_layout(title=title, barmode="group", height=900, template="plotly_white")
    return str(figure.to_html(include_plotlyjs=True, full_html=True))
