"""vLLM without kvscope's plug-in: names and facts of 0.32, with the names of earlier versions. Ray Serve LLM (ray.py) builds on it."""

from __future__ import annotations

from exporters.adapters.capability import partial
from exporters.adapters.table import Adapter, Feed, Flag, Histogram, Latency, Level, Rate, Rename, Series, Share, Split
from observability.objectives import OBJECTIVES, LatencyObjective

_seconds = {x.threshold_seconds for x in OBJECTIVES if isinstance(x, LatencyObjective) and x.name == "ttft" and not x.request_class}  # fmt: skip
_THRESHOLDS = " and ".join(f"{seconds:g} s" for seconds in sorted(_seconds))
#: Deprecated in the release named, hidden in the next, gone in the one after.
RENAMES = (
    Rename("kv_cache_usage_perc", "gpu_cache_usage_perc", "0.9"),
    Rename("prefix_cache_queries_total", "gpu_prefix_cache_queries_total", "0.9"),
    Rename("prefix_cache_hits_total", "gpu_prefix_cache_hits_total", "0.9"),
    Rename("inter_token_latency_seconds", "time_per_output_token_seconds", "0.11"),
)

_prompt = Series("prompt_tokens_total")
_hits = Rate((Series("prefix_cache_hits_total"), Series("external_prefix_cache_hits_total")))

FEEDS = {
    "model:kvscope_requests_received:rate5m": Feed(
        Rate((Series("time_to_first_token_seconds_count"), Series("admission_rejections_total"))),
        partial("counted at the first token or at rejection: a request that leaves the queue is never counted"),
    ),
    "model_outcome:kvscope_requests:rate5m": Feed(
        Split(
            "outcome",
            (
                ("stop", Rate((Series("request_success_total", 'finished_reason=~"stop|repetition"'),))),
                ("length", Rate((Series("request_success_total", 'finished_reason="length"'),))),
                ("error", Rate((Series("request_success_total", 'finished_reason="error"'),))),
                ("rejected", Rate((Series("admission_rejections_total"),))),
            ),
        ),
        partial(
            "aborts are not exported: vLLM drops an aborted request before its statistics, its abort series stays 0"
        ),
    ),
    "model:kvscope_prompt_tokens:rate5m": Feed(Rate((_prompt,))),
    "model:kvscope_generation_tokens:rate5m": Feed(Rate((Series("generation_tokens_total"),))),
    "model:kvscope_requests_running:sum": Feed(Level(Series("num_requests_running"))),
    "model:kvscope_requests_waiting:sum": Feed(Level(Series("num_requests_waiting"))),
    "model:kvscope_preemptions:rate5m": Feed(Rate((Series("num_preemptions_total"),))),
    "model:kvscope_kv_hit:ratio_rate5m": Feed(
        Share(_hits, Rate((Series("prefix_cache_queries_total"),))),
    ),
    "model:kvscope_kv_usage:ratio": Feed(
        Level(Series("kv_cache_usage_perc"), "mean"),
        partial(
            "mean over ranks and instances, exact where their pools are equally large; hybrid models pool all KV groups in one"
        ),
    ),
    "model_phase:kvscope_step_tokens:rate5m": Feed(
        Split(
            "phase",
            (
                ("prefill", Rate((Series("prompt_tokens_by_source_total", 'source="local_compute"'),))),
                ("decode", Rate((Series("generation_tokens_total"),))),
            ),
        ),
        partial(
            "counted at the first token of a request, without recomputation after preemption; the first token counts as decode"
        ),
    ),
}

LATENCIES = {
    "ttft": Latency(
        Histogram(Series("time_to_first_token_seconds"), "0.75"),
        share="no bucket bound at 0.8 s by default: counted from 0.75 s, never too few",
    ),
    "itl": Latency(
        Histogram(Series("inter_token_latency_seconds"), "0.1"),
        limits="one sample an engine output, which is several tokens under speculation",
        resolution="nothing is told apart below 10 ms",
    ),
    "e2e": Latency(
        Histogram(Series("e2e_request_latency_seconds"), "20"),
        resolution="nothing is told apart below 0.3 s: 0.3 s means at most that",
    ),
}

_SAMPLED = "vLLM's own residency histograms (--kv-cache-metrics) see 1 % of the evicted blocks and none that still lives: no such series is made of them"
LACKS = (
    ("kvscope_kv_block_survival", _SAMPLED),
    ("kvscope_kv_block_lifetime", _SAMPLED),
    ("kvscope_kv_idle_before_eviction", _SAMPLED),
    ("kvscope_kv_reuse_gap", _SAMPLED),
    ("kvscope_kv_live_block_age", _SAMPLED),
    (":kvscope_request_phase_seconds:", "phases are separate histograms: the make-up of the slowest requests cannot be worked out from them"),
    (":kvscope_request_length_phase_", "phases are separate histograms: the make-up of the slowest requests cannot be worked out from them"),
    ("length_bucket:", "hits are not counted by prompt length; the kvscope plug-in for vLLM counts them"),
    ("kvscope_kv_evicted_blocks", "evictions are not counted; the residency histograms see 1 % of them, when switched on"),
    ("kvscope_kv_blocks", "the pool's size is a label of vllm:cache_config_info, which a rule cannot calculate with"),
    ("kvscope_kv_stored_tokens", "only the share of blocks in use is exported, not the tokens in them"),
    ("kvscope_kv_internal_fragmentation", "only the share of blocks in use is exported, not the tokens in them"),
    ("kvscope_step_seconds", "the engine's time by step component is not measured"),
)  # fmt: skip

FLAGS = (
    Flag("--kv-cache-metrics", "how long KV blocks live and lie idle before eviction (1 % sample)", ("kv_block_lifetime_seconds",)),
    Flag("--custom-histogram-buckets", f"a bucket bound at the objective's {_THRESHOLDS}, so that its share is exact", ()),
    Flag("pip install 'kvscope[vllm]' beside vLLM", "hits by prompt length, phases of the slowest requests, aborts, fine latency buckets", ()),
)  # fmt: skip

NOTES = (
    "A router that re-exports vllm:* as gauges (vLLM production-stack) adds a label `server`; series that carry it are left out, or every sum would double.",
    "The label `engine` of vLLM is the data-parallel rank; ranks are added up. It is not the label `engine` of the recorded series.",
    "Preempted and re-scheduled requests are not counted again as queries.",
    "A usage gauge that stays where it was after a mass abort is frozen, not full: `kvscope doctor` compares two scrapes.",
)

ADAPTER = Adapter(
    engine="vllm",
    title="vLLM",
    prefixes=("vllm:", "vllm_"),
    path="/metrics",
    port=8000,
    model_label="model_name",
    version_page=("/version", "version"),
    feeds=FEEDS,
    latencies=LATENCIES,
    renames=RENAMES,
    where='server=""',
    ranks=("engine",),
    lacks=LACKS,
    flags=FLAGS,
    notes=NOTES,
)
