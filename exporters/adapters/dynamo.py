"""NVIDIA Dynamo: the frontend's families and its workers' KV gauges. Engines behind it are read by their own adapters."""

from __future__ import annotations

from exporters.adapters.capability import partial
from exporters.adapters.table import Adapter, Feed, Histogram, Latency, Level, Rate, Rename, Series, Share, Split

_INVALID = "validation|not_found|not_implemented"
_requests = "frontend_requests_total"

ADAPTER = Adapter(
    engine="dynamo",
    title="NVIDIA Dynamo",
    prefixes=("dynamo_",),
    path="/metrics",
    port=8000,
    model_label="model",
    ranks=("worker_id", "dp_rank"),
    renames=(Rename("component_gpu_cache_usage_percent", "component_kvstats_gpu_cache_usage_percent"),),
    feeds={
        "model:kvscope_requests_received:rate5m": Feed(
            Rate((Series(_requests),)), partial("counted when a request ends, not when it arrives")
        ),
        "model_outcome:kvscope_requests:rate5m": Feed(
            Split(
                "outcome",
                (
                    ("abort", Rate((Series(_requests, 'error_type="cancelled"'),))),
                    ("rejected", Rate((Series(_requests, 'error_type="overload"'),))),
                    ("invalid", Rate((Series(_requests, f'error_type=~"{_INVALID}"'),))),
                    ("error", Rate((Series(_requests, f'status="error",error_type!~"cancelled|overload|{_INVALID}"'),))),
                ),
            ),
            partial("of served requests it is not exported whether they stopped or reached their length"),
        ),
        "model:kvscope_prompt_tokens:rate5m": Feed(Rate((Series("frontend_input_sequence_tokens_sum"),))),
        "model:kvscope_generation_tokens:rate5m": Feed(Rate((Series("frontend_output_tokens_total"),))),
        "model:kvscope_requests_running:sum": Feed(
            Level(Series("frontend_inflight_requests"), minus=Series("frontend_queued_requests")),
            partial("requests after their first token: prefill counts as waiting"),
        ),
        "model:kvscope_requests_waiting:sum": Feed(
            Level(Series("frontend_queued_requests")), partial("requests until their first token: prefill is in it")
        ),
        "model:kvscope_kv_hit:ratio_rate5m": Feed(
            Share(
                Rate((Series("frontend_cached_tokens_sum"),)),
                Rate((Series("frontend_input_sequence_tokens_sum"),)),
            ),
            partial("as the engines report it per request; kv_hit_rate of the router is a prediction and is not read"),
        ),
        "model:kvscope_kv_usage:ratio": Feed(
            Level(Series("component_gpu_cache_usage_percent"), "mean"),
            partial("decode workers only; mean over workers, exact where their pools are equally large"),
        ),
    },
    latencies={
        "ttft": Latency(
            Histogram(Series("frontend_time_to_first_token_seconds")),
            limits="as the frontend sees it",
            share="only where 0.8 s is a bucket bound, which the installation decides",
        ),
        "itl": Latency(
            Histogram(Series("frontend_inter_token_latency_seconds")),
            limits="as the frontend sees it",
            share="only where 0.1 s is a bucket bound, which the installation decides",
        ),
        "e2e": Latency(
            Histogram(Series("frontend_request_duration_seconds")),
            limits="as the frontend sees it",
            share="only where 20 s is a bucket bound, which the installation decides",
        ),
    },
    lacks=(
        (":kvscope_request_phase_seconds:", "stages are separate histograms: the make-up of the slowest requests cannot be worked out from them"),
        (":kvscope_request_length_phase_", "stages are separate histograms: the make-up of the slowest requests cannot be worked out from them"),
        ("length_bucket:", "hits are not counted by prompt length"),
        ("kvscope_preemptions", "a matter of the engines behind it: load their adapter"),
        ("kvscope_kv_evicted_blocks", "a matter of the engines behind it: load their adapter"),
        ("kvscope_kv_blocks", "only the share in use is exported for all workers"),
        ("kvscope_step_", "a matter of the engines behind it: load their adapter"),
    ),
    notes=(
        "The share in use is between 0 and 1 although its name says percent.",
        "Workers of an engine with an adapter of its own (vLLM, SGLang, TensorRT-LLM) can be scraped as well; their series carry that engine's name.",
    ),
)  # fmt: skip
