"""The pages in a real browser: charts with data, no error, both themes, both widths, and sources that come and go."""

from __future__ import annotations

import time
from pathlib import Path

import pandas as pd
import pytest
from selenium.webdriver.common.by import By

from observability.store.embedded import create
from tests.app import synthetic
from tests.app.browser import Browser
from tests.app.conftest import Start
from tests.conftest import wait_for

#: Page in the URL -> number of its charts.
CHARTS = {"": 7, "kv-cache": 9, "p99": 7, "forecast": 3}
NAMES = {"": "now", "kv-cache": "kv-cache", "p99": "p99", "forecast": "forecast"}


@pytest.mark.parametrize(("width", "height", "theme"), [(1280, 800, "light"), (1920, 1080, "dark")])
@pytest.mark.parametrize("page", CHARTS)
def test_every_page_draws_all_its_charts_with_data_and_no_error(
    browser: Browser, app_url: str, page: str, width: int, height: int, theme: str
) -> None:
    browser.look(width, height, theme)
    browser.open(f"{app_url}/{page}", CHARTS[page])
    time.sleep(0.4)  # the last animation
    browser.picture(f"app-{NAMES[page]}-{theme}-{width}")
    charts = browser.charts()
    assert len(charts) == CHARTS[page]
    for chart in charts:
        assert chart["traces"], chart
        assert max(chart["traces"]) >= 2, f"{chart['card']} is empty: {chart['traces']}"
    assert browser.count(".placeholder") == 0
    assert browser.count(".stException, [data-testid=stException], .banner.error") == 0
    assert browser.console_errors() == []
    assert browser.overflow()[0] <= 0, "the page scrolls sideways"
    assert browser.status() == "live"
    background = browser.driver.execute_script(
        "return getComputedStyle(document.querySelector('.stApp')).backgroundColor"
    )
    assert (sum(map(int, background[4:-1].split(","))) > 380) == (theme == "light")


def test_now_is_one_screen_at_1280_by_800(browser: Browser, app_url: str) -> None:
    browser.look(1280, 800, "light")
    browser.open(app_url, CHARTS[""])
    assert browser.overflow()[1] <= 0


def test_nothing_is_loaded_from_outside_the_app(browser: Browser, app_url: str) -> None:
    browser.open(f"{app_url}/p99", CHARTS["p99"])
    loaded = browser.driver.execute_script("return performance.getEntriesByType('resource').map(e => e.name)")
    assert loaded
    assert [name for name in loaded if not name.startswith((app_url, "data:", "blob:"))] == []


def test_range_zone_and_choices_are_in_the_url_and_hold_on_every_page(browser: Browser, app_url: str) -> None:
    browser.look(1280, 800, "light")
    browser.open(f"{app_url}/?range=15m&tz=local", CHARTS[""])
    for name, path in (("KV cache", "kv-cache"), ("P99", "p99"), ("Forecast", "forecast")):
        browser.driver.find_element(By.XPATH, f"//header//a[contains(., '{name}')]").click()
        wait_for(lambda path=path: len(browser.charts()) == CHARTS[path] and browser.status() == "live", 30, name)  # type: ignore[misc]
        assert browser.driver.current_url.split("?")[0] == f"{app_url}/{path}"
        assert {"range=15m", "tz=local"} <= set(browser.driver.current_url.split("?")[1].split("&"))
    browser.driver.find_element(By.XPATH, "//button[.='6h']").click()
    wait_for(lambda: "range=6h" in browser.driver.current_url, 10, "the range in the URL")


def test_simulated_time_is_named_in_the_header_and_in_the_charts(browser: Browser, app_url: str) -> None:
    browser.open(app_url, CHARTS[""])
    assert browser.count(".pill.virtual") == 1
    assert "simulated (virtual time)" in browser.text()


def test_the_query_of_a_chart_is_shown(browser: Browser, app_url: str) -> None:
    browser.open(app_url, CHARTS[""])
    browser.driver.find_element(By.CSS_SELECTOR, ".st-key-card-kv-usage [data-testid=stPopover] button").click()
    wait_for(lambda: 'kvscope_kv_blocks{state="active"}' in browser.text(), 10, "the query")
    assert "Download CSV" in browser.text()


def test_a_source_that_dies_and_returns_needs_no_reload_and_moves_nothing(
    browser: Browser, start_app: Start, tmp_path: Path, rows: dict[str, pd.DataFrame]
) -> None:
    path = tmp_path / "store.db"
    store = create(path)
    for name, frame in rows.items():
        store.append(name, frame)
    browser.look(1280, 800, "light")
    browser.open(f"{start_app(path)}/kv-cache", CHARTS["kv-cache"])
    run = browser.driver.execute_script
    run("document.querySelector('[data-testid=stMain]').scrollTop = 240; window.marked = 1")
    scroll = run("return document.querySelector('[data-testid=stMain]').scrollTop")
    assert scroll > 0
    path.rename(tmp_path / "away.db")
    wait_for(lambda: browser.status() == "down", 40, "the page says that the source is gone")
    assert "There is no store at" in browser.text()
    assert browser.count(".banner.error[role=alert]") == 1
    assert len(browser.charts()) == CHARTS["kv-cache"], "what was last read is kept"
    browser.picture("app-source-gone", whole=False)
    (tmp_path / "away.db").rename(path)
    wait_for(lambda: browser.status() in ("live", "stale"), 40, "the page goes on by itself")
    wait_for(lambda: browser.count(".banner.error") == 0, 20, "the banner leaves")
    assert run("return window.marked") == 1, "the page was reloaded"
    assert abs(run("return document.querySelector('[data-testid=stMain]').scrollTop") - scroll) <= 2


def test_an_empty_store_says_what_to_do_and_a_partial_one_what_is_missing(
    browser: Browser, start_app: Start, tmp_path: Path, rows: dict[str, pd.DataFrame]
) -> None:
    store = create(tmp_path / "store.db")
    url = start_app(store.path)
    browser.look(1280, 800, "light")
    browser.open(url, 0)
    assert "Nothing has been recorded yet." in browser.text()
    assert "kvscope record" in browser.text()
    browser.picture("app-empty")
    for name, frame in rows.items():
        if "kv_usage" in name or "requests_" in name:
            store.append(name, frame)
    wait_for(lambda: len(browser.charts()) == 4, 40, "the page fills by itself")
    assert browser.count(".placeholder.absent") >= 4
    assert browser.count(".placeholder.failed") == 0
    browser.picture("app-partial")
    assert browser.driver.find_element(By.CSS_SELECTOR, ".st-key-model input").get_attribute("value") == synthetic.MODEL
