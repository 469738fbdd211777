"""A metrics page as it is, faults included: samples in order, declared types, and findings about text that is not as it should be.

Lines are parsed by prometheus_client; a line that it refuses is counted and left out, so that one bad line does not hide the rest.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from prometheus_client import parser

from exporters.adapters.endpoint import Answer, Finding

_TYPE = re.compile(r"# TYPE (\S+) (\S+)\s*$")
_EXEMPLAR = re.compile(r" # \{.*$")
_PARTS = ("_bucket", "_sum", "_count", "_total", "_created")


class Sample(NamedTuple):
    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True)
class Page:
    """Samples in order of the page, each series once; `types` by family as declared; `findings` about the text itself."""

    samples: tuple[Sample, ...]
    types: Mapping[str, str]
    findings: tuple[Finding, ...] = field(default=())

    @cached_property
    def by_name(self) -> Mapping[str, list[Sample]]:
        out: dict[str, list[Sample]] = {}
        for sample in self.samples:
            out.setdefault(sample.name, []).append(sample)
        return out

    def type_of(self, name: str) -> str:
        """Declared type of the family that the sample name `name` belongs to, "" where none is declared."""
        if name in self.types:
            return self.types[name]
        for part in _PARTS:
            if name.endswith(part) and name.removesuffix(part) in self.types:
                return self.types[name.removesuffix(part)]
        return ""


def _samples(lines: list[str]) -> Iterator[Sample]:
    for family in parser.text_string_to_metric_families("\n".join(lines) + "\n"):
        for s in family.samples:
            yield Sample(s.name, s.labels, float(s.value))


_REFUSED = (ValueError, IndexError, KeyError, TypeError, AttributeError)  # what the parser lets out on malformed lines


def parse(answer: Answer, *, seconds: float = 10.0) -> Page:
    """`answer` as a page; where nothing of it is a sample, a page without samples and the finding that says what it is. A page that
    takes longer than `seconds` is read in part, with a finding that says so."""
    findings = []
    text = answer.body.decode("utf-8", errors="replace")
    try:
        answer.body.decode()
    except UnicodeDecodeError:
        findings.append(
            Finding("warning", "not_utf8", "The page holds bytes that are not UTF-8; Prometheus refuses the whole page.", "Find the label value that brings them in.")
        )  # fmt: skip
    if text and not text.endswith("\n"):
        findings.append(
            Finding("warning", "cut_off", "The last line has no end: the page may be cut off.", "Check proxies between, and the engine's log.")
        )  # fmt: skip
    lines: list[str] = []
    types: dict[str, str] = {}
    changed: dict[str, tuple[str, str]] = {}
    declared = Counter[str]()
    for line in text.split("\n"):
        line = line.strip()
        if line.startswith("#"):
            if match := _TYPE.match(line):
                name, kind = match[1], match[2]
                declared[name] += 1
                if types.setdefault(name, kind) != kind:
                    changed[name] = (types[name], kind)
        elif line:
            lines.append(_EXEMPLAR.sub("", line))
    samples, bad, done = _parsed(lines, time.monotonic() + seconds)
    if done < len(lines):
        findings.append(
            Finding("warning", "too_many_series", f"Only {done:,} of {len(lines):,} lines were read, within {seconds:g} s.", "Look for a label without bounds: a scrape of this page is as slow.")
        )  # fmt: skip
    if not samples:
        return Page((), types, (*findings, _what_it_is(answer, text)))
    if bad:
        findings.append(
            Finding("warning", "bad_lines", f"{len(bad):,} of {len(lines):,} lines are no samples, first {bad[0][:120]!r}; Prometheus refuses the whole page.", "Check what else writes to this page.")
        )  # fmt: skip
    for name, (first, second) in list(changed.items())[:5]:
        findings.append(
            Finding("warning", "type_changed", f"{name} is declared as {first} and as {second} on one page.", "Two exporters share a registry or a prefix: separate them.")
        )  # fmt: skip
    twice = [name for name, times in declared.items() if times > 1 and name not in changed]
    if twice:
        findings.append(
            Finding("warning", "family_twice", f"{len(twice)} families are declared twice, first {twice[0]}: pages of several processes were put together.", "Aggregate the processes in one registry.")
        )  # fmt: skip
    seen: dict[tuple[str, tuple[tuple[str, str], ...]], Sample] = {}
    doubles = 0
    for sample in samples:
        key = (sample.name, tuple(sorted(sample.labels.items())))
        doubles += key in seen
        seen.setdefault(key, sample)
    if doubles:
        findings.append(
            Finding("warning", "series_twice", f"{doubles:,} series are on the page twice with the same labels: several processes answer as one, and Prometheus keeps one value of each.", "Give each process a label, or let one process gather them.")
        )  # fmt: skip
    return Page(tuple(seen.values()), types, tuple(findings))


_CHUNK = 500
_MOST_BAD = 1000
#: No sample of an engine is longer; the parser's time grows with the square of a line's labels.
_LONGEST = 1 << 16


def _parsed(lines: list[str], until: float) -> tuple[list[Sample], list[str], int]:
    """Samples, lines that are none, and how many lines were looked at by the monotonic time `until`. Of a part with a fault the bad
    lines are searched for, until there are so many that it is no page of metrics."""
    samples: list[Sample] = []
    bad: list[str] = []
    for start in range(0, len(lines), _CHUNK):
        if time.monotonic() > until:
            return samples, bad, start
        chunk = lines[start : start + _CHUNK]
        bad += [line for line in chunk if len(line) > _LONGEST]
        chunk = [line for line in chunk if len(line) <= _LONGEST]
        try:
            samples += list(_samples(chunk))
        except _REFUSED:
            for line in chunk:
                try:
                    samples += _samples([line])
                except _REFUSED:
                    bad.append(line)
        if len(bad) > _MOST_BAD:
            break
    return samples, bad, len(lines)


def _what_it_is(answer: Answer, text: str) -> Finding:
    start = text.lstrip()[:200].lower()
    if not text.strip():
        found = "is empty"
    elif start.startswith(("<!doctype", "<html")):
        found = "is a web page"
    elif start.startswith(("{", "[")):
        found = "is JSON"
    else:
        found = f"is not in the Prometheus format (it begins with {text.strip()[:40]!r})"
    return Finding(
        "error", "not_metrics", f"{answer.url} {found}: it has no sample.",
        "Give the address of the metrics: /metrics for most engines, /prometheus/metrics for TensorRT-LLM.",
    )  # fmt: skip
