"""A driver library that answers from a script (scripted_nvml.c), and machines made of files, for tests of GPU health."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from exporters.gpu.nvml import NvmlSource
from tests.conftest import require

GIB = 2**30
#: A healthy H100 in the middle of work, in the units of NVML: percent, bytes, KB/s, MHz, mW, mJ, ns, °C.
HEALTHY = {
    "driver": "580.95.05", "count": 1, "0.uuid": "GPU-aaaa", "0.name": "NVIDIA H100 80GB HBM3", "0.bus": "00000000:3B:00.0",
    "0.utilization.gpu": 87, "0.utilization.memory": 54,
    "0.memory.total": 80 * GIB, "0.memory.used": 60 * GIB, "0.memory.free": 19 * GIB, "0.memory.reserved": 1 * GIB,
    "0.pcie.rate0": 1500, "0.pcie.rate1": 2500, "0.pcie.width": 16, "0.pcie.width.max": 16, "0.pcie.generation": 5,
    "0.pcie.generation.max": 5, "0.pcie.replays": 4,
    "0.link0": 1, "0.link1": 1,
    **{f"0.link{link}.error{kind}": 10 * link + kind for link in (0, 1) for kind in range(5)},
    "0.ecc0.0": 12, "0.ecc1.0": 0, "0.ecc0.1": 9999,
    "0.remapped.corrected": 2, "0.remapped.uncorrected": 1, "0.remapped.pending": 0, "0.remapped.failed": 0,
    **{f"0.violation{policy}": (policy + 1) * 1_500_000_000 for policy in range(6)},
    "0.clock.reasons": 0, "0.power": 512_345, "0.power.limit": 700_000, "0.power.default": 700_000, "0.energy": 7_000_500,
    "0.temperature": 61, "0.field82": 72, "0.threshold1": 87, "0.threshold0": 92,
    "0.clock1": 1755, "0.clock1.max": 1980, "0.clock2": 2619, "0.clock2.max": 2619, "0.persistence": 1, "0.events": 1,
    "0.gpm": 1, "0.gpm2": 91.5, "0.gpm5": 33, "0.gpm10": 71.25, "0.gpm164": 88, "0.gpm20": 100, "0.gpm21": 200,
    "0.mig": 0,
}  # fmt: skip


@pytest.fixture(scope="session")
def nvml_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds a libnvidia-ml.so.1; for LD_LIBRARY_PATH of a process."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    require(compiler, "no C compiler: apt-get install gcc libc6-dev")
    assert compiler is not None
    folder = tmp_path_factory.mktemp("nvml")
    source = Path(__file__).with_name("scripted_nvml.c")
    name = "libnvidia-ml.so.1"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", f"-Wl,-soname,{name}", "-o", folder / name, source], check=True
    )
    return folder


Script = Callable[..., Path]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    """Writes what the library answers: HEALTHY with changes ({"0.power": "E4"} for an error, None to leave a key out)."""
    path = tmp_path / "nvml.txt"
    monkeypatch.setenv("NVML_SCRIPT", str(path))

    def write(changes: dict[str, object] | None = None) -> Path:
        values = {**HEALTHY, **(changes or {})}
        fresh = path.with_suffix(".new")
        fresh.write_text("".join(f"{key} {value}\n" for key, value in values.items() if value is not None))
        fresh.replace(path)  # the library reads it at any time
        return path

    return write


@pytest.fixture
def source(nvml_folder: Path, script: Script) -> Iterator[NvmlSource]:
    """NVML through the real bindings; a library that is loaded already is found by its soname."""
    ctypes.CDLL(str(nvml_folder / "libnvidia-ml.so.1"))
    script()
    source = NvmlSource()
    yield source
    source.close()


@pytest.fixture
def machine(tmp_path: Path) -> Callable[..., Path]:
    """A root with sys and proc: two NUMA nodes of four CPUs, NVIDIA cards by PCI address with their node."""

    def make(cards: dict[str, int], cpus: str = "0-3", nodes: int = 2) -> Path:
        root = tmp_path / "root"
        for bus, node in cards.items():
            folder = root / "sys/bus/pci/devices" / bus
            folder.mkdir(parents=True)
            (folder / "vendor").write_text("0x10de\n")
            (folder / "class").write_text("0x030200\n")
            (folder / "numa_node").write_text(f"{node}\n")
        audio = root / "sys/bus/pci/devices/0000:3b:00.1"  # a card's other function is no GPU
        audio.mkdir(parents=True)
        (audio / "vendor").write_text("0x10de\n")
        (audio / "class").write_text("0x040300\n")
        for node in range(nodes):
            folder = root / f"sys/devices/system/node/node{node}"
            folder.mkdir(parents=True)
            (folder / "cpulist").write_text(f"{4 * node}-{4 * node + 3}\n")
        (root / "proc/self").mkdir(parents=True)
        (root / "proc/self/status").write_text(f"Name:\tx\nCpus_allowed:\tff\nCpus_allowed_list:\t{cpus}\n")
        return root

    return make
