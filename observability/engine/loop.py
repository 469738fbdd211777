"""The thread that steps a live engine. Clients talk to the engine from their own threads by add() and abort()."""

from __future__ import annotations

import logging
import threading

from observability.engine.engine import Engine
from observability.errors import ServiceError

_log = logging.getLogger(__name__)
_IDLE_WAIT_SECONDS = 0.5  # how often an idle engine refreshes its gauges
_MAX_FAILURES = 3  # steps failed in a row after which the executor counts as broken


class EngineThread:
    """Steps `engine` until stop(). Submit with `thread.engine.add(request)`.

    When a step raises, the running requests end with outcome "error" and the loop goes on with the waiting ones. The thread is
    dead after three failed steps in a row, or when the engine's own bookkeeping is broken: then every request ends with "error"
    and add() refuses. No client waits for an engine that will not answer.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.error: str | None = None  # what the last step failed with; None again once a step succeeds
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._stopping = False

    @property
    def alive(self) -> bool:
        """Whether requests are being served; False before start(), after stop(), and when dead."""
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float = 10.0) -> None:
        """Refuses new requests, aborts all others after the step in progress and waits for the thread.

        Raises ServiceError when a step takes longer than `timeout` seconds.
        """
        self._stopping = True
        self.engine.close("it was told to stop.")
        if self._thread.ident is None:  # never started, so this thread may act for it
            self.engine.end_all("abort")
        else:
            self._thread.join(timeout)
        if self._thread.is_alive():
            raise ServiceError(f"The engine did not stop within {timeout:g} s.", next_step="End the process.")

    def _run(self) -> None:
        engine, failures = self.engine, 0
        outcome, reason = "abort", None
        while not self._stopping:
            engine.work.clear()  # what arrives from here on ends the wait below
            try:
                worked = engine.step()
            except Exception as error:
                failures += 1
                self.error = f"{type(error).__name__}: {error}"
                _log.exception("engine step failed")
                if not self._recover(failures):
                    outcome, reason = "error", self.error
                    break
                continue
            if worked:
                failures, self.error = 0, None
            else:
                engine.work.wait(_IDLE_WAIT_SECONDS)
        engine.close("it was told to stop." if reason is None else f"a step failed ({reason}).")
        engine.end_all(outcome, reason)

    def _recover(self, failures: int) -> bool:
        """Ends the running requests; False when the engine cannot go on."""
        try:
            self.engine.fail_running(self.error or "")
            self.engine.check_integrity()
        except Exception:
            _log.exception("engine state is broken")
            return False
        return failures < _MAX_FAILURES
