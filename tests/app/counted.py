"""Requests one by one and their counters as a store records them. As a program: what the app says of them, as JSON, under the objectives that
KVSCOPE_OBJECTIVES names."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

from observability import catalog
from observability.app import budget, page_batching, page_now, page_p99, page_trends, queries, report
from observability.app.happened import burns
from observability.app.ui import Context
from observability.app.view import View
from observability.forecast.limits import limits_of
from observability.objectives import OBJECTIVES, AvailabilityObjective, held_to
from observability.store.embedded import EmbeddedStore, create
from observability.store.evaluate import Key
from observability.store.recorder import Recorder, Scrape

#: On the grid of five minutes, like that of the app.
START, END, EVERY = 1_796_061_600.0, 1_796_065_200.0, 15.0
#: Over the objective of first tokens (0.8 s), but within the 10 s that a class is given.
LONG_TTFT = 5.0


class Ended(NamedTuple):
    """A request: when a scrape first counts it, latencies in seconds, `tokens` intervals of `itl`."""

    model: str
    request_class: str
    time: float
    ttft: float
    e2e: float
    itl: float
    tokens: int


def requests() -> list[Ended]:
    """An hour of two models. In its second half a tenth of the requests arrive, those of before end late, and tokens come slowly."""
    rng, out = np.random.default_rng(7), list[Ended]()
    for model in ("own", "other"):
        for time in np.arange(START + EVERY, END + 1, EVERY):
            late = time > (START + END) / 2
            for name, mean in (("standard", 9.0), ("long_context", 3.0)):
                for _ in range(rng.poisson(mean)):
                    ttft = LONG_TTFT if name == "long_context" else float(rng.uniform(0.05, 0.7))
                    e2e = float(rng.uniform(21, 39) if late else rng.uniform(6, 15)) if rng.random() < 0.98 else 50.0
                    out.append(Ended(model, name, time, ttft, e2e, 0.2 if late else 0.02, 400 if late else 20))
    return out


def record(path: Path, ended: list[Ended]) -> EmbeddedStore:
    """A store of scrapes of the counters of `ended`; the load that arrives is no part of them."""
    store = create(path)
    recorder = Recorder(store, batch=50)
    families = ((catalog.TIME_TO_FIRST_TOKEN, "ttft"), (catalog.REQUEST_DURATION, "e2e"), (catalog.INTER_TOKEN_LATENCY, "itl"))  # fmt: skip
    values: dict[Key, float] = {}
    for model in ("own", "other"):
        for name in catalog.CLASSES:
            labels = (("model", model), ("class", name))
            values[catalog.REQUESTS_RECEIVED.series, labels] = 0.0
            for outcome in ("stop", "error"):
                values[catalog.REQUESTS.series, (*labels, ("outcome", outcome))] = 0.0
            for family, _ in families:
                for bound in (*map(str, family.bounds), "+Inf"):
                    values[family.series, (*labels, ("le", bound))] = 0.0
    recorder.step(START, Scrape([*values], np.array([*values.values()])))
    for time in np.arange(START + EVERY, END + 1, EVERY):
        for each in (each for each in ended if each.time == time):
            labels = (("model", each.model), ("class", each.request_class))
            values[catalog.REQUESTS.series, (*labels, ("outcome", "stop" if each.e2e < 50 else "error"))] += 1
            for family, name in families:
                for bound in (*family.bounds, np.inf):
                    if getattr(each, name) <= bound:
                        le = "+Inf" if bound == np.inf else str(bound)
                        values[family.series, (*labels, ("le", le))] += each.tokens if name == "itl" else 1
        for key in values:
            if key[0] == catalog.REQUESTS_RECEIVED.series:
                values[key] += 1 if time > (START + END) / 2 else 10
        recorder.step(time, Scrape([*values], np.array([*values.values()])))
    recorder.flush()
    return store


def main() -> None:
    store, said = EmbeddedStore(Path(sys.argv[1])), {}
    availability = next(x for x in OBJECTIVES if isinstance(x, AvailabilityObjective))
    for model in ("own", "other"):
        view = View(model, START, END, EVERY)
        held = queries.held_latencies(model)
        panels = {panel.key: panel for panel in page_now.panels(model)}
        known = [budget.budget(store, view, each) for each in (*held, held_to(model, availability))]
        frames = {key: panel.read(store, view) for key, panel in panels.items()}
        said[model] = {
            "kept": {each.objective.name: (each.share_over, each.verdict) for each in (report.kept(store, view, each) for each in held)},
            "left": [None if each is None else each.left for each in known],
            "words": {key: p.words(Context(store, view), frames[key]) for key, p in panels.items() if p.words is not None},
            "lines": {key: [line.value for line in p.lines] for key, p in panels.items()},
            "notes": {key: p.note for key, p in panels.items()},
            "quantiles": [page_p99.quantile_panel(each).lines[0].value for each in held],
            "week": [line.value for panel in page_trends.week_panels(held[0]) for line in panel.lines],
            "classes": [line.label for line in page_batching.class_limits(model)],
            "threshold": queries.threshold_of(queries.quantile_signal(held[2], 0.99), model),
            "forecast": limits_of(queries.quantile_signal(held[2], 0.99).name, model)[0].value,
            "report": [line.value for _, panels in report.chapters(model) for p in panels for line in p.lines if line.label.endswith(" s")],
            "marks": [mark.text for mark in burns(store, view)],
        }  # fmt: skip
    print(json.dumps(said))  # noqa: T201


if __name__ == "__main__":
    main()
