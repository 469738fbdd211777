"""What will probably arrive soon, learned from what arrived of late: prompt tokens by class, and prefixes that will be asked for again.

The scheduler keeps room for the first and brings the second back from the host tier before anybody waits for them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from observability.catalog import CLASSES
from observability.engine.kv.prefix import Blocks, Keys, PrefixIndex

Floats = npt.NDArray[np.float64]

_MIN_ARRIVALS = 5  # of a class, below which nothing is expected of it
_MAX_USES = 8  # more uses than these count as these
_KEYS_PER_PREFIX = 256  # kept on average: bounds memory where prompts are long
#: Bounds of idle times: 0, then log-spaced from 0.1 s to about a day, four in an octave. Longer ones tell nothing.
_IDLE_BOUNDS: Floats = np.concatenate(([0.0], 0.1 * 2.0 ** (np.arange(80) / 4)))
_BINS = len(_IDLE_BOUNDS) - 1
_PRIOR = 2.0  # made-up prefixes in each bin that did not return, so that a return or two do not make a rule


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A prefix, by the keys of its full blocks, and the probability that it is asked for within the horizon."""

    keys: Keys
    confidence: float


class _TokenRate:
    """Prompt tokens (or requests) per second of one class, exponentially weighted by age."""

    __slots__ = ("_arrivals", "_half_life_seconds", "_last", "_start", "_tokens")

    def __init__(self, half_life_seconds: float) -> None:
        self._half_life_seconds = half_life_seconds
        self._arrivals = 0
        self._start = self._last = 0.0
        self._tokens = 0.0  # of all arrivals but the first, which only starts the clock; halved each half-life

    def observe(self, now: float, tokens: int) -> None:
        self._arrivals += 1
        if self._arrivals == 1:
            self._start = self._last = now
            return
        self._tokens = self._tokens * self._decay(now - self._last) + tokens
        self._last = now

    def expected(self, now: float, seconds: float) -> float:
        """Tokens in `seconds` from `now` on. Nothing is extrapolated from a shorter time than is asked about."""
        if self._arrivals < _MIN_ARRIVALS:
            return 0.0
        # At a constant rate, the weighted sum is rate x (integral of the weights over the time observed).
        observed_seconds = max(now - self._start, seconds)
        weight_seconds = self._half_life_seconds / np.log(2) * (1.0 - self._decay(observed_seconds))
        return float(self._tokens * self._decay(now - self._last) / weight_seconds * seconds)

    def _decay(self, seconds: float) -> float:
        return float(0.5 ** (seconds / self._half_life_seconds))


class ArrivalModel:
    """Learns from each arrival. Times are seconds on the engine's clock; memory is bounded whatever arrives.

    A prompt is remembered by the key of its last full block. A later prompt that contains this key starts with all of the earlier one: the
    prefix has returned, which is how the turns of a conversation and repeated prompts show. Up to `memory` prefixes are kept, those used
    last.

    The chance of a return within `horizon_seconds` is 1 - S(idle + horizon) / S(idle), where S is the share of prefixes with as many uses
    that stayed idle for at least so long: the actuarial (life-table) estimate over bins of idle time, in which prefixes that have not
    returned yet, or were forgotten, count for as long as they were seen (Cutler and Ederer 1958).
    """

    def __init__(self, horizon_seconds: float, *, memory: int = 4096, half_life_seconds: float = 60.0) -> None:
        self._horizon_seconds = horizon_seconds
        self._rates = {name: _TokenRate(half_life_seconds) for name in CLASSES}
        self._counts = {name: _TokenRate(half_life_seconds) for name in CLASSES}
        # Remembered prefixes by slot; `last` is inf where the slot is vacant.
        self._index = PrefixIndex(memory)
        self._keys: list[Keys | None] = [None] * memory
        self._lengths = np.zeros(memory, dtype=np.int64)  # len(keys)
        self._last: Floats = np.full(memory, np.inf)
        self._uses = np.zeros(memory, dtype=np.int64)
        self._continued = np.zeros(memory, dtype=bool)  # a longer prompt has taken over its number of uses
        self._vacant = list(range(memory - 1, -1, -1))
        self._max_keys = memory * _KEYS_PER_PREFIX
        self._num_keys = 0
        # Idle times that ended, by uses and bin: how many reached the bin, and how many of these returned in it.
        self._reached: Floats = np.zeros((_MAX_USES, _BINS))
        self._returned: Floats = np.zeros((_MAX_USES, _BINS))
        self._most_counted = memory

    def __len__(self) -> int:
        """Prefixes remembered."""
        return len(self._index)

    def observe(self, now: float, request_class: str, prompt_tokens: int, keys: Keys | None) -> None:
        """A request arrived. keys: of its prompt's full blocks, `[blocks]`; None where prefixes are not cached."""
        self._rates[request_class].observe(now, prompt_tokens)
        self._counts[request_class].observe(now, 1)
        if keys is not None and len(keys):
            self._observe_prefix(now, keys)

    def expected_tokens(self, now: float, request_class: str, seconds: float) -> float:
        """Prompt tokens of a class that will probably arrive in `seconds` from `now` on; 0 before its fifth arrival."""
        return self._rates[request_class].expected(now, seconds)

    def expected_requests(self, now: float, request_class: str, seconds: float) -> float:
        """As expected_tokens, in requests."""
        return self._counts[request_class].expected(now, seconds)

    # -- prefixes that return --------------------------------------------------------------------------------------

    def _observe_prefix(self, now: float, keys: Keys) -> None:
        slots = self._index.get(keys)
        slots = slots[slots >= 0]  # in order of length
        uses = 1
        if slots.size:
            for slot in slots.tolist():
                self._count(slot, now, returned=True)
            self._forget(slots[:-1])  # the longest covers them
            longest = int(slots[-1])
            self._uses[longest] += 1
            self._last[longest] = now
            if self._lengths[longest] == len(keys):
                return
            # The next turn of a conversation inherits its history; of several branches, only the first.
            if not self._continued[longest]:
                self._continued[longest] = True
                uses = int(self._uses[longest])
        self._remember(now, keys, uses)

    def _remember(self, now: float, keys: Keys, uses: int) -> None:
        if len(keys) > self._max_keys:
            return
        while not self._vacant or self._num_keys + len(keys) > self._max_keys:
            oldest = int(self._last.argmin())
            self._count(oldest, now, returned=False)
            self._forget(np.array([oldest]))
        slot = self._vacant.pop()
        self._index.insert(keys[-1:], np.array([slot]))
        self._keys[slot] = keys.copy()  # a view would keep a larger array alive
        self._lengths[slot] = len(keys)
        self._num_keys += len(keys)
        self._last[slot] = now
        self._uses[slot] = uses
        self._continued[slot] = False

    def _forget(self, slots: Blocks) -> None:
        if not slots.size:
            return
        self._index.remove(slots)
        self._last[slots] = np.inf
        self._num_keys -= int(self._lengths[slots].sum())
        for slot in slots.tolist():
            self._keys[slot] = None
            self._vacant.append(slot)

    def _count(self, slot: int, now: float, *, returned: bool) -> None:
        """The idle time of a prefix has ended, or is not watched any more."""
        row = min(int(self._uses[slot]), _MAX_USES) - 1
        at = int(_bins(now - self._last[slot]))
        self._reached[row, :at] += 1
        if at < _BINS:
            self._reached[row, at] += 1.0 if returned else 0.5
            self._returned[row, at] += returned
        if self._reached[row, 0] > self._most_counted:  # so that what is long past loses weight
            self._reached[row] /= 2
            self._returned[row] /= 2

    def _survival(self, rows: Blocks, bins: Blocks) -> Floats:
        """S at each of _IDLE_BOUNDS by uses, `[_MAX_USES, _BINS + 1]`, given the prefixes that are idle now."""
        idle = np.bincount(rows * (_BINS + 1) + bins, minlength=_MAX_USES * (_BINS + 1)).reshape(_MAX_USES, -1)
        at_least = np.cumsum(idle[:, ::-1], axis=1)[:, ::-1]
        reached = self._reached + (at_least - idle / 2)[:, :-1]
        survival = np.ones((_MAX_USES, _BINS + 1))
        np.cumprod(1.0 - self._returned / (reached + _PRIOR), axis=1, out=survival[:, 1:])
        return survival

    def candidates(self, now: float, min_confidence: float, most: int) -> list[Candidate]:
        """Up to `most` prefixes that return within the horizon with at least `min_confidence` (and more than 0), likeliest first.

        A prefix is left out where one that is as likely starts with it. Each call takes time by `memory`.
        """
        slots = np.flatnonzero(self._last < np.inf)
        rows = np.minimum(self._uses[slots], _MAX_USES) - 1
        idle = now - self._last[slots]
        survival = self._survival(rows, _bins(idle))
        confidence = 1.0 - _at(survival, rows, idle + self._horizon_seconds) / _at(survival, rows, idle)
        fits = (confidence >= min_confidence) & (confidence > 0)
        slots, confidence = slots[fits], confidence[fits]
        found: list[Candidate] = []
        for i in np.lexsort((-self._lengths[slots], -confidence)).tolist():
            if len(found) == most:
                break
            keys = self._keys[slots[i]]
            assert keys is not None
            # A key is of all tokens up to its block: prompts that agree in one agree in all before it.
            if not any(len(c.keys) >= len(keys) and c.keys[len(keys) - 1] == keys[-1] for c in found):
                found.append(Candidate(keys, float(confidence[i])))
        return found


def _bins(idle_seconds: Floats | float) -> Blocks:
    """Bin of each idle time; _BINS past the last bound."""
    return np.clip(np.searchsorted(_IDLE_BOUNDS, idle_seconds, side="right") - 1, 0, _BINS)


def _at(survival: Floats, rows: Blocks, idle_seconds: Floats) -> Floats:
    """Survival at idle times between the bounds, where returns are taken as evenly spread within a bin."""
    low = np.minimum(_bins(idle_seconds), _BINS - 1)
    start, end = _IDLE_BOUNDS[low], _IDLE_BOUNDS[low + 1]
    part = np.clip((idle_seconds - start) / (end - start), 0.0, 1.0)
    at: Floats = survival[rows, low] * (1.0 - part) + survival[rows, low + 1] * part
    return at
