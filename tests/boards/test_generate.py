"""`kvscope generate`: files in the repository are current, and the command says so when they are not."""

from __future__ import annotations

import json
from pathlib import Path

import typer
from typer.testing import CliRunner

from dashboards.boards import BOARDS
from observability.cli import generate
from observability.errors import KvscopeError

REPO = Path(__file__).resolve().parents[2]


def _run(*arguments: str) -> tuple[int, str, BaseException | None]:
    app = typer.Typer()
    generate.register(app)
    app.callback()(lambda: None)  # more than one command, as in the real program
    result = CliRunner().invoke(app, ["generate", *arguments])
    return result.exit_code, result.output, result.exception


def test_generated_files_in_the_repository_are_current() -> None:
    code, output, _ = _run(str(REPO), "--check", "--json")
    assert code == 0, output
    assert set(json.loads(output).values()) == {"current"}


def test_generate_writes_what_check_then_finds_current(tmp_path: Path) -> None:
    assert _run(str(tmp_path))[0] == 0
    assert _run(str(tmp_path), "--check")[0] == 0
    written = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert written == set(generate.generated_files())


def test_check_names_missing_stale_and_unknown_files(tmp_path: Path) -> None:
    _run(str(tmp_path))
    (tmp_path / "alerts/generated/kvscope-alerts.yml").write_text("groups: []\n")
    (tmp_path / "dashboards/generated/kv-cache.json").unlink()
    (tmp_path / "alerts/generated/old.yml").write_text("groups: []\n")
    code, output, error = _run(str(tmp_path), "--check")
    assert code != 0
    assert isinstance(error, KvscopeError)
    assert "stale    alerts/generated/kvscope-alerts.yml" in output
    assert "missing  dashboards/generated/kv-cache.json" in output
    assert "unknown  alerts/generated/old.yml" in output
    assert "kvscope generate" in error.next_step


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "dashboards").write_text("a file where a folder should be")
    _, _, error = _run(str(tmp_path))
    assert isinstance(error, KvscopeError)
    assert "dashboards" in str(error)


def test_the_page_about_boards_lists_every_board_with_its_question() -> None:
    page = (REPO / "docs/boards.md").read_text()
    listed = [line for line in page.splitlines() if "`dashboards/generated/" in line and line.startswith("|")]
    made = {name: make() for name, make in BOARDS.items()}
    assert listed == [
        f"| {b.title} | `dashboards/generated/{name}.json` | {b.description} |" for name, b in made.items()
    ]
