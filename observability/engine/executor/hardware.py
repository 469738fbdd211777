"""GPUs as small frozen records: what the roofline executor divides by. Each number names where it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from observability.errors import ConfigError

GB, TB, TERA = 1e9, 1e12, 1e12

_ASSUMED_FRACTIONS = (
    "assumption, not a datasheet figure: large dense matrix products reach 0.5-0.75 of the dense peak "
    "(FlashAttention-3 reports 0.75 on H100), streaming reads 0.8-0.9 of the bandwidth; serving stays below both"
)
_ASSUMED_OVERHEAD = (
    "assumption: a serving engine's Python step costs a few ms beside the kernels; measure your own and replace it"
)


@dataclass(frozen=True, slots=True)
class GPU:
    """One accelerator. FLOP/s are dense (no sparsity), bytes are decimal, bandwidths are bytes/s in one direction.

    `compute_fraction` and `memory_fraction` are the attainable shares of the peaks; `overlapped` says that arithmetic hides behind
    memory traffic or the other way round, where a CPU's small products take the time of both. The three overheads are the seconds
    that one step spends outside the model, whatever it holds. `sources` maps field names to where the number is from.
    """

    name: str
    peak_flops: Mapping[str, float]
    memory_bytes: float
    memory_bandwidth: float
    pcie_bandwidth: float | None  # None: the model runs in host memory
    nvlink_bandwidth: float | None  # None: GPUs of a group talk over PCIe
    compute_fraction: float
    memory_fraction: float
    schedule_seconds: float
    sample_seconds: float
    emit_seconds: float
    sources: Mapping[str, str]
    overlapped: bool = True

    @property
    def step_overhead_seconds(self) -> float:
        return self.schedule_seconds + self.sample_seconds + self.emit_seconds

    @property
    def assumed(self) -> bool:
        """True where the attainable shares and the overheads are assumptions and no measurements."""
        return not self.sources.get("compute_fraction", "").startswith(_MEASURED)

    @property
    def link_bandwidth(self) -> float | None:
        """Between two GPUs of a tensor-parallel group, bytes/s in one direction."""
        return self.nvlink_bandwidth or self.pcie_bandwidth


def _gpu(
    name: str,
    datasheet: str,
    *,
    bf16: float,
    fp8: float | None = None,
    memory: float,
    bandwidth: float,
    pcie: float,
    nvlink: float | None,
) -> GPU:
    fields = ("peak_flops", "memory_bytes", "memory_bandwidth", "pcie_bandwidth", "nvlink_bandwidth")
    return GPU(
        name=name,
        peak_flops=MappingProxyType({"bfloat16": bf16} | ({"fp8": fp8} if fp8 else {})),
        memory_bytes=memory,
        memory_bandwidth=bandwidth,
        pcie_bandwidth=pcie,
        nvlink_bandwidth=nvlink,
        compute_fraction=0.6,
        memory_fraction=0.8,
        schedule_seconds=0.0015,
        sample_seconds=0.0005,
        emit_seconds=0.0010,
        sources=MappingProxyType(
            dict.fromkeys(fields, datasheet)
            | dict.fromkeys(("compute_fraction", "memory_fraction"), _ASSUMED_FRACTIONS)
            | dict.fromkeys(("schedule_seconds", "sample_seconds", "emit_seconds"), _ASSUMED_OVERHEAD)
            | {"overlapped": "the roofline model (Williams et al. 2009): a GPU's copies and products run side by side"}
        ),
    )


_MEASURED = "measured with torch 2.13 on 2 cores of an AMD EPYC (AVX2), best of several runs: "
_MEASURED_OVERHEAD = _MEASURED + "this engine's share outside the model, SmolLM2-135M, one request"

_CPU_LAPTOP = GPU(
    name="cpu-laptop",
    peak_flops=MappingProxyType({"float32": 170e9}),
    memory_bytes=8 * GB,
    memory_bandwidth=33 * GB,
    pcie_bandwidth=None,
    nvlink_bandwidth=None,
    compute_fraction=0.38,
    memory_fraction=0.39,
    schedule_seconds=0.0005,
    sample_seconds=0.0004,
    emit_seconds=0.0001,
    sources=MappingProxyType(
        {
            "peak_flops": _MEASURED + "float32 product of 2048 x 2048 matrices",
            "memory_bandwidth": _MEASURED + "sum over 256 MiB of float32",
            "memory_bytes": "assumption: half of a laptop with 16 GB",
            "compute_fraction": _MEASURED
            + "SmolLM2-135M float32 prefills 512 tokens at 271 tokens/s, and decodes at 96 ms a "
            "step 8 sequences of 512 tokens",
            "memory_fraction": _MEASURED + "SmolLM2-135M float32 decodes at 49 ms a step, one sequence of 512 tokens",
            "overlapped": _MEASURED + "those 96 ms are the sum of both times, not the larger",
            "schedule_seconds": _MEASURED_OVERHEAD,
            "sample_seconds": _MEASURED_OVERHEAD,
            "emit_seconds": _MEASURED_OVERHEAD,
        }
    ),
    overlapped=False,
)

GPUS: dict[str, GPU] = {
    gpu.name: gpu
    for gpu in (
        _gpu(
            "A10G",
            "NVIDIA A10G datasheet (AWS G5): 24 GB GDDR6, 600 GB/s, 70 TFLOPS FP16 tensor dense, PCIe 4.0 x16, no NVLink",
            bf16=70 * TERA, memory=24 * GB, bandwidth=600 * GB, pcie=32 * GB, nvlink=None,
        ),
        _gpu(
            "A100-40",
            "NVIDIA A100 datasheet, SXM4 40 GB: 312 TFLOPS BF16 dense, 1,555 GB/s HBM2, NVLink 600 GB/s and PCIe 4.0 64 GB/s both ways",
            bf16=312 * TERA, memory=40 * GB, bandwidth=1555 * GB, pcie=32 * GB, nvlink=300 * GB,
        ),
        _gpu(
            "A100-80",
            "NVIDIA A100 datasheet, SXM4 80 GB: 312 TFLOPS BF16 dense, 2,039 GB/s HBM2e, NVLink 600 GB/s and PCIe 4.0 64 GB/s both ways",
            bf16=312 * TERA, memory=80 * GB, bandwidth=2039 * GB, pcie=32 * GB, nvlink=300 * GB,
        ),
        _gpu(
            "H100",
            "NVIDIA H100 datasheet, SXM5 80 GB: 1,979 TFLOPS BF16 and 3,958 TFLOPS FP8 with sparsity (half of it dense), "
            "3.35 TB/s HBM3, NVLink 900 GB/s and PCIe 5.0 128 GB/s both ways",
            bf16=989.5 * TERA, fp8=1979 * TERA, memory=80 * GB, bandwidth=3.35 * TB, pcie=64 * GB, nvlink=450 * GB,
        ),
        _gpu(
            "H200",
            "NVIDIA H200 datasheet, SXM 141 GB: 1,979 TFLOPS BF16 and 3,958 TFLOPS FP8 with sparsity (half of it dense), "
            "4.8 TB/s HBM3e, NVLink 900 GB/s and PCIe 5.0 128 GB/s both ways",
            bf16=989.5 * TERA, fp8=1979 * TERA, memory=141 * GB, bandwidth=4.8 * TB, pcie=64 * GB, nvlink=450 * GB,
        ),
        _CPU_LAPTOP,
    )
}  # fmt: skip


def group_sizes(gpu: GPU, heads: int) -> list[int]:
    """Numbers of GPUs that can share the `heads` of each layer evenly."""
    most = heads if gpu.link_bandwidth is not None else 1
    return [gpus for gpus in range(1, most + 1) if heads % gpus == 0]


def gpu_by_name(name: str) -> GPU:
    """The record of that name, upper or lower case. Raises ConfigError that lists the known names."""
    for key, gpu in GPUS.items():
        if key.lower() == name.lower():
            return gpu
    raise ConfigError(f"There is no record of a GPU named {name!r}.", next_step=f"Use one of {', '.join(GPUS)}.")
