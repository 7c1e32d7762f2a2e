"""Fixtures of the tests of several rooms."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str | bytes], Path]:
    """Return a function that writes a `cluster.toml` and returns its path."""

    def write(text: str | bytes) -> Path:
        file = tmp_path / "cluster.toml"
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return file

    return write
