"""What all tests share: chance that is the same every time, and no test that fails because the machine is busy."""

import logging

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("espalier", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("espalier")


@pytest.fixture
def unlogged(monkeypatch):
    """For tests in which so much happens that logging it takes longer than doing it."""
    monkeypatch.setattr(logging.getLogger("supervisor.run"), "disabled", True)
