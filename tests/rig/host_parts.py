"""Code that runs where SGLang is imported, in forks of one process that has imported it once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping

from supervisor.engines.sglang.spawn import host_environment

HEAD = """
import espalier_sglang_cpu; espalier_sglang_cpu.prepare()
import asyncio, os, signal, socket, subprocess, sys
from types import SimpleNamespace
"""
IMPORTED_ONCE = (
    HEAD
    + """
import json, traceback
from actors.engines.sglang.host import encoder, liveness, outputs, server, warm_up

parts = json.load(sys.stdin)
errors = {}
for name, code in parts.items():
    reads, writes = os.pipe()
    if os.fork() == 0:
        os.setsid()
        os.dup2(writes, 2)
        try:
            exec(code, {})
            print("done", file=sys.stderr, flush=True)
        except BaseException:
            traceback.print_exc()
        os.killpg(0, signal.SIGKILL)  # what it started, too
    os.close(writes)
    errors[name] = open(reads)
print(json.dumps({name: error.read() for name, error in errors.items()}))
"""
)


def written_by(parts: Mapping[str, str]) -> dict[str, str]:
    """Return what each part wrote to its standard error; one that has reached its end has written `done` last."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED_ONCE],
        env=host_environment(os.environ, "cpu"),
        input=json.dumps(parts),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    errors: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return errors
