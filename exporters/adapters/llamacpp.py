"""llama.cpp's server (llama-server --metrics): counters and two gauges, no histogram, no label."""

from __future__ import annotations

from exporters.adapters.capability import partial
from exporters.adapters.table import Adapter, Feed, Flag, Level, Rate, Series, Split

ADAPTER = Adapter(
    engine="llamacpp",
    title="llama.cpp server",
    prefixes=("llamacpp:", "llamacpp_"),
    path="/metrics",
    port=8080,
    model_label="",
    version_page=("/props", "build_info"),
    feeds={
        "model:kvscope_prompt_tokens:rate5m": Feed(
            Rate((Series("prompt_tokens_total"),)), partial("only tokens that were computed: those taken from the cache are not counted")
        ),
        "model:kvscope_generation_tokens:rate5m": Feed(Rate((Series("tokens_predicted_total"),))),
        "model:kvscope_requests_running:sum": Feed(Level(Series("requests_processing"))),
        "model:kvscope_requests_waiting:sum": Feed(Level(Series("requests_deferred"))),
        "model:kvscope_kv_usage:ratio": Feed(
            Level(Series("kv_cache_usage_ratio"), "mean"),
            partial("only in builds from before the family was removed (ggml-org/llama.cpp pull request 13660)"),
        ),
        "model_phase:kvscope_step_tokens:rate5m": Feed(
            Split(
                "phase",
                (
                    ("prefill", Rate((Series("prompt_tokens_total"),))),
                    ("decode", Rate((Series("tokens_predicted_total"),))),
                ),
            ),
            partial("counted when a prompt or a request is done, not step by step"),
        ),
    },
    lacks=(
        ("kvscope_time_to_first_token_seconds", "no histogram is exported, only averages since the last scrape"),
        ("kvscope_inter_token_latency_seconds", "no histogram is exported, only averages since the last scrape"),
        ("kvscope_request_duration_seconds", "no histogram is exported"),
        ("kvscope_requests", "requests are not counted, only those in work"),
        ("kvscope_kv_", "no metric of the KV cache is exported"),
        ("kvscope_preemptions", "slots are not preempted"),
        ("kvscope_step_seconds", "prompt and generation seconds are summed over slots that run at the same time"),
    ),
    flags=(Flag("--metrics", "all of the llamacpp:* families", ("requests_processing",)),),
    notes=(
        "The server names no model: give it on the scrape job (`kvscope scrape-config --model`).",
        "prompt_tokens_seconds, predicted_tokens_seconds and n_busy_slots_per_decode are averages that a scrape resets or that cover the whole uptime; they are not read.",
    ),
)  # fmt: skip
