"""What tests with real processes share: a short folder for nodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench._node import place


@pytest.fixture
def folder() -> Iterator[Path]:
    with place() as made:
        yield made
