"""`kvscope backtest` as a user starts it: on a CSV file, on a recorder's file, and on too little history."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from observability.forecast.last_value import last_value
from tests.forecast.conftest import DAY, END, load
from tests.forecast.test_exporter import fill


def write(path: Path, values: np.ndarray) -> Path:
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["ds", "y"])
        for place, value in enumerate(values):
            at = datetime.fromtimestamp(END + 600.0 * (place - len(values) + 1), UTC)
            out.writerow([at.isoformat(), "" if np.isnan(value) else f"{value:.6f}"])
    return path


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "observability.cli", "backtest", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_the_table_is_what_the_forecasts_of_the_past_would_have_been(tmp_path: Path) -> None:
    """The baseline's errors are worked out here from the file: the last value against each of the six that came."""
    values = load(4)
    values[200:205] = np.nan
    path, page = write(tmp_path / "load.csv", values), tmp_path / "page.html"
    done = run("--source", str(path), "--signal", "requests", "--days", "1", "--json", "--plot", str(page))
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    rows = {row["model"]: row for row in said["models"]}
    assert set(rows) == {"auto", "last_value", "seasonal_naive"}
    last = len(values) - 1
    places = [p for p in range(last - DAY, last) if round(END + 600 * (p - last)) % 3600 == 0]
    errors = np.concatenate(
        [
            np.abs(values[p + 1 : p + 7] - last_value(values[: p + 1]).quantiles[:, 6][: len(values) - p - 1])
            for p in places
        ]
    )
    assert rows["last_value"]["mae"] == pytest.approx(np.nanmean(errors), rel=1e-4)
    assert rows["last_value"]["mae_ratio"] == rows["last_value"]["crps_ratio"] == 1
    assert rows["auto"]["origins"] == len(places)
    assert rows["auto"]["mae_ratio"] == pytest.approx(rows["auto"]["mae"] / rows["last_value"]["mae"])
    assert rows["auto"]["mae_ratio"] < 1, "the load has a daily shape"
    for row in rows.values():
        assert 0 <= row["cover_50"] <= row["cover_80"] <= row["cover_95"] <= 1
    text = page.read_text()
    assert "what came" in text
    assert "<script src=" not in text, "no network is needed"


def test_a_recorders_file_is_read_for_people_too(tmp_path: Path) -> None:
    store = fill(tmp_path / "s.sqlite", hours=40)
    done = run("--source", str(store.path), "--signal", "kv_usage", "--model", "last_value", "--days", "2")
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "KV pool held by requests, m, one hour ahead" in said
    assert "Last value" in said
    assert "Brier skill: of the chance of going above 0.85 ratio" in said


@pytest.mark.parametrize(
    ("text", "argv", "code", "reason"),
    [
        ("ds,y\n", (), 1, "has no rows"),
        ("ds,y\nyesterday,1\n", (), 1, "line 2"),
        ("time,value\n1,1\n", (), 1, "'ds'"),
        ("ds,y\n0,1\n3600,1\n7200,1\n", (), 1, "each 60 min"),
        ("ds,y\n" + "".join(f"{600 * i},1\n" for i in range(1, 100)), (), 1, "Too little history"),
        ("ds,y\n0,1\n", ("--signal", "hit_rate"), 2, "is not forecast"),
        ("ds,y\n0,1\n", ("--model", "oracle"), 2, "is not a forecast model"),
        ("ds,y\n0,1\n", ("--plot", "/nonexistent/x.html"), 2, "cannot be written"),
    ],
)
def test_wrong_input_says_what_to_do(tmp_path: Path, text: str, argv: tuple[str, ...], code: int, reason: str) -> None:
    path = tmp_path / "x.csv"
    path.write_text(text)
    done = run("--source", str(path), *(("--signal", "requests") if "--signal" not in argv else ()), *argv)
    assert done.returncode == code, done.stderr
    assert reason in " ".join(done.stderr.split())
    assert "next:" in done.stderr
