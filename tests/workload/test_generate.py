"""The generated load: like the recorded trace where it says so, the same for a seed, and usable as real prompts."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from observability.engine.types import PromptSpan
from observability.errors import ConfigError
from observability.workload.generate import (
    DAY_SHAPE,
    PRESETS,
    WORDS,
    LoadSettings,
    generate_load,
    prompt_text,
    prompt_token_ids,
)
from observability.workload.traces import TraceRequest, read_trace
from tests.workload.truth import hit_rate, hits_of_unbounded_cache

HOUR = 3537.0  # what the trace covers


def load(settings: LoadSettings, seconds: float, seed: int = 0, start_time: float = 0.0) -> list[TraceRequest]:
    requests = generate_load(settings, seed, start_time=start_time)
    return list(itertools.takewhile(lambda r: r.arrival_seconds < seconds, requests))


@pytest.fixture(scope="module")
def recorded(data_dir: Path) -> list[TraceRequest]:
    return list(read_trace(data_dir / "traces" / "mooncake_conversation.jsonl"))


@pytest.fixture(scope="module")
def generated() -> list[list[TraceRequest]]:
    """Eight hours, each from its own seed and an empty cache, as the trace is one hour; no day shape."""
    return [load(LoadSettings(day_strength=0.0), HOUR, seed) for seed in range(8)]


def test_lengths_have_the_recorded_quantiles(recorded: list[TraceRequest], generated: list[list[TraceRequest]]) -> None:
    at = (0.05, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
    everything = list(itertools.chain.from_iterable(generated))
    for name, of, within in (
        ("prompt", lambda r: r.prompt.length, 0.15),
        ("output", lambda r: r.output_tokens, 0.10),
    ):
        want = np.quantile([of(r) for r in recorded], at)
        got = np.quantile([of(r) for r in everything], at)
        assert np.abs(got / want - 1).max() < within, f"{name}: {got.round()} for {want.round()}"


def test_request_and_token_rates_are_the_recorded_ones(
    recorded: list[TraceRequest], generated: list[list[TraceRequest]]
) -> None:
    requests = np.array([len(hour) for hour in generated])
    tokens = np.array([sum(r.prompt.length for r in hour) for hour in generated])
    assert requests.mean() == pytest.approx(len(recorded), rel=0.06)
    assert tokens.mean() == pytest.approx(sum(r.prompt.length for r in recorded), rel=0.08)


def test_unbounded_cache_hits_as_often_as_on_the_trace(
    recorded: list[TraceRequest], generated: list[list[TraceRequest]]
) -> None:
    def by_bucket(requests: list[TraceRequest]) -> dict[str, tuple[int, int]]:
        return hits_of_unbounded_cache((r.prompt.length, r.prompt.hash_ids) for r in requests)

    want = by_bucket(recorded)
    hours = [by_bucket(hour) for hour in generated]
    assert hit_rate(want) == pytest.approx(0.3736, abs=0.0002)
    assert np.mean([hit_rate(hour) for hour in hours]) == pytest.approx(0.3736, abs=0.02)
    for bucket in ("0-2K", "2K-8K", "8K-32K", "32K-128K"):
        got = np.mean([hour[bucket][1] / hour[bucket][0] for hour in hours])
        assert got == pytest.approx(want[bucket][1] / want[bucket][0], abs=0.06), bucket


def test_arrivals_are_as_bursty_as_on_the_trace(
    recorded: list[TraceRequest], generated: list[list[TraceRequest]]
) -> None:
    def dispersion(requests: list[TraceRequest], window: float) -> float:
        counts = np.bincount([int(r.arrival_seconds // window) for r in requests])[:-1]
        return float(counts.var() / counts.mean())

    for window in (30, 60):
        want = dispersion(recorded, window)
        got = float(np.median([dispersion(hour, window) for hour in generated]))
        assert want > 2.0  # Poisson would be 1
        assert got == pytest.approx(want, rel=0.4), f"{window} s: {got:.2f} for {want:.2f}"


def test_rate_over_days_is_the_mean_that_was_asked_for_and_follows_the_day() -> None:
    days = 6
    requests = load(LoadSettings(requests_per_second=0.2, burstiness=0.0), days * 86_400)
    assert len(requests) / (days * 86_400) == pytest.approx(0.2, rel=0.04)
    by_hour = np.bincount([int(r.arrival_seconds // 3600) % 24 for r in requests], minlength=24)
    by_hour = by_hour / by_hour.mean()
    between = [(a + b) / 2 for a, b in zip(DAY_SHAPE, (*DAY_SHAPE[1:], DAY_SHAPE[0]), strict=True)]
    assert np.abs(by_hour - between).max() < 0.12
    assert np.corrcoef(by_hour, between)[0, 1] > 0.9


@pytest.mark.parametrize("preset", PRESETS)
def test_an_hour_without_a_time_of_day_has_the_mean_rate(preset: str) -> None:
    settings, hours = replace(PRESETS[preset], burstiness=0.0), 20
    seconds = 3600.0 * (1 if preset == "recorded" else 10)
    counts = []
    for seed in range(hours):
        requests = itertools.takewhile(lambda r: r.arrival_seconds < seconds, generate_load(settings, seed))
        counts.append(sum(1 for _ in requests))
    assert np.mean(counts) / seconds == pytest.approx(settings.requests_per_second, rel=0.03)


def test_day_shape_follows_the_start_time() -> None:
    settings = LoadSettings(requests_per_second=2.0, burstiness=0.0, day_strength=2.0)
    evening = len(load(settings, 3600, start_time=20 * 3600.0))
    night = len(load(settings, 3600, start_time=5 * 3600.0))
    assert evening / night == pytest.approx((1.255 / 0.805) ** 2, rel=0.15)


def test_same_seed_same_load_other_seed_other_load() -> None:
    settings = PRESETS["laptop"]
    first, again, other = (list(itertools.islice(generate_load(settings, seed), 500)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


@pytest.mark.parametrize("preset", PRESETS)
def test_every_request_is_in_order_and_within_its_settings(preset: str) -> None:
    settings = PRESETS[preset]
    requests = list(itertools.islice(generate_load(settings, 3), 20_000))
    times = [r.arrival_seconds for r in requests]
    assert times == sorted(times)
    assert times[0] >= 0.0
    for r in requests:
        assert 1 <= r.prompt.length <= settings.max_prompt_tokens
        assert r.output_tokens >= 1
        assert len(r.prompt.hash_ids) == -(-r.prompt.length // r.prompt.part_tokens)
        assert r.prompt.hash_ids[0] == 0
    assert {r.request_class for r in requests} == {"interactive", "standard", "long_context"}


def test_laptop_preset_is_what_two_cores_can_serve() -> None:
    requests = load(PRESETS["laptop"], 3 * 86_400)
    hit = hit_rate(
        hits_of_unbounded_cache(
            ((r.prompt.length, r.prompt.hash_ids) for r in requests), requests[0].prompt.part_tokens
        )
    )
    busy_prefill = sum(r.prompt.length for r in requests) * (1 - hit) / 300
    busy_decode = sum(r.output_tokens for r in requests) * 0.05
    assert (busy_prefill + busy_decode) / (3 * 86_400) == pytest.approx(0.18, abs=0.03)


@pytest.mark.parametrize(
    "bad",
    [
        {"requests_per_second": 0}, {"requests_per_second": 9e-5}, {"requests_per_second": float("nan")}, {"length_scale": 0.001}, {"max_prompt_tokens": 512},
        {"day_strength": -1}, {"burstiness": 9},
    ],
)  # fmt: skip
def test_settings_out_of_range_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        LoadSettings(**bad)  # type: ignore[arg-type]


def test_prompts_share_tokens_and_words_exactly_as_far_as_their_hashes_agree() -> None:
    one = PromptSpan(1100, (0, 7, 8))
    other = PromptSpan(1400, (0, 7, 9))
    vocabulary = list(range(100, 400))
    a, b = prompt_token_ids(one, vocabulary), prompt_token_ids(other, vocabulary)
    assert (len(a), len(b)) == (1100, 1400)
    assert a[:1024] == b[:1024]
    assert a[1024:1040] != b[1024:1040]  # not one block is shared by accident
    assert set(a) <= set(vocabulary)
    assert prompt_token_ids(PromptSpan(600, (0, 7)), vocabulary) == a[:600]
    words, more = prompt_text(one).split(), prompt_text(other).split()
    assert (len(words), len(more)) == (1100, 1400)
    assert words[:1024] == more[:1024]
    assert words[1024:1040] != more[1024:1040]
    assert len(set(WORDS)) >= 64


def test_content_of_a_hash_never_changes() -> None:
    assert prompt_text(PromptSpan(8, (42,))) == prompt_text(PromptSpan(8, (42,)))
    assert prompt_token_ids(PromptSpan(6, (42,)), range(1000)) == [89, 773, 654, 438, 433, 858]
