"""The parts of every attack: a node with keys, threads that attack, the honest client beside them, the verdict."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from statistics import median
from threading import Event, Thread
from typing import Any

from bench.attacks import GAP_S_MAX
from bench.attacks.honest_client import headers
from bench.rig.client_keys import write_keys
from bench.rig.node import ROOT, SIMULATED, Node, node

GATEWAY = 'requests_max = 512\nwaiting_max = 1024\nkeys = "{keys}"\n'
HONEST, ATTACKER = "honest-secret-of-the-bench-000001", "attacker-secret-of-the-bench-0001"
UNDISTURBED_S = 4.0  # before each attack, in which the engine's own gaps are measured
ENDS_WITHIN_S = 40.0  # of the honest client, whose answers last 3 s, or 20, and of the node
TIMEOUT_S = 60.0


@dataclass
class Verdict:
    """The figures of the honest client beside one attack; times in milliseconds."""

    own_gap_ms: float = 0.0  # of the engine: the median before the attack
    worst_gap_ms: float = 0.0
    worst_first_ms: float = 0.0
    whole: int = 0
    gap_s_max: float = GAP_S_MAX  # by which a gap may be longer than the engine's own
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)  # other promises that were broken
    result: str = ""  # of the attack itself, in words

    @property
    def held(self) -> bool:
        """Whether every promise was kept: nothing lost, nothing wrong, no gap too long."""
        return not (self.lost or self.wrong) and self.worst_gap_ms - self.own_gap_ms <= 1000 * self.gap_s_max

    def conclude(self, result: str, *, kept: bool = True) -> None:
        """Set the result of the attack; it counts as wrong unless its own promise was kept."""
        self.result = result
        if not kept:
            self.wrong.append(result)


@contextmanager
def beside_honest_client(
    folder: Path, port: int, verdict: Verdict, key: str = HONEST, tokens: int = 60
) -> Iterator[None]:
    """Run the honest client before and while the body attacks, and fill in the verdict.

    Its streams have so many `tokens` each.
    """
    out = folder / f"honest-{port}.json"
    command = [sys.executable, "-m", "bench.attacks.honest_client", str(port), str(out)]
    command += ["--key", key, "--tokens", str(tokens)]
    client = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    try:
        assert client.stdout is not None
        client.stdout.readline()
        time.sleep(UNDISTURBED_S)
        attack_at = time.monotonic()
        yield
        client.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            client.wait(ENDS_WITHIN_S)
    finally:
        client.kill()
        client.wait()
        client.stdout.close()  # type: ignore[union-attr]
    if out.exists():
        judge(json.loads(out.read_text()), attack_at, verdict)
    else:
        verdict.lost.append(f"an answer did not end within {ENDS_WITHIN_S:g} s after the attack")


def judge(measured: dict[str, Any], attack_at: float, verdict: Verdict) -> None:
    """Fill in a verdict from the client's measurements; the attack began at `attack_at` by the same clock."""
    own = [gap for at, gap in measured["gaps"] if at < attack_at]
    during = [gap for at, gap in measured["gaps"] if at >= attack_at]
    verdict.own_gap_ms = 1000 * median(own or [0.0])
    verdict.worst_gap_ms = 1000 * max(during, default=0.0)
    verdict.worst_first_ms = 1000 * max((first for at, first in measured["firsts"] if at >= attack_at), default=0.0)
    verdict.whole += measured["whole"]
    verdict.lost += measured["lost"]
    if not during:
        verdict.wrong.append("the honest client got no token during the attack")


@contextmanager
def attacked_node(
    folder: Path,
    verdict: Verdict,
    *,
    slots: int = 256,
    engine: str = SIMULATED,
    limits: str = "",
    prefix: Sequence[str] = (),
    output: int | None = None,
    while_draining: Callable[[], object] = lambda: None,
) -> Iterator[Node]:
    """Run a node with the honest client beside it while the body attacks; end it by SIGTERM.

    `limits` are lines behind the table `gateway`; `while_draining` runs after the signal.
    """
    keys = write_keys(folder, {"honest": HONEST, "attacker": ATTACKER})
    gateway = GATEWAY.format(keys=keys) + limits
    with node(folder, slots=slots, engine=engine, gateway=gateway, prefix=prefix, output=output) as target:
        with beside_honest_client(folder, target.port, verdict):
            yield target
        if target.process.poll() is None:
            target.signal(signal.SIGTERM)
        while_draining()
        if target.wait_exit(ENDS_WITHIN_S) is None:
            verdict.wrong.append(f"SIGTERM did not end the node within {ENDS_WITHIN_S:g} s")
        elif target.process.returncode != 0:
            verdict.wrong.append(f"the node ended with {target.process.returncode}")


@contextmanager
def attacking(attack: Callable[[Event], object], threads: int = 1, *, join: bool = True) -> Iterator[None]:
    """Run an attack in so many threads while the body runs; each gets the event that ends it."""
    over = Event()
    running = [Thread(target=attack, args=(over,), daemon=True) for _ in range(threads)]
    for thread in running:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in running:
            thread.join(TIMEOUT_S if join else 0.0)


def post(port: int, path: str, body: object, key: str = ATTACKER, timeout_s: float = TIMEOUT_S) -> tuple[int, bytes]:
    """Return status and body of one POST; status 0, with the error, if there was no whole answer."""
    connection = HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        connection.request("POST", path, body if isinstance(body, bytes) else json.dumps(body), headers(key))
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, HTTPException) as error:
        return 0, repr(error).encode()
    finally:
        connection.close()
