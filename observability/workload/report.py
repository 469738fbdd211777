"""A replay's result as tables for a terminal; says `virtual time` wherever a figure comes from it."""

from __future__ import annotations

from collections.abc import Mapping

from rich import box
from rich.console import Console
from rich.table import Table

from observability.workload.results import Phases, ReplayResult, Summary

_LATENCIES = {
    "time_to_first_token_seconds": "time to first token",
    "end_to_end_seconds": "end to end",
    "inter_token_seconds": "inter-token",
    "send_delay_seconds": "send delay",
}
_FILE_WIDTH = 120  # of output that goes to a file or a pipe
_SHOWN_QUANTILES = ("mean", "p50", "p90", "p95", "p99", "p99.9", "max")


def print_result(result: ReplayResult, console: Console | None = None) -> None:
    """Writes the tables to standard output. Colour only on a terminal."""
    console = console or Console(highlight=False)
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    clock = "virtual time" if result.clock == "virtual" else "real time"
    console.print(f"[bold]Replay[/bold] in {clock}", end="")
    console.print(f" ({_target(result)})", markup=False)
    for note in result.notes:
        console.print(f"  {note}", markup=False, style="yellow" if result.clock == "virtual" else None)
    console.print(
        f"{result.requests:,} requests over {seconds_text(result.duration_seconds)} of {clock}, "
        f"replayed in {seconds_text(result.wall_seconds)}: {_outcomes(result)}"
    )
    for reason, times in result.reasons.items():
        console.print(f"  {times:,} x {reason}", markup=False)
    console.print(f"\n[bold]Latency ({clock})[/bold]", _latency_table(result), sep="\n")
    if result.phases is not None:
        console.print(f"[bold]Where the time went, mean ({clock})[/bold]", _phase_table(result.phases), sep="\n")
    console.print("[bold]KV prefix cache by prompt length, tokens[/bold]", _hit_table(result), sep="\n")
    console.print(_footer(result, clock), markup=False)


def _target(result: ReplayResult) -> str:
    settings = result.settings
    if settings["target"] == "url":
        return f"{settings['url']}, model {settings['served_model']}"
    device = settings["device"] + (" simulated" if result.clock == "virtual" else "")
    return f"{settings['model']} on {device}"


def _outcomes(result: ReplayResult) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in result.outcomes.items() if count) or "none ended"


def _table(first: str, *columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(first)
    for name in columns:
        table.add_column(name, justify="right")
    return table


def _latency_table(result: ReplayResult) -> Table:
    table = _table("", "samples", *_SHOWN_QUANTILES)
    for key, name in _LATENCIES.items():
        summary: Summary | None = result.latency.get(key)
        if summary is not None:
            table.add_row(name, f"{int(summary['count']):,}", *(seconds_text(summary[q]) for q in _SHOWN_QUANTILES))
        elif key in result.latency:
            table.add_row(name, "-", *("unknown" for _ in _SHOWN_QUANTILES))
    return table


def _phase_table(phases: Mapping[str, Phases]) -> Table:
    """Rows by state, then by component; what took no time in either column is left out."""
    everyone, slowest = phases["all"], phases["slowest_1_percent"]
    table = _table(
        "",
        f"all {everyone.requests:,}",
        f"slowest {slowest.requests:,}",
    )
    for view in ("by_state", "by_component"):
        all_seconds, slow_seconds = getattr(everyone, view), getattr(slowest, view)
        for name in all_seconds:
            if all_seconds[name] or slow_seconds[name]:
                table.add_row(name, seconds_text(all_seconds[name]), seconds_text(slow_seconds[name]))
        table.add_section()
    table.add_row("latency", seconds_text(everyone.mean_latency_seconds), seconds_text(slowest.mean_latency_seconds))
    return table


def _hit_table(result: ReplayResult) -> Table:
    table = _table("length", "queried", "hittable", "hit", "hit rate")
    for bucket, tokens in result.kv.by_length_bucket.items():
        if tokens["queried_tokens"] != 0:
            rate = _ratio(tokens["hit_tokens"], tokens["queried_tokens"])
            table.add_row(
                bucket, *(_count(tokens[k]) for k in ("queried_tokens", "hittable_tokens", "hit_tokens")), rate
            )
    table.add_section()
    kv = result.kv
    total = (kv.queried_tokens, kv.hittable_tokens, kv.hit_tokens)
    table.add_row("all", *map(_count, total), _ratio(kv.hit_tokens, kv.queried_tokens))
    return table


def _footer(result: ReplayResult, clock: str) -> str:
    rates = result.throughput
    shown = [
        f"{name.removesuffix('_per_second').replace('_', ' ')} {rate:,.1f}/s"
        for name, rate in rates.items()
        if rate is not None
    ]
    lines = [f"Throughput ({clock}): {', '.join(shown) or 'unknown'}"]
    use = result.kv.use
    if use is not None:
        active, compressed = use.active_blocks, use.active_compressed_blocks
        exact = "" if compressed is None else "exact "
        line = f"KV pool: {active['mean']:,.0f} {exact}blocks active on average, at most {active['max']:,.0f}"
        if use.capacity_blocks is None:
            line += ", unbounded"
        else:
            line += f", of {use.capacity_blocks:,}"
        if compressed is not None:
            line += f"; {compressed['mean']:,.0f} compressed ones, at most {compressed['max']:,.0f}"
            line += f", of {use.compressed_capacity_blocks:,}"
        if use.usage_ratio is not None:
            of = "" if compressed is None else "of all bytes "
            line += f" ({of}{use.usage_ratio['mean']:.1%} / {use.usage_ratio['max']:.1%})"
        for name, ratio in (
            ("internal", use.internal_fragmentation_ratio),
            ("external", use.external_fragmentation_ratio),
        ):
            if ratio is not None:
                line += f"; {name} fragmentation {ratio['mean']:.1%} / {ratio['max']:.1%}"
        lines.append(line)
    if result.preemptions is not None:
        lines.append(
            f"Preemptions: {result.preemptions:,}; recomputed tokens {_count(result.kv.recomputed_tokens)}; "
            f"evicted blocks {_count(result.kv.evicted_blocks)}"
        )
    return "\n".join(lines)


def _count(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"


def _ratio(part: int | None, whole: int | None) -> str:
    return "unknown" if part is None or not whole else f"{part / whole:.2%}"


def seconds_text(value: float) -> str:
    """With three digits and a unit people use."""
    if value >= 120:
        return f"{value:,.0f} s"
    if value >= 1:
        return f"{value:.3g} s"
    if value >= 1e-3:
        return f"{value * 1e3:.3g} ms"
    return f"{value * 1e6:.3g} µs" if value else "0"
