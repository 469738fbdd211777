"""A server whose pages the test sets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.adapters.serving import CAPTURE, Server
from tests.conftest import require


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    yield found
    found.end()


@pytest.fixture
def capture(data_dir: Path) -> str:
    """/metrics of a real vLLM 0.32 after 60 requests."""
    path = data_dir / CAPTURE
    require(path.is_file(), f"recorded data is missing: {path}")
    return path.read_text()
