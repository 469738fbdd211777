"""What is read of a GPU: one table of values by key, with the family and labels that each becomes. Sources fill it, health judges it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from observability import catalog as c
from observability.catalog import Family


@dataclass(frozen=True, slots=True)
class Value:
    """`labels` are the family's label values behind gpu, uuid and mig. Values are in the family's unit."""

    family: Family
    labels: tuple[str, ...] = ()


def _each(prefix: str, family: Family, names: tuple[str, ...]) -> dict[str, Value]:
    return {f"{prefix}/{name}": Value(family, (name,)) for name in names}


VALUES: dict[str, Value] = {
    **_each("utilization", c.GPU_UTILIZATION, ("sm", "memory")),
    **_each("profiled", c.GPU_PROFILED_RATIO, c.GPU_PROFILED),
    **_each("memory", c.GPU_MEMORY, ("total", "used", "free", "reserved")),
    **_each("pcie_rate", c.GPU_PCIE_RATE, ("tx", "rx")),
    **_each("pcie_lanes", c.GPU_PCIE_WIDTH, ("current", "max")),
    **_each("pcie_generation", c.GPU_PCIE_GENERATION, ("current", "max")),
    "pcie_replays": Value(c.GPU_PCIE_REPLAYS),
    **_each("nvlink", c.GPU_NVLINK_LINKS, ("active", "inactive")),
    **_each("nvlink_errors", c.GPU_NVLINK_FAULTS, c.GPU_NVLINK_ERRORS),
    **_each("ecc", c.GPU_ECC, ("corrected", "uncorrected")),
    **_each("repairs", c.GPU_REPAIRED, c.GPU_REPAIRS),
    **_each("repair_flag", c.GPU_REPAIR_FLAG, c.GPU_REPAIR_FLAGS),
    "last_xid": Value(c.GPU_LAST_XID),
    **_each("throttled", c.GPU_THROTTLED, c.GPU_THROTTLES),
    **_each("clock_reason", c.GPU_CLOCK_REASON, c.GPU_CLOCK_REASONS),
    **_each("power", c.GPU_POWER, ("draw", "limit", "default_limit")),
    "energy": Value(c.GPU_ENERGY),
    **_each("temperature", c.GPU_TEMPERATURE, ("gpu", "memory")),
    **_each("temperature_limit", c.GPU_TEMPERATURE_LIMIT, ("slowdown", "shutdown")),
    **{
        f"clock/{domain}/{bound}": Value(c.GPU_CLOCK, (domain, bound))
        for domain in ("sm", "memory")
        for bound in ("current", "max")
    },
}


#: In place of an instance, for a whole GPU. Not "": Prometheus takes an empty label for an absent one.
WHOLE = "none"


@dataclass(slots=True)
class GpuReading:
    """One GPU, or MIG instance, at one time. A key of VALUES that is missing in `values` could not be read.

    `xids` are events by code since the source was started, None where the source does not tell them; `recent_xids` the codes of the
    last ten minutes. `extra` is for `kvscope doctor` and has no family.
    """

    index: str
    uuid: str
    mig: str = WHOLE
    name: str = ""
    driver: str = ""
    bus: str = ""
    source: str = "nvml"
    values: dict[str, float] = field(default_factory=dict)
    xids: dict[str, float] | None = None
    recent_xids: tuple[str, ...] | None = None
    extra: dict[str, float] = field(default_factory=dict)

    @property
    def labels(self) -> tuple[str, str, str]:
        return self.index, self.uuid, self.mig

    def put(self, key: str, value: float) -> None:
        """Raises KeyError for a key that is not in VALUES."""
        VALUES[key]
        self.values[key] = float(value)


@dataclass(slots=True)
class Reading:
    """All GPUs at one time, and how many reads gave no value, by reason (of GPU_READ_FAILURES)."""

    gpus: list[GpuReading] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)


class SourceUnavailable(Exception):
    """There is nothing to read from: `reason` is a word for a label (such as no_driver), the message is for people."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class GpuSource(Protocol):
    """Where GPUs are read from. Called from one thread only."""

    name: str

    def read(self) -> Reading:
        """Raises SourceUnavailable when there is nothing to read from (any more); may be called again later."""

    def close(self) -> None: ...
