"""`kvscope app`: says what is wrong before it starts, and how its settings keep it local and quiet."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import streamlit

from observability.app import serve, settings
from observability.app.files import csv
from observability.app.page_now import changes_table
from observability.app.queries import Change


def kvscope_app(*options: str) -> subprocess.CompletedProcess[str]:
    argv = (sys.executable, "-m", "observability.cli", "app", *options)
    environment = {k: v for k, v in os.environ.items() if k != settings.SOURCE_VARIABLE}
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, env=environment, check=False)


def test_a_source_that_does_not_exist_is_named_with_the_next_step(tmp_path: Path) -> None:
    done = kvscope_app("--source", str(tmp_path / "none.sqlite"))
    assert done.returncode == 1
    assert f"There is no store at {tmp_path / 'none.sqlite'}" in " ".join(done.stderr.split())
    assert "next: " in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_in_use_is_named_with_the_next_step(store_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = kvscope_app("--source", str(store_path), "--port", port)
    assert done.returncode == 1
    assert f"127.0.0.1:{port}" in done.stderr
    assert "choose another port" in done.stderr
    assert "Traceback" not in done.stderr


def test_it_can_be_stopped_while_it_loads(
    store_path: Path, monkeypatch: pytest.MonkeyPatch, free_port: Callable[[], int]
) -> None:
    """What takes long at the start comes before the signals are taken from Python for the server's own."""
    taken: list[object] = []
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    monkeypatch.setattr(serve, "_settle", lambda: taken.append({each: signal.getsignal(each) for each in before}))
    monkeypatch.setattr(streamlit.App, "run", lambda *_, **__: None)
    try:
        serve.serve(str(store_path), "127.0.0.1", free_port())
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert taken == [before]


def test_the_app_stays_local_and_reports_to_nobody() -> None:
    options = settings.options("127.0.0.1", 8501)
    assert options["server_address"] == "127.0.0.1"
    assert options["browser_gatherUsageStats"] is False
    assert options["server_headless"] is True
    assert options["server_fileWatcherType"] == "none"


def test_every_setting_is_one_that_streamlit_knows() -> None:
    from streamlit import config

    known = config.get_config_options()
    unknown = [name for name in settings.options("127.0.0.1", 8501) if name.replace("_", ".") not in known]
    assert unknown == []


def test_csv_has_exact_values_and_utc_times() -> None:
    times = pd.to_datetime([1_700_000_000, 1_700_000_015], unit="s", utc=True)
    text = csv(pd.DataFrame({"time": times, "value": [0.1, 1 / 3]})).decode()
    assert text.splitlines() == ["time,value", "2023-11-14T22:13:20Z,0.1", "2023-11-14T22:13:35Z,0.3333333333333333"]


@pytest.mark.parametrize(("score", "told"), [(3.0, True), (0.5, False)])
def test_only_clear_changes_are_called_worse(score: float, told: bool) -> None:
    html = changes_table([Change("KV <pool>", "ratio", 0.5, 0.7, score, True)])
    assert ("worse" in html) is told
    assert "KV &lt;pool&gt;" in html
    assert "▲ 20.0 points" in html
