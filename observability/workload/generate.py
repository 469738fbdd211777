"""The default load: conversations with shared prefixes, bursts and a day shape, fitted to recorded traces.

Fitted to the Mooncake conversation trace (FAST'25 release, 12,031 requests in an hour):
- length of first prompts, length of answers, tokens that a next turn adds, seconds between turns, and how much of the
  earlier prompt an edited turn keeps: each by its quantiles 0, .01, .05, .1 ... .9, .95, .99, .999, 1;
- chance of a next turn by the number of turns so far, share of edited turns (15 %), one system prompt of 512 tokens that
  all share, share of fixed-size single calls that never get a second turn;
- burstiness: index of dispersion of arrivals in windows of 30 s and 60 s.
The marginal prompt lengths, the hit rate of an unbounded cache (0.374) and the hit rate by length bucket follow from these and
are compared with the trace in tests. The shape of the day (hourly factors) is the mean of two production LLM services in
ServeGen (Apache-2.0), since neither public trace covers a day. The Azure 2023 code trace is far burstier
(`burstiness` of about 1).
"""

from __future__ import annotations

import bisect
import functools
import heapq
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from observability.engine.types import PromptSpan
from observability.errors import ConfigError
from observability.workload.traces import MAX_TOKENS, PART_TOKENS, TraceRequest

LEAST_REQUESTS_PER_SECOND = 1e-4
"""Below, a load would be little but empty time, which is drawn slot by slot."""


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """requests_per_second: mean, of days where there is a time of day. length_scale: on prompts and answers, as in
    read_trace. max_prompt_tokens: longer first prompts are cut, and a conversation that would outgrow it starts over.
    day_strength: exponent on the hourly factors (0: no day shape, 1: as recorded, 2: twice as pronounced). burstiness:
    relative standard deviation of the rate around the day shape, with a memory of two minutes (0: Poisson session starts)."""

    requests_per_second: float = 3.4
    length_scale: float = 1.0
    max_prompt_tokens: int = 126_976  # leaves room for an answer in a context of 131,072
    day_strength: float = 1.0
    burstiness: float = 0.15

    def __post_init__(self) -> None:
        def check(ok: bool, name: str, want: str) -> None:
            if not ok:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be {want}.", next_step=f"Change {name}.")

        check(
            LEAST_REQUESTS_PER_SECOND <= self.requests_per_second <= 1e6,
            "requests_per_second",
            f"between {LEAST_REQUESTS_PER_SECOND:g} (about nine a day) and a million",
        )
        check(1 / PART_TOKENS <= self.length_scale <= 64.0, "length_scale", "between 1/512 and 64")
        low = round(PART_TOKENS * self.length_scale) + 1
        check(
            low <= self.max_prompt_tokens <= MAX_TOKENS,
            "max_prompt_tokens",
            f"between {low} (system prompt + 1) and 10 M",
        )
        check(0.0 <= self.day_strength <= 10.0, "day_strength", "between 0 and 10")
        check(0.0 <= self.burstiness <= 3.0, "burstiness", "between 0 and 3")


PRESETS: dict[str, LoadSettings] = {
    "recorded": LoadSettings(),
    # For SmolLM2-135M on two CPU cores (about 300 prompt tokens/s, 50 ms a decode step): a fifth busy on average, with
    # queues at the evening peak. 1/24 of the recorded lengths, prompts in the two lowest length buckets.
    "laptop": LoadSettings(
        requests_per_second=0.1, length_scale=1 / 24, max_prompt_tokens=6144, day_strength=2.0, burstiness=0.4
    ),
}

#: Hourly factors of the request rate, UTC, mean 1: mean of two ServeGen services over two weeks each.
DAY_SHAPE = (
    0.91, 0.85, 0.87, 0.82, 0.81, 0.80, 0.81, 0.84, 0.89, 1.00, 1.08, 1.09,
    1.01, 1.02, 1.04, 1.04, 1.09, 1.07, 1.01, 1.17, 1.28, 1.23, 1.17, 1.06,
)  # fmt: skip

# Quantiles measured on the trace, at these probabilities; between them the logarithm is interpolated.
_AT = (0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 0.999, 1.0)
_FIRST_PROMPT = (891, 894, 897, 905, 1092, 1757, 3913, 5264, 7418, 10771, 15871, 25559, 38494, 89868, 121160, 126195)
_ANSWER = (1, 3, 10, 24, 100, 213, 291, 350, 399, 447, 504, 597, 698, 1118, 2000, 2000)
_ADDED = (1, 1, 1, 1, 7, 11, 16, 26, 52, 172, 694, 4194, 6921, 16705, 37523, 91467)
_GAP_SECONDS = (
    3.0,
    12.0,
    30.0,
    42.0,
    60.0,
    75.0,
    96.0,
    123.0,
    162.0,
    222.0,
    318.0,
    483.0,
    615.0,
    1477.0,
    2639.0,
    3030.0,
)
_EDIT_KEEPS = (0.015, 0.031, 0.054, 0.07, 0.1, 0.133, 0.176, 0.222, 0.3, 0.409, 0.551, 0.896, 0.944, 0.978, 0.99, 0.993)
_EDIT_LENGTH_RATIO = (0.17, 0.29, 0.51, 0.61, 0.72, 0.84, 0.93, 0.99, 1.03, 1.08, 1.16, 1.38, 1.68, 2.83, 5.78, 7.72)
_EDIT_SHARE = 0.15
#: Chance that a turn is followed by another, by turns so far; from requests whose next turn the trace could still show.
_NEXT_TURN = (0.40, 0.44, 0.54, 0.63, 0.65, 0.69, 0.74, 0.75, 0.76, 0.80)
_SINGLE_CALL_BELOW = 1000  # first prompts shorter than this (18 %) are calls of one fixed size; none gets a second turn
_LONG_CONTEXT = 32_768  # prompts from here on are of class long_context
_LONG_CONTEXT_NEXT_TURN = 0.75  # ... and their chance of a next turn is lower by this factor
_MEAN_TURNS = 1.70  # requests a session with the chances above; a test compares the resulting request rate

_WARM_UP_SECONDS = 3600.0  # sessions that started so long before the load begins may have turns in it
_SLOT_SECONDS = 10.0
_BURST_MEMORY_SECONDS = 120.0


def _draw(rng: random.Random, quantiles: Sequence[float]) -> float:
    """A value from the distribution with these quantiles at _AT."""
    u = rng.random()
    i = bisect.bisect_right(_AT, u) - 1
    low, high = quantiles[i], quantiles[i + 1]
    if low == high:
        return low
    weight = (u - _AT[i]) / (_AT[i + 1] - _AT[i])
    return math.exp(math.log(low) * (1.0 - weight) + math.log(high) * weight)


@dataclass(slots=True)
class _Turn:
    """The latest turn of a session, in unscaled tokens."""

    prompt_tokens: int
    answer_tokens: int
    hash_ids: tuple[int, ...]
    turns: int


def generate_load(settings: LoadSettings, seed: int = 0, *, start_time: float | None = None) -> Iterator[TraceRequest]:
    """Yields requests without end, in order of arrival; the same settings, seed and start_time give the same load.

    start_time: Unix seconds at which the load starts, for the shape of the day. None: there is no shape, and any hour has the mean rate.
    arrival_seconds counts from the start.
    Class: first turns are `standard`, next turns (somebody waits in a conversation) `interactive`, prompts of 32K
    unscaled tokens and more `long_context`. Memory holds only sessions that have a turn ahead.
    """
    part_tokens = round(PART_TOKENS * settings.length_scale)
    most = settings.max_prompt_tokens * PART_TOKENS // part_tokens  # unscaled; never scales to more than the maximum
    rng = random.Random(f"content {seed}")
    starts = _session_starts(random.Random(f"arrivals {seed}"), settings, start_time)
    new_hash = itertools.count(1)  # hash 0 is the system prompt

    def first_turn() -> _Turn:
        tokens = min(round(_draw(rng, _FIRST_PROMPT)), most)
        return _Turn(tokens, round(_draw(rng, _ANSWER)), _extend((0,), tokens, new_hash), 1)

    pending: list[tuple[float, int, _Turn]] = []  # heap of turns to come, by time; the counter breaks ties
    order = itertools.count()
    next_start = next(starts)
    while True:
        if pending and pending[0][0] <= next_start:
            now, _, turn = heapq.heappop(pending)
        else:
            now, turn = next_start, first_turn()
            next_start = next(starts)
        if now >= 0.0:
            yield _request(now, turn, part_tokens)
        if rng.random() < _next_turn_chance(turn):
            following = _next_turn(rng, turn, new_hash)
            if following.prompt_tokens > most:  # outgrown: the conversation starts over
                following = first_turn()
                following.turns = turn.turns + 1
            heapq.heappush(pending, (now + _draw(rng, _GAP_SECONDS), next(order), following))


def _request(now: float, turn: _Turn, part_tokens: int) -> TraceRequest:
    if turn.prompt_tokens >= _LONG_CONTEXT:
        request_class = "long_context"
    else:
        request_class = "interactive" if turn.turns > 1 else "standard"
    return TraceRequest(
        arrival_seconds=now,
        prompt=PromptSpan(-(-turn.prompt_tokens * part_tokens // PART_TOKENS), turn.hash_ids, part_tokens),
        output_tokens=-(-turn.answer_tokens * part_tokens // PART_TOKENS),
        request_class=request_class,
    )


def _next_turn_chance(turn: _Turn) -> float:
    if turn.turns == 1 and turn.prompt_tokens < _SINGLE_CALL_BELOW:
        return 0.0
    chance = _NEXT_TURN[min(turn.turns, len(_NEXT_TURN)) - 1]
    return chance * _LONG_CONTEXT_NEXT_TURN if turn.prompt_tokens >= _LONG_CONTEXT else chance


def _next_turn(rng: random.Random, turn: _Turn, new_hash: Iterator[int]) -> _Turn:
    """Either the whole prompt, its answer and some more, or (edited) a part of the prompt with new text after it."""
    whole_parts = turn.prompt_tokens // PART_TOKENS  # a partial last part has another hash once it is full
    if rng.random() < _EDIT_SHARE:
        kept = max(1, int(whole_parts * _draw(rng, _EDIT_KEEPS)))
        tokens = max(kept * PART_TOKENS + 1, round(turn.prompt_tokens * _draw(rng, _EDIT_LENGTH_RATIO)))
    else:
        kept = whole_parts
        tokens = turn.prompt_tokens + turn.answer_tokens + round(_draw(rng, _ADDED))
    return _Turn(tokens, round(_draw(rng, _ANSWER)), _extend(turn.hash_ids[:kept], tokens, new_hash), turn.turns + 1)


def _extend(hash_ids: tuple[int, ...], tokens: int, new_hash: Iterator[int]) -> tuple[int, ...]:
    """`hash_ids` and as many new ones as a prompt of `tokens` unscaled tokens needs; cut when it needs fewer."""
    parts = -(-tokens // PART_TOKENS)
    return (*hash_ids[:parts], *itertools.islice(new_hash, max(0, parts - len(hash_ids))))


def _session_starts(rng: random.Random, settings: LoadSettings, start_time: float | None) -> Iterator[float]:
    """Times of session starts: Poisson within slots of 10 s whose rate follows the day and a mean-reverting burst factor."""
    mean_rate = settings.requests_per_second / _MEAN_TURNS
    strength = 0.0 if start_time is None else settings.day_strength
    shape = [factor**strength for factor in DAY_SHAPE]
    mean_shape = sum(shape) / len(shape)
    sigma = math.sqrt(math.log1p(settings.burstiness**2))  # of the logarithm, so that the factor's mean is 1
    memory = math.exp(-_SLOT_SECONDS / _BURST_MEMORY_SECONDS)
    level = rng.gauss(0.0, sigma)
    for slot in itertools.count():
        begin = slot * _SLOT_SECONDS - _WARM_UP_SECONDS
        hour = ((start_time or 0.0) + begin) / 3600.0
        low = math.floor(hour)
        weight = hour - low
        day = shape[low % 24] * (1.0 - weight) + shape[(low + 1) % 24] * weight
        rate = mean_rate * day / mean_shape * math.exp(level - sigma * sigma / 2.0)
        at = begin + rng.expovariate(rate)
        while at < begin + _SLOT_SECONDS:
            yield at
            at += rng.expovariate(rate)
        level = level * memory + rng.gauss(0.0, sigma * math.sqrt(1.0 - memory * memory))


# -- content for a real model -----------------------------------------------------------------------------------------

#: Words that common byte-pair vocabularies hold as one token with a space before it, so that n words are n tokens.
_WORDS = (
    "the of and to in is that for it was on are as with his they at be this have from or had by but not what all were "
    "we when your can said there use an each which she do how their if will up other about out many then them these so "
    "some her would make like him into time has look two more write go see number no way could people my than first "
    "been call who its now find long down day did get come made may part over new sound take only little work know "
    "place year live me back give most very after thing our just name good man think say great where help"
)
WORDS = tuple(_WORDS.split())


@functools.lru_cache(maxsize=4096)
def _part_choices(hash_id: int, part_tokens: int, choices: int) -> np.ndarray:
    """Indices [part_tokens] below `choices`; the same for the same arguments on every machine and run."""
    return np.random.Generator(np.random.PCG64(hash_id)).integers(0, choices, part_tokens, dtype=np.int32)


def prompt_token_ids(prompt: PromptSpan, vocabulary: Sequence[int]) -> list[int]:
    """Token ids [prompt.length] drawn from `vocabulary`: equal hash ids give equal tokens, so that prefixes are shared as
    the span says."""
    ids = np.asarray(vocabulary)
    parts = [ids[_part_choices(hash_id, prompt.part_tokens, len(ids))] for hash_id in prompt.hash_ids]
    return np.concatenate(parts)[: prompt.length].tolist()


def prompt_text(prompt: PromptSpan) -> str:
    """Plain words, about one token each in common vocabularies; prefixes are shared as the span says."""
    indices = prompt_token_ids(prompt, range(len(WORDS)))
    return " ".join([WORDS[i] for i in indices])
