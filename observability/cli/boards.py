"""`kvscope boards`: writes the Grafana boards to a folder, checks boards, and imports them into a Grafana by its HTTP API."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from observability.errors import ConfigError, KvscopeError, ServiceError

Json = dict[str, Any]
FOLDER_UID, FOLDER_TITLE = "kvscope", "kvscope"
_HINTS = {
    401: "Set KVSCOPE_GRAFANA_TOKEN to a service account token of this Grafana (Administration, Service accounts).",
    403: "Give the service account the role Editor, or the permissions to create folders and to write boards in this one.",
    412: "Give --overwrite to replace what is there.",
}


def files() -> dict[str, str]:
    """File name -> JSON of every board, and of the page of each runbook to which alerts link."""
    from alerts import rules
    from alerts.links import runbook_uid
    from dashboards import runbooks
    from dashboards.boards import BOARDS
    from dashboards.panels import write

    out = {f"{name}.json": write(board()) for name, board in BOARDS.items()}
    for name in rules.ALERT_NAMES:
        out[f"{runbook_uid(name)}.json"] = write(runbooks.board(rules.named(name)))
    return out


def chosen(names: Iterable[str] | None) -> dict[str, str]:
    """`files()`, or those named: a board by its name, a runbook's page by its uid. Raises ConfigError."""
    every = files()
    if not names:
        return every
    wanted = {f"{name.removesuffix('.json')}.json": name for name in names}
    for file, name in wanted.items():
        if file not in every:
            raise ConfigError(
                f"There is no board {name!r}.",
                next_step=f"Choose from {', '.join(n.removesuffix('.json') for n in every)}.",
            )
    return {file: every[file] for file in wanted}


# -- check ----------------------------------------------------------------------------------------------------------


def expressions(board: Json) -> Iterator[tuple[str, str]]:
    """(where, query) of every panel and variable of a board."""
    for panel in _panels(board):
        for target in panel.get("targets") or ():
            if isinstance(target, dict) and target.get("expr"):
                yield f"panel {panel.get('title')!r}", str(target["expr"])
    for variable in (board.get("templating") or {}).get("list") or ():
        query = variable.get("query")
        text = query.get("query") if isinstance(query, dict) else query
        if variable.get("type") == "query" and text:
            yield f"variable {variable.get('name')!r}", str(text)


def _panels(board: Json) -> Iterator[Json]:
    for panel in board.get("panels") or ():
        if isinstance(panel, dict):
            yield panel
            yield from (inside for inside in panel.get("panels") or () if isinstance(inside, dict))


def faults(folder: Path) -> dict[str, list[str]]:
    """By file: what is wrong with the boards of `folder`, whoever wrote them. Empty lists for sound ones. Raises ConfigError."""
    from observability.cli._files import known_series, unknown_series

    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise ConfigError(f"{folder} has no board.", next_step=f"Run `kvscope boards write {folder}` first.")
    known, uids, out = known_series(), dict[str, str](), dict[str, list[str]]()
    for path in paths:
        found = out.setdefault(path.name, [])
        try:
            board = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            found.append(f"cannot be read as JSON: {error}")
            continue
        if not isinstance(board, dict) or not isinstance(board.get("panels"), list) or not board.get("title"):
            found.append("is not a board: it has no title or no list of panels")
            continue
        uid = str(board.get("uid") or "")
        if not uid:
            found.append("has no uid, so that links to it break and each import makes another board")
        elif uid in uids:
            found.append(f"has the uid {uid} of {uids[uid]}")
        uids.setdefault(uid, path.name)
        for where, expr in expressions(board):
            if names := unknown_series(expr, known):
                found.append(f"{where} asks for {', '.join(names)}, which nothing exports or records")
    return out


# -- import ---------------------------------------------------------------------------------------------------------


def import_boards(
    url: str,
    token: str,
    boards: dict[str, str],
    *,
    folder_uid: str,
    folder_title: str,
    overwrite: bool,
    message: str,
    dry_run: bool,
    seconds: float,
) -> dict[str, str]:
    """Writes `boards` (file name -> JSON) into a folder of the Grafana at `url`, which is made if it is not there. File name ->
    created, replaced, or with `dry_run` what would become of it. Raises ServiceError at the first refusal, naming the board."""
    from observability.cli._http import Api

    headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
    done: dict[str, str] = {}
    with Api("a Grafana", url, headers=headers, seconds=seconds, hints=_HINTS) as api:
        _, health = api.json("GET", "/api/health")
        if not isinstance(health, dict) or "database" not in health:
            raise ServiceError(
                f"{url} is not a Grafana.", next_step="Give the address at which Grafana opens in a browser."
            )
        status, _ = api.json("GET", f"/api/folders/{folder_uid}", accept=(200, 404))
        if status == 404 and not dry_run:
            api.json("POST", "/api/folders", json={"uid": folder_uid, "title": folder_title})
        for name, text in boards.items():
            board = json.loads(text)
            status, there = api.json("GET", f"/api/dashboards/uid/{board['uid']}", accept=(200, 404))
            exists = status == 200
            if exists and not overwrite:
                version = there.get("meta", {}).get("version", "?") if isinstance(there, dict) else "?"
                if dry_run:
                    done[name] = "exists, needs --overwrite"
                    continue
                raise ServiceError(
                    f"Board {board['title']!r} (uid {board['uid']}) is in this Grafana, version {version}; "
                    f"{len(done)} of {len(boards)} were imported.",
                    next_step=_HINTS[412],
                )
            if dry_run:
                done[name] = "would replace" if exists else "would create"
                continue
            try:
                api.json(
                    "POST",
                    "/api/dashboards/db",
                    json={
                        "dashboard": board | {"id": None},
                        "folderUid": folder_uid,
                        "overwrite": overwrite,
                        "message": message,
                    },
                )
            except ServiceError as error:
                raise ServiceError(
                    f"Board {board['title']!r}: {error.reason} ({len(done)} of {len(boards)} were imported.)",
                    next_step=error.next_step,
                ) from None
            done[name] = "replaced" if exists else "created"
    return done


# -- commands -------------------------------------------------------------------------------------------------------

Boards = Annotated[
    list[str] | None, typer.Option("--board", help="Only this board, such as p99. Again for more. [default: all]")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
commands = typer.Typer(no_args_is_help=True, help="Write, check and import the Grafana boards.")


def register(app: typer.Typer) -> None:
    app.add_typer(commands, name="boards")


def show(state: dict[str, str], as_json: bool) -> None:
    """Prints name -> state."""
    width = max((len(word) for word in state.values()), default=0)
    typer.echo(
        json.dumps(state, indent=1) if as_json else "\n".join(f"{word:{width}}  {name}" for name, word in state.items())
    )


@commands.command("write")
def write_boards(
    folder: Annotated[Path, typer.Argument(help="Folder to write to.", file_okay=False)],
    board: Boards = None,
    as_json: AsJson = False,
) -> None:
    """Write the boards, and a page for each alert's runbook, as JSON for Grafana 13 (import by hand, or provisioning).

    Examples:

        kvscope boards write ./boards

        kvscope boards write /var/lib/grafana/dashboards --board p99 --board kv-cache --json
    """
    from observability.cli._files import compare, write

    made = chosen(board)
    state = compare(folder, made)
    write(folder, made, state)
    show(state, as_json)


@commands.command("check")
def check_boards(
    folder: Annotated[Path, typer.Argument(help="Folder with boards.", file_okay=False)], as_json: AsJson = False
) -> None:
    """Say which boards of a folder are what this version makes, and what is wrong with those that are not, yours included: files that
    are no boards, uids given twice, queries for series that nothing exports or records (as after an upgrade).

    Exit code: 0 all boards work with this version (edited ones too), 1 something is wrong.

    Examples:

        kvscope boards check ./boards

        kvscope boards check ./boards --json
    """
    from observability.cli._files import compare

    wrong = faults(folder)
    made = files()
    state = compare(folder, {name: made[name] for name in wrong if name in made})
    rows = {
        name: {"state": state.get(name, "yours").replace("stale", "differs"), "faults": found}
        for name, found in wrong.items()
    }
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
    else:
        for name, row in rows.items():
            typer.echo("\n".join([f"{row['state']:8} {name}", *(f"         {fault}" for fault in row["faults"])]))
    bad = [name for name, found in wrong.items() if found]
    if bad:
        raise KvscopeError(
            f"{len(bad)} of {len(wrong)} boards do not work with this version: {', '.join(bad)}.",
            next_step="Correct them, or write them again with `kvscope boards write`.",
        )


@commands.command("import")
def import_command(
    url: Annotated[str, typer.Option(help="Address of the Grafana, with its path if it is served below one.")],
    token: Annotated[
        str | None,
        typer.Option(
            envvar="KVSCOPE_GRAFANA_TOKEN",
            help="Service account token (role Editor). Better in the environment.",
            show_default=False,
        ),
    ] = None,
    board: Boards = None,
    folder: Annotated[str, typer.Option(help="Title of the Grafana folder; made where it is missing.")] = FOLDER_TITLE,
    folder_uid: Annotated[str, typer.Option(help="Uid of the Grafana folder.")] = FOLDER_UID,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace boards that are there.")] = False,
    message: Annotated[str, typer.Option(help="Note in the boards' version history.")] = "kvscope boards import",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Change nothing; say what would be done.")] = False,
    timeout: Annotated[float, typer.Option(min=0.1, max=300, help="Seconds that one request may take.")] = 10.0,
    as_json: AsJson = False,
) -> None:
    """Import the boards into a Grafana by its HTTP API. They find their Prometheus by the variable "Data source".

    Examples:

        export KVSCOPE_GRAFANA_TOKEN=glsa_...

        kvscope boards import --url https://grafana.example.com --dry-run

        kvscope boards import --url https://grafana.example.com --overwrite --message "kvscope 0.2"

        kvscope boards import --url http://127.0.0.1:3000 --board p99 --folder "LLM serving" --folder-uid llm --json
    """
    import re

    from observability.cli._http import base_url

    if not token:
        raise ConfigError("No token for Grafana.", next_step=_HINTS[401])
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,40}", folder_uid):
        raise ConfigError(
            f"--folder-uid {folder_uid!r} is no uid.",
            next_step="Use at most 40 letters, digits, dashes and underscores.",
        )
    done = import_boards(
        base_url(url),
        token,
        chosen(board),
        folder_uid=folder_uid,
        folder_title=folder,
        overwrite=overwrite,
        message=message,
        dry_run=dry_run,
        seconds=timeout,
    )
    show(done, as_json)
