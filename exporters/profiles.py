"""CPU profiles of this process to a Pyroscope server: 100 samples a second, tagged by what the engine's thread is doing.

A server that does not answer, or hangs, costs its profiles only: samples are taken and sent by threads of the profiler's own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from observability.addresses import without_secrets
from observability.errors import ConfigError

SAMPLES_PER_SECOND = 100
_UPLOAD_SECONDS = 10
_LAST_UPLOAD_SECONDS = 5.0  # that the last profiles may take when it ends


class PhaseTag:
    """`with tag(name)`: samples of the calling thread carry phase=name; within another one, the inner name alone.

    For one thread. Costs two calls into the profiler a change.
    """

    def __init__(self, pyroscope: Any) -> None:
        self._add, self._remove = pyroscope.add_thread_tag, pyroscope.remove_thread_tag
        self._stack: list[str] = []

    def __call__(self, name: str) -> PhaseTag:
        stack = self._stack
        if stack:
            self._remove("phase", stack[-1])
        stack.append(name)
        self._add("phase", name)
        return self

    def __enter__(self) -> None:
        """The tag was set by the call before."""

    def __exit__(self, *_: object) -> None:
        stack = self._stack
        self._remove("phase", stack.pop())
        if stack:
            self._add("phase", stack[-1])


@contextmanager
def profiles_to(url: str, tags: Mapping[str, str], *, upload_seconds: int = _UPLOAD_SECONDS) -> Iterator[PhaseTag]:
    """Sends profiles until it is left; gives the tag for the engine's thread. Raises ConfigError when that cannot begin."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise ConfigError(
            f"{without_secrets(url)!r} is not an address for profiles.",
            next_step="Give one such as http://127.0.0.1:4040.",
        )
    try:
        import pyroscope
    except ImportError:
        raise ConfigError("pyroscope-io is not installed.", next_step="Run pip install 'kvscope[profile]'.") from None
    begun = pyroscope.configure(
        application_name="kvscope",
        server_address=url,
        sample_rate=SAMPLES_PER_SECOND,
        oncpu=True,
        gil_only=False,  # a forward pass runs without the interpreter's lock
        tags=dict(tags),
        upload_interval=upload_seconds,
    )
    if not begun:
        raise ConfigError(
            "The profiler cannot read this process.",
            next_step="Leave --profile-to out, or allow it to (in a container: --cap-add SYS_PTRACE).",
        )
    try:
        yield PhaseTag(pyroscope)
    finally:
        # It sends what is left, and tries again for half a minute where the server hangs.
        ending = threading.Thread(target=pyroscope.shutdown, name="profiler-end", daemon=True)
        ending.start()
        ending.join(_LAST_UPLOAD_SECONDS)
