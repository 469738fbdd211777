"""The board "Exporter": can the measurements be trusted, and what do they cost?"""

from __future__ import annotations

from dashboards.frame import frame
from dashboards.panels import RED, Board, Line, Section
from dashboards.shared import OF_INSTANCE, STALE, limits, lines, query, rate, raw_rate
from observability import catalog as c
from observability import objectives as o


def exporter() -> Section:
    """Freshness, anomalies and cost of the telemetry."""
    of_instance = '{instance=~"$instance"}'
    written = lines(
        STALE,
        "When did each source last write?",
        "Seconds since each source last wrote its values. A saw-tooth near 0 is well; a ramp of an engine is a frozen engine. The "
        f"red line is the threshold of {STALE}. KV events come only while blocks are stored or evicted: their age grows while nothing is asked.",
        "s",
        query(f"time() - {c.LAST_UPDATE.series}{{{OF_INSTANCE}}}", "{{instance}} {{source}}"),
        **limits((o.STALE_AFTER_SECONDS, RED)),
    )
    refused = lines(
        STALE,
        "Were measurements refused or corrected?",
        "Telemetry anomalies per second by reason: negative intervals, missing milestones, clock steps, non-finite values. "
        "Should stay 0; anything else is a fault of the engine or its clock, worth a bug report with the reason.",
        "ops",
        query(rate(c.ANOMALIES_TOTAL, "reason"), "{{reason}}"),
    )
    cost = lines(
        STALE,
        "What does a scrape cost?",
        "Time that the exporter took to render its previous answer, by instance. It runs outside the step loop; if it grows, "
        "look at the number of series.",
        "s",
        query(f"{c.SCRAPE_SECONDS.series}{of_instance}", "{{instance}}"),
    )
    series = lines(
        STALE,
        "How many series are exported?",
        "Series in the exporter's previous answer, by instance. Labels are bounded, so this is nearly flat; growth means a "
        "new model or class.",
        "short",
        query(f"{c.SCRAPE_SERIES.series}{of_instance}", "{{instance}}"),
    )
    folds = lines(
        STALE,
        "Were labels folded?",
        "Values of a label per second that were counted under `other`, because the label had all the values that it may have, by label. Not 0: "
        "the numbers stay right in sum, but what is shown by this label has lost its newcomers.",
        "ops",
        query(raw_rate(c.LABEL_FOLDS, "label"), "{{label}}"),
    )
    return Section("Can the measurements be trusted?", [Line(8, [written, refused, folds]), Line(8, [cost, series])])


def board() -> Board:
    return frame("exporter", "Can the measurements be trusted, and what do they cost?", [exporter()])
