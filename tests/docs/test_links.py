"""Links of the pages: files and headings that they lead to are there, addresses outside are well formed."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.conftest import REPO

DOCS = sorted((REPO / "docs").glob("*.md"))
PAGES = (REPO / "README.md", *DOCS, *sorted((REPO / "alerts/runbooks").glob("*.md")))


def prose(page: Path) -> str:
    """Text without blocks of code and without code in quotes."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^ {4,}.*$", "", text, flags=re.MULTILINE))


def links(page: Path) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", prose(page))


def anchors(page: Path) -> set[str]:
    """Anchors of the headings, as GitHub makes them."""
    found: set[str] = set()
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for title in re.findall(r"^#{1,6} (.+)$", text, re.MULTILINE):
        plain = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).lower()).replace(" ", "-")
        name, number = plain, 0
        while name in found:
            number += 1
            name = f"{plain}-{number}"
        found.add(name)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_a_link_leads_to_a_file_and_a_heading_that_are_there(page: Path) -> None:
    for link in links(page):
        if urlsplit(link).scheme:
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page.name}: {link}"
        assert target.is_relative_to(REPO), f"{page.name}: {link} leads out of the repository"
        if anchor:
            assert anchor in anchors(target), f"{page.name}: {link}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_an_address_outside_is_well_formed(page: Path) -> None:
    for link in links(page):
        parts = urlsplit(link)
        if parts.scheme:
            assert parts.scheme == "https", f"{page.name}: {link}"
            assert re.fullmatch(r"(?:[a-z0-9-]+\.)+[a-z]{2,}", parts.netloc), f"{page.name}: {link}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_a_page_begins_with_its_one_title(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert text.startswith("# ")
    assert len(re.findall(r"^# ", text, re.MULTILINE)) == 1
