"""Addresses of other servers: as they may be shown, and whose certificates are trusted."""

from __future__ import annotations

import re
import ssl


def without_secrets(url: str) -> str:
    """An address as it may be shown: no user, no password, no values of its query. Works on what is no address, too."""
    url = re.sub(r"^([^/?#]*//)?[^/?#]*@", r"\1", url)
    return re.sub(r"(?<==)[^&#]+(?=[^#]*)", "...", url) if "?" in url else url


def trusted() -> ssl.SSLContext:
    """For clients: certificates that httpx brings, those of the system, and those in SSL_CERT_FILE and SSL_CERT_DIR."""
    import httpx

    context = httpx.create_ssl_context(trust_env=False)
    context.load_default_certs()
    return context
