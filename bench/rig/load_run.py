"""One run of the load generator in processes of its own, and its report."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.rig.node import MODEL, ROOT

RUN_WITHIN_S = 300.0

ALLOWED_TIMES, ALLOWED_MS = 1.5, 20.0
"""The allowed slowdown of other clients during an attack: by this factor, or by so many milliseconds."""


def load(folder: Path, port: int, *options: object) -> dict[str, Any]:
    """Run `bench load` against a port with these options; return its JSON report. Raises if it did not exit with 0."""
    out = folder / "load.json"
    command = [sys.executable, "-m", "bench", "load", "--url", f"http://127.0.0.1:{port}", "--model", MODEL]
    command += ["--quiet", "--json", str(out), *map(str, options)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=RUN_WITHIN_S, stdout=subprocess.DEVNULL)
    document: dict[str, Any] = json.loads(out.read_text())
    return document


def slowdown_allowed(alone_ms: float, beside_ms: float) -> bool:
    """Whether a slowdown from `alone_ms` to `beside_ms` is allowed."""
    return beside_ms <= max(ALLOWED_TIMES * alone_ms, alone_ms + ALLOWED_MS)
