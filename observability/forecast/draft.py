"""What a model says before it is calibrated: quantiles of each step ahead, and paths that keep the steps together."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from observability.store.forecasts import HORIZON_STEPS, LEVELS


class Draft(NamedTuple):
    """`quantiles` float64 [HORIZON_STEPS, len(LEVELS)]. `paths` float64 [paths, HORIZON_STEPS]: ways in which the hour may go,
    equally likely; there may be none. `fallback`: which model this is instead, and why; empty when it is the one asked for."""

    quantiles: np.ndarray
    paths: np.ndarray
    fallback: str = ""


def whole_rows(errors: np.ndarray) -> np.ndarray:
    """Rows of `errors` [n, HORIZON_STEPS] that were observed in half of the steps or more (NaN: not), the rest filled in between
    (0 at the origin, the last one kept)."""
    seen = np.isfinite(errors)
    rows = errors[seen.sum(axis=1) * 2 >= HORIZON_STEPS]
    steps = np.arange(HORIZON_STEPS + 1)
    for row in (rows[place] for place in np.flatnonzero(~np.isfinite(rows).all(axis=1))):
        known = np.flatnonzero(np.isfinite(row))
        row[:] = np.interp(steps[1:], np.concatenate(([0], known + 1)), np.concatenate(([0.0], row[known])))
    return rows


def ahead(values: np.ndarray) -> np.ndarray:
    """[steps, HORIZON_STEPS]: what came 1 to HORIZON_STEPS steps after each of `values` [steps]; NaN after the end."""
    padded = np.concatenate((values, np.full(HORIZON_STEPS, np.nan)))
    return np.lib.stride_tricks.sliding_window_view(padded[1:], HORIZON_STEPS)


def around(centre: np.ndarray, errors: np.ndarray) -> np.ndarray:
    """Quantiles [HORIZON_STEPS, len(LEVELS)] of `centre` [HORIZON_STEPS] plus past `errors` [n, HORIZON_STEPS] (NaN: not
    observed). The median stays at `centre`."""
    out = np.repeat(centre[:, None], len(LEVELS), axis=1)
    levels = np.array(LEVELS)
    for row, column in zip(out, errors.T, strict=True):
        if len(known := column[np.isfinite(column)]):
            offsets = np.quantile(known, levels)
            row += np.where(levels < 0.5, np.minimum(offsets, 0), np.where(levels > 0.5, np.maximum(offsets, 0), 0))
    return out
