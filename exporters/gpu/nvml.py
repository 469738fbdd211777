"""Reads GPUs through the driver's own library (NVML, by nvidia-ml-py). What a card or the driver does not give is left out and counted.

Units and meanings: NVML API reference, https://docs.nvidia.com/deploy/nvml-api/. GPM values need Hopper or later.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from exporters.gpu.reading import WHOLE, GpuReading, Reading, SourceUnavailable
from observability import catalog as c

_RECENT_XID_SECONDS = 600.0
_MAX_XID_CODES = 64  # more codes of one GPU are counted as `other`
_MIB = 2.0**20


class NvmlSource:
    """Every GPU that NVML shows, and the instances of those in MIG mode. `clock` gives Unix seconds."""

    name = "nvml"

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._nvml: Any = None
        self._events: Any = None
        self._watched: dict[str, str] = {}  # UUID by PCI bus id, of GPUs whose XID events are listened to
        self._xids: dict[str, Counter[str]] = {}  # by UUID
        self._recent: dict[str, deque[tuple[float, str]]] = {}
        self._gpm: dict[str, Any] = {}  # the sample before, by UUID
        self._failures: Counter[str] = Counter()

    # -- the library ---------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        if self._nvml is not None:
            return
        try:
            import pynvml
        except ImportError:
            raise SourceUnavailable(
                "no_library", "nvidia-ml-py is not installed; pip install 'kvscope[gpu]' adds it."
            ) from None
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            reason = "no_driver" if error.value in (
                pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED
            ) else _failure(pynvml, error)  # fmt: skip
            raise SourceUnavailable(reason, f"NVML cannot be used: {error}.") from None
        self._nvml = pynvml

    def close(self) -> None:
        if self._nvml is None:
            return
        nvml, self._nvml = self._nvml, None
        for sample in self._gpm.values():
            self._try(nvml, nvml.nvmlGpmSampleFree, sample)
        if self._events is not None:
            self._try(nvml, nvml.nvmlEventSetFree, self._events)
        self._gpm, self._events, self._watched = {}, None, {}
        self._try(nvml, nvml.nvmlShutdown)

    def _try(self, nvml: Any, call: Callable[..., Any], *arguments: Any) -> Any:
        """What `call` gives, or None, counted."""
        try:
            return call(*arguments)
        except nvml.NVMLError as error:
            self._failures[_failure(nvml, error)] += 1
            return None

    # -- reading -------------------------------------------------------------------------------------------------------

    def read(self) -> Reading:
        self._open()
        nvml = self._nvml
        self._failures = Counter()
        try:
            count = nvml.nvmlDeviceGetCount()
            driver = self._try(nvml, nvml.nvmlSystemGetDriverVersion) or ""
        except nvml.NVMLError as error:
            self.close()  # a driver that was unloaded needs a new start
            raise SourceUnavailable(_failure(nvml, error), f"NVML cannot count the GPUs: {error}.") from None
        if count == 0:
            raise SourceUnavailable("no_gpu", "The NVIDIA driver shows no GPU.")
        gpus: list[GpuReading] = []
        for index in range(count):
            handle = self._try(nvml, nvml.nvmlDeviceGetHandleByIndex, index)
            if handle is None:
                continue
            gpu = GpuReading(
                str(index),
                self._try(nvml, nvml.nvmlDeviceGetUUID, handle) or "",
                name=self._try(nvml, nvml.nvmlDeviceGetName, handle) or "",
                driver=driver,
            )
            pci = self._try(nvml, nvml.nvmlDeviceGetPciInfo, handle)
            gpu.bus = _bus(pci.busId) if pci is not None else ""
            self._read_gpu(nvml, handle, gpu)
            gpus.append(gpu)
            gpus.extend(self._instances(nvml, handle, gpu))
        self._take_events(nvml)
        for gpu in gpus:
            if gpu.mig == WHOLE and gpu.bus in self._watched:
                gpu.xids = dict(self._xids.get(gpu.uuid, {}))
                gpu.recent_xids = self._recent_codes(gpu.uuid)
                gpu.put("last_xid", float(self._last_code(gpu.uuid)))
        return Reading(gpus, self._failures)

    def _read_gpu(self, nvml: Any, handle: Any, gpu: GpuReading) -> None:
        self._watch(nvml, handle, gpu)
        for read in (
            _utilization, _memory, _pcie, _nvlink, _ecc, _repairs, _throttling, _power, _temperature, _clocks, _settings,
        ):  # fmt: skip
            for keys, scale, call in read(nvml, handle):
                found = self._try(nvml, call)
                if found is None:
                    continue
                for key, value in zip(keys, found if isinstance(found, (tuple, list)) else (found,), strict=True):
                    if key[0] == "+":
                        gpu.extra[key[1:]] = float(value)
                    else:
                        gpu.put(key, value * scale)
        if "memory/total" not in gpu.values:  # drivers before 510 do not know what is reserved
            old = self._try(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
            if old is not None:
                for kind in ("total", "used", "free"):
                    gpu.put(f"memory/{kind}", getattr(old, kind))
        self._read_gpm(nvml, handle, gpu)

    def _instances(self, nvml: Any, handle: Any, gpu: GpuReading) -> Iterator[GpuReading]:
        """MIG instances have memory of their own; utilization and the rest belong to the card or to nobody."""
        if gpu.extra.get("mig") != 1.0:
            return
        for number in range(self._try(nvml, nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
            try:
                instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
            except nvml.NVMLError as error:
                if error.value != nvml.NVML_ERROR_NOT_FOUND:  # fewer instances than could be are no failure
                    self._failures[_failure(nvml, error)] += 1
                continue
            ids = [
                self._try(nvml, get, instance)
                for get in (nvml.nvmlDeviceGetGpuInstanceId, nvml.nvmlDeviceGetComputeInstanceId)
            ]
            if None in ids:
                continue
            uuid = self._try(nvml, nvml.nvmlDeviceGetUUID, instance) or ""
            reading = GpuReading(gpu.index, uuid, f"{ids[0]}/{ids[1]}", gpu.name, gpu.driver, gpu.bus)
            memory = self._try(nvml, nvml.nvmlDeviceGetMemoryInfo, instance)
            if memory is not None:
                for kind in ("total", "used", "free"):
                    reading.put(f"memory/{kind}", getattr(memory, kind))
            yield reading

    # -- XID events ----------------------------------------------------------------------------------------------------

    def _watch(self, nvml: Any, handle: Any, gpu: GpuReading) -> None:
        """Listens to XID events from now on; earlier ones are in the kernel's log only."""
        if gpu.bus in self._watched or not gpu.bus:
            return
        if self._events is None:
            self._events = self._try(nvml, nvml.nvmlEventSetCreate)
            if self._events is None:
                return
        try:
            nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._events)
        except nvml.NVMLError as error:
            self._failures[_failure(nvml, error)] += 1
            return
        self._watched[gpu.bus] = gpu.uuid

    def _take_events(self, nvml: Any) -> None:
        """Events since the last reading; an event comes once."""
        while self._events is not None and self._watched:
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
            except nvml.NVMLError as error:
                if error.value != nvml.NVML_ERROR_TIMEOUT:  # timeout: there is none
                    self._failures[_failure(nvml, error)] += 1
                return
            if event.eventType != nvml.nvmlEventTypeXidCriticalError:
                continue
            pci = self._try(nvml, nvml.nvmlDeviceGetPciInfo, event.device)
            uuid = self._watched.get(_bus(pci.busId)) if pci is not None else None
            if uuid is None:
                continue
            counts = self._xids.setdefault(uuid, Counter())
            code = str(int(event.eventData))
            counts[code if code in counts or len(counts) < _MAX_XID_CODES else "other"] += 1
            self._recent.setdefault(uuid, deque(maxlen=64)).append((self._clock(), code))

    def _recent_codes(self, uuid: str) -> tuple[str, ...]:
        since = self._clock() - _RECENT_XID_SECONDS
        return tuple(dict.fromkeys(code for at, code in self._recent.get(uuid, ()) if at >= since))

    def _last_code(self, uuid: str) -> str:
        recent = self._recent.get(uuid)
        return recent[-1][1] if recent else "0"

    # -- GPM: ratios from hardware counters, between two samples ---------------------------------------------------------

    def _read_gpm(self, nvml: Any, handle: Any, gpu: GpuReading) -> None:
        support = self._try(nvml, nvml.nvmlGpmQueryDeviceSupport, handle)
        if support is None or not support.isSupportedDevice or gpu.extra.get("mig") == 1.0:
            return
        sample = self._try(nvml, nvml.nvmlGpmSampleAlloc)
        if sample is None:
            return
        if self._try(nvml, nvml.nvmlGpmSampleGet, handle, sample) is None:
            nvml.nvmlGpmSampleFree(sample)
            return
        before, self._gpm[gpu.uuid] = self._gpm.get(gpu.uuid), sample
        if before is None:
            return
        wanted = {
            "profiled/sm": (nvml.NVML_GPM_METRIC_SM_UTIL, 0.01),
            "profiled/tensor": (nvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL, 0.01),
            "profiled/dram": (nvml.NVML_GPM_METRIC_DRAM_BW_UTIL, 0.01),
            "profiled/l2_hit": (nvml.NVML_GPM_METRIC_DRAM_CACHE_HIT, 0.01),
            "pcie_rate/tx": (nvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC, _MIB),
            "pcie_rate/rx": (nvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC, _MIB),
        }
        query = nvml.c_nvmlGpmMetricsGet_t()
        query.version, query.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, len(wanted)
        query.sample1, query.sample2 = before, sample
        for i, (metric, _) in enumerate(wanted.values()):
            query.metrics[i].metricId = metric
        answer = self._try(nvml, nvml.nvmlGpmMetricsGet, query)
        nvml.nvmlGpmSampleFree(before)
        for i, (key, (_, scale)) in enumerate(wanted.items() if answer is not None else ()):
            status, value = query.metrics[i].nvmlReturn, query.metrics[i].value
            if status == nvml.NVML_SUCCESS and value == value:
                gpu.put(key, value * scale)
            else:
                self._failures["not_supported" if status == nvml.NVML_ERROR_NOT_SUPPORTED else "error"] += 1


# -- what is asked, as (keys, scale, call): a call that raises gives none of its keys; "+" marks values for `kvscope doctor` only ------------

_Reads = Iterator[tuple[tuple[str, ...], float, Callable[[], Any]]]


def _utilization(nvml: Any, handle: Any) -> _Reads:
    def rates() -> tuple[float, float]:
        found = nvml.nvmlDeviceGetUtilizationRates(handle)
        return found.gpu, found.memory

    yield ("utilization/sm", "utilization/memory"), 0.01, rates


def _memory(nvml: Any, handle: Any) -> _Reads:
    def memory() -> tuple[float, ...]:
        found = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
        return found.total, found.used, found.free, found.reserved

    yield ("memory/total", "memory/used", "memory/free", "memory/reserved"), 1.0, memory


def _pcie(nvml: Any, handle: Any) -> _Reads:
    for way, counter in (("tx", nvml.NVML_PCIE_UTIL_TX_BYTES), ("rx", nvml.NVML_PCIE_UTIL_RX_BYTES)):
        # KB/s over the last 20 ms
        yield (f"pcie_rate/{way}",), 1e3, partial(nvml.nvmlDeviceGetPcieThroughput, handle, counter)
    yield ("pcie_lanes/current",), 1.0, partial(nvml.nvmlDeviceGetCurrPcieLinkWidth, handle)
    yield ("pcie_lanes/max",), 1.0, partial(nvml.nvmlDeviceGetMaxPcieLinkWidth, handle)
    yield ("pcie_generation/current",), 1.0, partial(nvml.nvmlDeviceGetCurrPcieLinkGeneration, handle)
    yield ("pcie_generation/max",), 1.0, partial(nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle)
    yield ("pcie_replays",), 1.0, partial(nvml.nvmlDeviceGetPcieReplayCounter, handle)


def _nvlink(nvml: Any, handle: Any) -> _Reads:
    counters = {
        "replay": nvml.NVML_NVLINK_ERROR_DL_REPLAY,
        "recovery": nvml.NVML_NVLINK_ERROR_DL_RECOVERY,
        "crc_flit": nvml.NVML_NVLINK_ERROR_DL_CRC_FLIT,
        "crc_data": nvml.NVML_NVLINK_ERROR_DL_CRC_DATA,
        "ecc_data": nvml.NVML_NVLINK_ERROR_DL_ECC_DATA,
    }
    links: list[int] = []

    def states() -> tuple[float, float]:
        inactive = 0
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            try:
                active = nvml.nvmlDeviceGetNvLinkState(handle, link)
            except nvml.NVMLError as error:
                if link and error.value in (nvml.NVML_ERROR_INVALID_ARGUMENT, nvml.NVML_ERROR_NOT_SUPPORTED):
                    break  # past the last link
                links.clear()
                raise
            if active:
                links.append(link)
            else:
                inactive += 1
        return len(links), inactive

    def over_links(counter: int) -> int:
        return sum(nvml.nvmlDeviceGetNvLinkErrorCounter(handle, link, counter) for link in links)

    yield ("nvlink/active", "nvlink/inactive"), 1.0, states
    if links:
        for kind, counter in counters.items():
            yield (f"nvlink_errors/{kind}",), 1.0, partial(over_links, counter)


def _ecc(nvml: Any, handle: Any) -> _Reads:
    for kind, which in (
        ("corrected", nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
        ("uncorrected", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
    ):
        yield (f"ecc/{kind}",), 1.0, partial(nvml.nvmlDeviceGetTotalEccErrors, handle, which, nvml.NVML_VOLATILE_ECC)


def _repairs(nvml: Any, handle: Any) -> _Reads:
    """Pages are retired up to Volta and Turing, rows are remapped from Ampere on."""

    def retired(cause: int) -> int:
        return len(nvml.nvmlDeviceGetRetiredPages(handle, cause))

    for kind, cause in (
        ("corrected", nvml.NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS),
        ("uncorrected", nvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR),
    ):
        yield (f"repairs/retired_{kind}",), 1.0, partial(retired, cause)
    yield ("repair_flag/retirement_pending",), 1.0, partial(nvml.nvmlDeviceGetRetiredPagesPendingStatus, handle)
    keys = (
        "repairs/remapped_corrected",
        "repairs/remapped_uncorrected",
        "repair_flag/remap_pending",
        "repair_flag/remap_failed",
    )
    yield keys, 1.0, partial(nvml.nvmlDeviceGetRemappedRows, handle)


def _throttling(nvml: Any, handle: Any) -> _Reads:
    policies = {
        "power": nvml.NVML_PERF_POLICY_POWER,
        "thermal": nvml.NVML_PERF_POLICY_THERMAL,
        "sync_boost": nvml.NVML_PERF_POLICY_SYNC_BOOST,
        "board_limit": nvml.NVML_PERF_POLICY_BOARD_LIMIT,
        "low_utilization": nvml.NVML_PERF_POLICY_LOW_UTILIZATION,
        "reliability": nvml.NVML_PERF_POLICY_RELIABILITY,
    }

    def violation(policy: int) -> int:
        return nvml.nvmlDeviceGetViolationStatus(handle, policy).violationTime

    for reason, policy in policies.items():
        yield (f"throttled/{reason}",), 1e-9, partial(violation, policy)

    def reasons() -> tuple[float, ...]:  # the bits stand in the order of GPU_CLOCK_REASONS
        bits = nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
        return tuple(float(bits >> i & 1) for i in range(len(c.GPU_CLOCK_REASONS)))

    yield tuple(f"clock_reason/{reason}" for reason in c.GPU_CLOCK_REASONS), 1.0, reasons


def _power(nvml: Any, handle: Any) -> _Reads:
    """NVML counts in mW and mJ."""
    yield ("power/draw",), 1e-3, partial(nvml.nvmlDeviceGetPowerUsage, handle)
    yield ("power/limit",), 1e-3, partial(nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
    yield ("power/default_limit",), 1e-3, partial(nvml.nvmlDeviceGetPowerManagementDefaultLimit, handle)
    yield ("energy",), 1e-3, partial(nvml.nvmlDeviceGetTotalEnergyConsumption, handle)


def _temperature(nvml: Any, handle: Any) -> _Reads:
    def memory() -> float:
        [field] = nvml.nvmlDeviceGetFieldValues(handle, [nvml.NVML_FI_DEV_MEMORY_TEMP])
        if field.nvmlReturn != nvml.NVML_SUCCESS:
            raise nvml.NVMLError(field.nvmlReturn)
        return field.value.uiVal

    yield ("temperature/gpu",), 1.0, partial(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)
    yield ("temperature/memory",), 1.0, memory
    for limit, which in (
        ("slowdown", nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
        ("shutdown", nvml.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN),
    ):
        yield (f"temperature_limit/{limit}",), 1.0, partial(nvml.nvmlDeviceGetTemperatureThreshold, handle, which)


def _clocks(nvml: Any, handle: Any) -> _Reads:
    """NVML counts in MHz."""
    for domain, which in (("sm", nvml.NVML_CLOCK_SM), ("memory", nvml.NVML_CLOCK_MEM)):
        yield (f"clock/{domain}/current",), 1e6, partial(nvml.nvmlDeviceGetClockInfo, handle, which)
        yield (f"clock/{domain}/max",), 1e6, partial(nvml.nvmlDeviceGetMaxClockInfo, handle, which)


def _settings(nvml: Any, handle: Any) -> _Reads:
    yield ("+persistence",), 1.0, partial(nvml.nvmlDeviceGetPersistenceMode, handle)
    yield ("+mig", "+mig_pending"), 1.0, partial(nvml.nvmlDeviceGetMigMode, handle)


@contextmanager
def opened(clock: Callable[[], float] = time.time) -> Iterator[NvmlSource]:
    """A source that is closed at the end, for one look."""
    source = NvmlSource(clock)
    try:
        yield source
    finally:
        source.close()


def _failure(nvml: Any, error: Any) -> str:
    return {
        nvml.NVML_ERROR_NOT_SUPPORTED: "not_supported",
        nvml.NVML_ERROR_FUNCTION_NOT_FOUND: "not_supported",  # an older driver
        nvml.NVML_ERROR_NO_PERMISSION: "no_permission",
        nvml.NVML_ERROR_GPU_IS_LOST: "gpu_lost",
        nvml.NVML_ERROR_TIMEOUT: "timeout",
    }.get(error.value, "error")


def _bus(bus_id: str | bytes) -> str:
    """A PCI address as sysfs writes it: 0000:3b:00.0, where NVML says 00000000:3B:00.0."""
    text = bus_id.decode() if isinstance(bus_id, bytes) else bus_id
    domain, _, rest = text.lower().partition(":")
    return f"{domain[-4:]}:{rest}"
