"""What a scrape sees: families of the newest reading, at once even while the driver hangs, and nothing that is old or made up."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from exporters.gpu.health import TARGETS
from exporters.gpu.nvml import NvmlSource
from exporters.gpu.reading import VALUES
from exporters.gpu.sampler import GpuSampler
from exporters.prometheus import start_exporter
from exporters.text import render
from exporters.together import Together
from observability import catalog as c
from tests.conftest import wait_for
from tests.gpu.test_nvml import EXPECTED, OF_OLDER_CARDS
from tests.telemetry.bench import Bench, rows_of

LABELS = ("0", "GPU-aaaa", "none")


@pytest.fixture
def sampler(source: NvmlSource) -> GpuSampler:
    sampler = GpuSampler(source, clock=lambda: 1_700_000_000.0)
    sampler.read_once()
    sampler.read_once()
    return sampler


def test_every_value_read_is_a_series_of_its_family(sampler: GpuSampler) -> None:
    text = render(sampler.snapshot(), openmetrics=False).decode()
    samples = {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    for key, expected in EXPECTED.items():
        value = VALUES[key]
        assert samples[value.family.series, (*LABELS, *value.labels)] == pytest.approx(expected), key
    for key in OF_OLDER_CARDS:
        assert (VALUES[key].family.series, (*LABELS, *VALUES[key].labels)) not in samples
    assert samples["kvscope_gpu_last_read_timestamp_seconds", LABELS] == 1_700_000_000.0
    assert samples["kvscope_gpu_health_ratio", LABELS] == 1.0
    info = (*LABELS, "NVIDIA H100 80GB HBM3", "580.95.05", "0000:3b:00.0", "nvml")
    assert samples["kvscope_gpu_info", info] == 1


def test_every_family_of_gpus_is_fed(script, sampler: GpuSampler) -> None:
    script({"event0.gpu": 0, "event0.xid": 31, "0.retired0": 0, "0.retired1": 0, "0.retired.pending": 0})
    sampler.read_once()
    assert {family.name for family, _ in sampler.snapshot()} == {family.name for family in c.HOST_FAMILIES}


def test_penalties_say_why_the_health_is_not_1(script, sampler: GpuSampler) -> None:
    script({"0.pcie.width": 8, "0.pcie.replays": 40, "0.power.default": "E4"})
    sampler.read_once()
    families = sampler.snapshot()
    found = {labels[3]: v for (_, labels), v in rows_of(families, "kvscope_gpu_health_penalty_ratio").items()}
    assert {reason for reason, penalty in found.items() if penalty} == {"pcie_width", "pcie_replays"}
    assert "power_limit" not in found, "it cannot be told"
    [score] = rows_of(families, "kvscope_gpu_health_ratio").values()
    assert score == pytest.approx(1 - 0.3 - 0.1)


def test_targets_say_what_is_measured_and_why_the_rest_is_not(script, sampler: GpuSampler) -> None:
    def status() -> set[tuple[str, ...]]:
        return {labels for _, labels in rows_of(sampler.snapshot(), "kvscope_hardware_target")}

    assert status() == {("dram_active", "measured", "none"), ("l2_hit", "measured", "none")}
    script({"0.gpm164": "E3"})
    sampler.read_once()
    assert status() == {("dram_active", "measured", "none"), ("l2_hit", "unavailable", "no_profiler")}
    script({"init": "E9", "count": "E9"})
    sampler.read_once()
    sampler._state = sampler._state.__class__(unavailable=sampler._state.unavailable)
    assert {labels[:2] for labels in status()} == {("dram_active", "unavailable"), ("l2_hit", "unavailable")}
    ratios = {labels[0]: v for (_, labels), v in rows_of(sampler.snapshot(), "kvscope_hardware_target_ratio").items()}
    assert ratios == TARGETS == {"dram_active": 0.65, "copy_compute_overlap": 0.7, "l2_hit": 0.85}


def test_a_driver_that_hangs_blocks_no_scrape_and_is_counted_once(source: NvmlSource, script) -> None:  # QS1
    sampler = GpuSampler(source, interval=0.05, timeout=4.0, keep=1.0).start()
    timeouts = lambda: rows_of(sampler.snapshot(), "kvscope_gpu_read_failures")["_total", ("timeout",)]  # noqa: E731
    try:
        wait_for(lambda: rows_of(sampler.snapshot(), "kvscope_gpu_energy_joules"), 5, "a reading")
        with start_exporter(sampler) as exporter:
            script({"hang": 1})
            text = httpx.get(exporter.url, timeout=2).text  # sooner than the sampler gives the hanging call up
            assert "kvscope_gpu_energy_joules" in text
            wait_for(lambda: timeouts() == 1, 10, "the hanging call is noticed")
            text = httpx.get(exporter.url, timeout=2).text
            stamp = re.search(r"last_read_timestamp_seconds\{.*\} (\S+)", text)
            assert stamp is not None
            assert 0.2 < time.time() - float(stamp[1]) < 10
            wait_for(lambda: not rows_of(sampler.snapshot(), "kvscope_gpu_energy_joules"), 5, "old values leave")
            assert rows_of(sampler.snapshot(), "kvscope_gpu_last_read_timestamp_seconds"), "their time stays"
            assert ("_info", ("dram_active", "unavailable", "stale")) in rows_of(
                sampler.snapshot(), "kvscope_hardware_target"
            )
            assert timeouts() == 1
            script()
            wait_for(lambda: rows_of(sampler.snapshot(), "kvscope_gpu_energy_joules"), 5, "readings go on")
    finally:
        script()
        sampler.stop()


def test_an_engine_and_its_gpus_share_one_exposition(sampler: GpuSampler) -> None:
    together = Together([Bench().t, sampler]).snapshot()
    names = [family.name for family, _ in together]
    assert names == [f.name for f in c.FAMILIES if f.name in set(names)], "each family once, in catalogue order"
    assert {labels for _, labels in rows_of(together, "kvscope_hardware_target")} == {
        ("copy_compute_overlap", "unavailable", "no_gpu"), ("dram_active", "measured", "none"), ("l2_hit", "measured", "none"),
    }  # fmt: skip


def test_the_command_serves_gpus_on_the_loopback_with_a_token(spawn, nvml_folder, script, free_port, tmp_path) -> None:
    path, port = script(), free_port()
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(nvml_folder),
        "NVML_SCRIPT": str(path),
        "KVSCOPE_TOKEN": "secret",
    }
    log = tmp_path / "log"
    with log.open("wb") as out:
        process = spawn(
            sys.executable,
            "-m",
            "observability.cli",
            "gpu",
            "--port",
            str(port),
            "--interval",
            "500ms",
            env=environment,
            stdout=out,
            stderr=out,
        )
    url = f"http://127.0.0.1:{port}/metrics"
    assert wait_for(lambda: httpx.get(url).status_code, 20, "an answer") == 401
    headers = {"Authorization": "Bearer secret"}
    wait_for(
        lambda: (
            'kvscope_gpu_power_watts{gpu="0",uuid="GPU-aaaa",mig="none",kind="draw"} 512.345'
            in httpx.get(url, headers=headers).text
        ),
        10,
        "power",
    )
    process.terminate()
    assert process.wait(10) == 0
    assert "GPU metrics are being read." in log.read_text()


def test_a_driver_call_that_never_returns_stops_neither_a_scrape_nor_the_end(
    spawn, nvml_folder, script, free_port
) -> None:
    path, port = script({"hang": 1}), free_port()
    environment = {**os.environ, "LD_LIBRARY_PATH": str(nvml_folder), "NVML_SCRIPT": str(path)}
    process = spawn(
        sys.executable, "-m", "observability.cli", "serve", "tiny", "--port", str(port), env=environment,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}/metrics"
    hung = 'kvscope_gpu_read_failures_total{reason="timeout"} 1'
    wait_for(lambda: hung in httpx.get(url).text, 60, "the reading that hangs is counted, by scrapes that are answered")
    process.terminate()
    assert process.wait(30) == 0


def test_the_command_without_a_gpu_says_so_once_and_goes_on(spawn, free_port, tmp_path) -> None:
    log, port = tmp_path / "log", free_port()
    with log.open("wb") as out:
        spawn(
            sys.executable,
            "-m",
            "observability.cli",
            "gpu",
            "--port",
            str(port),
            "--dcgm",
            f"http://127.0.0.1:{free_port()}/metrics",
            stdout=out,
            stderr=out,
        )

    def answer() -> str:
        text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
        return text if "no_answer" in text else ""

    text = str(wait_for(answer, 20, "the reason"))
    assert 'kvscope_hardware_target_info{target="dram_active",status="unavailable",reason="no_answer"} 1' in text
    assert not re.findall(r"^kvscope_gpu_(?!read_failures)\w+", text, re.MULTILINE), "nothing is said of a GPU"
    assert log.read_text().count("No GPU metrics:") == 1
