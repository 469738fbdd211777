"""Every forecast model side by side on recorded series: error, calibration, width, speed, and how true chances of a breach are.

    python benchmarks/forecast.py --series DIR [--json FILE] [--models auto,last_value] [--every 6] [--jobs 2] [--half even]

DIR holds CSV files `ds,y` on a 10-minute grid (empty y: missing). Forecasts are made hourly from the eighth day on, each from the
seven days before it, in order, so that calibration knows only outcomes of its past. Prophet is slow and is run every --prophet-hours, statsforecast
(AutoETS, a column where the extra `compare` is installed) every six; their ratios are over the origins both have. Ratios are geometric means over series, against the last value with the
quantiles of its own past errors. A file whose name starts with kv_ or nab_cpu is a share in [0, 1], others are bounded by 0.
"""

from __future__ import annotations

import csv
import importlib.util
import logging
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")  # one core a process, or the times mean nothing

import numpy as np  # noqa: E402
import pandas as pd  # noqa: E402

from figures import Parser, Row, keep  # noqa: E402
from observability.cli._terminal import progress_bar  # noqa: E402
from observability.forecast.calibration import calibrate  # noqa: E402
from observability.forecast.draft import ahead  # noqa: E402
from observability.forecast.limits import Limit  # noqa: E402
from observability.forecast.models import finished, forecast, presentable, usually  # noqa: E402
from observability.forecast.pooled import Network, load, pooled, save, train  # noqa: E402
from observability.forecast.series import FORECAST_SIGNALS, GridSeries, Window, window  # noqa: E402
from observability.forecast.stack import fill  # noqa: E402
from observability.store.forecasts import (  # noqa: E402
    DEFAULT_MODEL,
    HORIZON_STEPS,
    LEVELS,
    MODEL_TITLES,
    MODELS,
    STEP_SECONDS,
    Forecast,
)

WEEK = 1008
THRESHOLDS = (90, 95, 99)
MIDDLE = LEVELS.index(0.5)
SHARES = ("kv_", "nab_cpu")
#: Models that are too slow for every hour.
SLOW = ("prophet", "prophet_default")
#: Hours between origins of statsforecast's.
STATSFORECAST_HOURS = 6
REFERENCE = "reference"
#: Trained before each day on what all series were until then.
POOLED = "pooled"
DAY = 144
TITLES = {
    POOLED: "Pooled over all series",
    REFERENCE: "Last value, own errors",
    "prophet_default": "Prophet as documented",
    "statsforecast": "statsforecast AutoETS",
    **MODEL_TITLES,
}


def read(path: Path) -> np.ndarray:
    """Column y; empty is NaN."""
    with path.open(newline="") as file:
        return np.array([float(row["y"] or "nan") for row in csv.DictReader(file)])


def series_of(path: Path) -> GridSeries:
    """The file on a grid."""
    values = read(path)
    ends = STEP_SECONDS * np.arange(1, len(values) + 1, dtype=np.float64)
    signal = FORECAST_SIGNALS["kv_usage" if path.stem.startswith(SHARES) else "requests"]
    return GridSeries(signal, {"series": path.stem}, ends, values, float(ends[-1]))


def cpu_seconds() -> float:
    """Of this process and its finished children: Prophet's solver is one."""
    now = os.times()
    return now.user + now.system + now.children_user + now.children_system


def reference(values: np.ndarray, series: GridSeries) -> np.ndarray:
    """The last value with the quantiles of its own h-step errors over the window."""
    errors = ahead(values) - values[:, None]
    low, high = series.signal.bounds
    return np.clip(values[-1] + np.nanquantile(errors, LEVELS, axis=0).T, low, high)


def statsforecast(seen: Window) -> np.ndarray:
    """AutoETS with its own intervals: quantiles [HORIZON_STEPS, levels]. Without a season, since it drops one of 144 steps with a warning."""
    from statsforecast.models import AutoETS

    widths = [round(100 * (1 - 2 * level)) for level in LEVELS if level < 0.5]
    said = AutoETS(season_length=1).forecast(y=fill(seen.values), h=HORIZON_STEPS, level=widths)
    low, high = ([np.asarray(said[f"{side}-{width}"]) for width in widths] for side in ("lo", "hi"))
    return np.stack((*low, np.asarray(said["mean"]), *reversed(high)), axis=1)


def documented_prophet(series: GridSeries, place: int) -> np.ndarray:
    """Quantiles [HORIZON_STEPS, levels] of Prophet as its documentation runs it: on the recorded values of the week up to `place` as they
    are, with its own defaults, nothing cleaned before and nothing put within bounds after."""
    for name in ("cmdstanpy", "prophet", "prophet.plot"):
        logging.getLogger(name).disabled = True
    from prophet import Prophet

    week = slice(max(0, place + 1 - WEEK), place + 1)
    ahead_of = series.ends[place] + STEP_SECONDS * np.arange(1, HORIZON_STEPS + 1)
    recorded, wanted = (pd.to_datetime(times.astype(np.int64), unit="s") for times in (series.ends[week], ahead_of))
    model = Prophet()
    np.random.seed(0)
    model.fit(pd.DataFrame({"ds": recorded, "y": series.values[week]}), seed=0)
    samples = model.predictive_samples(pd.DataFrame({"ds": wanted}))["yhat"]
    model.stan_backend.cleanup()
    return np.quantile(samples, LEVELS, axis=1).T


def train_day(files: list[Path], until: int, folder: Path) -> float:
    """Trains on the first `until` steps of all files; returns its seconds."""
    start = cpu_seconds()
    save(train([series_of(path) for path in files], float(STEP_SECONDS * until)), folder / f"{until}.npz")
    return cpu_seconds() - start


@lru_cache(2)
def trained(path: Path) -> Network:
    """The network in a file."""
    return load(path)


def run(path: Path, model: str, every: int, folder: Path) -> dict[str, Any]:
    """All forecasts of one series by one model: quantiles [origins, HORIZON_STEPS, levels], what came, seconds, chances."""
    series = series_of(path)
    first = series.values[:WEEK]
    limits = [Limit(f"q{share:g}", float(np.nanquantile(first, share / 100))) for share in THRESHOLDS]
    base = {limit.name: float(usually(np.append(first, -np.inf), limit)[-1]) for limit in limits}
    places, tables, seconds = [], [], 0.0
    made: list[Forecast] = []
    chances: dict[str, list[tuple[float, ...]]] = {limit.name: [] for limit in limits}
    came_all = ahead(series.values)
    for place in range(WEEK - 1, len(series.values) - HORIZON_STEPS, every):
        now = float(series.ends[place])
        seen = window(series, now)
        if seen.refused or seen.origin != now:
            continue
        start = cpu_seconds()
        if model == REFERENCE:
            table = reference(series.values[max(0, place + 1 - WEEK) : place + 1], series)
        elif model == "prophet_default":
            table = documented_prophet(series, place)
        elif model == "statsforecast":
            table = presentable(statsforecast(seen), series.signal)
        else:
            known = calibrate(series, made, now)
            if model == POOLED:
                network = trained(folder / f"{(place + 1) // DAY * DAY}.npz")
                one = finished(seen, model, pooled(network, seen), known, limits=limits)
            else:
                one = forecast(seen, model, known, limits=limits)
            made.append(one)
            table = one.quantiles
            if one.refused:
                raise SystemExit(f"{path}: {model} refused at step {place}: {one.refused}")
            came = came_all[place]
            for limit, said in zip(limits, one.breaches, strict=True):
                if series.values[place] <= limit.value and np.isfinite(came).all():
                    alike = float(usually(seen.values, limit)[-1])
                    happened = float((came > limit.value).any())
                    chances[limit.name].append((said.raw[-1], said.chance, base[limit.name], alike, happened))
        seconds += cpu_seconds() - start
        places.append(place)
        tables.append(table)
    return {
        "places": np.array(places), "tables": np.array(tables), "came": came_all[places], "seconds": seconds / len(places),
        "chances": chances,
    }  # fmt: skip


def measures(one: dict[str, Any], base: dict[str, Any]) -> dict[str, float]:
    """Of one series, over the origins that both have: ratios to `base`, coverage."""
    _, mine, theirs = np.intersect1d(one["places"], base["places"], return_indices=True)
    came, q, r = one["came"][mine], one["tables"][mine], base["tables"][theirs]
    seen = np.isfinite(came)
    inside = (came >= q[..., 0]) & (came <= q[..., -1])
    return {
        "mae": _mae(q, came) / _mae(r, came), "crps": _crps(q, came) / _crps(r, came), "covered": float(inside[seen].mean()),
        "width": float((q[..., -1] - q[..., 0])[seen].mean() / (r[..., -1] - r[..., 0])[seen].mean()), "targets": int(seen.sum()),
    }  # fmt: skip


def _mae(q: np.ndarray, came: np.ndarray) -> float:
    return float(np.nanmean(np.abs(q[..., MIDDLE] - came)))


def _crps(q: np.ndarray, came: np.ndarray) -> float:
    """Twice the mean pinball loss over the levels."""
    off = came[..., None] - q
    return float(2 * np.nanmean(np.maximum(np.array(LEVELS) * off, (np.array(LEVELS) - 1) * off)))


def geometric(values: list[float]) -> float:
    return float(np.exp(np.mean(np.log(values))))


def summary(
    runs: dict[str, dict[str, Any]], base: dict[str, dict[str, Any]], plain: dict[str, dict[str, Any]] | None
) -> dict[str, float]:
    """The columns of one model over all series."""
    each = [measures(runs[name], base[name]) for name in runs]
    covered = np.array([row["covered"] for row in each])
    out = {
        "mae_ratio": geometric([row["mae"] for row in each]), "crps_ratio": geometric([row["crps"] for row in each]),
        "better": float(np.mean([row["mae"] < 1 for row in each])), "coverage": float(covered.mean()),
        "coverage_worst": float(covered.min()), "coverage_distance": float(np.abs(covered - 0.95).mean()),
        "width_ratio": geometric([row["width"] for row in each]),
        "cpu_ms": float(1e3 * np.mean([one["seconds"] for one in runs.values()])),
        "origins": int(sum(len(one["places"]) for one in runs.values())),
    }  # fmt: skip
    if plain:
        out["mae_to_default_prophet"] = geometric([measures(runs[name], plain[name])["mae"] for name in runs])
    return out


def reliability(chance: np.ndarray, usual: np.ndarray, alike: np.ndarray, outcome: np.ndarray) -> dict[str, Any]:
    """Brier score, skill, calibration error and table of chances, each [n]. Skill is against `usual`, how often the limit was passed from
    below it in the first week, which sets it; `rolling_skill` against `alike`, the same in the seven days before each origin."""
    brier, climate, strict = (float(((said - outcome) ** 2).mean()) for said in (chance, usual, alike))
    bins = np.minimum((chance * 10).astype(int), 9)
    table = [
        {"said": float(chance[bins == b].mean()), "came": float(outcome[bins == b].mean()), "n": int((bins == b).sum())}
        for b in range(10)
        if (bins == b).any()
    ]
    error = sum(row["n"] * abs(row["said"] - row["came"]) for row in table) / len(chance)
    return {
        "origins": len(chance), "events": float(outcome.mean()), "brier": brier, "climatology": climate, "skill": 1 - brier / climate,
        "rolling_skill": 1 - brier / strict, "calibration_error": float(error), "reliability": table,
    }  # fmt: skip


def decisions(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Per threshold, pooled over series; `raw`: as the paths say it, before it learned from outcomes."""
    out = {}
    for name in next(iter(runs.values()))["chances"]:
        if rows := [row for one in runs.values() for row in one["chances"][name]]:
            raw, chance, *rest = np.array(rows).T
            out[name] = reliability(chance, *rest) | {"raw": reliability(raw, *rest)}
    return out


def main() -> None:
    parser = Parser(__doc__, quick={"every": 36, "half": "even", "no_prophet": True})
    parser.add_argument("--series", type=Path, required=True, help="folder of CSV files ds,y")
    parser.add_argument(
        "--models", default=",".join((*MODELS, POOLED)), help=f"of {', '.join((*MODELS, POOLED))}; default: all"
    )
    parser.add_argument(
        "--no-prophet", action="store_true", help="leave both Prophets out (they take most of the time)"
    )
    parser.add_argument(
        "--prophet-hours", type=int, default=3, help="hours between two origins of the Prophets, which are slow (3)"
    )
    parser.add_argument("--every", type=int, default=6, help="steps of 10 minutes between origins (6)")
    parser.add_argument(
        "--half",
        choices=("even", "odd"),
        help="every other series, by name: settings from one half are judged on the other",
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes (1)")
    options = parser.parse_args()
    files = sorted(options.series.glob("*.csv"))
    if options.half:
        files = files[options.half == "odd" :: 2]
    if not files:
        parser.error(f"{options.series} holds no CSV file; give a folder of files with the columns ds,y.")
    wanted = [name for name in options.models.split(",") if not (options.no_prophet and name in SLOW)]
    if unknown := set(wanted) - {*MODELS, POOLED}:
        parser.error(f"{', '.join(sorted(unknown))}: no such model; there are {', '.join((*MODELS, POOLED))}.")
    models = [REFERENCE, *wanted, *([] if options.no_prophet else ["prophet_default"])]
    if importlib.util.find_spec("statsforecast"):
        models.append("statsforecast")
    results: dict[str, dict[str, Any]] = {model: {} for model in models}
    training = 0.0
    with (
        progress_bar("forecasting", "series") as show,
        ProcessPoolExecutor(options.jobs) as pool,
        tempfile.TemporaryDirectory() as name,
    ):
        folder = Path(name)
        if POOLED in wanted:
            longest = max(len(read(file)) for file in files)
            days = range(WEEK, longest, DAY)
            training = float(np.mean(list(pool.map(train_day, [files] * len(days), days, [folder] * len(days)))))
        hours = {**dict.fromkeys(SLOW, options.prophet_hours), "statsforecast": STATSFORECAST_HOURS}
        tasks = [
            (file, model, max(options.every, 6 * hours.get(model, 0)), folder) for model in models for file in files
        ]
        for done, ((file, model, *_), found) in enumerate(
            zip(tasks, pool.map(run, *zip(*tasks, strict=True)), strict=True), start=1
        ):
            results[model][file.stem] = found
            if show is not None:
                show(done, len(tasks))
    base, plain = results[REFERENCE], results.get("prophet_default")
    table = {model: summary(runs, base, plain) for model, runs in results.items()}
    report = {
        "settings": {"series": len(files), "every_steps": options.every, "slow_hours": hours, "levels": LEVELS, "training_seconds": training},
        "models": table,
        "series": {model: {name: measures(one, base[name]) for name, one in runs.items()} for model, runs in results.items()},
        "decisions": {model: decisions(results[model]) for model in wanted},
    }  # fmt: skip
    print_tables(report)
    keep(options, shown(report), report)


def shown(report: dict[str, Any]) -> list[Row]:
    """What docs/performance.md shows of a report."""
    models = {name: one for name, one in report["models"].items() if name != REFERENCE}
    columns = (
        ("mean absolute error / last value's", "mae_ratio", "ratio"), ("CRPS / last value's", "crps_ratio", "ratio"),
        ("mean absolute error / documented Prophet's", "mae_to_default_prophet", "ratio"),
        ("outcomes inside its 95 % band", "coverage", "ratio"), ("CPU of a fit and forecast", "cpu_ms", "ms"),
    )  # fmt: skip
    return [
        Row(f"{TITLES[name]}: {title}", one[key], unit)
        for title, key, unit in columns
        for name, one in models.items()
        if key in one
    ]


def print_tables(report: dict[str, Any]) -> None:
    settings = report["settings"]
    print(
        f"{settings['series']} series, origins every {settings['every_steps']} steps (Prophet: every {settings['slow_hours']['prophet']} hours); ratios to the reference\n"
    )
    print(
        f"{'model':24}{'MAE':>7}{'CRPS':>7}{'better':>8}{'cover':>8}{'worst':>8}{'dist':>7}{'width':>7}{'/Prophet':>9}{'CPU ms':>8}{'origins':>9}"
    )
    for model, row in report["models"].items():
        to_prophet = f"{row['mae_to_default_prophet']:.3f}" if "mae_to_default_prophet" in row else "-"
        print(
            f"{TITLES[model]:24}{row['mae_ratio']:7.3f}{row['crps_ratio']:7.3f}{row['better']:8.0%}{row['coverage']:8.1%}"
            f"{row['coverage_worst']:8.1%}{row['coverage_distance']:7.3f}{row['width_ratio']:7.2f}{to_prophet:>9}{row['cpu_ms']:8.1f}{row['origins']:9}"
        )  # fmt: skip
    if POOLED in report["models"]:
        print(f"{TITLES[POOLED]}: {settings['training_seconds']:.1f} s of a processor to train, once a day")
    if "statsforecast" not in report["models"]:
        print('(no column statsforecast: it is not installed; pip install "kvscope[compare]")')
    print(
        f"one core refreshes {60e3 / report['models'][DEFAULT_MODEL]['cpu_ms']:.0f} series a minute by {TITLES[DEFAULT_MODEL]}"
        if DEFAULT_MODEL in report["models"]
        else ""
    )
    print("\nchance of passing a quantile of the first week within the hour, from below it")
    print(
        f"{'model':24}{'limit':>6}{'origins':>9}{'events':>8}{'Brier':>8}{'skill':>8}{'rolling':>9}{'cal.err':>9}{'raw skill':>11}{'raw err':>9}"
    )
    for model, limits in report["decisions"].items():
        for name, row in limits.items():
            print(
                f"{TITLES[model]:24}{name:>6}{row['origins']:9}{row['events']:8.1%}{row['brier']:8.4f}{row['skill']:8.3f}{row['rolling_skill']:9.3f}"
                f"{row['calibration_error']:9.3f}{row['raw']['skill']:11.3f}{row['raw']['calibration_error']:9.3f}"
            )  # fmt: skip
    for model, limits in report["decisions"].items():
        if model == DEFAULT_MODEL and "q90" in limits:
            said = "  ".join(
                f"{row['said']:.2f}->{row['came']:.2f} ({row['n']})" for row in limits["q90"]["reliability"]
            )
            print(f"\n{TITLES[model]} at q90, said->came (n): {said}")


if __name__ == "__main__":
    sys.exit(main())
