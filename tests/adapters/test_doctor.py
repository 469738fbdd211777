"""What `kvscope doctor` says of engines: which one, what it feeds, how sure each number is, and what is wrong by construction."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from exporters.adapters import checks
from exporters.adapters.doctor import Report, examine
from exporters.adapters.endpoint import Answer
from exporters.adapters.engines import ADAPTERS, BUNDLED, PLUGIN, TITLES, capability
from exporters.adapters.own import OWN
from exporters.adapters.page import parse
from exporters.adapters.readings import Reading, quantile
from observability.cli import root
from observability.signals import SIGNALS
from tests.adapters.serving import Server, page_of
from tests.adapters.test_endpoint import codes, look
from tests.conftest import REPO

PAGE = page_of("vllm")


def reading(report: Report, name: str) -> Reading:
    return next(r for r in report.readings if r.name == name)


def finding(report: Report, code: str) -> str:
    return next(f.found for f in report.findings if f.code == code)


# -- which engine, which signals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ADAPTERS)
def test_engine_is_recognized_by_its_names_and_feeds_what_the_matrix_says(server: Server, engine: str) -> None:
    # a page of each instance of the engine's rule test: together they have every family
    text = "".join(
        page_of(engine, instance)
        for instance in ("a", "b", "f", "w1")
        if f'instance="{instance}"' in str(RULE_TESTS[engine])
    )
    server.pages[ADAPTERS[engine].path] = text
    report = look(server, ADAPTERS[engine].path)
    assert report.engine == engine
    for state in report.signals:
        can = capability(engine, state.signal).status
        if can == "no":
            assert (state.status, state.reason) == ("no", capability(engine, state.signal).reason)
        else:
            assert state.status == {"yes": "fed", "partial": "partial"}[can], state


RULE_TESTS = {engine: (REPO / f"alerts/tests/adapters/{engine}.yml").read_text() for engine in ADAPTERS}


def test_kvscope_and_the_plug_in_are_told_apart(server: Server) -> None:
    own = 'kvscope_engine_info{model="m",version="0.1.0"} 1\nkvscope_requests_running{model="m",class="standard"} 2\n'
    server.pages["/metrics"] = own
    report = look(server)
    assert (report.engine, report.version.text) == (BUNDLED, "0.1.0")
    assert {s.signal for s in report.signals if s.status == "fed"} == {
        "model:kvscope_requests_running:sum",
        "model_class:kvscope_requests_running:sum",
        "model_executor_clock_device_kv_dtype_version:kvscope_engine:sum",
    }
    server.pages["/metrics"] = own + PAGE
    assert look(server).engine == PLUGIN


def test_what_a_source_says_of_itself_counts_before_the_general_matrix(server: Server) -> None:
    info = 'kvscope_source_family_info{model="m",source="vllm",family="kvscope_kv_hit_tokens",status="no",reason="prefix caching is switched off"} 1\n'  # fmt: skip
    server.pages["/metrics"] = 'kvscope_requests_running{model="m",class="unknown"} 2\n' + info + PAGE
    report = look(server)
    assert report.engine == PLUGIN
    states = {state.signal: state for state in report.signals}
    assert states["model:kvscope_requests_running:sum"].status == "fed"
    assert states["model:kvscope_kv_hit:ratio_rate5m"].status == "no"
    assert states["model:kvscope_kv_hit:ratio_rate5m"].reason == "prefix caching is switched off"
    assert states["model:kvscope_requests_waiting:sum"].status == "missing"


def test_missing_family_is_missing_with_its_name_and_the_setting_that_adds_it(server: Server) -> None:
    server.pages["/prometheus/metrics"] = "".join(
        line + "\n"
        for line in page_of("trtllm").splitlines()
        if "_kv_cache_" not in line and "num_requests" not in line
    )
    report = look(server, "/prometheus/metrics")
    states = {state.signal: state for state in report.signals}
    assert states["model:kvscope_requests_running:sum"].status == "missing"
    assert states["model:kvscope_requests_running:sum"].reason == "trtllm_num_requests_running is not on the page"
    assert [flag.setting for flag in report.flags] == ["enable_iter_perf_stats: true"]
    assert reading(report, "KV pool in use").status == "unavailable"


@pytest.mark.parametrize(
    ("drop", "text", "status"),
    [
        ("", "0.11 or later", "estimated"),
        ("inter_token_latency", "0.9 or later", "estimated"),
        ("vllm:(inter|kv_cache|prefix_cache|gpu_prefix)", "unavailable", "unavailable"),
    ],
)
def test_version_is_worked_out_from_names_where_no_page_says_it(
    server: Server, drop: str, text: str, status: str
) -> None:
    server.pages["/metrics"] = "\n".join(x for x in PAGE.splitlines() if not drop or not re.search(drop, x)) + "\n"
    version = look(server).version
    assert (version.text, version.status) == (text, status)


# -- numbers ---------------------------------------------------------------------------------------------------------------


def test_numbers_of_a_real_vllm_are_what_its_page_says_worked_out_another_way(server: Server, capture: str) -> None:
    server.pages["/metrics"] = capture
    report = look(server)
    assert report.engine == "vllm"
    assert report.exit_code == 0
    values = dict(re.findall(r'^(\S+?)\{engine="0",model_name="smol"\} (\S+)$', capture, re.M))
    assert reading(report, "KV hit rate since start").text == "0.3586 (3,712 of 10,352 tokens)"
    assert float(values["vllm:prefix_cache_hits_total"]) / float(values["vllm:prefix_cache_queries_total"]) == pytest.approx(0.35858, abs=1e-5)  # fmt: skip
    for family, title in (
        ("time_to_first_token_seconds", "Time to first token"),
        ("inter_token_latency_seconds", "Inter-token latency"),
        ("e2e_request_latency_seconds", "Request duration"),
    ):
        rows = re.findall(rf'^vllm:{family}_bucket{{engine="0",le="(\S+)",model_name="smol"}} (\S+)$', capture, re.M)
        bounds = np.array([0.0, *(float(le) for le, _ in rows[:-1])])
        counts = np.array([0.0, *(float(count) for _, count in rows[:-1])])
        assert rows[-1][0] == "+Inf"
        for q in (0.5, 0.9, 0.99):
            rank = q * float(rows[-1][1])
            found = reading(report, f"{title} p{q * 100:g} since start")
            top = int(np.searchsorted(counts, rank))
            assert found.value == pytest.approx(np.interp(rank, counts[top - 1 : top + 1], bounds[top - 1 : top + 1]))
            assert (found.low, found.high) == (bounds[top - 1], bounds[top])
            assert found.status == "estimated"


def test_quantile_in_the_first_or_last_bucket_is_a_bound_and_no_number() -> None:
    rows = [(0.3, 60.0), (0.5, 60.0), (60.0, 90.0), (math.inf, 100.0)]
    first, last = quantile("x", 0.5, rows), quantile("x", 0.99, rows)
    assert (first.text, first.value, first.high) == ("below 300 ms", None, 0.3)
    assert (last.text, last.value, last.low) == ("above 60 s", None, 60.0)
    assert quantile("x", 0.5, [(1.0, 0.0), (math.inf, 0.0)]).status == "unavailable"
    assert quantile("x", 0.5, []).status == "unavailable"


def test_every_number_has_a_status_and_its_bounds_hold_it(server: Server) -> None:
    for engine, adapter in ADAPTERS.items():
        server.pages[adapter.path] = page_of(engine)
        for found in look(server, adapter.path).readings:
            if found.status == "unavailable":
                assert found.reason
                assert found.value is None
            elif found.value is not None:
                assert found.low is not None
                assert found.high is not None
                assert found.low <= found.value <= found.high
                assert found.status == "estimated" or found.low == found.high


# -- wrong by construction -----------------------------------------------------------------------------------------------


def histogram(family: str, counts: dict[str, float], total: float, labels: str = 'model_name="m",engine="0"') -> str:
    lines = [f'vllm:{family}_bucket{{{labels},le="{le}"}} {count}' for le, count in counts.items()]
    return (
        "\n".join(
            [*lines, f"vllm:{family}_count{{{labels}}} {counts['+Inf']}", f"vllm:{family}_sum{{{labels}}} {total}"]
        )
        + "\n"
    )


GOOD = {"0.3": 1, "20.0": 9, "+Inf": 10}
BASE = 'vllm:num_requests_running{model_name="m",engine="0"} 1\n'
WRONG = {
    "a placeholder for the model": (BASE.replace('"m"', '"undefined"'), "placeholder_label", "'undefined'"),
    "no model at all": ('vllm:num_requests_running{engine="0"} 1\n', "no_model_label", "model_name"),
    "all observations are 0": (BASE + histogram("e2e_request_latency_seconds", {"0.3": 208, "20.0": 208, "+Inf": 208}, 0), "sum_is_zero", "208 observations"),
    "a negative sum": (BASE + histogram("request_queue_time_seconds", GOOD, -5), "negative_sum", "(-5)"),
    "a time as long as the host is up": (BASE + histogram("request_queue_time_seconds", GOOD, 10 * 5e6), "impossible_mean", "5e+06 s"),
    "counts that fall": (BASE + histogram("e2e_request_latency_seconds", {"0.3": 9, "20.0": 5, "+Inf": 10}, 9), "broken_histogram", "e2e"),
    "a median in the first bucket": (BASE + histogram("e2e_request_latency_seconds", {"0.3": 60, "20.0": 60, "+Inf": 60}, 1), "first_bucket", "below 300 ms"),
    "a tail beyond the last bound": (BASE + histogram("e2e_request_latency_seconds", {"0.3": 1, "60.0": 90, "+Inf": 100}, 999), "overflow", "above the last bound, 60 s"),
    "a gauge that a dead process left": ("".join(BASE.replace('engine="0"', f'engine="0",pid="{pid}"') for pid in (77, 78)), "per_process", "adds all of them up"),
    "a router's copy": (BASE + BASE.replace('engine="0"', 'engine="0",server="h:1"'), "re_exported", "num_requests_running"),
    "a rank missing": (BASE + BASE.replace('"0"', '"2"'), "missing_rank", "[1]"),
    "a rank in one family only": (BASE + BASE.replace('"0"', '"1"') + 'vllm:num_requests_waiting{model_name="m",engine="0"} 0\n', "uneven_ranks", "num_requests_waiting"),
    "usage in percent": (BASE + 'vllm:kv_cache_usage_perc{model_name="m",engine="0"} 87\n', "not_a_ratio", "87"),
    "hits that lookups do not see": (
        BASE + 'vllm:prefix_cache_hits_total{model_name="m",engine="0"} 0\nvllm:prompt_tokens_by_source_total{model_name="m",engine="0",source="local_cache_hit"} 512\n',
        "hits_disagree", "512",
    ),
    "tokens of requests that never finished": (
        BASE + 'vllm:prompt_tokens_total{model_name="m",engine="0"} 3010\nvllm:request_prompt_tokens_sum{model_name="m",engine="0"} 0\n',
        "not_finished", "3,010 of 3,010",
    ),
    "names of before": (BASE + 'vllm:gpu_cache_usage_perc{model_name="m",engine="0"} 0.5\n', "old_name", "became kv_cache_usage_perc in 0.9"),
    "no bound at the objective": (BASE + histogram("time_to_first_token_seconds", {"0.75": 5, "1.0": 9, "+Inf": 10}, 9), "objective_no_bound", "counts from 750 ms"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_by_construction_is_found_with_its_numbers(server: Server, case: str) -> None:
    server.pages["/metrics"], code, words = WRONG[case]
    report = look(server)
    assert words in finding(report, code)


NOT_JUDGED = "is not judged here. No event counts as bad, no budget burns, no alert fires."
LOOK = """
import json, sys
from pathlib import Path
from exporters.adapters import checks
from exporters.adapters.endpoint import Answer
from exporters.adapters.engines import ADAPTERS
from exporters.adapters.page import parse
vllm = ADAPTERS["vllm"]
page = parse(Answer("", Path(sys.argv[1]).read_bytes(), "text/plain"), seconds=5)
print(json.dumps([[x.level, x.code, x.found, x.do] for x in checks.objective_bounds(vllm, page)]))
print([flag.gives for flag in vllm.flags])
"""


@pytest.mark.parametrize(
    ("models", "said"),
    [
        (("m",), ["at the 1.5 s of the objective:"]),  # which has no objective of its own
        (("own",), ["at the 3 s of the objective for own:"]),
        (("m", "own"), ["at the 1.5 s of the objective:", "at the 3 s of the objective for own:"]),
        (("exact",), []),
    ],
)
def test_an_objective_of_ones_own_that_no_bucket_bound_measures_is_said_to_be_not_judged(
    tmp_path: Path, models: tuple[str, ...], said: list[str]
) -> None:
    tables = ("threshold_seconds = 1.5", 'model = "own"\nthreshold_seconds = 3', 'model = "exact"\nthreshold_seconds = 2.5', 'class = "standard"\nthreshold_seconds = 4')  # fmt: skip
    mine, page = tmp_path / "mine.toml", tmp_path / "page"
    mine.write_text("".join(f'[[objective]]\nname = "ttft"\n{table}\n' for table in tables))
    counts = {"0.8": 5, "1.0": 6, "2.5": 9, "5.0": 10, "+Inf": 10}
    page.write_text("".join(histogram("time_to_first_token_seconds", counts, 9, f'model_name="{m}"') for m in models))
    environment = {**os.environ, "KVSCOPE_OBJECTIVES": str(mine), "PYTHONPATH": str(REPO)}
    argv = [sys.executable, "-c", LOOK, str(page)]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found, flags = done.stdout.splitlines()
    for (level, code, text, do), which in zip(json.loads(found), said, strict=True):
        assert (level, code) == ("warning", "objective_not_judged")
        assert f"Time to first token: no bucket bound {which} it {NOT_JUDGED}" == text
        near = "1 or 2.5" if "1.5 s" in which else "2.5 or 5"
        assert do == f"Add that bound where the engine lets you, or give the objective a threshold_seconds of {near}."
    assert "a bucket bound at the objective's 1.5 s and 2.5 s and 3 s, so" in flags


def test_a_default_objective_that_no_bound_stands_for_is_said_to_be_not_judged(server: Server) -> None:
    server.pages["/metrics"] = BASE + histogram("time_to_first_token_seconds", {"0.7": 5, "1.0": 9, "+Inf": 10}, 9)
    report = look(server)
    assert finding(report, "objective_not_judged").endswith(NOT_JUDGED)
    assert "objective_no_bound" not in codes(report)


def test_kvscopes_own_engine_without_the_bound_of_an_objective_is_to_be_started_again() -> None:
    text = "".join(
        f'kvscope_time_to_first_token_seconds_bucket{{model="m",class="standard",le="{le}"}} 3\n'
        for le in ("1.0", "+Inf")
    )
    [found] = checks.objective_bounds(OWN, parse(Answer("", text.encode(), "text/plain"), seconds=5))
    assert found.found.endswith(NOT_JUDGED)
    assert "Start the engine again" in found.do


def test_a_sound_page_has_no_warning(server: Server) -> None:
    sound = BASE + histogram("e2e_request_latency_seconds", {**GOOD, "20.0": 10}, 70) + histogram("time_to_first_token_seconds", {"0.5": 2, "0.8": 9, "5.0": 10, "+Inf": 10}, 6)  # fmt: skip
    server.pages["/metrics"] = sound
    report = look(server)
    assert not report.findings
    assert report.exit_code == 0


OTHER_BOUNDS = {"0.1": 0, "0.5": 2, "2.0": 9, "+Inf": 10}


def test_replicas_on_one_page_with_other_bounds_are_told(server: Server) -> None:
    other = histogram("e2e_request_latency_seconds", OTHER_BOUNDS, 9, 'model_name="m",engine="1"')
    server.pages["/metrics"] = BASE + histogram("e2e_request_latency_seconds", GOOD, 9) + other
    text = finding(look(server), "uneven_buckets")
    assert "Request duration of 'm' has 2 sets of bucket bounds, of 2 to 3 bounds" in text
    assert "100 ms" in text


@pytest.mark.parametrize(
    ("model", "bounds", "told"), [("m", OTHER_BOUNDS, 1), ("m", {**GOOD, "20.0": 8}, 0), ("another", OTHER_BOUNDS, 0)]
)
def test_replicas_with_other_bounds_are_told_of_looks_at_several_endpoints(
    server: Server, model: str, bounds: dict[str, float], told: int
) -> None:
    here = BASE + histogram("e2e_request_latency_seconds", GOOD, 70)
    there = histogram("e2e_request_latency_seconds", bounds, 70, f'model_name="{model}",engine="0"')
    server.pages["/metrics"], server.pages["/b"] = here, BASE.replace('"m"', f'"{model}"') + there
    urls = [server.url(), server.url().replace("/metrics", "") + "/b"]
    done = CliRunner().invoke(root, ["doctor", "--json", "--interval", "0", *urls])
    answer = json.loads(done.stdout)
    assert [found["code"] for found in answer["findings"]] == ["uneven_buckets"] * told
    alone = [each["exit_code"] for each in answer["endpoints"]]
    assert answer["exit_code"] == max(told, *alone)
    assert done.exit_code == answer["exit_code"]
    plain = CliRunner().invoke(root, ["doctor", "--interval", "0", *urls]).stdout
    assert plain.count("sets of bucket bounds") == told
    assert plain.count("endpoint: ") == 2


def test_processes_that_another_label_tells_apart_are_sound(server: Server) -> None:
    server.pages["/metrics"] = "".join(BASE.replace('engine="0"', f'engine="{rank}",pid="7{rank}"') for rank in (0, 1))
    report = look(server)
    assert not report.findings
    assert reading(report, "Requests running").value == 2


def test_what_a_dead_process_left_is_added_up_as_doctor_says(server: Server) -> None:
    seven = BASE.replace("} 1", "} 7")
    server.pages["/metrics"] = "".join(seven.replace('engine="0"', f'engine="0",pid="{pid}"') for pid in (11, 12))
    report = look(server)
    assert reading(report, "Requests running").value == 14
    assert report.exit_code == 1


def test_engine_without_a_model_in_its_metrics_is_told_to_name_it_on_the_job(server: Server) -> None:
    server.pages["/metrics"] = page_of("llamacpp").replace('model="m"', "")
    assert "no_model_label" in codes(look(server))


def two_looks(server: Server, first: str, second: str) -> Report:
    pages = iter([first, second])

    def answer(handler: object) -> None:
        body = next(pages).encode()
        handler.send_response(200)  # type: ignore[attr-defined]
        handler.send_header("Content-Length", str(len(body)))  # type: ignore[attr-defined]
        handler.end_headers()  # type: ignore[attr-defined]
        handler.wfile.write(body)  # type: ignore[attr-defined]

    server.pages["/metrics"] = answer
    return examine(server.url(), timeout_seconds=5, interval_seconds=0.05)


IDLE = 'vllm:num_requests_running{model_name="m",engine="0"} 106\nvllm:kv_cache_usage_perc{model_name="m",engine="0"} 0.99\nvllm:generation_tokens_total{model_name="m",engine="0"} 5000\n'  # fmt: skip


def test_gauges_left_over_from_requests_that_are_gone_are_frozen(server: Server) -> None:
    report = two_looks(server, IDLE, IDLE)
    texts = [f.found for f in report.findings if f.code == "frozen_gauge"]
    assert len(texts) == 2
    assert "stays at 106 while no counter moved" in texts[0]
    assert report.exit_code == 1


@pytest.mark.parametrize("second", [IDLE.replace("5000", "5001"), IDLE.replace("} 106", "} 0").replace("0.99", "0")])
def test_engine_that_works_or_went_idle_properly_is_not_frozen(server: Server, second: str) -> None:
    assert "frozen_gauge" not in codes(two_looks(server, IDLE, second))


def test_second_look_that_fails_is_said(server: Server) -> None:
    server.pages["/metrics"] = PAGE
    pages = server.pages

    class Once(dict):  # type: ignore[type-arg]
        def get(self, path: str, *_: object) -> object:
            return pages.pop(path, None)

    server.pages = Once()
    report = examine(server.url(), timeout_seconds=5, interval_seconds=0.05)
    assert "status" in codes(report)


def test_titles_cover_every_engine_of_the_matrix() -> None:
    assert set(TITLES) == {BUNDLED, PLUGIN, *ADAPTERS}
    assert len(SIGNALS) == len({s.name for s in SIGNALS})
