"""The board "Quantization": how far stored KV is from exact, and what that costs."""

from __future__ import annotations

from dashboards.frame import frame
from dashboards.panels import RED, YELLOW, Board, Heatmap, Line, Section
from dashboards.shared import NO_QUANT, about, buckets, known, limits, lines, query, signal
from observability import catalog as c
from observability import objectives as o

QUANT_ERROR = "KvscopeQuantizationError"
_STORED = "model_tensor_layer_group_scheme:kvscope_kv_quantization"
NO_COMPARISON = "No comparison with exact KV yet: no block is stored quantized, or no decode step was sampled"


def quantization() -> Section:
    """Error of stored KV, mean and single blocks."""
    rms = signal("model_tensor_layer_group_scheme:kvscope_kv_quantization_relative_rms:ratio_rate5m")
    mean = lines(
        QUANT_ERROR,
        "How far is stored KV from exact?",
        "Relative RMS error, sqrt(sum of squared error / sum of squared signal), measured on sampled live blocks, by tensor "
        "and layer group. Above the red line greedy output may change: store KV unquantized, or find the layer group that "
        "drifts.",
        "percentunit",
        query(rms, "{{tensor}} {{layer_group}} {{scheme}}"),
        decimals=2,
        when_empty=NO_QUANT,
        **limits((o.QUANT_ERROR_WARNING, RED)),
    )
    blocks = Heatmap(
        **about(
            QUANT_ERROR,
            "Are single blocks much worse than the mean?",
            "Measured blocks a second by bucket of their relative RMS error, on all instances. A second band far above the "
            "first means outlier blocks that the mean hides.",
        ),
        targets=buckets(c.KV_QUANT_RELATIVE),
        unit="suffix: blocks/s",
        when_empty=NO_QUANT,
        options={"yAxis": {"unit": "percentunit"}},
    )
    noise = lines(
        QUANT_ERROR,
        "How loud is the quantization noise?",
        "Signal to quantization noise of stored KV in decibels, by tensor and layer group: 10 log10 of squared signal over squared "
        "error. 40 dB is 1 % relative RMS, and each bit of precision is worth about 6 dB.",
        "dB",
        query(signal(f"{_STORED}_sqnr:decibel_rate5m"), "{{tensor}} {{layer_group}} {{scheme}}"),
        min=None,
        when_empty=NO_QUANT,
    )
    largest = lines(
        QUANT_ERROR,
        "Do outliers break the scale of a block?",
        "99th percentile over blocks of the largest error in a block over the block's RMS, by tensor and layer group. High with a "
        "low relative RMS: single outliers stretch the scale that all values of the block share.",
        "percentunit",
        query(known(signal(f"{_STORED}_maximum_error_ratio:p99_5m")), "{{tensor}} {{layer_group}} {{scheme}}"),
        when_empty=NO_QUANT,
    )
    return Section(
        "$model: how far is stored KV from exact?",
        [Line(8, [mean, blocks]), Line(8, [noise, largest])],
        repeat_for="model",
    )


def effect() -> Section:
    """What the error does to attention, logits and whole sequences, against the budget."""
    attention = lines(
        QUANT_ERROR,
        "What does it do to attention?",
        "Relative RMS error of the attention output over stored KV against exact KV, for the same queries, on sampled decode "
        "steps, by layer group. This is what later layers see: a stored error that attention averages out is harmless.",
        "percentunit",
        query(
            signal("model_layer_group_scheme:kvscope_kv_quantization_attention_error:ratio_rate5m"),
            "{{layer_group}} {{scheme}}",
        ),
        decimals=2,
        when_empty=NO_COMPARISON,
        **limits((o.QUANTIZATION_BUDGET.attention_error, RED)),
    )
    agreed = lines(
        QUANT_ERROR,
        "Does the likeliest token stay the same?",
        "Share of compared tokens whose likeliest token is the same with exact KV, by scheme. The line is the budget: below it, "
        "greedy answers differ within a hundred tokens.",
        "percentunit",
        query(known(signal("model_scheme:kvscope_kv_quantization_agreed:ratio_rate5m")), "{{scheme}}"),
        decimals=1,
        max=1,
        when_empty=NO_COMPARISON,
        **limits((o.QUANTIZATION_BUDGET.agreed, YELLOW)),
    )
    divergence = lines(
        QUANT_ERROR,
        "How far do the logits move?",
        "Mean KL divergence of the distribution over exact KV from that over stored KV, in nats a token, by scheme. It matters for "
        "sampled answers, where the likeliest token alone does not decide. The line is the budget.",
        "suffix: nats",
        query(known(signal("model_scheme:kvscope_kv_quantization_divergence:mean_rate5m")), "{{scheme}}"),
        when_empty=NO_COMPARISON,
        **limits((o.QUANTIZATION_BUDGET.divergence_nats, RED)),
    )
    over = lines(
        QUANT_ERROR,
        "How many sequences are over their budget?",
        "Share of ended requests whose accumulated attention error is above the budget of "
        f"{o.QUANTIZATION_BUDGET.attention_error * 100:g} %. The line is what may be. A few: single contexts with outliers. "
        "Many: the scheme is too coarse for this model.",
        "percentunit",
        query(known(signal("model:kvscope_request_quantization_error:over_budget_ratio_rate5m")), "over budget"),
        decimals=1,
        max=1,
        when_empty=NO_COMPARISON,
        **limits((o.QUANTIZATION_BUDGET.sequences_over, RED)),
    )
    sequences = Heatmap(
        **about(
            QUANT_ERROR,
            "Does error pile up in some sequences?",
            "Ended requests a second by bucket of their accumulated relative attention error, on all instances. A band that climbs "
            "over time: contexts grew longer, and more of each is stored quantized.",
        ),
        targets=buckets(c.REQUEST_QUANT_ERROR),
        unit="reqps",
        when_empty=NO_COMPARISON,
        options={"yAxis": {"unit": "percentunit"}},
    )
    return Section(
        "$model: what does it do to answers?",
        [Line(8, [attention, agreed, divergence]), Line(8, [over, sequences])],
        repeat_for="model",
    )


def board() -> Board:
    return frame(
        "quantization", "How far is stored KV from exact, and what does that cost?", [quantization(), effect()]
    )
