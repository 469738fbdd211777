"""Numbers as people read them: a value and its unit in few, sensible digits. Used by cards, tables and hover texts."""

from __future__ import annotations

import math
import re

ABSENT = "–"
_PER_SECOND = {"requests/s": "req/s", "tokens/s": "tok/s", "blocks/s": "blocks/s", "1/s": "/s"}
_COUNTED = {"blocks": "blocks", "tokens": "tok"}


def significant(value: float, digits: int = 3) -> str:
    """`value` in `digits` significant digits, never in scientific notation: 1234567 -> 1,230,000; 0.01234 -> 0.0123."""
    if value == 0:
        return "0"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    rounded = round(value, decimals)
    if rounded and math.floor(math.log10(abs(rounded))) > math.floor(math.log10(abs(value))):
        decimals -= 1  # 9.999 became 10.00: one digit less
    return f"{rounded:,.{max(decimals, 0)}f}"


def _scaled(value: float) -> str:
    """`value` with k, M or G from 10,000 on, where a count's last digits say nothing."""
    for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor * (10 if letter == "k" else 1):
            return significant(value / factor) + letter
    return significant(value)


def duration(seconds: float) -> str:
    """A span of time: 800 µs, 612 ms, 1.24 s, 3 min 20 s, 2 h 5 min, 3 d 4 h."""
    size = abs(seconds)
    if size < 0.0009995 and size:
        return f"{significant(seconds * 1e6)} µs"
    if size < 0.9995:
        return f"{significant(seconds * 1e3)} ms" if size else "0 s"
    if size < 99.95:
        return f"{significant(seconds)} s"
    whole = round(size)
    sign = "-" if seconds < 0 else ""
    for unit, below, small, name in ((60, 3600, 1, "s"), (3600, 86400, 60, "min"), (86400, math.inf, 3600, "h")):
        if whole < below:
            large = {60: "min", 3600: "h", 86400: "d"}[unit]
            rest = whole % unit // small
            return f"{sign}{whole // unit} {large}" + (f" {rest} {name}" if rest else "")
    raise AssertionError("unreachable")


def percent(ratio: float) -> str:
    """A share: 82.3 %, 0.041 %, 100 %; a share below one in a million is shown as such, not as 0."""
    if 0 < abs(ratio) < 1e-6:
        return "< 0.0001 %"
    if 0.9995 <= ratio < 1:
        return "> 99.9 %"
    return f"{significant(ratio * 100)} %"


def setting(value: float, unit: str) -> str:
    """A chosen number (threshold, target) with its unit, without the zeros that would claim a measurement: 20 s, 1 %."""
    return re.sub(r"(\.\d*?)0+(?= )", lambda m: m[1].rstrip("."), quantity(value, unit), count=1)


def quantity(value: float | None, unit: str) -> str:
    """`value` with its unit, in the unit's customary form; a missing or non-finite value is a dash."""
    if value is None or not math.isfinite(value):
        return ABSENT
    if unit == "seconds":
        return duration(value)
    if unit == "ratio":
        return percent(value)
    if unit == "bytes":
        for factor, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
            if abs(value) >= factor:
                return f"{significant(value / factor)} {name}"
        return f"{significant(value)} B"
    suffix = _PER_SECOND.get(unit) or _COUNTED.get(unit, unit)
    return f"{_scaled(value)} {suffix}".strip()


def axis_units(unit: str) -> tuple[tuple[float, str], ...]:
    """(factor, name) of what an axis can show `unit` in, the smallest first."""
    if unit == "seconds":
        return (1e6, "µs"), (1e3, "ms"), (1.0, "s")
    if unit == "ratio":
        return ((100.0, "%"),)
    if unit == "bytes":
        return (1.0, "B"), (2.0**-20, "MiB"), (2.0**-30, "GiB"), (2.0**-40, "TiB")
    return ((1.0, _PER_SECOND.get(unit) or _COUNTED.get(unit, unit)),)


def axis_unit(unit: str, largest: float) -> tuple[float, str]:
    """(factor, name) in which an axis shows `unit` so that its numbers are short: seconds below 1 s become ms."""
    units = axis_units(unit)
    fitting = [(factor, name) for factor, name in units if largest * factor >= 1]
    return fitting[-1] if fitting else units[0]
