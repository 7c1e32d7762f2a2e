"""Fixtures of the tests of several rooms."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.rig.log_records import log_records


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str | bytes], Path]:
    """Return a function that writes a `cluster.toml` and returns its path."""

    def write(text: str | bytes) -> Path:
        file = tmp_path / "cluster.toml"
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return file

    return write


@pytest.fixture
def link_records(caplog: pytest.LogCaptureFixture) -> Callable[[], list[Any]]:
    """Return the logged records of links; one of a bug fails the test."""
    caplog.set_level(logging.INFO)

    def records() -> list[Any]:
        assert not [record for record in log_records(caplog) if "bug" in record.message]
        return [record for record in log_records(caplog) if hasattr(record, "peer")]

    return records


@pytest.fixture
def reasons(link_records: Callable[[], list[Any]]) -> Callable[[], list[str]]:
    """Return why links ended or could not be made, as logged."""
    return lambda: [record.reason for record in link_records() if record.message == "no link"]
