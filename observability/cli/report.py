"""`kvscope report`: one span of time as a self-contained HTML file, and as PDF where a Chromium is installed."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from observability.errors import ConfigError, ServiceError, StoreError

_UNITS = {"m": 60.0, "h": 3600.0, "d": 86400.0}
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PDF_SECONDS = 180.0
#: Charts are drawn for the window and then printed: its text is as wide as that of an A4 page in landscape, whose margins are 12 mm.
WINDOW = "--window-size=1096,900"


def register(app: typer.Typer) -> None:
    app.command()(report)


def report(
    begin: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="TIME",
            help="Start: 2026-11-30T02:00 (UTC unless it has an offset), or how long before --to: 90m, 6h, 2d.",
        ),
    ],
    to: Annotated[str, typer.Option("--to", metavar="TIME", help="End: a time, or `now`.")] = "now",
    source: Annotated[
        str | None,
        typer.Option(
            envvar="KVSCOPE_SOURCE",
            help="File of a recorder, or prometheus:URL. Default: the recorded history in the user's data folder.",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model to report on. Default: the only one.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="File to write. Default: kvscope-MODEL-FROM.html here.", show_default=False)
    ] = None,
    pdf: Annotated[
        bool, typer.Option("--pdf", help="Also write a PDF beside it, with an installed Chromium or Chrome.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what the report says, and the files written, as JSON.")
    ] = False,
) -> None:
    """Write what happened in a span of time as one HTML file: objectives, findings, changes, charts and their queries.

    The file needs no network and no kvscope to be read.

    Examples:

        kvscope report --from 6h

        kvscope report --from 2026-11-30T02:00 --to 2026-11-30T05:30 --out incident.html --pdf

        kvscope report --from 1d --source prometheus:http://127.0.0.1:9090 --model llama --json
    """  # fmt: skip
    from platformdirs import user_data_path

    from observability.app.report import as_html, make_report, span_view
    from observability.app.report import as_json as told
    from observability.cli._terminal import check_writable
    from observability.store.open import open_source

    end = datetime.now(UTC).timestamp() if to == "now" else parse_time(to, "--to")
    start = parse_start(begin, end)
    browser = find_browser() if pdf else None
    read = open_source(source or str(user_data_path("kvscope") / "kvscope.sqlite"))
    view = span_view(choose_model(model, read.models()), start, end)
    safe = re.sub(r"[^\w.-]+", "-", view.model)
    path = out or Path(f"kvscope-{safe}-{datetime.fromtimestamp(start, UTC):%Y%m%dT%H%M}.html")
    check_writable(path, "Give --out another path.")
    made = make_report(read, view)
    path.write_text(as_html(made), encoding="utf-8")
    files = {"html": str(path)}
    if browser is not None:
        files["pdf"] = str(print_pdf(browser, path, path.with_suffix(".pdf")))
    if as_json:
        typer.echo(json.dumps({**told(made), "files": files}, indent=2, allow_nan=False))
    else:
        for kind, name in files.items():
            typer.echo(f"{kind.upper()}: {name}")


def parse_time(text: str, option: str) -> float:
    """Unix seconds of an ISO 8601 time, UTC unless it has an offset. Raises ConfigError."""
    try:
        when = datetime.fromisoformat(text.strip())
    except ValueError:
        raise ConfigError(
            f"{option} {text!r} is not a time.",
            next_step="Write 2026-11-30T02:00, or for --from a length such as 90m, 6h or 2d.",
        ) from None
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()


def parse_start(text: str, end: float) -> float:
    """Unix seconds of --from: a time, or so long before `end`. Raises ConfigError."""
    match = re.fullmatch(r"(\d{1,6}(?:\.\d+)?)([mhd])", text.strip())
    start = end - float(match[1]) * _UNITS[match[2]] if match else parse_time(text, "--from")
    if start >= end:
        raise ConfigError(f"--from {text} is not before --to.", next_step="Let the span end after it begins.")
    return start


def choose_model(wanted: str | None, models: list[str]) -> str:
    """The model to report on. Raises ConfigError when that is not told, StoreError when there is none."""
    if not models:
        raise StoreError(
            "The source has no values yet.",
            next_step="Record an engine first: kvscope record, or simulate: kvscope history.",
        )
    if wanted is None and len(models) > 1:
        raise ConfigError(
            f"The source has {len(models)} models.", next_step=f"Choose one with --model: {', '.join(models[:20])}."
        )
    if wanted is not None and wanted not in models:
        raise ConfigError(f"The source has no model {wanted!r}.", next_step=f"Use one of {', '.join(models[:20])}.")
    return wanted or models[0]


def find_browser() -> str:
    """An installed Chromium or Chrome. Raises ConfigError."""
    import shutil

    for name in BROWSERS:
        if path := shutil.which(name):
            return path
    raise ConfigError(
        "--pdf needs a Chromium or Chrome, and none is on the PATH.",
        next_step="Install one (apt-get install chromium), or leave --pdf out and print the HTML file from any browser.",
    )


def print_pdf(browser: str, html: Path, pdf: Path) -> Path:
    """Prints `html` to `pdf` with a browser that can reach no network. Raises ServiceError."""
    import os
    import subprocess
    import tempfile

    with tempfile.TemporaryDirectory(prefix="kvscope-", ignore_cleanup_errors=True) as profile:
        argv = [
            browser, "--headless", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync",
            "--disable-dev-shm-usage", "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={profile}", "--no-pdf-header-footer",
            "--virtual-time-budget=20000", WINDOW, f"--print-to-pdf={pdf.resolve()}", html.resolve().as_uri(),
        ]  # fmt: skip
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            argv.insert(1, "--no-sandbox")  # Chromium's own sandbox refuses to run as root
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=PDF_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            raise ServiceError(
                f"{browser} did not print the report within {PDF_SECONDS:g} s.",
                next_step=f"Print {html} from a browser.",
            ) from None
    if done.returncode != 0 or not pdf.is_file():
        raise ServiceError(
            f"{browser} could not print the report: {done.stderr.strip()[-300:]}.",
            next_step=f"Print {html} from a browser.",
        )
    return pdf
