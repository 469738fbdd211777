"""`kvscope doctor URL`: which engine an endpoint is, which signals it feeds, what would add more, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import anyio
import httpx

from exporters.adapters import checks, readings
from exporters.adapters.endpoint import Endpoint, Finding, without_secrets
from exporters.adapters.engines import ADAPTERS, BUNDLED, PLUGIN, TITLES, capability
from exporters.adapters.own import OWN, refused, stale
from exporters.adapters.page import Page, parse
from exporters.adapters.promql import names, objective_of
from exporters.adapters.readings import Plan, Reading
from exporters.adapters.table import Adapter, Flag
from exporters.adapters.vllm_plugin import families_of, from_families
from observability import catalog
from observability.catalog import BY_NAME
from observability.signals import SIGNALS, Signal

ENGINE_INFO = catalog.ENGINE.series
SOURCE_INFO = catalog.SOURCE_FAMILY.series


@dataclass(frozen=True, slots=True)
class SignalState:
    """fed or partial: its families are on the page. missing: the engine can feed it, this endpoint does not. no: it cannot."""

    signal: str
    title: str
    status: Literal["fed", "partial", "missing", "no"]
    reason: str = ""


@dataclass(frozen=True)
class Report:
    """All that a look at one endpoint gave. `exit_code`: 0 nothing to change, 1 something is wrong or missing that a finding names,
    2 the endpoint cannot be read as an engine's metrics."""

    url: str
    engine: str = ""
    title: str = ""
    version: Reading = field(
        default_factory=lambda: Reading("Version", "unavailable", "unavailable", reason="the engine was not recognized")
    )
    readings: tuple[Reading, ...] = ()
    signals: tuple[SignalState, ...] = ()
    flags: tuple[Flag, ...] = ()
    findings: tuple[Finding, ...] = ()
    plans: tuple[Plan, ...] = ()

    @property
    def exit_code(self) -> int:
        levels = {finding.level for finding in self.findings}
        return 2 if "error" in levels else 1 if "warning" in levels else 0


def examine(
    url: str, *, token: str | None = None, timeout_seconds: float = 10.0, interval_seconds: float = 2.0
) -> Report:
    """Looks at `url` twice, `interval_seconds` apart (once where that is 0). Raises ConfigError for what is no address."""
    return anyio.run(_examine, url, token, timeout_seconds, interval_seconds)


async def _examine(url: str, token: str | None, timeout: float, interval: float) -> Report:
    async with Endpoint(url, token=token, timeout_seconds=timeout) as endpoint:
        answer = await endpoint.metrics()
        if isinstance(answer, Finding):
            return Report(without_secrets(str(endpoint.url)), findings=(answer,))
        page = parse(answer, seconds=timeout)
        engine = recognize(page)
        if not engine:
            return Report(answer.url, findings=(*page.findings, *_unknown(page)))
        found = list(page.findings)
        adapter = ADAPTERS.get(engine)
        reader = adapter or OWN
        version = await _version(endpoint, engine, page)
        for check in checks.CHECKS:
            found += check(reader, page)
        if adapter is None:
            found += refused(page)
        if interval > 0:
            await anyio.sleep(interval)
            again = await endpoint.get(
                endpoint.at(httpx.URL(answer.url).path) if not endpoint.has_path else endpoint.url
            )
            if isinstance(again, Finding):
                found.append(again)
            else:
                second = parse(again, seconds=timeout)
                found += stale(page, second) if adapter is None else checks.frozen(adapter, page, second, interval)
        flags = tuple(flag for flag in adapter.flags if not _shown(adapter, page, flag)) if adapter else ()
        numbers = tuple(readings.read(reader, page))
        states = tuple(_state(engine, signal, page) for signal in SIGNALS)
        plans = tuple(readings.plans(reader, page))
        return Report(answer.url, engine, TITLES[engine], version, numbers, states, flags, tuple(found), plans)


def together(reports: Sequence[Report]) -> list[Finding]:
    """What is wrong with several endpoints that no look at one shows."""
    plans = {plan for report in reports for plan in report.plans if plan.model}
    said = {finding.found for report in reports for finding in report.findings}
    return [finding for finding in checks.uneven_buckets(plans) if finding.found not in said]


def recognize(page: Page) -> str:
    """Key of TITLES whose metrics are on the page, "" for none; of several the one with most samples."""
    own = [s for s in page.samples if s.name.startswith("kvscope_")]
    if own and any(s.name.startswith(("vllm:", "vllm_")) for s in page.samples):
        return PLUGIN
    if any(s.name == ENGINE_INFO for s in own):
        return BUNDLED
    counts = {}
    for engine, adapter in ADAPTERS.items():
        if not adapter.known_by or any(n in page.by_name for known in adapter.known_by for n in names(adapter, known)):
            counts[engine] = sum(s.name.startswith(adapter.prefixes) for s in page.samples)
    best = max(counts, key=lambda engine: counts[engine], default="")
    return best if counts.get(best) else ""


def _unknown(page: Page) -> Iterator[Finding]:
    if page.samples:
        some = sorted({s.name for s in page.samples if not s.name.startswith(("python_", "process_", "go_"))})[:3]
        yield Finding(
            "error", "not_recognized", f"The page is of no engine that kvscope knows{': it has ' + ', '.join(some) if some else ''}.",
            f"kvscope reads {', '.join(TITLES.values())}.",
        )  # fmt: skip


async def _version(endpoint: Endpoint, engine: str, page: Page) -> Reading:
    if engine in (BUNDLED, PLUGIN):
        for sample in page.by_name.get(ENGINE_INFO, ()):
            if version := sample.labels.get("version"):
                return Reading("Version", "measured", version[:40], reason=f"of kvscope, from {ENGINE_INFO}")
    adapter = ADAPTERS.get(engine)
    if adapter is not None and adapter.version_page:
        path, key = adapter.version_page
        found = await endpoint.json(path)
        if isinstance(found, dict) and isinstance(found.get(key), str):
            return Reading("Version", "measured", found[key][:40], reason=f"from {path}")
    for rename in sorted(
        adapter.renames if adapter else (), key=lambda r: [int(x) for x in r.since.split(".") if x], reverse=True
    ):
        here = {n: any(p + n + part in page.by_name for p in adapter.prefixes for part in ("", "_bucket")) for n in (rename.new, rename.old)}  # type: ignore[union-attr]  # fmt: skip
        if rename.since and here[rename.new]:
            return Reading("Version", "estimated", f"{rename.since} or later", reason=f"it has {rename.new}")
        if rename.since and here[rename.old]:
            return Reading("Version", "estimated", f"before {rename.since}, or shows hidden metrics", reason=f"it has {rename.old}")  # fmt: skip
    return Reading("Version", "unavailable", "unavailable", reason="the metrics do not say it")


def _shown(adapter: Adapter, page: Page, flag: Flag) -> bool:
    """Whether what `flag` gives is there already. A flag whose families cannot show it is named always."""
    return any(
        spelled + part in page.by_name
        for family in flag.shown_by
        for spelled in names(adapter, family)
        for part in ("", "_bucket")
    )


def _state(engine: str, signal: Signal, page: Page) -> SignalState:
    can = capability(engine, signal.name)
    told = {
        s.labels.get("family", ""): (s.labels.get("status", ""), s.labels.get("reason", ""))
        for s in page.by_name.get(SOURCE_INFO, ())
    }
    if told:  # what this very source can tell, with its settings
        can = from_families(signal, told)
    if can.status == "no":
        return SignalState(signal.name, signal.title, "no", can.reason)
    adapter = ADAPTERS.get(engine)
    if adapter is None:
        wanted = [{BY_NAME[name].series} for name in families_of(signal)]
    else:
        objective = objective_of(signal)
        if objective is not None:
            source: Any = adapter.latencies[objective.name].source
        else:
            source = adapter.feeds[signal.name].source
        suffix = "_bucket" if objective is not None else ""
        wanted = [set(names(adapter, series.name, suffix)) for series, _ in checks.sources(source)]
    lacking = [min(spelled) for spelled in wanted if not spelled & page.by_name.keys()]
    # kvscope's own families are all needed; of another engine's some stand for others
    if lacking and (adapter is None or len(lacking) == len(wanted)):
        return SignalState(signal.name, signal.title, "missing", f"{lacking[0]} is not on the page")
    if can.status == "partial":
        return SignalState(signal.name, signal.title, "partial", can.reason)
    return SignalState(signal.name, signal.title, "fed")
