"""Service objectives as data: what is promised, and the bucket bound that measures it. Imports the catalogue and the errors.

Rules, boards and the app take their thresholds from here, so that a line on a chart and an alert never disagree.
`KVSCOPE_OBJECTIVES` names a TOML file with objectives of your own (docs/objectives.md), else those of the configuration file hold; all parts
read the same one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from observability import catalog, config
from observability.catalog import Family
from observability.errors import ConfigError

ENVIRONMENT = "KVSCOPE_OBJECTIVES"
#: How a request can end well, and how it can end badly. An abort is the client's choice and `invalid` its mistake: neither counts.
GOOD_OUTCOMES = ("stop", "length")
BAD_OUTCOMES = ("error", "rejected", "deadline")
#: Of thresholds. Six digits within them are written without an exponent, in the label of a bucket and in the name of a signal.
LEAST_SECONDS, MOST_SECONDS = 0.0001, 100_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """`target` of the events are good. Without `model` or `request_class` it is for all that have no objective of their own.

    Fewer than `min_events` within a window prove nothing: a single slow request at night must not page.
    """

    name: str
    title: str
    target: float
    model: str = ""
    request_class: str = ""
    min_events: int = 30
    events: str = "requests"

    @property
    def applies_to(self) -> Mapping[str, str]:
        """Labels that a series of this objective must have."""
        return {k: v for k, v in (("model", self.model), ("class", self.request_class)) if v}

    def __post_init__(self) -> None:
        if not 0.5 <= self.target < 1:
            raise ConfigError(
                f"Objective {self.name}: target {self.target:g} is not a share between 0.5 and 1.",
                next_step="Write 99 % as target = 0.99.",
            )
        if self.min_events < 0:
            raise ConfigError(
                f"Objective {self.name}: min_events {self.min_events} is below 0.",
                next_step="Give the number of events below which an alert stays silent; 0 for none.",
            )
        if self.model and self.request_class:
            raise ConfigError(
                f"Objective {self.name} is for a model and a class at once.",
                next_step="Name one of the two; a model's objective stands before a class's.",
            )
        if self.request_class and self.request_class not in catalog.CLASSES:
            raise ConfigError(
                f"Objective {self.name}: there is no class {self.request_class!r}.",
                next_step=f"Use one of {', '.join(catalog.CLASSES)}.",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyObjective(Objective):
    """`target` of the events stay at or under `threshold_seconds`, which kvscope's exporters make a bucket bound of `family`
    (observability/buckets.py), so that counting is exact."""

    family: Family
    threshold_seconds: float

    def __post_init__(self) -> None:
        Objective.__post_init__(self)
        if not LEAST_SECONDS <= self.threshold_seconds <= MOST_SECONDS:  # also refuses NaN
            raise ConfigError(
                f"Objective {self.name}: {self.threshold_seconds:g} s is no threshold.",
                next_step=f"Give seconds between {LEAST_SECONDS:g} and {MOST_SECONDS:,.0f}.",
            )
        if self.threshold_seconds != (kept := float(f"{self.threshold_seconds:.6g}")):
            raise ConfigError(
                f"Objective {self.name}: {self.threshold_seconds!r} s has more digits than a bucket bound.",
                next_step=f"Give six digits at most, such as {kept:g}.",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class AvailabilityObjective(Objective):
    """`target` of the requests that end well or badly end well; an abort and what cannot be served as asked are the client's and neither."""


_DEFAULTS: tuple[Objective, ...] = (
    LatencyObjective(
        name="ttft", title="Time to first token", target=0.99,
        family=catalog.TIME_TO_FIRST_TOKEN, threshold_seconds=0.8,
    ),
    LatencyObjective(
        name="itl", title="Inter-token latency", target=0.99, min_events=1000, events="tokens",
        family=catalog.INTER_TOKEN_LATENCY, threshold_seconds=0.1,
    ),
    LatencyObjective(
        name="e2e", title="Request duration", target=0.99,
        family=catalog.REQUEST_DURATION, threshold_seconds=20.0,
    ),
    AvailabilityObjective(name="availability", title="Availability", target=0.999),
)  # fmt: skip
#: Seconds of the latency objectives that nobody changed, by name.
DEFAULT_THRESHOLDS = {x.name: x.threshold_seconds for x in _DEFAULTS if isinstance(x, LatencyObjective)}
SHORT_TITLES = {"ttft": "TTFT", "itl": "ITL", "e2e": "Duration", "availability": "Availability"}


def parse(text: str, source: str) -> tuple[Objective, ...]:
    """Objectives of a TOML text: `[[objective]]` tables with `name` (ttft, itl, e2e, availability), and any of `target`,
    `threshold_seconds`, `min_events`, `model` and `class`. What is not named keeps its default.

    ConfigError if the text, a key or a value makes no sense; it names `source`.
    """
    return _of_tables(config.toml(text, source, "docs/objectives.md").get(config.OBJECTIVE), source)


def _of_tables(tables: Any, source: str) -> tuple[Objective, ...]:
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"{source} has no [[objective]] table.", next_step="See docs/objectives.md for an example.")
    out = {_key(objective): objective for objective in _DEFAULTS}
    for table in tables:
        objective = _of_table(table, source)
        out[_key(objective)] = objective
    return tuple(out.values())


def _key(objective: Objective) -> tuple[str, str, str]:
    return objective.name, objective.model, objective.request_class


def _of_table(table: Mapping[str, Any], source: str) -> Objective:
    default = next((x for x in _DEFAULTS if x.name == table.get("name")), None)
    if default is None:
        raise ConfigError(
            f"{source}: an objective is named {table.get('name')!r}.",
            next_step=f"Name it one of {', '.join(x.name for x in _DEFAULTS)}.",
        )
    kinds: dict[str, type | tuple[type, ...]] = {
        "target": (int, float), "threshold_seconds": (int, float), "min_events": int, "model": str, "class": str,
    }  # fmt: skip
    if not isinstance(default, LatencyObjective):
        del kinds["threshold_seconds"]
    for key, value in table.items():
        if key != "name" and (key not in kinds or not isinstance(value, kinds[key]) or isinstance(value, bool)):
            raise ConfigError(
                f"{source}: objective {default.name} has {key} = {value!r}.",
                next_step=f"It takes {', '.join(kinds)}; see docs/objectives.md.",
            )
    if '"' in (model := table.get("model", "")) or "\\" in model or "\n" in model:
        raise ConfigError(f"{source}: model {model!r} cannot be a label in a rule.", next_step="Use the served name.")
    fields = {name: getattr(default, name) for name in ("name", "title", "min_events", "events", "target")}
    fields |= {"model": model, "request_class": table.get("class", "")}
    fields |= {key: table[key] for key in ("target", "min_events") if key in table}
    if isinstance(default, LatencyObjective):
        threshold = float(table.get("threshold_seconds", default.threshold_seconds))
        return LatencyObjective(family=default.family, threshold_seconds=threshold, **fields)
    return AvailabilityObjective(**fields)


def _read() -> tuple[Objective, ...]:
    path = os.environ.get(ENVIRONMENT)
    if not path:
        whole = config.read()
        own = whole.tables.get(config.OBJECTIVE)
        return _DEFAULTS if own is None else _of_tables(own, str(whole.path))
    try:
        with open(path, encoding="utf-8") as file:
            return parse(file.read(), path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{ENVIRONMENT} names {path}, which cannot be read: {error}.", next_step="Correct or unset it."
        ) from error


def excluded(objective: Objective, among: Sequence[Objective] | None = None) -> Mapping[str, tuple[str, ...]]:
    """Label values that `objective` leaves to more specific ones of its name, by label, so that none counts twice.

    A model's objective stands before a class's, which stands before the general one.
    """
    others = [x for x in (OBJECTIVES if among is None else among) if x.name == objective.name]
    models = tuple(x.model for x in others if x.model)
    classes = tuple(x.request_class for x in others if x.request_class)
    out: dict[str, tuple[str, ...]] = {}
    if models and not objective.model:
        out["model"] = models
    if classes and not objective.applies_to:
        out["class"] = classes
    return out


#: A model that several engines serve is read by engine, under names such as `m on vllm`.
ON_ENGINE = " on "

_Kind = TypeVar("_Kind", bound=Objective)


def held_to(model: str, general: _Kind) -> _Kind:
    """What `model` is held to over its classes: its own objective of the name, else the `general` one, which leaves out classes that have
    their own (`left_out`)."""
    served = model.rpartition(ON_ENGINE)[0]
    own = (x for name in (model, served) for x in OBJECTIVES if name and (x.name, x.model) == (general.name, name))
    return next((x for x in own if isinstance(x, type(general))), general)


def left_out(objective: Objective) -> tuple[str, ...]:
    """Classes whose events `objective` does not count."""
    return excluded(objective).get("class", ())


OBJECTIVES: tuple[Objective, ...] = _read()
#: The general latency objectives; a model is held to `held_to` of each.
LATENCY_OBJECTIVES: tuple[LatencyObjective, ...] = tuple(
    x for x in OBJECTIVES if isinstance(x, LatencyObjective) and not x.applies_to
)
TTFT, ITL, E2E = LATENCY_OBJECTIVES

#: Share of the KV pool held by running requests above which the next long prompt is likely to wait or preempt.
KV_USAGE_WARNING = 0.85
KV_USAGE_CRITICAL = 0.95
#: Fewer requests of the present mean length than this fit into the free KV: the next one waits.
KV_ROOM_REQUESTS = 1.0


@dataclass(frozen=True, slots=True)
class QuantizationBudget:
    """What quantized KV may cost in accuracy. The first two are relative RMS errors; `attention_error`, which is also what one
    sequence may accumulate, is a bucket bound of kvscope_request_quantization_error_ratio."""

    stored_error: float  # of keys and values, of any layer group
    attention_error: float  # of the attention output
    agreed: float  # least share of tokens whose likeliest token stays the same
    divergence_nats: float  # mean KL(exact || stored) a token
    sequences_over: float  # share of sequences above attention_error

    def __post_init__(self) -> None:
        if self.attention_error not in catalog.REQUEST_QUANT_ERROR.bounds:
            raise ValueError(f"{self.attention_error} is not a bucket bound of {catalog.REQUEST_QUANT_ERROR.name}")


#: int8 of SmolLM2-135M is within it, int4 is not.
QUANTIZATION_BUDGET = QuantizationBudget(
    stored_error=0.02, attention_error=0.02, agreed=0.99, divergence_nats=0.001, sequences_over=0.01
)
#: Relative RMS error of stored KV that greedy decoding tolerates in practice (int8 sits near 0.005 to 0.01).
QUANT_ERROR_WARNING = QUANTIZATION_BUDGET.stored_error
#: A source that has not written for this long is frozen.
STALE_AFTER_SECONDS = 60.0
