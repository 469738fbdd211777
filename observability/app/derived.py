"""What pages work out of a source's reads, shared by viewers as the reads are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Concatenate, ParamSpec, Protocol, TypeVar, cast, runtime_checkable

from observability.store.source import SeriesSource

_P = ParamSpec("_P")
_T = TypeVar("_T")


@runtime_checkable
class Keeps(Protocol):
    """A source that keeps what is worked out of it."""

    def derived(self, key: Hashable, work: Callable[[], object]) -> object:
        """What `work` gave under `key` a short time ago, or gives now."""


def shared(work: Callable[Concatenate[SeriesSource, _P], _T]) -> Callable[Concatenate[SeriesSource, _P], _T]:
    """`work` of a source and positional arguments, not done again for the same ones where the source keeps it. Arguments are hashable, or
    signals and objectives, which go by their name. Nobody may change what it gives."""

    @functools.wraps(work)
    def known(source: SeriesSource, *arguments: _P.args, **named: _P.kwargs) -> _T:
        if isinstance(source, Keeps) and not named:
            key = (work.__module__, work.__qualname__, *(getattr(each, "name", each) for each in arguments))
            return cast(_T, source.derived(key, lambda: work(source, *arguments, **named)))
        return work(source, *arguments, **named)

    return known
