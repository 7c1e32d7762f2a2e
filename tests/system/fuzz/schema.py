"""Schemathesis against a node on the simulated engine: `python -m tests.system.fuzz.schema PATH/TO/st [OPTION...]`."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "simulated.toml"
START_S, STOP_S = 30, 20
# All checks but one: that nothing is refused which the schemas allow cannot hold, as no schema says how long a prompt
# may be, which ids a model has, or that one grammar excludes another.
OPTIONS = [
    "--checks=all",
    "--exclude-checks=positive_data_acceptance",
    "--continue-on-failure",
    "--no-color",
    "--seed=1",
]


@contextmanager
def node() -> Iterator[tuple[int, Path]]:
    """Run a node while the body runs; gives its port and its log."""
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        quick = re.sub("fixed_s = .*", "fixed_s = 0.0005", EXAMPLE.read_text()).replace("port = 8000", f"port = {port}")
        quick = quick.replace("context_max = 8192", "context_max = 512")  # who asks for no end is answered that much
        config, log = Path(folder, "node.toml"), Path(folder, "log")
        config.write_text(quick.replace('path = "tiny"', f'path = "{EXAMPLE.parent / "tiny"}"'))
        with log.open("w") as out:
            running = subprocess.Popen([sys.executable, "-m", "supervisor", config], cwd=ROOT, stdout=out, stderr=out)
        try:
            _wait_ready(port)
            yield port, log
        finally:
            running.terminate()
            running.wait(STOP_S)


def _wait_ready(port: int) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        connection = HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/ready")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(0.2)
    raise TimeoutError(f"no node on port {port} within {START_S} s")


def main() -> int:
    """Run it; the exit status says whether anything was found, or logged as an error."""
    st, *more = sys.argv[1:]
    with node() as (port, log):
        url = f"http://127.0.0.1:{port}/openapi.json"
        command: list[str | Path] = [Path(st).absolute(), "run", url, *OPTIONS, *(more or ["--max-examples=60"])]
        found = subprocess.run(command, cwd=log.parent, check=False).returncode  # it leaves files where it runs
        lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
        logged = [line for line in lines if line["level"] == "error" or "traceback" in line]
    print(*logged[:20], sep="\n")  # noqa: T201
    return found or min(len(logged), 1)


if __name__ == "__main__":
    sys.exit(main())
