"""Runs step plans on a real model. One step: rows of all chunks and decodes in one matrix -> Llama.forward -> sampled tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from observability.catalog import COMPONENTS
from observability.engine.clock import MonotonicClock
from observability.engine.executor.kv_cache import Batch, FloatKV, Int8KV, Span
from observability.engine.executor.sampling import sample
from observability.engine.executor.timing import Part, StepTimer
from observability.engine.model.loading import LoadedModel
from observability.engine.types import Clock, EngineConfig, PromptSpan, Request, StepPlan, StepResult
from observability.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from observability.telemetry.recorder import Telemetry

_PREFILL, _DECODE = COMPONENTS.index("forward_prefill"), COMPONENTS.index("forward_decode")
_DEQUANT, _SAMPLE = COMPONENTS.index("dequant"), COMPONENTS.index("sample")


class TorchExecutor:
    """Executor (see engine/types.py) of a loaded model, with its KV pool. Raises ConfigError when the settings do not fit the model.

    Time goes to telemetry's components like this. Attention of chunks is forward_prefill, of decodes forward_decode. What treats
    all rows alike (projections, norms, storing keys and values) is split by the share of tokens, logits by the share of sampled rows.
    Reading quantized blocks is dequant; quantizing them belongs to the phase that filled them. On a GPU the shares come from
    events and divide the step's time on the clock.

    Sampling is reproducible by seed as far as logits are: another batch can change them in the last bit (matrix products sum in
    another order), which matters only for tokens of practically equal probability.
    """

    def __init__(
        self, loaded: LoadedModel, config: EngineConfig, telemetry: Telemetry | None, *, clock: Clock | None = None
    ) -> None:
        if config.num_blocks is None:
            raise ConfigError("A real model needs a bounded KV pool.", next_step="Set num_blocks.")
        if config.max_model_len > loaded.config.max_position:
            raise ConfigError(
                f"max_model_len = {config.max_model_len} is longer than the {loaded.config.max_position} tokens of context that "
                f"model {loaded.name} was trained for.",
                next_step=f"Set max_model_len <= {loaded.config.max_position}.",
            )
        self.clock: Clock = clock or MonotonicClock()
        self.device = str(loaded.model.device)
        self.vocab_size = loaded.config.vocab_size
        self._model, self._config, self._telemetry = loaded.model, config, telemetry
        self._timer = StepTimer(loaded.model.device)
        kind = Int8KV if config.kv_dtype == "int8" else FloatKV
        try:
            self.kv: FloatKV | Int8KV = kind(
                loaded.config, config, loaded.model.device, loaded.model.dtype, self._timer
            )
        except RuntimeError as error:  # torch's out of memory, on any device
            raise ConfigError(
                f"A KV pool of {config.num_blocks} blocks cannot be allocated on {self.device}: {str(error).splitlines()[0]}",
                next_step="Lower num_blocks, or use kv_dtype int8.",
            ) from error
        self.kv_bytes_per_block = self.kv.bytes_per_block
        self._model.prepare(config.max_model_len)

    @torch.inference_mode()
    def execute(self, plan: StepPlan, until: float | None = None) -> StepResult:
        """Runs the plan once; `until` and repeats are for virtual time."""
        started = self.clock.now()
        self._timer.begin()
        batch, tokens, positions, rows, sampled = self._assemble(plan)
        self.kv.begin(batch)
        hidden = self._model.forward(self._tensor(tokens), self._tensor(positions), self.kv.attend)
        if sampled:
            hidden = hidden[self._tensor(rows)]
            self._timer.lap(Part.LINEAR)
            logits = self._model.logits(hidden)
            self._timer.lap(Part.HEAD)
        else:
            self._timer.lap(Part.LINEAR)
        shares = self._timer.shares()
        forwarded = self.clock.now()
        ids = sample(logits, sampled, self._config.seed) if sampled else []
        ended = self.clock.now()
        if self._telemetry is not None:
            self._lap(self._telemetry, plan, shares, started, forwarded)
            if sampled:
                self._telemetry.lap_to(_SAMPLE, ended)
            self.kv.report(self._telemetry.quant_error)
        return StepResult(ends=np.array([ended]), tokens=ids)

    @torch.inference_mode()
    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies KV content from block to block (source, target); all sources are read before any target is written."""
        if pairs:
            sources, targets = zip(*pairs, strict=True)
            self.kv.copy_blocks(self._tensor(np.array(sources)), self._tensor(np.array(targets)))

    def release(self, request: Request) -> None:
        """`request` left the running set; what is kept of it beside its blocks is given up."""
        self.kv.release(request)

    # -- plan to rows ----------------------------------------------------------------------------------------------------

    def _assemble(self, plan: StepPlan) -> tuple[Batch, np.ndarray, np.ndarray, np.ndarray, list[Request]]:
        """(batch, token ids [rows], positions [rows], rows to sample from, their requests in the order StepResult.tokens asks)."""
        ids: list[np.ndarray] = []
        chunks: list[Span] = []
        row = 0
        for chunk in plan.prefill:
            span = self._span(chunk.request, chunk.start, chunk.tokens, row)
            chunks.append(span)
            ids.append(self._ids(chunk.request, span.start, span.context))
            row += chunk.tokens
        first = row
        order = sorted(range(len(plan.decode)), key=lambda i: plan.decode[i].num_computed)
        decodes = []
        for i in order:
            request = plan.decode[i]
            decodes.append(self._span(request, request.num_computed, 1, row))
            ids.append(self._ids(request, request.num_computed, request.num_computed + 1))
            row += 1
        positions = np.concatenate([np.arange(span.start, span.context) for span in (*chunks, *decodes)])
        last = [span.row + span.tokens - 1 for span, chunk in zip(chunks, plan.prefill, strict=True) if chunk.samples]
        decode_rows = np.empty(len(order), np.int64)
        decode_rows[order] = np.arange(first, row)
        sampled = [chunk.request for chunk in plan.prefill if chunk.samples] + plan.decode
        return (
            Batch(chunks, decodes),
            np.concatenate(ids),
            positions,
            np.concatenate([np.array(last, np.int64), decode_rows]),
            sampled,
        )

    def _span(self, request: Request, start: int, tokens: int, row: int) -> Span:
        assert request.table is not None
        needed = -(-(start + tokens) // self._config.block_size)
        return Span(request, start, tokens, row, np.fromiter(request.table.blocks[:needed], np.int64, needed))

    def _ids(self, request: Request, start: int, end: int) -> np.ndarray:
        """Token ids at positions [start, end) of prompt and output."""
        if isinstance(request.prompt, PromptSpan):
            raise RequestError(
                f"Request {request.request_id} has a prompt known by hashes only, which a real model cannot read.",
                param="prompt",
                next_step="Give token ids, or run it in virtual time.",
            )
        length = len(request.prompt)
        ids = np.array(
            [*request.prompt[start : min(end, length)], *request.output[max(start - length, 0) : max(end - length, 0)]],
            np.int64,
        )
        if ids.size and not (ids.min() >= 0 and ids.max() < self.vocab_size):
            raise RequestError(
                f"Request {request.request_id} holds a token id outside 0..{self.vocab_size - 1}.",
                param="prompt",
                next_step="Encode the prompt with this model's tokenizer.",
            )
        return ids

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64, copy=False)).to(self._model.device)

    # -- time ------------------------------------------------------------------------------------------------------------

    @staticmethod
    def _lap(telemetry: Telemetry, plan: StepPlan, shares: list[float], started: float, forwarded: float) -> None:
        prefill_tokens = sum(chunk.tokens for chunk in plan.prefill)
        tokens = prefill_tokens + len(plan.decode)
        prefill_samples = sum(chunk.samples for chunk in plan.prefill)
        samples = prefill_samples + len(plan.decode)
        of_head = prefill_samples / samples if samples else 0.0
        prefill = shares[Part.PREFILL] + shares[Part.LINEAR] * prefill_tokens / tokens + shares[Part.HEAD] * of_head
        parts = {_PREFILL: prefill, _DEQUANT: shares[Part.DEQUANT], _DECODE: 1.0 - prefill - shares[Part.DEQUANT]}
        now = started
        for component, share in parts.items():
            if share > 1e-12:
                now = min(forwarded, now + share * (forwarded - started))
                telemetry.lap_to(component, now)
