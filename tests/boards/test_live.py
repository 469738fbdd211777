"""Every query of the board is answered with data by a real Prometheus that scrapes a real engine, and all alerts arrive."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from alerts import burn
from alerts.links import JOB
from dashboards.boards import BOARDS
from dashboards.panels import Board, LabelVariable, Panel, Query, Row
from tests.adapters.serving import CAPTURE, Server
from tests.boards import live
from tests.boards.promql import fill
from tests.conftest import wait_for


def _with_rows(board: Board) -> Iterator[tuple[Panel, Row | None]]:
    """Each panel and the row that it stands under."""
    row: Row | None = None
    for panel in board.panels:
        if isinstance(panel, Row):
            row = panel
            yield from ((inside, row) for inside in panel.panels)
        else:
            yield panel, row


ALL = {name: board() for name, board in BOARDS.items()}
PANELS: list[Panel] = [p for board in ALL.values() for p in board._iter_panels() if isinstance(p, Panel) and p.targets]
SCRAPES = 15
#: Panels of rows that repeat are asked for one model, as Grafana does: two models would be two lines of one name.
REPEATED = {
    panel.title for board in ALL.values() for panel, row in _with_rows(board) if row is not None and row.repeat_for
}
NOTHING_LACKS = "What is not exported, and why?"
#: Shown while the gaps between stalls vary little; a job stalls the engine here each 1.3 s.
REGULAR_STALLS = "Does anything stop the engine at regular times?"
IRREGULAR = "model_instance:kvscope_stall_gap_seconds:variation1h >= 0.3"
NEEDS_CUDA = {"Do copies hide behind the steps?"}


@dataclass
class System:
    engine: live.LoadedEngine
    prometheus: live.Prometheus
    webhook: live.Webhook


@pytest.fixture(scope="module")
def system(
    program: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory, nvml_folder: Path, data_dir: Path
) -> Iterator[System]:
    """The bundled engine under load, a host with a GPU, and what a real vLLM exported, in one Prometheus."""
    folder = tmp_path_factory.mktemp("live")
    started: list[subprocess.Popen[bytes]] = []

    def spawn(*argv: str, **kwargs: Any) -> None:
        started.append(subprocess.Popen(argv, start_new_session=True, **kwargs))

    webhook = live.Webhook()
    engine = live.LoadedEngine()
    vllm = Server()
    vllm.pages["/metrics"] = (data_dir / CAPTURE).read_text()
    alertmanager = live.free_address()
    started_here = contextlib.ExitStack()
    try:
        live.start_alertmanager(spawn, program, folder, alertmanager, webhook.url)
        live.wait_until_ready(f"http://{alertmanager}")
        # before the engine, whose tokens would wait for the fits
        forecasts = live.start_forecast_exporter(folder)
        started_here.callback(forecasts.stop)
        # what is scraped answers before the first scrape: here alerts hold for two seconds only
        engine.start()
        gpus = live.start_gpu_exporter(spawn, folder, nvml_folder)
        targets = [engine.exporter.url.removeprefix("http://").removesuffix("/metrics"), gpus]
        wait_for(lambda: live.answers(f"http://{gpus}/metrics"), 60, "the GPU exporter")
        prometheus = live.start_prometheus(
            spawn, program, folder, targets,
            engines={"vllm": vllm.address}, forecasts=forecasts.url.removeprefix("http://").removesuffix("/metrics"),
            address=live.free_address(), alertmanager=alertmanager,
        )  # fmt: skip
        live.wait_until_ready(prometheus.url)
        yield System(engine, prometheus, webhook)
    finally:
        engine.stop()
        webhook.stop()
        vllm.end()
        started_here.close()
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in started:
            process.wait(timeout=15)


@pytest.fixture(scope="module")
def scraped(system: System) -> System:
    """The system after enough scrapes for rates, and after rules have been evaluated over them."""
    count = f'count_over_time(up{{job="{JOB}"}}[5m])'

    def enough() -> bool:
        result = system.prometheus.get("query", query=count)["result"]
        return bool(result) and float(result[0]["value"][1]) >= SCRAPES

    wait_for(enough, 60, f"{SCRAPES} scrapes")
    return system


def _answer(prometheus: live.Prometheus, query: Query, values: Mapping[str, str]) -> list[dict[str, Any]]:
    """Series with at least one finite sample, as the panel would get them over the last 8 seconds."""
    # no engine here has run for a week: what is compared with the past is compared with a moment ago
    expr = re.sub("offset 1[dwh]", "offset 2s", fill(query.expr, values, rate_interval="5s"))
    now = time.time()
    if query.instant:
        result = prometheus.get("query", query=expr)["result"]
        samples = [(r["metric"], [r["value"]]) for r in result]
    else:
        result = prometheus.get("query_range", query=expr, start=now - 8, end=now, step=1)["result"]
        samples = [(r["metric"], r["values"]) for r in result]
    return [metric for metric, values in samples if any(math.isfinite(float(value)) for _, value in values)]


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.title)
def test_every_query_of_the_panel_is_answered_with_data(scraped: System, panel: Panel) -> None:
    if panel.title in NEEDS_CUDA:
        pytest.skip("copies are timed on a GPU alone")
    for query in panel.targets:
        found = _answer(scraped.prometheus, query, {"model": live.MODEL} if panel.title in REPEATED else {})
        if panel.title == NOTHING_LACKS:  # kvscope's own engine feeds every panel
            assert not found
            continue
        if panel.title == REGULAR_STALLS and not found and scraped.prometheus.get("query", query=IRREGULAR)["result"]:
            pytest.skip("this busy machine stopped the engine at other times, too")
        assert found, query.expr
        for label in re.findall(r"\{\{\s*(\w+)\s*\}\}", query.legendFormat):
            # series of kvscope's own engine have no label engine
            assert label == "engine" or all(label in metric for metric in found), (
                f"legend {query.legendFormat}: {found[0]}"
            )
        if query.legendFormat and not query.instant:  # lines of one panel that bear one name cannot be told apart
            names = [
                re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda m, of=metric: of.get(m[1], ""), query.legendFormat)
                for metric in found
            ]
            assert len(names) == len(set(names)), names


def test_panels_that_idle_or_unquantized_engines_leave_empty_say_why() -> None:
    """Here all of them have data (see above): the engine is busy, its KV quantized and bounded."""
    reasons = {panel.title: panel.when_empty for panel in PANELS if panel.when_empty}
    assert "How far is stored KV from exact?" in reasons
    assert all(re.match(r"No [a-zA-Z :]{8}", reason) for reason in reasons.values())


@pytest.mark.parametrize(
    "variable", [v for v in ALL["overview"].templating.list if isinstance(v, LabelVariable)], ids=lambda v: v.name
)
def test_variable_offers_values(scraped: System, variable: LabelVariable) -> None:
    selector, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable.query).groups()  # type: ignore[union-attr]
    values = scraped.prometheus.get(f"label/{label}/values", **{"match[]": fill(selector)})
    assert values
    if variable.name == "class":
        assert len(values) == 3


def test_every_query_that_asks_for_exemplars_gets_some(scraped: System) -> None:
    now = time.time()
    asked = [query for panel in PANELS for query in panel.targets if query.exemplar]
    assert len(asked) >= 2
    for query in asked:
        expr = fill(query.expr, rate_interval="5s")
        found = scraped.prometheus.get("query_exemplars", query=expr, start=now - 30, end=now)
        assert sum(len(series["exemplars"]) for series in found), expr


def test_the_parts_add_up_on_the_live_board(scraped: System) -> None:
    """At one instant: blocks by state make the pool, and the make-up of the slowest 1 % is one total however it is split."""
    value, tail = scraped.prometheus.value, "model_state_component:kvscope_request_phase_seconds:p99_tail_mean5m"
    assert value(f'sum(model_state:kvscope_kv_blocks:sum{{model="{live.MODEL}"}})') == live.POOL
    ratio = value(f"sum(sum by (state) ({tail})) / sum(sum by (component) ({tail}))")
    assert ratio == pytest.approx(1.0, abs=1e-9)
    # the tail's mean is at least the lower bound that selected it, which is at most its p99 by the histogram
    assert value(f"sum({tail})") > value(f'model:kvscope_request_duration_seconds:p90_5m{{model="{live.MODEL}"}}') * 0.5
    # the components cover the engine's time: one second a second (a line through a minute: the moment of one scrape hardly counts)
    assert value("sum(deriv(kvscope_step_seconds_total[1m]))") == pytest.approx(1.0, abs=0.05)


def test_prometheus_counts_exactly_the_requests_that_the_engine_ended(scraped: System) -> None:
    engine, value = scraped.engine, scraped.prometheus.value
    engine.paused.set()
    try:
        wait_for(lambda: engine.engine.num_running + engine.engine.num_waiting == 0, 30, "the engine to run dry")
        time.sleep(2.5)  # two scrapes
        records = list(engine.telemetry.finished)
        served = [r for r in records if r.outcome in ("stop", "length")]
        assert value("sum(kvscope_requests_total)") == len(records)
        assert value('sum(kvscope_requests_total{outcome="abort"})') == len(records) - len(served)
        assert value("sum(kvscope_kv_queried_tokens_total)") == sum(r.prompt_tokens for r in records if r.scheduled)
        assert value("sum(kvscope_kv_hit_tokens_total)") == sum(r.cached_tokens for r in records)
        assert value(f'model:kvscope_requests_running:sum{{model="{live.MODEL}"}}') == 0
    finally:
        engine.paused.clear()


def test_seeded_faults_reach_a_webhook_through_alertmanager(scraped: System) -> None:
    """Overload fills the pool and burns the budget; then the exporter goes away. Nothing fired before, but where this machine was too busy for
    a source to answer within the second that a scrape has here: that is told, and true."""
    silent = {
        r["metric"]["instance"] for r in scraped.prometheus.get("query", query="min_over_time(up[5m]) == 0")["result"]
    }
    fired = scraped.webhook.firing().items()
    assert [
        each for name, each in fired if name != "KvscopeSourceStale" or each["labels"]["instance"] not in silent
    ] == []
    scraped.engine.overload.set()
    wait_for(
        lambda: {"KvscopeTTFTBudgetBurn", "KvscopeKVCacheExhausted"} <= set(scraped.webhook.firing()),
        90,
        "alerts of the overload",
    )
    slow, full = scraped.webhook.firing()["KvscopeTTFTBudgetBurn"], scraped.webhook.firing()["KvscopeKVCacheExhausted"]
    assert slow["labels"]["model"] == full["labels"]["model"] == live.MODEL
    times = float(re.search(r"burns ([\d.]+) times", slow["annotations"]["description"])[1])  # type: ignore[index]
    assert times > burn.PAIRS[0].burn
    assert slow["annotations"]["runbook_url"].endswith("/d/kvscope-runbook-ttftbudgetburn")
    assert full["labels"]["instance"] == scraped.engine.exporter.url.removeprefix("http://").removesuffix("/metrics")
    scraped.engine.exporter.stop()
    said = "does not answer scrapes"
    wait_for(
        lambda: any(said in a["annotations"]["description"] for a in list(scraped.webhook.alerts)),
        30,
        "the stale alert",
    )
