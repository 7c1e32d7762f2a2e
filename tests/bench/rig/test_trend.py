"""The trend of a quantity is its growth by a thousand requests."""

import pytest

from bench.rig.trend import slope


def test_the_slope_is_by_a_thousand_requests() -> None:
    assert slope([(0, 5.0), (100, 5.0), (200, 5.0)]) == 0
    assert slope([(0, 1.0), (500, 2.0), (1000, 3.0)]) == pytest.approx(2.0)
