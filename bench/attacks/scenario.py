"""What every attack has: keys, a node, the honest client beside it, and what it found."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from bench.attacks import GAP_S_MAX
from bench.rig.node import ROOT

HONEST, ATTACKER = "honest-secret-of-the-bench-000001", "attacker-secret-of-the-bench-0001"
PEACE_S = 4.0  # before each attack, to know the engine's own pace
ENDS_WITHIN_S = 40.0  # of the honest client, whose answers last 3 s, or 20


@dataclass
class Verdict:
    """What an honest client found beside one attack; times in milliseconds."""

    own_gap_ms: float = 0.0  # the engine's own: the median while nobody attacks
    worst_gap_ms: float = 0.0
    worst_first_ms: float = 0.0
    whole: int = 0
    gap_s_max: float = GAP_S_MAX  # by which a gap may be longer than the engine's own
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)  # what else was not as it should be
    said: str = ""  # what the attack itself came to

    @property
    def held(self) -> bool:
        """Whether the honest client lost nothing and waited no longer than it may."""
        return not (self.lost or self.wrong) and self.worst_gap_ms - self.own_gap_ms <= 1000 * self.gap_s_max


def keys_file(folder: Path) -> Path:
    """Write the keys of the honest client and of the attacker, and return their file."""
    file = folder / "keys.toml"
    secrets = {"honest": HONEST, "attacker": ATTACKER}
    sections = (
        f'[key.{name}]\nsha256 = "{hashlib.sha256(each.encode()).hexdigest()}"\n' for name, each in secrets.items()
    )
    file.write_text("".join(sections))
    file.chmod(0o600)
    return file


@contextmanager
def beside_honest_client(
    folder: Path, port: int, verdict: Verdict, key: str = HONEST, tokens: int = 60
) -> Iterator[None]:
    """Have an honest client ask, in peace for a while and then while the body attacks, and judge what it found.

    Its streams have so many `tokens` each.
    """
    out = folder / f"honest-{port}.json"
    command = [
        sys.executable,
        "-m",
        "bench.attacks.honest_client",
        str(port),
        str(out),
        "--key",
        key,
        "--tokens",
        str(tokens),
    ]
    client = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    try:
        assert client.stdout is not None
        client.stdout.readline()
        time.sleep(PEACE_S)
        began = time.monotonic()
        yield
        client.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            client.wait(ENDS_WITHIN_S)
    finally:
        client.kill()
        client.wait()
        client.stdout.close()  # type: ignore[union-attr]
    if out.exists():
        _judge(json.loads(out.read_text()), began, verdict)
    else:
        verdict.lost.append(f"an answer did not end within {ENDS_WITHIN_S:g} s after the attack")


def _judge(noted: dict[str, Any], began: float, verdict: Verdict) -> None:
    own = [gap for at, gap in noted["gaps"] if at < began]
    during = [gap for at, gap in noted["gaps"] if at >= began]
    verdict.own_gap_ms = 1000 * median(own or [0.0])
    verdict.worst_gap_ms = 1000 * max(during, default=0.0)
    verdict.worst_first_ms = 1000 * max((first for at, first in noted["firsts"] if at >= began), default=0.0)
    verdict.whole += noted["whole"]
    verdict.lost += noted["lost"]
    if not during:
        verdict.wrong.append("the honest client got no token during the attack")
