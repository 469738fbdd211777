"""A headless Chromium as the tests of the pages use it: open, wait until the charts are drawn, look at what they hold."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

ARTIFACTS = Path(__file__).resolve().parents[2] / "artifacts"
_FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --hide-scrollbars"
)
#: What every chart that is seen holds: its card, and for each trace the number of points that are numbers.
_CHARTS = """
return [...document.querySelectorAll('.js-plotly-plot')].filter(gd => gd.data && gd._fullLayout && gd.getClientRects().length).map(gd => ({
  card: (gd.closest('[class*="st-key-card-"]').className.match(/st-key-card-(\\S+)/) || [])[1],
  traces: gd.data.map(t => {
    const flat = a => Array.from(a || []).flatMap(v => (v && v.length !== undefined && typeof v !== 'string') ? Array.from(v) : [v]);
    const values = t.type === 'heatmap' ? t.z : t.orientation === 'h' ? t.x : t.y;
    return flat(values && values._inputArray ? values._inputArray : values).filter(v => v !== null && !Number.isNaN(v)).length;
  })}));
"""
#: On a deep link Streamlit looks for its server beside the page first; the browser logs these two misses.
_EXPECTED = re.compile(r"/_stcore/(health|host-config) .*404")


class Browser:
    """A Chromium of its own; `driver` is selenium's."""

    def __init__(self, chromium: str, chromedriver: str, profile: Path) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = chromium
        for flag in (*_FLAGS.split(), f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(chromedriver))
        self.driver.set_script_timeout(60)

    def quit(self) -> None:
        self.driver.quit()

    def look(self, width: int, height: int, theme: str) -> None:
        """Sets the size of the window in pixels and what the system asks for: light or dark."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        wanted = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", wanted)

    def open(self, url: str, charts: int, seconds: float = 60.0) -> float:
        """Opens `url`, returns the seconds until `charts` charts are drawn and the page is not being read any more."""
        self.driver.get_log("browser")
        begin = time.monotonic()
        self.driver.get(url)
        while len(self.charts()) < charts or self.status() in ("", "reading"):
            assert time.monotonic() - begin < seconds, (
                f"{url}: {len(self.charts())} of {charts} charts drawn; {self.text()[:500]}"
            )
            time.sleep(0.05)
        return time.monotonic() - begin

    def charts(self) -> list[dict[str, Any]]:
        """Every drawn chart: {card, traces: [points]}."""
        return self.driver.execute_script(_CHARTS)  # type: ignore[no-any-return]

    def status(self) -> str:
        """live, stale, down or reading, as the pill in the header says; empty before it is there."""
        script = "const p = document.querySelector('.st-key-status .pill:last-child'); return p ? p.className.split(' ')[1] : ''"
        return str(self.driver.execute_script(script))

    def text(self) -> str:
        return str(self.driver.execute_script("return document.body.innerText"))

    def count(self, selector: str) -> int:
        return int(self.driver.execute_script("return document.querySelectorAll(arguments[0]).length", selector))

    def console_errors(self) -> list[str]:
        """Errors that the page logged since it was opened."""
        entries = self.driver.get_log("browser")
        return [e["message"] for e in entries if e["level"] == "SEVERE" and not _EXPECTED.search(e["message"])]

    def overflow(self) -> tuple[int, int]:
        """Pixels by which the page is wider and taller than the window."""
        script = (
            "const m = document.querySelector('[data-testid=stMain]');"
            "return [Math.max(m.scrollWidth - m.clientWidth, document.body.scrollWidth - innerWidth), m.scrollHeight - m.clientHeight]"
        )
        wide, tall = self.driver.execute_script(script)
        return int(wide), int(tall)

    def picture(self, name: str, *, whole: bool = True) -> Path:
        """Keeps a screenshot as artifacts/NAME.png; `whole`: of all of the page, not only of what fits the window."""
        ARTIFACTS.mkdir(exist_ok=True)
        path = ARTIFACTS / f"{name}.png"
        if whole and (tall := self.overflow()[1]) > 0:
            size = self.driver.execute_script("return [innerWidth, innerHeight]")
            metrics = {"width": size[0], "height": size[1] + tall, "deviceScaleFactor": 1, "mobile": False}
            self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
            time.sleep(0.7)  # charts follow the new size
            self.driver.save_screenshot(str(path))
            metrics["height"] = size[1]
            self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        else:
            self.driver.save_screenshot(str(path))
        return path
