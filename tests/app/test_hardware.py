"""The page Hardware: scores with their reasons, worst first, and what it says where there is no GPU."""

from __future__ import annotations

import time
from pathlib import Path

import pandas as pd
import pytest

from exporters.gpu.health import BY_REASON, TARGETS
from observability.app import hardware
from observability.app.view import View
from observability.signals import SIGNALS
from observability.store.embedded import EmbeddedStore, create
from tests.app import synthetic
from tests.app.browser import Browser
from tests.app.conftest import STORED_SECONDS, Start

GPU_SIGNALS = [signal.name for signal in SIGNALS if signal.by[0] == "gpu"]


@pytest.fixture(scope="module")
def view(end: float) -> View:
    return View(synthetic.MODEL, end - 3600, end, 15.0)


def test_the_score_is_one_less_what_is_listed_and_the_worst_gpu_comes_first(source: EmbeddedStore, view: View) -> None:
    seen = hardware.gpu_health(source, view)
    assert [gpu.name for gpu in seen] == ["GPU 1", "GPU 0"]
    for gpu in seen:
        assert gpu.score == pytest.approx(1 - sum(each.penalty for each in gpu.taken))
        assert gpu.looked_for == 4, "a reason without a series could not be told"
    ill, well = seen
    assert [each.reason for each in ill.taken] == sorted(synthetic.FOUND, key=lambda r: -synthetic.FOUND[r])
    assert ill.taken[0].do == BY_REASON["pcie_width"].do
    assert well.taken == ()


def test_gpus_of_one_number_on_two_hosts_are_told_apart_and_instances_named() -> None:
    frame = pd.DataFrame({"gpu": ["0", "0", "1", "1"], "uuid": ["GPU-aaa111", "GPU-bbb222", "GPU-c", "GPU-c"],
                          "mig": ["none", "none", "none", "3/0"]})  # fmt: skip
    assert list(hardware.gpu_names(frame).values()) == ["GPU 0 (…aaa111)", "GPU 0 (…bbb222)", "GPU 1 MIG 3/0", "GPU 1"]


def test_a_gpu_that_is_no_longer_read_keeps_its_last_score_and_says_so(source: EmbeddedStore, view: View) -> None:
    later = View(view.model, view.start, view.end + STORED_SECONDS + 780, 20.0)
    assert all(gpu.current for gpu in hardware.gpu_health(source, view))
    assert not any(gpu.current for gpu in hardware.gpu_health(source, later))


def test_a_finding_of_a_newer_exporter_is_shown_by_its_name(
    tmp_path: Path, rows: dict[str, pd.DataFrame], view: View
) -> None:
    store = create(tmp_path / "store.db")
    store.append(hardware.HEALTH.name, rows[hardware.HEALTH.name])
    store.append(hardware.PENALTY.name, rows[hardware.PENALTY.name].replace({"reason": {"pcie_width": "new_thing"}}))
    assert "new thing" in [each.condition for each in hardware.gpu_health(store, view)[0].taken]


def test_every_hardware_target_has_a_title() -> None:
    assert set(hardware.TARGET_TITLES) == set(TARGETS)


def test_the_page_says_each_score_its_reasons_and_what_to_do(browser: Browser, app_url: str) -> None:
    browser.look(1280, 800, "light")
    browser.open(f"{app_url}/hardware", 7)
    text = browser.text()
    assert text.index("GPU 1") < text.index("GPU 0"), "the worst comes first"
    assert "60.0 %" in text
    assert "▲ needs a look" in text
    assert "✓ well" in text
    assert BY_REASON["pcie_width"].condition in text
    assert BY_REASON["hot"].do in text
    assert "card or driver give no hardware counters" in text


def test_without_a_gpu_the_page_says_why_and_what_to_run(
    browser: Browser, start_app: Start, tmp_path: Path, rows: dict[str, pd.DataFrame]
) -> None:
    store = create(tmp_path / "store.db")
    for name, frame in rows.items():
        if name not in GPU_SIGNALS:
            store.append(name, frame.assign(status="unavailable", reason="no_gpu").drop_duplicates(["time", *(c for c in frame if c != "value" and c not in ("time", "status", "reason"))]) if name == hardware.TARGETS.name else frame)  # fmt: skip
    browser.look(1280, 800, "light")
    browser.open(f"{start_app(store.path)}/hardware", 1)
    text = browser.text()
    assert "No GPU was read in this range." in text
    assert "no GPU on that host" in text
    assert "kvscope gpu" in text
    assert browser.count(".placeholder.failed") == 0
    browser.picture("app-hardware-no-gpu")
    (tmp_path / "store.db").rename(tmp_path / "gone.db")
    deadline = time.monotonic() + 60
    while browser.status() != "down" and time.monotonic() < deadline:
        time.sleep(0.2)
    assert browser.status() == "down"
    assert browser.count("[data-testid=stException]") == 0
