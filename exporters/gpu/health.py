"""The table of findings that take something off a GPU's health, and how a reading is judged by it. docs/hardware.md shows the table.

A finding that needs a value which could not be read is neither there nor absent: it is unknown. Penalties, and thresholds where no
source is named, are this project's own judgement.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from exporters.gpu.reading import GpuReading

#: XID codes after which the GPU or its driver cannot be trusted, and those that a faulty program causes.
#: https://docs.nvidia.com/deploy/xid-errors/
FATAL_XIDS = frozenset({"48", "62", "64", "74", "79", "95", "119", "120", "140", "143"})
PROGRAM_XIDS = frozenset({"13", "31", "43", "45", "68", "69"})
WINDOW_SECONDS = 600.0
#: What hardware figures should exceed: the ratio of DRAM activity, of hidden copies, of L2 hits.
TARGETS = {"dram_active": 0.65, "copy_compute_overlap": 0.70, "l2_hit": 0.85}


@dataclass(frozen=True, slots=True)
class Look:
    """What findings are told from: values now, growth of counters within the last ten minutes, XID codes of that time."""

    now: Mapping[str, float]
    grown: Mapping[str, float] = field(default_factory=dict)
    xids: Sequence[str] | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """`when` gets a Look that has all of `needs` (keys of `now`), `needs_growth` (keys of `grown`) and, with `needs_xids`, XIDs."""

    reason: str
    penalty: float
    condition: str  # `when` in words
    when: Callable[[Look], bool]
    do: str
    needs: tuple[str, ...] = ()
    needs_growth: tuple[str, ...] = ()
    needs_xids: bool = False

    def judge(self, look: Look) -> bool | None:
        """Whether the finding is there; None where that cannot be told."""
        if any(key not in look.now for key in self.needs) or any(key not in look.grown for key in self.needs_growth):
            return None
        return None if self.needs_xids and look.xids is None else bool(self.when(look))


def _below(current: str, most: str, share: float = 1.0) -> Callable[[Look], bool]:
    return lambda look: look.now[current] < share * look.now[most]


def _is_on(*keys: str) -> Callable[[Look], bool]:
    return lambda look: any(look.now[key] > 0 for key in keys)


FINDINGS: tuple[Finding, ...] = (
    Finding(
        "remap_failed", 1.0, "remapping a faulty memory row has failed", _is_on("repair_flag/remap_failed"),
        "Take the GPU out of service and have it replaced.", needs=("repair_flag/remap_failed",),
    ),
    Finding(
        "xid_fatal", 1.0, f"an XID of {', '.join(sorted(FATAL_XIDS, key=int))} within 10 min",
        lambda look: any(code in FATAL_XIDS for code in look.xids or ()),
        "Drain the host and reset the GPU (`nvidia-smi --gpu-reset`); look the code up in NVIDIA's XID catalogue. If it returns, have the GPU replaced.",
        needs_xids=True,
    ),
    Finding(
        "xid_other", 0.3, "any other XID within 10 min, but for those of programs",
        lambda look: any(code not in FATAL_XIDS | PROGRAM_XIDS for code in look.xids or ()),
        "Look the code up in NVIDIA's XID catalogue and in the kernel's log (`dmesg | grep Xid`).", needs_xids=True,
    ),
    Finding(
        "xid_program", 0.1, f"an XID of {', '.join(sorted(PROGRAM_XIDS, key=int))} within 10 min: a program did something wrong",
        lambda look: any(code in PROGRAM_XIDS for code in look.xids or ()),
        "Find the program in the kernel's log (`dmesg | grep Xid`) and see why its kernel failed.", needs_xids=True,
    ),
    Finding(
        "ecc_uncorrected", 0.5, "uncorrected memory errors since the driver was loaded", _is_on("ecc/uncorrected"),
        "Restart what runs on the GPU: results computed at that time may be wrong. Reset the GPU, so that the memory is repaired.",
        needs=("ecc/uncorrected",),
    ),
    Finding(
        "ecc_corrected", 0.1, "more than 1,000 corrected memory errors within 10 min",
        lambda look: look.grown["ecc/corrected"] > 1000, "Watch it: memory that corrects so much often fails next.",
        needs_growth=("ecc/corrected",),
    ),
    Finding(
        "retirement_pending", 0.3, "a faulty page is to be retired at the next reset", _is_on("repair_flag/retirement_pending"),
        "Drain the GPU and reset it (`nvidia-smi --gpu-reset`).", needs=("repair_flag/retirement_pending",),
    ),
    Finding(
        "remap_pending", 0.3, "a faulty row is to be remapped at the next reset", _is_on("repair_flag/remap_pending"),
        "Drain the GPU and reset it (`nvidia-smi --gpu-reset`).", needs=("repair_flag/remap_pending",),
    ),
    Finding(
        "retired_pages", 0.5, "60 or more pages retired: NVIDIA's limit for a replacement",
        lambda look: look.now["repairs/retired_corrected"] + look.now["repairs/retired_uncorrected"] >= 60,
        "Have the GPU replaced.", needs=("repairs/retired_corrected", "repairs/retired_uncorrected"),
    ),
    Finding(
        "nvlink_inactive", 0.2, "some NVLink links are down, others are up",
        lambda look: look.now["nvlink/inactive"] > 0 and look.now["nvlink/active"] > 0,
        "Compare with the topology of this machine (`nvidia-smi nvlink -s`); reset GPU and switches, then have the link looked at.",
        needs=("nvlink/active", "nvlink/inactive"),
    ),
    Finding(
        "nvlink_errors", 0.2, "NVLink recovered from an error, or more than 100 CRC errors, within 10 min",
        lambda look: look.grown["nvlink_errors/recovery"] > 0
        or look.grown["nvlink_errors/crc_flit"] + look.grown["nvlink_errors/crc_data"] > 100,
        "See which link it is (`nvidia-smi nvlink -e`) and have bridge, board or cable looked at.",
        needs_growth=("nvlink_errors/recovery", "nvlink_errors/crc_flit", "nvlink_errors/crc_data"),
    ),
    Finding(
        "pcie_width", 0.3, "the PCIe link has fewer lanes than card and slot can do",
        _below("pcie_lanes/current", "pcie_lanes/max"),
        "Put the card into a slot with all lanes, reseat it, and look at bifurcation in the firmware's setup.",
        needs=("pcie_lanes/current", "pcie_lanes/max"),
    ),
    Finding(
        "pcie_generation", 0.2, "the PCIe link is slower than card and slot can do while the GPU is more than 30 % busy",
        lambda look: look.now["utilization/sm"] > 0.3
        and look.now["pcie_generation/current"] < look.now["pcie_generation/max"],
        "Look at link speed and power management (ASPM) in the firmware's setup; reseat card and riser.",
        needs=("pcie_generation/current", "pcie_generation/max", "utilization/sm"),
    ),
    Finding(
        "pcie_replays", 0.1, "more than 10 PCIe packets sent again within 10 min",
        lambda look: look.grown["pcie_replays"] > 10, "Reseat card and riser; the link is disturbed.",
        needs_growth=("pcie_replays",),
    ),
    Finding(
        "thermal_slowdown", 0.3, "clocks are held down by heat",
        _is_on("clock_reason/hw_thermal_slowdown", "clock_reason/sw_thermal_slowdown"),
        "Look at fans, filters, inlet temperature and neighbours; a lower power limit keeps clocks even.",
        needs=("clock_reason/hw_thermal_slowdown", "clock_reason/sw_thermal_slowdown"),
    ),
    Finding(
        "power_brake", 0.3, "clocks are held down by the power supply's brake signal",
        _is_on("clock_reason/hw_power_brake_slowdown"), "Look at power supplies and cables of the machine.",
        needs=("clock_reason/hw_power_brake_slowdown",),
    ),
    Finding(
        "hot", 0.1, "less than 5 °C below the temperature at which clocks fall",
        lambda look: look.now["temperature/gpu"] > look.now["temperature_limit/slowdown"] - 5,
        "Look at fans, filters and inlet temperature.", needs=("temperature/gpu", "temperature_limit/slowdown"),
    ),
    Finding(
        "power_limit", 0.1, "the power limit is below the card's default", _below("power/limit", "power/default_limit", 0.99),
        "Raise it where cooling allows (`nvidia-smi -pl WATTS`), or accept lower clocks under load.",
        needs=("power/limit", "power/default_limit"),
    ),
)  # fmt: skip
BY_REASON = {finding.reason: finding for finding in FINDINGS}


def look_at(gpu: GpuReading, grown: Mapping[str, float] | None = None) -> Look:
    return Look(gpu.values, grown or {}, gpu.recent_xids)


def penalties(look: Look) -> dict[str, float]:
    """Penalty by reason: 0 where a finding is not there; reasons that cannot be told are left out."""
    judged = {finding.reason: finding.judge(look) for finding in FINDINGS}
    return {
        reason: BY_REASON[reason].penalty if found else 0.0 for reason, found in judged.items() if found is not None
    }


def health(found: Mapping[str, float]) -> float | None:
    """1 less the penalties, at least 0; None where nothing could be judged."""
    return max(0.0, 1.0 - sum(found.values())) if found else None


def table() -> str:
    """The findings as a Markdown table, highest penalty first as they stand."""
    lines = ["| Reason | Takes off | When | What to do |", "|---|---|---|---|"]
    lines += [f"| `{f.reason}` | {f.penalty:g} | {f.condition} | " + f.do.replace("|", "\\|") + " |" for f in FINDINGS]
    return "\n".join(lines) + "\n"
