"""Step times from a calibration: coefficients fitted to steps of the torch executor measured on one machine, kept as a JSON file.

A step costs a table of seconds by the number of its rows (tokens through the matrix products, whose efficiency on a CPU neither grows
nor falls evenly with rows), plus a sum of features that attention and logits depend on. workload/calibrate.py measures and fits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from observability.engine.executor.virtual import Overhead, StepShape, blocks_that_fit, check_num_blocks
from observability.engine.types import EngineConfig, KVDtype
from observability.errors import ConfigError

CALIBRATED = "calibrated"
"""As the name of a GPU: the calibration that `kvscope calibrate` wrote for the model on this machine."""
FORMAT_VERSION = 1
_KIND = "kvscope calibration"
_MEMORY_UTILIZATION = 0.9

#: What a step costs beside its rows; each coefficient is in seconds for one of it.
FEATURES = (
    "sampled_row",  # of logits
    "decode_step",  # a step with any decode
    "visible_token",  # token that a decode attends to, its own included
    "chunk",
    "first_chunk_pair",  # query and key of a chunk that starts its prompt: tokens x (tokens + 1) / 2
    "later_chunk_pair",  # of any other chunk, which masks: tokens x context
    "later_chunk_context",  # token of context of such a chunk, read or gathered once
)


class Calibration(BaseModel):
    """What was measured where, and the fit. Read with load_calibration(); seconds, bytes and tokens as named."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kind: str = _KIND
    format_version: int = FORMAT_VERSION
    model: str
    device: str
    processor: str
    threads: PositiveInt
    kv_dtype: KVDtype
    measured_at: str  # ISO 8601, UTC
    versions: dict[str, str]
    load_average: NonNegativeFloat | None  # of the machine over the minute before the end; None where it has none
    steps_measured: PositiveInt
    median_relative_error: dict[str, NonNegativeFloat]  # of the fit to the measured steps, by step kind
    max_num_seqs: PositiveInt
    max_num_batched_tokens: PositiveInt
    max_context: PositiveInt
    memory_bytes: PositiveInt  # that weights and KV may take
    weight_bytes: PositiveInt
    kv_bytes_per_token: PositiveFloat
    kv_block_bytes: NonNegativeFloat = 0.0  # what a block of any size takes beside its tokens (scales that they share)
    kv_fixed_bytes_per_sequence: NonNegativeInt
    copy_bytes_per_second: PositiveFloat  # of KV blocks on the device
    schedule_seconds: NonNegativeFloat
    sample_seconds: NonNegativeFloat
    emit_seconds: NonNegativeFloat
    row_seconds: tuple[tuple[PositiveInt, NonNegativeFloat], ...] = Field(min_length=1)  # (rows, seconds), ascending
    coefficients: dict[str, NonNegativeFloat]

    @model_validator(mode="after")
    def _check(self) -> Calibration:
        if any(a[0] >= b[0] for a, b in pairwise(self.row_seconds)):
            raise ValueError("row_seconds must be in ascending order of rows")
        if set(self.coefficients) != set(FEATURES):
            raise ValueError(f"coefficients must be {', '.join(FEATURES)}")
        return self

    @property
    def description(self) -> str:
        """`smollm2-135m, calibrated on AMD EPYC (2 threads) at 2026-01-31T12:00:00+00:00`."""
        return f"{self.model}, calibrated on {self.processor} ({self.threads} threads) at {self.measured_at}"

    def kv_bytes_per_block(self, block_size: int) -> int:
        """Of a block of so many tokens."""
        return round(block_size * self.kv_bytes_per_token + self.kv_block_bytes)

    def save(self, path: Path) -> None:
        """Raises ConfigError when the file cannot be written."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be written: {error.strerror or error}.", next_step="Give --output another path."
            ) from None


def default_path(model: str, kv_dtype: KVDtype = "auto") -> Path:
    """Where the calibration of a model (a name or a path) is kept on this machine."""
    suffix = "" if kv_dtype == "auto" else f"-{kv_dtype}"
    return platformdirs.user_data_path("kvscope") / f"calibration-{Path(model).stem}{suffix}.json"


def is_calibration(gpu: str) -> bool:
    """Whether this name of a GPU means a calibration: `calibrated`, or the path of its file."""
    return gpu == CALIBRATED or gpu.endswith(".json")


def load_calibration(gpu: str, model: str | None = None, kv_dtype: KVDtype = "auto") -> Calibration:
    """The calibration that `gpu` names (see is_calibration) for `model`, by default the file's own.

    Raises ConfigError when the file is missing, is no calibration or of another format version, or is of another model or KV format.
    """
    again = f"kvscope calibrate{'' if model is None else f' --model {model}'}{'' if kv_dtype == 'auto' else ' --kv-dtype int8'}"
    path = default_path(model or "smollm2-135m", kv_dtype) if gpu == CALIBRATED else Path(gpu)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"There is no calibration at {path}.", next_step=f"Run `{again}` first.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.", next_step="Give the path of a calibration.") from None
    found = _parse(text, path, again)
    if model is not None and model != found.model:
        raise ConfigError(
            f"{path} was calibrated with {found.model}, not with {model}.",
            next_step=f"Ask for model {found.model}, or run `{again}`.",
        )
    if kv_dtype != found.kv_dtype:
        raise ConfigError(
            f"{path} was calibrated with kv_dtype {found.kv_dtype}, not with {kv_dtype}.",
            next_step=f"Ask for kv_dtype {found.kv_dtype}, or run `{again}`.",
        )
    return found


class _Head(BaseModel):
    """What tells a calibration and its version before the rest is read."""

    kind: JsonValue = None
    format_version: JsonValue = None


def _parse(text: str, path: Path, again: str) -> Calibration:
    try:
        head = _Head.model_validate_json(text)
    except ValidationError:
        head = _Head()
    if head.kind != _KIND:
        raise ConfigError(f"{path} is not a calibration.", next_step=f"Make one with `{again}`.")
    if head.format_version != FORMAT_VERSION:
        raise ConfigError(
            f"{path} has format version {head.format_version}; this kvscope reads version {FORMAT_VERSION}.",
            next_step=f"Measure again: `{again}`.",
        )
    try:
        return Calibration.model_validate_json(text)
    except ValidationError as error:
        first: Any = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"{path} is damaged: {where + ': ' if where else ''}{first['msg']}.", next_step=f"Measure again: `{again}`."
        ) from None


# -- the model of time ------------------------------------------------------------------------------------------------


def row_weights(rows: int, knots: Sequence[int]) -> np.ndarray:
    """Weights [knots] by which a table of seconds at `knots` gives the seconds of `rows`: linear between two knots; beyond the last
    in proportion to rows, below the first as at the first."""
    weights = np.zeros(len(knots))
    if rows >= knots[-1]:
        weights[-1] = rows / knots[-1]
        return weights
    above = int(np.searchsorted(knots, rows, side="right"))
    if above == 0:
        weights[0] = 1.0
        return weights
    low, high = knots[above - 1], knots[above]
    weights[above] = (rows - low) / (high - low)
    weights[above - 1] = 1.0 - weights[above]
    return weights


def features_of(shape: StepShape) -> dict[str, float]:
    """Amount of each of FEATURES in a step."""
    later = [(chunk.tokens, chunk.start + chunk.tokens) for chunk in shape.chunks if chunk.start]
    sampled = sum(chunk.samples for chunk in shape.chunks) + len(shape.visible)
    return {
        "sampled_row": sampled,
        "decode_step": float(bool(shape.visible)),
        "visible_token": sum(shape.visible),
        "chunk": len(shape.chunks),
        "first_chunk_pair": sum(c.tokens * (c.tokens + 1) / 2 for c in shape.chunks if not c.start),
        "later_chunk_pair": sum(tokens * context for tokens, context in later),
        "later_chunk_context": sum(context for _, context in later),
    }


def rows_of(shape: StepShape) -> int:
    """Tokens that go through the matrix products."""
    return sum(chunk.tokens for chunk in shape.chunks) + len(shape.visible)


class CalibratedTimes:
    """virtual.StepTimes of a calibration."""

    def __init__(self, calibration: Calibration, config: EngineConfig) -> None:
        self.calibration = calibration
        self.device = f"{CALIBRATED}-{calibration.device}"
        self.source = f"steps of {calibration.description}"
        self.overhead = Overhead(calibration.schedule_seconds, calibration.sample_seconds, calibration.emit_seconds)
        self.kv_bytes_per_block = calibration.kv_bytes_per_block(config.block_size)
        self.kv_bytes_per_compressed_block = 0
        self.kv_fixed_bytes_per_sequence = calibration.kv_fixed_bytes_per_sequence
        self._knots = [rows for rows, _ in calibration.row_seconds]
        self._row_seconds = np.array([seconds for _, seconds in calibration.row_seconds])
        self.transfers_beside_steps = False

    def check(self, config: EngineConfig) -> None:
        """Raises ConfigError when the KV blocks do not fit the memory (unbounded KV is not checked), or for compressed blocks."""
        if config.num_compressed_blocks:
            raise ConfigError(
                "A calibration has measured no compressed blocks.", next_step="Leave num_compressed_blocks at 0."
            )
        if config.num_blocks is not None:
            check_num_blocks(config, self.fit_num_blocks(config), self.calibration.model, self.device)

    def fit_num_blocks(self, config: EngineConfig) -> int:
        """KV blocks that fit the memory beside the weights and what sequences keep outside blocks. Raises ConfigError when not one
        does."""
        record = self.calibration
        room = record.memory_bytes * _MEMORY_UTILIZATION - record.weight_bytes
        room -= config.max_num_seqs * record.kv_fixed_bytes_per_sequence
        return blocks_that_fit(room, record.kv_bytes_per_block(config.block_size), f"{record.model} on {self.device}")

    def forward(self, shape: StepShape) -> tuple[float, float]:
        parts = self._parts(shape)
        tokens, decodes = rows_of(shape), len(shape.visible)
        prefills = sum(chunk.samples for chunk in shape.chunks)
        seconds = sum(parts.values())
        if not decodes or not shape.chunks:
            return seconds, float(not decodes)
        # As the torch executor books it: what treats all rows alike by tokens, logits by sampled rows, attention to whom it belongs.
        prefill = parts["rows"] * (tokens - decodes) / tokens
        prefill += parts["sampled_row"] * prefills / (prefills + decodes)
        prefill += sum(parts[name] for name in FEATURES if "chunk" in name)
        return seconds, prefill / seconds if seconds else 0.0

    def decode_run(self, shape: StepShape, repeats: int) -> np.ndarray:
        first, _ = self.forward(shape)
        growth = self.calibration.coefficients["visible_token"] * len(shape.visible)
        return first + growth * np.arange(repeats)

    def copy_seconds(self, blocks: int) -> float:
        return self.transfer_seconds(blocks * self.kv_bytes_per_block)

    def transfer_seconds(self, kv_bytes: float) -> float:
        """The device is the host: a move is a copy."""
        return kv_bytes / self.calibration.copy_bytes_per_second

    def _parts(self, shape: StepShape) -> Mapping[str, float]:
        """Seconds by what they are for: rows, then FEATURES."""
        coefficients = self.calibration.coefficients
        parts = {"rows": float(row_weights(rows_of(shape), self._knots) @ self._row_seconds)}
        return parts | {name: coefficients[name] * amount for name, amount in features_of(shape).items()}
