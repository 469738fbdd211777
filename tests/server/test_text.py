"""Detokenizer and stop strings: however the tokens or the text are split, the same text comes out."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from observability.engine.generation import Choice
from observability.engine.model.tokenizer import byte_tokenizer
from observability.engine.streaming import Detokenizer, StopStrings, TokenEvent, TokenInbox, Wakeups
from observability.engine.types import Request, SamplingParams

BYTES = byte_tokenizer()
SPECIAL = 257  # <|im_start|>, which decodes to nothing
#: Every byte: also those that never occur in UTF-8 (0xC0, 0xC1, 0xF5 and above).
ANY_TOKEN = st.integers(0, 258)
TEXT_TOKENS = st.text(alphabet="aé€😀ß\n\ufffd", max_size=30).map(BYTES.encode)
FRAGMENTS = st.sampled_from(
    [BYTES.encode("€")[:1], BYTES.encode("€")[:2], BYTES.encode("😀")[:3], BYTES.encode("é")[1:], [SPECIAL]]
)
TOKENS = st.lists(st.one_of(TEXT_TOKENS, FRAGMENTS, st.lists(ANY_TOKEN, max_size=50)), max_size=6).map(
    lambda parts: [token for part in parts for token in part]
)


def stream(decode: object, tokens: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(decode)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]


@settings(max_examples=300, deadline=None)
@given(TOKENS)
def test_pieces_joined_are_the_text_of_all_tokens(tokens: list[int]) -> None:
    assert "".join(stream(BYTES.decode, tokens)) == BYTES.decode(tokens)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=40))
def test_no_piece_holds_half_a_character(text: str) -> None:
    pieces = stream(BYTES.decode, BYTES.encode(text))
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_an_unfinished_character_at_the_end_shows_as_replacement() -> None:
    assert "".join(stream(BYTES.decode, BYTES.encode("a€")[:-1])) == "a\ufffd"


def test_a_long_undecodable_run_stays_cheap_and_loses_nothing() -> None:
    calls: list[int] = []

    def decode(ids: list[int]) -> str:
        calls.append(len(ids))
        return BYTES.decode(ids)

    tokens = [BYTES.encode("€")[1]] * 3000 + BYTES.encode("end")
    assert "".join(stream(decode, tokens)) == BYTES.decode(tokens)
    assert max(calls) < 100


def test_spaces_of_a_sentencepiece_decoder_survive() -> None:
    """Its decoder drops the space before the first token of a text, so each window needs the token before it."""
    words = ["▁a", "▁b", "<0xE2>", "<0x82>", "<0xAC>", "<s>", "▁c", "d"]
    backend = Backend(models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>"])
    tokens = [0, 1, 2, 3, 4, 5, 6, 5, 7, 1]
    assert backend.decode(tokens) == "a b€ cd b"
    assert "".join(stream(backend.decode, tokens)) == "a b€ cd b"


# -- stop strings ---------------------------------------------------------------------------------------------------


def cut_at_stop(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The meaning, character by character: the stop string that is complete first ends the text; the longest of several."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.text(alphabet="abc", max_size=4), max_size=12),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4),
)
def test_any_split_gives_the_text_before_the_first_stop_string(pieces: list[str], stops: list[str]) -> None:
    holder = StopStrings(stops)
    out = [holder.push(piece) for piece in pieces]
    out.append(holder.flush() if holder.matched is None else "")
    assert ("".join(out), holder.matched is not None) == cut_at_stop("".join(pieces), stops)


@settings(max_examples=200, deadline=None)
@given(
    st.text(alphabet="ab", max_size=12),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_nothing_of_a_stop_string_is_ever_sent_and_no_more_than_needed_is_held(text: str, stops: list[str]) -> None:
    holder, sent = StopStrings(stops), ""
    for end, character in enumerate(text, 1):
        sent += holder.push(character)
        if holder.matched is not None:
            return
        held = text[len(sent) : end]
        assert sent + held == text[:end]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_the_token_that_ends_the_sequence_is_counted_and_is_no_text_even_if_it_has_one() -> None:
    a, b = BYTES.encode("ab")
    choice = Choice(0, Request("r", [1], SamplingParams()), BYTES.decode)
    assert choice.advance(TokenEvent(0, a, None)).text == "a"
    last = choice.advance(TokenEvent(0, b, "stop"))
    assert (last.text, last.finish_reason, choice.text, choice.tokens) == ("", "stop", "a", 2)


# -- hand-over ------------------------------------------------------------------------------------------------------


def test_inbox_delivers_every_token_once_in_order_with_few_wakeups() -> None:
    async def run() -> tuple[list[int], int]:
        loop = asyncio.get_running_loop()
        calls = 0
        real = loop.call_soon_threadsafe

        def counting(callback: object, *args: object, **kwargs: object) -> object:
            nonlocal calls
            calls += 1
            return real(callback, *args, **kwargs)

        loop.call_soon_threadsafe = counting
        wakeups = Wakeups(loop)
        inboxes = [TokenInbox(wakeups) for _ in range(8)]

        def engine() -> None:
            for step in range(200):
                for inbox in inboxes:
                    inbox.put(TokenEvent(0, step, None))
                time.sleep(0.0001)
            for inbox in inboxes:
                inbox.put(TokenEvent(0, None, "length"))

        async def read(inbox: TokenInbox) -> list[int]:
            got: list[int] = []
            while True:
                for event in await inbox.take():
                    if event.outcome is not None:
                        return got
                    assert event.token is not None
                    got.append(event.token)

        thread = threading.Thread(target=engine)
        thread.start()
        results = await asyncio.gather(*(read(inbox) for inbox in inboxes))
        thread.join()
        assert all(result == results[0] for result in results)
        return results[0], calls

    got, calls = asyncio.run(asyncio.wait_for(run(), 20))
    assert got == list(range(200))
    assert calls < 8 * 201  # one a step where the loop keeps up, fewer where it does not


def test_putting_into_a_closed_loop_is_harmless() -> None:
    loop = asyncio.new_event_loop()
    inbox = TokenInbox(Wakeups(loop))
    loop.close()
    inbox.put(TokenEvent(0, 1, None))


@pytest.mark.parametrize("text", ["", "plain", "😀"])
def test_no_stop_strings_hold_nothing(text: str) -> None:
    assert StopStrings(()).push(text) == text
