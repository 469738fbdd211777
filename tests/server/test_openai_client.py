"""The `openai` package against a real server: what its users rely on."""

from __future__ import annotations

import asyncio
import json
import urllib.request
import uuid

import openai
import pytest

from observability.engine.model.loading import LoadedModel, load_model
from observability.engine.types import Request, SamplingParams
from tests.conftest import require, wait_for
from tests.server.harness import RunningServer, serving

LONG = "The prefix cache keeps blocks of sixteen tokens, and this prompt fills several of them. " * 4


def greedy(server: RunningServer, prompt: list[int], tokens: int) -> list[int]:
    """What the engine itself generates, without HTTP: the truth that texts are compared with."""
    request = Request(uuid.uuid4().hex, prompt, SamplingParams(max_tokens=tokens))
    done: list[str] = []
    request.on_token = lambda _request, _token, outcome: done.append(outcome) if outcome else None
    server.engine.add(request)
    wait_for(lambda: done, 10.0, "truth")
    return request.output


def test_completion_returns_the_text_of_the_generated_tokens(server: RunningServer) -> None:
    tokenizer = server.loaded.tokenizer
    answer = server.client().completions.create(model="tiny", prompt="Once upon", max_tokens=24, temperature=0)
    expected = greedy(server, tokenizer.encode("Once upon"), 24)
    assert answer.choices[0].text == tokenizer.decode(expected)
    assert answer.choices[0].finish_reason == "length"
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.model == "tiny"
    assert answer.system_fingerprint is not None
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (9, 24, 33)


def test_chat_follows_the_template(server: RunningServer) -> None:
    answer = server.client().chat.completions.create(
        model="tiny",
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "He"}, {"type": "text", "text": "llo"}]},
        ],
        max_completion_tokens=12,
        temperature=0,
    )
    prompt = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    tokens = server.loaded.tokenizer.encode(prompt)
    assert answer.choices[0].message.content == server.loaded.tokenizer.decode(greedy(server, tokens, 12))
    assert answer.choices[0].message.role == "assistant"
    assert answer.id.startswith("chatcmpl-")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(tokens)


def test_chat_without_a_limit_may_use_the_whole_context(tiny: LoadedModel) -> None:
    with serving(tiny, max_model_len=96, num_blocks=16) as server:
        answer = server.client().chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "x"}], temperature=0, extra_body={"ignore_eos": True}
        )
        assert answer.usage is not None
        assert answer.usage.total_tokens == 96
        assert answer.choices[0].finish_reason == "length"
        server.check_books()


def test_streamed_pieces_are_the_same_text_one_event_a_token(server: RunningServer) -> None:
    client = server.client()
    whole = client.completions.create(model="tiny", prompt="abc", max_tokens=40, temperature=0).choices[0].text
    chunks = list(
        client.completions.create(
            model="tiny",
            prompt="abc",
            max_tokens=40,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    *tokens, last = chunks
    assert "".join(chunk.choices[0].text for chunk in tokens) == whole
    assert len(tokens) == 40
    assert [chunk.choices[0].finish_reason for chunk in tokens] == [None] * 39 + ["length"]
    assert all(chunk.usage is None for chunk in tokens)
    assert last.choices == []
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (3, 40)
    assert len({chunk.id for chunk in chunks}) == 1


def test_streamed_chat_names_the_role_once_and_no_usage_unless_asked(server: RunningServer) -> None:
    chunks = list(
        server.client().chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=8, temperature=0, stream=True
        )
    )
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant"] + [None] * 7
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all("usage" not in chunk.to_dict() for chunk in chunks)


def test_usage_counts_cached_tokens_of_a_repeated_prompt(server: RunningServer) -> None:
    client = server.client()
    ids = server.loaded.tokenizer.encode(LONG)
    first, second = (
        client.completions.create(model="tiny", prompt=LONG, max_tokens=4, temperature=0) for _ in range(2)
    )
    assert first.choices[0].text == second.choices[0].text
    assert first.usage is not None
    assert second.usage is not None
    assert first.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details is not None
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    # whole blocks, with at least one token left to compute
    assert second.usage.prompt_tokens_details.cached_tokens == (len(ids) - 1) // 16 * 16


def test_prompt_as_token_ids_or_as_lists(server: RunningServer) -> None:
    client, encode = server.client(), server.loaded.tokenizer.encode

    def texts(prompt: object) -> list[str]:
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=10, temperature=0)
        assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
        assert answer.usage.completion_tokens == 10 * len(answer.choices)
        return [choice.text for choice in answer.choices]

    one, two = texts("first"), texts("the second")
    assert texts(encode("first")) == one
    assert texts(["first", "the second"]) == one + two
    assert texts([encode("the second"), encode("first")]) == two + one


def test_streamed_choices_keep_their_index(server: RunningServer) -> None:
    client = server.client()
    prompts = ["alpha", "beta", "gamma"]
    whole = [
        client.completions.create(model="tiny", prompt=p, max_tokens=12, temperature=0).choices[0].text for p in prompts
    ]
    got = ["", "", ""]
    for chunk in client.completions.create(model="tiny", prompt=prompts, max_tokens=12, temperature=0, stream=True):
        got[chunk.choices[0].index] += chunk.choices[0].text
    assert got == whole


def test_stop_string_across_token_borders_is_cut_and_not_returned(server: RunningServer) -> None:
    client = server.client()
    whole = client.completions.create(model="tiny", prompt="stop here", max_tokens=60, temperature=0).choices[0].text
    stop = whole[10:13]  # three characters, one token each
    expected = whole[: whole.index(stop)]
    answer = client.completions.create(
        model="tiny", prompt="stop here", max_tokens=60, temperature=0, stop=[stop, "zzzzz"]
    )
    assert answer.choices[0].text == expected
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens < 60
    chunks = list(
        client.completions.create(
            model="tiny", prompt="stop here", max_tokens=60, temperature=0, stop=stop, stream=True
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_matched_stop_string_ends_the_request_in_the_engine(server: RunningServer) -> None:
    client = server.client()
    sampling = {"model": "tiny", "prompt": "stop the engine", "temperature": 0, "extra_body": {"ignore_eos": True}}
    stop = client.completions.create(max_tokens=20, **sampling).choices[0].text[8:10]
    answer = client.completions.create(max_tokens=3000, stop=stop, **sampling)
    assert answer.choices[0].finish_reason == "stop"
    server.wait_idle()
    record = next(record for record in server.records if record.request_id == answer.id)
    assert record.outcome == "stop"
    assert answer.usage.completion_tokens <= record.generated_tokens < 3000


def test_text_held_back_for_a_stop_string_comes_at_the_end(server: RunningServer) -> None:
    client = server.client()
    whole = client.completions.create(model="tiny", prompt="held", max_tokens=20, temperature=0).choices[0].text
    answer = client.completions.create(
        model="tiny", prompt="held", max_tokens=20, temperature=0, stop=whole[-2:] + "never"
    )
    assert answer.choices[0].text == whole
    assert answer.choices[0].finish_reason == "length"


def test_end_of_sequence_is_no_text(server: RunningServer) -> None:
    """Sampled at a high temperature, some of 24 answers of the tiny model meet an end token."""
    client = server.client()
    prompts = [f"e{i}" for i in range(24)]
    sampling = {"model": "tiny", "max_tokens": 64, "temperature": 2.0, "seed": 1}
    answer = client.completions.create(prompt=prompts, **sampling)
    ended = [choice for choice in answer.choices if choice.finish_reason == "stop"]
    assert ended
    assert not any("<|im_end|>" in choice.text for choice in answer.choices)
    prompt = prompts[ended[0].index]
    alone = client.completions.create(prompt=prompt, **sampling)
    assert alone.choices[0].finish_reason == "stop"
    assert 0 < alone.usage.completion_tokens < 64
    more = client.completions.create(prompt=prompt, **sampling, extra_body={"ignore_eos": True})
    assert more.usage.completion_tokens == 64
    assert more.choices[0].text.startswith(alone.choices[0].text.rstrip("\ufffd"))


def test_same_seed_same_text_other_seed_other_text(server: RunningServer) -> None:
    client = server.client()

    def sample(seed: int) -> str:
        return (
            client.completions.create(model="tiny", prompt="dice", max_tokens=32, temperature=1, seed=seed)
            .choices[0]
            .text
        )

    assert sample(7) == sample(7)
    assert len({sample(seed) for seed in range(4)}) > 1


def test_models_and_one_model(server: RunningServer) -> None:
    client = server.client()
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "kvscope"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_sixteen_streams_at_once_lose_and_mix_nothing(server: RunningServer) -> None:
    prompts = [f"{i} stream number {i}" for i in range(16)]
    client = server.client()
    truth = [
        client.completions.create(model="tiny", prompt=p, max_tokens=48, temperature=0).choices[0].text for p in prompts
    ]

    async def one(client: openai.AsyncOpenAI, prompt: str) -> tuple[str, int, int]:
        text, events, tokens = "", 0, 0
        async for chunk in await client.completions.create(
            model="tiny",
            prompt=prompt,
            max_tokens=48,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        ):
            if chunk.usage is not None:
                tokens = chunk.usage.completion_tokens
            else:
                text, events = text + chunk.choices[0].text, events + 1
        return text, events, tokens

    async def run() -> list[tuple[str, int, int]]:
        async with server.async_client() as client:
            return await asyncio.gather(*(one(client, prompt) for prompt in prompts))

    got = asyncio.run(run())
    assert [text for text, _, _ in got] == truth
    assert all(events == tokens for _, events, tokens in got)


def test_request_class_by_header_tier_and_priority(server: RunningServer) -> None:
    server.wait_idle()
    seen = len(server.records)
    client = server.client()

    def ask(**kwargs: object) -> None:
        client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "c"}],
            max_tokens=1,
            **kwargs,
        )

    ask(extra_headers={"x-kvscope-class": "interactive"}, service_tier="flex")
    ask(service_tier="priority")
    ask(service_tier="flex")
    ask(service_tier="auto")
    ask(extra_body={"priority": -1})
    ask(extra_body={"priority": 5})
    ask(extra_headers={"x-kvscope-class": "platinum"})
    ask()
    server.wait_idle()
    assert [record.request_class for record in server.records[seen:]] == [
        "interactive", "interactive", "long_context", "standard", "interactive", "long_context", "standard", "standard",
    ]  # fmt: skip


def test_health_and_metrics_answer_beside_the_api(server: RunningServer) -> None:
    server.client().completions.create(model="tiny", prompt="m", max_tokens=2)
    server.wait_idle()
    with urllib.request.urlopen(server.url + "/health", timeout=5) as answer:
        health = json.load(answer)
    assert health["status"] == "ok"
    assert (health["running"], health["waiting"]) == (0, 0)
    with urllib.request.urlopen(server.url + "/metrics", timeout=5) as answer:
        text = answer.read().decode()
    assert 'kvscope_requests_received_total{model="tiny",class="standard"} ' in text


@pytest.mark.slow
def test_smollm2_answers_a_question_in_a_chat() -> None:
    from observability.engine.model.fetch import FETCHABLE, model_path

    require(model_path(FETCHABLE["smollm2-135m"]).is_file(), "SmolLM2 is not fetched: run `kvscope model get`")
    with serving(load_model("smollm2-135m"), num_blocks=64, max_model_len=512) as server:
        client = server.client(timeout=120)
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        answer = client.chat.completions.create(model="smollm2-135m", messages=messages, max_tokens=24, temperature=0)
        assert "Paris" in answer.choices[0].message.content
        pieces = client.chat.completions.create(
            model="smollm2-135m", messages=messages, max_tokens=24, temperature=0, stream=True
        )
        assert "".join(chunk.choices[0].delta.content for chunk in pieces) == answer.choices[0].message.content
        server.check_books()
