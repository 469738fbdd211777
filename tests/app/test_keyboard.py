"""The app without a mouse: Tab reaches every control, and Enter, arrows and Escape do what they do elsewhere."""

from __future__ import annotations

import time

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from tests.app.browser import Browser
from tests.conftest import wait_for

#: What has the focus, in words: the part of the page, and what a reader would call it.
_FOCUS = """
const e = document.activeElement;
if (!e || e === document.body) return ['', ''];
const part = e.closest('header, [class*="st-key-controls"], [class*="st-key-card-"], [class*="st-key-"]');
const name = part ? (part.tagName === 'HEADER' ? 'header' : (part.className.match(/st-key-(\\S+)/) || [])[1]) : '';
return [name, (e.innerText || e.getAttribute('aria-label') || e.value || e.placeholder || '').trim()];
"""
#: Whether the element with the focus, or one around it, looks different from how it looks without.
_SHOWN = """
const e = document.activeElement, around = [e, e.parentElement, e.parentElement.parentElement];
const look = () => around.map(x => { const s = getComputedStyle(x); return [s.outlineStyle, s.outlineColor, s.boxShadow, s.borderColor, s.backgroundColor, s.color, s.opacity, s.textDecorationLine].join(); }).join();
const still = document.createElement('style');  // no transition: the look of now, at once
still.textContent = '* { transition: none !important }';
document.head.append(still);
const focused = look();
e.blur();
const without = look();
e.focus({focusVisible: true});
still.remove();
return focused !== without;
"""


CONTROLS = "a, button, input, select, textarea, [role=button], [role=radio], [role=spinbutton], [role=combobox]"
#: What the expanded button of a card says that it controls: the first download in there.
CONTROLLED = """return [...document.querySelectorAll('button.menu[aria-expanded="true"]')].map(
    button => document.getElementById(button.getAttribute("aria-controls")).querySelector('[data-testid="stDownloadButton"] button').innerText.trim()
)"""
#: The button of the menu of the card on KV use, as `focus` tells it.
KV_USAGE = "card-kv-usage", "Query, data, picture: Is the KV pool full?"
IN_MENU = "return document.activeElement.matches('[data-testid=stPopoverBody]')"
#: A fixed end: nothing refreshes under the walk.
END = time.strftime("%Y-%m-%dT%H:%M", time.gmtime())


def press(browser: Browser, *keys: str) -> None:
    ActionChains(browser.driver).send_keys(*keys).perform()


def focus(browser: Browser) -> tuple[str, str]:
    part, name = browser.driver.execute_script(_FOCUS)
    return str(part), str(name)


def walk(browser: Browser, most: int = 90) -> list[tuple[str, str]]:
    """What Tab comes by from the top of the page on, until it leaves the page or comes back."""
    browser.driver.execute_script("document.activeElement.blur(); window.scrollTo(0, 0)")
    seen: list[tuple[str, str]] = []
    for _ in range(most):
        press(browser, Keys.TAB)
        now = focus(browser)
        if now == ("", "") and seen:
            break
        if browser.driver.execute_script(
            f"return document.activeElement.matches('{CONTROLS}')"
        ):  # what only scrolls has no look
            assert browser.driver.execute_script(_SHOWN), f"{now} does not show that it has the focus"
        seen.append(now)
    return seen


@pytest.fixture(scope="module")
def page(browser: Browser, app_url: str) -> Browser:
    browser.look(1280, 800, "light")
    browser.open(f"{app_url}/?end={END}&range=1h", 0)
    return browser


def test_tab_reaches_pages_filters_and_the_menu_of_every_card(page: Browser) -> None:
    seen = walk(page)
    names = [name for _, name in seen]
    for wanted in ("Now", "P99", "KV cache", "15m", "UTC"):
        assert any(wanted in name for name in names), f"{wanted} is out of reach: {names}"
    cards = page.driver.execute_script(
        "return [...document.querySelectorAll('[class*=\"st-key-card-\"]')].map(e => e.className.match(/st-key-card-(\\S+)/)[1])"
    )
    assert cards
    for card in cards:
        assert any(part == f"card-{card}" and name.startswith("Query, data, picture: ") for part, name in seen), (
            f"the menu of {card} is out of reach"
        )


def put_focus(browser: Browser, element: str) -> None:
    """Gives `element` (JavaScript) the focus and sees that it stays there: a page that is still being drawn takes it away."""

    def held() -> bool:
        browser.driver.execute_script(f"{element}.focus()")
        time.sleep(0.5)
        return bool(browser.driver.execute_script(f"return document.activeElement === {element}"))

    wait_for(held, 30, f"{element} keeps the focus")


def test_a_range_is_chosen_and_a_menu_opened_and_closed_by_keys(page: Browser, app_url: str) -> None:
    page.open(f"{app_url}/?end={END}&range=1h", 0)
    put_focus(page, "[...document.querySelectorAll('.st-key-range button')].find(b => b.innerText.trim() === '6h')")
    press(page, Keys.ENTER)
    wait_for(lambda: "range=6h" in page.driver.current_url, 30, "the range of six hours")
    put_focus(page, "document.querySelector('.st-key-card-kv-usage button.menu')")
    press(page, Keys.ENTER)
    wait_for(lambda: "recorded as" in page.text(), 30, "the menu opens")
    wait_for(lambda: page.driver.execute_script(IN_MENU), 10, "the menu has the focus")
    assert page.driver.execute_script(CONTROLLED) == ["Download CSV"]
    for _ in range(20):
        press(page, Keys.TAB)
        if focus(page)[1] == "Download CSV":
            break
    assert focus(page)[1] == "Download CSV", "what the menu holds is out of reach"
    press(page, Keys.ESCAPE)
    wait_for(lambda: "recorded as" not in page.text(), 30, "the menu closes")
    wait_for(lambda: focus(page) == KV_USAGE, 10, "its button has the focus again")
    assert page.driver.execute_script(CONTROLLED) == []
    press(page, Keys.SPACE)
    wait_for(lambda: "recorded as" in page.text(), 30, "the menu opens once more")
    put_focus(page, "document.querySelector('.st-key-card-kv-usage button.menu')")
    press(page, Keys.ENTER)
    wait_for(lambda: "recorded as" not in page.text(), 30, "its button closes it")
    wait_for(lambda: focus(page) == KV_USAGE, 10, "and has the focus")
    press(page, Keys.ENTER)
    wait_for(lambda: "model:kvscope_kv_usage:ratio" in page.text(), 30, "the menu opens again")
    put_focus(page, "document.querySelector('.st-key-card-requests button.menu')")
    press(page, Keys.ENTER)
    wait_for(lambda: "model:kvscope_requests_received:rate5m" in page.text(), 30, "the menu of another card")
    wait_for(lambda: page.driver.execute_script(IN_MENU), 10, "has the focus")


def test_a_refresh_leaves_the_focus_where_it_is(page: Browser, app_url: str) -> None:
    page.open(f"{app_url}/?range=15m", 8)
    said = "return document.querySelector('.st-key-status').innerText + [...document.querySelectorAll('.js-plotly-plot')].map(g => g._fullData[0].x0)"
    for card in ("kv-usage", "changes"):  # words over a chart, and words alone
        put_focus(page, f"document.querySelector('.st-key-card-{card} button.menu')")
        before = page.driver.execute_script(said)
        wait_for(lambda before=before: page.driver.execute_script(said) != before, 60, "a refresh")  # type: ignore[misc]
        time.sleep(1)
        assert focus(page)[0] == f"card-{card}"


def test_a_page_is_opened_by_keys(page: Browser, app_url: str) -> None:
    put_focus(page, "[...document.querySelectorAll('header a')].find(a => a.innerText.includes('Hardware'))")
    press(page, Keys.ENTER)
    wait_for(lambda: page.driver.current_url.split("?")[0] == f"{app_url}/hardware", 30, "the page Hardware")
