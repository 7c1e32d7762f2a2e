"""Logged records as tests read them: with the fields that a caller gave as `extra`, of which `logging` knows no types."""

from typing import Any

import pytest


def log_records(caplog: pytest.LogCaptureFixture) -> list[Any]:
    return list(caplog.records)
