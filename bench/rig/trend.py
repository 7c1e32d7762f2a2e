"""The growth of a quantity with the number of requests."""

from __future__ import annotations


def slope(points: list[tuple[float, float]]) -> float:
    """Return the least-squares slope of points (requests, value), by 1,000 requests."""
    count = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / count, sum(y for _, y in points) / count
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return 1000 * sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
