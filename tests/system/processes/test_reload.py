"""SIGHUP makes a running node read its keys again, and changes nothing else."""

from __future__ import annotations

import json
import signal
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from bench.rig.node import MODEL, SIMULATED, Node, node, wait_until
from supervisor.gateway.keys.key_sources import key_file_lines
from tests.rig.launched import check_exit, events_logged, lines

pytestmark = pytest.mark.realtime

ALICE, BOB = "alices-secret-of-32-characters-01", "bobs-secret-of-32-characters-0002"
READ, KEPT = "read the keys", "the keys stay as they were"
QUICK = SIMULATED.replace("fixed_s = 0.05", "fixed_s = 0.001")
WITHIN_S = 90.0


def asked(target: Node, secret: str) -> int:
    """Ask a node for one token, over a connection of its own, and return the answer's status."""
    connection = HTTPConnection("127.0.0.1", target.port, timeout=WITHIN_S)
    try:
        body = json.dumps({"model": MODEL, "prompt": "The oak", "max_tokens": 1})
        headers = {"authorization": f"Bearer {secret}", "content-type": "application/json"}
        connection.request("POST", "/v1/completions", body, headers)
        answer = connection.getresponse()
        answer.read()
        return answer.status
    finally:
        connection.close()


def hang_up(target: Node, event: str) -> dict[str, Any]:
    """Send SIGHUP, and return the one line more that tells of `event`."""
    before = len(events_logged(target, event))
    target.signal(signal.SIGHUP)
    assert wait_until(lambda: len(events_logged(target, event)) > before, WITHIN_S) is not None, target.output()
    return events_logged(target, event)[before]


def processes(target: Node) -> set[Any]:
    return {(seen.pid, seen.started) for seen in target.living()}


def test_sighup_admits_new_keys_revokes_old_ones_and_a_broken_file_changes_nothing(folder: Path) -> None:
    keys = folder / "keys.toml"
    keys.write_text(key_file_lines("alice", ALICE))
    with node(folder, engine=QUICK, gateway=f'keys = "{keys}"') as target:
        before = processes(target)
        assert (asked(target, ALICE), asked(target, BOB)) == (200, 401)

        keys.write_text(key_file_lines("bob", BOB))
        assert (asked(target, ALICE), asked(target, BOB)) == (200, 401)  # nobody has told the node yet
        assert hang_up(target, READ)["keys"] == 1
        assert (asked(target, ALICE), asked(target, BOB)) == (401, 200)

        for broken, reason in [
            ("[key.alice\n", f"{keys} is not TOML: "),
            (key_file_lines("alice", ALICE) + "\nrate_per_s = 0", f"{keys}: "),
            (None, f"{keys} cannot be read: No such file or directory"),
        ]:
            keys.unlink() if broken is None else keys.write_text(broken)
            why = hang_up(target, KEPT)
            assert why["reason"].startswith(reason)
            assert (why["level"], "traceback" in why) == ("error", False)
            assert (asked(target, ALICE), asked(target, BOB)) == (401, 200)

        assert (
            len(events_logged(target, READ)),
            len(events_logged(target, KEPT)),
            len(events_logged(target, "draining")),
        ) == (
            1,
            3,
            0,
        )
        assert processes(target) == before
        assert "restarting" not in {line.get("child_event") for line in lines(target)}
        assert ALICE not in target.output()
        assert BOB not in target.output()

        target.signal(signal.SIGTERM)
        check_exit(target)
