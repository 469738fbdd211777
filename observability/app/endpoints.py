"""Looks of `kvscope doctor` at the endpoints that the app was started with, made beside the pages: no page waits for one.

Only these addresses are ever asked; nothing that a viewer types or that a URL holds becomes one.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import streamlit as st

from exporters.adapters.doctor import Report, examine
from exporters.adapters.endpoint import Endpoint, Finding, without_secrets
from observability.app.settings import ENDPOINT_TOKEN_VARIABLE, ENDPOINTS_VARIABLE

log = logging.getLogger(__name__)
#: A look that is older is renewed when somebody opens the page.
RENEW_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Look:
    """The newest look at one endpoint. `report` is None until the first one is over; `at` is the Unix time at which it was."""

    url: str
    report: Report | None = None
    at: float = 0.0


class EndpointWatch:
    """Looks at `urls` in threads of its own, each at most once at a time."""

    def __init__(
        self, urls: Sequence[str], look: Callable[[str], Report], *, clock: Callable[[], float] = time.time
    ) -> None:
        self._urls, self._look, self._clock = tuple(urls), look, clock
        self._found = {url: Look(without_secrets(url)) for url in urls}
        self._busy: set[str] = set()
        self._lock = threading.Lock()

    def looks(self) -> list[Look]:
        """What is known now, in the order of the endpoints; those that are old are looked at again meanwhile."""
        with self._lock:
            due = [
                url
                for url in self._urls
                if url not in self._busy and self._clock() - self._found[url].at >= RENEW_SECONDS
            ]
            self._busy.update(due)
            found = [self._found[url] for url in self._urls]
        for url in due:
            threading.Thread(target=self._renew, args=(url,), name="endpoint look", daemon=True).start()
        return found

    def _renew(self, url: str) -> None:
        shown = without_secrets(url)
        try:
            report = self._look(url)
        except Exception as error:
            log.exception("look at %s failed", shown)
            failed = Finding("error", "look_failed", f"The look at {shown} failed: {type(error).__name__}.", "The log of the app has the reason.")  # fmt: skip
            report = Report(shown, findings=(failed,))
        with self._lock:
            self._found[url] = Look(shown, report, self._clock())
            self._busy.discard(url)


def configured() -> tuple[str, ...]:
    """The endpoints that this process was started for."""
    return tuple(os.environ.get(ENDPOINTS_VARIABLE, "").split())


def check_endpoint(url: str) -> None:
    """Raises ConfigError for what is no address."""
    Endpoint(url)


@st.cache_resource(show_spinner=False)
def watch() -> EndpointWatch:
    """The one of this process."""
    token = os.environ.get(ENDPOINT_TOKEN_VARIABLE)
    return EndpointWatch(configured(), lambda url: examine(url, token=token))
