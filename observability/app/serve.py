"""Runs the app in this process until it is told to stop: checks the source and the port first, then hands over to Streamlit."""

from __future__ import annotations

import gc
import importlib
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import streamlit
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse
from starlette.routing import Route

from observability.app import memory, settings, traces
from observability.app.access import Guard, is_header_name
from observability.app.endpoints import check_endpoint
from observability.errors import ConfigError
from observability.store.open import open_source
from observability.supervise import check_port_free
from observability.tls import Tls


@dataclass(frozen=True, slots=True)
class Access:
    """Who may see the app: holders of `token`, users that a proxy names in `header`; anybody who reaches it where both are empty."""

    token: str = ""
    header: str = ""

    def __post_init__(self) -> None:
        if self.header and not is_header_name(self.header):
            raise ConfigError(
                f"{self.header!r} is not the name of a header.", next_step="Give one such as X-Forwarded-User."
            )


async def _plotly(request: Request) -> FileResponse:
    """plotly.js for chart.js: the part for charts with axes. Its name has the version, so browsers keep it, and what they compiled of it."""
    return FileResponse(
        settings.PLOTLY, media_type="text/javascript", headers={"cache-control": "private, max-age=31536000, immutable"}
    )


def _settle() -> None:
    """Loads the pages, and takes what is loaded by now out of garbage collection: Streamlit collects after each run of a script, and looking
    through all the libraries would hold up what that run sends for a tenth of a second."""
    memory.give_back()
    importlib.import_module("observability.app.pages")
    gc.collect()
    gc.freeze()


def serve(
    source: str, host: str, port: int, *, endpoints: Sequence[str] = (), tls: Tls | None = None, access: Access | None = None,
    trace_url: str = "",
) -> None:  # fmt: skip
    """Serves the pages over `source` on host:port; returns after SIGTERM or SIGINT. `endpoints`: what the page Engines looks at; `trace_url`:
    where a slow request's trace is shown, with {trace_id} in it.

    Raises StoreError when the source cannot be opened, ConfigError for an endpoint or trace address that is none and ServiceError when the
    port is taken.
    """
    open_source(source)
    for url in endpoints:
        check_endpoint(url)
    if trace_url:
        traces.check(trace_url)
    check_port_free(host, port, "the app")
    os.environ[settings.SOURCE_VARIABLE] = source
    os.environ[settings.ENDPOINTS_VARIABLE] = " ".join(endpoints)
    os.environ[settings.TRACE_URL_VARIABLE] = trace_url
    doors = (
        [Middleware(Guard, token=access.token, header=access.header)]
        if access and (access.token or access.header)
        else []
    )
    app = streamlit.App(
        Path(__file__).with_name("main.py"),
        middleware=doors,
        routes=[Route(f"/kvscope/{settings.PLOTLY.name}", _plotly)],
    )
    _settle()
    for each in (
        signal.SIGTERM,
        signal.SIGINT,
    ):  # raised again once the server has ended: that is how it is told to, not a failure
        signal.signal(each, lambda *_: None)
    app.run(config={name.replace("_", "."): value for name, value in settings.options(host, port, tls).items()})
