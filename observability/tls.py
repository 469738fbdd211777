"""Certificate and key of a server of ours, checked before it listens."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from observability.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files: the certificate, with those between it and its root behind it, and its key without a passphrase."""

    cert: Path
    key: Path

    @classmethod
    def of(cls, cert: Path | None, key: Path | None) -> Tls | None:
        """None: neither is given, so plain HTTP. Raises ConfigError for one without the other, and for files that cannot be used."""
        if cert is None and key is None:
            return None
        if cert is None or key is None:
            raise ConfigError(
                "--tls-cert and --tls-key go together.", next_step="Give both, or neither for plain HTTP."
            )

        def no_passphrase() -> str:  # the library would ask for it on the terminal
            raise ValueError("the key has a passphrase")

        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, no_passphrase)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigError(
                f"{cert} and {key} cannot be used for TLS: {reason}.",
                next_step="Give a certificate and its own key as PEM files that this user may read, the key without a passphrase.",
            ) from error
        return cls(cert, key)


def scheme(tls: Tls | None) -> str:
    return "http" if tls is None else "https"


def uvicorn_options(tls: Tls | None) -> dict[str, str]:
    """Arguments of uvicorn.Config."""
    return {} if tls is None else {"ssl_certfile": str(tls.cert), "ssl_keyfile": str(tls.key)}
