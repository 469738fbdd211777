"""The rows behind a card as files: exact values in the base unit of the signal, times in UTC."""

from __future__ import annotations

import io

import pandas as pd


def csv(data: pd.DataFrame) -> bytes:
    """`data` as CSV, times in ISO 8601. Text that a spreadsheet would run as a formula is quoted with an apostrophe."""
    out = data.copy()
    for name, column in out.items():
        if isinstance(column.dtype, pd.DatetimeTZDtype):
            out[name] = column.dt.strftime("%Y-%m-%dT%H:%M:%SZ")
        elif not pd.api.types.is_numeric_dtype(column):
            out[name] = column.map(lambda cell: f"'{cell}" if str(cell)[:1] in "=+-@\t\r" and str(cell) else cell)
    return out.to_csv(index=False).encode()


def parquet(data: pd.DataFrame) -> bytes:
    """`data` as Parquet."""
    out = io.BytesIO()
    data.to_parquet(out, index=False)
    return out.getvalue()
