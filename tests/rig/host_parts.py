"""Code that runs where SGLang is imported, in forks of one process that has imported it once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from tempfile import TemporaryFile

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
from actors.engines.sglang.host import liveness, outputs, server, warm_up
from actors.engines.sglang.host.vision import encoder

for line in sys.stdin:
    errors = {}
    for name, code in json.loads(line).items():
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
    print(json.dumps({name: error.read() for name, error in errors.items()}), flush=True)
"""
)
Parts = Mapping[str, str]
RunParts = Callable[[Parts], dict[str, str]]


@contextmanager
def parts_process() -> Iterator[RunParts]:
    """Yield a function that returns what each part wrote to its standard error, where `done` is last at its end."""
    with (
        TemporaryFile() as log,
        subprocess.Popen(
            [sys.executable, "-c", IMPORTED_ONCE],
            env=host_environment(os.environ, "cpu"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        sent, written = process.stdin, process.stdout

        def run(parts: Parts) -> dict[str, str]:
            print(json.dumps(dict(parts)), file=sent, flush=True)
            for line in written:
                if line.startswith("{"):  # SGLang's imports may print
                    errors: dict[str, str] = json.loads(line)
                    return errors
            log.seek(0)
            raise AssertionError(log.read().decode())

        yield run
