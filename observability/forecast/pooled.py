"""A model that learns from all series of a deployment together, off-line, where the stack errs on each of them.

A small network (two layers) is given a series' newest lags, means and daily shape, what the stack says and its newest errors, all in
units of the error to be expected, so that quiet and busy series teach one another. It says the quantiles of the stack's error at each
step ahead; the forecast is half that and half the stack. It is trained by the pinball loss on what came after every step up to
`until`, against what the stack would have said without having learned from the hours around. A forecast from an earlier origin is
refused, since the network has seen its outcome. NumPy alone; a trained file holds arrays and nothing that runs.
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from observability.errors import ConfigError, KvscopeError
from observability.forecast.draft import Draft
from observability.forecast.members import DAY, REGRESSION_STEPS, delayed, features, trailing_mean
from observability.forecast.series import GridSeries, Window, window
from observability.forecast.stack import Hindsight, hindsight, spread, stack
from observability.store.forecasts import HORIZON_STEPS, LEVELS

SEED = 20261
WIDTH = 96
EPOCHS = 12
BATCH = 256
RATE = 2e-3
#: Below this many examples of all series together nothing is trained.
MIN_EXAMPLES = 2000
#: Steps at the start of a window whose lags reach back before it.
_WARM = 2 * DAY
_DECAY = 0.1
_MIDDLE = LEVELS.index(0.5)
_CEILING = 20.0
_OUT = HORIZON_STEPS * len(LEVELS)
#: Changes with the meaning of inputs or outputs: a file of another kind is refused.
_KIND = "kvscope-pooled-1"


class PooledError(KvscopeError):
    """The trained model cannot be used for this forecast."""


@dataclass(frozen=True)
class Network:
    """Trained weights, by layer. `mean` and `size` [features] scale the input. `until`: Unix seconds, nothing after it was seen.
    `series`, `examples`: how many it learned from."""

    w1: np.ndarray
    b1: np.ndarray
    w2: np.ndarray
    b2: np.ndarray
    w3: np.ndarray
    b3: np.ndarray
    mean: np.ndarray
    size: np.ndarray
    until: float
    series: int
    examples: int

    def __call__(self, given: np.ndarray) -> np.ndarray:
        """Quantiles [rows, HORIZON_STEPS, len(LEVELS)] of the stack's error in units of that to be expected, of inputs [rows, features]."""
        x = (given - self.mean) / self.size
        x = np.maximum(x @ self.w1 + self.b1, 0.0)
        x = np.maximum(x @ self.w2 + self.b2, 0.0)
        return np.sort((x @ self.w3 + self.b3).reshape(-1, HORIZON_STEPS, len(LEVELS)), axis=2)


#: A trained network, or the reason why there is none.
Trained = Network | str
NOT_TRAINED = "no pooled model was trained; `kvscope forecast --train` does it"


def inputs(seen: Hindsight) -> np.ndarray:
    """[steps, features] of a window, each looking back only, in units of the error to be expected; large ones compressed."""
    filled, scale = seen.filled, seen.scale
    level = np.abs(filled) + 0.05 * float(np.median(np.abs(filled))) + 1e-9
    said = np.concatenate((seen.past[:-1], seen.centre[None])) - filled[:, None]
    errors = np.nan_to_num(seen.errors)
    newest = [delayed(errors[:, h - 1], late) for h, late in ((1, 1), (1, 2), (3, 3), (6, 6))]
    own = [*said.T, *newest, filled - trailing_mean(filled, 3 * DAY)]
    ratios = [np.log(scale / trailing_mean(scale, 3 * DAY)), np.log(scale / level)]
    return np.arcsinh(
        np.concatenate((np.stack((*features(filled).T, *own)) / scale, np.stack(ratios))).T
    )  # fmt: skip


def examples(seen: Window) -> tuple[np.ndarray, np.ndarray]:
    """What there is to learn in a window: inputs [rows, features] and the stack's errors [rows, HORIZON_STEPS] in units of those to
    be expected. Only steps that were observed and after which the whole hour was."""
    found = hindsight(seen.values, seen.signal.bounds)
    errors = found.errors / found.scale[:, None]
    known = np.isfinite(errors).all(axis=1)
    known[:_WARM] = False
    return inputs(found)[known].astype(np.float32), np.clip(errors[known], -_CEILING, _CEILING).astype(np.float32)


def pooled(network: Network, seen: Window) -> Draft:
    """Quantiles and paths of the hour after `seen`. Raises PooledError when the network has learned from after its origin, or
    the window is too short for the stack's daily shape."""
    if seen.origin < network.until:
        raise PooledError("the pooled model has learned from what came after this; it says nothing of its past.")
    if len(seen.values) < REGRESSION_STEPS:
        raise PooledError("two days of history are needed.")
    found = hindsight(seen.values, seen.signal.bounds)
    alone = spread(found.centre, found.errors, found.scale)
    learned = found.centre[:, None] + found.scale[-1] * network(inputs(found)[-1:])[0]
    quantiles = 0.5 * (alone.quantiles + learned)
    moved = quantiles[:, _MIDDLE] - alone.quantiles[:, _MIDDLE]
    return Draft(quantiles, alone.paths + moved)


def pooled_or_stack(trained: Trained, seen: Window) -> Draft:
    """What the trained network says of the hour after `seen`; where there is none, or it cannot speak of it, the stack alone, with why."""
    try:
        if isinstance(trained, str):
            raise PooledError(trained)
        return pooled(trained, seen)
    except PooledError as error:
        alone = stack(seen)
        return alone._replace(fallback="; ".join(filter(None, (f"the stack alone: {error.reason}", alone.fallback))))


def train(found: Sequence[GridSeries], until: float) -> Network:
    """Learns from what was observed of all series up to `until` (Unix seconds). The same series give the same weights. Raises
    ConfigError where there is too little."""
    windows = [window(series, until) for series in found]
    learned = [examples(seen) for seen in windows if not seen.refused and len(seen.values) >= REGRESSION_STEPS]
    rows = sum(len(x) for x, _ in learned)
    if rows < MIN_EXAMPLES:
        raise ConfigError(
            f"{len(learned)} series with two days of history give {rows} examples; a pooled model needs {MIN_EXAMPLES}.",
            next_step="Record longer or more series; the other models need no training.",
        )
    x, y = (np.concatenate(each) for each in zip(*learned, strict=True))
    mean, size = x.mean(axis=0), x.std(axis=0) + 1e-6
    w1, b1, w2, b2, w3, b3 = _descend((x - mean) / size, y)
    return Network(w1, b1, w2, b2, w3, b3, mean, size, until, len(learned), rows)


def path_beside(store: Path) -> Path:
    """Where the trained model of the store at `store` lies."""
    return store.with_name(store.name + ".pooled.npz")


def trained_beside(store: Path) -> Trained:
    """The model trained for the store at `store`, or why there is none."""
    path = path_beside(store)
    try:
        return load(path) if path.exists() else NOT_TRAINED
    except ConfigError as error:
        return error.reason


def save(network: Network, path: Path) -> None:
    """Replaces the file at `path` at once, so that a reader finds the old one or the new one."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        arrays: dict[str, Any] = {each.name: np.asarray(getattr(network, each.name)) for each in fields(Network)}
        np.savez(file, kind=np.array(_KIND), **arrays)
    partial.replace(path)


def load(path: Path) -> Network:
    """Raises ConfigError when the file is not one that `save` wrote; nothing in it is run."""
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            if str(file["kind"]) != _KIND:
                raise ValueError("it was made by another version")
            arrays = {each.name: file[each.name] for each in fields(Network)}
        if any(not np.isfinite(array).all() for array in arrays.values()):
            raise ValueError("it holds numbers that are not finite")
    except (OSError, TypeError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ConfigError(
            f"{path} is not a trained pooled model: {error}.",
            next_step="Train it anew with `kvscope forecast --train`, or remove the file.",
        ) from error
    numbers = {"until": float(arrays["until"]), "series": int(arrays["series"]), "examples": int(arrays["examples"])}
    return Network(**(arrays | numbers))


def _descend(x: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
    """Adam (Kingma and Ba 2015) on the pinball loss, the rate falling to nothing along a cosine."""
    rng = np.random.default_rng(SEED)
    widths = (x.shape[1], WIDTH, WIDTH, _OUT)
    weights = []
    for before, after in pairwise(widths):
        weights += [rng.normal(0, np.sqrt(2 / before), (before, after)).astype(np.float32), np.zeros(after, np.float32)]
    weights[4] *= 0.1
    weights[5][:] = np.quantile(y, LEVELS, axis=0).T.ravel()
    first, second = [np.zeros_like(w) for w in weights], [np.zeros_like(w) for w in weights]
    levels, target = np.tile(np.array(LEVELS, np.float32), HORIZON_STEPS), np.repeat(y, len(LEVELS), axis=1)
    total, step = EPOCHS * (len(x) // BATCH), 0
    for _ in range(EPOCHS):
        order = rng.permutation(len(x))
        for batch in order[: len(x) // BATCH * BATCH].reshape(-1, BATCH):
            step += 1
            rate = RATE * 0.5 * (1 + np.cos(np.pi * step / total)) / (1 - 0.9**step) * np.sqrt(1 - 0.999**step)
            for w, m, v, g in zip(
                weights, first, second, _slopes(weights, x[batch], target[batch], levels), strict=True
            ):
                m += 0.1 * (g - m)
                v += 0.001 * (g * g - v)
                w -= rate * (m / (np.sqrt(v) + 1e-8) + (_DECAY * w if w.ndim == 2 else 0.0))
    return weights


def _slopes(weights: Sequence[np.ndarray], x: np.ndarray, target: np.ndarray, levels: np.ndarray) -> list[np.ndarray]:
    """Of the mean pinball loss of one batch, by weight."""
    w1, b1, w2, b2, w3, b3 = weights
    one = np.maximum(x @ w1 + b1, 0.0)
    two = np.maximum(one @ w2 + b2, 0.0)
    out = ((target < two @ w3 + b3) - levels) / np.float32(len(x))
    back_two = (out @ w3.T) * (two > 0)
    back_one = (back_two @ w2.T) * (one > 0)
    return [x.T @ back_one, back_one.sum(0), one.T @ back_two, back_two.sum(0), two.T @ out, out.sum(0)]
