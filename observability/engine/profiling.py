"""Names for what an engine's thread is doing, for profilers: put around its methods while one runs, and taken off again.

An engine that nobody profiles has its own methods and pays nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

from observability.engine.engine import Engine
from observability.engine.types import StepPlan


@dataclass(frozen=True, slots=True)
class Point:
    """A method of `owner`; `name` may depend on its arguments."""

    owner: Any
    method: str
    name: str | Callable[..., str]


def _forward(plan: StepPlan, *_: object, **__: object) -> str:
    return f"forward_{plan.kind}"


def phases(engine: Engine) -> list[Point]:
    """What fills a step: schedule, forward_prefill, forward_decode or forward_mixed, kv_move, emit. kv_move lies within others."""
    executor = engine.executor
    moves = ("copy_blocks", "compress_blocks", "offload_blocks", "load_blocks")
    return [
        Point(engine.scheduler, "schedule", "schedule"),
        Point(executor, "execute", _forward),
        Point(engine, "_commit", "emit"),
        *(Point(executor, method, "kv_move") for method in moves if hasattr(executor, method)),
    ]


def regions(engine: Engine) -> list[Point]:
    """The phases within `step`, and what KV does in them: taking, indexing and freeing blocks, and in each layer storing keys and
    values and attending to them."""
    kv, executor = engine.kv, engine.executor
    points = [Point(engine, "step", "step"), *phases(engine)]
    for method, name in (("admit", "kv_alloc"), ("grow", "kv_alloc"), ("register", "kv_index"), ("release", "kv_free")):
        points.append(Point(kv, method, name))
    for owner, method, name in (
        (getattr(executor, "kv", None), "begin", "kv_gather"),
        (getattr(executor, "kv", None), "attend", "kv_attend"),
        (getattr(executor, "_model", None), "logits", "logits"),
    ):
        if owner is not None:
            points.append(Point(owner, method, name))
    return points


@contextmanager
def named(points: Sequence[Point], enter: Callable[[str], AbstractContextManager[Any]]) -> Iterator[None]:
    """While it is open, each call of a point runs within enter(name). To be opened and closed while the engine's thread is not
    in one of them."""
    for point in points:
        setattr(point.owner, point.method, _wrapped(point, enter))
    try:
        yield
    finally:
        for point in points:
            delattr(point.owner, point.method)


def _wrapped(point: Point, enter: Callable[[str], AbstractContextManager[Any]]) -> Callable[..., Any]:
    call, name = getattr(point.owner, point.method), point.name

    @wraps(call)
    def run(*args: Any, **kwargs: Any) -> Any:
        with enter(name if isinstance(name, str) else name(*args, **kwargs)):
            return call(*args, **kwargs)

    return run
