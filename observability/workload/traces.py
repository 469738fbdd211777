"""Readers of recorded LLM load: a file in, a stream of timed requests out. Nothing is held beyond one line.

Mooncake traces are JSONL with prefix hashes of 512-token parts (github.com/kvcache-ai/Mooncake, FAST'25 release);
Azure traces are CSV without prefix information (github.com/Azure/AzurePublicDataset, 2023 and 2024).
"""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from observability.engine.types import PromptSpan
from observability.errors import ConfigError, TraceError

PART_TOKENS = 512
"""Tokens that one Mooncake hash stands for."""
MAX_TOKENS = 10_000_000
MAX_SECONDS = 366 * 86400.0
"""A trace spans a year at most; more is a timestamp in another unit than it should be."""
"""A longer prompt or output is a fault of the file: no model serves it."""
MAX_LINE_BYTES = 1 << 20
"""Room for the hashes of a MAX_TOKENS prompt; a longer line is refused before it is held in memory."""

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a load. `arrival_seconds` counts from the first request of the load."""

    arrival_seconds: float
    prompt: PromptSpan
    output_tokens: int
    request_class: str = "standard"


class _MooncakeLine(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    timestamp: float = Field(ge=0, allow_inf_nan=False)  # milliseconds
    input_length: int = Field(ge=1, le=MAX_TOKENS)
    output_length: int = Field(ge=1, le=MAX_TOKENS)
    hash_ids: list[int]


class _AzureLine(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    TIMESTAMP: str
    ContextTokens: int = Field(ge=1, le=MAX_TOKENS)
    GeneratedTokens: int = Field(ge=1, le=MAX_TOKENS)


@dataclass(frozen=True, slots=True)
class _Row:
    """A parsed line, unscaled. `hash_ids` is None where the format carries no prefix information."""

    seconds: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: list[int] | None


class _LineError(Exception):
    """Why a line cannot be used; becomes a TraceError with file and line number."""


def read_trace(
    path: str | Path,
    *,
    time_scale: float = 1.0,
    length_scale: float = 1.0,
    limit: int | None = None,
    start_seconds: float = 0.0,
    span_seconds: float | None = None,
) -> Iterator[TraceRequest]:
    """Yields the requests of a Mooncake or Azure file in order of arrival; the format is told from the first line.

    time_scale: 10 replays ten times as fast. length_scale: 0.1 makes prompts and outputs a tenth as long and keeps which
    parts prompts share: one hash then stands for round(512 x scale) tokens, so the scale is rounded to 1/512.
    start_seconds, span_seconds: only arrivals in [start, start + span) of the recorded time, counted from the file's
    first request. limit: at most so many requests. In an Azure file every prompt is distinct.

    Raises ConfigError for a scale or limit out of range, at once; TraceError with file, line, reason and next step at
    the first line that cannot be used.
    """
    if not (math.isfinite(length_scale) and length_scale > 0):
        raise ConfigError(f"length_scale is {length_scale}; it must be a positive number.", next_step="Give 0.5, say.")
    part_tokens = round(PART_TOKENS * length_scale)
    if not 1 <= part_tokens <= MAX_TOKENS:
        raise ConfigError(
            f"length_scale is {length_scale}; it must lie between 1/512 and {MAX_TOKENS // PART_TOKENS}.",
            next_step="Give a length_scale such as 0.1.",
        )
    requests = _requests(Path(path), part_tokens)
    return window(requests, time_scale=time_scale, limit=limit, start_seconds=start_seconds, span_seconds=span_seconds)


def window(
    requests: Iterator[TraceRequest],
    *,
    time_scale: float = 1.0,
    limit: int | None = None,
    start_seconds: float = 0.0,
    span_seconds: float | None = None,
) -> Iterator[TraceRequest]:
    """The part of a load that read_trace describes, faster by time_scale; reads no further than it must.

    Raises ConfigError at once for a value out of range."""
    if not 1e-3 <= time_scale <= 1e6:
        raise ConfigError(
            f"time_scale is {time_scale}; it must lie between 0.001 and 1,000,000.", next_step="Give 2, say."
        )
    if limit is not None and limit < 1:
        raise ConfigError(f"limit is {limit}; it must be at least 1.", next_step="Leave it out to replay everything.")
    if not (math.isfinite(start_seconds) and start_seconds >= 0):
        raise ConfigError(f"start_seconds is {start_seconds}; it must be 0 or more.", next_step="Give seconds.")
    if span_seconds is not None and not span_seconds > 0:
        raise ConfigError(f"span_seconds is {span_seconds}; it must be above 0.", next_step="Give seconds.")
    end = math.inf if span_seconds is None else start_seconds + span_seconds
    before_end = itertools.takewhile(lambda r: r.arrival_seconds < end, requests)
    inside = itertools.dropwhile(lambda r: r.arrival_seconds < start_seconds, before_end)
    moved = (replace(r, arrival_seconds=(r.arrival_seconds - start_seconds) / time_scale) for r in inside)
    return itertools.islice(moved, limit)


def _requests(path: Path, part_tokens: int) -> Iterator[TraceRequest]:
    first: float | None = None
    previous = -math.inf
    next_hash = 0
    for number, row in _rows(path):
        if row.seconds < previous:
            raise _trace_error(path, number, f"arrives {previous - row.seconds:.3f} s before the line above it")
        previous = row.seconds
        first = row.seconds if first is None else first
        if row.seconds - first > MAX_SECONDS:
            raise _trace_error(
                path,
                number,
                f"arrives {(row.seconds - first) / 86400:.3g} days after the first request",
                "Check the unit of the timestamps: milliseconds.",
            )
        if row.hash_ids is None:  # distinct: hashes that no other request of this file has
            parts = -(-row.prompt_tokens // PART_TOKENS)
            hash_ids = tuple(range(next_hash, next_hash + parts))
            next_hash += parts
        else:
            hash_ids = tuple(row.hash_ids)
        # ceil keeps the number of parts: a length in ((k-1) x 512, k x 512] stays in ((k-1) x part, k x part].
        length = -(-row.prompt_tokens * part_tokens // PART_TOKENS)
        output_tokens = -(-row.output_tokens * part_tokens // PART_TOKENS)
        if max(length, output_tokens) > MAX_TOKENS:
            raise _trace_error(path, number, f"scaled to more than {MAX_TOKENS:,} tokens", "Lower the length scale.")
        yield TraceRequest(row.seconds - first, PromptSpan(length, hash_ids, part_tokens), output_tokens)
    if first is None:
        raise TraceError(f"{path} holds no request.", next_step="Give a Mooncake JSONL or Azure CSV trace.")


def _rows(path: Path) -> Iterator[tuple[int, _Row]]:
    """Line number and content of each request. Opens, decodes and splits; knows which format it is reading."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise TraceError(
            f"{path} cannot be read: {error.strerror or error}.", next_step="Give the path of a trace file."
        ) from None
    with file:
        parse: Callable[[str], _Row] | None = None
        empty = 0  # the first empty line; the end of a file may be empty lines
        for number, line in _lines(path, file):
            if not line.strip():
                empty = empty or number
                continue
            if empty:
                raise _trace_error(path, empty, "is empty")
            try:
                if parse is None:
                    if line.lstrip().startswith("{"):
                        parse = _parse_mooncake
                    else:
                        parse = _azure_parser(line)
                        continue
                yield number, parse(line)
            except _LineError as error:
                raise _trace_error(path, number, str(error)) from None


def _lines(path: Path, file: BinaryIO) -> Iterator[tuple[int, str]]:
    number = 0
    while True:
        number += 1
        try:
            raw = file.readline(MAX_LINE_BYTES + 1)
        except OSError as error:  # a directory opens, but does not read, on some systems
            raise TraceError(
                f"{path} cannot be read: {error.strerror or error}.", next_step="Give the path of a trace file."
            ) from None
        if not raw:
            return
        if len(raw) > MAX_LINE_BYTES:
            raise _trace_error(path, number, f"is longer than {MAX_LINE_BYTES:,} bytes")
        try:
            yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError:
            raise _trace_error(path, number, "is not UTF-8 text") from None


def _parse_mooncake(line: str) -> _Row:
    try:
        row = _MooncakeLine.model_validate_json(line)
    except ValidationError as error:
        raise _LineError(_reason(error)) from None
    want = -(-row.input_length // PART_TOKENS)
    if len(row.hash_ids) != want:
        raise _LineError(
            f"has {len(row.hash_ids)} hash_ids; {row.input_length} tokens in parts of {PART_TOKENS} need {want}"
        )
    if min(row.hash_ids) < 0 or max(row.hash_ids) >= 1 << 63:
        raise _LineError("has a hash id outside 0..2^63-1")
    return _Row(row.timestamp / 1000.0, row.input_length, row.output_length, row.hash_ids)


def _azure_parser(header: str) -> Callable[[str], _Row]:
    names = _split_csv(header)
    missing = [name for name in AZURE_COLUMNS if name not in names]
    if missing:
        raise _LineError(
            "is neither a Mooncake JSON object nor an Azure CSV header "
            f"(no column {', '.join(missing)} in {header.strip()[:60]!r})"
        )
    aware: bool | None = None

    def parse(line: str) -> _Row:
        nonlocal aware
        fields = _split_csv(line)
        if len(fields) != len(names):
            raise _LineError(f"has {len(fields)} fields; the header has {len(names)}")
        try:
            row = _AzureLine.model_validate(dict(zip(names, fields, strict=True)))
            when = datetime.fromisoformat(row.TIMESTAMP)
        except ValidationError as error:
            raise _LineError(_reason(error)) from None
        except ValueError:
            raise _LineError(f"TIMESTAMP {row.TIMESTAMP[:40]!r} is not an ISO 8601 date and time") from None
        if aware is None:
            aware = when.tzinfo is not None
        if aware != (when.tzinfo is not None):
            raise _LineError("mixes times with and without a time zone")
        seconds = (when - (_EPOCH_UTC if aware else _EPOCH)).total_seconds()
        return _Row(seconds, row.ContextTokens, row.GeneratedTokens, None)

    return parse


_EPOCH = datetime(1970, 1, 1)
_EPOCH_UTC = datetime.fromisoformat("1970-01-01T00:00:00+00:00")


def _split_csv(line: str) -> list[str]:
    try:
        rows = list(csv.reader([line], strict=True))
    except csv.Error as error:
        raise _LineError(f"is not CSV: {error}") from None
    return rows[0] if rows else []


def _reason(error: ValidationError) -> str:
    """The first fault of a line in one phrase: `input_length: input should be greater than or equal to 1`."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    message = first["msg"][:1].lower() + first["msg"][1:]
    return f"{where}: {message}" if where else message


def _trace_error(path: Path, number: int, reason: str, next_step: str = "") -> TraceError:
    return TraceError(
        f"{path}, line {number}: {reason}.", next_step=next_step or f"Correct or remove line {number} and replay again."
    )
