"""The tiny model, and a server of it that the tests of one file share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from observability.engine.model.loading import LoadedModel, load_model
from tests.server.harness import RunningServer, serving


@pytest.fixture
def tiny() -> LoadedModel:
    return load_model("tiny")


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """One server for a file; whatever its tests did with it, the books agree afterwards."""
    with serving(load_model("tiny")) as running:
        yield running
        running.check_books()
