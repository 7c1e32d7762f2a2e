"""The one process that imports SGLang for all tests of the host's parts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rig.host_parts import RunParts, parts_process


@pytest.fixture(scope="session")
def run_parts() -> Iterator[RunParts]:
    with parts_process() as run:
        yield run
