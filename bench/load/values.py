"""Values on the command line of a load; each function is a `type` of argparse."""

from __future__ import annotations

import argparse
import math

import msgspec

from bench.load.plan import Span


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


def span(text: str) -> Span:
    """Return the span of `N` or `A:B`."""
    least, colon, most = text.partition(":")
    span = Span(count(least), count(most if colon else least))
    if span.least > span.most:
        raise argparse.ArgumentTypeError("must be N, or A:B with A not above B")
    return span


def json_object(text: str) -> str:
    """Return the text of a JSON object."""
    try:
        document = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise argparse.ArgumentTypeError(f"is no JSON: {error}") from error
    if not isinstance(document, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return text
