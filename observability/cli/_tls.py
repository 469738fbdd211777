"""The options --tls-cert and --tls-key, which every command that serves has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

TlsCert = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Serve https with this certificate (PEM), with --tls-key.", show_default=False),
]
TlsKey = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="The key of the certificate (PEM, without a passphrase).", show_default=False),
]
