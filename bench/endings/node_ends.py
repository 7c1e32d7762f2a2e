"""Scenes in which a node ends: it is killed, it gets a signal, or its first engine does not start."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench.endings.streams import Times, check, end_complete, end_incomplete, references, streams
from bench.rig.clients import Chat, ResponsesSocket, chat_body, response_body
from bench.rig.node import Node, node, wait_until
from bench.rig.prompts import OAK_PROMPT

SOON_S = 20.0  # a drain takes up to 30 s
WITHIN_S = 60.0  # for what else would never be
ZYGOTE_WITHIN_S = 120.0


# The node dies ---------------------------------------------------------------------------


def _kill(target: Node, folder: Path) -> Times:
    """Kill the node; check that its processes end with it, and that the next node removes what they left."""
    target.observe()
    target.signal(signal.SIGKILL)
    gone_s = target.wait_gone(SOON_S)
    living = [process.command for process in target.living()]
    check(gone_s is not None, f"{SOON_S:g} s after the node there were {living}")
    files = list(target.tmp.iterdir())
    with node(folder, ready=False) as successor:
        swept = wait_until(lambda: not any(path.exists() for path in files), WITHIN_S)
        check(swept is not None, f"the next node left {[str(path) for path in files if path.exists()]}")
        wait_until(lambda: not successor.tmp.exists() or '"starting"' in successor.output(), WITHIN_S)
        left = [line for line in target.leftovers() if "shm" in line or "process" in line]
        check(not left, f"the next node left {left}")
    for path in target.tmp.iterdir():  # the successor was killed by this scene
        shutil.rmtree(path)
    return {"gone": gone_s or 0.0}


def node_killed(folder: Path) -> Times:
    """Kill the node under running streams."""
    with node(folder) as target, streams(target) as (readers, _):
        times = _kill(target, folder)
        end_incomplete(readers)
        return times


def node_killed_while_zygote_imports(folder: Path) -> Times:
    """Kill the node as soon as it has a zygote."""
    with node(folder, ready=False) as target:
        wait_importing(target)
        return _kill(target, folder)


def node_killed_while_engine_loads(folder: Path) -> Times:
    """Kill the node as soon as it has a host."""
    with node(folder, ready=False) as target:
        wait_loading(target)
        return _kill(target, folder)


def wait_importing(target: Node) -> None:
    """Wait until the zygote imports SGLang."""
    check(wait_until(lambda: "zygote" in target.observe(), WITHIN_S) is not None, "there was no zygote")
    time.sleep(1.0)


def wait_loading(target: Node) -> None:
    """Wait until an engine has begun to load."""
    check(wait_until(lambda: "host" in target.observe(), ZYGOTE_WITHIN_S, 0.01) is not None, "there was no host")
    time.sleep(0.1)  # of the half second that it takes


def host_killed_while_loading(folder: Path) -> Times:
    """Kill the first host while it loads: the node logs why in a sentence and exits with 1."""
    with node(folder, ready=False) as target:
        wait_loading(target)
        since = time.perf_counter()
        target.kill("host")
        exit_s = exited(target, 1, since, within_s=WITHIN_S)
        check("espalier: engine" in target.output(), f"no reason was logged:\n{target.output()}")
        return {"ended": exit_s}


def exited(target: Node, code: int | None, since: float, within_s: float) -> float:
    """Wait for the node's exit; check its code, and that nothing is left; return how long after `since` it was."""
    check(target.wait_exit(within_s) is not None, f"no exit within {within_s} s:\n{target.output()[-2000:]}")
    took_s = time.perf_counter() - since
    actual = target.process.returncode
    check(code is None or actual == code, f"exit code {actual}:\n{target.output()[-2000:]}")
    check(not target.leftovers(), f"left behind: {target.leftovers()}")
    return took_s


def terminated(folder: Path) -> Times:
    """Send SIGTERM to a node with streams running."""
    with node(folder) as target:
        return terminated_with_streams(target, references(target))


def terminated_with_streams(target: Node, texts: dict[str, str]) -> Times:
    """Send SIGTERM with streams running: they finish, new requests are refused as retryable, nothing is left."""
    idle = ResponsesSocket(target.port)
    with streams(target) as (readers, socket):
        since = time.perf_counter()
        target.signal(signal.SIGTERM)
        check(idle.close_code() == 1012, "an idle WebSocket was not closed by 1012")
        idle_s = time.perf_counter() - since
        idle.close()
        refused = Chat(target.port, chat_body(OAK_PROMPT)).read()
        code = (refused.error or {}).get("code")
        check(refused.status == 503 and code == "draining", f"got {refused}")
        check("retry-after" in refused.headers, "a refusal had no retry-after")
        socket.send(response_body(OAK_PROMPT))
        finished_at = end_complete(readers, texts)
        check(readers[2].wait().refusals, "the open WebSocket's new request was not refused")
        check(socket.close_code() == 1012, "a WebSocket was not closed by 1012")
    target.observe()
    exit_s = exited(target, 0, finished_at, within_s=WITHIN_S)
    return {"idle closed": idle_s, "exit after the last stream": exit_s}


def terminated_idle(folder: Path) -> Times:
    """Send SIGTERM without a client."""
    with node(folder) as target:
        since = time.perf_counter()
        target.signal(signal.SIGTERM)
        return {"exit": exited(target, 0, since, within_s=WITHIN_S)}


def signalled_twice(number: signal.Signals, folder: Path, *, stopped: bool = False) -> Times:
    """Send a signal twice with streams running, whose engine may be stopped."""
    with node(folder) as target, streams(target) as (readers, _):
        if stopped:
            for role in ("scheduler", "host"):
                target.kill(role, signal.SIGSTOP)
        target.signal(number)
        time.sleep(0.3)
        check(target.process.poll() is None, "it did not wait for its streams")
        since = time.perf_counter()
        target.signal(number)
        took_s = exited(target, 128 + number, since, within_s=SOON_S)
        end_incomplete(readers)
    return {"exit at once": took_s}


def interrupted_while_starting(wait: Callable[[Node], None], times: int, folder: Path) -> Times:
    """Send Ctrl-C, once or twice, at a moment of the start that `wait` waits for."""
    with node(folder, ready=False) as target:
        wait(target)
        for _ in range(times - 1):
            target.signal(signal.SIGINT)
            time.sleep(0.05)
        since = time.perf_counter()
        target.signal(signal.SIGINT)
        took_s = exited(target, None, since, within_s=SOON_S)
        imported = '"child": "main/zygote/process", "child_event": "started"' in target.output()
        check(wait is not wait_importing or not imported, "it waited for the imports of the zygote")
    return {"exit at once": took_s}


SCENES: dict[str, Callable[[Path], Times]] = {
    "host kill -9 at the first start": host_killed_while_loading,
    "node kill -9": node_killed,
    "node kill -9, zygote imports": node_killed_while_zygote_imports,
    "node kill -9, engine loads": node_killed_while_engine_loads,
    "SIGTERM, streams run": terminated,
    "SIGTERM, idle": terminated_idle,
    "second SIGTERM": partial(signalled_twice, signal.SIGTERM),
    "second Ctrl-C": partial(signalled_twice, signal.SIGINT),
    "second SIGTERM, engine stopped": partial(signalled_twice, signal.SIGTERM, stopped=True),
    "second Ctrl-C, engine stopped": partial(signalled_twice, signal.SIGINT, stopped=True),
    "Ctrl-C, zygote imports": partial(interrupted_while_starting, wait_importing, 1),
    "second Ctrl-C, zygote imports": partial(interrupted_while_starting, wait_importing, 2),
    "Ctrl-C, engine loads": partial(interrupted_while_starting, wait_loading, 1),
    "second Ctrl-C, engine loads": partial(interrupted_while_starting, wait_loading, 2),
}
