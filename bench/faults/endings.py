"""The endings of a node, and its recovery when one of its processes dies.

Each scene kills or signals a process, raises `AssertionError` for a broken promise, and returns the seconds of the
reaction. The times are compared with the promised ones, which only a quiet machine keeps.
"""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import inf
from pathlib import Path

from bench.faults.scenario import Run, check
from bench.rig.clients import BackgroundReader, Chat, Outcome, ResponsesSocket, chat_body, response_body
from bench.rig.node import Node, node, wait_until
from bench.rig.prompts import OAK_PROMPT, STORY_PROMPT

SOON_S = 20.0  # a drain takes up to 30 s
WITHIN_S = 60.0  # for what else would never be
ZYGOTE_WITHIN_S = 120.0
PROMISED_S = {"gone": 2.0, "exit at once": 2.0, "served": 3.0, "served by the successor": 4.0}  # of a quiet machine
DEATHS_A_NODE = 4  # in a row, before its supervision tree gives up
TOKENS = 400  # of an answer that must still be running when something dies
LONG_TOKENS = 3000  # of one that never comes to its end, however late a busy machine lets the node be killed
BEGIN_TRIES = 5

Times = dict[str, float]


# Streams that a scene disturbs, and what must hold of their answers ----------------------


def references(target: Node) -> dict[str, str]:
    """Return the complete texts, by prompt, that the answers of the scenes must equal."""
    long = Chat(target.port, chat_body(STORY_PROMPT, TOKENS)).read()
    short = Chat(target.port, chat_body(OAK_PROMPT)).read()
    check(long.whole and short.whole, f"the node does not answer: {long.error or short.error}")
    return {STORY_PROMPT: long.text, OAK_PROMPT: short.text}


@contextmanager
def streams(target: Node, tokens: int = TOKENS) -> Iterator[tuple[list[BackgroundReader], ResponsesSocket]]:
    """Run two HTTP streams and one WebSocket response, past their first tokens; yield their readers and the WebSocket.

    On a busy machine an answer may be complete before this process runs again; then the streams are started again.
    """
    for _ in range(BEGIN_TRIES):
        chats = [Chat(target.port, chat_body(STORY_PROMPT, tokens)) for _ in range(2)]
        socket, outcome = ResponsesSocket(target.port), Outcome()
        readers: list[BackgroundReader] = []
        try:
            socket.send(response_body(STORY_PROMPT, tokens))
            readers += [BackgroundReader(chat.read) for chat in chats]
            readers.append(BackgroundReader(partial(socket.read, outcome)))
            outcomes = [*(chat.outcome for chat in chats), outcome]
            begun = wait_until(partial(_all_begun, outcomes), 60.0)
            check(begun is not None, "the streams did not begin")
            if all(reader.outcome is None for reader in readers):
                yield readers, socket
                return
        finally:
            clients: list[Chat | ResponsesSocket] = [socket, *chats]
            for client in clients:
                client.leave()
            for reader in readers:
                reader.wait()
            for client in clients:
                client.close()
    raise RuntimeError("the streams were over before anything could happen")


def _all_begun(outcomes: list[Outcome]) -> bool:
    return all(outcome.first_at for outcome in outcomes)


def end_in_retryable_error(readers: list[BackgroundReader], since: float) -> float:
    """Check that each stream ended in a retryable error; return how long after `since` the last one ended."""
    outcomes = [reader.wait() for reader in readers]
    for outcome in outcomes:
        check(not outcome.whole and outcome.finish is None, f"a cut answer looks whole: {outcome.finish}")
        assert outcome.error is not None, "a cut answer ended without an error"
        cause = outcome.error.get("cause", outcome.error["code"])  # `response.failed` has it beside the code
        check(cause in {"engine_lost", "actor_lost", "draining"}, f"a cut answer ended in {outcome.error}")
    return max(outcome.ended_at for outcome in outcomes) - since


def end_complete(readers: list[BackgroundReader], texts: dict[str, str]) -> float:
    """Check that each stream ended with its whole text; return when the last one ended."""
    outcomes = [reader.wait() for reader in readers]
    for outcome in outcomes:
        check(outcome.whole and outcome.text == texts[STORY_PROMPT], f"a stream was cut: {outcome.error}")
    return max(outcome.ended_at for outcome in outcomes)


def end_incomplete(readers: list[BackgroundReader]) -> None:
    """Check that no stream of a killed node looks complete."""
    check(not any(reader.wait().whole for reader in readers), "a cut answer looks whole")


def served(target: Node, since: float, texts: dict[str, str]) -> float:
    """Send a new request, check its answer, and return how long after `since` its first token came."""
    while True:
        outcome = Chat(target.port, chat_body(OAK_PROMPT)).read()
        if outcome.status != 503 or outcome.headers.get("x-should-retry") != "true":
            break
        time.sleep(0.01)  # the node had not noticed the death yet; stock clients retry, too
    check(outcome.whole, f"a new request was not served: {outcome.status} {outcome.error}")
    check(outcome.text == texts[OAK_PROMPT], f"a new request was answered {outcome.text!r}")
    return (outcome.first_at or outcome.ended_at) - since


# A process dies, and the node continues --------------------------------------------------


def engine_killed(role: str, target: Node, texts: dict[str, str]) -> Times:
    """Kill the scheduler or the host under running streams."""
    with streams(target) as (readers, _):
        pid = target.observe()[role].pid
        since = time.perf_counter()
        target.kill(role)
        error_s = end_in_retryable_error(readers, since)
    served_s = served(target, since, texts)
    check(target.observe()[role].pid != pid, "it is the old process")
    return {"error": error_s, "served": served_s}


def zygote_killed(target: Node, texts: dict[str, str]) -> Times:
    """Kill the zygote under running streams, which must not notice; then the host, whose restart must wait."""
    old = target.observe()["zygote"].pid
    with streams(target) as (readers, _):
        since = time.perf_counter()
        target.kill("zygote")
        end_complete(readers, texts)
    target.kill("host")
    killed_at = time.perf_counter()
    served_s = served(target, killed_at, texts)
    check(target.observe()["zygote"].pid != old, "the zygote was not replaced")
    return {"served, since the zygote": served_s + killed_at - since, "since the host": served_s}


def host_killed_again(target: Node, texts: dict[str, str]) -> Times:
    """Kill the host, and its successor while that is still loading."""
    old = target.observe()["host"].pid

    def has_new_host() -> bool:
        host = target.observe().get("host")
        return host is not None and host.pid != old

    target.kill("host")
    check(wait_until(has_new_host, 120.0) is not None, "no new host")
    since = time.perf_counter()
    target.kill("host")
    served_s = served(target, since, texts)
    return {"served by the successor": served_s}


DEATHS: dict[str, Callable[[Node, dict[str, str]], Times]] = {
    "scheduler kill -9": partial(engine_killed, "scheduler"),
    "host kill -9": partial(engine_killed, "host"),
    "host kill -9, and its successor while it loads": host_killed_again,
    "zygote kill -9, then host": zygote_killed,
}


# The node dies ---------------------------------------------------------------------------


def _kill(target: Node, folder: Path) -> Times:
    """Kill the node; check that its processes end with it, and the next node removes their remains."""
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
    with node(folder) as target, streams(target, LONG_TOKENS) as (readers, _):
        times = _kill(target, folder)
        end_incomplete(readers)
        return times


def node_killed_at_start(wait: Callable[[Node], None], folder: Path) -> Times:
    """Kill the node at a moment of its start that `wait` waits for."""
    with node(folder, ready=False) as target:
        wait(target)
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


def signalled_twice(number: signal.Signals, folder: Path, *, stopped: bool = False) -> Times:
    """Send a signal twice with streams running, whose engine may be stopped."""
    with node(folder) as target, streams(target, LONG_TOKENS) as (readers, _):
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


ENDS: dict[str, Callable[[Path], Times]] = {
    "host kill -9 at the first start": host_killed_while_loading,
    "node kill -9": node_killed,
    "node kill -9, zygote imports": partial(node_killed_at_start, wait_importing),
    "node kill -9, engine loads": partial(node_killed_at_start, wait_loading),
    "SIGTERM, streams run": terminated,
    "second SIGTERM": partial(signalled_twice, signal.SIGTERM),
    "second Ctrl-C": partial(signalled_twice, signal.SIGINT),
    "second SIGTERM, engine stopped": partial(signalled_twice, signal.SIGTERM, stopped=True),
    "second Ctrl-C, engine stopped": partial(signalled_twice, signal.SIGINT, stopped=True),
    "Ctrl-C, zygote imports": partial(interrupted_while_starting, wait_importing, 1),
    "second Ctrl-C, zygote imports": partial(interrupted_while_starting, wait_importing, 2),
    "Ctrl-C, engine loads": partial(interrupted_while_starting, wait_loading, 1),
    "second Ctrl-C, engine loads": partial(interrupted_while_starting, wait_loading, 2),
}


# The run ---------------------------------------------------------------------------------


def tries(name: str, times: int, folder: Path) -> Iterator[Times]:
    """Try one scene so often; one of a living node on a new node after `DEATHS_A_NODE` deaths."""
    if name in ENDS:
        yield from (ENDS[name](folder) for _ in range(times))
        return
    deaths = 2 if "then" in name or "successor" in name else 1
    done = 0
    while done < times:
        with node(folder) as target:
            texts = references(target)
            for _ in range(min(times - done, DEATHS_A_NODE // deaths)):
                yield DEATHS[name](target, texts)
                done += 1
            target.signal(signal.SIGTERM)
            exited(target, 0, time.perf_counter(), within_s=WITHIN_S)


def measured(run: Run, name: str) -> None:
    """Try one scene so often, and add its rows."""
    taken = dict[str, list[float]]()
    try:
        for result in tries(name, run.options.times, run.folder):
            for timed, seconds in result.items():
                taken.setdefault(timed, []).append(seconds)
    finally:
        for timed, times_s in taken.items():
            run.row(name, timed, len(times_s), times_s)
            promised_s, most_s = PROMISED_S.get(timed, inf), max(times_s)
            run.check(most_s <= promised_s, f"{name}: {timed} after {most_s:.2f} s, {promised_s} s are promised")


def endings(run: Run) -> None:
    """Try each chosen scene."""
    for name in run.chosen({**DEATHS, **ENDS}):
        run.attempt(name, partial(measured, name=name))
