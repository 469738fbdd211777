"""NVIDIA Triton with the TensorRT-LLM backend: `nv_*` families at port 8002."""

from __future__ import annotations

from exporters.adapters.capability import partial
from exporters.adapters.table import Adapter, Feed, Flag, Histogram, Latency, Level, Rate, Series, Share, Split

_BLOCKS = "trt_llm_kv_cache_block_metrics"

ADAPTER = Adapter(
    engine="triton",
    title="Triton (TensorRT-LLM backend)",
    prefixes=("nv_",),
    path="/metrics",
    port=8002,
    model_label="model",
    known_by=("inference_request_success", "inference_request_duration_us", _BLOCKS),
    feeds={
        "model:kvscope_requests_received:rate5m": Feed(
            Rate((Series("inference_request_success"), Series("inference_request_failure"))),
            partial("counted when a request ends; a step of an ensemble counts under its own model name"),
        ),
        "model_outcome:kvscope_requests:rate5m": Feed(
            Split(
                "outcome",
                (
                    ("abort", Rate((Series("inference_request_failure", 'reason="CANCELED"'),))),
                    ("rejected", Rate((Series("inference_request_failure", 'reason="REJECTED"'),))),
                    ("error", Rate((Series("inference_request_failure", 'reason!~"CANCELED|REJECTED"'),))),
                ),
            ),
            partial("only failures are told apart; of served requests it is not exported whether they stopped or reached their length"),
        ),
        "model:kvscope_prompt_tokens:rate5m": Feed(
            Rate((Series("llm_input_token_len_sum"),)), partial("counted when a request ends, in one step")
        ),
        "model:kvscope_generation_tokens:rate5m": Feed(
            Rate((Series("llm_output_token_len_sum"),)), partial("counted when a request ends, in one step")
        ),
        "model:kvscope_requests_running:sum": Feed(Level(Series("trt_llm_request_metrics", 'request_type="scheduled"'))),
        "model:kvscope_requests_waiting:sum": Feed(
            Level(Series("trt_llm_request_metrics", 'request_type="waiting"')),
            partial("only in versions of the backend that have request_type=waiting"),
        ),
        "model:kvscope_kv_usage:ratio": Feed(
            Share(
                Level(Series(_BLOCKS, 'kv_cache_block_type="used"')),
                Level(Series(_BLOCKS, 'kv_cache_block_type="max"')),
            ),
            partial("what is kept for reuse is not told apart from what requests hold"),
        ),
        "model_state:kvscope_kv_blocks:sum": Feed(
            Split(
                "state",
                (
                    ("free", Level(Series(_BLOCKS, 'kv_cache_block_type="free"'))),
                    ("active", Level(Series(_BLOCKS, 'kv_cache_block_type="used"'))),
                ),
            ),
            partial("blocks that could be evicted are not told apart from the others"),
        ),
    },
    latencies={
        "ttft": Latency(
            Histogram(Series("inference_first_response_histogram_ms", scale=0.001), "500"),
            limits="needs histogram_latencies=true and a decoupled model",
            resolution="bounds of 0.1, 0.5, 2 and 5 s by default",
            share="counted from 0.5 s by default",
        ),
    },
    lacks=(
        ("kvscope_inter_token_latency_seconds", "no time between tokens is exported"),
        ("kvscope_request_duration_seconds", "request time is a counter of microseconds without a histogram: it has a mean and no quantile"),
        ("length_bucket:", "hits are not counted by prompt length"),
        ("kvscope_kv_hit", "reused blocks are in the JSON statistics only"),
        ("kvscope_preemptions", "pauses are not counted"),
        ("kvscope_step_tokens", "tokens of an iteration are a gauge of the last iteration"),
    ),
    flags=(
        Flag("--metrics-config histogram_latencies=true", "time to the first response as a histogram", ("inference_first_response_histogram_ms",)),
    ),
    notes=(
        "Counters carry no `_total`.",
        "Each step of an ensemble (preprocessing, tensorrt_llm, postprocessing) counts the same request under its own model name: choose one, do not add them up.",
    ),
)  # fmt: skip
