"""The boards as Grafana would read them: types of Grafana 13.2, its lists of ids, and the rules of the known linters."""

from __future__ import annotations

import copy
import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator

from alerts import burn, forecasts, rules, symptoms
from alerts.links import board_url, runbook_url
from dashboards import runbooks
from dashboards.boards import BOARDS as MAKERS
from dashboards.panels import COLUMNS, write
from observability import catalog, objectives
from tests.boards.promql import TARGET_LABELS, fill, function_names, known_series, selectors

SCHEMAS = Path(__file__).parent / "schemas"
TYPES = {
    kind: Draft7Validator(schema)
    for kind, schema in json.loads((SCHEMAS / "grafana-13.2.3-types.json").read_text())["schemas"].items()
}
IDS = json.loads((SCHEMAS / "grafana-13.2.3-ids.json").read_text())
MAIN = {name: json.loads(write(board())) for name, board in MAKERS.items()}
BOARDS = [*MAIN.values(), *(json.loads(write(runbooks.board(rules.named(name)))) for name in rules.ALERT_NAMES)]
KNOWN = known_series()

Json = dict[str, Any]


def every_panel(board: Json) -> Iterator[Json]:
    for panel in board["panels"]:
        yield panel
        yield from panel.get("panels", [])


def asking(board: Json) -> list[Json]:
    return [panel for panel in every_panel(board) if panel["type"] not in ("row", "text")]


EVERY = [panel for board in MAIN.values() for panel in asking(board)]
PANELS = [
    pytest.param(panel, id=f"{name}: {panel['title']}") for name, board in MAIN.items() for panel in asking(board)
]
TARGETS = [
    pytest.param(panel, target, id=f"{name}: {panel['title']} {target['refId']}")
    for name, board in MAIN.items()
    for panel in asking(board)
    for target in panel["targets"]
]


# -- types and ids --------------------------------------------------------------------------------------------------


def faults(board: Json) -> list[str]:
    """What is wrong with a board, by Grafana's types, its id lists, and the grid."""
    found = [f"board: {e.json_path} {e.message}" for e in TYPES["dashboard"].iter_errors(board)]
    variables = {v["name"] for v in board.get("templating", {}).get("list", [])} | {
        "__rate_interval",
        "__interval",
        "__range",
    }
    ids: set[int] = set()
    for panel in every_panel(board):
        name = f"{panel['type']} {panel.get('title')!r}"
        if panel["type"] not in TYPES:
            found.append(f"{name}: no such panel type")
            continue
        found += [f"{name}: {e.json_path} {e.message}" for e in TYPES[panel["type"]].iter_errors(panel)]
        if panel["id"] in ids:
            found.append(f"{name}: id {panel['id']} is taken")
        ids.add(panel["id"])
        defaults = panel.get("fieldConfig", {}).get("defaults", {})
        units = [defaults.get("unit"), panel.get("options", {}).get("yAxis", {}).get("unit")]
        units += [panel.get("options", {}).get("cellValues", {}).get("unit")]
        for unit in filter(None, units):
            if unit not in IDS["units"] and not re.match(r"(suffix|prefix|si|time|count|currency):", unit):
                found.append(f"{name}: no unit {unit}")
        for calc in panel.get("options", {}).get("reduceOptions", {}).get("calcs", []):
            if calc not in IDS["reducers"]:
                found.append(f"{name}: no reducer {calc}")
        for calc in panel.get("options", {}).get("legend", {}).get("calcs", []):
            if calc not in IDS["reducers"]:
                found.append(f"{name}: no reducer {calc}")
        for override in panel.get("fieldConfig", {}).get("overrides", []):
            if override["matcher"]["id"] not in IDS["fieldMatchers"]:
                found.append(f"{name}: no matcher {override['matcher']['id']}")
        for step in panel.get("transformations", []):
            allowed = IDS["transformations"].get(step["id"])
            if allowed is None:
                found.append(f"{name}: no transformation {step['id']}")
            elif extra := set(step["options"]) - set(allowed) - {"sort"}:
                found.append(f"{name}: {step['id']} has no option {extra}")
        for target in panel.get("targets", []):
            for variable in re.findall(r"\$\{?(\w+)", target["expr"]):
                if variable not in variables:
                    found.append(f"{name}: no variable {variable}")
            try:
                used = [s.name for s, _ in selectors(fill(target["expr"]))]
            except ValueError as error:
                found.append(f"{name}: {error}")
            else:
                found += [f"{name}: nobody exports {x}" for x in used if x not in KNOWN]
    return found + grid_faults(board["panels"])


def grid_faults(panels: list[Json]) -> list[str]:
    """Cells of the 24-column grid that two panels claim, or that lie empty beside a panel."""
    taken: dict[tuple[int, int], int] = {}
    found = []
    for panel in panels:
        place = panel["gridPos"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                if (x, y) in taken:
                    found.append(f"panel {panel['id']} lies over panel {taken[x, y]}")
                taken[x, y] = panel["id"]
        if panel.get("panels"):
            found += grid_faults(panel["panels"])
    rows = {y for _, y in taken}
    found += [f"hole at column {x}, row {y}" for y in rows for x in range(COLUMNS) if (x, y) not in taken]
    return sorted(set(found))


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board["uid"])
def test_board_fits_the_types_of_grafana_13(board: Json) -> None:
    assert faults(board) == []


def _first(kind: str, board: Json) -> Json:
    return next(p for p in every_panel(board) if p["type"] == kind)


def _set(path: str, value: Any) -> Callable[[Json], None]:
    """Sets board -> kind -> dotted path to `value`; kind `board` is the board itself."""

    def change(board: Json) -> None:
        kind, *keys = path.split(".")
        node: Any = board if kind == "board" else _first(kind, board)
        for key in keys[:-1]:
            node = node[int(key)] if isinstance(node, list) else node[key]
        if value is KeyError:
            del node[keys[-1]]
        else:
            node[keys[-1]] = value

    return change


PLANTED = {
    "unknown key at top level": _set("board.sharedCrosshair", True),
    "unknown key in a panel": _set("stat.span", 3),
    "unknown key in options": _set("stat.options.colourMode", "value"),
    "unknown key in custom": _set("timeseries.fieldConfig.defaults.custom.lineWdth", 2),
    "unknown key in a target": _set("timeseries.targets.0.intervalFactor", 2),
    "value not in enum: colour mode": _set("stat.options.colorMode", "backgrund"),
    "value not in enum: stacking": _set("timeseries.fieldConfig.defaults.custom.stacking", {"mode": "stacked"}),
    "value not in enum: target format": _set("timeseries.targets.0.format", "heat"),
    "value not in enum: refresh": _set("board.templating.list.1.refresh", 7),
    "wrong type: line width": _set("timeseries.fieldConfig.defaults.custom.lineWidth", "2"),
    "wrong type: schema version": _set("board.schemaVersion", "42"),
    "wrong type: threshold": _set("stat.fieldConfig.defaults.thresholds.steps", [{"value": "null", "color": "green"}]),
    "wrong type: data source": _set("stat.datasource", "prometheus"),
    "wrong type: mapping": _set("stat.fieldConfig.defaults.mappings", [{"type": "x"}]),
    "required option missing": _set("stat.options.wideLayout", KeyError),
    "title missing": _set("stat.title", KeyError),
    "old heatmap colour": _set("heatmap.options.color", {"cardColor": "#fff"}),
    "unknown panel type": _set("stat.type", "singlestat"),
    "PromQL that does not parse": _set("stat.targets.0.expr", "sum(up"),
    "metric that nobody exports": _set("stat.targets.0.expr", "kvscope_kv_block"),
    "undefined variable": _set("stat.targets.0.expr", 'kvscope_kv_blocks{model="$modle"}'),
    "unknown unit": _set("stat.fieldConfig.defaults.unit", "second"),
    "unknown reducer": _set("stat.options.reduceOptions.calcs", ["latest"]),
    "unknown transformation": _set("table.transformations.0.id", "merges"),
    "unknown option of a transformation": _set("table.transformations.1.options.renameBy", {}),
    "unknown override matcher": _set("timeseries.fieldConfig.overrides.0.matcher.id", "byLabel"),
    "two panels with one id": _set("stat.id", 1),
    "panels that overlap": _set("timeseries.gridPos.y", 1),
}


@pytest.mark.parametrize("name", PLANTED)
def test_checks_find_a_planted_error(name: str) -> None:
    """In a board that holds a panel of each kind."""
    kinds = {panel["type"]: panel for panel in EVERY}
    board = copy.deepcopy(MAIN["p99"])
    board["panels"] += [
        copy.deepcopy(panel) for kind, panel in kinds.items() if kind not in {p["type"] for p in board["panels"]}
    ]
    for number, panel in enumerate(board["panels"], 1):
        panel["id"], panel["gridPos"] = number, {"x": 0, "y": number, "w": 24, "h": 1}
        for inner, below in enumerate(panel.get("panels", []), 1):
            below["id"] = 1000 * number + inner
    assert not faults(board)
    PLANTED[name](board)
    assert faults(board)


# -- house rules ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board["uid"])
def test_board_is_read_only_tagged_and_in_schema_42(board: Json) -> None:
    assert board["schemaVersion"] == 42
    assert board["editable"] is False
    assert "kvscope" in board["tags"]
    assert board["uid"]
    assert len(board["uid"]) <= 40
    assert board["title"]
    assert board["description"]


def test_writing_a_board_twice_gives_the_same_bytes() -> None:
    for make in MAKERS.values():
        assert write(make()) == write(make())


@pytest.mark.parametrize("board", MAIN.values(), ids=list(MAIN))
def test_variables_are_a_data_source_and_multi_value_labels(board: Json) -> None:
    variables = {v["name"]: v for v in board["templating"]["list"]}
    assert list(variables) == ["datasource", "model", "instance", "class"]
    assert variables["datasource"]["label"] == "Data source"
    for name in ("model", "instance", "class"):
        v = variables[name]
        assert (v["type"], v["multi"], v["includeAll"], v["allValue"], v["refresh"]) == ("query", True, True, ".+", 2)
        assert v["datasource"]["uid"] == "${datasource}"
        selector, label = re.fullmatch(r"label_values\((.*), (\w+)\)", v["query"]["query"]).groups()  # type: ignore[union-attr]
        [(selector, _)] = selectors(fill(selector))
        assert label in KNOWN[selector.name] | TARGET_LABELS


@pytest.mark.parametrize("panel", PANELS)
def test_panel_asks_a_question_explains_itself_and_links_its_runbook(panel: Json) -> None:
    assert panel["title"].endswith(("?", "(P99)"))
    assert len(panel["title"]) <= 60
    assert len(panel["description"]) >= 60
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["datasource"]["uid"] == "${datasource}"
    runbook, neighbour = (entry["url"] for entry in panel["links"])
    assert runbook in {runbook_url(name) for name in rules.ALERT_NAMES}
    assert neighbour in {board_url(name) for name in MAKERS}


@pytest.mark.parametrize("board", MAIN.values(), ids=list(MAIN))
def test_titles_are_unique_and_all_other_boards_are_linked(board: Json) -> None:
    titles = [panel["title"] for panel in every_panel(board)]
    assert len(titles) == len(set(titles))
    others = {board_url(name) for name in MAKERS} - {f"/d/{board['uid']}"}
    assert others <= {entry["url"] for entry in board["links"]}


def test_every_alert_is_explained_on_the_board_that_it_links() -> None:
    for alert in rules.ALERTS:
        assert runbook_url(alert.name) in {entry["url"] for entry in MAIN[alert.board]["links"]}


@pytest.mark.parametrize("panel", PANELS)
def test_quantities_start_at_zero(panel: Json) -> None:
    if panel["type"] in ("timeseries", "bargauge", "stat"):
        differences = any(" offset " in t["expr"] and " - " in t["expr"] for t in panel["targets"])
        signed = panel["fieldConfig"]["defaults"]["unit"] == "dB" or any(
            "forecast_skill" in t["expr"] for t in panel["targets"]
        )
        assert differences or signed or panel["fieldConfig"]["defaults"]["min"] == 0


@pytest.mark.parametrize(("panel", "target"), TARGETS)
def test_query_follows_the_rules_for_queries(panel: Json, target: Json) -> None:
    expr = target["expr"]
    assert target["datasource"]["uid"] == "${datasource}"
    assert "vector(0)" not in expr, "fails together with ad-hoc filters, and shows 0 for unknown"
    for function, window in re.findall(
        r"(\w+)\([^()]*\[([^\]]+)\]", expr
    ):  # a peak of recorded values may be of an hour
        assert window == "$__rate_interval" or function.endswith("_over_time")
    for selector, above in selectors(fill(expr)):
        functions = function_names(above)
        counts = selector.name.endswith(("_total", "_bucket", "_count", "_sum"))  # a recorded rate ends in its window
        assert counts == bool({"rate", "increase"} & set(functions)), f"{selector.name} inside {functions}"
        matchers = {m.name: m for m in selector.matchers.matchers}
        assert set(matchers) <= KNOWN[selector.name] | TARGET_LABELS, selector.name
        has_model = "model" in KNOWN[selector.name]
        assert ("model" in matchers) == has_model, f"{selector.name} without $model"
        raw = ":" not in selector.name
        if raw:
            assert "instance" in matchers, f"{selector.name} without $instance"
        if raw and "class" in KNOWN[selector.name]:
            assert "class" in matchers, f"{selector.name} without $class"


def test_raw_families_are_read_only_where_a_split_or_a_distribution_is_needed() -> None:
    """Everything else is a recorded signal, so that board, alert and app show one number."""
    raw = {
        s.name for panel in EVERY for t in panel["targets"] for s, _ in selectors(fill(t["expr"])) if ":" not in s.name
    }
    hardware = {f.series for f in catalog.FAMILIES if f.name.startswith(("kvscope_gpu_", "kvscope_hardware_"))}
    assert raw - hardware <= {
        catalog.ENGINE.series, catalog.SOURCE_FAMILY.series, "up",
        catalog.TIME_TO_FIRST_TOKEN.series, catalog.REQUEST_DURATION.series, catalog.LABEL_FOLDS.series,
        catalog.KV_RECOMPUTED_TOKENS.series, catalog.KV_LAYOUT_FALLBACKS.series, catalog.REQUESTS_WAITING.series,
        catalog.LAST_UPDATE.series, catalog.ANOMALIES_TOTAL.series, catalog.SCRAPE_SECONDS.series,
        catalog.SCRAPE_SERIES.series,
    }  # fmt: skip


def test_latency_queries_over_buckets_ask_for_exemplars() -> None:
    latency = {catalog.TIME_TO_FIRST_TOKEN.series, catalog.REQUEST_DURATION.series}
    for panel in EVERY:
        for target in panel["targets"]:
            if latency & {s.name for s, _ in selectors(fill(target["expr"]))}:
                assert target["exemplar"], panel["title"]


def test_both_parsers_read_every_query(program: Callable[[str], str], tmp_path: Path) -> None:
    """promql-parser speaks the grammar of 3.x, promtool that of the installed server: queries keep to what both know."""
    exprs = {fill(t["expr"]) for panel in EVERY for t in panel["targets"]}
    exprs |= {fill(mark["expr"]) for board in MAIN.values() for mark in board["annotations"]["list"]}
    rule_file = tmp_path / "queries.yml"
    all_rules = [{"record": f"q:{i}:x", "expr": expr} for i, expr in enumerate(sorted(exprs))]
    rule_file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": all_rules}]}))
    done = subprocess.run([program("promtool"), "check", "rules", rule_file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(exprs)} rules found" in done.stdout


def test_thresholds_of_the_first_row_are_those_of_alerts_and_objectives() -> None:
    stats = {
        panel["title"]: [step["value"] for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"]]
        for panel in asking(MAIN["overview"])
        if panel["type"] == "stat"
    }
    assert stats["Do first tokens come in time? (P99)"] == [None, objectives.TTFT.threshold_seconds]
    assert stats["Do tokens flow evenly? (P99)"] == [None, objectives.ITL.threshold_seconds]
    assert stats["Do requests end in time? (P99)"] == [None, objectives.E2E.threshold_seconds]
    by_name = {alert.name: alert.expr for alert in reversed(rules.ALERTS)}  # of one name the first, which pages
    assert f"> {stats['How full is the KV pool?'][-1]:g}" in by_name["KvscopeKVCacheExhausted"]
    assert f"> {stats['Are these numbers fresh?'][-1]:g}" in by_name["KvscopeSourceStale"]
    worst = stats["How fast does the worst budget burn?"][-1]
    assert f'{burn.burn("1h")}{{objective="ttft"}} > {worst:g}' in by_name["KvscopeTTFTBudgetBurn"]


def test_states_components_and_lengths_have_a_colour_each() -> None:
    from dashboards import shared

    assert set(shared.STATE_COLORS) == set(catalog.SHOWN_STATES)
    assert set(shared.COMPONENT_COLORS) == set(catalog.SHOWN_COMPONENTS)
    assert set(shared.LENGTH_COLORS) == set(catalog.LENGTH_BUCKETS)
    assert set(shared.BLOCK_COLORS) == {*catalog.BLOCK_STATES, catalog.ALLOCATABLE}
    for colors in (shared.STATE_COLORS, shared.COMPONENT_COLORS, shared.LENGTH_COLORS, shared.BLOCK_COLORS):
        assert len(set(colors.values())) == len(colors)


#: Signals of the pages Batching, KV cache, P99, Now and Engines.
APP = frozenset(
    [
        "model_rule_action:kvscope_controller_changes:rate5m",
        "model_outcome:kvscope_kv_prefetch_blocks:rate5m",
        "model_reason:kvscope_preemptions:rate5m",
        "model_class:kvscope_time_to_first_token_seconds:p99_5m",
        "model_class:kvscope_queue_promotions:rate5m",
        "model:kvscope_time_to_first_token_seconds:rate5m",
        "model:kvscope_limit_batched_tokens:min",
        "model:kvscope_prefill_batch_spread_ratio:p99_5m",
        "model_reason:kvscope_kv_recomputed_tokens:rate5m",
        "model_class:kvscope_requests_waiting:sum",
        "model_length_bucket:kvscope_request_length_phase_seconds:p90_tail_mean5m",
        "model_class:kvscope_requests_running:sum",
        "model_kind:kvscope_steps:rate5m",
        "model:kvscope_prefill_batch_splits:rate5m",
        "model:kvscope_prefill_batch_spread_ratio:p50_5m",
        "model:kvscope_request_duration_seconds:rate5m",
        "model_executor_clock_device_kv_dtype_version:kvscope_engine:sum",
        "model_kind:kvscope_step_duration_seconds:p99_5m",
        "model_length_bucket:kvscope_request_length_phase_requests:p50_tail_mean5m",
        "model_rule:kvscope_requests_degraded:rate5m",
        "model:kvscope_kv_layout_fallbacks:rate5m",
        "model:kvscope_limit_prefills:min",
        "model_length_bucket:kvscope_request_length_phase_seconds:p50_tail_mean5m",
        "model_length_bucket:kvscope_request_length_phase_requests:p90_tail_mean5m",
        "model_source_family_status_reason:kvscope_source_family:sum",
        "model_reason:kvscope_kv_moved_blocks:rate5m",
        "model:kvscope_inter_token_latency_seconds:rate5m",
    ]
)


def test_every_recorded_series_is_on_a_board_or_named_here_with_a_reason() -> None:
    shown = {s.name for panel in EVERY for t in panel["targets"] for s, _ in selectors(fill(t["expr"]))}
    elsewhere = {
        "model:kvscope_prompt_tokens:rate5m": "the board shows tokens computed, which cached ones are not",
        "model:kvscope_stalls:rate5m": "the board shows the time that they take, and how regular they are",
        "model:kvscope_kv_stored_tokens:sum": "inside internal fragmentation",
        "model_length_bucket:kvscope_kv_hittable_tokens:rate5m": "divisor of the hit rate of hittable tokens",
        "model_length_bucket:kvscope_kv_hit_tokens:rate5m": "numerator of both hit rates",
        "model:kvscope_telemetry_anomalies:rate5m": "the board splits anomalies by reason",
    }
    elsewhere |= {
        symptoms.COMPUTED: "the board shows it by phase",
        symptoms.RUNNING: "the boards show it by model and class",
        symptoms.ROOM: "follows from KV use and the requests that run",
        **{symptoms.overflow_rate(x): "the board shows its share" for x in objectives.LATENCY_OBJECTIVES},
        rules.HAZARD.name: "what survival is made of",
        symptoms.COMPACTED: "whether compaction runs, for two alerts",
        symptoms.FALLBACK_RATE: "the floor of two alerts",
        symptoms.PREEMPTIONS: "the floor of an alert",
        symptoms.LOOKUPS: "the floor of an alert",
        forecasts.TARGETS: "the floor of an alert",
    }
    elsewhere["model_window:kvscope_kv_regret_tokens:rate5m"] = "the board shows its share of the tokens looked up"
    for family in ("kv_idle_before_eviction", "kv_reuse_gap"):
        tails = (f"model_pool:kvscope_{family}_seconds:{p}_5m" for p in ("p90", "p99"))
        elsewhere |= dict.fromkeys(tails, "the board compares medians")
    gpus = {name for name in rules.recorded_names() - shown if name.startswith("gpu_uuid_mig")}
    elsewhere |= dict.fromkeys(
        gpus, "the board reads the families, which name the instance as well; the app reads these"
    )
    elsewhere["target_status_reason:kvscope_hardware_target:sum"] = (
        "the board reads the family, which names the instance"
    )
    elsewhere |= dict.fromkeys(APP, "the app shows it; the board reads the family, to choose instances and classes")
    windows = {name for name in rules.recorded_names() - shown if ":kvscope_objective_" in name}
    elsewhere |= dict.fromkeys(windows, "the board shows some windows of one ratio")
    assert shown | set(elsewhere) >= rules.recorded_names()
    assert not shown & set(elsewhere)


def test_tokens_of_an_hour_for_each_second_of_its_forward_passes_whatever_the_hour_was_like(
    program: Callable[[str], str], tmp_path: Path
) -> None:
    """A replica of 10 tokens a second of forward passes for an hour, idle for ten minutes of it, and one of 1000 for five minutes."""
    [panel] = [p for p in asking(MAIN["trends"]) if p["title"] == "Does computing become more or less efficient?"]
    series = {
        'kvscope_step_tokens_total{model="m",instance="a",phase="decode"}': "0+100x200 20000x40 20000+100x60",
        'kvscope_step_seconds_total{model="m",instance="a",component="forward_decode"}': "0+10x200 2000x40 2000+10x60",
        'kvscope_step_tokens_total{model="m",instance="b",phase="decode"}': "_x200 0+10000x20 200000x80",
        'kvscope_step_seconds_total{model="m",instance="b",component="forward_decode"}': "_x200 0+10x20 200x80",
    }
    expr = panel["targets"][0]["expr"].replace("$model", "m")
    # of the hour's samples a is busy in 200 and b in 20, for as many seconds in each
    test = {
        "rule_files": [str(Path(__file__).resolve().parents[2] / "alerts/generated/kvscope-recording.yml")],
        "evaluation_interval": "15s",
        "tests": [
            {
                "interval": "15s",
                "input_series": [{"series": name, "values": values} for name, values in series.items()],
                "promql_expr_test": [
                    {
                        "expr": f"abs({expr} - (200 * 10 + 20 * 1000) / 220) < bool 10",
                        "eval_time": "75m",
                        "exp_samples": [{"labels": '{model="m"}', "value": 1}],
                    }
                ],
            }
        ],
    }
    path = tmp_path / "test.yml"
    path.write_text(yaml.safe_dump(test, width=10_000))
    done = subprocess.run([program("promtool"), "test", "rules", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
