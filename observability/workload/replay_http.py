"""Replays a load against any OpenAI-compatible server and measures at the client, chunk by chunk.

Requests go out when they arrive in the load, whether earlier ones have ended or not, up to a bound on open requests; a
request held back by that bound says so in its send delay. What ends in no answer is counted as lost, never dropped.
"""

from __future__ import annotations

import asyncio
import json
import time
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import httpx
import numpy as np

from observability import catalog
from observability.addresses import without_secrets
from observability.errors import ConfigError, KvscopeError, ServiceError
from observability.workload.generate import prompt_text
from observability.workload.results import SERVED, ReplayResult, kv_from_buckets, summarize, throughput
from observability.workload.traces import TraceRequest

_MAX_REASON = 160  # characters of a server's message that are kept
_MAX_EVENT = 1 << 20  # characters of one server-sent event; an endless line is cut off as lost


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """url: base of the server, with or without /v1. served_model: None asks /v1/models and takes the first. ignore_eos asks for the
    recorded output length even where the model would stop (an extension that vLLM, SGLang and kvscope know)."""

    url: str
    served_model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    max_concurrency: int = 256
    timeout_seconds: float = 600.0  # without a byte from the server
    ignore_eos: bool = False
    serial: bool = False

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(
                f"{without_secrets(self.url)!r} is not an http URL.",
                next_step="Give one such as http://127.0.0.1:8000.",
            )
        if self.max_concurrency < 1:
            raise ConfigError("max_concurrency is below 1.", next_step="Allow at least one open request.")
        if not self.timeout_seconds > 0:
            raise ConfigError("timeout_seconds must be above 0.", next_step="Give seconds.")

    @property
    def base(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1") + "/v1"


@dataclass(slots=True)
class _Sent:
    """One request as the client saw it, seconds on the replay's clock."""

    due: float
    started: float
    chunks: array[float] = field(default_factory=lambda: array("d"))  # when each piece of text came
    ended: float = 0.0
    outcome: str = "lost"
    reason: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


class _Failed(Exception):
    """The server answered, and the answer is no: outcome and reason."""

    def __init__(self, outcome: str, reason: str) -> None:
        super().__init__(reason)
        self.outcome, self.reason = outcome, reason


def replay_http(
    requests: Iterable[TraceRequest],
    settings: HttpSettings,
    *,
    describe: dict[str, Any] | None = None,
    on_end: Callable[[int], None] | None = None,
) -> ReplayResult:
    """Sends `requests` to a server in real time and returns what the client measured; `describe` joins the settings.

    `on_end` is called with the number of requests that ended so far. The prompts are plain words of about the recorded
    length, with the recorded prefixes shared. Hits come from usage.prompt_tokens_details.cached_tokens and are None where the
    server does not report it. Raises ServiceError when the server cannot be reached at the start or has no model.
    """
    return asyncio.run(_replay(requests, settings, describe or {}, on_end))


async def _replay(
    requests: Iterable[TraceRequest],
    settings: HttpSettings,
    describe: dict[str, Any],
    on_end: Callable[[int], None] | None,
) -> ReplayResult:
    headers = {"Authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
    limits = httpx.Limits(max_connections=settings.max_concurrency, max_keepalive_connections=settings.max_concurrency)
    # The wait for a free connection is bounded by the semaphore, so the pool itself never times out.
    timeout = httpx.Timeout(settings.timeout_seconds, connect=10.0, pool=None)
    async with httpx.AsyncClient(headers=headers, limits=limits, timeout=timeout) as client:
        model = await _served_model(client, settings)
        sent: list[_Sent] = []
        started = time.monotonic()
        room = asyncio.Semaphore(1 if settings.serial else settings.max_concurrency)
        ended = 0

        async def run(record: _Sent, request: TraceRequest) -> None:
            nonlocal ended
            try:
                await _complete(client, settings, model, request, record, started)
            finally:
                record.ended = time.monotonic() - started
                room.release()
                ended += 1
                if on_end is not None:
                    on_end(ended)

        broken: KvscopeError | None = None  # a load that breaks off: what is in flight ends first
        async with asyncio.TaskGroup() as group:
            try:
                for request in requests:
                    due = request.arrival_seconds
                    if not settings.serial:
                        await asyncio.sleep(max(0.0, started + due - time.monotonic()))
                    await room.acquire()
                    now = time.monotonic() - started
                    record = _Sent(due=now if settings.serial else due, started=now)
                    sent.append(record)
                    group.create_task(run(record, request))
            except KvscopeError as error:
                broken = error
        if broken is not None:
            raise broken
        wall = time.monotonic() - started
    return _result(sent, settings, model, describe, wall)


async def _served_model(client: httpx.AsyncClient, settings: HttpSettings) -> str:
    next_step = "Start the server, or correct --url."
    try:
        answer = await client.get(f"{settings.base}/models")
    except httpx.HTTPError as error:
        raise ServiceError(
            f"{without_secrets(settings.url)} cannot be reached: {_name(error)}.", next_step=next_step
        ) from None
    if answer.status_code != 200:
        raise ServiceError(
            f"{without_secrets(settings.base)}/models answered {answer.status_code}.", next_step=next_step
        )
    if settings.served_model is not None:
        return settings.served_model
    try:
        return str(answer.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise ServiceError(
            f"{without_secrets(settings.base)}/models names no model.",
            next_step="Name one with --served-model, or correct --url.",
        ) from None


async def _complete(
    client: httpx.AsyncClient, settings: HttpSettings, model: str, request: TraceRequest, record: _Sent, started: float
) -> None:
    """Runs one streamed completion into `record`; whatever happens ends in an outcome."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt_text(request.prompt),
        "max_tokens": request.output_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if settings.ignore_eos:
        body["ignore_eos"] = True
    try:
        async with client.stream("POST", f"{settings.base}/completions", json=body) as answer:
            if answer.status_code != 200:
                text = (await answer.aread()).decode(errors="replace")
                raise _Failed(_refusal(answer.status_code), f"HTTP {answer.status_code}: {_message(text)}")
            finish = await _read_stream(answer, record, started)
        record.outcome = finish if finish in SERVED else "lost"
        record.reason = "" if finish in SERVED else f"stream ended with finish_reason {finish!r}"
    except _Failed as failed:
        record.outcome, record.reason = failed.outcome, failed.reason
    except httpx.HTTPError as error:
        record.outcome, record.reason = "lost", _name(error)


def _refusal(status: int) -> str:
    """Outcome of a request that was answered with `status`, in the terms of catalog.OUTCOMES."""
    if status in (429, 503):
        return "rejected"
    return "invalid" if 400 <= status < 500 else "error"


async def _read_stream(answer: httpx.Response, record: _Sent, started: float) -> str | None:
    finish: str | None = None
    async for line in _lines(answer):
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            return finish
        try:
            event = json.loads(data)
        except ValueError:
            raise _Failed("lost", "stream held an event that is not JSON") from None
        if "error" in event:
            raise _Failed("error", _message(data))
        for choice in event.get("choices") or ():
            if choice.get("text"):
                record.chunks.append(time.monotonic() - started)
            finish = choice.get("finish_reason") or finish
        usage = event.get("usage")
        if usage:
            record.prompt_tokens = usage.get("prompt_tokens")
            record.completion_tokens = usage.get("completion_tokens")
            record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return None  # no [DONE]: the server went away


async def _lines(answer: httpx.Response) -> AsyncIterator[str]:
    """Lines of a stream, each bounded."""
    rest = ""
    async for text in answer.aiter_text():
        *lines, rest = (rest + text).split("\n")
        for line in lines:
            yield line
        if len(rest) > _MAX_EVENT:
            raise _Failed("lost", f"stream held an event of more than {_MAX_EVENT:,} characters")


def _message(text: str) -> str:
    """The server's own words, shortened; from {"error": {"message": ...}} where it is one."""
    try:
        error = json.loads(text)["error"]
        text = error["message"] if isinstance(error, dict) else str(error)
    except (ValueError, LookupError, TypeError):
        pass
    text = " ".join(str(text).split())
    return text if len(text) <= _MAX_REASON else text[: _MAX_REASON - 1] + "…"


def _name(error: httpx.HTTPError) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _result(
    sent: list[_Sent], settings: HttpSettings, model: str, describe: dict[str, Any], wall: float
) -> ReplayResult:
    served = [s for s in sent if s.outcome in SERVED]
    gaps, unequal = [], 0
    for s in served:
        if s.completion_tokens == len(s.chunks):
            gaps.append(np.diff(s.chunks))
        else:
            unequal += 1
    notes = ["Measured at the client, in real time."]
    if unequal:
        notes.append(
            f"{unequal} of {len(served)} answers came in chunks that are not one token each, or without a token count; "
            "their chunk times are no inter-token latencies and are left out."
        )
    queried, hit = dict.fromkeys(catalog.LENGTH_BUCKETS, 0), dict.fromkeys(catalog.LENGTH_BUCKETS, 0)
    known = all(s.cached_tokens is not None and s.prompt_tokens is not None for s in served) and bool(served)
    for s in served if known else ():
        assert s.prompt_tokens is not None
        assert s.cached_tokens is not None
        bucket = catalog.LENGTH_BUCKETS[catalog.length_bucket(s.prompt_tokens)]
        queried[bucket] += s.prompt_tokens
        hit[bucket] += s.cached_tokens
    unknown: dict[str, int | None] = dict.fromkeys(catalog.LENGTH_BUCKETS)
    if not known:
        notes.append("The server does not report cached tokens for each request, so hits are unknown.")
    first = min((s.started for s in sent), default=0.0)
    duration = max((s.ended for s in sent), default=0.0) - first
    prompt_tokens = _total(s.prompt_tokens for s in served)
    generated = _total(s.completion_tokens for s in served)
    shown = {k: v for k, v in asdict(settings).items() if k != "api_key"} | {"url": without_secrets(settings.url)}
    return ReplayResult(
        clock="real",
        settings={"target": "url", **shown, "served_model": model, **describe},
        requests=len(sent),
        outcomes=_outcomes(Counter(s.outcome for s in sent)),
        reasons=dict(Counter(s.reason for s in sent if s.reason).most_common(20)),
        duration_seconds=duration,
        wall_seconds=wall,
        prompt_tokens=prompt_tokens,
        generated_tokens=generated,
        latency={
            "time_to_first_token_seconds": summarize([s.chunks[0] - s.started for s in served if s.chunks]),
            "end_to_end_seconds": summarize([s.ended - s.started for s in served]),
            "inter_token_seconds": summarize(np.concatenate(gaps) if gaps else []),
            "send_delay_seconds": summarize([s.started - s.due for s in sent]),
        },
        throughput=throughput(len(served), prompt_tokens, generated, duration),
        phases=None,
        kv=kv_from_buckets(queried, unknown, hit) if known else kv_from_buckets(unknown, unknown, unknown),
        preemptions=None,
        notes=notes,
    )


def _total(counts: Iterable[int | None]) -> int | None:
    values = list(counts)
    known = [n for n in values if n is not None]
    return sum(known) if len(known) == len(values) else None


def _outcomes(counted: Counter[str]) -> dict[str, int]:
    return {name: counted[name] for name in (*catalog.OUTCOMES, "lost")}
