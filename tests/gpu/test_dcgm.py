"""DCGM-exporter's metrics give the same values as NVML, whatever their types and units."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator

import pytest

from exporters.gpu.dcgm import FIELDS, DcgmSource, parse
from exporters.gpu.reading import VALUES, SourceUnavailable
from exporters.gpu.sampler import GpuSampler
from tests.telemetry.bench import rows_of

LABELS = (
    'gpu="0",UUID="GPU-1f02",pci_bus_id="00000000:3B:00.0",device="nvidia0",modelName="NVIDIA H100 80GB HBM3",'
    'Hostname="a",DCGM_FI_DRIVER_VERSION="580.95.05"'
)
#: Names, types and help as DCGM-exporter's counter files have them; values of one GPU.
FIELDS_OF_ONE = [
    ("DCGM_FI_DEV_SM_CLOCK", "gauge", "SM clock frequency (in MHz).", 1755),
    ("DCGM_FI_DEV_MEMORY_TEMP", "gauge", "Memory temperature (in C).", 72),
    ("DCGM_FI_DEV_GPU_TEMP", "gauge", "GPU temperature (in C).", 61),
    ("DCGM_FI_DEV_POWER_USAGE", "gauge", "Power draw (in W).", 512.345),
    ("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "counter", "Total energy consumption since boot (in mJ).", 7000500),
    ("DCGM_FI_DEV_PCIE_REPLAY_COUNTER", "counter", "Total number of PCIe retries.", 4),
    ("DCGM_FI_DEV_GPU_UTIL", "gauge", "GPU utilization (in %).", 87),
    ("DCGM_FI_DEV_MEM_COPY_UTIL", "gauge", "Memory utilization (in %).", 54),
    ("DCGM_FI_DEV_XID_ERRORS", "gauge", "Value of the last XID error encountered.", 0),
    ("DCGM_FI_DEV_POWER_VIOLATION", "counter", "Throttling duration due to power constraints (in us).", 1_500_000),
    ("DCGM_FI_DEV_THERMAL_VIOLATION", "counter", "Throttling duration due to thermal constraints (in ns).", 3_000_000_000),
    ("DCGM_FI_DEV_RELIABILITY_VIOLATION", "counter", "Throttling duration due to reliability.", 5),
    ("DCGM_FI_DEV_FB_FREE", "gauge", "Framebuffer memory free (in MiB).", 19456),
    ("DCGM_FI_DEV_FB_USED", "gauge", "Framebuffer memory used (in MiB).", 61440),
    ("DCGM_FI_DEV_FB_RESERVED", "gauge", "Framebuffer memory reserved (in MiB).", 1024),
    ("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", "counter", "Total number of double-bit volatile ECC errors.", 0),
    ("DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL", "counter", "Total number of NVLink flow-control CRC errors.", 14),
    ("DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS", "counter", "Number of remapped rows for uncorrectable errors", 1),
    ("DCGM_FI_DEV_ROW_REMAP_FAILURE", "gauge", "Whether remapping of rows has failed", 0),
    ("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "gauge", "Ratio of cycles the tensor (HMMA) pipe is active.", 0.33),
    ("DCGM_FI_PROF_DRAM_ACTIVE", "gauge", "Ratio of cycles the device memory interface is active.", 0.7125),
    ("DCGM_FI_PROF_PCIE_TX_BYTES", "counter", "The rate of data transmitted over the PCIe bus.", 104857600),
    ("DCGM_FI_DEV_CLOCKS_EVENT_REASONS", "gauge", "Current clock event reasons.", 0x44),
    ("DCGM_FI_DEV_VGPU_LICENSE_STATUS", "gauge", "vGPU License status", 0),
    ("DCGM_FI_DEV_ECC_SBE_VOL_TOTAL", "counter", "Total number of single-bit volatile ECC errors.", 9223372036854775794),
]  # fmt: skip


def exposition(fields=FIELDS_OF_ONE, labels: str = LABELS) -> str:
    return "".join(f"# HELP {n} {h}\n# TYPE {n} {t}\n{n}{{{labels}}} {v}\n" for n, t, h, v in fields)


def test_names_and_units_of_dcgm_become_ours() -> None:
    reading = parse(exposition())
    [gpu] = reading.gpus
    reasons = {key: value for key, value in gpu.values.items() if key.startswith("clock_reason/")}
    assert {key for key, value in reasons.items() if value} == {
        "clock_reason/sw_power_cap",
        "clock_reason/hw_thermal_slowdown",
    }
    assert {key: value for key, value in gpu.values.items() if key not in reasons} == pytest.approx({
        "clock/sm/current": 1.755e9, "temperature/memory": 72, "temperature/gpu": 61, "power/draw": 512.345, "energy": 7000.5,
        "pcie_replays": 4, "utilization/sm": 0.87, "utilization/memory": 0.54, "last_xid": 0,
        "throttled/power": 1.5, "throttled/thermal": 3.0,
        "memory/free": 19 * 2**30, "memory/used": 60 * 2**30, "memory/reserved": 2**30, "memory/total": 80 * 2**30,
        "ecc/uncorrected": 0, "nvlink_errors/crc_flit": 14, "repairs/remapped_uncorrected": 1, "repair_flag/remap_failed": 0,
        "profiled/tensor": 0.33, "profiled/dram": 0.7125, "pcie_rate/tx": 104857600,
    })  # fmt: skip
    assert "throttled/reliability" not in gpu.values, "its unit is not told"
    assert "ecc/corrected" not in gpu.values, "DCGM's mark for blank is no count"
    assert (gpu.labels, gpu.name, gpu.driver, gpu.bus, gpu.source) == (
        ("0", "GPU-1f02", "none"), "NVIDIA H100 80GB HBM3", "580.95.05", "0000:3b:00.0", "dcgm",
    )  # fmt: skip


def test_every_field_leads_to_a_value_that_there_is() -> None:
    keys = [key for key, _ in FIELDS.values()]
    assert set(keys) <= set(VALUES)
    assert len(keys) == len(set(keys))


def test_of_a_mig_instance_only_memory_and_profile_are_its_own() -> None:  # QR3
    instance = LABELS + ',GPU_I_PROFILE="3g.40gb",GPU_I_ID="1"'
    card, mig = parse(exposition(labels=instance)).gpus
    assert card.mig == "none"
    assert mig.mig == "1"
    assert {key.partition("/")[0] for key in mig.values} == {"memory", "profiled", "pcie_rate"}
    assert card.values["temperature/gpu"] == 61
    assert not {key for key in card.values if key.startswith(("memory", "profiled"))}


def test_pod_labels_and_their_absence_make_no_difference() -> None:  # QR2
    with_pod = parse(exposition(labels=LABELS + ',container="c",namespace="n",pod="p"')).gpus
    assert [gpu.values for gpu in with_pod] == [gpu.values for gpu in parse(exposition()).gpus]


class Exporter:
    """Answers with `text` on the loopback."""

    def __init__(self) -> None:
        self.text = exposition()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = outer.text.encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Quiet."""

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/metrics"


@pytest.fixture
def dcgm() -> Iterator[Exporter]:
    exporter = Exporter()
    yield exporter
    exporter.server.shutdown()
    exporter.server.server_close()


def test_an_xid_is_recent_from_when_the_code_changed_and_for_ten_minutes(dcgm: Exporter) -> None:
    now = [0.0]
    source = DcgmSource(dcgm.url, clock=lambda: now[0])
    assert source.read().gpus[0].recent_xids == ()
    dcgm.text = dcgm.text.replace(
        "DCGM_FI_DEV_XID_ERRORS{" + LABELS + "} 0", "DCGM_FI_DEV_XID_ERRORS{" + LABELS + "} 79"
    )
    assert source.read().gpus[0].recent_xids == ("79",)
    now[0] = 599.0
    assert source.read().gpus[0].recent_xids == ("79",)
    now[0] = 601.0
    assert source.read().gpus[0].recent_xids == (), "the code stays in DCGM's gauge for ever"
    source.close()


def test_counts_of_xids_within_a_window_are_preferred_to_the_last_code() -> None:
    window = (
        "# HELP DCGM_EXP_XID_ERRORS_COUNT Count of XID Errors within user-specified time window\n"
        "# TYPE DCGM_EXP_XID_ERRORS_COUNT gauge\n"
        f'DCGM_EXP_XID_ERRORS_COUNT{{{LABELS},window_size_in_ms="300000",xid="31"}} 2\n'
    )
    assert parse(exposition() + window).gpus[0].recent_xids == ("31",)
    none = window.replace(',xid="31"} 2', "} 0").replace(',xid="31"}} 2', "}} 0")
    assert parse(exposition() + none).gpus[0].recent_xids == ()


def test_health_and_targets_come_from_dcgm_too(dcgm: Exporter) -> None:
    sampler = GpuSampler(DcgmSource(dcgm.url))
    sampler.read_once()
    families = sampler.snapshot()
    assert rows_of(families, "kvscope_gpu_health_ratio") == {("", ("0", "GPU-1f02", "none")): pytest.approx(0.7)}
    assert {labels for _, labels in rows_of(families, "kvscope_hardware_target")} == {
        ("dram_active", "measured", "none"), ("l2_hit", "unavailable", "no_profiler"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "reason"),
    [("", "no_gpu"), ("<html>", "error"), ("up 1\n", "no_gpu"), ("x" * (17 * 2**20), "error"), ('a{b="', "error")],
    ids=["nothing", "a page", "another exporter", "too much", "cut off"],
)
def test_what_is_no_dcgm_exporter_is_told(dcgm: Exporter, text: str, reason: str) -> None:
    dcgm.text = text
    with pytest.raises(SourceUnavailable) as raised:
        DcgmSource(dcgm.url).read()
    assert raised.value.reason == reason


def test_an_address_that_is_none_is_told() -> None:
    for url in ("http://127.0.0.1:1/metrics", "nonsense", "http://[::"):
        with pytest.raises(SourceUnavailable):
            DcgmSource(url).read()
