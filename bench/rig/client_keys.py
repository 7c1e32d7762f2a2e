"""A file of client keys for a gateway that is measured."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path


def write_keys(folder: Path, secrets: Mapping[str, str]) -> Path:
    """Write the secrets, by the names of their keys, into a key file in a folder; return its path."""
    path = folder / "keys.toml"
    sections = (
        f'[key.{name}]\nsha256 = "{hashlib.sha256(secret.encode()).hexdigest()}"\n' for name, secret in secrets.items()
    )
    path.write_text("".join(sections))
    path.chmod(0o600)
    return path
