"""How fast the app's pages are, and whether its memory stays flat, seen by a real browser.

    python benchmarks/app.py                                  half an hour
    python benchmarks/app.py --minutes 120 --viewers 5        the claim about memory in full
    python benchmarks/app.py --store week.sqlite              keeps the store and uses it again

A store gets --days of points, one each --interval seconds, of every series that one engine and its host have (a recorder keeps older points at
one a minute; here all stay, which is the harder case), and a forecast of each model each ten minutes. Then `kvscope app` runs on it and a headless Chromium measures:

- floor: the same for a Streamlit script of one chart with three points. What Streamlit, Plotly and the browser take on this machine
  whatever an app does; views are told as ratios to it, too.
- first view: a new session opens a page with the whole range on a warm server (its process has shown that page before), from the start of
  the navigation until the charts in sight are drawn (1280 x 800), and until all of the page are and nothing is being read. Target: under 2 s.
- change of a filter: from a click on another range until the time charts in sight show it, and until all of the page do and
  nothing is being read. Target: under 0.7 s.
- points: most points of one trace, against the pixels that it has.
- memory: --viewers look at different pages, which refresh themselves, for --minutes. The slope is a least-squares line through the resident
  memory of the app's process after the first fifth, with its standard error.

Times are of a whole machine: what else runs on it, and the browser itself, is in them; the CPU seconds of the app's process are its own. Needs chromium and chromium-driver.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np  # noqa: E402
from selenium.common.exceptions import WebDriverException  # noqa: E402

from figures import Parser, Row, keep  # noqa: E402
from observability.signals import SIGNALS  # noqa: E402
from observability.store.embedded import EmbeddedStore, SignalBlock, create  # noqa: E402
from tests.app import synthetic  # noqa: E402
from tests.app.browser import Browser  # noqa: E402

DAY = 86400.0
#: Pages that draw series, by their place in the URL.
PAGES = {
    "Now": "",
    "KV cache": "kv-cache",
    "P99": "p99",
    "Hardware": "hardware",
    "Trends": "trends",
    "Forecast": "forecast",
}
FIRST_VIEW_SECONDS, FILTER_SECONDS = 2.0, 0.7
CLICKS = ("6h", "24h", "1h", "3d", "7d")
SAMPLE_SECONDS = 5.0

#: What the measured page is asked, by a script of its own: a browser driver that asks again and again would be much of what is measured.
_PAGE = """
const charts = () => [...document.querySelectorAll('.js-plotly-plot')].filter(gd => gd._fullLayout && gd.getClientRects().length);
const status = () => { const p = document.querySelector('.st-key-status .pill:last-child'); return p ? p.className.split(' ')[1] : '' };
const seen = gd => { const { top, bottom } = gd.getBoundingClientRect(); return bottom > 0 && top < innerHeight };
const card = gd => (gd.closest('[class*="st-key-card-"]')?.className.match(/st-key-card-\\S+/) ?? [''])[0];
const timed = gd => gd.layout?.xaxis?.type === 'date';
const from = gd => String(gd._fullLayout?.xaxis?.range[0]);
const rest = () => !['', 'reading'].includes(status());
"""
#: Notes in a new page when the charts of these cards (those in sight) are drawn, and when so many are and nothing is being read.
_VIEW = """
window.seconds = {};
const look = setInterval(() => {
  const drawn = charts(), cards = new Set(drawn.map(card)), now = performance.now() / 1000;
  if (!seconds.sight && SIGHT.every(each => cards.has(each))) seconds.sight = now;
  if (seconds.sight && drawn.length >= WHOLE && rest()) { seconds.whole = now; clearInterval(look); }
}, 40);
"""
#: Clicks on a range; from there to when each time chart in sight shows it, and when each of the page does and nothing is being read. Nothing
#: where there is no such button, no time chart in sight, or not within LIMIT seconds.
_CLICK = """
const [wanted, done] = arguments, all = charts().filter(timed), near = all.filter(seen), before = new Set(all.map(from)), taken = {};
const button = [...document.querySelectorAll('.st-key-range button')].find(b => b.innerText.trim() === wanted);
if (!button || !near.length) { done({}); return; }
const begin = performance.now();
const look = setInterval(() => {
  const now = (performance.now() - begin) / 1000, found = charts().filter(timed).map(from);
  if (now > LIMIT) { clearInterval(look); done({}); return; }
  if (!taken.sight && near.every(gd => gd._fullLayout && !before.has(from(gd)))) taken.sight = now;
  if (taken.sight && found.length >= all.length && !found.some(each => before.has(each)) && rest()) { taken.whole = now; clearInterval(look); done(taken); }
}, 30);
button.click();
""".replace("LIMIT", "50")
_WIDEST = """
return Math.max(0, ...[...document.querySelectorAll('.js-plotly-plot')].filter(gd => gd._fullLayout).map(gd => gd._fullLayout.width))"""


def fill(path: Path, days: float, interval: float, ahead: float) -> None:
    """Writes the store, until `ahead` seconds from now, so that it stays fresh while this runs. A day of synthetic values repeats, each time
    a little different."""
    store, end = create(path), time.time() // interval * interval + ahead
    per_day, rng = round(DAY / interval), np.random.default_rng(0)
    minutes = np.arange(0, DAY, 60.0)
    for number, signal in enumerate(SIGNALS):
        frame = synthetic.series(signal, minutes)
        wide = frame.pivot_table(
            index="time", columns=list(signal.by), values="value", aggfunc="last", observed=True, dropna=False
        )
        wide = wide.dropna(axis=1, how="all").dropna(axis=0, how="all")
        if wide.empty:
            continue
        names = wide.columns if len(signal.by) > 1 else [(name,) for name in wide.columns]
        labels = [dict(zip(signal.by, map(str, key), strict=True)) for key in names]
        day = wide.to_numpy()[np.minimum(np.arange(per_day) * len(wide) // per_day, len(wide) - 1)]
        for back in range(math.ceil(days + ahead / DAY), 0, -1):
            times = end - back * DAY + interval * np.arange(1, per_day + 1)
            noise = 1 if signal.unit in ("engines", "hosts") else 1 - 0.02 * rng.random(day.shape)
            store.append_blocks({signal.name: SignalBlock(times, labels, day * noise)})
        print(f"\r{number + 1} of {len(SIGNALS)} signals written", end="", flush=True)
    print()
    minutes = np.arange(time.time() - days * DAY, time.time() + ahead, 60.0)
    rows = {signal.name: synthetic.series(signal, minutes) for signal in synthetic.FORECAST_SIGNALS}
    made = synthetic.forecasts(rows, time.time(), (days - 0.1) * DAY)
    store.add_forecasts(made)


@contextmanager
def served(*command: str) -> Iterator[tuple[str, int]]:
    """A Streamlit server of this Python, `command` with a free port behind it: its address and process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        (sys.executable, *command, str(port)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{url}/_stcore/health", timeout=1).close()
                break
            except OSError:
                time.sleep(0.1)
        else:
            raise SystemExit("the server did not start within a minute")
        yield url, process.pid
    finally:
        process.terminate()
        process.wait(30)


def steady(browser: Browser, limit: float = 120.0) -> tuple[list[str], int]:
    """The cards of the open page whose charts are in sight, and how many charts it has, once these stay for three seconds and nothing is being
    read."""
    begin, found, since = time.monotonic(), ([], 0), time.monotonic()
    while time.monotonic() - since < 3:
        if time.monotonic() - begin > limit:
            raise SystemExit(f"{browser.driver.current_url} did not come to rest within {limit:.0f} s")
        time.sleep(0.2)
        with suppress(WebDriverException):  # too busy to say
            sight, whole, rest = browser.driver.execute_script(
                f"{_PAGE} return [charts().filter(seen).map(card), charts().length, rest()]"
            )
            if (sight, whole) != found or not sight or not rest:
                found, since = (sight, whole), time.monotonic()
    return found


@contextmanager
def noting(browser: Browser, sight: list[str], whole: int) -> Iterator[None]:
    """Pages that are opened inside note when the charts of these cards, and so many, are drawn (see _VIEW)."""
    script = f"{{{_PAGE}{_VIEW}}}".replace("SIGHT", json.dumps(sight)).replace("WHOLE", str(whole))
    added = browser.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": script})
    try:
        yield
    finally:
        browser.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)


def opened(browser: Browser, url: str, until: str = "whole", limit: float = 120.0) -> dict[str, float]:
    """Seconds from the start of the navigation to `url` until its charts in sight, and all of them (`until`), were drawn."""
    browser.driver.get("about:blank")
    browser.driver.get(url)
    begin = time.monotonic()
    while time.monotonic() - begin < limit:
        with suppress(WebDriverException):
            if until in (taken := browser.driver.execute_script("return window.seconds || {}")):
                return {name: float(each) for name, each in taken.items()}
        time.sleep(0.25)
    raise SystemExit(f"the charts of {url} were not drawn within {limit:.0f} s")


def cpu_seconds(pid: int) -> float:
    """CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


FLOOR = """import streamlit, plotly.graph_objects
streamlit.plotly_chart(plotly.graph_objects.Figure([{"type": "scatter", "y": [1, 3, 2]}], {"height": 200}), key="chart")
"""


def floor(browser: Browser, folder: Path, rounds: int) -> float:
    """Median seconds until the chart of FLOOR is drawn in a new session."""
    script = folder / "floor.py"
    script.write_text(FLOOR)
    with (
        served("-m", "streamlit", "run", str(script), "--server.headless", "true", "--browser.gatherUsageStats", "false", "--server.port") as (url, _),
        noting(browser, [""], 1),
    ):  # fmt: skip
        found = [opened(browser, url, "sight")["sight"] for _ in range(rounds + 1)]
    return statistics.median(found[1:])


Times = dict[str, list[dict[str, float]]]
"""By page and view: seconds until the charts in sight show it (sight), until all do and nothing is being read (whole), CPU seconds of the
app's process (cpu)"""


def first_views(browser: Browser, url: str, pid: int, rounds: int) -> Times:
    """Each first view by page; the one that warms the server up is left out."""
    out: Times = {}
    for name, path in PAGES.items():
        browser.open(f"{url}/{path}?range=7d", 1, 300)
        with noting(browser, *steady(browser)):
            for _ in range(rounds):
                browser.driver.get("about:blank")
                spent = cpu_seconds(pid)
                taken = opened(browser, f"{url}/{path}?range=7d")
                out.setdefault(name, []).append(taken | {"cpu": cpu_seconds(pid) - spent})
    return out


def filter_changes(browser: Browser, url: str, pid: int, rounds: int) -> Times:
    """From a click on another range until the time charts of the page show it, by page. Each range was read before once, as on a server
    that others use."""
    out: Times = {}
    for name in ("Now", "KV cache", "P99", "Hardware"):
        browser.open(f"{url}/{PAGES[name]}?range=15m", 1, 300)
        for number in range(rounds + 1):
            for wanted in CLICKS:
                spent = cpu_seconds(pid)
                taken = browser.driver.execute_async_script(_PAGE + _CLICK, wanted)
                if "whole" not in taken:
                    raise SystemExit(f"{name}: the charts did not change to {wanted}")
                if number:
                    out.setdefault(name, []).append(taken | {"cpu": cpu_seconds(pid) - spent})
                time.sleep(0.5)
    return out


def points(browser: Browser, url: str) -> dict[str, int]:
    """Most points of one line or area of a page at the longest range."""
    out = {}
    for name, path in PAGES.items():
        browser.open(f"{url}/{path}?range=7d", 1, 300)
        time.sleep(1)
        script = "return Math.max(0, ...[...document.querySelectorAll('.js-plotly-plot')].flatMap(gd => gd._fullData.filter(t => (t.type || '').startsWith('scatter') && t.mode !== 'markers').map(t => t._length || 0)))"  # fmt: skip
        out[name] = int(browser.driver.execute_script(script))
    return out


def resident_mib(pid: int) -> float:
    """Resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def memory(browser: Browser, url: str, pid: int, viewers: int, minutes: float) -> list[tuple[float, float]]:
    """(seconds, MiB) of the app while so many sessions look at pages that refresh themselves."""
    paths = list(PAGES.values())
    for number in range(viewers):
        if number:
            browser.driver.switch_to.new_window("tab")
        browser.open(f"{url}/{paths[number % len(paths)]}?range=15m", 1, 300)
    begin, out = time.monotonic(), []
    while (now := time.monotonic() - begin) < 60 * minutes:
        out.append((now, resident_mib(pid)))
        time.sleep(SAMPLE_SECONDS)
    return out


def settled(samples: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The samples after the first fifth of the time."""
    return [(at, mib) for at, mib in samples if at >= samples[-1][0] / 5]


def memory_rows(samples: list[tuple[float, float]], viewers: int, minutes: float) -> list[Row]:
    """What is told of the resident memory."""
    kept = [mib for _, mib in settled(samples)]
    sixth = max(1, len(kept) // 6)
    what = f"memory with {viewers} viewers over {minutes:g} minutes"
    return [
        Row(f"{what}, after a fifth (mean of a sixth of the rest)", statistics.fmean(kept[:sixth]), "MiB"),
        Row(f"{what}, at last (mean of a sixth)", statistics.fmean(kept[-sixth:]), "MiB"),
        Row(f"memory with {viewers} viewers, slope an hour", slope(samples)[0], "MiB"),
    ]


def slope(samples: list[tuple[float, float]]) -> tuple[float, float]:
    """MiB an hour after the first fifth, and its standard error with blocks of a minute as independent values."""
    kept = settled(samples)
    blocks: dict[int, list[float]] = {}
    for at, mib in kept:
        blocks.setdefault(int(at // 60), []).append(mib)
    x, y = np.array(sorted(blocks), dtype=float), np.array([statistics.fmean(blocks[each]) for each in sorted(blocks)])
    if len(x) < 3:
        return float("nan"), float("nan")
    (rise, start), cov = np.polyfit(x, y, 1, cov="unscaled")
    noise = np.sqrt(np.sum((y - rise * x - start) ** 2) / max(len(x) - 2, 1))
    return 60 * rise, 60 * noise * float(np.sqrt(cov[0, 0]))


def main() -> None:
    parser = Parser(__doc__, quick={"days": 1.0, "rounds": 2, "minutes": 0.5, "interval": 30.0})
    parser.add_argument("--days", type=float, default=7.0)
    parser.add_argument("--interval", type=float, default=10.0, help="seconds between two points")
    parser.add_argument("--rounds", type=int, default=5, help="views of each page, and rounds of clicks")
    parser.add_argument("--viewers", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=20.0, help="how long memory is watched; 0: not")
    parser.add_argument("--store", type=Path, help="a store file to make, or to use again")
    options = parser.parse_args()
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not driver:
        parser.error("chromium and chromium-driver are not installed: apt-get install chromium chromium-driver")
    with tempfile.TemporaryDirectory() as folder:
        path = options.store or Path(folder) / "app.sqlite"
        extent = EmbeddedStore(path).extent() if path.exists() else None
        lasts = 1800 + 60 * options.minutes
        if extent is None or extent[1] < time.time() + lasts:
            path.unlink(missing_ok=True)
            fill(path, options.days, options.interval, lasts + 1800)
        print(
            f"store: {path.stat().st_size / 2**20:.0f} MiB; load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
        )
        browser = Browser(chromium, driver, Path(folder) / "profile")
        try:
            browser.look(1280, 800, "light")
            least = floor(browser, Path(folder), options.rounds)
            print(f"floor: {least:.2f} s for a page of one chart with three points")
            with served("-m", "observability.cli", "app", "--source", str(path), "--port") as (url, pid):
                report(options, browser, url, pid, path, least)
        finally:
            browser.quit()


def report(options: Any, browser: Browser, url: str, pid: int, path: Path, least: float) -> None:
    """Measures, prints and keeps."""
    rows = [Row("a page of one chart with three points", least, "s")]
    detail: dict[str, Any] = {"store_mib": path.stat().st_size / 2**20}
    for what, target, found in (
        ("first view of 7 days", FIRST_VIEW_SECONDS, first_views(browser, url, pid, options.rounds)),
        ("change of the range", FILTER_SECONDS, filter_changes(browser, url, pid, max(1, options.rounds // 2))),
    ):
        print(f"{what} (target {target:g} s), load average {os.getloadavg()[0]:.1f}")
        for name, taken in found.items():
            sight, whole, cpu = (statistics.median(each[part] for each in taken) for part in ("sight", "whole", "cpu"))
            print(f"  {name:10} in sight {sight:5.2f} s, whole {whole:5.2f} s (medians); CPU of the app {cpu:5.2f} s")
            rows.append(Row(f"{what}, {name}, charts in sight, median", sight, "s"))
            rows.append(Row(f"{what}, {name}, whole page, median", whole, "s"))
            if what.startswith("first view"):
                rows.append(Row(f"{what}, {name}, charts in sight / a page of one chart", sight / least, "ratio"))
            rows.append(Row(f"{what}, {name}, CPU of the app", cpu, "s"))
        detail[what] = found
    found_points, width = points(browser, url), browser.driver.execute_script(_WIDEST)
    print(
        f"most points of one line at 7 days: {max(found_points.values())}, widest chart {width} px: {json.dumps(found_points)}"
    )
    rows.append(Row("most points of one line at 7 days", max(found_points.values()), "points"))
    detail["points"] = found_points
    if options.minutes > 0:
        samples = memory(browser, url, pid, options.viewers, options.minutes)
        rise, error = slope(samples)
        print(
            f"memory with {options.viewers} viewers over {options.minutes:g} min: {samples[0][1]:.0f} MiB at first, {samples[-1][1]:.0f} MiB at last, "
            f"slope {rise:.1f} ± {error:.1f} MiB an hour"
        )
        rows += memory_rows(samples, options.viewers, options.minutes)
        detail["memory"] = {"samples": samples, "slope_mib_per_hour": rise, "standard_error": error}
    keep(options, rows, detail)


if __name__ == "__main__":
    main()
