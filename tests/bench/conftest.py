"""Tests of benches with real processes run in the night alone: what they prove serves no user of the product."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests of this folder that run in real time."""
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("realtime") is not None:
            item.add_marker("nightly")
