"""A store with a synthetic day in it, shared by the tests of the app."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pandas as pd
import pytest

from observability.app.view import View
from observability.store.embedded import EmbeddedStore, create
from tests.app import synthetic
from tests.app.browser import Browser
from tests.conftest import wait_for

#: So long after `end` the store has rows.
STORED_SECONDS = 3600


@pytest.fixture(scope="session")
def end() -> float:
    """The end of what happens in the store, Unix seconds, ten minutes ahead."""
    return time.time() // 60 * 60 + 600


@pytest.fixture(scope="session")
def rows(end: float) -> dict[str, pd.DataFrame]:
    """Three hours of every signal, a point a minute."""
    return synthetic.all_series(np.arange(end - 3 * 3600, end + 1, 60.0))


@pytest.fixture(scope="session")
def store_path(tmp_path_factory: pytest.TempPathFactory, rows: dict[str, pd.DataFrame], end: float) -> Path:
    """A store file that holds `rows`, the last of them for another hour, so that it stays fresh while tests run, and forecasts made every
    ten minutes; tests only read it."""
    path = tmp_path_factory.mktemp("store") / "history.db"
    store = create(path)
    later = pd.to_timedelta(np.arange(1, STORED_SECONDS // 60 + 1), unit="min")
    for name, frame in rows.items():
        last = frame[frame["time"] == pd.Timestamp(end, unit="s", tz="UTC")]
        store.append(name, pd.concat([frame, *(last.assign(time=last["time"] + each) for each in later)]))
    store.mark_simulated(end - 3 * 3600, end - 2400)
    store.add_forecasts(synthetic.forecasts(rows, time.time()))
    return path


@pytest.fixture(scope="session")
def source(store_path: Path) -> EmbeddedStore:
    return EmbeddedStore(store_path)


@pytest.fixture(scope="session")
def view(end: float) -> View:
    """The newest hour in the store."""
    return View(synthetic.MODEL, end - 3600, end, 60.0)


Start = Callable[..., str]


@pytest.fixture(scope="session")
def start_app() -> Iterator[Start]:
    """Runs `kvscope app` on a source, with further options; returns its address. Ends every app after the tests."""
    started: list[subprocess.Popen[bytes]] = []

    def start(source: Path | str, *options: str) -> str:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        argv = (
            sys.executable,
            "-m",
            "observability.cli",
            "app",
            "--source",
            str(source),
            "--port",
            str(port),
            *options,
        )
        started.append(subprocess.Popen(argv, start_new_session=True))
        url = f"http://127.0.0.1:{port}"
        wait_for(lambda: httpx.get(f"{url}/_stcore/health").status_code == 200, 60, "the app answers")
        return url

    yield start
    for process in started:
        process.terminate()
    for process in started:
        assert process.wait(timeout=15) == 0, "the app ends by itself when told to"


@pytest.fixture(scope="session")
def app_url(start_app: Start, store_path: Path) -> str:
    return start_app(store_path)


@pytest.fixture(scope="session")
def browser(program: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One headless Chromium for all tests."""
    opened = Browser(program("chromium"), program("chromedriver"), tmp_path_factory.mktemp("chromium"))
    _opened.append(opened)
    yield opened
    _opened.remove(opened)
    opened.quit()


_opened: list[Browser] = []


@pytest.fixture(scope="module", autouse=True)
def leave_the_page() -> Iterator[None]:
    """After each file: a page that stays open refreshes itself for as long as other tests run."""
    yield
    for opened in _opened:
        opened.driver.get("about:blank")
