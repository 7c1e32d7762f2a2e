"""Which Espalier this is."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed


def version() -> str:
    """Return the version of the installed package, or of this checkout."""
    try:
        return installed("espalier")
    except PackageNotFoundError:
        return "0.1.0"  # run from a checkout
