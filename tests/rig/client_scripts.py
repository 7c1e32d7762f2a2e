"""Scripts of stock clients, each run by a virtual environment of its own beside a server of this project."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

RUN_WITHIN_S = 300.0


def lines_of(environment: Path, script: Path, port: int, model: str) -> list[dict[str, Any]]:
    """Return what a script prints, an object a line, once it has asked the server at this port of loopback."""
    done = subprocess.run(
        [str(environment / "bin" / "python"), str(script), f"http://127.0.0.1:{port}/v1", model],
        env={**os.environ, "LANGSMITH_TRACING": "false", "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=RUN_WITHIN_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]
