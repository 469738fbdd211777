"""Reads GPUs from DCGM-exporter's metrics: the same values as NVML gives, by DCGM's names and units.

Names and units: DCGM-exporter's etc/*.csv and DCGM's field list, https://docs.nvidia.com/datacenter/dcgm/latest/dcgm-api/dcgm-api-field-ids.html.
Types in its exposition are not to be trusted (byte fields of DCGM_FI_PROF_PCIE_* are rates, whatever their type says; the XID field is
the newest code), so that names decide. Throttling time came in microseconds and in nanoseconds: its help text tells which.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable

import httpx
from prometheus_client.parser import text_string_to_metric_families

from exporters.gpu.reading import WHOLE, GpuReading, Reading, SourceUnavailable
from observability import catalog as c
from observability.addresses import without_secrets

_MIB = 2.0**20
_RECENT_XID_SECONDS = 600.0
_MAX_BYTES = 16 * 2**20
#: From here on a value is one of DCGM's marks for "blank".
_BLANK = 2.0**62

#: DCGM field -> (key of reading.VALUES, factor to its unit).
FIELDS: dict[str, tuple[str, float]] = {
    "DCGM_FI_DEV_SM_CLOCK": ("clock/sm/current", 1e6),
    "DCGM_FI_DEV_MEM_CLOCK": ("clock/memory/current", 1e6),
    "DCGM_FI_DEV_MAX_SM_CLOCK": ("clock/sm/max", 1e6),
    "DCGM_FI_DEV_MAX_MEM_CLOCK": ("clock/memory/max", 1e6),
    "DCGM_FI_DEV_GPU_TEMP": ("temperature/gpu", 1.0),
    "DCGM_FI_DEV_MEMORY_TEMP": ("temperature/memory", 1.0),
    "DCGM_FI_DEV_SLOWDOWN_TEMP": ("temperature_limit/slowdown", 1.0),
    "DCGM_FI_DEV_SHUTDOWN_TEMP": ("temperature_limit/shutdown", 1.0),
    "DCGM_FI_DEV_POWER_USAGE": ("power/draw", 1.0),
    "DCGM_FI_DEV_ENFORCED_POWER_LIMIT": ("power/limit", 1.0),
    "DCGM_FI_DEV_POWER_MGMT_LIMIT_DEF": ("power/default_limit", 1.0),
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": ("energy", 1e-3),
    "DCGM_FI_DEV_PCIE_REPLAY_COUNTER": ("pcie_replays", 1.0),
    "DCGM_FI_DEV_PCIE_LINK_WIDTH": ("pcie_lanes/current", 1.0),
    "DCGM_FI_DEV_PCIE_MAX_LINK_WIDTH": ("pcie_lanes/max", 1.0),
    "DCGM_FI_DEV_PCIE_LINK_GEN": ("pcie_generation/current", 1.0),
    "DCGM_FI_DEV_PCIE_MAX_LINK_GEN": ("pcie_generation/max", 1.0),
    "DCGM_FI_PROF_PCIE_TX_BYTES": ("pcie_rate/tx", 1.0),
    "DCGM_FI_PROF_PCIE_RX_BYTES": ("pcie_rate/rx", 1.0),
    "DCGM_FI_DEV_GPU_UTIL": ("utilization/sm", 0.01),
    "DCGM_FI_DEV_MEM_COPY_UTIL": ("utilization/memory", 0.01),
    "DCGM_FI_PROF_SM_ACTIVE": ("profiled/sm", 1.0),
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": ("profiled/tensor", 1.0),
    "DCGM_FI_PROF_DRAM_ACTIVE": ("profiled/dram", 1.0),
    "DCGM_FI_DEV_XID_ERRORS": ("last_xid", 1.0),
    "DCGM_FI_DEV_FB_TOTAL": ("memory/total", _MIB),
    "DCGM_FI_DEV_FB_FREE": ("memory/free", _MIB),
    "DCGM_FI_DEV_FB_USED": ("memory/used", _MIB),
    "DCGM_FI_DEV_FB_RESERVED": ("memory/reserved", _MIB),
    "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL": ("ecc/corrected", 1.0),
    "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": ("ecc/uncorrected", 1.0),
    "DCGM_FI_DEV_RETIRED_SBE": ("repairs/retired_corrected", 1.0),
    "DCGM_FI_DEV_RETIRED_DBE": ("repairs/retired_uncorrected", 1.0),
    "DCGM_FI_DEV_RETIRED_PENDING": ("repair_flag/retirement_pending", 1.0),
    "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS": ("repairs/remapped_corrected", 1.0),
    "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS": ("repairs/remapped_uncorrected", 1.0),
    "DCGM_FI_DEV_ROW_REMAP_PENDING": ("repair_flag/remap_pending", 1.0),
    "DCGM_FI_DEV_ROW_REMAP_FAILURE": ("repair_flag/remap_failed", 1.0),
    "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL": ("nvlink_errors/replay", 1.0),
    "DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL": ("nvlink_errors/recovery", 1.0),
    "DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL": ("nvlink_errors/crc_flit", 1.0),
    "DCGM_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL": ("nvlink_errors/crc_data", 1.0),
}
_VIOLATIONS = {f"DCGM_FI_DEV_{name.upper()}_VIOLATION": name for name in c.GPU_THROTTLES if name != "low_utilization"}
_VIOLATIONS["DCGM_FI_DEV_LOW_UTIL_VIOLATION"] = "low_utilization"
_REASONS = ("DCGM_FI_DEV_CLOCKS_EVENT_REASONS", "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS")  # bits, as NVML has them
_XIDS_IN_WINDOW = "DCGM_EXP_XID_ERRORS_COUNT"


#: What a MIG instance has for itself; DCGM-exporter repeats the rest of the card at each instance.
_OF_INSTANCES = ("DCGM_FI_DEV_FB_", "DCGM_FI_PROF_")


class DcgmSource:
    """GPUs at the /metrics of a DCGM-exporter. `clock` gives Unix seconds."""

    name = "dcgm"

    def __init__(self, url: str, *, timeout: float = 5.0, clock: Callable[[], float] = time.time) -> None:
        self._url, self._shown, self._clock = url, without_secrets(url), clock
        self._client = httpx.Client(timeout=timeout)
        self._codes: dict[str, deque[tuple[float, str]]] = {}  # changes of the newest XID code, by UUID

    def read(self) -> Reading:
        body = bytearray()
        try:
            with self._client.stream("GET", self._url) as answer:
                answer.raise_for_status()
                for part in answer.iter_bytes():
                    body += part
                    if len(body) > _MAX_BYTES:
                        raise SourceUnavailable("error", f"{self._shown} sends more than {_MAX_BYTES} bytes.")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reason = "timeout" if isinstance(error, httpx.TimeoutException) else "no_answer"
            raise SourceUnavailable(
                reason, f"{self._shown} does not answer: {error or type(error).__name__}."
            ) from None
        reading = parse(body.decode(errors="replace"))
        if not reading.gpus:
            raise SourceUnavailable("no_gpu", f"{self._shown} has no DCGM metric of a GPU.")
        for gpu in reading.gpus:
            if gpu.recent_xids is None and "last_xid" in gpu.values and gpu.mig == WHOLE:
                gpu.recent_xids = self._changes(gpu.uuid, f"{gpu.values['last_xid']:.0f}")
        return reading

    def _changes(self, uuid: str, code: str) -> tuple[str, ...]:
        """Codes that came up within the last ten minutes. One that is there at first counts from then on: its age is not known."""
        seen = self._codes.setdefault(uuid, deque(maxlen=64))
        if (seen[-1][1] if seen else "0") != code:
            seen.append((self._clock(), code))
        since = self._clock() - _RECENT_XID_SECONDS
        return tuple(dict.fromkeys(code for at, code in seen if at >= since and code != "0"))

    def close(self) -> None:
        self._client.close()


def parse(text: str) -> Reading:
    """GPUs in an exposition of DCGM-exporter. Raises SourceUnavailable for text that is no exposition."""
    gpus: dict[tuple[str, str], GpuReading] = {}
    xids: dict[tuple[str, str], list[str]] = {}
    failures: Counter[str] = Counter()
    try:
        for family in text_string_to_metric_families(text):
            if not family.name.startswith("DCGM_"):
                continue
            for sample in family.samples:
                labels = sample.labels
                at = (
                    labels.get("UUID", ""),
                    labels.get("GPU_I_ID") or WHOLE if family.name.startswith(_OF_INSTANCES) else WHOLE,
                )
                if not labels.get("gpu", "").isdigit() or not 0 <= sample.value < _BLANK:
                    failures["not_supported"] += 1  # blank, or about no GPU
                    continue
                gpu = gpus.get(at) or gpus.setdefault(
                    at,
                    GpuReading(
                        labels["gpu"], at[0], at[1], labels.get("modelName", ""), labels.get("DCGM_FI_DRIVER_VERSION", ""),
                        _bus(labels.get("pci_bus_id", "")), "dcgm",
                    ),
                )  # fmt: skip
                if sample.name == _XIDS_IN_WINDOW:
                    codes = xids.setdefault(at, [])
                    if sample.value > 0:
                        codes.append(labels.get("xid", "0"))
                else:  # the parser adds _total to what DCGM types as a counter
                    _take(gpu, sample.name.removesuffix("_total"), sample.value, family.documentation)
    except ValueError as error:
        raise SourceUnavailable("error", f"This is no Prometheus exposition: {error}.") from None
    for at, gpu in gpus.items():
        if at in xids:
            gpu.recent_xids = tuple(code for code in xids[at] if code != "0")
        parts = [gpu.values.get(f"memory/{kind}") for kind in ("used", "free", "reserved")]
        if "memory/total" not in gpu.values and None not in parts:
            gpu.put("memory/total", sum(part for part in parts if part is not None))
    return Reading(sorted(gpus.values(), key=lambda gpu: (int(gpu.index), gpu.mig != WHOLE, gpu.mig)), failures)


def _take(gpu: GpuReading, name: str, value: float, help: str) -> None:
    """Puts one sample where it belongs; one that is not known, or whose unit is not told, is left out."""
    if name in FIELDS:
        key, factor = FIELDS[name]
        gpu.put(key, value * factor)
    elif name in _VIOLATIONS:
        factor = 1e-9 if "in ns" in help else 1e-6 if "in us" in help else 0.0
        if factor:
            gpu.put(f"throttled/{_VIOLATIONS[name]}", value * factor)
    elif name in _REASONS:
        for i, reason in enumerate(c.GPU_CLOCK_REASONS):
            gpu.put(f"clock_reason/{reason}", float(int(value) >> i & 1))


def _bus(text: str) -> str:
    domain, _, rest = text.lower().partition(":")
    return f"{domain[-4:]}:{rest}" if rest else ""
