"""SGLang: names of the scheduler and tokenizer collectors, started with --enable-metrics."""

from __future__ import annotations

from exporters.adapters.capability import partial
from exporters.adapters.table import Adapter, Feed, Flag, Histogram, Latency, Level, Rate, Rename, Series, Share, Split

_requests = Series("num_requests_total")

ADAPTER = Adapter(
    engine="sglang",
    title="SGLang",
    prefixes=("sglang:", "sglang_"),
    path="/metrics",
    port=30000,
    model_label="model_name",
    # priority: the total of all priorities is the series with an empty label, and without the feature there is no label
    where='priority=""',
    repeated_over=("tp_rank", "pp_rank", "moe_ep_rank"),
    ranks=("dp_rank",),
    renames=(Rename("inter_token_latency_seconds", "time_per_output_token_seconds"),),
    version_page=("/server_info", "version"),
    feeds={
        "model:kvscope_requests_received:rate5m": Feed(
            Rate((_requests,)), partial("counted when a request ends, not when it arrives")
        ),
        "model_outcome:kvscope_requests:rate5m": Feed(
            Split("outcome", (("abort", Rate((Series("num_aborted_requests_total"),))),)),
            partial("only aborts are told apart; of served requests it is not exported whether they stopped or reached their length"),
        ),
        "model:kvscope_prompt_tokens:rate5m": Feed(
            Rate((Series("prompt_tokens_total"),)), partial("counted when a request ends, in one step")
        ),
        "model:kvscope_generation_tokens:rate5m": Feed(
            Rate((Series("generation_tokens_total"),)), partial("counted when a request ends, in one step")
        ),
        "model:kvscope_requests_running:sum": Feed(Level(Series("num_running_reqs"))),
        "model:kvscope_requests_waiting:sum": Feed(Level(Series("num_queue_reqs"))),
        "model:kvscope_preemptions:rate5m": Feed(Rate((Series("num_retracted_requests_total"),))),
        "model:kvscope_kv_hit:ratio_rate5m": Feed(
            Share(
                Rate((Series("prefill_effective_tokens_total", 'mode=~".+_hit"'),)),
                Rate((Series("prefill_effective_tokens_total"),)),
            ),
        ),
        "model:kvscope_kv_usage:ratio": Feed(
            Share(Level(Series("num_used_tokens")), Level(Series("max_total_num_tokens"))),
            partial("in tokens of the fuller of the full-attention and sliding-window pools, not in blocks"),
        ),
        "model:kvscope_kv_stored_tokens:sum": Feed(
            Level(Series("kv_used_tokens")), partial("slots held by running requests: with pages of several tokens a part of the last is empty")
        ),
        "model_phase:kvscope_step_tokens:rate5m": Feed(
            Split(
                "phase",
                (
                    ("prefill", Rate((Series("realtime_tokens_total", 'mode="prefill_compute"'),))),
                    ("decode", Rate((Series("realtime_tokens_total", 'mode="decode"'),))),
                ),
            ),
            partial("written at each log interval, so it moves in steps"),
        ),
    },
    latencies={
        # a request that does not stream gets its first token seen with its last or a late one
        "ttft": Latency(
            Histogram(Series("time_to_first_token_seconds", 'is_streaming!="false"'), "0.8"),
            limits="streaming requests only",
            resolution="nothing is told apart below 0.1 s: 0.1 s means at most that",
        ),
        "itl": Latency(
            Histogram(Series("inter_token_latency_seconds"), "0.1"),
            limits="the interval of an output divided evenly over its tokens",
            resolution="nothing is told apart below 2 ms",
        ),
        "e2e": Latency(
            Histogram(Series("e2e_request_latency_seconds"), "20"),
            resolution="nothing is told apart below 0.1 s: 0.1 s means at most that",
        ),
    },
    lacks=(
        (":kvscope_request_phase_seconds:", "stages are separate histograms: the make-up of the slowest requests cannot be worked out from them"),
        (":kvscope_request_length_phase_", "stages are separate histograms: the make-up of the slowest requests cannot be worked out from them"),
        ("length_bucket:", "hits are not counted by prompt length"),
        ("kvscope_kv_evicted_blocks", "evictions are counted in tokens, of all pools together"),
        ("kvscope_kv_blocks", "the pool is counted in tokens, and what protected sessions hold is in no gauge"),
        ("kvscope_step_seconds", "forward time is exported by forward mode only, not the engine's whole time"),
    ),
    flags=(
        Flag("--enable-metrics", "all of the sglang:* families", ("num_running_reqs",)),
        Flag("--bucket-time-to-first-token", "bucket bounds below 0.1 s for quick first tokens", ()),
        Flag("--enable-hierarchical-cache", "hits from host memory and storage, if you have memory to spare for them", ("hicache_host_total_tokens",)),
    ),
    notes=(
        "With priority scheduling the total appears under an empty label `priority` beside one series a priority; only the total is read.",
        "Tensor-, pipeline- and expert-parallel ranks repeat each other's numbers (--enable-metrics-for-all-schedulers): one counts. Data-parallel ranks are added up.",
        "sglang:cache_hit_rate is overwritten by each prefill batch and 0 after a decode-only step; it is not read.",
        "sglang:num_paused_reqs has one series a process and is not read.",
    ),
)  # fmt: skip
