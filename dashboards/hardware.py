"""The board "Hardware": is a GPU the reason? Health with its findings, work, clocks and heat, links, memory."""

from __future__ import annotations

from dashboards.frame import frame
from dashboards.panels import GREEN, RED, YELLOW, Board, Json, Line, Query, Section, StateTimeline, Table
from dashboards.shared import (
    INSTANCE,
    LINK_ERRORS,
    MEMORY_ERRORS,
    NO_GPU,
    UNHEALTHY,
    about,
    limits,
    lines,
    query,
    raw_rate,
    signal,
)
from observability import catalog as c

_EACH = "{{instance}} {{gpu}}"


def _share(family: c.Family, label: str, of: str, whole: str, where: str = "") -> str:
    """`of` over `whole`, two values of `label` of one gauge."""
    fixed = f"{where}," if where else ""
    part, total = (_gauge(family, f'{fixed}{label}="{value}"') for value in (of, whole))
    return f"{part} / ignoring ({label}) {total}"


def _gauge(family: c.Family, where: str = "") -> str:
    return f"{family.series}{{{INSTANCE}{',' + where if where else ''}}}"


def _table(title: str, text: str, expr: str, names: dict[str, str], unit: str, when_empty: str) -> Table:
    organize: Json = {
        "excludeByName": {"Time": True, "__name__": True, "job": True, "uuid": True, "mig": True},
        "includeByName": {},
        "indexByName": {name: place for place, name in enumerate(names)},
        "renameByName": names,
    }
    return Table(
        **about(UNHEALTHY, title, text),
        targets=[Query(expr=expr, format="table", instant=True)],
        transformations=[{"id": "organize", "options": organize}],
        unit=unit,
        when_empty=when_empty,
    )


def health() -> Section:
    """Health of each GPU over time, what takes from it, and which figures are measured at all."""
    score = StateTimeline(
        **about(
            UNHEALTHY,
            "Is each GPU well?",
            "Health of each GPU: 1 less the penalties of its findings (docs/hardware.md has the table). Below 0.8 something needs a look, "
            f"below 0.5 {UNHEALTHY} fires. Blank: no reading.",
        ),
        targets=[query(_gauge(c.GPU_HEALTH), _EACH)],
        unit="percentunit",
        min=0,
        max=1,
        color={"mode": "thresholds"},
        thresholds=[(None, RED), (0.5, YELLOW), (0.8, GREEN)],
        when_empty=NO_GPU,
    )
    findings = _table(
        "What is wrong with it?",
        "Findings that take from the health now, with what each takes off. The name of a finding is a row in docs/hardware.md, which says "
        "what to do; `kvscope doctor --host` on that host says it too.",
        f"sort_desc({_gauge(c.GPU_PENALTY)} > 0)",
        {"instance": "Instance", "gpu": "GPU", "reason": "Finding", "Value": "Takes off"},
        "percentunit",
        "No findings",
    )
    targets = _table(
        "Which hardware figures are measured here?",
        "The targets for hardware and whether this host measures them: unavailable says why. A figure that is not measured is absent "
        "everywhere, never 0.",
        f"{c.HARDWARE_STATUS.series}{{{INSTANCE}}}",
        {"instance": "Instance", "target": "Target", "status": "Status", "reason": "Why"},
        "short",
        NO_GPU,
    )
    return Section("Is a GPU the reason?", [Line(8, [score, findings, targets])])


def work() -> Section:
    """How busy the GPU is, by what, and whether copies hide behind steps."""
    busy = lines(
        "KvscopeBusyLowThroughput",
        "How busy is each GPU?",
        "Share of time with a kernel running (sm) and with device memory being read or written (memory). 100 % sm says only that some "
        "kernel ran; the panel to the right says how much of the device it used.",
        "percentunit",
        query(_gauge(c.GPU_UTILIZATION), f"{_EACH} {{{{unit}}}}"),
        max=1,
        when_empty=NO_GPU,
    )
    profiled = lines(
        "KvscopeBusyLowThroughput",
        "How much of the device does the work use?",
        "From hardware counters: SMs busy, tensor cores active, memory interface active (dram), L2 hits. Decode should be bound by memory: "
        "dram above 65 %. Low everywhere at full utilization: small kernels, look at the batch size.",
        "percentunit",
        query(_gauge(c.GPU_PROFILED_RATIO), f"{_EACH} {{{{unit}}}}"),
        max=1,
        when_empty="No profiler on these hosts",
        **limits((0.65, YELLOW)),
    )
    overlap = lines(
        "KvscopeBusyLowThroughput",
        "Do copies hide behind the steps?",
        "Share of the time of copies between device and host memory during which a step was running. Below 70 %: offloading and "
        "prefetch hold steps up.",
        "percentunit",
        query(signal("model:kvscope_kv_copy_overlap:ratio_rate5m"), "{{model}}"),
        max=1,
        when_empty="No copies on a GPU",
        **limits((0.7, YELLOW)),
    )
    return Section("How hard does it work?", [Line(8, [busy, profiled, overlap])])


def limits_row() -> Section:
    """Heat, power and clocks: what holds the device back."""
    heat = lines(
        UNHEALTHY,
        "How hot is it?",
        "Temperature of GPU and memory. The driver lowers clocks at its slowdown limit (typically 83 to 90 °C for the GPU); compare "
        "with the panel on clocks.",
        "celsius",
        query(_gauge(c.GPU_TEMPERATURE), f"{_EACH} {{{{sensor}}}}"),
        when_empty=NO_GPU,
    )
    power = lines(
        UNHEALTHY,
        "Is it at its power limit?",
        "Power drawn over the limit that is enforced now. At 100 % clocks are lowered to stay there: normal under load, unless the limit "
        "was set below the default.",
        "percentunit",
        query(_share(c.GPU_POWER, "kind", "draw", "limit"), _EACH),
        when_empty=NO_GPU,
    )
    clocks = lines(
        UNHEALTHY,
        "Are clocks held down?",
        "SM clock over its highest. Low under load is throttling; the panel to the right says why. An idle GPU lowers its clocks by itself.",
        "percentunit",
        query(_share(c.GPU_CLOCK, "bound", "current", "max", 'domain="sm"'), _EACH),
        max=1,
        when_empty=NO_GPU,
    )
    throttled = lines(
        UNHEALTHY,
        "What holds clocks down?",
        "Share of time that clocks were held down, by reason. power: at its limit. thermal: cooling. sync_boost and board: other GPUs or "
        "the board decide.",
        "percentunit",
        query(raw_rate(c.GPU_THROTTLED, "instance, gpu, reason"), f"{_EACH} {{{{reason}}}}"),
        when_empty="No driver that counts it",
    )
    return Section("What holds it back?", [Line(8, [heat, power, clocks, throttled])])


def links() -> Section:
    """PCIe and NVLink: width, traffic and errors."""
    traffic = lines(
        LINK_ERRORS,
        "How much goes over PCIe?",
        "Bytes sent and received per second. Offloading and prefetch of KV go here; a PCIe 4 x16 link carries about 25 GB/s each way.",
        "Bps",
        query(_gauge(c.GPU_PCIE_RATE), f"{_EACH} {{{{direction}}}}"),
        when_empty=NO_GPU,
    )
    width = lines(
        LINK_ERRORS,
        "Is the PCIe link as wide as it could be?",
        "Lanes in use over the most that card and slot allow. Below 100 %: a wrong slot, a riser, or a damaged contact; host copies are "
        "slower by as much.",
        "percentunit",
        query(_share(c.GPU_PCIE_WIDTH, "bound", "current", "max"), _EACH),
        max=1,
        when_empty=NO_GPU,
    )
    errors = lines(
        LINK_ERRORS,
        "Do the links lose packets?",
        "Per second: PCIe packets sent again, and NVLink errors by kind. Replays now and then are normal; a steady rate is a bad contact "
        f"or cable. {LINK_ERRORS} fires on it.",
        "ops",
        query(raw_rate(c.GPU_PCIE_REPLAYS, "instance, gpu"), f"{_EACH} PCIe replays"),
        query(raw_rate(c.GPU_NVLINK_FAULTS, "instance, gpu, kind"), f"{_EACH} NVLink {{{{kind}}}}"),
        when_empty=NO_GPU,
    )
    return Section("Are the links sound?", [Line(8, [traffic, width, errors])])


def memory() -> Section:
    """Device memory, its errors and repairs."""
    used = lines(
        MEMORY_ERRORS,
        "How much device memory is used?",
        "Memory used over the total, by GPU. The KV pool is reserved at start, so this is nearly flat; growth is something else on the card.",
        "percentunit",
        query(_share(c.GPU_MEMORY, "kind", "used", "total"), _EACH),
        max=1,
        when_empty=NO_GPU,
    )
    errors = lines(
        MEMORY_ERRORS,
        "Does memory make errors?",
        "ECC errors per second. Corrected ones are a sign of age; an uncorrected one has ended a kernel, and its results are lost.",
        "ops",
        query(raw_rate(c.GPU_ECC, "instance, gpu, kind"), f"{_EACH} {{{{kind}}}}"),
        when_empty="No ECC memory",
    )
    repairs = lines(
        MEMORY_ERRORS,
        "Was memory repaired?",
        "Pages retired or rows remapped over the life of the card, and flags: a repair that waits for a reset (pending), or that failed. "
        "A failed one: replace the card.",
        "short",
        query(_gauge(c.GPU_REPAIRED), f"{_EACH} {{{{kind}}}}"),
        query(_gauge(c.GPU_REPAIR_FLAG), f"{_EACH} {{{{flag}}}}"),
        when_empty=NO_GPU,
    )
    faults = lines(
        MEMORY_ERRORS,
        "Did the driver report faults?",
        "XID errors in each interval by code. 48, 63, 64, 94 and 95 are memory, 74 is NVLink, 79 is a GPU that fell off the bus; "
        "`kvscope doctor --host` says more.",
        "short",
        query(
            f"sum by (instance, gpu, xid) (increase({c.GPU_XIDS.series}{{{INSTANCE}}}[$__rate_interval]))",
            f"{_EACH} XID {{{{xid}}}}",
        ),
        when_empty="No XID errors",
    )
    return Section("Is memory sound?", [Line(8, [used, errors, repairs, faults])])


def board() -> Board:
    return frame("hardware", "Is a GPU the reason?", [health(), work(), limits_row(), links(), memory()])
