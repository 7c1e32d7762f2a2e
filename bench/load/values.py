"""Values on the command line of a load; each function is a `type` of argparse."""

from __future__ import annotations

import argparse
import math


def count(text: str) -> int:
    """Return a number from 1 on."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def whole(text: str) -> int:
    """Return a number from 0 on."""
    if (value := int(text)) < 0:
        raise argparse.ArgumentTypeError("must be at least 0")
    return value


def positive(text: str) -> float:
    """Return a finite number above 0."""
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError("must be a number above 0")
    return value
