"""A launcher that runs several nodes, for tests: started from a file of its own, watched as a whole, always ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench._node import MARK, ROOT, Node, Seen, _die_with_us

SIMULATED = """\
[node.front]
[node.one]
listen = "127.0.0.1:{ports[1]}"
[node.two]
listen = "127.0.0.1:{ports[2]}"
[cluster]
retry_max_s = 0.5
[gateway]
node = "front"
port = {ports[0]}
[model.tiny]
path = "{tiny}"
[engine.tiny-1]
node = "one"
model = "tiny"
kind = "simulated"
kv_tokens_max = 65536
simulated.costs.fixed_s = 0.02
[engine.tiny-2]
node = "two"
model = "tiny"
kind = "simulated"
kv_tokens_max = 65536
simulated.costs.fixed_s = 0.02
"""


THIRD = """
[node.three]
listen = "127.0.0.1:{port}"
[engine.tiny-3]
node = "three"
model = "tiny"
kind = "simulated"
kv_tokens_max = 65536
"""


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on now, all different."""
    import socket

    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


@contextmanager
def launched(folder: Path, cluster: str, port: int, *arguments: str) -> Iterator[Node]:
    """Start `cluster` as one launcher and its nodes; its gateway will listen at `port`."""
    tmp, file = folder / "t", folder / "cluster.toml"
    tmp.mkdir(exist_ok=True)
    file.write_text(cluster)
    mark = f"{os.getpid()}-{port}"
    own = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "supervisor", str(file), *arguments],
            cwd=ROOT,
            env=own | {"TMPDIR": str(tmp), MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=_die_with_us,  # noqa: PLW1509  # one system call, and no lock is taken
        )
    running = Node(process, port, folder, tmp, mark, time.perf_counter())
    try:
        yield running
    finally:
        running.end()


def operate(of: Node, *arguments: str) -> tuple[int, str]:
    """Run an operator's command on a launcher's cluster, and return its exit code and what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "supervisor", str(of.folder / "cluster.toml"), *arguments],
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout + done.stderr


def seen(of: Node) -> dict[str, dict[str, Any]]:
    """Return what an operator sees of each node of a launcher's cluster."""
    told: dict[str, dict[str, Any]] = json.loads(operate(of, "status", "--json")[1])["nodes"]
    return told


def nodes(of: Node) -> dict[str, Seen]:
    """Return the processes of a launcher's nodes that live, by name."""
    living = {seen.command.split("--node ")[1].split()[0]: seen for seen in of.alive() if "--launched" in seen.command}
    return dict(sorted(living.items()))
