"""The pages in a real browser: charts with data, no error, both themes, both widths, and sources that come and go."""

from __future__ import annotations

import re
import time
from pathlib import Path
from urllib.parse import unquote

import httpx
import numpy as np
import pandas as pd
import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from observability.app.settings import PLOTLY
from observability.app.units import quantity
from observability.signals import BY_NAME
from observability.store.embedded import create
from tests.app import synthetic
from tests.app.browser import Browser
from tests.app.conftest import Start
from tests.conftest import wait_for

#: Page in the URL -> number of its charts.
CHARTS = {"": 8, "kv-cache": 13, "p99": 8, "quantization": 7, "batching": 16, "hardware": 7, "forecast": 8}
#: Cards that a store of signals alone has nothing for.
ABSENT = {"p99": 1}
NAMES = {page: page or "now" for page in CHARTS}


def check(browser: Browser, page: str, theme: str, width: int) -> None:
    """Every chart of the open page has data, nothing failed, it is in `theme` and as wide as the window."""
    browser.picture(f"app-{NAMES[page]}-{theme}-{width}")
    wait_for(lambda: len(browser.charts()) == CHARTS[page], 60, "every chart stands once")
    charts = browser.charts()
    for chart in charts:
        assert chart["traces"], chart
        assert max(chart["traces"]) >= 2, f"{chart['card']} is empty: {chart['traces']}"
    assert browser.count(".placeholder.failed") == 0
    assert browser.count(".placeholder.absent") == ABSENT.get(page, 0)
    assert browser.count(".stException, [data-testid=stException], .banner.error") == 0
    assert browser.console_errors() == []
    assert browser.overflow()[0] <= 0, "the page scrolls sideways"
    assert browser.status() == "live"
    assert is_dark(browser) == (theme == "dark")


def is_dark(browser: Browser) -> bool:
    background = browser.driver.execute_script(
        "return getComputedStyle(document.querySelector('.stApp')).backgroundColor"
    )
    return sum(map(int, background[4:-1].split(","))) < 380


@pytest.mark.parametrize("page", CHARTS)
def test_every_page_draws_all_its_charts_with_data_and_no_error_in_both_themes(
    browser: Browser, app_url: str, page: str
) -> None:
    browser.look(1280, 800, "light")
    browser.open(f"{app_url}/{page}", CHARTS[page])
    time.sleep(0.4)  # the last animation
    check(browser, page, "light", 1280)
    browser.look(1920, 1080, "dark")
    wait_for(lambda: is_dark(browser), 10, "the page follows the system's theme")
    time.sleep(0.7)  # charts follow the width
    check(browser, page, "dark", 1920)


@pytest.fixture(scope="module")
def now_page(browser: Browser, app_url: str) -> Browser:
    """The browser with the page Now open."""
    browser.look(1280, 800, "light")
    browser.open(app_url, CHARTS[""])
    return browser


def test_now_is_one_screen_at_1280_by_800(now_page: Browser) -> None:
    assert now_page.overflow()[1] <= 0


def test_nothing_is_loaded_from_outside_the_app(now_page: Browser, app_url: str) -> None:
    loaded = now_page.driver.execute_script("return performance.getEntriesByType('resource').map(e => e.name)")
    assert loaded
    assert [name for name in loaded if not name.startswith((app_url, "data:", "blob:"))] == []


def test_the_chart_library_is_kept_by_browsers_and_charts_say_what_they_answer(now_page: Browser, app_url: str) -> None:
    answer = httpx.get(f"{app_url}/kvscope/{PLOTLY.name}")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/javascript")
    assert "immutable" in answer.headers["cache-control"]
    assert answer.text == PLOTLY.read_text()
    named = now_page.driver.execute_script("return [...document.querySelectorAll('.chart')].map(e => e.ariaLabel)")
    assert "Is the KV pool full?" in named
    assert all(named)


def test_menus_stand_at_the_right_of_their_card_and_leave_the_question_its_room(now_page: Browser) -> None:
    gaps = now_page.driver.execute_script(
        """return [...document.querySelectorAll('[class*="st-key-card-"]')].map(card => {
          const menu = card.querySelector('button.menu').getBoundingClientRect();
          const text = card.querySelector('h3.question');
          return [card.getBoundingClientRect().right - menu.right, menu.left - text.getBoundingClientRect().right];
        })"""
    )
    assert len(gaps) == 10
    for edge, beside in gaps:
        assert 0 <= edge < 20, gaps
        assert -1 <= beside < 20, gaps


def test_hover_says_the_value_and_its_unit(now_page: Browser) -> None:
    said = now_page.driver.execute_script(
        """const gd = document.querySelector('.st-key-card-kv-usage .js-plotly-plot');
        const at = gd._fullData[0].y.length - 1;
        Plotly.Fx.hover(gd, [{curveNumber: 0, pointNumber: at}]);
        return [gd._fullData[0].y[at], gd.querySelector('.hoverlayer').textContent]"""
    )
    shown = re.search(r"([\d.,]+) %", said[1])
    assert shown, said
    assert float(shown[1]) == pytest.approx(said[0], rel=1e-4)


def test_simulated_time_is_named_in_the_header_and_in_the_charts(now_page: Browser) -> None:
    assert now_page.count(".pill.virtual") == 1
    assert "simulated (virtual time)" in now_page.text()


_MENU = "[data-testid=stPopoverBody]"


def press_menu(page: Browser, card: str) -> None:
    """Presses the button of a card's menu as a mouse does."""
    ActionChains(page.driver).click(
        page.driver.find_element(By.CSS_SELECTOR, f".st-key-card-{card} button.menu")
    ).perform()


def open_menu(page: Browser) -> None:
    """Opens the menu of the card on KV use, unless it is open."""
    if not page.count("button.save"):
        press_menu(page, "kv-usage")
    wait_for(lambda: page.count("button.save") == 2, 30, "the menu of the card")


def menu_says(page: Browser) -> str:
    return str(page.driver.execute_script(f"return document.querySelector('{_MENU}')?.innerText ?? ''"))


def test_the_query_of_a_chart_is_shown(now_page: Browser) -> None:
    open_menu(now_page)
    wait_for(lambda: 'kvscope_kv_blocks{state="active"}' in now_page.text(), 10, "the query")
    assert "Download CSV" in now_page.text()
    assert "Download Parquet" in now_page.text()


def test_a_chart_is_saved_as_a_picture_by_the_browser(now_page: Browser, tmp_path: Path) -> None:
    where = {"behavior": "allow", "downloadPath": str(tmp_path)}
    now_page.driver.execute_cdp_cmd("Browser.setDownloadBehavior", where)
    for kind in ("png", "svg"):
        open_menu(now_page)
        now_page.driver.execute_script(f"document.querySelector('button.save[data-format={kind}]').click()")
        wait_for((tmp_path / f"kvscope-kv-usage.{kind}").exists, 30, f"{kind}: {now_page.console_errors()}")
    assert (tmp_path / "kvscope-kv-usage.png").read_bytes().startswith(b"\x89PNG")
    assert "Is the KV pool full?" in (tmp_path / "kvscope-kv-usage.svg").read_text()


def test_numbers_on_the_page_are_those_of_the_rows(now_page: Browser, rows: dict[str, pd.DataFrame]) -> None:
    """The figure of KV use is the newest value that a refresh could have read, computed from the written rows."""
    shown = now_page.driver.find_element(By.CSS_SELECTOR, ".st-key-card-kv-usage .figure b").text
    frame = rows["model:kvscope_kv_usage:ratio"]
    now = pd.Timestamp(time.time(), unit="s", tz="UTC")
    recent = frame[(frame["time"] <= now) & (frame["time"] > now - pd.Timedelta(minutes=10))]
    assert shown in {quantity(value, "ratio") for value in recent["value"]}


def apart(page: Browser, card: str) -> float:
    """Pixels between the open menu and the button of a card."""
    return float(
        page.driver.execute_script(
            f"""const menu = document.querySelector('{_MENU}').getBoundingClientRect();
            const button = document.querySelector('.st-key-card-{card} button.menu').getBoundingClientRect();
            return Math.max(menu.top - button.bottom, button.top - menu.bottom, menu.left - button.right, button.left - menu.right)"""
        )
    )


def test_a_menu_that_a_mouse_closed_is_opened_by_keys(browser: Browser, app_url: str) -> None:
    browser.open(f"{app_url}/?range=1h", 8)
    press_menu(browser, "busy")
    wait_for(lambda: "does not idle" in menu_says(browser), 30, "the menu")
    ActionChains(browser.driver).click(browser.driver.find_element(By.CSS_SELECTOR, f"{_MENU} p")).perform()
    ActionChains(browser.driver).send_keys(Keys.ESCAPE).perform()
    wait_for(lambda: not menu_says(browser), 30, "Escape closes it")
    browser.driver.execute_script("document.querySelector('.st-key-card-busy button.menu').focus()")
    ActionChains(browser.driver).send_keys(Keys.ENTER).perform()
    wait_for(lambda: "does not idle" in menu_says(browser), 30, "Enter opens it")
    ActionChains(browser.driver).send_keys(Keys.ESCAPE).perform()
    wait_for(lambda: not menu_says(browser), 30, "Escape closes it")


def test_a_press_while_a_page_is_being_read_opens_the_menu_once_it_is(browser: Browser, app_url: str) -> None:
    browser.open(f"{app_url}/?range=24h", 8)
    browser.driver.execute_script(
        """document.querySelector('header a[href*=batching]').click();
        window.pressed = '';
        const look = setInterval(() => {
          const button = location.pathname === '/batching' && document.querySelector('.st-key-card-efficiency button.menu');
          if (!button) return;
          clearInterval(look);
          button.click();
          window.pressed = document.querySelector('.st-key-status .pill:last-child').className;
        }, 5)"""
    )
    wait_for(
        lambda: "reading" in browser.driver.execute_script("return window.pressed"), 30, "a press while it is read"
    )
    wait_for(lambda: "Download CSV" in menu_says(browser), 30, "the menu")


def test_the_one_menu_opens_at_whichever_card_is_asked_and_closes_again(browser: Browser, app_url: str) -> None:
    browser.open(f"{app_url}/?range=1h", 8)
    for card, says in (("kv-usage", "share of the pool"), ("busy", "does not idle"), ("kv-usage", "share of the pool")):
        press_menu(browser, card)  # while that of the card before is open
        wait_for(lambda says=says: says in menu_says(browser), 30, f"the menu of {card}")
        wait_for(lambda card=card: apart(browser, card) < 40, 10, f"it stands at {card}")  # type: ignore[misc]
    browser.look(1920, 1080, "light")
    wait_for(lambda: apart(browser, "kv-usage") < 40, 10, "the menu follows its button")
    browser.look(1280, 800, "light")
    wait_for(lambda: apart(browser, "kv-usage") < 40, 10, "and back")
    press_menu(browser, "kv-usage")
    wait_for(lambda: not menu_says(browser), 30, "the menu closes by the button that opened it")
    time.sleep(1)  # and does not come back
    assert not menu_says(browser)
    ActionChains(browser.driver).click(
        browser.driver.find_element(By.CSS_SELECTOR, "header a[href*=hardware]")
    ).perform()
    wait_for(lambda: browser.count(".st-key-card-gpu-health button.menu") == 1, 60, "another page")
    wait_for(lambda: browser.status() not in ("", "reading"), 60, "it is read")
    press_menu(browser, "gpu-health")
    wait_for(lambda: "penalties" in menu_says(browser), 30, "a menu of the other page")


def test_hostile_addresses_are_ordinary_pages(browser: Browser, app_url: str) -> None:
    hostile = "%3Cscript%3Ewindow.pwned%3D1%3C%2Fscript%3E"
    browser.open(
        f"{app_url}/p99?range={hostile}&model={hostile}&tz={hostile}&end=9999&vs={hostile}&q={hostile}&of=../../etc",
        CHARTS["p99"],
    )
    assert browser.driver.execute_script("return window.pwned") is None
    assert "<script>" not in browser.text()
    assert browser.count(".placeholder.failed, .banner.error") == 0


def test_range_zone_and_choices_are_in_the_url_and_hold_on_every_page(browser: Browser, app_url: str) -> None:
    browser.look(1280, 800, "light")
    browser.open(f"{app_url}/?range=15m&tz=Asia/Kolkata", CHARTS[""])
    for name, path in (("KV cache", "kv-cache"), ("P99", "p99")):
        browser.driver.find_element(By.XPATH, f"//header//a[contains(., '{name}')]").click()
        wait_for(lambda path=path: len(browser.charts()) == CHARTS[path] and browser.status() == "live", 90, name)  # type: ignore[misc]
        assert browser.driver.current_url.split("?")[0] == f"{app_url}/{path}"
        assert {"range=15m", "tz=Asia/Kolkata"} <= set(unquote(browser.driver.current_url).split("?")[1].split("&"))
    browser.driver.find_element(By.XPATH, "//button[.='6h']").click()
    wait_for(lambda: "range=6h" in browser.driver.current_url, 10, "the range in the URL")


def test_a_link_shows_the_same_hours_in_every_time_zone(browser: Browser, app_url: str, end: float) -> None:
    """A colleague in another zone sees what was sent; another clock leaves the end of the range where it was."""
    axis = "const a = document.querySelector('.st-key-card-requests .js-plotly-plot')._fullLayout.xaxis; return [a.range[0].slice(0, 16), a.range[1].slice(0, 16)]"
    until = pd.Timestamp(end // 60 * 60 - 3600, unit="s", tz="UTC")

    def hours(zone: str) -> list[str]:
        local = until.tz_convert(zone).tz_localize(None)
        return [f"{at:%Y-%m-%d %H:%M}" for at in (local - pd.Timedelta(hours=1), local)]

    def shown() -> list[str]:
        return [each.replace("T", " ") for each in browser.driver.execute_script(axis)]

    berlin = f"{app_url}/?range=1h&tz=Europe/Berlin&end={until.tz_convert('Europe/Berlin'):%Y-%m-%dT%H:%M}"
    try:
        for zone in ("Europe/Berlin", "America/New_York"):
            browser.driver.execute_cdp_cmd("Emulation.setTimezoneOverride", {"timezoneId": zone})
            browser.open(berlin, CHARTS[""])
            assert shown() == hours("Europe/Berlin")
        for zone in ("America/New_York", "UTC"):
            browser.driver.find_element(By.XPATH, f"//button[.='{zone}']").click()
            wait_for(lambda zone=zone: shown() == hours(zone), 30, f"the same hours on the clock of {zone}")  # type: ignore[misc]
            link = unquote(browser.driver.current_url)
            assert f"end={until.tz_convert(zone):%Y-%m-%dT%H:%M}" in link
    finally:
        browser.driver.execute_cdp_cmd("Emulation.setTimezoneOverride", {"timezoneId": ""})


def test_a_line_that_is_left_alone_is_shown_though_it_was_hidden(
    browser: Browser, start_app: Start, tmp_path: Path
) -> None:
    store, begin = create(tmp_path / "store.db"), time.time()

    def write(at: np.ndarray, **values: float) -> None:
        when = pd.to_datetime(at, unit="s", utc=True)
        for kind, value in values.items():
            store.append(
                BY_NAME["model_kind:kvscope_step_duration_seconds:p99_5m"].name,
                pd.DataFrame({"time": when, "model": "m", "kind": kind, "value": value}),
            )
        store.append("model:kvscope_kv_usage:ratio", pd.DataFrame({"time": when, "model": "m", "value": 0.5}))

    write(np.arange(begin - 7200, begin - 3700, 15.0), decode=0.02)  # no more in the last hour
    write(np.arange(begin - 7200, begin + 600, 15.0), prefill=0.05)
    browser.open(f"{start_app(tmp_path / 'store.db')}/batching?range=6h", 1)
    card = ".st-key-card-step-duration"
    wait_for(lambda: browser.count(f"{card} .names button") == 2, 30, "both have a name")
    shown = f"return document.querySelector('{card} .js-plotly-plot')._fullData.map(t => [t.name, t.visible])"
    browser.driver.execute_script(
        f"[...document.querySelectorAll('{card} .names button')].find(b => b.innerText === 'prefill').click()"
    )
    wait_for(lambda: ["prefill", "legendonly"] in browser.driver.execute_script(shown), 10, "it is hidden")
    browser.driver.find_element(By.XPATH, "//button[.='1h']").click()
    wait_for(lambda: browser.driver.execute_script(shown) == [["prefill", True]], 30, "the one that is left is drawn")
    assert browser.count(f"{card} .names button") == 0


#: By card: what the buttons over its chart say, and what Plotly's own legend of the same chart says.
_LEGENDS = """
const done = arguments[0], out = {};
(async () => {
  for (const gd of document.querySelectorAll('.js-plotly-plot')) {
    const card = gd.closest('[class*="st-key-card-"]'), copy = document.createElement('div');
    document.body.append(copy);
    await Plotly.newPlot(copy, gd.data, {...gd.layout, showlegend: undefined, height: 900, width: 1200});
    out[card.className.match(/st-key-card-(\\S+)/)[1]] = [[...card.querySelectorAll('.names button')].map(b => b.innerText), [...copy.querySelectorAll('.legendtext')].map(t => t.textContent)];
    copy.remove();
  }
  done(out);
})();
"""


@pytest.mark.parametrize("page", ["kv-cache", "batching", "p99", "quantization", "forecast", "trends"])
def test_legends_name_what_plotly_would_name(browser: Browser, app_url: str, page: str) -> None:
    browser.look(1280, 800, "light")
    browser.open(f"{app_url}/{page}?range=24h&vs=yesterday", CHARTS.get(page, 4))
    legends = browser.driver.execute_async_script(_LEGENDS)
    assert any(named for named, _ in legends.values())
    assert {card: named for card, (named, _) in legends.items()} == {
        card: wanted for card, (_, wanted) in legends.items()
    }


def test_a_name_hides_its_line_by_keys_and_a_double_click_shows_it_alone(browser: Browser, app_url: str) -> None:
    browser.open(f"{app_url}/kv-cache?range=1h", CHARTS["kv-cache"])
    names = "[...document.querySelectorAll('.st-key-card-hits-over-time .names button')]"
    shown = "return document.querySelector('.st-key-card-hits-over-time .js-plotly-plot')._fullData.filter(t => t.visible === true).map(t => t.name)"
    every = browser.driver.execute_script(shown)
    assert len(every) >= 3
    browser.driver.execute_script(f"{names}[1].focus()")
    ActionChains(browser.driver).send_keys(Keys.ENTER).perform()
    wait_for(lambda: browser.driver.execute_script(shown) == [every[0], *every[2:]], 10, "it is hidden")
    assert browser.driver.execute_script(f"return {names}.map(b => b.ariaPressed)")[:2] == ["true", "false"]
    ActionChains(browser.driver).send_keys(Keys.SPACE).perform()
    wait_for(lambda: browser.driver.execute_script(shown) == every, 10, "it is back")
    browser.driver.execute_script(f"{names}[1].click()")
    wait_for(lambda: len(browser.driver.execute_script(shown)) == len(every) - 1, 10, "it is hidden again")
    browser.driver.find_element(By.XPATH, "//button[.='6h']").click()
    wait_for(lambda: browser.driver.execute_script(shown) == every, 30, "another range shows all")
    assert set(browser.driver.execute_script(f"return {names}.map(b => b.ariaPressed)")) == {"true"}
    last = browser.driver.find_elements(By.CSS_SELECTOR, ".st-key-card-hits-over-time .names button")[-1]
    for wanted in (every[-1:], every):
        time.sleep(1)  # apart from the double click before
        ActionChains(browser.driver).double_click(last).perform()
        wait_for(lambda wanted=wanted: browser.driver.execute_script(shown) == wanted, 10, "a double click")  # type: ignore[misc]


HIT = "document.querySelector('.st-key-card-occupancy .js-plotly-plot')"
CHART = "document.querySelector('.st-key-card-evictions .js-plotly-plot')"


def test_a_source_that_fills_dies_and_returns_needs_no_reload_and_keeps_scroll_and_zoom(
    browser: Browser, start_app: Start, tmp_path: Path, rows: dict[str, pd.DataFrame]
) -> None:
    path, away = tmp_path / "store.db", tmp_path / "away.db"
    store = create(path)
    url, run = start_app(path), browser.driver.execute_script
    browser.look(1280, 800, "light")

    browser.open(f"{url}/kv-cache", 0)
    assert "Nothing has been recorded yet." in browser.text()
    assert "kvscope record" in browser.text()
    browser.picture("app-empty")
    run("window.marked = 1")

    charts = CHARTS["kv-cache"] - 1
    for name, frame in rows.items():
        if "prefetch" not in name:
            store.append(name, frame)
    wait_for(lambda: len(browser.charts()) == charts, 120, "the page fills by itself")
    model = browser.driver.find_element(By.CSS_SELECTOR, ".st-key-model input").get_attribute("value")
    assert model == synthetic.MODEL
    assert browser.count(".placeholder.absent") == 1, "what the source lacks is said"
    assert browser.count(".placeholder.failed") == 0
    browser.picture("app-partial")

    plot = browser.driver.find_element(By.CSS_SELECTOR, ".st-key-card-evictions .nsewdrag")
    run("arguments[0].scrollIntoView({block: 'center'})", plot)
    drag = ActionChains(browser.driver).move_to_element_with_offset(plot, -60, 0).click_and_hold()
    drag.move_by_offset(60, 0).move_by_offset(60, 0).release()
    spans = f"return {CHART}._fullLayout.xaxis.range.map(t => new Date(t).getTime())"
    whole = run(spans)
    drag.perform()
    wait_for(lambda: np.ptp(run(spans)) < 3000e3, 10, "the chart shows what was dragged over")
    dragged = run(spans)
    browser.driver.find_element(By.CSS_SELECTOR, ".st-key-card-occupancy .names button").click()
    hidden = f"return {HIT}._fullData.filter(t => t.visible === 'legendonly').map(t => t.name)"
    wait_for(lambda: run(hidden), 10, "a line is hidden by its name in the legend")
    named = run(hidden)
    run(f"window.lastTime = {CHART}._fullData[0].x0; document.querySelector('[data-testid=stMain]').scrollTop = 240")
    scroll = run("return document.querySelector('[data-testid=stMain]').scrollTop")
    assert scroll > 0

    path.rename(away)
    wait_for(lambda: browser.status() == "down", 120, "the page says that the source is gone")
    assert "There is no store at" in browser.text()
    assert browser.count(".banner.error[role=alert]") == 1
    assert len(browser.charts()) == charts, "what was last read is kept"
    browser.picture("app-source-gone", whole=False)

    away.rename(path)
    wait_for(lambda: browser.status() in ("live", "stale"), 120, "the page goes on by itself")
    wait_for(lambda: browser.count(".banner.error") == 0, 60, "the banner leaves")
    assert run("return window.marked") == 1, "the page was reloaded"
    assert abs(run("return document.querySelector('[data-testid=stMain]').scrollTop") - scroll) <= 2
    wait_for(lambda: run(f"return {CHART}._fullData[0].x0 !== window.lastTime"), 120, "the chart goes on")
    assert run(spans) == dragged, "the zoom is kept"
    assert run(hidden) == named, "what was hidden is kept"
    ActionChains(browser.driver).double_click(
        browser.driver.find_element(By.CSS_SELECTOR, ".st-key-card-evictions .nsewdrag")
    ).perform()
    wait_for(lambda: np.ptp(run(spans)) == 3600e3, 10, "a double click shows the whole range")
    assert run(spans)[1] > whole[1], "of now, not of when the chart was first drawn"
    height = run(f"return {CHART}._fullLayout.yaxis.range")
    top = run(f"return Math.max(...{CHART}._fullData[0].y.filter(Number.isFinite))")
    assert height[0] == 0
    assert height[1] >= top
