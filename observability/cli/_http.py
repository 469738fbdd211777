"""One HTTP request to a server of others (Grafana, Prometheus, Mimir): its answer, or an error that says what to do. Secrets never
appear in a message, and no redirect is followed with them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import httpx

from observability.addresses import without_secrets
from observability.errors import ConfigError, ServiceError

#: No answer of these APIs is longer.
MAX_BYTES = 16 * 1024 * 1024


def base_url(url: str, option: str = "--url") -> str:
    """`url` without a slash at its end. Raises ConfigError for what is no http address, or carries a user and password."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        parsed = httpx.URL("")
    if parsed.userinfo:
        raise ConfigError(
            f"{option} carries a user or password.",
            next_step="Give the address alone; secrets go into the environment.",
        )
    if parsed.scheme not in ("http", "https") or not parsed.host or parsed.query or parsed.fragment:
        raise ConfigError(
            f"{option} {without_secrets(url)!r} is not an http or https address.",
            next_step=f"Give it as in {option} https://grafana.example.com.",
        )
    return url.rstrip("/")


class Api:
    """A server under `base`. `seconds` bounds each request; `hints` say by status what to do, over the general words.
    Raises ConfigError for a header that cannot be sent."""

    def __init__(
        self,
        what: str,
        base: str,
        *,
        headers: Mapping[str, str],
        seconds: float,
        hints: Mapping[int, str],
        auth: tuple[str, str] | None = None,
    ) -> None:
        self.what, self.base, self.hints, self.seconds = what, base, hints, seconds
        for name, value in headers.items():
            if not value.isascii() or not value.isprintable():
                raise ConfigError(
                    f"The value for {name} has characters that a header cannot carry.",
                    next_step="Look for a line break or a quote that came along when it was copied.",
                )
        self._client = httpx.Client(headers=dict(headers), timeout=seconds, auth=auth, follow_redirects=False)

    def __enter__(self) -> Api:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def send(self, method: str, path: str, *, accept: tuple[int, ...] = (200,), **kwargs: Any) -> httpx.Response:
        """The answer to `method` on `path`, its status one of `accept`. Raises ServiceError."""
        url = self.base + path
        end = time.monotonic() + self.seconds
        try:
            with self._client.stream(method, url, **kwargs) as answer:
                body = bytearray()
                for part in answer.iter_bytes():
                    body += part
                    if time.monotonic() > end:  # the client's own limit holds for each read only
                        raise httpx.ReadTimeout("")
                    if len(body) > MAX_BYTES:
                        raise ServiceError(
                            f"{url} answers with more than {MAX_BYTES >> 20} MiB.",
                            next_step=f"Check that {self.base} is {self.what}.",
                        )
                whole = httpx.Response(answer.status_code, headers=_plain(answer.headers), content=bytes(body))
        except httpx.TimeoutException:
            raise ServiceError(
                f"{url} does not answer within {self.seconds:g} s.",
                next_step=f"Check that {self.what} is up, or give a longer --timeout.",
            ) from None
        except httpx.HTTPError as error:
            raise ServiceError(
                f"{url} cannot be reached: {error}.", next_step=f"Check the address, and that {self.what} is up."
            ) from None
        if whole.status_code not in accept:
            raise ServiceError(f"{url}: {whole.status_code} {_said(whole)}".rstrip(), next_step=self._hint(whole))
        return whole

    def json(self, method: str, path: str, *, accept: tuple[int, ...] = (200,), **kwargs: Any) -> tuple[int, Any]:
        """(status, parsed body). Raises ServiceError also for a body that is not JSON."""
        answer = self.send(method, path, accept=accept, **kwargs)
        try:
            return answer.status_code, answer.json()
        except ValueError:
            raise ServiceError(
                f"{self.base}{path} answers with something that is not JSON.",
                next_step=f"Check that {self.base} is {self.what}, and not a proxy or a login page.",
            ) from None

    def _hint(self, answer: httpx.Response) -> str:
        status = answer.status_code
        if status in self.hints:
            return self.hints[status]
        if 300 <= status < 400:
            return f"Give the address that it redirects to: {answer.headers.get('location', 'it names none')}."
        if status == 404:
            return f"Check that {self.base} is {self.what}; a path such as /grafana may be missing."
        if status == 429 or status >= 500:
            return "Try again; if it stays, look at the server's own log."
        return f"Look at the log of {self.what}."


def _plain(headers: httpx.Headers) -> dict[str, str]:
    """Headers for a body that is decoded already."""
    return {
        k: v for k, v in headers.items() if k.lower() not in ("content-encoding", "content-length", "transfer-encoding")
    }


def _said(answer: httpx.Response) -> str:
    """What the server says about its refusal, on one line of at most 300 characters."""
    text = answer.text
    try:
        body = answer.json()
    except ValueError:
        body = None
    if isinstance(body, dict):
        text = next((str(body[key]) for key in ("message", "error", "title") if body.get(key)), text)
    elif "<html" in text.lower():
        text = answer.reason_phrase
    return " ".join(text.split())[:300]
