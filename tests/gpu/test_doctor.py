"""`kvscope doctor --host` finds what was put wrong with a machine, says what to do, and is honest where there is no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from exporters.gpu.host import Check, check_host, parse_list
from exporters.gpu.nvml import NvmlSource

BUS = "0000:3b:00.0"


def by_name(checks: list[Check], name: str) -> Check:
    [check] = [check for check in checks if check.name == name]
    return check


def doctor(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "observability.cli", "doctor", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **environment})


def test_a_healthy_machine_has_nothing_to_change(source: NvmlSource, machine) -> None:
    checks = check_host(source, root=machine({BUS: 0}))
    assert {check.status for check in checks} == {"ok"}, [check for check in checks if check.status != "ok"]
    assert by_name(checks, "PCIe width").found == "x16 of x16"
    assert by_name(checks, "driver").found == "580.95.05"
    assert by_name(checks, "memory left").found == "19.0 of 80.0 GiB"
    assert (
        by_name(checks, "retired pages").found == "over the card's life: 2 remapped corrected, 1 remapped uncorrected"
    )


@pytest.mark.parametrize(
    ("changes", "name", "status", "advice"),
    [
        ({"0.pcie.width": 4}, "PCIe width", "warning", "slot"),
        ({"0.pcie.generation": 3}, "PCIe speed", "warning", "ASPM"),
        ({"0.pcie.generation": 1, "0.utilization.gpu": 0}, "PCIe speed", "unknown", "busy"),
        ({"0.remapped.failed": 1}, "remap failed", "broken", "replaced"),
        ({"0.remapped.pending": 1}, "remap pending", "warning", "reset"),
        ({"0.retired0": 20, "0.retired1": 40, "0.retired.pending": 0}, "retired pages", "broken", "replaced"),
        ({"0.memory.free": 2**30}, "memory left", "warning", "nvidia-smi"),
        ({"0.persistence": 0}, "persistence mode", "warning", "nvidia-persistenced"),
        ({"0.power.limit": 400_000}, "power cap", "warning", "nvidia-smi -pl"),
        ({"0.clock.reasons": 0x40}, "thermal slowdown", "warning", "fans"),
        ({"0.power.limit": "E4"}, "power cap", "unknown", ""),
        ({"0.persistence": "E3"}, "persistence mode", "unknown", ""),
    ],
)
def test_what_is_wrong_is_found_with_what_to_do(source, script, machine, changes, name, status, advice) -> None:
    script(changes)
    checks = check_host(source, root=machine({BUS: 0}))
    [found] = [check for check in checks if check.name == name and check.status == status]
    assert advice in found.do
    others = {check.status for check in checks if check is not found}
    assert others <= {"ok"}, [check for check in checks if check.status != "ok"]


@pytest.mark.parametrize(
    ("cpus", "node", "status"),
    [("0-3", 0, "ok"), ("1", 0, "ok"), ("4-7", 0, "warning"), ("0-7", 1, "warning"), ("0-3", -1, "unknown")],
)
def test_a_process_away_from_its_gpu_is_told(source: NvmlSource, machine, cpus: str, node: int, status: str) -> None:
    check = by_name(check_host(source, root=machine({BUS: node}, cpus)), "NUMA placement")
    assert check.status == status
    assert ("numactl" in check.do) == (status == "warning")
    if cpus == "0-7":
        assert "50% of them" in check.found


def test_a_card_that_the_driver_does_not_show_is_broken(source: NvmlSource, machine) -> None:
    checks = check_host(source, root=machine({BUS: 0, "0000:af:00.0": 1}))
    [check] = [check for check in checks if check.status == "broken"]
    assert "0000:af:00.0" in check.found
    assert "dmesg" in check.do


def test_a_card_without_a_driver_is_broken(machine, source: NvmlSource, script) -> None:
    script({"init": "E9"})  # DRIVER_NOT_LOADED
    checks = check_host(source, root=machine({BUS: 0}))
    assert by_name(checks, "driver").status == "broken"
    assert "modprobe" in by_name(checks, "driver").do


def test_a_machine_without_a_gpu_says_so_and_is_fine() -> None:
    answer = doctor("--host", "--json", LD_LIBRARY_PATH="/nowhere")
    report = json.loads(answer.stdout)
    if any("NVIDIA GPU at" in check["found"] for check in report["checks"]):
        pytest.skip("this machine has an NVIDIA GPU")
    assert answer.returncode == report["exit_code"] == 0
    [card] = [check for check in report["checks"] if check["name"] == "card"]
    assert "no NVIDIA GPU" in card["found"]
    assert not [check for check in report["checks"] if check["gpu"]], "nothing is said of GPUs that are not there"


@pytest.mark.parametrize(
    ("changes", "code"), [({}, 0), ({"0.persistence": 0}, 1), ({"0.persistence": 0, "0.remapped.failed": 1}, 2)]
)
def test_the_exit_code_is_that_of_the_worst_check(nvml_folder: Path, script, changes, code: int) -> None:
    path = script(changes)
    answer = doctor("--host", "--json", LD_LIBRARY_PATH=str(nvml_folder), NVML_SCRIPT=str(path))
    assert answer.returncode == json.loads(answer.stdout)["exit_code"] == code, answer.stdout + answer.stderr
    text = doctor("--host", LD_LIBRARY_PATH=str(nvml_folder), NVML_SCRIPT=str(path))
    assert text.returncode == code
    assert ("nvidia-persistenced" in " ".join(text.stdout.split())) == (code > 0)


def test_a_process_that_is_not_there_is_an_error() -> None:
    answer = doctor("--host", "--pid", "999999999")
    assert answer.returncode == 2
    assert "no process 999999999" in answer.stderr


def test_lists_of_the_kernel_are_read() -> None:
    assert parse_list("0-3,8, 10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert parse_list("") == set()
