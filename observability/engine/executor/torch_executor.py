"""Runs step plans on a real model. One step: rows of all chunks and decodes in one matrix -> Llama.forward -> sampled tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from observability.catalog import COMPONENTS
from observability.engine.clock import MonotonicClock
from observability.engine.executor.block_moves import BlockMoves
from observability.engine.executor.comparison import Twin, divergence
from observability.engine.executor.compressed_kv import CompressedKV
from observability.engine.executor.host_blocks import Transfer
from observability.engine.executor.kv_cache import Batch, FloatKV, Int8KV, Span
from observability.engine.executor.latent_kv import LatentKV
from observability.engine.executor.rates import Rate
from observability.engine.executor.sampling import sample
from observability.engine.executor.timing import Part, StepTimer
from observability.engine.model.latent import LatentDecoder
from observability.engine.model.loading import LoadedModel
from observability.engine.types import Clock, EngineConfig, Payload, PromptSpan, Request, StepPlan, StepResult
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
        model = loaded.model
        try:
            self.kv: FloatKV | Int8KV | LatentKV
            if isinstance(model, LatentDecoder):
                self.kv = LatentKV(model, config, self._timer)
            else:
                kind = (
                    Int8KV if config.kv_dtype == "int8" else CompressedKV if config.num_compressed_blocks else FloatKV
                )
                self.kv = kind(model.config, config, model.device, model.dtype, self._timer)
            sets = self.kv.block_sets
            self._moves = BlockMoves(sets, config.num_host_blocks)
        except RuntimeError as error:  # torch's out of memory, on any device
            raise ConfigError(
                f"A KV pool of {config.num_blocks} blocks cannot be allocated on {self.device}: {str(error).splitlines()[0]}",
                next_step="Lower num_blocks, num_compressed_blocks, num_host_blocks or quant_shadow_tokens, or use kv_dtype int8.",
            ) from error
        self.kv_bytes_per_block = sets[0].bytes_per_block
        self.kv_bytes_per_compressed_block = sets[-1].bytes_per_block if config.num_compressed_blocks else 0
        self.kv_fixed_bytes_per_sequence = self.kv.fixed_bytes_per_sequence
        self._prefilling = Rate(torch.device("cpu"))  # a token; from shares of the step's time on the clock
        self._model.prepare(config.max_model_len)
        self._overlap = self._moves.overlap
        if self._overlap is not None and telemetry is not None:
            telemetry.mechanisms.expect(copies=True)

    @torch.inference_mode()
    def execute(self, plan: StepPlan, until: float | None = None) -> StepResult:
        """Runs the plan once; `until` and repeats are for virtual time."""
        started = self.clock.now()
        if self._overlap is not None:
            self._overlap.begin_step()
        self._timer.begin()
        batch, tokens, positions, rows, sampled, twin = self._assemble(plan)
        self.kv.begin(batch)
        hidden = self._model.forward(self._tensor(tokens), self._tensor(positions), self.kv.attend)
        if sampled:
            hidden = hidden[self._tensor(rows)]
            self._timer.lap(Part.LINEAR)
            logits = self._model.logits(hidden)
            if twin is not None:
                logits = self._compare(twin, sampled, logits)
            self._timer.lap(Part.HEAD)
        else:
            self._timer.lap(Part.LINEAR)
        shares = self._timer.shares()
        forwarded = self.clock.now()
        ids = sample(logits, sampled, self._config.seed) if sampled else []
        ended = self.clock.now()
        prefill = self._prefill_share(plan, shares)
        if plan.prefill:
            self._prefilling.add(sum(chunk.tokens for chunk in plan.prefill), prefill * (forwarded - started))
        if self._telemetry is not None:
            self._lap(self._telemetry, prefill, shares[Part.DEQUANT], started, forwarded)
            if sampled:
                self._telemetry.lap_to(_SAMPLE, ended)
        if self._overlap is not None:
            self._overlap.end_step()
            if self._telemetry is not None:
                self._telemetry.mechanisms.copied(*self._overlap.take())
        self._report_errors()
        return StepResult(ends=np.array([ended]), tokens=ids)

    def release(self, request: Request) -> None:
        """`request` left the running set; what is kept of it beside its blocks is given up."""
        self.kv.release(request)

    # -- blocks: see types.Executor -----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies KV content from block to block (source, target) of one kind; all sources are read before any target is written."""
        self._moves.copy(pairs)

    @torch.inference_mode()
    def compress_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Quantizes full exact blocks into compressed ones (source, target) and reports the error of the sampled ones."""
        if not isinstance(self.kv, CompressedKV):
            raise RuntimeError("there are no compressed blocks: num_compressed_blocks is 0")
        if pairs:
            sources, targets = zip(*pairs, strict=True)
            self.kv.compress_blocks(sources, targets)
            self._report_errors()

    @torch.inference_mode()
    def offload_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies device blocks to host slots (block, slot); returns when the blocks may be written again."""
        self._moves.offload(pairs)

    @torch.inference_mode()
    def load_blocks(self, pairs: Sequence[tuple[int, int]]) -> Transfer:
        """Starts to copy host slots to device blocks (slot, block). Raises ValueError when a slot holds no block of that kind."""
        return self._moves.load(pairs)

    @torch.inference_mode()
    def export_blocks(self, blocks: Sequence[int]) -> Payload:
        """Content of blocks of one kind, bit-exact: floats as they are (bfloat16 as its bits in uint16), quantized integers as int8."""
        return self._moves.export_payload(blocks)

    @torch.inference_mode()
    def import_blocks(self, blocks: Sequence[int], payload: Payload) -> None:
        """Raises ValueError, with nothing changed, when the payload does not fit."""
        self._moves.import_payload(blocks, payload)

    def recompute_seconds(self, tokens: int) -> float:
        """At the rate of late prefill steps, whatever their length; inf before the first one."""
        return self._prefilling.seconds(tokens)

    def transfer_seconds(self, blocks: int) -> float:
        """At the rate of late moves, or of a first try; inf without a host tier."""
        return self._moves.transfer_seconds(blocks)

    def copy_seconds(self, blocks: int) -> float:
        """At the rate of late copies, or of a first try."""
        return self._moves.copy_seconds(blocks)

    def _report_errors(self) -> None:
        self.kv.report(self._telemetry.quant_error if self._telemetry is not None else _discard)

    def _compare(self, twin: Twin, sampled: Sequence[Request], logits: torch.Tensor) -> torch.Tensor:
        """Reports what quantized KV cost the twin's request in this step; the logits [rows, vocab_size] without the twin's, the last."""
        request = twin.span.request
        kv = self.kv
        assert isinstance(kv, Int8KV | CompressedKV)
        assert self._telemetry is not None
        assert request.trace is not None
        quantized = kv.compressed if isinstance(kv, CompressedKV) else kv.blocks
        nats, agreed = divergence(logits[sampled.index(request)], logits[-1])
        sums = [(name, *pair) for name, pair in zip(quantized.layer_groups, twin.sums.tolist(), strict=True)]
        self._telemetry.quant_compared(request.trace, quantized.quantizer.scheme, nats, agreed, sums)
        return logits[:-1]

    # -- plan to rows ----------------------------------------------------------------------------------------------------

    def _assemble(self, plan: StepPlan) -> tuple[Batch, np.ndarray, np.ndarray, np.ndarray, list[Request], Twin | None]:
        """(batch, token ids [rows], positions [rows], rows to sample from, their requests in the order StepResult.tokens asks, the
        decode that is in the last row a second time to be compared)."""
        ids: list[np.ndarray] = []
        chunks: list[Span] = []
        row = 0
        for chunk in plan.prefill:
            span = self._span(chunk.request, chunk.start, chunk.tokens, row)
            chunks.append(span)
            ids.append(self._ids(chunk.request, span.start, span.context))
            row += chunk.tokens
        first = row
        unordered = [self._span(request, request.num_computed, 1, 0) for request in plan.decode]
        order = sorted(range(len(unordered)), key=lambda i: (self._is_compressed(unordered[i]), unordered[i].start))
        decodes = []
        for i in order:
            request, span = plan.decode[i], unordered[i]
            span.row = row
            decodes.append(span)
            ids.append(self._ids(request, request.num_computed, request.num_computed + 1))
            row += 1
        batch = Batch(chunks, decodes)
        twin = self.kv.comparison.choose(batch, row) if self.kv.comparison and self._telemetry else None
        again = [] if twin is None else [twin.span]
        ids += [self._ids(span.request, span.start, span.context) for span in again]
        positions = np.concatenate([np.arange(span.start, span.context) for span in (*chunks, *decodes, *again)])
        last = [span.row + span.tokens - 1 for span, chunk in zip(chunks, plan.prefill, strict=True) if chunk.samples]
        decode_rows = np.empty(len(order), np.int64)
        decode_rows[order] = np.arange(first, row)
        sampled = [chunk.request for chunk in plan.prefill if chunk.samples] + plan.decode
        return (
            batch,
            np.concatenate(ids),
            positions,
            np.concatenate([np.array(last, np.int64), decode_rows, np.full(len(again), row)]),
            sampled,
            twin,
        )

    def _span(self, request: Request, start: int, tokens: int, row: int) -> Span:
        assert request.table is not None
        needed = -(-(start + tokens) // self._config.block_size)
        return Span(request, start, tokens, row, np.fromiter(request.table.blocks[:needed], np.int64, needed))

    def _is_compressed(self, span: Span) -> bool:
        """Whether any of the sequence's blocks is compressed."""
        return isinstance(self.kv, CompressedKV) and self.kv.is_mixed(span)

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
    def _prefill_share(plan: StepPlan, shares: list[float]) -> float:
        """Share of prefill in the forward pass."""
        prefill_tokens = sum(chunk.tokens for chunk in plan.prefill)
        tokens = prefill_tokens + len(plan.decode)
        prefill_samples = sum(chunk.samples for chunk in plan.prefill)
        samples = prefill_samples + len(plan.decode)
        of_head = prefill_samples / samples if samples else 0.0
        return shares[Part.PREFILL] + shares[Part.LINEAR] * prefill_tokens / tokens + shares[Part.HEAD] * of_head

    @staticmethod
    def _lap(telemetry: Telemetry, prefill: float, dequant: float, started: float, forwarded: float) -> None:
        parts = {_PREFILL: prefill, _DEQUANT: dequant, _DECODE: 1.0 - prefill - dequant}
        now = started
        for component, share in parts.items():
            if share > 1e-12:
                now = min(forwarded, now + share * (forwarded - started))
                telemetry.lap_to(component, now)


def _discard(*_: object) -> None:
    """Nobody asks for errors."""
