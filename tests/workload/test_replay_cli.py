"""`kvscope replay` as a user runs it: a process, its output, its exit code, its time and memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from observability.cli.replay import _Load
from tests.workload.truth import hit_rate, hits_of_unbounded_cache, mooncake_prompts

KVSCOPE = str(Path(sys.executable).with_name("kvscope"))


def kvscope(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [KVSCOPE, "replay", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment, cwd=cwd)


def replayed(*arguments: str) -> dict[str, Any]:
    done = kvscope(*arguments, "--json", "-")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def trace(data_dir: Path) -> Path:
    return data_dir / "traces" / "mooncake_conversation.jsonl"


@pytest.mark.slow
def test_the_whole_trace_takes_less_than_a_minute_of_one_core_and_less_than_two_gibibytes(
    trace: Path, tmp_path: Path
) -> None:
    # A child's peak memory starts with its parent's (exec keeps it), so a small process in between starts and measures it.
    measure = (
        "import json, resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True);"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN); print(json.dumps([used.ru_utime + used.ru_stime, used.ru_maxrss]))"
    )
    out = tmp_path / "result.json"
    command = [sys.executable, "-c", measure, KVSCOPE, "replay", str(trace), "--json", str(out)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=280)
    cpu, peak_kib = json.loads(done.stdout.splitlines()[-1])
    result = json.loads(out.read_text())
    assert result["outcomes"]["length"] == result["requests"] == 12_031
    assert result["prompt_tokens"] == 144_793_823
    assert cpu < 60.0, f"{cpu:.1f} s of CPU"
    assert peak_kib < 2 * 1024 * 1024, f"{peak_kib / 1024:.0f} MiB"
    assert result["kv"]["hit_rate"] <= 0.3737
    assert result["clock"] == "virtual"


def test_json_has_what_it_promises_and_the_truth_in_it(trace: Path) -> None:
    result = replayed(str(trace), "--limit", "200", "--serial", "--unbounded")
    assert result["settings"]["target"] == "roofline"
    assert result["settings"]["device"] == "H100"
    assert result["settings"]["model"] == "llama-3-8b"
    assert result["settings"]["load"] == str(trace)
    assert result["settings"]["num_blocks"] is None
    assert result["settings"]["max_model_len"] == 131_072
    assert set(result["versions"]) == {"kvscope", "python", "numpy"}
    by_bucket = result["kv"]["by_length_bucket"]
    assert list(by_bucket) == ["0-2K", "2K-8K", "8K-32K", "32K-128K", "128K-512K", "512K+"]
    assert all(set(row) == {"queried_tokens", "hittable_tokens", "hit_tokens"} for row in by_bucket.values())
    want = hits_of_unbounded_cache(mooncake_prompts(trace, 200))
    assert {name: (row["queried_tokens"], row["hit_tokens"]) for name, row in by_bucket.items()} == want
    assert result["kv"]["hit_rate"] == pytest.approx(hit_rate(want))
    assert set(result["latency"]["end_to_end_seconds"]) == {
        "count", "mean", "p50", "p90", "p95", "p99", "p99.9", "max",
    }  # fmt: skip
    for part in ("all", "slowest_1_percent"):
        phases = result["phases"][part]
        assert sum(phases["by_state"].values()) == pytest.approx(phases["mean_latency_seconds"])
    assert result["kv"]["use"]["usage_ratio"] is None  # unbounded: unknown, not 0


def test_a_table_for_people_and_a_file_for_programs(data_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    azure = data_dir / "traces" / "azure_2023_code.csv"
    done = kvscope(str(azure), "--limit", "100", "--gpu", "a10g", "--json", str(out))
    assert done.returncode == 0, done.stderr
    assert "Replay in virtual time (llama-3-8b on A10G simulated)" in done.stdout
    assert done.stderr == ""  # no progress bar where nobody watches
    result = json.loads(out.read_text())
    assert result["requests"] == 100
    assert result["kv"]["hit_tokens"] == 0  # every prompt of this trace is distinct


def test_a_mechanism_is_switched_on_by_name_and_is_part_of_the_result() -> None:
    small = ("generated", "--limit", "240", "--kv-blocks", "9000", "--max-model-len", "131072", "--time-scale", "4")
    plain = replayed(*small)
    with_host = replayed(*small, "--engine", "num_host_blocks=100000", "--engine", "controller.patience=4")
    assert (plain["settings"]["num_host_blocks"], plain["settings"]["controller"]) == (0, None)
    assert with_host["settings"]["num_host_blocks"] == 100_000
    assert with_host["settings"]["controller"]["patience"] == 4
    assert with_host["kv"]["hit_tokens"] > plain["kv"]["hit_tokens"]


def test_the_generated_load_needs_no_file() -> None:
    result = replayed("generated", "--span", "120", "--seed", "3", "--requests-per-second", "2")
    assert 150 < result["requests"] < 350
    assert result["settings"]["seed"] == 3
    assert result["kv"]["hit_tokens"] > 0
    assert result["duration_seconds"] > 100


def test_an_hour_of_the_generated_load_has_the_rate_that_was_asked_for() -> None:
    result = replayed("generated", "--length-scale", "0.02", "--requests-per-second", "3.4")
    assert result["settings"]["span_seconds"] == 3600
    assert result["settings"]["start_time"] is None
    assert result["requests"] / 3600 == pytest.approx(3.4, rel=0.07)  # its bursts alone are 4 % of an hour
    assert result["throughput"]["requests_per_second"] == pytest.approx(3.4, rel=0.07)


def test_days_of_the_generated_load_have_their_shape_and_less_has_none() -> None:
    def load(span: float) -> _Load:
        return _Load("generated", 1.0, 1.0, None, 0.0, span, "recorded", 0.5, 0, laptop=False, now=0.0)

    hours = np.bincount([int(r.arrival_seconds // 3600) for r in load(86_400).requests()])
    assert hours.mean() / 3600 == pytest.approx(0.5, rel=0.05)
    assert hours[19:22].mean() / hours[3:6].mean() == pytest.approx(1.23 / 0.81, rel=0.15)
    less = np.bincount([int(r.arrival_seconds // 3600) for r in load(86_399).requests()])
    assert less[19:22].mean() / less[3:6].mean() == pytest.approx(1.0, rel=0.15)


def test_what_fits_is_worked_out_beside_compressed_blocks() -> None:
    result = replayed("generated", "--limit", "20", "--engine", "num_compressed_blocks=2000")
    use, settings = result["kv"]["use"], result["settings"]
    assert settings["max_model_len"] == 2000 * 16
    assert use["compressed_capacity_blocks"] == 2000
    room = use["capacity_blocks"] * use["bytes_per_block"] + 2000 * use["bytes_per_compressed_block"]
    assert 0 <= 72e9 - 16_060_522_496 - room < use["bytes_per_block"]
    done = kvscope("generated", "--limit", "20", "--engine", "num_compressed_blocks=2000")
    told = " ".join(done.stdout.split())
    assert (
        f"exact blocks active on average, at most {use['active_blocks']['max']:,.0f}, of {use['capacity_blocks']:,}"
        in told
    )
    assert f"at most {use['active_compressed_blocks']['max']:,.0f}, of 2,000 (of all bytes" in told


def test_a_start_past_the_end_says_where_the_trace_ends(tmp_path: Path) -> None:
    line = '{"timestamp": %d, "input_length": 5, "output_length": 5, "hash_ids": [1]}\n'
    (tmp_path / "short.jsonl").write_text(line % 1000 + line % 31_500)
    done = kvscope("short.jsonl", "--start", "100", cwd=tmp_path)
    assert done.returncode != 0
    assert done.stdout == ""
    assert "No request arrives from 100 s on: short.jsonl ends at 30.5 s." in " ".join(done.stderr.split())
    done = kvscope("short.jsonl", "--start", "10", "--span", "5", cwd=tmp_path)
    assert "No request arrives in the 5 s from 10 s on: short.jsonl ends at 30.5 s." in " ".join(done.stderr.split())
    assert "Give a longer --span." in done.stderr


def test_a_real_model_runs_from_the_command_line() -> None:
    result = replayed("generated", "--torch", "tiny", "--limit", "5", "--time-scale", "100")
    assert result["clock"] == "real"
    assert result["settings"]["preset"] == "laptop"
    assert result["outcomes"]["length"] == 5


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": [1]}\n\n{}\n', "line 2: is empty"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": [1]}\n{"timestamp"\n', "line 2: invalid JSON"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,-4,5\n", "line 2: ContextTokens"),
        ("", "holds no request"),
    ],
)  # fmt: skip
def test_a_bad_trace_is_named_with_its_line_before_anything_runs(tmp_path: Path, content: str, reason: str) -> None:
    path = tmp_path / "bad.trace"
    path.write_text(content)
    done = kvscope("bad.trace", "--json", "out.json", cwd=tmp_path)
    assert done.returncode == 1
    assert reason in " ".join(done.stderr.split())
    assert "next:" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["absent.jsonl"], "absent.jsonl cannot be read"),
        (["generated", "--gpu", "H1000"], "no record of a GPU named 'H1000'"),
        (["generated", "--torch", "tiny", "--url", "http://127.0.0.1:9"], "different targets"),
        (["generated", "--url", "http://127.0.0.1:9", "--kv-blocks", "5"], "--kv-blocks has no effect with --url"),
        (["generated", "--url", "http://127.0.0.1:9", "--limit", "1"], "cannot be reached"),
        (["generated", "--ignore-eos"], "--ignore-eos has no effect with --gpu"),
        (["generated", "--time-scale", "0"], "time_scale is 0.0"),
        (["generated", "--preset", "moon"], "no preset 'moon'"),
        (["generated", "--engine", "warp=9"], "no engine setting 'warp'"),
        (["generated", "--engine", "max_num_seqs=9"], "has an option of its own"),
        (["generated", "--engine", "num_host_blocks=1"], "prefetch_lookahead = 3 and num_host_blocks = 1 contradict"),
        (["generated", "--requests-per-second", "1e-9", "--limit", "5"], "must be between 0.0001 (about nine a day)"),
        (
            ["generated", "--requests-per-second", "0.001", "--span", "1"],
            "No request of the built-in load arrives in the 1 s",
        ),
        (
            ["generated", "--engine", "num_compressed_blocks=9999999"],
            "9,999,999 compressed blocks on 1 x H100 (80 GB each) leaves no room",
        ),
        (["generated", "--json", "/no/such/folder/out.json"], "cannot be written"),
        (["generated", "--limit", "3", "--max-model-len", "16"], "No request of 3 was served"),
    ],
)
def test_what_cannot_be_done_is_said_with_the_next_step(tmp_path: Path, arguments: list[str], reason: str) -> None:
    done = kvscope(*arguments, cwd=tmp_path)
    assert done.returncode != 0
    assert reason in " ".join(done.stderr.split())
    assert "next:" in done.stderr
    assert "Traceback" not in done.stderr


def test_help_shows_examples() -> None:
    done = kvscope("--help")
    assert done.returncode == 0
    assert "kvscope replay mooncake.jsonl --gpu H100" in " ".join(done.stdout.split())
