"""The page docs/adapters.md: capability matrix, and what a reader of an engine's numbers should know. Made by `kvscope generate`."""

from __future__ import annotations

from collections.abc import Iterator

from exporters.adapters.engines import ADAPTERS, PLUGIN, TITLES, capability
from exporters.adapters.table import Adapter
from observability.signals import SIGNALS

MARK = {"yes": "●", "partial": "◐", "no": "–"}

_HEAD = """# Other engines

<!-- Made by `kvscope generate` from exporters/adapters; do not edit. -->

kvscope's boards and alerts read signals. The bundled engine feeds all of them; so does vLLM with kvscope's plug-in, but for what vLLM
cannot tell. For other engines a file of recording rules makes the same signals from the engine's own metrics, as far as they go:

    kvscope scrape-config --engine vllm --target 10.0.0.5:8000

prints the scrape job and the rule files for a Prometheus; the files are in `alerts/generated/adapters/`. Every series they record
carries the label `engine`, so that one model on two engines stays two series; series of the bundled engine have no such label.
The app and the forecasts then take each engine's as a model of its own: `m on vllm`, `m on sglang`. Boards do not show the
forecasts of such a model, and alerts on them do not know when the pool of its engine is full.

- **Renames**: names of several versions and both forms of a colon (`vllm:` and `vllm_`) are read. Of one target the first that exists
  counts, so a version that exports old and new names is not counted twice.
- **Adding up**: counters, buckets and gauges of requests, tokens and blocks are summed over ranks and instances; a ratio is a sum over a
  sum; a gauge that is a ratio already is averaged, and said to be. Quantiles come from summed buckets.
- **Quantiles** in the first bucket of a histogram read that bucket's bound (at most that), beyond the last its bound (at least that).
- **Replicas with other bucket bounds** give quantiles of neither: give all replicas of a model the same. `kvscope doctor` with the addresses of
  several replicas says whether they have.
- **A look at a live endpoint**: `kvscope doctor http://10.0.0.5:8000/metrics` says which engine it is, which of these signals it feeds
  now, which settings would add more, and what is wrong with its numbers.
- **Not exported** is not "No data": each file records `engine_signal:kvscope_capability:info` with `engine`, `signal`, `status` and
  `reason`; 1 is yes, 0.5 partial, 0 no.

## Which engine feeds which signal

● yes, ◐ in part, – no. The reasons are below, engine by engine.
"""


def _matrix() -> Iterator[str]:
    yield "| Signal | " + " | ".join(TITLES.values()) + " |"
    yield "|---|" + ":-:|" * len(TITLES)
    for signal in SIGNALS:
        marks = " | ".join(MARK[capability(engine, signal.name).status] for engine in TITLES)
        yield f"| {signal.title}<br>`{signal.name}` | {marks} |"


def _reasons(engine: str) -> Iterator[str]:
    """Signals by status and reason; those that share both share a row."""
    rows: dict[tuple[str, str], list[str]] = {}
    for signal in SIGNALS:
        found = capability(engine, signal.name)
        if found.status != "yes":
            rows.setdefault((found.status, found.reason), []).append(signal.title)
    if not rows:
        return
    yield "\n| Signals | | Why |\n|---|:-:|---|"
    for (status, reason), titles in sorted(rows.items(), key=lambda row: row[0][0] != "partial"):
        yield f"| {'; '.join(titles)} | {MARK[status]} | {reason} |"


def _section(adapter: Adapter) -> Iterator[str]:
    yield f"\n## {adapter.title}\n"
    yield f"Metrics at `:{adapter.port}{adapter.path}`, names begin with {' or '.join(f'`{p}`' for p in adapter.prefixes)}. "
    yield (
        f"The model is the label `{adapter.model_label}`."
        if adapter.model_label
        else "No label names the model: the scrape job has to."
    )
    if adapter.ranks:
        yield f"Added up over {', '.join(f'`{label}`' for label in adapter.ranks)}."
    if adapter.repeated_over:
        yield f"Of {', '.join(f'`{label}`' for label in adapter.repeated_over)} one counts."
    yield ""
    yield from (f"- {note}" for note in adapter.notes)
    if adapter.renames:
        yield "\n| Name now | Before | Renamed in |\n|---|---|---|"
        yield from (f"| `{r.new}` | `{r.old}` | {r.since or 'not known'} |" for r in adapter.renames)
    if adapter.flags:
        yield "\n| Setting | Adds |\n|---|---|"
        yield from (f"| `{flag.setting}` | {flag.gives} |" for flag in adapter.flags)
    yield from _reasons(adapter.engine)


def page() -> str:
    """The whole page."""
    lines = [_HEAD, *_matrix(), f"\n## {TITLES[PLUGIN]}\n"]
    lines += [
        "The plug-in puts kvscope's own families on vLLM's metrics page, so the rules of the bundled engine apply and the adapter's are not needed.",
        *_reasons(PLUGIN),
    ]
    for adapter in ADAPTERS.values():
        lines += _section(adapter)
    return "\n".join(lines) + "\n"
