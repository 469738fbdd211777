"""One load on two settings of the engine in virtual time, side by side. As a program: a process that the app starts for each comparison.

    python -m observability.workload.whatif     reads a Question as one line of JSON, writes progress and the answer as lines of JSON

It ends when its standard input does, so that none is left behind by an app that ended, and holds itself to limits of memory and time.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from observability.catalog import REFUSED_OUTCOMES
from observability.engine.executor.hardware import gpu_by_name
from observability.engine.executor.roofline import source_of
from observability.errors import ConfigError, KvscopeError
from observability.objectives import LATENCY_OBJECTIVES
from observability.workload.experiment import mechanisms, plan_sizes
from observability.workload.generate import LEAST_REQUESTS_PER_SECOND, PRESETS, generate_load
from observability.workload.replay import InProcess, MeasuredTelemetry, replay_measured
from observability.workload.results import SERVED, ReplayResult, Summary, notes_on, phases_of, summarize
from observability.workload.traces import TraceRequest, read_trace, window

MAX_REQUESTS = 20_000
MAX_MEMORY_BYTES = 6 << 30  # of address space
MAX_CPU_SECONDS = 600
_SHOW_SECONDS = 0.2
PERCENTILES = (1, 5, *range(10, 96, 5), 97, 98, 99, 99.5, 99.9)
Layout = Literal["contiguous", "paged", "compressed", "reserved"]


class Setting(BaseModel):
    """What is compared. `layout`: adjacent blocks for short sequences and any for longer ones, any blocks, quantized from 8K tokens on, or
    room for the longest sequence reserved at once. None: the default for that target."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    gpu: str = "H100"
    model: str = "llama-3-8b"
    tensor_parallel: int = Field(1, ge=1, le=64)
    kv_dtype: Literal["auto", "int8"] = "auto"
    layout: Layout = "contiguous"
    max_num_seqs: int = Field(256, ge=1, le=4096)
    max_num_batched_tokens: int = Field(8192, ge=16, le=1 << 20)
    replicas: int = Field(1, ge=1, le=32)


class Load(BaseModel):
    """The built-in load, or the recorded one of the file `path`; its first `limit` requests."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str | None = None
    preset: str = "recorded"
    requests_per_second: float | None = Field(None, ge=LEAST_REQUESTS_PER_SECOND, le=10_000)
    seed: int = Field(0, ge=0, le=1 << 32)
    time_scale: float = Field(1.0, ge=0.001, le=1000)
    limit: int = Field(1500, ge=2, le=MAX_REQUESTS)


class Question(BaseModel):
    """What would change if the engine were `after` in place of `before`? `thresholds`: seconds of latency objectives by name, where
    they are not the general ones."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    load: Load
    before: Setting
    after: Setting
    thresholds: dict[str, float] = {}


@dataclass(frozen=True, slots=True)
class Side:
    """One setting under the load. Latencies in seconds: exact quantiles over all served requests of all replicas, and their values at
    PERCENTILES. over: share above the threshold of each latency objective. None: nothing was measured. notes: what to mind of these
    figures. answer_tokens: of served requests.

    kv_tokens: room of one replica's KV pool, exact and compressed blocks. kv_usage_mean: share of the bytes of all replicas' pools that
    requests held, from the first arrival to the last end. kv_usage_max: the largest share of one replica's. makeup: mean seconds by state
    of the slowest 1 % and of all. worked_out_from: what the times are based on.
    """

    requests: int
    served: int
    refused: int
    reasons: dict[str, int]
    notes: list[str]
    answer_tokens: int
    duration_seconds: float
    latency: dict[str, Summary | None]
    percentiles: dict[str, list[float]]
    over: dict[str, float | None]
    tokens_per_second: float | None
    kv_tokens: int | None
    kv_usage_mean: float | None
    kv_usage_max: float | None
    hit_rate: float | None
    preemptions: int
    makeup: dict[str, dict[str, float]]
    device: str
    worked_out_from: str


@dataclass(frozen=True, slots=True)
class Answer:
    """Both sides under one load, in virtual time: nothing was run. `rate` is the load's mean, requests/s;
    `percentiles` are those at which the sides have latencies."""

    clock: Literal["virtual"]
    requests: int
    span_seconds: float
    rate: float
    prompt_tokens: int
    output_tokens: int
    percentiles: tuple[float, ...]
    before: Side
    after: Side
    wall_seconds: float


Progress = Callable[[str, float], None]
"""(what is being replayed, share of the whole that is done)"""


def compare(question: Question, on_progress: Progress | None = None) -> Answer:
    """Replays the question's load on both settings. Raises ConfigError for settings that do not fit each other, TraceError for a trace
    that cannot be read."""
    started = time.perf_counter()
    load = list(read_load(question.load))
    if len(load) < 2:
        raise ConfigError("The load has fewer than two requests.", next_step="Give a longer trace, or a higher limit.")
    sides, thresholds = {}, {o.name: o.threshold_seconds for o in LATENCY_OBJECTIVES} | question.thresholds
    for place, (name, setting) in enumerate((("before", question.before), ("after", question.after))):

        def tell(done: float, name: str = name, place: int = place) -> None:
            if on_progress is not None:
                on_progress(name, (place + done) / 2)

        sides[name] = replay_side(load, setting, thresholds, tell)
    span = load[-1].arrival_seconds - load[0].arrival_seconds
    return Answer(
        clock="virtual", requests=len(load), span_seconds=span, rate=(len(load) - 1) / span if span > 0 else math.nan,
        prompt_tokens=sum(r.prompt.length for r in load), output_tokens=sum(r.output_tokens for r in load), percentiles=PERCENTILES, before=sides["before"],
        after=sides["after"], wall_seconds=time.perf_counter() - started,
    )  # fmt: skip


def read_load(load: Load) -> Iterator[TraceRequest]:
    """The requests of a Load. Raises ConfigError and TraceError."""
    if load.path is not None:
        return read_trace(load.path, time_scale=load.time_scale, limit=load.limit)
    if load.preset not in PRESETS:
        raise ConfigError(f"There is no preset {load.preset!r}.", next_step=f"Use one of {', '.join(PRESETS)}.")
    settings = PRESETS[load.preset]
    if load.requests_per_second is not None:
        settings = replace(settings, requests_per_second=load.requests_per_second)
    return window(generate_load(settings, load.seed), time_scale=load.time_scale, limit=load.limit)


def split(load: Sequence[TraceRequest], replicas: int) -> list[list[TraceRequest]]:
    """The load of each replica. Requests of one conversation (a prompt's second part names it; the first is a system prompt that others
    share) stay together, as the router keeps a session, each new one goes where the fewest prompt tokens went so far."""
    parts: list[list[TraceRequest]] = [[] for _ in range(replicas)]
    tokens, home = [0] * replicas, dict[int, int]()
    for request in load:
        hashes = request.prompt.hash_ids
        key = hashes[1] if len(hashes) > 1 else hashes[0]
        place = home.setdefault(key, tokens.index(min(tokens))) if len(hashes) > 1 else tokens.index(min(tokens))
        tokens[place] += request.prompt.length
        parts[place].append(request)
    return parts


def target_of(setting: Setting, load: Sequence[TraceRequest]) -> InProcess:
    """Where to replay `load` for a setting. Raises ConfigError."""
    target = InProcess(
        model=setting.model, gpu=setting.gpu, tensor_parallel=setting.tensor_parallel, kv_dtype=setting.kv_dtype,
        max_num_seqs=setting.max_num_seqs, max_num_batched_tokens=setting.max_num_batched_tokens,
    )  # fmt: skip
    if setting.layout == "paged":
        return replace(target, engine={"contiguous_below": 0})
    if setting.layout == "reserved":
        sizes = plan_sizes(load, target, compression=False)
        return replace(
            target, max_model_len=sizes.max_model_len, prefix_caching=False,
            engine={"reservation": "max_model_len", "contiguous_below": 0},
        )  # fmt: skip
    if setting.layout == "compressed":
        sizes = plan_sizes(load, target)
        compression = next(m for m in mechanisms(sizes) if m.name == "compression")
        return replace(target, max_model_len=sizes.max_model_len, engine=dict(compression.settings))
    return target


def replay_side(
    load: Sequence[TraceRequest], setting: Setting, thresholds: Mapping[str, float], tell: Callable[[float], None]
) -> Side:
    """`load` on `setting`, replica by replica; `tell` hears the share that is done."""
    target, ended = target_of(setting, load), 0
    results: list[tuple[ReplayResult, MeasuredTelemetry]] = []
    for part in split(load, setting.replicas):

        def on_end(done: int, before: int = ended) -> None:
            tell((before + done) / len(load))

        if part:
            results.append(replay_measured(part, target, on_end=on_end))
        ended += len(part)
    return _side(results, len(load), setting, thresholds)


def _side(
    results: Sequence[tuple[ReplayResult, MeasuredTelemetry]],
    requests: int,
    setting: Setting,
    thresholds: Mapping[str, float],
) -> Side:
    records = [record for _, telemetry in results for record in telemetry.records]
    served = [record for record in records if record.outcome in SERVED]
    values: dict[str, np.ndarray] = {
        "ttft": np.array([r.first_token - r.arrival for r in served if r.first_token is not None]),
        "itl": np.concatenate([np.frombuffer(t.intervals) for _, t in results] or [np.empty(0)]),
        "e2e": np.array([r.finished - r.arrival for r in served]),
    }
    weights = {
        "itl": np.concatenate(
            [np.frombuffer(t.weights, dtype=np.int64) for _, t in results] or [np.empty(0, dtype=np.int64)]
        )
    }
    over = {name: _over(values[name], weights.get(name), threshold) for name, threshold in thresholds.items()}
    duration = max((r.finished for r in records), default=0.0) - min((r.arrival for r in records), default=0.0)
    answer_tokens = sum(r.generated_tokens for r in served)
    tokens = answer_tokens + sum(r.prompt_tokens for r in served)
    kv = [result.kv for result, _ in results]
    uses = [each.use for each in kv if each.use is not None]
    capacity = uses[0].capacity_bytes if uses else None
    held = sum(telemetry.active_byte_seconds for _, telemetry in results)  # replicas without a request held nothing
    queried, hit = (_sum([getattr(each, name) for each in kv]) for name in ("queried_tokens", "hit_tokens"))
    refused = sum(result.outcomes[name] for result, _ in results for name in REFUSED_OUTCOMES)
    cut_short = sum(result.answers_cut_short or 0 for result, _ in results)
    settings, phases = results[0][0].settings, phases_of(records)
    reasons: dict[str, int] = {}
    for result, _ in results:
        for reason, count in result.reasons.items():
            reasons[reason] = reasons.get(reason, 0) + count
    return Side(
        requests=requests, served=len(served), refused=refused, reasons=reasons,
        notes=notes_on(requests, refused, cut_short, settings["max_model_len"], phases), answer_tokens=answer_tokens,
        duration_seconds=duration,
        latency={name: summarize(values[name], weights.get(name)) for name in values},
        percentiles={name: _percentiles(values[name], weights.get(name)) for name in values},
        over=over, tokens_per_second=tokens / duration if duration > 0 else None,
        kv_tokens=uses[0].capacity_tokens if uses else None,
        kv_usage_mean=held / (setting.replicas * capacity * duration) if capacity and duration > 0 else None,
        kv_usage_max=max((use.usage_ratio["max"] for use in uses if use.usage_ratio is not None), default=None),
        hit_rate=hit / queried if hit is not None and queried else None,
        preemptions=sum(record.preemptions for record in records),
        makeup={} if phases is None else {name: dict(each.by_state) for name, each in phases.items()},
        device=str(settings["device"]), worked_out_from=source_of(gpu_by_name(setting.gpu), setting.tensor_parallel),
    )  # fmt: skip


def _over(values: np.ndarray, weights: np.ndarray | None, threshold: float) -> float | None:
    if not len(values):
        return None
    return float(np.average(values > threshold, weights=weights))


def _percentiles(values: np.ndarray, weights: np.ndarray | None) -> list[float]:
    if not len(values):
        return []
    counts = np.ones(len(values)) if weights is None else weights
    marks = np.quantile(values, np.array(PERCENTILES) / 100, weights=counts, method="inverted_cdf")
    return [float(mark) for mark in marks]


def _sum(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


# -- as a program -----------------------------------------------------------------------------------------------------------


def main() -> int:
    """Answers the question on standard input; returns the exit code."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_SECONDS, MAX_CPU_SECONDS + 5))
    os.nice(5)  # the pages go first
    line = sys.stdin.readline()
    threading.Thread(target=_end_with_input, daemon=True).start()
    shown = 0.0

    def show(what: str, share: float) -> None:
        nonlocal shown
        if time.monotonic() - shown >= _SHOW_SECONDS:
            shown = time.monotonic()
            _say({"what": what, "share": share})

    path = ""
    try:
        question = Question.model_validate_json(line)
        path = question.load.path or ""
        _say({"answer": _finite(asdict(compare(question, show)))})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        _say({"reason": f"{where}: {first['msg']}.", "next_step": "Change that setting."})
        return 2
    except KvscopeError as error:
        said = {"reason": error.reason, "next_step": error.next_step}
        # the name that a file has here says nothing to whoever gave it
        _say({k: v.replace(path, "The trace") if path else v for k, v in said.items()})
        return error.exit_code
    except MemoryError:
        _say(
            {
                "reason": f"The replay needs more than {MAX_MEMORY_BYTES >> 30} GiB.",
                "next_step": "Lower the number of requests.",
            }
        )
        return 1
    return 0


def _end_with_input() -> None:
    while sys.stdin.readline():
        pass
    os._exit(3)


def _say(message: Mapping[str, Any]) -> None:
    print(json.dumps(message, allow_nan=False), flush=True)  # noqa: T201


def _finite(value: Any) -> Any:
    """`value` with None for what JSON cannot say."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # the thread that waits for the end of the input would hold a usual exit up
