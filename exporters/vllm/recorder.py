"""From vLLM's scheduler, iteration and finished-request statistics to kvscope's families. Imports nothing of vLLM.

vLLM says that its statistics objects may change with any version: every field is read with care, a part that cannot be
read is counted as an anomaly and leaves the other parts alone, and nothing is ever raised.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from exporters.vllm import residency
from exporters.vllm.capabilities import LOOKUPS
from exporters.vllm.frontend import Frontend, Request
from exporters.vllm.siblings import Siblings, Told, Word
from observability import catalog as c
from observability.telemetry import phases as p
from observability.telemetry.observed import Gauges, Observed, Source

if TYPE_CHECKING:
    from exporters.vllm.kv_events import KVEvents

_Parts = tuple[Callable[[Observed, Any], None], ...]
_log = logging.getLogger(__name__)
_PREFILL, _DECODE, _MIXED = range(len(c.STEP_KINDS))
#: By name of vllm.v1.engine.FinishReason. A repetition that vLLM detects is an end that the model chose, as stop is.
_OUTCOMES = {"stop": "stop", "length": "length", "abort": "abort", "error": "error", "repetition": "stop"}
#: What one label of the front end's own series tells when several engines share it.
_OF_FRONTEND = (c.REQUESTS_RECEIVED.name, c.REQUESTS.name, c.ANOMALIES_TOTAL.name, *LOOKUPS)


@dataclass(frozen=True, slots=True)
class Settings:
    """What a vLLM was started with, as far as its numbers depend on it. None: not known."""

    block_size: int | None
    capacity_blocks: int | None
    priorities: bool = False  # priority scheduling: classes differ
    connector: bool = False  # KV comes from elsewhere, too
    several_processes: bool = False  # this front end is one of several


class Recorder:
    """What the plug-in does with vLLM's numbers. `observed` holds one recorder by engine index (data-parallel rank)."""

    def __init__(
        self, source: Source, settings: Settings, engines: Sequence[int] = (0,), siblings: Siblings | None = None
    ) -> None:
        self.settings = settings
        self._siblings = siblings
        self._words: dict[int, Word] = {}
        self.observed = {str(index): Observed(source) for index in engines}
        self._by_index = {index: self.observed[str(index)] for index in engines}
        self._indices = {id(observed): index for index, observed in self._by_index.items()}
        first = next(iter(self.observed.values()))
        self._front = first
        if len(self.observed) > 1:  # nobody tells which engine a request went to before it ends
            told = {name: status if name in _OF_FRONTEND else ("no", "") for name, status in source.families.items()}
            self._front = self.observed["frontend"] = Observed(
                source._replace(families=told, outcomes=("abort", "error", "rejected"))
            )
        self.set_pool(settings.capacity_blocks, settings.block_size)
        self.frontend: Frontend | None = None
        self._samples = {id(observed): residency.EvictionSample() for observed in self._by_index.values()}
        self._reported: set[str] = set()
        self._classes = source.classes
        self._total = source.classes.index(source.class_of_totals) if source.class_of_totals in source.classes else None
        self._scheduler_parts: _Parts = (self._scheduler, self._evictions, self._step)
        self._iteration_parts: _Parts = (
            self._counts, self._first_tokens, self._intervals, self._finished,
        )  # fmt: skip
        for observed in self.observed.values():
            observed.before_reading = self._refresh

    def follow(self, events: Mapping[int, KVEvents]) -> None:
        """Residency of each engine, from its KV events where `events` has a reader for it, and from vLLM's sample."""
        for index, observed in self._by_index.items():
            observed.extend(residency.blocks(observed.source.model, events.get(index), self._samples[id(observed)]))

    def watch(self, frontend: Frontend) -> None:
        """`frontend` tells of arrivals and aborts from now on."""
        self.frontend = frontend

    def set_pool(self, capacity_blocks: int | None, block_size: int | None) -> None:
        """Size of the KV pool of each engine. vLLM keeps one block for itself (its null block)."""
        self._usable = None if capacity_blocks is None or capacity_blocks < 2 else capacity_blocks - 1
        self._block_size = block_size
        for observed in self._by_index.values():
            if self._usable is not None:
                observed.capacity_blocks = self._usable
            if block_size is not None:
                observed.block_size = block_size

    # -- vLLM's event loop ------------------------------------------------------------------------------------------

    def record(self, scheduler_stats: Any, iteration_stats: Any, engine_index: int = 0) -> None:
        """One iteration of an engine; either part may be None."""
        try:
            observed = self._by_index.get(engine_index)
            if observed is None:
                self._fault(self._front, "engine_idx")
                return
            if scheduler_stats is not None:
                for scheduler_part in self._scheduler_parts:
                    self._guard(scheduler_part, observed, scheduler_stats)
            if iteration_stats is not None:
                for part in self._iteration_parts:
                    self._guard(part, observed, iteration_stats)
        except Exception:
            self._fault(self._front, "record")

    def rejected(self) -> None:
        """vLLM refused a request before it was queued."""
        self._front.received[self._standard] += 1
        self._front.end(self._standard, "rejected")

    def received(self, class_index: int) -> None:
        """A request came in."""
        self._front.received[class_index] += 1

    def aborted(self, request: Request) -> None:
        """A request left before it ended, in the queue, in prefill or in decode."""
        self._front.end(request.class_index, "abort")
        state = request.state
        if state is not None and state.is_prefilling is False:  # its lookup is known; before that vLLM has not told it
            self._guard(
                lambda observed, s: self._lookup(observed, s.prompt_len, s.num_cached_tokens), self._front, state
            )
            if self._total is None:
                stats = state.stats
                front = next(iter(self._by_index.values()))
                self._own_totals(front, request.class_index, stats, state.prompt_len, stats.num_generation_tokens)

    def fault(self, what: str) -> None:
        """The observer of vLLM's front end failed in `what`."""
        self._fault(self._front, what)

    def _guard(self, part: Callable[[Observed, Any], None], observed: Observed, stats: Any) -> None:
        try:
            part(observed, stats)
        except Exception:
            self._fault(observed, part.__name__)

    def _fault(self, observed: Observed, what: str) -> None:
        observed.anomalies[p.RECORD_ERROR] += 1
        if what not in self._reported:
            self._reported.add(what)
            _log.warning("kvscope cannot read %s of this vLLM; further cases are only counted", what, exc_info=True)

    @property
    def _standard(self) -> int:
        return self._classes.index("standard") if "standard" in self._classes else 0

    # -- scheduler statistics ---------------------------------------------------------------------------------------

    def _scheduler(self, observed: Observed, stats: Any) -> None:
        running, waiting = _number(observed, stats, "num_running_reqs"), _number(observed, stats, "num_waiting_reqs")
        deferred = getattr(stats, "num_skipped_waiting_reqs", None)  # vLLM 0.17 and later
        usage = _number(observed, stats, "kv_cache_usage")
        active = _NAN
        if usage == usage and self._usable is not None:
            if not 0.0 <= usage <= 1.0:
                observed.anomalies[p.UNREADABLE_FIELD] += 1
            else:
                active = round(usage * self._usable)
        waiting += deferred if isinstance(deferred, int) and deferred < _MOST else 0
        observed.gauges = said = Gauges(observed.wall_clock(), running, waiting, active)
        self._words[self._indices[id(observed)]] = Word(said.unix_time, running + waiting)
        cache = getattr(stats, "prefix_cache_stats", None)
        if cache is not None and getattr(cache, "preempted_requests", None):
            queries, hits = (_number(observed, cache, name) for name in ("preempted_queries", "preempted_hits"))
            if queries == queries and hits == hits:
                observed.add(observed.recomputed, 0, queries - hits)

    def _evictions(self, observed: Observed, stats: Any) -> None:
        if evictions := getattr(stats, "kv_cache_eviction_events", None):
            self._samples[id(observed)].add(evictions)

    def _step(self, observed: Observed, stats: Any) -> None:
        details = getattr(stats, "iteration_details", None)
        if details is None or getattr(details, "is_dummy", False):
            return
        prefills, decodes = details.num_ctx_requests, details.num_generation_requests
        if not prefills and not decodes:
            return
        observed.steps_told = True
        kind = _MIXED if prefills and decodes else _PREFILL if prefills else _DECODE
        observed.steps[kind] += 1
        observed.observe(observed.step_duration, kind, (details.elapsed_ms / 1e3,))
        observed.add(observed.step_tokens, 0, details.num_ctx_tokens)
        observed.add(observed.step_tokens, 1, details.num_generation_tokens)

    # -- iteration statistics -----------------------------------------------------------------------------------------

    def _counts(self, observed: Observed, stats: Any) -> None:
        preempted = _number(observed, stats, "num_preempted_reqs")
        if preempted:  # NaN: not told
            observed.add(observed.preemptions, 0, 0 if preempted != preempted else preempted)
        if self._total is None:
            return
        for values, owner, name in (
            (observed.generation_tokens, stats, "num_generation_tokens"),
            (observed.prompt_tokens, stats, "num_prompt_tokens"),
        ):
            if (tokens := _number(observed, owner, name)) == tokens:
                observed.add(values, self._total, tokens)

    def _first_tokens(self, observed: Observed, stats: Any) -> None:
        if self._total is not None and stats.time_to_first_tokens_iter:
            observed.observe(observed.ttft, self._total, stats.time_to_first_tokens_iter)

    def _intervals(self, observed: Observed, stats: Any) -> None:
        if stats.inter_token_latencies_iter:
            observed.observe(observed.itl, 0, stats.inter_token_latencies_iter)

    def _finished(self, observed: Observed, stats: Any) -> None:
        for finished in stats.finished_requests:
            self._guard(self._one_finished, observed, finished)

    def _one_finished(self, observed: Observed, finished: Any) -> None:
        external_id = getattr(finished, "request_id", None)
        request = self.frontend.finished(external_id) if self.frontend and isinstance(external_id, str) else None
        class_index = self._standard if request is None else request.class_index
        reason = getattr(finished, "finish_reason", None)
        outcome = _OUTCOMES.get(str(reason).lower(), str(reason))
        observed.end(class_index, outcome)
        prompt = _number(observed, finished, "num_prompt_tokens")
        cached = _number(observed, finished, "num_cached_tokens")
        if prompt == prompt and cached == cached:
            self._lookup(observed, int(prompt), int(cached))
        if outcome in ("stop", "length"):
            latency = _number(observed, finished, "e2e_latency")
            if latency == latency:
                parts = self._make_up(observed, finished, request, latency)
                observed.served(class_index, latency, parts, int(prompt) if prompt == prompt else None)
        if self._total is None and request is not None and request.state is not None and prompt == prompt:
            generated = _number(observed, finished, "num_generation_tokens")
            self._own_totals(observed, class_index, request.state.stats, prompt, generated)

    def _own_totals(self, observed: Observed, class_index: int, stats: Any, prompt: float, generated: float) -> None:
        """With priority scheduling: what vLLM's iteration totals do not tell by class, when the request ends."""
        observed.add(observed.prompt_tokens, class_index, prompt)
        observed.add(observed.generation_tokens, class_index, generated)
        observed.observe(observed.ttft, class_index, (stats.first_token_latency,))

    def _lookup(self, observed: Observed, prompt: int, cached: int) -> None:
        if not observed.tells(c.KV_LOOKUPS) or self._block_size is None:
            return
        # With a connector KV may come for all but the last token, not only whole blocks.
        whole = prompt - 1 if self.settings.connector else (prompt - 1) // self._block_size * self._block_size
        observed.lookup(prompt, max(whole, 0), cached)

    def _make_up(
        self, observed: Observed, finished: Any, request: Request | None, latency: float
    ) -> list[float] | None:
        """Seconds by state, adding up to `latency`; None where a milestone is missing or out of order."""
        names = ("queued_time", "prefill_time", "decode_time")
        queued, prefill, decode = (_number(observed, finished, name) for name in names)
        if not (queued == queued and prefill == prefill and decode == decode):
            return None
        inside = queued + prefill + decode
        # vLLM subtracts times that were never set as 0: the result is negative, or as long as the host is up.
        if queued < 0.0 or prefill < 0.0 or decode < 0.0:
            observed.anomalies[p.MISSING_MILESTONE] += 1
            return None
        outside = latency - inside
        if outside < 0.0:
            if outside < -1e-3 - 1e-3 * latency:  # two clocks: the wall's and a monotonic one
                observed.anomalies[p.MILESTONE_ORDER] += 1
                return None
            scale, outside = latency / inside, 0.0
            queued, prefill, decode = queued * scale, prefill * scale, decode * scale
        states = [outside, queued, prefill, decode]
        if len(observed.source.states) > len(states):  # preempted time is told
            away_prefill = min(request.preempted_prefill, prefill) if request else 0.0
            away_decode = min(request.preempted_decode, decode) if request else 0.0
            states = [outside, queued, prefill - away_prefill, decode - away_decode, away_prefill + away_decode]
        return states

    # -- scrapes ------------------------------------------------------------------------------------------------------

    def _refresh(self) -> None:
        """Writes anew what is known of engines that have nothing to do: vLLM tells nothing of these, be it since their last requests were
        aborted, or while others work. An engine is idle if those that spoke after it have all the requests that are in flight."""
        if self.frontend is None:
            return
        told = [Told(self.frontend.in_flight(), self.frontend.bound, dict(self._words))]
        if self.settings.several_processes:
            if self._siblings is None:
                return
            try:
                told = self._siblings.exchange(told[0])
            except Exception:
                self._fault(self._front, "siblings")
                return
        words = {index: max(each.words.get(index, Word()) for each in told) for index in self._by_index}
        if any(word.time for word in words.values()) and not any(each.bound for each in told):
            return  # engines speak of requests that no front end shows
        in_flight, of_later = sum(each.in_flight for each in told), 0.0
        for index, word in sorted(words.items(), key=lambda item: -item[1].time):
            if of_later >= in_flight:
                observed = self._by_index[index]
                kept = observed.gauges
                active = kept.active_blocks if self.settings.connector and kept is not None else 0.0
                if self._usable is None:
                    active = _NAN
                observed.gauges = Gauges(observed.wall_clock(), 0.0, 0.0, active)
            of_later += word.requests


_NAN = float("nan")


def _number(observed: Observed, owner: Any, name: str) -> float:
    """A numeric field of vLLM's statistics; NaN, and an anomaly, where it is missing, of another type or too large."""
    value = getattr(owner, name, None)
    if (type(value) is int or type(value) is float) and -_MOST < value < _MOST:
        return value
    observed.anomalies[p.UNREADABLE_FIELD] += 1
    return _NAN


_MOST = 1e300  # an integer may be larger than any float
