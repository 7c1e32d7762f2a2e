"""The version of Espalier."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed

CHECKOUT = "0.1.0"  # the version in pyproject.toml


def version() -> str:
    """Return the version of the installed package, or of this checkout."""
    try:
        return installed("espalier")
    except PackageNotFoundError:
        return CHECKOUT
