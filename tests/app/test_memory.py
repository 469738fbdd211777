"""What threads of the app have freed goes back to the system."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and trims glibc's heaps")

#: Threads allocate 200 MiB in small blocks and keep one of each 40, as caches do: prints what the process has in MiB before, at most, and last.
SCRIPT = """
import re, threading, time
from observability.app import memory

def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024

memory.EVERY_SECONDS = 0.2
GIVE
before, kept, most = resident(), [], []
def work():
    blocks = [bytearray(4000) for _ in range(6400)]
    kept.extend(blocks[::40])
    barrier.wait()
    most.append(resident())
    barrier.wait()
barrier = threading.Barrier(8)
threads = [threading.Thread(target=work) for _ in range(8)]
for each in threads: each.start()
for each in threads: each.join()
time.sleep(1.5)
print(before, max(most), resident())
"""


def resident(give: str) -> tuple[float, float, float]:
    said = subprocess.run(
        (sys.executable, "-c", SCRIPT.replace("GIVE", give)), capture_output=True, text=True, check=True, timeout=120
    )
    before, most, last = map(float, said.stdout.split())
    assert most - before > 150
    return before, most, last


def test_what_threads_freed_goes_back_though_some_of_it_is_kept() -> None:
    before, most, last = resident("memory.give_back()")
    assert last - before < 0.2 * (most - before)
    before, most, last = resident("")  # else the C library keeps it, and the test says nothing
    assert last - before > 0.5 * (most - before)


def test_who_has_settled_it_for_the_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "4")
    before, most, last = resident("memory.give_back()")
    assert last - before > 0.5 * (most - before)
