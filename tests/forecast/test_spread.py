"""Many series on processes of this machine and on Dask's workers: the forecasts are those of one process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from pathlib import Path

import numpy as np
import pytest

from observability.errors import ServiceError
from observability.forecast import spread
from observability.forecast.calibration import UNCALIBRATED, Calibration
from observability.forecast.models import forecast_many
from observability.forecast.series import window
from observability.store.forecasts import Forecast
from tests.conftest import wait_for
from tests.forecast.conftest import END, gridded, load

SERIES = 40


def work() -> Iterator[spread.Work]:
    """40 series, among them one that is refused and one that is constant."""
    for seed in range(SERIES):
        values = load(2.5, seed)
        if seed == 7:
            values[6:] = np.nan
        if seed == 8:
            values[:] = 3.0
        yield window(gridded(values), END), UNCALIBRATED if seed % 2 else Calibration(1.5, (0.1, 0.9))


def same(one: Forecast, other: Forecast) -> bool:
    return (
        np.array_equal(one.quantiles, other.quantiles)
        and (one.flags, one.refused, one.breaches, one.origin) == (other.flags, other.refused, other.breaches, other.origin)
    )  # fmt: skip


@pytest.fixture(scope="module")
def alone() -> list[Forecast]:
    return list(forecast_many(work(), "auto"))


@pytest.fixture
def scheduler(tmp_path: Path, spawn: Callable[..., subprocess.Popen[bytes]]) -> str:
    """A Dask scheduler and one worker with two processes' worth of threads, as a user starts them."""
    log = tmp_path / "scheduler.log"
    dask = (sys.executable, "-m", "dask")
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "DASK_DISTRIBUTED__SCHEDULER__DASHBOARD__STATUS__TASK_STREAM_LENGTH": "0",
    }
    with log.open("wb") as out:
        spawn(
            *dask,
            "scheduler",
            "--host",
            "127.0.0.1",
            "--port",
            "0",
            "--no-dashboard",
            stdout=out,
            stderr=out,
            env=environment,
        )
    wait_for(lambda: "Scheduler at:" in log.read_text(), 60, "the scheduler")
    address = next(line.split()[-1] for line in log.read_text().splitlines() if "Scheduler at:" in line)
    with (tmp_path / "worker.log").open("wb") as out:
        spawn(
            *dask, "worker", address, "--nworkers", "1", "--nthreads", "1", "--no-dashboard", "--no-nanny",
            "--local-directory", str(tmp_path), stdout=out, stderr=out, env=environment,
        )  # fmt: skip
    return address


def test_a_pool_of_processes_gives_the_forecasts_of_one(alone: list[Forecast]) -> None:
    with spread.processes(2)() as pool:
        found = list(spread.spread(work(), "auto", pool))
    assert len(found) == len(alone) == SERIES
    assert all(map(same, found, alone))
    assert sum(bool(one.refused) for one in found) == 1


def test_a_dask_cluster_gives_the_forecasts_of_one(alone: list[Forecast], scheduler: str) -> None:
    with spread.dask(scheduler)() as pool:
        found = list(spread.spread(work(), "auto", pool))
    assert len(found) == SERIES
    assert all(map(same, found, alone))


def test_a_process_that_dies_costs_refusals_with_the_reason_and_no_more(alone: list[Forecast]) -> None:
    with spread.processes(1)() as pool:
        assert pool is not None
        pool.submit(os.getpid).result()
        [pid] = pool._processes  # type: ignore[attr-defined]
        os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)
        found = list(spread.spread(work(), "auto", pool))
    assert len(found) == SERIES
    assert all("BrokenProcessPool" in one.refused for place, one in enumerate(found) if place != 7)
    assert found[7].refused == alone[7].refused  # has a reason of its own


def test_a_scheduler_that_is_not_there_says_what_to_do() -> None:
    with pytest.raises(ServiceError, match=r"No Dask scheduler answers at tcp://127\.0\.0\.1:1") as caught:
        connect: Callable[[], Executor | None] = spread.dask("tcp://127.0.0.1:1")().__enter__
        connect()
    assert "--jobs" in caught.value.next_step
