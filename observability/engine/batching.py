"""Whose turn it is: the order of waiting requests by class, and which of the requests in prefill share a step.

Both rules favour what is short or urgent and both are bounded, so that nobody is passed over for ever.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from observability.catalog import CLASSES
from observability.engine.types import Request


class WaitingQueues:
    """Waiting requests: interactive before standard before long_context, each first come first served.

    A request that has waited for `max_wait_seconds` since its arrival is overdue: it goes before all that are not, the longest waiting
    first. So once overdue it only sees requests pass that arrived before it, and never waits longer than `max_wait_seconds` and then as
    many admissions as there were arrivals before its own.

    Requests are added in order of arrival (with disorder, one becomes overdue as late as those before it in its class). Each call takes
    constant time, counted over the life of a request. `on_overdue(request)` is called once when head() finds a request overdue. With
    `class_queues` off, all classes share one queue, in which nobody could overtake and nobody is ever overdue.
    """

    def __init__(
        self,
        max_wait_seconds: float,
        *,
        class_queues: bool = True,
        on_overdue: Callable[[Request], None] | None = None,
    ) -> None:
        self._max_wait_seconds = max_wait_seconds
        self._on_overdue = on_overdue
        self._overdue: OrderedDict[Request, None] = OrderedDict()
        # In order of priority, which is the catalogue's order of classes.
        self._queues: list[OrderedDict[Request, None]] = [
            OrderedDict() for _ in (CLASSES if class_queues else CLASSES[:1])
        ]
        self._queue_of = {name: self._queues[min(i, len(self._queues) - 1)] for i, name in enumerate(CLASSES)}

    def __len__(self) -> int:
        return len(self._overdue) + sum(map(len, self._queues))

    def __iter__(self) -> Iterator[Request]:
        """In the order in which they would be admitted if nobody else became overdue or arrived."""
        return chain(self._overdue, *self._queues)

    def add(self, request: Request) -> None:
        """Puts a request at the end of its class."""
        self._queue_of[request.request_class][request] = None

    def remove(self, request: Request) -> bool:
        """Takes a request out, wherever it stands; False if it does not wait here."""
        for queue in (self._queue_of[request.request_class], self._overdue):
            if request in queue:
                del queue[request]
                return True
        return False

    def head(self, now: float) -> Request | None:
        """The request to be admitted next, at `now` on the clock of arrivals; it stays in its place until removed."""
        if len(self._queues) > 1:
            self._promote(now)
        return next(iter(self), None)

    def next_overdue(self) -> float | None:
        """When the next request becomes overdue, from which on another one may be the head; None if none will."""
        if len(self._queues) == 1:
            return None
        firsts = (next(iter(queue)).arrival for queue in self._queues if queue)
        return min((arrival + self._max_wait_seconds for arrival in firsts), default=None)

    def _promote(self, now: float) -> None:
        late: list[Request] = []
        for queue in self._queues:
            while queue and now - (request := next(iter(queue))).arrival >= self._max_wait_seconds:
                del queue[request]
                late.append(request)
        # Those promoted earlier arrived earlier. The sort is stable: of two that arrived together, the higher class goes first.
        for request in sorted(late, key=lambda request: request.arrival):
            self._overdue[request] = None
            if self._on_overdue is not None:
                self._on_overdue(request)


class PrefillSplit(NamedTuple):
    """`chosen` indices of requests to run, in the order in which they take the step's budget; `spread` is that of all."""

    chosen: list[int]
    spread: float


def split_prefill(
    lengths: Sequence[int], limit: float, passed_over: Sequence[int], max_passed_over: int
) -> PrefillSplit:
    """Which requests in prefill run in this step, so that short ones need not wait for the chunks of much longer ones.

    lengths: tokens left to compute (at least 1) by request, in order of admission. Their spread is q75/q25 (linear interpolation, as
    numpy.quantile); where it is at most `limit`, or limit is 0, all run in order of admission. Otherwise the short ones run: as many of
    the shortest as are no longer than limit x their own q25, so that their own spread is within limit. The others wait.
    passed_over: steps in a row in which the request computed nothing. Those that reach `max_passed_over` run, the one longest without a
    turn first, and if one of them is not among the short ones, the rest of the step is for those that waited. So every request is chosen
    in one of max_passed_over + 1 steps in a row.
    """
    if not lengths:
        return PrefillSplit([], 1.0)
    order = sorted(range(len(lengths)), key=lengths.__getitem__)  # stable: of equal lengths, the one admitted first
    ascending = [lengths[i] for i in order]
    spread = _quantile(ascending, 0.75) / _quantile(ascending, 0.25)
    if not limit or spread <= limit:
        return PrefillSplit(list(range(len(lengths))), spread)
    count = next(n for n in range(len(order) - 1, 0, -1) if ascending[n - 1] <= limit * _quantile(ascending[:n], 0.25))
    short = set(order[:count])
    starved = sorted((i for i in order if passed_over[i] >= max_passed_over), key=lambda i: (-passed_over[i], i))
    group = [i for i in range(len(lengths)) if (i in short) == short.issuperset(starved) and i not in starved]
    return PrefillSplit(starved + group, spread)


def _quantile(ascending: Sequence[int], share: float) -> float:
    """As numpy.quantile with its default, linear interpolation; an array would cost more than these few values."""
    whole, part = divmod(share * (len(ascending) - 1), 1.0)
    low = ascending[int(whole)]
    return low + part * (ascending[min(int(whole) + 1, len(ascending) - 1)] - low)
