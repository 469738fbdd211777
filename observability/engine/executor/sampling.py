"""Picks the next token of each row: greedy, or temperature and top-p with one random number a token.

The number depends on the request's seed and the token's place alone, so that a seeded request draws the same numbers whatever
else is in the batch and after a preemption.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from observability.engine.types import Request
from observability.errors import ModelError

#: Tokens looked at first for top-p; the few rows whose nucleus is larger are sorted whole.
_CANDIDATES = 512


def sample(logits: Tensor, requests: Sequence[Request], engine_seed: int) -> list[int]:
    """One token id for each row of `logits`, float32 [rows, vocab_size].

    temperature 0 takes the largest logit, the lowest id in a tie. Otherwise ids come from softmax(logits / temperature), cut to the
    smallest set of the likeliest tokens that holds at least top_p. No token is left out for another reason.
    Raises ModelError when a row is not finite.
    """
    best, greedy = logits.max(-1)
    if not bool(torch.isfinite(best).all()):
        row = int(torch.isfinite(best).logical_not().nonzero()[0])
        raise ModelError(
            f"The model gave logits that are not finite for request {requests[row].request_id}.",
            next_step="Check the weights, or use float32.",
        )
    tokens: list[int] = greedy.tolist()
    rows = [i for i, r in enumerate(requests) if r.params.temperature > 0]
    if rows:
        params = [requests[i].params for i in rows]
        temperatures = torch.tensor([p.temperature for p in params], device=logits.device, dtype=torch.float64)
        # the largest logit is taken off first: a tiny temperature must not overflow
        scaled = (logits[rows].double() - best[rows, None].double()) / temperatures[:, None]
        uniforms = torch.tensor(
            [_uniform(requests[i], engine_seed) for i in rows], device=logits.device, dtype=torch.float64
        )
        top_p = torch.tensor([p.top_p for p in params], device=logits.device, dtype=torch.float64)
        for i, token in zip(rows, _draw(scaled.softmax(-1), top_p, uniforms), strict=True):
            tokens[i] = token
    return tokens


def _draw(probabilities: Tensor, top_p: Tensor, uniforms: Tensor) -> list[int]:
    """A token a row by inversion of the distribution's cumulative sum, tokens from the likeliest down where top_p cuts."""
    tokens = torch.empty(len(top_p), dtype=torch.int64, device=probabilities.device)
    whole = (top_p >= 1.0).nonzero().squeeze(-1)
    cut = (top_p < 1.0).nonzero().squeeze(-1)
    if len(whole):
        tokens[whole] = _invert(probabilities[whole].cumsum(-1), uniforms[whole])
    candidates = min(_CANDIDATES, probabilities.shape[-1])
    while len(cut):
        likeliest, ids = probabilities[cut].topk(candidates, dim=-1)
        sums = likeliest.cumsum(-1)
        # a token is in the nucleus while the mass before it is below top_p
        inside = (sums - likeliest) < top_p[cut, None]
        enough = (sums[:, -1] >= top_p[cut]) | (candidates == probabilities.shape[-1])
        sums = torch.where(inside, sums, 0.0).cummax(-1).values
        chosen = ids.gather(-1, _invert(sums, uniforms[cut])[:, None]).squeeze(-1)
        tokens[cut[enough]] = chosen[enough]
        cut, candidates = cut[enough.logical_not()], probabilities.shape[-1]
    return tokens.tolist()


def _invert(sums: Tensor, uniforms: Tensor) -> Tensor:
    """Index of the first cumulative sum above uniform x total, [rows]. Never an entry of no mass."""
    return torch.searchsorted(sums, (uniforms * sums[:, -1])[:, None], right=True).squeeze(-1)


def _uniform(request: Request, engine_seed: int) -> float:
    """The request's random number in [0, 1) for its next token; an unseeded request's depends on the engine's seed and its id."""
    seed = request.params.seed
    source = f"seed {seed}" if seed is not None else f"engine {engine_seed} request {request.request_id}"
    digest = hashlib.blake2b(f"{source} token {request.num_generated}".encode(), digest_size=8).digest()
    return float(np.frombuffer(digest, "<u8")[0] >> np.uint64(11)) * 2.0**-53
