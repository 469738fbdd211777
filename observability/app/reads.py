"""Reads that can take long: each runs beside the page that waits for it, so that the page can say how long it waits and be stopped."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import Any, TypeVar

import streamlit as st

from observability.errors import StoreError

#: Reads that run at once, of all viewers together; what a stopped page had asked for still ends and is kept.
WORKERS = 8
#: Seconds between two looks whether the reader stopped it or went elsewhere.
LOOK_SECONDS = 0.1
#: Seconds after which the page says that it waits.
SLOW_SECONDS = 1.0

_T = TypeVar("_T")


class StoppedError(StoreError):
    """The reader stopped a read that took long."""

    def __init__(self) -> None:
        super().__init__("Not read: reading was stopped.", next_step="Press Read again, or choose a shorter range.")


class _Reads:
    """The reads under way by key: viewers who ask for the same wait for one read."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="read")
        self._lock = threading.Lock()
        self._running: dict[Hashable, Future[Any]] = {}

    def start(self, key: Hashable, read: Callable[[], _T]) -> Future[_T]:
        """The read under `key`, begun now if nobody waits for it yet."""
        with self._lock:
            future = self._running.get(key)
            if future is None:
                future = self._running[key] = self._pool.submit(read)
        future.add_done_callback(functools.partial(self._end, key))  # at once, in this thread, if it is done
        return future

    def _end(self, key: Hashable, future: Future[Any]) -> None:
        with self._lock:
            if self._running.get(key) is future:
                del self._running[key]


@st.cache_resource(show_spinner=False)
def _reads() -> _Reads:
    return _Reads()


def patiently(key: Hashable, read: Callable[[], _T], waiting: Callable[[float], None]) -> _T:
    """What `read` gives. While it lasts Streamlit can end the page, so that no click of the reader is held up by a slow source;
    from SLOW_SECONDS on `waiting` is told the seconds about once a second."""
    begin, told = time.monotonic(), 0.0
    future = _reads().start(key, read)
    while not wait_for((future,), LOOK_SECONDS).done:
        st.session_state.get("stopped")  # a look at the state is where Streamlit ends this page or begins it anew
        waited = time.monotonic() - begin
        if waited >= max(SLOW_SECONDS, told + 1.0):
            told = waited
            waiting(waited)
    return future.result()
