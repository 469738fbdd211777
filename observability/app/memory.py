"""Gives memory that was freed back to the system. Each run of a page is a thread of its own, and allocators keep what a thread has freed for
threads like it: with five viewers that is 15 MiB more each hour, though nothing in the process grows."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time

import pyarrow as pa

#: Names of mallopt's parameters, as in glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
#: glibc's own first thresholds in bytes; told, they stay, and do not rise with what is freed.
_THRESHOLD = 128 << 10
_HEAPS = 2
EVERY_SECONDS = 60.0


def give_back() -> None:
    """Few heaps for all threads, pandas' text in them, too (Arrow has an allocator of its own), and each EVERY_SECONDS what is free there goes
    back. Does nothing where the C library is not glibc, or where MALLOC_ARENA_MAX or GLIBC_TUNABLES say that the user has settled it."""
    if sys.platform != "linux" or os.environ.keys() & {"MALLOC_ARENA_MAX", "GLIBC_TUNABLES"}:
        return
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt") or not hasattr(libc, "malloc_trim"):
        return
    for parameter, value in (
        (_M_ARENA_MAX, _HEAPS),
        (_M_MMAP_THRESHOLD, _THRESHOLD),
        (_M_TRIM_THRESHOLD, _THRESHOLD),
    ):
        libc.mallopt(parameter, value)
    pa.set_memory_pool(pa.system_memory_pool())
    threading.Thread(target=_trim, args=(libc,), name="give-back", daemon=True).start()


def _trim(libc: ctypes.CDLL) -> None:
    while True:
        time.sleep(EVERY_SECONDS)
        libc.malloc_trim(0)
