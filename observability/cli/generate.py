"""`kvscope generate`: writes boards, rules and the reference of metrics, or says which written ones are out of date."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """
Examples:

  kvscope generate                                       below the current folder: dashboards, alerts, docs

  kvscope generate /etc/kvscope --grafana-url https://grafana.example.com

  kvscope generate --check                               exit code 1 when a file is missing or out of date
"""


def generated_files(grafana_url: str | None = None) -> dict[str, str]:
    """Path below the output folder -> text, of every board and rule file and the reference of metrics."""
    from alerts import adapters, rules
    from alerts.links import GRAFANA_URL, runbook_uid
    from dashboards import runbooks
    from dashboards.boards import BOARDS
    from dashboards.panels import write
    from exporters.adapters.reference import page
    from observability.telemetry.reference import reference

    base = GRAFANA_URL if grafana_url is None else grafana_url.rstrip("/")
    files = {f"dashboards/generated/{name}.json": write(board()) for name, board in BOARDS.items()}
    for name in rules.ALERT_NAMES:
        files[f"dashboards/generated/{runbook_uid(name)}.json"] = write(runbooks.board(rules.named(name)))
    files["docs/metrics.md"] = reference()
    files["alerts/generated/kvscope-recording.yml"] = rules.recording_file()
    files["alerts/generated/kvscope-alerts.yml"] = rules.alert_file(base)
    files |= adapters.rule_files()
    files["docs/adapters.md"] = page()
    return files


def _state(folder: Path, files: dict[str, str]) -> dict[str, str]:
    """For each file of ours, and each file in a `generated` folder that is not: current, missing, stale or unknown."""
    state = {}
    for name, text in files.items():
        path = folder / name
        if not path.is_file():
            state[name] = "missing"
        else:
            state[name] = "current" if path.read_text(encoding="utf-8") == text else "stale"
    for parent in sorted({(folder / name).parent for name in files if "/generated/" in name}):
        for path in sorted(parent.glob("*")):
            name = path.relative_to(folder).as_posix()
            if name not in files and path.is_file():
                state[name] = "unknown"
    return state


def register(app: typer.Typer) -> None:
    @app.command(epilog=EXAMPLES)
    def generate(
        folder: Annotated[Path, typer.Argument(help="Folder to write below.", file_okay=False)] = Path(),
        check: Annotated[
            bool, typer.Option("--check", help="Write nothing; exit 1 if something is out of date.")
        ] = False,
        grafana_url: Annotated[
            str | None,
            typer.Option(
                help="Where Grafana is reached; links of alerts point there. [default: http://127.0.0.1:3000]"
            ),
        ] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print the files and their state as JSON.")] = False,
    ) -> None:
        """Write the Grafana boards, the Prometheus recording and alerting rules, and the reference of all metrics."""
        from observability.errors import ConfigError, KvscopeError

        if grafana_url is not None and not grafana_url.startswith(("http://", "https://")):
            raise ConfigError(
                f"--grafana-url {grafana_url!r} is not an http or https address.",
                next_step="Give it as in --grafana-url https://grafana.example.com.",
            )
        files = generated_files(grafana_url)
        state = _state(folder, files)
        if not check:
            for name, text in files.items():
                if state[name] != "current":
                    path = folder / name
                    try:
                        path.parent.mkdir(parents=True, exist_ok=True)
                        path.write_text(text, encoding="utf-8")
                    except OSError as error:
                        raise ConfigError(
                            f"{path} cannot be written: {error.strerror}.",
                            next_step="Name a folder that you may write to.",
                        ) from error
                    state[name] = "written"
        if as_json:
            typer.echo(json.dumps(state, indent=1))
        else:
            for name, word in state.items():
                typer.echo(f"{word:8} {name}")
        behind = [name for name, word in state.items() if word in ("missing", "stale", "unknown")]
        if check and behind:
            raise KvscopeError(
                f"{len(behind)} of {len(files)} files are not what the code makes: {', '.join(behind)}.",
                next_step="Run `kvscope generate`, and remove files that it does not know.",
            )
