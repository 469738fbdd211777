"""`kvscope generate`: writes every file of the repository that is made from code, or says which of them are out of date."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """
Examples:

  kvscope generate                       below the current folder: dashboards, alerts, deploy, docs

  kvscope generate --check               exit code 1 when a file is missing or out of date
"""


def generated_files() -> dict[str, str]:
    """Path below the repository -> text: boards, rules, the kustomize base, the references of metrics, signals, alerts and adapters."""
    from alerts import grafana
    from alerts import reference as derived
    from dashboards import kubernetes
    from exporters.adapters.reference import page
    from observability.cli import boards, rules
    from observability.telemetry.reference import reference

    made, rule_files = boards.files(), rules.files()
    out = {f"dashboards/generated/{name}": text for name, text in made.items()}
    out["docs/metrics.md"] = reference()
    out["docs/signals.md"] = derived.signals_page()
    out["docs/alerts.md"] = derived.alerts_page()
    out |= {f"alerts/generated/{name}": text for name, text in rule_files.items()}
    out["alerts/generated/grafana/kvscope-alerts.yml"] = grafana.provisioning_file()
    out |= kubernetes.files({name: rule_files[name] for name in (rules.RECORDING, rules.ALERTS)}, made)
    out["docs/adapters.md"] = page()
    return out


def register(app: typer.Typer) -> None:
    @app.command(epilog=EXAMPLES)
    def generate(
        folder: Annotated[Path, typer.Argument(help="Folder of the repository.", file_okay=False)] = Path(),
        check: Annotated[
            bool, typer.Option("--check", help="Write nothing; exit 1 if something is out of date.")
        ] = False,
        as_json: Annotated[bool, typer.Option("--json", help="Print the files and their state as JSON.")] = False,
    ) -> None:
        """For developers: write what the repository holds of boards, rules, manifests and references. To use boards and rules, take
        `kvscope boards` and `kvscope rules`."""
        from observability.cli._files import compare, write
        from observability.errors import KvscopeError

        files = generated_files()
        owned = sorted({Path(name).parent.as_posix() for name in files if "/generated/" in name})
        state = compare(folder, files, owned=owned)
        if not check:
            write(folder, files, state)
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
