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


def at_least_zero(text: str) -> float:
    """Return a finite number from 0 on."""
    value = float(text)
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError("must be a number from 0 on")
    return value


def positive(text: str) -> float:
    """Return a finite number above 0."""
    if not (value := at_least_zero(text)):
        raise argparse.ArgumentTypeError("must be above 0")
    return value


def fraction(text: str) -> float:
    """Return a number from 0 to 1."""
    if (value := at_least_zero(text)) > 1:
        raise argparse.ArgumentTypeError("must be from 0 to 1")
    return value


def temperature(text: str) -> float | None:
    """Return a temperature, or None for the default of the server."""
    return None if text == "default" else at_least_zero(text)


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
