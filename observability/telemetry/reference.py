"""The catalogue as a page of documentation: `python -m observability.telemetry.reference > docs/metrics.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from observability import catalog as c
from observability.catalog import Family

_LABELS: tuple[tuple[str, str], ...] = (
    ("model", "the served model; one per engine"),
    ("class", ", ".join(c.CLASSES)),
    ("outcome", ", ".join(c.OUTCOMES)),
    ("state (requests)", ", ".join(c.STATES)),
    ("component", ", ".join(c.COMPONENTS)),
    ("gt", ", ".join(f"{bound:g}" for bound in c.TAIL_BOUNDS)),
    ("length_bucket", ", ".join(c.LENGTH_BUCKETS) + " (prompt tokens, upper bound excluded)"),
    ("tier", ", ".join(c.TIERS)),
    ("state (blocks)", ", ".join(c.BLOCK_STATES)),
    ("layout", ", ".join(c.LAYOUTS)),
    ("region", f"{c.REGION_LABELS[0]} to {c.REGION_LABELS[-1]}, in address order"),
    ("pool", ", ".join(c.POOLS)),
    ("age", f"{', '.join(c.AGE_LABELS)}: upper end of an interval in seconds, included"),
    ("window", ", ".join(c.REGRET_WINDOWS)),
    ("tensor", ", ".join(c.TENSORS)),
    ("kind (steps)", ", ".join(c.STEP_KINDS)),
    ("reason (preemptions)", ", ".join(c.PREEMPTION_REASONS)),
    ("reason (anomalies)", ", ".join(c.ANOMALIES)),
    ("gpu, uuid, mig", "index and UUID of a GPU; its instance in MIG mode, else empty"),
    ("kind (NVLink errors)", ", ".join(c.GPU_NVLINK_ERRORS)),
    ("kind (memory repairs)", ", ".join(c.GPU_REPAIRS)),
    ("flag", ", ".join(c.GPU_REPAIR_FLAGS)),
    ("reason (throttle seconds)", ", ".join(c.GPU_THROTTLES)),
    ("reason (clock reasons)", ", ".join(c.GPU_CLOCK_REASONS)),
    ("unit (profiled)", ", ".join(c.GPU_PROFILED)),
    ("reason (read failures)", ", ".join(c.GPU_READ_FAILURES)),
    ("target", ", ".join(c.HARDWARE_TARGETS)),
    ("overlap", ", ".join(c.COPY_OVERLAPS)),
)

_INTRODUCTION = """\
# Metrics

Every family that kvscope exports, made from `observability/catalog.py` by
`python -m observability.telemetry.reference > docs/metrics.md`. Do not edit this page.

Counters and histograms exist from the start with 0 for every label value that can occur. A series that has no source is
absent, never 0: states `preempted` and `swapped`, tier `host` and layout `compressed` until they occur, quantization
families unless KV is stored quantized, pools that an engine does not have, and capacity, free blocks, address regions and
residency of an unbounded pool.
Each histogram `x` has `x_bucket` with a label `le`, `x_sum` and `x_count`. Request duration and time to first token carry
exemplars (`trace_id`, or `request_id` without tracing) for a scraper that asks for OpenMetrics.
"""


def reference(families: Sequence[Family] = c.FAMILIES) -> str:
    """The page in Markdown."""
    return _INTRODUCTION + "\n" + "\n".join(_lines(families)) + "\n"


def _lines(families: Sequence[Family]) -> Iterator[str]:
    yield "## Families\n"
    yield "| Series | Kind | Unit | Labels | Meaning |"
    yield "|---|---|---|---|---|"
    for family in families:
        labels = ", ".join(f"`{label}`" for label in family.labels)
        help = family.help.replace("|", "\\|")
        yield f"| `{family.series}` | {family.kind} | {family.unit} | {labels} | {help} |"
    yield "\n## Label values\n"
    yield "| Label | Values |"
    yield "|---|---|"
    for label, values in _LABELS:
        yield f"| `{label.split()[0]}`{label[len(label.split()[0]) :]} | {values} |"
    yield "\n## Buckets\n"
    yield "Upper bounds; `+Inf` follows. Thresholds of objectives are always bounds.\n"
    yield "| Family | Bounds |"
    yield "|---|---|"
    for family in families:
        if family.bounds:
            yield f"| `{family.name}` | {' '.join(f'{bound:g}' for bound in family.bounds)} |"


if __name__ == "__main__":
    sys.stdout.write(reference())
