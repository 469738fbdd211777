"""Checks a host for what makes GPUs slower than they could be: card, driver, PCIe, NUMA placement, memory, power. For `kvscope doctor --host`.

Only reads: NVML, sysfs and /proc. A check that could not be made says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from exporters.gpu.health import FINDINGS, look_at
from exporters.gpu.reading import WHOLE, GpuReading, GpuSource, SourceUnavailable

#: ok; unknown: could not be told; warning: costs speed or will; broken: needs somebody now.
Status = Literal["ok", "unknown", "warning", "broken"]
_NVIDIA = "0x10de"
_DISPLAY = ("0x0300", "0x0302")  # PCI classes: VGA controller, 3D controller
_LITTLE_MEMORY = 0.1
_MIB, _GIB = 2.0**20, 2.0**30


@dataclass(frozen=True, slots=True)
class Check:
    """`gpu` is its index, "" for the host. `do` is what to change, "" where nothing has to be."""

    name: str
    gpu: str
    status: Status
    found: str
    do: str = ""


def check_host(source: GpuSource, *, pid: int | None = None, root: Path = Path("/")) -> list[Check]:
    """Looks once. `pid` is the process whose placement counts (None: this one); `root` holds sys and proc."""
    cards = _cards(root)
    checks: list[Check] = []
    try:
        gpus = [gpu for gpu in source.read().gpus if gpu.mig == WHOLE]
    except SourceUnavailable as error:
        return [*_without_gpus(cards, error), *_placement([], pid, root)]
    checks.append(Check("card", "", "ok", f"{len(gpus)} GPU(s): " + ", ".join(sorted({gpu.name for gpu in gpus}))))
    missing = sorted(set(cards) - {gpu.bus for gpu in gpus})
    if missing:
        checks.append(
            Check(
                "card", "", "broken", f"the driver does not show the card at {', '.join(missing)}",
                "Look for Xid 79 in the kernel's log (`dmesg | grep -i nvrm`); a card that fell off the bus needs a restart of the machine.",
            )
        )  # fmt: skip
    driver = gpus[0].driver if gpus else ""
    checks.append(
        Check("driver", "", "ok", driver) if driver else Check("driver", "", "unknown", "its version could not be read")
    )
    for gpu in gpus:
        checks += [*_link(gpu), *_findings(gpu), *_memory(gpu), *_settings(gpu)]
    return [*checks, *_placement(gpus, pid, root)]


def _cards(root: Path) -> list[str]:
    """PCI addresses of NVIDIA GPUs, whether or not a driver serves them."""
    devices = root / "sys/bus/pci/devices"
    return sorted(
        device.name
        for device in (devices.iterdir() if devices.is_dir() else ())
        if _text(device / "vendor") == _NVIDIA and (_text(device / "class") or "").startswith(_DISPLAY)
    )


def _without_gpus(cards: list[str], error: SourceUnavailable) -> Iterator[Check]:
    if not cards:
        yield Check("card", "", "ok", "no NVIDIA GPU in this machine: the engine runs on the CPU, nothing to check")
        yield Check("driver", "", "unknown", str(error))
        return
    yield Check("card", "", "ok", f"NVIDIA GPU at {', '.join(cards)}")
    do = {
        "no_library": "Run pip install 'kvscope[gpu]'.",
        "no_driver": "Install or load the NVIDIA driver (`modprobe nvidia`); in a container, start it with --gpus all.",
        "no_permission": "Let this user read /dev/nvidiactl and /dev/nvidia*.",
    }.get(error.reason, "Look at the kernel's log (`dmesg | grep -i nvrm`).")
    yield Check("driver", "", "broken", str(error), do)


def _link(gpu: GpuReading) -> Iterator[Check]:
    """Lanes and speed. The link of an idle GPU is slow on purpose, so that its speed can only be told under load."""
    values = gpu.values
    lanes, most = values.get("pcie_lanes/current"), values.get("pcie_lanes/max")
    if lanes is None or most is None:
        yield Check("PCIe width", gpu.index, "unknown", "could not be read")
    else:
        yield _from_finding("pcie_width", "PCIe width", gpu, f"x{lanes:g} of x{most:g}")
    speed, top = values.get("pcie_generation/current"), values.get("pcie_generation/max")
    if speed is None or top is None:
        yield Check("PCIe speed", gpu.index, "unknown", "could not be read")
    elif speed < top and values.get("utilization/sm", 0.0) <= 0.3:
        yield Check(
            "PCIe speed", gpu.index, "unknown", f"generation {speed:g} of {top:g}, but an idle GPU lowers it",
            "Run this again while the GPU is busy.",
        )  # fmt: skip
    else:
        yield _from_finding("pcie_generation", "PCIe speed", gpu, f"generation {speed:g} of {top:g}")


def _from_finding(reason: str, name: str, gpu: GpuReading, found: str) -> Check:
    finding = next(f for f in FINDINGS if f.reason == reason)
    there = finding.judge(look_at(gpu))
    if there is None and reason == "pcie_generation":  # at full speed: needs no load to be told
        there = False
    return Check(name, gpu.index, "warning" if there else "ok", found, finding.do if there else "")


def _findings(gpu: GpuReading) -> Iterator[Check]:
    """Memory repairs, errors, heat, links: from the table of health, but for what has a check of its own."""
    look = look_at(gpu)
    told = 0
    for finding in FINDINGS:
        if finding.reason.startswith("pcie_"):
            continue
        there = finding.judge(look)
        told += there is not None
        if there:
            status: Status = "broken" if finding.penalty >= 0.5 else "warning"
            name = "power cap" if finding.reason == "power_limit" else finding.reason.replace("_", " ")
            yield Check(name, gpu.index, status, finding.condition + _numbers(finding.needs, gpu), finding.do)
    keys = [key for key in gpu.values if key.startswith(("repairs/", "repair_flag/"))]
    if not keys:
        yield Check("retired pages", gpu.index, "unknown", "the card does not tell retired pages or remapped rows")
    elif not any(gpu.values[key] for key in keys):
        yield Check("retired pages", gpu.index, "ok", "no page retired, no row remapped")
    else:
        counts = ", ".join(
            f"{gpu.values[key]:g} {key.partition('/')[2].replace('_', ' ')}" for key in keys if gpu.values[key]
        )
        yield Check("retired pages", gpu.index, "ok", f"over the card's life: {counts}")
    if told == 0:
        yield Check("health", gpu.index, "unknown", "nothing of the card's health could be read")


def _numbers(keys: tuple[str, ...], gpu: GpuReading) -> str:
    return " (" + ", ".join(f"{key} {gpu.values[key]:g}" for key in keys) + ")" if keys else ""


def _memory(gpu: GpuReading) -> Iterator[Check]:
    total, free = gpu.values.get("memory/total"), gpu.values.get("memory/free")
    if not total or free is None:
        yield Check("memory left", gpu.index, "unknown", "could not be read")
        return
    found = f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB"
    if free < _LITTLE_MEMORY * total:
        yield Check(
            "memory left", gpu.index, "warning", found,
            "See who holds it (`nvidia-smi`); an engine that starts now gets a small KV pool or none.",
        )  # fmt: skip
    else:
        yield Check("memory left", gpu.index, "ok", found)


def _settings(gpu: GpuReading) -> Iterator[Check]:
    persistence = gpu.extra.get("persistence")
    if persistence is None:
        yield Check("persistence mode", gpu.index, "unknown", "could not be read")
    elif persistence:
        yield Check("persistence mode", gpu.index, "ok", "on")
    else:
        yield Check(
            "persistence mode", gpu.index, "warning", "off: the driver unloads when nobody uses the GPU",
            "Start nvidia-persistenced, or run `nvidia-smi -pm 1`.",
        )  # fmt: skip
    limit, default = gpu.values.get("power/limit"), gpu.values.get("power/default_limit")
    if limit is None:
        yield Check("power cap", gpu.index, "unknown", "could not be read")
    elif default is None or limit >= 0.99 * default:
        yield Check("power cap", gpu.index, "ok", f"{limit:.0f} W")
    if gpu.extra.get("mig"):
        yield Check("MIG", gpu.index, "ok", "on: utilization and hardware counters of the whole card are not given")


# -- NUMA ----------------------------------------------------------------------------------------------------------------


def _placement(gpus: list[GpuReading], pid: int | None, root: Path) -> Iterator[Check]:
    """Whether the CPUs that the process may use lie beside its GPUs."""
    who = "this process" if pid is None else f"process {pid}"
    status = _text(root / "proc" / ("self" if pid is None else str(pid)) / "status")
    allowed = next(
        (line.partition(":")[2] for line in (status or "").splitlines() if line.startswith("Cpus_allowed_list")), None
    )
    if allowed is None:
        yield Check("NUMA placement", "", "unknown", f"the CPUs of {who} could not be read")
        return
    cpus = parse_list(allowed)
    node_folder = root / "sys/devices/system/node"
    nodes = {
        int(path.name[4:]): parse_list(_text(path / "cpulist") or "") for path in sorted(node_folder.glob("node[0-9]*"))
    }
    if not gpus:
        used = [node for node, of_node in nodes.items() if cpus & of_node]
        yield Check(
            "NUMA placement", "", "ok", f"{who} may use {len(cpus)} CPUs on {len(used)} of {len(nodes)} node(s)"
        )
        return
    for gpu in gpus:
        text = _text(root / "sys/bus/pci/devices" / gpu.bus / "numa_node")
        node = int(text) if text is not None and text.lstrip("-").isdigit() else None
        if len(nodes) == 1:
            yield Check("NUMA placement", gpu.index, "ok", "one node")
        elif node is None or node not in nodes:  # -1: the firmware does not say
            yield Check("NUMA placement", gpu.index, "unknown", "the system does not tell the GPU's node")
        elif cpus <= nodes[node]:
            yield Check("NUMA placement", gpu.index, "ok", f"{who} runs on node {node}, beside the GPU")
        else:
            share = len(cpus & nodes[node]) / max(len(cpus), 1)
            yield Check(
                "NUMA placement", gpu.index, "warning",
                f"the GPU is on node {node}; {who} may use {len(cpus)} CPUs, {share:.0%} of them there",
                f"Start the engine with `numactl --cpunodebind={node} --membind={node}`.",
            )  # fmt: skip


def parse_list(text: str) -> set[int]:
    """Numbers of a kernel list such as 0-3,8."""
    found: set[int] = set()
    for part in text.strip().split(","):
        low, _, high = part.strip().partition("-")
        if low.isdigit():
            found |= set(range(int(low), int(high or low) + 1))
    return found


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
