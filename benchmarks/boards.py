"""How fast a Prometheus answers every query of every board, and evaluates every rule, for a fleet.

    python benchmarks/boards.py [--replicas 100] [--hours 24] [--interval 60] [--raw-interval 30] [--only p99] [--json FILE]

A real engine under load and a real Prometheus with the generated rules give the series that one replica has (a GPU's families and those of a
forecast exporter are made up: neither is needed). These are multiplied to --replicas, and those that boards read are written as --hours of history at one sample
each --interval seconds (recorded series) or --raw-interval seconds (series of exporters), by promtool. Then a Prometheus on that folder is asked each
query as Grafana asks it (All, and the one value of each variable; 24 h and 1 h; 720 points at most), three times; the best of three counts, since the
machine may be busy with other things. Last, --replicas targets are scraped live and the rule groups' own evaluation times are read.

What is scaled down: real scrapes and rules come each 15 s. A query over exporters' series touches twice as many samples then as with
--raw-interval 30; one over recorded series the same number at steps of a minute or more. Buckets that are read at the right edge alone (for
exemplars) have one hour of history. Needs prometheus and promtool 2.42 or later; the default writes about 3 GB below --folder.
"""

from __future__ import annotations

import argparse
import contextlib
import http.server
import itertools
import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
sys.path.insert(
    0, str(Path(__file__).resolve().parent.parent)
)  # tests/boards/live.py starts the engine and the servers

import httpx  # noqa: E402
import numpy as np  # noqa: E402

from alerts import forecasts  # noqa: E402
from dashboards.boards import BOARDS  # noqa: E402
from dashboards.panels import LabelVariable, Panel, Query, write  # noqa: E402
from figures import Parser, Row, keep  # noqa: E402
from observability import catalog  # noqa: E402
from observability.cli._terminal import progress_bar  # noqa: E402
from observability.forecast.series import FORECAST_SIGNALS  # noqa: E402
from observability.store.forecasts import MODELS  # noqa: E402
from tests.boards import live  # noqa: E402
from tests.boards.promql import fill, selectors  # noqa: E402

Labels = dict[str, str]
COUNTERS = {f.series for f in catalog.FAMILIES if f.kind in ("counter", "histogram")}
FIRST = "replica-000:8000"
REPEATS = 3
POINTS = 720
TARGET_P95, LIMIT = 1.0, 3.0
SCRAPE = 15


def replica(number: int) -> str:
    return f"replica-{number:03d}:8000"


# -- what one replica has ---------------------------------------------------------------------------------------------


class Template:
    """Series of one live engine as its Prometheus has them, and the text of its page."""

    def __init__(self, series: list[tuple[Labels, float]], page: str) -> None:
        self.series, self.page = series, page

    @classmethod
    def measured(cls, folder: Path) -> Template:
        started: list[subprocess.Popen[bytes]] = []
        engine = live.LoadedEngine()
        try:
            address = live.free_address()
            target = engine.exporter.url.removeprefix("http://").removesuffix("/metrics")
            prometheus = live.start_prometheus(
                lambda *argv, **kw: started.append(subprocess.Popen(argv, **kw)),
                found,
                folder,
                [target],
                address=address,
            )
            engine.start()
            live.wait_until_ready(prometheus.url)
            time.sleep(15)
            engine.overload.set()  # preemption, waiting, long requests: their series exist only then
            time.sleep(15)
            now = time.time()
            series: list[tuple[Labels, float]] = [
                (
                    result["metric"] | ({"instance": FIRST} if result["metric"].get("instance") == target else {}),
                    float(result["value"][1]),
                )
                for result in prometheus.get("query", query='{__name__!=""}', time=now)["result"]
                if math.isfinite(float(result["value"][1]))
            ]
            page = httpx.get(engine.exporter.url).text
        finally:
            engine.stop()
            end(started)
        return cls(series + gpu_series() + forecast_series(), page)

    @property
    def exported(self) -> int:
        return sum(
            1 for labels, _ in self.series if labels.get("instance") == FIRST and "kvscope_" in labels["__name__"][:8]
        )


def gpu_series() -> list[tuple[Labels, float]]:
    """One GPU a replica: every label value that the catalogue lists for its families, one value where it lists none."""
    out = []
    for family in catalog.FAMILIES:
        if not family.series.startswith(("kvscope_gpu_", "kvscope_hardware_")):
            continue
        labels = {label: "0" for label in family.labels} | {
            "__name__": family.series,
            "instance": FIRST,
            "job": "kvscope",
        }
        for kind in ("used", "total", "draw", "limit") if "kind" in family.labels else ("",):
            for bound in ("current", "max") if "bound" in family.labels else ("",):
                extra = {
                    k: v
                    for k, v in (
                        ("kind", kind),
                        ("bound", bound),
                        ("domain", "sm" if "domain" in family.labels else ""),
                    )
                    if v
                }
                out.append((labels | extra, 1.0))
    return out


def forecast_series() -> list[tuple[Labels, float]]:
    """What the rules record of one forecast exporter: every label value that it can have. They are of a model, so a fleet has no more."""
    values = {
        "model": ("tiny",), "signal": tuple(FORECAST_SIGNALS), "horizon": catalog.FORECAST_HORIZONS,
        "quantile": tuple(f"{q:g}" for q in catalog.FORECAST_QUANTILES), "limit": ("kv_exhaustion", "kv_usage_warning", "kv_room", "ttft", "e2e"),
        "forecaster": MODELS, "status": ("own",), "history": ("observed",), "band": tuple(map(str, catalog.FORECAST_BANDS)),
        "instance": ("forecast:9402",), "reason": catalog.FORECAST_FAILED,
    }  # fmt: skip
    out: list[tuple[Labels, float]] = [
        ({"__name__": catalog.FORECAST_LIMIT.series, "instance": "forecast:9402", "job": "kvscope-forecast"} | labels, 1.0)
        for labels in _every(values, catalog.FORECAST_LIMIT.labels)
    ]  # fmt: skip
    for rule in forecasts.RECORDINGS:
        names = [name for name in values if f"_{name}_" in f"_{rule.name.partition(':')[0]}_"]
        out += [({"__name__": rule.name} | labels, 0.5) for labels in _every(values, names)]
    return out


def _every(values: dict[str, tuple[str, ...]], names: Sequence[str]) -> list[Labels]:
    return [dict(zip(names, each, strict=True)) for each in itertools.product(*(values[name] for name in names))]


def found(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise SystemExit(f"{name} is not installed: apt-get install prometheus")
    return path


def end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.send_signal(signal.SIGTERM)
    for process in processes:
        process.wait(timeout=60)


# -- the history ------------------------------------------------------------------------------------------------------


def asked(boards: dict[str, Any]) -> dict[str, list[list[tuple[str, str]]]]:
    """Name of each series that a query asks for -> the label values that must be equal, for each selector of it."""
    out: dict[str, list[list[tuple[str, str]]]] = defaultdict(list)
    for board in boards.values():
        for panel in board._iter_panels():
            for query in panel.targets or () if isinstance(panel, Panel) else ():
                for selector, _ in selectors(fill(query.expr)):
                    equal = [
                        (m.name, m.value)
                        for m in selector.matchers.matchers
                        if str(m.op).endswith("Equal") and "Not" not in str(m.op)
                    ]
                    out[selector.name].append(equal)
    return out


def read_at_the_end(boards: dict[str, Any]) -> set[str]:
    """Series of which queries read the last minutes alone."""
    late, over_time = set[str](), set[str]()
    for board in boards.values():
        for panel in board._iter_panels():
            for query in panel.targets or () if isinstance(panel, Panel) else ():
                names = {selector.name for selector, _ in selectors(fill(query.expr))}
                (late if "@ end()" in query.expr else over_time).update(names)
    return late - over_time


def fleet(
    template: Template, names: dict[str, list[list[tuple[str, str]]]], replicas: int
) -> dict[str, list[tuple[str, float]]]:
    """Name -> (label part, level) of every series of the fleet that boards ask for."""
    out: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for labels, value in template.series:
        name = labels["__name__"]
        if not any(all(labels.get(k, "") == v for k, v in equal) for equal in names.get(name, ())):
            continue
        own = labels.get("instance") == FIRST
        for number in range(replicas if own else 1):
            shown = labels | ({"instance": replica(number)} if own else {})
            text = ",".join(f"{k}={json.dumps(v)}" for k, v in sorted(shown.items()) if k != "__name__")
            out[name].append((f"{name}{{{text}}} ", value))
    return out


def backfill(
    folder: Path,
    series: dict[str, list[tuple[str, float]]],
    late: set[str],
    hours: float,
    interval: int,
    raw_interval: int,
    end_at: int,
) -> int:
    """Writes `series` (of `late` the last hour) as blocks that end at `end_at`; the number of samples. Levels move by a fifth; counters grow by theirs an hour."""
    rng, samples = np.random.default_rng(0), 0
    openmetrics = folder / "history.om"
    with openmetrics.open("w") as out, progress_bar("Writing history", "series") as show:
        done, total = 0, sum(map(len, series.values()))
        for name, members in series.items():
            step = interval if ":" in name else raw_interval
            times = np.arange(end_at - int((1 if name in late else hours) * 3600), end_at, step)
            stamps = [f" {t}\n" for t in times.tolist()]
            kind = "counter" if name.endswith("_total") else "gauge"
            out.write(f"# TYPE {name.removesuffix('_total') if kind == 'counter' else name} {kind}\n")
            for text, level in members:
                if name in COUNTERS:
                    values = level + level * np.arange(len(times)) * step / 3600
                else:
                    values = level * (1 + 0.2 * np.sin(times / 5000 + rng.random() * 6))
                out.write("".join([f"{text}{v:.6g}{t}" for v, t in zip(values.tolist(), stamps, strict=True)]))
                samples += len(stamps)
                done += 1
                if show:
                    show(done, total)
        out.write("# EOF\n")
    subprocess.run(
        [found("promtool"), "tsdb", "create-blocks-from", "openmetrics", "--max-block-duration=48h", str(openmetrics), str(folder / "data")],
        check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    openmetrics.unlink()
    return samples


# -- asking -----------------------------------------------------------------------------------------------------------


def choices(board: Any, template: Template) -> list[tuple[str, Labels]]:
    """(what is chosen, variables): All, then each value that a variable of the board offers, alone."""
    out: list[tuple[str, Labels]] = [("All", {})]
    for variable in board.templating.list:
        if not isinstance(variable, LabelVariable):
            continue
        name, label = re.match(r"label_values\(([\w:]+).*, (\w+)\)", variable.query).groups()  # type: ignore[union-attr]
        values = sorted(
            {labels[label] for labels, _ in template.series if labels["__name__"] == name and label in labels}
        )
        out += [
            (f"{variable.name}={value}", {variable.name: re.escape(value).replace("\\", "\\\\")}) for value in values
        ]
    return out


def ask(url: str, query: Query, values: Labels, hours: float, end_at: int) -> tuple[float, int]:
    """(best seconds of a few, series) of a query as Grafana asks it."""
    step = max(SCRAPE, math.ceil(hours * 3600 / POINTS / SCRAPE) * SCRAPE)
    expr = fill(query.expr, values, rate_interval=f"{max(4 * SCRAPE, step + SCRAPE)}s")
    where = "query" if query.instant else "query_range"
    params: dict[str, Any] = {"query": expr}
    params |= {"time": end_at} if query.instant else {"start": end_at - hours * 3600, "end": end_at, "step": step}
    best, count = math.inf, 0
    for _ in range(REPEATS):
        began = time.perf_counter()
        answer = httpx.post(f"{url}/api/v1/{where}", data=params, timeout=120)
        took = time.perf_counter() - began
        body = answer.json()
        if body["status"] != "success":
            raise SystemExit(f"{expr}: {body['error']}")
        count = len(body["data"]["result"])
        best = min(best, took)
        if took > LIMIT:
            break
    return best, count


def measure(
    url: str, boards: dict[str, Any], template: Template, spans: list[float], end_at: int
) -> list[dict[str, Any]]:
    work = [
        (name, panel, query, chosen, values, hours)
        for name, board in boards.items()
        for panel in board._iter_panels()
        if isinstance(panel, Panel)
        for query in panel.targets or ()
        for hours in spans
        for chosen, values in choices(board, template)
    ]
    rows, seen = [], dict[tuple[str, float], tuple[float, int]]()
    with progress_bar("Asking", "queries") as show:
        for number, (name, panel, query, chosen, values, hours) in enumerate(work):
            key = (fill(query.expr, values), hours)
            if key not in seen:
                seen[key] = ask(url, query, values, hours, end_at)
                seconds, count = seen[key]
                rows.append(
                    {
                        "board": name,
                        "panel": panel.title,
                        "chosen": chosen,
                        "hours": hours,
                        "seconds": seconds,
                        "series": count,
                        "expr": query.expr,
                    }
                )
            if show:
                show(number, len(work))
    return rows


# -- rules ------------------------------------------------------------------------------------------------------------


class Page(http.server.BaseHTTPRequestHandler):
    """The page of the template; counters grow by their level in a minute."""

    lines: ClassVar[list[tuple[str, float, bool]]] = []
    began = 0.0
    _made: tuple[int, bytes] = (-1, b"")
    lock = threading.Lock()

    def do_GET(self) -> None:
        cls = type(self)
        turn = int((time.time() - cls.began) / SCRAPE)
        with cls.lock:
            if cls._made[0] != turn:
                grown = 1 + turn * SCRAPE / 60
                text = "".join(
                    f"{name} {value * grown if counts else value:.9g}\n" for name, value, counts in cls.lines
                )
                cls._made = (turn, text.encode())
        body = cls._made[1]
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Quiet."""


def rule_times(folder: Path, template: Template, replicas: int, seconds: float) -> dict[str, float]:
    """Rule group -> seconds of its slowest evaluation while `replicas` targets are scraped each 15 s."""
    lines = []
    for line in template.page.splitlines():
        if line and not line.startswith("#"):
            series, _, value = line.rpartition(" ")
            lines.append(
                (series, float(value), series.partition("{")[0].endswith(("_total", "_bucket", "_sum", "_count")))
            )
    Page.lines, Page.began = lines, time.time()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    target = f"127.0.0.1:{server.server_address[1]}"
    from alerts import rules

    (folder / "recording.yml").write_text(rules.recording_file())
    (folder / "alerts.yml").write_text(rules.alert_file())
    jobs = [{"targets": [target], "labels": {"instance": replica(number)}} for number in range(replicas)]
    config = {
        "global": {"scrape_interval": f"{SCRAPE}s", "evaluation_interval": f"{SCRAPE}s"},
        "rule_files": ["recording.yml", "alerts.yml"],
        "scrape_configs": [{"job_name": "kvscope", "static_configs": jobs}],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))
    slowest: dict[str, float] = defaultdict(float)
    with running(folder, "live") as url:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(5)
            body = httpx.get(f"{url}/api/v1/rules", timeout=30).json()["data"]["groups"]
            for group in body:
                if errors := [rule["lastError"] for rule in group["rules"] if rule.get("lastError")]:
                    raise SystemExit(f"{group['name']}: {errors[0]}")
                slowest[group["name"]] = max(slowest[group["name"]], group["evaluationTime"])
        answer = httpx.get(f"{url}/api/v1/query", params={"query": 'count({job="kvscope"})'}, timeout=120).json()
        print(f"live series: {answer['data']['result'][0]['value'][1]} of {replicas} replicas")
    server.shutdown()
    server.server_close()
    return dict(slowest)


@contextlib.contextmanager
def running(folder: Path, data: str) -> Iterator[str]:
    """A Prometheus on `folder`/prometheus.yml and the folder `data` below it."""
    address = live.free_address()
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [found("prometheus"), f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/{data}",
             f"--web.listen-address={address}", "--storage.tsdb.retention.time=30d", "--query.max-samples=200000000"],
            stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        live.wait_until_ready(f"http://{address}", 120)
        yield f"http://{address}"
    finally:
        end([process])


# -- the whole --------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = Parser(__doc__, quick={"replicas": 5, "hours": 3.0, "rules_seconds": 45.0})
    parser.add_argument("--replicas", type=int, default=100)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--interval", type=int, default=60, help="seconds between samples of recorded series")
    parser.add_argument("--raw-interval", type=int, default=30, help="seconds between samples of exporters' series")
    parser.add_argument("--only", action="append", choices=list(BOARDS), help="this board alone; again for more")
    parser.add_argument(
        "--rules-seconds", type=float, default=90, help="how long live replicas are scraped; 0: not at all"
    )
    parser.add_argument(
        "--folder", type=Path, help="where the history is kept for the next run [default: a temporary folder]"
    )
    args = parser.parse_args()
    boards = {name: board() for name, board in BOARDS.items() if not args.only or name in args.only}
    for board in boards.values():
        write(board)  # numbers panels and queries
    with contextlib.ExitStack() as stack:
        folder = args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvscope-boards-")))
        folder.mkdir(parents=True, exist_ok=True)
        template, end_at, samples = history(folder, boards, args)
        (folder / "prometheus.yml").write_text("{}")
        with running(folder, "data") as url:
            rows = measure(url, boards, template, [args.hours, 1.0], end_at)
        report(rows)
        groups = rule_times(folder, template, args.replicas, args.rules_seconds) if args.rules_seconds else {}
        report_rules(groups)
    times = sorted(row["seconds"] for row in rows)
    shown = [
        Row("all queries of all boards, p95", times[math.ceil(0.95 * len(times)) - 1], "s"),
        Row("the slowest query", times[-1], "s"),
    ]
    if groups:
        shown.append(
            Row(f"all rule groups / the {SCRAPE} s between evaluations", sum(groups.values()) / SCRAPE, "ratio")
        )
    keep(args, shown, {"samples": samples, "queries": rows, "rule_groups": groups})


def history(folder: Path, boards: dict[str, Any], args: argparse.Namespace) -> tuple[Template, int, int]:
    """(what one replica has, end of the history in Unix seconds, samples): written to `folder`, or found there from a run of the same size."""
    size = {key: getattr(args, key) for key in ("replicas", "hours", "interval", "raw_interval", "only")}
    made = folder / "made.json"
    if made.exists() and (kept := json.loads(made.read_text()))["size"] == size:
        return Template(kept["series"], kept["page"]), kept["end_at"], kept["samples"]
    shutil.rmtree(folder / "data", ignore_errors=True)
    (folder / "template").mkdir(exist_ok=True)
    template = Template.measured(folder / "template")
    print(f"one replica exports {template.exported} series")
    end_at = int(time.time()) - 2 * 3600
    series = fleet(template, asked(boards), args.replicas)
    began = time.monotonic()
    samples = backfill(folder, series, read_at_the_end(boards), args.hours, args.interval, args.raw_interval, end_at)
    print(
        f"{samples / 1e6:.1f} M samples of {sum(map(len, series.values())):,} series written in {time.monotonic() - began:.0f} s"
    )
    made.write_text(
        json.dumps(
            {"size": size, "series": template.series, "page": template.page, "end_at": end_at, "samples": samples}
        )
    )
    return template, end_at, samples


def report(rows: list[dict[str, Any]]) -> None:
    print(f"\n{'board':14}{'span':>6}{'queries':>9}{'empty':>7}{'median s':>10}{'p95 s':>8}{'max s':>8}")
    for name in dict.fromkeys(row["board"] for row in rows):
        for hours in dict.fromkeys(row["hours"] for row in rows):
            of = [row for row in rows if row["board"] == name and row["hours"] == hours]
            times = sorted(row["seconds"] for row in of)
            empty = sum(1 for row in of if not row["series"])
            p95 = times[math.ceil(0.95 * len(times)) - 1]
            print(
                f"{name:14}{hours:>5g}h{len(of):>9}{empty:>7}{statistics.median(times):>10.3f}{p95:>8.2f}{times[-1]:>8.2f}"
            )
    times = sorted(row["seconds"] for row in rows)
    p95 = times[math.ceil(0.95 * len(times)) - 1]
    print(f"\nall queries: p95 {p95:.2f} s (target {TARGET_P95:g}), slowest {times[-1]:.2f} s (limit {LIMIT:g})")
    for row in sorted(rows, key=lambda row: -row["seconds"])[:12]:
        print(
            f"  {row['seconds']:6.2f} s {row['hours']:g}h {row['series']:>5} series  {row['board']}: {row['panel']} [{row['chosen']}]"
        )


def report_rules(groups: dict[str, float]) -> None:
    if groups:
        print("\nslowest evaluation of each rule group")
        for name, seconds in sorted(groups.items(), key=lambda item: -item[1]):
            print(f"  {seconds:6.3f} s  {name}")
        print(f"  {sum(groups.values()):6.3f} s  in all, of {SCRAPE} s")


if __name__ == "__main__":
    main()
