"""How a node ends, and how it recovers when a part of it dies: each case ten times, with times.

Each function makes one thing die, raises if a promise was broken, and returns how long what followed took, in seconds.
`tests/system/processes/test_endings.py` runs each of them once.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from bench.rig.clients import BackgroundReader, Chat, Outcome, ResponsesSocket, chat_body, response_body
from bench.rig.node import EXIT_MAX_S, Node, node, place, wait_until
from bench.rig.prompts import OAK_PROMPT, STORY_PROMPT

TOKENS = 400  # of an answer that must still be running when something dies
SERVED_WITHIN_S = 3.0
OUT_WITHIN_S = 2.0
ZYGOTE_WITHIN_S = 60.0
BEGIN_TRIES = 5

Times = dict[str, float]


def check(holds: object, sentence: str) -> None:
    """Raise `AssertionError` with a sentence unless something holds."""
    if not holds:
        raise AssertionError(sentence)


def references(target: Node) -> dict[str, str]:
    """Return the whole texts that the answers of these scenes must equal."""
    long = Chat(target.port, chat_body(STORY_PROMPT, TOKENS)).read()
    short = Chat(target.port, chat_body(OAK_PROMPT)).read()
    check(long.whole and short.whole, f"the node does not answer: {long.error or short.error}")
    return {STORY_PROMPT: long.text, OAK_PROMPT: short.text}


# Streams to be disturbed -----------------------------------------------------------------


@contextmanager
def streams(target: Node) -> Iterator[tuple[list[BackgroundReader], ResponsesSocket]]:
    """Run two HTTP streams and one WebSocket response, all past their first token; yield them, and the WebSocket.

    On a machine with busy neighbours a whole answer may have come before this process was given its turn: then again.
    """
    for _ in range(BEGIN_TRIES):
        chats, socket, answer = (
            [Chat(target.port, chat_body(STORY_PROMPT, TOKENS)) for _ in range(2)],
            ResponsesSocket(target.port),
            Outcome(),
        )
        running: list[BackgroundReader] = []
        try:
            socket.send(response_body(STORY_PROMPT, TOKENS))
            running += [BackgroundReader(chat.read) for chat in chats]
            running.append(BackgroundReader(partial(_response, socket, answer)))
            begun = [*(chat.outcome for chat in chats), answer]
            check(wait_until(partial(_all_begun, begun), 20.0) is not None, "the streams did not begin")
            if all(each.outcome is None for each in running):
                yield running, socket
                return
        finally:
            _let_go(chats, socket, running)
    raise RuntimeError("the streams were over before anything could happen")


def _all_begun(outcomes: list[Outcome]) -> bool:
    return all(each.first_at for each in outcomes)


def _response(socket: ResponsesSocket, outcome: Outcome) -> Outcome:
    for _ in socket.events(outcome):
        pass
    return outcome


def _let_go(chats: list[Chat], socket: ResponsesSocket, running: list[BackgroundReader]) -> None:
    socket.leave()
    for chat in chats:
        chat.leave()
    for each in running:
        each.wait()
    socket.close()
    for chat in chats:
        chat.close()


def end_truthfully(running: list[BackgroundReader], since: float) -> float:
    """Check that each stream ended in an error that may be tried again; return when the last had."""
    outcomes = [each.wait(20.0) for each in running]
    for outcome in outcomes:
        check(not outcome.whole and outcome.finish is None, f"a cut answer looks whole: {outcome.finish}")
        assert outcome.error is not None, "a cut answer ended without an error"
        cause = outcome.error.get("cause", outcome.error["code"])  # in a `response.failed` it stands beside the code
        retryable = cause in {"engine_lost", "actor_lost", "draining"}
        check(retryable, f"a cut answer ended in {outcome.error}")
    return max(outcome.ended_at for outcome in outcomes) - since


def served(target: Node, since: float, texts: dict[str, str]) -> float:
    """Ask for a new answer now, check it, and return when its first token had come."""
    while True:
        outcome = Chat(target.port, chat_body(OAK_PROMPT)).read()
        if outcome.status != 503 or outcome.headers.get("x-should-retry") != "true":
            break
        time.sleep(0.01)  # it came while the death was not known yet; stock clients try again, too
    check(outcome.whole, f"a new request was not served: {outcome.status} {outcome.error}")
    check(outcome.text == texts[OAK_PROMPT], f"a new request was answered {outcome.text!r}")
    return (outcome.first_at or outcome.ended_at) - since


# A part dies, the node goes on -----------------------------------------------------------


def engine_killed(what: str, target: Node, texts: dict[str, str]) -> Times:
    """Kill the scheduler or the host under running streams."""
    with streams(target) as (running, _):
        pid = target.look()[what].pid
        since = time.perf_counter()
        target.kill(what)
        error_s = end_truthfully(running, since)
    served_s = served(target, since, texts)
    check(served_s < SERVED_WITHIN_S, f"served again after {served_s:.1f} s")
    check(target.look()[what].pid != pid, "it is the old process")
    return {"error": error_s, "served": served_s}


def zygote_killed(target: Node, texts: dict[str, str]) -> Times:
    """Kill the zygote under running streams, which must not notice; then the host, whose restart must wait."""
    old = target.look()["zygote"].pid
    with streams(target) as (running, _):
        since = time.perf_counter()
        target.kill("zygote")
        for each in running:
            outcome = each.wait()
            check(outcome.whole and outcome.text == texts[STORY_PROMPT], f"a stream noticed: {outcome.error}")
    target.kill("host")
    killed = time.perf_counter()
    served_at = served(target, killed, texts)
    check(target.look()["zygote"].pid != old, "the zygote was not remade")
    return {"served, since the zygote": served_at + killed - since, "since the host": served_at}


def host_killed_again(target: Node, texts: dict[str, str]) -> Times:
    """Kill the host, and its successor while that is still loading."""
    old = target.look()["host"].pid
    target.kill("host")
    check(
        wait_until(lambda: target.look().get("host", target.look()["node"]).pid not in {old, target.pid}, 20.0),
        "no new host",
    )
    since = time.perf_counter()
    target.kill("host")
    served_s = served(target, since, texts)
    check(served_s < SERVED_WITHIN_S + 1.0, f"served again after {served_s:.1f} s")
    return {"served": served_s}


# The node dies ---------------------------------------------------------------------------


def _killed(target: Node, folder: Path) -> Times:
    """Kill the node; check that its processes follow it, and that the next node sweeps what they left."""
    target.look()
    target.signal(signal.SIGKILL)
    gone_s = target.wait_gone()
    left = [seen.command for seen in target.alive()]
    check(gone_s is not None, f"{EXIT_MAX_S} s after the node there were {left}")
    files = list(target.tmp.iterdir())
    with node(folder, ready=False) as successor:
        swept = wait_until(lambda: not any(path.exists() for path in files), 20.0)
        check(swept is not None, f"the next node left {[str(path) for path in files if path.exists()]}")
        wait_until(lambda: not successor.tmp.exists() or '"starting"' in successor.output(), 20.0)
        names = [line for line in target.left() if "shm" in line or "process" in line]
        check(not names, f"the next node left {names}")
    for path in target.tmp.iterdir():  # the successor was killed by us
        _remove(path)
    return {"gone": gone_s or 0.0}


def _remove(path: Path) -> None:
    for inner in sorted(path.rglob("*"), reverse=True):
        inner.rmdir() if inner.is_dir() else inner.unlink()
    path.rmdir()


def node_killed(folder: Path) -> Times:
    """Kill the node under running streams."""
    with node(folder) as target, streams(target) as (running, _):
        times = _killed(target, folder)
        for each in running:
            check(not each.wait(5.0).whole, "an answer of a killed node looks whole")
        return times


def node_killed_while_zygote_imports(folder: Path) -> Times:
    """Kill the node as soon as it has a zygote."""
    with node(folder, ready=False) as target:
        check(wait_until(lambda: "zygote" in target.look(), 20.0) is not None, "there was no zygote")
        time.sleep(1.0)
        return _killed(target, folder)


def node_killed_while_engine_loads(folder: Path) -> Times:
    """Kill the node as soon as it has a host."""
    with node(folder, ready=False) as target:
        loading(target)
        return _killed(target, folder)


def loading(target: Node) -> None:
    """Wait until an engine has begun to load."""
    check(wait_until(lambda: "host" in target.look(), ZYGOTE_WITHIN_S, 0.01) is not None, "there was no host")
    time.sleep(0.3)


def host_killed_while_loading(folder: Path) -> Times:
    """Kill the first host while it loads: the node says so in a sentence and ends."""
    with node(folder, ready=False) as target:
        loading(target)
        since = time.perf_counter()
        target.kill("host")
        ended(target, 1, since, within_s=10.0)
        check("espalier: engine" in target.output(), f"it did not say why:\n{target.output()}")
        return {"ended": time.perf_counter() - since}


# The node is told to end -----------------------------------------------------------------


def ended(target: Node, code: int | None, since: float, within_s: float) -> float:
    """Wait for the node's exit; check its code, and that nothing is left; return when it had ended."""
    check(target.wait_exit(within_s) is not None, f"no exit within {within_s} s:\n{target.output()[-2000:]}")
    took_s = time.perf_counter() - since
    check(
        code is None or target.process.returncode == code,
        f"exit code {target.process.returncode}:\n{target.output()[-2000:]}",
    )
    check(not target.left(), f"left behind: {target.left()}")
    return took_s


def told(folder: Path) -> Times:
    """SIGTERM with streams running: they finish, whatever is new is told to come back, nothing is left."""
    with node(folder) as target:
        texts = references(target)
        idle = ResponsesSocket(target.port)
        with streams(target) as (running, socket):
            since = time.perf_counter()
            target.signal(signal.SIGTERM)
            check(idle.close_code() == 1012, "an idle WebSocket was not closed by 1012")
            idle_s = time.perf_counter() - since
            idle.close()
            refused = Chat(target.port, chat_body(OAK_PROMPT)).read()
            code = (refused.error or {}).get("code")
            check(refused.status == 503 and code == "draining", f"got {refused}")
            check("retry-after" in refused.headers, "a refusal did not say when to come back")
            socket.send(response_body(OAK_PROMPT))
            for each in running:
                outcome = each.wait()
                check(outcome.whole and outcome.text == texts[STORY_PROMPT], f"a stream was cut: {outcome.error}")
            check(running[2].wait().refusals, "the open WebSocket's new request heard nothing")
            finished_at = max(each.wait().ended_at for each in running)
            check(socket.close_code() == 1012, "a WebSocket was not closed by 1012")
        target.look()
        exit_s = ended(target, 0, finished_at, within_s=10.0)
    return {"idle closed": idle_s, "exit after the last stream": exit_s}


def told_idle(folder: Path) -> Times:
    """SIGTERM without a client."""
    with node(folder) as target:
        since = time.perf_counter()
        target.signal(signal.SIGTERM)
        return {"exit": ended(target, 0, since, within_s=10.0)}


def told_twice(number: signal.Signals, stopped: bool, folder: Path) -> Times:
    """Send a signal twice with streams running, whose engine may not even react."""
    with node(folder) as target, streams(target) as (running, _):
        if stopped:
            for what in ("scheduler", "host"):
                target.kill(what, signal.SIGSTOP)
        target.signal(number)
        time.sleep(0.3)
        check(target.process.poll() is None, "it did not wait for its streams")
        since = time.perf_counter()
        target.signal(number)
        took_s = ended(target, 128 + number, since, within_s=10.0)
        for each in running:
            check(not each.wait(5.0).whole, "a cut answer looks whole")
    check(took_s < OUT_WITHIN_S, f"out after {took_s:.2f} s")
    return {"exit": took_s}


def told_while_starting(phase: str, times: int, folder: Path) -> Times:
    """Send Ctrl-C, once or twice, while the zygote imports or while the engine loads."""
    with node(folder, ready=False) as target:
        if phase == "loads":
            loading(target)
        else:
            check(wait_until(lambda: "zygote" in target.look(), 20.0) is not None, "there was no zygote")
            time.sleep(1.0)
        for _ in range(times - 1):
            target.signal(signal.SIGINT)
            time.sleep(0.05)
        since = time.perf_counter()
        target.signal(signal.SIGINT)
        took_s = ended(target, None, since, within_s=20.0)
    check(took_s < OUT_WITHIN_S, f"out after {took_s:.2f} s")
    return {"exit": took_s}


# All of them -----------------------------------------------------------------------------

ON_A_NODE: dict[str, Callable[[Node, dict[str, str]], Times]] = {
    "scheduler kill -9": lambda target, texts: engine_killed("scheduler", target, texts),
    "host kill -9": lambda target, texts: engine_killed("host", target, texts),
    "host kill -9, and its successor while it loads": host_killed_again,
    "zygote kill -9, then host": zygote_killed,
}
OF_A_NODE: dict[str, Callable[[Path], Times]] = {
    "host kill -9 at the first start": host_killed_while_loading,
    "node kill -9": node_killed,
    "node kill -9, zygote imports": node_killed_while_zygote_imports,
    "node kill -9, engine loads": node_killed_while_engine_loads,
    "SIGTERM, streams run": told,
    "SIGTERM, idle": told_idle,
    "second SIGTERM": lambda folder: told_twice(signal.SIGTERM, False, folder),
    "second Ctrl-C": lambda folder: told_twice(signal.SIGINT, False, folder),
    "second SIGTERM, engine stopped": lambda folder: told_twice(signal.SIGTERM, True, folder),
    "second Ctrl-C, engine stopped": lambda folder: told_twice(signal.SIGINT, True, folder),
    "Ctrl-C, zygote imports": lambda folder: told_while_starting("imports", 1, folder),
    "second Ctrl-C, zygote imports": lambda folder: told_while_starting("imports", 2, folder),
    "Ctrl-C, engine loads": lambda folder: told_while_starting("loads", 1, folder),
    "second Ctrl-C, engine loads": lambda folder: told_while_starting("loads", 2, folder),
}
A_NODE_TAKES = 4  # deaths in a row, before its tree gives up


def tries_on_nodes(name: str, times: int, folder: Path) -> Iterator[Times]:
    """Try one scene of a living node so often, with a new node whenever one has had enough."""
    done = 0
    while done < times:
        with node(folder) as target:
            texts = references(target)
            a_try = 2 if "then" in name or "successor" in name else 1
            for _ in range(min(times - done, A_NODE_TAKES // a_try)):
                yield ON_A_NODE[name](target, texts)
                done += 1
            target.signal(signal.SIGTERM)
            ended(target, 0, time.perf_counter(), within_s=20.0)


def tries(name: str, times: int, folder: Path) -> Iterator[Times]:
    """Try one scene so often."""
    if name in ON_A_NODE:
        yield from tries_on_nodes(name, times, folder)
    else:
        for _ in range(times):
            yield OF_A_NODE[name](folder)


def main() -> int:
    """Try each scene whose name holds the given words, print a table, return 1 if a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--only", default="", help="part of a scene's name")
    arguments = parser.parse_args()
    broken = 0
    print(f"{'what happens':<48}{'what is timed':<28}{'tries':>6}{'p50 s':>8}{'max s':>8}")
    for name in (*ON_A_NODE, *OF_A_NODE):
        if arguments.only in name:
            broken += _row(name, arguments.times)
    return 1 if broken else 0


def _row(name: str, times: int) -> int:
    taken: dict[str, list[float]] = {}
    broken = ""
    with place() as folder:
        try:
            for each in tries(name, times, folder):
                for what, seconds in each.items():
                    taken.setdefault(what, []).append(seconds)
        except AssertionError as error:
            broken = str(error)
    for what, times_s in taken.items():
        middle_s, most_s = statistics.median(times_s), max(times_s)
        print(f"{name:<48}{what:<28}{len(times_s):>6}{middle_s:>8.3f}{most_s:>8.3f}", flush=True)
    if broken:
        print(f"{name:<48}BROKEN: {broken}", flush=True)
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
