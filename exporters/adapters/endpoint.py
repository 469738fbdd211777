"""Reads a metrics endpoint that may be anything: bounded in time and size, never following it elsewhere, and without touching
TensorRT-LLM's /metrics, which hands out a queue and empties it.

What goes wrong is a Finding, not an exception: an endpoint that misbehaves is what `kvscope doctor` is asked about.
"""

from __future__ import annotations

import asyncio
import json
import threading
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal

import anyio
import httpx

from observability.addresses import trusted, without_secrets
from observability.errors import ConfigError

MAX_BODY_BYTES = 64 << 20
ACCEPT = "text/plain;version=0.0.4,application/openmetrics-text;version=1.0.0;q=0.5,*/*;q=0.1"
TRTLLM_METRICS = "/prometheus/metrics"

Level = Literal["error", "warning", "note"]
#: Longest text that is shown of what an endpoint sent.
MAX_TEXT = 600


def printable(text: str) -> str:
    """`text` on one line, without what would steer a terminal, at most MAX_TEXT long."""
    text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 3] + "..."


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about an endpoint: `error` means its numbers cannot be read, `warning` that some are wrong or missing."""

    level: Level
    code: str
    found: str
    do: str = ""

    def __post_init__(self) -> None:  # both hold what an endpoint sent: names, headers, addresses
        object.__setattr__(self, "found", printable(self.found))
        object.__setattr__(self, "do", printable(self.do))


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
        named = printable(without_secrets(url))
        try:
            parsed = httpx.URL(url if "://" in url.partition("?")[0] else f"http://{url}")
            usable = parsed.scheme in ("http", "https") and bool(parsed.host) and 0 < (parsed.port or 1) < 65536
        except (httpx.InvalidURL, ValueError):  # its message may hold parts of the password
            raise ConfigError(f"{named!r} is not an address.", next_step=_EXAMPLE) from None
        if not usable:
            raise ConfigError(f"{named!r} is not an http address.", next_step=_EXAMPLE)
        self.has_path = parsed.path not in ("", "/")
        self.url = parsed if self.has_path else parsed.copy_with(path="/metrics")
        self._timeout = timeout_seconds
        headers = {"Accept": ACCEPT, "Accept-Encoding": "gzip"}
        if token := (token or "").strip():  # one read from a file ends in a line break
            if not (token.isascii() and token.isprintable()):
                raise ConfigError(
                    "The token has characters that a header cannot carry.",
                    next_step="Look for a line break or a quote that came along when it was copied.",
                )
            headers["Authorization"] = f"Bearer {token}"
        self._client = httpx.AsyncClient(headers=headers, timeout=timeout_seconds, trust_env=False, verify=trusted())

    async def __aenter__(self) -> Endpoint:
        asyncio.get_running_loop().set_default_executor(_Abandonable())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    def at(self, path: str) -> httpx.URL:
        """The same server at another path."""
        return self.url.copy_with(path=path, query=None)

    async def get(self, asked: httpx.URL, *, limit: int = MAX_BODY_BYTES) -> Answer | Finding:
        """The answer, or why there is none."""
        url = without_secrets(str(asked))
        try:
            with anyio.fail_after(self._timeout):
                async with self._client.stream("GET", asked) as answer:
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

    async def _take(self, url: str, answer: httpx.Response, limit: int) -> Answer | Finding:
        if answer.is_redirect:
            to = without_secrets(answer.headers.get("location", "nowhere"))[:200]
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
        unpack = _unpacker() if encoding != "identity" else None
        body = bytearray()
        raw = 0
        try:
            async for part in answer.aiter_raw():
                raw += len(part)
                if unpack is None:
                    body += part
                while unpack is not None and part and len(body) <= limit:
                    if unpack.eof:  # a stream may have several members, one after the other
                        unpack = _unpacker()
                    # at most one byte beyond the limit is ever unpacked, whatever the ratio
                    body += unpack.decompress(part, limit + 1 - len(body))
                    part = unpack.unused_data
                if len(body) > limit or raw > limit:
                    return Finding(
                        "error", "too_large", f"{url} sent more than {limit >> 20} MiB{' unpacked' if unpack else ''}.",
                        "Check that it is a metrics page, and that no label has unbounded values.",
                    )  # fmt: skip
        except zlib.error as error:
            return Finding("error", "encoding", f"{url} says gzip and is none: {error}.", _STATUS_NEXT)
        if unpack is not None and not unpack.eof:
            return Finding("error", "half_answer", f"{url} ends within its gzip stream.", "Check proxies between.")
        return Answer(url, bytes(body), answer.headers.get("content-type", ""))

    async def json(self, path: str) -> Any:
        """What a small JSON page of the server holds; None where there is none."""
        answer = await self.get(self.at(path), limit=1 << 20)
        if isinstance(answer, Finding):
            return None
        return _json(answer.body)

    async def metrics(self) -> Answer | Finding:
        """The metrics page. Before anything at a path that ends in /metrics is read, harmless pages beside it say whether it would
        be TensorRT-LLM's queue; that one is refused unread."""
        path = self.url.path.rstrip("/")
        if not path.endswith("/metrics") or path.endswith(TRTLLM_METRICS):
            return await self.get(self.url)
        above = path.removesuffix("/metrics")  # of a server behind a proxy: what all its paths begin with
        beside = self.at(above + TRTLLM_METRICS)
        other = await self.get(beside)
        if isinstance(other, Answer) and b"trtllm_" in other.body:
            return _refuse(self.url) if self.has_path else other
        if isinstance(other, Finding) and other.code in ("no_answer", "timeout", "half_answer"):
            asked, meant = without_secrets(str(beside)), without_secrets(str(self.url))
            return replace(other, found=other.found.replace(asked, meant))
        models = await self.json(above + "/v1/models")
        if _owned_by_trtllm(models) or (models is None and _serves_trtllm(await self.json(above + "/openapi.json"))):
            return _refuse(self.url)
        answer = await self.get(self.url)
        if isinstance(answer, Answer) and is_trtllm_queue(answer.body):
            return Finding(
                "error", "trtllm_queue",
                f"{answer.url} is TensorRT-LLM's queue of iteration statistics, which a read empties: this one took what was in it. It was not read again.",
                f"Use {TRTLLM_METRICS} (return_perf_metrics: true makes it exist), and take {self.url.path} out of every scrape job.",
            )  # fmt: skip
        return answer


class _Abandonable(ThreadPoolExecutor):
    """Name look-ups of the event loop, each in a thread of its own that nothing waits for: one that hangs outlives its time limit,
    and neither the loop's end nor the interpreter's waits for it."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()

        def work() -> None:
            try:
                done.set_result(fn(*args, **kwargs))
            except BaseException as error:
                done.set_exception(error)

        threading.Thread(target=work, name="kvscope-lookup", daemon=True).start()
        return done


def _unpacker() -> Any:
    return zlib.decompressobj(wbits=47)  # gzip or zlib, by its header


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


def _serves_trtllm(described: Any) -> bool:
    """Whether a server's own description of its paths has those that only TensorRT-LLM serve has."""
    paths = described.get("paths") if isinstance(described, Mapping) else None
    return isinstance(paths, Mapping) and bool({"/kv_cache_events", "/perf_metrics"} & paths.keys())


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
        f"{without_secrets(str(url))} is TensorRT-LLM's queue of iteration statistics, which a read empties: it was not read.",
        f"Use {TRTLLM_METRICS} of the same server, and take {url.path} out of every scrape job.",
    )  # fmt: skip
