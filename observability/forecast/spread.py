"""The same forecasts over many processes or machines: one function for whatever speaks concurrent.futures.

A pool is an Executor: processes of this machine, or Dask's (`distributed.Client(address).get_executor()`). Results do not depend on
it, since each forecast is a pure function of its window and calibration.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor
from dataclasses import replace
from itertools import islice

from observability.errors import ConfigError, ServiceError
from observability.forecast.calibration import Calibration
from observability.forecast.models import forecast_many
from observability.forecast.pooled import NOT_TRAINED, Trained
from observability.forecast.series import Window
from observability.store.forecasts import Forecast

#: Series sent to a process at a time: half a second of work, 250 KB.
CHUNK = 32
#: Chunks under way at a time, so that 10,000 series never lie in memory twice.
IN_FLIGHT = 64
_CONNECT_SECONDS = 10

Work = tuple[Window, Calibration]
#: Opens a pool for one run; None: this process does the work.
Pool = Callable[[], contextlib.AbstractContextManager[Executor | None]]


def in_this_process() -> contextlib.AbstractContextManager[Executor | None]:
    return contextlib.nullcontext()


def processes(count: int) -> Pool:
    """Processes of this machine, started anew for each run: one that was killed spoils one run. They are forked off a process that has
    done the imports, a second of work that each would begin with."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return lambda: ProcessPoolExecutor(count, mp_context=context)


def dask(address: str) -> Pool:
    """The workers of the Dask scheduler at `address`, such as tcp://127.0.0.1:8786; kvscope must be installed there. Raises ConfigError
    without the extra `scale`; opening the pool raises ServiceError when the scheduler does not answer."""
    try:
        from distributed import Client
    except ImportError as error:
        raise ConfigError(
            "Dask is not installed here.", next_step='Install it: pip install "kvscope[scale]".'
        ) from error

    @contextlib.contextmanager
    def connected() -> Iterator[Executor]:
        try:
            client = Client(address, timeout=_CONNECT_SECONDS, set_as_default=False)
        except (OSError, ValueError) as error:  # TimeoutError is an OSError
            raise ServiceError(
                f"No Dask scheduler answers at {address}: {error}.",
                next_step="Start one with `dask scheduler` and `dask worker`, or use --jobs.",
            ) from error
        with client, client.get_executor(pure=False) as executor:
            yield executor

    return connected


def spread(
    work: Iterable[Work], model: str, pool: Executor | None, trained: Trained = NOT_TRAINED
) -> Iterator[Forecast]:
    """A forecast of each window, in order. One that fails, alone or with its process, is a refusal with the reason."""
    if pool is None:
        yield from forecast_many(work, model, trained=trained)
        return
    under_way: deque[tuple[Sequence[Work], Future[list[Forecast]]]] = deque()
    rest = iter(work)
    while chunk := list(islice(rest, CHUNK)):
        try:
            future = pool.submit(_chunk, chunk, model, trained)
        except BrokenExecutor as error:
            future = Future()
            future.set_exception(error)
        under_way.append((chunk, future))
        if len(under_way) >= IN_FLIGHT:
            yield from _result(*under_way.popleft(), model)
    while under_way:
        yield from _result(*under_way.popleft(), model)


def _chunk(work: Sequence[Work], model: str, trained: Trained) -> list[Forecast]:
    return list(forecast_many(work, model, trained=trained))


def _result(work: Sequence[Work], future: Future[list[Forecast]], model: str) -> Iterator[Forecast]:
    try:
        yield from future.result()
    except Exception as error:  # its process died, or the answer was lost
        yield from refused(work, model, f"{model} failed: {type(error).__name__}: {error}")


def refused(work: Iterable[Work], model: str, reason: str) -> Iterator[Forecast]:
    """Refusals for `reason` of all windows; those that have a reason of their own keep it."""
    yield from forecast_many(((replace(seen, refused=seen.refused or reason), how) for seen, how in work), model)
