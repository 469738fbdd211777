"""Runs the app in this process until it is told to stop: checks the source and the port first, then hands over to Streamlit."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from streamlit.web import bootstrap

from observability.app import settings
from observability.app.endpoints import check_endpoint
from observability.store.open import open_source
from observability.supervise import check_port_free
from observability.tls import Tls


def serve(source: str, host: str, port: int, *, endpoints: Sequence[str] = (), tls: Tls | None = None) -> None:
    """Serves the pages over `source` on host:port; returns after SIGTERM or SIGINT. `endpoints`: what the page Engines looks at.

    Raises StoreError when the source cannot be opened, ConfigError for an endpoint that is no address and ServiceError when the port is taken.
    """
    open_source(source)
    for url in endpoints:
        check_endpoint(url)
    check_port_free(host, port, "the app")
    os.environ[settings.SOURCE_VARIABLE] = source
    os.environ[settings.ENDPOINTS_VARIABLE] = " ".join(endpoints)
    options = settings.options(host, port, tls)
    bootstrap.load_config_options(options)
    bootstrap.run(str(Path(__file__).with_name("main.py")), False, [], options)
