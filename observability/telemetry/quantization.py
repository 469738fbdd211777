"""What storing KV in few bits costs in accuracy. Same rules as recorder.py; series appear with the first measurement.

Every ratio is two sums: relative RMS error = sqrt(squared error / squared signal), SQNR = 10 log10(squared signal / squared error).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import sqrt
from typing import NamedTuple

from observability import catalog as c
from observability.telemetry.requests import QuantizationError
from observability.telemetry.snapshot import Block, Histograms, counters

#: (tensor, layer group, scheme) combinations that get series of their own; more are folded into layer group `other`.
_MAX_KEYS = 64
_LAYER_GROUP = 2  # place in the label folds


class _Stored(NamedTuple):
    """Of one tensor, layer group and scheme."""

    error: list[float]
    signal: list[float]
    elements: list[float]
    relative: Histograms
    maximum: Histograms


class _Compared(NamedTuple):
    """Of one scheme."""

    tokens: list[float]
    agreed: list[float]
    divergence: list[float]
    requests: Histograms


class Quantization:
    """Sums of one engine, written by its thread only. A method returns the blocks of series that exist from now on."""

    def __init__(self, model: str, folds: list[float]) -> None:
        self._model, self._folds = model, folds
        self._stored: dict[tuple[int, str, str], _Stored] = {}
        self._attention: dict[tuple[str, str], tuple[list[float], list[float]]] = {}  # by layer group and scheme
        self._compared: dict[str, _Compared] = {}

    def error(
        self,
        tensor: int,
        layer_group: str,
        scheme: str,
        squared_error: float,
        squared_signal: float,
        maximum: float,
        elements: int,
    ) -> list[Block]:
        """One measured block; see Telemetry.quant_error."""
        new: list[Block] = []
        stored = self._stored.get((tensor, layer_group, scheme))
        if stored is None:
            if len(self._stored) >= _MAX_KEYS:
                self._folds[_LAYER_GROUP] += 1
                layer_group, scheme = "other", "other"
            stored = self._stored.get((tensor, layer_group, scheme))
        if stored is None:
            labels = [(self._model, c.TENSORS[tensor], layer_group, scheme)]
            stored = _Stored(
                [0.0], [0.0], [0.0], Histograms(c.KV_QUANT_RELATIVE, labels), Histograms(c.KV_QUANT_MAXIMUM, labels)
            )
            self._stored[tensor, layer_group, scheme] = stored
            families = (c.KV_QUANT_ERROR, c.KV_QUANT_SIGNAL, c.KV_QUANT_ELEMENTS)
            new = [counters(family, labels, values) for family, values in zip(families, stored[:3], strict=True)]
            new += [stored.relative.block(), stored.maximum.block()]
        stored.error[0] += squared_error
        stored.signal[0] += squared_signal
        stored.elements[0] += elements
        if squared_signal > 0.0:
            _observe(stored.relative, sqrt(squared_error / squared_signal))
            _observe(stored.maximum, maximum / sqrt(squared_signal / elements))
        return new

    def compared(
        self, scheme: str, divergence: float, agreed: bool, attention: Sequence[tuple[str, float, float]]
    ) -> list[Block]:
        """One compared token; see Telemetry.quant_compared. Schemes and layer groups are those of one executor: few."""
        new: list[Block] = []
        sums = self._compared.get(scheme)
        if sums is None:
            labels = [(self._model, scheme)]
            sums = self._compared[scheme] = _Compared([0.0], [0.0], [0.0], Histograms(c.REQUEST_QUANT_ERROR, labels))
            families = (c.KV_QUANT_COMPARED, c.KV_QUANT_AGREED, c.KV_QUANT_DIVERGENCE)
            new = [counters(family, labels, values) for family, values in zip(families, sums[:3], strict=True)]
            new.append(sums.requests.block())
        sums.tokens[0] += 1
        sums.agreed[0] += agreed
        sums.divergence[0] += divergence
        for layer_group, squared_error, squared_signal in attention:
            cells = self._attention.get((layer_group, scheme))
            if cells is None:
                cells = self._attention[layer_group, scheme] = ([0.0], [0.0])
                pair = (c.KV_QUANT_ATTENTION_ERROR, c.KV_QUANT_ATTENTION_SIGNAL)
                by = [(self._model, layer_group, scheme)]
                new += [counters(family, by, values) for family, values in zip(pair, cells, strict=True)]
            cells[0][0] += squared_error
            cells[1][0] += squared_signal
        return new

    def ended(self, error: QuantizationError) -> None:
        """A request with compared tokens has ended."""
        if (ratio := error.relative) is not None:
            _observe(self._compared[error.scheme].requests, ratio)


def _observe(histograms: Histograms, value: float) -> None:
    """Into the one label set of `histograms`."""
    histograms.cells[bisect_left(histograms.bounds, value)] += 1
    histograms.cells[-1] += value
