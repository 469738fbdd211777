"""The page What if: comparisons in processes of their own, with limits, progress and cancel; its numbers are those of a replay."""

from __future__ import annotations

import itertools
import json
import math
import re
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.by import By

from observability.app.files import csv
from observability.app.page_whatif import (
    _difference,
    cautions,
    figures,
    groups_for,
    kv_for,
    latency,
    layouts_for,
    makeup,
    models_for,
)
from observability.app.units import quantity
from observability.app.whatif import RUNNING, WAITING, Comparisons, Job, key_of
from observability.engine.model.costs import MODELS
from observability.engine.types import PromptSpan
from observability.errors import ConfigError
from observability.objectives import TTFT
from observability.workload.generate import PRESETS, generate_load
from observability.workload.replay import InProcess, replay_in_process, virtual_engine
from observability.workload.traces import TraceRequest
from observability.workload.whatif import Load, Question, Setting, compare, read_load, replay_side, split, target_of
from tests.app.browser import Browser
from tests.conftest import wait_for

SMALL = {
    "load": {"requests_per_second": 2.0, "limit": 60},
    "before": {},
    "after": {"gpu": "A100-80", "kv_dtype": "int8"},
}
ANSWER = 'print(\'{"what": "before", "share": 0.25}\', flush=True); input(); '


def finished(comparisons: Comparisons, key: str, seconds: float = 120) -> Job:
    job = wait_for(
        lambda: (j := comparisons.find(key)) is not None and j.state not in ("waiting", "running") and j,
        seconds,
        "the comparison ends",
    )
    assert isinstance(job, Job)
    return job


def scripted(code: str, **options: float) -> Comparisons:
    """Comparisons whose worker is a Python program of its own."""
    return Comparisons((sys.executable, "-c", code), **options)


@pytest.fixture(scope="module")
def answered() -> Job:
    comparisons = Comparisons()
    job = finished(comparisons, comparisons.start(SMALL).key)
    assert job.state == "done", (job.reason, job.next_step)
    return job


def test_both_sides_are_what_a_replay_of_the_same_load_gives(answered: Job) -> None:
    load = list(itertools.islice(generate_load(replace(PRESETS["recorded"], requests_per_second=2.0), 0), 60))
    assert answered.answer is not None
    assert answered.answer["clock"] == "virtual"
    for side, target in (("before", InProcess()), ("after", InProcess(gpu="A100-80", kv_dtype="int8"))):
        target = replace(target, max_num_seqs=256, max_num_batched_tokens=8192)
        truth, told = replay_in_process(load, target), answered.answer[side]
        assert told["latency"]["ttft"] == truth.latency["time_to_first_token_seconds"]
        assert told["latency"]["itl"] == truth.latency["inter_token_seconds"]
        assert told["latency"]["e2e"] == truth.latency["end_to_end_seconds"]
        assert told["hit_rate"] == pytest.approx(truth.kv.hit_rate)
        assert told["preemptions"] == truth.preemptions
        assert told["served"] == sum(truth.outcomes[each] for each in ("stop", "length"))
        makeup = told["makeup"]["slowest_1_percent"]
        assert sum(makeup.values()) == pytest.approx(truth.latency["end_to_end_seconds"]["max"])  # type: ignore[index]


def test_the_words_on_the_page_are_the_answers_numbers(answered: Job) -> None:
    assert answered.answer is not None
    card = latency(answered.answer, TTFT)
    told = card.html
    assert card.figure is not None
    card.figure.figure()  # Plotly checks each property
    before, after = (answered.answer[side]["latency"]["ttft"]["p99"] for side in ("before", "after"))
    assert f"{quantity(before, 'seconds')} → {quantity(after, 'seconds')}" in told


def test_replicas_share_the_load_by_conversation_and_lose_nothing() -> None:
    load = list(read_load(Load(limit=400)))
    parts = split(load, 3)
    assert sorted(r.arrival_seconds for part in parts for r in part) == [r.arrival_seconds for r in load]
    homes: dict[int, set[int]] = {}
    for place, part in enumerate(parts):
        for request in part:
            if len(request.prompt.hash_ids) > 1:
                homes.setdefault(request.prompt.hash_ids[1], set()).add(place)
    assert all(len(places) == 1 for places in homes.values())
    assert len(homes) > 100
    tokens = [sum(r.prompt.length for r in part) for part in parts]
    assert max(tokens) < 1.5 * min(tokens)


@pytest.mark.parametrize(
    ("question", "told"),
    [
        ({"before": {"gpu": "none"}}, "none"),
        ({"before": {"replicas": 1000}}, "before.replicas"),
        ({"load": {"limit": 10**9}}, "load.limit"),
        ({"load": {"path": "/etc/passwd", "limit": 10}}, "The trace, line 1"),
        ({"before": {"shell": "rm -rf /"}}, "before.shell"),
        ({"after": {"model": "llama-3-70b", "gpu": "A10G"}}, "llama-3-70b"),
    ],
)
def test_a_question_that_makes_no_sense_gets_a_reason_and_a_next_step(question: dict[str, object], told: str) -> None:
    comparisons = Comparisons()
    job = finished(comparisons, comparisons.start({"load": {"limit": 10}, "before": {}, "after": {}} | question).key)
    assert job.state == "failed"
    assert told in job.reason
    assert job.next_step


@pytest.mark.parametrize("trace", [b"", b"\xff\xfe\x00", b"{" * 5000, b'{"timestamp": 1e999}\n', b"a,b\n1,2\n", b'{"timestamp":0,"input_length":1,"output_length":1,"hash_ids":["x"]}'])  # fmt: skip
def test_a_hostile_trace_gets_a_clear_error_that_names_no_path_of_this_machine(trace: bytes) -> None:
    comparisons = Comparisons()
    job = finished(comparisons, comparisons.start(SMALL, trace).key)
    assert job.state == "failed"
    assert "The trace" in job.reason
    assert "/tmp" not in job.reason + job.next_step
    assert job.next_step


def test_the_same_question_is_answered_once_and_another_trace_makes_it_another_question(answered: Job) -> None:
    assert key_of(SMALL, None) == answered.key
    assert (
        len(
            {
                key_of(SMALL, None),
                key_of(SMALL, b""),
                key_of(SMALL, b"x"),
                key_of(SMALL | {"before": {"replicas": 2}}, None),
            }
        )
        == 4
    )
    counted = scripted("import json; input(); print(json.dumps({'answer': {}}))")
    first = counted.start(SMALL)
    assert counted.start(SMALL) is first
    assert finished(counted, first.key).state == "done"
    assert counted.start(SMALL) is first


def test_progress_is_told_and_a_cancelled_comparison_leaves_no_process() -> None:
    comparisons = scripted(ANSWER + "import time; time.sleep(600)")
    job = comparisons.start(SMALL)
    wait_for(lambda: job.share == 0.25 and job.what == "before", 20, "progress")
    process = job.process
    assert process is not None
    comparisons.cancel(job.key)
    assert process.wait(10) != 0
    assert finished(comparisons, job.key).state == "cancelled"
    wait_for(lambda: job.process is None, 10, "the thread lets go")


def test_what_takes_too_long_or_ends_early_or_waits_too_long_is_said() -> None:
    slow = scripted(ANSWER + "import time; time.sleep(600)", max_seconds=0.5)
    job = finished(slow, slow.start(SMALL).key)
    assert "took more than 0.5 s" in job.reason
    broken = scripted("input(); raise SystemExit(7)")
    job = finished(broken, broken.start(SMALL).key)
    assert "code 7" in job.reason
    busy = scripted("import time; time.sleep(600)")
    jobs = [busy.start(SMALL | {"load": {"limit": 10 + i}}) for i in range(RUNNING + WAITING + 3)]
    assert "Too many comparisons wait" in jobs[-1].reason
    for each in jobs:
        busy.cancel(each.key)


def test_a_worker_ends_when_the_app_that_started_it_does() -> None:
    import subprocess

    question = json.dumps({"load": {"limit": 20000}, "before": {}, "after": {}})
    worker = subprocess.Popen((sys.executable, "-m", "observability.workload.whatif"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # fmt: skip
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(question + "\n")
    worker.stdin.flush()
    assert "share" in worker.stdout.readline()
    worker.stdin.close()
    assert worker.wait(20) == 3
    worker.stdout.close()


@pytest.mark.parametrize("model", MODELS)
def test_every_precision_and_layout_that_the_page_offers_for_a_model_serves_the_load(model: str) -> None:
    load = list(read_load(Load(limit=6)))
    gpu = "A10G" if MODELS[model].parameters < 1e9 else "H200"
    group = max(size for size in groups_for(gpu, model) if size <= 16)
    offered = [(kv, layout) for kv in kv_for(gpu, model).values() for layout in layouts_for(model, kv)]
    assert {"contiguous", "paged", "reserved"} <= {layout for _, layout in offered}
    for kv, layout in offered:
        setting = Setting(model=model, gpu=gpu, tensor_parallel=group, kv_dtype=kv, layout=layout)  # type: ignore[arg-type]
        side = replay_side(load, setting, {}, lambda _: None)
        context = (
            MODELS[model].max_context if layout in ("contiguous", "paged") else math.inf
        )  # else: what the longest request needs
        assert side.served == sum(r.prompt.length < context for r in load) > 0, (kv, layout, side.reasons)


@pytest.mark.parametrize("gpu", ["A10G", "A100-40", "H100", "cpu-laptop"])
def test_what_the_page_offers_is_refused_for_nothing_but_memory(gpu: str) -> None:
    load, refused = list(read_load(Load(limit=2))), list[str]()
    for model in models_for(gpu):
        small = MODELS[model].parameters < 1e9  # its KV blocks would be tens of millions
        group = max(size for size in groups_for(gpu, model) if size <= (1 if small else 4))
        for kv in kv_for(gpu, model).values():
            for layout in layouts_for(model, kv):
                setting = Setting(model=model, gpu=gpu, tensor_parallel=group, kv_dtype=kv, layout=layout)  # type: ignore[arg-type]
                try:
                    replay_side(load, setting, {}, lambda _: None)
                except ConfigError as error:
                    refused.append(error.reason)
    assert all(re.search("leaves? no room|do not fit|cannot hold one sequence", reason) for reason in refused), refused


def test_int8_and_compression_are_offered_where_the_model_has_int8_and_once() -> None:
    assert kv_for("H100", "llama-3-8b") == {"16 bit": "auto", "int8": "int8"}
    assert kv_for("cpu-laptop", "smollm2-135m") == {"32 bit": "auto", "int8": "int8"}
    assert kv_for("H100", "deepseek-v4-flash") == {"fp8": "auto"}
    assert "compressed" in layouts_for("llama-3-8b", "auto")
    assert "compressed" not in layouts_for("llama-3-8b", "int8")
    assert "compressed" not in layouts_for("deepseek-v3", "auto")
    assert groups_for("H100", "smollm2-135m") == [1, 3, 9]
    assert groups_for("cpu-laptop", "smollm2-135m") == [1]
    assert "deepseek-v3" not in models_for("cpu-laptop")


def test_the_compressed_pool_counts_as_room_and_as_held() -> None:
    load = [TraceRequest(0.0, PromptSpan(30_000, tuple(range(59))), 200)]
    setting = Setting(layout="compressed")
    side = replay_side(load, setting, {}, lambda _: None)
    engine = virtual_engine(target_of(setting, load))[0]
    config, executor = engine.config, engine.executor
    assert config.num_blocks is not None
    assert side.kv_tokens == (config.num_blocks + config.num_compressed_blocks) * 16
    whole = virtual_engine(InProcess())[0]  # the same memory in exact blocks alone
    assert whole.config.num_blocks is not None
    assert side.kv_tokens > 1.2 * whole.config.num_blocks * 16
    # All but the newest 256 tokens lie in compressed blocks, from the admission to the end.
    old = (30_000 - 256) // 16
    capacity = whole.config.num_blocks * executor.kv_bytes_per_block
    compressed, exact = old * executor.kv_bytes_per_compressed_block, 30_200 // 16 + 1 - old
    assert side.kv_usage_max == pytest.approx((compressed + exact * executor.kv_bytes_per_block) / capacity, rel=1e-3)
    assert side.kv_usage_mean == pytest.approx((compressed + 23 * executor.kv_bytes_per_block) / capacity, rel=0.01)
    use = replay_in_process(load, target_of(setting, load)).kv.use
    assert use is not None
    assert use.active_compressed_blocks == {"mean": pytest.approx(old), "max": old}
    assert use.active_blocks["max"] == exact


def test_idle_replicas_hold_none_of_their_kv() -> None:
    load = [TraceRequest(2.0 * i, PromptSpan(8000, tuple(range(100 * i, 100 * i + 16))), 400) for i in range(10)]
    capacity = virtual_engine(InProcess())[0].config.num_blocks
    assert capacity is not None
    for replicas in (1, 32):
        side = replay_side(load, Setting(replicas=replicas), {}, lambda _: None)
        served = side.latency["e2e"]
        assert served is not None
        held = 10 * served["mean"] * (8000 + 200) / 16  # while it answers, a request goes from 500 blocks to 525
        assert side.kv_usage_mean == pytest.approx(held / (replicas * capacity * side.duration_seconds), rel=0.01)


def test_contiguous_and_paged_differ_in_no_latency_and_the_page_says_why() -> None:
    load = list(read_load(Load(limit=200)))
    contiguous, paged = (
        replay_side(load, Setting(layout=layout), {}, lambda _: None)  # type: ignore[arg-type]
        for layout in ("contiguous", "paged")
    )
    assert contiguous.latency == paged.latency
    question = {
        side: Setting(layout=layout).model_dump() for side, layout in (("before", "contiguous"), ("after", "paged"))
    }  # type: ignore[arg-type]
    assert "contiguous and paged give the same latencies" in _difference(question, ["layout"])
    question["after"] = Setting(layout="reserved").model_dump()
    assert "same latencies" not in _difference(question, ["layout"])


@pytest.fixture(scope="module")
def uneven() -> dict[str, object]:
    """A model with a shorter context on the one side."""
    question = Question(
        load=Load(limit=200), before=Setting(), after=Setting(model="smollm2-135m"), thresholds={TTFT.name: 1.0}
    )
    return asdict(compare(question))


def test_sides_that_serve_other_requests_are_told_apart_beside_the_p99(uneven: dict[str, Any]) -> None:
    load = list(read_load(Load(limit=200)))
    fit = [r for r in load if r.prompt.length < 8192]
    answers = [min(r.output_tokens, 8192 - r.prompt.length) for r in fit]
    cut = sum(told < r.output_tokens for told, r in zip(answers, fit, strict=True))
    told = [" ".join(each) for each in cautions(uneven)]
    assert "did not serve the same" in told[0]
    assert f"before: 200 of 200 requests and {sum(r.output_tokens for r in load):,} answer tokens" in told[0]
    assert f"after: {len(fit)} of 200 requests and {sum(answers):,} answer tokens" in told[0]
    assert any(each.startswith(f"After: {200 - len(fit)} of 200 requests were refused") for each in told)
    assert any(
        each.startswith(f"After: {cut} answers were cut short by max_model_len = 8,192") for each in told
    ) == bool(cut)
    assert f"P99 of 200 → {len(fit)} requests," in latency(uneven, TTFT).html


def test_overload_is_told_for_the_side_that_has_it() -> None:
    question = Question(load=Load(limit=150, requests_per_second=50), before=Setting(replicas=32), after=Setting())
    told = cautions(asdict(compare(question)))
    assert [title for title, text in told if text.startswith("Overloaded")] == ["After:"]
    assert all("did not serve" not in title for title, _ in told)


def test_files_of_the_page_say_that_their_figures_are_virtual(uneven: dict[str, Any]) -> None:
    for content in (latency(uneven, TTFT), makeup(uneven), figures(uneven)):
        assert content.data is not None
        rows = csv(content.data).decode().splitlines()
        assert rows[0].startswith("clock,")
        assert len(rows) > 1
        assert all(row.startswith("virtual,") for row in rows[1:])


def click(browser: Browser, key: str) -> None:
    """Clicks a button as soon as it is there and enabled; the page may draw it anew meanwhile."""
    script = "const b = document.querySelector(arguments[0]); if (b) b.click(); return Boolean(b)"
    wait_for(lambda: browser.driver.execute_script(script, f".st-key-{key} button:enabled"), 30, key)


def test_the_page_replays_shows_both_sides_and_a_link_shows_a_colleague_the_same(
    browser: Browser, app_url: str
) -> None:
    browser.look(1280, 800, "light")
    link = f"{app_url}/what-if?qps=2.0&requests=120&before_gpu=A100-80&after_gpu=H100&after_replicas=1"
    browser.open(link, 0)
    wait_for(lambda: "GPU A100-80 → H100" in browser.text(), 20, "the difference in words")
    assert "Nothing runs until you press the button." in browser.text()
    click(browser, "whatif-start")
    wait_for(lambda: len(browser.charts()) == 4, 120, "the answer")
    text = browser.text()
    assert "Simulated: virtual time, no model was run." in text
    assert "120 requests at" in text
    assert "Requests refused" in text
    assert browser.count(".placeholder, [data-testid=stException], .banner.error") == 0
    assert browser.overflow()[0] <= 0
    time.sleep(0.7)
    browser.picture("app-what-if-light-1280")
    browser.look(1920, 1080, "dark")
    browser.open(link, 4)
    assert "120 requests at" in browser.text(), "a link shows the answer that is there"
    time.sleep(0.7)
    browser.picture("app-what-if-dark-1920")


def test_a_comparison_can_be_cancelled_and_a_bad_trace_is_told_on_the_page(
    browser: Browser, app_url: str, tmp_path: Path
) -> None:
    browser.look(1280, 800, "light")
    browser.open(f"{app_url}/what-if?requests=20000&after_replicas=32&qps=900", 0)
    wait_for(lambda: browser.count(".st-key-whatif-start button:enabled"), 20, "the button")
    click(browser, "whatif-start")
    wait_for(lambda: browser.count(".st-key-whatif-cancel button"), 60, "progress with a way to cancel")
    click(browser, "whatif-cancel")
    wait_for(lambda: "Cancelled." in browser.text(), 30, "it says that it was cancelled")

    bad = tmp_path / "<img src=x onerror=alert(1)>.jsonl"
    bad.write_text("<script>alert(1)</script>\n")
    browser.open(f"{app_url}/what-if?load=a+trace+of+yours", 0)
    wait_for(lambda: browser.count(".st-key-trace input[type=file]"), 20, "the place for a trace")
    browser.driver.find_element(By.CSS_SELECTOR, ".st-key-trace input[type=file]").send_keys(str(bad))
    wait_for(lambda: browser.count(".st-key-whatif-start button:enabled"), 20, "the trace is there")
    click(browser, "whatif-start")
    wait_for(lambda: browser.count(".banner.error[role=alert]"), 60, "the fault of the trace")
    assert "The trace, line 1: is neither a Mooncake JSON object nor an Azure CSV header" in browser.text()
    assert browser.count("script[src=x], img[src=x]") == 0
    browser.picture("app-what-if-bad-trace")
