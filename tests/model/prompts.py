"""Fixed prompts of 3 to 3,000 tokens for comparing generation with transformers.

Chosen so that the two best logits are far apart at every step (test_greedy.py checks it): comparison is then exact, token for token.
"""

from __future__ import annotations

from observability.engine.model.tokenizer import Tokenizer

#: Prompt lengths in tokens; multiples of the block size, and one more or less, among them.
PROMPTS = (3, 5, 9, 15, 16, 17, 31, 32, 33, 48, 64, 65, 100, 129, 160, 200, 257, 300, 400, 511, 700, 1000, 3000)

_OPENINGS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Water boils at 100 degrees Celsius, and it freezes at",
    "The three primary colours are red, blue, and",
    "In 1969, Neil Armstrong became the first person to walk on the",
)
_BODY = (
    "A cache keeps what was computed once, so that it need not be computed again. ",
    "Each block holds sixteen tokens, and a table says which blocks belong to which sequence. ",
    "When memory runs out, the request that came last gives up its blocks and waits. ",
    "The quick brown fox jumps over the lazy dog, and the dog does not mind. ",
    "Rivers carry water from the mountains to the sea, and clouds carry it back again. ",
    "She opened the letter slowly, read it twice, and put it back into the drawer. ",
    "for i in range(10):\n    print(i * i)\n",
    "Le chat est assis sur le tapis, et il regarde par la fenêtre. ",
)


def new_tokens(length: int) -> int:
    """How many tokens to generate: enough to cross a block, few where the prompt is long."""
    return 12 if length <= 65 else 6 if length <= 511 else 3


def prompt_ids(tokenizer: Tokenizer, length: int) -> list[int]:
    """`length` tokens: an opening by itself, or a text that ends with one. Prompts past 600 tokens begin alike."""
    which = PROMPTS.index(length)
    ending = tokenizer.encode("\n\n" + _OPENINGS[which % len(_OPENINGS)])
    if length <= len(ending) - 2:
        return ending[1 : length + 1]
    shift = 0 if length > 600 else which
    body: list[int] = []
    line = 0
    while len(body) < length:
        body += tokenizer.encode(f"{line + 1}. " + _BODY[(line * 3 + shift) % len(_BODY)])
        line += 1
    return body[: length - len(ending)] + ending if length > len(ending) else body[:length]
