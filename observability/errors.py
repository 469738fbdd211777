"""The error tree. Every message names the input, the reason and the next step; the command line prints it and exits non-zero."""

import math


class KvscopeError(Exception):
    """Base of every error that a user can cause or act on.

    `next_step` is one imperative sentence; `str(error)` shows it after the reason.
    """

    exit_code = 1
    #: Outcome of a request that is refused with it (catalog.OUTCOMES): it could be served at another time.
    outcome = "rejected"

    def __init__(self, reason: str, *, next_step: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.next_step = next_step

    def __str__(self) -> str:
        return f"{self.reason}\nNext: {self.next_step}" if self.next_step else self.reason


class ConfigError(KvscopeError):
    """A setting is out of range, or two settings contradict each other."""

    exit_code = 2


class ModelError(KvscopeError):
    """Weights, tokenizer or model configuration cannot be found, read or trusted."""


class TraceError(KvscopeError):
    """A recorded load cannot be read; the message carries the line number."""


class RequestError(KvscopeError):
    """A request cannot be served as asked (bad sampling value, prompt too long)."""

    outcome = "invalid"

    def __init__(self, reason: str, *, param: str | None = None, next_step: str = "") -> None:
        super().__init__(reason, next_step=next_step)
        self.param = param


class QueueFullError(KvscopeError):
    """The bounded waiting queue is full; the client may try again after `retry_after_seconds`."""

    def __init__(self, reason: str, *, retry_after_seconds: float) -> None:
        self.retry_after_seconds = max(1, math.ceil(retry_after_seconds))
        super().__init__(reason, next_step=f"Retry after {self.retry_after_seconds} s.")


class StoreError(KvscopeError):
    """A series source (Prometheus or the embedded file) cannot be read or written."""


class ServiceError(KvscopeError):
    """A server cannot start or stopped unexpectedly (port in use, child process ended)."""
