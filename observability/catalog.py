"""Every metric family that kvscope exports: name, kind, unit, labels, buckets, help. Pure data.

Exporter, signals, recording rules, boards, alerts and the reference page are all made from this table, so a name can
only be wrong in one place. Imports nothing of ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram", "info"]

# -- label values ---------------------------------------------------------------------------------------------------

#: States a request moves through; each second of its latency is spent in exactly one (telemetry/phases.py).
STATES = ("queued", "kv_wait", "prefill", "decode", "preempted", "swapped")
#: What the engine was doing during a second of its step loop; together they cover all of its time.
COMPONENTS = (
    "schedule", "kv_alloc", "kv_evict", "kv_move", "dequant",
    "forward_prefill", "forward_decode", "sample", "emit", "idle",
)  # fmt: skip
#: Of foreign engines beside STATES: seconds between a client and the engine's own queue (tokenizing, transport, detokenizing).
FRONTEND_STATE = "frontend"
#: Component and class where a foreign engine does not say which one it was.
UNTOLD = "unknown"
SHOWN_STATES = (*STATES, FRONTEND_STATE)
SHOWN_COMPONENTS = (*COMPONENTS, UNTOLD)
#: Priority classes, highest first.
CLASSES = ("interactive", "standard", "long_context")
#: How a request can end. `stop` and `length` are successes; `rejected` and `invalid` were never queued, for what the server could not or for
#: what the client asked.
OUTCOMES = ("stop", "length", "abort", "error", "rejected", "deadline", "invalid")
REFUSED_OUTCOMES = ("rejected", "invalid")
BLOCK_STATES = ("free", "evictable", "active")
#: Batches of KV events of foreign engines: read as they came, asked back after a gap, not to be had, not readable.
KV_EVENT_OUTCOMES = ("received", "replayed", "lost", "malformed")
#: State of blocks of foreign engines that do not tell free from evictable.
ALLOCATABLE = "allocatable"
LAYOUTS = ("contiguous", "paged", "compressed")
#: kv_exhausted: the blocks were given up and are computed again; kv_swap: they went to the host and come back.
PREEMPTION_REASONS = ("kv_exhausted", "kv_swap")
#: Why KV blocks were moved or rewritten.
MOVES = ("compaction", "compress", "offload", "load", "swap_out", "swap_in")
PREFETCH_OUTCOMES = ("issued", "useful", "late", "wasted")
#: What the load controller reacts to.
CONTROLLER_RULES = ("kv_utilization", "p99_latency", "error_rate")
CONTROLLER_ACTIONS = ("tighten", "relax", "rollback")
HOST_STATES = ("free", "cached", "pinned")
#: What became of a session's KV snapshot after a turn.
SESSION_SAVES = ("written", "unchanged", "nothing", "busy", "too_large", "failed")
#: How a turn of a session began. From "unreadable" on a snapshot was refused.
SESSION_RESUMES = (
    "imported", "cached", "missing", "diverged", "no_room", "busy", "engine", "unreadable",
    "content", "checksum", "version", "size", "model", "fingerprint", "kv_scheme", "block_size",
)  # fmt: skip
STEP_KINDS = ("prefill", "decode", "mixed")
ANOMALIES = (
    "negative_interval", "negative_increment", "missing_milestone", "milestone_order", "clock_step", "duplicate_finish",
    "non_finite", "record_error", "unreadable_field",
)  # fmt: skip
TIERS = ("device", "host")
TENANT_TOKEN_KINDS = ("prompt", "generation")
#: Where cached content lives, each with ages of its own: exact and quantized blocks of the device, and the host tier.
POOLS = ("exact", "compressed", "host")
TENSORS = ("key", "value")

#: GPU health and hardware targets (exporters/gpu). Kinds of errors, memory repairs and throttling are those of NVML.
GPU_NVLINK_ERRORS = ("replay", "recovery", "crc_flit", "crc_data", "ecc_data")
GPU_REPAIRS = ("retired_corrected", "retired_uncorrected", "remapped_corrected", "remapped_uncorrected")
GPU_REPAIR_FLAGS = ("retirement_pending", "remap_pending", "remap_failed")
GPU_THROTTLES = ("power", "thermal", "sync_boost", "board_limit", "low_utilization", "reliability")
GPU_CLOCK_REASONS = (
    "gpu_idle", "applications_clocks_setting", "sw_power_cap", "hw_slowdown", "sync_boost", "sw_thermal_slowdown",
    "hw_thermal_slowdown", "hw_power_brake_slowdown", "display_clock_setting",
)  # fmt: skip
GPU_PROFILED = ("sm", "tensor", "dram", "l2_hit")
GPU_READ_FAILURES = ("not_supported", "no_permission", "gpu_lost", "timeout", "no_source", "error")
HARDWARE_TARGETS = ("dram_active", "copy_compute_overlap", "l2_hit")
COPY_OVERLAPS = ("hidden", "exposed")

#: Forecasts (exporters/forecast.py): ends of the steps ahead, quantiles of a forecast and of the time to a limit, central bands.
FORECAST_HORIZONS = ("10m", "20m", "30m", "40m", "50m", "60m")
FORECAST_QUANTILES = (0.025, 0.1, 0.25, 0.5, 0.75, 0.9, 0.975)
FORECAST_TIME_QUANTILES = (0.1, 0.5, 0.9)
FORECAST_BANDS = (50, 80, 95)
#: own: by the model named. fallback: another one stood in. refused: there is none now.
FORECAST_STATUSES = ("own", "fallback", "refused")
#: Why a series was not forecast: nothing new was observed, too little ever was, or the model failed on it.
FORECAST_FAILED = ("stale", "short_history", "model")
FORECAST_RUN_OUTCOMES = ("done", "failed")

# -- bucket plans (upper bounds, seconds unless said) ------------------------------------------------------------------


def _log_spaced(per_decade: Literal[5, 10, 20], low: float, high: float) -> tuple[float, ...]:
    """Preferred numbers (ISO 3, series R5, R10 or R20) from `low` to `high`, each a short decimal."""
    r20 = (
        1.0, 1.12, 1.25, 1.4, 1.6, 1.8, 2.0, 2.24, 2.5, 2.8, 3.15, 3.55, 4.0, 4.5, 5.0, 5.6, 6.3, 7.1, 8.0, 9.0,
    )  # fmt: skip
    bounds = (float(f"{m * 10.0**e:.6g}") for e in range(-6, 4) for m in r20[:: 20 // per_decade])
    return tuple(b for b in bounds if low <= b <= high)


#: Of request duration and time to first token. Each bound is at most 1/7 above the one before, so that histogram_quantile is within
#: 5 % wherever the density of latencies changes by less than 4.3 times inside one bucket; without any such condition within 1/7.
LATENCY_BOUNDS = (*_log_spaced(20, 0.001, 640.0), 640.0)
ITL_BOUNDS = (*_log_spaced(20, 0.0005, 0.5), *_log_spaced(10, 0.6, 10.0), 20.0, 40.0, 80.0)
STEP_BOUNDS = (*_log_spaced(5, 0.0001, 10.0), 20.0, 40.0)
#: Lower bounds of the tail families: a series `gt="0.8"` counts requests slower than 0.8 s. "0" counts all; every other one is a
#: bound of request duration too. Each costs a series for each state and component.
TAIL_BOUNDS = (
    0.0, 0.1, 0.2, 0.5, 0.8, 1.25, 2.0, 3.15, 5.0, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
#: Of time to first token by tenant: few, for their number is multiplied by that of tenants.
TENANT_TTFT_BOUNDS = (0.2, 0.4, 0.8, 2.0, 5.0, 20.0)
RATIO_BOUNDS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
SPREAD_BOUNDS = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0, 32.0, 64.0, 128.0)
RELATIVE_ERROR_BOUNDS = (
    0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.0125, 0.016, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0,
)  # fmt: skip
#: Of the error of single blocks, by tensor, layer group and scheme: few, for the ratio of sums is exact.
BLOCK_ERROR_BOUNDS = (0.002, 0.004, 0.006, 0.01, 0.02, 0.05, 0.1, 0.2)
#: Of a block's largest error over the RMS of its exact values.
MAXIMUM_ERROR_BOUNDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.315, 0.63, 1.25)
#: Ages of cached KV blocks: 60, 600 and 3600 s among them, and nowhere from 10 s to an hour more than 7:5 apart.
AGE_BOUNDS = (
    0.1, 0.25, 0.5, 1.0, 1.6, 2.5, 4.0, 6.3, 10.0, 12.5, 16.0, 20.0, 25.0, 31.5, 40.0, 50.0, 60.0, 80.0, 100.0, 125.0, 160.0,
    200.0, 250.0, 315.0, 400.0, 500.0, 600.0, 800.0, 1000.0, 1250.0, 1600.0, 2000.0, 2500.0, 3000.0, 3600.0, 5000.0, 8000.0,
    12500.0, 20000.0, 36000.0, 86400.0,
)  # fmt: skip
#: Some of AGE_BOUNDS: of ages and idle times that are shown as a median, not multiplied up as a life table is.
SPELL_BOUNDS = (
    0.1, 1.0, 2.5, 6.3, 10.0, 16.0, 25.0, 40.0, 60.0, 100.0, 160.0, 250.0, 400.0, 600.0, 1000.0, 1600.0, 2500.0, 3600.0, 8000.0,
    86400.0,
)  # fmt: skip
#: The label `age` of a life table: the upper end of each interval of ages, included; the lower end is the one before, or 0.
AGE_LABELS = (*(f"{bound:g}" for bound in AGE_BOUNDS), "+Inf")
#: How long ago an eviction may lie to be regretted, by label value.
REGRET_WINDOWS = {"1m": 60.0, "10m": 600.0, "1h": 3600.0}

#: Prompt-length buckets in tokens: lower bounds, upper bound excluded.
LENGTH_BOUNDS = (0, 2048, 8192, 32768, 131072, 524288)
LENGTH_BUCKETS = ("0-2K", "2K-8K", "8K-32K", "32K-128K", "128K-512K", "512K+")
#: Address regions of the KV pool in the fragmentation heatmap. Zero-padded so that label order is address order.
REGIONS = 32
REGION_LABELS = tuple(f"{i:02d}" for i in range(REGIONS))
#: Upper bounds, in blocks, of the free-run length distribution.
FREE_RUN_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 16384)


def length_bucket(prompt_tokens: int) -> int:
    """Index into LENGTH_BUCKETS of a prompt of `prompt_tokens` tokens."""
    index = 0
    for i, low in enumerate(LENGTH_BOUNDS):
        if prompt_tokens >= low:
            index = i
    return index


# -- families -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Family:
    """One metric family. `name` carries no `_total`; the exposition adds it to counters.

    `labels` come in exposition order. `bounds` are a histogram's finite upper bounds (+Inf is implied).
    """

    name: str
    kind: Kind
    unit: str
    labels: tuple[str, ...]
    help: str
    bounds: tuple[float, ...] = ()

    @property
    def series(self) -> str:
        """The name a PromQL selector uses: `x_total` for a counter, `x_bucket` for a histogram, else `x`."""
        suffix = {"counter": "_total", "histogram": "_bucket", "info": "_info"}.get(self.kind, "")
        return self.name + suffix


def _counter(name: str, unit: str, labels: tuple[str, ...], help: str) -> Family:
    return Family(name, "counter", unit, labels, help)


def _gauge(name: str, unit: str, labels: tuple[str, ...], help: str) -> Family:
    return Family(name, "gauge", unit, labels, help)


def _histogram(name: str, unit: str, labels: tuple[str, ...], help: str, bounds: tuple[float, ...]) -> Family:
    return Family(name, "histogram", unit, labels, help, bounds)


_M = ("model",)
_MC = ("model", "class")
_ML = ("model", "length_bucket")

# Requests
REQUESTS_RECEIVED = _counter(
    "kvscope_requests_received", "requests", _MC, "Requests received, also those then refused."
)
REQUESTS = _counter(
    "kvscope_requests", "requests", ("model", "class", "outcome"),
    "Requests ended, by outcome: stop or length (served), abort (client left), error, rejected (refused for want of room: 429 or 503), "
    "deadline (its time was up), invalid (refused for what was asked: another 4xx). "
    "received = ended + waiting + running.",
)  # fmt: skip
REQUEST_DURATION = _histogram(
    "kvscope_request_duration_seconds", "seconds", _MC,
    "From arrival to the last token of requests that ended by stop or length.", LATENCY_BOUNDS,
)  # fmt: skip
TIME_TO_FIRST_TOKEN = _histogram(
    "kvscope_time_to_first_token_seconds", "seconds", _MC,
    "From arrival to the first token, for every request that got one. Measured, not derived.", LATENCY_BOUNDS,
)  # fmt: skip
INTER_TOKEN_LATENCY = _histogram(
    "kvscope_inter_token_latency_seconds", "seconds", _MC,
    "Between one token and the next of a request; the first token is not included. One sample a token.", ITL_BOUNDS,
)  # fmt: skip
PROMPT_TOKENS = _counter(
    "kvscope_prompt_tokens", "tokens", _MC, "Prompt tokens of requests whose prefill completed, cached ones included."
)
GENERATION_TOKENS = _counter("kvscope_generation_tokens", "tokens", _MC, "Tokens generated and handed to a client.")
REQUESTS_RUNNING = _gauge("kvscope_requests_running", "requests", _MC, "Requests in prefill or decode. 0 when idle.")
REQUESTS_WAITING = _gauge(
    "kvscope_requests_waiting", "requests", _MC, "Requests queued, waiting for KV blocks, or preempted. 0 when idle."
)
PREEMPTIONS = _counter(
    "kvscope_preemptions", "preemptions", ("model", "reason"), "Running requests put back in the queue."
)

# By tenant: the first to come have their own series, all others share `other`. Requests without a tenant are not here.
_MT = ("model", "tenant")
TENANT_REQUESTS = _counter(
    "kvscope_tenant_requests", "requests", (*_MT, "outcome"), "Requests ended, by tenant and outcome."
)
TENANT_TTFT = _histogram(
    "kvscope_tenant_time_to_first_token_seconds", "seconds", _MT,
    "From arrival to the first token, by tenant. Few buckets: for quantiles over all tenants use kvscope_time_to_first_token_seconds.",
    TENANT_TTFT_BOUNDS,
)  # fmt: skip
TENANT_TOKENS = _counter(
    "kvscope_tenant_tokens", "tokens", (*_MT, "kind"),
    "Tokens by tenant: of prompts, when their prefill is complete, and generated ones, when their request ends.",
)  # fmt: skip

# Where the time of requests went
PHASE_SECONDS = _counter(
    "kvscope_request_phase_seconds", "seconds", ("model", "state", "component", "gt"),
    "Seconds that requests slower than `gt` seconds spent in a state while the engine did a component of its step. "
    "gt=0 counts every served request. Divide by kvscope_request_phase_requests_total of the same gt for the mean make-up.",
)  # fmt: skip
PHASE_REQUESTS = _counter(
    "kvscope_request_phase_requests", "requests", ("model", "gt"),
    "Served requests slower than `gt` seconds; gt=0 counts all. Divisor of kvscope_request_phase_seconds_total.",
)  # fmt: skip
PHASE_LENGTH_SECONDS = _counter(
    "kvscope_request_length_phase_seconds", "seconds", ("model", "length_bucket", "gt"),
    "Latency of served requests slower than `gt` seconds, by prompt length: kvscope_request_phase_seconds_total of the same gt, split "
    "another way.",
)  # fmt: skip
PHASE_LENGTH_REQUESTS = _counter(
    "kvscope_request_length_phase_requests", "requests", ("model", "length_bucket", "gt"),
    "Served requests slower than `gt` seconds, by prompt length: kvscope_request_phase_requests_total, split.",
)  # fmt: skip

# Prefix cache
KV_LOOKUPS = _counter(
    "kvscope_kv_lookups", "lookups", _ML, "Prefix lookups: one a request, however often scheduling retries."
)
KV_QUERIED_TOKENS = _counter("kvscope_kv_queried_tokens", "tokens", _ML, "Prompt tokens looked up in the prefix cache.")
KV_HITTABLE_TOKENS = _counter(
    "kvscope_kv_hittable_tokens", "tokens", _ML,
    "Prompt tokens that a perfect cache could have served: whole blocks, leaving one token to compute.",
)  # fmt: skip
KV_HIT_TOKENS = _counter(
    "kvscope_kv_hit_tokens", "tokens", ("model", "length_bucket", "tier"), "Prompt tokens served from cache."
)
KV_RECOMPUTED_TOKENS = _counter(
    "kvscope_kv_recomputed_tokens", "tokens", ("model", "reason"),
    "Tokens computed again because their blocks were given up. Never part of hits or queries.",
)  # fmt: skip

# KV pool
KV_BLOCKS = _gauge(
    "kvscope_kv_blocks", "blocks", ("model", "state"),
    "KV blocks by state: free, evictable (cached, in use by nobody), active (held by a request). Sums to the capacity. "
    "allocatable: free or evictable, from engines that do not tell them apart.",
)  # fmt: skip
KV_LAYOUT_BLOCKS = _gauge(
    "kvscope_kv_layout_blocks", "blocks", ("model", "layout"),
    "Block table entries of running requests by layout; a shared block counts once a request.",
)  # fmt: skip
KV_CAPACITY_BLOCKS = _gauge("kvscope_kv_capacity_blocks", "blocks", _M, "KV blocks in the pool.")
KV_BLOCK_SIZE = _gauge("kvscope_kv_block_size_tokens", "tokens", _M, "Tokens a KV block holds.")
KV_BYTES = _gauge(
    "kvscope_kv_bytes", "bytes", ("model", "kind"),
    "KV memory of the device: reserved (all blocks, exact and quantized), resident (blocks with content), active (blocks held by requests); "
    "each with the fixed part of sequences, reserved for as many as can run. Not the host tier.",
)  # fmt: skip
KV_STORED_TOKENS = _gauge(
    "kvscope_kv_stored_tokens", "tokens", _M, "Tokens stored in active blocks; a shared block counts once."
)
KV_LARGEST_FREE_RUN = _gauge(
    "kvscope_kv_largest_free_run_blocks", "blocks", _M,
    "Longest run of adjacent allocatable blocks (free or evictable). External fragmentation = 1 - this / allocatable.",
)  # fmt: skip
KV_FREE_RUNS = _gauge(
    "kvscope_kv_free_runs",
    "runs",
    ("model", "le"),
    "Runs of adjacent allocatable blocks of at most `le` blocks. Cumulative.",
)
KV_REGION_BLOCKS = _gauge(
    "kvscope_kv_region_blocks",
    "blocks",
    ("model", "region", "state"),
    "KV blocks by address region (32 equal parts) and state.",
)
KV_REGION_FREE_RUN = _gauge(
    "kvscope_kv_region_largest_free_run_blocks", "blocks", ("model", "region"),
    "Longest run of adjacent allocatable blocks inside an address region.",
)  # fmt: skip
KV_ALLOCATED_BLOCKS = _counter(
    "kvscope_kv_allocated_blocks", "blocks", ("model", "layout"), "Blocks handed out, by layout of the taker."
)
KV_EVICTED_BLOCKS = _counter(
    "kvscope_kv_evicted_blocks", "blocks", _M, "Cached blocks whose content was given up for another use."
)
KV_LAYOUT_FALLBACKS = _counter(
    "kvscope_kv_layout_fallbacks",
    "requests",
    _M,
    "Requests meant for a contiguous layout that found no adjacent block and went paged.",
)

KV_LAYOUT_CHANGES = _counter(
    "kvscope_kv_layout_changes", "sequences", ("model", "layout"),
    "Running sequences that took on another layout, by the one they went to: they grew past a bound.",
)  # fmt: skip
KV_COMPRESSED_BLOCKS = _gauge(
    "kvscope_kv_compressed_blocks", "blocks", ("model", "state"),
    "Quantized KV blocks of long sequences by state, beside kvscope_kv_blocks. Each holds a full block of tokens.",
)  # fmt: skip
KV_FIXED_BYTES = _gauge(
    "kvscope_kv_fixed_bytes", "bytes", _M,
    "KV memory of running requests that does not grow with their length (sliding windows), beside the blocks.",
)  # fmt: skip
KV_BYTES_PER_TOKEN = _gauge(
    "kvscope_kv_bytes_per_token", "bytes", _M,
    "KV memory that a sequence grows by for each token (in full-precision blocks). A sequence takes this times its length, and its fixed part.",
)  # fmt: skip
KV_FIXED_PER_SEQUENCE = _gauge(
    "kvscope_kv_fixed_bytes_per_sequence", "bytes", _M,
    "KV memory of a running sequence that does not grow with its length (sliding windows). Absent where a model has none.",
)  # fmt: skip
KV_HOST_BLOCKS = _gauge(
    "kvscope_kv_host_blocks", "blocks", ("model", "state"),
    "Host-tier blocks by state: free, cached (evicted from the device, can be hit), pinned (of swapped-out requests).",
)  # fmt: skip
KV_MOVED_BLOCKS = _counter(
    "kvscope_kv_moved_blocks", "blocks", ("model", "reason"),
    "KV blocks moved or rewritten: compaction, compress (quantized), offload and load (host tier), swap_out and swap_in.",
)  # fmt: skip
KV_MOVE_SECONDS = _counter(
    "kvscope_kv_move_seconds", "seconds", ("model", "reason"),
    "Time that the engine spent on moving KV blocks, between steps. Loads run beside the steps: only waiting for them counts.",
)  # fmt: skip
KV_COMPACTION_RECOVERED = _counter(
    "kvscope_kv_compaction_recovered_blocks", "blocks", _M,
    "Growth of the longest run of adjacent allocatable blocks by compaction, summed over its slices.",
)  # fmt: skip
KV_PREFETCH_BLOCKS = _counter(
    "kvscope_kv_prefetch_blocks", "blocks", ("model", "outcome"),
    "Blocks brought back from the host ahead of their use: issued, and of these useful (hit once there), late (hit while on their way), "
    "wasted (evicted unused). issued = useful + late + wasted + still waiting for use.",
)  # fmt: skip
KV_SWITCH_LOSS = _histogram(
    "kvscope_kv_context_switch_hit_loss_ratio", "ratio", _M,
    "At the first request after the class or tenant changed: hit ratio that its class and tenant had before, less the one it got. "
    "0: the switch cost nothing.", RATIO_BOUNDS,
)  # fmt: skip

# How long cached content lives: from when a block can be found to its eviction, also if it moves to another block
_MP = ("model", "pool")
KV_LIVE_AGES = _gauge(
    "kvscope_kv_live_blocks", "blocks", (*_MP, "le"),
    "Cached blocks that are at most `le` seconds old. Cumulative. What is not evicted yet: never read lifetimes off evictions alone.",
)  # fmt: skip
KV_EVICTED_AGES = _counter(
    "kvscope_kv_evicted_age_blocks", "blocks", (*_MP, "age"),
    "Evicted blocks by age: `age` is the upper end of the interval, in seconds. Not cumulative.",
)  # fmt: skip
KV_EXPOSED = _counter(
    "kvscope_kv_exposed_blocks", "blocks", (*_MP, "age"),
    "Blocks exposed to eviction in each age interval: 1 for one that outlived it or was evicted in it, else the share of it that has passed. "
    "1 - kvscope_kv_evicted_age_blocks_total / this, multiplied over all ages up to x, is the share of blocks that survive x.",
)  # fmt: skip
KV_IDLE_BEFORE_EVICTION = _histogram(
    "kvscope_kv_idle_before_eviction_seconds",
    "seconds",
    _MP,
    "Since an evicted block was last held by a request.",
    SPELL_BOUNDS,
)
KV_REUSE_GAP = _histogram(
    "kvscope_kv_reuse_gap_seconds", "seconds", _MP,
    "Since a block that is hit was last held by a request. Hits on blocks in use have no gap.", SPELL_BOUNDS,
)  # fmt: skip
KV_REGRET = _counter(
    "kvscope_kv_regret_tokens", "tokens", ("model", "window"),
    "Prompt tokens missed in a lookup that a cache without evictions in the last `window` would have served.",
)  # fmt: skip
KV_EVICTION_MEMORY = _gauge(
    "kvscope_kv_eviction_memory_seconds", "seconds", _M,
    "How far back every eviction is remembered; longer windows of kvscope_kv_regret_tokens count too little. Absent while none was forgotten.",
)  # fmt: skip

# Quantization of stored KV, on sampled live blocks
_Q = ("model", "tensor", "layer_group", "scheme")
KV_QUANT_ERROR = _counter(
    "kvscope_kv_quantization_squared_error",
    "squared units",
    _Q,
    "Sum of squared (dequantized - exact) over sampled elements.",
)
KV_QUANT_SIGNAL = _counter(
    "kvscope_kv_quantization_squared_signal", "squared units", _Q, "Sum of squared exact values over the same elements."
)
KV_QUANT_ELEMENTS = _counter(
    "kvscope_kv_quantization_sampled_elements", "elements", _Q, "Elements sampled for the error measurement."
)
KV_QUANT_RELATIVE = _histogram(
    "kvscope_kv_quantization_relative_error", "ratio", _Q,
    "Relative RMS error sqrt(sum of squared error / sum of squared signal), one sample a measured block.", BLOCK_ERROR_BOUNDS,
)  # fmt: skip
KV_QUANT_MAXIMUM = _histogram(
    "kvscope_kv_quantization_maximum_error_ratio", "ratio", _Q,
    "Largest |dequantized - exact| over the RMS of the exact values, one sample a measured block.", MAXIMUM_ERROR_BOUNDS,
)  # fmt: skip

# Quantized KV against exact KV: on sampled decode steps one sequence is also run with the exact values of its quantized blocks
_QL = ("model", "layer_group", "scheme")
_QS = ("model", "scheme")
KV_QUANT_ATTENTION_ERROR = _counter(
    "kvscope_kv_quantization_attention_squared_error", "squared units", _QL,
    "Sum of squared (attention output over stored KV - over exact KV, for the same queries), all heads of sampled layers.",
)  # fmt: skip
KV_QUANT_ATTENTION_SIGNAL = _counter(
    "kvscope_kv_quantization_attention_squared_signal", "squared units", _QL,
    "Sum of squared attention output over exact KV, over the same elements.",
)  # fmt: skip
KV_QUANT_COMPARED = _counter(
    "kvscope_kv_quantization_compared_tokens", "tokens", _QS,
    "Decoded tokens whose logits were also computed with the exact values of all quantized blocks.",
)  # fmt: skip
KV_QUANT_AGREED = _counter(
    "kvscope_kv_quantization_agreed_tokens", "tokens", _QS, "Of the compared tokens, those whose likeliest token is the same."
)  # fmt: skip
KV_QUANT_DIVERGENCE = _counter(
    "kvscope_kv_quantization_divergence_nats", "nats", _QS,
    "Sum over the compared tokens of KL(exact || stored), the divergence of the distributions that their logits give.",
)  # fmt: skip
REQUEST_QUANT_ERROR = _histogram(
    "kvscope_request_quantization_error_ratio", "ratio", _QS,
    "Accumulated over a request's compared tokens: sqrt(sum of squared attention error / sum of squared signal). One sample an ended "
    "request with at least one compared token.", RELATIVE_ERROR_BOUNDS,
)  # fmt: skip

# Step loop
STEP_SECONDS = _counter(
    "kvscope_step_seconds",
    "seconds",
    ("model", "component"),
    "The engine's time by step component; sums to its uptime.",
)
STEPS = _counter(
    "kvscope_steps", "steps", ("model", "kind"), "Model steps by what they held: prefill, decode, or both (mixed)."
)
STEP_DURATION = _histogram(
    "kvscope_step_duration_seconds", "seconds", ("model", "kind"), "Duration of one model step.", STEP_BOUNDS
)
STEP_TOKENS = _counter(
    "kvscope_step_tokens",
    "tokens",
    ("model", "phase"),
    "Tokens run through the model, prefill or decode, recomputation included.",
)
STALLS = _counter(
    "kvscope_stalls", "stalls", _M,
    "Steps (with what held the loop up before them, idle time left out) that took over 50 ms and over 5 times the usual step of their "
    "kind; slow steps in a row are one stall.",
)  # fmt: skip
STALL_SECONDS = _counter("kvscope_stall_seconds", "seconds", _M, "Time of the steps of stalls.")
STALL_GAPS = _counter(
    "kvscope_stall_gaps", "gaps", _M,
    "Gaps from the beginning of one large stall to that of the next; large: at least half as long as the longest of late. A gap counts once the "
    "next has come, and if it is at most three times as long as either neighbour: silence is no gap of a job.",
)  # fmt: skip
STALL_GAP_SECONDS = _counter("kvscope_stall_gap_seconds", "seconds", _M, "Sum of the gaps that count.")
STALL_GAP_SQUARES = _counter(
    "kvscope_stall_gap_squared_seconds", "squared seconds", _M,
    "Sum of the squares of the gaps that count: with sum and count their regularity.",
)  # fmt: skip

# Batching and the load controller
PREFILL_SPREAD = _histogram(
    "kvscope_prefill_batch_spread_ratio", "ratio", _M,
    "q75/q25 of the lengths left to compute among requests in prefill, at each step with two or more.", SPREAD_BOUNDS,
)  # fmt: skip
BATCH_SPLITS = _counter(
    "kvscope_prefill_batch_splits", "steps", _M, "Steps that left long prefills out for their spread."
)
QUEUE_PROMOTIONS = _counter(
    "kvscope_queue_promotions", "requests", _MC, "Waiting requests that became overdue and went to the front."
)
LIMIT_BATCHED_TOKENS = _gauge(
    "kvscope_limit_batched_tokens", "tokens", _M, "Most tokens of a step as the load controller has it now."
)
LIMIT_PREFILLS = _gauge(
    "kvscope_limit_prefills",
    "requests",
    _M,
    "Most requests in prefill as the load controller has it now; 1 is serial admission.",
)
CONTROLLER_CHANGES = _counter(
    "kvscope_controller_changes", "changes", ("model", "rule", "action"), "Changes of limits by the load controller."
)
REQUESTS_DEGRADED = _counter(
    "kvscope_requests_degraded",
    "requests",
    ("model", "rule"),
    "Requests that the load controller degraded, once a rule.",
)

# Sessions that move between replicas
SESSION_SNAPSHOTS = _counter(
    "kvscope_session_snapshots", "turns", ("model", "outcome"), "Turns of sessions by what became of their KV snapshot."
)
SESSION_STARTS = _counter(
    "kvscope_session_resumes", "turns", ("model", "outcome"),
    "Turns of sessions by how they began: imported from a snapshot, cached here, missing, or why a snapshot was refused.",
)  # fmt: skip
SESSION_TOKENS = _counter(
    "kvscope_session_imported_tokens", "tokens", _M, "Prompt tokens whose KV came from another replica's snapshot."
)

# GPUs
_G = ("gpu", "uuid", "mig")
GPU = Family(
    "kvscope_gpu", "info", "", (*_G, "name", "driver", "bus", "source"),
    "A GPU (mig=none), or an instance of one in MIG mode (mig=GPU instance/compute instance). source: nvml, or dcgm.",
)  # fmt: skip
GPU_LAST_READ = _gauge(
    "kvscope_gpu_last_read_timestamp_seconds", "seconds", _G, "Unix time of the newest reading of a GPU. Its values are as old."
)  # fmt: skip
GPU_READ_FAILED = _counter(
    "kvscope_gpu_read_failures", "reads", ("reason",),
    "Reads that gave no value, by reason. What could not be read is absent. timeout: the driver did not answer in time.",
)  # fmt: skip
GPU_UTILIZATION = _gauge(
    "kvscope_gpu_utilization_ratio", "ratio", (*_G, "unit"),
    "Share of the driver's sample period with a kernel running (sm) or device memory being read or written (memory).",
)  # fmt: skip
GPU_PROFILED_RATIO = _gauge(
    "kvscope_gpu_profiled_ratio", "ratio", (*_G, "unit"),
    "From hardware counters: SMs busy, tensor cores active, memory interface active (dram), L2 hits (l2_hit). Absent where no profiler gives them.",
)  # fmt: skip
GPU_MEMORY = _gauge(
    "kvscope_gpu_memory_bytes", "bytes", (*_G, "kind"), "Device memory: total, used, free, reserved (by driver and firmware)."
)  # fmt: skip
GPU_PCIE_RATE = _gauge(
    "kvscope_gpu_pcie_bytes_per_second", "bytes per second", (*_G, "direction"), "PCIe traffic of the GPU: tx (sent), rx (received)."
)  # fmt: skip
GPU_PCIE_WIDTH = _gauge(
    "kvscope_gpu_pcie_link_lanes", "lanes", (*_G, "bound"), "PCIe lanes: current, and max of card and slot."
)
GPU_PCIE_GENERATION = _gauge(
    "kvscope_gpu_pcie_link_generation", "generation", (*_G, "bound"),
    "PCIe generation: current (an idle GPU lowers it), and max of card and slot.",
)  # fmt: skip
GPU_PCIE_REPLAYS = _counter("kvscope_gpu_pcie_replays", "packets", _G, "PCIe packets sent again after an error.")
GPU_NVLINK_LINKS = _gauge("kvscope_gpu_nvlink_links", "links", (*_G, "state"), "NVLink links: active, inactive.")
GPU_NVLINK_FAULTS = _counter(
    "kvscope_gpu_nvlink_errors", "errors", (*_G, "kind"), "NVLink errors by kind, over all links."
)
GPU_ECC = _counter(
    "kvscope_gpu_ecc_errors", "errors", (*_G, "kind"), "Memory errors since the driver was loaded: corrected, uncorrected."
)  # fmt: skip
GPU_REPAIRED = _gauge(
    "kvscope_gpu_memory_repairs", "repairs", (*_G, "kind"), "Pages retired or rows remapped over the card's life, by what was wrong."
)  # fmt: skip
GPU_REPAIR_FLAG = _gauge(
    "kvscope_gpu_memory_repair_flag", "", (*_G, "flag"), "1: a repair waits for a reset of the GPU, or has failed."
)  # fmt: skip
GPU_XIDS = _counter("kvscope_gpu_xid_events", "events", (*_G, "xid"), "XID errors that the driver reported, by code.")
GPU_LAST_XID = _gauge(
    "kvscope_gpu_last_xid", "", _G, "Code of the newest XID error; 0: none since the source was started."
)
GPU_THROTTLED = _counter(
    "kvscope_gpu_throttle_seconds", "seconds", (*_G, "reason"), "Time that clocks were held down, by reason."
)  # fmt: skip
GPU_CLOCK_REASON = _gauge(
    "kvscope_gpu_clock_reason", "", (*_G, "reason"), "1: a reason why clocks are now below their highest."
)  # fmt: skip
GPU_POWER = _gauge(
    "kvscope_gpu_power_watts", "watts", (*_G, "kind"), "Power: draw, limit (enforced now), default_limit."
)
GPU_ENERGY = _counter("kvscope_gpu_energy_joules", "joules", _G, "Energy used since the driver was loaded.")
GPU_TEMPERATURE = _gauge("kvscope_gpu_temperature_celsius", "celsius", (*_G, "sensor"), "Temperature: gpu, memory.")
GPU_TEMPERATURE_LIMIT = _gauge(
    "kvscope_gpu_temperature_limit_celsius", "celsius", (*_G, "limit"), "Temperature at which clocks fall (slowdown) or the GPU stops (shutdown)."
)  # fmt: skip
GPU_CLOCK = _gauge(
    "kvscope_gpu_clock_hertz", "hertz", (*_G, "domain", "bound"), "Clocks of sm and memory: current, max."
)
GPU_HEALTH = _gauge(
    "kvscope_gpu_health_ratio", "ratio", _G, "1 less the penalties, at least 0; 1 is a GPU without a finding among what could be read."
)  # fmt: skip
GPU_PENALTY = _gauge(
    "kvscope_gpu_health_penalty_ratio", "ratio", (*_G, "reason"),
    "What a finding takes off the health; 0 where it was looked for and not found, absent where it cannot be told. docs/hardware.md lists the reasons.",
)  # fmt: skip
HARDWARE_TARGET = _gauge("kvscope_hardware_target_ratio", "ratio", ("target",), "What a hardware figure should exceed.")
HARDWARE_STATUS = Family(
    "kvscope_hardware_target", "info", "", ("target", "status", "reason"),
    "Whether the figure of a target is measured here (reason=none), or unavailable and why.",
)  # fmt: skip
KV_COPY_SECONDS = _counter(
    "kvscope_kv_copy_seconds", "seconds", ("model", "overlap"),
    "Time of copies between device and host memory, on the GPU's clock: hidden (a step was running) or exposed.",
)  # fmt: skip

# Forecasts
_MS = ("model", "signal")
FORECAST = Family(
    "kvscope_forecast", "info", "", (*_MS, "forecaster", "status", "history"),
    "The forecast in use: whose it is, whether it is the forecaster's own, a fallback or refused, and whether it learned from "
    "real or (in part) simulated history.",
)  # fmt: skip
FORECAST_VALUE = _gauge(
    "kvscope_forecast_value", "", (*_MS, "horizon", "quantile"),
    "Quantile of the mean of a signal over the 10 minutes that end `horizon` after kvscope_forecast_origin_timestamp_seconds, in the signal's unit.",
)  # fmt: skip
FORECAST_ORIGIN = _gauge(
    "kvscope_forecast_origin_timestamp_seconds", "seconds", _MS,
    "Unix time up to which the forecast in use has seen its signal. Absent while it is refused. An hour later value, breach and time to breach are absent.",
)  # fmt: skip
FORECAST_BREACH = _gauge(
    "kvscope_forecast_breach_probability_ratio", "ratio", (*_MS, "limit", "horizon"),
    "Chance that the signal passes the limit by `horizon` after kvscope_forecast_origin_timestamp_seconds, calibrated on what came of earlier ones. 1 - that of 60m is the chance that it takes longer.",
)  # fmt: skip
FORECAST_BREACH_TIME = _gauge(
    "kvscope_forecast_time_to_breach_seconds", "seconds", (*_MS, "limit", "quantile"),
    "Time from kvscope_forecast_origin_timestamp_seconds within which the limit is passed with probability `quantile`, linear inside a step. Absent when that is more than an hour.",
)  # fmt: skip
FORECAST_LIMIT = _gauge(
    "kvscope_forecast_limit", "", (*_MS, "limit"), "The limit, in the unit of its signal: an objective, the KV pool nearly full, or (kv_room, passed downwards) room for one more request."
)  # fmt: skip
FORECAST_ERROR = _gauge(
    "kvscope_forecast_absolute_error", "", (*_MS, "forecaster"),
    "Mean distance of the median from what came, in the signal's unit, over the forecasts of the last 24 hours that all forecasters made.",
)  # fmt: skip
FORECAST_SKILL = _gauge(
    "kvscope_forecast_skill_ratio", "ratio", (*_MS, "forecaster"),
    "1 - absolute error / that of the last value, over the last 24 hours. 0: no better; below: worse. Absent where the last value made no error.",
)  # fmt: skip
FORECAST_COVERAGE = _gauge(
    "kvscope_forecast_coverage_ratio", "ratio", (*_MS, "forecaster", "band"),
    "Share of what came in the last 24 hours that lay inside the central band of 50, 80 or 95 %.",
)  # fmt: skip
FORECAST_TARGETS = _gauge(
    "kvscope_forecast_scored_targets", "targets", (*_MS, "forecaster"), "Observed values behind error, skill and coverage."
)  # fmt: skip
FORECAST_FAILURES = _counter(
    "kvscope_forecast_failures", "forecasts", ("signal", "reason"),
    "Forecasts that were refused, by reason: stale (nothing new observed), short_history, model (it failed on the series).",
)  # fmt: skip
FORECAST_RUNS = _counter(
    "kvscope_forecast_runs", "runs", ("outcome",), "Refreshes of all forecasts: done, or failed since the history could not be read."
)  # fmt: skip
FORECAST_LAST_RUN = _gauge(
    "kvscope_forecast_last_run_timestamp_seconds", "seconds", (), "Unix time of the newest refresh that was done."
)
FORECAST_RUN_SECONDS = _gauge(
    "kvscope_forecast_run_seconds", "seconds", (), "Time that the newest refresh took, without the forecasts made up for afterwards."
)  # fmt: skip

# The exporter about itself
ENGINE = Family(
    "kvscope_engine", "info", "", ("model", "executor", "clock", "device", "kv_dtype", "version"),
    "Which engine feeds this exporter. clock=virtual marks simulated time.",
)  # fmt: skip
KV_EVENT_BATCHES = _counter(
    "kvscope_kv_event_batches", "batches", ("model", "outcome"),
    "Batches of KV events of a foreign engine: received, replayed (a gap in their numbers that was asked back), lost, malformed. "
    "After a loss the books of cached blocks start anew.",
)  # fmt: skip
KV_EVENT_UNMATCHED = _counter(
    "kvscope_kv_event_unmatched_blocks", "blocks", _M,
    "Blocks that a KV event removed although no event had told that they were stored. Expected after lost batches alone.",
)  # fmt: skip
SOURCE_FAMILY = Family(
    "kvscope_source_family", "info", "", ("model", "source", "family", "status", "reason"),
    "What a foreign engine can tell: each family of kvscope with status yes, partial or no, and why. A family with status no is absent.",
)  # fmt: skip
LAST_UPDATE = _gauge(
    "kvscope_last_update_timestamp_seconds", "seconds", ("model", "source"),
    "Unix time at which a source last wrote its values. An idle engine still writes; KV events (source kv_events) come only while blocks are "
    "stored or evicted.",
)  # fmt: skip
ANOMALIES_TOTAL = _counter(
    "kvscope_telemetry_anomalies",
    "events",
    ("model", "reason"),
    "Measurements refused or corrected, by reason. Should stay 0.",
)
LABEL_FOLDS = _counter(
    "kvscope_label_folds", "events", ("label",), "Label values outside the bound set that were folded into `other`."
)
SCRAPE_SECONDS = _gauge("kvscope_scrape_render_seconds", "seconds", (), "Time the previous exposition took to render.")
SCRAPE_SERIES = _gauge("kvscope_scrape_series", "series", (), "Series in the previous exposition.")

FAMILIES: tuple[Family, ...] = tuple(v for v in dict(globals()).values() if isinstance(v, Family))
#: Of GPUs and hardware, whether or not an engine runs on them.
HOST_FAMILIES = tuple(f for f in FAMILIES if f.name.startswith(("kvscope_gpu", "kvscope_hardware")))
#: Of `kvscope forecast --serve`, beside any engine.
FORECAST_FAMILIES = tuple(f for f in FAMILIES if f.name.startswith("kvscope_forecast"))
#: Told about other engines than the bundled one.
FOREIGN_FAMILIES = (KV_EVENT_BATCHES, KV_EVENT_UNMATCHED, SOURCE_FAMILY)
BY_NAME: dict[str, Family] = {f.name: f for f in FAMILIES}

#: What holds between families when every engine is idle, or within one reading's worth of traffic: left = right, as PromQL. Drift means
#: that requests are lost or counted twice (or that anomalies were counted).
IDENTITIES: tuple[tuple[str, str], ...] = (
    (
        "sum(kvscope_requests_received_total)",
        "sum(kvscope_requests_total) + sum(kvscope_requests_running) + sum(kvscope_requests_waiting)",
    ),
    ("sum(kvscope_request_duration_seconds_count)", 'sum(kvscope_requests_total{outcome=~"stop|length"})'),
    ('sum(kvscope_request_phase_requests_total{gt="0"})', "sum(kvscope_request_duration_seconds_count)"),
    ('sum(kvscope_request_phase_seconds_total{gt="0"})', "sum(kvscope_request_duration_seconds_sum)"),
    ("sum(kvscope_request_length_phase_requests_total)", "sum(kvscope_request_phase_requests_total)"),
    ("sum(kvscope_request_length_phase_seconds_total)", "sum(kvscope_request_phase_seconds_total)"),
    (
        "sum(kvscope_inter_token_latency_seconds_count)",
        "sum(kvscope_generation_tokens_total) - sum(kvscope_time_to_first_token_seconds_count)",
    ),
    ("sum(kvscope_step_duration_seconds_count)", "sum(kvscope_steps_total)"),
    ("sum(kvscope_kv_blocks)", "sum(kvscope_kv_capacity_blocks)"),
    ("sum(kvscope_kv_region_blocks)", "sum(kvscope_kv_capacity_blocks)"),
)
