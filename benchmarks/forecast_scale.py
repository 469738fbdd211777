"""Forecasts of many series: one process, a pool of processes, and Dask's workers, on the same windows; and the worker from end to end.

    python benchmarks/forecast_scale.py                     500 series of seven days
    python benchmarks/forecast_scale.py --series 10000 --jobs 8

Prints series per second of the default model, the ratio to one process within the same run, and whether the forecasts are equal. The last
line is what `kvscope forecast` does for 500 series of the default model on one core: read what is new, calibrate on a day of stored
forecasts, forecast, store.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import numpy as np  # noqa: E402

from figures import Parser, Row, keep  # noqa: E402
from observability.forecast import spread  # noqa: E402
from observability.forecast.calibration import UNCALIBRATED, calibrate  # noqa: E402
from observability.forecast.series import FORECAST_SIGNALS, READ_SECONDS, GridSeries, SeriesReader, window  # noqa: E402
from observability.store.embedded import SignalBlock, create  # noqa: E402
from observability.store.forecasts import DEFAULT_MODEL, STEP_SECONDS  # noqa: E402

DAY, END = 144, 1_800_000_000.0
REFRESHED = 500


def made(number: int, extra: int = 0) -> GridSeries:
    """Seven days of a load with a daily shape and autocorrelated noise, the `number`th, and `extra` steps more."""
    rng = np.random.default_rng(number)
    steps = 7 * DAY + extra
    noise = np.zeros(steps)
    shocks = rng.normal(0, 0.4, steps)
    for i in range(1, steps):
        noise[i] = 0.85 * noise[i - 1] + shocks[i]
    phase = rng.uniform(0, 2 * np.pi)
    values = np.maximum(8 + rng.uniform(1, 5) * np.sin(2 * np.pi * np.arange(steps) / DAY + phase) + noise, 0.0)
    ends = END + STEP_SECONDS * np.arange(1 - steps, 1)
    return GridSeries(FORECAST_SIGNALS["requests"], {"model": f"m{number}"}, ends, values, END)


def work(count: int) -> list[spread.Work]:
    return [(window(made(number), END), UNCALIBRATED) for number in range(count)]


def timed(windows: list[spread.Work], pool: spread.Pool) -> tuple[list[np.ndarray], float]:
    """Quantiles of every forecast, and the seconds from an open pool on."""
    with pool() as executor:
        list(spread.spread(windows[: 2 * spread.CHUNK], DEFAULT_MODEL, executor))  # imports, compiled code
        start = time.perf_counter()
        found = [one.quantiles for one in spread.spread(windows, DEFAULT_MODEL, executor)]
        return found, time.perf_counter() - start


def minutes(series: list[GridSeries], start: float, stop: float) -> SignalBlock:
    """A reading a minute in (start, stop] of all series, from their values on the grid."""
    times = np.arange(start + 60.0, stop + 1, 60.0)
    place = np.ceil((times - series[0].ends[0]) / STEP_SECONDS).astype(int)
    return SignalBlock(
        times, [each.labels for each in series], np.stack([each.values[place] for each in series], axis=1)
    )


def refresh(folder: Path) -> dict[str, float]:
    """One refresh of REFRESHED series by the default model as the worker does it, in CPU seconds of this process: read from a store with a
    reading a minute, calibrate on a day of stored hourly forecasts, forecast, store. The first refresh reads eight days, the ones after it
    what is new: they are what counts."""
    store = create(folder / "scale.sqlite")
    signal = FORECAST_SIGNALS["requests"]
    series = [made(number, DAY + 1) for number in range(REFRESHED)]
    begin, before = float(series[0].ends[0]), END - STEP_SECONDS
    store.append_blocks({signal.name: minutes(series, begin, before)})
    for each in series:
        rows = []
        for hours in range(24, 0, -1):
            rows += [
                replace(one, model=DEFAULT_MODEL)
                for one in spread.spread([(window(each, END - 3600.0 * hours), UNCALIBRATED)], "last_value", None)
            ]
        store.add_forecasts(rows)
    reader = SeriesReader()
    cpu = time.process_time()
    reader.read(store, signal, before + 5)
    whole = time.process_time() - cpu
    store.append_blocks({signal.name: minutes(series, before, END)})
    start, cpu = time.perf_counter(), time.process_time()
    found = reader.read(store, signal, END + 5)
    read = time.process_time() - cpu
    assert len(found) == REFRESHED
    ready = []
    for each in found:
        stored = store.hourly_forecasts(signal.name, each.labels, DEFAULT_MODEL, END - READ_SECONDS)
        assert len(stored) == 24
        ready.append((window(each, END), calibrate(each, stored, END)))
    calibrated = time.process_time() - cpu
    store.add_forecasts(spread.spread(ready, DEFAULT_MODEL, None))
    return {
        "series": REFRESHED, "read_whole_cpu_seconds": whole, "read_cpu_seconds": read,
        "calibrate_cpu_seconds": calibrated - read, "cpu_seconds": time.process_time() - cpu,
        "wall_seconds": time.perf_counter() - start,
    }  # fmt: skip


def main() -> None:
    parser = Parser(__doc__, quick={"series": 100, "no_dask": True})
    parser.add_argument("--series", type=int, default=500)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--no-dask", action="store_true", help="leave Dask out")
    options = parser.parse_args()
    windows = work(options.series)
    alone, base = timed(windows, spread.in_this_process)
    results = {"one process": (base, True)}
    found, seconds = timed(windows, spread.processes(options.jobs))
    results[f"{options.jobs} processes"] = (seconds, all(map(np.array_equal, found, alone)))
    if not options.no_dask:
        from distributed import LocalCluster

        with (
            tempfile.TemporaryDirectory() as folder,
            LocalCluster(
                n_workers=options.jobs,
                threads_per_worker=1,
                dashboard_address=None,
                local_directory=folder,
                host="127.0.0.1",
            ) as cluster,
        ):
            found, seconds = timed(windows, spread.dask(cluster.scheduler_address))
            results[f"Dask, {options.jobs} workers"] = (seconds, all(map(np.array_equal, found, alone)))
    print(f"{options.series} series of seven days, {DEFAULT_MODEL}, {os.cpu_count()} cores here")
    for name, (seconds, equal) in results.items():
        print(
            f"{name:22}{options.series / seconds:8.1f} series/s{base / seconds:7.2f} x{'  equal' if equal else '  DIFFERENT'}"
        )
    with tempfile.TemporaryDirectory() as folder:
        one = refresh(Path(folder))
    print(
        f"refresh of {REFRESHED} series on one core: {one['cpu_seconds']:.1f} s CPU ({one['read_cpu_seconds']:.1f} s of it reading, "
        f"{one['calibrate_cpu_seconds']:.1f} s calibrating), {one['wall_seconds']:.1f} s wall; the first one reads {one['read_whole_cpu_seconds']:.1f} s longer"
    )
    rows = [Row(f"{name} / one process", base / seconds, "ratio") for name, (seconds, _) in results.items()][1:]
    rows += [Row(name, options.series / seconds, "series/s") for name, (seconds, _) in results.items()]
    rows.append(Row(f"refresh of {REFRESHED} series, one core", one["cpu_seconds"], "s CPU"))
    report = {name: {"seconds": seconds, "equal": equal} for name, (seconds, equal) in results.items()}
    keep(options, rows, {"runs": report, "refresh": one})


if __name__ == "__main__":
    sys.exit(main())
