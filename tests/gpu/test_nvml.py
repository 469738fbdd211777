"""What the driver says becomes series in base units, under the real bindings; what it does not say is absent and counted."""

from __future__ import annotations

import pytest

from exporters.gpu.nvml import NvmlSource
from exporters.gpu.reading import VALUES, GpuReading, SourceUnavailable
from exporters.gpu.sampler import GpuSampler
from observability import catalog as c
from tests.gpu.conftest import GIB, HEALTHY
from tests.telemetry.bench import rows_of

#: By key of VALUES, worked out by hand from HEALTHY and the units of NVML.
EXPECTED = {
    "utilization/sm": 0.87, "utilization/memory": 0.54,
    "profiled/sm": 0.915, "profiled/tensor": 0.33, "profiled/dram": 0.7125, "profiled/l2_hit": 0.88,
    "memory/total": 80 * GIB, "memory/used": 60 * GIB, "memory/free": 19 * GIB, "memory/reserved": GIB,
    "pcie_lanes/current": 16, "pcie_lanes/max": 16, "pcie_generation/current": 5, "pcie_generation/max": 5, "pcie_replays": 4,
    "nvlink/active": 2, "nvlink/inactive": 0,
    "nvlink_errors/replay": 10, "nvlink_errors/recovery": 12, "nvlink_errors/crc_flit": 14, "nvlink_errors/crc_data": 16,
    "nvlink_errors/ecc_data": 18,
    "ecc/corrected": 12, "ecc/uncorrected": 0,
    "repairs/remapped_corrected": 2, "repairs/remapped_uncorrected": 1,
    "repair_flag/remap_pending": 0, "repair_flag/remap_failed": 0,
    "last_xid": 0,
    "throttled/power": 1.5, "throttled/thermal": 3.0, "throttled/sync_boost": 4.5, "throttled/board_limit": 6.0,
    "throttled/low_utilization": 7.5, "throttled/reliability": 9.0,
    **{f"clock_reason/{reason}": 0 for reason in c.GPU_CLOCK_REASONS},
    "power/draw": 512.345, "power/limit": 700, "power/default_limit": 700, "energy": 7000.5,
    "temperature/gpu": 61, "temperature/memory": 72, "temperature_limit/slowdown": 87, "temperature_limit/shutdown": 92,
    "clock/sm/current": 1.755e9, "clock/sm/max": 1.98e9, "clock/memory/current": 2.619e9, "clock/memory/max": 2.619e9,
}  # fmt: skip
#: A card either retires pages or remaps rows: this one remaps.
OF_OLDER_CARDS = {"repairs/retired_corrected", "repairs/retired_uncorrected", "repair_flag/retirement_pending"}


def read(source: NvmlSource) -> GpuReading:
    [gpu] = source.read().gpus
    return gpu


def test_every_value_is_in_the_base_unit_of_its_family(source: NvmlSource) -> None:
    first = read(source)
    assert first.values["pcie_rate/tx"] == 1_500_000  # KB/s, until hardware counters give bytes over an interval
    gpu = read(source)
    assert gpu.values.pop("pcie_rate/tx") == 100 * 2**20
    assert gpu.values.pop("pcie_rate/rx") == 200 * 2**20
    assert gpu.values == pytest.approx(EXPECTED)
    assert EXPECTED.keys() == VALUES.keys() - OF_OLDER_CARDS - {"pcie_rate/tx", "pcie_rate/rx"}
    assert (gpu.labels, gpu.name, gpu.driver, gpu.bus) == (
        ("0", "GPU-aaaa", "none"), "NVIDIA H100 80GB HBM3", "580.95.05", "0000:3b:00.0",
    )  # fmt: skip


def test_an_older_card_tells_retired_pages(source: NvmlSource, script) -> None:
    script({"0.remapped.corrected": None, "0.retired0": 3, "0.retired1": 0, "0.retired.pending": 1})
    values = read(source).values
    assert [values[key] for key in sorted(OF_OLDER_CARDS)] == [1, 3, 0]
    assert not [key for key in values if "remap" in key]


def test_bits_of_clock_reasons_go_to_their_names(source: NvmlSource, script) -> None:
    script({"0.clock.reasons": 0x4 | 0x40})  # nvml.h: SwPowerCap, HwThermalSlowdown
    on = {key for key, value in read(source).values.items() if key.startswith("clock_reason/") and value}
    assert on == {"clock_reason/sw_power_cap", "clock_reason/hw_thermal_slowdown"}


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ("E3", "not_supported"),
        ("E4", "no_permission"),
        ("E15", "gpu_lost"),
        ("E999", "error"),
        ("E13", "not_supported"),
        (None, "not_supported"),
    ],
)
def test_what_cannot_be_read_is_absent_and_counted_by_reason(source: NvmlSource, script, error, reason: str) -> None:
    usual = source.read().failures[reason]
    script({"0.power": error, "0.temperature": error})
    reading = source.read()
    [gpu] = reading.gpus
    assert "power/draw" not in gpu.values
    assert "temperature/gpu" not in gpu.values
    assert gpu.values["power/limit"] == 700
    assert reading.failures[reason] == usual + 2


@pytest.mark.parametrize("key", [key for key in HEALTHY if key.startswith("0.") and key not in ("0.uuid", "0.name")])
def test_no_missing_value_reads_as_zero(source: NvmlSource, script, key: str) -> None:
    source.read()
    whole = read(source).values
    script({key: "E4"})
    values = read(source).values
    assert values.keys() <= whole.keys()
    differing = {k for k in values if values[k] != whole[k]}
    assert differing <= {"pcie_rate/tx", "pcie_rate/rx"}, "known to NVML in two ways"
    assert all(values[k] for k in differing)


def test_a_gpu_that_is_lost_does_not_hide_the_others(source: NvmlSource, script) -> None:
    script({"count": 2, "0.handle": "E15", "1.uuid": "GPU-bbbb", "1.temperature": 40})
    reading = source.read()
    assert [(gpu.index, gpu.values["temperature/gpu"]) for gpu in reading.gpus] == [("1", 40)]
    assert reading.failures["gpu_lost"] == 1


def test_xid_events_count_once_by_code(source: NvmlSource, script) -> None:
    assert read(source).xids == {}
    events = {"event0.gpu": 0, "event0.xid": 79, "event1.gpu": 0, "event1.xid": 31, "event2.gpu": 0, "event2.xid": 31}
    script(events)
    for _ in range(2):
        gpu = read(source)
        assert gpu.xids == {"79": 1, "31": 2}
        assert gpu.values["last_xid"] == 31
        assert gpu.recent_xids == ("79", "31")


def test_xid_events_are_recent_for_ten_minutes(script, source: NvmlSource) -> None:
    now = [0.0]
    source._clock = lambda: now[0]
    read(source)
    script({"event0.gpu": 0, "event0.xid": 79})
    assert read(source).recent_xids == ("79",)
    now[0] = 599.0
    assert read(source).recent_xids == ("79",)
    now[0] = 601.0
    assert read(source).recent_xids == ()
    assert read(source).xids == {"79": 1}


def test_without_event_permission_xids_are_unknown(source: NvmlSource, script) -> None:
    script({"0.events": "E4"})
    gpu = read(source)
    assert gpu.xids is None
    assert gpu.recent_xids is None
    assert "last_xid" not in gpu.values


def test_mig_instances_have_their_own_memory_and_the_card_no_utilization(source: NvmlSource, script) -> None:
    mig = {
        "0.mig": 1, "0.mig.most": 7, "0.utilization.gpu": "E3", "0m0.gi": 1, "0m0.ci": 0, "0m0.uuid": "MIG-1",
        "0m0.memory.total": 10 * GIB, "0m0.memory.used": 4 * GIB, "0m0.memory.free": 6 * GIB,
        "0m2.gi": 5, "0m2.ci": 0, "0m2.uuid": "MIG-5", "0m2.memory.total": 20 * GIB, "0m2.memory.used": 0, "0m2.memory.free": 20 * GIB,
    }  # fmt: skip
    script(mig)
    source.read()
    reading = source.read()
    card, first, second = reading.gpus
    assert "utilization/sm" not in card.values
    assert not [key for key in card.values if key.startswith("profiled/")]
    assert card.values["temperature/gpu"] == 61
    assert first.labels == ("0", "MIG-1", "1/0")
    assert first.values == {"memory/total": 10 * GIB, "memory/used": 4 * GIB, "memory/free": 6 * GIB}
    assert second.labels == ("0", "MIG-5", "5/0")


@pytest.mark.parametrize(
    ("changes", "reason"), [({"init": "E9"}, "no_driver"), ({"count": 0}, "no_gpu"), ({"init": "E4"}, "no_permission")]
)
def test_no_gpu_is_told_with_its_reason_and_nothing_is_made_up(
    script, source: NvmlSource, changes, reason: str
) -> None:
    script(changes)
    with pytest.raises(SourceUnavailable) as raised:
        source.read()
    assert raised.value.reason == reason
    messages: list[str] = []
    sampler = GpuSampler(source, on_change=messages.append)
    sampler.read_once()
    sampler.read_once()
    assert len(messages) == 1, "it is said once"
    families = sampler.snapshot()
    assert {family.name for family, _ in families} == {
        "kvscope_gpu_read_failures", "kvscope_hardware_target_ratio", "kvscope_hardware_target",
    }  # fmt: skip
    assert rows_of(families, "kvscope_gpu_read_failures")["_total", ("no_source",)] == 2
    assert {labels for _, labels in rows_of(families, "kvscope_hardware_target")} == {
        ("dram_active", "unavailable", reason), ("l2_hit", "unavailable", reason),
    }  # fmt: skip


def test_a_driver_that_comes_later_is_found(script, source: NvmlSource) -> None:
    messages: list[str] = []
    sampler = GpuSampler(source, on_change=messages.append)
    script({"init": "E9"})
    sampler.read_once()
    script()
    sampler.read_once()
    assert [bool(message) for message in messages] == [True, False]
    assert rows_of(sampler.snapshot(), "kvscope_gpu_temperature_celsius")
