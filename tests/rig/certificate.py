"""A self-signed certificate for tests, made by the `openssl` command."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

FOLDER = TemporaryDirectory(prefix="espalier-test-tls-")  # gone when the process ends
NAMES = "subjectAltName=DNS:localhost,IP:127.0.0.1"


@cache
def files() -> tuple[Path, Path]:
    """Return a certificate and its key; skips the test where there is no `openssl`."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl command to make a certificate with")
    folder = Path(FOLDER.name)
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    make(certificate, key)
    return certificate, key


def make(certificate: Path, key: Path, *more: str, names: str = NAMES) -> None:
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2"),
            *(more or ("-nodes",)),
            *("-subj", "/CN=localhost", "-addext", names, "-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
        timeout=30,
    )


def trusting() -> ssl.SSLContext:
    """Return a client's TLS context that trusts the certificate."""
    return ssl.create_default_context(cafile=str(files()[0]))
