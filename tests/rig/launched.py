"""A launcher process that runs several nodes, for tests: its processes and log lines are read, and it is always ended."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

from bench.rig.node import ROOT, Node, free_ports, start_process, wait_until
from bench.rig.processes import MARK, ProcessEntry

ENGINE = """\
[engine.tiny-{number}]
node = "{node}"
model = "tiny"
kind = "simulated"
kv_tokens_max = 65536
simulated.costs.fixed_s = 0.02
"""
SIMULATED = """\
[node.front]
[node.one]
listen = "127.0.0.1:{ports[1]}"
[node.two]
listen = "127.0.0.1:{ports[2]}"
[cluster]
silent_s = 8.0  # a process of a busy machine may stand still for a few seconds
[gateway]
node = "front"
port = {ports[0]}
[model.tiny]
path = "{tiny}"
"""
SIMULATED += ENGINE.format(number=1, node="one") + ENGINE.format(number=2, node="two")
THIRD = '[node.three]\nlisten = "127.0.0.1:{port}"\n' + ENGINE.format(number=3, node="three")


class ClusterFolder(Protocol):
    """A cluster whose file is `cluster.toml` in a folder."""

    folder: Path


@contextmanager
def running_launcher(folder: Path, cluster: str, port: int, *arguments: str) -> Iterator[Node]:
    """Start `cluster` as one launcher and its nodes; its gateway will listen at `port`."""
    tmp, file = folder / "t", folder / "cluster.toml"
    tmp.mkdir(exist_ok=True)
    file.write_text(cluster)
    mark = f"{os.getpid()}-{port}"
    with (folder / "output").open("wb") as output:
        process = start_process([str(file), *arguments], output, {"TMPDIR": str(tmp), MARK: mark})
    running = Node(process, port, folder, tmp, mark, time.perf_counter())
    try:
        yield running
    finally:
        running.end()


def simulated_launcher(
    folder: Path, *arguments: str, change: tuple[str, str] = ("", "")
) -> AbstractContextManager[Node]:
    """Start a front and two simulated workers at free ports as one launcher; `change` replaces one text of the file."""
    ports = free_ports(3)
    text = SIMULATED.format(ports=ports, tiny=ROOT / "examples" / "tiny").replace(*change)
    return running_launcher(folder, text, ports[0], *arguments)


def wait_ready(target: Node, within_s: float = 120.0) -> None:
    """Wait until a launcher has logged that all nodes are ready."""
    assert wait_until(lambda: "Ready:" in target.output(), within_s) is not None, target.output()


def check_exit(target: Node, code: int = 0, within_s: float = 90.0) -> None:
    """Wait for the exit of a node or launcher; check its code, and that nothing is left."""
    assert target.wait_exit(within_s) is not None, target.output()
    assert (target.process.returncode, target.leftovers()) == (code, [])


def at_free_ports(text: str, *ports: int) -> tuple[str, list[int]]:
    """Return a cluster file in which free ports stand in place of these, and the free ports."""
    free = dict(zip(map(str, ports), free_ports(len(ports)), strict=True))
    assert all(port in text for port in free)
    return re.sub("|".join(free), lambda old: str(free[old.group()]), text), list(free.values())


def run_supervisor(*arguments: object, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the program to its end, with these variables beside those of this process."""
    return subprocess.run(
        [sys.executable, "-m", "supervisor", *map(str, arguments)],
        input=stdin,
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=240,  # a restart of several nodes on a busy machine takes more than a minute
        check=False,
    )


def run_cli(target: ClusterFolder, *arguments: str, temporary: Path | None = None) -> tuple[int, str]:
    """Run a command of the command line on a cluster, and return its exit code and its output.

    A node that does not listen, or whose launcher made its secret, is asked by its socket only where `temporary` is the
    folder that it runs below; a launcher's own by default.
    """
    temporary = target.tmp if temporary is None and isinstance(target, Node) else temporary
    environment = {"COLUMNS": "200"} | ({} if temporary is None else {"TMPDIR": str(temporary)})
    done = run_supervisor(target.folder / "cluster.toml", *arguments, **environment)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout + done.stderr


def seen(target: Node) -> dict[str, dict[str, Any]]:
    """Return the status of each node of a launcher's cluster, as the command line prints it."""
    every: dict[str, dict[str, Any]] = json.loads(run_cli(target, "status", "--json")[1])["nodes"]
    return every


def lines(target: Node) -> list[dict[str, Any]]:
    """Return every complete line of the log."""
    whole = target.output().rpartition("\n")[0].splitlines()
    return [json.loads(text) for text in whole if text.startswith("{")]  # the others are for a person who looks on


def events_logged(target: Node, event: str, **given: object) -> list[dict[str, Any]]:
    """Return the log records of one message that have these fields."""
    return [each for each in lines(target) if each["event"] == event and given.items() <= each.items()]


def nodes(target: Node) -> dict[str, ProcessEntry]:
    """Return the processes of a launcher's nodes that live, by name."""
    living = {
        seen.command.split("--node ")[1].split()[0]: seen for seen in target.living() if "--launched" in seen.command
    }
    return dict(sorted(living.items()))
