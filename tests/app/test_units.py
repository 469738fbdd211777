"""Numbers shown to people: sensible digits, always a unit, a dash for what is not known."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from observability.app.units import ABSENT, duration, percent, quantity, setting, significant

MULTIPLES = {"µs": 1e-6, "ms": 1e-3, "s": 1, "min": 60, "h": 3600, "d": 86400}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (8e-4, "800 µs"), (0.612, "612 ms"), (0.9999, "1.00 s"), (1.239, "1.24 s"), (99.99, "1 min 40 s"),
     (200, "3 min 20 s"), (3600, "1 h"), (7500, "2 h 5 min"), (277_200, "3 d 5 h"), (-0.25, "-250 ms")],
)  # fmt: skip
def test_a_duration_reads_in_its_natural_unit(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@given(st.floats(1e-7, 1e7))
def test_a_duration_read_back_is_right_within_its_last_digit(seconds: float) -> None:
    parts = re.findall(r"([\d,.]+) (µs|ms|s|min|h|d)", duration(seconds))
    read = sum(float(number.replace(",", "")) * MULTIPLES[unit] for number, unit in parts)
    smallest = MULTIPLES[parts[-1][1]]
    assert abs(read - seconds) <= max(
        0.006 * seconds, smallest if len(parts) > 1 or parts[0][1] in ("min", "h", "d") else 0
    )


@given(st.floats(1e-9, 1e12))
def test_three_significant_digits_read_back_within_half_a_percent(value: float) -> None:
    text = significant(value)
    assert "e" not in text
    assert float(text.replace(",", "")) == pytest.approx(value, rel=0.0051)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(0.823, "ratio", "82.3 %"), (0.00041, "ratio", "0.0410 %"), (1.0, "ratio", "100 %"), (0.99997, "ratio", "> 99.9 %"),
     (1e-9, "ratio", "< 0.0001 %"), (3.416, "requests/s", "3.42 req/s"), (12_345, "tokens/s", "12.3k tok/s"),
     (4096, "blocks", "4,100 blocks"), (6.9e7, "tokens", "69.0M tok"), (3 * 2**30, "bytes", "3.00 GiB"), (0, "requests", "0 requests")],
)  # fmt: skip
def test_a_quantity_carries_its_unit(value: float, unit: str, text: str) -> None:
    assert quantity(value, unit) == text


@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_what_is_not_known_is_a_dash_and_not_zero(value: float | None) -> None:
    assert quantity(value, "seconds") == ABSENT
    assert percent(0.0) == "0 %"


def test_a_threshold_is_shown_without_digits_that_nobody_measured() -> None:
    assert [setting(v, "seconds") for v in (0.8, 20.0, 0.1, 1.5)] == ["800 ms", "20 s", "100 ms", "1.5 s"]
    assert setting(0.01, "ratio") == "1 %"
