"""What is wrong by construction with an engine's metrics: each check looks at one page, or at two of one engine taken apart in time.

A check says what it saw, with the numbers, and what to do; it never says that all is well.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

from exporters.adapters.endpoint import Finding
from exporters.adapters.engines import BUNDLED
from exporters.adapters.page import Page, Sample
from exporters.adapters.promql import bound_patterns, names
from exporters.adapters.readings import Plan, buckets, duration, find, plans, total
from exporters.adapters.table import Adapter, Histogram, Level, Rate, Series, Share, Source, Split
from observability.objectives import LATENCY_OBJECTIVES, OBJECTIVES, LatencyObjective, excluded

PLACEHOLDERS = {"", "undefined", "unknown", "none", "null", "nan", "default", "todo", "placeholder", "model_name"}
#: More than this share beyond the last bound, and the high quantiles are that bound whatever the truth is.
OVERFLOW = 0.01


def sources(source: Source) -> Iterator[tuple[Series, str]]:
    """Families that `source` reads, with the kind that they should have."""
    match source:
        case Rate(of):
            for series in of:
                inside = series.name.endswith(("_sum", "_count"))
                yield series, "" if inside else "counter"
        case Level(of, _, minus):
            yield of, "gauge"
            if minus is not None:
                yield minus, "gauge"
        case Share(top, bottom):
            yield from sources(top)
            yield from sources(bottom)
        case Split(_, parts):
            for _, part in parts:
                yield from sources(part)
        case Histogram(of):
            yield of, "histogram"


def own(adapter: Adapter, page: Page) -> list[Sample]:
    """Samples whose names begin with a prefix of the engine."""
    return [s for s in page.samples if s.name.startswith(adapter.prefixes)]


def placeholder_labels(adapter: Adapter, page: Page) -> Iterator[Finding]:
    label = adapter.model_label
    values = {s.labels[label] for s in own(adapter, page) if label and label in s.labels}
    bad = sorted(value for value in values if value.strip().lower() in PLACEHOLDERS)
    if bad:
        yield Finding(
            "warning", "placeholder_label", f"The model is called {bad[0]!r} in label {label}: a placeholder, so models cannot be told apart.",
            "Give the engine a served model name, or set the label on the scrape job.",
        )  # fmt: skip
    if label and own(adapter, page) and not values:
        yield Finding(
            "warning", "no_model_label", f"No series has the label {label}.", "Set the label `model` on the scrape job."
        )
    if not label and not any("model" in s.labels for s in own(adapter, page)):
        yield Finding(
            "note", "no_model_label", f"{adapter.title} names no model in its metrics.",
            f"Set it on the scrape job: kvscope scrape-config --engine {adapter.engine} --model NAME.",
        )  # fmt: skip


def _histograms(adapter: Adapter, page: Page) -> dict[str, list[Sample]]:
    """Sums of every histogram of the engine that the page declares or implies, by family name."""
    out: dict[str, list[Sample]] = {}
    for name, samples in page.by_name.items():
        family = name.removesuffix("_bucket")
        if name.endswith("_bucket") and name.startswith(adapter.prefixes) and any("le" in s.labels for s in samples):
            out[family] = page.by_name.get(f"{family}_sum", [])
    return out


def histograms(adapter: Adapter, page: Page) -> Iterator[Finding]:
    zero, negative, host, broken = [], [], [], []
    for family, sums in _histograms(adapter, page).items():
        counts = {_others(s): s.value for s in page.by_name.get(f"{family}_count", ())}
        may_be_zero = "preemption" in family or family.endswith(("_ratio", "_error"))  # 0 is what is hoped for
        for sample in sums:
            count = counts.get(_others(sample), 0.0)
            if count > 0 and sample.value == 0 and not may_be_zero:
                zero.append(f"{family} ({count:,.0f} observations)")
            if sample.value < 0:
                negative.append(f"{family} ({sample.value:g})")
            # unset timestamps are subtracted as 0: a time as long as the host has been up, or since 1970
            if family.endswith("_seconds") and count > 0 and sample.value / count > 86400 * 30:
                host.append(f"{family} (mean {duration(sample.value / count)})")
        series: dict[tuple[tuple[str, str], ...], list[tuple[float, float]]] = defaultdict(list)
        for sample in page.by_name[f"{family}_bucket"]:
            try:
                bound = float(sample.labels["le"])
            except (KeyError, ValueError):
                broken.append(f"{family} (le={sample.labels.get('le', '')!r})")
            else:
                series[_others(sample)].append((bound, sample.value))
        for key, found in series.items():
            found.sort()
            falls = any(b[1] < a[1] for a, b in itertools.pairwise(found))
            if falls or not math.isinf(found[-1][0]) or found[-1][1] != counts.get(key, found[-1][1]):
                broken.append(family)
                break
    for code, what, why, do in (
        ("sum_is_zero", zero, "count observations but sum to 0: all of them are exactly 0, so the interval is never set", "Do not read it; it is a fault of the engine."),
        ("negative_sum", negative, "sum to less than 0: timestamps that were never set are subtracted", "Read quantiles only; sums and means are void."),
        ("impossible_mean", host, "have a mean of more than a month: timestamps that were never set are subtracted", "Read quantiles only; sums and means are void."),
        ("broken_histogram", broken, "are no histograms: counts fall towards larger bounds, or there is no +Inf that equals the count", "Quantiles of it are void."),
    ):  # fmt: skip
        if what:
            yield Finding("warning", code, f"{_list(what)} {why}.", do)


def bucket_bounds(adapter: Adapter, page: Page) -> Iterator[Finding]:
    for objective in LATENCY_OBJECTIVES:
        if objective.name not in adapter.latencies:
            continue
        found = buckets(adapter, page, adapter.latencies[objective.name].source.of)
        if len(found) < 2 or found[-1][1] <= 0:
            continue
        count, first, last = found[-1][1], found[0], found[-2]
        title = objective.title
        if first[1] > count / 2:
            yield Finding(
                "warning", "first_bucket", f"{title}: {first[1] / count:.3g} of {count:,.0f} observations are in the first bucket, below {duration(first[0])}: its median, and all below, cannot be told.",
                "Add smaller bucket bounds where the engine lets you; do not read an interpolated number there.",
            )  # fmt: skip
        if 1 - last[1] / count > OVERFLOW:
            yield Finding(
                "warning", "overflow", f"{title}: {1 - last[1] / count:.3g} of {count:,.0f} observations are above the last bound, {duration(last[0])}: a high quantile reads that bound whatever the truth is.",
                "Add larger bucket bounds where the engine lets you.",
            )  # fmt: skip


def objective_bounds(adapter: Adapter, page: Page) -> Iterator[Finding]:
    """Objectives of the page's models whose threshold is no bound there, and what the rules make of that."""
    for objective in OBJECTIVES:
        if not isinstance(objective, LatencyObjective) or objective.name not in adapter.latencies:
            continue
        if objective.request_class and adapter.engine != BUNDLED:  # another engine's requests have no class
            continue
        threshold, source = objective.threshold_seconds, adapter.latencies[objective.name].source
        bounds = [bound for bound, _ in buckets(adapter, page, source.of) if math.isfinite(bound)]
        judged = bool(bounds) and _holds(objective, adapter, page, source)
        if not judged or any(math.isclose(bound, threshold) for bound in bounds):
            continue
        own = objective.model or objective.request_class
        missing = (
            f"{objective.title}: no bucket bound at the {duration(threshold)} of the objective{own and f' for {own}'}"
        )
        if (below := _below(adapter, page, objective, source)) is not None:
            yield Finding(
                "note", "objective_no_bound", f"{missing}; the share over it counts from {duration(below)}.",
                "Add that bound where the engine lets you.",
            )  # fmt: skip
        else:
            yield Finding(
                "warning", "objective_not_judged", f"{missing}: it is not judged here. No event counts as bad, no budget burns, no alert fires.",
                _to_be_judged(adapter, threshold, bounds),
            )  # fmt: skip


def _to_be_judged(adapter: Adapter, threshold: float, bounds: list[float]) -> str:
    if adapter.engine == BUNDLED:
        return "Start the engine again with the objectives that the rules are made of: it makes each threshold a bound."
    possible = [bound for bound in bounds if bound == float(f"{bound:.6g}")]  # as thresholds are written
    near = [*[x for x in possible if x < threshold][-1:], *[x for x in possible if x > threshold][:1]]
    or_take = f", or give the objective a threshold_seconds of {' or '.join(f'{x:g}' for x in near)}" if near else ""
    return f"Add that bound where the engine lets you{or_take}."


def _holds(objective: LatencyObjective, adapter: Adapter, page: Page, source: Histogram) -> bool:
    """Whether a model of the page is held to `objective`. Where the page names no model (the scrape job does), any may be."""
    label = adapter.model_label or "model"
    models = {sample.labels.get(label, "") for sample in find(adapter, page, source.of, "_bucket")} - {""}
    others = excluded(objective).get("model", ())
    return not models or any(
        model == objective.model or (not objective.model and model not in others) for model in models
    )


def _below(adapter: Adapter, page: Page, objective: LatencyObjective, source: Histogram) -> float | None:
    """The bound from which the rules count an objective whose own bound the page lacks, in seconds."""
    found = [sample.labels.get("le", "") for sample in find(adapter, page, source.of, "_bucket")]
    for pattern in bound_patterns(objective, source):
        for le in found:
            if re.fullmatch(pattern, le):
                try:
                    return float(le) * source.of.scale
                except ValueError:  # said by `histograms`
                    continue
    return None


def uneven_buckets(plans: Iterable[Plan]) -> Iterator[Finding]:
    """Series of one model, be it on several endpoints, whose buckets have other bounds: summed by bound they make no histogram."""
    by_latency: dict[tuple[str, str, str], set[tuple[float, ...]]] = defaultdict(set)
    for plan in plans:
        by_latency[plan.engine, plan.model, plan.title].add(plan.bounds)
    for (_, model, title), found in by_latency.items():
        if len(found) > 1:
            few, *_, many = sorted(found, key=len)
            lone = sorted(set(few) ^ set(many))[:3]
            yield Finding(
                "warning", "uneven_buckets", f"{title} of {repr(model) if model else 'the model'} has {len(found)} sets of bucket bounds, of {len(few)} to {len(many)} bounds; {', '.join(map(duration, lone))} and others are not in all: quantiles over these replicas together are wrong by any amount.",
                "Start every replica of the model with the same bounds (`kvscope serve --buckets`); until then read quantiles by instance.",
            )  # fmt: skip


def coarse_elsewhere(adapter: Adapter, page: Page) -> Iterator[Finding]:
    """Other histograms of times whose median is in the first bucket."""
    read = {name for latency in adapter.latencies.values() for name in names(adapter, latency.source.of.name)}
    coarse = []
    for family in _histograms(adapter, page):
        if family in read or not family.endswith(("_seconds", "_duration", "_ms")):
            continue
        counts: dict[float, float] = defaultdict(float)
        for sample in page.by_name[f"{family}_bucket"]:
            try:
                counts[float(sample.labels["le"])] += sample.value
            except (KeyError, ValueError):  # said by `histograms`
                continue
        found = sorted(counts.items())
        if found and found[-1][1] > 0 and found[0][1] > found[-1][1] / 2:
            coarse.append(f"{family} (below {found[0][0]:g})")
    if coarse:
        yield Finding(
            "note", "first_bucket_elsewhere", f"{_list(coarse)}: more than half of the observations are in the first bucket; an interpolated quantile there means nothing.",
            "Read their means instead. kvscope does not read them.",
        )  # fmt: skip


def processes(adapter: Adapter, page: Page) -> Iterator[Finding]:
    alike: dict[tuple[object, ...], set[str]] = defaultdict(set)  # processes of what is the same series otherwise
    for sample in own(adapter, page):
        if pid := sample.labels.get("pid"):
            alike[(sample.name, *_others(sample, "pid"))].add(pid)
    doubled = sorted({str(series[0]) for series, pids in alike.items() if len(pids) > 1})
    if doubled:
        yield Finding(
            "warning", "per_process", f"{_list(doubled)} has series that only the process (label pid) tells apart: those of dead processes stay, and a sum, as in kvscope's rules and here, adds all of them up.",
            "Clear PROMETHEUS_MULTIPROC_DIR at each start of the engine; until then read these as at most that.",
        )  # fmt: skip
    again = sorted({s.name for s in own(adapter, page) if s.labels.get("server") and "server" in adapter.where})
    if again:
        yield Finding(
            "warning", "re_exported", f"A router re-exports the engine's families with a label server ({_list(again)}): a sum over both is doubled.",
            "Scrape the engines themselves; kvscope's rules leave series with a label server out.",
        )  # fmt: skip


def ranks(adapter: Adapter, page: Page) -> Iterator[Finding]:
    """Data-parallel ranks: none missing in the middle, and each family of load has all of them."""
    for label in adapter.ranks:
        by_name: dict[str, set[int]] = defaultdict(set)
        for sample in own(adapter, page):
            if re.fullmatch(r"[0-9]{1,20}", sample.labels.get(label, "")):
                by_name[sample.name].add(int(sample.labels[label]))
        every = set().union(*by_name.values())
        if max(every, default=0) > 4096:  # an id, as Dynamo's worker_id, and no rank
            continue
        if missing := sorted(set(range(max(every, default=-1) + 1)) - every):
            yield Finding(
                "warning", "missing_rank", f"Of the ranks in label {label} up to {max(every)}, {missing[:8]} are on no series.", "See whether these ranks run and report."
            )  # fmt: skip
        lacking = sorted(name for name, has in by_name.items() if has != every)
        if lacking and len(every) > 1:
            yield Finding(
                "warning", "uneven_ranks", f"{_list(lacking)} has not every rank that others have (label {label}, {len(every)} ranks): a ratio with another family is of different engines.",
                "See whether the missing ranks have had work yet; until then read such ratios by rank.",
            )  # fmt: skip


def kinds(adapter: Adapter, page: Page) -> Iterator[Finding]:
    """Families that are declared as something else than the rules read them as, and values that no quantity of their kind has."""
    feeds = [feed.source for feed in adapter.feeds.values()] + [
        latency.source for latency in adapter.latencies.values()
    ]
    wanted = {series.name: kind for source in feeds for series, kind in sources(source)}
    for name, kind in wanted.items():
        for spelled in names(adapter, name):
            declared = page.types.get(spelled) or page.types.get(spelled.removesuffix("_total"), "")
            bare = adapter.bare_counters and declared == "gauge"
            if kind and declared not in ("", "untyped", "unknown", kind) and not bare:
                yield Finding(
                    "warning", "other_type", f"{spelled} is declared as {declared}; the rules read it as {kind}.", "See whether another exporter uses the name; else this version of the engine is not known."
                )  # fmt: skip
        odd = [
            s for spelled in names(adapter, name) for s in page.by_name.get(spelled, ()) if not math.isfinite(s.value)
        ]
        if odd:
            yield Finding("warning", "not_a_number", f"{odd[0].name} is {odd[0].value} in {len(odd)} series.", "It is left out of sums here, and spoils them in Prometheus.")  # fmt: skip
    usage = adapter.feeds.get("model:kvscope_kv_usage:ratio")
    if usage is not None and isinstance(usage.source, Level):
        for sample in find(adapter, page, usage.source.of):
            if math.isfinite(sample.value) and not 0 <= sample.value <= 1:
                yield Finding("warning", "not_a_ratio", f"{sample.name} is {sample.value:g}; a ratio is between 0 and 1.", "Do not chart it as a share.")  # fmt: skip
                break


def hits(adapter: Adapter, page: Page) -> Iterator[Finding]:
    """Two counts of the same hits, where an engine has both."""
    if adapter.engine not in ("vllm", "ray"):
        return
    counted = total(adapter, page, [Series("prefix_cache_hits_total")])
    by_source = total(adapter, page, [Series("prompt_tokens_by_source_total", 'source="local_cache_hit"')])
    if counted is not None and by_source is not None and (counted == 0) != (by_source == 0):
        yield Finding(
            "warning", "hits_disagree", f"Lookups count {counted:,.0f} hit tokens, prompts {by_source:,.0f} taken from the cache.", "One of the counters is not fed in this configuration: do not read a hit rate."
        )  # fmt: skip
    prompt = total(adapter, page, [Series("prompt_tokens_total")])
    finished = total(adapter, page, [Series("request_prompt_tokens_sum")])
    if prompt and finished is not None and prompt - finished > 0.01 * prompt:
        yield Finding(
            "note", "not_finished", f"{prompt - finished:,.0f} of {prompt:,.0f} prompt tokens belong to requests that have not finished: in work, or aborted, which this engine does not count.",
            "The kvscope plug-in counts aborts.",
        )  # fmt: skip


def old_names(adapter: Adapter, page: Page) -> Iterator[Finding]:
    for rename in adapter.renames:
        for prefix in adapter.prefixes:
            has_old = any(prefix + rename.old + part in page.by_name for part in ("", "_bucket"))
            has_new = any(prefix + rename.new + part in page.by_name for part in ("", "_bucket"))
            if has_old and not has_new:
                since = f" in {rename.since}" if rename.since else ""
                yield Finding("note", "old_name", f"{prefix}{rename.old} became {rename.new}{since}; kvscope reads both.", "Boards of your own may need both names.")  # fmt: skip


def frozen(adapter: Adapter, before: Page, after: Page, seconds: float) -> Iterator[Finding]:
    """Gauges that say an engine works while none of its counters moves: left over from requests that are gone."""
    old, new = (
        {(s.name, *sorted(s.labels.items())): s.value for s in own(adapter, page) if s.name.endswith(_COUNTERS)}
        for page in (before, after)
    )
    if old != new:
        return
    for signal in ("model:kvscope_requests_running:sum", "model:kvscope_kv_usage:ratio"):
        feed = adapter.feeds.get(signal)
        if feed is None or not isinstance(feed.source, Level):
            continue
        first, second = (total(adapter, page, [feed.source.of]) for page in (before, after))
        if first and first == second:
            yield Finding(
                "warning", "frozen_gauge", f"{names(adapter, feed.source.of.name)[0]} stays at {second:g} while no counter moved in {seconds:.1f} s: the engine is idle, or hangs, and the gauge is left over.",
                "Look again after some seconds; if it stays, the gauge is frozen: a router or scaler that reads it is misled.",
            )  # fmt: skip


def _others(sample: Sample, but: str = "le") -> tuple[tuple[str, str], ...]:
    return tuple(sorted((k, v) for k, v in sample.labels.items() if k != but))


_COUNTERS = ("_total", "_count", "_sum")


def _list(found: list[str]) -> str:
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return ", ".join(found[:3]) + more


CHECKS: tuple[Callable[[Adapter, Page], Iterator[Finding]], ...] = (
    placeholder_labels, histograms, bucket_bounds, objective_bounds, lambda adapter, page: uneven_buckets(plans(adapter, page)), coarse_elsewhere,
    processes, ranks, kinds, hits, old_names,
)  # fmt: skip
