"""Session fixtures: the default model loaded once, and transformers on the same weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from observability.engine.model.fetch import fetch_model
from observability.engine.model.loading import LoadedModel, load_model
from observability.errors import ModelError
from tests.conftest import require
from tests.model.prompts import PROMPTS, new_tokens, prompt_ids


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    try:
        fetch_model()
    except ModelError as error:
        require(False, str(error))
    return load_model("smollm2-135m")


@pytest.fixture(scope="session")
def tiny() -> LoadedModel:
    return load_model("tiny")


@pytest.fixture(scope="session")
def transformers_model(smollm2: LoadedModel) -> Any:
    """transformers' own reading of the same GGUF file, float32."""
    from transformers import AutoModelForCausalLM

    path = fetch_model()
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


@dataclass(frozen=True)
class Greedy:
    """What transformers generates greedily after a prompt. `margin` is the smallest gap of its two best logits on the way."""

    prompt: list[int]
    tokens: list[int]
    max_tokens: int
    margin: float


@pytest.fixture(scope="session")
def reference(smollm2: LoadedModel, transformers_model: Any) -> list[Greedy]:
    """transformers' greedy generation of every prompt, one at a time."""
    found = []
    for length in PROMPTS:
        prompt = prompt_ids(smollm2.tokenizer, length)
        with torch.inference_mode():
            out = transformers_model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, length, dtype=torch.long),
                max_new_tokens=new_tokens(length),
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
            )
        gaps = [float(best[0, 0] - best[0, 1]) for best in (step.topk(2).values for step in out.logits)]
        found.append(Greedy(prompt, out.sequences[0, length:].tolist(), new_tokens(length), min(gaps)))
    return found
