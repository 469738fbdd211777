"""`kvscope version`: what is installed here, for a bug report or an inventory."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

#: Distributions whose version decides how kvscope behaves.
PACKAGES = (
    "torch", "numpy", "prometheus-client", "opentelemetry-api", "streamlit", "prophet", "grafanalib", "vllm",
)  # fmt: skip


def register(app: typer.Typer) -> None:
    app.command()(version)


def version(
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Show the version, the Python it runs on, which extras are installed and in which versions.

    Examples:

        kvscope version

        kvscope version --json
    """
    told = facts()
    if as_json:
        typer.echo(json.dumps(told, indent=1))
        return
    extras = told.pop("extras")
    packages = told.pop("packages")
    told["extras"] = ", ".join(name for name, there in extras.items() if there) or "none"
    for name, value in {**told, **packages}.items():
        typer.echo(f"{name:20} {value}")


def facts() -> dict[str, Any]:
    """kvscope's own version, Python, platform, extra -> installed, package -> version; a package that is not here is absent."""
    import platform
    from importlib import metadata

    from observability.extras import installed

    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "kvscope": metadata.version("kvscope"),
        "python": platform.python_version(),
        "platform": platform.platform(terse=True),
        "extras": installed(),
        "packages": packages,
    }
