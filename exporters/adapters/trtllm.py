"""TensorRT-LLM serve (trtllm-serve): families at /prometheus/metrics. Its /metrics is a queue of JSON that a read empties."""

from __future__ import annotations

from exporters.adapters.capability import partial
from exporters.adapters.table import Adapter, Feed, Flag, Histogram, Latency, Level, Rate, Series, Share, Split

ADAPTER = Adapter(
    engine="trtllm",
    title="TensorRT-LLM serve",
    prefixes=("trtllm_",),
    path="/prometheus/metrics",
    port=8000,
    model_label="model_name",
    version_page=("/version", "version"),
    feeds={
        "model:kvscope_requests_received:rate5m": Feed(
            Rate((Series("request_success_total"), Series("request_error_total"))),
            partial("counted when a request ends, not when it arrives"),
        ),
        "model_outcome:kvscope_requests:rate5m": Feed(
            Split(
                "outcome",
                (
                    ("stop", Rate((Series("request_success_total", 'finished_reason=~"stop|end_id|stop_words"'),))),
                    ("length", Rate((Series("request_success_total", 'finished_reason="length"'),))),
                    ("abort", Rate((Series("request_success_total", 'finished_reason="cancelled"'),))),
                    ("deadline", Rate((Series("request_success_total", 'finished_reason=~"timeout|timed_out"'),))),
                    ("error", Rate((Series("request_error_total"),))),
                ),
            ),
            partial("errors only in versions with trtllm_request_error_total; a reason has no series before it first occurs"),
        ),
        "model:kvscope_prompt_tokens:rate5m": Feed(
            Rate((Series("prompt_tokens_total"),)), partial("counted when a request ends, in one step")
        ),
        "model:kvscope_generation_tokens:rate5m": Feed(
            Rate((Series("generation_tokens_total"),)), partial("counted when a request ends, in one step")
        ),
        "model:kvscope_requests_running:sum": Feed(Level(Series("num_requests_running"))),
        "model:kvscope_requests_waiting:sum": Feed(Level(Series("num_requests_waiting"))),
        "model:kvscope_kv_hit:ratio_rate5m": Feed(
            Share(Rate((Series("prompt_cached_tokens_total"),)), Rate((Series("prompt_tokens_total"),))),
            partial("counted when a request ends; absent until the first hit, and in versions that count blocks only"),
        ),
        "model:kvscope_kv_usage:ratio": Feed(
            Share(Level(Series("kv_cache_used_blocks")), Level(Series("kv_cache_max_blocks"))),
            partial("of the last iteration before the scrape; what an idle engine keeps for reuse is not told apart"),
        ),
        "model_state:kvscope_kv_blocks:sum": Feed(
            Split(
                "state",
                (
                    ("free", Level(Series("kv_cache_free_blocks"))),
                    ("active", Level(Series("kv_cache_used_blocks"))),
                ),
            ),
            partial("blocks that could be evicted are not told apart from the others"),
        ),
    },
    latencies={
        "ttft": Latency(
            Histogram(Series("time_to_first_token_seconds"), "0.75"),
            share="no bucket bound at 0.8 s by default: counted from 0.75 s, never too few",
        ),
        "itl": Latency(
            Histogram(Series("time_per_output_token_seconds"), "0.1"),
            limits="the mean of each request, not each interval: a stall within a request is spread over its tokens",
        ),
        "e2e": Latency(
            Histogram(Series("e2e_request_latency_seconds"), "20"),
            resolution="nothing is told apart below 0.3 s: 0.3 s means at most that",
        ),
    },
    lacks=(
        (":kvscope_request_phase_seconds:", "phases are separate histograms: the make-up of the slowest requests cannot be worked out from them"),
        (":kvscope_request_length_phase_", "phases are separate histograms: the make-up of the slowest requests cannot be worked out from them"),
        ("length_bucket:", "hits are not counted by prompt length"),
        ("kvscope_preemptions", "paused requests are a gauge of the moment, not a count"),
        ("kvscope_kv_evicted_blocks", "evictions are in the iteration statistics only"),
        ("kvscope_step_seconds", "iteration latency is a gauge of the last iteration"),
        ("kvscope_step_tokens", "tokens of an iteration are a gauge of the last iteration"),
    ),
    flags=(
        Flag("return_perf_metrics: true", "request counters and latency histograms", ("e2e_request_latency_seconds",)),
        Flag("enable_iter_perf_stats: true", "running and waiting requests, KV blocks", ("num_requests_running", "kv_cache_max_blocks")),
    ),
    notes=(
        "Scrape /prometheus/metrics. /metrics of the same server hands out JSON statistics of iterations and empties their queue: whoever scrapes it takes them from others.",
        "A time of exactly 0 is not observed: a request that never waited is missing from the queue histogram.",
        "kv_cache_hit_rate covers the whole uptime and is not read.",
    ),
)  # fmt: skip
