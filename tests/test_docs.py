"""The pages in README.md and docs/ against the code: settings and their defaults, commands, metric names, files, figures."""

from __future__ import annotations

import asyncio
import re
import shlex
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer
from starlette.requests import Request
from starlette.responses import Response
from typer.core import TyperGroup

from alerts import adapters
from observability import catalog
from observability.cli import root
from observability.cli.route import metrics_of
from observability.cli.serve import _mechanisms
from observability.engine import executor, kv
from observability.engine.executor.torch_executor import TorchExecutor
from observability.engine.model.loading import load_model
from observability.engine.openai_types import GenerationBody
from observability.engine.router import Router, RouterSettings
from observability.engine.settings import parse_settings
from observability.engine.types import ControllerConfig, DegradeRecord, EngineConfig
from observability.signals import SIGNALS
from tests.conftest import REPO, require

PAGES = (REPO / "README.md", *sorted((REPO / "docs").glob("*.md")))
ENGINE_PAGE = (REPO / "docs/engine.md").read_text()
SETTINGS = [f.name for f in fields(EngineConfig)] + [f"controller.{f.name}" for f in fields(ControllerConfig)]
COMMANDS = typer.main.get_command(root)


def setting_rows() -> list[list[str]]:
    """[name, default, off] of each row of the page's tables of settings, without quotes; "-" where there is no value for off."""
    rows, within = [], False
    for line in ENGINE_PAGE.splitlines():
        cells = [cell.strip().strip("`") for cell in line.split("|")[1:-1]]
        if cells[:3] == ["Setting", "Default", "Off"]:
            within = True
        elif within and cells and not cells[0].startswith("---"):
            rows.append(cells[:3])
        else:
            within = within and bool(cells)
    return rows


def config_of(*pairs: str) -> EngineConfig:
    return EngineConfig(**parse_settings(pairs))


def quoted(page: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", page)


def router_families() -> set[str]:
    """Names of the families at the /metrics of `kvscope route`."""

    async def scrape() -> Response:
        return await metrics_of(Router(["http://replica"], RouterSettings()))(Request({"type": "http"}))

    return set(re.findall(r"^# TYPE (\S+)", bytes(asyncio.run(scrape()).body).decode(), re.MULTILINE))


def command_lines(page: str) -> Iterator[list[str]]:
    """Words after `kvscope` of each indented line that runs it."""
    for line in re.findall(r"^ {4,}kvscope (.+)$", page, re.MULTILINE):
        yield shlex.split(line, comments=True)


def find_command(words: list[str]) -> tuple[Any, list[str]]:
    """The command or group of commands that `words` name and the words behind its name. Raises KeyError for one that there is not."""
    command: Any = COMMANDS
    while words and isinstance(command, TyperGroup):
        name, *words = words
        command = command.commands[name]
    return command, words


# -- settings ----------------------------------------------------------------------------------------------------------


def test_the_engine_page_lists_every_setting_once_and_no_other() -> None:
    assert Counter(name for name, _, _ in setting_rows()) == Counter(SETTINGS)


@pytest.mark.parametrize(("name", "default", "off"), setting_rows())
def test_a_setting_has_the_default_and_accepts_the_off_value_on_the_page(name: str, default: str, off: str) -> None:
    if name.startswith("controller."):
        assert config_of(f"{name}={default}").controller == ControllerConfig()
    else:
        assert config_of(f"{name}={default}") == EngineConfig()
    if off != "-":
        config_of(f"{name}={off}")


def test_settings_in_the_text_of_the_engine_page_exist() -> None:
    pairs = [text for text in quoted(ENGINE_PAGE) if re.fullmatch(r"[a-z_.]+=\S+", text)]
    assert pairs
    for pair in pairs:
        config_of(pair)
    names = {*SETTINGS, *GenerationBody.model_fields, *(f.name for f in fields(DegradeRecord))}
    labels = {value for values in vars(catalog).values() if isinstance(values, tuple) for value in values}
    words = {text for text in quoted(ENGINE_PAGE) if re.fullmatch(r"[a-z0-9]+(_[a-z0-9]+)+", text)}
    unknown = {word for word in words if word not in names | labels and not word.startswith("kvscope_")}
    assert not unknown


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_every_engine_option_in_an_example_is_accepted_as_serve_accepts_it(page: Path) -> None:
    for words in command_lines(page.read_text()):
        if words[0] == "serve":
            command, arguments = find_command(words)
            chosen = command.make_context("serve", arguments).params["engine"] or []
            EngineConfig(**_mechanisms(chosen))


# -- commands, metrics, files --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_every_command_line_in_the_docs_is_understood(page: Path) -> None:
    text = page.read_text()
    for words in command_lines(text):
        command, arguments = find_command(words)
        command.make_context(" ".join(words), arguments)  # raises for an option or value that there is not
    for mention in re.findall(r"`kvscope ([a-z][^`\n]*)`", text):
        find_command(mention.split())


def test_every_metric_in_the_docs_is_exported() -> None:
    known = {name for family in catalog.FAMILIES for name in (family.name, family.series)}
    known |= {f.name + part for f in catalog.FAMILIES if f.kind == "histogram" for part in ("_sum", "_count")}
    known |= {signal.name.split(":")[1] for signal in SIGNALS} | {adapters.CAPABILITY.split(":")[1]}
    of_router = router_families()
    for page in PAGES:
        unknown = set(re.findall(r"\bkvscope_[a-z0-9_]*[a-z0-9]\b", page.read_text())) - known - of_router
        # a path of the compose file, not a metric
        assert unknown <= {"kvscope_token"}, f"{page.name} names {sorted(unknown)}"


def test_files_that_the_engine_page_names_exist() -> None:
    paths = [text for text in quoted(ENGINE_PAGE) if text.endswith(".py") and " " not in text]
    assert len(paths) > 10
    for path in paths:
        assert (REPO / path).is_file() or (REPO / "observability/engine" / path).is_file(), path


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_readme_leads_to_every_page_of_the_docs_by_a_row_of_its_index() -> None:
    rows = re.findall(
        r"^\| \[docs/([\w-]+\.md)\]\(docs/\1\) \| (.+) \|$", (REPO / "README.md").read_text(), re.MULTILINE
    )
    assert sorted(name for name, _ in rows) == [page.name for page in PAGES[1:]]


def test_readme_names_every_command() -> None:
    rows = set(re.findall(r"^\| `kvscope ([a-z-]+)", (REPO / "README.md").read_text(), re.MULTILINE))
    assert set(COMMANDS.commands) - rows <= {"demo", "generate"}  # `make demo`; for those who develop


@pytest.mark.parametrize("package", [executor, kv], ids=lambda package: package.__name__)
def test_a_folder_of_the_engine_names_each_of_its_files(package: Any) -> None:
    files = {path.name for path in Path(package.__file__).parent.glob("*.py")}
    named = set(re.findall(r"\w+\.py\b", package.__doc__))
    assert {name for name in files if name != "__init__.py" and not name.endswith("_pb2.py")} == named


# -- figures -------------------------------------------------------------------------------------------------------------


def kv_bytes(model: str) -> tuple[float, int]:
    """(per token, per sequence) of a preset in float32, as its executor allocates them."""
    config = EngineConfig(prefix_caching=False, num_blocks=512)
    built = TorchExecutor(load_model(model), config, None)
    return built.kv_bytes_per_block / config.block_size, built.kv_fixed_bytes_per_sequence


def test_kv_bytes_of_the_presets_are_as_the_engine_page_says() -> None:
    (slope, fixed), (ordinary, nothing) = kv_bytes("tiny-mla"), kv_bytes("tiny")
    text = " ".join(ENGINE_PAGE.split())
    assert f"`tiny-mla` takes {slope:,.0f} B per token and {fixed:,} B per sequence in float32" in text
    assert f"`tiny`, as wide and deep with ordinary attention, takes {ordinary:,.0f} B per token" in text
    assert nothing == 0


def test_no_file_holds_the_marks_of_a_merge() -> None:
    names = subprocess.run(["git", "ls-files"], cwd=REPO, capture_output=True, text=True).stdout.split()
    require(bool(names), "not a git checkout")
    marks = re.compile(rb"^(<{7}|>{7}) ", re.MULTILINE)
    assert [name for name in names if (REPO / name).is_file() and marks.search((REPO / name).read_bytes())] == []
