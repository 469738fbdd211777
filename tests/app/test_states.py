"""Every page in every state of its source, as a reader sees it: empty, stale, gone and back, and with an engine that cannot feed all."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from exporters.adapters.vllm_plugin import CAPABILITIES
from exporters.vllm.capabilities import families
from observability.app import absence, queries
from observability.app.pages import PAGES
from observability.signals import BY_NAME, SIGNALS
from observability.store.embedded import create
from tests.app import synthetic
from tests.app.browser import Browser
from tests.app.conftest import Start
from tests.conftest import wait_for

PATHS = [page.path for page in PAGES]
#: What these show does not come from the source.
WITHOUT_DATA = {page.path for page in PAGES if page.without_data}


def settle(browser: Browser, address: str, status: set[str]) -> str:
    """Opens a page, waits until its header says one of `status` and its text stays; the text."""
    browser.look(1280, 800, "light")
    browser.open(address, 0)
    wait_for(lambda: browser.status() in status, 60, f"{address} is {status}, not {browser.status()!r}")
    wait_for(lambda: browser.count("[class*='st-key-card-'], .banner") > 0, 60, "the page is drawn")
    text = ""
    for _ in range(100):
        before, text = text, browser.text()
        if text == before:
            return text
        time.sleep(0.3)
    raise AssertionError(f"{address} never came to rest")


@pytest.fixture(scope="module")
def empty_url(start_app: Start, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("empty") / "store.db"
    create(path)
    return start_app(path)


@pytest.mark.parametrize("page", PATHS)
def test_with_an_empty_source_every_page_says_what_to_do(browser: Browser, empty_url: str, page: str) -> None:
    text = settle(browser, f"{empty_url}/{page}", {"stale"})
    assert "No data yet" in text
    assert "Nothing has been recorded yet." in text
    assert "kvscope record" in text
    assert browser.count(".placeholder.failed, .banner.error, [data-testid=stException]") == 0
    assert browser.console_errors() == []
    assert (browser.count("[class*='st-key-card-']") > 0) == (page in WITHOUT_DATA)
    browser.picture(f"state-empty-{page or 'now'}", whole=False)


LAG = 1800


@pytest.fixture(scope="module")
def stale(start_app: Start, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, float]:
    """An app on a store whose newest value is half an hour old, and the time of that."""
    path, end = tmp_path_factory.mktemp("stale") / "store.db", time.time() // 60 * 60 - LAG
    store = create(path)
    for name, frame in synthetic.all_series(np.arange(end - 3 * 3600, end + 1, 60.0)).items():
        store.append(name, frame)
    return start_app(path), end


@pytest.mark.parametrize("page", PATHS)
def test_with_a_source_that_stopped_every_page_says_since_when_and_shows_what_there_was(
    browser: Browser, stale: tuple[str, float], page: str
) -> None:
    url, end = stale
    text = settle(browser, f"{url}/{page}", {"stale"})
    since = pd.Timestamp(end, unit="s", tz="UTC")
    assert f"Stale since {since:%H:%M:%S}" in text
    assert f"Nothing new since {since:%-d %b %H:%M:%S}" in text
    assert browser.count(".placeholder.failed, .banner.error, [data-testid=stException]") == 0
    if page not in WITHOUT_DATA | {"forecast", "trends"}:  # these need forecasts, and a day
        assert browser.charts(), "what there was is shown"
    if page == "":
        assert browser.count(".verdict.met, .verdict.missed, .verdict.near") == 0, (
            "an objective is not judged by old data"
        )
    browser.picture(f"state-stale-{page or 'now'}", whole=False)


@pytest.fixture(scope="module")
def gone(start_app: Start, tmp_path_factory: pytest.TempPathFactory, rows: dict[str, pd.DataFrame]) -> tuple[str, Path]:
    """An app whose store can be taken away."""
    path = tmp_path_factory.mktemp("gone") / "store.db"
    store = create(path)
    for name, frame in rows.items():
        store.append(name, frame)
    return start_app(path), path


def test_when_the_source_goes_away_every_page_says_so_keeps_what_it_had_and_needs_no_reload(
    browser: Browser, gone: tuple[str, Path]
) -> None:
    url, path = gone
    away, run = path.with_name("away.db"), browser.driver.execute_script
    seen = {"", "hardware"}  # the pages that were open before
    charts = {}
    for page in sorted(seen):
        settle(browser, f"{url}/{page}", {"live"})
        charts[page] = len(browser.charts())
    path.rename(away)
    for page in PATHS:
        text = settle(browser, f"{url}/{page}", {"down"})
        assert "There is no store at" in text
        assert "no reload is needed" in text
        assert browser.count(".banner.error[role=alert]") == 1
        assert browser.count("[data-testid=stException]") == 0
        if page in seen:
            assert len(browser.charts()) == charts[page], "what was last read is kept"
            assert browser.count(".placeholder.failed") == 0
        elif page not in WITHOUT_DATA:
            assert browser.count(".placeholder") > 0, "a card that has nothing says why"
        browser.picture(f"state-gone-{page or 'now'}", whole=False)
    run("window.marked = 1")
    away.rename(path)
    wait_for(lambda: browser.status() == "live" and browser.count(".banner.error") == 0, 120, "it goes on by itself")
    assert run("return window.marked") == 1, "the page was reloaded"


@pytest.fixture(scope="module")
def foreign(
    start_app: Start, tmp_path_factory: pytest.TempPathFactory, rows: dict[str, pd.DataFrame], end: float
) -> str:
    """An app on what the vLLM plug-in would have fed, as it says itself."""
    store = create(path := tmp_path_factory.mktemp("foreign") / "store.db")
    for name, frame in rows.items():
        if CAPABILITIES[name].status != "no" and name != absence.TOLD.name:
            store.append(name, frame)
    told = families(prefix_cache=True, frontend=True)
    times = pd.to_datetime(np.arange(end - 3600, end + 1, 60.0), unit="s", utc=True)
    store.append(
        absence.TOLD.name,
        pd.DataFrame(
            [(t, synthetic.MODEL, "vllm_plugin", name, status, reason, 1.0)
             for t in times for name, (status, reason) in told.items()],
            columns=["time", *absence.TOLD.by, "value"],
        ),
    )  # fmt: skip
    return start_app(path)


#: A signal that the plug-in cannot feed, on each page that has one.
LACKED = {
    "kv-cache": "model_region:kvscope_kv_region_usage:ratio",
    "quantization": queries.QUANT_ERROR.name,
    "batching": "model:kvscope_limit_batched_tokens:min",
}


@pytest.mark.parametrize("page", PATHS)
def test_what_a_foreign_engine_cannot_feed_is_said_with_its_reason_and_the_rest_is_shown(
    browser: Browser, foreign: str, page: str
) -> None:
    text = settle(browser, f"{foreign}/{page}", {"live"})
    assert browser.count(".placeholder.failed, .banner.error, [data-testid=stException]") == 0
    if page in LACKED:
        assert CAPABILITIES[LACKED[page]].status == "no"
        assert f"This engine cannot feed it: {CAPABILITIES[LACKED[page]].reason}" in text
    if page in ("", "p99", "kv-cache", "batching"):
        assert browser.charts()
    browser.picture(f"state-partial-{page or 'now'}", whole=False)


def test_the_lacked_signals_are_signals() -> None:
    assert set(LACKED.values()) <= set(BY_NAME)
    assert len(SIGNALS) > len([name for name in CAPABILITIES if CAPABILITIES[name].status == "no"]) > 0
