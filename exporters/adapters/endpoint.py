"""Reads a metrics endpoint that may be anything: bounded in time and size, never following it elsewhere, and without touching
TensorRT-LLM's /metrics, which hands out a queue and empties it.

What goes wrong is a Finding, not an exception: an endpoint that misbehaves is what `kvscope doctor` is asked about.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import anyio
import httpx

from observability.errors import ConfigError

MAX_BODY_BYTES = 64 << 20
ACCEPT = "text/plain;version=0.0.4,application/openmetrics-text;version=1.0.0;q=0.5,*/*;q=0.1"
TRTLLM_METRICS = "/prometheus/metrics"

Level = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about an endpoint: `error` means its numbers cannot be read, `warning` that some are wrong or missing."""

    level: Level
    code: str
    found: str
    do: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer with status 200: its body decompressed, and what its headers said."""

    url: str
    body: bytes
    content_type: str


class Endpoint:
    """One URL to look at. `timeout_seconds` holds for each reading as a whole. Use as `async with`.

    Raises ConfigError for an address that is none.
    """

    def __init__(self, url: str, *, token: str | None = None, timeout_seconds: float = 10.0) -> None:
        try:
            parsed = httpx.URL(url if "://" in url else f"http://{url}")
        except (httpx.InvalidURL, ValueError) as error:
            raise ConfigError(f"{url!r} is not an address: {error}.", next_step=_EXAMPLE) from None
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ConfigError(f"{url!r} is not an http address.", next_step=_EXAMPLE)
        self.has_path = parsed.path not in ("", "/")
        self.url = parsed if self.has_path else parsed.copy_with(path="/metrics")
        self._timeout = timeout_seconds
        headers = {"Accept": ACCEPT, "Accept-Encoding": "gzip"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        self._client = httpx.AsyncClient(headers=headers, timeout=timeout_seconds, trust_env=False)

    async def __aenter__(self) -> Endpoint:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    def at(self, path: str) -> httpx.URL:
        """The same server at another path."""
        return self.url.copy_with(path=path, query=None)

    async def get(self, url: httpx.URL, *, limit: int = MAX_BODY_BYTES) -> Answer | Finding:
        """The answer, or why there is none."""
        try:
            with anyio.fail_after(self._timeout):
                async with self._client.stream("GET", url) as answer:
                    return await self._take(url, answer, limit)
        except (TimeoutError, httpx.TimeoutException):
            return Finding(
                "error", "timeout", f"{url} did not finish its answer within {self._timeout:g} s.",
                "Check that the engine is not blocked; a scrape by Prometheus would fail as well.",
            )  # fmt: skip
        except httpx.RemoteProtocolError as error:
            return Finding(
                "error",
                "half_answer",
                f"{url} broke off its answer: {error}.",
                "Check the engine's log and proxies between.",
            )
        except (httpx.HTTPError, OSError) as error:
            return Finding(
                "error", "no_answer", f"{url} does not answer: {str(error) or type(error).__name__}.",
                "Check that the engine runs, and host and port.",
            )  # fmt: skip

    async def _take(self, url: httpx.URL, answer: httpx.Response, limit: int) -> Answer | Finding:
        if answer.is_redirect:
            to = answer.headers.get("location", "nowhere")[:200]
            return Finding(
                "error", "redirect", f"{url} answers {answer.status_code} and points to {to}.",
                "Name the address that it points to, if it is the engine's; kvscope does not follow it, nor send a token there.",
            )  # fmt: skip
        if answer.status_code != 200:
            do = "Give the token (--token)." if answer.status_code in (401, 403) else _STATUS_NEXT
            return Finding(
                "error", "status", f"{url} answers {answer.status_code} {answer.reason_phrase}.".replace(" .", "."), do
            )
        encoding = answer.headers.get("content-encoding", "identity").lower()
        if encoding not in ("identity", "gzip", "x-gzip", "deflate"):
            return Finding(
                "error", "encoding", f"{url} is encoded as {encoding[:40]!r}, which was not asked for.", _STATUS_NEXT
            )
        unpack = zlib.decompressobj(wbits=47) if encoding != "identity" else None  # 47: gzip or zlib, by its header
        body = bytearray()
        try:
            async for part in answer.aiter_raw():
                # at most one byte beyond the limit is ever unpacked, whatever the ratio
                body += unpack.decompress(part, limit + 1 - len(body)) if unpack else part
                if len(body) > limit:
                    return Finding(
                        "error", "too_large", f"{url} sent more than {limit >> 20} MiB{' unpacked' if unpack else ''}.",
                        "Check that it is a metrics page, and that no label has unbounded values.",
                    )  # fmt: skip
        except zlib.error as error:
            return Finding("error", "encoding", f"{url} says gzip and is none: {error}.", _STATUS_NEXT)
        if unpack is not None and not unpack.eof:
            return Finding("error", "half_answer", f"{url} ends within its gzip stream.", "Check proxies between.")
        return Answer(str(url), bytes(body), answer.headers.get("content-type", ""))

    async def json(self, path: str) -> Any:
        """What a small JSON page of the server holds; None where there is none."""
        answer = await self.get(self.at(path), limit=1 << 20)
        if isinstance(answer, Finding):
            return None
        return _json(answer.body)

    async def metrics(self) -> Answer | Finding:
        """The metrics page. Before anything at a path /metrics is read, two harmless pages say whether it would be TensorRT-LLM's
        queue; that one is refused unread."""
        if self.url.path.rstrip("/") != "/metrics":
            return await self.get(self.url)
        other = await self.get(self.at(TRTLLM_METRICS))
        if isinstance(other, Answer) and b"trtllm_" in other.body:
            return _refuse(self.url) if self.has_path else other
        if isinstance(other, Finding) and other.code in ("no_answer", "timeout", "half_answer"):
            return other
        models = await self.json("/v1/models")
        if _owned_by_trtllm(models):
            return _refuse(self.url)
        answer = await self.get(self.url)
        if isinstance(answer, Answer) and is_trtllm_queue(answer.body):
            return Finding(
                "error", "trtllm_queue",
                f"{answer.url} is TensorRT-LLM's queue of iteration statistics, which a read empties: this one took what was in it. It was not read again.",
                f"Use {TRTLLM_METRICS} (return_perf_metrics: true makes it exist), and take {self.url.path} out of every scrape job.",
            )  # fmt: skip
        return answer


_EXAMPLE = "Give it as in kvscope doctor http://127.0.0.1:8000/metrics."
_STATUS_NEXT = "Check the path: vLLM, SGLang, TGI and llama.cpp have /metrics, TensorRT-LLM /prometheus/metrics."


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _owned_by_trtllm(models: Any) -> bool:
    data = models.get("data") if isinstance(models, Mapping) else None
    owners = [m.get("owned_by") for m in data if isinstance(m, Mapping)] if isinstance(data, list) else []
    return any(isinstance(owner, str) and "tensorrt" in owner.lower() for owner in owners)


def is_trtllm_queue(body: bytes) -> bool:
    """Whether `body` is what TensorRT-LLM serve answers at /metrics: a JSON list of iterations, empty where the queue was."""
    if body.strip() == b"[]":
        return True
    found = _json(body) if body.lstrip()[:1] == b"[" else None
    keys = (
        {key for entry in found[:1] if isinstance(entry, Mapping) for key in entry}
        if isinstance(found, list)
        else set()
    )
    return bool(keys & {"iter", "iterLatencyMS", "numActiveRequests", "kvCacheStats"})


def _refuse(url: httpx.URL) -> Finding:
    return Finding(
        "error", "trtllm_queue",
        f"{url} is TensorRT-LLM's queue of iteration statistics, which a read empties: it was not read.",
        f"Use {TRTLLM_METRICS} of the same server, and take {url.path} out of every scrape job.",
    )  # fmt: skip
