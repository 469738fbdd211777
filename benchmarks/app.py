"""How fast the app's pages are, and whether its memory stays flat, seen by a real browser.

    python benchmarks/app.py                                  half an hour
    python benchmarks/app.py --minutes 120 --viewers 5        the claim about memory in full
    python benchmarks/app.py --store week.sqlite              keeps the store and uses it again

A store gets --days of points, one each --interval seconds, of every series that one engine and its host have (a recorder keeps older points at
one a minute; here all stay, which is the harder case), and a forecast of each model each ten minutes. Then `kvscope app` runs on it and a headless Chromium measures:

- floor: the same for a Streamlit script of one chart with three points. What Streamlit, Plotly and the browser take on this machine
  whatever an app does; views are told as ratios to it, too.
- first view: a new session opens a page with the whole range on a warm server (its process has shown that page before), until the charts are
  drawn and nothing is being read any more. Target: under 2 s.
- change of a filter: from a click on another range until the charts show it. Target: under 0.7 s.
- points: most points of one trace, against the pixels that it has.
- memory: --viewers look at different pages, which refresh themselves, for --minutes. The slope is a least-squares line through the resident
  memory of the app's process after the first fifth, with its standard error.

Times are of a whole machine: what else runs on it, and the browser itself, is in them; the CPU seconds of the app's process are its own. Needs chromium and chromium-driver.
"""

from __future__ import annotations

import json
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

_RANGES = """
return [...document.querySelectorAll('.js-plotly-plot')].filter(gd => gd._fullLayout && gd.layout.xaxis && gd.layout.xaxis.type === 'date')
  .map(gd => String(gd._fullLayout.xaxis.range[0]))"""
#: How many charts are drawn and seen, and what the header says; cheap, since it is asked often.
_DRAWN = """
const p = document.querySelector('.st-key-status .pill:last-child');
return [[...document.querySelectorAll('.js-plotly-plot')].filter(gd => gd._fullLayout && gd.getClientRects().length).length, p ? p.className.split(' ')[1] : '']"""
_WIDEST = """
return Math.max(0, ...[...document.querySelectorAll('.js-plotly-plot')].filter(gd => gd._fullLayout).map(gd => gd._fullLayout.width))"""


def fill(path: Path, days: float, interval: float) -> None:
    """Writes the store. A day of synthetic values repeats, each time a little different."""
    store, end = (
        create(path),
        time.time() // interval * interval + 3600,
    )  # ahead, so that it stays fresh while this runs
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
        for back in range(int(days), 0, -1):
            times = end - back * DAY + interval * np.arange(1, per_day + 1)
            noise = 1 if signal.unit in ("engines", "hosts") else 1 - 0.02 * rng.random(day.shape)
            store.append_blocks({signal.name: SignalBlock(times, labels, day * noise)})
        print(f"\r{number + 1} of {len(SIGNALS)} signals written", end="", flush=True)
    print()
    minutes = np.arange(time.time() - days * DAY, time.time() + 3600, 60.0)
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


def settled(browser: Browser, begin: float, charts: int, limit: float = 120.0) -> float:
    """Seconds since `begin` until at least `charts` charts are drawn and the page reads nothing any more."""
    while not ((now := drawn(browser))[0] >= max(charts, 1) and at_rest(now[1])):
        if time.monotonic() - begin > limit:
            raise SystemExit(f"{now[0]} of {charts} charts were drawn within {limit:.0f} s; the page is {now[1]!r}")
        time.sleep(0.05)
    return time.monotonic() - begin


def steady(browser: Browser, limit: float = 120.0) -> int:
    """How many charts the open page has, once that number stays for three seconds and nothing is being read."""
    begin, count, since = time.monotonic(), -1, time.monotonic()
    while time.monotonic() - since < 3 and time.monotonic() - begin < limit:
        time.sleep(0.2)
        now, status = drawn(browser)
        if now != count or not at_rest(status):
            count, since = now, time.monotonic()
    return count


def drawn(browser: Browser) -> tuple[int, str]:
    """Charts that are drawn, and what the header says; none and nothing while the browser is too busy to say."""
    with suppress(WebDriverException):
        count, status = browser.driver.execute_script(_DRAWN)
        return int(count), str(status)
    return 0, ""


def at_rest(status: str) -> bool:
    return status not in ("", "reading")


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
    with served("-m", "streamlit", "run", str(script), "--server.headless", "true", "--browser.gatherUsageStats", "false", "--server.port") as (url, _):  # fmt: skip
        found = []
        for _ in range(rounds + 1):
            browser.driver.get("about:blank")
            begin = time.monotonic()
            browser.driver.get(url)
            while drawn(browser)[0] < 1:
                if time.monotonic() - begin > 120:
                    raise SystemExit("a page of one chart was not drawn within two minutes")
                time.sleep(0.05)
            found.append(time.monotonic() - begin)
    return statistics.median(found[1:])


Times = dict[str, list[tuple[float, float]]]
"""By page: seconds by the clock and CPU seconds of the app's process, of each view"""


def first_views(browser: Browser, url: str, pid: int, rounds: int) -> Times:
    """Each first view by page; the one that warms the server up is left out."""
    out: Times = {}
    for name, path in PAGES.items():
        browser.open(f"{url}/{path}?range=7d", 1, 300)
        charts = steady(browser)
        for _ in range(rounds):
            browser.driver.get("about:blank")
            begin, spent = time.monotonic(), cpu_seconds(pid)
            browser.driver.get(f"{url}/{path}?range=7d")
            seconds = settled(browser, begin, charts)
            out.setdefault(name, []).append((seconds, cpu_seconds(pid) - spent))
    return out


def filter_changes(browser: Browser, url: str, pid: int, rounds: int) -> Times:
    """From a click on another range until every time chart of the page shows it, by page. Each range was read before once, as on a server
    that others use."""
    out: Times = {}
    click = "const b = [...document.querySelectorAll('.st-key-range button')].find(b => b.innerText.trim() === arguments[0]); if (b) b.click(); return !!b"
    for name in ("Now", "KV cache", "P99", "Hardware"):
        browser.open(f"{url}/{PAGES[name]}?range=15m", 1, 300)
        for number in range(rounds + 1):
            for wanted in CLICKS:
                before = browser.driver.execute_script(_RANGES)
                begin, spent = time.monotonic(), cpu_seconds(pid)
                if not browser.driver.execute_script(click, wanted):
                    raise SystemExit(f"no button {wanted}")
                while True:
                    now = browser.driver.execute_script(_RANGES)
                    if len(now) >= len(before) and not set(now) & set(before) and drawn(browser)[1] != "reading":
                        break
                    if time.monotonic() - begin > 60:
                        raise SystemExit(f"{name}: the charts did not change to {wanted}")
                    time.sleep(0.03)
                if number:
                    out.setdefault(name, []).append((time.monotonic() - begin, cpu_seconds(pid) - spent))
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


def slope(samples: list[tuple[float, float]]) -> tuple[float, float]:
    """MiB an hour after the first fifth, and its standard error with blocks of a minute as independent values."""
    kept = [(at, mib) for at, mib in samples if at >= samples[-1][0] / 5]
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
        if extent is None or extent[1] < time.time():
            path.unlink(missing_ok=True)
            fill(path, options.days, options.interval)
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
            seconds, cpu = ([each[place] for each in taken] for place in (0, 1))
            middle = statistics.median(seconds)
            print(
                f"  {name:10} median {middle:5.2f} s, fastest {min(seconds):5.2f} s; CPU of the app {statistics.median(cpu):5.2f} s"
            )
            rows.append(Row(f"{what}, {name}, median", middle, "s"))
            if what.startswith("first view"):
                rows.append(Row(f"{what}, {name} / a page of one chart", middle / least, "ratio"))
            rows.append(Row(f"{what}, {name}, CPU of the app", statistics.median(cpu), "s"))
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
        rows.append(Row(f"memory with {options.viewers} viewers, slope an hour", rise, "MiB"))
        detail["memory"] = {"samples": samples, "slope_mib_per_hour": rise, "standard_error": error}
    keep(options, rows, detail)


if __name__ == "__main__":
    main()
