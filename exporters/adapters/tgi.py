"""Text Generation Inference: `tgi_*` families, counters without `_total`, durations in seconds without a unit suffix."""

from __future__ import annotations

from exporters.adapters.capability import partial
from exporters.adapters.table import Adapter, Feed, Histogram, Latency, Level, Rate, Series, Split

ADAPTER = Adapter(
    engine="tgi",
    title="Text Generation Inference",
    prefixes=("tgi_",),
    path="/metrics",
    port=8080,
    model_label="",
    version_page=("/info", "version"),
    feeds={
        "model:kvscope_requests_received:rate5m": Feed(Rate((Series("request_count"),))),
        "model_outcome:kvscope_requests:rate5m": Feed(
            Split(
                "outcome",
                (
                    ("rejected", Rate((Series("request_failure", 'err="overloaded"'),))),
                    ("invalid", Rate((Series("request_failure", 'err="validation"'),))),
                    ("error", Rate((Series("request_failure", 'err!~"overloaded|validation"'),))),
                ),
            ),
            partial("only failures are told apart; of served requests it is not exported whether they stopped or reached their length"),
        ),
        "model:kvscope_prompt_tokens:rate5m": Feed(Rate((Series("request_input_length_sum"),))),
        "model:kvscope_generation_tokens:rate5m": Feed(
            Rate((Series("request_generated_tokens_sum"),)), partial("counted when a request ends, in one step")
        ),
        "model:kvscope_requests_running:sum": Feed(
            Level(Series("batch_current_size")), partial("of the batch in work: 0 between batches")
        ),
        "model:kvscope_requests_waiting:sum": Feed(Level(Series("queue_size"))),
    },
    latencies={
        # bounds are 0.00015 * 1.5^n
        "itl": Latency(
            Histogram(Series("request_mean_time_per_token_duration"), r"0\.0985.*"),
            limits="the mean of each request, not each interval",
            share="counted from 0.0985 s, the bound below",
        ),
        "e2e": Latency(
            Histogram(Series("request_duration"), r"19\.17.*"),
            share="no bucket bound at 20 s: counted from 19.2 s, never too few",
        ),
    },
    lacks=(
        ("kvscope_time_to_first_token_seconds", "not exported; adding the medians of queue and prefill is not a median"),
        (":kvscope_request_phase_seconds:", "phases are separate histograms: the make-up of the slowest requests cannot be worked out from them"),
        (":kvscope_request_length_phase_", "phases are separate histograms: the make-up of the slowest requests cannot be worked out from them"),
        ("kvscope_kv_", "no metric of the KV cache is exported"),
        ("kvscope_preemptions", "requests are not preempted"),
        ("kvscope_step_tokens", "tokens of a batch are not counted by phase"),
    ),
    notes=(
        "The server names no model: give it on the scrape job (`kvscope scrape-config --model`).",
        "Counters carry no `_total`, durations no unit; they are seconds.",
    ),
)  # fmt: skip
